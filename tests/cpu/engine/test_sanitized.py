"""The engine under the sanitizer: silent when whole, and heard when a step uses what its request no longer
owns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import SanitizeConfig
from penstock.contract import FinishReason, StepPlan, Waits
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import SanitizerStop
from penstock.kv.table import BlockTable
from penstock.sanitizer.report import Kind
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import generate, run_all, submit, tiny_config

Prompts = Callable[..., list[int]]


@pytest.mark.cpu_shapes
def test_every_access_of_a_step_is_declared_by_layer_and_by_slot(prompts: Prompts) -> None:
    engine, sanitizer = build_sanitized(tiny_config())
    seen: list[tuple[str, list[int], tuple[int, int], str]] = []
    whole = sanitizer.submitted

    def submitted(lane: str, ticket: int, label: str, accesses: Any) -> None:
        kv = [a for a in accesses if a.arena == engine.parts.arena.name]
        seen.extend((label, sorted(map(int, a.slots)), a.layers, a.mode.value) for a in kv)
        whole(lane, ticket, label, accesses)

    sanitizer.submitted = submitted  # type: ignore[method-assign]
    generate(engine, prompts(20), max_tokens=2)
    layers = engine.parts.arena.layout.num_layers
    assert ("layer 0", [0, 1], (0, 1), "read") in seen and (
        f"layer {layers - 1}",
        [0, 1],
        (layers - 1, layers),
        "read",
    ) in seen
    replayed = [entry for entry in seen if entry[0].startswith("step")]
    assert {entry[2:] for entry in replayed} == {((0, layers), "read"), ((0, layers), "write")}
    assert [entry[1] for entry in replayed if entry[3] == "write"] == [[1]]
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_a_step_over_slots_that_were_given_back_is_reported(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sanitizer = build_sanitized(tiny_config())
    found = submit(engine, prompts(40))
    lose_the_table(engine, found.request_id, monkeypatch)
    engine.step()
    engine.cancel(found.request_id)
    run_all(engine)
    assert sanitizer.num_by_kind[Kind.LIFETIME] > 0
    assert "which no handle covers" in sanitizer.reports[0].sentence
    with pytest.raises(AssertionError, match="the sanitizer reports"):
        check_silent(sanitizer)
    engine.close(timeout_s=20.0)


def lose_the_table(engine: Engine, request_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a request's table ends while a plan that uses it is on its way to the lane."""
    executor, scheduler = engine.parts.executor, engine.parts.scheduler
    whole = executor.launch

    def launch(plan: StepPlan, waits: Waits) -> Any:
        scheduler.running.requests[request_id].table.release(None)
        monkeypatch.setattr(BlockTable, "release", lambda *_: None)
        monkeypatch.setattr(BlockTable, "seal", lambda *_: None)
        monkeypatch.setattr(executor, "launch", whole)
        return whole(plan, waits)

    monkeypatch.setattr(executor, "launch", launch)


def test_strict_stops_the_engine_and_the_findings_are_counted_and_written(
    prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    engine = build(dataclasses.replace(tiny_config(), sanitize=SanitizeConfig("strict", str(file))))
    assert json.loads(file.read_text()) == []
    assert engine.stats().sanitizer == {"race": 0, "lifetime": 0, "accounting": 0, "stall": 0}
    found = submit(engine, prompts(40))
    engine._inbox.run_all()
    lose_the_table(engine, found.request_id, monkeypatch)
    monkeypatch.setattr(engine, "warm", lambda _: None)  # the fault is for the request's own step
    loop = EngineLoop(engine)
    loop.start()
    loop.close(5.0)
    assert isinstance(loop.failed(), SanitizerStop)
    assert (
        found.finish is FinishReason.ERROR
        and found.error is not None
        and ("which no handle covers") in found.error
    )
    assert engine.stats().sanitizer["lifetime"] == 1
    (written,) = json.loads(file.read_text())
    assert written["kind"] == "lifetime" and written["deeds"][0]["stack"]

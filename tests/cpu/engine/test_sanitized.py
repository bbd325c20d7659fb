"""The engine under the sanitizer: silent when whole, and heard when a step uses what its request no longer owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import StepPlan
from penstock.sanitizer.report import Kind
from penstock.testing.driving import generate, run_all, submit, tiny_config
from penstock.testing.sanitized import build_sanitized, check_silent

Prompts = Callable[..., list[int]]


def test_every_access_of_a_step_is_declared_by_layer_and_by_slot(prompts: Prompts) -> None:
    engine, sanitizer = build_sanitized(tiny_config())
    seen: list[tuple[str, list[int], tuple[int, int], str]] = []
    whole = sanitizer.submitted

    def submitted(lane: str, ticket: int, label: str, accesses: Any) -> None:
        seen.extend((label, sorted(map(int, a.slots)), a.layers, a.mode.value) for a in accesses)
        whole(lane, ticket, label, accesses)

    sanitizer.submitted = submitted  # type: ignore[method-assign]
    generate(engine, prompts(20), max_tokens=2)
    layers = engine._parts.arena.layout.num_layers
    assert ("layer 0", [0, 1], (0, 1), "read") in seen and (f"layer {layers - 1}", [0, 1], (layers - 1, layers), "read") in seen
    replayed = [entry for entry in seen if entry[0].startswith("step")]
    assert {entry[2:] for entry in replayed} == {((0, layers), "read"), ((0, layers), "write")}
    assert [entry[1] for entry in replayed if entry[3] == "write"] == [[1]]
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_a_step_over_slots_that_were_given_back_is_reported(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a request's table ends while a plan that uses it is on its way to the lane."""
    engine, sanitizer = build_sanitized(tiny_config())
    executor, scheduler, cache = engine._parts.executor, engine._parts.scheduler, engine._parts.cache
    whole = executor.launch
    found = submit(engine, prompts(40))

    def launch(plan: StepPlan) -> Any:
        table = scheduler._tracks[found.request_id].held_table()
        cache.release(table, None)
        monkeypatch.setattr(cache, "release", lambda *_: None)
        monkeypatch.setattr(cache, "seal", lambda *_: None)
        monkeypatch.setattr(executor, "launch", whole)
        return whole(plan)

    monkeypatch.setattr(executor, "launch", launch)
    engine.step()
    engine.cancel(found.request_id)
    run_all(engine)
    assert sanitizer.num_by_kind[Kind.LIFETIME] > 0
    assert "which nobody holds" in sanitizer.reports[0].sentence
    with pytest.raises(AssertionError, match="the sanitizer reports"):
        check_silent(sanitizer)
    engine.close(timeout_s=20.0)

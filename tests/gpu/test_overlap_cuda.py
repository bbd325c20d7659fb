"""Steps over promotions, in the order that the device itself keeps: the load lane sleeps on the device, so no
host thread can hide a missing wait.

Holds invariant 3: a replay waits for the promotions of its own blocks. Holds invariant 4: a step begins under
its own load, and waits for no promotion of another request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_sanitized_order import replays
from tests.cpu.engine.test_tiers import forget, until

from tests.gpu.test_engine_cuda import make_engine
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.kv.transfer import Group
from tests.support.driving import generate, run_all, submit, tiny_config
from tests.support.gates import gates

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]

SLEEP_CYCLES = 6_000_000_000  # three seconds of device time or so
MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def sleep_before_copies(engine: Engine, from_layer: int = 0) -> None:
    """The load lane sleeps on the device before each copy of `from_layer` or a later one."""
    load, _ = gates(engine)
    whole = load.inner.copy

    class Slow:
        def copy(self, source: Any, dest: Any, layers: tuple[int, int]) -> None:
            if layers[0] >= from_layer:
                torch.cuda._sleep(SLEEP_CYCLES)
            whole(source, dest, layers)

    load.inner = Slow()


def retract(engine: Engine, request_id: str) -> None:
    """Have it give up its device slots, as where memory runs out."""
    scheduler = engine.parts.scheduler
    scheduler.retract(scheduler.running.requests[request_id])


def test_an_eager_step_computes_its_first_layer_while_the_second_is_on_its_way(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not in checked mode, where a launcher compares bytes and so waits for the device before anybody may go
    # on.
    engine = build(tiny_config(device="cuda", host_blocks=256, prefill_chunk=1536))
    stem, whole = prompts(80), prompts(80) + prompts(1200, seed=3)
    expected = generate(make_engine(prefill_chunk=1536), whole, max_tokens=3).tokens
    generate(engine, stem, max_tokens=1)
    forget(engine)
    cache = engine.cache
    num_layers = engine.parts.arena.layout.num_layers
    monkeypatch.setattr(
        cache.loads, "_groups", lambda num, layered: [Group((i, i + 1)) for i in range(num_layers)]
    )
    sleep_before_copies(engine, from_layer=1)
    events: dict[int, torch.cuda.Event] = {}
    model = type(engine.parts.executor.target.model)
    layer = model.layer

    def noted(self: Any, index: int, *rest: Any, **named: Any) -> Any:
        found = layer(self, index, *rest, **named)
        events.setdefault(index, torch.cuda.Event()).record()
        return found

    monkeypatch.setattr(model, "layer", noted)
    returning = submit(engine, whole, max_tokens=3)
    deadline_s = time.monotonic() + 20.0
    while 1 not in events and time.monotonic() < deadline_s:
        engine._inbox.run_all()
        engine.turns.settle()
        plan, waits = engine.parts.scheduler.plan()[:2]
        if plan is not None:
            assert plan.loads, "the step is launched over a load"
            engine.turns.running = engine.turns.launch(plan, waits)
    events[0].synchronize()
    assert not events[1].query(), "the second layer was computed before its KV can have come"
    run_all(engine)
    assert returning.tokens == expected
    assert returning.source is not None and returning.source.host == 80
    engine.close(timeout_s=20.0)


def test_a_resumed_request_waits_for_its_load_and_its_neighbour_decodes_on(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = build(tiny_config(device="cuda", host_blocks=64))
    alone = make_engine()
    resumed, beside = (
        submit(engine, prompts(40), max_tokens=60),
        submit(engine, prompts(30, seed=1), max_tokens=200),
    )
    until(engine, lambda: len(resumed.tokens) >= 4 and len(beside.tokens) >= 4)
    sleep_before_copies(engine)
    retract(engine, resumed.request_id)
    until(engine, lambda: engine.stats().requests["loading"] == 1)
    had = len(resumed.tokens), len(beside.tokens)
    until(engine, lambda: len(beside.tokens) >= had[1] + 20)
    assert len(resumed.tokens) == had[0] and engine.stats().requests["loading"] == 1, (
        "the load lane is still asleep"
    )
    run_all(engine)
    assert resumed.tokens == generate(alone, prompts(40), max_tokens=60).tokens
    assert beside.tokens == generate(alone, prompts(30, seed=1), max_tokens=200).tokens
    assert engine.stats().retractions == 1
    engine.close(timeout_s=20.0)


def test_a_replay_of_a_resumed_request_waits_on_the_device_for_its_load(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(tiny_config(device="cuda", host_blocks=64))
    expected = generate(make_engine(), prompts(40), max_tokens=60).tokens
    found = submit(engine, prompts(40), max_tokens=60)
    until(engine, lambda: len(found.tokens) >= 4)
    sleep_before_copies(engine)
    labels = replays(engine, monkeypatch)
    retract(engine, found.request_id)
    until(engine, lambda: engine.turns.running is not None and bool(engine.turns.running.loads))
    assert engine.turns.running is not None and labels and not engine.turns.running.fence.passed(), (
        "launched, and asleep behind its load"
    )
    run_all(engine)
    assert found.tokens == expected and engine.stats().retractions == 1
    engine.close(timeout_s=20.0)

"""A step over a promotion on the device itself: its first layers are computed while the last are still on their way.

Holds invariant 4: a step begins under its own load, on the device itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu.engine.conftest import prompts
from cpu.engine.test_tiers import forget

from gpu.test_engine_cuda import make_engine
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.kv.transfer import Group
from support.driving import generate, run_all, submit, tiny_config
from support.gates import gates

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]

SLEEP_CYCLES = 6_000_000_000  # three seconds of device time or so
MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def slow_after_the_first_group(engine: Engine) -> None:
    """Between the first layer's copy and the next the load lane sleeps, on the device."""
    load, _ = gates(engine)
    whole = load.inner.copy

    class Slow:
        def copy(self, source: Any, dest: Any, layers: tuple[int, int]) -> None:
            if layers[0]:
                torch.cuda._sleep(SLEEP_CYCLES)
            whole(source, dest, layers)

    load.inner = Slow()


def test_an_eager_step_computes_its_first_layer_while_the_second_is_on_its_way(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not in checked mode, where a launcher compares bytes and so waits for the device before anybody may go on.
    engine = build(tiny_config(device="cuda", host_blocks=256, prefill_chunk=1536))
    stem, whole = prompts(80), prompts(80) + prompts(1200, seed=3)
    expected = generate(make_engine(prefill_chunk=1536), whole, max_tokens=3).tokens
    generate(engine, stem, max_tokens=1)
    forget(engine)
    cache = engine.cache
    num_layers = engine._parts.arena.layout.num_layers
    monkeypatch.setattr(cache.loads, "_groups", lambda num, layered: [Group((i, i + 1)) for i in range(num_layers)])
    slow_after_the_first_group(engine)
    events: dict[int, torch.cuda.Event] = {}
    model = type(engine._parts.executor._forward.model)
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
        engine._settle()
        plan = engine._parts.scheduler.plan()
        if plan is not None:
            assert plan.loads, "the step is launched over a load"
            engine._running = engine._launch(plan)
    events[0].synchronize()
    assert not events[1].query(), "the second layer was computed before its KV can have come"
    run_all(engine)
    assert returning.tokens == expected
    assert returning.source is not None and returning.source.host == 80
    engine.close(timeout_s=20.0)

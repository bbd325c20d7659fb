"""The figures of a real engine in runs whose every block and token can be counted by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from penstock.engine import engine as engine_module
from penstock.engine.engine import Engine
from penstock.errors import DeadlineExceeded
from tests.cpu.engine.test_tiers import forget, states, until
from tests.support.driving import generate, run_all, submit
from tests.support.gates import gates

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def test_hits_misses_evictions_and_duplicates_are_told_apart(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Eight slots; prompts of whole blocks, of which the last token is computed again where all of it is
    found."""
    engine = make_engine(blocks=8)
    found: list[tuple[int, int, int, int]] = []

    def ask(num_blocks: int, seed: int, **sampling: int) -> None:
        generate(engine, prompts(16 * num_blocks, seed), max_tokens=1, **sampling)
        cache = engine.stats().cache
        found.append((cache["hits"], cache["misses"], cache["evictions"], cache["duplicate_seals"]))

    ask(3, seed=1)
    ask(3, seed=1)
    ask(3, seed=1, prompt_logprobs=0)  # computes what is there already, and finds its keys taken
    ask(5, seed=2)  # three idle and five free
    ask(4, seed=3)  # four of those have to go: the end of the first prompt, then the end of the second
    assert found == [(0, 3, 0, 0), (3, 3, 0, 0), (3, 6, 0, 3), (3, 11, 0, 3), (3, 15, 4, 3)]


def test_time_counts_as_exposed_while_a_request_loads_and_only_then(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of a clock that only waiting moves."""
    engine = make_engine(host_blocks=64)
    generate(engine, prompts(80), max_tokens=2)
    forget(engine)
    load, save = gates(engine)
    load.hold()
    other = submit(engine, prompts(20, seed=1), max_tokens=30)
    until(engine, lambda: len(other.tokens) > 2)
    returning = submit(engine, prompts(80), max_tokens=2)
    until(engine, lambda: other.finish is not None)
    assert states(engine) == {"loading": 1}

    def exposed_s(num_waits: int) -> float:
        now = [100.0]
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
            patch.setattr(engine._inbox, "wait", lambda timeout_s: now.__setitem__(0, now[0] + 2.0))
            before = engine.stats().load_exposed_s
            for _ in range(num_waits):
                engine.wait_work(1.0)
            return engine.stats().load_exposed_s - before

    assert exposed_s(2) == 4.0
    load.let()
    run_all(engine)
    assert len(returning.tokens) == 2
    save.hold()
    generate(engine, prompts(40, seed=4), max_tokens=1)
    assert engine.is_transferring() and exposed_s(2) == 0.0, "nobody loads while a save is under way"
    save.let()


def test_a_close_waits_for_a_stuck_lane_no_longer_than_it_was_given(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Its cache has nothing under way: only the compute lane does not end."""
    engine = make_engine()
    generate(engine, prompts(20))
    gate = threading.Event()
    engine.parts.lanes[0].submit(lambda: gate.wait(30), label="a step that takes for ever")
    try:
        with pytest.raises(DeadlineExceeded):
            engine.close(timeout_s=0.01)
        assert not gate.is_set()
    finally:
        gate.set()

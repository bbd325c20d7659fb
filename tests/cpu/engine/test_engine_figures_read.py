"""What the engine's figures count: no more than happened, and nothing that happens after they were read."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock.contract import FinishReason
from penstock.engine.engine import Engine
from penstock.errors import DeadlineExceeded
from tests.support.driving import generate, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def test_a_request_without_a_token_has_no_time_to_its_first(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    cancelled = submit(engine, prompts(20))
    engine.cancel(cancelled.request_id)
    run_all(engine)
    assert cancelled.source is None and sum(engine.stats().prompt_tokens.values()) == 0, (
        "nothing of its prompt was found or computed"
    )
    scored = generate(engine, prompts(20), max_tokens=0, prompt_logprobs=0)
    assert (cancelled.finish, scored.finish) == (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert sum(engine.stats().ttft.counts) == 0
    generate(engine, prompts(20))
    assert sum(engine.stats().ttft.counts) == 1


@pytest.mark.parametrize("name", ["_num_flying", "_num_cold"])
def test_a_wait_for_transfers_of_any_kind_is_short_and_exposed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine, waits = make_engine(host_blocks=8), list[float]()
    monkeypatch.setattr(engine._inbox, "wait", waits.append)
    monkeypatch.setattr(type(engine._parts.scheduler), "awaits_load", True)
    engine.wait_work(0.5)
    assert (waits, engine.stats().load_exposed_s) == ([0.5], 0.0), "nothing is under way"
    monkeypatch.setattr(type(engine.cache), name, 1)
    engine.wait_work(0.5)
    assert waits[1:] == [engine.cache.look_again_s] and engine.stats().load_exposed_s > 0.0
    monkeypatch.undo()


def test_a_close_waits_for_a_stuck_lane_no_longer_than_it_was_given(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Its cache has nothing under way: only the compute lane does not end."""
    engine = make_engine()
    generate(engine, prompts(20))
    gate = threading.Event()
    engine._parts.lanes[0].submit(lambda: gate.wait(30), label="a step that takes for ever")
    try:
        with pytest.raises(DeadlineExceeded):
            engine.close(timeout_s=0.01)
        assert not gate.is_set()
    finally:
        gate.set()

"""The figures of a real engine in runs whose every block and token can be counted by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock.engine.engine import Engine
from penstock.errors import DeadlineExceeded
from tests.support.driving import generate

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

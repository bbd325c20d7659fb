"""Chunks sized by time: how much of a prompt a step computes where other requests get tokens from it, in
exact numbers; and that every plan keeps the target, that prompts get on, and that tokens are the same."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.scheduling.budget import Budget, PrefillTimes, Room
from penstock.kv.tiers.policy import PrefillRate
from tests.event_walks import told_shortly
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_times import Ticks, Timed
from tests.pure.engine.scheduling.scheduler_walks import choose, walk

NUM_WALKS = 60


def room(
    chunk_s: float = 16.0,
    *,
    times: PrefillTimes | None = None,
    tokens: int = 64,
    min_chunk: int = 4,
    block: int = 4,
    num_decoding: int = 1,
    delay_s: float = 0.0,
) -> Room:
    budget = Budget(8, tokens, chunk_s=chunk_s, min_chunk=min_chunk, delay_s=delay_s)
    return Room(budget, block, times or Ticks(), num_decoding)


# -------------------------------------------------------------------------------------------------- one chunk


def test_a_chunk_that_time_cuts_short_ends_with_a_block() -> None:
    assert room(18.9).size(0, 100) == 16
    assert room(18.9).size(2, 100) == 18, "from the middle of a block on, too"
    assert room(18.9).size(0, 18) == 18, "what is left fits"


def test_the_more_requests_decode_the_shorter_a_chunk_makes_them_wait() -> None:
    sizes = [room(16.0, delay_s=32.0, num_decoding=num).size(0, 100) for num in (0, 1, 2, 4, 8)]
    assert sizes == [64, 16, 16, 8, 4], "up to the limit for one; nothing waits if none decodes"
    assert room(16.0, delay_s=1e-9, num_decoding=9, min_chunk=8).size(0, 100) == 8, "prompts get on"


def test_the_first_prompt_of_a_step_always_gets_on() -> None:
    assert room(1.0).size(0, 100) == 4 and room(1.0, min_chunk=12).size(0, 100) == 12
    assert room(1.0, min_chunk=12).size(2, 100) == 14, "to the end of a block"
    assert room(1.0, min_chunk=0).size(0, 100) == 4 and room(1.0, min_chunk=0).size(7, 100) == 1
    assert room(1.0, min_chunk=12).size(0, 7) == 7, "no more than there is"
    assert room(1.0, min_chunk=12, tokens=6).size(0, 100) == 6, "tokens limit it all the same"


@pytest.mark.parametrize("times", [Ticks(measured=False), PrefillRate()])
def test_before_anything_was_measured_tokens_are_the_limit(times: PrefillTimes) -> None:
    unknown = room(times=times)
    assert unknown.size(0, 100) == 64
    unknown.spend(0, 10, 10)
    assert unknown.size(0, 100) == 54


# --------------------------------------------------------------------------------------------------- any plan

SIZES = st.tuples(st.integers(0, 200), st.integers(1, 300))


@settings(deadline=None)
@given(
    prompts=st.lists(SIZES, min_size=1, max_size=6),
    target=st.floats(0.5, 200.0),
    limits=st.tuples(st.integers(1, 100), st.integers(0, 32)),
    line=st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 0.5)),
    block=st.sampled_from([1, 4, 16]),
    decodes=st.booleans(),
)
def test_every_step_keeps_the_target_or_the_least_chunk_and_every_prompt_gets_on(
    prompts: list[tuple[int, int]],
    target: float,
    limits: tuple[int, int],
    line: tuple[float, float],
    block: int,
    decodes: bool,
) -> None:
    """Step after step until all prompts are computed, each of its tokens once and in order."""
    (tokens, min_chunk), times = limits, Ticks(*line)
    left = [[start, start + num] for start, num in prompts]
    for _ in range(sum(num for _, num in prompts)):
        one = room(target, times=times, tokens=tokens, min_chunk=min_chunk, block=block, num_decoding=decodes)
        spent_s, ended, num_tokens, num_chunks = 0.0, decodes, 0, 0
        for at in left:
            start, end = at
            if start == end or one.tokens == 0:
                continue
            size = one.size(start, end - start)
            assert 0 <= size <= end - start
            if size == 0:
                assert one.tokens == 0 and num_chunks, "the first gets on"
                break
            spent_s += times.seconds_from(start, size)
            if ended and size > 1 and spent_s > target * (1 + 1e-9):
                assert num_chunks == 0 and start + size <= -(-(start + max(1, min_chunk)) // block) * block
            assert size in (end - start, tokens - num_tokens) or (start + size) % block == 0
            one.spend(start, size, end - start)
            at[0], ended, num_tokens, num_chunks = (
                start + size,
                ended or start + size == end,
                num_tokens + size,
                num_chunks + 1,
            )
        assert 0 < num_tokens <= tokens
        if all(start == end for start, end in left):
            return
    raise AssertionError("a prompt did not get on")


def test_the_scheduler_keeps_the_target_and_all_its_promises_in_any_order_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The world compares every token with what the request gets alone, and every plan with the target."""
    land_in_parts(monkeypatch)
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        r = random.Random(seed)
        timed = Timed(
            r.choice([0.5, 3.0, 6.0, 9.0]), r.choice([0, BLOCK, 2 * BLOCK]), Ticks(1.0, r.choice([0.0, 0.1]))
        )
        walked, events = choose(seed)
        walked = walked._replace(prefill_chunk=r.choice([5, 8, 64]), timed=timed)
        seen += told_shortly(
            lambda some, walked=walked: walk(walked, some), events, f"walk {seed} through {walked}"
        )
    for what in ("chunk cut by time", "least chunk", "retraction", "promotion"):
        assert seen[what] >= 5, f"hardly ever: {what}"


@pytest.mark.parametrize(
    ("start", "num_tokens", "size"),
    [
        (16, 1535, 1520),  # a short one ends with a block
        (32, 1535, 1520),
        (32, 1536, 1504),  # a long one where the next begins with whole shapes
        (16, 2040, 2032),
        (1024, 3000, 2560),
    ],
)
def test_a_long_chunk_that_time_cuts_short_ends_with_a_whole_shape(
    start: int, num_tokens: int, size: int
) -> None:
    """A token takes a second."""
    assert room(chunk_s=float(num_tokens), block=16, tokens=8192).size(start, 8000) == size

"""Which replay serves a step: of few decodes over long sequences, and of prompts beside decodes."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.contract import Chunk, StepPlan
from penstock.engine.execution.batch import DEEP_TOKENS, Packer, Shape
from penstock.engine.execution.replays import MOST_DEEP, MOST_DEEP_PROMPT, Replays, cuda_buckets


def plan_of(*lengths: int, num_tokens: int = 1) -> StepPlan:
    chunks = (
        Chunk(
            str(row),
            row,
            length - num_tokens,
            (0,) * num_tokens,
            np.zeros(-(-length // 16), np.int32),
            True,
            1,
        )
        for row, length in enumerate(lengths)
    )
    return StepPlan(1, tuple(chunks), len(lengths) if num_tokens == 1 else 0)


@pytest.fixture
def replays() -> Replays:
    unused, packer = None, Packer(16, 0, 0)
    return Replays(unused, unused, packer, unused, cuda_buckets(256, 8192), lambda: ())  # type: ignore[arg-type]


def test_a_few_decodes_with_a_long_sequence_have_a_replay_of_their_own(replays: Replays) -> None:
    for num, size in ((2, 2), (5, 8), (16, 16)):
        short, long = [DEEP_TOKENS] * num, [*[100] * (num - 1), DEEP_TOKENS + 1]
        assert replays.bucket_for(plan_of(*short)) == Shape(size, size, size)
        assert replays.bucket_for(plan_of(*long)) == Shape(size, size, size, deep=True)
    for num in (1, MOST_DEEP + 1, 200):
        shape = replays.bucket_for(plan_of(*[DEEP_TOKENS + 1] * num))
        assert shape is not None and shape.num_chunks >= num and not shape.deep


def test_a_short_prompt_never_has_a_replay_of_long_decodes(replays: Replays) -> None:
    assert replays.bucket_for(plan_of(DEEP_TOKENS + 400, num_tokens=16)) == Shape(16, 1, 1)


def beside(num_decodes: int, *prompts: int, longest: int = 100) -> StepPlan:
    """Decodes, the first over `longest` tokens, and prompts of so many."""
    decodes = plan_of(*[longest] * (num_decodes > 0), *[100] * (num_decodes - 1)).chunks
    others = (
        chunk for number, length in enumerate(prompts) for chunk in plan_of(length, num_tokens=length).chunks
    )
    return StepPlan(1, (*decodes, *others), num_decodes)


@pytest.mark.parametrize(
    ("num_decodes", "prompts"),
    [(1, [2]), (9, [300]), (31, [16] * 8), (255, [256] * 8)],
)
def test_prompts_beside_decodes_have_the_smallest_replay_that_holds_both(
    replays: Replays, num_decodes: int, prompts: list[int]
) -> None:
    shape = replays.bucket_for(beside(num_decodes, *prompts))
    assert shape is not None and not shape.deep
    held = [
        one
        for one in replays.buckets
        if one.num_beside >= num_decodes
        and one.num_tokens - one.num_beside >= sum(prompts)
        and one.num_chunks - one.num_beside >= len(prompts)
        and not one.deep
    ]
    assert shape in held and shape.num_tokens == min(one.num_tokens for one in held)


def test_a_prompt_beside_long_decodes_has_a_replay_of_its_own_unless_it_is_long(replays: Replays) -> None:
    for num, length in ((1, 2), (8, 300), (32, MOST_DEEP_PROMPT)):
        shape = replays.bucket_for(beside(num, length, longest=DEEP_TOKENS + 1))
        assert shape is not None and shape.deep and shape.num_chunks == shape.num_beside + 1
    several, many = beside(3, 20, 30, longest=DEEP_TOKENS + 1), beside(33, 20, longest=DEEP_TOKENS + 1)
    for plan in (several, many):
        shape = replays.bucket_for(plan)
        assert shape is not None and not shape.deep
    assert replays.bucket_for(beside(3, MOST_DEEP_PROMPT + 1, longest=DEEP_TOKENS + 1)) is None
    assert replays.bucket_for(beside(3, MOST_DEEP_PROMPT + 1, longest=DEEP_TOKENS)) is not None


def test_one_prompt_alone_has_replays_of_its_own_and_several_those_beside_decodes(replays: Replays) -> None:
    for longest in (100, DEEP_TOKENS + 1):
        alone = replays.bucket_for(plan_of(longest, num_tokens=50))
        assert alone == Shape(64, 1, 1)
    several = replays.bucket_for(beside(0, 20, 30, 10))
    assert several is not None and (several.num_beside, several.num_tokens) == (8, 8 + 64)


def test_what_no_replay_holds_runs_eagerly(replays: Replays) -> None:
    assert replays.bucket_for(beside(3, *[16] * 9)) is None, "too many prompts"
    assert replays.bucket_for(beside(3, 2049)) is None, "too long a prompt"
    assert replays.bucket_for(beside(256, 16)) is None, "too many decodes"

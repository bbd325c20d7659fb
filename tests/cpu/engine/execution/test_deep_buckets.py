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


def bucket(replays: Replays, plan: StepPlan) -> Shape:
    shape = replays.bucket_for(plan)
    assert shape is not None
    return shape


def test_a_few_decodes_with_a_long_sequence_have_a_replay_of_their_own(replays: Replays) -> None:
    for num, size in ((2, 2), (5, 8), (16, 16)):
        short, long = [DEEP_TOKENS] * num, [*[100] * (num - 1), DEEP_TOKENS + 1]
        assert bucket(replays, plan_of(*short)) == Shape(size, size, size)
        assert bucket(replays, plan_of(*long)) == Shape(size, size, size, deep=True)
    for num in (1, MOST_DEEP + 1, 200):  # alone, and many together
        shape = bucket(replays, plan_of(*[DEEP_TOKENS + 1] * num))
        assert shape.num_chunks >= num and not shape.deep
    assert bucket(replays, plan_of(DEEP_TOKENS + 400, num_tokens=16)) == Shape(16, 1, 1), "a short prompt"


def beside(num_decodes: int, *prompts: int, longest: int = 100) -> StepPlan:
    """Decodes, the first over `longest` tokens, and prompts of so many."""
    decodes = plan_of(*[longest] * (num_decodes > 0), *[100] * (num_decodes - 1)).chunks
    others = (chunk for length in prompts for chunk in plan_of(length, num_tokens=length).chunks)
    return StepPlan(1, (*decodes, *others), num_decodes)


def test_prompts_beside_decodes_have_the_smallest_replay_that_holds_both(replays: Replays) -> None:
    for num_decodes, prompts in ((1, [2]), (9, [300]), (31, [16] * 8), (255, [256] * 8)):
        shape = bucket(replays, beside(num_decodes, *prompts))
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
        shape = bucket(replays, beside(num, length, longest=DEEP_TOKENS + 1))
        assert shape.deep and shape.num_chunks == shape.num_beside + 1
    for num, prompts in ((3, [20, 30]), (33, [20])):  # several prompts, many decodes
        assert not bucket(replays, beside(num, *prompts, longest=DEEP_TOKENS + 1)).deep
    assert replays.bucket_for(beside(3, MOST_DEEP_PROMPT + 1, longest=DEEP_TOKENS + 1)) is None
    bucket(replays, beside(3, MOST_DEEP_PROMPT + 1, longest=DEEP_TOKENS))


def test_one_prompt_alone_has_replays_of_its_own_and_several_those_beside_decodes(replays: Replays) -> None:
    for longest in (100, DEEP_TOKENS + 1):
        assert bucket(replays, plan_of(longest, num_tokens=50)) == Shape(64, 1, 1)
    several = bucket(replays, beside(0, 20, 30, 10))
    assert (several.num_beside, several.num_tokens) == (8, 8 + 64)


def test_what_no_replay_holds_runs_eagerly(replays: Replays) -> None:
    """Too many prompts, too long a prompt, too many decodes."""
    for plan in (beside(3, *[16] * 9), beside(3, 2049), beside(256, 16)):
        assert replays.bucket_for(plan) is None

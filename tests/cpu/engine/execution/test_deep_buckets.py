"""Which replay serves a step of few decodes over long sequences."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.contract import Chunk, StepPlan
from penstock.engine.execution.batch import DEEP_TOKENS, Packer, Shape
from penstock.engine.execution.replays import MOST_DEEP, Replays, cuda_buckets


def plan_of(*lengths: int, num_tokens: int = 1) -> StepPlan:
    chunks = (
        Chunk(str(row), row, length - num_tokens, (0,) * num_tokens, np.zeros(-(-length // 16), np.int32), True, 1)
        for row, length in enumerate(lengths)
    )
    return StepPlan(1, tuple(chunks), len(lengths) if num_tokens == 1 else 0)


@pytest.fixture
def replays() -> Replays:
    unused, packer = None, Packer(16, 0, 0)
    return Replays(unused, unused, packer, unused, cuda_buckets(256, 8192), lambda: ())  # type: ignore[arg-type]


@pytest.mark.parametrize("num", [2, 5, 16])
def test_a_step_with_a_long_sequence_has_a_replay_of_its_own(replays: Replays, num: int) -> None:
    size = next(size for size in (2, 4, 8, 16) if size >= num)
    short, long = [DEEP_TOKENS] * num, [*[100] * (num - 1), DEEP_TOKENS + 1]
    assert replays.bucket_for(plan_of(*short)) == Shape(size, size, size)
    assert replays.bucket_for(plan_of(*long)) == Shape(size, size, size, deep=True)


def test_one_alone_and_many_together_have_one_replay_whatever_their_length(replays: Replays) -> None:
    for num in (1, MOST_DEEP + 1, 200):
        shape = replays.bucket_for(plan_of(*[DEEP_TOKENS + 1] * num))
        assert shape is not None and shape.num_chunks >= num and not shape.deep


def test_a_short_prompt_never_has_a_replay_of_long_decodes(replays: Replays) -> None:
    assert replays.bucket_for(plan_of(DEEP_TOKENS + 400, num_tokens=16)) == Shape(16, 1, 1)

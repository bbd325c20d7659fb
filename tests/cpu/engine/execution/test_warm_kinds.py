"""Which steps are run before the first request: every replay, every option, nothing that no request could ask
for."""

from __future__ import annotations

import pytest

from penstock.engine.execution.batch import DEEP_TOKENS, Packer, Shape
from penstock.engine.execution.replays import Replays, cuda_buckets
from penstock.engine.execution.warm import Sizes, all_kinds, plans


def replays_of(buckets: tuple[Shape, ...]) -> Replays:
    return Replays(None, None, Packer(16, 0, 0), None, buckets, lambda: ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sizes", [Sizes(256, 8192, 40960), Sizes(1, 16, 16), Sizes(8, 512, 300), Sizes(33, 2048, 100_000)]
)
def test_all_kinds_fit_and_meet_every_replay(sizes: Sizes) -> None:
    buckets = cuda_buckets(sizes.max_batch, sizes.prefill_chunk)
    kinds = all_kinds(sizes, buckets)
    made = list(plans(kinds, slot=3, block_tokens=16))
    replays = replays_of(buckets)
    met = {replays.bucket_for(plan) for plan in made}
    possible = {
        b
        for b in buckets
        if max(DEEP_TOKENS + 1 if b.deep else 1, b.num_tokens - b.num_decodes) <= sizes.max_tokens
    }
    assert possible <= met
    for plan in made:
        assert len(plan.chunks) <= sizes.max_batch
        assert sum(c.num_tokens for c in plan.chunks if c.num_tokens > 1) <= sizes.prefill_chunk
        assert max(c.kv_len for c in plan.chunks) <= sizes.max_tokens
        assert all(len(c.slots) == -(-c.kv_len // 16) and set(c.slots.tolist()) == {3} for c in plan.chunks)
        assert [start.row for start in plan.starts] == [c.row for c in plan.chunks]


def test_every_sampling_option_is_among_them() -> None:
    kinds = all_kinds(Sizes(256, 8192, 40960), cuda_buckets(256, 8192))
    samplings = [kind.sampling for kind in kinds]
    off = {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    for name, value in off.items():
        assert any(getattr(sampling, name) != value for sampling in samplings), name
    assert {sampling.logprobs for sampling in samplings} >= {None, 0, 5, 20}
    assert {sampling.prompt_logprobs for sampling in samplings} >= {None, 0, 5, 20}
    assert {sampling.greedy for sampling in samplings} == {True, False}
    assert any(kind.adapter is not None for kind in kinds) and any(kind.output for kind in kinds)

"""Prefixes of more blocks than any part, stretch or list of the KV side holds, with its limits as they are:
they come back whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.kv.blocks import handles, key
from penstock.kv.tiers import host, saves
from tests.cpu.engine.test_engine import check_at_rest
from tests.cpu.engine.test_tiers import forget
from tests.support.driving import generate, settle_all

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]

LIMITS = {handles._FIRST_ROOM, key._STRETCH, saves._PART_BLOCKS, host._PIECE}
BLOCK = 8
NUM_BLOCKS = sorted(
    {num for limit in LIMITS for num in (limit - 1, limit, limit + 1)} | {2 * max(LIMITS) + 1}
)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(blocks=160, host_blocks=160, block_tokens=BLOCK, prefill_chunk=512)


def test_a_prefix_of_any_number_of_blocks_comes_back_from_either_tier(
    engine: Engine, prompts: Prompts
) -> None:
    for num in NUM_BLOCKS:
        prompt = prompts(num * BLOCK + 3, seed=num)
        cold = generate(engine, prompt, max_tokens=3)
        assert cold.source == KvSource(computed=len(prompt))
        warm = generate(engine, prompt, max_tokens=3)
        assert (warm.tokens, warm.source) == (cold.tokens, KvSource(device=num * BLOCK, computed=3))
        forget(engine)
        back = generate(engine, prompt, max_tokens=3)
        assert (back.tokens, back.source) == (cold.tokens, KvSource(host=num * BLOCK, computed=3))
        settle_all(engine)
        engine.cache.reset(("device", "host"))
    check_at_rest(engine)


def test_prompts_that_part_in_any_block_share_exactly_what_they_have_in_common(
    engine: Engine, prompts: Prompts
) -> None:
    """Keys are remembered in stretches: what follows a remembered one is of this prompt."""
    prompt = prompts(NUM_BLOCKS[-1] * BLOCK)
    generate(engine, prompt, max_tokens=1)
    for num in NUM_BLOCKS:
        other = prompt.copy()
        other[num * BLOCK - 1] += 1 if other[num * BLOCK - 1] < 499 else -1
        found = generate(engine, other[: (num + 2) * BLOCK], max_tokens=1)
        assert found.source is not None and found.source.device == (num - 1) * BLOCK

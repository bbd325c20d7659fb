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

LIMITS = {handles._FIRST_ROOM, 32, key._STRETCH, saves._PART_BLOCKS, host._PIECE}
BLOCK = 8
NUM_BLOCKS = sorted(
    {num for limit in LIMITS for num in (limit - 1, limit, limit + 1)} | {2 * max(LIMITS) + 1}
)


def test_these_prefixes_go_beyond_every_limit() -> None:
    assert max(LIMITS) < 100 and NUM_BLOCKS[-1] > 2 * max(LIMITS)


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


def test_the_oldest_of_two_long_prefixes_goes_first_and_from_its_end(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Runs of slots that are arrays, and runs that are lists."""
    for num in (31, 33):
        engine = make_engine(blocks=3 * num, block_tokens=BLOCK, prefill_chunk=512)
        first, second, third = (prompts(num * BLOCK, seed) for seed in range(3))
        for prompt in (first, second, first, third[: (num - 5) * BLOCK]):
            generate(engine, prompt, max_tokens=1)
        generate(engine, prompts(10 * BLOCK, seed=9), max_tokens=1)  # five fit, and five of the second go
        for prompt, left in ((second, num - 5), (first, num)):
            prefix = engine.cache.prefix_of(prompt)
            assert prefix is not None and engine.cache.match(prefix.keys).num_blocks == left

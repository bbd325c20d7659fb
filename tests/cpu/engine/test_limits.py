"""Every limit of an engine from both sides: exactly at it a request runs, one beyond it it is refused by
name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.config import GIB, Config
from penstock.contract import MAX_LOGPROBS, FinishReason
from penstock.engine import build as build_module
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.batch import Drafted, Packer
from penstock.engine.execution.passes import StepLimits
from penstock.engine.execution.replays import cuda_buckets
from penstock.engine.execution.sampler import NUM_PARAMS, packed_width
from penstock.errors import InvalidRequest, Overloaded
from tests.support.driving import block_bytes, generate, run_all, submit, tiny_config

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
CONTEXT = 64


def test_a_request_may_fill_the_context_to_its_last_token(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(max_model_len=CONTEXT)
    for num_prompt in (1, 40, CONTEXT - 1):
        found = generate(engine, prompts(num_prompt), max_tokens=CONTEXT - num_prompt)
        assert (len(found.tokens), found.finish) == (CONTEXT - num_prompt, FinishReason.LENGTH)
        with pytest.raises(InvalidRequest, match="context length is 64") as refused:
            submit(engine, prompts(num_prompt), max_tokens=CONTEXT - num_prompt + 1)
        assert refused.value.param == "max_tokens"
    assert generate(engine, prompts(CONTEXT), max_tokens=0).finish is FinishReason.LENGTH
    with pytest.raises(InvalidRequest, match="context length is 64") as refused:
        submit(engine, prompts(CONTEXT), max_tokens=1)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_a_request_may_fill_the_memory_to_its_last_block(
    make_engine: MakeEngine, prompts: Prompts, num_blocks: int
) -> None:
    engine = make_engine(blocks=num_blocks)
    room = 16 * num_blocks
    assert engine.max_model_len == room
    found = generate(engine, prompts(room - 9), max_tokens=9)
    assert len(found.tokens) == 9
    engine.limits = engine.limits._replace(max_model_len=2 * room)
    with pytest.raises(InvalidRequest, match="do not fit"):
        submit(engine, prompts(room - 9), max_tokens=10)


def test_as_many_requests_are_open_as_may_be_submitted_or_running(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Those that wait in the inbox count, and those that have ended do not."""
    engine = make_engine(max_batch=2)
    most = engine.parts.max_open
    assert most == 2 * build_module._WAITING_PER_ROW
    opened = [submit(engine, prompts(4), max_tokens=1 + n) for n in range(most // 2)]
    engine.step()
    opened += [submit(engine, prompts(4)) for _ in range(most - len(opened))]
    with pytest.raises(Overloaded):
        submit(engine, prompts(4))
    while opened[0].finish is None:
        engine.step()
    submit(engine, prompts(4))
    run_all(engine)


# ------------------------------------------------------------------------------------------------------ sizes


def sized(config: Config, **offload: float | bool | None) -> dict[str, int]:
    """Slots by tier of an engine without sizes in blocks."""
    engine = build(
        replace(config, kv=replace(config.kv, device_blocks=None), offload=replace(config.offload, **offload))
    )
    blocks = {tier: sum(states.values()) for tier, states in engine.stats().kv_blocks.items()}
    engine.close(timeout_s=20.0)
    return blocks


def test_a_tiny_model_gets_no_more_memory_by_itself_than_it_can_use() -> None:
    """Four times what all rows can fill, and sixteen times that in host memory; less where that is more than
    the default."""
    config = tiny_config(max_batch=2, max_model_len=64)
    assert sized(config, enabled=True, host_gib=None) == {"device": 4 * 2 * 4, "host": 16 * 32}
    device_gib = 40.5 * block_bytes("tiny-qwen3", 16) / GIB
    given = replace(config, kv=replace(config.kv, device_gib=device_gib, device_blocks=None))
    assert sized(given, enabled=False)["device"] == 40, "what is asked for is given"


@pytest.mark.parametrize(
    ("max_batch", "chunk", "max_drafts"), [(1, 64, 0), (3, 64, 0), (3, 64, 24), (40, 512, 0), (256, 8192, 64)]
)
def test_every_captured_step_fits_the_staging_buffer(max_batch: int, chunk: int, max_drafts: int) -> None:
    """With the tables of all rows at the end of the context, and with parameters of its own for every
    sample."""
    ahead, per_request = (8, 8) if max_drafts else (0, 0)
    limits = StepLimits(
        *(max_batch, chunk, 5, 16, 99, "device"),
        max_drafts=max_drafts,
        max_request_drafts=per_request,
        num_ahead=ahead,
        num_layers=1,
    )
    packer = Packer(16, 99, max_batch, ahead)
    for shape in cuda_buckets(limits.max_rows, chunk):
        tables = packer.num_padding + max_batch * (5 + packer.num_padding)
        params = shape.num_samples * (NUM_PARAMS + 2 * per_request)
        drafted = Drafted.num_ints(shape.num_samples, shape.num_samples) if max_drafts else 0
        assert (
            shape.fixed_ints + tables + params + drafted + (shape.num_tokens if ahead else 0)
            <= limits.staging_ints
        ), shape
        assert shape.num_samples * packed_width(MAX_LOGPROBS) <= limits.result_ints, shape

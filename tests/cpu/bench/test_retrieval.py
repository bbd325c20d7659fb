"""The retrieval model: it finds every needle through the real engine, and none whose KV is not what was
written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.config import Config, EngineConfig, KvConfig, ModelSource
from penstock.contract import FinishReason
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.models.loader import LoadedModel
from penstock.testing.sanitized import build_sanitized, check_silent
from retrieval import Haystack, Needle, Retrieval, haystack, write_retrieval_model
from tests.support.contiguous_kv import ContiguousKv, forward
from tests.support.driving import Collected, generate, run_all, submit
from tests.support.loading import load_on_cpu

BLOCK = 16
CHUNK = 1024
SHAPES = [
    Retrieval(max_position=8192),
    Retrieval(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, max_position=8192),
    Retrieval(num_layers=4, num_heads=4, num_kv_heads=1, head_dim=64, max_position=8192),
    Retrieval(num_layers=1, num_heads=8, num_kv_heads=8, head_dim=16, tries=1, max_position=8192),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval_model(
        tmp_path_factory.mktemp("models") / "retrieval", Retrieval(max_position=1 << 16)
    )


def config_of(directory: Path, num_tokens: int, dtype: str = "float32") -> Config:
    source = ModelSource(model=str(directory), device="cpu", dtype=dtype)  # type: ignore[arg-type]
    return Config(
        source,
        KvConfig(BLOCK, device_blocks=num_tokens // BLOCK + 64),
        EngineConfig(max_batch=4, prefill_chunk=CHUNK),
    )


@pytest.fixture
def engine(written: Path) -> Iterator[Engine]:
    """Without the sanitizer: tests write into its arena."""
    built = build(config_of(written, 2048))
    yield built
    built.close(timeout_s=20.0)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_on_cpu(directory, dtype)


def ask_all(engine: Engine, stack: Haystack) -> Collected:
    return generate(
        engine, stack.all_questions(), max_tokens=stack.most_tokens, stop_token_ids=frozenset({stack.stop})
    )


# ----------------------------------------------------------------------------------------------------- recall


def test_every_needle_is_found_by_decoding_behind_a_prompt_in_chunks(written: Path) -> None:
    num_tokens = 8192  # benchmarks/needles.py has longer ones
    engine, sanitizer = build_sanitized(config_of(written, num_tokens))
    stack = haystack(num_tokens, seed=num_tokens)
    asked = submit(
        engine, stack.all_questions(), max_tokens=stack.most_tokens, stop_token_ids=frozenset({stack.stop})
    )
    assert run_all(engine) >= num_tokens // CHUNK + len(stack.output), "it was not computed in chunks"
    assert asked.finish is FinishReason.STOP
    assert asked.tokens[: len(stack.output)] == stack.output and stack.found(asked.tokens) == 16
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"{s.num_layers}x{s.num_heads}/{s.num_kv_heads}x{s.head_dim}"
)
def test_every_shape_finds_every_needle_in_the_plain_reference(
    tmp_path: Path, shape: Retrieval, dtype: torch.dtype
) -> None:
    model = load(write_retrieval_model(tmp_path, shape), dtype).model
    stack = haystack(1024, min(16, shape.num_keys - 1), seed=5, model=shape)
    kv = ContiguousKv(model.config, model.rope)
    forward(model, kv, stack.all_questions()[:-1])
    outputs = forward(model, kv, [stack.all_questions()[-1], *stack.output]).argmax(dim=1).tolist()
    assert outputs == [*stack.output, stack.stop]


class SeenKv(ContiguousKv):
    """Keeps what its last step attended with."""

    def rotate_and_write(self, layer: int, *rest: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        self.seen = {**getattr(self, "seen", {}), layer: super().rotate_and_write(layer, *rest)}  # type: ignore[arg-type]
        return self.seen[layer]


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"{s.num_layers}x{s.num_heads}/{s.num_kv_heads}x{s.head_dim}"
)
def test_a_needle_outweighs_a_million_tokens_of_any_other_kind(tmp_path: Path, shape: Retrieval) -> None:
    """In every head of every layer. So recall does not depend on how long a haystack is, or on which fillers
    it is made of."""
    model = load(write_retrieval_model(tmp_path, shape)).model
    key = 7
    others = [shape.filler(number) for number in range(shape.num_fillers)]
    others += [shape.needle(other, 0) for other in range(shape.num_keys) if other != key]
    others += [shape.answer(other, 0) for other in range(shape.num_keys)] + [shape.go(key), shape.ask(key)]
    kv = SeenKv(model.config, model.rope)
    forward(model, kv, [shape.start, *others, shape.needle(key, 3), shape.ask(key)])
    group = shape.num_heads // shape.num_kv_heads
    for queries, keys, _ in kv.seen.values():
        scores = (
            torch.einsum("hd,thd->ht", queries[-1], keys.repeat_interleave(group, dim=1)) * model.config.scale
        )
        sink, rest, needle = scores[:, 0], scores[:, 1:-2], scores[:, -2]
        assert (needle - rest.amax(dim=1) > math.log(1 << 20) + 8).all(), (
            "a million of these tokens have too much weight"
        )
        assert (needle - sink > 8).all()
        assert (sink - rest.amax(dim=1) > 4).all(), (
            "without its needle a question would see something else than the sink"
        )


# ----------------------------------------------------------------------- blocks that are not what was written


# what happens to block `at` of one layer, which has keys, then values, by token and head
DAMAGES: dict[str, Callable[[Tensor, int, int, int], None]] = {
    "lost keys": lambda blocks, at, other, layer: blocks[at, layer, 0].zero_(),
    "another block": lambda blocks, at, other, layer: blocks[at, layer].copy_(blocks[other, layer]),
    "exchanged heads": lambda blocks, at, other, layer: blocks[at, layer].copy_(blocks[at, layer].flip(2)),
    "exchanged layers": lambda blocks, at, other, layer: blocks[at].copy_(blocks[at].flip(0)),
    "one head lost": lambda blocks, at, other, layer: blocks[at, layer, :, :, 1].zero_(),
}


def slot_of(engine: Engine, stack: Haystack, needle: Needle) -> int:
    prefix = engine.cache.prefix_of(stack.tokens)
    assert prefix is not None
    return engine.cache._pool.find_each(prefix.keys)[needle.position // BLOCK]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_needle_whose_block_is_damaged_in_one_layer_is_not_found(
    engine: Engine, damage: str, layer: int
) -> None:
    stack = haystack(2048, 4, (0.2, 0.4, 0.6, 0.8), seed=1)
    (prompt, answer), *others = stack.questions()
    assert generate(engine, prompt, max_tokens=1).tokens == [answer]
    first, second = (slot_of(engine, stack, needle) for needle in stack.needles[:2])
    DAMAGES[damage](engine.parts.arena.tensor, first, second, layer)
    again = generate(engine, prompt, max_tokens=2)
    assert again.source is not None and again.source.device >= 2032, (
        "it was computed anew, so nothing was shown"
    )
    model, key = stack.model, stack.needles[0].key
    assert again.tokens == [model.ask(key, model.tries - 1), model.ask(key, model.tries - 2)], "it asks again"
    untouched = others[1:]
    assert [generate(engine, one, max_tokens=1).tokens for one, _ in untouched] == [
        [right] for _, right in untouched
    ]


# -------------------------------------------------------------------------------------------------- haystacks

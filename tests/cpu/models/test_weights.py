"""Names, shapes, random weights and their identity."""

from __future__ import annotations

import dataclasses

import torch

from penstock.models.llama import TINY_LLAMA
from penstock.models.model import ModelConfig
from penstock.models.qwen3 import QWEN3_4B, TINY_QWEN3
from penstock.models.registry import layout
from penstock.models.weights import dummy_digest, dummy_weights, weights_digest

CPU = torch.device("cpu")


def test_the_layout_of_qwen3_4b_has_its_four_billion_parameters() -> None:
    assert sum(weight.numel for weight in layout(QWEN3_4B)) == 4_022_468_096


def test_dummy_weights_follow_from_the_seed_alone() -> None:
    calls: list[tuple[str, int, int]] = []
    first, again, other = (
        dummy_weights(TINY_QWEN3, seed, CPU, torch.bfloat16, lambda *call: calls.append(call))
        for seed in (7, 7, 8)
    )
    assert set(first) == {weight.name for weight in layout(TINY_QWEN3)}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert not torch.equal(first["layers.1.down"], other["layers.1.down"])
    assert calls[-1][1] == calls[-1][2] == sum(weight.numel for weight in layout(TINY_QWEN3))


def test_digests_tell_apart_whatever_changes_the_kv() -> None:
    digests = [
        dummy_digest(TINY_QWEN3, 0, CPU, torch.float32),
        dummy_digest(TINY_QWEN3, 1, CPU, torch.float32),
        dummy_digest(TINY_QWEN3, 0, CPU, torch.bfloat16),
        dummy_digest(TINY_QWEN3, 0, torch.device("cuda"), torch.float32),
        dummy_digest(dataclasses.replace(TINY_QWEN3, rope_theta=1e5), 0, CPU, torch.float32),
        weights_digest(TINY_QWEN3, torch.float32, [b"ab", b"c"]),
        weights_digest(TINY_QWEN3, torch.float32, [b"a", b"bc"]),
    ]
    assert len(set(digests)) == len(digests)


def test_a_model_keeps_its_identity_from_version_to_version() -> None:
    """Stored KV is found under it. A change that means to give it up changes these."""
    llama, qwen3 = (dummy_digest(config, 0, CPU, torch.float32).hex() for config in (TINY_LLAMA, TINY_QWEN3))
    assert llama == "81d965d7c9e3d8fb7e42bee5b33df4fc8d6b6c3589da638431c16129145bd51f"
    assert qwen3 == "573676648cd2fe9b58e59daaf86010d41503fed3574666fcac0c1ddbd9a4147b"


def test_a_number_that_a_later_version_adds_changes_only_the_models_that_use_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class LaterConfig(ModelConfig):
        window: int | None = None

    later = LaterConfig(**dataclasses.asdict(TINY_LLAMA))
    windowed = dataclasses.replace(later, window=4096)
    before, same, other = (
        weights_digest(config, torch.float32, [b"content"]) for config in (TINY_LLAMA, later, windowed)
    )
    assert before == same != other


def test_when_to_stop_is_no_part_of_the_identity() -> None:
    assert dummy_digest(TINY_QWEN3, 0, CPU, torch.float32) == dummy_digest(
        dataclasses.replace(TINY_QWEN3, eos_ids=(1, 2)), 0, CPU, torch.float32
    )

"""Which tensors a model has, how files call them, and random ones for a config. Owns names, shapes and digests; reads no files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.hashed_file import DIGEST_BYTES
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress

DTYPES = ("F32", "BF16", "F16")
_NAMED = 6  # tensors listed in an error before the rest is only counted


class Part(NamedTuple):
    """One tensor as safetensors files of this architecture have it."""

    name: str
    shape: tuple[int, ...]


class Weight(NamedTuple):
    """One tensor as the model takes it: its parts stacked along rows."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def numel(self) -> int:
        return sum(torch.Size(part.shape).numel() for part in self.parts)


def layout(config: ModelConfig) -> tuple[Weight, ...]:
    """Every tensor of the model, in the order in which a forward pass meets them."""
    return tuple(_layout(config))


def _layout(config: ModelConfig) -> Iterator[Weight]:
    hidden, ffn, dim = config.hidden, config.ffn, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    yield _single("embed", "model.embed_tokens.weight", config.vocab, hidden)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attention = f"{theirs}.self_attn"
        yield _single(f"{ours}.attn_norm", f"{theirs}.input_layernorm.weight", hidden)
        rows = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
        yield Weight(f"{ours}.qkv", tuple(Part(f"{attention}.{name}.weight", (n, hidden)) for name, n in rows))
        if config.architecture == "qwen3":
            yield _single(f"{ours}.q_norm", f"{attention}.q_norm.weight", dim)
            yield _single(f"{ours}.k_norm", f"{attention}.k_norm.weight", dim)
        yield _single(f"{ours}.out", f"{attention}.o_proj.weight", hidden, q_rows)
        yield _single(f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm.weight", hidden)
        gate_up = tuple(Part(f"{theirs}.mlp.{name}.weight", (ffn, hidden)) for name in ("gate_proj", "up_proj"))
        yield Weight(f"{ours}.gate_up", gate_up)
        yield _single(f"{ours}.down", f"{theirs}.mlp.down_proj.weight", hidden, ffn)
    yield _single("norm", "model.norm.weight", hidden)
    if not config.tied_embeddings:
        yield _single("head", "lm_head.weight", config.vocab, hidden)


def _single(name: str, source: str, *shape: int) -> Weight:
    return Weight(name, (Part(source, shape),))


def empty_weight(weight: Weight, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Room for one tensor. A matrix that is only multiplied with lies input-major on the CPU, where float32 products of a few rows
    take half the time so; embeddings are looked up by row and stay row-major."""
    if device.type == "cpu" and dtype == torch.float32 and len(weight.shape) == 2 and weight.name != "embed":
        return torch.empty(weight.shape[::-1], dtype=dtype).t()
    return torch.empty(weight.shape, dtype=dtype, device=device)


def check_tensors(found: Mapping[str, tuple[tuple[int, ...], str]], config: ModelConfig, where: Path) -> None:
    """`found` is what a file has: name -> (shape, dtype as safetensors spells it). All that is wrong with it is one ModelError."""
    expected = {part.name: part.shape for weight in layout(config) for part in weight.parts}
    present = [name for name in expected if name in found]
    shapes = ((name, list(found[name][0]), list(expected[name])) for name in present)
    problems = {
        "missing tensors": [name for name in expected if name not in found],
        "unexpected tensors": [name for name in found if name not in expected and not _ignorable(name, config)],
        "misshapen tensors": [f"{name} is {shape}, expected {wanted}" for name, shape, wanted in shapes if shape != wanted],
        f"dtypes other than {', '.join(DTYPES)}": [f"{name} is {found[name][1]}" for name in present if found[name][1] not in DTYPES],
    }
    if any(problems.values()):
        stated = "; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names)
        raise ModelError(f"the weights in {where} do not fit its configuration: {stated}")


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store the rotary frequencies, and some repeat a tied output matrix; both follow from what is read."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def dummy_weights(config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype, progress: Progress) -> dict[str, Tensor]:
    """Random weights made on the device: norms of one, matrices normal with a deviation of fan-in ** -0.5, so that every
    projection keeps its input's scale and logits differ. The same seed, dtype and kind of device give the same weights."""
    generator = torch.Generator(device=device).manual_seed(seed % 2**63)
    total, done = sum(weight.numel for weight in layout(config)), 0
    weights = {}
    for weight in layout(config):
        tensor = empty_weight(weight, device, dtype)
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        weights[weight.name] = tensor
        done += weight.numel
        progress("making random weights", done, total)
    return weights


def tensor_digest(part: Part, dtype: str, pieces: Iterable[bytes]) -> bytes:
    """Identity of one tensor in a file: the digests of its pieces, under its name, its shape and the dtype that it is stored in."""
    return _framed(b"penstock-tensor", [part.name.encode(), dtype.encode(), str(list(part.shape)).encode(), b"".join(pieces)])


def weights_digest(config: ModelConfig, dtype: torch.dtype, content: Iterable[bytes]) -> bytes:
    """Identity of the function that the weights compute: their `content`, the dtype they run in and the numbers of the config."""
    numbers = dataclasses.asdict(config)
    del numbers["eos_ids"]  # when to stop changes no KV
    return _framed(b"penstock-weights", [json.dumps(numbers, sort_keys=True).encode(), str(dtype).encode(), *content])


def _framed(kind: bytes, parts: Iterable[bytes]) -> bytes:
    """Each part goes in behind its length, so that no two lists read the same."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=kind)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def dummy_digest(config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> bytes:
    return weights_digest(config, dtype, [b"dummy", str(seed).encode(), device.type.encode()])

"""Which tensors a model has, how files call them, and random ones for a config. Owns names, shapes and digests; reads no files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import TensorSpec, WeightSpec
from penstock.models.hashed_file import DIGEST_BYTES
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress
from penstock.models.registry import architecture_of, layout

DTYPES = ("F32", "BF16", "F16")
_NAMED = 6  # tensors listed in an error before the rest is only counted


def empty_weight(weight: WeightSpec, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Room for one tensor. A matrix that is only multiplied with lies input-major on the CPU, where float32 products of a few rows
    take half the time so; embeddings are looked up by row and stay row-major."""
    if device.type == "cpu" and dtype == torch.float32 and len(weight.shape) == 2 and weight.name != "embed":
        return torch.empty(weight.shape[::-1], dtype=dtype).t()
    return torch.empty(weight.shape, dtype=dtype, device=device)


def check_tensors(found: Mapping[str, tuple[tuple[int, ...], str]], config: ModelConfig, where: Path) -> None:
    """`found` is what a file has: name -> (shape, dtype as safetensors spells it). All that is wrong with it is one ModelError."""
    expected = {part.name: part.shape for weight in layout(config) for part in weight.parts}
    redundant = architecture_of(config).is_redundant
    present = [name for name in expected if name in found]
    shapes = ((name, list(found[name][0]), list(expected[name])) for name in present)
    problems = {
        "missing tensors": [name for name in expected if name not in found],
        "unexpected tensors": [name for name in found if name not in expected and not redundant(name, config)],
        "misshapen tensors": [f"{name} is {shape}, expected {wanted}" for name, shape, wanted in shapes if shape != wanted],
        f"dtypes other than {', '.join(DTYPES)}": [f"{name} is {found[name][1]}" for name in present if found[name][1] not in DTYPES],
    }
    if any(problems.values()):
        stated = "; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names)
        raise ModelError(f"the weights in {where} do not fit its configuration: {stated}")


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


def tensor_digest(part: TensorSpec, dtype: str, pieces: Iterable[bytes]) -> bytes:
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

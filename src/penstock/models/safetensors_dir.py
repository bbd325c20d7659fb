"""A model directory: config.json and safetensors files, opened and loaded. Owns which files belong to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.hashed_file import FilePiece, WeightFile, piece_rows, read_pieces
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress
from penstock.models.registry import layout
from penstock.models.safetensors_file import StoredTensor, read_header
from penstock.models.weights import check_tensors, empty_weight, listed, tensor_digest

INDEX = "model.safetensors.index.json"
_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that together hold the weights."""
    if (directory / INDEX).is_file():
        return _indexed_files(directory)
    files = sorted(directory.glob("*.safetensors"))
    if directory / "model.safetensors" in files:
        return (directory / "model.safetensors",)
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelError(f"{directory} must hold model.safetensors or {INDEX}; safetensors files there: {found}")
    return tuple(files)


def _indexed_files(directory: Path) -> tuple[Path, ...]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{directory / INDEX} has no usable weight_map")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{directory / INDEX} names files outside its directory: {listed(outside)}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{directory} lacks weight files that its index names: {listed(missing)}")
    return tuple(directory / name for name in names)


class LoadedWeights(NamedTuple):
    """Weights on the device, and what they were read from."""

    tensors: dict[str, Tensor]
    content: dict[str, bytes]  # digest of each tensor's name, dtype, shape and bytes, under its name in the file, in the model's order


def load_directory(directory: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress) -> LoadedWeights:
    """The model's tensors on `device` in `dtype`. Every byte is read once, hashed, and copied from there to where it stays."""
    with ExitStack() as stack:
        files = [stack.enter_context(WeightFile(path)) for path in weight_files(directory)]
        stored = _stored(files)
        check_tensors({name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}, config, directory)
        sources = [stored[part.name] for weight in layout(config) for part in weight.parts]
        reading = stack.enter_context(closing(read_pieces(piece for source in sources for _, piece in _pieces(source))))
        total, done = sum(weight.numel for weight in layout(config)), 0
        loaded = LoadedWeights({}, {})
        for weight in layout(config):
            out = empty_weight(weight, device, dtype)
            for part, room in zip(weight.parts, out.split([part.shape[0] for part in weight.parts]), strict=True):
                digests = list(_fill(room, stored[part.name], reading))
                loaded.content[part.name] = tensor_digest(part, stored[part.name].dtype, digests)
            loaded.tensors[weight.name] = out
            done += weight.numel
            progress("loading weights", done, total)
        for file in files:
            file.check_unchanged()
    return loaded


def _stored(files: Iterable[WeightFile]) -> dict[str, StoredTensor]:
    """The tensors of all files together."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        tensors = read_header(file)
        twice = [name for name in tensors if name in stored]
        if twice:
            raise ModelError(f"{file.path} repeats tensors of another file: {listed(twice)}")
        stored |= tensors
    return stored


def _pieces(source: StoredTensor) -> Iterator[tuple[slice, FilePiece]]:
    """The pieces of a matrix with the rows that each has; a vector is a matrix of one row."""
    num_rows = source.shape[0] if len(source.shape) > 1 else 1
    row_bytes = source.num_bytes // num_rows
    for rows in piece_rows(num_rows, row_bytes):
        yield rows, FilePiece(source.file, source.start + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes)


def _fill(room: Tensor, source: StoredTensor, reading: Iterator[tuple[memoryview, bytes]]) -> Iterator[bytes]:
    """Copy the next pieces of `reading`, which are those of `source`, to `room`; yields their digests."""
    room = room if room.dim() > 1 else room.unsqueeze(0)
    for rows, _ in _pieces(source):
        data, digest = next(reading)
        room[rows].copy_(torch.frombuffer(data, dtype=_TORCH_DTYPES[source.dtype]).view(-1, room.shape[1]))
        yield digest

"""A model directory: config.json and safetensors files, opened and loaded. Owns which files belong to it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.cache import file_digest
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress
from penstock.models.weights import Weight, check_tensors, empty_weight, layout, listed, weights_digest

INDEX = "model.safetensors.index.json"


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


def directory_digest(directory: Path, config: ModelConfig, dtype: torch.dtype, progress: Progress) -> bytes:
    """Digest of the weights in a directory, from the bytes of its files."""
    files = weight_files(directory)
    content = [file_digest(file, f"hashing {file.name}", progress) for file in files]
    return weights_digest(config, dtype, content)


def load_directory(directory: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress) -> dict[str, Tensor]:
    """The model's tensors on `device` in `dtype`. Files are mapped and every tensor is copied once, to where it stays."""
    with ExitStack() as stack:
        source = _open(weight_files(directory), stack)
        views = ((name, file.get_slice(name)) for name, file in source.items())
        check_tensors({name: (tuple(view.get_shape()), view.get_dtype()) for name, view in views}, config, directory)
        total, done = sum(weight.numel for weight in layout(config)), 0
        weights = {}
        for weight in layout(config):
            weights[weight.name] = _stack(weight, source, device, dtype)
            done += weight.numel
            progress("loading weights", done, total)
    return weights


def _open(files: Iterable[Path], stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that has it."""
    source: dict[str, Any] = {}
    for path in files:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            names = list(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is damaged or not a safetensors file: {error}") from error
        twice = [name for name in names if name in source]
        if twice:
            raise ModelError(f"{path} repeats tensors of another file: {listed(twice)}")
        source.update(dict.fromkeys(names, file))
    return source


def _stack(weight: Weight, source: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    out = empty_weight(weight, device, dtype)
    row = 0
    for part in weight.parts:
        try:
            tensor = source[part.name].get_tensor(part.name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"tensor {part.name} cannot be read: {error}") from error
        out[row : row + part.shape[0]].copy_(tensor)
        row += part.shape[0]
    return out

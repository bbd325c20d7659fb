"""The safetensors container: which tensors a file has and where. Owns the format and its bounds; knows nothing of architectures.

The file starts with the length of its header, eight bytes, and the header, a JSON object: name -> dtype, shape and the place in the rest
of the file. Tensors fill that rest without gaps. (huggingface.co/docs/safetensors)
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, TypeGuard

from penstock.errors import ModelError
from penstock.models.hashed_file import WeightFile

_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class StoredTensor(NamedTuple):
    """One tensor's place in its file."""

    file: WeightFile
    dtype: str  # as the format spells it
    shape: tuple[int, ...]
    start: int  # byte of the file
    num_bytes: int


def read_header(file: WeightFile) -> dict[str, StoredTensor]:
    """The tensors of a file, all of them inside it."""
    try:
        header_bytes = int.from_bytes(file.read(0, 8), "little") if file.num_bytes >= 8 else 0
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, file.num_bytes - 8):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {file.num_bytes}")
        entries = json.loads(file.read(8, header_bytes).decode("utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("its header is no JSON object")
        entries.pop(_METADATA, None)
        tensors = {name: _tensor(file, 8 + header_bytes, name, entry) for name, entry in entries.items()}
        _check_places(tensors, 8 + header_bytes, file.num_bytes)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file.path} is damaged or not a safetensors file: {error}") from error
    return tensors


def _tensor(file: WeightFile, data_start: int, name: str, entry: Any) -> StoredTensor:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, places = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _counts(shape) or not _counts(places) or len(places) != 2:
        raise ValueError(f"its header does not describe {name}")
    start, end = places
    item_bytes = _ITEM_BYTES.get(dtype)  # of one that is not known nothing is read
    if start > end or (item_bytes is not None and end - start != math.prod(shape) * item_bytes):
        raise ValueError(f"{name} of shape {shape} in {dtype} does not take the bytes {start} to {end}")
    return StoredTensor(file, dtype, tuple(shape), data_start + start, end - start)


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _check_places(tensors: dict[str, StoredTensor], at: int, num_bytes: int) -> None:
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != at:
            raise ValueError(f"{name} starts at byte {tensor.start}, expected {at}")
        at += tensor.num_bytes
    if at != num_bytes:
        raise ValueError(f"its tensors end at byte {at} of {num_bytes}")

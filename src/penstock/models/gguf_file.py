"""The GGUF container: metadata and tensors of one file. Owns the format, its bounds and its encodings; knows
nothing of architectures.

The header is read here rather than with the `gguf` package, whose reader maps files and trusts every count:
a damaged one sends it into a loop of up to 2**64 rounds. Each count here is checked against the bytes that
are left before it is believed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from penstock.errors import ModelError
from penstock.models.fields import Shape
from penstock.models.forms import Quants
from penstock.models.hashed_file import WeightFile, piece_rows

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# GGUF type -> struct format
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an unnamed tensor of one dimension
_LEAST_ENTRY_BYTES = 8 + 4 + 1
_PLAIN = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of values that are already as safetensors stores them

Array = np.ndarray[Any, Any]


class GgufTensor(NamedTuple):
    """One tensor's place in the file, and how its rows lie there; `shape` has rows first."""

    name: str
    shape: Shape
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the tensor data
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def is_plain(self) -> bool:
        return self.kind.name in _PLAIN

    @property
    def dtype(self) -> str:
        """What it becomes in safetensors."""
        return self.kind.name if self.is_plain else "F32"

    @property
    def item_bytes(self) -> int:
        return _PLAIN[self.dtype]


class GgufFile:
    """A file whose header has been read and checked; all its tensors are inside."""

    def __init__(self, file: WeightFile) -> None:
        self.path, self._file = file.path, file
        if file.num_bytes < 24:
            raise ModelError(f"{file.path} is not a GGUF file: it ends inside the header")
        cursor = _Cursor(file)
        if cursor.take(4) != MAGIC:
            raise ModelError(f"{file.path} is not a GGUF file: its first bytes are not {MAGIC.decode()}")
        version = cursor.number("I")
        if version not in _VERSIONS:
            known = ", ".join(map(str, _VERSIONS))
            raise ModelError(f"{file.path} has GGUF version {version}; supported are {known} (little-endian)")
        num_tensors, num_entries = cursor.count(_LEAST_TENSOR_BYTES), cursor.count(_LEAST_ENTRY_BYTES)
        self.metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(num_entries)}
        self.tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            tensor = cursor.tensor()
            if tensor.name in self.tensors:
                raise cursor.damaged(f"tensor {tensor.name} appears twice")
            self.tensors[tensor.name] = tensor
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.damaged(f"alignment {alignment!r}")
        self._data_start = -(-cursor.at // alignment) * alignment
        for tensor in self.tensors.values():
            end = self._data_start + tensor.offset + tensor.num_rows * tensor.row_bytes
            if end > file.num_bytes:
                short = f"{end - file.num_bytes} bytes behind the end of the file"
                raise ModelError(f"{file.path} is truncated: tensor {tensor.name} ends {short}")

    def decoded(self, tensor: GgufTensor, interleaved: int | None) -> Iterator[tuple[slice, Array]]:
        """A tensor as safetensors stores it, in the pieces of rows that it is hashed in: bytes in a row.
        `interleaved`: the width of heads whose halves are; such a tensor is read as a whole."""
        import gguf

        for rows, raw in self._pieces(tensor, interleaved):
            if not tensor.is_plain:
                try:
                    raw = gguf.dequantize(raw, tensor.kind).view(np.uint8)
                except NotImplementedError as error:
                    raise ModelError(f"{self.path}: tensor {tensor.name}: {error}") from error
            yield rows, np.require(raw, requirements=["C", "W"]).reshape(-1)

    def has_quants(self, tensor: GgufTensor) -> bool:
        """Whether `quants` can tell what its encoding holds: numbers of 4 bits at equal steps."""
        return tensor.kind.name in _QUANTS

    def quants(self, tensor: GgufTensor, interleaved: int | None) -> Iterator[Quants]:
        """A tensor that has them, without any rounding, in pieces of rows."""
        for _, raw in self._pieces(tensor, interleaved):
            parts = _QUANTS[tensor.kind.name](raw)
            yield Quants(*(torch.from_numpy(part.reshape(len(raw), -1)) for part in parts))

    def _pieces(self, tensor: GgufTensor, interleaved: int | None) -> Iterator[tuple[slice, Array]]:
        whole = None if interleaved is None else self._unpermuted(tensor, interleaved)
        for rows in piece_rows(tensor.num_rows, tensor.shape[-1] * tensor.item_bytes):
            yield rows, self._rows(tensor, rows) if whole is None else whole[rows]

    def numbers(self, tensor: GgufTensor) -> list[float]:
        """A short vector of plain numbers."""
        if tensor.kind.name != "F32" or tensor.num_rows != 1:
            raise ModelError(f"{self.path}: tensor {tensor.name} is no vector of float32")
        values: list[float] = self._rows(tensor, slice(0, 1)).view(np.float32)[0].tolist()
        return values

    def _unpermuted(self, tensor: GgufTensor, head_dim: int) -> Array:
        """All of it; the values of a vector are the rows of a matrix of one column."""
        rows = self._rows(tensor, slice(0, tensor.num_rows))
        if len(tensor.shape) > 1:
            return unpermute(rows, head_dim)
        if not tensor.is_plain:
            raise ModelError(
                f"{self.path}: tensor {tensor.name} is a quantized vector, which is not supported"
            )
        return unpermute(rows.reshape(-1, tensor.item_bytes), head_dim).reshape(rows.shape)

    def _rows(self, tensor: GgufTensor, rows: slice) -> Array:
        """As [rows, row_bytes]."""
        start = self._data_start + tensor.offset + rows.start * tensor.row_bytes
        data = self._file.read(start, (rows.stop - rows.start) * tensor.row_bytes)
        return np.frombuffer(data, np.uint8).reshape(-1, tensor.row_bytes)


def unpermute(rows: Array, head_dim: int) -> Array:
    """Rows that are stored with the two halves of each head interleaved: put the halves back one after the
    other."""
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


# numbers, scales and zeros as `Quants` has them, of rows as the file has them
_Parts = tuple[Array, Array, Array]


def _quants_of_q4_0(raw: Array) -> _Parts:
    """A group is a float16 step and 16 bytes, whose low halves come first."""
    groups = raw.reshape(-1, 18)
    scale = _halves(groups[:, :2])
    return _nibbles(groups[:, 2:]), scale, np.zeros_like(scale)


def _quants_of_q4_1(raw: Array) -> _Parts:
    """The same with a float16 minimum behind the step."""
    groups = raw.reshape(-1, 20)
    scale, least = _halves(groups[:, :4]).T
    return _nibbles(groups[:, 4:]), scale, least + _MIDDLE * scale


def _quants_of_q4_k(raw: Array) -> _Parts:
    """Eight groups share two float16 factors, of their steps and of their minima, which have 6 bits each. The
    numbers of two groups share 32 bytes."""
    from gguf.quants import Q4_K

    blocks = raw.reshape(-1, 144)
    factors = _halves(blocks[:, :4])
    steps, minima = Q4_K.get_scale_min(blocks[:, 4:16])
    scale, least = factors[:, :1] * steps, factors[:, 1:] * minima
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), scale, _MIDDLE * scale - least


def _halves(data: Array) -> Array:
    return data.copy().view(np.float16).astype(np.float32)


def _nibbles(data: Array) -> Array:
    return np.concatenate((data & 15, data >> 4), axis=-1)


_MIDDLE = np.float32(8)
_QUANTS = {"Q4_0": _quants_of_q4_0, "Q4_1": _quants_of_q4_1, "Q4_K": _quants_of_q4_k}


class _Cursor:
    """Reads forward through the header; running past the end, or a count that cannot fit, is a ModelError."""

    def __init__(self, file: WeightFile) -> None:
        self._file, self.at = file, 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(
            f"{self._file.path} is damaged or truncated: {what} at byte {self.at} of its header"
        )

    def take(self, size: int) -> bytes:
        left = self._file.num_bytes - self.at
        if size > left:
            raise self.damaged(f"{size} bytes wanted, {left} left")
        self.at += size
        return self._file.read(self.at - size, size)

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(form)))

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def count(self, least_bytes: int) -> int:
        """A number of things that take at least `least_bytes` each."""
        count = int(self.number("Q"))
        if count * least_bytes > self._file.num_bytes - self.at:
            raise self.damaged(f"a count of {count}, more than the file can hold,")
        return count

    def string(self) -> str:
        raw = self.take(self.count(1))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged("a text that is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > 1:
            raise self.damaged(f"a value of unknown type {kind}")
        inner = self.number("I")
        if inner in _NUMBERS:
            form = _NUMBERS[inner]
            return list(self.numbers(form, self.count(struct.calcsize(form))))
        return [self.value(inner, depth + 1) for _ in range(self.count(1))]

    def tensor(self) -> GgufTensor:
        # not every machine that runs converted weights has it
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, num_dimensions = self.string(), self.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name} of {num_dimensions} dimensions")
        shape = self.numbers("Q", num_dimensions)[::-1]
        number, offset = self.number("I"), self.number("Q")
        if not all(0 < extent < 2**40 for extent in shape) or offset > self._file.num_bytes:
            raise self.damaged(f"tensor {name} of shape {list(shape)} at offset {offset}")
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self._file.path}: tensor {name} has an unknown encoding {number}") from error
        if shape[-1] % block:
            rows = f"rows of {name} are {shape[-1]} long, not a multiple of {block}"
            raise ModelError(f"{self._file.path} is damaged: {rows}")
        return GgufTensor(name, shape, kind, offset, shape[-1] // block * block_bytes)

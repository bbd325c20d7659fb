"""The GGUF container: metadata and tensors of one file. Owns the format, its bounds and its encodings; knows
nothing of architectures.

The header is read here rather than with the `gguf` package, whose reader trusts every count: a damaged one
sends it into a loop of up to 2**64 rounds. Each count here is checked against the bytes that are left before
it is believed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.errors import ModelError
from penstock.models.forms import Quants
from penstock.models.hashed_file import WeightFile, piece_rows

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
# GGUF type -> struct format
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
# a vocabulary has a hundred thousand lengths
_STRUCTS = {kind: struct.Struct("<" + kind) for kind in _NUMBERS.values()}
_MAX_DIMENSIONS = 4
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an unnamed tensor of one dimension
_LEAST_ENTRY_BYTES = 8 + 4 + 1


class GgufTensor(NamedTuple):
    """One tensor's place in the file; `shape` has rows first, `kind` is ggml's number for its encoding."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the start of the tensor data

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufEncoding(NamedTuple):
    """How a tensor's rows lie in the file, and the safetensors dtype they become."""

    row_bytes: int
    dtype: str
    plain: bool  # the bytes are already what safetensors stores

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "F32" else 2


class GgufFile:
    """A file whose header has been read and checked."""

    def __init__(self, file: WeightFile) -> None:
        self.path = file.path
        if file.num_bytes < 24:
            raise ModelError(f"{file.path} is not a GGUF file: it ends inside the header")
        self._file = file
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._data_start = self._read_header()

    def _read_header(self) -> int:
        cursor = _Cursor(self._file)
        if cursor.take(4) != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: its first bytes are not {MAGIC.decode()}")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{self.path} has GGUF version {version}; supported are {', '.join(map(str, _VERSIONS))} "
                "(little-endian)"
            )
        num_tensors = cursor.count(_LEAST_TENSOR_BYTES)
        num_entries = cursor.count(_LEAST_ENTRY_BYTES)
        for _ in range(num_entries):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        for _ in range(num_tensors):
            tensor = cursor.tensor()
            if tensor.name in self.tensors:
                raise cursor.damaged(f"tensor {tensor.name} appears twice")
            self.tensors[tensor.name] = tensor
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.damaged(f"alignment {alignment!r}")
        return -(-cursor.at // alignment) * alignment

    def encoding(self, tensor: GgufTensor) -> GgufEncoding:
        import gguf  # only a conversion needs it, and not every machine that runs converted weights has it

        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{self.path}: tensor {tensor.name} has an unknown encoding {tensor.kind}"
            ) from error
        if tensor.shape[-1] % block:
            raise ModelError(
                f"{self.path} is damaged: rows of {tensor.name} are {tensor.shape[-1]} long, not a multiple "
                f"of {block}"
            )
        plain = kind.name in ("F32", "F16", "BF16")
        return GgufEncoding(tensor.shape[-1] // block * block_bytes, kind.name if plain else "F32", plain)

    def check_inside(self, tensor: GgufTensor) -> None:
        """Raises where the file ends before the tensor does."""
        short = (
            self._data_start
            + tensor.offset
            + tensor.num_rows * self.encoding(tensor).row_bytes
            - self._file.num_bytes
        )
        if short > 0:
            raise ModelError(
                f"{self.path} is truncated: tensor {tensor.name} ends {short} bytes behind the end of the "
                "file"
            )

    def decoded(self, tensor: GgufTensor, interleaved: int | None) -> Iterator[tuple[slice, memoryview]]:
        """A tensor that is inside as safetensors stores it, in the pieces of rows that it is hashed in.
        `interleaved`: the width of heads whose halves are; such a tensor is read as a whole."""
        import gguf

        for rows, raw in self._pieces(tensor, interleaved):
            if not self.encoding(tensor).plain:
                try:
                    raw = gguf.dequantize(raw, gguf.GGMLQuantizationType(tensor.kind)).view(np.uint8)
                except NotImplementedError as error:
                    raise ModelError(f"{self.path}: tensor {tensor.name}: {error}") from error
            yield rows, np.ascontiguousarray(raw).reshape(-1).data

    def has_quants(self, tensor: GgufTensor) -> bool:
        """Whether `quants` can tell what its encoding holds: numbers of 4 bits at equal steps."""
        return tensor.kind in _QUANTS

    def quants(self, tensor: GgufTensor, interleaved: int | None) -> Iterator[Quants]:
        """A tensor that is inside and has them, without any rounding, in pieces of rows."""
        for _, raw in self._pieces(tensor, interleaved):
            yield Quants(*map(torch.from_numpy, _QUANTS[tensor.kind](raw)))

    def _pieces(
        self, tensor: GgufTensor, interleaved: int | None
    ) -> Iterator[tuple[slice, np.ndarray[Any, np.dtype[np.uint8]]]]:
        encoding = self.encoding(tensor)
        whole = None if interleaved is None else self._unpermuted(tensor, encoding, interleaved)
        for rows in piece_rows(tensor.num_rows, tensor.shape[-1] * encoding.item_bytes):
            yield rows, self._rows(tensor, encoding.row_bytes, rows) if whole is None else whole[rows]

    def numbers(self, tensor: GgufTensor) -> list[float]:
        """A short vector of plain numbers."""
        encoding = self.encoding(tensor)
        if encoding.dtype != "F32" or not encoding.plain or tensor.num_rows != 1:
            raise ModelError(f"{self.path}: tensor {tensor.name} is no vector of float32")
        self.check_inside(tensor)
        values: list[float] = self._rows(tensor, encoding.row_bytes, slice(0, 1)).view(np.float32)[0].tolist()
        return values

    def _unpermuted(
        self, tensor: GgufTensor, encoding: GgufEncoding, head_dim: int
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All of it; the values of a vector are the rows of a matrix of one column."""
        rows = self._rows(tensor, encoding.row_bytes, slice(0, tensor.num_rows))
        if len(tensor.shape) > 1:
            return unpermute(rows, head_dim)
        if not encoding.plain:
            raise ModelError(
                f"{self.path}: tensor {tensor.name} is a quantized vector, which is not supported"
            )
        return unpermute(rows.reshape(-1, encoding.item_bytes), head_dim).reshape(rows.shape)

    def _rows(self, tensor: GgufTensor, row_bytes: int, rows: slice) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """As [rows, row_bytes]."""
        start = self._data_start + tensor.offset + rows.start * row_bytes
        data = self._file.read(start, (rows.stop - rows.start) * row_bytes)
        return np.frombuffer(data, np.uint8).reshape(-1, row_bytes)


def unpermute(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Rows that are stored with the two halves of each head interleaved: put the halves back one after the
    other."""
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


_Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]  # of `Quants`


def _quants_of_q4_0(raw: np.ndarray[Any, Any]) -> _Arrays:
    """A group is a float16 step and 16 bytes, whose low halves come first."""
    groups = raw.reshape(len(raw), -1, 18)
    scale = groups[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    return _nibbles(groups[..., 2:]).reshape(len(raw), -1), scale, np.zeros_like(scale)


def _quants_of_q4_1(raw: np.ndarray[Any, Any]) -> _Arrays:
    """The same with a float16 minimum behind the step."""
    groups = raw.reshape(len(raw), -1, 20)
    scale, least = np.moveaxis(groups[..., :4].copy().view(np.float16).astype(np.float32), -1, 0)
    return _nibbles(groups[..., 4:]).reshape(len(raw), -1), scale, least + _MIDDLE * scale


def _quants_of_q4_k(raw: np.ndarray[Any, Any]) -> _Arrays:
    """Eight groups share two float16 factors, of their steps and of their minima, which have 6 bits each. The
    numbers of two groups share 32 bytes."""
    import gguf

    blocks = raw.reshape(-1, 144)
    factors = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    steps, minima = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    scale, least = factors[:, :1] * steps, factors[:, 1:] * minima
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    zero = _MIDDLE * scale - least
    return numbers.reshape(len(raw), -1), scale.reshape(len(raw), -1), zero.reshape(len(raw), -1)


def _nibbles(data: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.concatenate((data & 15, data >> 4), axis=-1)


_MIDDLE = np.float32(8)
_QUANTS = {2: _quants_of_q4_0, 3: _quants_of_q4_1, 12: _quants_of_q4_k}  # by ggml's number for the encoding


class _Cursor:
    """Reads forward through the header; running past the end, or a count that cannot fit, is a ModelError."""

    def __init__(self, file: WeightFile) -> None:
        self._file, self.at = file, 0

    @property
    def _left(self) -> int:
        return self._file.num_bytes - self.at

    def damaged(self, what: str) -> ModelError:
        return ModelError(
            f"{self._file.path} is damaged or truncated: {what} at byte {self.at} of its header"
        )

    def take(self, size: int) -> bytes:
        if size > self._left:
            raise self.damaged(f"{size} bytes wanted, {self._left} left")
        piece = self._file.read(self.at, size)
        self.at += size
        return piece

    def number(self, kind: str) -> Any:
        form = _STRUCTS[kind]
        return form.unpack(self.take(form.size))[0]

    def count(self, least_bytes: int) -> int:
        """A number of things that take at least `least_bytes` each."""
        count = int(self.number("Q"))
        if count * least_bytes > self._left:
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
        if kind == _BOOL:
            return self.take(1) != b"\0"
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < 2:
            return self._array(depth)
        raise self.damaged(f"a value of unknown type {kind}")

    def _array(self, depth: int) -> list[Any]:
        kind = self.number("I")
        if kind in _NUMBERS:
            form = _NUMBERS[kind]
            count = self.count(struct.calcsize("<" + form))
            return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize("<" + form))))
        return [self.value(kind, depth + 1) for _ in range(self.count(1))]

    def tensor(self) -> GgufTensor:
        name = self.string()
        num_dimensions = self.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name} of {num_dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(num_dimensions))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        if not all(0 < extent < 2**40 for extent in shape) or offset > self._file.num_bytes:
            raise self.damaged(f"tensor {name} of shape {list(shape)} at offset {offset}")
        return GgufTensor(name, shape, kind, offset)

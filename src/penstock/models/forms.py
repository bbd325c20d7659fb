"""The forms in which a CPU holds a model's matrices, and their products. Owns the numbers of a form, not the choice of one.

A matrix may be held twice: in 8 bits for products of a few rows, whose time is that of reading the weights, and in bfloat16 or float32 for
many rows, whose time is that of computing. Both hold the same values, those of 8 bits: KV of a block is the same, but for rounding, whether
a prefill or a decode step computed it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST = 127.0  # of 8 bits with a sign: symmetric, so that a scale is all that a row needs


@dataclass(frozen=True, slots=True)
class Forms:
    """Which forms there are, and which one multiplies how many rows."""

    wide: torch.dtype  # for many rows: bfloat16 or float32
    few_rows: int = 0  # products of at most so many rows read 8-bit weights; 0: there are none

    @property
    def scope(self) -> str:
        """Names the values of the weights, for keys. `few_rows` is not among them: it chooses between two products of the same values."""
        name = str(self.wide).removeprefix("torch.")
        return f"int8+{name}" if self.few_rows else name

    def __str__(self) -> str:
        name = str(self.wide).removeprefix("torch.")
        return f"int8 for up to {self.few_rows} rows, {name} for more" if self.few_rows else name

    def num_bytes(self, shapes: Iterable[tuple[str, tuple[int, ...]]], tied: bool) -> int:
        """Of a model's weights in memory, by their names and shapes."""
        total = 0
        for name, shape in shapes:
            narrow, wide = self.held(name, tied)
            matrix = math.prod(shape) * (narrow + wide * self.wide.itemsize) + 2 * narrow * shape[0]
            total += matrix if len(shape) == 2 else 4 * shape[0]
        return total

    def held(self, name: str, tied: bool) -> tuple[bool, bool]:
        """Whether a matrix is held in 8 bits, and whether in the wide form. Logits come from 8 bits alone where their product is exact;
        embeddings that are only looked up are wide."""
        narrow = self.few_rows > 0 and (name != "embed" or tied)
        return narrow, not (narrow and name in ("embed", "head") and has_exact_products())


def has_exact_products() -> bool:
    """Whether products of 8-bit numbers are summed in 32 bits. Without VNNI pairs of them are summed in 16, and clipped."""
    return bool(torch.cpu._is_vnni_supported())


class Matrix:
    """One matrix [out, in] in its forms."""

    __slots__ = ("few_rows", "packed", "scale", "shape", "wide")

    def __init__(self, packed: Tensor | None, scale: Tensor | None, wide: Tensor | None, few_rows: int) -> None:
        self.packed, self.scale = packed, scale  # int8 [out, in]; bfloat16 [out], by which a row is multiplied
        self.wide = wide  # None: every product is one of 8-bit numbers
        self.few_rows = few_rows
        self.shape = next(tensor.shape for tensor in (packed, wide) if tensor is not None)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.packed, self.scale, self.wide) if tensor is not None]

    def split(self, sizes: Sequence[int]) -> list[Matrix]:
        """Its rows in parts that share its memory."""
        ends = itertools.accumulate(sizes)
        spans = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        held = (self.packed, self.scale, self.wide)
        parts = ([None if tensor is None else tensor[span] for tensor in held] for span in spans)
        return [Matrix(packed, scale, wide, self.few_rows) for packed, scale, wide in parts]

    def fill(self, rows: slice, values: Tensor) -> None:
        """Round float32 `values` [rows, in] to its forms."""
        if self.packed is not None and self.scale is not None:
            scale = _scale(values).bfloat16()
            factor = scale.float()
            values = (values / factor).round_().clamp_(-_LARGEST, _LARGEST)
            self.packed[rows], self.scale[rows] = values, scale.squeeze(1)
            values.mul_(factor)
        if self.wide is not None:
            self.wide[rows] = values

    def reorder(self, order: Tensor) -> None:
        for tensor in self.tensors:
            tensor.copy_(tensor[order])

    def product(self, x: Tensor) -> Tensor:
        """float32 [T, in] -> float32 [T, out]. Activations are rounded to bfloat16 where the product reads 8 bits or bfloat16."""
        if len(x) <= self.few_rows:
            assert self.packed is not None and self.scale is not None
            return torch._weight_int8pack_mm(x.bfloat16(), self.packed, self.scale).float()
        assert self.wide is not None
        if self.wide.dtype == torch.bfloat16:
            return F.linear(x.bfloat16(), self.wide).float()
        return F.linear(x, self.wide)

    def logits(self, x: Tensor) -> Tensor:
        """`product` for the output head, whose results are compared with each other: bfloat16 would tie neighbours. Activations are two
        8-bit numbers, the second of what the first leaves out, and sums of products are exact."""
        if self.wide is not None:
            return self.product(x)
        assert self.packed is not None and self.scale is not None
        scale = _scale(x)
        coarse = (x / scale).round_()
        rest = x - coarse * scale
        rest_scale = _scale(rest)
        both = torch.cat((coarse, (rest / rest_scale).round_())).to(torch.int8)
        sums = torch._int_mm(both, self.packed.t())
        return (sums[: len(x)] * scale).addcmul_(sums[len(x) :], rest_scale).mul_(self.scale)

    def rows(self, tokens: Tensor) -> Tensor:
        """float32 [T, in]: an embedding's rows."""
        if self.packed is None or self.scale is None:
            assert self.wide is not None
            return F.embedding(tokens, self.wide).float()
        return self.packed.index_select(0, tokens).float().mul_(self.scale.index_select(0, tokens).unsqueeze(1))


def empty_matrix(name: str, shape: tuple[int, ...], tied: bool, forms: Forms) -> Matrix:
    """Room for one matrix of a model, whose embeddings are perhaps `tied` to its head."""
    narrow, wide = forms.held(name, tied)
    packed = torch.empty(shape, dtype=torch.int8) if narrow else None
    scale = torch.empty(shape[0], dtype=torch.bfloat16) if narrow else None
    return Matrix(packed, scale, torch.empty(shape, dtype=forms.wide) if wide else None, forms.few_rows if narrow else 0)


def _scale(rows: Tensor) -> Tensor:
    """[T, 1]: what a step of 8 bits is worth in each row; 1 in a row of zeros, where any would do."""
    scale = rows.abs().amax(dim=1, keepdim=True).div_(_LARGEST)
    return scale.masked_fill_(scale == 0, 1.0)

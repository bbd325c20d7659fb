"""The forms in which a CPU holds a model's matrices, and their products. Owns the numbers of a form, not the
choice of one.

A matrix may be held twice: in 4 or 8 bits for products of a few rows, whose time is that of reading the
weights, and in bfloat16 or float32 for many rows, whose time is that of computing. Both hold the same values,
those of the few bits: KV of a block is the same, but for rounding, whether a prefill or a decode step
computed it. Any matrix may be rounded to 8 bits; 4 bits are only for matrices that a file has in 4 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models.fields import Shape

_LARGEST = 127.0  # of 8 bits with a sign: symmetric, so that a scale is all that a row needs
_LEAST_STEP = 1e-30  # bfloat16 has it
GROUP = 32  # values of a row that share a scale and a zero in 4 bits, as files have them
_MIDDLE = 8  # of 4 bits without a sign: the number that stands for a group's zero
_ALIGNED_ROWS = 16  # the product of 4 bits takes multiples of so many rows
_UNSIGNED = 128  # added to 8-bit activations: oneDNN multiplies those without a sign by weights with one
_HEAD_ROWS = 4  # oneDNN multiplies so many rows in less time than fewer
_DEPTH = 16  # the product of 8 bits reads rows of weights by so many values, and behind the end of others
_EVERY = 1 << 30  # rows: more than any product has
_TILE_ROWS = 16  # of a product in the wide form whose sums must not depend on their number
# endings of names: few values, whose rounding would change choices, or how long a state lasts
_EXACT = ("router", "shared_gate", ".gates", ".conv")
_PACKED_ROWS = 1024  # packed at a time, as 32-bit numbers: a multiple of every CPU's tile of rows


@dataclass(frozen=True, slots=True)
class Forms:
    """Which forms there are, and which one multiplies how many rows."""

    wide: torch.dtype  # for many rows: bfloat16 or float32
    few_rows: int = 0  # products of at most so many rows read 8-bit weights; 0: there are none
    # the same of weights that the file has in 4 bits; 0: those are held as all others are
    few_rows_of_4: int = 0
    # one product for any number of rows: a row's result is the same bits, whatever is computed beside it
    steady: bool = False

    @property
    def scope(self) -> str:
        """Names the values of the weights, for keys. Numbers of rows are not among them: they choose between
        two products of the same values. Steady ones are: KV that is the same bits each time is not mixed with
        KV that is not."""
        return "+".join([*self._narrow, self._wide, *(["steady"] if self.steady else [])])

    def made_steady(self) -> Forms:
        """The same values, in the form of few rows for all of them."""
        few, few_of_4 = (_EVERY if rows else 0 for rows in (self.few_rows, self.few_rows_of_4))
        return Forms(self.wide, few, few_of_4, steady=True)

    def __str__(self) -> str:
        if self.steady:
            return f"{' and '.join(self._narrow) or self._wide} for any number of rows"
        narrow = " and ".join(f"{name} for up to {rows} rows" for name, rows in self._narrow.items())
        return f"{narrow}, {self._wide} for more" if narrow else self._wide

    @property
    def _wide(self) -> str:
        return str(self.wide).removeprefix("torch.")

    @property
    def _narrow(self) -> dict[str, int]:
        rows = {"int4": self.few_rows_of_4, "int8": self.few_rows}
        return {name: num for name, num in rows.items() if num}

    def of(self, in_4_bits: Collection[str]) -> Forms:
        """For a file that has the matrices `in_4_bits` so: where there are none, its values are those of the
        other forms, and so is its scope."""
        return self if in_4_bits else replace(self, few_rows_of_4=0)

    def num_bytes(
        self, shapes: Iterable[tuple[str, Shape]], tied: bool, in_4_bits: Collection[str] = ()
    ) -> int:
        """Of a model's weights in memory, by their names and shapes."""
        total, width = 0, self.wide.itemsize
        for name, shape in shapes:
            values, rows = math.prod(shape), math.prod(shape[:-1])
            if len(shape) == 1 or name.endswith(_EXACT):
                total += 4 * values
            elif self.few_rows_of_4 and name in in_4_bits:
                total += values // 2 + 4 * values // GROUP + (not self.steady) * width * values
            else:
                narrow, wide = self.held(name, shape[-1], tied)
                twice = narrow and not wide and name in ("embed", "head")  # once more, in oneDNN's order
                total += values * (narrow + twice + wide * width) + rows * (2 * narrow + 8 * twice)
        return total

    def held(self, name: str, width: int, tied: bool) -> tuple[bool, bool]:
        """Whether a matrix that no file has in 4 bits is held in 8 bits, and whether in the wide form. Logits
        come from 8 bits alone where their product is exact; embeddings that are only looked up are wide."""
        narrow = self.few_rows > 0 and (name != "embed" or tied) and width % _DEPTH == 0
        return narrow, not (narrow and (self.steady or (name in ("embed", "head") and has_exact_products())))


def has_exact_products() -> bool:
    """Whether products of 8-bit numbers are summed in 32 bits. Without VNNI pairs of them are summed in 16,
    and clipped."""
    return bool(torch.cpu._is_vnni_supported()) and torch.backends.mkldnn.is_available()


class Quants(NamedTuple):
    """Rows of a matrix in 4 bits, as a file has them: value = (number - 8) * scale + zero."""

    numbers: Tensor  # uint8 [rows, in], 0 to 15
    scale: Tensor  # float32 [rows, in / GROUP]
    zero: Tensor  # the same


def takes_4_bits(shape: Shape, name: str = "") -> bool:
    """Whether the product of 4 bits takes a matrix of this shape, or a stack of them."""
    fits = len(shape) > 1 and shape[-2] % _ALIGNED_ROWS == 0 and shape[-1] % GROUP == 0
    return fits and not name.endswith(_EXACT)


class Matrix:
    """One matrix [out, in] in its forms."""

    __slots__ = ("few_rows", "is_in_4_bits", "packed", "scale", "shape", "steady", "tiled", "wide")

    def __init__(
        self,
        packed: Tensor | None,
        scale: Tensor | None,
        wide: Tensor | None,
        few_rows: int,
        steady: bool = False,
    ) -> None:
        # 8 bits: int8 [out, in], and bfloat16 [out] by which a row is multiplied. 4 bits: uint8 [out, in / 2]
        # in the order of this CPU's product, and bfloat16 [in / GROUP, out, 2], a scale and a zero.
        self.packed, self.scale = packed, scale
        self.is_in_4_bits = packed is not None and packed.dtype == torch.uint8
        self.wide = wide  # None: every product is one of the few bits
        self.steady = steady  # wide products are of as many rows each
        # the numbers in oneDNN's order, scales and zeros of rows; made by `logits`
        self.tiled: tuple[Tensor, Tensor, Tensor] | None = None
        self.few_rows = few_rows
        self.shape = next(tuple(tensor.shape) for tensor in (wide, packed) if tensor is not None)
        if wide is None and self.is_in_4_bits:
            self.shape = self.shape[0], 2 * self.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        held = (self.packed, self.scale, self.wide, *(self.tiled or ()))
        return [tensor for tensor in held if tensor is not None]

    def split(self, sizes: Sequence[int]) -> list[Matrix]:
        """Its rows in parts that share its memory, to be filled one by one. One in 4 bits is made in one
        piece."""
        assert not self.is_in_4_bits
        held = (self.packed, self.scale, self.wide)
        parts = ([None] * len(sizes) if tensor is None else tensor.split(list(sizes)) for tensor in held)
        rows = zip(*parts, strict=True)
        return [Matrix(packed, scale, wide, self.few_rows, self.steady) for packed, scale, wide in rows]

    def fill(self, rows: slice, values: Tensor) -> None:
        """Round float32 `values` [rows, in] to its forms."""
        assert not self.is_in_4_bits
        if self.packed is not None and self.scale is not None:
            scale = _scale(values).bfloat16()
            factor = scale.float()
            values = (values / factor).round_().clamp_(-_LARGEST, _LARGEST)
            self.packed[rows], self.scale[rows] = values, scale.squeeze(1)
            values.mul_(factor)
        if self.wide is not None:
            self.wide[rows] = values

    def reorder(self, order: Tensor) -> None:
        assert not self.is_in_4_bits
        for tensor in self.tensors:
            tensor.copy_(tensor[order])

    def product(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], in bfloat16 unless the form is float32: activations are rounded to it on both
        sides of the product."""
        if x.shape[0] <= self.few_rows:
            assert self.packed is not None and self.scale is not None
            if self.is_in_4_bits:
                return torch._weight_int4pack_mm_for_cpu(x.bfloat16(), self.packed, GROUP, self.scale)
            return torch._weight_int8pack_mm(x.bfloat16(), self.packed, self.scale)
        assert self.wide is not None
        return (_in_tiles if self.steady else F.linear)(x.to(self.wide.dtype), self.wide)

    def logits(self, x: Tensor) -> Tensor:
        """`product` for the output head, whose results are compared with each other: bfloat16 would tie
        neighbours. Activations are two 8-bit numbers, the second of what the first leaves out, and sums of
        products are exact."""
        if self.wide is not None or not has_exact_products():
            return self.product(x).float()
        assert self.packed is not None and self.scale is not None
        if self.tiled is None:  # nothing is filled any more
            zeros = torch.zeros(self.shape[0], dtype=torch.int32)
            self.tiled = torch.ops.onednn.qlinear_prepack(self.packed, None), self.scale.float(), zeros
        num_rows, scale = len(x), _scale(x)
        coarse = (x / scale).round_()
        rest = torch.addcmul(x, coarse, scale, value=-1.0)
        rest_scale = _scale(rest)
        both = torch.cat((coarse, (rest / rest_scale).round_())).add_(_UNSIGNED).to(torch.uint8)
        if 2 * num_rows < _HEAD_ROWS:
            both = F.pad(both, (0, 0, 0, _HEAD_ROWS - 2 * num_rows))
        # The scale and the zero of `both`, and of the result; nothing is applied to it.
        sums = torch.ops.onednn.qlinear_pointwise(
            both, 1.0, _UNSIGNED, *self.tiled, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return (sums[:num_rows] * scale).addcmul_(sums[num_rows : 2 * num_rows], rest_scale)

    def rows(self, tokens: Tensor) -> Tensor:
        """float32 [T, in]: an embedding's rows."""
        if self.packed is None or self.scale is None:
            assert self.wide is not None
            return F.embedding(tokens, self.wide).float()
        numbers, scale = (part.index_select(0, tokens) for part in (self.packed, self.scale))
        return numbers.float().mul_(scale.unsqueeze(1))


def empty_matrix(name: str, shape: Shape, tied: bool, forms: Forms) -> Matrix:
    """Room for one matrix of a model, whose embeddings are perhaps `tied` to its head."""
    if name.endswith(_EXACT):
        return Matrix(None, None, torch.empty(shape), 0, forms.steady)
    is_narrow, is_wide = forms.held(name, shape[1], tied)
    wide = torch.empty(shape, dtype=forms.wide) if is_wide else None
    if not is_narrow:
        return Matrix(None, None, wide, 0, forms.steady)
    scale = torch.empty(shape[0], dtype=torch.bfloat16)
    return Matrix(torch.empty(shape, dtype=torch.int8), scale, wide, forms.few_rows, forms.steady)


def matrix_of_quants(quants: Quants, forms: Forms) -> Matrix:
    """A matrix that a file has in 4 bits. Only its scales and zeros are rounded, to bfloat16."""
    numbers, (num_rows, width) = quants.numbers, quants.numbers.shape
    scale, zero = quants.scale.bfloat16(), quants.zero.bfloat16()
    packed = torch.empty(num_rows, width // 2, dtype=torch.uint8)
    wide = None if forms.steady else torch.empty(num_rows, width, dtype=forms.wide)
    for first in range(0, num_rows, _PACKED_ROWS):
        rows = slice(first, first + _PACKED_ROWS)
        packed[rows] = torch._convert_weight_to_int4pack_for_cpu(numbers[rows].int(), 1)
        if wide is None:
            continue
        steps = numbers[rows].view(-1, width // GROUP, GROUP).float().sub_(_MIDDLE)
        values = steps.mul_(scale[rows].float().unsqueeze(2)).add_(zero[rows].float().unsqueeze(2))
        wide[rows] = values.view(-1, width)
    return Matrix(packed, torch.stack((scale.t(), zero.t()), dim=2), wide, forms.few_rows_of_4, forms.steady)


def _in_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` of as many rows each time, the last ones zeros: how sums are put together may depend on the
    number of rows."""
    padded = F.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
    return torch.cat([F.linear(tile, weight) for tile in padded.split(_TILE_ROWS)])[: len(x)]


def _scale(rows: Tensor) -> Tensor:
    """[T, 1]: what a step of 8 bits is worth in each row; not 0 in a row of zeros, where any other number
    would do."""
    return rows.abs().amax(dim=1, keepdim=True).div_(_LARGEST).clamp_(min=_LEAST_STEP)

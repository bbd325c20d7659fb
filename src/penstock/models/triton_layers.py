# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The elementwise pieces of a layer for CUDA, one Triton launch each. Owns no weights; matrix products are
PyTorch's, except those of a few rows that are faster together with what comes behind them: gate and up with
their product, and sums in shares with the norm.

Rows are read once, computed in float32 and written once, whatever their width; widths need not be powers of
two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.models import triton_delta, triton_experts
from penstock.models.model import Experts, Split
from penstock.models.triton_experts import Chosen

SILU_TILE = 1024  # values per program


class ProductTile(NamedTuple):
    """What one program of a product holds at a time."""

    columns: int  # of the output; so many rows of the weights, or of gate's and of up's
    depth: int
    warps: int
    stages: int  # tiles of weights in flight


# By rows at most: beyond the last PyTorch's product is faster. Measured on an H200 with Qwen3-4B's shape.
GATED_TILES = {16: ProductTile(32, 128, 2, 3), 32: ProductTile(32, 128, 2, 3), 64: ProductTile(64, 64, 4, 4)}
GATED_MIN_DEPTH = 64  # tried where a tile's depth does not divide the width of the input
SHARES_TILES = {
    16: ProductTile(64, 128, 4, 4),
    32: ProductTile(64, 128, 4, 4),
    64: ProductTile(128, 128, 8, 4),
}
SHARES = 4
SHARES_MAX_PROGRAMS = 128  # without shares: more would keep every multiprocessor busy as they are


@triton.jit
def _normalised(x, columns, weight_ptr, eps, WIDTH: tl.constexpr):
    """Float32 RMS norm of one row, whose values behind WIDTH are zero."""
    factor = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    return x * factor * tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, PADDED)
    x = tl.load(x_ptr + row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    out = _normalised(x, columns, weight_ptr, eps, WIDTH)
    tl.store(out_ptr + row + columns, out.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["share_stride"])
def add_rms_norm_kernel(
    x_ptr,  # [NUM_SHARES, rows, WIDTH]: what is added is their sum
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    share_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_SHARES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, PADDED)
    x = tl.load(x_ptr + row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    for share in tl.static_range(1, NUM_SHARES):
        x += tl.load(x_ptr + share * share_stride + row + columns, mask=columns < WIDTH, other=0.0).to(
            tl.float32
        )
    residual = tl.load(residual_ptr + row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    # The norm is of the sum as the next layer will read it, rounding included.
    total = (x + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + columns, total, mask=columns < WIDTH)
    out = _normalised(total.to(tl.float32), columns, weight_ptr, eps, WIDTH)
    tl.store(out_ptr + row + columns, out.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _activated(x, GELU: tl.constexpr):
    """SiLU, or GELU in its approximation by tanh: x / 2 (1 + tanh y) is x / (1 + exp(-2 y))."""
    if GELU:
        out = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        out = x / (1.0 + tl.exp(-x))
    return out


@triton.jit
def gate_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = gate_up_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(source, mask=columns < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=columns < WIDTH, other=0.0).to(tl.float32)
    out = _activated(gate, GELU) * up
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def gated_kernel(
    x_ptr,  # [num_rows, WIDTH]
    weight_ptr,  # [2 * FFN, WIDTH]: gate's rows, then up's
    out_ptr,  # [num_rows, FFN]
    num_rows,
    WIDTH: tl.constexpr,
    FFN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GELU: tl.constexpr,
):
    """Program i: its columns of the output for all rows. Weights are what is read, so they are the left and
    longer side of the products; what they give is rounded as it would be on its way through memory."""
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    rows = tl.arange(0, TILE_ROWS)
    depths = tl.arange(0, DEPTH)
    inside = (rows < num_rows)[None, :]
    x_at = x_ptr + rows[None, :] * WIDTH + depths[:, None]
    gate_at = weight_ptr + columns[:, None] * WIDTH + depths[None, :]
    gate = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    up = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        x = tl.load(x_at + start, mask=inside, other=0.0)
        gate = tl.dot(tl.load(gate_at + start), x, gate)
        up = tl.dot(tl.load(gate_at + FFN * WIDTH + start), x, up)
    gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
    up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
    out = _activated(gate, GELU) * up
    tl.store(out_ptr + rows[None, :] * FFN + columns[:, None], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def shares_kernel(
    x_ptr,  # [num_rows, WIDTH]
    weight_ptr,  # [OUT, WIDTH]
    out_ptr,  # float32 [shares, num_rows, OUT]
    num_rows,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    SHARE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (i, j): its columns of the output for all rows, from the SHARE values of the input that begin
    at j * SHARE."""
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    share = tl.program_id(1)
    rows = tl.arange(0, TILE_ROWS)
    depths = share * SHARE + tl.arange(0, DEPTH)
    inside = (rows < num_rows)[None, :]
    x_at = x_ptr + rows[None, :] * WIDTH + depths[:, None]
    weight_at = weight_ptr + columns[:, None] * WIDTH + depths[None, :]
    total = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    for start in range(0, SHARE, DEPTH):
        total = tl.dot(tl.load(weight_at + start), tl.load(x_at + start, mask=inside, other=0.0), total)
    tl.store(out_ptr + (share * num_rows + rows)[None, :] * OUT + columns[:, None], total, mask=inside)


class TritonLayerOps:
    """`LayerOps` for CUDA tensors."""

    split = Split()

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return F.embedding(tokens, table)

    def logits(self, x: Tensor, weight: Tensor, vocab: int) -> Tensor:
        return self.linear(x, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        if rows:
            rms_norm_kernel[(rows,)](
                x,
                weight,
                out,
                eps,
                WIDTH=width,
                PADDED=triton.next_power_of_2(width),
                num_warps=_warps(width),
            )
        return out

    def norm_heads(self, parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> list[Tensor]:
        return [self.rms_norm(part, weight, eps) for part, weight in zip(parts, weights, strict=True)]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total, width = torch.empty_like(residual), torch.empty_like(residual), residual.shape[-1]
        rows = residual.numel() // width
        if rows:
            add_rms_norm_kernel[(rows,)](
                x,
                residual,
                weight,
                out,
                total,
                eps,
                rows * width,
                WIDTH=width,
                PADDED=triton.next_power_of_2(width),
                NUM_SHARES=len(x) if x.dim() > residual.dim() else 1,
                num_warps=_warps(width),
            )
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(gate_up, is_gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(gate_up, is_gelu=True)

    def _gate_mul(self, gate_up: Tensor, is_gelu: bool) -> Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        rows = out.numel() // width
        if rows:
            gate_mul_kernel[(rows, triton.cdiv(width, SILU_TILE))](
                gate_up, out, WIDTH=width, TILE=SILU_TILE, GELU=is_gelu, num_warps=4
            )
        return out

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._gated(x, weight, is_gelu=False)

    def gelu_gated(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._gated(x, weight, is_gelu=True)

    def _gated(self, x: Tensor, weight: Tensor, is_gelu: bool) -> Tensor:
        tile = _gated_tile(x, weight)
        if tile is None:
            return self._gate_mul(self.linear(x, weight), is_gelu)
        ffn = len(weight) // 2
        out = x.new_empty(len(x), ffn)
        shape = {"WIDTH": weight.shape[1], "FFN": ffn, "GELU": is_gelu}
        gated_kernel[(ffn // tile.columns,)](x.contiguous(), weight, out, len(x), **shape, **_launch(x, tile))
        return out

    def linear_shares(self, x: Tensor, weight: Tensor) -> Tensor:
        tile = _shares_tile(x, weight)
        if tile is None:
            return self.linear(x, weight)
        out_width, width = weight.shape
        out = torch.empty(SHARES, len(x), out_width, dtype=torch.float32, device=x.device)
        shape = {"WIDTH": width, "OUT": out_width, "SHARE": width // SHARES}
        shares_kernel[(out_width // tile.columns, SHARES)](
            x.contiguous(), weight, out, len(x), **shape, **_launch(x, tile)
        )
        return out

    def whole(self, x: Tensor) -> Tensor:
        return x

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def delta_gates(self, rows: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return triton_delta.gates(rows, rate, dt_bias)

    def gated_norm(self, found: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_delta.gated_norm(found, gate, weight, eps)

    def routed(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Tensor:
        return triton_experts.routed(x, experts, shared)

    def choose(self, x: Tensor, experts: Experts) -> Chosen:
        return triton_experts.choose(x, experts, triton_experts.sorts_pairs(len(x), experts.routing))

    def terms(self, x: Tensor, experts: Experts, has_shared: bool) -> Tensor:
        return x.new_empty(experts.routing.top_k + has_shared, *x.shape)

    def add_terms(self, x: Tensor, experts: Experts, chosen: Chosen, terms: Tensor) -> None:
        triton_experts.products(x, experts, chosen, terms)

    def summed(self, terms: Tensor, chosen: Chosen, experts: Experts, shared: Tensor | None) -> Tensor:
        """In shares, `shared` the last."""
        if shared is not None:
            terms[-1].copy_(shared)
        return terms


def _tile_rows(x: Tensor) -> int:
    return max(16, triton.next_power_of_2(len(x)))


def _launch(x: Tensor, tile: ProductTile) -> dict[str, int]:
    """How a product is launched."""
    tiles = {"TILE_ROWS": _tile_rows(x), "TILE_COLUMNS": tile.columns, "DEPTH": tile.depth}
    return {**tiles, "num_warps": tile.warps, "num_stages": tile.stages}


def _gated_tile(x: Tensor, weight: Tensor) -> ProductTile | None:
    """None: PyTorch's product is faster, or the kernel's tiles do not fit the weight exactly."""
    tile = GATED_TILES.get(_tile_rows(x)) if _is_plain(x, weight) else None
    if tile is None:
        return None
    ffn, width = len(weight) // 2, weight.shape[1]
    if width % tile.depth:
        tile = tile._replace(depth=GATED_MIN_DEPTH)
    return tile if width % tile.depth == 0 and ffn % tile.columns == 0 else None


def _shares_tile(x: Tensor, weight: Tensor) -> ProductTile | None:
    """None: as for `_gated_tile`."""
    tile = SHARES_TILES.get(_tile_rows(x)) if _is_plain(x, weight) else None
    if tile is None:
        return None
    out_width, width = weight.shape
    fits = width % (SHARES * tile.depth) == 0 and out_width % tile.columns == 0
    return tile if fits and out_width // tile.columns <= SHARES_MAX_PROGRAMS else None


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Two bytes per value, and offsets that fit into 32 bits."""
    return len(x) > 0 and x.element_size() == 2 and weight.is_contiguous() and weight.numel() < 1 << 31


def _warps(width: int) -> int:
    """A thread keeps at most sixteen values of its row."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))

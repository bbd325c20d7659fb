# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The elementwise pieces of a layer for CUDA, one Triton launch each. Owns no weights; matrix products are PyTorch's.

Rows are read once, computed in float32 and written once, whatever their width; widths need not be powers of two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

SILU_TILE = 1024  # values per program


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


@triton.jit
def add_rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, PADDED)
    x = tl.load(x_ptr + row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    # The norm is of the sum as the next layer will read it, rounding included.
    total = (x + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + columns, total, mask=columns < WIDTH)
    out = _normalised(total.to(tl.float32), columns, weight_ptr, eps, WIDTH)
    tl.store(out_ptr + row + columns, out.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = gate_up_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(source, mask=columns < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=columns < WIDTH, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


class TritonLayerOps:
    """`LayerOps` for CUDA tensors."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        if rows:
            rms_norm_kernel[(rows,)](x, weight, out, eps, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=_warps(width))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total, width = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        if rows:
            add_rms_norm_kernel[(rows,)](
                x, residual, weight, out, total, eps, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=_warps(width)
            )
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        rows = out.numel() // width
        if rows:
            silu_mul_kernel[(rows, triton.cdiv(width, SILU_TILE))](gate_up, out, WIDTH=width, TILE=SILU_TILE, num_warps=4)
        return out


def _warps(width: int) -> int:
    """A thread keeps at most sixteen values of its row."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))

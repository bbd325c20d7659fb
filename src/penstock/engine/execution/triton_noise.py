"""The sampler's Gumbel noise as one CUDA launch. The numbers are those of `sampler.gumbel_noise`, up to the last bits of `log`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _mix32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit(do_not_specialize=["num_rows", "vocab"])
def _noise_kernel(keys_ptr, out_ptr, num_rows, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
    high = tl.load(keys_ptr + num_rows + row).to(tl.uint32, bitcast=True)
    x = _mix32(_mix32(at.to(tl.uint32) ^ low) ^ high)
    uniform = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # log1p is not in every Triton: for small u the series -log(1 - u) = u + u^2/2 keeps the digits that 1 - u would lose
    exponential = tl.where(uniform < 1e-3, uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334)), -tl.log(1.0 - uniform))
    tl.store(out_ptr + row.to(tl.int64) * vocab + at, -tl.log(exponential), mask=at < vocab)


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """float32 [S, vocab]; `keys` is int32 [2, S]."""
    num_rows = keys.shape[1]
    out = torch.empty((num_rows, vocab), dtype=torch.float32, device=keys.device)
    _noise_kernel[(triton.cdiv(vocab, _BLOCK), num_rows)](keys.contiguous(), out, num_rows, vocab, BLOCK=_BLOCK)
    return out

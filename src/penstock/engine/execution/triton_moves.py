# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Small copies between pinned and device memory as kernels. A copy engine serves one direction in order, so that a few bytes on it wait for
gigabytes of KV that another lane sends the same way; loads and stores of a kernel share the link with them instead."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


@triton.jit(do_not_specialize=["dest_ptr", "source_ptr", "num"])  # so that one compiled kernel serves every length and offset
def _move_kernel(dest_ptr, source_ptr, num, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(dest_ptr + at, tl.load(source_ptr + at, mask=at < num), mask=at < num)


def move(dest: Tensor, source: Tensor) -> None:
    """Both contiguous and of one length; values are converted to `dest`'s type."""
    num = source.numel()
    if num:
        _move_kernel[(triton.cdiv(num, _TILE),)](dest, source, num, TILE=_TILE, num_warps=4)

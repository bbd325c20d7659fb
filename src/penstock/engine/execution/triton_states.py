# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The states of a step with drafts, as kernels: the same as `state_drafts.run_groups`, where the tensors are
described, from the convolution to the state. A replay does not know which rows are of one request, so
programs find that out."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from penstock.config import MAX_DRAFTS
from penstock.models.model import Recurrence

_PLACES = triton.next_power_of_2(MAX_DRAFTS + 1)  # a token and its drafts
_VALUES = 32  # of a head, in one program: with 128 keys they fit into registers
_WIDTH = 1024

_STEP_TENSORS = ["rows_ptr", "positions_ptr"]


@triton.jit
def _num_of_group(rows_ptr, positions_ptr, row, first, num_rows, PLACES: tl.constexpr):
    """Rows of the step, from `first` on, that are of one request. 0: it is not the first one."""
    position = tl.load(positions_ptr + first)
    place = tl.arange(0, PLACES)
    inside = first + place < num_rows
    same = tl.load(rows_ptr + first + place, mask=inside, other=-1) == row
    goes_on = tl.load(positions_ptr + first + place, mask=inside, other=-1) == position + place
    num = tl.min(tl.where(inside & same & goes_on, PLACES, place))
    before = tl.maximum(first - 1, 0)
    is_later = (
        (first > 0) & (tl.load(rows_ptr + before) == row) & (tl.load(positions_ptr + before) + 1 == position)
    )
    return tl.where(is_later, 0, num)


@triton.jit
def _mixed(
    qkv_ptr, window_ptr, conv_ptr, first, place, at, inside, width,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """The values `at` of the token at `place` of the group, behind the convolution."""
    total = tl.zeros(at.shape, tl.float32)
    for tap in tl.static_range(WINDOW):
        back = WINDOW - 1 - tap  # tokens before
        x = tl.load(qkv_ptr + (first + place - back) * width + at, mask=inside & (place >= back), other=0.0)
        before_ptr = window_ptr + (WINDOW - 1 + place - back) * width + at
        x += tl.load(before_ptr, mask=inside & (place < back), other=0.0)
        total += x * tl.load(conv_ptr + at * WINDOW + tap, mask=inside, other=0.0)
    return total / (1 + tl.exp(-total))


@triton.jit(do_not_specialize=["num_rows", *_STEP_TENSORS])
def _advance_kernel(
    qkv_ptr, decay_ptr, beta_ptr, conv_ptr, windows_ptr, matrices_ptr, rows_ptr, positions_ptr, rejected_ptr,
    found_ptr, num_rows, window_stride, matrix_stride, width, num_keys, num_values, shared, key_dim,
    value_dim, scale,
    SETTLES: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + first)
    num = _num_of_group(rows_ptr, positions_ptr, row, first, num_rows, PLACES)
    if SETTLES:
        num = tl.where(num > 0, tl.maximum(num - tl.load(rejected_ptr + row), 1), 0)
    if num > 0:
        key = tl.arange(0, KEYS)
        value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
        is_key, is_value = key < key_dim, value < value_dim
        q_at = head // shared * key_dim + key
        k_at, v_at = num_keys * key_dim + q_at, 2 * num_keys * key_dim + head * value_dim + value
        window_ptr = windows_ptr + row.to(tl.int64) * window_stride
        tile = (head * key_dim + key[:, None]) * value_dim + value[None, :]
        state_ptr = matrices_ptr + row.to(tl.int64) * matrix_stride + tile
        inside = is_key[:, None] & is_value[None, :]
        state = tl.load(state_ptr, mask=inside, other=0.0)
        for place in range(num):
            k = _mixed(qkv_ptr, window_ptr, conv_ptr, first, place, k_at, is_key, width, WINDOW)
            v = _mixed(qkv_ptr, window_ptr, conv_ptr, first, place, v_at, is_value, width, WINDOW)
            k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
            at = (first + place) * num_values + head
            state = state * tl.exp(tl.load(decay_ptr + at))
            change = (v - tl.sum(k[:, None] * state, axis=0)) * tl.load(beta_ptr + at)
            state += k[:, None] * change[None, :]
            if not SETTLES:
                q = _mixed(qkv_ptr, window_ptr, conv_ptr, first, place, q_at, is_key, width, WINDOW)
                q = q * tl.rsqrt(tl.sum(q * q) + 1e-6) * scale
                out = tl.sum(q[:, None] * state, axis=0)
                tl.store(found_ptr + at * value_dim + value, out, mask=is_value)
        if SETTLES:
            tl.store(state_ptr, state, mask=inside)


def advance_groups(
    given: Any,
    states: tuple[Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    dims: Recurrence,
    found: Tensor | None,
) -> None:
    """`states`: windows and matrices of one layer, by row. `where`: row and position of each token, and the
    rejected drafts of each row. With `found` all tokens are run and what they find is written there; without
    it the accepted ones, and the matrices are written. Windows are left as they are."""
    (windows, matrices), (rows, positions, rejected) = states, where
    num, grid_values = len(rows), triton.cdiv(dims.value_dim, _VALUES)
    _advance_kernel[(num, dims.num_value_heads, grid_values)](
        given.qkv, given.decay, given.beta, given.conv, windows, matrices, rows, positions, rejected,
        given.qkv if found is None else found, num, windows.stride(0), matrices.stride(0), dims.qkv_width,
        dims.num_key_heads, dims.num_value_heads, dims.num_value_heads // dims.num_key_heads, dims.key_dim,
        dims.value_dim, dims.key_dim**-0.5,
        SETTLES=found is None, WINDOW=dims.window, KEYS=triton.next_power_of_2(dims.key_dim),
        VALUES=min(_VALUES, triton.next_power_of_2(dims.value_dim)), PLACES=_PLACES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", *_STEP_TENSORS])
def _move_kernel(
    windows_ptr, qkv_ptr, rows_ptr, positions_ptr, rejected_ptr, num_rows, slot_stride, layer_stride, width,
    BEFORE: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    first, layer = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + first)
    num = _num_of_group(rows_ptr, positions_ptr, row, first, num_rows, PLACES)
    if num > 0:
        num = tl.maximum(num - tl.load(rejected_ptr + row), 1)
        at = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
        inside = at < width
        own_ptr = windows_ptr + row.to(tl.int64) * slot_stride + layer * BEFORE * width + at
        # Upwards: a place is read before it is written.
        for place in tl.static_range(BEFORE):
            moved = place + num
            x = tl.load(own_ptr + moved * width, mask=inside & (moved < BEFORE), other=0.0)
            given_ptr = qkv_ptr + layer * layer_stride + (first + moved - BEFORE) * width + at
            x += tl.load(given_ptr, mask=inside & (moved >= BEFORE), other=0.0)
            tl.store(own_ptr + place * width, x, mask=inside)


def move_windows(windows: Tensor, qkv: Tensor, where: tuple[Tensor, Tensor, Tensor]) -> None:
    """All layers: the inputs of the accepted tokens, `qkv` [layers, R, width], into the windows of their rows
    [slots, layers, tokens before, width]."""
    rows, positions, rejected = where
    num, (_, num_layers, before, width) = len(rows), windows.shape
    _move_kernel[(num, num_layers, triton.cdiv(width, _WIDTH))](
        windows, qkv, rows, positions, rejected, num, windows.stride(0), qkv.stride(0), width,
        BEFORE=before, WIDTH=min(_WIDTH, triton.next_power_of_2(width)), PLACES=_PLACES,
    )  # fmt: skip

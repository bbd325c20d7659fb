# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Gated delta layers for CUDA: the convolution and the delta rule as few launches, in place, by row. The
readable form is `delta_rule.py`, whose arithmetic and float32 these follow. Owns no state.

    every step         gates, gated_norm                                before and after
    one token each     convolve_step, delta_step                        every request of the step at once
    prompts            convolve, keep_window                            requests of any lengths at once
                       prepare_chunks, carry_state, read_chunks

Launches depend on shapes and on the most tokens that a request may have; where each begins and ends is read
on the device, so steps can be captured. In a chunk, what each token stores depends on what those before it
have stored: `prepare_chunks` solves that for all chunks at once, `carry_state` takes a state through the
chunks of its request and keeps it before each, `read_chunks` reads all of them at once. Padding shares a row:
its programs may overtake each other, and what they leave there is finite and of no use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.models.delta_rule import DeltaInputs, LayerStates, Prompts

CHUNK = 64  # tokens whose system is solved at once; also those that a program of the convolution takes
CHANNELS = 128  # of the convolution, per program
STEP_VALUES = 32  # values of a head per program of a step: more programs than heads
GATES = 256  # values per program
NORM_HEADS = 8  # heads per program
# Launches of the kernels for prompts. VALUES: of a head per program.
PREPARE = {"num_warps": 4, "num_stages": 1}
CARRY = {"num_warps": 8, "num_stages": 1, "VALUES": 32}
READ = {"num_warps": 4, "num_stages": 1, "VALUES": 64}
# Products of float32 on tensor cores. In three of less precision they are as exact as sums in float32 are;
# one is more exact than the inputs of a model in 16 bits.
EXACT, ROUNDED = "tf32x3", "tf32"
_LEAST_SQUARE = 1e-6  # added to the square of a length, as in `delta_rule.py`
# Views of packed inputs, which have any alignment: one compiled kernel serves every step.
_STEP_TENSORS = ["rows_ptr", "starts_ptr"]


class TritonDelta:
    """Implements `DeltaForm`."""

    needs_lengths = False

    def steps(self, states: LayerStates, rows: Tensor, inputs: DeltaInputs) -> Tensor:
        qkv, sizes = inputs.qkv, _sizes(states, inputs)
        num, width = qkv.shape
        mixed = torch.empty(qkv.shape, dtype=torch.float32, device=qkv.device)
        found = mixed.new_empty(num, sizes["HEADS"], sizes["VALUE_DIM"])
        convolve_step_kernel[num, triton.cdiv(width, CHANNELS)](
            *(qkv, inputs.conv, states.windows, mixed, rows),
            *(qkv.stride(0), states.windows.stride(0)),
            WIDTH=width,
            WINDOW=inputs.conv.shape[2],
            CHANNELS=CHANNELS,
        )
        values = min(STEP_VALUES, triton.next_power_of_2(sizes["VALUE_DIM"]))
        delta_step_kernel[num, sizes["HEADS"], triton.cdiv(sizes["VALUE_DIM"], values)](
            *(mixed, inputs.decay.contiguous(), inputs.beta.contiguous(), states.matrices, found, rows),
            states.matrices.stride(0),
            **sizes,
            VALUES=values,
        )
        return found

    def prompts(self, states: LayerStates, prompts: Prompts, inputs: DeltaInputs) -> Tensor:
        """All of them together."""
        mixed, sizes = _convolved(states, prompts, inputs), _sizes(states, inputs)
        chunks, num = triton.cdiv(prompts.longest, CHUNK), len(prompts.rows)
        found = mixed.new_empty(len(mixed), sizes["HEADS"], sizes["VALUE_DIM"])
        if prompts.lengths is None:
            found.zero_()  # tokens of no request write KV, too, which has to be finite
        taken = mixed.new_empty(len(mixed), sizes["HEADS"], sizes["KEY_DIM"])
        total = mixed.new_empty(len(mixed), sizes["HEADS"])
        # every request has a first chunk, and begins behind the last one of the request before
        states_before = mixed.new_empty(len(mixed) // CHUNK + num, *states.matrices.shape[1:])
        exact = inputs.qkv.dtype == torch.float32
        sizes |= {"CHUNK": CHUNK, "PRECISION": EXACT if exact else ROUNDED}
        prepare_chunks_kernel[num * chunks, sizes["HEADS"]](
            *(mixed, inputs.decay.contiguous(), inputs.beta.contiguous(), found, taken, total),
            *(prompts.starts, prompts.before, chunks),
            **sizes,
            **PREPARE,
        )
        carry, read = (
            launch | {"VALUES": min(launch["VALUES"], triton.next_power_of_2(sizes["VALUE_DIM"]))}
            for launch in (CARRY, READ)
        )
        carry_state_kernel[num, sizes["HEADS"], triton.cdiv(sizes["VALUE_DIM"], carry["VALUES"])](
            *(mixed, found, taken, total, states_before, states.matrices),
            *(prompts.rows, prompts.starts, prompts.before, states.matrices.stride(0)),
            **sizes,
            **carry,
        )
        read_chunks_kernel[num * chunks, sizes["HEADS"], triton.cdiv(sizes["VALUE_DIM"], read["VALUES"])](
            *(mixed, found, total, states_before, prompts.starts, prompts.before, chunks),
            **sizes,
            **read,
        )
        return found


def gates(rows: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`LayerOps.delta_gates` in one launch."""
    num, heads = len(rows), len(rate)
    decay, beta = (torch.empty(num, heads, dtype=torch.float32, device=rows.device) for _ in range(2))
    grid = triton.cdiv(num * heads, GATES)
    gates_kernel[grid,](rows.contiguous(), rate, dt_bias, decay, beta, num, HEADS=heads, TILE=GATES)
    return decay, beta


def gated_norm(found: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`LayerOps.gated_norm` in one launch."""
    num, heads, values = found.shape
    out = torch.empty(num, heads * values, dtype=gate.dtype, device=gate.device)
    gated_norm_kernel[num, triton.cdiv(heads, NORM_HEADS)](
        *(found, gate, weight, out, gate.stride(0), eps),
        HEADS=heads,
        VALUE_DIM=values,
        VALUES=triton.next_power_of_2(values),
        TILE=NORM_HEADS,
    )
    return out


def _convolved(states: LayerStates, prompts: Prompts, inputs: DeltaInputs) -> Tensor:
    """float32 [T, width]; the windows of the rows move on."""
    qkv, width = inputs.qkv, inputs.qkv.shape[1]
    mixed = torch.empty(qkv.shape, dtype=torch.float32, device=qkv.device)
    chunks, channels = triton.cdiv(prompts.longest, CHUNK), triton.cdiv(width, CHANNELS)
    window = {"WIDTH": width, "WINDOW": inputs.conv.shape[2], "CHANNELS": CHANNELS}
    where, strides = (prompts.rows, prompts.starts, prompts.before), (qkv.stride(0), states.windows.stride(0))
    convolve_kernel[len(prompts.rows) * chunks, channels](
        *(qkv, inputs.conv, states.windows, mixed, *where, chunks, *strides),
        **window,
        TOKENS=CHUNK,
    )
    keep_window_kernel[len(prompts.rows), channels](*(qkv, states.windows, *where, *strides), **window)
    return mixed


def _sizes(states: LayerStates, inputs: DeltaInputs) -> dict[str, Any]:
    heads, key_dim, value_dim = states.matrices.shape[1:]
    width = inputs.qkv.shape[1]
    return {
        "WIDTH": width,
        "HEADS": heads,
        "SHARED": heads * 2 * key_dim // (width - heads * value_dim),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEYS": max(16, triton.next_power_of_2(key_dim)),
        "LEAST": _LEAST_SQUARE,
    }


# --------------------------------------------------------------------------------------------- gates and norm


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num"])
def gates_kernel(
    given_ptr,  # [num, 2 * HEADS]: for beta, then for the decay
    rate_ptr,  # [HEADS]
    bias_ptr,
    decay_ptr,  # float32 [num, HEADS]
    beta_ptr,
    num,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    real, head = place < num * HEADS, place % HEADS
    at = given_ptr + place // HEADS * (2 * HEADS) + head
    beta = tl.load(at, mask=real, other=0.0).to(tl.float32)
    x = tl.load(at + HEADS, mask=real, other=0.0).to(tl.float32) + tl.load(bias_ptr + head)
    # softplus, which is x itself where the exponential would overflow
    rises = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    tl.store(decay_ptr + place, tl.load(rate_ptr + head) * rises, mask=real)
    tl.store(beta_ptr + place, 1.0 / (1.0 + tl.exp(-beta)), mask=real)


@triton.jit
def gated_norm_kernel(
    found_ptr,  # float32 [T, HEADS, VALUE_DIM]
    gate_ptr,  # [T, HEADS * VALUE_DIM]
    weight_ptr,  # [VALUE_DIM]
    out_ptr,  # as the gate
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (i, j): some heads of token i."""
    token = tl.program_id(0).to(tl.int64)
    heads, values = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, VALUES)
    real = (heads < HEADS)[:, None] & (values < VALUE_DIM)[None, :]
    at = heads[:, None] * VALUE_DIM + values[None, :]
    x = tl.load(found_ptr + token * (HEADS * VALUE_DIM) + at, mask=real, other=0.0)
    x *= tl.rsqrt(tl.sum(x * x, 1) / VALUE_DIM + eps)[:, None]
    x *= tl.load(weight_ptr + values, mask=values < VALUE_DIM, other=0.0).to(tl.float32)[None, :]
    gate = tl.load(gate_ptr + token * gate_stride + at, mask=real, other=0.0).to(tl.float32)
    out = (x * _silu(gate)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * (HEADS * VALUE_DIM) + at, out, mask=real)


# ------------------------------------------------------------------------------------------------ convolution


@triton.jit(do_not_specialize=["rows_ptr"])
def convolve_step_kernel(
    qkv_ptr,  # [requests, WIDTH]
    conv_ptr,  # [WIDTH, WINDOW]
    windows_ptr,  # float32 [rows, WINDOW - 1, WIDTH]
    out_ptr,  # float32 [requests, WIDTH]
    rows_ptr,
    qkv_stride,
    window_stride,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (i, j): some channels of the token of request i. The window moves on by it."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channels < WIDTH
    x = tl.load(qkv_ptr + request * qkv_stride + channels, mask=real, other=0.0).to(tl.float32)
    total = x * tl.load(conv_ptr + channels * WINDOW + WINDOW - 1, mask=real, other=0.0)
    window_at = windows_ptr + row * window_stride + channels
    for place in tl.static_range(WINDOW - 1):
        earlier = tl.load(window_at + place * WIDTH, mask=real, other=0.0)
        total += earlier * tl.load(conv_ptr + channels * WINDOW + place, mask=real, other=0.0)
        if place > 0:
            tl.store(window_at + (place - 1) * WIDTH, earlier, mask=real)
    tl.store(window_at + (WINDOW - 2) * WIDTH, x, mask=real)
    tl.store(out_ptr + request * WIDTH + channels, _silu(total), mask=real)


@triton.jit
def _loaded(qkv_ptr, window_at, first, places, channels, real, qkv_stride, WIDTH, WINDOW):
    """Inputs of these places of a request whose first token is `first`; those before it are in its window.
    [places, channels] float32."""
    behind = (places >= 0)[:, None] & real
    before = (places < 0)[:, None] & real
    qkv_at = qkv_ptr + (first + places)[:, None] * qkv_stride + channels[None, :]
    earlier_at = window_at + (places + WINDOW - 1)[:, None] * WIDTH + channels[None, :]
    x = tl.load(qkv_at, mask=behind, other=0.0).to(tl.float32)
    return x + tl.load(earlier_at, mask=before, other=0.0)


@triton.jit(do_not_specialize=[*_STEP_TENSORS, "before", "chunks"])
def convolve_kernel(
    qkv_ptr,  # [T, WIDTH]
    conv_ptr,
    windows_ptr,
    out_ptr,  # float32 [T, WIDTH]
    rows_ptr,
    starts_ptr,
    before,
    chunks,
    qkv_stride,
    window_stride,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (i, j): some channels of TOKENS tokens of one request."""
    request = tl.program_id(0) // chunks
    first = tl.load(starts_ptr + request).to(tl.int64) - before
    length = tl.load(starts_ptr + request + 1) - before - first
    start = tl.program_id(0) % chunks * TOKENS
    if start >= length:
        return
    row = tl.load(rows_ptr + request).to(tl.int64)
    window_at = windows_ptr + row * window_stride
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    places = start + tl.arange(0, TOKENS)
    real = (places < length)[:, None] & (channels < WIDTH)[None, :]
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for place in tl.static_range(WINDOW):
        at = places - (WINDOW - 1 - place)
        x = _loaded(qkv_ptr, window_at, first, at, channels, real, qkv_stride, WIDTH, WINDOW)
        weight = tl.load(conv_ptr + channels * WINDOW + place, mask=channels < WIDTH, other=0.0)
        total += x * weight[None, :]
    out_at = out_ptr + (first + places)[:, None] * WIDTH + channels[None, :]
    tl.store(out_at, _silu(total), mask=real)


@triton.jit(do_not_specialize=[*_STEP_TENSORS, "before"])
def keep_window_kernel(
    qkv_ptr,
    windows_ptr,
    rows_ptr,
    starts_ptr,
    before,
    qkv_stride,
    window_stride,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (i, j): the last inputs of a request become its window. A launch of its own: programs of the
    convolution read the window before."""
    request = tl.program_id(0)
    first = tl.load(starts_ptr + request).to(tl.int64) - before
    length = tl.load(starts_ptr + request + 1) - before - first
    row = tl.load(rows_ptr + request).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channels < WIDTH
    window_at = windows_ptr + row * window_stride + channels
    # In order: an earlier place of the window is never read again.
    for place in tl.static_range(WINDOW - 1):
        at = length - (WINDOW - 1) + place
        x = tl.load(qkv_ptr + (first + at) * qkv_stride + channels, mask=real & (at >= 0), other=0.0)
        earlier = tl.load(window_at + (at + WINDOW - 1) * WIDTH, mask=real & (at < 0), other=0.0)
        tl.store(window_at + place * WIDTH, x.to(tl.float32) + earlier, mask=real)


# ------------------------------------------------------------------------------------------------- delta rule


@triton.jit(do_not_specialize=["rows_ptr"])
def delta_step_kernel(
    mixed_ptr,  # float32 [requests, WIDTH]: q, k, v behind the convolution
    decay_ptr,  # [requests, HEADS]
    beta_ptr,
    matrices_ptr,  # float32 [rows, HEADS, KEY_DIM, VALUE_DIM]
    out_ptr,  # float32 [requests, HEADS, VALUE_DIM]
    rows_ptr,
    row_stride,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Program (i, j, l): some values of head j of the token of request i."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + request).to(tl.int64)
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    token_at = mixed_ptr + request * WIDTH
    key_at = token_at + head // SHARED * KEY_DIM + keys
    width = WIDTH - HEADS * VALUE_DIM  # of queries and keys
    q = tl.load(key_at, mask=is_key, other=0.0)
    k = tl.load(key_at + width // 2, mask=is_key, other=0.0)
    q *= tl.rsqrt(tl.sum(q * q, 0) + LEAST) * (KEY_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + LEAST)
    v = tl.load(token_at + width + head * VALUE_DIM + values, mask=is_value, other=0.0)
    decay = tl.exp(tl.load(decay_ptr + request * HEADS + head))
    beta = tl.load(beta_ptr + request * HEADS + head)
    at = matrices_ptr + row * row_stride + (head * KEY_DIM + keys)[:, None] * VALUE_DIM + values[None, :]
    real = is_key[:, None] & is_value[None, :]
    state = tl.load(at, mask=real, other=0.0) * decay
    change = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * change[None, :]
    tl.store(at, state, mask=real)
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + (request * HEADS + head) * VALUE_DIM + values, out, mask=is_value)


@triton.jit
def _unit(x, LEAST: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 1) + LEAST)[:, None]


@triton.jit
def _inverse(system, places, PRECISION: tl.constexpr):
    """Of ones and what lies below them in `system`, [64, 64]. Of the blocks of 16 on the diagonal row by row,
    all four at once: each row is one of its own and rows before it. With these blocks as B, and E = B times
    what is below the blocks, the inverse of the whole is (1 - E)(1 + E^2) B, since E^4 is 0."""
    below = tl.where(places[:, None] > places[None, :], system, 0.0)
    own_block = places[:, None] // 16 == places[None, :] // 16
    blocks, row = tl.arange(0, 4), tl.arange(0, 16)
    is_own = blocks[:, None, None, None] == blocks[None, None, :, None]
    solved = -tl.sum(tl.where(is_own, tl.reshape(below, (4, 16, 4, 16)), 0.0), 2)  # [block, row, column]
    for place in range(1, 16):
        is_row = (row == place)[None, :, None]
        own = tl.sum(tl.where(is_row, solved, 0.0), 1)
        own += tl.sum(tl.where((row < place)[None, :], own, 0.0)[:, :, None] * solved, 1)
        solved = tl.where(is_row, own[:, None, :], solved)
    solved += tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    whole = tl.where(is_own, tl.broadcast_to(solved[:, :, None, :], (4, 16, 4, 16)), 0.0)
    inverse = tl.reshape(whole, (64, 64))
    more = tl.dot(inverse, tl.where(own_block, 0.0, below), input_precision=PRECISION)
    inverse += tl.dot(tl.dot(more, more, input_precision=PRECISION), inverse, input_precision=PRECISION)
    return inverse - tl.dot(more, inverse, input_precision=PRECISION)


@triton.jit
def _queries_and_keys(at, width, by_key, KEY_DIM: tl.constexpr, LEAST: tl.constexpr):
    q = _unit(tl.load(at, mask=by_key, other=0.0), LEAST) * (KEY_DIM**-0.5)
    return q, _unit(tl.load(at + width // 2, mask=by_key, other=0.0), LEAST)


@triton.jit
def _decays(total, places):
    """What is left of each token of a chunk at each later one, and at itself."""
    seen = places[:, None] >= places[None, :]
    return tl.where(seen, tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=[*_STEP_TENSORS, "before", "chunks"])
def prepare_chunks_kernel(
    mixed_ptr,  # float32 [T, WIDTH]
    decay_ptr,  # [T, HEADS]
    beta_ptr,
    stored_ptr,  # float32 [T, HEADS, VALUE_DIM]: what tokens store, if the state before the chunk is zero
    taken_ptr,  # float32 [T, HEADS, KEY_DIM]: the keys under which they take from that state
    total_ptr,  # float32 [T, HEADS]: the decay since the chunk began
    starts_ptr,
    before,
    chunks,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, j): one chunk of one request, for head j."""
    request, head = tl.program_id(0) // chunks, tl.program_id(1)
    first = tl.load(starts_ptr + request).to(tl.int64) - before
    length = tl.load(starts_ptr + request + 1) - before - first
    start = tl.program_id(0) % chunks * CHUNK
    if start >= length:
        return
    places, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    tokens, is_token = first + start + places, start + places < length
    by_key = is_token[:, None] & (keys < KEY_DIM)[None, :]
    width = WIDTH - HEADS * VALUE_DIM
    key_at = mixed_ptr + tokens[:, None] * WIDTH + head // SHARED * KEY_DIM + keys[None, :]
    k = _unit(tl.load(key_at + width // 2, mask=by_key, other=0.0), LEAST)
    # A token behind the last has no decay and stores nothing.
    beta = tl.load(beta_ptr + tokens * HEADS + head, mask=is_token, other=0.0)
    total = tl.cumsum(tl.load(decay_ptr + tokens * HEADS + head, mask=is_token, other=0.0), 0)
    tl.store(total_ptr + tokens * HEADS + head, total, mask=is_token)
    system = tl.dot(k * beta[:, None], tl.trans(k), input_precision=PRECISION) * _decays(total, places)
    solved = _inverse(system, places, PRECISION)
    taken = tl.dot(solved, k * (beta * tl.exp(total))[:, None], input_precision=PRECISION)
    tl.store(taken_ptr + (tokens * HEADS + head)[:, None] * KEY_DIM + keys[None, :], taken, mask=by_key)
    for value in tl.static_range(0, VALUE_DIM, KEYS):
        values = value + keys
        by_value = is_token[:, None] & (values < VALUE_DIM)[None, :]
        value_at = mixed_ptr + tokens[:, None] * WIDTH + width + head * VALUE_DIM + values[None, :]
        v = tl.load(value_at, mask=by_value, other=0.0) * beta[:, None]
        stored = tl.dot(solved, v, input_precision=PRECISION)
        stored_at = stored_ptr + (tokens * HEADS + head)[:, None] * VALUE_DIM + values[None, :]
        tl.store(stored_at, stored, mask=by_value)


@triton.jit(do_not_specialize=[*_STEP_TENSORS, "before"])
def carry_state_kernel(
    mixed_ptr,
    stored_ptr,  # what tokens store, then with the state before their chunk
    taken_ptr,
    total_ptr,
    states_ptr,  # float32 [chunks, HEADS, KEY_DIM, VALUE_DIM]: before each chunk
    matrices_ptr,
    rows_ptr,
    starts_ptr,
    before,
    row_stride,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, j, l): all chunks of request i in order, for some values of head j."""
    request, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts_ptr + request).to(tl.int64) - before
    length = (tl.load(starts_ptr + request + 1) - before - first).to(tl.int32)
    row = tl.load(rows_ptr + request).to(tl.int64)
    places, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    real = is_key[:, None] & is_value[None, :]
    in_head = (head * KEY_DIM + keys)[:, None] * VALUE_DIM + values[None, :]
    state = tl.load(matrices_ptr + row * row_stride + in_head, mask=real, other=0.0)
    state_at = states_ptr + (first // CHUNK + request) * (HEADS * KEY_DIM * VALUE_DIM) + in_head
    width = WIDTH - HEADS * VALUE_DIM
    for start in range(0, length, CHUNK):
        tl.store(state_at, state, mask=real)
        state_at += HEADS * KEY_DIM * VALUE_DIM
        tokens, is_token = first + start + places, start + places < length
        by_head = tokens * HEADS + head
        by_key, by_value = is_token[:, None] & is_key[None, :], is_token[:, None] & is_value[None, :]
        key_at = mixed_ptr + tokens[:, None] * WIDTH + width // 2 + head // SHARED * KEY_DIM + keys[None, :]
        k = _unit(tl.load(key_at, mask=by_key, other=0.0), LEAST)
        last = tl.load(total_ptr + (first + tl.minimum(start + CHUNK, length) - 1) * HEADS + head)
        total = tl.load(total_ptr + by_head, mask=is_token, other=0.0)
        taken_at = taken_ptr + by_head[:, None] * KEY_DIM + keys[None, :]
        taken = tl.load(taken_at, mask=by_key, other=0.0)
        stored_at = stored_ptr + by_head[:, None] * VALUE_DIM + values[None, :]
        stored = tl.load(stored_at, mask=by_value, other=0.0)
        stored -= tl.dot(taken, state, input_precision=PRECISION)
        tl.store(stored_at, stored, mask=by_value)
        left = tl.where(is_token, tl.exp(last - total), 0.0)  # of what a token stores, at the chunk's end
        state = tl.dot(tl.trans(k * left[:, None]), stored, state * tl.exp(last), input_precision=PRECISION)
    tl.store(matrices_ptr + row * row_stride + in_head, state, mask=real)


@triton.jit(do_not_specialize=[*_STEP_TENSORS, "before", "chunks"])
def read_chunks_kernel(
    mixed_ptr,
    out_ptr,  # what tokens store, then what they return
    total_ptr,
    states_ptr,
    starts_ptr,
    before,
    chunks,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, j, l): some values of head j, read by one chunk of one request."""
    request, head = tl.program_id(0) // chunks, tl.program_id(1)
    first = tl.load(starts_ptr + request).to(tl.int64) - before
    length = tl.load(starts_ptr + request + 1) - before - first
    chunk = tl.program_id(0) % chunks
    start = chunk * CHUNK
    if start >= length:
        return
    places, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    tokens, is_token = first + start + places, start + places < length
    by_head = tokens * HEADS + head
    by_key, by_value = is_token[:, None] & is_key[None, :], is_token[:, None] & is_value[None, :]
    width = WIDTH - HEADS * VALUE_DIM
    key_at = mixed_ptr + tokens[:, None] * WIDTH + head // SHARED * KEY_DIM + keys[None, :]
    q, k = _queries_and_keys(key_at, width, by_key, KEY_DIM, LEAST)
    total = tl.load(total_ptr + by_head, mask=is_token, other=0.0)
    inside = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _decays(total, places)
    in_head = (head * KEY_DIM + keys)[:, None] * VALUE_DIM + values[None, :]
    state_at = states_ptr + (first // CHUNK + request + chunk) * (HEADS * KEY_DIM * VALUE_DIM) + in_head
    state = tl.load(state_at, mask=is_key[:, None] & is_value[None, :], other=0.0)
    out = tl.dot(q * tl.exp(total)[:, None], state, input_precision=PRECISION)
    out_at = out_ptr + by_head[:, None] * VALUE_DIM + values[None, :]
    stored = tl.load(out_at, mask=by_value, other=0.0)
    tl.store(out_at, tl.dot(inside, stored, out, input_precision=PRECISION), mask=by_value)

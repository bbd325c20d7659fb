# ruff: noqa: SIM102
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernels over one layer of the block-major arena. Own the arithmetic; `triton.py` chooses the kernel
and its tiles.

A value is found at slot * SLOT_STRIDE + token in block * TOKEN_STRIDE + kv head * HEAD_STRIDE + value,
counted from the layer's keys or values in slot 0. Slots are widened to 64 bits first: an arena holds more
values than 32 bits can count. Upper case marks what is fixed at compile time. Kernels are not specialised on
numbers and index tensors that change between steps, so that no step compiles anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STEP_TENSORS = [
    "q_starts_ptr",
    "kv_lens_ptr",
    "table_starts_ptr",
    "tables_ptr",
    "positions_ptr",
    "write_at_ptr",
]
_STEP_NUMBERS = ["first_chunk", "first_row", "num_rows", "num_splits", "first_key", "num_tokens", "chunk"]


@triton.jit(do_not_specialize=_STEP_TENSORS + _STEP_NUMBERS)
def rotate_and_write_kernel(
    qkv_ptr,  # [T, (heads + 2 * kv heads) * HEAD_DIM]
    q_ptr,  # [T, heads, HEAD_DIM]
    k_ptr,  # [T, kv heads, HEAD_DIM]
    k_cache_ptr,
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    rope_ptr,  # float32 [positions, HEAD_DIM]: cos, then sin
    positions_ptr,
    write_at_ptr,
    num_tokens,
    norm_eps,
    SLOT_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMALISE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Program (i, j): tokens of tile i, and TILE_HEADS of all heads of q, k and v from j * TILE_HEADS on,
    under one loaded rotation."""
    HALF: tl.constexpr = HEAD_DIM // 2
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    dims = tl.arange(0, HALF_PADDED)
    real = tokens < num_tokens
    inside = real[:, None] & (dims < HALF)[None, :]
    positions = tl.load(positions_ptr + tokens, mask=real, other=0)
    cos = tl.load(rope_ptr + positions[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    sin = tl.load(rope_ptr + positions[:, None] * HEAD_DIM + HALF + dims[None, :], mask=inside, other=0.0)
    at = tl.load(write_at_ptr + tokens, mask=real, other=0)
    cache_rows = (at // BLOCK_TOKENS).to(tl.int64) * SLOT_STRIDE + (at % BLOCK_TOKENS) * TOKEN_STRIDE
    tokens = tokens.to(tl.int64)
    for i in range(TILE_HEADS):
        head = tl.program_id(1) * TILE_HEADS + i
        if head < ALL_HEADS:
            source = qkv_ptr + (tokens * (ALL_HEADS * HEAD_DIM) + head * HEAD_DIM)[:, None] + dims[None, :]
            first = tl.load(source, mask=inside, other=0.0)
            second = tl.load(source + HALF, mask=inside, other=0.0)
            if head < NUM_HEADS + NUM_KV_HEADS:
                x = first.to(tl.float32)
                y = second.to(tl.float32)
                if NORMALISE:
                    weight_ptr = q_norm_ptr if head < NUM_HEADS else k_norm_ptr
                    factor = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + norm_eps)
                    x = (
                        x
                        * factor[:, None]
                        * tl.load(weight_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
                    )
                    y = (
                        y
                        * factor[:, None]
                        * tl.load(weight_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[
                            None, :
                        ]
                    )
                first = (x * cos - y * sin).to(qkv_ptr.dtype.element_ty)
                second = (y * cos + x * sin).to(qkv_ptr.dtype.element_ty)
            if head < NUM_HEADS:
                target = q_ptr + (tokens * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM)[:, None] + dims[None, :]
                tl.store(target, first, mask=inside)
                tl.store(target + HALF, second, mask=inside)
            elif head < NUM_HEADS + NUM_KV_HEADS:
                own = head - NUM_HEADS
                target = (
                    k_ptr + (tokens * (NUM_KV_HEADS * HEAD_DIM) + own * HEAD_DIM)[:, None] + dims[None, :]
                )
                tl.store(target, first, mask=inside)
                tl.store(target + HALF, second, mask=inside)
                cached = k_cache_ptr + (cache_rows + own * HEAD_STRIDE)[:, None] + dims[None, :]
                tl.store(cached, first, mask=inside)
                tl.store(cached + HALF, second, mask=inside)
            else:
                own = head - NUM_HEADS - NUM_KV_HEADS
                cached = v_cache_ptr + (cache_rows + own * HEAD_STRIDE)[:, None] + dims[None, :]
                tl.store(cached, first, mask=inside)
                tl.store(cached + HALF, second, mask=inside)


@triton.jit
def _cached_tile(
    cache_ptr, rows, dims, valid, DIMS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr
):
    """[keys, DIMS_PADDED] of one KV head. If masked, invalid keys are not read and count as zero."""
    pointers = cache_ptr + rows[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=valid[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif DIMS_PADDED != HEAD_DIM:  # noqa: RET505  (both branches are compile-time)
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _slots_of(table_ptr, begin, end, BLOCK_TOKENS: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Slot of each key of the tile from `begin`; entries after the last key are not read."""
    keys = begin + tl.arange(0, TILE_KEYS)
    return tl.load(table_ptr + keys // BLOCK_TOKENS, mask=keys < end, other=0)


@triton.jit
def _attend_tile(
    acc,
    largest,
    total,
    q,
    last_visible,  # [rows] position of the last key that a row sees
    slots,  # [keys] that hold the tile's keys
    begin,
    end,
    k_cache_ptr,  # of this KV head
    v_cache_ptr,
    scale_log2,
    SLOT_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SKIPS_BLANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of online softmax: keys begin..begin + TILE_KEYS, only those before `end` exist. All in powers
    of two."""
    keys = begin + tl.arange(0, TILE_KEYS)
    dims = tl.arange(0, DIMS_PADDED)
    exists = keys < end
    rows = slots.to(tl.int64) * SLOT_STRIDE + (keys % BLOCK_TOKENS) * TOKEN_STRIDE
    k = _cached_tile(k_cache_ptr, rows, dims, exists, DIMS_PADDED, HEAD_DIM, MASKED)
    # Scores stay unscaled until the exponent, where scaling and subtracting are one instruction; `largest` is
    # in scaled units.
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(keys[None, :] <= last_visible[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(keys[None, :] > last_visible[:, None] - WINDOW, scores, float("-inf"))
    if SKIPS_BLANK:  # only a key of zeros has this score with every query
        scores = tl.where(scores == 0.0, float("-inf"), scores)
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
    if MASKED or SKIPS_BLANK:
        # A row without keys so far keeps -inf as its largest; zero in its place avoids subtracting
        # infinities.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    else:
        base = new_largest
    p = tl.exp2(scores * scale_log2 - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(p, 1)
    v = _cached_tile(v_cache_ptr, rows, dims, exists, DIMS_PADDED, HEAD_DIM, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_largest, total


@triton.jit(do_not_specialize=_STEP_TENSORS + _STEP_NUMBERS)
def paged_attention_kernel(
    q_ptr,  # [T, heads, HEAD_DIM]
    out_ptr,  # [num_rows, heads, HEAD_DIM], or float32 [num_splits, num_rows, heads, HEAD_DIM] where split
    lse_ptr,  # float32 [num_splits, num_rows, heads] where split or wanted: log2 of the sum of powers
    k_cache_ptr,
    v_cache_ptr,
    q_starts_ptr,
    kv_lens_ptr,
    table_starts_ptr,
    tables_ptr,
    first_chunk,
    first_row,  # token that is row 0 of the output
    num_rows,
    num_splits,
    first_key,  # earlier keys are attended elsewhere; a multiple of TILE_KEYS
    scale_log2,
    SLOT_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WITH_LSE: tl.constexpr,
    WINDOW: tl.constexpr,
    SKIPS_BLANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, j, c * num_splits + s): KV head j of chunk c, for its i-th tile of tokens counted from the
    end, over share s of the keys.

    A row of the tile is one query head of one token, all heads of the KV head side by side, so that a key is
    loaded once for all of them. Decode is the case of one token. Later tokens see more keys, so they start
    first. With a WINDOW a token sees that many keys, its own included; keys that no token of the tile sees
    are not read. SKIPS_BLANK: keys that are all zeros are masked.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = first_chunk + tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    q_begin = tl.load(q_starts_ptr + chunk)
    q_len = tl.load(q_starts_ptr + chunk + 1) - q_begin
    if tile * TILE_TOKENS >= q_len:
        return
    kv_len = tl.load(kv_lens_ptr + chunk)
    rows = tl.arange(0, TILE_ROWS)
    tokens = tile * TILE_TOKENS + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    real = (rows < TILE_TOKENS * GROUP) & (tokens < q_len)
    last_visible = kv_len - q_len + tokens

    # Keys visible to some row of the tile end at key_end; those up to the first token's own are visible to
    # every row.
    key_end = kv_len - q_len + tl.minimum((tile + 1) * TILE_TOKENS, q_len)
    key_begin = first_key
    if WINDOW:
        key_begin = (
            tl.maximum(kv_len - q_len + tile * TILE_TOKENS + 1 - WINDOW, key_begin) // TILE_KEYS * TILE_KEYS
        )
    share = tl.cdiv(tl.cdiv(key_end - key_begin, TILE_KEYS), num_splits) * TILE_KEYS
    begin = tl.minimum(key_begin + split * share, key_end)
    end = tl.minimum(begin + share, key_end)
    all_visible = (kv_len - q_len + tile * TILE_TOKENS + 1) // TILE_KEYS * TILE_KEYS
    middle = tl.maximum(begin, tl.minimum(end, all_visible))
    # From here on keys are visible to every row, even the last one, whose window begins last.
    inside_from = begin
    if WINDOW:
        inside_from = tl.minimum(
            middle, tl.maximum(begin, tl.cdiv(tl.maximum(key_end - WINDOW, 0), TILE_KEYS) * TILE_KEYS)
        )

    dims = tl.arange(0, DIMS_PADDED)
    out_rows = (
        (split * num_rows + (q_begin - first_row) + tokens).to(tl.int64) * NUM_HEADS + heads
    ) * HEAD_DIM
    lse_at = lse_ptr + (split * num_rows + (q_begin - first_row) + tokens).to(tl.int64) * NUM_HEADS + heads
    if SPLIT:
        if begin >= end:  # the outer condition is decided at compile time
            tl.store(lse_at, tl.full([TILE_ROWS], float("-inf"), tl.float32), mask=real)
            return
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = ((q_begin + tokens).to(tl.int64) * NUM_HEADS + heads) * HEAD_DIM
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=inside, other=0.0)
    table_ptr = tables_ptr + tl.load(table_starts_ptr + chunk)
    keys_ptr = k_cache_ptr + kv_head * HEAD_STRIDE
    values_ptr = v_cache_ptr + kv_head * HEAD_STRIDE
    acc = tl.zeros([TILE_ROWS, DIMS_PADDED], tl.float32)
    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    # The table is read one tile ahead and carried, so that the pipeline of key loads never waits for it.
    slots = _slots_of(table_ptr, begin, end, BLOCK_TOKENS, TILE_KEYS)
    # fmt: off
    if WINDOW:
        for start in range(begin, inside_from, TILE_KEYS):
            next_slots = _slots_of(table_ptr, start + TILE_KEYS, end, BLOCK_TOKENS, TILE_KEYS)
            acc, largest, total = _attend_tile(
                acc, largest, total, q, last_visible, slots, start, end, keys_ptr, values_ptr, scale_log2,
                SLOT_STRIDE, TOKEN_STRIDE, HEAD_DIM, DIMS_PADDED, BLOCK_TOKENS, TILE_KEYS, True, WINDOW,
                SKIPS_BLANK, PRECISION,
            )
            slots = next_slots
    for start in range(inside_from, middle, TILE_KEYS):
        next_slots = _slots_of(table_ptr, start + TILE_KEYS, end, BLOCK_TOKENS, TILE_KEYS)
        acc, largest, total = _attend_tile(
            acc, largest, total, q, last_visible, slots, start, end, keys_ptr, values_ptr, scale_log2,
            SLOT_STRIDE, TOKEN_STRIDE, HEAD_DIM, DIMS_PADDED, BLOCK_TOKENS, TILE_KEYS, False, 0, SKIPS_BLANK,
            PRECISION,
        )
        slots = next_slots
    for start in range(middle, end, TILE_KEYS):
        next_slots = _slots_of(table_ptr, start + TILE_KEYS, end, BLOCK_TOKENS, TILE_KEYS)
        acc, largest, total = _attend_tile(
            acc, largest, total, q, last_visible, slots, start, end, keys_ptr, values_ptr, scale_log2,
            SLOT_STRIDE, TOKEN_STRIDE, HEAD_DIM, DIMS_PADDED, BLOCK_TOKENS, TILE_KEYS, True, WINDOW,
            SKIPS_BLANK, PRECISION,
        )
        slots = next_slots
    # fmt: on
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + out_rows[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    if SPLIT or WITH_LSE:
        tl.store(lse_at, tl.where(total == 0.0, float("-inf"), largest + tl.log2(total)), mask=real)


@triton.jit(do_not_specialize=_STEP_NUMBERS)
def merge_splits_kernel(
    partial_ptr,  # float32 [num_splits, num_rows, heads, HEAD_DIM]
    lse_ptr,  # float32 [num_splits, num_rows, heads]
    out_ptr,  # [num_rows, heads, HEAD_DIM]
    out_lse_ptr,  # float32 [num_rows, heads] where wanted
    num_rows,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Program (row, head): the splits of one query head, weighted by their sums. A split without keys was
    never written and is not read."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, DIMS_PADDED)
    at = (splits * num_rows + row) * NUM_HEADS + head
    lse = tl.load(lse_ptr + at, mask=splits < num_splits, other=float("-inf"))
    has_keys = lse != float("-inf")  # a NaN counts, so that it propagates
    largest = tl.max(lse, 0)
    weights = tl.where(has_keys, tl.exp2(lse - tl.where(largest > float("-inf"), largest, 0.0)), 0.0)
    partial = tl.load(
        partial_ptr + at[:, None] * HEAD_DIM + dims[None, :],
        mask=has_keys[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    merged = tl.sum(partial * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    target = out_ptr + (row * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    if WITH_LSE:
        tl.store(out_lse_ptr + row * NUM_HEADS + head, largest + tl.log2(total))


@triton.jit(do_not_specialize=_STEP_TENSORS + _STEP_NUMBERS)
def gather_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,  # [num_tokens, kv heads, HEAD_DIM]
    v_ptr,
    table_starts_ptr,
    tables_ptr,
    chunk,
    first_key,
    num_tokens,
    SLOT_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Program i of n: tiles i, i + n, ... of `num_tokens` cached tokens of a chunk from `first_key` on, all
    their KV heads, into contiguous memory."""
    values = tl.arange(0, WIDTH_PADDED)
    table_ptr = tables_ptr + tl.load(table_starts_ptr + chunk)
    for first in range(tl.program_id(0) * TILE_TOKENS, num_tokens, tl.num_programs(0) * TILE_TOKENS):
        tokens = first + tl.arange(0, TILE_TOKENS)
        real = tokens < num_tokens
        inside = real[:, None] & (values < NUM_KV_HEADS * HEAD_DIM)[None, :]
        keys = first_key + tokens
        slots = tl.load(table_ptr + keys // BLOCK_TOKENS, mask=real, other=0)
        source = (slots.to(tl.int64) * SLOT_STRIDE + (keys % BLOCK_TOKENS) * TOKEN_STRIDE)[:, None]
        if HEAD_STRIDE == HEAD_DIM:
            source += values[None, :]
        else:
            source += (values // HEAD_DIM * HEAD_STRIDE + values % HEAD_DIM)[None, :]
        target = (tokens.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM))[:, None] + values[None, :]
        tl.store(k_ptr + target, tl.load(k_cache_ptr + source, mask=inside, other=0.0), mask=inside)
        tl.store(v_ptr + target, tl.load(v_cache_ptr + source, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_past"])
def join_kernel(
    own_ptr,  # [num_tokens, heads, HEAD_DIM]; the result is written here
    own_lse_ptr,  # float32 [num_tokens, heads], log2; the result's is written here
    past_ptr,  # [num_past, heads, HEAD_DIM]
    past_lse_ptr,  # float32 [heads, num_past], natural logarithm
    num_tokens,
    num_past,  # at least num_tokens: the rest is padding
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Program i: merges attention over two disjoint sets of keys. A row of its tile is one head of one
    token."""
    rows = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    dims = tl.arange(0, DIMS_PADDED)
    real = rows < num_tokens.to(tl.int64) * NUM_HEADS
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    own_lse = tl.load(own_lse_ptr + rows, mask=real, other=0.0)
    past_lse = (
        tl.load(past_lse_ptr + rows % NUM_HEADS * num_past + rows // NUM_HEADS, mask=real, other=0.0)
        * 1.4426950408889634
    )
    largest = tl.maximum(own_lse, past_lse)
    past_share = tl.exp2(past_lse - largest)
    total = tl.exp2(own_lse - largest) + past_share
    at = rows[:, None] * HEAD_DIM + dims[None, :]
    own = tl.load(own_ptr + at, mask=inside, other=0.0).to(tl.float32)
    past = tl.load(past_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        own_ptr + at,
        (own + (past_share / total)[:, None] * (past - own)).to(own_ptr.dtype.element_ty),
        mask=inside,
    )
    tl.store(own_lse_ptr + rows, largest + tl.log2(total), mask=real)

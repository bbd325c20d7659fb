# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The experts of a layer for CUDA: router, choice, and one launch for each of the two grouped products. Owns
no weights.

A pair is a token and one of its experts, number token * TOP_K + rank. Pairs of one expert are computed
together, so that its weights are read once:

    one token    router, choose          gated, down   a program has a pair to itself
    few pairs    router, choose          gated, down   a program finds the pairs of its expert among all
    many pairs   router, choose, place   gated, down   `place` sorts pairs by expert, and programs take tiles

Launches depend on shapes alone: no count comes back to the host, so a step can be captured. What a token's
experts return is one share per rank, which the norm behind sums in that order (`LayerOps.add_rms_norm`): no
sum depends on the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.models.model import Experts, GroupedRouting, Routing

Sized = TypeVar("Sized")


class RouterTile(NamedTuple):
    """What one program of the router holds."""

    rows: int
    shares: int  # parts of the input that logits are computed from


# Values of the input that a program of the router holds at a time; fewer if there are so many experts, or
# numbers so wide, that they would not fit into a multiprocessor's memory.
ROUTER_DEPTH = 128
ROUTER_STAGES = 3  # tiles of the router in flight
ROUTER_BYTES = 224 << 10
# by tokens at most; the last is for all larger ones
ROUTER_TILES = {16: RouterTile(16, 16), 512: RouterTile(16, 8), 1024: RouterTile(64, 2)}
PLACED = {1024: 8, 2048: 32}  # tokens that a program places, by tokens at most as well
PLACE_TILES = 16  # whose counts a program reads at a time


class ExpertTile(NamedTuple):
    """What one program of a grouped product holds at a time."""

    rows: int  # pairs
    columns: int  # of the output; so many rows of the weights, or of gate's and of up's
    depth: int
    warps: int
    stages: int  # tiles of weights in flight
    weights_left: bool = True  # weights are the left side of the products


class ExpertPlan(NamedTuple):
    """How a step's experts are computed. Tiles of both products have as many rows."""

    gated: ExpertTile
    down: ExpertTile
    is_sorted: bool = True


class PairTile(NamedTuple):
    """What one program of a product for a single token holds: whole rows of weights, all at once."""

    values: int  # of each of its matrices
    warps: int


# Measured on an H200 with Qwen3-30B-A3B's shape.
FEW_PAIRS = 512
FEW = ExpertPlan(ExpertTile(16, 64, 128, 4, 4), ExpertTile(16, 256, 64, 4, 3), is_sorted=False)
# By pairs per expert at most, on average; the last is for all larger ones.
SORTED = {
    16: ExpertPlan(ExpertTile(16, 64, 128, 4, 4), ExpertTile(16, 128, 128, 4, 3)),
    64: ExpertPlan(ExpertTile(64, 128, 64, 8, 3), ExpertTile(64, 256, 64, 8, 3, False)),
    128: ExpertPlan(ExpertTile(128, 128, 64, 8, 3), ExpertTile(128, 256, 64, 8, 3, False)),
}
GATED_PAIR, DOWN_PAIR = PairTile(8192, 4), PairTile(4096, 4)


@triton.jit(do_not_specialize=["num_rows"])
def router_kernel(
    x_ptr,  # [num_rows, WIDTH]
    router_ptr,  # [NUM, WIDTH]
    out_ptr,  # float32 [shares, num_rows, NUM]
    num_rows,
    WIDTH: tl.constexpr,
    NUM: tl.constexpr,
    PADDED: tl.constexpr,
    SHARE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (i, j): the logits of its tokens, from the SHARE values of the input from j * SHARE on."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first = tl.program_id(1) * SHARE
    experts = tl.arange(0, PADDED)
    depths = tl.arange(0, DEPTH)
    total = tl.zeros([TILE_ROWS, PADDED], tl.float32)
    for start in range(first, first + SHARE, DEPTH):
        inside = (start + depths < WIDTH)[None, :]
        x_at = x_ptr + rows[:, None] * WIDTH + start + depths[None, :]
        router_at = router_ptr + experts[:, None] * WIDTH + start + depths[None, :]
        x = tl.load(x_at, mask=(rows < num_rows)[:, None] & inside, other=0.0)
        router = tl.load(router_at, mask=(experts < NUM)[:, None] & inside, other=0.0)
        total = tl.dot(x, tl.trans(router), total, input_precision=PRECISION)
    out_at = out_ptr + (tl.program_id(1) * num_rows + rows)[:, None] * NUM + experts[None, :]
    tl.store(out_at, total, mask=(rows < num_rows)[:, None] & (experts < NUM)[None, :])


@triton.jit
def _summed_logits(
    logits_ptr,
    rows,
    num_rows,
    NUM: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """[TILE_ROWS, PADDED], none of them a NaN."""
    inside = (rows < num_rows)[:, None]
    experts = tl.arange(0, PADDED)[None, :]
    logits = tl.zeros([TILE_ROWS, PADDED], tl.float32)
    for share in tl.static_range(NUM_SHARES):
        at = logits_ptr + (share * num_rows + rows)[:, None] * NUM + experts
        logits += tl.load(at, mask=inside & (experts < NUM), other=0.0)
    return tl.where(logits > -3.0e38, logits, -3.0e38)  # a NaN is not


@triton.jit
def _sorting_keys(values, experts, NUM: tl.constexpr, PADDED: tl.constexpr):
    """Keys sort as values do, and of equal values the first expert is the largest."""
    bits = values.to(tl.int32, bitcast=True)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (PADDED - 1 - experts).to(tl.int64)
    return tl.where(experts < NUM, keys, -0x8000000000000000)


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    logits_ptr,  # float32 [NUM_SHARES, num_rows, NUM]
    ids_ptr,  # int32 [num_rows, TOP_K]: the experts of each token, the likeliest first
    weights_ptr,  # float32 [num_rows, TOP_K]
    counts_ptr,  # int32 [programs, PADDED]: pairs of each expert in each tile of tokens
    num_rows,
    NUM: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    NORMALISED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Ids are different experts that exist, whatever the logits are: a step that is padded computes rows of
    arbitrary content."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inside = (rows < num_rows)[:, None]
    experts = tl.arange(0, PADDED)[None, :]
    ranks = tl.arange(0, PADDED_K)[None, :]
    logits = _summed_logits(logits_ptr, rows, num_rows, NUM, PADDED, NUM_SHARES, TILE_ROWS)
    keys = _sorting_keys(logits, experts, NUM, PADDED)
    ids = tl.zeros([TILE_ROWS, PADDED_K], tl.int32)
    best_logits = tl.full([TILE_ROWS, PADDED_K], float("-inf"), tl.float32)
    taken = tl.zeros([TILE_ROWS, PADDED], tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        bits = (best >> 32).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        id = PADDED - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        ids = tl.where(ranks == rank, id, ids)
        best_logits = tl.where(ranks == rank, bits.to(tl.float32, bitcast=True), best_logits)
        taken += (keys == best).to(tl.int32)
        keys = tl.where(keys == best, -0x8000000000000000, keys)
    largest = tl.max(best_logits, 1)[:, None]
    weights = tl.exp(best_logits - largest)
    if NORMALISED:
        weights /= tl.sum(weights, 1)[:, None]
    else:
        weights /= tl.sum(tl.where(experts < NUM, tl.exp(logits - largest), 0.0), 1)[:, None]
    out = rows[:, None] * TOP_K + ranks
    tl.store(ids_ptr + out, ids, mask=inside & (ranks < TOP_K))
    tl.store(weights_ptr + out, weights, mask=inside & (ranks < TOP_K))
    counts = tl.sum(tl.where(inside, taken, 0), 0)
    tl.store(counts_ptr + tl.program_id(0) * PADDED + tl.arange(0, PADDED), counts)


@triton.jit
def _best_groups(
    wanted,  # float32 [TILE_ROWS, PADDED]
    NUM: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """[TILE_ROWS, PADDED]: 1 for the experts of the groups whose best two have the largest sums."""
    SIZE: tl.constexpr = NUM // NUM_GROUPS
    experts = tl.arange(0, PADDED)[None, :]
    groups = tl.arange(0, PADDED_GROUPS)[None, :]
    sums = tl.full([TILE_ROWS, PADDED_GROUPS], float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        own = tl.where(experts // SIZE == group, wanted, float("-inf"))
        first = tl.max(own, 1)[:, None]
        at = tl.min(tl.where(own == first, experts, PADDED), 1)[:, None]
        second = tl.max(tl.where(experts == at, float("-inf"), own), 1)[:, None]
        sums = tl.where(groups == group, first + second, sums)
    is_in = tl.zeros([TILE_ROWS, PADDED], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(sums, 1)[:, None]
        at = tl.min(tl.where(sums == best, groups, PADDED_GROUPS), 1)[:, None]
        is_in = tl.where(experts // SIZE == at, 1, is_in)
        sums = tl.where(groups == at, float("-inf"), sums)
    return is_in


@triton.jit(do_not_specialize=["num_rows"])
def choose_grouped_kernel(
    logits_ptr,  # as for `choose_kernel`, up to `num_rows`
    ids_ptr,
    weights_ptr,
    counts_ptr,
    num_rows,
    bias_ptr,  # float32 [NUM]
    scale,
    NUM: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    NORMALISED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
):
    """As `choose_kernel`, by the rule of `GroupedRouting`. The order of a token's experts is that of the sums
    with the bias."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inside = (rows < num_rows)[:, None]
    experts = tl.arange(0, PADDED)[None, :]
    ranks = tl.arange(0, PADDED_K)[None, :]
    logits = _summed_logits(logits_ptr, rows, num_rows, NUM, PADDED, NUM_SHARES, TILE_ROWS)
    shares = 1.0 / (1.0 + tl.exp(-logits))
    wanted = shares + tl.load(bias_ptr + experts, mask=experts < NUM, other=0.0)
    if NUM_GROUPS > 1:
        is_in = _best_groups(wanted, NUM, PADDED, NUM_GROUPS, TOP_GROUPS, PADDED_GROUPS, TILE_ROWS)
        wanted = tl.where(is_in == 1, wanted, -3.3e38)
    keys = _sorting_keys(wanted, experts, NUM, PADDED)
    ids = tl.zeros([TILE_ROWS, PADDED_K], tl.int32)
    weights = tl.zeros([TILE_ROWS, PADDED_K], tl.float32)
    taken = tl.zeros([TILE_ROWS, PADDED], tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        is_best = keys == best
        ids = tl.where(ranks == rank, PADDED - 1 - (best & 0xFFFFFFFF).to(tl.int32), ids)
        share = tl.sum(tl.where(is_best, shares, 0.0), 1)[:, None]
        weights = tl.where(ranks == rank, share, weights)
        taken += is_best.to(tl.int32)
        keys = tl.where(is_best, -0x8000000000000000, keys)
    if NORMALISED:
        weights /= tl.sum(weights, 1)[:, None] + 1e-20  # `LEAST_SUM`
    out = rows[:, None] * TOP_K + ranks
    tl.store(ids_ptr + out, ids, mask=inside & (ranks < TOP_K))
    tl.store(weights_ptr + out, weights * scale, mask=inside & (ranks < TOP_K))
    counts = tl.sum(tl.where(inside, taken, 0), 0)
    tl.store(counts_ptr + tl.program_id(0) * PADDED + tl.arange(0, PADDED), counts)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def place_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,  # int32 [pairs]: pairs by expert, those of one expert in the order of tokens
    bounds_ptr,  # int32 [2, PADDED]: where each expert's pairs begin and end in it
    num_rows,
    num_tiles,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program i: the places of the pairs of tile i."""
    tile = tl.program_id(0)
    experts = tl.arange(0, PADDED)
    total = tl.zeros([PADDED], tl.int32)
    before = tl.zeros([PADDED], tl.int32)
    for first in range(0, num_tiles, AT_ONCE):
        tiles = (first + tl.arange(0, AT_ONCE))[:, None]
        counts = tl.load(counts_ptr + tiles * PADDED + experts[None, :], mask=tiles < num_tiles, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(tiles < tile, counts, 0), 0)
    begin = tl.cumsum(total, 0) - total
    if tile == 0:
        tl.store(bounds_ptr + experts, begin)
        tl.store(bounds_ptr + PADDED + experts, begin + total)
    rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    taken = tl.zeros([TILE_ROWS, PADDED], tl.int32)
    for rank in tl.static_range(TOP_K):
        id = tl.load(ids_ptr + rows * TOP_K + rank, mask=rows < num_rows, other=PADDED)
        taken += (id[:, None] == experts[None, :]).to(tl.int32)
    places = (begin + before)[None, :] + tl.cumsum(taken, 0) - taken
    for rank in tl.static_range(TOP_K):
        id = tl.load(ids_ptr + rows * TOP_K + rank, mask=rows < num_rows, other=PADDED)
        place = tl.sum(tl.where(id[:, None] == experts[None, :], places, 0), 1)
        tl.store(order_ptr + place, rows * TOP_K + rank, mask=rows < num_rows)


@triton.jit
def _sorted_rows(order_ptr, bounds_ptr, tile, PADDED: tl.constexpr, TILE_ROWS: tl.constexpr):
    """The expert of tile `tile`, its pairs, their places in the order, which of them there are, and whether
    there are none."""
    experts = tl.arange(0, PADDED)
    begins = tl.load(bounds_ptr + experts)
    ends = tl.load(bounds_ptr + PADDED + experts)
    tiles = (ends - begins + TILE_ROWS - 1) // TILE_ROWS
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)  # PADDED: there are fewer tiles
    own = experts == expert
    begin = tl.sum(tl.where(own, begins + (tile - behind + tiles) * TILE_ROWS, 0), 0)
    end = tl.sum(tl.where(own, ends, 0), 0)
    places = begin + tl.arange(0, TILE_ROWS)
    inside = places < end
    places = tl.where(inside, places, 0)
    return expert, tl.load(order_ptr + places), places, inside, begin >= end


@triton.jit
def _found_rows(ids_ptr, num_pairs, pair, PAIRS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """As `_sorted_rows`: the expert of pair `pair`, and its pairs from this one on. Only every TILE_ROWS-th
    pair of an expert begins a tile."""
    pairs = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    expert = tl.load(ids_ptr + pair)
    same = (ids == expert).to(tl.int32)
    before = tl.sum(tl.where(pairs < pair, same, 0), 0)
    wanted = before + tl.arange(0, TILE_ROWS)
    numbers = tl.cumsum(same, 0) * same - 1  # among the pairs of this expert; -1: not one of them
    is_it = numbers[None, :] == wanted[:, None]
    rows = tl.sum(tl.where(is_it, pairs[None, :], 0), 1)
    return expert, rows, rows, wanted < tl.sum(same, 0), before % TILE_ROWS != 0


@triton.jit
def _tile_of(
    ids_ptr,
    order_ptr,
    bounds_ptr,
    num_pairs,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """The expert of this program, its pairs, their rows between the two products, which of them there are,
    and whether the program has none."""
    if SORTED:
        found = _sorted_rows(order_ptr, bounds_ptr, tl.program_id(1), PADDED, TILE_ROWS)
    else:
        found = _found_rows(ids_ptr, num_pairs, tl.program_id(1), PAIRS, TILE_ROWS)
    return found


@triton.jit
def _loaded(at, inside, EVEN: tl.constexpr):
    if EVEN:
        loaded = tl.load(at)
    else:
        loaded = tl.load(at, mask=inside, other=0.0)
    return loaded


@triton.jit
def _added(weight, x, total, WEIGHTS_LEFT: tl.constexpr, PRECISION: tl.constexpr):
    """`total` and the product of `weight` [columns, depth] and `x` [rows, depth]."""
    if WEIGHTS_LEFT:
        total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["num_pairs"])
def gated_experts_kernel(
    x_ptr,  # [tokens, WIDTH]
    weight_ptr,  # [slots, 2 * FFN, WIDTH]: gate's rows, then up's
    out_ptr,  # [num_pairs, FFN], in the order of the tiles' rows
    slots_ptr,
    ids_ptr,
    order_ptr,
    bounds_ptr,
    num_pairs,
    WIDTH: tl.constexpr,
    FFN: tl.constexpr,
    TOP_K: tl.constexpr,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, j): its columns of silu(gate) * up for the pairs of tile j."""
    EVEN: tl.constexpr = WIDTH % DEPTH == 0 and FFN % TILE_COLUMNS == 0
    expert, pairs, rows, inside, is_empty = _tile_of(
        ids_ptr, order_ptr, bounds_ptr, num_pairs, SORTED, PAIRS, PADDED, TILE_ROWS
    )
    if is_empty:
        return
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    depths = tl.arange(0, DEPTH)
    slot = tl.load(slots_ptr + expert).to(tl.int64)
    x_at = x_ptr + (pairs // TOP_K)[:, None] * WIDTH + depths[None, :]
    gate_at = weight_ptr + slot * (2 * FFN * WIDTH) + columns[:, None] * WIDTH + depths[None, :]
    if slot < 0:
        return
    if WEIGHTS_LEFT:
        gate = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
        up = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    else:
        gate = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        up = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        deep = (start + depths < WIDTH)[None, :]
        x = _loaded(x_at + start, deep, EVEN)
        is_real = deep & (columns < FFN)[:, None]
        gate = _added(_loaded(gate_at + start, is_real, EVEN), x, gate, WEIGHTS_LEFT, PRECISION)
        up_weight = _loaded(gate_at + FFN * WIDTH + start, is_real, EVEN)
        up = _added(up_weight, x, up, WEIGHTS_LEFT, PRECISION)
    out = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    if WEIGHTS_LEFT:
        out = tl.trans(out)
    at = out_ptr + rows[:, None].to(tl.int64) * FFN + columns[None, :]
    tl.store(at, out, mask=inside[:, None] & (columns < FFN)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def down_experts_kernel(
    x_ptr,  # [num_pairs, FFN]: what `gated_experts_kernel` wrote
    weight_ptr,  # [slots, WIDTH, FFN]
    shares_ptr,  # float32 [num_pairs]: the router's weights
    out_ptr,  # [TOP_K, num_tokens, WIDTH]
    slots_ptr,
    ids_ptr,
    order_ptr,
    bounds_ptr,
    num_pairs,
    num_tokens,
    WIDTH: tl.constexpr,
    FFN: tl.constexpr,
    TOP_K: tl.constexpr,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, j): its columns of what the expert of tile j returns, weighted, each pair in the share of
    its rank."""
    EVEN: tl.constexpr = FFN % DEPTH == 0 and WIDTH % TILE_COLUMNS == 0
    expert, pairs, rows, inside, is_empty = _tile_of(
        ids_ptr, order_ptr, bounds_ptr, num_pairs, SORTED, PAIRS, PADDED, TILE_ROWS
    )
    if is_empty:
        return
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    depths = tl.arange(0, DEPTH)
    slot = tl.load(slots_ptr + expert).to(tl.int64)
    x_at = x_ptr + rows[:, None].to(tl.int64) * FFN + depths[None, :]
    weight_at = weight_ptr + slot * (WIDTH * FFN) + columns[:, None] * FFN + depths[None, :]
    if slot < 0:
        return
    if WEIGHTS_LEFT:
        total = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    else:
        total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, FFN, DEPTH):
        deep = (start + depths < FFN)[None, :]
        x = _loaded(x_at + start, deep, EVEN)
        weight = _loaded(weight_at + start, deep & (columns < WIDTH)[:, None], EVEN)
        total = _added(weight, x, total, WEIGHTS_LEFT, PRECISION)
    if WEIGHTS_LEFT:
        total = tl.trans(total)
    total *= tl.load(shares_ptr + pairs)[:, None]
    out_rows = (pairs % TOP_K).to(tl.int64) * num_tokens + pairs // TOP_K
    at = out_ptr + out_rows[:, None] * WIDTH + columns[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def gated_pair_kernel(
    x_ptr,  # [1, WIDTH]
    weight_ptr,  # [slots, 2 * FFN, WIDTH]: gate's rows, then up's
    out_ptr,  # [pairs, FFN]
    slots_ptr,
    ids_ptr,
    WIDTH: tl.constexpr,
    FFN: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (i, j): its columns of silu(gate) * up of the only token's expert j. The input is that of the
    router, which has ended when this begins; so only its choice is waited for. All its experts are
    in slots."""
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    depths = tl.arange(0, DEPTH)
    inside = (columns < FFN)[:, None] & (depths < WIDTH)[None, :]
    x = tl.load(x_ptr + depths, mask=depths < WIDTH, other=0.0).to(tl.float32)[None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + tl.load(ids_ptr + tl.program_id(1))).to(tl.int64)
    gate_at = weight_ptr + slot * (2 * FFN * WIDTH) + columns[:, None] * WIDTH + depths[None, :]
    gate_weight = tl.load(gate_at, mask=inside, other=0.0)
    up_weight = tl.load(gate_at + FFN * WIDTH, mask=inside, other=0.0)
    gate = tl.sum(gate_weight.to(tl.float32) * x, 1)
    up = tl.sum(up_weight.to(tl.float32) * x, 1)
    out = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.program_id(1) * FFN + columns, out, mask=columns < FFN)


@triton.jit
def down_pair_kernel(
    x_ptr,  # [pairs, FFN]: what `gated_pair_kernel` wrote
    weight_ptr,  # [slots, WIDTH, FFN]
    shares_ptr,  # float32 [pairs]: the router's weights
    out_ptr,  # [pairs, WIDTH]
    slots_ptr,
    ids_ptr,
    WIDTH: tl.constexpr,
    FFN: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (i, j): its columns of what expert j of the only token returns, weighted. The choice was made
    when this begins; weights are read while the last inputs are computed."""
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    depths = tl.arange(0, DEPTH)
    pair = tl.program_id(1)
    slot = tl.load(slots_ptr + tl.load(ids_ptr + pair)).to(tl.int64)
    at = weight_ptr + slot * (WIDTH * FFN) + columns[:, None] * FFN + depths[None, :]
    weight = tl.load(at, mask=(columns < WIDTH)[:, None] & (depths < FFN)[None, :], other=0.0)
    if OVERLAP:
        gdc_wait()
    x = tl.load(x_ptr + pair * FFN + depths, mask=depths < FFN, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(weight.to(tl.float32) * x, 1) * tl.load(shares_ptr + pair)
    tl.store(out_ptr + pair * WIDTH + columns, total.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


class Rule(NamedTuple):
    """The launch of one rule of choice: its kernel, and what that takes besides."""

    kernel: Any
    values: tuple[Any, ...] = ()
    sizes: Mapping[str, int] = {}


def _softmax_rule(experts: Experts) -> Rule:
    return Rule(choose_kernel)


def _grouped_rule(experts: Experts) -> Rule:
    routing, bias = experts.routing, experts.bias
    assert isinstance(routing, GroupedRouting) and bias is not None
    sizes = {"NUM_GROUPS": routing.num_groups, "TOP_GROUPS": routing.top_groups}
    sizes["PADDED_GROUPS"] = triton.next_power_of_2(routing.num_groups)
    return Rule(choose_grouped_kernel, (bias, routing.scale), sizes)


RULES: Mapping[type[Routing], Callable[[Experts], Rule]] = {
    Routing: _softmax_rule,
    GroupedRouting: _grouped_rule,
}


class Chosen(NamedTuple):
    """The experts of a step's tokens."""

    ids: Tensor  # int32 [T, top_k]
    weights: Tensor  # float32 [T, top_k]
    order: Tensor  # int32: pairs by expert; empty where they are not sorted
    bounds: Tensor  # int32 [2, experts]


def plan_for(num_pairs: int, num_experts: int) -> ExpertPlan:
    if num_pairs <= FEW_PAIRS:
        return FEW
    return _of_size(SORTED, triton.cdiv(num_pairs, num_experts))


def routed(x: Tensor, experts: Experts, shared: Tensor | None, plan: ExpertPlan | None = None) -> Tensor:
    """[top_k, T, hidden] in shares, and one more that is `shared`."""
    x, routing = x.contiguous(), experts.routing
    out = x.new_empty(routing.top_k + (shared is not None), *x.shape)
    if shared is not None:
        out[-1].copy_(shared)
    if len(x):
        sorts = sorts_pairs(len(x), routing) if plan is None else plan.is_sorted
        products(x, experts, choose(x, experts, sorts), out, plan)
    return out


def sorts_pairs(num_tokens: int, routing: Routing) -> bool:
    """Whether the pairs of so many tokens are sorted by expert."""
    return num_tokens > 1 and plan_for(num_tokens * routing.top_k, routing.num_experts).is_sorted


def products(
    x: Tensor, experts: Experts, choice: Chosen, out: Tensor, plan: ExpertPlan | None = None
) -> None:
    """What the experts that are in a slot return, to the first shares of `out`."""
    x, routing = x.contiguous(), experts.routing
    if len(x) == 1 and plan is None:
        pair_products(x, experts, choice, out)
    elif len(x):
        plan = plan or plan_for(len(x) * routing.top_k, routing.num_experts)
        down(gated(x, experts, choice, plan), experts, choice, plan, out)


def choose(x: Tensor, experts: Experts, is_sorted: bool) -> Chosen:
    x = x.contiguous()
    routing, num_tokens, overlaps = experts.routing, len(x), _overlaps(x.is_cuda)
    num, top_k = routing.num_experts, routing.top_k
    sizes = {"NUM": num, "PADDED": max(16, triton.next_power_of_2(num))}
    logits = _logits(x, experts.router, sizes, overlaps)
    tokens = _of_size(PLACED, num_tokens) if is_sorted else 1
    tiles = triton.cdiv(num_tokens, tokens)
    ids, counts, order, bounds = (
        torch.empty(shape, dtype=torch.int32, device=x.device)
        for shape in (
            (num_tokens, top_k),
            (tiles, sizes["PADDED"]),
            num_tokens * top_k * is_sorted,
            (2, sizes["PADDED"]),
        )
    )
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    rule = RULES[type(routing)](experts)
    rule.kernel[(tiles,)](
        logits,
        ids,
        weights,
        counts,
        num_tokens,
        *rule.values,
        **sizes,
        **rule.sizes,
        TOP_K=top_k,
        PADDED_K=triton.next_power_of_2(top_k),
        NUM_SHARES=len(logits),
        NORMALISED=routing.normalised,
        TILE_ROWS=tokens,
        OVERLAP=overlaps,
        num_warps=4 if is_sorted else 1,
        launch_pdl=overlaps,
    )
    if is_sorted:
        place = {"PADDED": sizes["PADDED"], "TOP_K": top_k, "TILE_ROWS": tokens, "AT_ONCE": PLACE_TILES}
        place_kernel[(tiles,)](ids, counts, order, bounds, num_tokens, tiles, **place, num_warps=4)
    return Chosen(ids, weights, order, bounds)


def _logits(x: Tensor, router: Tensor, sizes: Mapping[str, int], overlaps: bool) -> Tensor:
    """float32 [shares, T, experts]."""
    num_tokens, width = x.shape
    tile = _of_size(ROUTER_TILES, num_tokens)
    num_shares = tile.shares if width % (tile.shares * ROUTER_DEPTH) == 0 else 1
    out = torch.empty(num_shares, num_tokens, len(router), dtype=torch.float32, device=x.device)
    router_kernel[(triton.cdiv(num_tokens, tile.rows), num_shares)](
        x,
        router,
        out,
        num_tokens,
        **sizes,
        WIDTH=width,
        SHARE=width // num_shares,
        TILE_ROWS=tile.rows,
        DEPTH=_router_depth((sizes["PADDED"] + tile.rows) * x.element_size()),
        PRECISION=_precision(x),
        OVERLAP=overlaps,
        num_warps=4,
        num_stages=ROUTER_STAGES,
        launch_pdl=overlaps,
    )
    return out


def _router_depth(row_bytes: int) -> int:
    """`row_bytes`: of one value of each expert and of each token."""
    depth = ROUTER_DEPTH
    while depth > 16 and ROUTER_STAGES * depth * row_bytes > ROUTER_BYTES:
        depth //= 2
    return depth


def pair_products(
    x: Tensor,
    experts: Experts,
    choice: Chosen,
    out: Tensor,
    gated_tile: PairTile = GATED_PAIR,
    down_tile: PairTile = DOWN_PAIR,
) -> None:
    """Of a single token. The first shares of `out` are written."""
    width, ffn, top_k = x.shape[1], experts.routing.ffn, experts.routing.top_k
    inner, ids, overlaps = x.new_empty(top_k, ffn), choice.ids, _overlaps(x.is_cuda)
    launch = _pair_launch(gated_tile, width, ffn, overlaps)
    gated_pair_kernel[(triton.cdiv(ffn, launch["TILE_COLUMNS"]), top_k)](
        x, experts.gate_up, inner, experts.slots, ids, WIDTH=width, FFN=ffn, **launch
    )
    launch = _pair_launch(down_tile, ffn, width, overlaps)
    down_pair_kernel[(triton.cdiv(width, launch["TILE_COLUMNS"]), top_k)](
        inner, experts.down, choice.weights, out, experts.slots, ids, WIDTH=width, FFN=ffn, **launch
    )


def _pair_launch(tile: PairTile, depth: int, columns: int, overlaps: bool) -> dict[str, int]:
    """How a product of a single token is launched, by the width of its input and of its output."""
    padded = triton.next_power_of_2(depth)
    most = min(max(1, tile.values // padded), triton.next_power_of_2(columns))
    tiles = {"TILE_COLUMNS": most, "DEPTH": padded, "OVERLAP": overlaps}
    return {**tiles, "num_warps": tile.warps, "launch_pdl": overlaps}


def gated(x: Tensor, experts: Experts, choice: Chosen, plan: ExpertPlan) -> Tensor:
    """silu(gate) * up of every pair: [pairs, ffn], by expert where pairs are sorted."""
    width, ffn, num_pairs = x.shape[1], experts.routing.ffn, choice.ids.numel()
    out = x.new_empty(num_pairs, ffn)
    tile = _fitting(plan.gated, width, ffn, x)
    gated_experts_kernel[(triton.cdiv(ffn, tile.columns), _num_tiles(choice, experts, plan))](
        x,
        experts.gate_up,
        out,
        experts.slots,
        choice.ids,
        choice.order,
        choice.bounds,
        num_pairs,
        **_launch(x, width, experts, choice, plan, tile),
    )
    return out


def down(x: Tensor, experts: Experts, choice: Chosen, plan: ExpertPlan, out: Tensor) -> None:
    """`x`: from `gated`. The first shares of `out` are written."""
    ffn, (num_tokens, width) = experts.routing.ffn, out.shape[1:]
    tile = _fitting(plan.down, ffn, width, x)
    down_experts_kernel[(triton.cdiv(width, tile.columns), _num_tiles(choice, experts, plan))](
        x,
        experts.down,
        choice.weights,
        out,
        experts.slots,
        choice.ids,
        choice.order,
        choice.bounds,
        choice.ids.numel(),
        num_tokens,
        **_launch(x, width, experts, choice, plan, tile),
    )


def _num_tiles(choice: Chosen, experts: Experts, plan: ExpertPlan) -> int:
    """At most, over all ways to route."""
    num_pairs, rows = choice.ids.numel(), plan.gated.rows
    if not plan.is_sorted:
        return num_pairs
    return min(num_pairs, (num_pairs + experts.routing.num_experts * (rows - 1)) // rows)


def _launch(
    x: Tensor, width: int, experts: Experts, choice: Chosen, plan: ExpertPlan, tile: ExpertTile
) -> dict[str, int | bool | str]:
    return {
        "WIDTH": width,
        "FFN": experts.routing.ffn,
        "TOP_K": experts.routing.top_k,
        "SORTED": plan.is_sorted,
        "PAIRS": 16 if plan.is_sorted else triton.next_power_of_2(choice.ids.numel()),
        "PADDED": choice.bounds.shape[1],
        "TILE_ROWS": tile.rows,
        "TILE_COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "WEIGHTS_LEFT": tile.weights_left,
        "PRECISION": _precision(x),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _fitting(tile: ExpertTile, width: int, out_width: int, x: Tensor) -> ExpertTile:
    """Smaller for matrices that are, and for wider numbers."""
    depth = min(tile.depth * 2 // x.element_size(), max(16, triton.next_power_of_2(width)))
    return tile._replace(depth=depth, columns=min(tile.columns, max(16, triton.next_power_of_2(out_width))))


def _of_size(by_most: Mapping[int, Sized], num: int) -> Sized:
    """The entry of the first size that is at least `num`, or the last."""
    return next((found for most, found in by_most.items() if num <= most), by_most[max(by_most)])


@functools.cache
def _overlaps(is_cuda: bool) -> bool:
    """Whether a kernel may begin before the one that it depends on has ended (Hopper and later)."""
    return is_cuda and triton.runtime.driver.active.get_current_target().arch >= 90


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"

"""Attention for CUDA: launches the Triton kernels, and PyTorch's fused attention for long prompts if it is
faster. Owns the choice of tiles and the splitting of keys; the arithmetic is in `triton_kernels.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from penstock.engine.execution.attention import Geometry, Partial
from penstock.engine.execution.attention import triton_kernels as kernels
from penstock.engine.execution.batch import DEEP_TOKENS, Shape, StepInputs
from penstock.models.model import ModelConfig

Prefill = Literal["auto", "triton", "sdpa"]
Fused = Literal["cudnn", "flash"]


class Tile(NamedTuple):
    """What one program of the attention kernel holds at a time."""

    rows: int  # query heads of one KV head times tokens; at least 16, a power of two
    keys: int
    warps: int
    stages: int  # tiles of keys in flight


class RotateTile(NamedTuple):
    """What one program of the rotate-and-write kernel does."""

    tokens: int
    heads: int
    warps: int


class Tuning(NamedTuple):
    """All measured constants. The attention tile depends on the rows (tokens times query heads per KV head)
    of the longest chunk of a launch."""

    decode: Tile  # one token per chunk, at most one program per multiprocessor
    decode_even: Tile  # one or two programs per multiprocessor
    decode_many: Tile  # more programs: three must fit on a multiprocessor
    short: Tile
    long: Tile
    deep: Tile  # for a prefix that is longer than the chunk
    programs_per_sm: int = 2  # keys are split until there are about this many programs
    # the same for several decodes over long sequences, so that different lengths end together
    deep_programs_per_sm: int = 12
    # for low latency: one program per head
    rotate_few: RotateTile = RotateTile(tokens=1, heads=1, warps=1)
    rotate_many: RotateTile = RotateTile(tokens=8, heads=8, warps=4)

    @property
    def tiles(self) -> frozenset[Tile]:
        return frozenset((self.decode, self.decode_even, self.decode_many, self.short, self.long, self.deep))

    def decode_tile(self, per_sm: float) -> tuple[Tile, int | None]:
        """The tile for this many programs per multiprocessor without splitting, and the number of splits;
        None: by `programs_per_sm`. Slightly above one is the worst case: a few multiprocessors would have two
        programs, and all others would wait for them."""
        if per_sm <= 1.0:
            return self.decode, None
        if per_sm < 4 / 3:
            return self.decode_many, 3
        return (self.decode_even if per_sm <= 2.5 else self.decode_many), 1

    def prefill_tile(self, num_rows: int, deep: bool) -> Tile:
        return self.short if num_rows <= self.short.rows else self.deep if deep else self.long


# By bytes per value: 2 is bfloat16 (and float16), measured on an H200 with Qwen3-4B's shape (`python
# benchmarks/kernels.py`); 4 is float32, which runs without tensor cores.
_EXACT_DECODE, _EXACT = Tile(16, 32, 8, 2), Tile(32, 16, 8, 2)
TUNING = {
    2: Tuning(
        decode=Tile(16, 64, 4, 3),
        decode_even=Tile(16, 64, 2, 3),
        decode_many=Tile(16, 64, 2, 2),
        short=Tile(64, 64, 4, 3),
        long=Tile(128, 64, 8, 3),
        deep=Tile(128, 128, 8, 3),
    ),
    4: Tuning(_EXACT_DECODE, _EXACT_DECODE, _EXACT_DECODE, _EXACT, _EXACT, _EXACT),
}
# The same for heads of more than 128 values: fewer keys at a time, so that tiles fit into a multiprocessor's
# memory (compiled for it, not measured).
WIDE_HEAD = 128
WIDE_TUNING = {
    2: Tuning(
        decode=Tile(16, 32, 4, 3),
        decode_even=Tile(16, 64, 2, 2),
        decode_many=Tile(16, 32, 2, 2),
        short=Tile(64, 32, 4, 2),
        long=Tile(64, 64, 8, 2),
        deep=Tile(64, 64, 8, 2),
    ),
    4: TUNING[4],
}
ROTATE_MANY_FROM = 512  # tokens
MAX_SPLITS = 64
GATHER_TOKENS = 8
# programs that gather from host memory: enough for the link, and most multiprocessors stay free for compute
FETCH_PROGRAMS = 32
JOIN_ROWS = 32


class FusedSizes(NamedTuple):
    """Shapes for PyTorch's fused attention. cuDNN builds a plan for each new shape, which takes 40 ms or
    more. So there are few shapes, all planned before the first request."""

    own: int = 1024  # a chunk's own tokens are padded to a multiple of this, if they fill at least half of it
    # tokens of a chunk over a piece of its prefix, padded to a multiple of the last
    rows: tuple[int, ...] = (8192, 4096, 2048, 1024, 512)
    least_rows: int = 384
    # tokens in such a piece; the paged kernel takes the rest
    keys: tuple[int, ...] = (32768, 16384, 8192, 4096)
    least_keys: int = 8192  # for fewer, gathering and merging cost more than is gained


def rounded_up(num: int, step: int) -> int:
    return -(-num // step) * step


def pieces(num: int, sizes: tuple[int, ...]) -> list[int]:
    """`num` as the fewest possible sizes, largest first; each size is a multiple of the next. The remainder
    is less than the last size."""
    made = []
    for size in sizes:
        count, num = divmod(num, size)
        made += [size] * count
    return made


def fused_shapes(sizes: FusedSizes, chunk: int, max_tokens: int) -> list[tuple[int, int]]:
    """The shapes for chunks of up to `chunk` tokens in a context of `max_tokens`, as (tokens, tokens before
    them)."""
    own = [
        (tokens, 0)
        for tokens in range(sizes.own, min(chunk, rounded_up(max_tokens, sizes.own)) + 1, sizes.own)
    ]
    rows = [num for num in sizes.rows if num <= rounded_up(chunk, sizes.rows[-1])]
    return own + [
        (num, keys) for keys in sizes.keys if max(keys, sizes.least_keys) < max_tokens for num in rows
    ]


class _Launch(NamedTuple):
    """Adjacent chunks of one launch, and the tokens they cover."""

    first_chunk: int
    num_chunks: int
    first_row: int
    num_rows: int
    max_q_len: int

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)


class _Grid(NamedTuple):
    """How the attention kernel is launched."""

    tile: Tile
    num_tiles: int  # per chunk
    splits: int  # of the keys


class _Query(NamedTuple):
    """What one call attends with, and where to."""

    layer: int
    q: Tensor
    out: Tensor
    inputs: StepInputs


class _Cached(NamedTuple):
    """Cached tokens of a chunk from `first_key` on."""

    table_starts: Tensor
    tables: Tensor
    chunk: int
    first_key: int


class _ChunkGroup(NamedTuple):
    """Chunks of a step that are attended together: several by the paged kernel, or one with fused
    attention."""

    launch: _Launch
    num_fused: int = 0  # prefix tokens that fused attention takes, in pieces
    # fused attention takes the chunk's own tokens too, so the paged kernel is not needed
    own_fused: bool = False

    @property
    def is_fused(self) -> bool:
        return self.own_fused or self.num_fused > 0


class Choices(NamedTuple):
    """Other ways than an engine's, for measurements and tests."""

    prefill: Prefill = "auto"
    fused: Fused = "cudnn"
    tuning: Tuning | None = None  # None: by the size of a value
    fused_sizes: FusedSizes = FusedSizes()


_USUAL = Choices()


class TritonAttention:
    """`Attention` in bfloat16 or float32 on CUDA; on the CPU under Triton's interpreter."""

    lse_nats = math.log(2)

    def __init__(
        self,
        arena: Tensor,
        config: ModelConfig,
        rope: Tensor,
        blank_from: int | None = None,
        choices: Choices = _USUAL,
    ) -> None:
        self._sizes = Geometry.of(arena, config, rope, blank_from)
        self.arena = arena
        self._keys = [arena[:, layer, 0] for layer in range(config.num_layers)]
        self._values = [arena[:, layer, 1] for layer in range(config.num_layers)]
        self._ropes = self._sizes.rope_tables(rope)
        self._prefill, self._fused, tuning, self._fused_sizes = choices
        is_wide = config.head_dim > WIDE_HEAD
        self._tuning = tuning or (WIDE_TUNING if is_wide else TUNING)[arena.element_size()]
        if is_wide and self._prefill == "auto":
            self._prefill = "triton"  # cuDNN takes such heads in some versions only
        self._planned: set[tuple[int, int]] = set()  # tokens, and tokens before them
        # the eager step being launched and its groups, by window
        self._step: tuple[StepInputs, dict[int, list[_ChunkGroup]]] | None = None
        self._no_starts = torch.zeros(1, dtype=torch.int32, device=arena.device)
        self._num_sms = (
            torch.cuda.get_device_properties(arena.device).multi_processor_count if arena.is_cuda else 8
        )
        self._layout = {
            "SLOT_STRIDE": arena.stride(0),
            "TOKEN_STRIDE": arena.stride(3),
            "HEAD_STRIDE": arena.stride(4),
            "HEAD_DIM": config.head_dim,
            "BLOCK_TOKENS": arena.shape[3],
        }

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, num_tokens = self._sizes, qkv.shape[0]
        qkv = qkv.contiguous()
        q = qkv.new_empty(num_tokens, sizes.num_heads, sizes.head_dim)
        k = qkv.new_empty(num_tokens, sizes.num_kv_heads, sizes.head_dim)
        heads = sizes.num_heads + 2 * sizes.num_kv_heads
        tile = self._tuning.rotate_many if num_tokens >= ROTATE_MANY_FROM else self._tuning.rotate_few
        kernels.rotate_and_write_kernel[
            (triton.cdiv(num_tokens, tile.tokens), triton.cdiv(heads, tile.heads))
        ](
            qkv,
            q,
            k,
            self._keys[layer],
            self._values[layer],
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            self._ropes[layer],
            inputs.positions,
            inputs.write_at,
            num_tokens,
            sizes.norm_eps,
            **self._layout,
            NUM_HEADS=sizes.num_heads,
            NUM_KV_HEADS=sizes.num_kv_heads,
            NORMALISE=q_norm is not None and k_norm is not None,
            TILE_TOKENS=tile.tokens,
            TILE_HEADS=tile.heads,
            HALF_PADDED=triton.next_power_of_2(sizes.head_dim // 2),
            num_warps=tile.warps,
        )
        v = qkv.view(num_tokens, heads, sizes.head_dim)[:, sizes.num_heads + sizes.num_kv_heads :]
        return q, k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor:
        num_tokens, num_chunks, num_decodes = q.shape[0], inputs.kv_lens.shape[0], inputs.num_decodes
        parts = self._parts(inputs, self._sizes.windows[layer])
        if len(parts) == 1 and parts[0].own_fused and not num_decodes:
            return self._attend_fused(_Query(layer, q, q, inputs), k, v, parts[0])[0]
        # Padding tokens of a captured step belong to no chunk, so no program writes them: they must be zeros.
        blank = torch.empty if inputs.max_q_len or num_decodes == num_chunks else torch.zeros
        out = blank(num_tokens, self._sizes.num_heads * self._sizes.head_dim, dtype=q.dtype, device=q.device)
        query = _Query(layer, q, out, inputs)
        if num_decodes:
            self._attend_paged(query, _decodes(inputs), inputs.max_kv_len > DEEP_TOKENS)
        if num_decodes < num_chunks and not parts:
            # A capture does not know its longest chunk; the number of non-decode tokens is an upper bound.
            rest = num_tokens - num_decodes
            most = inputs.max_q_len or rest
            parts = [_ChunkGroup(_Launch(num_decodes, num_chunks - num_decodes, num_decodes, rest, most))]
        for part in parts:
            if not part.is_fused:
                self._attend_paged(query, part.launch, inputs.max_kv_len > 2 * inputs.max_q_len)
            elif (made := self._attend_fused(query, k, v, part)[0]) is not out:
                out[part.launch.rows] = made
        return out

    def attend_resident(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Partial:
        sizes, num_tokens, num_decodes = self._sizes, q.shape[0], inputs.num_decodes
        out = torch.empty(num_tokens, sizes.num_heads * sizes.head_dim, dtype=q.dtype, device=q.device)
        lse = torch.empty(num_tokens, sizes.num_heads, dtype=torch.float32, device=q.device)
        query = _Query(layer, q, out, inputs)
        if num_decodes:
            is_deep = inputs.max_kv_len > DEEP_TOKENS
            lse[:num_decodes] = self._attend_paged(query, _decodes(inputs), is_deep, first_key=0)
        for part in self._parts(inputs, sizes.windows[layer]):
            rows = part.launch.rows
            if part.is_fused:
                made, lse[rows] = self._attend_fused(query, k, v, part, with_lse=True)
                if made is not out:
                    out[rows] = made
            else:
                is_deep = inputs.max_kv_len > 2 * inputs.max_q_len
                lse[rows] = self._attend_paged(query, part.launch, is_deep, first_key=0)
        return Partial(out.float(), lse)

    def fetch(self, layer: int, host: Tensor, tables: Tensor, first: int, into: Tensor) -> None:
        where = _Cached(self._no_starts, tables[first:], 0, 0)
        self._gather((host[:, layer, 0], host[:, layer, 1]), (into[0], into[1]), where, FETCH_PROGRAMS)

    def add_piece(self, partial: Partial, q: Tensor, rows: tuple[int, int], piece: Tensor) -> None:
        sizes, num_keys, (begin, end) = self._fused_sizes, piece.shape[1], rows
        num_rows, planned = end - begin, self._rows(end - begin)
        is_planned = (
            self._fused == "cudnn"
            and num_rows >= sizes.least_rows
            and self._planned.issuperset((n, num_keys) for n in planned)
        )
        for num in planned if is_planned else [num_rows]:
            last = min(begin + num, end)
            queries = _padded(q[begin:last], num)
            if piece.element_size() != 2:
                past = self._plain_attention(queries, piece[0], piece[1])
            else:
                past = self._fused_attention(
                    queries, piece[0], piece[1], causal=False, with_lse=True, planned=is_planned
                )
            self._join(partial.out[begin:last], partial.lse[begin:last], *past)
            begin = last

    def _plain_attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """For float32, which fused attention does not support."""
        group = self._sizes.group
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * self._sizes.scale
        out = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v.repeat_interleave(group, dim=1))
        return out.contiguous(), scores.logsumexp(dim=-1)

    def _parts(self, inputs: StepInputs, window: int = 0) -> list[_ChunkGroup]:
        """The groups of chunks after the decodes of an eager step, in order; empty for a captured step, whose
        lengths vary."""
        if not inputs.spans:
            return []
        if self._step is None or self._step[0] is not inputs:
            self._step = inputs, {}
        if window in self._step[1]:
            return self._step[1][window]
        parts: list[_ChunkGroup] = []
        row = inputs.num_decodes
        for chunk, (start, q_len) in enumerate(inputs.spans, inputs.num_decodes):
            part = _ChunkGroup(_Launch(chunk, 1, row, q_len, q_len), *self._fuses(start, q_len, window))
            if parts and not part.is_fused and not parts[-1].is_fused:
                first = parts[-1].launch
                part = _ChunkGroup(
                    first._replace(
                        num_chunks=first.num_chunks + 1,
                        num_rows=first.num_rows + q_len,
                        max_q_len=max(first.max_q_len, q_len),
                    )
                )
                parts.pop()
            parts.append(part)
            row += q_len
        self._step[1][window] = parts
        return parts

    # --------------------------------------------------------------------------------------- paged, by Triton

    def num_splits(self, num_chunks: int, num_tiles: int, deep: bool = False) -> int:
        """Number of splits of the keys, so that every multiprocessor has work. `deep`: more splits, so that
        all end together."""
        per_sm = (
            self._tuning.deep_programs_per_sm if deep and num_chunks > 1 else self._tuning.programs_per_sm
        )
        wanted = per_sm * self._num_sms
        return max(1, min(MAX_SPLITS, wanted // (num_chunks * num_tiles * self._sizes.num_kv_heads)))

    def grid(self, launch: _Launch, deep: bool) -> _Grid:
        """For decodes it depends only on the launch shape and on `deep`, so that captured and eager steps of
        the same requests agree bit by bit."""
        sizes, tuning, splits = self._sizes, self._tuning, None
        num_rows = launch.max_q_len * sizes.group
        is_decode = num_rows <= tuning.decode.rows
        if is_decode:
            tile, splits = tuning.decode_tile(launch.num_chunks * sizes.num_kv_heads / self._num_sms)
        else:
            tile = tuning.prefill_tile(num_rows, deep)
        num_tiles = triton.cdiv(launch.max_q_len, tile.rows // sizes.group)
        splits = splits or self.num_splits(launch.num_chunks, num_tiles, is_decode and deep)
        return _Grid(tile, num_tiles, splits)

    def _attend_paged(
        self, query: _Query, launch: _Launch, deep: bool, first_key: int | None = None
    ) -> Tensor:
        """`first_key`: attend from this key on only, and return the log2 of each sum of powers as [rows,
        heads]."""
        return self._launch_paged(query, launch, self.grid(launch, deep), first_key)

    def _launch_paged(
        self, query: _Query, launch: _Launch, grid: _Grid, first_key: int | None = None
    ) -> Tensor:
        sizes, (layer, q, out, inputs) = self._sizes, query
        (tile, num_tiles, splits), with_lse = grid, first_key is not None
        if launch.first_row:
            out = out[launch.first_row :]
        target = lse = out
        if splits > 1 or with_lse:
            lse = torch.empty(splits, launch.num_rows, sizes.num_heads, dtype=torch.float32, device=q.device)
        if splits > 1:
            target = lse.new_empty(*lse.shape, sizes.head_dim)
            if not inputs.max_q_len and launch.max_q_len > 1:
                lse.fill_(float("-inf"))  # padding tokens again: their splits count nothing
        tables = inputs.q_starts, inputs.kv_lens, inputs.table_starts, inputs.tables
        numbers = launch.first_chunk, launch.first_row, launch.num_rows, splits, first_key or 0
        kernels.paged_attention_kernel[(num_tiles, sizes.num_kv_heads, launch.num_chunks * splits)](
            q,
            target,
            lse,
            self._keys[layer],
            self._values[layer],
            *tables,
            *numbers,
            sizes.scale * math.log2(math.e),
            **self._layout,
            NUM_HEADS=sizes.num_heads,
            GROUP=sizes.group,
            DIMS_PADDED=self._dims_padded,
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            SPLIT=splits > 1,
            WITH_LSE=with_lse,
            WINDOW=sizes.windows[layer],
            SKIPS_BLANK=layer >= sizes.blank_from,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return self._merge(target, lse, out, with_lse) if splits > 1 else lse[0]

    def _merge(self, partial: Tensor, lse: Tensor, out: Tensor, with_lse: bool) -> Tensor:
        sizes, (splits, num_rows) = self._sizes, partial.shape[:2]
        merged = torch.empty_like(lse[0]) if with_lse else lse
        kernels.merge_splits_kernel[(num_rows, sizes.num_heads)](
            partial,
            lse,
            out,
            merged,
            num_rows,
            splits,
            NUM_HEADS=sizes.num_heads,
            HEAD_DIM=sizes.head_dim,
            DIMS_PADDED=self._dims_padded,
            MAX_SPLITS=MAX_SPLITS,
            WITH_LSE=with_lse,
        )
        return merged

    @property
    def _dims_padded(self) -> int:
        return max(16, triton.next_power_of_2(self._sizes.head_dim))

    def warm(self, max_chunk: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        self.compile()
        shapes = fused_shapes(self._fused_sizes, max_chunk, max_tokens)
        for done, shape in enumerate(shapes):
            progress("planning prefill", done, len(shapes))
            self.plan(*shape)
        progress("planning prefill", len(shapes), len(shapes))

    def compile(self) -> None:
        """Compile kernels that only eager steps need: this takes a second, which no request should wait
        for."""
        sizes, values = self._sizes, self._values[0]
        packed = torch.zeros(Shape(1, 1, 0).fixed_ints + 1, dtype=torch.int32, device=values.device)
        inputs = Shape(1, 1, 0).views(packed, num_decodes=0, max_q_len=1, max_kv_len=1)
        q = values.new_zeros(1, sizes.num_heads, sizes.head_dim)
        # An empty chunk declared as long: kernels are launched and do nothing.
        kinds = {
            (window, layer >= sizes.blank_from): _Query(layer, q, q.view(1, -1).clone(), inputs)
            for layer, window in enumerate(sizes.windows)
        }
        for q_len in (4096, 2 * self._tuning.deep.rows):  # keys in one split, and in several
            for query in kinds.values():
                for deep, first_key in ((True, None), (True, 0), (False, 0)):
                    self._attend_paged(query, _Launch(0, 1, 0, 1, q_len), deep, first_key)
        for (_, skips_blank), query in kinds.items():
            # draft passes run after captured steps of every kind, and are not always captured
            for tile in self._tuning.tiles if skips_blank else ():
                for splits in (1, 2):
                    self._launch_paged(query, _Launch(0, 1, 0, 1, 1), _Grid(tile, 1, splits))
        self.gathered(0, 0, 0, 1, inputs)
        lse = torch.zeros(1, sizes.num_heads, dtype=torch.float32, device=values.device)
        self._join(q.clone(), lse, q, lse.t().contiguous())

    # -------------------------------------------------------------------------------- long chunks, by PyTorch

    def plan(self, q_len: int, num_past: int) -> None:
        """Let cuDNN build its plan for this shape now, so that "auto" can use it later without a pause. cuDNN
        keeps plans per thread. `num_past` 0: for tokens among themselves."""
        sizes, values = self._sizes, self._values[0]
        if values.element_size() != 2 or not values.is_cuda or self._prefill == "triton":
            return
        q = values.new_zeros(q_len, sizes.num_heads, sizes.head_dim)
        keys = values.new_zeros(num_past or q_len, sizes.num_kv_heads, sizes.head_dim)
        for with_lse in (True,) if num_past else (True, False):
            self._fused_attention(q, keys, keys.clone(), causal=not num_past, with_lse=with_lse)
        self._planned.add((q_len, num_past))

    def _fuses(self, start: int, q_len: int, window: int = 0) -> tuple[int, bool]:
        """For a chunk of `q_len` tokens after `start` others: how many of those fused attention takes, and
        whether it takes the chunk's own tokens. Nothing if a token is outside the window."""
        sizes, is_half = self._fused_sizes, self._values[0].element_size() == 2
        if self._prefill == "triton" or not is_half or 0 < window < start + q_len:
            return 0, False
        if self._prefill == "sdpa":
            return start, True
        num_past = 0
        if q_len >= sizes.least_rows and start >= sizes.least_keys:
            num_past = sum(pieces(start, sizes.keys))
            if not self._planned.issuperset(
                (rows, keys) for rows in self._rows(q_len) for keys in pieces(num_past, sizes.keys)
            ):
                num_past = 0
        takes_own = (
            start == num_past
            and 2 * q_len >= sizes.own
            and (rounded_up(q_len, sizes.own), 0) in self._planned
        )
        return num_past, takes_own

    def _rows(self, q_len: int) -> list[int]:
        rows = self._fused_sizes.rows
        return pieces(rounded_up(q_len, rows[-1]), rows)

    def _attend_fused(
        self, query: _Query, k: Tensor, v: Tensor, part: _ChunkGroup, with_lse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attend to a chunk's own tokens and the end of its prefix, then to the rest of its prefix in pieces,
        merged by log-sum-exp. Returns `out`, or the chunk's rows if `out` was not written; and the log2 of
        each sum of powers as [rows, heads], which is valid only `with_lse`."""
        (layer, q, out, inputs), launch = query, part.launch
        q_len, rows = launch.num_rows, launch.rows
        with_lse = with_lse or part.num_fused > 0
        if part.own_fused:
            made, lse = self._attend_own(q[rows], k[rows], v[rows], with_lse)
            result = made
        else:
            num_left = inputs.spans[launch.first_chunk - inputs.num_decodes][0] - part.num_fused
            lse = self._attend_paged(query, launch, num_left > q_len, first_key=part.num_fused)
            result, made = out, out[rows]
        exact, first_key = self._prefill == "sdpa", 0
        for num_keys in (
            [part.num_fused] * (part.num_fused > 0)
            if exact
            else pieces(part.num_fused, self._fused_sizes.keys)
        ):
            past = self.gathered(layer, launch.first_chunk, first_key, num_keys, inputs)
            begin = 0
            for num_rows in [q_len] if exact else self._rows(q_len):
                some = slice(begin, min(begin + num_rows, q_len))
                queries = _padded(q[rows][some], num_rows)
                attended = self._fused_attention(queries, *past, causal=False, with_lse=True)
                self._join(made[some], lse[some], *attended)
                begin += num_rows
            first_key += num_keys
        return result, lse

    def _attend_own(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
        """A chunk's tokens among themselves. Padding comes last, where no token sees it."""
        num = len(q)
        padded = num if self._prefill == "sdpa" else rounded_up(num, self._fused_sizes.own)
        q, k, v = (_padded(x, padded) for x in (q, k, v))
        made, lse = self._fused_attention(q, k, v, causal=True, with_lse=with_lse)
        lse = (lse * math.log2(math.e)).t()[:num].contiguous() if with_lse else lse
        return made.view(padded, -1)[:num], lse

    def _fused_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, with_lse: bool, planned: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Both operators accept fewer KV heads than query heads. Returns [tokens, heads, head_dim] and
        [heads, tokens]."""
        # a plan depends on strides
        heads_first = [x.contiguous().transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        if self._fused == "cudnn" and planned:
            result = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *heads_first, None, with_lse, 0.0, causal, False, scale=self._sizes.scale
            )
        else:
            result = torch.ops.aten._scaled_dot_product_flash_attention(
                *heads_first, 0.0, causal, False, scale=self._sizes.scale
            )
        out, lse = result[0], result[1]
        # unused without `with_lse`
        lse = lse.reshape(self._sizes.num_heads, -1)[:, : q.shape[0]].contiguous() if with_lse else out
        return out.squeeze(0).transpose(0, 1).contiguous(), lse

    def gathered(
        self, layer: int, chunk: int, first_key: int, num_tokens: int, inputs: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Cached tokens of a chunk from `first_key` on, as contiguous keys and values [num_tokens, kv_heads,
        head_dim]."""
        sizes, cache = self._sizes, self._keys[layer]
        keys = cache.new_empty(num_tokens, sizes.num_kv_heads, sizes.head_dim)
        values = torch.empty_like(keys)
        where = _Cached(inputs.table_starts, inputs.tables, chunk, first_key)
        self._gather((cache, self._values[layer]), (keys, values), where)
        return keys, values

    def _gather(
        self,
        cached: tuple[Tensor, Tensor],
        into: tuple[Tensor, Tensor],
        where: _Cached,
        most_programs: int = 1 << 30,
    ) -> None:
        """Copy keys and values."""
        sizes, num_tokens = self._sizes, len(into[0])
        kernels.gather_kernel[(min(triton.cdiv(num_tokens, GATHER_TOKENS), most_programs),)](
            *cached,
            *into,
            *where,
            num_tokens,
            **self._layout,
            NUM_KV_HEADS=sizes.num_kv_heads,
            WIDTH_PADDED=triton.next_power_of_2(sizes.num_kv_heads * sizes.head_dim),
            TILE_TOKENS=GATHER_TOKENS,
        )

    def _join(self, own: Tensor, own_lse: Tensor, past: Tensor, past_lse: Tensor) -> None:
        """Merge `past` into `own` [tokens, heads * head_dim] and `own_lse` [tokens, heads]."""
        sizes, num_tokens = self._sizes, own.shape[0]
        kernels.join_kernel[(triton.cdiv(num_tokens * sizes.num_heads, JOIN_ROWS),)](
            own,
            own_lse,
            past,
            past_lse,
            num_tokens,
            past.shape[0],
            NUM_HEADS=sizes.num_heads,
            HEAD_DIM=sizes.head_dim,
            DIMS_PADDED=self._dims_padded,
            TILE_ROWS=JOIN_ROWS,
        )


def _decodes(inputs: StepInputs) -> _Launch:
    return _Launch(0, inputs.num_decodes, 0, inputs.num_decodes, 1)


def _padded(x: Tensor, num_tokens: int) -> Tensor:
    """Pad with zeros at the end."""
    return x if len(x) == num_tokens else F.pad(x, (0, 0, 0, 0, 0, num_tokens - len(x)))

"""Attention for CUDA: launches the Triton kernels, and for long prompts may use PyTorch's fused attention instead. Owns the choice of tiles
and the splitting of keys; the arithmetic is in `triton_kernels.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from penstock.engine.execution.attention import triton_kernels as kernels
from penstock.engine.execution.attention.geometry import Geometry
from penstock.engine.execution.batch import DEEP_TOKENS, Shape, StepInputs
from penstock.errors import ConfigError
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
    """All constants that were found by measuring. The attention tile goes by how many rows (tokens times query heads per KV head) the
    longest chunk of a launch has."""

    decode: Tile  # one token a chunk, and hardly a program per multiprocessor
    decode_even: Tile  # one or two of them
    decode_many: Tile  # more: three have to fit side by side
    short: Tile
    long: Tile
    deep: Tile  # the same over a prefix that is longer than the chunk
    programs_per_sm: int = 2  # keys are split until about so many programs exist
    deep_programs_per_sm: int = 12  # the same for several decodes over long sequences: those of different lengths end together
    rotate_few: RotateTile = RotateTile(tokens=1, heads=1, warps=1)  # latency counts: as many programs as there are heads
    rotate_many: RotateTile = RotateTile(tokens=8, heads=8, warps=4)

    def decode_tile(self, per_sm: float) -> tuple[Tile, int | None]:
        """By programs per multiprocessor without splitting: the tile, and how often keys are split where that is not up to
        `programs_per_sm`. One and a bit is the worst case: a few multiprocessors would have two, and all others wait for them."""
        if per_sm <= 1.0:
            return self.decode, None
        if per_sm < 4 / 3:
            return self.decode_many, 3
        return (self.decode_even if per_sm <= 2.5 else self.decode_many), 1

    def prefill_tile(self, num_rows: int, deep: bool) -> Tile:
        return self.short if num_rows <= self.short.rows else self.deep if deep else self.long


# By bytes per value: 2 is bfloat16 (and float16), measured on an H200 with Qwen3-4B's shape (`python benchmarks/kernels.py`);
# 4 is float32, whose exact products run outside the tensor cores.
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
ROTATE_MANY_FROM = 512  # tokens
MAX_SPLITS = 64
GATHER_TOKENS = 32
JOIN_TOKENS = 16
# "auto" hands a lone chunk of at least half this many tokens to PyTorch's fused attention, padded to a multiple of it, in shapes that
# were announced to `plan`: cuDNN builds a plan for each new shape, for tens to hundreds of milliseconds.
FUSED_STEP = 1024


def _padded(num_tokens: int) -> int:
    return triton.cdiv(num_tokens, FUSED_STEP) * FUSED_STEP


def prefill_shapes(chunk: int, max_tokens: int) -> list[tuple[int, int]]:
    """Shapes worth a plan as (tokens, prefix): any single chunk, rounded up, and each later full chunk of a long prompt."""
    first = [(tokens, 0) for tokens in range(FUSED_STEP, min(chunk, _padded(max_tokens)) + 1, FUSED_STEP)]
    return first + [(chunk, prefix) for prefix in range(chunk, max_tokens - chunk + 1, chunk) if chunk % FUSED_STEP == 0]


class _Launch(NamedTuple):
    """A run of chunks that one launch attends, and the tokens they cover."""

    first_chunk: int
    num_chunks: int
    first_row: int
    num_rows: int
    max_q_len: int


class TritonAttention:
    """`Attention` in bfloat16 or float32 on CUDA; on the CPU under Triton's interpreter."""

    def __init__(
        self,
        arena: Tensor,
        config: ModelConfig,
        rope: Tensor,
        *,
        prefill: Prefill = "auto",
        fused: Fused = "cudnn",
        tuning: Tuning | None = None,
    ) -> None:
        self._sizes = Geometry.of(arena, config, rope)
        if prefill not in ("auto", "triton", "sdpa") or fused not in ("cudnn", "flash"):
            raise ConfigError(f"prefill must be auto, triton or sdpa and fused cudnn or flash, got {prefill!r} and {fused!r}")
        self.arena = arena
        self._keys = [arena[:, layer, 0] for layer in range(config.num_layers)]
        self._values = [arena[:, layer, 1] for layer in range(config.num_layers)]
        self._rope = rope
        self._tuning = tuning or TUNING[arena.element_size()]
        self._prefill = prefill
        self._fused = fused
        self._planned: set[tuple[int, int]] = set()
        self._num_sms = torch.cuda.get_device_properties(arena.device).multi_processor_count if arena.is_cuda else 8
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
        kernels.rotate_and_write_kernel[(triton.cdiv(num_tokens, tile.tokens), triton.cdiv(heads, tile.heads))](
            qkv,
            q,
            k,
            self._keys[layer],
            self._values[layer],
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            self._rope,
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
        if self._takes_fused(num_tokens, inputs, self._sizes.windows[layer]):
            return self._attend_fused(layer, q, k, v, inputs)
        # Padding tokens of a captured step belong to no chunk, so no program writes them: they are zeros.
        blank = torch.empty if inputs.max_q_len or num_decodes == num_chunks else torch.zeros
        out = blank(num_tokens, self._sizes.num_heads * self._sizes.head_dim, dtype=q.dtype, device=q.device)
        if num_decodes:
            self._attend_paged(layer, q, out, inputs, _Launch(0, num_decodes, 0, num_decodes, 1))
        if num_decodes < num_chunks:
            # A capture does not know its longest chunk; no chunk is longer than all tokens that are not decodes.
            rest = num_tokens - num_decodes
            launch = _Launch(num_decodes, num_chunks - num_decodes, num_decodes, rest, inputs.max_q_len or rest)
            self._attend_paged(layer, q, out, inputs, launch)
        return out

    # ------------------------------------------------------------------------------------------------- paged, by Triton

    def num_splits(self, num_chunks: int, num_tiles: int, deep: bool = False) -> int:
        """Shares that the keys are cut into, so that every multiprocessor has something to do. `deep`: until all have done it."""
        per_sm = self._tuning.deep_programs_per_sm if deep and num_chunks > 1 else self._tuning.programs_per_sm
        wanted = per_sm * self._num_sms
        return max(1, min(MAX_SPLITS, wanted // (num_chunks * num_tiles * self._sizes.num_kv_heads)))

    def grid(self, launch: _Launch, deep: bool) -> tuple[Tile, int, int]:
        """Tile, tiles per chunk, and splits. Those of decodes follow from the shape of the launch, and from whether the step is `deep`, so
        that captured and eager steps of the same requests agree to the bit."""
        sizes, tuning, splits = self._sizes, self._tuning, None
        num_rows = launch.max_q_len * sizes.group
        is_decode = num_rows <= tuning.decode.rows
        if is_decode:
            tile, splits = tuning.decode_tile(launch.num_chunks * sizes.num_kv_heads / self._num_sms)
        else:
            tile = tuning.prefill_tile(num_rows, deep)
        num_tiles = triton.cdiv(launch.max_q_len, tile.rows // sizes.group)
        return tile, num_tiles, splits or self.num_splits(launch.num_chunks, num_tiles, is_decode and deep)

    def _attend_paged(self, layer: int, q: Tensor, out: Tensor, inputs: StepInputs, launch: _Launch) -> None:
        sizes = self._sizes
        least = DEEP_TOKENS if launch.max_q_len == 1 else 2 * inputs.max_q_len
        tile, num_tiles, splits = self.grid(launch, deep=inputs.max_kv_len > least)
        target, lse, first_row = out, out, 0
        if splits > 1:
            target = torch.empty(splits, launch.num_rows, sizes.num_heads, sizes.head_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(splits, launch.num_rows, sizes.num_heads, dtype=torch.float32, device=q.device)
            if not inputs.max_q_len and launch.max_q_len > 1:
                lse.fill_(float("-inf"))  # padding tokens again: no share of theirs counts
            first_row = launch.first_row
        kernels.paged_attention_kernel[(num_tiles, sizes.num_kv_heads, launch.num_chunks * splits)](
            q,
            target,
            lse,
            self._keys[layer],
            self._values[layer],
            inputs.q_starts,
            inputs.kv_lens,
            inputs.table_starts,
            inputs.tables,
            launch.first_chunk,
            first_row,
            launch.num_rows,
            splits,
            sizes.scale * math.log2(math.e),
            **self._layout,
            NUM_HEADS=sizes.num_heads,
            GROUP=sizes.group,
            DIMS_PADDED=self._dims_padded,
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            SPLIT=splits > 1,
            WINDOW=sizes.windows[layer],
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            self._merge(target, lse, out, launch.first_row)

    def _merge(self, partial: Tensor, lse: Tensor, out: Tensor, first_row: int) -> None:
        sizes, (splits, num_rows) = self._sizes, partial.shape[:2]
        kernels.merge_splits_kernel[(num_rows, sizes.num_heads)](
            partial,
            lse,
            out,
            first_row,
            num_rows,
            splits,
            NUM_HEADS=sizes.num_heads,
            HEAD_DIM=sizes.head_dim,
            DIMS_PADDED=self._dims_padded,
            MAX_SPLITS=MAX_SPLITS,
        )

    @property
    def _dims_padded(self) -> int:
        return max(16, triton.next_power_of_2(self._sizes.head_dim))

    def warm(self, max_chunk: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        self.compile()
        shapes = prefill_shapes(max_chunk, max_tokens)
        for done, (chunk, prefix) in enumerate(shapes):
            progress("planning prefill", done, len(shapes))
            self.plan(chunk, prefix)
        progress("planning prefill", len(shapes), len(shapes))

    def compile(self) -> None:
        """What steps outside captures need beyond what captures do: a pause of a second, better now than under a request."""
        sizes, values = self._sizes, self._values[0]
        packed = torch.zeros(Shape(1, 1, 0).fixed_ints + 1, dtype=torch.int32, device=values.device)
        q = values.new_zeros(1, sizes.num_heads, sizes.head_dim)
        # A chunk without tokens, said to be long and deep: kernels are launched and do nothing.
        for q_len in (4096, 2 * self._tuning.deep.rows):  # its keys in one share, and in several
            inputs = Shape(1, 1, 0).views(packed, num_decodes=0, max_q_len=q_len, max_kv_len=4 * q_len)
            for layer in {window: layer for layer, window in enumerate(sizes.windows)}.values():
                self._attend_paged(layer, q, q.view(1, -1).clone(), inputs, _Launch(0, 1, 0, 1, q_len))
        self.gathered(0, 1, inputs)
        lse = torch.zeros(sizes.num_heads, 1, dtype=torch.float32, device=values.device)
        self._join(q, lse, q.clone(), lse)

    # ----------------------------------------------------------------------------------- a long chunk alone, by PyTorch

    def plan(self, q_len: int, prefix_len: int) -> None:
        """Let cuDNN build its plan for a lone chunk of this shape now, so that "auto" may use it later without a pause. It keeps its plans
        by thread."""
        sizes, values = self._sizes, self._values[0]
        if values.element_size() != 2 or not values.is_cuda:
            return
        qkv = values.new_zeros(q_len, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim)
        q, k = qkv[:, : sizes.num_heads].contiguous(), qkv[:, : sizes.num_kv_heads].contiguous()
        v = qkv[:, sizes.num_heads + sizes.num_kv_heads :]
        self._fused_attention(q, k, v, causal=True, with_lse=prefix_len > 0)
        if prefix_len:
            past = values.new_zeros(prefix_len, sizes.num_kv_heads, sizes.head_dim)
            self._fused_attention(q, past, past, causal=False, with_lse=True)
        self._planned.add((q_len, prefix_len))

    def _takes_fused(self, num_tokens: int, inputs: StepInputs, window: int = 0) -> bool:
        """Host numbers describe a chunk exactly only where it is alone, and only in an eager step. No token may be outside the window."""
        if 0 < window < inputs.max_kv_len:
            return False
        if (
            self._prefill == "triton"
            or inputs.max_q_len != num_tokens
            or inputs.kv_lens.shape[0] != 1
            or self._values[0].element_size() != 2
        ):
            return False
        if self._prefill == "sdpa":
            return True
        return 2 * num_tokens >= FUSED_STEP and (_padded(num_tokens), inputs.max_kv_len - num_tokens) in self._planned

    def _attend_fused(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor:
        """The chunk's own tokens causally, the prefix in full, joined by their log-sum-exp. Padding comes last, where no token sees it."""
        num_tokens = q.shape[0]
        prefix_len = inputs.max_kv_len - num_tokens
        if (padding := _padded(num_tokens) - num_tokens) and self._prefill == "auto":
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
        own, own_lse = self._fused_attention(q, k, v, causal=True, with_lse=prefix_len > 0)
        if prefix_len:
            past_k, past_v = self.gathered(layer, prefix_len, inputs)
            past, past_lse = self._fused_attention(q, past_k, past_v, causal=False, with_lse=True)
            self._join(own, own_lse, past, past_lse)
        return own.view(q.shape[0], -1)[:num_tokens]

    def _fused_attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, with_lse: bool) -> tuple[Tensor, Tensor]:
        """Both operators take fewer KV heads than query heads. Returns [tokens, heads, head_dim] and [heads, tokens]."""
        heads_first = [x.contiguous().transpose(0, 1).unsqueeze(0) for x in (q, k, v)]  # a plan is for given strides
        if self._fused == "cudnn":
            result = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *heads_first, None, with_lse, 0.0, causal, False, scale=self._sizes.scale
            )
        else:
            result = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal, False, scale=self._sizes.scale)
        out, lse = result[0], result[1]
        lse = lse.reshape(self._sizes.num_heads, -1)[:, : q.shape[0]].contiguous() if with_lse else out  # not asked for: never read
        return out.squeeze(0).transpose(0, 1).contiguous(), lse

    def gathered(self, layer: int, num_tokens: int, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The first cached tokens of a lone chunk as contiguous keys and values [num_tokens, kv_heads, head_dim]."""
        sizes, cache = self._sizes, self._keys[layer]
        keys = cache.new_empty(num_tokens, sizes.num_kv_heads, sizes.head_dim)
        values = torch.empty_like(keys)
        kernels.gather_kernel[(triton.cdiv(num_tokens, GATHER_TOKENS), sizes.num_kv_heads)](
            cache,
            self._values[layer],
            keys,
            values,
            inputs.table_starts,
            inputs.tables,
            0,
            num_tokens,
            **self._layout,
            NUM_KV_HEADS=sizes.num_kv_heads,
            DIMS_PADDED=self._dims_padded,
            TILE_TOKENS=GATHER_TOKENS,
        )
        return keys, values

    def _join(self, own: Tensor, own_lse: Tensor, past: Tensor, past_lse: Tensor) -> None:
        sizes = self._sizes
        kernels.join_kernel[(triton.cdiv(own.shape[0], JOIN_TOKENS), sizes.num_heads)](
            own,
            own_lse,
            past,
            past_lse,
            own.shape[0],
            NUM_HEADS=sizes.num_heads,
            HEAD_DIM=sizes.head_dim,
            DIMS_PADDED=self._dims_padded,
            TILE_TOKENS=JOIN_TOKENS,
        )

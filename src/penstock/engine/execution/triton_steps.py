# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Work of a step besides its layers, as one kernel each: a step of a small model takes a millisecond, a
launch microseconds. They compute the same as `sampler.gumbel_noise` (up to the last bits of `log`),
`sampler.Allowed.forbid`, `sampler.kept_tokens`, `target.place_unsure` and `ahead.blank`, where the tensors
are described."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.config import MAX_DRAFTS
from penstock.engine.execution.batch import DraftedInputs, StepInputs

_TILE = 1024
_BLOCK = 1024
_ROWS = 128
_PLACES = triton.next_power_of_2(MAX_DRAFTS + 1)  # drafts of a request, and the token after them

# Not specialised on: views of packed inputs have any alignment, and one compiled kernel must serve every
# step.
_STEP_TENSORS = [
    "rows_ptr", "unsure_ptr", "positions_ptr", "kv_lens_ptr", "table_starts_ptr", "tables_ptr",
    "write_at_ptr", "starts_ptr", "lengths_ptr",
    "step_tokens_ptr", "chosen_ptr", "tokens_ptr", "lasts_ptr", "nexts_out_ptr", "lasts_out_ptr",
    "rows_out_ptr",
]  # fmt: skip


@triton.jit(do_not_specialize=["num", *_STEP_TENSORS])
def _place_kernel(
    rows_ptr, unsure_ptr, rejected_ptr, positions_ptr, kv_lens_ptr, table_starts_ptr, tables_ptr,
    write_at_ptr, num,
    BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < num
    unsure = tl.load(unsure_ptr + at, mask=inside, other=0)
    shift = (
        tl.load(rejected_ptr + tl.load(rows_ptr + at, mask=inside, other=0), mask=inside, other=0) * unsure
    )
    moved = inside & (shift > 0)
    tl.store(positions_ptr + at, tl.load(positions_ptr + at, mask=moved, other=0) - shift, mask=moved)
    kv_len = tl.load(kv_lens_ptr + at, mask=moved, other=1) - shift
    tl.store(kv_lens_ptr + at, kv_len, mask=moved)
    last = kv_len - 1
    slot = tl.load(
        tables_ptr + tl.load(table_starts_ptr + at, mask=moved, other=0) + last // BLOCK_TOKENS,
        mask=moved,
        other=0,
    )
    tl.store(write_at_ptr + at, slot * BLOCK_TOKENS + last % BLOCK_TOKENS, mask=moved)


def place_unsure(inputs: StepInputs, unsure: Tensor, rejected: Tensor, block_tokens: int) -> None:
    num = len(unsure)
    _place_kernel[(triton.cdiv(num, _ROWS),)](
        inputs.rows, unsure, rejected, inputs.positions, inputs.kv_lens, inputs.table_starts, inputs.tables,
        inputs.write_at, num,
        BLOCK_TOKENS=block_tokens, ROWS=_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pending_stride", *_STEP_TENSORS])
def _keep_kernel(
    starts_ptr, lengths_ptr, step_tokens_ptr, chosen_ptr, rows_ptr, pending_ptr, rejected_ptr, tokens_ptr,
    lasts_ptr, pending_stride,
    PLACES: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    group = tl.program_id(0)
    place = tl.arange(0, PLACES)
    start, length = tl.load(starts_ptr + group), tl.load(lengths_ptr + group)
    chosen = tl.load(chosen_ptr + start + place, mask=place <= length, other=0).to(tl.int32)
    draft = tl.load(step_tokens_ptr + start + 1 + place, mask=place < length, other=-1)
    kept = tl.min(tl.where((place < length) & (draft == chosen), PLACES, place))
    tl.store(tokens_ptr + start + place, tl.where(place <= kept, chosen, -1), mask=place <= length)
    row = tl.load(rows_ptr + start)
    tl.store(pending_ptr + row * pending_stride, tl.load(chosen_ptr + start + kept).to(tl.int32))
    tl.store(rejected_ptr + row, length - kept)
    tl.store(lasts_ptr + group, (start + kept).to(tl.int64))


def kept_tokens(
    drafting: DraftedInputs, chosen: Tensor, rows: Tensor, pending: Tensor, rejected: Tensor
) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(len(chosen), dtype=torch.int32, device=chosen.device)
    lasts = torch.empty(len(drafting.starts), dtype=torch.int64, device=chosen.device)
    _keep_kernel[(len(lasts),)](
        drafting.starts, drafting.lengths, drafting.tokens, chosen, rows, pending, rejected, tokens, lasts,
        pending.stride(0),
        PLACES=_PLACES,
    )  # fmt: skip
    return tokens, lasts


@triton.jit(do_not_specialize=["num_samples", "num_groups", *_STEP_TENSORS])
def _fill_kernel(
    tokens_ptr, lasts_ptr, rows_ptr, nexts_out_ptr, lasts_out_ptr, rows_out_ptr, num_samples, num_groups,
    HAS_LASTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, real = at < num_samples, at < num_groups
    tl.store(nexts_out_ptr + at, tl.maximum(tl.load(tokens_ptr + at, mask=inside, other=0), 0), mask=inside)
    last = at.to(tl.int64)
    if HAS_LASTS:
        last = tl.load(lasts_ptr + at * real, mask=inside, other=0)
    tl.store(lasts_out_ptr + at, last, mask=inside)
    tl.store(rows_out_ptr + at, tl.load(rows_ptr + last, mask=inside, other=0), mask=inside)


def fill_pass(tokens: Tensor, lasts: Tensor | None, rows: Tensor, into: tuple[Tensor, ...]) -> None:
    """Fill the inputs of a captured pass: `into` are its next tokens, last places and rows. A padding request
    copies the first request in everything: it writes to the same row, so it must draw the same drafts."""
    num_groups = len(tokens) if lasts is None else len(lasts)
    _fill_kernel[(triton.cdiv(len(tokens), _ROWS),)](
        tokens,
        tokens if lasts is None else lasts,
        rows,
        *into,
        len(tokens),
        num_groups,
        HAS_LASTS=lasts is not None,
        ROWS=_ROWS,
    )


@triton.jit(do_not_specialize=_STEP_TENSORS)
def _blank_kernel(
    arena_ptr, write_at_ptr,
    SLOT_STRIDE: tl.constexpr, HALF_STRIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per keys or values of a token in one layer."""
    at = tl.load(write_at_ptr + tl.program_id(0)).to(tl.int64)
    place = (
        at // BLOCK_TOKENS * SLOT_STRIDE
        + tl.program_id(1).to(tl.int64) * HALF_STRIDE
        + at % BLOCK_TOKENS * WIDTH
    )
    column = tl.arange(0, COLUMNS)
    tl.store(
        arena_ptr + place + column, tl.zeros((COLUMNS,), arena_ptr.dtype.element_ty), mask=column < WIDTH
    )


def blank(arena: Tensor, write_at: Tensor) -> None:
    num_layers, block_tokens, width = arena.shape[1], arena.shape[3], arena.shape[4] * arena.shape[5]
    assert arena.stride()[1:] == (2 * block_tokens * width, block_tokens * width, width, arena.shape[5], 1)
    _blank_kernel[(len(write_at), 2 * num_layers)](
        arena,
        write_at,
        SLOT_STRIDE=arena.stride(0),
        HALF_STRIDE=arena.stride(2),
        BLOCK_TOKENS=block_tokens,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
    )


@triton.jit(do_not_specialize=["vocab", "num_words", "at_ptr", "words_ptr"])
def _forbid_kernel(logits_ptr, at_ptr, words_ptr, vocab, num_words, BLOCK: tl.constexpr):
    """One program per stretch of a constrained row."""
    row = tl.load(at_ptr + tl.program_id(1))
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(words_ptr + tl.program_id(1) * num_words + token // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    place = logits_ptr + row * vocab + token
    tl.store(place, tl.full((BLOCK,), float("-inf"), logits_ptr.dtype.element_ty), mask=forbidden)


def forbid(logits: Tensor, at: Tensor, words: Tensor) -> None:
    vocab = logits.shape[-1]
    assert logits.is_contiguous() and words.is_contiguous() and at.dtype == torch.int64
    _forbid_kernel[(triton.cdiv(vocab, _BLOCK), len(at))](
        logits, at, words, vocab, words.shape[1], BLOCK=_BLOCK
    )


# so that one compiled kernel serves every length and offset
@triton.jit(do_not_specialize=["dest_ptr", "source_ptr", "num"])
def _move_kernel(dest_ptr, source_ptr, num, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(dest_ptr + at, tl.load(source_ptr + at, mask=at < num), mask=at < num)


def move(dest: Tensor, source: Tensor) -> None:
    """A small copy between pinned and device memory; both contiguous and of one length. Values are converted
    to `dest`'s type. A copy engine serves one direction in order, so a small copy would wait for gigabytes of
    KV of another lane. The loads and stores of a kernel share the link with them instead."""
    num = source.numel()
    if num:
        _move_kernel[(triton.cdiv(num, _TILE),)](dest, source, num, TILE=_TILE, num_warps=4)


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
    # not every Triton has log1p: for small u the series of -log(1 - u) keeps the digits that 1 - u would lose
    exponential = tl.where(
        uniform < 1e-3, uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334)), -tl.log(1.0 - uniform)
    )
    tl.store(out_ptr + row.to(tl.int64) * vocab + at, -tl.log(exponential), mask=at < vocab)


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """float32 [S, vocab]; `keys` is int32 [2, S]."""
    num_rows = keys.shape[1]
    out = torch.empty((num_rows, vocab), dtype=torch.float32, device=keys.device)
    _noise_kernel[(triton.cdiv(vocab, _BLOCK), num_rows)](
        keys.contiguous(), out, num_rows, vocab, BLOCK=_BLOCK
    )
    return out

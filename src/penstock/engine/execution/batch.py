"""The tensors of one step. Owns their layout; what they mean to the kernels is written here and nowhere else."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Chunk
from penstock.errors import InvariantBroken

# A sequence with more tokens is deep: where some of a step's few are, their lengths differ by far more than shorter ones', and their keys
# are cut into so many shares that no multiprocessor waits for another.
DEEP_TOKENS = 8192


Spans = tuple[tuple[int, int], ...]  # of each chunk behind the decodes: tokens before it, and its own


@dataclass(slots=True)
class StepInputs:
    """Device-side inputs of a step of T tokens in B chunks. All int32.

    Chunk b computes tokens q_starts[b]..q_starts[b+1] of the step, which are the last q_len positions of a sequence of
    kv_lens[b] tokens. Its slots are tables[table_starts[b] :][: ceil(kv_lens[b] / block_tokens)], exactly: there is nothing
    behind them that belongs to it. The first `num_decodes` chunks have exactly one token each. Of a sequence some of whose blocks are not
    on the device, all this is about the rest; only `positions` count from its beginning, and `paged` says which of the others are read.

    A captured replay reads the same tensors, refilled in place, so kernels must take everything that changes from step to step
    from them and not from host numbers; `max_q_len`, `max_kv_len` and `spans` are for eager steps. In a capture the first is 0, the
    second says no more than whether the step is deep, and there are no spans.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    write_at: Tensor  # [T] slot * block_tokens + offset at which the token's KV is written; the padding block's where it must not be
    q_starts: Tensor  # [B + 1]
    kv_lens: Tensor  # [B]
    table_starts: Tensor  # [B]
    tables: Tensor  # [at least the sum of all table lengths] slots
    rows: Tensor  # [B] row of per-request device state
    sample_at: Tensor  # [S] indices into the T tokens whose logits are wanted
    sample_rows: Tensor  # [S] rows of the requests they belong to
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    spans: Spans = ()
    paged: tuple[PagedChunk, ...] = ()


class PagedChunk(NamedTuple):
    """A chunk whose sequence begins with blocks that are in host memory."""

    rows: tuple[int, int]  # [first, end) of the step's tokens
    slots: NDArray[np.int32]  # of host memory
    table_at: int  # where in `StepInputs.tables` these slots begin


@functools.lru_cache(maxsize=4096)  # asked for several times in each step
def _cuts(t: int, b: int, s: int) -> tuple[int, ...]:
    return tuple(itertools.accumulate((t, t, t, b + 1, b, b, b, s, s)))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a step, and with them the place of each input inside one packed int32 buffer: one buffer, one upload."""

    num_tokens: int
    num_chunks: int
    num_samples: int
    deep: bool = False  # of a captured step: some of its sequences have more than `DEEP_TOKENS` tokens

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_chunks

    def cuts(self) -> tuple[int, ...]:
        """Ends of: tokens, positions, write_at, q_starts, kv_lens, table_starts, rows, sample_at, sample_rows. Tables follow."""
        return _cuts(self.num_tokens, self.num_chunks, self.num_samples)

    @property
    def fixed_ints(self) -> int:
        """Everything but the tables."""
        return self.cuts()[-1]

    def views(
        self,
        packed: Tensor,
        num_decodes: int,
        max_q_len: int,
        max_kv_len: int,
        spans: Spans = (),
        paged: tuple[PagedChunk, ...] = (),
    ) -> StepInputs:
        ends = self.cuts()
        parts = [packed[start:end] for start, end in zip((0, *ends[:-1]), ends, strict=True)]
        tokens, positions, write_at, q_starts, kv_lens, table_starts, rows, sample_at, sample_rows = parts
        return StepInputs(
            tokens=tokens,
            positions=positions,
            write_at=write_at,
            q_starts=q_starts,
            kv_lens=kv_lens,
            table_starts=table_starts,
            tables=packed[ends[-1] :],
            rows=rows,
            sample_at=sample_at,
            sample_rows=sample_rows,
            num_decodes=num_decodes,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            spans=spans,
            paged=paged,
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """A step on the host, ready to upload. Its arrays are views of a staging buffer, valid until that comes round again."""

    shape: Shape
    ints: NDArray[np.int32]
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    read_slots: NDArray[np.int32]
    write_slots: NDArray[np.int32]
    spans: Spans
    paged: tuple[PagedChunk, ...] = ()


class Packer:
    """Turns chunks into the packed inputs of a step. Pure host work: the step before may be running meanwhile."""

    def __init__(self, block_tokens: int, padding_slot: int, padding_row: int) -> None:
        self.block_tokens = block_tokens
        self._padding_slot = padding_slot
        self._padding_row = padding_row

    def pack(self, chunks: tuple[Chunk, ...], num_decodes: int, bucket: Shape | None, into: NDArray[np.int32]) -> Packed:
        """Write the step into `into`, padded to `bucket` where there is one. The first `num_decodes` chunks have one token each.

        Padding tokens sit at position 0 of the padding block, and what they compute lands where nobody reads. In a decode bucket each is
        a chunk of its own, so that every program has work; in any other they belong to no chunk, and padding chunks have no tokens.
        Every chunk of a bucket is sampled once; those that did not ask are sampled into the padding row.
        """
        num = len(chunks)
        lens = np.fromiter((len(c.tokens) for c in chunks), np.int32, num)
        starts = np.fromiter((c.start for c in chunks), np.int32, num)
        paged_lens = np.fromiter((c.num_paged for c in chunks), np.int32, num)
        elsewhere = np.fromiter((c.num_elsewhere for c in chunks), np.int32, num)
        resident = starts - elsewhere * self.block_tokens  # tokens before each chunk that its table has
        table_lens = np.fromiter((len(c.slots) for c in chunks), np.int32, num)
        if (table_lens != -(-(resident + lens) // self.block_tokens)).any() or (resident < 0).any():
            raise InvariantBroken("a block table is not exactly as long as its sequence")
        if (lens[:num_decodes] != 1).any() or (lens[num_decodes:] == 1).any():
            raise InvariantBroken(f"not the first {num_decodes} chunks have one token, and the others several")
        num_logits = np.fromiter((c.num_logits for c in chunks), np.int32, num)
        if (num_logits > lens).any():
            raise InvariantBroken("a chunk wants more logits than it has tokens")
        shape = bucket or Shape(int(lens.sum()), num, int(num_logits.sum()))
        num_tables = 1 + int(table_lens.sum())
        ints = into[: shape.fixed_ints + num_tables + int(paged_lens.sum())]
        parts = [ints[start:end] for start, end in pairwise((0, *shape.cuts(), len(ints)))]
        tokens, positions, write_at, q_starts, kv_lens, table_starts, rows, sample_at, sample_rows, tables = parts
        tables[0] = self._padding_slot  # entry 0 is the table of every padding chunk
        if chunks:
            np.concatenate([c.slots for c in chunks], out=tables[1:num_tables])
        kv_lens[:num] = resident + lens
        kv_lens[num:] = 1
        table_ends = np.cumsum(table_lens)
        table_starts[:num] = table_ends - table_lens + 1
        table_starts[num:] = 0
        rows[:num] = [c.row for c in chunks]
        rows[num:] = self._padding_row
        q_starts[0] = 0
        np.cumsum(lens, out=q_starts[1 : num + 1])
        q_starts[num + 1 :] = np.arange(num + 1, shape.num_chunks + 1) if shape.is_decode else q_starts[num]
        self._pack_tokens(chunks, num_decodes, starts, tables[table_ends], (tokens, positions, write_at))
        if bucket:
            sample_at[:] = np.maximum(q_starts[1:] - 1, 0)
            sample_rows[:num] = np.where(num_logits > 0, rows[:num], self._padding_row)
            sample_rows[num:] = self._padding_row
        else:
            sample_at[:] = np.repeat(q_starts[1:] - np.cumsum(num_logits), num_logits) + np.arange(shape.num_samples)
            sample_rows[:] = np.repeat(rows, num_logits)
        spans = tuple(zip(resident[num_decodes:].tolist(), lens[num_decodes:].tolist(), strict=True))
        paged = tuple(_pack_paged(chunks, q_starts, tables, num_tables)) if len(tables) > num_tables else ()
        num_decodes = shape.num_chunks if shape.is_decode else num_decodes
        write_slots = write_at[: int(lens.sum())] // self.block_tokens
        most = int(lens.max(initial=0)), int(kv_lens.max())
        return Packed(shape, ints, num_decodes, *most, tables[1:num_tables], write_slots, spans, paged)

    def _pack_tokens(
        self,
        chunks: tuple[Chunk, ...],
        num: int,
        starts: NDArray[np.int32],
        last_slots: NDArray[np.int32],
        out: tuple[NDArray[np.int32], ...],
    ) -> None:
        """The first `num` are decodes, of which a step has hundreds: filled at once."""
        tokens, positions, write_at = out
        block = self.block_tokens
        padding_at = self._padding_slot * block
        tokens[:num] = [c.tokens[0] for c in chunks[:num]]
        positions[:num] = starts[:num]
        writes = np.fromiter((c.writes for c in chunks[:num]), bool, num)
        write_at[:num] = np.where(writes, last_slots[:num] * block + starts[:num] % block, padding_at)
        at = num
        for chunk in chunks[num:]:
            end = at + len(chunk.tokens)
            tokens[at:end] = chunk.tokens
            where = np.arange(chunk.start, chunk.start + len(chunk.tokens), dtype=np.int32)
            positions[at:end] = where
            write_at[at:end] = chunk.slots[where // block - chunk.num_elsewhere] * block + where % block if chunk.writes else padding_at
            at = end
        tokens[at:], positions[at:], write_at[at:] = 0, 0, padding_at


def _pack_paged(chunks: tuple[Chunk, ...], q_starts: NDArray[np.int32], tables: NDArray[np.int32], table_at: int) -> Iterator[PagedChunk]:
    """Those whose first blocks were paged out; the slots of these stand behind all tables."""
    for number, chunk in enumerate(chunks):
        if chunk.paged is not None and len(chunk.paged):
            tables[table_at : table_at + len(chunk.paged)] = chunk.paged
            yield PagedChunk((int(q_starts[number]), int(q_starts[number + 1])), chunk.paged, table_at)
            table_at += len(chunk.paged)

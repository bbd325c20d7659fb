"""The tensors of one step. Owns their layout, and defines what they mean to the kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Chunk
from penstock.errors import InvariantBroken

# A sequence with more tokens is deep. In a step of few sequences the lengths of deep ones differ widely, so
# their keys are split finely enough that no multiprocessor waits for another.
DEEP_TOKENS = 8192
TOKENS_OF, _SLOTS_OF = attrgetter("tokens"), attrgetter("slots")
_WRITES_OF, _UNSURE_OF = attrgetter("writes"), attrgetter("num_unsure")

Spans = tuple[tuple[int, int], ...]  # of each chunk after the decodes: tokens before it, and its own


@dataclass(slots=True)
class StepInputs:
    """Device-side inputs of a step of T tokens in B chunks. All int32, in the order in which they are packed.

    Chunk b computes tokens q_starts[b]..q_starts[b+1] of the step, which are the last q_len positions of a
    sequence of kv_lens[b] tokens. Its slots are tables[table_starts[b] :][: ceil(kv_lens[b] / block_tokens)];
    entries for drafts made after the step follow, if there are any. The first `num_decodes` chunks have
    exactly one token each: a plan's chunk with drafts becomes one such chunk per token, all over the same
    table, each with one token more than the one before. For a sequence that is partly on the device, all of
    this describes that part; only `positions` count from its beginning, and `paged` lists the host blocks
    that are read.

    A captured replay reads the same tensors, refilled in place, so kernels must take everything that changes
    from step to step from them and not from host numbers; `max_q_len`, `max_kv_len` and `spans` are for eager
    steps. In a capture the first is 0, the second only tells whether the step is deep, and there are no
    spans.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    # [T] slot * block_tokens + offset where the token's KV is written; in the padding block if it must not be
    # written
    write_at: Tensor
    q_starts: Tensor  # [B + 1]
    kv_lens: Tensor  # [B]
    table_starts: Tensor  # [B]
    rows: Tensor  # [B] row of per-request device state
    sample_at: Tensor  # [S] indices into the T tokens whose logits are wanted
    sample_rows: Tensor  # [S] rows of the requests they belong to
    tables: Tensor  # [at least the sum of all table lengths] slots
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    spans: Spans = ()
    paged: tuple[PagedChunk, ...] = ()


class PagedChunk(NamedTuple):
    """Host blocks at the beginning of a chunk's sequence, or a piece of them."""

    rows: tuple[int, int]  # [first, end) of the step's tokens; they see all of it
    slots: NDArray[np.int32]  # of host memory
    table_at: int  # where in `StepInputs.tables` these slots begin


@functools.lru_cache(maxsize=4096)  # asked for several times in each step
def _cuts(t: int, b: int, s: int) -> tuple[int, ...]:
    return tuple(itertools.accumulate((t, t, t, b + 1, b, b, b, s, s)))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a step, and with them the place of each input inside one packed int32 buffer: one buffer, one
    upload."""

    num_tokens: int
    num_chunks: int
    num_samples: int
    deep: bool = False  # of a captured step: some sequences have more than `DEEP_TOKENS` tokens
    num_beside: int = 0  # of a captured step with prompts: decodes before them

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_chunks

    @property
    def num_decodes(self) -> int:
        """Of a captured step: its first chunks, of one token each."""
        return self.num_chunks if self.is_decode else self.num_beside

    @property
    def samples_all(self) -> bool:
        """Every token is a row, and is sampled."""
        return self.num_tokens == self.num_chunks == self.num_samples

    def cuts(self) -> tuple[int, ...]:
        """Ends of: tokens, positions, write_at, q_starts, kv_lens, table_starts, rows, sample_at,
        sample_rows. Tables follow."""
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
        parts = [packed[start:end] for start, end in pairwise((0, *self.cuts(), len(packed)))]
        return StepInputs(*parts, num_decodes, max_q_len, max_kv_len, spans, paged)  # type: ignore[arg-type,call-arg]  # ten parts


@dataclass(frozen=True, slots=True)
class Packed:
    """A step on the host, ready to upload. Its arrays are views of a staging buffer, valid until that is
    reused."""

    shape: Shape
    ints: NDArray[np.int32]
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    read_slots: NDArray[np.int32]
    write_slots: NDArray[np.int32]
    spans: Spans
    paged: tuple[PagedChunk, ...] = ()
    nexts_at: int = 0  # offset of the next tokens of a step with prompts, if a draft model needs them
    drafted: Drafted | None = None  # set if a chunk has drafts, or a start that the host does not know
    # slots that drafts made after the step may write
    ahead_slots: NDArray[np.int32] | None = None
    gap: int = 0  # rows of padding between the decodes and the prompts
    num_asking: int = 0  # requests without padding; 0 if none samples

    @property
    def row_of(self) -> NDArray[np.int32]:
        """The row of each chunk."""
        return self.ints[slice(*self.shape.cuts()[5:7])]


class Drafted(NamedTuple):
    """Extra inputs of a step with drafts, or after a step with drafts. The adjacent samples of one request
    form a group. The arrays are at the end of the packed ints."""

    at: int
    num_samples: int
    num_groups: int
    num_drafts: int  # most drafts of a group
    num_unsure: int  # most of a chunk

    def views(self, packed: Tensor, tokens: Tensor) -> DraftedInputs:
        sizes = [self.num_samples, self.num_samples, self.num_groups, self.num_groups]
        unsure, group_of, starts, lengths = packed[self.at : self.at + sum(sizes)].split(sizes)
        return DraftedInputs(unsure, group_of, starts, lengths, tokens, self.num_drafts, self.num_unsure)

    @staticmethod
    def num_ints(num_samples: int, num_groups: int) -> int:
        return 2 * (num_samples + num_groups)


class DraftedInputs(NamedTuple):
    """The same on the device; all int32."""

    unsure: Tensor  # [S] 1: its start depends on the step before; 0: the host knows it
    group_of: Tensor  # [S]
    starts: Tensor  # [G] the first sample of each group
    lengths: Tensor  # [G] drafts of each group
    tokens: Tensor  # tokens of the step; the draft after a sample is the next token
    num_drafts: int
    num_unsure: int


class _Rows(NamedTuple):
    """A step as kernels see it, without padding. By row: its tokens, tokens of its sequence before them, how
    many of these are in its table, and samples."""

    lens: NDArray[np.int32]
    starts: NDArray[np.int32]
    resident: NDArray[np.int32]
    num_logits: NDArray[np.int32]
    of_chunk: NDArray[np.intp] | slice
    firsts: NDArray[np.intp]  # the first row of each chunk
    num_decodes: int  # first rows, of one token each
    num_paged: int  # host blocks of all chunks


class Packer:
    """Turns chunks into the packed inputs of a step. Host work only: the step before may still be running."""

    def __init__(self, block_tokens: int, padding_slot: int, padding_row: int, num_ahead: int = 0) -> None:
        """`num_ahead`: drafts per request that may be made after a step. If not 0, steps with prompts also
        carry the next token of each of their tokens."""
        self._num_ahead = num_ahead
        self.num_padding = 1 + num_ahead // block_tokens  # table entries of a padding chunk
        self._padding_table = np.full(self.num_padding, padding_slot, np.int32)
        self.block_tokens = block_tokens
        self._padding_slot = padding_slot
        self.padding_row = padding_row

    def pack(
        self,
        chunks: tuple[Chunk, ...],
        num_decodes: int,
        bucket: Shape | None,
        into: NDArray[np.int32],
        num_ahead: int = 0,
    ) -> Packed:
        """Write the step into `into`, padded to `bucket` if given. The first `num_decodes` chunks have one
        token and its drafts; those that sample nothing are the last of them. Tables have entries for
        `num_ahead` drafts made after the step.

        Padding tokens are at position 0 of the padding block, and their results are never read. Those after
        the decodes are chunks of their own, so that every program has work; those after prompts belong to no
        chunk, and padding chunks there are empty. Every row of a bucket is sampled once, padding last; rows
        that want no sample are sampled into the padding row.
        """
        table_lens, rows = self._measured(chunks, num_decodes, num_ahead)
        num, num_single, num_decodes = len(rows.lens), num_decodes, rows.num_decodes
        num_tokens, num_drafts = int(rows.lens.sum()), num_decodes - num_single
        num_paged, num_tables = rows.num_paged, self.num_padding + int(table_lens.sum())
        shape = bucket or Shape(num_tokens, num, int(rows.num_logits.sum()))
        is_drafted = num_drafts > 0 or any(map(_UNSURE_OF, chunks))
        num_extra = Drafted.num_ints(shape.num_samples, shape.num_samples - num_drafts) if is_drafted else 0
        num_nexts = shape.num_tokens if self._num_ahead and not shape.samples_all else 0
        num_extra += num_nexts
        ints = into[: shape.fixed_ints + num_tables + num_paged + num_extra]
        parts = [ints[start:end] for start, end in pairwise((0, *shape.cuts(), len(ints) - num_extra))]
        tokens, positions, write_at, q_starts, kv_lens, tables_at, row_of, sample_at, sample_rows, tables = (
            parts
        )
        tables[: self.num_padding] = self._padding_slot  # shared by all padding chunks
        if chunks:
            own_tables = (
                self._padded_tables(chunks, table_lens) if num_ahead else list(map(_SLOTS_OF, chunks))
            )
            np.concatenate(own_tables, out=tables[self.num_padding : num_tables])
        gap = bucket.num_decodes - num_decodes if bucket is not None else 0
        if bucket is not None and (gap < 0 or num + gap > bucket.num_chunks or num_paged):
            raise InvariantBroken(
                f"a step of {num} rows, {num_decodes} of which decode, does not fit {bucket}"
            )
        padding = slice(num_decodes, num_decodes + gap)
        # Indices of the chunks within the shape, and of their tokens.
        own: NDArray[np.intp] | slice = slice(num)
        own_tokens: NDArray[np.intp] | slice = slice(num_tokens)
        is_apart = gap > 0 and num > num_decodes  # padding lies between them
        if is_apart:
            own, own_tokens = (np.r_[:num_decodes, padding.stop : end + gap] for end in (num, num_tokens))
        table_starts = np.cumsum(table_lens) - table_lens + self.num_padding
        widths = np.zeros(shape.num_chunks, np.int32)
        widths[own], widths[padding] = rows.lens, 1
        q_starts[0] = 0
        np.cumsum(widths, out=q_starts[1:])
        starts_of = table_starts[rows.of_chunk]
        ids, places, written = self._by_token(chunks, rows, starts_of, tables)
        for part, at, end, values, blank in (
            (kv_lens, own, num + gap, rows.resident + rows.lens, 1),
            (tables_at, own, num + gap, starts_of, 0),
            (row_of, own, num + gap, _column(chunks, "row")[rows.of_chunk], self.padding_row),
            (tokens, own_tokens, num_tokens + gap, ids, 0),
            (positions, own_tokens, num_tokens + gap, places, 0),
            (write_at, own_tokens, num_tokens + gap, written, self._padding_slot * self.block_tokens),
        ):
            part[padding] = part[end:] = blank
            part[at] = values
        if bucket:
            sample_at[:] = np.maximum(q_starts[1:] - 1, 0)
            if is_apart:
                sample_at[:num], sample_at[num : num + gap] = sample_at[own], sample_at[padding].copy()
            sample_rows[:num] = np.where(rows.num_logits > 0, row_of[own], self.padding_row)
            sample_rows[num:] = self.padding_row
        else:
            sample_at[:] = np.repeat(q_starts[1:] - np.cumsum(rows.num_logits), rows.num_logits) + np.arange(
                shape.num_samples
            )
            sample_rows[:] = np.repeat(row_of, rows.num_logits)
        spans = tuple(
            zip(rows.resident[num_decodes:].tolist(), rows.lens[num_decodes:].tolist(), strict=True)
        )
        paged = tuple(_pack_paged(chunks, q_starts, rows.firsts, tables, num_tables)) if num_paged else ()
        nexts_at = len(ints) - num_extra
        if num_nexts:
            _pack_nexts(chunks, num_single, gap, bucket is not None, ints[nexts_at : nexts_at + num_nexts])
        drafted = (
            _pack_drafted(chunks, bucket is not None, shape.num_samples, ints, nexts_at + num_nexts)
            if is_drafted
            else None
        )
        write_slots = written // self.block_tokens
        num_decodes += gap
        # rows with an unknown start may write earlier slots
        if drafted is not None and drafted.num_unsure:
            write_slots = np.concatenate(
                [write_slots, *(self._slots_before(chunk) for chunk in chunks if chunk.num_unsure)]
            )
        most = int(rows.lens.max(initial=0)), int(kv_lens.max())
        read_slots = tables[self.num_padding : num_tables]
        ahead_slots = read_slots[:0]
        if num_ahead and chunks:  # drafts are written after the last token of each chunk
            ends = [chunk.kv_len - chunk.num_elsewhere * self.block_tokens for chunk in chunks]
            read_slots = np.concatenate(
                [c.slots[: -(-end // self.block_tokens)] for c, end in zip(chunks, ends, strict=True)]
            )
            ahead_slots = np.concatenate(
                [c.slots[end // self.block_tokens :] for c, end in zip(chunks, ends, strict=True)]
            )
        num_asking = len(chunks) if rows.num_logits.any() else 0
        return Packed(
            shape,
            ints,
            num_decodes,
            *most,
            read_slots,
            write_slots,
            spans,
            paged,
            nexts_at,
            drafted,
            ahead_slots,
            gap,
            num_asking,
        )

    def _measured(
        self, chunks: tuple[Chunk, ...], num_decodes: int, num_ahead: int
    ) -> tuple[NDArray[np.int32], _Rows]:
        """Table entries of each chunk, and the step's rows: one per chunk, and one per token of a decode."""
        num = len(chunks)
        lens = np.fromiter(map(len, map(TOKENS_OF, chunks)), np.int32, num)
        table_lens = np.fromiter(map(len, map(_SLOTS_OF, chunks)), np.int32, num)
        paged = np.fromiter((0 if c.paged is None else len(c.paged) for c in chunks), np.int32, num)
        starts, room = _column(chunks, "start"), _column(chunks, "room")
        resident = starts - (paged + _column(chunks, "num_left_out")) * self.block_tokens
        is_whole = table_lens == -(-(resident + lens + room) // self.block_tokens)
        if not is_whole.all() or (resident < 0).any() or (room > num_ahead).any():
            raise InvariantBroken("a block table is not exactly as long as its sequence")
        if num_ahead:
            table_lens = -(-(resident + lens + num_ahead) // self.block_tokens)
        num_logits, num_paged = _column(chunks, "num_logits"), int(paged.sum())
        _check_lengths(lens, num_logits, num_decodes)
        num_drafts = int(lens[:num_decodes].sum()) - num_decodes
        if not num_drafts:
            return table_lens, _Rows(
                lens, starts, resident, num_logits, slice(None), np.arange(num), num_decodes, num_paged
            )
        rows_of = np.where(np.arange(num) < num_decodes, lens, 1)
        of_chunk, places = _numbered(rows_of)
        num_decodes += num_drafts
        lens, num_logits = lens[of_chunk], num_logits[of_chunk]
        lens[:num_decodes] = 1
        # some decodes sample nothing
        np.minimum(num_logits[:num_decodes], 1, out=num_logits[:num_decodes])
        firsts = np.flatnonzero(places == 0)
        starts, resident = starts[of_chunk] + places, resident[of_chunk] + places
        return table_lens, _Rows(lens, starts, resident, num_logits, of_chunk, firsts, num_decodes, num_paged)

    def _padded_tables(
        self, chunks: Sequence[Chunk], table_lens: NDArray[np.int32]
    ) -> list[NDArray[np.int32]]:
        """The slots of each chunk, with the padding slot for drafts that have no room."""
        parts: list[NDArray[np.int32]] = []
        for chunk, length in zip(chunks, table_lens.tolist(), strict=True):
            parts += chunk.slots, self._padding_table[: length - len(chunk.slots)]
        return parts

    def _slots_before(self, chunk: Chunk) -> NDArray[np.int32]:
        """Slots that the chunk writes if drafts before it are rejected."""
        first, end = (
            (chunk.start - chunk.num_unsure) // self.block_tokens,
            -(-chunk.start // self.block_tokens),
        )
        return chunk.slots[first - chunk.num_elsewhere : end - chunk.num_elsewhere]

    def _by_token(
        self, chunks: Sequence[Chunk], rows: _Rows, table_starts: NDArray[np.int32], tables: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """By token: its id, its position, and where its KV is written. Vectorised, since there may be
        hundreds of chunks. `table_starts` are by row."""
        is_one_each = (rows.lens == 1).all()
        owners, places = (slice(None), np.int32(0)) if is_one_each else _numbered(rows.lens)
        where = rows.resident[owners] + places
        ids = np.fromiter(itertools.chain.from_iterable(map(TOKENS_OF, chunks)), np.int32, len(where))
        write_at = (
            tables[table_starts[owners] + where // self.block_tokens] * self.block_tokens
            + where % self.block_tokens
        )
        if not all(map(_WRITES_OF, chunks)):
            unwritten = np.repeat(
                [not chunk.writes for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
            )
            write_at[unwritten] = self._padding_slot * self.block_tokens
        return ids, rows.starts[owners] + places, write_at


def _column(chunks: Sequence[Chunk], name: str) -> NDArray[np.int32]:
    """One field of all chunks as an array; fast, since there may be hundreds."""
    return np.fromiter(map(attrgetter(name), chunks), np.int32, len(chunks))


def _check_lengths(lens: NDArray[np.int32], num_logits: NDArray[np.int32], num_decodes: int) -> None:
    if (lens[num_decodes:] == 1).any():
        raise InvariantBroken(f"not only the first {num_decodes} chunks have one token")
    if (num_logits > lens).any():
        raise InvariantBroken("a chunk wants more logits than it has tokens")
    decodes = lens[:num_decodes]
    if (num_logits[:num_decodes] != decodes)[decodes != 1].any():
        raise InvariantBroken("a decode with drafts wants the logits of all its tokens")
    samples = num_logits[:num_decodes] > 0
    if (samples[1:] > samples[:-1]).any():
        raise InvariantBroken(
            "a chunk of one token that samples nothing stands before one that samples: rows and samples "
            "would differ"
        )


def _numbered(lens: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """For a concatenation of `lens` items per owner: the owner of each item, and its index within the
    owner."""
    owners = np.repeat(np.arange(len(lens)), lens)
    return owners, (np.arange(len(owners)) - (np.cumsum(lens) - lens)[owners]).astype(np.int32)


def _pack_nexts(
    chunks: Sequence[Chunk], num_decodes: int, gap: int, is_bucket: bool, into: NDArray[np.int32]
) -> None:
    """Token ids, or -1 - the number of the sample that is the next token."""
    at = sample = 0
    for chunk in chunks[:num_decodes]:
        end = at + len(chunk.tokens)
        into[at:end] = (
            -1 - np.arange(sample, sample + len(chunk.tokens)) if chunk.num_logits else chunk.next_token
        )
        at, sample = end, sample + max(chunk.num_logits, is_bucket)
    into[at : at + gap] = 0
    at += gap
    for chunk in chunks[num_decodes:]:
        end = at + len(chunk.tokens)
        into[at : end - 1] = chunk.tokens[1:]
        into[end - 1] = -1 - sample if chunk.num_logits else chunk.next_token
        at, sample = end, sample + max(chunk.num_logits, is_bucket)
    into[at:] = 0


def _pack_drafted(
    chunks: tuple[Chunk, ...], is_bucket: bool, num_samples: int, ints: NDArray[np.int32], at: int
) -> Drafted:
    """In a bucket every row has a sample, and a padding row is a group of its own."""
    sizes = np.array([max(chunk.num_logits, is_bucket) for chunk in chunks], np.int32)
    flags = np.repeat([chunk.num_unsure > 0 for chunk in chunks], sizes)
    sizes = np.concatenate([sizes[sizes > 0], np.ones(num_samples - len(flags), np.int32)])
    unsure, group_of, starts, lengths = np.split(ints[at:], np.cumsum([num_samples, num_samples, len(sizes)]))
    unsure[: len(flags)], unsure[len(flags) :] = flags, 0
    group_of[:] = np.repeat(np.arange(len(sizes)), sizes)
    starts[:] = np.cumsum(sizes) - sizes
    lengths[:] = sizes - 1
    return Drafted(
        at, num_samples, len(sizes), int(lengths.max(initial=0)), max(chunk.num_unsure for chunk in chunks)
    )


def _pack_paged(
    chunks: tuple[Chunk, ...],
    q_starts: NDArray[np.int32],
    first_rows: NDArray[np.intp],
    tables: NDArray[np.int32],
    table_at: int,
) -> Iterator[PagedChunk]:
    """Chunks with paged-out blocks; their host slots follow all tables."""
    for number, chunk in zip(first_rows.tolist(), chunks, strict=True):
        if chunk.paged is not None and len(chunk.paged):
            tables[table_at : table_at + len(chunk.paged)] = chunk.paged
            yield PagedChunk((int(q_starts[number]), int(q_starts[number + 1])), chunk.paged, table_at)
            table_at += len(chunk.paged)

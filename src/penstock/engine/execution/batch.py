"""The tensors of one step. Owns their layout, and defines what they mean to the kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
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
    has_drafts: bool = False  # adjacent decodes may be of one request


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
    has_drafts: bool = False  # of a captured step: only if its layers have to know

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_chunks

    @property
    def label(self) -> str:
        """For people."""
        kinds = {"deep": self.deep, "with drafts": self.has_drafts}
        return " ".join([f"{self.num_tokens} x {self.num_chunks}", *(kind for kind in kinds if kinds[kind])])

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
        return StepInputs(*parts, num_decodes, max_q_len, max_kv_len, spans, paged, self.has_drafts)  # type: ignore[arg-type,call-arg]  # ten parts


@dataclass(slots=True)
class Packed:
    """A step on the host, ready to upload. Its arrays are views of a staging buffer, valid until that is
    reused."""

    shape: Shape
    buffer: NDArray[np.int32]
    num_ints: int  # used ones of the buffer; passes append their own
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    read_slots: NDArray[np.int32]
    write_slots: NDArray[np.int32]
    spans: Spans
    paged: tuple[PagedChunk, ...] = ()
    drafted: Drafted | None = None  # set if a chunk has drafts, or a start that the host does not know
    gap: int = 0  # rows of padding between the decodes and the prompts

    @property
    def ints(self) -> NDArray[np.int32]:
        return self.buffer[: self.num_ints]

    @property
    def row_of(self) -> NDArray[np.int32]:
        """The row of each chunk."""
        return self.buffer[slice(*self.shape.cuts()[5:7])]

    def samples(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The row of each sample, and the position of its token."""
        ends = self.shape.cuts()
        at, rows = self.buffer[ends[6] : ends[7]], self.buffer[ends[7] : ends[8]]
        return rows, self.buffer[ends[0] : ends[1]][at]

    def append(self, num_ints: int) -> tuple[int, NDArray[np.int32]]:
        """Room for further inputs, and where it begins."""
        at, self.num_ints = self.num_ints, self.num_ints + num_ints
        return at, self.ints[at:]

    def views(self, ints: Tensor) -> StepInputs:
        """`ints`: the same on the device."""
        sizes = self.num_decodes, self.max_q_len, self.max_kv_len
        return self.shape.views(ints, *sizes, self.spans, self.paged)


class Drafted(NamedTuple):
    """Extra inputs of a step with drafts, or after a step with drafts. The adjacent samples of one request
    form a group. The arrays are at the end of the packed ints."""

    at: int
    num_samples: int
    num_groups: int
    num_drafts: int  # most drafts of a group
    num_unsure: int  # most of a chunk

    def views(self, packed: Tensor, tokens: Tensor, positions: Tensor | None = None) -> DraftedInputs:
        sizes = [self.num_samples, self.num_samples, self.num_groups, self.num_groups]
        unsure, group_of, starts, lengths = packed[self.at : self.at + sum(sizes)].split(sizes)
        most = self.num_drafts, self.num_unsure
        return DraftedInputs(unsure, group_of, starts, lengths, tokens, *most, positions)

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
    positions: Tensor | None = None  # [S] of the samples' tokens


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


class _Places(NamedTuple):
    """Where rows and tokens are within a shape. Padding after the decodes is between them if there are
    prompts."""

    gap: int  # rows of padding after the decodes
    padding: slice  # these rows
    rows: NDArray[np.intp] | slice
    tokens: NDArray[np.intp] | slice

    @classmethod
    def of(cls, rows: _Rows, bucket: Shape | None) -> _Places:
        num, num_tokens, num_decodes = len(rows.lens), int(rows.lens.sum()), rows.num_decodes
        gap = 0 if bucket is None else bucket.num_decodes - num_decodes
        if bucket is not None and (gap < 0 or num + gap > bucket.num_chunks or rows.num_paged):
            raise InvariantBroken(
                f"a step of {num} rows, {num_decodes} of which decode, does not fit {bucket}"
            )
        padding = slice(num_decodes, num_decodes + gap)
        if gap > 0 and num > num_decodes:
            apart = (np.r_[:num_decodes, padding.stop : end + gap] for end in (num, num_tokens))
            return cls(gap, padding, *apart)
        return cls(gap, padding, slice(num), slice(num_tokens))


class _Parts(NamedTuple):
    """The packed inputs, as in `StepInputs`."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    write_at: NDArray[np.int32]
    q_starts: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    table_starts: NDArray[np.int32]
    rows: NDArray[np.int32]
    sample_at: NDArray[np.int32]
    sample_rows: NDArray[np.int32]
    tables: NDArray[np.int32]


class Packer:
    """Turns chunks into the packed inputs of a step. Host work only: the step before may still be running.

    Padding tokens are at position 0 of the padding block, and their results are never read. Those after the
    decodes are chunks of their own, so that every program has work; those after prompts belong to no chunk,
    and padding chunks there are empty. Every row of a bucket is sampled once, padding last; rows that want no
    sample are sampled into the padding row.
    """

    def __init__(self, block_tokens: int, padding_slot: int, padding_row: int, num_ahead: int = 0) -> None:
        """`num_ahead`: drafts per request that may be made after a step."""
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
        `num_ahead` drafts made after the step."""
        if bucket is not None and bucket.is_decode and not num_ahead and _are_plain(chunks):
            return self._pack_plain(chunks, bucket, into)
        table_lens, rows = self._measured(chunks, num_decodes, num_ahead)
        has_drafts, num_samples = rows.num_decodes > num_decodes, int(rows.num_logits.sum())
        shape = bucket or Shape(int(rows.lens.sum()), len(rows.lens), num_samples, has_drafts=has_drafts)
        places = _Places.of(rows, bucket)
        num_tables = self.num_padding + int(table_lens.sum())
        num_ints = shape.fixed_ints + num_tables + rows.num_paged
        parts = _Parts(*(into[start:end] for start, end in pairwise((0, *shape.cuts(), num_ints))))
        parts.tables[: self.num_padding] = self._padding_slot  # shared by all padding chunks
        own_tables = parts.tables[self.num_padding : num_tables]
        if chunks:
            np.concatenate(self._tables(chunks, table_lens, num_ahead), out=own_tables)
        table_starts = np.cumsum(table_lens) - table_lens + self.num_padding
        written = self._pack_rows(chunks, rows, table_starts[rows.of_chunk], places, parts)
        self._pack_samples(rows, places, parts, bucket is not None)
        packed = Packed(
            shape,
            into,
            num_ints,
            rows.num_decodes + places.gap,
            int(rows.lens.max(initial=0)),
            int(parts.kv_lens.max()),
            own_tables if not num_ahead else self._slots_read(chunks, own_tables),
            self._slots_written(chunks, written),
            _spans(rows),
            _pack_paged(chunks, rows, parts, num_tables) if rows.num_paged else (),
            gap=places.gap,
        )
        if has_drafts or any(map(_UNSURE_OF, chunks)):
            packed.drafted = _pack_drafted(chunks, bucket is not None, packed, rows.num_decodes - num_decodes)
        return packed

    def _pack_plain(self, chunks: tuple[Chunk, ...], bucket: Shape, into: NDArray[np.int32]) -> Packed:
        """Decodes of one token each, whose whole sequences are on the device: nearly every step. The same
        inputs in a third of the time, which a small model's step would wait for."""
        num, size, most = len(chunks), self.block_tokens, bucket.num_tokens
        if num > most:
            raise InvariantBroken(f"a step of {num} rows, {num} of which decode, does not fit {bucket}")
        starts, table_lens = _column(chunks, "start"), np.fromiter(map(len, map(_SLOTS_OF, chunks)), np.int32)
        if (table_lens != starts // size + 1).any():
            raise InvariantBroken("a block table is not exactly as long as its sequence")
        into[: bucket.fixed_ints] = self._blank(bucket)
        ends = bucket.cuts()
        tokens, positions, write_at, _, kv_lens, table_starts, rows, _, sample_rows = (
            into[first : first + num] for first in (0, *ends[:-1])
        )
        first, last = bucket.fixed_ints + self.num_padding, np.cumsum(table_lens)
        num_ints = first + (int(last[-1]) if num else 0)
        into[bucket.fixed_ints : first] = self._padding_slot
        tables = into[first:num_ints]
        if num:
            np.concatenate([chunk.slots for chunk in chunks], out=tables)
        tokens[:] = np.fromiter((chunk.tokens[0] for chunk in chunks), np.int32, num)
        positions[:], rows[:] = starts, _column(chunks, "row")
        np.add(starts, 1, out=kv_lens)
        np.add(last - table_lens, self.num_padding, out=table_starts)
        written = tables[last - 1]
        write_at[:] = written * size + starts % size
        num_logits = _column(chunks, "num_logits")
        _check_lengths(np.ones(num, np.int32), num_logits, num)
        sample_rows[:] = np.where(num_logits > 0, rows, self.padding_row)
        longest = int(starts.max(initial=0)) + 1
        return Packed(bucket, into, num_ints, most, 1, longest, tables, written, (), gap=most - num)

    @functools.cache  # noqa: B019  # an engine has one packer, for life
    def _blank(self, bucket: Shape) -> NDArray[np.int32]:
        """The inputs of a decode step without requests, but for its tables."""
        blank = np.empty(bucket.fixed_ints, np.int32)
        parts = _Parts(*(blank[start:end] for start, end in pairwise((0, *bucket.cuts(), len(blank)))))
        parts.tokens[:] = parts.positions[:] = parts.table_starts[:] = 0
        parts.write_at[:] = self._padding_slot * self.block_tokens
        parts.q_starts[:], parts.sample_at[:] = np.arange(len(parts.q_starts)), np.arange(len(parts.rows))
        parts.kv_lens[:] = 1
        parts.rows[:] = parts.sample_rows[:] = self.padding_row
        return blank

    def _pack_rows(
        self,
        chunks: Sequence[Chunk],
        rows: _Rows,
        starts_of: NDArray[np.int32],
        places: _Places,
        parts: _Parts,
    ) -> NDArray[np.int32]:
        """Everything by row and by token, with padding between and after them. `starts_of`: where each row's
        table starts. Returns where the KV of each token is written."""
        own, own_tokens, padding = places.rows, places.tokens, places.padding
        widths = np.zeros(len(parts.kv_lens), np.int32)
        widths[own], widths[padding] = rows.lens, 1
        parts.q_starts[0] = 0
        np.cumsum(widths, out=parts.q_starts[1:])
        ids, positions, written = self._by_token(chunks, rows, starts_of, parts.tables)
        num, num_tokens = len(rows.lens) + places.gap, len(ids) + places.gap
        for part, at, end, values, blank in (
            (parts.kv_lens, own, num, rows.resident + rows.lens, 1),
            (parts.table_starts, own, num, starts_of, 0),
            (parts.rows, own, num, _column(chunks, "row")[rows.of_chunk], self.padding_row),
            (parts.tokens, own_tokens, num_tokens, ids, 0),
            (parts.positions, own_tokens, num_tokens, positions, 0),
            (parts.write_at, own_tokens, num_tokens, written, self._padding_slot * self.block_tokens),
        ):
            part[padding] = part[end:] = blank
            part[at] = values
        return written

    def _pack_samples(self, rows: _Rows, places: _Places, parts: _Parts, is_bucket: bool) -> None:
        ends, sample_at, num = parts.q_starts[1:], parts.sample_at, len(rows.lens)
        if not is_bucket:
            before = np.repeat(ends - np.cumsum(rows.num_logits), rows.num_logits)
            sample_at[:] = before + np.arange(len(sample_at))
            parts.sample_rows[:] = np.repeat(parts.rows, rows.num_logits)
            return
        sample_at[:] = np.maximum(ends - 1, 0)
        if not isinstance(places.rows, slice):
            padding = sample_at[places.padding].copy()
            sample_at[:num], sample_at[num : num + places.gap] = sample_at[places.rows], padding
        parts.sample_rows[:num] = np.where(rows.num_logits > 0, parts.rows[places.rows], self.padding_row)
        parts.sample_rows[num:] = self.padding_row

    def _slots_read(self, chunks: Sequence[Chunk], tables: NDArray[np.int32]) -> NDArray[np.int32]:
        """Without those for drafts made after the step."""
        ends = [chunk.kv_len - chunk.num_elsewhere * self.block_tokens for chunk in chunks]
        own = [c.slots[: -(-end // self.block_tokens)] for c, end in zip(chunks, ends, strict=True)]
        return np.concatenate(own) if own else tables

    def _slots_written(self, chunks: Sequence[Chunk], written: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows with an unknown start may write earlier slots."""
        slots = written // self.block_tokens
        if not any(map(_UNSURE_OF, chunks)):
            return slots
        return np.concatenate([slots, *(self._slots_before(chunk) for chunk in chunks if chunk.num_unsure)])

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

    def _tables(
        self, chunks: Sequence[Chunk], table_lens: NDArray[np.int32], num_ahead: int
    ) -> list[NDArray[np.int32]]:
        """The slots of each chunk, with the padding slot for drafts that have no room."""
        if not num_ahead:
            return list(map(_SLOTS_OF, chunks))
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


def _are_plain(chunks: Sequence[Chunk]) -> bool:
    """True if each is one token that is written after a sequence on the device, and depends on no drafts."""
    return all(
        len(chunk.tokens) == 1
        and chunk.writes
        and chunk.paged is None
        and not (chunk.num_unsure or chunk.num_left_out or chunk.room)
        for chunk in chunks
    )


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


def _spans(rows: _Rows) -> Spans:
    resident, lens = (values[rows.num_decodes :].tolist() for values in (rows.resident, rows.lens))
    return tuple(zip(resident, lens, strict=True))


def _pack_drafted(chunks: Sequence[Chunk], is_bucket: bool, packed: Packed, num_drafts: int) -> Drafted:
    """In a bucket every row has a sample, and a padding row is a group of its own."""
    num_samples = packed.shape.num_samples
    at, ints = packed.append(Drafted.num_ints(num_samples, num_samples - num_drafts))
    sizes = np.array([max(chunk.num_logits, is_bucket) for chunk in chunks], np.int32)
    flags = np.repeat([chunk.num_unsure > 0 for chunk in chunks], sizes)
    sizes = np.concatenate([sizes[sizes > 0], np.ones(num_samples - len(flags), np.int32)])
    unsure, group_of, starts, lengths = np.split(ints, np.cumsum([num_samples, num_samples, len(sizes)]))
    unsure[: len(flags)], unsure[len(flags) :] = flags, 0
    group_of[:] = np.repeat(np.arange(len(sizes)), sizes)
    starts[:] = np.cumsum(sizes) - sizes
    lengths[:] = sizes - 1
    most = int(lengths.max(initial=0)), max(chunk.num_unsure for chunk in chunks)
    return Drafted(at, num_samples, len(sizes), *most)


def _pack_paged(chunks: Sequence[Chunk], rows: _Rows, parts: _Parts, table_at: int) -> tuple[PagedChunk, ...]:
    """Chunks with paged-out blocks; their host slots follow all tables."""
    paged = []
    ends = [*rows.firsts[1:].tolist(), len(rows.lens)]
    for first, end, chunk in zip(rows.firsts.tolist(), ends, chunks, strict=True):
        if chunk.paged is not None and len(chunk.paged):
            parts.tables[table_at : table_at + len(chunk.paged)] = chunk.paged
            tokens = int(parts.q_starts[first]), int(parts.q_starts[end])
            paged.append(PagedChunk(tokens, chunk.paged, table_at))
            table_at += len(chunk.paged)
    return tuple(paged)

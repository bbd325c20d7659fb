"""Runs of neighbouring slots, each moved by one call of the system. Owns how blocks are grouped into runs and how they get past memory that
O_DIRECT cannot use; what the bytes mean and what a failure means is the store's business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.kv.tiers.ssd.disk import is_aligned, read_all, write_all
from penstock.kv.tiers.ssd.files import SegmentFiles
from penstock.kv.tiers.ssd.format import SECTOR_BYTES, SegmentHead, slot_bytes
from penstock.kv.tiers.ssd.segments import Segment, Segments

_MOST_BLOCKS = 256  # two buffers each: half of what one call may have
_MOST_BYTES = 16 << 20  # more in one call is no faster, and bounces take memory


class Run(NamedTuple):
    """Neighbouring slots of one segment, and which blocks of a call belong there."""

    segment: Segment
    head: SegmentHead  # of the segment, when the run was made
    first: int  # as the segment counts them
    places: list[int]

    def split(self) -> list[Run]:
        """The same, block by block."""
        return [Run(self.segment, self.head, self.first + i, [place]) for i, place in enumerate(self.places)]


def runs_of(segments: Segments, slots: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """`slots` are pairs of slot and place, in any order, each slot once."""
    run: Run | None = None
    for slot, place in sorted(slots):
        segment, number = segments.locate(slot)
        if run is not None and (run.segment, run.first + len(run.places)) == (segment, number) and not _is_full(run):
            run.places.append(place)
            continue
        if run is not None:
            yield run
        run = Run(segment, segment.head, number, [place])
    if run is not None:
        yield run


def _is_full(run: Run) -> bool:
    num = len(run.places)
    return num >= _MOST_BLOCKS or (num + 1) * slot_bytes(run.head.block_bytes) > _MOST_BYTES


def write_run(files: SegmentFiles, run: Run, heads: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
    """All of it, or OSError; then anything may be in those slots."""
    buffers = _buffers(files, run, blocks)
    for i, head in enumerate(heads):
        buffers.heads[i][:] = head
        if buffers.payloads is not None:
            buffers.payloads[i][: len(blocks[i])] = blocks[i]
    write_all(files.io, run.segment.fd, buffers.all, run.segment.offset(run.first))


def read_run(files: SegmentFiles, run: Run, into: Sequence[memoryview]) -> list[memoryview]:
    """The heads of those blocks that were read in full; the payloads are in `into`. The heads are good until the thread's next call."""
    buffers = _buffers(files, run, into)
    done = read_all(files.io, run.segment.fd, buffers.all, run.segment.offset(run.first))
    num = done // slot_bytes(run.head.block_bytes)
    if buffers.payloads is not None:
        for i in range(num):
            into[i][:] = buffers.payloads[i][: len(into[i])]
    return buffers.heads[:num]


class _Buffers(NamedTuple):
    all: list[memoryview]  # as they lie in the file
    heads: list[memoryview]
    payloads: list[memoryview] | None  # None: those of the caller


def _buffers(files: SegmentFiles, run: Run, blocks: Sequence[memoryview]) -> _Buffers:
    width, num = slot_bytes(run.head.block_bytes), len(blocks)
    if all(map(is_aligned, blocks)):
        room = files.scratch.room(num * SECTOR_BYTES)
        heads = [room[i * SECTOR_BYTES : (i + 1) * SECTOR_BYTES] for i in range(num)]
        return _Buffers([buffer for pair in zip(heads, blocks, strict=True) for buffer in pair], heads, None)
    room = files.scratch.room(num * width)
    heads = [room[i * width : i * width + SECTOR_BYTES] for i in range(num)]
    payloads = [room[i * width + SECTOR_BYTES : (i + 1) * width] for i in range(num)]
    return _Buffers([room], heads, payloads)

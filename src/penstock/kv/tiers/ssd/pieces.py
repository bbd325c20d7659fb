"""Pieces of segments: slots that become usable together, when their file is made or when their heads have been read. Owns those whose file
is yet to be made, and makes it when they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.kv.blocks.handles import Reservation
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.segments import Segment, Segments

_MOST_SLOTS = 256
_FEWEST = 8  # of a segment: so much of it can be used where the disk has not enough room for all


class SlotPiece(NamedTuple):
    segment: Segment
    slots: range  # as the segment counts them
    withheld: Reservation

    @property
    def is_in_file(self) -> bool:
        return self.slots.stop <= self.segment.num_ready


def withhold_all(segments: Segments, index: SlotIndex) -> list[SlotPiece]:
    """No slot can be used yet. Called before the index is."""
    return [SlotPiece(segment, slots, index.withhold(len(slots))) for segment in segments for slots in _ranges(segment.num_slots)]


def _ranges(num_slots: int) -> Iterator[range]:
    """Small ones first: of however few slots the disk has room for, more than half can be used."""
    step, first = min(_MOST_SLOTS, -(-num_slots // _FEWEST)), 0
    while first < num_slots:
        end = min(first + min(max(1, first), step), num_slots)
        yield range(first, end)
        first = end


class Growth:
    """Slots without a file. Several threads use it."""

    def __init__(self, segments: Segments, index: SlotIndex, pieces: Iterable[SlotPiece]) -> None:
        self._segments = segments
        self._index = index
        self._left: dict[Segment, list[SlotPiece]] = {segment: [] for segment in segments}
        for piece in pieces:
            self._left[piece.segment].append(piece)

    def make_room(self, num_slots: int) -> None:
        """That many slots are free then, unless all files are made or the disk is full."""
        while self._index.num_free < num_slots:
            segment = self._segments.try_grow()
            if segment is None:
                return
            pieces = self._left[segment]  # nobody else has made this file
            self._left[segment] = [piece for piece in pieces if not piece.is_in_file]
            for piece in pieces:
                if piece.is_in_file:
                    self._index.release(piece.withheld)

    def close(self) -> None:
        for pieces in self._left.values():
            while pieces:
                self._index.release(pieces.pop().withheld)

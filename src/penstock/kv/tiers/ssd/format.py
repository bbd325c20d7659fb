"""What the bytes of a segment file mean: its own head, and the head of each of its slots. Owns the format and its version; does no I/O.

    segment file    [ segment head | slot 0 | slot 1 | ... ]       each head is one sector of 4096 bytes
    slot            [ slot head | payload, padded to whole sectors ]
    slot head       [ envelope | place ]                           the place says where this head was written, and in which generation

A slot stands for a block when its head is whole, lies where it says it does, and has the generation of its segment. So a new generation
in the segment head forgets every slot of the file at once.
"""

from __future__ import annotations

import secrets
import struct
from typing import NamedTuple

import xxhash

from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.tiers.envelope import HEADER_BYTES, Envelope, unpack

SECTOR_BYTES = 4096  # what O_DIRECT wants of addresses, lengths and offsets, on every device in use
FORMAT = 1
GENERATION_BYTES = 16
_MAGIC = b"penstkSG"
_SEGMENT = struct.Struct(
    f"<8sHHIIIQ{SCOPE_BYTES}s{GENERATION_BYTES}s"
)  # magic, format, 0, number, slots, 0, block bytes, space, generation
_PLACE = struct.Struct(f"<{GENERATION_BYTES}sIII")  # generation, number, slot, depth
_CHECK = struct.Struct("<Q")  # of everything before it
_PLACE_END = HEADER_BYTES + _PLACE.size


def slot_bytes(block_bytes: int) -> int:
    """What one block takes in a file."""
    return SECTOR_BYTES + -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES


def segment_bytes(num_slots: int, block_bytes: int) -> int:
    return SECTOR_BYTES + num_slots * slot_bytes(block_bytes)


def new_generation() -> bytes:
    return secrets.token_bytes(GENERATION_BYTES)


class SegmentHead(NamedTuple):
    """Whose blocks a file has, and how many fit."""

    number: int  # of the file, as its name has it
    num_slots: int
    block_bytes: int
    space: bytes
    generation: bytes


class SlotHead(NamedTuple):
    """A slot's head that is whole."""

    envelope: Envelope
    generation: bytes
    number: int
    slot: int
    depth: int  # the block's place in its prompt

    def is_for(self, segment: SegmentHead, slot: int) -> bool:
        """Whether it was written for that slot of the segment, and belongs to a block of the segment as it is now."""
        place = (self.generation, self.number, self.slot) == (segment.generation, segment.number, slot)
        return place and (self.envelope.space, self.envelope.num_bytes) == (segment.space, segment.block_bytes)


def pack_segment(head: SegmentHead) -> bytes:
    fields = _SEGMENT.pack(_MAGIC, FORMAT, 0, head.number, head.num_slots, 0, head.block_bytes, head.space, head.generation)
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(SECTOR_BYTES, b"\0")


def unpack_segment(sector: memoryview | bytes) -> SegmentHead | None:
    """None: it is not of this format, or damaged."""
    if len(sector) < SECTOR_BYTES:
        return None
    fields = bytes(sector[: _SEGMENT.size])
    magic, version, _, number, num_slots, _, block_bytes, space, generation = _SEGMENT.unpack(fields)
    (expected,) = _CHECK.unpack_from(sector, _SEGMENT.size)
    if magic != _MAGIC or version != FORMAT or xxhash.xxh3_64_intdigest(fields) != expected:
        return None
    return SegmentHead(number, num_slots, block_bytes, space, generation)


def pack_slot(envelope: bytes, segment: SegmentHead, slot: int, depth: int) -> bytes:
    """`envelope` as `tiers.envelope.pack` made it."""
    fields = envelope + _PLACE.pack(segment.generation, segment.number, slot, depth)
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(SECTOR_BYTES, b"\0")


def unpack_slot(sector: memoryview | bytes) -> SlotHead | None:
    """None: nothing was written there, or it is damaged."""
    envelope = unpack(sector)
    if envelope is None or len(sector) < SECTOR_BYTES:
        return None
    (expected,) = _CHECK.unpack_from(sector, _PLACE_END)
    if xxhash.xxh3_64_intdigest(bytes(sector[:_PLACE_END])) != expected:
        return None
    return SlotHead(envelope, *_PLACE.unpack_from(sector, HEADER_BYTES))

"""What stands before a block's bytes wherever they leave the process: whose they are, under which key, how long, and their checksum. Owns
the format and its version; where it is put is the store's business."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from penstock.errors import InvariantBroken
from penstock.kv.blocks.key import KEY_BYTES, SCOPE_BYTES

HEADER_BYTES = 128
FORMAT = 1
_MAGIC = b"penstock"
_FIELDS = struct.Struct(f"<8sHHIQQ{KEY_BYTES}s{SCOPE_BYTES}s16s")  # magic, format, 0, 0, length, sequence, key, space, checksum
_CHECK = struct.Struct("<Q")  # of everything before it, in the last bytes of the header


class Envelope(NamedTuple):
    """A header that was read and whose own checksum holds."""

    key: bytes
    space: bytes
    num_bytes: int  # of the payload
    sequence: int  # counts writes of one store: of two blocks with one key, the higher is the newer
    checksum: bytes

    def fits(self, payload: memoryview | bytes) -> bool:
        """Whether `payload` is what this header was written for."""
        return len(payload) == self.num_bytes and checksum(payload) == self.checksum


def checksum(payload: memoryview | bytes) -> bytes:
    """128 bits, at memory speed; against accidents, not against somebody who can write into the store."""
    return xxhash.xxh3_128_digest(payload)


def pack(key: bytes, space: bytes, payload: memoryview | bytes, sequence: int = 0) -> bytes:
    """The header of `payload`, which is a contiguous buffer of bytes."""
    if len(key) != KEY_BYTES or len(space) != SCOPE_BYTES:
        raise InvariantBroken(f"a key of {len(key)} and a space of {len(space)} bytes have no header")
    fields = _FIELDS.pack(_MAGIC, FORMAT, 0, 0, len(payload), sequence, key, space, checksum(payload))
    head = fields.ljust(HEADER_BYTES - _CHECK.size, b"\0")
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def unpack(header: memoryview | bytes) -> Envelope | None:
    """None: no header of this format stands there, or it is damaged."""
    if len(header) < HEADER_BYTES:
        return None
    head = bytes(header[: HEADER_BYTES - _CHECK.size])
    (expected,) = _CHECK.unpack(header[HEADER_BYTES - _CHECK.size : HEADER_BYTES])
    magic, version, _, _, num_bytes, sequence, key, space, digest = _FIELDS.unpack_from(head)
    if magic != _MAGIC or version != FORMAT or xxhash.xxh3_64_intdigest(head) != expected:
        return None
    return Envelope(key, space, num_bytes, sequence, digest)

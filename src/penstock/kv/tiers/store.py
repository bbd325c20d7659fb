"""The interface of a cold tier's storage: a disk, or a store that several engines share. Owns the protocols,
and the header before a block's bytes outside the process. Stores that engines share are packages of their
own (`remote.py`)."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import xxhash

from penstock.errors import InvariantBroken
from penstock.kv.blocks.key import KEY_BYTES, SCOPE_BYTES


class Outcome(enum.Enum):
    """Outcome of one block of a read or a write."""

    DONE = "done"
    MISSING = "missing"  # read: not there, or gone
    CORRUPT = "corrupt"  # read: damaged; it has been removed
    FULL = "full"  # write: no room, and nothing may be evicted
    FAILED = "failed"  # only this block could not be read or written


@dataclass(frozen=True, slots=True)
class Space:
    """The owner of blocks: engines with equal spaces share them; others never see them."""

    # 32 bytes: covers everything that decides what a block's bytes mean, except salt and adapter, which are
    # in the keys.
    digest: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Blocks in a store, if known."""

    num_used: int
    num_slots: int | None = None  # None: the store is shared and sets its own limit

    def as_dict(self) -> dict[str, int]:
        """Empty for a shared store: its blocks are not counted here, and a zero would mean that it is
        empty."""
        return (
            {} if self.num_slots is None else {"used": self.num_used, "free": self.num_slots - self.num_used}
        )


class BlockStore(Protocol):
    """Blocks by key, in a place that outlives the process.

    Calls block and come from several lanes at once; each ends within the timeout that the store was built
    with. They raise `StoreFailed` if the store as a whole does not answer or cannot be used; a problem with
    one block is an outcome. Bytes that `read` reports as DONE were checked: key, space, length and checksum.
    After any other outcome the buffer's content is undefined.
    """

    name: str  # of its tier: "ssd" or "remote"
    local: bool  # `find` answers from memory: any thread may call it, and it never blocks

    def find(self, keys: Sequence[bytes]) -> int:
        """Number of leading `keys` that are there. May be a guess: `read` decides."""

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """Each block into its buffer of `Space.block_bytes`."""

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        """Write each block under its key. One that is there already counts as DONE. `depths`: positions in
        their prompts, for eviction."""

    def persist(self) -> None:
        """Make every block that `write` reported as DONE survive a crash of the process and the machine, as
        far as the store can tell."""

    def probe(self) -> None:
        """Return if the store can be used again, else raise `StoreFailed`. Cheap; changes nothing."""

    def reset(self) -> int:
        """Forget every block of this space. Returns how many, if known."""

    def usage(self) -> StoreUsage:
        """Never blocks."""

    def close(self) -> None:
        """Idempotent. No call is in flight."""


@runtime_checkable
class SparseStore(Protocol):
    """A store that finds a block behind others that it lacks. It keeps states of recurrent layers: there is
    one of few boundaries."""

    def find_last(self, keys: Sequence[bytes]) -> int:
        """Length of the longest prefix of `keys` whose last key is there; 0: none. May be a guess, like
        `find`."""


class Written(enum.Enum):
    """Outcome of writing a manifest."""

    DONE = "done"
    TAKEN = "taken"  # the content under its id is not the expected one
    FULL = "full"  # there is no room


@runtime_checkable
class ManifestStore(Protocol):
    """A store that also keeps manifests of snapshots. They are few, are written rarely and are read whole; a
    reset leaves them. Calls block, have the same timeout as those for blocks, and raise `StoreFailed`.
    Several engines write at once: a write is one atomic compare-and-set, so of two writers of one id exactly
    one gets DONE."""

    def manifests(self, start: str = "") -> list[str]:
        """Ids of the manifests that begin with `start`."""

    def read_manifest(self, id: str) -> bytes | None:
        """The stored bytes; the caller checks them. None: it is not there."""

    def write_manifest(
        self, id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
    ) -> Written:
        """Write it if `instead_of` is the present content (None: if nothing is there). DONE: all of it is
        there, as durable as a persisted block. Otherwise nothing has changed. The store may forget it after
        `expires_in_s`."""

    def remove_manifest(self, id: str, only: bytes | None = None) -> None:
        """Remove it if `only` is the present content (None: any content). No error if nothing is removed."""


@runtime_checkable
class PinningStore(Protocol):
    """A place with its own eviction, in which blocks can be pinned. Never blocks."""

    def pin_keys(self, id: str, keys: Sequence[bytes]) -> None:
        """Protect `keys` from eviction. Applies to blocks that come later, too."""

    def unpin_keys(self, id: str) -> None:
        """Idempotent."""

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many of the leading `keys` are here."""

    def has_each(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are here."""


# ------------------------------------------------------------------------- what stands before a block's bytes

HEADER_BYTES = 128
FORMAT = 1
_MAGIC = b"penstock"
# magic, format, 0, 0, length, sequence, key, space, checksum
_FIELDS = struct.Struct(f"<8sHHIQQ{KEY_BYTES}s{SCOPE_BYTES}s16s")
_CHECK = struct.Struct("<Q")  # of everything before it, in the last bytes of the header


class Envelope(NamedTuple):
    """A header that was read and whose own checksum holds."""

    key: bytes
    space: bytes
    num_bytes: int  # of the payload
    sequence: int  # counts writes of one store; of two blocks with one key, the higher is newer
    checksum: bytes

    def fits(self, payload: memoryview | bytes) -> bool:
        """Whether `payload` belongs to this header."""
        return len(payload) == self.num_bytes and checksum(payload) == self.checksum


def checksum(payload: memoryview | bytes) -> bytes:
    """128 bits, at memory speed. Detects accidents, not an attacker who can write into the store."""
    return xxhash.xxh3_128_digest(payload)


def pack(key: bytes, space: bytes, payload: memoryview | bytes, sequence: int = 0) -> bytes:
    """The header of `payload`, which is a contiguous buffer of bytes."""
    if len(key) != KEY_BYTES or len(space) != SCOPE_BYTES:
        raise InvariantBroken(f"a key of {len(key)} and a space of {len(space)} bytes have no header")
    fields = _FIELDS.pack(_MAGIC, FORMAT, 0, 0, len(payload), sequence, key, space, checksum(payload))
    head = fields.ljust(HEADER_BYTES - _CHECK.size, b"\0")
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def unpack(header: memoryview | bytes) -> Envelope | None:
    """None: no header of this format, or a damaged one."""
    if len(header) < HEADER_BYTES:
        return None
    head = bytes(header[: HEADER_BYTES - _CHECK.size])
    (expected,) = _CHECK.unpack(header[HEADER_BYTES - _CHECK.size : HEADER_BYTES])
    magic, version, _, _, num_bytes, sequence, key, space, digest = _FIELDS.unpack_from(head)
    if magic != _MAGIC or version != FORMAT or xxhash.xxh3_64_intdigest(head) != expected:
        return None
    return Envelope(key, space, num_bytes, sequence, digest)

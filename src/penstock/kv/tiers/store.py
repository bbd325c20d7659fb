"""What a cold tier keeps its blocks in: a disk, or a store that several engines share. Owns the words that
all of them speak, and what stands before a block's bytes wherever they leave the process. Adding a store is a
file with a `BlockStore` in it, and a line where its kind is named."""

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
    """What became of one block of a read or a write."""

    DONE = "done"
    MISSING = "missing"  # read: not there, or not any more
    CORRUPT = "corrupt"  # read: there, and not what was written; it has been removed
    FULL = "full"  # write: no room, and nothing that may be evicted
    FAILED = "failed"  # this block alone could not be read or written


@dataclass(frozen=True, slots=True)
class Space:
    """Whose blocks these are: engines with equal spaces share them, others never meet."""

    # 32 bytes: of everything but salt and adapter that decides what a block's bytes mean; those two are in
    # the keys
    digest: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What is in a store, as far as it knows; in blocks."""

    num_used: int
    num_slots: int | None = None  # None: somebody else decides

    def as_dict(self) -> dict[str, int]:
        """Nothing where somebody else decides: nobody here counts, and a zero would say that it is empty."""
        return (
            {} if self.num_slots is None else {"used": self.num_used, "free": self.num_slots - self.num_used}
        )


class BlockStore(Protocol):
    """Blocks by key, in a place that outlives the process.

    Calls block and come from several lanes at once; each ends within the time that the store was built with.
    They raise `StoreFailed` where the place as a whole does not answer or cannot be used: what is wrong with
    single blocks is an outcome. Bytes that `read` calls DONE were checked: key, space, length and checksum.
    After any other outcome the buffer holds anything.
    """

    name: str  # of its tier: "ssd" or "remote"
    local: bool  # `find` answers from memory: any thread may call it, and it never blocks

    def find(self, keys: Sequence[bytes]) -> int:
        """How many of the first `keys` are there, up to the first that is not. A guess where it must be: the
        truth shows on reading."""

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """Each block into its buffer of `Space.block_bytes`."""

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        """Each block under its key; one that is there already counts as DONE. `depths`: places in their
        prompts, for eviction."""

    def persist(self) -> None:
        """Everything that `write` has returned DONE for survives a crash of process and machine from now on,
        as far as it can say."""

    def probe(self) -> None:
        """Return if the place can be used again, raise `StoreFailed` if not. A cheap call that changes
        nothing."""

    def reset(self) -> int:
        """Forget every block of this space; returns how many, as far as it is known."""

    def usage(self) -> StoreUsage:
        """Never blocks."""

    def close(self) -> None:
        """Idempotent. No call is under way."""


class Written(enum.Enum):
    """What became of a manifest that was to be written."""

    DONE = "done"
    TAKEN = "taken"  # something else is under its id than the writer has said
    FULL = "full"  # there is no room for it


@runtime_checkable
class ManifestStore(Protocol):
    """A store that has manifests of snapshots beside its blocks. They are few, are written rarely and read
    whole; a reset leaves them. Calls block and end within the same time as those for blocks, and raise
    `StoreFailed`. Several engines write at once: what is there is compared and changed in one step, so that
    of two writers of one id exactly one is told DONE."""

    def manifests(self, start: str = "") -> list[str]:
        """Ids of those that are there and begin with `start`."""

    def read_manifest(self, id: str) -> bytes | None:
        """As it was written, or not: whoever reads it checks it. None: it is not there."""

    def write_manifest(
        self, id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
    ) -> Written:
        """Write it where `instead_of` is what is there; None: where nothing is. DONE: all of it is there, to
        survive what a persisted block survives. Else nothing has changed. It may be forgotten after
        `expires_in_s`."""

    def remove_manifest(self, id: str, only: bytes | None = None) -> None:
        """Where `only` is what is there; None: whatever is. No error where nothing is removed."""


@runtime_checkable
class PinningStore(Protocol):
    """A place that evicts by itself, and can be told what not to. None of it blocks."""

    def pin_keys(self, id: str, keys: Sequence[bytes]) -> None:
        """None of `keys` is evicted from now on, whether it is here already or comes later."""

    def unpin_keys(self, id: str) -> None:
        """Idempotent."""

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first `keys` are here."""

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

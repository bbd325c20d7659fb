"""Blocks in files on a local disk: a `BlockStore` that outlives the process. Owns what a call means for slots
and files: which slots it uses, how blocks get to and from them, and what a failure says about a block or
about the whole disk. Also notices when its open files are no longer those of its directory. What is on disk
at each instant is in docs/decisions/0013-ssd-files.md.

A block to disk: `SsdStore.write` claims a slot (`index`), groups neighbouring slots into runs, `SlotIo` puts
a head before each block and writes the run (`directory`) into its file (`segments`). A block back: the same
with a pin, and what was read is checked.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.config import EvictionName
from penstock.errors import ConfigError, SnapshotRefused, StoreFailed
from penstock.kv.blocks.eviction import make_order
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.manifest import unpack as unpack_manifest
from penstock.kv.tiers.ssd.directory import (
    FULL,
    SECTOR_BYTES,
    Directory,
    DiskIo,
    ManifestFiles,
    is_aligned,
    make_directory,
    read_all,
    remake_directory,
    write_all,
)
from penstock.kv.tiers.ssd.index import ABSENT, Scan, SlotIndex
from penstock.kv.tiers.ssd.segments import (
    Segment,
    SegmentFiles,
    SegmentHead,
    Segments,
    WithheldSlots,
    pack_slot,
    slot_bytes,
    unpack_slot,
)
from penstock.kv.tiers.store import Outcome, Space, StoreUsage, Written, pack

log = logging.getLogger(__name__)

_MOST_BLOCKS = 256  # of a run, two buffers each: half of the limit of one call
# of a run: larger calls are no faster, and unaligned memory is copied through a buffer of this size
_MOST_BYTES = 16 << 20
# the directory cannot be used at all
_GONE = (errno.EBADF, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN)
_STRIKES = 8  # failed system calls in a row until the disk counts as failed, not a block


class SlotRun(NamedTuple):
    """Neighbouring slots of one segment, moved by one system call, and the blocks of a store call that belong
    there."""

    segment: Segment
    head: SegmentHead  # of the segment, when the run was made
    first: int  # slot number within the segment
    places: list[int]  # indices of the blocks in the call

    def split(self) -> list[SlotRun]:
        """The same run, block by block."""
        return [
            SlotRun(self.segment, self.head, self.first + i, [place]) for i, place in enumerate(self.places)
        ]


def runs_of(segments: Segments, slots: Iterable[tuple[int, int]]) -> Iterator[SlotRun]:
    """`slots` are pairs of slot and place, in any order, each slot once."""
    run: SlotRun | None = None
    most = 0  # blocks of the run
    for slot, place in sorted(slots):
        segment, number = segments.locate(slot)
        if (
            run is not None
            and (run.segment, run.first + len(run.places)) == (segment, number)
            and len(run.places) < most
        ):
            run.places.append(place)
            continue
        if run is not None:
            yield run
        run = SlotRun(segment, segment.head, number, [place])
        most = min(_MOST_BLOCKS, _MOST_BYTES // slot_bytes(run.head.block_bytes))
    if run is not None:
        yield run


class SlotIo:
    """Moves the blocks of runs, checks what was read, and tells a bad block from a bad disk. For several
    threads."""

    def __init__(self, files: SegmentFiles, space: bytes) -> None:
        self._files = files
        self._space = space
        self._strikes = 0

    def read(self, run: SlotRun, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """The outcome of each block of `run`; `keys` and `into` are those of its blocks."""
        try:
            buffers, heads, copies = self._buffers(run, into)  # good until the thread's next call
            num = read_all(
                self._files.io, run.segment.fd, buffers, run.segment.offset(run.first)
            ) // slot_bytes(run.head.block_bytes)
        except OSError as error:
            if len(run.places) == 1:
                self._strike(error, "read")
                return [Outcome.FAILED]
        else:
            self._strikes = 0
            heads = heads[:num]  # of blocks that were read in full
            for i, copy in enumerate(copies[:num]):
                into[i][:] = copy[: len(into[i])]
            return [self._judge(heads[i : i + 1], key, into[i]) for i, key in enumerate(keys)]
        # Which of them it is shows one by one.
        return [
            self.read(single, keys[i : i + 1], into[i : i + 1])[0] for i, single in enumerate(run.split())
        ]

    def _judge(self, sector: Sequence[memoryview], key: bytes, payload: memoryview) -> Outcome:
        """`sector` is empty where the file ended before the block did."""
        head = unpack_slot(sector[0]) if sector else None
        if (
            head is None
            or (head.envelope.key, head.envelope.space) != (key, self._space)
            or not head.envelope.fits(payload)
        ):
            return Outcome.CORRUPT
        return Outcome.DONE

    def write(self, run: SlotRun, heads: Sequence[bytes], blocks: Sequence[memoryview]) -> list[Outcome]:
        """The outcome of each block of `run`. Unless it is DONE, the slot's content is undefined."""
        try:
            buffers, head_buffers, copies = self._buffers(run, blocks)
            for i, head in enumerate(heads):
                head_buffers[i][:] = head
                if copies:
                    copies[i][: len(blocks[i])] = blocks[i]
            write_all(self._files.io, run.segment.fd, buffers, run.segment.offset(run.first))
        except OSError as error:
            if len(run.places) == 1:
                if error.errno not in FULL:
                    self._strike(error, "written")
                return [Outcome.FULL if error.errno in FULL else Outcome.FAILED]
        else:
            self._strikes = 0
            return [Outcome.DONE] * len(run.places)
        return [
            self.write(single, heads[i : i + 1], blocks[i : i + 1])[0] for i, single in enumerate(run.split())
        ]

    def forgive(self) -> None:
        """The disk can be used again."""
        self._strikes = 0

    def _strike(self, error: OSError, done: str) -> None:
        """One block could not be read or written. Raises if the disk as a whole has failed."""
        self._strikes += 1
        where = self._files.directory.path
        if error.errno in _GONE or self._strikes >= _STRIKES:
            raise StoreFailed(f"the SSD cache in {where} cannot be {done}: {error.strerror}") from error
        log.warning("SSD cache in %s: a block could not be %s: %s", where, done, error.strerror)

    def _buffers(
        self, run: SlotRun, blocks: Sequence[memoryview]
    ) -> tuple[list[memoryview], list[memoryview], list[memoryview]]:
        """The buffers of the system call, in file order; the heads among them; and the payloads among them,
        empty if these are `blocks`."""
        num = len(blocks)
        if all(map(is_aligned, blocks)):
            room = self._files.scratch.room(num * SECTOR_BYTES)
            heads = [room[i * SECTOR_BYTES : (i + 1) * SECTOR_BYTES] for i in range(num)]
            return [buffer for pair in zip(heads, blocks, strict=True) for buffer in pair], heads, []
        width = slot_bytes(run.head.block_bytes)
        room = self._files.scratch.room(num * width)
        slots = [room[i * width : (i + 1) * width] for i in range(num)]
        return [room], [slot[:SECTOR_BYTES] for slot in slots], [slot[SECTOR_BYTES:] for slot in slots]


class SsdStore:
    """One directory. Several lanes read and write at once; the index's lock is never held across a system
    call."""

    name = "ssd"
    local = True

    def __init__(self, path: Path, max_bytes: int, space: Space, eviction: EvictionName, io: DiskIo) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._space = space
        self._eviction: EvictionName = eviction
        self._lock = threading.Lock()
        self._num_calls = 0  # in flight on the open files
        self._is_open = False
        self._closed = False  # for good
        self._pinned_keys: dict[str, Sequence[bytes]] = {}  # by snapshot, since the start
        self._open(lambda: make_directory(path), io)

    def _open(self, lock: Callable[[], Directory], io: DiskIo) -> None:
        """Raises ConfigError or OSError; then nothing has changed."""
        with contextlib.ExitStack() as undo:
            directory = lock()
            undo.callback(directory.close)
            segments = Segments(SegmentFiles(io, directory), self._space, self._max_bytes)
            undo.callback(segments.close)
            pool = BlockPool(
                segments.num_slots, "ssd", eviction=make_order(self._eviction, segments.num_slots)
            )
            index = SlotIndex(pool, segments.generation, segments.written_ns)
            manifests = ManifestFiles(io, directory)
            manifests.tidy()
            for id, keys in self._found_pinned(manifests).items():  # before anything can overwrite them
                index.pin_keys(id, keys)
            for segment in segments:  # no slot can be used before its file is made or its head is read
                segment.withheld = [
                    WithheldSlots(segment, slots, index.withhold(len(slots))) for slots in segment.groups()
                ]
            scan = Scan(
                segments.files, index, [group for segment in segments for group in segment.take_ready()]
            )
            scan.start()
            undo.pop_all()
        self._directory, self._segments, self._index, self._scan, self._manifests = (
            directory,
            segments,
            index,
            scan,
            manifests,
        )
        self._slot_io = SlotIo(segments.files, self._space.digest)
        with self._lock:
            for id, keys in self._pinned_keys.items():
                index.pin_keys(id, keys)
            self._is_open = True

    def _found_pinned(self, manifests: ManifestFiles) -> dict[str, Sequence[bytes]]:
        """The blocks of the snapshots in the directory whose manifests are intact and of this space."""
        pinned: dict[str, Sequence[bytes]] = {}
        for id in manifests.ids():
            try:
                manifest = unpack_manifest(manifests.read(id) or b"")
            except (SnapshotRefused, StoreFailed) as error:
                log.warning("the snapshot %s in %s is left alone: %s", id, self._path, error)
                continue
            if manifest.space == self._space.digest and manifest.id == id:  # under another name it is refused
                pinned[id] = manifest.block_keys
        return pinned

    @property
    def files(self) -> SegmentFiles:
        """Its files. A test may replace their `io` by a disk that fails."""
        return self._segments.files

    def wait_scanned(self, timeout_s: float) -> bool:
        """Whether all blocks of an earlier process can be found by then."""
        return self._scan.done.wait(timeout_s)

    def find(self, keys: Sequence[bytes]) -> int:
        return self._index.find(keys) if self._is_open else 0

    def usage(self) -> StoreUsage:
        num_keys = self._index.num_keys if self._is_open else 0
        return StoreUsage(num_keys, max(num_keys, self._segments.num_usable))

    # ------------------------------------------------------------------------------------------------- blocks

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        with self._call():
            return self._read(keys, into)

    def _read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        outcomes = [Outcome.MISSING] * len(keys)
        slots, pin = self._index.pin_each(keys)
        if pin is None:
            return outcomes
        whole: list[int] = []
        try:
            first = {slot: place for place, slot in reversed(list(enumerate(slots))) if slot != ABSENT}
            for run in runs_of(self._segments, first.items()):
                read = self._slot_io.read(
                    run, [keys[place] for place in run.places], [into[place] for place in run.places]
                )
                for place, outcome in zip(run.places, read, strict=True):
                    outcomes[place] = outcome
                    if outcome is not Outcome.DONE:
                        self._give_up(keys[place], slots[place], outcome)
            for place, slot in enumerate(slots):
                if slot != ABSENT and first[slot] != place:  # requested twice
                    outcomes[place] = outcomes[first[slot]]
                    into[place][:] = into[first[slot]]
            whole = [slot for place, slot in enumerate(slots) if outcomes[place] is Outcome.DONE]
        finally:
            self._index.unpin(pin, whole)
        return outcomes

    def _give_up(self, key: bytes, slot: int, outcome: Outcome) -> None:
        self._index.forget(key, slot)
        segment, number = self._segments.locate(slot)
        where = self._segments.files.path(segment.head.number)
        log.warning("the block in slot %d of %s is given up: %s", number, where, outcome.value)

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        with self._call(changes=True):
            return self._write(keys, depths, blocks)

    def _write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        claim = self._index.claim(keys, evicts=False)
        while claim is None:  # nothing is evicted while files can be made
            if (segment := self._segments.try_grow()) is not None:
                self._index.release(segment.take_ready())  # no other writer has made this file
            claim = self._index.claim(keys, evicts=segment is None)
        written: dict[int, bytes] = {}
        try:
            for run in runs_of(self._segments, zip(claim.slots, claim.places, strict=True)):
                heads = []
                for i, place in enumerate(run.places):
                    # so that the end of a prefix counts as older
                    sequence = claim.sequence + len(keys) - 1 - place
                    envelope = pack(keys[place], self._space.digest, blocks[place], sequence)
                    heads.append(pack_slot(envelope, run.head, run.first + i, depths[place]))
                outcomes = self._slot_io.write(run, heads, [blocks[place] for place in run.places])
                self._segments.note_unsynced(run.segment)
                for place, outcome in zip(run.places, outcomes, strict=True):
                    claim.outcomes[place] = outcome
                    if outcome is Outcome.DONE:
                        written[place] = run.head.generation
        finally:
            self._index.land(claim, keys, depths, written)
        for place in claim.unverified:
            claim.outcomes[place] = self._write_if_torn(keys[place], depths[place], blocks[place])
        again: list[int] = []
        # this claim has landed, so claims cannot wait for each other in a circle
        for place, key, other in claim.others:
            other.over.wait()
            claim.outcomes[place] = Outcome.DONE if key in other.landed else Outcome.FAILED
            if key in other.forgotten:  # the other's block was forgotten before it could be found
                again.append(place)
        for place in again:
            (claim.outcomes[place],) = self._write([keys[place]], [depths[place]], [blocks[place]])
        return claim.outcomes

    def _write_if_torn(self, key: bytes, depth: int, block: memoryview) -> Outcome:
        """A crash may have torn a block of an earlier process, and a later persist promises that this block
        is there."""
        (outcome,) = self._read([key], [memoryview(bytearray(len(block)))])
        return outcome if outcome is Outcome.DONE else self._write([key], [depth], [block])[0]

    # ---------------------------------------------------------------------------------------------- snapshots

    def pin_keys(self, id: str, keys: Sequence[bytes]) -> None:
        with self._lock:  # files may be reopened, with a new index
            self._pinned_keys[id] = keys
            self._index.pin_keys(id, keys)

    def unpin_keys(self, id: str) -> None:
        with self._lock:
            self._pinned_keys.pop(id, None)
            self._index.unpin_keys(id)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        return self._index.num_leading(keys) if self._is_open else 0

    def has_each(self, keys: Sequence[bytes]) -> list[bool]:
        return self._index.has_each(keys) if self._is_open else [False] * len(keys)

    def manifests(self, start: str = "") -> list[str]:
        with self._call():
            return [id for id in self._manifests.ids() if id.startswith(start)]

    def read_manifest(self, id: str) -> bytes | None:
        with self._call():
            return self._manifests.read(id)

    def write_manifest(
        self, id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
    ) -> Written:
        """One process writes to the directory, and it has one thread for manifests."""
        with self._call(changes=True):
            if self._manifests.read(id) != instead_of:
                return Written.TAKEN
            return Written.DONE if self._manifests.write(id, data) else Written.FULL

    def remove_manifest(self, id: str, only: bytes | None = None) -> None:
        with self._call(changes=True):
            if only is None or self._manifests.read(id) == only:
                self._manifests.remove(id)

    # -------------------------------------------------------------------------------------------------- place

    def persist(self) -> None:
        with self._call(changes=True):
            self._segments.persist()

    def reset(self) -> int:
        with self._call(changes=True), self._segments.renewal() as renew:
            return self._index.reset(renew)

    def probe(self) -> None:
        """Also reopens everything if its files are no longer those of the directory, or could not be opened
        the last time."""
        if not self._is_open or not (self._directory.is_in_place() and self._segments.are_in_place()):
            self._open_anew()
        with self._call():
            self._segments.probe()
            self._slot_io.forgive()

    @contextlib.contextmanager
    def _call(self, changes: bool = False) -> Iterator[None]:
        """Raises StoreFailed if nothing is open; with `changes` also if a change would be lost."""
        with self._lock:
            if not self._is_open:
                raise StoreFailed(
                    f"the SSD cache in {self._path} is {'closed' if self._closed else 'not open'}"
                )
            self._num_calls += 1
        try:
            if changes and not self._directory.is_in_place():
                raise StoreFailed("the directory of the SSD cache, or its lock, has been removed or replaced")
            yield
        finally:
            with self._lock:
                self._num_calls -= 1

    def _open_anew(self) -> None:
        """Blocks in lost files are misses from now on. Raises StoreFailed while calls use the old files, and
        if the directory is not available, for example locked by another process."""
        with self._lock:
            if self._closed:
                raise StoreFailed(f"the SSD cache in {self._path} is closed")
            if self._num_calls:
                raise StoreFailed(
                    f"the SSD cache in {self._path} is still busy with files that have been removed or "
                    "replaced"
                )
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._close_files()
        try:
            self._open(lambda: remake_directory(self._path, self._directory.device), self.files.io)
        except (ConfigError, OSError) as error:
            raise StoreFailed(f"the SSD cache cannot be opened anew: {error}") from error
        log.warning(
            "the SSD cache in %s was opened anew: its directory, its lock or a file had been removed or "
            "replaced",
            self._path,
        )

    def close(self) -> None:
        with self._lock:
            was_open, self._is_open, self._closed = self._is_open, False, True
        if was_open:
            self._close_files()

    def _close_files(self) -> None:
        self._scan.close()
        try:
            self._segments.persist()
        except StoreFailed as error:
            log.warning("%s", error)
        finally:
            self._segments.close()
            self._directory.close()
        for segment in self._segments:
            self._index.release(segment.withheld)
            segment.withheld = []
        self._index.close()


def open_ssd(
    directory: str | Path, max_bytes: int, space: Space, eviction: EvictionName, io: DiskIo | None = None
) -> SsdStore:
    """The store in `directory`, which takes at most `max_bytes` of disk. Raises ConfigError if that can never
    work, if other users may write there, or if another process has the directory. Serves at once; earlier
    blocks are found as they are scanned."""
    return SsdStore(Path(directory).absolute(), max_bytes, space, eviction, io or DiskIo())

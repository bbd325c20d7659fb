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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
    Buffers,
    Directory,
    DiskIo,
    is_aligned,
    make_directory,
    remake_directory,
)
from penstock.kv.tiers.ssd.index import ABSENT, Keys, Scan, SlotIndex
from penstock.kv.tiers.ssd.segments import (
    Segment,
    SegmentHead,
    Segments,
    pack_slot,
    slot_bytes,
    unpack_slot,
)
from penstock.kv.tiers.store import Outcome, Space, StoreUsage, Written, pack
from penstock.observe import PoolObserver

log = logging.getLogger(__name__)

Outcomes = list[Outcome]  # by block

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
        return [self._replace(first=self.first + i, places=[place]) for i, place in enumerate(self.places)]


def runs_of(segments: Segments, slots: Iterable[tuple[int, int]]) -> list[SlotRun]:
    """`slots` are pairs of slot and place, in any order."""
    runs: list[SlotRun] = []
    for slot, place in sorted(slots):
        segment, number = segments.locate(slot)
        most = min(_MOST_BLOCKS, _MOST_BYTES // slot_bytes(segment.head.block_bytes))
        if (
            runs
            and (run := runs[-1]).segment is segment
            and run.first + len(run.places) == number
            and len(run.places) < most
        ):
            run.places.append(place)
        else:
            runs.append(SlotRun(segment, segment.head, number, [place]))
    return runs


class SlotIo:
    """Moves the blocks of runs, checks what was read, and tells a bad block from a bad disk. For several
    threads."""

    def __init__(self, directory: Directory, space: bytes) -> None:
        self._directory = directory
        self._space = space
        self._strikes = 0

    def read(self, run: SlotRun, keys: Keys, into: Buffers) -> Outcomes:
        """The outcome of each block of `run`; `keys` and `into` are those of the whole call."""

        def move(run: SlotRun) -> Outcomes:
            blocks = [into[place] for place in run.places]
            heads, payloads, buffers = self._buffers(run, blocks)
            num_bytes = self._directory.read(run.segment.fd, buffers, run.segment.offset(run.first))
            num = num_bytes // slot_bytes(run.head.block_bytes)  # blocks that were read in full
            outcomes = [Outcome.CORRUPT] * len(blocks)
            for i, (place, block) in enumerate(zip(run.places[:num], blocks[:num], strict=True)):
                if payloads[i] is not block:
                    block[:] = payloads[i][: len(block)]
                outcomes[i] = self._judge(heads[i], keys[place], block)
            return outcomes

        return self._try(run, "read", move)

    def _judge(self, sector: memoryview, key: bytes, payload: memoryview) -> Outcome:
        head = unpack_slot(sector)
        if (
            head is None
            or (head.envelope.key, head.envelope.space) != (key, self._space)
            or not head.envelope.fits(payload)
        ):
            return Outcome.CORRUPT
        return Outcome.DONE

    def write(self, run: SlotRun, heads: Mapping[int, bytes], blocks: Buffers) -> Outcomes:
        """The outcome of each block of `run`; `heads` are those of the run, by place, and `blocks` those of
        the whole call. Unless it is DONE, the slot's content is undefined."""

        def move(run: SlotRun) -> Outcomes:
            sectors, payloads, buffers = self._buffers(run, [blocks[place] for place in run.places])
            for place, sector, payload in zip(run.places, sectors, payloads, strict=True):
                sector[:] = heads[place]
                if payload is not blocks[place]:
                    payload[: len(blocks[place])] = blocks[place]
            self._directory.write(run.segment.fd, buffers, run.segment.offset(run.first))
            return [Outcome.DONE] * len(run.places)

        return self._try(run, "written", move)

    def _try(self, run: SlotRun, done: str, move: Callable[[SlotRun], Outcomes]) -> Outcomes:
        """If the run cannot be moved as a whole, block by block: that shows which of them it is."""
        try:
            outcomes = move(run)
            self._strikes = 0
            return outcomes
        except OSError as error:
            why = error
        if len(run.places) > 1:
            return [outcome for single in run.split() for outcome in self._try(single, done, move)]
        if why.errno in FULL:
            return [Outcome.FULL]
        self._strikes += 1
        where = self._directory.path
        if why.errno in _GONE or self._strikes >= _STRIKES:
            raise StoreFailed(f"the SSD cache in {where} cannot be {done}: {why.strerror}") from why
        log.warning("SSD cache in %s: a block could not be %s: %s", where, done, why.strerror)
        return [Outcome.FAILED]

    def forgive(self) -> None:
        """The disk can be used again."""
        self._strikes = 0

    def _buffers(self, run: SlotRun, blocks: Buffers) -> tuple[list[memoryview], Buffers, list[memoryview]]:
        """Heads and payloads of the run, and both as the system call gets them, in file order. The payloads
        are `blocks`, if direct I/O can use these. Good until the thread's next call."""
        if all(map(is_aligned, blocks)):
            _, heads = self._directory.scratch.parts(len(blocks), SECTOR_BYTES)
            payloads = blocks
        else:
            _, slots = self._directory.scratch.parts(len(blocks), slot_bytes(run.head.block_bytes))
            heads, payloads = [slot[:SECTOR_BYTES] for slot in slots], [slot[SECTOR_BYTES:] for slot in slots]
        return heads, payloads, [buffer for pair in zip(heads, payloads, strict=True) for buffer in pair]


class OpenFiles:
    """What a store has open: its directory, the files in it, and the index over them. Closes once."""

    def __init__(
        self,
        directory: Directory,
        max_bytes: int,
        space: Space,
        eviction: EvictionName,
        observer: PoolObserver | None,
    ) -> None:
        """Owns `directory` from here on. Raises ConfigError, StoreFailed or OSError; then it is closed."""
        with contextlib.ExitStack() as undo:
            undo.callback(directory.close)
            self.directory = directory
            self.segments = Segments(directory, space, max_bytes)
            undo.callback(self.segments.close)
            num_slots = self.segments.num_slots
            pool = BlockPool(num_slots, "ssd", observer, make_order(eviction, num_slots))
            self.index = SlotIndex(pool, self.segments)
            directory.tidy()
            self._pin_found(space)  # before anything can overwrite them
            self.slot_io = SlotIo(directory, space.digest)
            self.scan = Scan(self.segments, self.index)
            undo.pop_all()

    def _pin_found(self, space: Space) -> None:
        """Pin the blocks of the snapshots in the directory whose manifests are intact and of this space."""
        for id in self.directory.manifests():
            try:
                manifest = unpack_manifest(self.directory.read_manifest(id) or b"")
            except (SnapshotRefused, StoreFailed) as error:
                log.warning("the snapshot %s in %s is left alone: %s", id, self.directory.path, error)
                continue
            if manifest.space == space.digest and manifest.id == id:  # under another name it is refused
                self.index.pin_keys(id, manifest.block_keys)

    def are_in_place(self) -> bool:
        return self.directory.is_in_place() and self.segments.are_in_place()

    def close(self) -> None:
        self.scan.close()
        try:
            self.segments.persist()
        except StoreFailed as error:
            log.warning("%s", error)
        finally:
            self.segments.close()
            self.directory.close()
        self.index.close()


class SsdStore:
    """One directory. Several lanes read and write at once; the index's lock is never held across a system
    call."""

    name = "ssd"
    local = True

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        space: Space,
        eviction: EvictionName,
        io: DiskIo,
        observer: PoolObserver | None = None,
    ) -> None:
        self._path = path
        self._space = space
        self._lock = threading.Lock()
        self._num_calls = 0  # in flight on the open files
        self._is_open = True
        self._closed = False  # for good
        self._pinned_keys: dict[str, Keys] = {}  # by snapshot, since the start
        self._open = partial(
            OpenFiles, max_bytes=max_bytes, space=space, eviction=eviction, observer=observer
        )
        self._now = self._open(make_directory(path, io))

    @property
    def space(self) -> bytes:
        return self._space.digest

    @property
    def directory(self) -> Directory:
        """A test may replace its `io` by a disk that fails."""
        return self._now.directory

    def wait_scanned(self, timeout_s: float) -> bool:
        """Whether all blocks of an earlier process can be found by then."""
        return self._now.scan.done.wait(timeout_s)

    @property
    def scanned(self) -> Directory | None:
        """The directory in use, once all blocks of an earlier process in it can be found."""
        now = self._now
        return now.directory if self._is_open and now.scan.is_complete else None

    def find(self, keys: Keys) -> int:
        return self._now.index.find(keys) if self._is_open else 0

    def find_last(self, keys: Keys) -> int:
        return self._now.index.find_last(keys) if self._is_open else 0

    def usage(self) -> StoreUsage:
        num_keys = self._now.index.num_keys if self._is_open else 0
        return StoreUsage(num_keys, max(num_keys, self._now.segments.num_usable))

    # ------------------------------------------------------------------------------------------------- blocks

    def read(self, keys: Keys, into: Buffers) -> Outcomes:
        with self._call() as now:
            return self._read(now, keys, into)

    def _read(self, now: OpenFiles, keys: Keys, into: Buffers) -> Outcomes:
        outcomes = [Outcome.MISSING] * len(keys)
        slots, pin = now.index.pin_each(keys)
        if pin is None:
            return outcomes
        whole: list[int] = []
        try:
            here = [(slot, place) for place, slot in enumerate(slots) if slot != ABSENT]
            for run in runs_of(now.segments, here):
                for place, outcome in zip(run.places, now.slot_io.read(run, keys, into), strict=True):
                    outcomes[place] = outcome
                    if outcome is not Outcome.DONE:
                        now.index.forget(keys[place], slots[place])
                        segment, number = now.segments.locate(slots[place])
                        where = now.directory.segment_path(segment.head.number)
                        log.warning(
                            "the block in slot %d of %s is given up: %s", number, where, outcome.value
                        )
            whole = [slot for slot, place in here if outcomes[place] is Outcome.DONE]
        finally:
            now.index.unpin(pin, whole)
        return outcomes

    def write(self, keys: Keys, depths: Sequence[int], blocks: Buffers) -> Outcomes:
        with self._call(changes=True) as now:
            return self._write(now, keys, depths, blocks)

    def _write(self, now: OpenFiles, keys: Keys, depths: Sequence[int], blocks: Buffers) -> Outcomes:
        claim = now.index.claim(keys, evicts=False)
        while claim is None:  # nothing is evicted while files can be made
            if grown := now.segments.try_grow():
                now.index.release(now.index.take_ready())
            claim = now.index.claim(keys, evicts=not grown)
        written: dict[int, bytes] = {}
        try:
            for run in runs_of(now.segments, zip(claim.slots, claim.places, strict=True)):
                heads: dict[int, bytes] = {}
                for slot, place in enumerate(run.places, run.first):
                    # so that the end of a prefix counts as older
                    sequence = claim.sequence + len(keys) - 1 - place
                    envelope = pack(keys[place], self._space.digest, blocks[place], sequence)
                    heads[place] = pack_slot(envelope, run.head, slot, depths[place])
                outcomes = now.slot_io.write(run, heads, blocks)
                now.segments.note_unsynced(run.segment)
                for place, outcome in zip(run.places, outcomes, strict=True):
                    claim.outcomes[place] = outcome
                    if outcome is Outcome.DONE:
                        written[place] = run.head.generation
        finally:
            now.index.land(claim, keys, depths, written)
        for place in claim.unverified:
            # A crash may have torn this block of an earlier process, and a later persist promises it.
            one = [keys[place]], [memoryview(bytearray(len(blocks[place])))]
            if self._read(now, *one) != [Outcome.DONE]:
                (claim.outcomes[place],) = self._write(now, one[0], [depths[place]], [blocks[place]])
        return claim.outcomes

    # ---------------------------------------------------------------------------------------------- snapshots

    def pin_keys(self, id: str, keys: Keys) -> None:
        with self._lock:  # files may be reopened, with a new index
            self._pinned_keys[id] = keys
            self._now.index.pin_keys(id, keys)

    def unpin_keys(self, id: str) -> None:
        with self._lock:
            self._pinned_keys.pop(id, None)
            self._now.index.unpin_keys(id)

    def num_leading(self, keys: Keys) -> int:
        return [*self.has_each(keys), False].index(False)

    def has_each(self, keys: Keys) -> list[bool]:
        if not self._is_open:
            return [False] * len(keys)
        return [slot != ABSENT for slot in self._now.index.find_each(keys)]

    def manifests(self, start: str = "") -> list[str]:
        with self._call() as now:
            return [id for id in now.directory.manifests() if id.startswith(start)]

    def read_manifest(self, id: str) -> bytes | None:
        with self._call() as now:
            return now.directory.read_manifest(id)

    def write_manifest(
        self, id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
    ) -> Written:
        """One process writes to the directory, and it has one thread for manifests."""
        with self._call(changes=True) as now:
            if now.directory.read_manifest(id) != instead_of:
                return Written.TAKEN
            return Written.DONE if now.directory.write_manifest(id, data) else Written.FULL

    def remove_manifest(self, id: str, only: bytes | None = None) -> None:
        with self._call(changes=True) as now:
            if only is None or now.directory.read_manifest(id) == only:
                now.directory.remove_manifest(id)

    # -------------------------------------------------------------------------------------------------- place

    def persist(self) -> None:
        with self._call(changes=True) as now:
            now.segments.persist()

    def reset(self) -> int:
        with self._call(changes=True) as now, now.segments.renewal() as renew:
            return now.index.reset(renew)

    def probe(self) -> None:
        """Also reopens everything if its files are no longer those of the directory, or could not be opened
        the last time."""
        if not self._is_open or not self._now.are_in_place():
            self._open_anew()
        with self._call() as now:
            now.segments.probe()
            now.slot_io.forgive()

    @contextlib.contextmanager
    def _call(self, changes: bool = False) -> Iterator[OpenFiles]:
        """Raises StoreFailed if nothing is open; with `changes` also if a change would be lost."""
        with self._lock:
            if not self._is_open:
                raise self._failed("is closed" if self._closed else "is not open")
            self._num_calls += 1
        try:
            if changes and not self._now.directory.is_in_place():
                raise StoreFailed("the directory of the SSD cache, or its lock, has been removed or replaced")
            yield self._now
        finally:
            with self._lock:
                self._num_calls -= 1

    def _failed(self, why: str) -> StoreFailed:
        return StoreFailed(f"the SSD cache in {self._path} {why}")

    def _open_anew(self) -> None:
        """Blocks in lost files are misses from now on. Raises StoreFailed while calls use the old files, and
        if the directory is not available, for example locked by another process."""
        with self._lock:
            if self._closed:
                raise self._failed("is closed")
            if self._num_calls:
                raise self._failed("is still busy with files that have been removed or replaced")
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._now.close()
        try:
            now = self._open(remake_directory(self._path, self.directory.io, self.directory.device))
        except (ConfigError, OSError) as error:
            raise StoreFailed(f"the SSD cache cannot be opened anew: {error}") from error
        with self._lock:
            for id, keys in self._pinned_keys.items():
                now.index.pin_keys(id, keys)
            self._now, self._is_open = now, True
        log.warning(
            "the SSD cache in %s was opened anew: its directory, its lock or a file had been removed or "
            "replaced",
            self._path,
        )

    def close(self) -> None:
        with self._lock:
            was_open, self._is_open, self._closed = self._is_open, False, True
        if was_open:
            self._now.close()


def open_ssd(
    directory: str | Path,
    max_bytes: int,
    space: Space,
    eviction: EvictionName,
    io: DiskIo | None = None,
    observer: PoolObserver | None = None,
) -> SsdStore:
    """The store in `directory`, which takes at most `max_bytes` of disk. Raises ConfigError if that can never
    work, if other users may write there, or if another process has the directory. Serves at once; earlier
    blocks are found as they are scanned."""
    return SsdStore(Path(directory).absolute(), max_bytes, space, eviction, io or DiskIo(), observer)

"""Blocks in files on a local disk: a `BlockStore` that outlives the process. Owns what a call means for slots and files, which have their
own modules, and notices when the files it has open are no longer those of its directory. What is on disk at each instant is in
docs/decisions/0013-ssd-files.md."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.config import EvictionName
from penstock.errors import ConfigError, StoreFailed
from penstock.kv.blocks.eviction import make_order
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd.blocks import BlockIo, Blocks
from penstock.kv.tiers.ssd.directory import Directory, make_directory, remake_directory
from penstock.kv.tiers.ssd.disk import DiskIo
from penstock.kv.tiers.ssd.earlier import ABSENT
from penstock.kv.tiers.ssd.files import SegmentFiles
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.pieces import Growth, withhold_all
from penstock.kv.tiers.ssd.runs import runs_of
from penstock.kv.tiers.ssd.scan import Scan
from penstock.kv.tiers.ssd.segments import Segments
from penstock.kv.tiers.store import Outcome, Space, StoreUsage

log = logging.getLogger(__name__)


class SsdStore:
    """One directory. Several lanes read and write at once; the lock of the index is never held across a call of the system."""

    name = "ssd"
    local = True

    def __init__(self, path: Path, max_bytes: int, space: Space, eviction: EvictionName, io: DiskIo) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._space = space
        self._eviction: EvictionName = eviction
        self._lock = threading.Lock()
        self._num_calls = 0  # under way, with what is open
        self._is_open = False
        self._closed = False  # for good
        self._open(lambda: make_directory(path), io)

    def _open(self, lock: Callable[[], Directory], io: DiskIo) -> None:
        """Raises ConfigError or OSError, and everything is as it was."""
        with contextlib.ExitStack() as undo:
            directory = lock()
            undo.callback(directory.close)
            segments = Segments(SegmentFiles(io, directory), self._space, self._max_bytes)
            undo.callback(segments.close)
            pool = BlockPool(segments.num_slots, "ssd", eviction=make_order(self._eviction, segments.num_slots))
            index = SlotIndex(pool, segments.generation)
            pieces = withhold_all(segments, index)
            growth = Growth(segments, index, [piece for piece in pieces if not piece.is_in_file])
            scan = Scan(io, index, [piece for piece in pieces if piece.is_in_file])
            scan.start()
            undo.pop_all()
        self._directory, self._segments, self._index, self._growth, self._scan = directory, segments, index, growth, scan
        self._blocks = BlockIo(segments.files, self._space.digest)
        self._is_open = True

    @property
    def files(self) -> SegmentFiles:
        """What it is written in. A disk that fails on purpose can be put in place of its `io`."""
        return self._segments.files

    @property
    def scanned(self) -> bool:
        """Whether all that an earlier life has left can be found."""
        return self._scan.done.is_set()

    def wait_scanned(self, timeout_s: float) -> bool:
        return self._scan.done.wait(timeout_s)

    def find(self, keys: Sequence[bytes]) -> int:
        return self._index.find(keys) if self._is_open else 0

    def usage(self) -> StoreUsage:
        num_keys = self._index.num_keys if self._is_open else 0
        return StoreUsage(num_keys, max(num_keys, self._segments.num_usable))

    # --------------------------------------------------------------------------------------------------------------- blocks

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        with self._call():
            return self._read(keys, into)

    def _read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        outcomes = [Outcome.MISSING] * len(keys)
        slots, pin = self._index.pin_each(keys)
        if pin is None:
            return outcomes
        try:
            first = {slot: place for place, slot in reversed(list(enumerate(slots))) if slot != ABSENT}
            for run in runs_of(self._segments, list(first.items())):
                for place, outcome in self._blocks.read(run, keys, into).items():
                    outcomes[place] = outcome
                    if outcome is not Outcome.DONE:
                        self._give_up(keys[place], slots[place], outcome)
            for place, slot in enumerate(slots):
                if slot != ABSENT and first[slot] != place:  # asked for twice
                    outcomes[place] = outcomes[first[slot]]
                    into[place][:] = into[first[slot]]
            self._index.earlier.note_good(slot for place, slot in enumerate(slots) if outcomes[place] is Outcome.DONE)
        finally:
            self._index.unpin(pin)
        return outcomes

    def _give_up(self, key: bytes, slot: int, outcome: Outcome) -> None:
        self._index.forget(key, slot)
        segment, number = self._segments.locate(slot)
        where = self._segments.files.path(segment.head.number)
        log.warning("the block in slot %d of %s is given up: %s", number, where, outcome.value)

    def write(self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        with self._call(changes=True):
            return self._write(keys, depths, blocks)

    def _write(self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        self._growth.make_room(len(keys))
        claim = self._index.claim(keys)
        written: dict[int, bytes] = {}
        try:
            what = Blocks(keys, depths, blocks, claim.sequence)
            for run in runs_of(self._segments, list(zip(claim.slots, claim.places, strict=True))):
                outcomes = self._blocks.write(run, what)
                self._segments.unsynced.note(run.segment)
                for place, outcome in outcomes.items():
                    claim.outcomes[place] = outcome
                    if outcome is Outcome.DONE:
                        written[place] = run.head.generation
        finally:
            self._index.land(claim, keys, depths, written)
        for place in claim.doubtful:
            claim.outcomes[place] = self._write_if_torn(keys[place], depths[place], blocks[place])
        claim.wait_others()
        for place in claim.again:
            (claim.outcomes[place],) = self._write([keys[place]], [depths[place]], [blocks[place]])
        return claim.outcomes

    def _write_if_torn(self, key: bytes, depth: int, block: memoryview) -> Outcome:
        """A crash may have torn a block of an earlier life, and whoever persists this write is to be right that it is there."""
        (outcome,) = self._read([key], [memoryview(bytearray(len(block)))])
        return outcome if outcome is Outcome.DONE else self._write([key], [depth], [block])[0]

    # ---------------------------------------------------------------------------------------------------------------- place

    def persist(self) -> None:
        with self._call(changes=True):
            self._segments.persist()

    def reset(self) -> int:
        with self._call(changes=True):
            return self._segments.renew(self._index.reset)

    def probe(self) -> None:
        """Also opens everything anew where its files are no longer those of the directory, or could not be opened the last time."""
        if not self._is_open or not (self._directory.is_in_place() and self._segments.are_in_place()):
            self._open_anew()
        with self._call():
            self._segments.probe()
            self._blocks.forgive()

    @contextlib.contextmanager
    def _call(self, changes: bool = False) -> Iterator[None]:
        """Raises StoreFailed where there is nothing to talk to; where it `changes` something, also where nobody would find that again."""
        with self._lock:
            if not self._is_open:
                raise StoreFailed(f"the SSD cache in {self._path} is {'closed' if self._closed else 'not open'}")
            self._num_calls += 1
        try:
            if changes and not self._directory.is_in_place():
                raise StoreFailed("the directory of the SSD cache, or its lock, has been removed or replaced")
            yield
        finally:
            with self._lock:
                self._num_calls -= 1

    def _open_anew(self) -> None:
        """What was in the files that are gone is a miss from now on. Raises StoreFailed while calls are under way in them, and where the
        directory cannot be had, as when another process has taken it."""
        with self._lock:
            if self._closed:
                raise StoreFailed(f"the SSD cache in {self._path} is closed")
            if self._num_calls:
                raise StoreFailed(f"the SSD cache in {self._path} is still busy with files that have been removed or replaced")
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._close_files()
        try:
            self._open(lambda: remake_directory(self._path, self._directory.device), self.files.io)
        except (ConfigError, OSError) as error:
            raise StoreFailed(f"the SSD cache cannot be opened anew: {error}") from error
        log.warning("the SSD cache in %s was opened anew: its directory, its lock or a file had been removed or replaced", self._path)

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
        self._growth.close()
        self._index.close()


def open_ssd(directory: str | Path, max_bytes: int, space: Space, eviction: EvictionName, io: DiskIo | None = None) -> SsdStore:
    """The store in `directory`, which takes at most `max_bytes` of disk. Raises ConfigError where that can never work, where other users
    may write there, or where another process has the directory. Serves at once; what is there from before is found as it is scanned."""
    return SsdStore(Path(directory).absolute(), max_bytes, space, eviction, io or DiskIo())

"""Blocks in files on a local disk: a `BlockStore` that outlives the process. Owns what a call means for slots and files, which have their
own modules. What is on disk at each instant is in docs/decisions/0013-ssd-files.md."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.config import EvictionName
from penstock.errors import StoreFailed
from penstock.kv.blocks.eviction import make_order
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd.blocks import BlockIo, Blocks
from penstock.kv.tiers.ssd.directory import Directory, make_directory
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

    def __init__(self, directory: Directory, segments: Segments, space: Space, eviction: EvictionName) -> None:
        self._directory = directory
        self._segments = segments
        self._blocks = BlockIo(segments.files, space.digest)
        pool = BlockPool(segments.num_slots, "ssd", eviction=make_order(eviction, segments.num_slots))
        self._index = SlotIndex(pool, segments.generation)
        pieces = withhold_all(segments, self._index)
        self._growth = Growth(segments, self._index, [piece for piece in pieces if not piece.is_in_file])
        self._scan = Scan(segments.files.io, self._index, [piece for piece in pieces if piece.is_in_file])
        self._closed = False
        self._scan.start()

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
        return self._index.find(keys)

    def usage(self) -> StoreUsage:
        return StoreUsage(self._index.num_keys, max(self._index.num_keys, self._segments.num_usable))

    # --------------------------------------------------------------------------------------------------------------- blocks

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self._require_open()
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
        self._require_open()
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
        return claim.wait_others()

    def _write_if_torn(self, key: bytes, depth: int, block: memoryview) -> Outcome:
        """A crash may have torn a block of an earlier life, and whoever persists this write is to be right that it is there."""
        (outcome,) = self.read([key], [memoryview(bytearray(len(block)))])
        return outcome if outcome is Outcome.DONE else self.write([key], [depth], [block])[0]

    # ---------------------------------------------------------------------------------------------------------------- place

    def persist(self) -> None:
        self._require_open()
        self._segments.persist()

    def probe(self) -> None:
        self._require_open()
        self._segments.probe()
        self._blocks.forgive()

    def reset(self) -> int:
        self._require_open()
        return self._segments.renew(self._index.reset)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
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

    def _require_open(self) -> None:
        if self._closed:
            raise StoreFailed(f"the SSD cache in {self._directory.path} is closed")


def open_ssd(directory: str | Path, max_bytes: int, space: Space, eviction: EvictionName, io: DiskIo | None = None) -> SsdStore:
    """The store in `directory`, which takes at most `max_bytes` of disk. Raises ConfigError where that can never work, or where another
    process has the directory. Serves at once; what is there from before is found as it is scanned."""
    locked = make_directory(Path(directory).absolute())
    try:
        segments = Segments(SegmentFiles(io or DiskIo(), locked), space, max_bytes)
        try:
            return SsdStore(locked, segments, space, eviction)
        except BaseException:
            segments.close()
            raise
    except BaseException:
        locked.close()
        raise

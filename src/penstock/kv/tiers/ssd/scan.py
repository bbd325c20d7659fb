"""The start of an SSD tier over files of an earlier life: reads the head of every slot, on threads of its own, while the tier serves. Owns
those threads and the slots that nobody may use before their head has been read."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque

from penstock.kv.tiers.ssd.disk import DiskIo, Scratch, read_all
from penstock.kv.tiers.ssd.format import SECTOR_BYTES, SlotHead, slot_bytes, stands, unpack_slot
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.pieces import SlotPiece

log = logging.getLogger(__name__)

_NUM_THREADS = 8  # most of their time is the disk's
_SKIP_BYTES = 16 << 10  # slots up to this size are read with all that lies between their heads: fewer calls are worth more than bytes
_TELL_S = 3.0


class Scan:
    """One pass over `pieces`."""

    def __init__(self, io: DiskIo, index: SlotIndex, pieces: list[SlotPiece]) -> None:
        self.done = threading.Event()  # nothing of it will happen any more
        self._io = io
        self._index = index
        self._left = deque(pieces)
        self._num_slots = sum(len(piece.slots) for piece in pieces)
        self._num_seen = 0
        self._found: dict[bytes, int] = {}  # key to sequence, for one thread at a time: changed under the index's lock
        self._scratch = Scratch()
        self._stop = threading.Event()
        self._tell_s = time.monotonic() + _TELL_S
        self._thread = threading.Thread(target=self._run, name="ssd-scan", daemon=True)
        index.earlier.begin_scan()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent. What has not been read stays unknown."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        while self._left:
            self._index.release(self._left.popleft().withheld)
        self.done.set()

    def _run(self) -> None:
        others: list[threading.Thread] = []
        try:
            with contextlib.suppress(RuntimeError):  # no more threads can be had: those that are there read it all
                for i in range(min(_NUM_THREADS - 1, len(self._left) // 2)):
                    thread = threading.Thread(target=self._work, name=f"ssd-scan-{i}", daemon=True)
                    thread.start()
                    others.append(thread)
            self._work()
            for thread in others:
                thread.join()
            if not self._stop.is_set():
                self._index.earlier.end_scan(self._found)
                if self._num_slots:
                    log.info("SSD cache: %d blocks found in %d slots", len(self._found), self._num_slots)
            self._found = {}
        finally:
            self.done.set()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                piece = self._left.popleft()
            except IndexError:
                return
            heads: dict[int, SlotHead] = {}
            try:
                heads = self._read_heads(piece)
            except Exception as error:  # whatever it is, these slots hold nothing then, and the others are read
                log.warning("SSD cache: %d slots of file %d cannot be read: %s", len(piece.slots), piece.segment.head.number, error)
            self._index.earlier.publish(piece.withheld, heads, self._found)
            self._num_seen += len(piece.slots)
            self._tell()

    def _read_heads(self, piece: SlotPiece) -> dict[int, SlotHead]:
        """Of those slots that stand for a block, by their numbers among all slots."""
        segment, found = piece.segment, {}
        width = slot_bytes(segment.head.block_bytes)
        if width <= _SKIP_BYTES:
            room = self._scratch.room(len(piece.slots) * width)
            room = room[: read_all(self._io, segment.fd, [room], segment.offset(piece.slots.start))]
            sectors = [room[place * width : place * width + SECTOR_BYTES] for place in range(len(piece.slots))]
        else:
            room = self._scratch.room(len(piece.slots) * SECTOR_BYTES)
            sectors = [room[place * SECTOR_BYTES : (place + 1) * SECTOR_BYTES] for place in range(len(piece.slots))]
            for slot, sector in zip(piece.slots, sectors, strict=True):
                if read_all(self._io, segment.fd, [sector], segment.offset(slot)) < SECTOR_BYTES:
                    sector[:] = bytes(SECTOR_BYTES)
        for slot, sector in zip(piece.slots, sectors, strict=True):
            head = unpack_slot(sector)
            if head is not None and stands(head, segment.head, slot):
                found[segment.first + slot] = head
        return found

    def _tell(self) -> None:
        if time.monotonic() >= self._tell_s:
            self._tell_s = time.monotonic() + _TELL_S
            log.info("SSD cache: %d of %d slots read, %d blocks found so far", self._num_seen, self._num_slots, len(self._found))

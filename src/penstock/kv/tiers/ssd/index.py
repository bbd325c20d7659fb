"""Which block is in which slot, and which must stay. Owns the pool of slots and its lock, and the scan that
rebuilds the index at start from the files of an earlier process.

ColdReader and writer lanes, callers of `find` and the scan share the index. Its methods take the lock for
bookkeeping only, never across I/O. A slot that is being written has no key; one that is being read is pinned;
one whose head has not been read yet is withheld.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Pin, Reservation
from penstock.kv.blocks.pool import BlockPool, PinnedKeys
from penstock.kv.tiers.ssd.directory import READ_THROUGH_BYTES, SECTOR_BYTES, read_all
from penstock.kv.tiers.ssd.segments import (
    Segment,
    SegmentFiles,
    SlotHead,
    WithheldSlots,
    slot_bytes,
    unpack_slot,
)
from penstock.kv.tiers.store import Outcome

log = logging.getLogger(__name__)

ABSENT = -1
_NEVER = 1 << 64  # above every sequence: blocks written since the start are the newest
_USED_AT_ONCE = 1000  # blocks whose recency is restored per lock
_SCAN_THREADS = 8  # they mostly wait for the disk
_TELL_S = 3.0
# Unreadable slots in a row after which the others are not tried, as each may take seconds.
_MOST_FAILED = 8


@dataclass(slots=True, eq=False)
class Claim:
    """Blocks of one call that no other call writes at the same time, and their slots. Lands exactly once."""

    outcomes: list[Outcome]  # of all blocks of the call; a block to be written has the outcome of a failure
    places: list[int] = field(default_factory=list)  # indices of the blocks to write
    slots: list[int] = field(default_factory=list)  # by place
    sequence: int = 0  # the first of as many sequence numbers as the call has blocks
    reservation: Reservation | None = None
    # blocks that another call is writing: place, key, its claim
    others: list[tuple[int, bytes, Claim]] = field(default_factory=list)
    # places of blocks that an earlier process wrote and that were not read since
    unverified: list[int] = field(default_factory=list)
    landed: set[bytes] = field(default_factory=set)
    forgotten: set[bytes] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)


class SlotIndex:
    """A pool of slots that several threads share. `generation` returns the generation of a slot's file;
    `sequence` is above those of an earlier process, as far as known before the scan."""

    def __init__(self, pool: BlockPool, generation: Callable[[int], bytes], sequence: int = 0) -> None:
        self._pool = pool
        self._generation = generation
        self._lock = threading.Lock()
        self._writing: dict[bytes, Claim] = {}
        self._sequence = sequence  # the last one given to a write or found in a file
        # slots of blocks that an earlier process wrote; the first read shows whether they are intact
        self._unverified: set[int] = set()
        self._found: dict[bytes, int] = {}  # during the scan: sequences of the blocks that it has added
        # during the scan: blocks used since the start, the latest last
        self._used: dict[bytes, None] | None = {}
        # Pinned by a want, like blocks of waiting requests; this index never evicts wanted blocks.
        self._pinned = PinnedKeys(pool, lambda run: pool.want(run, 0.0).end)

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def num_keys(self) -> int:
        return self._pool.num_keys

    def find(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            slots = self._pool.find(keys)
            if len(slots):
                self._pool.note_hits(slots)
            return len(slots)

    # ------------------------------------------------------------------------------------------------ reading

    def pin_each(self, keys: Sequence[bytes]) -> tuple[list[int], Pin | None]:
        """The slot of each key, or ABSENT, and a pin on the blocks that are here."""
        with self._lock:
            slots = self._pool.find_each(keys)
            here = dict.fromkeys(slot for slot in slots if slot != ABSENT)
            if self._used is not None:
                self._note_use(
                    self._used, (key for key, slot in zip(keys, slots, strict=True) if slot != ABSENT)
                )
            return slots, self._pool.pin(list(here), "read") if here else None

    def unpin(self, pin: Pin, whole: Iterable[int] = ()) -> None:
        """`whole` are those of its slots whose block was read and is intact."""
        with self._lock:
            self._unverified.difference_update(whole)
            pin.end()

    def forget(self, key: bytes, slot: int) -> None:
        """The block in `slot` is damaged. It may have been forgotten, or written elsewhere, meanwhile."""
        with self._lock:
            if self._pool.find_each([key]) == [slot]:
                self._pool.forget([slot])

    @staticmethod
    def _note_use(used: dict[bytes, None], keys: Iterable[bytes]) -> None:
        for key in keys:
            used.pop(key, None)
            used[key] = None

    # ------------------------------------------------------------------------------------------------ pinning

    def pin_keys(self, id: str, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._pinned.pin(id, keys)

    def unpin_keys(self, id: str) -> None:
        with self._lock:
            self._pinned.unpin(id)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return len(self._pool.find(keys))

    def has_each(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [slot != ABSENT for slot in self._pool.find_each(keys)]

    # ------------------------------------------------------------------------------------------------ writing

    def claim(self, keys: Sequence[bytes], evicts: bool = True) -> Claim | None:
        """Slots for those of `keys` that are neither here nor being written: as many as fit, in order.
        Without `evicts` only free slots, and None if there are too few; counted under the lock, so that no
        other writer takes some in between."""
        with self._lock:
            claim = Claim([Outcome.DONE] * len(keys))
            new: list[int] = []
            num_slots = self._pool.num_unwanted if evicts else self._pool.num_free
            for place, (key, slot) in enumerate(zip(keys, self._pool.find_each(keys), strict=True)):
                if slot != ABSENT:
                    if slot in self._unverified:
                        claim.unverified.append(place)
                    continue
                if (other := self._writing.get(key)) is not None:
                    claim.others.append((place, key, other))
                elif len(new) < num_slots:
                    new.append(place)
                    self._writing[key] = claim
                elif not evicts:
                    for earlier in new:
                        del self._writing[keys[earlier]]
                    return None
                else:
                    claim.outcomes[place] = Outcome.FULL
            claim.places = new
            if new:
                claim.reservation = self._reserve(len(new), "write")
                claim.slots = list(claim.reservation.slots)
                # timestamps, so that a human can read them, but never the same twice
                claim.sequence = max(self._sequence + 1, time.time_ns())
                self._sequence = claim.sequence + len(keys) - 1
                for place in new:
                    claim.outcomes[place] = Outcome.FAILED
            return claim

    def land(
        self, claim: Claim, keys: Sequence[bytes], depths: Sequence[int], written: Mapping[int, bytes]
    ) -> None:
        """The writes of `claim` are over. `written` has the places whose bytes are in the file, each with its
        generation: they can be found from now on, unless everything was forgotten meanwhile."""
        with self._lock:
            for place in claim.places:
                self._writing.pop(keys[place], None)
            claim.outcomes = [
                Outcome.DONE if place in written else outcome for place, outcome in enumerate(claim.outcomes)
            ]
            if claim.reservation is not None:
                hold = self._pool.hold("write")
                claim.reservation.commit(hold)
                pairs = list(zip(claim.places, claim.slots, strict=True))
                good = [
                    (place, slot) for place, slot in pairs if written.get(place) == self._generation(slot)
                ]
                self._unverified.difference_update(claim.slots)
                # A copy that the scan has found meanwhile may be torn: the one written now counts.
                self._pool.forget(
                    [
                        slot
                        for slot in self._pool.find_each([keys[place] for place, _ in good])
                        if slot in self._unverified
                    ]
                )
                self._pool.seal(
                    [slot for _, slot in good],
                    [keys[place] for place, _ in good],
                    [depths[place] for place, _ in good],
                )
                if self._pinned.num_owners:
                    self._pinned.landed(keys[place] for place, _ in good)
                hold.end()
                if self._used is not None:
                    self._note_use(self._used, (keys[place] for place, _ in good))
                claim.landed.update(keys[place] for place, _ in good)
                # by a reset; other copies may have come since
                claim.forgotten.update({keys[place] for place in written} - claim.landed)
            claim.over.set()

    def _reserve(self, num_slots: int, owner: str) -> Reservation:
        reservation = self._pool.try_reserve(num_slots, owner)
        if reservation is None:
            raise InvariantBroken(f"SSD slots vanished under the lock: {num_slots} were available")
        return reservation

    # ---------------------------------------------------------------------------------- slots that come later

    def withhold(self, num_slots: int) -> Reservation:
        """Withhold the next slots by number. Called for all slots in order, before the index is used."""
        return self._reserve(num_slots, "not ready yet")

    def release(self, withheld: Iterable[WithheldSlots]) -> None:
        """They can be used, and are empty."""
        with self._lock:
            for group in withheld:
                group.reservation.rollback()

    def add_scanned(self, reservation: Reservation, heads: Mapping[int, SlotHead]) -> int:
        """The slots of `reservation`, withheld so far, hold the blocks with these heads, by slot, all of one
        file. Returns how many blocks the scan has found by now."""
        newest = sorted(heads.items(), key=lambda item: item[1].envelope.sequence, reverse=True)
        with self._lock:
            hold = self._pool.hold("scan")
            reservation.commit(hold)
            if newest and newest[0][1].generation == self._generation(newest[0][0]):
                self._sequence = max(self._sequence, newest[0][1].envelope.sequence)
                chosen = self._choose(newest)
                self._pool.seal(
                    list(chosen),
                    [head.envelope.key for head in chosen.values()],
                    [head.depth for head in chosen.values()],
                )
                self._unverified.update(chosen)
                self._pinned.landed(head.envelope.key for head in chosen.values())
            hold.end()
            return len(self._found)

    def _choose(self, newest: Sequence[tuple[int, SlotHead]]) -> dict[int, SlotHead]:
        """Of two blocks with one key the newer counts, or the one used since the start; the other is
        forgotten."""
        used = self._used or {}
        chosen: dict[int, SlotHead] = {}
        seen: set[bytes] = set()
        there = self._pool.find_each([head.envelope.key for _, head in newest])
        for (slot, head), other in zip(newest, there, strict=True):
            key, sequence = head.envelope.key, head.envelope.sequence
            if key in seen or (other != ABSENT and (key in used or self._found.get(key, _NEVER) >= sequence)):
                continue
            if other != ABSENT:
                self._pool.forget([other])
            seen.add(key)
            chosen[slot] = head
            self._found[key] = sequence
        return chosen

    def end_scan(self) -> None:
        """Order blocks by their time of writing, as less recently used than all blocks used since the
        start."""
        oldest = sorted(self._found, key=self._found.__getitem__)
        for first in range(0, len(oldest), _USED_AT_ONCE):
            with self._lock:
                used = self._used or {}
                self._use_again([key for key in oldest[first : first + _USED_AT_ONCE] if key not in used])
        with self._lock:
            self._use_again(list(self._used or ()))
            self._used, self._found = None, {}

    def _use_again(self, keys: Sequence[bytes]) -> None:
        """Pin and unpin them: that makes them the latest used. The last of a pin's slots is evicted first."""
        slots = [slot for slot in self._pool.find_each(keys) if slot != ABSENT]
        self._pool.pin(slots[::-1], "scan").end()

    # ---------------------------------------------------------------------------------------------------- end

    def reset(self, renew: Callable[[], None]) -> int:
        """Forget every block, and give the files new generations by `renew`. Blocks being read stay until
        that is over; blocks being written are not published."""
        with self._lock:
            renew()
            num = self._pool.evict(self._pool.num_slots)
            return num + self._pool.forget(self._pool.find_each(self._pool.keys()))

    def check(self) -> None:
        with self._lock:
            self._pool.check()

    def close(self) -> None:
        """Idempotent. Raises Leaked while a call reads or writes."""
        with self._lock:
            self._pool.close()


class Scan:
    """One pass over the heads of `withheld` slots, on its own threads, while the tier serves. Owns these
    slots until they are read."""

    def __init__(self, files: SegmentFiles, index: SlotIndex, withheld: Sequence[WithheldSlots]) -> None:
        self.done = threading.Event()  # the scan is over
        self._files = files
        self._index = index
        self._left = deque(withheld)
        self._num_slots = sum(len(group.slots) for group in withheld)
        self._num_seen = 0
        self._num_found = 0
        self._stop = threading.Event()
        self._tell_s = time.monotonic() + _TELL_S
        self._thread = threading.Thread(target=self._run, name="ssd-scan", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Blocks that have not been read stay unknown."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        while self._left:
            self._index.release([self._left.popleft()])
        self.done.set()

    def _run(self) -> None:
        others: list[threading.Thread] = []
        try:
            # no more threads available: the existing ones read it all
            with contextlib.suppress(RuntimeError):
                for i in range(min(_SCAN_THREADS - 1, len(self._left) // 2)):
                    thread = threading.Thread(target=self._work, name=f"ssd-scan-{i}", daemon=True)
                    thread.start()
                    others.append(thread)
            self._work()
            for thread in others:
                thread.join()
            if not self._stop.is_set():
                self._index.end_scan()
                if self._num_slots:
                    log.info("SSD cache: %d blocks found in %d slots", self._num_found, self._num_slots)
        finally:
            self.done.set()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                group = self._left.popleft()
            except IndexError:
                return
            self._num_found = max(
                self._num_found, self._index.add_scanned(group.reservation, self._heads_of(group))
            )
            self._num_seen += len(group.slots)
            self._tell()

    def _heads_of(self, group: WithheldSlots) -> dict[int, SlotHead]:
        """Like `_read_heads`. Unreadable slots count as empty, and the others are read."""
        segment, slots = group.segment, group.slots
        found: dict[int, SlotHead] = {}
        num_read = num_failed = 0
        try:
            return self._read_heads(segment, slots)
        except Exception as error:
            why = error
        for slot in slots if isinstance(why, OSError) else ():  # one by one, to find the bad ones
            try:
                found.update(self._read_heads(segment, range(slot, slot + 1)))
                num_read, num_failed = num_read + 1, 0
            except OSError as error:
                why, num_failed = error, num_failed + 1
                if num_failed == _MOST_FAILED:
                    break
        log.warning(
            "SSD cache: %d slots of file %d cannot be read: %s",
            len(slots) - num_read,
            segment.head.number,
            why,
        )
        return found

    def _read_heads(self, segment: Segment, slots: range) -> dict[int, SlotHead]:
        """Heads of the slots that hold a block, by slot number."""
        width = slot_bytes(segment.head.block_bytes)
        if width <= READ_THROUGH_BYTES:
            room = self._files.scratch.room(len(slots) * width)
            room = room[: read_all(self._files.io, segment.fd, [room], segment.offset(slots.start))]
            sectors = [room[place * width : place * width + SECTOR_BYTES] for place in range(len(slots))]
        else:
            room = self._files.scratch.room(len(slots) * SECTOR_BYTES)
            sectors = [room[place * SECTOR_BYTES : (place + 1) * SECTOR_BYTES] for place in range(len(slots))]
            for slot, sector in zip(slots, sectors, strict=True):
                if read_all(self._files.io, segment.fd, [sector], segment.offset(slot)) < SECTOR_BYTES:
                    sector[:] = bytes(SECTOR_BYTES)
        found = {}
        for slot, sector in zip(slots, sectors, strict=True):
            head = unpack_slot(sector)
            if head is not None and head.is_for(segment.head, slot):
                found[segment.first + slot] = head
        return found

    def _tell(self) -> None:
        if time.monotonic() >= self._tell_s:
            self._tell_s = time.monotonic() + _TELL_S
            log.info(
                "SSD cache: %d of %d slots read, %d blocks found so far",
                self._num_seen,
                self._num_slots,
                self._num_found,
            )

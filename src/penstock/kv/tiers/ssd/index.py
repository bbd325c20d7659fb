"""Which block is in which slot, and which must stay. Owns the pool of slots and its lock, and the scan that
rebuilds the index at start from the files of an earlier process.

ColdReader and writer lanes, callers of `find` and the scan share the index. Its methods take the lock for
bookkeeping only, never across I/O. A slot that is being written has no key; one that is being read is pinned;
one whose file is not made or whose head has not been read yet is withheld.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Pin, Reservation
from penstock.kv.blocks.pool import BlockPool, PinnedKeys
from penstock.kv.tiers.ssd.segments import Segment, Segments, SlotHead, read_slots, unpack_slot
from penstock.kv.tiers.store import Outcome

log = logging.getLogger(__name__)

Keys = Sequence[bytes]

ABSENT = -1
_NEVER = 1 << 64  # above every sequence: blocks written since the start are the newest
_USED_AT_ONCE = 1000  # blocks whose recency is restored per lock
_SCAN_THREADS = 8  # they mostly wait for the disk
_TELL_S = 3.0
# Unreadable slots in a row after which the others are not tried, as each may take seconds.
_MOST_FAILED = 8


class WithheldSlots(NamedTuple):
    """Neighbouring slots that become usable together: when their file is made, or when their heads are
    read."""

    segment: Segment
    slots: range  # numbers within the segment
    reservation: Reservation  # keeps them out of use until then


@dataclass(slots=True, eq=False)
class Claim:
    """Blocks of one call that no other call writes at the same time, and their slots. Lands exactly once."""

    outcomes: list[Outcome]  # of all blocks of the call; a block to be written has the outcome of a failure
    places: list[int] = field(default_factory=list)  # indices of the blocks to write
    slots: list[int] = field(default_factory=list)  # by place
    sequence: int = 0  # the first of as many sequence numbers as the call has blocks
    reservation: Reservation | None = None
    # places of blocks that an earlier process wrote and that were not read since
    unverified: list[int] = field(default_factory=list)


class SlotIndex:
    """A pool of all slots of `segments` that several threads share."""

    def __init__(self, pool: BlockPool, segments: Segments) -> None:
        self._pool = pool
        self._segments = segments
        self._lock = threading.Condition(threading.Lock())  # notified when a claim lands
        self._writing: set[bytes] = set()
        # the last one given to a write or found in a file
        self._sequence = segments.written_ns
        # slots of blocks that an earlier process wrote; the first read shows whether they are intact
        self._unverified: set[int] = set()
        self._found: dict[bytes, int] = {}  # during the scan: sequences of the blocks that it has added
        # during the scan: blocks used since the start, the latest last
        self._used: dict[bytes, None] | None = {}
        # Pinned by a want, like blocks of waiting requests; this index never evicts wanted blocks.
        self._pinned = PinnedKeys(pool, lambda run: pool.want(run, 0.0).end)
        self._withheld = [
            WithheldSlots(segment, slots, self._reserve(len(slots), "not ready yet"))
            for segment in segments
            for slots in segment.groups()
        ]

    @property
    def num_keys(self) -> int:
        return self._pool.num_keys

    def find(self, keys: Keys) -> int:
        """How many leading keys are here. They count as used."""
        with self._lock:
            slots = self._pool.find(keys)
            if len(slots):
                self._pool.note_hits(slots)
            return len(slots)

    def find_last(self, keys: Keys) -> int:
        """Length of the longest prefix whose last key is here. It counts as used."""
        with self._lock:
            num = self._pool.find_deepest(keys)
            if num:
                self._pool.note_hits(self._pool.find(keys[num - 1 : num]))
            return num

    def find_each(self, keys: Keys) -> list[int]:
        """The slot of each key, or ABSENT. Takes no lock, for threads that must not wait: a block that comes
        or goes meanwhile may count as either."""
        slot_of = self._pool.index.slot_of
        return [slot_of.get(key, ABSENT) for key in keys]

    # ------------------------------------------------------------------------------------------------ reading

    def pin_each(self, keys: Keys) -> tuple[list[int], Pin | None]:
        """The slot of each key, or ABSENT, and a pin on the blocks that are here."""
        with self._lock:
            slots = self._pool.find_each(keys)
            here = dict.fromkeys(slot for slot in slots if slot != ABSENT)
            self._note_use(key for key, slot in zip(keys, slots, strict=True) if slot != ABSENT)
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

    def _note_use(self, keys: Iterable[bytes]) -> None:
        if self._used is not None:
            for key in keys:
                self._used.pop(key, None)
                self._used[key] = None

    # ------------------------------------------------------------------------------------------------ pinning

    def pin_keys(self, id: str, keys: Keys) -> None:
        with self._lock:
            self._pinned.pin(id, keys)

    def unpin_keys(self, id: str) -> None:
        with self._lock:
            self._pinned.unpin(id)

    # ------------------------------------------------------------------------------------------------ writing

    def claim(self, keys: Keys, evicts: bool = True) -> Claim | None:
        """Slots for those of `keys` that are not here: as many as fit, in order. Waits while another call
        writes one of them; a call that waits has no claim, so none waits for it. Without `evicts` only free
        slots, and None if there are too few; counted under the lock, so that no other writer takes some in
        between."""
        with self._lock:
            self._lock.wait_for(lambda: self._writing.isdisjoint(keys))
            claim = Claim([Outcome.DONE] * len(keys))
            num_slots = self._pool.num_unwanted if evicts else self._pool.num_free
            for place, slot in enumerate(self._pool.find_each(keys)):
                if slot != ABSENT:
                    if slot in self._unverified:
                        claim.unverified.append(place)
                elif len(claim.places) < num_slots:
                    claim.places.append(place)
                    claim.outcomes[place] = Outcome.FAILED
                elif evicts:
                    claim.outcomes[place] = Outcome.FULL
                else:
                    return None
            if claim.places:
                self._writing.update(keys[place] for place in claim.places)
                claim.reservation = self._reserve(len(claim.places), "write")
                claim.slots = list(claim.reservation.slots)
                # timestamps, so that a human can read them, but never the same twice
                claim.sequence = max(self._sequence + 1, time.time_ns())
                self._sequence = claim.sequence + len(keys) - 1
            return claim

    def land(self, claim: Claim, keys: Keys, depths: Sequence[int], written: Mapping[int, bytes]) -> None:
        """The writes of `claim` are over. `written` has the places whose bytes are in the file, each with its
        generation: they can be found from now on, unless everything was forgotten meanwhile."""
        with self._lock:
            self._writing.difference_update(keys[place] for place in claim.places)
            self._lock.notify_all()
            for place in written:
                claim.outcomes[place] = Outcome.DONE
            if claim.reservation is not None:
                good = {
                    place: slot
                    for place, slot in zip(claim.places, claim.slots, strict=True)
                    if written.get(place) == self._generation(slot)
                }
                self._unverified.difference_update(claim.slots)
                # A copy that the scan has found meanwhile may be torn: the one written now counts.
                there = self._pool.find_each([keys[place] for place in good])
                self._pool.forget([slot for slot in there if slot in self._unverified])
                placed = {slot: (keys[place], depths[place]) for place, slot in good.items()}
                self._seal(claim.reservation, placed)
                self._note_use(keys[place] for place in good)

    def _seal(self, reservation: Reservation, blocks: Mapping[int, tuple[bytes, int]]) -> None:
        """Some of the reserved slots hold blocks: their keys and depths, by slot. The others are free."""
        hold = self._pool.hold("write")
        reservation.commit(hold)
        keys = [key for key, _ in blocks.values()]
        self._pool.seal(list(blocks), keys, [depth for _, depth in blocks.values()])
        if self._pinned.num_owners:
            self._pinned.landed(keys)
        hold.end()

    def _reserve(self, num_slots: int, owner: str) -> Reservation:
        reservation = self._pool.try_reserve(num_slots, owner)
        if reservation is None:
            raise InvariantBroken(f"SSD slots vanished under the lock: {num_slots} were available")
        return reservation

    def _generation(self, slot: int) -> bytes:
        return self._segments.locate(slot)[0].head.generation

    # ---------------------------------------------------------------------------------- slots that come later

    def take_ready(self) -> list[WithheldSlots]:
        """Withheld slots that are in a file by now. The caller releases them."""
        with self._lock:
            withheld, self._withheld, ready = self._withheld, list[WithheldSlots](), list[WithheldSlots]()
            for group in withheld:
                is_ready = group.slots.stop <= group.segment.num_ready
                (ready if is_ready else self._withheld).append(group)
            return ready

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
            chosen: dict[int, SlotHead] = {}
            if newest and newest[0][1].generation == self._generation(newest[0][0]):
                self._sequence = max(self._sequence, newest[0][1].envelope.sequence)
                chosen = self._choose(newest)
            self._seal(reservation, {slot: (head.envelope.key, head.depth) for slot, head in chosen.items()})
            self._unverified.update(chosen)
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

    def _use_again(self, keys: Keys) -> None:
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
        """Raises Leaked while a call reads or writes."""
        self.release(self._withheld)
        self._withheld = []
        with self._lock:
            self._pool.close()


class Scan:
    """One pass over the heads of `withheld` slots, on its own threads, while the tier serves. Owns these
    slots until they are read."""

    def __init__(self, segments: Segments, index: SlotIndex) -> None:
        self.done = threading.Event()  # the scan is over
        self.is_complete = False  # and nothing stopped it
        self._segments = segments
        self._index = index
        self._left = deque(index.take_ready())
        self._num_slots = sum(len(group.slots) for group in self._left)
        self._num_seen = 0
        self._num_found = 0
        self._stop = threading.Event()
        self._tell_s = time.monotonic() + _TELL_S
        self._thread = threading.Thread(target=self._run, name="ssd-scan", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Blocks that have not been read stay unknown."""
        self._stop.set()
        self._thread.join()
        self._index.release(self._left)
        self._left.clear()

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
                self.is_complete = True
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
            num_found = self._index.add_scanned(group.reservation, self._heads_of(group))
            self._num_found = max(self._num_found, num_found)
            self._num_seen += len(group.slots)
            if time.monotonic() >= self._tell_s:
                self._tell_s = time.monotonic() + _TELL_S
                counts = self._num_seen, self._num_slots, self._num_found
                log.info("SSD cache: %d of %d slots read, %d blocks found so far", *counts)

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
                found |= self._read_heads(segment, range(slot, slot + 1))
                num_read, num_failed = num_read + 1, 0
            except OSError as error:
                why, num_failed = error, num_failed + 1
                if num_failed == _MOST_FAILED:
                    break
        counts = len(slots) - num_read, segment.head.number
        log.warning("SSD cache: %d slots of file %d cannot be read: %s", *counts, why)
        return found

    def _read_heads(self, segment: Segment, slots: range) -> dict[int, SlotHead]:
        """Heads of the slots that hold a block, by slot number."""
        images = read_slots(self._segments.directory, segment.fd, segment.head.block_bytes, slots)
        return {
            segment.first + slot: head
            for slot, image in zip(slots, images, strict=True)
            if (head := unpack_slot(image)) is not None and head.is_for(segment.head, slot)
        }

"""Which block lies in which slot of the segments, and who needs it to stay. Owns the pool of slots and its lock; moves no bytes.

Lanes that read and write, callers that ask and the scan of a start meet here. Every method takes the lock for bookkeeping only. A slot that
is being written has no key; one that is being read is pinned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Pin, Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd.earlier import ABSENT, EarlierLife
from penstock.kv.tiers.store import Outcome


@dataclass(slots=True, eq=False)
class Claim:
    """Blocks of one call that nobody else writes at the same time, and the slots for them. Lands exactly once."""

    outcomes: list[Outcome]  # of all blocks of the call; of those to be written, that of a failure
    places: list[int] = field(default_factory=list)  # indices of those to be written
    slots: list[int] = field(default_factory=list)  # by place
    sequence: int = 0  # the first of as many numbers as the call has blocks
    reservation: Reservation | None = None
    others: list[tuple[int, bytes, Claim]] = field(default_factory=list)  # blocks that another call writes already: place, key, whose
    doubtful: list[int] = field(default_factory=list)  # blocks that are here from an earlier life, which nobody has read since
    again: list[int] = field(default_factory=list)  # of `others`: what they wrote was forgotten before it could be found
    landed: set[bytes] = field(default_factory=set)
    forgotten: set[bytes] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)

    def wait_others(self) -> None:
        """All outcomes are known then; blocks until those who write the same blocks have ended. The claim has landed, so nobody waits for
        the other in a circle."""
        for place, key, other in self.others:
            other.over.wait()
            self.outcomes[place] = Outcome.DONE if key in other.landed else Outcome.FAILED
            if key in other.forgotten:
                self.again.append(place)


class SlotIndex:
    """A pool of slots that several threads share. `generation` says which generation the file of a slot has now."""

    def __init__(self, pool: BlockPool, generation: Callable[[int], bytes]) -> None:
        self._pool = pool
        self._generation = generation
        self._lock = threading.Lock()
        self._writing: dict[bytes, Claim] = {}
        self.earlier = EarlierLife(pool, self._lock, generation)

    # ------------------------------------------------------------------------------------------------------------ questions

    @property
    def num_keys(self) -> int:
        return self._pool.num_keys

    @property
    def num_free(self) -> int:
        return self._pool.counts.free

    def find(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            slots = self._pool.find(keys)
            self._pool.note_hits(slots)
            return len(slots)

    # -------------------------------------------------------------------------------------------------------------- reading

    def pin_each(self, keys: Sequence[bytes]) -> tuple[list[int], Pin | None]:
        """The slot of each key, ABSENT where it is not here, and a pin on those that are."""
        with self._lock:
            slots = self._pool.find_each(keys)
            here = dict.fromkeys(slot for slot in slots if slot != ABSENT)
            self.earlier.note_use(key for key, slot in zip(keys, slots, strict=True) if slot != ABSENT)
            return slots, self._pool.pin(list(here), "read") if here else None

    def unpin(self, pin: Pin) -> None:
        with self._lock:
            pin.end()

    def forget(self, key: bytes, slot: int) -> None:
        """The block in `slot` is not what it was written as. It may have been forgotten, or written elsewhere, in the meantime."""
        with self._lock:
            if self._pool.find_each([key]) == [slot]:
                self._pool.forget([slot])

    # -------------------------------------------------------------------------------------------------------------- writing

    def claim(self, keys: Sequence[bytes]) -> Claim:
        """Slots for those of `keys` that are neither here nor being written: as many as fit, the first ones first."""
        with self._lock:
            claim = Claim([Outcome.DONE] * len(keys))
            new: list[int] = []
            for place, (key, slot) in enumerate(zip(keys, self._pool.find_each(keys), strict=True)):
                if slot != ABSENT:
                    if slot in self.earlier.unread:
                        claim.doubtful.append(place)
                    continue
                if (other := self._writing.get(key)) is not None:
                    claim.others.append((place, key, other))
                elif len(new) < self._pool.num_available:
                    new.append(place)
                    self._writing[key] = claim
                else:
                    claim.outcomes[place] = Outcome.FULL
            claim.places = new
            if new:
                claim.reservation = self._reserve(len(new), "write")
                claim.slots = list(claim.reservation.slots)
                claim.sequence = self.earlier.next_sequence(len(keys))
                for place in new:
                    claim.outcomes[place] = Outcome.FAILED
            return claim

    def land(self, claim: Claim, keys: Sequence[bytes], depths: Sequence[int], written: Mapping[int, bytes]) -> None:
        """The writes of `claim` are over. `written` has the places whose bytes are in the file, each with the generation that it was
        written in: they can be found from now on, unless everything was forgotten meanwhile."""
        with self._lock:
            for place in claim.places:
                self._writing.pop(keys[place], None)
            claim.outcomes = [Outcome.DONE if place in written else outcome for place, outcome in enumerate(claim.outcomes)]
            if claim.reservation is not None:
                hold = self._pool.hold("write")
                claim.reservation.commit(hold)
                pairs = list(zip(claim.places, claim.slots, strict=True))
                good = [(place, slot) for place, slot in pairs if written.get(place) == self._generation(slot)]
                self.earlier.unread.difference_update(claim.slots)
                self._pool.seal([slot for _, slot in good], [keys[place] for place, _ in good], [depths[place] for place, _ in good])
                hold.end()
                self.earlier.note_use(keys[place] for place, _ in good)
                claim.landed.update(keys[place] for place, _ in good)
                claim.forgotten.update({keys[place] for place in written} - claim.landed)  # by a reset; others may have come since
            claim.over.set()

    def _reserve(self, num_slots: int, owner: str) -> Reservation:
        reservation = self._pool.try_reserve(num_slots, owner)
        if reservation is None:
            raise InvariantBroken(f"SSD slots vanished under the lock: {num_slots} were available")
        return reservation

    # ------------------------------------------------------------------------------------------------- slots that come later

    def withhold(self, num_slots: int) -> Reservation:
        """The next slots by number are not to be used yet. Called for all of them in order, before the index is used."""
        return self._reserve(num_slots, "not ready yet")

    def release(self, withheld: Reservation) -> None:
        """They can be used, and hold nothing."""
        with self._lock:
            withheld.rollback()

    # ------------------------------------------------------------------------------------------------------------------ end

    def reset(self, renew: Callable[[], None]) -> int:
        """Forget every block, and give the files new generations by `renew`. What is being read stays until that is over; what is being
        written is not published."""
        with self._lock:
            renew()
            num = self._pool.evict(self._pool.num_slots)
            return num + self._pool.forget(self._pool.find_each(self._pool.keys()))

    def check(self) -> None:
        with self._lock:
            self._pool.check()

    def close(self) -> None:
        """Idempotent. Raises Leaked while somebody reads or writes."""
        with self._lock:
            self._pool.close()

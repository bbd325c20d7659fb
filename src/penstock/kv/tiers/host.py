"""The host tier: which blocks host memory has, and which must stay. Owns the host pool and its lock; moves no
bytes.

Several threads meet here: callers lease blocks for a prompt, the launcher of demotions takes slots for new
blocks, the engine thread lands and ends transfers. Every method takes the lock for bookkeeping only, never
across a copy, a wait or an allocation.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence
from penstock.errors import InvariantBroken, Leaked
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.handles import Handle, Pin, Reservation
from penstock.kv.blocks.pool import BlockPool, PinnedKeys
from penstock.kv.blocks.slots import Run, SlotCounts, as_list, as_run
from penstock.kv.memory import HostMemory
from penstock.kv.tiers.cold import Finding
from penstock.observe import EngineObserver

ABSENT = -1
HOST = "host"
_EXPIRY_S = 1.0  # between two checks for expired leases
_MAX_NAMED = 16  # leases listed in a Leaked message
_PIECE = 64  # slots that become ready together


@dataclass(slots=True)
class HostCounts:
    """Totals that never fall, in blocks; read without the lock."""

    landed: int = 0
    skipped_full: int = 0  # saves without room
    # saves of blocks that the device keeps; put off, since the only room was taken by wanted blocks
    postponed: int = 0
    deduplicated: int = 0
    leases_expired: int = 0


class Part(NamedTuple):
    """Blocks of a lease that are not in host memory, and the finding of another tier."""

    tier: str
    blocks: Sequence[int]  # numbers, in order
    finding: Finding  # how many of the leading blocks the tier has


def whose(slots: Sequence[int], parts: Sequence[Part], first: int) -> list[str]:
    """The tier of each block from number `first` on, up to the first that no tier has. `slots` are the slots
    in host memory."""
    found = {
        number: part.tier
        for part in parts
        if part.finding.ready
        for number in part.blocks[: part.finding.num]
    }
    places = (HOST if slot != ABSENT else found.get(number) for number, slot in enumerate(slots, first))
    return [
        place for place in itertools.takewhile(lambda place: place is not None, places) if place is not None
    ]


def runs_of(tiers: Sequence[str]) -> list[tuple[str, int]]:
    """(tier, number of neighbouring blocks)."""
    return [(tier, len(list(same))) for tier, same in itertools.groupby(tiers)]


Slots = NDArray[np.int64]
_Runs = tuple[Slots | None, tuple[int, ...], int, list[tuple[str, int]]]


class HostLease:
    """Copies of a run of a request's blocks. `slots[i]` is the slot of block i, or ABSENT. Implements
    `contract.Lease`.

    While its request waits, the blocks are only wanted: they are evicted last, and `HostTier.refresh` updates
    their slots. `claim` or `HostTier.take_lease` pins them when the request is admitted.
    """

    def __init__(self, tier: HostTier, owner: str, slots: Sequence[int] | Slots, num_tokens: int) -> None:
        self.saving = False  # the save of a retraction is still in flight
        self.expired = False
        self.owner = owner
        self.slots: Slots = np.asarray(slots, np.int64)  # replaced as a whole, never changed
        self.want: PoolWant | None = None  # None: claimed, or private
        self.keys: Sequence[bytes] = ()  # of its blocks, if more of them may land while it waits
        self.places: Slots = np.empty(0, np.int64)  # the blocks that are wanted
        self.num_tokens = num_tokens
        self.deadline_s = float("inf")
        self.parts: Sequence[Part] = ()
        self._tier = tier
        # cache of `runs_from`: (slots, findings, block, runs)
        self._runs: _Runs = None, (), 0, []

    @property
    def ready(self) -> bool:
        return not self.saving and all(part.finding.ready for part in self.parts)

    def num_from(self, block: int) -> int:
        return sum(num for _, num in self.runs_from(block))

    def note_run(self, block: int, num_blocks: int) -> None:
        """Host memory has `num_blocks` from `block` on; no other tier was asked."""
        self._runs = self.slots, (), block, [(HOST, num_blocks)] if num_blocks else []

    def runs_from(self, block: int) -> list[tuple[str, int]]:
        asked = self.slots, tuple(part.finding.num if part.finding.ready else 0 for part in self.parts), block
        # asked several times during a request's admission
        if asked[0] is not self._runs[0] or asked[1:] != self._runs[1:3]:
            if self.parts:
                self._runs = *asked, runs_of(whose(self.slots[block:].tolist(), self.parts, block))
            else:
                absent = np.flatnonzero(self.slots[block:] == ABSENT)
                self.note_run(block, int(absent[0]) if absent.size else max(0, len(self.slots) - block))
        return list(self._runs[3])

    def set_rank(self, rank: float) -> None:
        """How late its request runs; the eviction order compares wanted blocks by it."""
        if self.want is not None:
            self.want.rank = rank

    def claim(self, first: int, num_blocks: int) -> bool:
        return self._tier.claim(self, first, num_blocks)

    def end(self) -> None:
        self._tier.end_lease(self)


class Displaces(enum.Enum):
    """Which blocks may be evicted for blocks that come into host memory."""

    NOTHING = "nothing"  # only free slots are taken
    UNWANTED = "unwanted"  # blocks without a want
    ANYTHING = "anything"  # also blocks that requests in line will use


@dataclass(slots=True)
class Taken:
    """Slots for blocks that are about to be written: which of the requested blocks, and where. Lands or is
    dropped, exactly once."""

    places: list[int]  # indices into the requested keys
    keys: list[bytes]
    depths: list[int]
    reservation: Reservation | None = None


class HostTier:
    """A pool of host slots that several threads share."""

    def __init__(
        self, pool: BlockPool, block_tokens: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_slots = pool.num_slots
        self.counts = HostCounts()
        self._pool = pool
        self._block_tokens = block_tokens
        self._lease_s = lease_s
        self._clock = clock
        self._look_again_s = 0.0
        self._lock = threading.Lock()
        self._arriving: set[bytes] = set()  # taken, not landed
        self._leases: dict[HostLease, list[Handle]] = {}  # open leases, and the handles of each
        self._pinned = PinnedKeys(pool, lambda run: pool.pin(run, "snapshot").end)
        self._missing: deque[Reservation] = deque()  # slots whose memory is not ready yet, in order
        self.memory: HostMemory | None = None  # memory of the slots, if it is closed with the tier

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def slots(self) -> SlotCounts:
        with self._lock:  # a move between two states is never seen half done
            return self._pool.counts

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_keys(self) -> int:
        return self._pool.num_keys

    def has(self, key: bytes) -> bool:
        return self._pool.find_each([key]) != [ABSENT]

    def has_each(self, keys: Sequence[bytes]) -> list[bool]:
        return [slot != ABSENT for slot in self.find_each(keys)]

    def find_each(self, keys: Sequence[bytes]) -> list[int]:
        """The slot of each key, or ABSENT. The blocks are not protected."""
        with self._lock:
            return self._pool.find_each(keys)

    @property
    def num_spare(self) -> int:
        """Slots for blocks that have no table yet: free, or of unwanted blocks."""
        return self._pool.num_unwanted

    @property
    def num_available(self) -> int:
        """Slots for blocks of a table: free, or of blocks that no transfer uses."""
        return self._pool.num_available

    # ------------------------------------------------------------------------------------------------- leases

    def lease(
        self, keys: Sequence[bytes], owner: str, first: int = 0, even_empty: bool = False
    ) -> HostLease | None:
        """Want every block of `keys` from number `first` on that is here. None if none is, unless other tiers
        are to be asked."""
        with self._lock:
            run = self._pool.find(keys[first:])  # mostly all of them
            rest = self._pool.find_each(keys[first + len(run) :])
            here = as_run([*as_list(run), *(slot for slot in rest if slot != ABSENT)]) if rest else run
            if not len(here) and not even_empty:
                return None
            slots = np.concatenate(
                (np.full(first, ABSENT), np.asarray(run, np.int64), np.asarray(rest, np.int64))
            )
            lease = HostLease(self, owner, slots, len(keys) * self._block_tokens)
            lease.note_run(first, len(run))
            lease.deadline_s = self._clock() + self._lease_s
            self._leases[lease] = []
            lease.keys = keys
            self._want(lease, here)
            self._pool.note_hits(here)
            return lease

    def _want(self, lease: HostLease, here: Run) -> None:
        """`here` are the slots of its blocks."""
        lease.want = self._pool.want(here, self._clock())
        lease.places = np.flatnonzero(lease.slots != ABSENT)

    def want_saved(self, lease: HostLease, num_blocks: int) -> None:
        """Its first `num_blocks` blocks have keys and become wanted."""
        with self._lock:
            if lease in self._leases:
                here = lease.slots[:num_blocks]
                lease.want = self._pool.want(as_run(here[here != ABSENT]), self._clock())
                lease.places = np.flatnonzero(here != ABSENT)

    def want(self, keys: Sequence[bytes], rank: float, earlier: PoolWant | None = None) -> PoolWant:
        """Mark those of `keys` that are here as wanted, in place of `earlier`: they are evicted last."""
        with self._lock:
            return self._pool.want(
                as_run([slot for slot in self._pool.find_each(keys) if slot != ABSENT]), rank, earlier
            )

    def end_want(self, want: PoolWant) -> None:
        """Idempotent."""
        with self._lock:
            self._pool.end_want(want)

    def refresh(self, lease: HostLease) -> None:
        """Note the blocks that were evicted meanwhile."""
        if lease.want is not None:
            with self._lock:
                self._refresh(lease)

    def grow(self, lease: HostLease) -> None:
        """Note the blocks that landed after its own meanwhile: a save may have been in flight when the lease
        was made."""
        if lease.want is None or lease.parts or not lease.keys:
            return
        with self._lock:
            want, absent = lease.want, np.flatnonzero(lease.slots == ABSENT)
            absent = absent[absent >= (lease.places[0] if lease.places.size else len(lease.slots))]
            if want is None or not absent.size or self._pool.find_each([lease.keys[absent[0]]]) == [ABSENT]:
                return
            slots = lease.slots.copy()
            slots[absent] = self._pool.find_each([lease.keys[block] for block in absent.tolist()])
            self._end_want(lease)
            lease.slots = slots
            self._want(lease, as_run(slots[slots != ABSENT]))
            lease.set_rank(want.rank)

    def _refresh(self, lease: HostLease) -> None:
        if lease.want is None:
            return
        gone = self._pool.gone_of(lease.want)
        places = lease.places[gone]
        if places.size and (lease.slots[places] != ABSENT).any():
            slots = lease.slots.copy()
            slots[places] = ABSENT
            lease.slots = slots

    def claim(self, lease: HostLease, first: int, num_blocks: int) -> bool:
        """Pin its copies of blocks `first..first + num_blocks`: the request is admitted. False if some were
        evicted since the last look; then nothing is pinned."""
        with self._lock:
            if lease not in self._leases:
                return False
            if lease.want is None:
                return True
            seen = lease.slots
            self._refresh(lease)
            end = first + num_blocks
            if (lease.slots[first:end] != seen[first:end]).any():
                return False
            self._pin(lease, first, end)
            return True

    def _pin(self, lease: HostLease, first: int, end: int) -> None:
        here = lease.slots[lease.places[(lease.places >= first) & (lease.places < end)]]
        here = here[here != ABSENT]
        if here.size:
            self._leases[lease].append(self._pool.pin(as_run(here), f"lease of {lease.owner}"))
        self._end_want(lease)

    def _end_want(self, lease: HostLease) -> None:
        if lease.want is not None:
            self._pool.end_want(lease.want)
            lease.want = None

    def keep(self, lease: HostLease, *handles: Handle) -> None:
        """`lease` protects these handles, too. The first call opens it."""
        with self._lock:
            self._leases.setdefault(lease, []).extend(handles)

    def end_lease(self, lease: HostLease) -> None:
        """Give it up. Does nothing if it has ended or expired."""
        with self._lock:
            self._end_want(lease)
            self._end_handles(self._leases.pop(lease, []))

    def take_lease(self, lease: HostLease) -> list[Handle] | None:
        """Its handles, for the transfer that reads from it. None if it has expired."""
        with self._lock:
            if lease in self._leases and lease.want is not None:
                self._refresh(lease)
                self._pin(lease, 0, len(lease.slots))
            return self._leases.pop(lease, None)

    def end_handles(self, handles: Sequence[Handle | None], fence: Fence | None = None) -> None:
        """The transfer that they protected is over, or `fence` covers the remaining reads."""
        with self._lock:
            self._end_handles(handles, fence)

    def expire(self) -> None:
        """End expired leases. A transfer has taken its handles out of the lease, so no slot in use is given
        back."""
        now = self._clock()
        if now < self._look_again_s:
            return
        self._look_again_s = now + _EXPIRY_S
        with self._lock:
            for lease in [lease for lease in self._leases if lease.deadline_s < now]:
                self._end_handles(self._leases.pop(lease))
                self._end_want(lease)
                lease.slots, lease.parts, lease.expired = np.empty(0, np.int64), (), True
                self.counts.leases_expired += 1

    @staticmethod
    def _end_handles(handles: Sequence[Handle | None], fence: Fence | None = None) -> None:
        for handle in handles:
            if handle is not None:
                handle.end(fence)

    # ----------------------------------------------------------------------------------------- writing blocks

    def take(
        self,
        keys: Sequence[bytes],
        depths: Sequence[int],
        owner: str,
        displaces: Displaces = Displaces.UNWANTED,
        most: int | None = None,
    ) -> Taken:
        """Slots for those of `keys` that are neither here nor arriving: as many as fit, in order, at most
        `most`."""
        with self._lock:
            found = self._pool.find_each(keys)
            seen: set[bytes] = set()
            new: list[int] = []
            for place, (key, slot) in enumerate(zip(keys, found, strict=True)):
                if slot == ABSENT and key not in self._arriving and key not in seen:
                    seen.add(key)
                    new.append(place)
            self.counts.deduplicated += len(keys) - len(new)
            new = new[:most]
            num = min(len(new), self._num_in(displaces))
            if displaces is Displaces.NOTHING:
                self.counts.postponed += len(new) - num
            else:
                self.counts.skipped_full += len(new) - num
            places = new[:num]
            taken = Taken(places, [keys[place] for place in places], [depths[place] for place in places])
            if places:
                taken.reservation = self._reserve(num, owner)
                self._arriving.update(taken.keys)
            return taken

    def take_private(self, num_slots: int, owner: str) -> Reservation | None:
        """Slots for blocks without keys, for `owner` alone. None if there are not enough."""
        with self._lock:
            if num_slots > self._num_in(Displaces.UNWANTED):
                self.counts.skipped_full += num_slots
                return None
            return self._reserve(num_slots, owner)

    def _num_in(self, displaces: Displaces) -> int:
        pool = self._pool
        return {
            Displaces.NOTHING: pool.num_free,
            Displaces.UNWANTED: pool.num_unwanted,
            Displaces.ANYTHING: pool.num_available,
        }[displaces]

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are neither here nor arriving."""
        with self._lock:
            found = self._pool.find_each(keys)
            return [
                slot == ABSENT and key not in self._arriving for key, slot in zip(keys, found, strict=True)
            ]

    def give_way(self, keys: Sequence[bytes], most: int) -> int:
        """Evict up to `most` of `keys` that no transfer uses; the device has them and keeps them. Returns how
        many."""
        with self._lock:
            slots = [slot for slot in self._pool.find_each(keys) if slot != ABSENT]
            return self._pool.forget_idle(slots, most)

    def split(self, taken: Taken, num: int) -> Taken:
        """The first `num` blocks of `taken` as a new value; `taken` keeps the others."""
        with self._lock:
            first = Taken(taken.places[:num], taken.keys[:num], taken.depths[:num])
            taken.places, taken.keys, taken.depths = taken.places[num:], taken.keys[num:], taken.depths[num:]
            if not taken.keys:  # a handle without slots has ended
                first.reservation, taken.reservation = taken.reservation, None
            elif first.keys and taken.reservation is not None:
                first.reservation = taken.reservation.split(num)
            return first

    def land(self, taken: Taken, places: Sequence[int] | None = None, pinned_by: str = "") -> Pin | None:
        """The bytes at `places` of its keys (None: all) have arrived and can be found from now on. With
        `pinned_by` they stay pinned."""
        with self._lock:
            self._arriving.difference_update(taken.keys)
            if taken.reservation is None:
                return None
            slots, keys, depths = taken.reservation.slots, taken.keys, taken.depths
            if places is not None:
                slots = [slots[place] for place in places]
                keys, depths = [keys[place] for place in places], [depths[place] for place in places]
            hold = self._pool.hold(taken.reservation.owner)
            taken.reservation.commit(hold)
            self.counts.landed += self._pool.seal(slots, keys, depths)
            if self._pinned.num_owners:
                self._pinned.landed(keys)
            pin = self._pool.pin(slots, pinned_by) if pinned_by and slots else None
            hold.end()
            return pin

    def drop(self, taken: Taken) -> None:
        """The bytes did not arrive; nothing is published."""
        with self._lock:
            self._arriving.difference_update(taken.keys)
            if taken.reservation is not None:
                taken.reservation.rollback()

    def pin_each(self, keys: Sequence[bytes], owner: str) -> tuple[list[int], Pin | None]:
        """The slot of each key, or ABSENT, and a pin on the blocks that are here."""
        with self._lock:
            slots = self._pool.find_each(keys)
            here = [slot for slot in slots if slot != ABSENT]
            return slots, self._pool.pin(here, owner) if here else None

    def pin(self, slots: NDArray[np.int32], owner: str) -> Pin:
        """One more pin on slots that the caller has already pinned."""
        with self._lock:
            return self._pool.pin(as_run(slots), owner)

    def pin_run(self, keys: Sequence[bytes], owner: str, unit: int = 1) -> Pin | None:
        """A pin on the longest run of leading `keys` that are here, in multiples of `unit`. None if there is
        none."""
        with self._lock:
            run = self._pool.find(keys)
            run = run[: len(run) // unit * unit]
            return self._pool.pin(run, owner) if len(run) else None

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many of the leading `keys` are here. The blocks are not protected."""
        with self._lock:
            return len(self._pool.find(keys))

    def coldest(self, num: int) -> list[bytes]:
        """Keys of the blocks that are evicted next, roughly in order."""
        with self._lock:
            return self._pool.coldest(num)

    def keys(self) -> list[bytes]:
        """Keys of all blocks that are here."""
        with self._lock:
            return self._pool.keys()

    def watch_gone(self) -> None:
        """Record evicted keys from now on, for `take_gone`."""
        with self._lock:
            self._pool.gone = []

    @property
    def any_gone(self) -> bool:
        """Whether `take_gone` would return more."""
        return bool(self._pool.gone)

    def take_gone(self, most: int) -> list[bytes]:
        """Keys of blocks that were evicted and have not come back, in order. Looks at up to `most` evictions,
        each once."""
        with self._lock:
            gone = (self._pool.gone or [])[:most]
            if gone and self._pool.gone is not None:
                del self._pool.gone[:most]
            return [key for key, slot in zip(gone, self._pool.find_each(gone), strict=True) if slot == ABSENT]

    def _reserve(self, num_slots: int, owner: str) -> Reservation:
        reservation = self._pool.try_reserve(num_slots, owner)
        if reservation is None:
            raise InvariantBroken(f"host slots vanished under the lock: {num_slots} were available")
        return reservation

    # ------------------------------------------------------------------------------------------------- memory

    def withhold(self) -> None:
        """No memory is ready yet. Called once, before the tier is used."""
        while self._pool.num_available:
            self._missing.append(
                self._reserve(min(_PIECE, self._pool.num_available), "memory being prepared")
            )

    @property
    def num_unready(self) -> int:
        """Slots whose memory is not ready."""
        with self._lock:
            return sum(len(missing.slots) for missing in self._missing)

    def ready(self, slots: range) -> None:
        """The memory of `slots`, which follow those of the previous call, can be used from now on."""
        with self._lock:
            while self._missing and self._missing[0].slots[-1] < slots.stop:
                self._missing.popleft().rollback()

    # ---------------------------------------------------------------------------------------------------- end

    def reset(self) -> int:
        """Evict every block that is not in use. Returns how many."""
        with self._lock:
            return self._pool.evict(self._pool.num_slots)

    def forget(self, keys: Sequence[bytes]) -> int:
        """Forget the keys of these blocks. Returns how many were here. A block that a lease or transfer reads
        stays until that ends; one that a snapshot pins can still be found."""
        with self._lock:
            slots = self._pool.find_each([key for key in keys if key not in self._pinned])
            return self._pool.forget([slot for slot in slots if slot != ABSENT])

    def pin_keys(self, id: str, keys: Sequence[bytes]) -> None:
        """Protect `keys` from eviction until `unpin_keys`, for a snapshot. Applies to blocks that come later,
        too."""
        with self._lock:
            self._pinned.pin(id, keys)

    def unpin_keys(self, id: str) -> None:
        """Idempotent."""
        with self._lock:
            self._pinned.unpin(id)

    def tell_balance(self, observer: EngineObserver) -> None:
        """Under the lock, so that the observer's view and the counts belong to one moment."""
        with self._lock:
            observer.balanced(self._pool.name, self._pool.counts._asdict())

    def check(self) -> None:
        with self._lock:
            self._pool.check()

    def close(self) -> None:
        """Idempotent. Raises Leaked while a lease or transfer is out."""
        with self._lock:
            while self._missing:
                self._missing.popleft().rollback()
            if self._leases:
                owners = ", ".join(lease.owner for lease in itertools.islice(self._leases, _MAX_NAMED))
                raise Leaked(
                    f"the host tier was closed with {len(self._leases)} leases out, those of {owners}"
                )
            self._pool.close()
        if self.memory is not None:
            self.memory.close()

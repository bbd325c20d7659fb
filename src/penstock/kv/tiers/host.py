"""The host tier: which blocks host memory has, and which must stay. Owns the host pool; moves no bytes.

Several threads meet here: callers lease blocks for a prompt, the launcher of demotions takes slots for new
blocks, the engine thread lands and ends transfers. The pool's lock is held for bookkeeping only, never across
a copy, a wait or an allocation.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence
from penstock.errors import InvariantBroken, Leaked
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.handles import Handle, Pin, Reservation
from penstock.kv.blocks.pool import BlockPool, PinnedKeys
from penstock.kv.blocks.slots import Run
from penstock.kv.memory import HostArena, HostMemory
from penstock.kv.tiers.cold import Finding

ABSENT = -1
HOST = "host"
_EXPIRY_S = 1.0  # between two checks for expired leases
_MAX_NAMED = 16  # leases listed in a Leaked message
_PIECE = 64  # slots that become ready together

Slots = NDArray[np.int64]
TierRuns = list[tuple[str, int]]  # (tier, number of neighbouring blocks)


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


def tier_runs(slots: Slots, parts: Sequence[Part], first: int) -> TierRuns:
    """The blocks from number `first` on by tier, up to the first that no tier has. `slots` are the slots in
    host memory."""
    names = [HOST, *(part.tier for part in parts)]
    tier_of = tiers_of(slots, parts, first)
    lacking = np.flatnonzero(tier_of == ABSENT)
    tier_of = tier_of[: lacking[0]] if lacking.size else tier_of
    starts = np.flatnonzero(np.diff(tier_of, prepend=ABSENT))
    lengths = np.diff(starts, append=len(tier_of))
    return [
        (names[tier_of[start]], num) for start, num in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]


def tiers_of(slots: Slots, parts: Sequence[Part], first: int) -> Slots:
    """By block of `slots`, from number `first` on: 0 for host memory, the number of the part from 1 on, or
    ABSENT."""
    tier_of = np.where(slots == ABSENT, ABSENT, 0)
    for number, part in enumerate(parts, 1):
        if part.finding.ready:
            blocks = np.array(part.blocks[: part.finding.num], np.int64) - first
            blocks = blocks[(blocks >= 0) & (blocks < len(slots))]
            tier_of[blocks[slots[blocks] == ABSENT]] = number
    return tier_of


def blocks_by_tier(runs: TierRuns, limit: int) -> Iterator[tuple[int, str]]:
    """(block, tier) of the first `limit` blocks of `runs`, counted from 0."""
    tiers = itertools.chain.from_iterable(itertools.repeat(tier, num) for tier, num in runs)
    return enumerate(itertools.islice(tiers, limit))


class HostLease:
    """Copies of a run of a request's blocks. `slots[i]` is the slot of block i, or ABSENT. Implements
    `contract.Lease`.

    While its request waits, the blocks are only wanted: they are evicted last, and `refresh` updates their
    slots. `claim` or `take` pins them when the request is admitted.
    """

    def __init__(
        self, tier: HostTier, owner: str, slots: Slots, num_tokens: int, keys: Sequence[bytes] = ()
    ) -> None:
        self.owner = owner
        self.num_tokens = num_tokens
        self.slots = slots  # replaced as a whole, never changed
        self.keys = keys  # of its blocks, if more of them may land while it waits
        self.parts: Sequence[Part] = ()
        self.saving = False  # the save of a retraction is still in flight
        self.expired = False
        self.deadline_s = float("inf")
        self.want: PoolWant | None = None  # None: claimed, or private
        self.places: Slots = np.empty(0, np.int64)  # the blocks that are wanted
        self._handles: list[Handle] = []
        self._tier = tier
        self._lock = tier.pool.lock

    @property
    def ready(self) -> bool:
        return not self.saving and all(part.finding.ready for part in self.parts)

    def runs_from(self, block: int) -> TierRuns:
        return tier_runs(self.slots[block:], self.parts, block)

    def covered(self) -> NDArray[np.bool_]:
        """Which blocks some tier has, from number 0 on."""
        covered: NDArray[np.bool_] = tiers_of(self.slots, self.parts, 0) != ABSENT
        return covered

    def num_from(self, block: int) -> int:
        return sum(num for _, num in self.runs_from(block))

    def set_rank(self, rank: float) -> None:
        """How late its request runs; the eviction order compares wanted blocks by it."""
        if self.want is not None:
            self.want.rank = rank

    def open(self, num_wanted: int, *handles: Handle) -> None:
        """It protects `handles` until it ends. Its first `num_wanted` blocks become wanted."""
        with self._lock:
            self._tier.leases[self] = None
            self._handles += handles
            self.places = np.flatnonzero(self.slots[:num_wanted] != ABSENT)
            self.want = self._tier.pool.want(self.slots[self.places], self._tier.clock())

    def keep(self, handles: Sequence[Handle]) -> None:
        """The load that took these handles has failed: it protects them again."""
        with self._lock:
            self._tier.leases[self] = None
            self._handles += handles

    def refresh(self) -> None:
        """Note the blocks that were evicted meanwhile."""
        with self._lock:
            gone = None if self.want is None else self.places[self.want.gone]
            if gone is not None and (self.slots[gone] != ABSENT).any():
                slots = self.slots.copy()
                slots[gone] = ABSENT
                self.slots = slots

    def grow(self) -> None:
        """Note the blocks that landed after its own meanwhile: a save may have been in flight when the lease
        was made."""
        with self._lock:
            if self.want is None or self.parts or not self.keys:
                return
            absent = np.flatnonzero(self.slots == ABSENT)
            absent = absent[absent >= (self.places[0] if self.places.size else len(self.slots))]
            pool = self._tier.pool
            if not absent.size or pool.find_each([self.keys[absent[0]]]) == [ABSENT]:
                return
            slots = self.slots.copy()
            slots[absent] = pool.find_each([self.keys[block] for block in absent.tolist()])
            self.slots = slots
            earlier = self.want
            self.open(len(slots))
            self.set_rank(earlier.rank)
            earlier.end()

    def claim(self, first: int, num_blocks: int) -> bool:
        """Pin its copies of blocks `first..first + num_blocks`: the request is admitted. False if some were
        evicted since the last look; then nothing is pinned."""
        with self._lock:
            if self not in self._tier.leases:
                return False
            if self.want is None:
                return True
            seen, end = self.slots, first + num_blocks
            self.refresh()
            if (self.slots[first:end] != seen[first:end]).any():
                return False
            self._pin(first, end)
            return True

    def _pin(self, first: int, end: int) -> None:
        here = self.slots[self.places[(self.places >= first) & (self.places < end)]]
        here = here[here != ABSENT]
        if here.size:
            self._handles.append(self._tier.pool.pin(here, f"lease of {self.owner}"))
        self._end_want()

    def _end_want(self) -> None:
        if self.want is not None:
            self.want.end()
            self.want = None

    def take(self) -> list[Handle] | None:
        """It ends; its handles are for the transfer that reads from it. None if it has ended or expired."""
        with self._lock:
            if self not in self._tier.leases:
                return None
            if self.want is not None:
                self.refresh()
                self._pin(0, len(self.slots))
            del self._tier.leases[self]
            taken, self._handles = self._handles, []
            return taken

    def end(self) -> None:
        """Give up the copies. Does nothing if it has ended or expired."""
        with self._lock:
            self._tier.leases.pop(self, None)
            self._end_want()
            while self._handles:
                self._handles.pop().end()

    def expire(self) -> None:
        """Its time is over: it covers nothing. A transfer has taken the handles out of its lease, so no slot
        in use is given back."""
        with self._lock:
            self.end()
            self.slots, self.parts, self.expired = np.empty(0, np.int64), (), True


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
        self.pool = pool
        self.num_slots = pool.num_slots
        self.counts = HostCounts()
        self.clock = clock
        self.leases: dict[HostLease, None] = {}  # open ones
        self.memory: HostMemory | None = None  # set by `prepare`
        self._block_tokens = block_tokens
        self._lease_s = lease_s
        self._look_again_s = 0.0
        self._arriving: set[bytes] = set()  # taken, not landed
        self._pinned = PinnedKeys(pool, lambda run: pool.pin(run, "snapshot").end)
        self._missing: deque[Reservation] = deque()  # slots whose memory is not ready yet, in order

    # ---------------------------------------------------------------------------------------------- questions

    def has_each(self, keys: Sequence[bytes]) -> list[bool]:
        return [slot != ABSENT for slot in self.pool.find_each(keys)]

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are neither here nor arriving."""
        with self.pool.lock:
            there = self.has_each(keys)
            return [not here and key not in self._arriving for key, here in zip(keys, there, strict=True)]

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many of the leading `keys` are here. The blocks are not protected."""
        return len(self.pool.find(keys))

    # ------------------------------------------------------------------------------------------------- leases

    def lease(
        self, keys: Sequence[bytes], owner: str, first: int = 0, even_empty: bool = False
    ) -> HostLease | None:
        """Want every block of `keys` from number `first` on that is here. None if none is, unless other tiers
        are to be asked."""
        with self.pool.lock:
            run = self.pool.find(keys[first:])  # mostly all of them
            rest = self.pool.find_each(keys[first + len(run) :])
            slots = np.concatenate((np.full(first, ABSENT), run, np.array(rest, np.int64)))
            here = slots[slots != ABSENT]
            if not here.size and not even_empty:
                return None
            lease = HostLease(self, owner, slots, len(keys) * self._block_tokens, keys)
            lease.deadline_s = self.clock() + self._lease_s
            lease.open(len(slots))
            self.pool.note_hits(here)
            return lease

    def expire(self) -> None:
        """End expired leases."""
        now = self.clock()
        if now >= self._look_again_s:
            self._look_again_s = now + _EXPIRY_S
            with self.pool.lock:
                for lease in [lease for lease in self.leases if lease.deadline_s < now]:
                    lease.expire()
                    self.counts.leases_expired += 1

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
        with self.pool.lock:
            places = {key: place for place, key in reversed([*enumerate(keys)])}  # each key once
            absent = self.absent(keys)
            new = sorted(place for place in places.values() if absent[place])
            self.counts.deduplicated += len(keys) - len(new)
            new = new[:most]
            num = min(len(new), self._num_in(displaces))
            if displaces is Displaces.NOTHING:
                self.counts.postponed += len(new) - num
            else:
                self.counts.skipped_full += len(new) - num
            new = new[:num]
            taken = Taken(new, [keys[place] for place in new], [depths[place] for place in new])
            if new:
                taken.reservation = self._reserve(num, owner)
                self._arriving.update(taken.keys)
            return taken

    def take_private(self, num_slots: int, owner: str) -> Reservation | None:
        """Slots for blocks without keys, for `owner` alone. None if there are not enough."""
        with self.pool.lock:
            if num_slots > self._num_in(Displaces.UNWANTED):
                self.counts.skipped_full += num_slots
                return None
            return self._reserve(num_slots, owner)

    def _num_in(self, displaces: Displaces) -> int:
        pool = self.pool
        return {
            Displaces.NOTHING: pool.num_free,
            Displaces.UNWANTED: pool.num_unwanted,
            Displaces.ANYTHING: pool.num_available,
        }[displaces]

    def _reserve(self, num_slots: int, owner: str) -> Reservation:
        reservation = self.pool.try_reserve(num_slots, owner)
        if reservation is None:
            raise InvariantBroken(f"host slots vanished under the lock: {num_slots} were available")
        return reservation

    def split(self, taken: Taken, num: int) -> Taken:
        """The first `num` blocks of `taken` as a new value; `taken` keeps the others."""
        with self.pool.lock:
            first = Taken(taken.places[:num], taken.keys[:num], taken.depths[:num])
            taken.places, taken.keys, taken.depths = taken.places[num:], taken.keys[num:], taken.depths[num:]
            if not taken.keys:  # a handle without slots has ended
                first.reservation, taken.reservation = taken.reservation, None
            elif first.keys and taken.reservation is not None:
                first.reservation = taken.reservation.split(num)
            return first

    def land(
        self,
        taken: Taken,
        places: Sequence[int] | None = None,
        pinned_by: str = "",
        fence: Fence | None = None,
    ) -> Pin | None:
        """The bytes at `places` of its keys (None: all) have arrived and can be found from now on. With
        `pinned_by` they stay pinned. `fence` follows the work that wrote them."""
        with self.pool.lock:
            self._arriving.difference_update(taken.keys)
            if taken.reservation is None:
                return None
            slots, keys, depths = taken.reservation.run, taken.keys, taken.depths
            if places is not None:
                slots = slots[list(places)]
                keys, depths = [keys[place] for place in places], [depths[place] for place in places]
            hold = self.pool.hold(taken.reservation.owner)
            taken.reservation.commit(hold)
            self.counts.landed += self.pool.seal(slots, keys, depths)
            if self._pinned.num_owners:
                self._pinned.landed(keys)
            pin = self.pool.pin(slots, pinned_by) if pinned_by and keys else None
            hold.end(fence)
            return pin

    def drop(self, taken: Taken) -> None:
        """The bytes did not arrive; nothing is published."""
        with self.pool.lock:
            self._arriving.difference_update(taken.keys)
            if taken.reservation is not None:
                taken.reservation.rollback()

    # ------------------------------------------------------------------------------------- pins and evictions

    def pin_each(self, keys: Sequence[bytes], owner: str) -> tuple[list[int], Pin | None]:
        """The slot of each key, or ABSENT, and a pin on the blocks that are here."""
        with self.pool.lock:
            slots = self.pool.find_each(keys)
            here = [slot for slot in slots if slot != ABSENT]
            return slots, self.pool.pin(here, owner) if here else None

    def pin_run(self, keys: Sequence[bytes], owner: str, unit: int = 1) -> Pin | None:
        """A pin on the longest run of leading `keys` that are here, in multiples of `unit`. None if there is
        none."""
        with self.pool.lock:
            run: Run = self.pool.find(keys)
            run = run[: len(run) // unit * unit]
            return self.pool.pin(run, owner) if len(run) else None

    def pin_keys(self, id: str, keys: Sequence[bytes]) -> None:
        """Protect `keys` from eviction until `unpin_keys`, for a snapshot. Applies to blocks that come later,
        too."""
        with self.pool.lock:
            self._pinned.pin(id, keys)

    def unpin_keys(self, id: str) -> None:
        """Idempotent."""
        with self.pool.lock:
            self._pinned.unpin(id)

    def forget(self, keys: Sequence[bytes]) -> int:
        """Forget the keys of these blocks. Returns how many were here. A block that a lease or transfer reads
        stays until that ends; one that a snapshot pins can still be found."""
        with self.pool.lock:
            slots = self.pool.find_each([key for key in keys if key not in self._pinned])
            return self.pool.forget([slot for slot in slots if slot != ABSENT])

    def give_way(self, keys: Sequence[bytes], most: int) -> int:
        """Evict up to `most` of `keys` that no transfer uses; the device has them and keeps them. Returns how
        many."""
        with self.pool.lock:
            return self.pool.evict_these([s for s in self.pool.find_each(keys) if s != ABSENT], most)

    def take_gone(self, most: int) -> list[bytes]:
        """Keys of blocks that were evicted and have not come back, in order. Looks at up to `most` evictions,
        each once. The first call begins to record them."""
        with self.pool.lock:
            gone = (self.pool.gone or [])[:most]
            self.pool.gone = (self.pool.gone or [])[most:]
            return [key for key, here in zip(gone, self.has_each(gone), strict=True) if not here]

    # ------------------------------------------------------------------------------------------------- memory

    def withhold(self) -> None:
        """No memory is ready yet. Called once, before the tier is used."""
        while self.pool.num_available:
            self._missing.append(self._reserve(min(_PIECE, self.pool.num_available), "memory being prepared"))

    def prepare(self, arena: HostArena) -> None:
        """Make the memory of its slots usable, on a thread of its own. It is closed with the tier."""
        self.memory = HostMemory(arena, self.ready)

    @property
    def num_unready(self) -> int:
        """Slots whose memory is not ready."""
        with self.pool.lock:
            return sum(len(missing.run) for missing in self._missing)

    def ready(self, slots: range) -> None:
        """The memory of `slots`, which follow those of the previous call, can be used from now on."""
        with self.pool.lock:
            while self._missing and self._missing[0].run[-1] < slots.stop:
                self._missing.popleft().rollback()

    def close(self) -> None:
        """Idempotent. Raises Leaked while a lease or transfer is out."""
        with self.pool.lock:
            while self._missing:
                self._missing.popleft().rollback()
            if self.leases:
                owners = ", ".join(lease.owner for lease in itertools.islice(self.leases, _MAX_NAMED))
                raise Leaked(
                    f"the host tier was closed with {len(self.leases)} leases out, those of {owners}"
                )
            self.pool.close()
        if self.memory is not None:
            self.memory.close()

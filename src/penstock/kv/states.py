"""Kept states of recurrent layers: which slot of host memory has the state of which block boundary, and which
cold tiers have more of them. Owns their pool and what is known of cold tiers, no bytes.

Steps copy states between these slots and the rows of requests. A kept state is a block of a group of its own:
disks and stores have a space for states, in which the key is that of the last block before the boundary.

    asked when a request joins the line -> read into a slot while it waits -> pinned when it is admitted
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract import Fence, SlotHandle
from penstock.errors import InvariantBroken
from penstock.figures import STATES
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.handles import Pin, Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.calls import StoreGroup
from penstock.kv.tiers.cold import ColdTier, Finding, Writing
from penstock.kv.tiers.host import Displaces, HostTier, Taken
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.reads import PATIENCE_S, Costs
from penstock.kv.tiers.store import BlockStore, Outcome, PinningStore, SparseStore, StoreUsage
from penstock.kv.tiers.writeback import Writeback

KEPT_STATES = "kept states"  # their memory, in declared accesses
_MOST_KNOWN = 1024  # boundaries of which a cold tier is known to have the state
# boundaries that a store is asked for one by one, the last one first, if it cannot find states itself
_MOST_ASKED = 32
_MOST_READS = 3  # for one request, as its state may be evicted before it starts
_NO_LIMITS = TierLimits(0, float("inf"))


class StateStore:
    """The states in a store: its calls under a name of their own. `find` answers with the length of the
    longest prefix of which there is a state. Implements `BlockStore`."""

    def __init__(self, store: BlockStore) -> None:
        self.wrapped = store
        self.name = f"{store.name} {STATES}"
        self.local = store.local
        self.read, self.write, self.persist = store.read, store.write, store.persist
        self.probe, self.reset, self.close = store.probe, store.reset, store.close

    def find(self, keys: Sequence[bytes]) -> int:
        if isinstance(self.wrapped, SparseStore):
            return self.wrapped.find_last(keys)
        last = range(len(keys), max(0, len(keys) - _MOST_ASKED), -1)
        return next((num for num in last if self.wrapped.find(keys[num - 1 : num])), 0)

    def usage(self) -> StoreUsage:
        return self.wrapped.usage()


class PinningStateStore(StateStore):
    """Of a store in which states can be pinned. Implements `PinningStore`."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store)
        assert isinstance(store, PinningStore)
        self.pin_keys, self.unpin_keys = store.pin_keys, store.unpin_keys
        self.num_leading, self.has_each = store.num_leading, store.has_each


def states_in(store: BlockStore) -> StateStore:
    return PinningStateStore(store) if isinstance(store, PinningStore) else StateStore(store)


class _Known(NamedTuple):
    """A state in a cold tier."""

    depth: int  # blocks
    tier: str


class StateRead:
    """One state on its way from a cold tier into a slot of host memory. It lands whether its request waits
    for it or not."""

    def __init__(self, taken: Taken, tier: ColdTier, deadline_s: float) -> None:
        assert taken.reservation is not None
        self.taken = taken
        self.tier = tier
        self.deadline_s = deadline_s
        self.keeps = True  # what is read can be found
        slots, after = taken.reservation.slots, taken.reservation.after
        self.reading: StoreGroup = tier.read(taken.keys, slots, after, "a state")

    @property
    def key(self) -> bytes:
        return self.taken.keys[0]

    @property
    def overdue(self) -> bool:
        return time.monotonic() > self.deadline_s


class ColdStates:
    """The states in disks and stores. They are read into slots of `host`, and written from there. `costs`:
    what computing takes; None: a state is always read."""

    def __init__(
        self,
        host: HostTier,
        cold: Sequence[ColdTier] = (),
        limits: TierLimits = _NO_LIMITS,
        costs: Costs | None = None,
    ) -> None:
        self.host = host
        self.writeback = Writeback(host, cold, limits.admission)
        self.tiers = self.writeback.cold
        self.reads: dict[bytes, StateRead] = {}
        self._known: dict[bytes, _Known] = {}  # the newest last
        self._limits, self._costs = limits, costs

    # ---------------------------------------------------------------------------------------------- questions

    def find(self, keys: Sequence[bytes]) -> list[tuple[str, Finding]]:
        """Ask each tier for the last boundary of `keys` that has a state."""
        patience_s = PATIENCE_S if self._costs is None else self._costs.patience_s(0, len(keys))
        return [
            (name, tier.find(keys, patience_s)) for name, tier in self.tiers.items() if keys and tier.usable
        ]

    def note(self, key: bytes, depth: int, tier: str, after: int) -> None:
        """`tier` has the state of this boundary. It counts if reading it is faster than computing what
        follows `after` blocks."""
        costs = self._costs
        if costs is not None and not costs.limits.load_always:
            compute_s, read_s = costs.compute_s(after, depth - after), self.read_s(tier)
            if compute_s is not None and read_s is not None and compute_s < read_s:
                return
        self._known.pop(key, None)
        self._known[key] = _Known(depth, tier)
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def read_s(self, tier: str) -> float | None:
        return self.tiers[tier].read_s(self.tiers[tier].counts.block_bytes)

    def last_before(self, keys: Sequence[bytes], end: int) -> int:
        """The last boundary at or before `end` whose state is known to be in a tier that answers; 0: none."""
        found = [
            one.depth
            for key, one in self._known.items()
            if one.depth <= min(end, len(keys)) and keys[one.depth - 1] == key and self.tiers[one.tier].usable
        ]
        return max(found, default=0)

    # -------------------------------------------------------------------------------------------------- reads

    def try_read(self, key: bytes) -> StateRead | None:
        """Read a known state. None: there is no slot for it, or the tier does not answer."""
        if (read := self.reads.get(key)) is not None:
            return read
        one = self._known.get(key)
        if one is None or not self.tiers[one.tier].usable:
            return None
        taken = self.host.take([key], [one.depth], "a state", Displaces.ANYTHING)
        if taken.reservation is None:
            return None
        deadline_s = time.monotonic() + self._limits.load_deadline_s
        read = self.reads[key] = StateRead(taken, self.tiers[one.tier], deadline_s)
        return read

    def give_up(self, key: bytes) -> None:
        """No request waits for this state any more, until a tier is asked again."""
        self._known.pop(key, None)

    def settle(self) -> bool:
        """Returns whether a flush has more for the next turn."""
        self.writeback.settle()
        for read in [read for read in self.reads.values() if read.reading.over()]:
            del self.reads[read.key]
            self._take_in(read)
        return self.writeback.hand_over()

    def _take_in(self, read: StateRead) -> None:
        self.give_up(read.key)
        try:
            done = read.keeps and list(read.reading.take_outcomes()) == [Outcome.DONE]
        except BaseException:
            self.host.drop(read.taken)
            raise
        if done:
            self.host.land(read.taken)
            self.writeback.landed(read.taken.keys, read.tier.name)
        else:
            self.host.drop(read.taken)

    @property
    def num_in_flight(self) -> int:
        num = sum(len(one.readings) + len(one.writings) + len(one.findings) for one in self.tiers.values())
        return num + len(self.reads) + len(self.writeback.persisting) + len(self.writeback.later)

    # ---------------------------------------------------------------------------------------------------- end

    def reset(self, tier: str) -> Writing:
        """Clear the states beside the blocks in the cold `tier`."""
        self.forget_known()
        return self.writeback.reset(f"{tier} {STATES}")

    def forget_known(self) -> None:
        """What is being read does not land."""
        self._known.clear()
        for read in self.reads.values():
            read.keeps = False


class ColdSearch:
    """Implements `contract.StateSearch`."""

    def __init__(self, states: KeptStates, keys: Sequence[bytes]) -> None:
        self._states, self._cold = states, states.cold
        self._keys = keys
        self._findings = self._cold.find(keys)
        self._num_asked = len(keys)
        self._found = 0  # the deepest boundary that a tier has; once all have answered
        self._num_reads = 0

    @property
    def ready(self) -> bool:
        if not all(finding.ready for _, finding in self._findings):
            return False
        findings, self._findings = self._findings, []
        for name, finding in reversed(findings):  # the hottest one last
            self._found = max(self._found, finding.num)
            num_here = self._states.last_in_memory(self._keys, self._num_asked)
            if finding.num > num_here:
                self._cold.note(self._keys[finding.num - 1], finding.num, name, num_here)
        return True

    def reads_first(self, key: bytes | None, num_known: int) -> bool:
        if num_known < self._found:  # its blocks end earlier; is there a state before that?
            self._found, self._num_asked = 0, num_known
            self._findings = self._cold.find(self._keys[:num_known])
            return True
        if key is None or self._states.has(key):
            return False
        read = None
        if self._num_reads < _MOST_READS:
            self._num_reads += key not in self._cold.reads
            read = self._cold.try_read(key)
        if read is None or read.overdue:
            self._cold.give_up(key)
        return True


class KeptStates:
    """Implements `contract.StateLedger`. A slot has a key as blocks have: that of the last block before its
    boundary, and with it of all tokens there."""

    def __init__(self, pool: BlockPool, cold: ColdStates | None = None) -> None:
        """`cold` None: there are only the slots in host memory."""
        self.pool = pool
        self.cold = ColdStates(HostTier(pool, 1, 0.0)) if cold is None else cold
        self.num_skipped = 0  # states that were not kept, since every slot was in use
        self.expected = Counter[tuple[int, bytes]]()  # depth and key
        self._ahead: list[tuple[ColdSearch, Sequence[bytes]]] = []  # of prefetches

    def last_before(self, keys: Sequence[bytes], end: int) -> int:
        """The last boundary, in blocks, at or before `end` that has a state in some tier; 0: none."""
        return max(self.last_in_memory(keys, end), self.cold.last_before(keys, end))

    def last_in_memory(self, keys: Sequence[bytes], end: int) -> int:
        return self.pool.find_deepest(keys[:end])

    def last_here(self, keys: Sequence[bytes]) -> int:
        """The last boundary that has a state in memory or on a local disk; 0: none. For any thread."""
        local = [tier for tier in self.cold.tiers.values() if tier.local]
        return max([self.last_in_memory(keys, len(keys)), *(tier.calls.find(keys) for tier in local)])

    def has(self, key: bytes) -> bool:
        """In host memory."""
        return len(self.pool.find((key,))) > 0

    def search(self, keys: Sequence[bytes]) -> ColdSearch | None:
        return ColdSearch(self, keys) if self.cold.tiers and keys else None

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Read the last state of this prefix into host memory, for a request that may come."""
        if (search := self.search(keys)) is not None:
            self._ahead.append((search, keys))
            self._read_ahead()

    @property
    def is_searching(self) -> bool:
        """A prefetch does not know yet which state there is."""
        return bool(self._ahead)

    def settle(self) -> bool:
        """Returns whether a flush has more for the next turn."""
        self._read_ahead()
        return self.cold.settle()

    def _read_ahead(self) -> None:
        waiting, self._ahead = self._ahead, []
        for search, keys in waiting:
            if not search.ready:
                self._ahead.append((search, keys))
            elif num := self.last_before(keys, len(keys)):
                search.reads_first(keys[num - 1], len(keys))

    def want(self, keys: Sequence[bytes], rank: float, earlier: PoolWant | None) -> PoolWant:
        """Want the last state of this prefix that is in host memory: it is evicted after unwanted ones."""
        with self.pool.lock:
            num = self.last_in_memory(keys, len(keys))
            return self.pool.want(self.pool.find(keys[num - 1 : num] if num else ()), rank, earlier)

    def is_expected(self, keys: Sequence[bytes], after: int = 0) -> bool:
        """True if a running request will keep a state of one of these boundaries, `after` so many blocks."""
        return any(after < depth <= len(keys) and keys[depth - 1] == key for depth, key in self.expected)

    def pin(self, owner: str, key: bytes) -> Pin | None:
        with self.pool.lock:
            slots = self.pool.find((key,))
            if not len(slots):
                return None
            self.pool.note_hits(slots)
            pin = self.pool.pin(slots, owner)
        self.cold.writeback.used((key,))
        return pin

    def expect(self, key: bytes, depth: int, change: int) -> None:
        self.expected[depth, key] += change
        if self.expected[depth, key] < 0:
            raise InvariantBroken("a state is expected less often than never")
        if not self.expected[depth, key]:
            del self.expected[depth, key]

    def try_reserve(self, owner: str, key: bytes | None) -> Reservation | None:
        with self.pool.lock:
            if key is not None and len(self.pool.find((key,))):
                return None
            reservation = self.pool.try_reserve(1, owner)
        self.num_skipped += reservation is None
        return reservation

    def publish(
        self, handle: SlotHandle, key: bytes, depth: int, fence: Fence | None, is_shared: bool = True
    ) -> None:
        assert isinstance(handle, Reservation)
        is_new = not self.has(key)
        if not is_shared:
            self.cold.writeback.begin_unshared((key,))
        self.cold.host.land(Taken([0], [key], [depth], handle), fence=fence)
        if is_new:
            self.cold.writeback.landed((key,))

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by tier; for any thread."""
        cold = {name: tier.usage().as_dict() for name, tier in self.cold.tiers.items()}
        return {STATES: self.pool.counts._asdict(), **cold}

    def forget_unshared(self, keys: Sequence[bytes]) -> None:
        """Those of these boundaries, whose keys are of closed scopes."""
        self.cold.writeback.end_unshared(keys)
        self.cold.writeback.unwanted.clear()  # states are never on their way to host memory

    def forget(self) -> int:
        """All that no request uses; returns how many."""
        self.cold.forget_known()
        return self.pool.evict(self.pool.num_slots)

    def check(self) -> None:
        self.pool.check()

    def close(self) -> None:
        """Idempotent. Raises Leaked while a slot is out."""
        self.cold.host.close()

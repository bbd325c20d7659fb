"""Blocks on their way from host memory to cold tiers. Owns the dirty blocks: blocks in host memory that the
first cold tier is not known to have. Only the engine thread calls it.

Writes go to the first cold tier if its admission says so, and always to the tiers after it; `persist` writes
all dirty blocks. Many blocks are submitted in slices, one in each turn of the engine.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.config import AdmissionName
from penstock.errors import StoreFailed
from penstock.kv.tiers.cold import ColdTier, Writing
from penstock.kv.tiers.host import ABSENT, HostTier
from penstock.kv.tiers.store import PinningStore
from penstock.kv.transfer import Settling

# With write-on-eviction, 1 / this of the host slots is kept free or clean.
_CLEAN_SHARE = 8
_CLEAN_BLOCKS = 64  # blocks written together for that
_GONE_AT_ONCE = 4096  # evicted host blocks noted in one turn: a reset evicts all
_WRITE_AT_ONCE = 256  # blocks submitted in one turn if many wait: about a millisecond


@dataclass(slots=True)
class Persisting:
    """A persist in progress: all blocks sealed so far go to the first cold tier. Settled when they are
    durable there, or when that has failed."""

    saved: Settling | None  # the save that must land first
    keys: dict[bytes, None]  # blocks to write, in order
    # keys that were not submitted yet
    unwritten: Iterator[bytes] = field(default_factory=lambda: iter(()))
    # keys that could not be written, or left host memory before they were
    lost: set[bytes] = field(default_factory=set)
    sync: Writing | None = None
    num_emptied: int = -1  # of the first tier when writing began; -1: not begun
    settled: bool = False
    error: BaseException | None = None

    @property
    def handing_over(self) -> bool:
        """The next turn submits more of it, or finishes it."""
        return self.sync is None and (self.saved is None or self.saved.settled)


class Writeback:
    """`cold` are the tiers colder than host memory, hottest first; may be empty. `admission`: when the first
    of them gets a block."""

    def __init__(self, host: HostTier, cold: Sequence[ColdTier], admission: AdmissionName) -> None:
        self.cold = {tier.name: tier for tier in cold}
        # Resets submitted to the first cold tier, plus the times it lost its blocks. Reads and writes from
        # before such an event say nothing about what the tier has now.
        self.num_emptied = 0
        self.persisting: list[Persisting] = []
        # slices to write in later turns
        self.later: deque[tuple[ColdTier, Sequence[bytes]]] = deque()
        self.unwanted: set[bytes] = set()  # keys of ended closed scopes, while saves are in flight
        self._host = host
        self._admission = admission
        # keys of host blocks that the first cold tier is not known to have, in order
        self._dirty: dict[bytes, None] = {}
        self._writing: set[bytes] = set()  # keys of these that are being written
        # `num_emptied` at submission, by write to the first tier in flight
        self._emptied_before: dict[Writing, int] = {}
        self._num_losses = 0  # of the first tier, seen so far
        self._unshared: set[bytes] = set()  # keys of closed scopes, which only their request knows
        self._rests = False  # nothing is left to clean, or a write failed; wait until more blocks land
        if cold:
            host.take_gone(0)

    @property
    def first(self) -> ColdTier:
        """A block that it lacks is dirty. Only if there are cold tiers."""
        return next(iter(self.cold.values()))

    # ------------------------------------------------------------------------------------ host memory changes

    def landed(self, keys: Sequence[bytes], source: str = "device") -> None:
        """Blocks have landed in host memory from `source`; write those that admission selects."""
        self._rests = False
        if self._unshared or self.unwanted:
            self._host.forget([key for key in keys if key in self.unwanted])
            closed = self._unshared | self.unwanted
            keys = [key for key in keys if key not in closed]
        for tier in self.cold.values():
            if tier.name == source:
                continue
            if tier is self.first:
                self._dirty.update(dict.fromkeys(keys))
            if tier is not self.first or self._admission == "always":
                self._write_in_slices(tier, keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """Blocks in host memory were used again."""
        if self._admission == "reuse" and self.cold:
            dirty = [key for key in keys if key in self._dirty and key not in self._writing]
            self._write_in_slices(self.first, dirty)

    def recheck(self, keys: Sequence[bytes]) -> None:
        """Those of `keys` in host memory that the disk has evicted since become dirty again."""
        if self.cold and isinstance(store := self.first.calls.store, PinningStore):
            places = zip(keys, self._host.has_each(keys), store.has_each(keys), strict=True)
            lacking = [key for key, is_here, is_there in places if is_here and not is_there]
            self._dirty = {**dict.fromkeys(lacking), **self._dirty}

    def begin_unshared(self, keys: Sequence[bytes]) -> None:
        """Only their request knows these keys, and only in this process: they are never written to cold
        tiers."""
        self._unshared.update(keys)

    def end_unshared(self, keys: Sequence[bytes]) -> int:
        """Their request has ended. Returns how many blocks are forgotten now; the others are forgotten when
        they land."""
        self._unshared.difference_update(keys)
        self.unwanted.update(keys)
        # several requests with the same keys may end at once
        return self._host.forget(list(dict.fromkeys(keys)))

    def _forget_gone(self) -> None:
        """Evicted host blocks can no longer be written. Blocks being written cannot be evicted."""
        gone = [key for key in self._host.take_gone(_GONE_AT_ONCE) if key in self._dirty]
        for key in gone:
            del self._dirty[key]
        self._note_lost(gone)

    # ------------------------------------------------------------------------------------------------- writes

    def settle(self) -> None:
        """Take in writes that are over, and evictions from host memory."""
        if not self.cold:
            return
        if self._num_losses != self.first.calls.num_losses:
            self._num_losses = self.first.calls.num_losses
            self._begin_anew()
        for tier in self.cold.values():
            for writing in tier.settle():
                if writing.handle is not None:
                    writing.handle.end()
                if tier is self.first:
                    self._end_write(writing)
        if self._host.pool.gone:
            self._forget_gone()

    def hand_over(self) -> bool:
        """Submit this turn's writes. Returns whether a flush has more for the next turn."""
        if not self.cold:
            return False
        if self._admission == "evict" and not self._rests and not self._writing:
            self._clean()
        if self.later:
            tier, keys = self.later.popleft()
            if tier is self.first:  # it may have been written meanwhile
                self._write_dirty([key for key in keys if key in self._dirty])
            else:
                self._write(tier, keys)
        for one in self.persisting:
            self._advance_persisting(one)
        self.persisting = [one for one in self.persisting if not one.settled]
        return any(one.handing_over for one in self.persisting)

    def _clean(self) -> None:
        """Write blocks that will soon be evicted from host memory, a few at a time."""
        pool = self._host.pool
        if pool.num_free * _CLEAN_SHARE < pool.num_slots:
            with pool.lock:
                coldest = pool.keys(pool.coldest(max(_CLEAN_BLOCKS, pool.num_slots // _CLEAN_SHARE)))
            dirty = [key for key in coldest if key in self._dirty][:_CLEAN_BLOCKS]
            self._rests = self._write_dirty(dirty) is None

    def _write_in_slices(self, tier: ColdTier, keys: Sequence[bytes]) -> None:
        """The first slice now, the others in later turns."""
        for start in range(0, len(keys), _WRITE_AT_ONCE):
            part = keys[start : start + _WRITE_AT_ONCE]
            if start:
                self.later.append((tier, part))
            else:
                self._write(tier, part)

    def _write_dirty(self, keys: Sequence[bytes], must: bool = False) -> Writing | None:
        wanted = [key for key in keys if key not in self._writing]
        return self._write(self.first, wanted, must) if wanted else None

    def _write(self, tier: ColdTier, keys: Sequence[bytes], must: bool = False) -> Writing | None:
        slots, pin = self._host.pin_each(keys, f"write to {tier.name}")
        if pin is None:
            return None
        here = [key for key, slot in zip(keys, slots, strict=True) if slot != ABSENT]
        writing = None
        try:
            writing = tier.try_write(here, self._host.pool.depths[pin.run].tolist(), pin.slots, pin, must)
        finally:
            if writing is None:
                pin.end()
        if writing is not None and tier is self.first:
            self._emptied_before[writing] = self.num_emptied
            self._writing.update(writing.tried_keys)
        return writing

    def _end_write(self, writing: Writing) -> None:
        done = writing.done_keys
        if self._emptied_before.pop(writing, self.num_emptied) == self.num_emptied:
            for key in done:
                self._dirty.pop(key, None)
            self._writing.difference_update(writing.tried_keys)
            for one in self.persisting:
                one.lost.difference_update(done)
            self._note_lost([key for key in writing.tried_keys if key in self._dirty])
        self._rests |= bool(writing.keys) and not done

    def reset(self, tier: str) -> Writing:
        """Empty the cold `tier`. From now on no block counts as being there; host blocks are written again,
        after the reset, when a request asks for them. A `persist` in progress begins again."""
        writing = self.cold[tier].reset()
        self.later = deque(one for one in self.later if one[0].name != tier)  # it was queued before the reset
        if tier == self.first.name:
            self._begin_anew()
        return writing

    def _begin_anew(self) -> None:
        """No block counts as being in the first tier: all host blocks are dirty, except those that cold tiers
        never get."""
        self.num_emptied += 1
        self._writing.clear()
        shared = itertools.filterfalse(self._unshared.__contains__, self._host.pool.keys())
        self._dirty = {**dict.fromkeys(shared), **self._dirty}

    # ------------------------------------------------------------------------------------------------ persist

    def persist(self, saved: Settling | None) -> Persisting | None:
        """Write all blocks sealed so far to the first cold tier, after the save `saved` has landed, and make
        them durable there. None: there is no such tier."""
        if not self.cold:
            return None
        while self._host.pool.gone:
            self._forget_gone()  # blocks evicted before this call do not count as lost
        persisting = Persisting(saved, self._dirty.copy())
        self.persisting.append(persisting)
        return persisting

    def _advance_persisting(self, one: Persisting) -> None:
        if one.sync is None and not one.handing_over:
            return
        if one.num_emptied != self.num_emptied and (one.sync is None or one.sync.settled):
            # Start with the blocks that are dirty now: `saved` has landed, or the tier was emptied. Blocks
            # evicted unwritten meanwhile are lost.
            one.lost = {key for key in one.lost if key not in self._dirty}
            one.keys = {**dict.fromkeys(one.lost), **self._dirty}
            one.unwritten = iter(one.keys)
            one.sync, one.num_emptied = None, self.num_emptied
        if one.sync is None:
            if self._hand_over(one):
                return
            one.sync = self.first.persist()
        if one.sync.settled:
            lost = StoreFailed(
                f"{len(one.lost)} of {len(one.keys)} blocks could not be written to the {self.first.name} "
                "tier"
            )
            one.error = one.sync.error or (lost if one.lost else None)
            one.settled = True

    def _hand_over(self, one: Persisting) -> bool:
        """Submit the next slice. Returns whether there may be more. Skips blocks that are being written or
        are clean by now."""
        keys = list(itertools.islice(one.unwritten, _WRITE_AT_ONCE))
        dirty = [key for key in keys if key in self._dirty and key not in self._writing]
        for start in range(0, len(dirty), _CLEAN_BLOCKS):
            some = dirty[start : start + _CLEAN_BLOCKS]
            writing = self._write_dirty(some, must=True)
            # these were evicted from host memory
            one.lost.update(some if writing is None else set(some).difference(writing.keys))
        return len(keys) == _WRITE_AT_ONCE

    def _note_lost(self, keys: Sequence[bytes]) -> None:
        """The blocks are still dirty after their write, or were evicted while dirty."""
        for one in self.persisting:
            one.lost.update(key for key in keys if key in one.keys)

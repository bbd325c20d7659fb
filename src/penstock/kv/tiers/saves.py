"""Blocks on their way down: from the device to host memory, and from there to cold tiers. Owns every save,
and the dirty blocks: blocks in host memory that the first cold tier is not known to have. Only the engine
thread calls it.

    sealed, retracted, or room is needed -> host slots taken -> copied, in parts -> found in host memory
    -> written to cold tiers

A save protects both its ends until `settle` has seen its end. Writes go from host memory to the first cold
tier if its admission says so, and always to the tiers after it; `persist` writes all dirty blocks. Many
blocks are submitted in slices, one in each turn of the engine.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.contract import Fence
from penstock.errors import InvariantBroken, StoreFailed, TransferFailed
from penstock.figures import Histogram
from penstock.kv.blocks.handles import Handle, Hold, Pin, Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import as_run
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.calls import SECONDS_BOUNDS
from penstock.kv.tiers.cold import ColdTier, Writing
from penstock.kv.tiers.host import ABSENT, Displaces, HostLease, HostTier, Taken
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.store import PinningStore
from penstock.kv.transfer import Group, Mover, Settling, Slots, Transfer

log = logging.getLogger(__name__)

_PART_BLOCKS = 64  # blocks of a save that land in one turn
# Upper bound. A prefill of this length could fill most of a device with blocks that wait to be saved.
_PATIENCE_S = 5.0
# Blocks that leave the device together: the first slots are free while later blocks are copied.
_MOVE_BLOCKS = 512
# With write-on-eviction, 1 / this of the host slots is kept free or clean.
_CLEAN_SHARE = 8
_CLEAN_BLOCKS = 64  # blocks written together for that
_GONE_AT_ONCE = 4096  # evicted host blocks noted in one turn: a reset evicts all
_WRITE_AT_ONCE = 256  # blocks submitted in one turn if many wait: about a millisecond


class Offer(NamedTuple):
    """Blocks to be saved."""

    pin: Pin
    keys: Sequence[bytes]  # of its leading blocks
    depths: Sequence[int]
    after: Sequence[Fence]  # fences of the steps that wrote them


class SavedLease(HostLease):
    """The lease of a retracted request: its blocks with keys, and the unfinished block for itself alone."""

    def __init__(self, tier: HostTier, owner: str, num_tokens: int) -> None:
        super().__init__(tier, owner, [], num_tokens)
        self.saving = True
        self.given_up = False
        self.wait_until_s = float("inf")  # a request that has waited this long resumes without it

    @property
    def ready(self) -> bool:
        return super().ready or time.monotonic() > self.wait_until_s

    def end(self) -> None:
        # while it is being saved the transfer owns its slots, and gives them back at its end
        self.given_up = True
        super().end()


class Save(Transfer):
    """Blocks on their way from the device to host memory, without those that are there already. They land in
    parts, so that no turn of the engine pays for all.

    `moves`: the device slots are needed. The blocks are evicted from the device at the end of the save, even
    if it failed. `lease`: the save belongs to a retraction. Its blocks land together, and those without a key
    are for the lease alone.
    """

    def __init__(
        self,
        host: HostTier,
        offers: Sequence[Offer],
        num_layers: int,
        displaces: Displaces = Displaces.UNWANTED,
        moves: bool = False,
        lease: SavedLease | None = None,
    ) -> None:
        fences = {id(fence): fence for offer in offers for fence in offer.after}
        super().__init__(
            f"{'demote' if lease is None else 'retract'} of {offers[0].pin.owner}", (), tuple(fences.values())
        )
        self.pins = [offer.pin for offer in offers]
        self.offers = offers
        self.parts: deque[Taken] = deque()  # by group, parts that have not landed
        self.moves = moves
        self.lease = lease
        self.private: Reservation | None = None  # for blocks without a key
        self.kept: Handle | None = None  # pin on blocks of a retraction that host memory had already
        self._host = host
        self._layers = (0, num_layers)
        self._displaces = displaces

    def prepare(self) -> bool:
        keys = [key for offer in self.offers for key in offer.keys]
        depths = [depth for offer in self.offers for depth in offer.depths]
        slots = np.concatenate([offer.pin.array for offer in self.offers]).astype(np.int64)
        if self.lease is not None:
            self._take_all(keys, depths, slots)
            return bool(self.num_blocks)
        for first in range(0, len(keys), _PART_BLOCKS):
            part = slice(first, first + _PART_BLOCKS)
            self._take(keys[part], depths[part], slots[part])
        return bool(self.parts)

    def _take(self, keys: Sequence[bytes], depths: Sequence[int], slots: Slots) -> None:
        taken = self._host.take(keys, depths, self.label, self._displaces)
        if taken.reservation is not None:
            self.parts.append(taken)
            self.keys = (*self.keys, *taken.keys)
            self.groups = (
                *self.groups,
                Group(self._layers, slice(self.num_blocks, self.num_blocks + len(taken.keys))),
            )
            self._add(slots[taken.places], taken.reservation)

    def _take_all(self, keys: Sequence[bytes], depths: Sequence[int], slots: Slots) -> None:
        """As one group, including blocks without a key."""
        num_keyed = len(keys)
        _, self.kept = self._host.pin_each(keys, self.label)
        self._take(keys, depths, slots[:num_keyed])
        self.private = (
            self._host.take_private(len(slots) - num_keyed, self.label) if len(slots) > num_keyed else None
        )
        if self.private is not None:
            self._add(slots[num_keyed:], self.private)
        self.groups = (Group(self._layers),)

    def _add(self, sources: Slots, reservation: Reservation) -> None:
        self.source_slots = np.concatenate((self.source_slots, sources))
        self.dest_slots = np.concatenate((self.dest_slots, np.array(reservation.slots, np.int64)))
        self.after = (*self.after, *reservation.after)


@dataclass(slots=True)
class Persisting:
    """A persist in progress: all blocks sealed so far go to the first cold tier. Settled when they are
    durable there, or when that has failed."""

    saved: Settling | None  # the save that must land first
    keys: dict[bytes, int]  # blocks to write, with depths
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


@dataclass(slots=True)
class Resetting:
    """A reset in progress. Tiers in memory are empty from the start."""

    memory: dict[str, int]  # blocks forgotten, by tier
    stores: dict[str, Writing]  # by tier

    @property
    def settled(self) -> bool:
        return all(reset.settled for reset in self.stores.values())

    @property
    def forgotten(self) -> dict[str, int]:
        """By tier."""
        return {**self.memory, **{name: reset.num_forgotten for name, reset in self.stores.items()}}

    @property
    def error(self) -> BaseException | None:
        return next((reset.error for reset in self.stores.values() if reset.error is not None), None)


@dataclass(slots=True)
class TrafficCounts:
    """Transfers between device and host memory. Totals that never fall."""

    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (from, to)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (tier, reason)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)  # from submit to settled
    saves_late: int = 0  # blocks that were not saved because one before them was overdue

    def book(self, transfer: Transfer, source: str, dest: str, block_bytes: int) -> None:
        """It is over."""
        error = transfer.error()
        if isinstance(error, InvariantBroken):
            raise error  # a defect in Penstock, not in a tier: the engine stops
        if error is not None:
            self.failures["host", "copy" if isinstance(error, TransferFailed) else type(error).__name__] += 1
            log.warning("%s failed, and its blocks are computed instead: %s", transfer.label, error)
            return
        self.bytes[source, dest] += transfer.num_blocks * block_bytes
        if transfer.num_blocks:
            histogram = self.seconds.setdefault((source, dest), Histogram(SECONDS_BOUNDS))
            histogram.add(transfer.settled_s - transfer.submitted_s)


class Saves:
    """`cold` are the tiers colder than host memory, hottest first; may be empty. Nothing is saved to a host
    tier without slots."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostTier,
        cold: Sequence[ColdTier],
        mover: Mover,
        layout: BlockLayout,
        limits: TierLimits,
    ) -> None:
        self.host = host
        self.cold = {tier.name: tier for tier in cold}
        self.mover = mover
        self.pool = pool
        self.layout = layout
        self.limits = limits
        self.counts = TrafficCounts()
        # Resets submitted to the first cold tier, plus the times it lost its blocks. Reads and writes from
        # before such an event say nothing about what the tier has now.
        self.num_emptied = 0
        self._offers: list[Offer] = []
        self._due: list[Offer] = []  # offers that a request waits for; they may evict anything
        self._num_moving = 0  # device blocks being moved to host memory to make room
        # depth by key, of host blocks that the first cold tier is not known to have
        self._dirty: dict[bytes, int] = {}
        self._writing: set[bytes] = set()  # keys of these that are being written
        # `num_emptied` at submission, by write to the first tier in flight
        self._emptied_before: dict[Writing, int] = {}
        self._num_losses = 0  # of the first tier, seen so far
        self._unshared: set[bytes] = set()  # keys of closed scopes, which only their request knows
        # keys of these whose request has ended, while copies are in flight
        self._unwanted: set[bytes] = set()
        self._rests = False  # nothing is left to clean, or a write failed; wait until more blocks land
        self.persisting: list[Persisting] = []
        # slices to write in later turns
        self.later: deque[tuple[ColdTier, Sequence[bytes], Sequence[int]]] = deque()
        self.first: ColdTier  # a block that it lacks is dirty; set only if there are cold tiers
        if cold:
            self.first = cold[0]
            host.watch_gone()

    def pins(self) -> set[Pin]:
        """Pins on device slots for saves in flight or about to start."""
        return {offer.pin for offer in (*self._offers, *self._due)} | {
            pin for save in self.mover.flying for pin in save.pins
        }

    # ----------------------------------------------------------------------------------------- device to host

    def offer(
        self, hold: Hold, first: int, keys: Sequence[bytes], fence: Fence | None, due: bool = False
    ) -> None:
        """Blocks `first..` of `hold` were sealed with `keys`. `fence` lies behind the step that wrote them.
        `submit` sends them. `due`: the request resumes when they have landed."""
        if self.host.num_slots:
            pin = self.pool.pin_run(hold, first, len(keys), hold.owner)
            offer = Offer(pin, keys, range(first, first + len(keys)), () if fence is None else (fence,))
            (self._due if due else self._offers).append(offer)

    def submit(self) -> Transfer | None:
        """Send all offers since the last call as one save, or two if some are due. Nothing is sent while an
        earlier save is overdue: later ones would keep their slots as long, until the device has none left.
        When the returned save has settled, so have all before it. None: no save is in flight."""
        due, offers, self._due, self._offers = self._due, self._offers, [], []
        if (due or offers) and self.mover.is_late():
            self.counts.saves_late += sum(len(offer.keys) for offer in (*due, *offers))
            _end_pins((*due, *offers))
            due, offers = [], []
        if due:
            self._send(Save(self.host, due, self.layout.num_layers, Displaces.ANYTHING))
        if offers:
            # With cold tiers, offers may evict any host block: the cold tiers have it. Otherwise, while host
            # memory is full, blocks may stay on the device only and be saved when their slots are needed.
            displaces = (
                Displaces.ANYTHING
                if self.cold
                else Displaces.NOTHING
                if self.limits.postpones
                else Displaces.UNWANTED
            )
            self._send(Save(self.host, offers, self.layout.num_layers, displaces))
        return self.mover.flying[-1] if self.mover.flying else None

    def _send(self, save: Save) -> None:
        """If this raises, its device slots have been given back."""
        save.deadline_s = time.monotonic() + min(_PATIENCE_S, self.limits.load_deadline_s)
        try:
            self.mover.submit(save)
        except BaseException:
            _end_pins(save.offers)
            raise

    def retract(
        self, hold: Hold, num_blocks: int, keys: Sequence[bytes], num_tokens: int, fence: Fence | None
    ) -> SavedLease | None:
        """Save the first `num_blocks` blocks of `hold`, the first of which have `keys`. `fence` covers the
        steps that still write. None without a host tier, and while an earlier save is overdue."""
        if not self.host.num_slots:
            return None
        # the request's offered blocks go first, so that they count as in flight
        self.submit()
        if self.mover.is_late():
            self.counts.saves_late += num_blocks - len(keys)  # the others were counted when they were offered
            return None
        lease = SavedLease(self.host, hold.owner, num_tokens)
        pin = self.pool.pin_run(hold, 0, num_blocks, hold.owner)
        offer = Offer(pin, keys, range(len(keys)), () if fence is None else (fence,))
        save = Save(self.host, [offer], self.layout.num_layers, lease=lease)
        self._send(save)
        lease.wait_until_s = save.deadline_s
        return lease

    def save(self, keys: Sequence[bytes], fence: Fence | None) -> None:
        """Copy those of `keys` that only the device has to host memory, in place of unwanted blocks, without
        waiting until their device slots are needed. `fence` covers all launched work. Blocks in host memory
        that the disk has since evicted become dirty again; the next `persist` writes them."""
        self.submit()  # offered blocks count as in flight from here on
        if self.cold and isinstance(store := self.first.calls.store, PinningStore):
            places = zip(keys, self.host.has_each(keys), store.has_each(keys), strict=True)
            lacking = {
                key: depth
                for depth, (key, is_here, is_there) in enumerate(places)
                if is_here and not is_there
            }
            self._dirty = {**lacking, **self._dirty}
        if not self.host.num_slots or self.mover.is_late():
            return
        placed = zip(self.pool.find_each(keys), self.host.absent(keys), strict=True)
        alone = [slot for slot, is_absent in placed if slot != ABSENT and is_absent]
        for first in range(0, len(alone), _MOVE_BLOCKS):
            self._save_slots(
                alone[first : first + _MOVE_BLOCKS], "snapshot", () if fence is None else (fence,)
            )

    def _save_slots(
        self, slots: Sequence[int], owner: str, after: Sequence[Fence] = (), moves: bool = False
    ) -> None:
        """Save sealed device slots, held or not."""
        run = as_run(sorted(slots))
        fences = (*self.pool.last_use(run), *after)
        pin = self.pool.pin(run, owner)
        offer = Offer(pin, self.pool.keys_of(pin.slots), self.pool.depths_of(pin.slots), fences)
        self._send(Save(self.host, [offer], self.layout.num_layers, moves=moves))

    # ------------------------------------------------------------------------------------- room on the device

    def make_room(
        self, num_blocks: int, floor: int, give_way: Callable[[int], None], num_more: int = 0
    ) -> bool:
        """Whether the next `num_blocks` device slots can be drawn without losing a block that only the device
        has. If not, such blocks, and those among `num_more` further slots, are being moved to host memory
        when this returns; `floor` slots stay available meanwhile. `give_way` evicts host copies of blocks
        that stay on the device; they are saved again when they leave it. Without a host tier every evicted
        block is lost anyway."""
        if not self.host.num_slots:
            return True
        pool = self.pool
        num_evicted = min(num_blocks, pool.num_available) - pool.num_free
        if num_evicted <= 0 or self.mover.is_late():
            return True
        if self._num_moving:
            return False  # the slots that it frees come first
        alone = self._alone(num_evicted)
        if alone and num_more:
            alone = self._alone(min(num_evicted + num_more, pool.num_available - pool.num_free))
        alone = alone[: max(0, pool.num_available - floor)]
        if not alone:
            return True
        if self.limits.postpones and not self.cold:  # device and host memory are one capacity
            give_way(len(alone) - self.host.num_free)
        for first in range(0, len(alone), _MOVE_BLOCKS):
            self._move(alone[first : first + _MOVE_BLOCKS])
        return False

    def num_safe(self, num_slots: int) -> int:
        """How many of the next `num_slots` evictions come before the first block that only the device has."""
        if not self.host.num_slots:
            return 0
        absent = self.host.absent(self.pool.keys_of(self.pool.coldest_slots(num_slots)))
        return next((place for place, is_alone in enumerate(absent) if is_alone), len(absent))

    def _alone(self, num_slots: int) -> list[int]:
        """Of the next `num_slots` to be evicted, those whose blocks only the device has."""
        slots = self.pool.coldest_slots(num_slots)
        return [
            slot
            for slot, absent in zip(slots, self.host.absent(self.pool.keys_of(slots)), strict=True)
            if absent
        ]

    def _move(self, slots: Sequence[int]) -> None:
        self._save_slots(slots, "room on the device", moves=True)
        self._num_moving += len(slots)

    # ------------------------------------------------------------------------------------------------- settle

    def settle(self) -> None:
        """Take in copies that are over: their blocks can be found in host memory, and their pins end."""
        first = self.mover.flying[0] if self.mover.flying else None
        if isinstance(first, Save) and first.lease is None:
            self._land(first)
        for save in self.mover.settle():
            if isinstance(save, Save):
                self._end(save)
            self.counts.book(save, "device", "host", self.layout.block_bytes)
        if self._unwanted and not (self.mover.flying or self._due or self._offers):
            self._unwanted.clear()

    def _land(self, save: Save) -> None:
        """Landed blocks can be found from now on; failed ones are dropped."""
        for error in save.take_arrived():
            if save.parts:  # a retraction may have private blocks only
                taken = save.parts.popleft()
                (self.host.land if error is None else self.host.drop)(taken)
                if error is None:
                    self.landed(taken.keys, taken.depths)

    def _end(self, save: Save) -> None:
        self._land(save)
        while save.parts:  # never enqueued
            self.host.drop(save.parts.popleft())
        if save.lease is not None:
            self._fill_lease(save, save.lease)
        for pin in save.pins:
            pin.end()
            # Wanted blocks, too: otherwise they would be moved again, and the next request would wait
            # forever.
            if save.moves:
                self.pool.evict_these(pin.slots)
        self._num_moving -= sum(len(offer.keys) for offer in save.offers) if save.moves else 0

    def _fill_lease(self, save: Save, lease: SavedLease) -> None:
        """The retraction's save is over; its landed blocks belong to the lease."""
        landed, private = save.error() is None, save.private
        slots, pin = self.host.pin_each(save.offers[0].keys, save.label)
        self.host.keep(lease, *(() if private is None else (private,)))
        lease.slots = np.array([*slots, *(private.slots if private is not None and landed else ())], np.int64)
        self.host.want_saved(lease, len(slots))
        self.host.end_handles([save.kept, pin])
        lease.saving = False
        if lease.given_up:
            self.host.end_lease(lease)

    def settle_writes(self) -> None:
        """Take in writes to cold tiers that are over, and evictions from host memory."""
        if not self.cold:
            return
        if self._num_losses != self.first.calls.num_losses:
            self._num_losses = self.first.calls.num_losses
            self._begin_anew()
        for tier in self.cold.values():
            for writing in tier.settle():
                self.host.end_handles([writing.handle])
                if tier is self.first:
                    self._end_write(writing)
        if self.host.any_gone:
            self._forget_gone()

    def hand_over(self) -> bool:
        """Submit this turn's writes to cold tiers. Returns whether a flush has more for the next turn."""
        if not self.cold:
            return False
        if self.limits.admission == "evict" and not self._rests and not self._writing:
            self._clean()
        if self.later:
            tier, keys, depths = self.later.popleft()
            if tier is self.first:  # it may have been written meanwhile
                self._write_dirty([key for key in keys if key in self._dirty])
            else:
                self._write(tier, keys, depths)
        for one in self.persisting:
            self._advance_persisting(one)
        self.persisting = [one for one in self.persisting if not one.settled]
        return any(one.handing_over for one in self.persisting)

    # ------------------------------------------------------------------------------------------- host to cold

    def landed(self, keys: Sequence[bytes], depths: Sequence[int], source: str = "device") -> None:
        """Blocks have landed in host memory from `source`; write those that admission selects."""
        self._rests = False
        if self._unshared or self._unwanted:
            self.host.forget([key for key in keys if key in self._unwanted])
            shared = [
                place
                for place, key in enumerate(keys)
                if key not in self._unshared and key not in self._unwanted
            ]
            keys, depths = [keys[place] for place in shared], [depths[place] for place in shared]
        for tier in self.cold.values():
            if tier.name == source:
                continue
            if tier is self.first:
                self._dirty.update(zip(keys, depths, strict=True))
            if tier is not self.first or self.limits.admission == "always":
                self._write_in_slices(tier, keys, depths)

    def begin_unshared(self, keys: Sequence[bytes]) -> None:
        """Only their request knows these keys, and only in this process: they are never written to cold
        tiers."""
        self._unshared.update(keys)

    def end_unshared(self, keys: Sequence[bytes]) -> int:
        """Their request has ended. Returns how many blocks are forgotten now; the others are forgotten when
        they land."""
        self._unshared.difference_update(keys)
        self._unwanted.update(keys)
        # several requests with the same keys may end at once
        return self.host.forget(list(dict.fromkeys(keys)))

    def used(self, keys: Sequence[bytes]) -> None:
        """Blocks in host memory were used again."""
        if self.limits.admission == "reuse" and self.cold:
            dirty = [key for key in keys if key in self._dirty and key not in self._writing]
            self._write_in_slices(self.first, dirty, [self._dirty[key] for key in dirty])

    def _clean(self) -> None:
        """Write blocks that will soon be evicted from host memory, a few at a time."""
        if self.host.slots.free * _CLEAN_SHARE < self.host.num_slots:
            coldest = self.host.coldest(max(_CLEAN_BLOCKS, self.host.num_slots // _CLEAN_SHARE))
            self._rests = (
                self._write_dirty([key for key in coldest if key in self._dirty][:_CLEAN_BLOCKS]) is None
            )

    def _write_in_slices(self, tier: ColdTier, keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """The first slice now, the others in later turns."""
        for start in range(0, len(keys), _WRITE_AT_ONCE):
            part = slice(start, start + _WRITE_AT_ONCE)
            if start:
                self.later.append((tier, keys[part], depths[part]))
            else:
                self._write(tier, keys[part], depths[part])

    def _write_dirty(self, keys: Sequence[bytes], must: bool = False) -> Writing | None:
        wanted = [key for key in keys if key not in self._writing]
        return self._write(self.first, wanted, [self._dirty[key] for key in wanted], must) if wanted else None

    def _write(
        self, tier: ColdTier, keys: Sequence[bytes], depths: Sequence[int], must: bool = False
    ) -> Writing | None:
        slots, pin = self.host.pin_each(keys, f"write to {tier.name}")
        if pin is None:
            return None
        places = [place for place, slot in enumerate(slots) if slot != ABSENT]
        kept = [keys[place] for place in places]
        try:
            writing = tier.try_write(
                kept, [depths[place] for place in places], [slots[place] for place in places], pin, must
            )
        except BaseException:
            self.host.end_handles([pin])
            raise
        if writing is None:
            self.host.end_handles([pin])
        elif tier is self.first:
            self._emptied_before[writing] = self.num_emptied
            # without the blocks that the queue had no room for
            self._writing.update(key for group in writing.groups for key in group.keys)
        return writing

    def _end_write(self, writing: Writing) -> None:
        done = writing.done_keys
        tried = [key for group in writing.groups for key in group.keys]
        if self._emptied_before.pop(writing, self.num_emptied) == self.num_emptied:
            for key in done:
                self._dirty.pop(key, None)
            self._writing.difference_update(tried)
            if self.persisting:
                for one in self.persisting:
                    one.lost.difference_update(done)
                self._note_lost([key for key in tried if key in self._dirty])
        self._rests |= bool(writing.keys) and not done

    def _forget_gone(self) -> None:
        """Evicted host blocks can no longer be written. Blocks being written cannot be evicted."""
        gone = [key for key in self.host.take_gone(_GONE_AT_ONCE) if key in self._dirty]
        for key in gone:
            del self._dirty[key]
        self._note_lost(gone)

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
        self._dirty = {
            **dict.fromkeys(itertools.filterfalse(self._unshared.__contains__, self.host.keys()), 0),
            **self._dirty,
        }

    # ------------------------------------------------------------------------------------------------ persist

    def persist(self) -> Persisting | None:
        """Write all blocks sealed so far to the first cold tier, and make them durable there. None: there is
        no such tier."""
        if not self.cold:
            return None
        saved = self.submit()
        while self.host.any_gone:
            self._forget_gone()  # blocks evicted before this call do not count as lost
        persisting = Persisting(saved, self._dirty.copy())
        self.persisting.append(persisting)
        return persisting

    def _advance_persisting(self, one: Persisting) -> None:
        if one.sync is None and not one.handing_over:
            return
        if one.num_emptied != self.num_emptied and (one.sync is None or one.sync.settled):
            self._begin(one)
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

    def _begin(self, one: Persisting) -> None:
        """Start with the blocks that are dirty now: `saved` has landed, or the tier was emptied. Blocks
        evicted unwritten meanwhile are lost."""
        one.lost = {key for key in one.lost if key not in self._dirty}
        one.keys = {**dict.fromkeys(one.lost, 0), **self._dirty}
        one.unwritten = iter(one.keys)
        one.sync, one.num_emptied = None, self.num_emptied

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


def _end_pins(offers: Sequence[Offer]) -> None:
    for offer in offers:
        offer.pin.end()

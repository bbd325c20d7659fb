"""Blocks on their way from the device to host memory. Owns every save. Only the engine thread calls it.

    sealed, retracted, or room is needed -> host slots taken -> copied, in parts -> found in host memory

A save protects both its ends until `settle` has seen its end. `Writeback` decides what becomes of the blocks
then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.contract import Fence
from penstock.kv.blocks.handles import Handle, Hold, Pin, Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import Run
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.host import ABSENT, Displaces, HostLease, HostTier, Taken
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.writeback import Writeback
from penstock.kv.transfer import Group, Mover, Transfer

_PART_BLOCKS = 64  # blocks of a save that land in one turn
# Upper bound. A prefill of this length could fill most of a device with blocks that wait to be saved.
_PATIENCE_S = 5.0
# Blocks that leave the device together: the first slots are free while later blocks are copied.
_MOVE_BLOCKS = 512


class Offer(NamedTuple):
    """Blocks to be saved."""

    pin: Pin
    keys: Sequence[bytes]  # of its leading blocks
    depths: Sequence[int]
    after: Sequence[Fence]  # fences of the steps that wrote them
    first: int = 0  # number of its first block in a retracted request


class SavedLease(HostLease):
    """The lease of a retracted request: its blocks with keys, and the unfinished block for itself alone."""

    def __init__(self, tier: HostTier, owner: str, num_tokens: int, wait_until_s: float) -> None:
        super().__init__(tier, owner, np.empty(0, np.int64), num_tokens)
        self.saving = True
        self.given_up = False
        self.wait_until_s = wait_until_s  # a request that has waited this long resumes without it

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
    if it failed.
    """

    verb = "demote"

    def __init__(
        self,
        host: HostTier,
        offers: Sequence[Offer],
        num_layers: int,
        displaces: Displaces = Displaces.UNWANTED,
        moves: bool = False,
    ) -> None:
        fences = {id(fence): fence for offer in offers for fence in offer.after}
        super().__init__(f"{self.verb} of {offers[0].pin.owner}", (), tuple(fences.values()))
        self.pins = [offer.pin for offer in offers]
        self.offers = offers
        self.parts: deque[Taken] = deque()  # by group, parts that have not landed
        self.num_arrived = 0  # groups that were seen to be over
        self.moves = moves
        self._host = host
        self._layers = (0, num_layers)
        self._displaces = displaces

    def prepare(self) -> bool:
        keys = [key for offer in self.offers for key in offer.keys]
        depths = [depth for offer in self.offers for depth in offer.depths]
        slots = np.concatenate([offer.pin.run for offer in self.offers])
        for first in range(0, len(keys), _PART_BLOCKS):
            part = slice(first, first + _PART_BLOCKS)
            self._take(keys[part], depths[part], slots[part])
        return bool(self.parts)

    def _take(self, keys: Sequence[bytes], depths: Sequence[int], slots: Run) -> None:
        taken = self._host.take(keys, depths, self.label, self._displaces)
        if taken.reservation is not None:
            self.parts.append(taken)
            self.keys = (*self.keys, *taken.keys)
            blocks = slice(self.num_blocks, self.num_blocks + len(taken.keys))
            self.groups = (*self.groups, Group(self._layers, blocks))
            self._add(slots[taken.places], taken.reservation)

    def _add(self, sources: Run, reservation: Reservation) -> None:
        self.source_slots = np.concatenate((self.source_slots, sources))
        self.dest_slots = np.concatenate((self.dest_slots, reservation.run))
        self.after = (*self.after, *reservation.after)


class Retraction(Save):
    """The save of a retracted request. Its blocks land together, and those without a key are for `lease`
    alone."""

    verb = "retract"

    def __init__(self, host: HostTier, offer: Offer, num_layers: int, lease: SavedLease) -> None:
        super().__init__(host, [offer], num_layers)
        self.lease = lease
        self.private: Reservation | None = None  # for blocks without a key
        self.kept: Handle | None = None  # pin on blocks that host memory had already

    def prepare(self) -> bool:
        (offer,) = self.offers
        keyed, rest = np.split(offer.pin.run, [len(offer.keys)])
        _, self.kept = self._host.pin_each(offer.keys, self.label)
        self._take(offer.keys, offer.depths, keyed)
        if rest.size:
            self.private = self._host.take_private(len(rest), self.label)
        if self.private is not None:
            self._add(rest, self.private)
        self.groups = (Group(self._layers),)
        return bool(self.num_blocks)

    def fill_lease(self) -> None:
        """It is over, and its blocks with keys have landed: all belong to the lease."""
        offer, lease, private = self.offers[0], self.lease, self.private
        with self._host.pool.lock:
            # blocks that have left its window are not saved for it
            slots = [ABSENT] * offer.first + self._host.pool.find_each(offer.keys)
            if private is not None and self.error() is None:
                slots += private.slots
            lease.slots = np.array(slots, np.int64)
            lease.open(offer.first + len(offer.keys), *(() if private is None else (private,)))
        if self.kept is not None:
            self.kept.end()
        lease.saving = False
        if lease.given_up:
            lease.end()


class Saves:
    """Nothing is saved to a host tier without slots."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostTier,
        writeback: Writeback,
        mover: Mover,
        layout: BlockLayout,
        limits: TierLimits,
    ) -> None:
        self.mover = mover
        self.layout = layout
        self.limits = limits
        self.num_late = 0  # blocks that were not saved because one before them was overdue
        self._pool = pool
        self._host = host
        self._writeback = writeback
        self._offers: list[Offer] = []
        self._due: list[Offer] = []  # offers that a request waits for; they may evict anything

    def pins(self) -> set[Pin]:
        """Pins on device slots for saves in flight or about to start."""
        return {offer.pin for offer in (*self._offers, *self._due)} | {
            pin for save in self.mover.flying for pin in save.pins
        }

    def offer(
        self, hold: Hold, first: int, keys: Sequence[bytes], fence: Fence | None, due: bool = False
    ) -> None:
        """Blocks `first..` of `hold` were sealed with `keys`. `fence` lies behind the step that wrote them.
        `submit` sends them. `due`: the request resumes when they have landed. Others stay on the device only
        while host memory is full, if they may: no transfer is made to find that out."""
        if not self._host.num_slots:
            return
        if not due and self._postpones and not self._host.pool.num_free:
            self._host.counts.postponed += sum(self._host.absent(keys))
        else:
            end = first + len(keys)
            pin = self._pool.pin(hold.first(end)[first:], hold.owner)
            offer = Offer(pin, keys, range(first, end), () if fence is None else (fence,))
            (self._due if due else self._offers).append(offer)

    def submit(self) -> Transfer | None:
        """Send all offers since the last call as one save, or two if some are due. Nothing is sent while an
        earlier save is overdue: later ones would keep their slots as long, until the device has none left.
        When the returned save has settled, so have all before it. None: no save is in flight."""
        due, offers, self._due, self._offers = self._due, self._offers, [], []
        if (due or offers) and self.mover.is_late():
            for offer in (*due, *offers):
                self.num_late += len(offer.keys)
                offer.pin.end()
            due, offers = [], []
        if due:
            self._send(Save(self._host, due, self.layout.num_layers, Displaces.ANYTHING))
        if offers:
            # With cold tiers, offers may evict any host block: the cold tiers have it. Otherwise, while host
            # memory is full, blocks may stay on the device only and be saved when their slots are needed.
            displaces = (
                Displaces.ANYTHING
                if self._writeback.cold
                else Displaces.NOTHING
                if self._postpones
                else Displaces.UNWANTED
            )
            self._send(Save(self._host, offers, self.layout.num_layers, displaces))
        return self.mover.flying[-1] if self.mover.flying else None

    @property
    def _postpones(self) -> bool:
        """Device and host memory are one capacity: a block need not be in both."""
        return self.limits.postpones and not self._writeback.cold

    def _send(self, save: Save) -> None:
        """If this raises, its device slots have been given back."""
        save.deadline_s = self._deadline_s
        try:
            self.mover.submit(save)
        except BaseException:
            for pin in save.pins:
                pin.end()
            raise

    @property
    def _deadline_s(self) -> float:
        return time.monotonic() + min(_PATIENCE_S, self.limits.load_deadline_s)

    def retract(
        self, hold: Hold, num_blocks: int, keys: Sequence[bytes], num_tokens: int, fence: Fence | None
    ) -> SavedLease | None:
        """Save the first `num_blocks` blocks of `hold`, the first of which have `keys`, as far as they have
        slots. `fence` covers the steps that still write. None without a host tier, and while an earlier save
        is overdue."""
        if not self._host.num_slots:
            return None
        # the request's offered blocks go first, so that they count as in flight
        self.submit()
        if self.mover.is_late():
            self.num_late += num_blocks - len(keys)  # the others were counted when they were offered
            return None
        lease = SavedLease(self._host, hold.owner, num_tokens, self._deadline_s)
        first = hold.num_dropped
        pin = self._pool.pin(hold.first(num_blocks)[first:], hold.owner)
        offer = Offer(pin, keys[first:], range(first, len(keys)), () if fence is None else (fence,), first)
        self._send(Retraction(self._host, offer, self.layout.num_layers, lease))
        return lease

    def save(self, keys: Sequence[bytes], fence: Fence | None) -> None:
        """Copy those of `keys` that only the device has to host memory, in place of unwanted blocks, without
        waiting until their device slots are needed, so that the next `persist` writes all that the first cold
        tier lacks. `fence` covers all launched work."""
        self.submit()  # offered blocks count as in flight from here on
        self._writeback.recheck(keys)
        if self._host.num_slots and not self.mover.is_late():
            placed = zip(self._pool.find_each(keys), self._host.absent(keys), strict=True)
            alone = [slot for slot, is_absent in placed if slot != ABSENT and is_absent]
            self._save_slots(alone, "snapshot", () if fence is None else (fence,))

    def _save_slots(
        self, slots: Sequence[int], owner: str, after: Sequence[Fence] = (), moves: bool = False
    ) -> None:
        """Save sealed device slots, held or not."""
        for first in range(0, len(slots), _MOVE_BLOCKS):
            pin = self._pool.pin(sorted(slots[first : first + _MOVE_BLOCKS]), owner)
            offer = Offer(
                pin,
                self._pool.keys(pin.slots),
                self._pool.depths[pin.run].tolist(),
                (*self._pool.last_use.after(pin.run), *after),
            )
            self._send(Save(self._host, [offer], self.layout.num_layers, moves=moves))

    # ------------------------------------------------------------------------------------- room on the device

    def make_room(
        self, num_blocks: int, floor: int, give_way: Callable[[int], None], num_more: int = 0
    ) -> bool:
        """Whether the next `num_blocks` device slots can be drawn without losing a block that only the device
        has. If not, such blocks, and those among `num_more` further slots, are being moved to host memory
        when this returns; `floor` slots stay available meanwhile. No wanted block is among the further ones,
        and none that host memory has no room for. `give_way` evicts host copies of blocks that stay on the
        device; they are saved again when they leave it. Without a host tier every evicted block is lost
        anyway."""
        if not self._host.num_slots:
            return True
        pool = self._pool
        num_evicted = min(num_blocks, pool.num_available) - pool.num_free
        if num_evicted <= 0 or self.mover.is_late():
            return True
        if any(isinstance(save, Save) and save.moves for save in self.mover.flying):
            return False  # the slots that it frees come first
        num_more = max(0, min(num_more, pool.num_unwanted - pool.num_free - num_evicted))
        alone = self._alone(num_evicted)
        num_needed = len(alone)
        if alone and num_more:
            alone = self._alone(num_evicted + num_more)
        alone = alone[: max(0, pool.num_available - floor)]
        if not alone:
            return True
        if self._postpones:
            give_way(len(alone) - self._host.pool.num_free)
        alone = alone[: max(num_needed, self._host.pool.num_unwanted)]
        self._save_slots(alone, "room on the device", moves=True)
        return False

    def num_safe(self, num_slots: int) -> int:
        """How many of the next `num_slots` evictions come before the first block that only the device has."""
        if not self._host.num_slots:
            return 0
        absent = self._host.absent(self._pool.keys(self._pool.coldest(num_slots, drops_wants=True)))
        return absent.index(True) if True in absent else len(absent)

    def _alone(self, num_slots: int) -> list[int]:
        """Of the next `num_slots` to be evicted, those whose blocks only the device has."""
        slots = self._pool.coldest(num_slots, drops_wants=True)
        absent = self._host.absent(self._pool.keys(slots))
        return [slot for slot, is_absent in zip(slots, absent, strict=True) if is_absent]

    # ------------------------------------------------------------------------------------------------- settle

    def settle(self) -> None:
        """Take in copies that are over: their blocks can be found in host memory, and their pins end."""
        first = self.mover.flying[0] if self.mover.flying else None
        if isinstance(first, Save) and not isinstance(first, Retraction):
            self._land(first)
        for save in self.mover.settle():
            if isinstance(save, Save):
                self._end(save)
            self.mover.book(save)
        if not (self.mover.flying or self._due or self._offers):
            self._writeback.unwanted.clear()

    def _land(self, save: Save) -> None:
        """Landed blocks can be found from now on; failed ones are dropped."""
        arrivals = save.arrivals or ()
        while save.num_arrived < len(arrivals) and arrivals[save.num_arrived].fence.passed():
            error = save.copied[save.num_arrived].error()
            save.num_arrived += 1
            if save.parts:  # a retraction may have private blocks only
                taken = save.parts.popleft()
                (self._host.land if error is None else self._host.drop)(taken)
                if error is None:
                    self._writeback.landed(taken.keys)

    def _end(self, save: Save) -> None:
        self._land(save)
        while save.parts:  # never enqueued
            self._host.drop(save.parts.popleft())
        if isinstance(save, Retraction):
            save.fill_lease()
        for pin in save.pins:
            pin.end()
            # Wanted blocks, too: otherwise they would be moved again, and the next request would wait
            # forever.
            if save.moves:
                self._pool.evict_these(pin.run)

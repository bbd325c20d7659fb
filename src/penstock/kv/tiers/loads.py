"""Blocks on their way up to the device, from host memory or through it. Owns every load. Only the engine
thread calls it, except `lease`.

    read into host memory, if they are colder -> copied to the device in parts, the first while later ones are
    being read

Blocks that host memory has need no reading: such a load is one copy. All host slots of a load are taken
before the first byte moves, so no load waits for slots while it holds some.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from penstock.contract import Arrival, Fence
from penstock.errors import InvariantBroken, LaneClosed, TransferFailed
from penstock.kv.blocks.handles import Hold, Pin
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.calls import StoreGroup
from penstock.kv.tiers.host import ABSENT, HOST, Displaces, HostLease, HostTier, Part, blocks_by_tier
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.reads import ColdReader, Costs, Reads
from penstock.kv.tiers.saves import SavedLease
from penstock.kv.tiers.writeback import Writeback
from penstock.kv.transfer import Group, Mover, Slots, Transfer

_MIN_LAYERS = 3  # smaller groups make smaller copies, which do not reach the link's rate
# Bytes that may be left when a step is launched after a load: about a millisecond of a fast link.
_LAST_BYTES = 48 << 20
# Bytes copied at once while others are read: enough to use the link, little enough to begin soon.
_PART_BYTES = 16 << 20


class Copy(Transfer):
    """Blocks of a load on their way from host memory into slots of the device."""

    def __init__(self, load: BlockLoad, pins: Sequence[Pin], sources: Slots, groups: Sequence[Group]) -> None:
        super().__init__(f"promote of {load.hold.owner}", groups, load.after)
        self.load = load
        self.pins = pins
        self.first = load.first + load.num_sent  # block of the prefix
        self.keys = load.keys[load.num_sent : load.num_sent + len(sources)]
        self.source_slots = sources
        self.dest_slots = np.concatenate([pin.run for pin in pins])

    @property
    def overdue(self) -> bool:
        return not self.settled and time.monotonic() > self.load.deadline_s


class BlockLoad(Reads):
    """Implements `contract.Load`: reads from cold tiers, if any, then copies to the device. It may end short;
    blocks before the first missing one are usable.

    The hold that it fills may end first. Then nothing more is copied, and reads in flight still land in host
    memory.
    """

    def __init__(
        self,
        hold: Hold,
        first: int,
        num_blocks: int,
        keys: Sequence[bytes],
        after: Sequence[Fence],
        deadline_s: float,
    ) -> None:
        super().__init__(f"load of {hold.owner}", first, num_blocks, keys, deadline_s)
        self.hold = hold
        self.num_blocks = num_blocks
        self.after = tuple(after)  # fences of the slots' earlier uses
        self.layered = False
        self.is_cold = False  # some blocks come from cold tiers
        # a few blocks of a context that no request waits for; its time says nothing about the link
        self.is_part = False
        self.sources: Slots = np.full(num_blocks, ABSENT)  # host slots
        # blocks that a fetch is reading already, by key
        self.awaited: dict[bytes, tuple[int, StoreGroup]] = {}
        self.copies: list[Copy] = []
        self.num_sent = 0  # blocks handed to copies
        self.is_short = False  # the hold knows that the load ended short

    # ------------------------------------------------------------------------------------------ contract.Load

    @property
    def arrivals(self) -> tuple[Arrival, ...] | None:
        if self.num_sent < self.num_blocks:
            return None
        arrivals = [copy.arrivals for copy in self.copies if not copy.settled]
        return None if None in arrivals else tuple(arrival for some in arrivals for arrival in some or ())

    @property
    def settled(self) -> bool:
        """Over for its request. Reads after the first missing block may still go on."""
        return self.num_sent == self.limit and all(copy.settled for copy in self.copies)

    def error(self) -> BaseException | None:
        if self.limit < self.num_blocks:
            return TransferFailed(f"{self.limit} of {self.num_blocks} blocks came for {self.hold.owner}")
        return next((error for copy in self.copies if (error := copy.error()) is not None), None)

    def nearly_landed(self) -> bool:
        arrivals = self.arrivals
        # copies of one lane end in order
        return arrivals is not None and (len(arrivals) < 2 or arrivals[-2].fence.passed())

    @property
    def num_landed(self) -> int:
        num = 0
        for copy in self.copies:
            if copy.error() is not None or not copy.settled:
                break
            num += copy.num_blocks
        return num

    # -------------------------------------------------------------------------------------------- for `Loads`

    @property
    def ended(self) -> bool:
        return self.hold.ended

    @property
    def over(self) -> bool:
        return super().over and self.settled

    @property
    def num_ready(self) -> int:
        """Leading blocks that are in host memory."""
        absent = np.flatnonzero(self.sources[self.num_sent : self.limit] == ABSENT)
        return self.num_sent + int(absent[0]) if absent.size else self.limit

    def covers(self, number: int, key: bytes) -> bool:
        """Whether it loads block `number` of a prefix, with that `key`."""
        return 0 <= number - self.first < len(self.keys) and self.keys[number - self.first] == key

    def touches(self, slots: frozenset[int] | None) -> bool:
        """Whether it will copy blocks into one of these device slots. None: whether it is not over. Blocks
        already sent belong to their copies. Nothing is sent into the slots of an ended table."""
        if slots is None:
            return not self.over
        hold = self.hold
        return not hold.ended and not slots.isdisjoint(
            hold.first(self.first + self.limit)[self.first + self.num_sent :].tolist()
        )

    def wait_reads(self, deadline_s: float) -> None:
        super().wait_reads(deadline_s)
        for _, reading in self.awaited.values():
            reading.wait_over(deadline_s)

    def came(self, block: int, slot: int) -> None:
        self.sources[block] = slot

    def cut(self, limit: int) -> None:
        """Copies in flight go on."""
        self.limit = max(self.num_sent, min(self.limit, limit))

    def forget_keys(self) -> None:
        """Its blocks get no keys on the device. Reads in flight still land in host memory under their
        keys."""
        for copy in self.copies:
            copy.keys = ()
        if not self.is_cold:
            self.keys = ()


class Loads:
    """Fills device slots from the host tier and the cold tiers of `writeback`."""

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
        self.costs = Costs(mover, writeback.cold, layout, limits)
        self.reader = ColdReader(host, writeback, self.costs, self._share)
        self.in_flight: dict[Hold, BlockLoad] = {}  # by the hold whose slots they fill
        self._pool = pool
        self._host = host
        self._writeback = writeback
        self._layout = layout
        self._part_blocks = max(1, _PART_BYTES // layout.block_bytes)
        self._whole = [Group((0, layout.num_layers))]

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def reads(self) -> Sequence[Reads]:
        """Loads and fetches that are not over."""
        return [*self.in_flight.values(), *self.reader.fetches]

    def is_loading(self, hold: Hold) -> bool:
        load = self.in_flight.get(hold)
        return load is not None and not load.settled

    def is_coming(self, number: int, key: bytes) -> bool:
        """Whether block `number` of a prefix, which has `key`, is on its way to the device and not late."""
        return any(
            load.covers(number, key) and not load.over and not load.overdue
            for load in self.in_flight.values()
        )

    def num_abandoned(self, late: bool) -> int:
        """Device slots that only copies hold, since their tables have ended. Counts `late` copies, or the
        others."""
        copies = (
            copy for load in self.in_flight.values() if load.ended for copy in load.copies if not copy.settled
        )
        return sum(copy.num_blocks for copy in copies if copy.overdue == late)

    def pins(self) -> set[Pin]:
        """Pins on device slots for transfers in flight."""
        return {pin for copy in self.mover.flying for pin in copy.pins}

    # ------------------------------------------------------------------------------------------------ looking

    def lease(
        self, keys: Sequence[bytes], owner: str, first: int, answered: Sequence[Part] = ()
    ) -> HostLease | None:
        """Find and want the blocks of `keys` in colder tiers, from number `first` on. None if there are none
        and no remote store was asked. For any thread. A remote store is asked without waiting, and only as
        long as computing would take. Its `answered` findings for an earlier lease of the same keys are
        reused."""
        if not self._writeback.cold:
            # Blocks after a gap are useless if nothing fills the gap, and a search takes time proportional to
            # the prefix.
            return (
                self._host.lease(keys, owner, first)
                if self._host.has_each(keys[first : first + 1])[0]
                else None
            )
        lease = self._host.lease(keys, owner, first)
        missing = (
            list(range(first, len(keys)))
            if lease is None
            else (first + np.flatnonzero(lease.slots[first:] == ABSENT)).tolist()
        )
        if not missing:
            return lease
        try:
            patience_s = self.costs.patience_s(missing[0], len(missing))
            parts = self.reader.find(keys, missing, patience_s, answered)
        except BaseException:
            if lease is not None:
                lease.end()  # no other code has this lease
            raise
        if parts and lease is None:
            lease = self._host.lease(keys, owner, first, even_empty=True)
        if lease is not None:
            lease.parts = parts
        return lease

    def worth(self, lease: HostLease, depth: int, compute_from: int | None = None) -> int:
        """Number of blocks of `lease` after `depth` others that are worth loading: up to the next tier, or
        all up to a gap. `compute_from`: as in `Costs.worth`."""
        if isinstance(lease, SavedLease) and not self.mover.is_late():
            return lease.num_from(depth)
        return self.costs.worth(lease.runs_from(depth), depth, compute_from)

    # -------------------------------------------------------------------------------------------------- begin

    @property
    def deadline_s(self) -> float:
        """For a load or fetch that begins now."""
        return time.monotonic() + self.costs.limits.load_deadline_s

    def begin(
        self,
        hold: Hold,
        first: int,
        lease: HostLease,
        keys: Sequence[bytes],
        after: Sequence[Fence],
        num_next: int,
    ) -> BlockLoad:
        """Fill the slots of `hold` from number `first` on with the same blocks of `lease`, the first of which
        have `keys`. The slots may be written after `after`. Blocks in host memory are copied; colder ones are
        read first. The lease ends with the load. If this raises, the lease is unchanged."""
        if hold in self.in_flight:
            raise InvariantBroken(f"{hold.owner!r} loads blocks while others are on their way to its table")
        num_blocks = hold.num_slots - first
        tier, num_same = next(iter(lease.runs_from(first)), (HOST, 0))
        kept = lease.take()
        if kept is None:
            raise InvariantBroken(
                f"the host tier has no lease of {lease.owner!r}: it has expired, or was used"
            )
        load = BlockLoad(hold, first, num_blocks, keys, after, self.deadline_s)
        load.kept = kept
        load.is_cold = bool(self._writeback.cold) and (tier != HOST or num_same < num_blocks)
        try:
            if load.is_cold:
                self._begin_reads(load, lease)
            else:
                self._begin_copy(load, lease, num_next >= self.costs.limits.overlap_tokens)
        except BaseException:
            if hold not in self.in_flight:
                lease.keep(kept)
            raise
        return load

    def _begin_copy(self, load: BlockLoad, lease: HostLease, layered: bool) -> None:
        """All blocks are in host memory."""
        sources = lease.slots[load.first : load.first + load.num_blocks]
        if len(sources) != load.num_blocks or ABSENT in sources:
            raise InvariantBroken(
                f"the lease of {lease.owner!r} does not have {load.num_blocks} blocks from {load.first} on"
            )
        load.sources, load.layered = sources, layered
        self._send(load, load.num_blocks, self._groups(load.num_blocks, layered))
        self.costs.link.note_try()
        self._writeback.used(load.keys)

    def begin_whole(self, holds: Sequence[Hold], kept: Pin, after: Sequence[Fence]) -> BlockLoad:
        """Fill the slots of `holds`, one hold after the other, with the whole blocks of an existing context
        that `kept` protects; no step begins on single layers. If this raises, nothing is kept."""
        load = BlockLoad(holds[0], 0, len(kept.run), (), after, self.deadline_s)
        load.kept, load.sources, load.is_part = [kept], kept.run.astype(np.int64), True
        pins = [self._pool.pin(hold.run, hold.owner) for hold in holds]
        try:
            self._submit(Copy(load, pins, load.sources, self._whole))
        except BaseException:
            kept.end()
            raise
        return load

    def _send(self, load: BlockLoad, end: int, groups: Sequence[Group]) -> None:
        """Copy its unsent blocks up to `end`."""
        first = load.num_sent
        run = load.hold.first(load.first + end)[load.first + first :]
        pin = self._pool.pin(run, load.hold.owner)
        self._submit(Copy(load, [pin], load.sources[first:end].copy(), groups))

    def _submit(self, copy: Copy) -> None:
        """If this raises, the copy's device slots have been given back."""
        try:
            self.mover.submit(copy)
        except BaseException:
            for pin in copy.pins:
                pin.end()
            raise
        load = copy.load
        load.copies.append(copy)
        load.num_sent += copy.num_blocks
        self.in_flight[load.hold] = load

    def _groups(self, num_blocks: int, layered: bool) -> list[Group]:
        """By layers if a step can start on the first. Otherwise whole blocks, which is faster, with the last
        block apart: a step may be launched when the others have landed."""
        num_layers = self._layout.num_layers
        if layered:
            num = max(1, num_layers // _MIN_LAYERS)
            return [Group(layers) for layers in pairwise(num_layers * i // num for i in range(num + 1))]
        last = max(1, _LAST_BYTES // self._layout.block_bytes)
        if num_blocks <= last:
            return self._whole
        return [
            Group((0, num_layers), slice(0, num_blocks - last)),
            Group((0, num_layers), slice(num_blocks - last, num_blocks)),
        ]

    def _begin_reads(self, load: BlockLoad, lease: HostLease) -> None:
        """Some blocks are colder than host memory. They are read while the others are copied."""
        self.in_flight[load.hold] = load
        found = list(blocks_by_tier(lease.runs_from(load.first), load.num_blocks))
        load.cut(len(found))
        here = [block for block, tier in found if tier == HOST]
        self._writeback.used([load.keys[block] for block in here if block < len(load.keys)])
        load.sources[here] = lease.slots[load.first :][here]
        self._take_room(load, [one for one in found if one[1] != HOST])
        self._advance(load)

    def _take_room(self, load: BlockLoad, wanted: Sequence[tuple[int, str]]) -> None:
        """Take host slots for all blocks at once. If there are not enough, the load ends before the first
        block without a slot, and `_advance` gives back the device slots after it."""
        coming = self.reader.take_over({load.keys[block] for block, _ in wanted})
        slots = self._pin_each(load, [load.keys[block] for block, _ in wanted])
        absent: list[tuple[int, str]] = []
        for (block, tier), slot in zip(wanted, slots, strict=True):
            key = load.keys[block]
            if slot != ABSENT:  # it has landed since the match
                load.came(block, slot)
            elif key in coming:
                load.awaited[key] = block, coming[key]
            else:
                absent.append((block, tier))
        keys = [load.keys[block] for block, _ in absent]
        load.room = self._host.take(
            keys, [load.first + block for block, _ in absent], load.label, Displaces.ANYTHING
        )
        num = sum(i == place for i, place in enumerate(load.room.places))  # without a gap
        if num < len(absent):  # no free slot, or another request is reading the same block
            load.cut(absent[num][0])
        self.reader.queue(load, absent[:num])

    def _pin_each(self, load: BlockLoad, keys: Sequence[bytes]) -> list[int]:
        """The host slot of each key, or ABSENT; those that are here are kept for `load`."""
        slots, pin = self._host.pin_each(keys, load.label)
        load.kept += [] if pin is None else [pin]
        return slots

    def _share(self, keys: Sequence[bytes]) -> None:
        """A fetch has read these blocks or failed. Loads that wait for some of them go on, or end there."""
        for load in self.in_flight.values():
            awaited = {key: load.awaited.pop(key)[0] for key in keys if key in load.awaited}
            slots = self._pin_each(load, list(awaited))
            for block, slot in zip(awaited.values(), slots, strict=True):
                load.cut(block) if slot == ABSENT else load.came(block, slot)

    # ------------------------------------------------------------------------------------------------- settle

    def settle(self) -> Iterator[Copy]:
        """Take in copies that are over. Yields landed copies, in order, so that the caller can seal their
        blocks; the slots stay pinned meanwhile."""
        copies = [copy for copy in self.mover.settle() if isinstance(copy, Copy)]
        for copy in copies:
            if not copy.load.is_cold:
                self._end(copy.load)
            self.mover.book(copy)
            if copy.error() is None and not copy.load.is_part:
                times, num_bytes = copy.times, copy.num_blocks * self._layout.block_bytes
                unsure_s = times.settled_s - max(times.seen_s, times.first_s)
                self.costs.link.add(num_bytes, times.settled_s - times.first_s, unsure_s)
        for copy in copies:
            if copy.error() is None:
                yield copy
            else:
                # The request computes these slots instead. Its writes wait for the same fences as the copy
                # did.
                copy.load.hold.add_after(copy.load.after)
            for pin in copy.pins:
                pin.end()

    def advance(self) -> None:
        """Take in finished reads, and submit copies that are ready."""
        self.reader.advance()
        for load in self.in_flight.values():
            self._advance(load)
        for load in [load for load in self.in_flight.values() if load.over]:
            self._end(load)

    def _advance(self, load: BlockLoad) -> None:
        self.reader.read_up(load)
        if load.ended or any(copy.settled and copy.error() is not None for copy in load.copies):
            load.cut(load.num_sent)
        num_ready = load.num_ready
        num_new = num_ready - load.num_sent
        if num_new and (num_new >= self._part_blocks or num_ready == load.limit):
            try:
                self._send(load, num_ready, self._whole)
            except LaneClosed:
                load.cut(load.num_sent)
        # the slots after the limit are computed, once their earlier uses are over
        if load.settled and load.limit < load.num_blocks and not load.is_short:
            load.is_short = True
            load.hold.add_after(load.after)

    def _end(self, load: BlockLoad) -> None:
        """The load is over; its sources are no longer protected."""
        load.end_kept()
        del self.in_flight[load.hold]

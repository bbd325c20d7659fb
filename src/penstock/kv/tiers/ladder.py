"""The traffic between the device and colder tiers: what is demoted, what is promoted, what is saved for a retracted request. Owns
transfers and the pins inside them; the engine thread is its only caller, apart from `lease`.

A transfer protects both ends until its end has been seen here, in `settle`. Requests come and go meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.contract import Fence, Histogram, Lease, Traffic
from penstock.errors import InvariantBroken, TransferFailed
from penstock.kv.blocks.handles import Handle, Hold, Reservation, RunPin
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.memory.layout import BlockLayout
from penstock.kv.tiers.host import ABSENT, HostLease, HostTier, Taken
from penstock.kv.tiers.memory import HostMemory
from penstock.kv.tiers.worth import LinkRate, PrefillRate, worth_loading
from penstock.kv.transfer.mover import Group, Mover, Slots, Transfer

log = logging.getLogger(__name__)

TRANSFER_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_MIN_LAYERS = 3  # smaller groups lose the link's rate: their copies get too small
_PART_BLOCKS = 64  # that a demotion lands with in one turn
_LAST_BYTES = 48 << 20  # about a millisecond of a fast link: how much may be left when a step is launched behind a load


@dataclass(slots=True)
class TrafficCounts:
    """Totals that never fall."""

    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (from, to)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (tier, reason)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)  # from submit to settled


class _Offer(NamedTuple):
    """A run of blocks to be demoted."""

    pin: RunPin
    keys: Sequence[bytes]
    depth: int  # of the first
    fence: Fence | None


class Demotion(Transfer):
    """Sealed blocks on their way to the host, those that are not there yet. It lands in parts: no turn of the engine pays for all."""

    def __init__(self, host: HostTier, offers: Sequence[_Offer], num_layers: int) -> None:
        fences = {id(offer.fence): offer.fence for offer in offers if offer.fence is not None}
        super().__init__(f"demote of {offers[0].pin.owner}", (), tuple(fences.values()))
        self.pins = [offer.pin for offer in offers]
        self.parts: deque[Taken] = deque()  # by group, those that have not landed
        self._host = host
        self._offers = offers
        self._layers = (0, num_layers)

    def prepare(self) -> bool:
        keys = [key for offer in self._offers for key in offer.keys]
        depths = [offer.depth + i for offer in self._offers for i in range(len(offer.keys))]
        slots = np.concatenate([offer.pin.array for offer in self._offers]).astype(np.int64)
        for first in range(0, len(keys), _PART_BLOCKS):
            part = slice(first, first + _PART_BLOCKS)
            self._take(keys[part], depths[part], slots[part])
        return bool(self.parts)

    def _take(self, keys: Sequence[bytes], depths: Sequence[int], slots: Slots) -> None:
        taken = self._host.take(keys, depths, self.label)
        if taken.reservation is not None:
            self.parts.append(taken)
            self.keys = (*self.keys, *taken.keys)
            self.groups = (*self.groups, Group(self._layers, slice(self.num_blocks, self.num_blocks + len(taken.keys))))
            self.source_slots = np.concatenate((self.source_slots, slots[taken.places]))
            self.dest_slots = np.concatenate((self.dest_slots, np.array(taken.reservation.slots, np.int64)))
            self.after = (*self.after, *taken.reservation.after)

    def land_arrived(self) -> None:
        """What has come is found from now on; what has come to nothing is not."""
        for error in self.take_arrived():
            (self._host.land if error is None else self._host.drop)(self.parts.popleft())


class SavedLease(HostLease):
    """What a retracted request comes back with: its blocks with a key, and the unfinished rest for itself alone."""

    def __init__(self, tier: HostTier, owner: str, num_tokens: int) -> None:
        super().__init__(tier, owner, [], num_tokens)
        self.ready = False
        self.given_up = False

    def end(self) -> None:
        self.given_up = True  # while it is being saved the transfer has its slots; they are given back when that is over
        super().end()


class Retraction(Transfer):
    """All of a request's KV on its way to the host, as far as it is not there."""

    def __init__(self, host: HostTier, pin: RunPin, keys: Sequence[bytes], lease: SavedLease, groups: Sequence[Group]) -> None:
        super().__init__(f"retract of {pin.owner}", groups)
        self.pins = [pin]
        self.lease = lease
        self.wanted = keys  # of its first blocks
        self.private: Reservation | None = None
        self.taken = Taken([], [], [])
        self.kept: Handle | None = None  # pin on what was there already
        self._host = host

    def prepare(self) -> bool:
        slots = self.pins[0].array.astype(np.int64)
        num_keyed = len(self.wanted)
        _, self.kept = self._host.pin_each(self.wanted, self.label)
        self.taken = taken = self._host.take(self.wanted, range(num_keyed), self.label)
        self.private = self._host.take_private(len(slots) - num_keyed, self.label) if len(slots) > num_keyed else None
        places, dests = list(taken.places), list(taken.reservation.slots if taken.reservation else ())
        after = list(taken.reservation.after if taken.reservation else ())
        if self.private is not None:
            places += range(num_keyed, len(slots))
            dests += self.private.slots
            after += self.private.after
        self.source_slots, self.dest_slots = slots[places], np.array(dests, np.int64)
        self.keys = taken.keys
        self.after = (*self.after, *after)
        return bool(places)


class Promotion(Transfer):
    """Blocks on their way into the slots of a table."""

    def __init__(self, pin: RunPin, sources: Sequence[int], kept: Sequence[Handle], groups: Sequence[Group], layered: bool) -> None:
        super().__init__(f"promote of {pin.owner}", groups)
        self.pins = [pin]
        self.kept = kept  # the protection of the sources
        self.source_slots = np.array(sources, np.int64)
        self.dest_slots = pin.array.astype(np.int64)
        self._layered = layered

    @property
    def layered(self) -> bool:
        return self._layered


class Ladder:
    """Device pool on one side, the host tier on the other, a mover each way."""

    def __init__(self, pool: BlockPool, host: HostTier, movers: tuple[Mover, Mover], layout: BlockLayout, limits: LadderLimits) -> None:
        self.host = host
        self.counts = TrafficCounts()
        self.prefill = PrefillRate()
        self.link = LinkRate()
        self._pool = pool
        self.promoter, self.demoter = movers
        self._layout = layout
        self._limits = limits
        self._offers: list[_Offer] = []
        self._whole = [Group((0, layout.num_layers))]

    @property
    def num_in_flight(self) -> int:
        return len(self.promoter) + len(self.demoter)

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    def traffic(self) -> Traffic:
        """A snapshot; for any thread."""
        counts = self.counts
        return Traffic(
            bytes=dict(counts.bytes),
            seconds={pair: histogram.copy() for pair, histogram in list(counts.seconds.items())},
            in_flight={("host", "device"): len(self.promoter), ("device", "host"): len(self.demoter)},
            failures=dict(counts.failures),
            skipped={"full": self.host.counts.skipped_full},
            leases_open=self.host.num_leases,
        )

    def call_when_launched(self, wake: Callable[[], None]) -> None:
        self.promoter.wake = self.demoter.wake = wake

    # ------------------------------------------------------------------------------------------------------------- demote

    def offer(self, hold: Hold, first: int, keys: Sequence[bytes], fence: Fence | None) -> None:
        """Blocks `first..` of `hold` have got `keys`; `fence` lies behind the step that wrote them. `submit_saves` sends them off."""
        self._offers.append(_Offer(self._pool.pin_run(hold, first, len(keys), hold.owner), keys, first, fence))

    def submit_saves(self) -> None:
        """Send everything offered since the last call, as one transfer."""
        if self._offers:
            offers, self._offers = self._offers, []
            try:
                self.demoter.submit(Demotion(self.host, offers, self._layout.num_layers))
            except BaseException:
                for offer in offers:
                    offer.pin.end()
                raise

    def save(self, hold: Hold, num_blocks: int, keys: Sequence[bytes], num_tokens: int, fence: Fence | None) -> SavedLease:
        """Everything in the first `num_blocks` blocks of `hold`, of which the first have `keys`; `fence` covers whoever still writes."""
        pin = self._pool.pin_run(hold, 0, num_blocks, hold.owner)
        lease = SavedLease(self.host, hold.owner, num_tokens)
        transfer = Retraction(self.host, pin, keys, lease, self._whole)
        transfer.after = () if fence is None else (fence,)
        try:
            self.submit_saves()  # blocks of this request that were offered go first, so that they are known to be on their way
            self.demoter.submit(transfer)
        except BaseException:
            pin.end()
            raise
        return lease

    # ------------------------------------------------------------------------------------------------------------ promote

    def worth(self, lease: Lease, depth: int) -> int:
        """How many blocks of `lease` behind `depth` others are fetched rather than computed: all that follow without a gap, or none."""
        num_blocks = lease.num_from(depth)
        if self.promoter.is_late():
            return 0  # whatever is wrong with the tier, nobody else waits for it
        if self._limits.load_always or isinstance(lease, SavedLease):
            return num_blocks
        block = self._layout.block_bytes
        tokens = self._layout.block_tokens
        load_s = self.link.seconds((num_blocks + self.promoter.num_blocks) * block)
        compute_s = self.prefill.seconds(num_blocks * tokens, (depth + num_blocks / 2) * tokens)
        return num_blocks if worth_loading(load_s, compute_s) else 0

    def promote(self, pin: RunPin, after: Sequence[Fence], lease: HostLease, keys: Sequence[bytes], num_next: int) -> Promotion:
        """Fill the slots of `pin` with the same blocks of `lease`, of which the first have `keys`; they may be written after `after`. If
        this raises, `pin` has ended and the lease is as it was."""
        sources = lease.slots[pin.first : pin.first + pin.num_slots]
        kept = self.host.take_lease(lease)
        if kept is None or ABSENT in sources or len(sources) != pin.num_slots:
            if kept is not None:
                self.host.keep(lease, *kept)
            pin.end()
            raise InvariantBroken(f"the lease of {lease.owner!r} does not have {pin.num_slots} blocks from {pin.first} on")
        layered = num_next >= self._limits.overlap_tokens
        promotion = Promotion(pin, sources, kept, self._groups(pin.num_slots, layered), layered)
        promotion.after, promotion.keys = tuple(after), keys
        promotion.deadline_s = time.monotonic() + self._limits.load_deadline_s
        try:
            self.promoter.submit(promotion)
        except BaseException:
            self.host.keep(lease, *kept)
            pin.end()
            raise
        return promotion

    def _groups(self, num_blocks: int, layered: bool) -> list[Group]:
        """By layers where a step can start on the first; otherwise whole blocks, which is faster, the last of them apart: a step may be
        launched when the others have come."""
        num_layers = self._layout.num_layers
        if layered:
            num = max(1, num_layers // _MIN_LAYERS)
            return [Group(layers) for layers in pairwise(num_layers * i // num for i in range(num + 1))]
        last = max(1, _LAST_BYTES // self._layout.block_bytes)
        if num_blocks <= last:
            return [Group((0, num_layers))]
        return [Group((0, num_layers), slice(0, num_blocks - last)), Group((0, num_layers), slice(num_blocks - last, num_blocks))]

    # ------------------------------------------------------------------------------------------------------------- settle

    def settle(self) -> list[Promotion]:
        """Take in what is over: demotions become visible, pins end. Promotions are returned, for whoever knows their tables; their
        destination is still pinned then, and `end` unpins it."""
        self.host.expire()
        if isinstance(first := self.demoter.first(), Demotion):
            first.land_arrived()
        for transfer in self.demoter.settle():
            if isinstance(transfer, Demotion):
                self._end_demotion(transfer)
            elif isinstance(transfer, Retraction):
                self._end_retraction(transfer)
            self._book(transfer, "device", "host")
        promotions = [transfer for transfer in self.promoter.settle() if isinstance(transfer, Promotion)]
        for promotion in promotions:
            self.host.end_handles(promotion.kept)
            self._book(promotion, "host", "device")
            if promotion.error() is None:
                seconds = promotion.settled_s - promotion.first_s, promotion.settled_s - max(promotion.seen_s, promotion.first_s)
                self.link.add(promotion.num_blocks * self._layout.block_bytes, *seconds)
        return promotions

    def _end_demotion(self, transfer: Demotion) -> None:
        transfer.land_arrived()
        while transfer.parts:  # never enqueued
            self.host.drop(transfer.parts.popleft())
        for pin in transfer.pins:
            pin.end()

    def _end_retraction(self, transfer: Retraction) -> None:
        lease, landed = transfer.lease, transfer.error() is None
        (self.host.land if landed else self.host.drop)(transfer.taken)
        slots, pin = self.host.pin_each(transfer.wanted, transfer.label)
        private = transfer.private
        self.host.keep(lease, *(handle for handle in (transfer.kept, pin, private) if handle is not None))
        lease.slots = [*slots, *(private.slots if private is not None and landed else ())]
        lease.ready = True
        if lease.given_up:
            self.host.end_lease(lease)
        for run in transfer.pins:
            run.end()

    def _book(self, transfer: Transfer, source: str, dest: str) -> None:
        error = transfer.error()
        if isinstance(error, InvariantBroken):
            raise error  # a defect of ours, not a tier's: nobody carries on
        if error is not None:
            self.counts.failures["host", "copy" if isinstance(error, TransferFailed) else type(error).__name__] += 1
            log.warning("%s failed, and its blocks are computed instead: %s", transfer.label, error)
            return
        self.counts.bytes[source, dest] += transfer.num_blocks * self._layout.block_bytes
        if transfer.num_blocks:
            histogram = self.counts.seconds.setdefault((source, dest), Histogram(TRANSFER_BOUNDS_S))
            histogram.add(transfer.settled_s - transfer.submitted_s)

    # ---------------------------------------------------------------------------------------------------------------- end

    def newest_save(self) -> Transfer | None:
        """The demotion submitted last, where one is in flight: when it is settled, so are all before it."""
        flying = self.demoter.in_flight()
        return flying[-1] if flying else None

    def drain(self, timeout_s: float, slots: Sequence[int] | None = None) -> None:
        """Block until no transfer is in flight that touches one of the device's `slots` (None: any); those not yet launched included."""
        wanted = None if slots is None else frozenset(slots)

        def concerned(transfer: Transfer) -> bool:
            pins = transfer.pins if isinstance(transfer, Demotion | Retraction | Promotion) else ()
            return wanted is None or any(not wanted.isdisjoint(pin.slots) for pin in pins)

        self.submit_saves()
        deadline_s = time.monotonic() + timeout_s
        for mover in (self.demoter, self.promoter):
            mover.drain(max(0.0, deadline_s - time.monotonic()), concerned)

    def close(self, timeout_s: float | None) -> None:
        """After `drain` and `settle`."""
        self.demoter.close(timeout_s)
        self.promoter.close(timeout_s)
        self.host.close()
        if self._limits.memory is not None:
            self._limits.memory.close()


@dataclass(frozen=True, slots=True)
class LadderLimits:
    """What depends on the device and on the configuration."""

    overlap_tokens: int  # a step over at least so many tokens starts on the first layers of a promotion; shorter ones wait for all of it
    load_deadline_s: float
    load_always: bool = False  # also where computing seems faster
    memory: HostMemory | None = None  # closed with the ladder

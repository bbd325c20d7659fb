"""The traffic between the device and colder tiers: what is demoted, what is promoted, what is saved for a retracted request. Owns
transfers and the pins inside them; the engine thread is its only caller, apart from `lease`.

A transfer protects both ends until its end has been seen here, in `settle`. Requests come and go meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from penstock.contract import Fence, Lease
from penstock.errors import InvariantBroken, LaneClosed, TransferFailed
from penstock.figures import Histogram, Traffic
from penstock.kv.blocks.handles import Hold, Pin, RunPin
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import as_run
from penstock.kv.blocks.table import BlockTable
from penstock.kv.memory.host import HostMemory
from penstock.kv.memory.layout import BlockLayout
from penstock.kv.tiers.behind import Behind
from penstock.kv.tiers.cold import ColdTier
from penstock.kv.tiers.host import ABSENT, Displaces, HostLease, HostTier, Part
from penstock.kv.tiers.loads import Fetch, Haul, Promotion, Reads
from penstock.kv.tiers.policy import LinkRate, PrefillRate, TierRun, choose
from penstock.kv.tiers.saves import Demotion, Offer, Retraction, SavedLease
from penstock.kv.transfer.mover import Group, Mover, Transfer

log = logging.getLogger(__name__)

TRANSFER_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_MIN_LAYERS = 3  # smaller groups lose the link's rate: their copies get too small
_PATIENCE_S = 1.0  # with a store that is asked what it has, at most
_SAVE_PATIENCE_S = 5.0  # at most: in as long a prefill could fill most of a device with blocks that wait to be saved
_MOVE_BLOCKS = 512  # that leave the device together: the first are free for others while later ones are copied
_LAST_BYTES = 48 << 20  # about a millisecond of a fast link: how much may be left when a step is launched behind a load


@dataclass(slots=True)
class TrafficCounts:
    """Totals that never fall."""

    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (from, to)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (tier, reason)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)  # from submit to settled
    saves_late: int = 0  # blocks that were not saved because one before them was overdue


class Ladder:
    """Device pool on one side, the host tier on the other, a mover each way; and what lies behind the host tier, where there is some."""

    def __init__(self, pool: BlockPool, host: HostTier, movers: tuple[Mover, Mover], layout: BlockLayout, limits: LadderLimits) -> None:
        self.host = host
        self.behind: Behind | None = None
        self.counts = TrafficCounts()
        self.prefill = PrefillRate()
        self.link = LinkRate(clock=time.monotonic)
        self._pool = pool
        self.promoter, self.demoter = movers
        self._layout = layout
        self._limits = limits
        self._offers: list[Offer] = []
        self._num_moving = 0  # blocks of the device that are on their way to host memory to make room
        self._whole = [Group((0, layout.num_layers))]

    @property
    def num_in_flight(self) -> int:
        return len(self.promoter) + len(self.demoter)

    @property
    def look_again_s(self) -> float:
        return min(self.promoter.look_again_s(), self.demoter.look_again_s())

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    @property
    def cold_tiers(self) -> dict[str, ColdTier]:
        """Those behind the host tier, hottest first."""
        return {} if self.behind is None else self.behind.tiers

    def put_behind(self, behind: Behind) -> None:
        """Called once, before the ladder is used."""
        self.behind = behind
        behind.send, behind.worth = self._send_part, self._worth

    def traffic(self) -> Traffic:
        """A snapshot; for any thread."""
        counts = self.counts
        traffic = Traffic(
            bytes=dict(counts.bytes),
            seconds={pair: histogram.copy() for pair, histogram in list(counts.seconds.items())},
            in_flight={("host", "device"): len(self.promoter), ("device", "host"): len(self.demoter)},
            failures=dict(counts.failures),
            skipped={"full": self.host.counts.skipped_full, "late": counts.saves_late},
            postponed=self.host.counts.postponed,
            leases_open=self.host.num_leases,
        )
        for tier in self.cold_tiers.values():
            tier.report(traffic)
        return traffic

    def call_when_launched(self, wake: Callable[[], None]) -> None:
        self.promoter.wake = self.demoter.wake = wake
        for tier in self.cold_tiers.values():
            tier.wake = wake

    # ------------------------------------------------------------------------------------------------------------- demote

    def offer(self, hold: Hold, first: int, keys: Sequence[bytes], fence: Fence | None) -> None:
        """Blocks `first..` of `hold` have got `keys`; `fence` lies behind the step that wrote them. `submit_saves` sends them off."""
        pin = self._pool.pin_run(hold, first, len(keys), hold.owner)
        self._offers.append(Offer(pin, keys, range(first, first + len(keys)), () if fence is None else (fence,)))

    def submit_saves(self) -> None:
        """Send everything offered since the last call, as one transfer. Not while one before it is overdue: what is behind it would keep
        its slots for as long, until the device has none left."""
        offers, self._offers = self._offers, []
        if not offers:
            return
        if self.demoter.is_late():
            self.counts.saves_late += sum(len(offer.keys) for offer in offers)
            _end_pins(offers)
            return
        try:
            self._send_down(Demotion(self.host, offers, self._layout.num_layers, self._displaced_by_saves))
        except BaseException:
            _end_pins(offers)
            raise

    @property
    def _displaced_by_saves(self) -> Displaces:
        """Where a disk or a store is to have every block, nobody who waits keeps one from it: they have what is displaced."""
        if self.postpones:
            return Displaces.NOTHING
        return Displaces.UNWANTED if self.behind is None else Displaces.ANYTHING

    @property
    def postpones(self) -> bool:
        """Whether blocks stay on the device alone while host memory is full, and are saved when their room there is needed: device and
        host memory are one capacity then. Not where a disk or a store is to have every block."""
        return self._limits.postpones and self.behind is None

    def make_room(self, num_blocks: int, floor: int, tables: Iterable[BlockTable], num_more: int = 0) -> bool:
        """Whether the next `num_blocks` slots of the device can be drawn without losing a block that only the device has. Where not, such
        blocks are being moved to host memory when this returns, with those of the `num_more` that would be next; `floor` slots stay
        available meanwhile. `tables` are open."""
        pool = self._pool
        num_evicted = min(num_blocks, pool.num_available) - pool.num_free
        if num_evicted <= 0 or self.demoter.is_late():
            return True
        if self._num_moving:
            return False  # what it frees comes first
        alone = self._alone(num_evicted)
        if alone and num_more:
            alone = self._alone(min(num_evicted + num_more, pool.num_available - pool.num_free))
        alone = alone[: max(0, pool.num_available - floor)]
        if not alone:
            return True
        if self.postpones:
            self._give_way(len(alone) - self.host.num_free, tables)
        for first in range(0, len(alone), _MOVE_BLOCKS):
            self._move(alone[first : first + _MOVE_BLOCKS])
        return False

    def num_safe(self, num_slots: int) -> int:
        """How many of the next `num_slots` to be evicted go before the first whose block only the device has."""
        absent = self.host.absent(self._pool.keys_of(self._pool.coldest_slots(num_slots)))
        return next((place for place, is_alone in enumerate(absent) if is_alone), len(absent))

    def _alone(self, num_slots: int) -> list[int]:
        """Those of the next `num_slots` to be evicted whose blocks only the device has."""
        slots = self._pool.coldest_slots(num_slots)
        return [slot for slot, absent in zip(slots, self.host.absent(self._pool.keys_of(slots)), strict=True) if absent]

    def _give_way(self, num_blocks: int, tables: Iterable[BlockTable]) -> None:
        """Have host memory forget up to `num_blocks` that requests hold on the device: they are saved again when they have to leave it."""
        for table in tables:
            if num_blocks <= 0:
                return
            num = self.host.give_way(table.sealed_keys[table.num_alone :], num_blocks)
            num_blocks -= num
            if num_blocks > 0:
                table.num_alone = table.num_keyed

    def _move(self, slots: Sequence[int]) -> None:
        run = as_run(sorted(slots))
        fences = self._pool.last_use(run)
        pin = self._pool.pin(run, "room on the device")
        try:
            offer = Offer(pin, self._pool.keys_of(pin.slots), self._pool.depths_of(pin.slots), fences)
            self._send_down(Demotion(self.host, [offer], self._layout.num_layers, Displaces.UNWANTED, moves=True))
        except BaseException:
            pin.end()
            raise
        self._num_moving += len(slots)

    def save(self, hold: Hold, num_blocks: int, keys: Sequence[bytes], num_tokens: int, fence: Fence | None) -> SavedLease | None:
        """Everything in the first `num_blocks` blocks of `hold`, of which the first have `keys`; `fence` covers whoever still writes. None
        while a save before it is overdue."""
        self.submit_saves()  # blocks of this request that were offered go first, so that they are known to be on their way
        if self.demoter.is_late():
            self.counts.saves_late += num_blocks - len(keys)  # the others were counted when they were offered
            return None
        pin = self._pool.pin_run(hold, 0, num_blocks, hold.owner)
        lease = SavedLease(self.host, hold.owner, num_tokens)
        transfer = Retraction(self.host, pin, keys, lease, self._whole)
        transfer.after = () if fence is None else (fence,)
        try:
            self._send_down(transfer)
        except BaseException:
            pin.end()
            raise
        lease.wait_until_s = transfer.deadline_s
        return lease

    def _send_down(self, transfer: Transfer) -> None:
        transfer.deadline_s = time.monotonic() + min(_SAVE_PATIENCE_S, self._limits.load_deadline_s)
        self.demoter.submit(transfer)

    # ------------------------------------------------------------------------------------------------------------ promote

    def lease(self, keys: Sequence[bytes], owner: str, first: int, answered: Sequence[Part] = ()) -> HostLease | None:
        """Find, and want, what colder tiers have of `keys` from number `first` on; None where that is nothing and nobody far was asked. For
        any thread: a store far away is asked, not waited for, and only for as long as computing would take. What it has `answered` to
        an earlier lease of the same keys it is not asked again."""
        behind = self.behind
        if behind is None and not self.host.has(keys[first]):
            return None  # what lies behind a gap is of no use where nothing fills it, and looking for it takes as long as the prefix is
        lease = self.host.lease(keys, owner, first, behind is not None)
        if lease is None or behind is None:
            return lease
        missing = (first + np.flatnonzero(lease.slots[first:] == ABSENT)).tolist()
        if missing:
            try:
                lease.parts = behind.find(keys, missing, self._patience_s(missing), answered)
            except BaseException:
                lease.end()  # nobody else knows of it
                raise
        if lease.parts or len(missing) < len(keys) - first:
            return lease
        lease.end()
        return None

    def _patience_s(self, missing: Sequence[int]) -> float:
        """With a store that is asked for these blocks."""
        tokens = self._layout.block_tokens
        compute_s = self.prefill.seconds(len(missing) * tokens, (missing[0] + len(missing) / 2) * tokens)
        return _PATIENCE_S if compute_s is None or self._limits.load_always else min(_PATIENCE_S, compute_s)

    def worth(self, lease: Lease, depth: int) -> int:
        """How many blocks of `lease` behind `depth` others are fetched rather than computed: up to where another tier begins, or all
        that follow without a gap."""
        if isinstance(lease, SavedLease) and not self.promoter.is_late():
            return lease.num_from(depth)
        return self._worth(lease.runs_from(depth), depth)

    def _worth(self, runs: Sequence[tuple[str, int]], depth: int) -> int:
        if self.promoter.is_late():
            return 0  # whatever is wrong with the tier, nobody else waits for it
        if self._limits.load_always:
            return sum(num_blocks for _, num_blocks in runs)
        block, tokens = self._layout.block_bytes, self._layout.block_tokens
        pieces: list[TierRun] = []
        for tier, num_blocks in runs:
            cold = self.cold_tiers.get(tier)
            if cold is None:
                load_s = self.link.seconds((num_blocks + self.promoter.num_blocks) * block)
            elif cold.usable:
                load_s = cold.rate.seconds(num_blocks * block + cold.queued_read_bytes)
            else:
                break
            pieces.append(TierRun(num_blocks, load_s))
        return choose(pieces, lambda first, num: self.prefill.seconds(num * tokens, (depth + first + num / 2) * tokens))

    def promote(self, pin: RunPin, after: Sequence[Fence], lease: HostLease, keys: Sequence[bytes], num_next: int) -> Promotion:
        """Fill the slots of `pin` with the same blocks of `lease`, of which the first have `keys`; they may be written after `after`. If
        this raises, `pin` has ended and the lease is as it was."""
        kept = self.host.take_lease(lease)
        sources = lease.slots[pin.first : pin.first + pin.num_slots]
        if kept is None or ABSENT in sources or len(sources) != pin.num_slots:
            if kept is not None:
                self.host.keep(lease, *kept)
            pin.end()
            raise InvariantBroken(f"the lease of {lease.owner!r} does not have {pin.num_slots} blocks from {pin.first} on")
        layered = num_next >= self._limits.overlap_tokens
        promotion = Promotion(pin, sources, kept, self._groups(pin.num_slots, layered), layered)
        promotion.after, promotion.keys = tuple(after), keys
        self._send_up(promotion, lambda: self.host.keep(lease, *kept))
        return promotion

    def promote_ahead(self, pin: RunPin, after: Sequence[Fence], kept: Pin, keys: Sequence[bytes], first: int) -> Promotion:
        """Fill the slots of `pin` with blocks `first..` of a prefix, which have `keys` and lie where `kept` protects them. Nobody has a
        table for them: they come as whole blocks. If this raises, both pins have ended."""
        promotion = Promotion(pin, kept.slots, [kept], self._whole, layered=False)
        promotion.after, promotion.keys, promotion.first = tuple(after), keys, first
        self._send_up(promotion, lambda: self.host.end_handles([kept]))
        return promotion

    def _send_up(self, promotion: Promotion, undo: Callable[[], None]) -> None:
        """Where this raises, its slots on the device have been given back, and `undo` was called for the others."""
        promotion.deadline_s = time.monotonic() + self._limits.load_deadline_s
        try:
            self.promoter.submit(promotion)
        except BaseException:
            undo()
            promotion.pins[0].end()
            raise
        self.link.note_try()
        if self.behind is not None:
            self.behind.used(promotion.keys)

    def haul(self, hold: Hold, first: int, lease: HostLease, keys: Sequence[bytes], after: Sequence[Fence]) -> Haul:
        """As `promote`, where some of the blocks are colder than host memory: they are read while others are promoted."""
        if self.behind is None:
            raise InvariantBroken(f"{hold.owner!r} wants blocks from behind host memory, and there is nothing")
        return self.behind.haul(hold, first, lease, keys, after, time.monotonic() + self._limits.load_deadline_s)

    def prefetch(self, keys: Sequence[bytes], owner: str, first: int, answered: Sequence[Part] = ()) -> Fetch | None:
        """Have what cold tiers have of `keys` from number `first` on read into host memory, as far as host memory lacks it and it is worth
        it; None where that is nothing, or as much is under way as may be. A store far away is asked and not waited for."""
        behind = self.behind
        if behind is None or not behind.may_fetch:
            return None
        missing = [number for number, slot in enumerate(self.host.find_each(keys[first:]), first) if slot == ABSENT]
        asked = behind.find(keys, missing, _PATIENCE_S, answered)
        return behind.fetch(owner, first, keys[first:], asked, time.monotonic() + self._limits.load_deadline_s)

    def _send_part(self, haul: Haul, first: int, end: int) -> Promotion | None:
        pin = self._pool.pin_run(haul.hold, haul.first + first, end - first, haul.hold.owner)
        part = Promotion(pin, haul.sources[first:end], (), self._whole, layered=False)
        part.after, part.keys, part.deadline_s = haul.after, haul.keys[first:end], haul.deadline_s
        try:
            self.promoter.submit(part)
        except BaseException as error:
            pin.end()
            if not isinstance(error, LaneClosed):
                raise
            return None
        return part

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
            self._land(first)
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

    def settle_behind(self) -> bool:
        """The same for what lies behind the host tier; says whether anything has changed. After the promotions of its parts have
        been taken in."""
        return self.behind is not None and self.behind.settle()

    def _land(self, transfer: Demotion) -> None:
        for taken in transfer.land_arrived():
            if self.behind is not None:
                self.behind.landed(taken.keys, taken.depths)

    def _end_demotion(self, transfer: Demotion) -> None:
        self._land(transfer)
        while transfer.parts:  # never enqueued
            self.host.drop(transfer.parts.popleft())
        for pin in transfer.pins:
            pin.end()
            if transfer.moves:  # also what somebody wants by now: it would be moved again, and whoever is next would wait for ever
                self._pool.evict_these(pin.slots)
        self._num_moving -= transfer.num_offered if transfer.moves else 0

    def _end_retraction(self, transfer: Retraction) -> None:
        lease, landed = transfer.lease, transfer.error() is None
        (self.host.land if landed else self.host.drop)(transfer.taken)
        if landed and self.behind is not None:
            self.behind.landed(transfer.taken.keys, transfer.taken.depths)
        slots, pin = self.host.pin_each(transfer.wanted, transfer.label)
        private = transfer.private
        self.host.keep(lease, *(() if private is None else (private,)))
        lease.slots = np.array([*slots, *(private.slots if private is not None and landed else ())], np.int64)
        self.host.want_saved(lease, len(slots))
        self.host.end_handles([handle for handle in (transfer.kept, pin) if handle is not None])
        lease.saving = False
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

    def is_touched(self, slots: Sequence[int] | None = None) -> bool:
        """Whether anything that was taken on, launched or not, may still touch one of the device's `slots` (None: any)."""
        wanted = None if slots is None else frozenset(slots)
        flying = any(transfer.touches(wanted) for mover in (self.demoter, self.promoter) for transfer in mover.in_flight())
        return flying or any(reads.touches(wanted) for reads in self._reads)

    def drain(self, timeout_s: float, slots: Sequence[int] | None = None) -> None:
        """Block until every transfer under way that touches one of the device's `slots` (None: any) is over, and so is what hauls into
        them are reading: the next `settle` sends that on. Without `slots` also until the lanes of cold tiers have nothing to do: fetches
        touch host memory alone."""
        wanted = None if slots is None else frozenset(slots)
        self.submit_saves()
        deadline_s = time.monotonic() + timeout_s
        for mover in (self.demoter, self.promoter):
            mover.drain(max(0.0, deadline_s - time.monotonic()), lambda transfer: transfer.touches(wanted))
        for reads in self._reads:
            if reads.touches(wanted):
                reads.wait_reads(deadline_s)
        if slots is None:
            for tier in self.cold_tiers.values():
                tier.drain(max(0.0, deadline_s - time.monotonic()))

    @property
    def _reads(self) -> Sequence[Reads]:
        return () if self.behind is None else self.behind.reads

    def check(self) -> None:
        """Raises where a slot of the device is pinned for something that `drain` does not know."""
        known = {pin for offer in self._offers for pin in (offer.pin,)} | {
            pin for mover in (self.demoter, self.promoter) for transfer in mover.in_flight() for pin in transfer.pins
        }
        if unknown := [str(pin) for pin in self._pool.pins() if pin not in known]:
            raise InvariantBroken(f"nothing under way has these pins of the device: {', '.join(unknown)}")
        self.host.check()
        if self.behind is not None:
            self.behind.check()

    def close(self, timeout_s: float | None) -> None:
        """After `drain` and `settle`."""
        self.demoter.close(timeout_s)
        self.promoter.close(timeout_s)
        for tier in self.cold_tiers.values():
            tier.close(timeout_s)
        self.host.close()
        if self._limits.memory is not None:
            self._limits.memory.close()


def _end_pins(offers: Sequence[Offer]) -> None:
    for offer in offers:
        offer.pin.end()


@dataclass(frozen=True, slots=True)
class LadderLimits:
    """What depends on the device and on the configuration."""

    overlap_tokens: int  # a step over at least so many tokens starts on the first layers of a promotion; shorter ones wait for all of it
    load_deadline_s: float
    load_always: bool = False  # also where computing seems faster
    postpones: bool = False  # blocks that the device keeps need not be in a full host memory as well
    memory: HostMemory | None = None  # closed with the ladder

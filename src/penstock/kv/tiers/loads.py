"""Blocks on their way up: from host memory to the device, and from cold tiers into host memory, as part of a
load or ahead of any request. Owns every load and the host slots that it reads into. Only the engine thread
calls it, except `lease`.

    cold tiers asked -> host slots taken -> blocks read into them, group by group -> copied to the device in
    parts, the first while later ones are being read; or left in the host tier, if there is no table yet

Blocks that host memory has need no reading: such a load is one copy. All host slots of a load are taken
before the first byte moves, so no load waits for slots while it holds some.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from penstock.contract import Arrival, Fence, Lease
from penstock.errors import InvariantBroken, LaneClosed, TransferFailed
from penstock.kv.blocks.handles import Handle, Hold, Pin
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.calls import StoreGroup
from penstock.kv.tiers.cold import ColdTier, Finding
from penstock.kv.tiers.host import ABSENT, HOST, Displaces, HostLease, HostTier, Part, Taken, runs_of, whose
from penstock.kv.tiers.policy import LinkRate, PrefillRate, TierLimits, TierRun, choose
from penstock.kv.tiers.saves import SavedLease, Saves
from penstock.kv.tiers.store import Outcome
from penstock.kv.transfer import Group, Mover, NoMover, Slots, Transfer

_MIN_LAYERS = 3  # smaller groups make smaller copies, which do not reach the link's rate
# Bytes that may be left when a step is launched after a load: about a millisecond of a fast link.
_LAST_BYTES = 48 << 20
_PATIENCE_S = 1.0  # longest wait for a store's answer about what it has
# Bytes copied at once while others are read: enough to use the link, little enough to begin soon.
_PART_BYTES = 16 << 20
# Groups of one load that may be in flight, so that a tier keeps reading during a long step.
_READ_AHEAD = 256
_READ_AT_ONCE = 32  # groups begun in one turn: about a millisecond
_FETCHES = 4  # at most this many at once
_FETCH_SHARE = 4  # fetches may reserve 1 / this of the host slots; saves and loads need the others
_FETCH_AHEAD_S = 0.1  # longest queue of fetches on a tier, so that a new load waits no longer
_FETCH_UNMEASURED = 2  # groups in flight while the tier's speed is unknown


class Copy(Transfer):
    """Blocks of a load on their way from host memory into slots of the device."""

    def __init__(self, load: BlockLoad, pins: Sequence[Pin], sources: Slots, groups: Sequence[Group]) -> None:
        super().__init__(f"promote of {load.hold.owner}", groups, load.after)
        self.load = load
        self.pins = pins
        self.first = load.first + load.num_sent  # block of the prefix
        self.keys = load.keys[load.num_sent : load.num_sent + len(sources)]
        self.source_slots = sources
        self.dest_slots = np.concatenate([pin.array for pin in pins]).astype(np.int64)

    @property
    def overdue(self) -> bool:
        return not self.settled and time.monotonic() > self.load.deadline_s


class Staged(NamedTuple):
    """Blocks that are read together: room for them in the host tier."""

    blocks: Sequence[int]  # of the load or fetch
    taken: Taken
    tier: ColdTier
    reading: StoreGroup
    num_emptied: int | None  # of the first cold tier when the read began; None: a reset was under way


class Reads:
    """Common to loads and fetches: blocks `first..` of a prefix, which of them are read, and the progress."""

    def __init__(
        self, label: str, first: int, num_blocks: int, keys: Sequence[bytes], deadline_s: float
    ) -> None:
        self.label = label
        self.first = first  # number of its first block in the prefix
        self.keys = keys  # of its leading blocks
        self.deadline_s = deadline_s
        self.room = Taken([], [], [])  # host slots for blocks that are not being read yet
        self.unread: deque[tuple[str, Sequence[int]]] = deque()  # (tier, blocks) of these, in order
        self.staged: deque[Staged] = deque()  # being read, in order
        self.limit = num_blocks  # blocks from here on will not arrive

    @property
    def ended(self) -> bool:
        """No further block is read. Reads in flight still land."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """It touches no slot any more."""
        return not self.staged and not self.unread

    @property
    def overdue(self) -> bool:
        """It takes longer than a request should wait. Also checked after its own request has ended: other
        requests may wait for the same reads."""
        return not self.over and time.monotonic() > self.deadline_s

    def touches(self, slots: frozenset[int] | None) -> bool:
        """Whether it will copy blocks into one of these device slots. None: whether it is not over."""
        return slots is None and not self.over

    def wait_reads(self, deadline_s: float) -> None:
        """Block until its reads in flight are over. Raises DeadlineExceeded."""
        for staged in self.staged:
            staged.reading.wait_over(deadline_s)

    def came(self, block: int, slot: int) -> None:
        """`block` is in host memory."""
        raise NotImplementedError

    def cut(self, limit: int) -> None:
        """Blocks from `limit` on failed or are not wanted."""
        self.limit = min(self.limit, limit)


class Fetch(Reads):
    """Implements `contract.Prefetch`. It may end short; blocks before the first missing one are usable.
    Landed blocks are not protected: they are ordinary blocks of the host tier."""

    def __init__(
        self, owner: str, first: int, keys: Sequence[bytes], deadline_s: float, asked: Sequence[Part]
    ) -> None:
        super().__init__(f"fetch of {owner}", first, len(keys), keys, deadline_s)
        self.asked = asked  # questions to cold tiers, until all have answered
        self.is_next = False  # its request waits for nothing else
        self.keeps = True  # blocks that are read land in the host tier
        self.num_blocks = 0  # blocks that it reads or has read
        self.num_came = 0  # blocks of these that arrived
        self.origins: dict[int, str] = {}
        self._ended = False

    @property
    def settled(self) -> bool:
        """No more blocks will arrive."""
        return self.over

    def end(self) -> None:
        """Read no further. Reads in flight still land. Idempotent. The next `settle` frees unused slots."""
        self._ended = True
        self.asked = ()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def over(self) -> bool:
        return super().over and not self.asked

    @property
    def num_reserved(self) -> int:
        """Host slots that it has taken and that are still empty."""
        return len(self.room.keys) + sum(len(staged.blocks) for staged in self.staged)

    def came(self, block: int, slot: int) -> None:
        self.num_came += 1


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
        self.kept: list[Handle] = []  # protection of the sources
        self.copies: list[Copy] = []
        self.num_sent = 0  # blocks handed to copies
        self._num_ready = 0
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
        absent = np.flatnonzero(self.sources[self._num_ready : self.limit] == ABSENT)
        self._num_ready = (
            self._num_ready + int(absent[0]) if absent.size else max(self._num_ready, self.limit)
        )
        return self._num_ready

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


def _answer_in(answered: Sequence[Part], tier: str, missing: Sequence[int]) -> Finding | None:
    """The answer of `tier` about all blocks `missing`. None if it was not asked for each of them, or has not
    answered."""
    for part in answered:
        if part.tier == tier and part.finding.ready and set(missing) <= set(part.blocks):
            there = set(part.blocks[: part.finding.num])
            return Finding(
                num=next((num for num, number in enumerate(missing) if number not in there), len(missing))
            )
    return None


class Loads:
    """Fills device slots from the tiers that `saves` writes to, and tells `saves` which blocks came into host
    memory."""

    def __init__(self, saves: Saves, mover: Mover) -> None:
        self.saves = saves
        self.host = saves.host
        self.cold = saves.cold
        self.mover = mover
        self.prefill = PrefillRate()
        self.link = LinkRate(clock=time.monotonic)
        self._part_blocks = max(1, _PART_BYTES // saves.layout.block_bytes)
        self._whole = [Group((0, saves.layout.num_layers))]
        self.in_flight: dict[Hold, BlockLoad] = {}  # by the hold whose slots they fill
        self.fetches: list[Fetch] = []  # not over

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def reads(self) -> Sequence[Reads]:
        """Loads and fetches that are not over."""
        return [*self.in_flight.values(), *self.fetches]

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
        if not self.cold and not self.host.has(keys[first]):
            # Blocks after a gap are useless if nothing fills the gap, and a search takes time proportional to
            # the prefix.
            return None
        lease = self.host.lease(keys, owner, first)
        if not self.cold:
            return lease
        missing = (
            list(range(first, len(keys)))
            if lease is None
            else (first + np.flatnonzero(lease.slots[first:] == ABSENT)).tolist()
        )
        if not missing:
            return lease
        tokens, patience_s = self.saves.layout.block_tokens, _PATIENCE_S
        compute_s = self.prefill.seconds(len(missing) * tokens, (missing[0] + len(missing) / 2) * tokens)
        if compute_s is not None and not self.saves.limits.load_always:
            patience_s = min(_PATIENCE_S, compute_s)
        try:
            parts = self.find(keys, missing, patience_s, answered)
        except BaseException:
            if lease is not None:
                lease.end()  # no other code has this lease
            raise
        if parts and lease is None:
            lease = self.host.lease(keys, owner, first, even_empty=True)
        if lease is not None:
            lease.parts = parts
        return lease

    def find(
        self, keys: Sequence[bytes], missing: Sequence[int], patience_s: float, answered: Sequence[Part] = ()
    ) -> list[Part]:
        """Ask for blocks number `missing` of `keys`, hottest tier first; each tier is asked only for blocks
        that hotter ones lack. Findings that a remote store `answered` before are reused. For any thread.
        Empty answers are returned, too, so that they are remembered."""
        parts: list[Part] = []
        for tier in self.cold.values():
            if not missing or not tier.usable:
                continue
            finding = None if tier.local else _answer_in(answered, tier.name, missing)
            if finding is None:
                finding = tier.find([keys[number] for number in missing], patience_s)
            if finding.num or not tier.local:
                parts.append(Part(tier.name, missing, finding))
            if not finding.ready:
                break  # colder tiers are asked after it has answered
            missing = missing[finding.num :]
        return parts

    def worth(self, lease: Lease, depth: int) -> int:
        """Number of blocks of `lease` after `depth` others that are worth loading: up to the next tier, or
        all up to a gap."""
        if isinstance(lease, SavedLease) and not self.mover.is_late():
            return lease.num_from(depth)
        return self._worth(lease.runs_from(depth), depth)

    def _worth(self, runs: Sequence[tuple[str, int]], depth: int) -> int:
        if self.mover.is_late():
            return 0  # a late tier gets no more requests
        if self.saves.limits.load_always:
            return sum(num_blocks for _, num_blocks in runs)
        block, tokens = self.saves.layout.block_bytes, self.saves.layout.block_tokens
        pieces: list[TierRun] = []
        for tier, num_blocks in runs:
            cold = self.cold.get(tier)
            if cold is None:
                load_s = self.link.seconds((num_blocks + self.mover.num_blocks) * block)
            elif cold.usable:
                load_s = cold.rate.seconds(num_blocks * block + cold.queued_read_bytes)
            else:
                break
            pieces.append(TierRun(num_blocks, load_s))
        return choose(
            pieces, lambda first, num: self.prefill.seconds(num * tokens, (depth + first + num / 2) * tokens)
        )

    # -------------------------------------------------------------------------------------------------- begin

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
        kept = self.host.take_lease(lease)
        if kept is None:
            raise InvariantBroken(
                f"the host tier has no lease of {lease.owner!r}: it has expired, or was used"
            )
        load = BlockLoad(hold, first, num_blocks, keys, after, self._deadline_s)
        load.kept = kept
        load.is_cold = bool(self.cold) and (tier != HOST or num_same < num_blocks)
        try:
            if load.is_cold:
                self._begin_reads(load, lease)
            else:
                self._begin_copy(load, lease, num_next >= self.saves.limits.overlap_tokens)
        except BaseException:
            if hold not in self.in_flight:
                self.host.keep(lease, *kept)
            raise
        return load

    @property
    def _deadline_s(self) -> float:
        return time.monotonic() + self.saves.limits.load_deadline_s

    def _begin_copy(self, load: BlockLoad, lease: HostLease, layered: bool) -> None:
        """All blocks are in host memory."""
        sources = lease.slots[load.first : load.first + load.num_blocks]
        if len(sources) != load.num_blocks or ABSENT in sources:
            raise InvariantBroken(
                f"the lease of {lease.owner!r} does not have {load.num_blocks} blocks from {load.first} on"
            )
        load.sources, load.layered = sources, layered
        self._submit(self._copy(load, load.num_blocks, self._groups(load.num_blocks, layered)))
        self.link.note_try()
        self.saves.used(load.keys)

    def begin_whole(self, holds: Sequence[Hold], kept: Pin, after: Sequence[Fence]) -> BlockLoad:
        """Fill the slots of `holds`, one hold after the other, with the whole blocks of an existing context
        that `kept` protects; no step begins on single layers. If this raises, nothing is kept."""
        load = BlockLoad(holds[0], 0, len(kept.run), (), after, self._deadline_s)
        load.kept, load.sources, load.is_part = [kept], np.array(kept.slots, np.int64), True
        pins = [self.saves.pool.pin_run(hold, 0, hold.num_slots, hold.owner) for hold in holds]
        try:
            self._submit(Copy(load, pins, load.sources, self._whole))
        except BaseException:
            self.host.end_handles([kept])
            raise
        return load

    def _copy(self, load: BlockLoad, end: int, groups: Sequence[Group]) -> Copy:
        """A copy of its unsent blocks up to `end`."""
        first = load.num_sent
        pin = self.saves.pool.pin_run(load.hold, load.first + first, end - first, load.hold.owner)
        return Copy(load, [pin], load.sources[first:end].copy(), groups)

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
        num_layers = self.saves.layout.num_layers
        if layered:
            num = max(1, num_layers // _MIN_LAYERS)
            return [Group(layers) for layers in pairwise(num_layers * i // num for i in range(num + 1))]
        last = max(1, _LAST_BYTES // self.saves.layout.block_bytes)
        if num_blocks <= last:
            return [Group((0, num_layers))]
        return [
            Group((0, num_layers), slice(0, num_blocks - last)),
            Group((0, num_layers), slice(num_blocks - last, num_blocks)),
        ]

    # -------------------------------------------------------------------------------------- from cold to host

    def _begin_reads(self, load: BlockLoad, lease: HostLease) -> None:
        """Some blocks are colder than host memory. They are read while the others are copied."""
        self.in_flight[load.hold] = load
        wanted: list[tuple[int, str]] = []  # blocks that are not in host memory, with their tiers
        block = 0
        for tier, num_blocks in lease.runs_from(load.first):
            run = range(block, min(block + num_blocks, load.num_blocks))
            block = run.stop
            if tier != HOST:
                wanted += ((place, tier) for place in run)
                continue
            self.saves.used(load.keys[run.start : run.stop])
            load.sources[run.start : run.stop] = lease.slots[load.first + run.start : load.first + run.stop]
        load.cut(block)
        self._take_room(load, wanted)
        self._advance(load)

    def _take_room(self, load: BlockLoad, wanted: Sequence[tuple[int, str]]) -> None:
        """Take host slots for all blocks at once. If there are not enough, the load ends before the first
        block without a slot, and `_advance` gives back the device slots after it."""
        coming = self._take_over({load.keys[block] for block, _ in wanted})
        slots, pin = self.host.pin_each([load.keys[block] for block, _ in wanted], load.label)
        if pin is not None:
            load.kept.append(pin)
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
        load.room = self.host.take(
            keys, [load.first + block for block, _ in absent], load.label, Displaces.ANYTHING
        )
        num = next(
            (i for i, (key, taken) in enumerate(zip(keys, load.room.keys, strict=False)) if key != taken),
            len(load.room.keys),
        )
        if num < len(absent):  # no free slot, or another request is reading the same block
            load.cut(absent[num][0])
        self._queue(load, absent[:num])

    def _queue(self, reads: Reads, blocks: Sequence[tuple[int, str]]) -> None:
        """`reads` has host slots for these (block, tier) pairs."""
        for tier, same in groupby(blocks, key=lambda one: one[1]):
            run, size = [block for block, _ in same], self.cold[tier].group_blocks
            reads.unread.extend((tier, run[start : start + size]) for start in range(0, len(run), size))

    def _take_over(self, wanted: set[bytes]) -> dict[bytes, StoreGroup]:
        """A load wants these blocks. Fetches of the same blocks stop, and so do all fetches if their slots
        are needed. Reads in flight are shared: returned by key."""
        coming: dict[bytes, StoreGroup] = {}
        short = self.host.num_available < len(wanted)
        for fetch in self.fetches:
            under_way = {
                key: staged.reading for staged in fetch.staged for key in staged.taken.keys if key in wanted
            }
            if short or under_way or not wanted.isdisjoint(fetch.room.keys):
                fetch.end()
                self._read_no_further(fetch)
            if fetch.keeps and not fetch.overdue:
                coming.update(under_way)
        return coming

    def _read_up(self, reads: Reads) -> None:
        while reads.staged and reads.staged[0].reading.over():
            self._take_in(reads)
        if reads.ended or reads.limit < len(reads.keys):
            self._read_no_further(reads)
        # Enough reads in flight that a tier does not idle until the next turn, and few enough that a turn
        # stays short.
        for _ in range(_READ_AT_ONCE):
            if not reads.unread or not self._may_read(reads):
                return
            name, blocks = reads.unread.popleft()
            taken = self.host.split(reads.room, len(blocks))
            if taken.reservation is None:
                raise InvariantBroken(f"the {reads.label} reads blocks that it has no room for")
            tier = self.cold[name]
            reading = tier.read(taken.keys, taken.reservation.slots, taken.reservation.after, reads.label)
            reads.staged.append(
                Staged(blocks, taken, tier, reading, None if tier.is_resetting else self.saves.num_emptied)
            )

    def _may_read(self, reads: Reads) -> bool:
        """Whether to begin one more group. A fetch does not, while the tier is busy enough."""
        if isinstance(reads, BlockLoad):
            return len(reads.staged) < _READ_AHEAD
        tier = self.cold[reads.unread[0][0]]
        queued_s = tier.rate.seconds(tier.queued_read_bytes)
        return len(reads.staged) < _FETCH_UNMEASURED if queued_s is None else queued_s < _FETCH_AHEAD_S

    def _read_no_further(self, reads: Reads) -> None:
        """Drop blocks after the limit, and all blocks if the request has ended."""
        limit = 0 if reads.ended else reads.limit
        while reads.unread and reads.unread[-1][1][-1] >= limit:
            name, blocks = reads.unread.pop()
            wanted = [block for block in blocks if block < limit]
            if wanted:
                reads.unread.append((name, wanted))
        num_wanted = sum(len(blocks) for _, blocks in reads.unread)
        if num_wanted < len(reads.room.keys):
            rest, reads.room = reads.room, self.host.split(reads.room, num_wanted)
            self.host.drop(rest)

    def _take_in(self, reads: Reads) -> None:
        """Take in the next group, which is over."""
        staged = reads.staged[0]
        outcomes = staged.reading.take_outcomes()
        # Only now: if a defect was raised above, the slots are given back at the next look.
        reads.staged.popleft()
        if isinstance(reads, Fetch) and not reads.keeps:
            outcomes = [Outcome.MISSING] * len(outcomes)
        done = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.DONE]
        slots = () if staged.taken.reservation is None else staged.taken.reservation.slots
        pin = self.host.land(staged.taken, done, reads.label)
        for place in done:
            reads.came(staged.blocks[place], slots[place])
        lost = [
            block
            for block, outcome in zip(staged.blocks, outcomes, strict=True)
            if outcome is not Outcome.DONE
        ]
        if lost:
            reads.cut(lost[0])
        keys, depths = (
            [staged.taken.keys[place] for place in done],
            [staged.taken.depths[place] for place in done],
        )
        is_there_still = staged.tier is not self.saves.first or staged.num_emptied == self.saves.num_emptied
        self.saves.landed(keys, depths, staged.tier.name if is_there_still else "")
        if isinstance(reads, BlockLoad):
            reads.kept += [] if pin is None else [pin]
        else:
            self._share(staged.taken.keys)
            self.host.end_handles([pin])  # only now: the slots of blocks just shared could be evicted

    def _share(self, keys: Sequence[bytes]) -> None:
        """A fetch has read these blocks or failed. Loads that wait for some of them go on, or end there."""
        for load in self.in_flight.values():
            awaited = {key: load.awaited.pop(key)[0] for key in keys if key in load.awaited}
            slots, pin = self.host.pin_each(list(awaited), load.label)
            if pin is not None:
                load.kept.append(pin)
            for block, slot in zip(awaited.values(), slots, strict=True):
                load.cut(block) if slot == ABSENT else load.came(block, slot)

    # ----------------------------------------------------------------------------------------------- prefetch

    @property
    def may_fetch(self) -> bool:
        """Whether there is room for one more fetch: in number, and in host slots that fetches may reserve."""
        return bool(self.cold) and len(self.fetches) < _FETCHES and self._num_fetchable() > 0

    def _num_fetchable(self, is_next: bool = False) -> int:
        """Host slots that fetches may still reserve. Slots of wanted blocks are excluded, except for a
        request that `is_next`, which always gets its share."""
        most = self.host.num_slots // _FETCH_SHARE
        if is_next:
            return min(self.host.num_available, most)
        return min(self.host.num_spare, most - sum(fetch.num_reserved for fetch in self.fetches))

    def prefetch(
        self,
        keys: Sequence[bytes],
        owner: str,
        first: int,
        answered: Sequence[Part] = (),
        is_next: bool = False,
    ) -> Fetch | None:
        """Read blocks of `keys` from number `first` on from cold tiers into host memory, once all tiers have
        answered. Only blocks that host memory lacks, that are worth it, and that have room. None if there are
        none, or if fetches are at their limit and the request is not next. A remote store is asked without
        waiting."""
        if not self.may_fetch and not is_next:
            return None
        missing = [
            number for number, slot in enumerate(self.host.find_each(keys[first:]), first) if slot == ABSENT
        ]
        asked = self.find(keys, missing, _PATIENCE_S, answered)
        fetch = Fetch(owner, first, keys[first:], self._deadline_s, asked)
        fetch.is_next = is_next
        self._advance_fetch(fetch)
        if fetch.over:
            return None
        self.fetches.append(fetch)
        return fetch

    def end_fetches(self, keeps: bool = True) -> None:
        """End all fetches. Without `keeps`, reads in flight do not land either."""
        for fetch in self.fetches:
            fetch.keeps &= keeps
            fetch.end()
            self._read_no_further(fetch)

    def _advance_fetch(self, fetch: Fetch) -> None:
        if fetch.asked and all(part.finding.ready for part in fetch.asked):
            self._begin_fetch(fetch)
        if fetch.overdue or (fetch.unread and not self.cold[fetch.unread[0][0]].usable):
            fetch.end()
        self._read_up(fetch)

    def _begin_fetch(self, fetch: Fetch) -> None:
        """Take slots for the leading blocks that are worth reading, as many as are free. Blocks that other
        reads bring are left to them."""
        asked, fetch.asked = fetch.asked, ()
        # pinned, so that blocks of a prefix are not evicted for its later blocks
        slots, pin = self.host.pin_each(fetch.keys, fetch.label)
        try:
            tiers = whose(slots, asked, fetch.first)
            wanted = [
                (block, tier)
                for block, tier in enumerate(tiers[: self._worth(runs_of(tiers), fetch.first)])
                if tier != HOST
            ]
            fetch.origins = {fetch.first + block: tier for block, tier in wanted}
            keys, depths = [fetch.keys[block] for block, _ in wanted], list(fetch.origins)
            displaces = Displaces.ANYTHING if fetch.is_next else Displaces.UNWANTED
            fetch.room = self.host.take(
                keys, depths, fetch.label, displaces, max(0, self._num_fetchable(fetch.is_next))
            )
        finally:
            self.host.end_handles([pin])
        fetch.num_blocks = len(fetch.room.keys)
        self._queue(fetch, [wanted[place] for place in fetch.room.places])

    # ------------------------------------------------------------------------------------------------- settle

    def settle(self) -> Iterator[Copy]:
        """Take in copies that are over. Yields landed copies, in order, so that the caller can seal their
        blocks; the slots stay pinned meanwhile."""
        copies = [copy for copy in self.mover.settle() if isinstance(copy, Copy)]
        for copy in copies:
            if not copy.load.is_cold:
                self._end(copy.load)
            self.saves.counts.book(copy, "host", "device", self.saves.layout.block_bytes)
            if copy.error() is None and not copy.load.is_part:
                seconds = copy.settled_s - copy.first_s, copy.settled_s - max(copy.seen_s, copy.first_s)
                self.link.add(copy.num_blocks * self.saves.layout.block_bytes, *seconds)
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
        for fetch in self.fetches:
            self._advance_fetch(fetch)
        self.fetches = [fetch for fetch in self.fetches if not fetch.over]
        for load in self.in_flight.values():
            self._advance(load)
        for load in [load for load in self.in_flight.values() if load.over]:
            self._end(load)

    def _advance(self, load: BlockLoad) -> None:
        self._read_up(load)
        if any(copy.settled and copy.error() is not None for copy in load.copies):
            load.cut(load.num_sent)
        num_ready = load.num_ready
        if num_ready > load.num_sent and (
            num_ready - load.num_sent >= self._part_blocks or num_ready == load.limit
        ):
            if load.ended or not self._try_send(load, num_ready):
                load.cut(load.num_sent)
        elif load.ended:
            load.cut(load.num_sent)
        # the slots after the limit are computed, once their earlier uses are over
        if load.settled and load.limit < load.num_blocks and not load.is_short:
            load.is_short = True
            load.hold.add_after(load.after)

    def _try_send(self, load: BlockLoad, end: int) -> bool:
        """False if the lane is closed."""
        try:
            self._submit(self._copy(load, end, self._whole))
        except LaneClosed:
            return False
        return True

    def _end(self, load: BlockLoad) -> None:
        """The load is over; its sources are no longer protected."""
        self.host.end_handles(load.kept)
        del self.in_flight[load.hold]

    def check(self) -> None:
        """Raises if fetches have reserved more than they may."""
        ahead = [fetch for fetch in self.fetches if not fetch.is_next]
        num_reserved = sum(fetch.num_reserved for fetch in ahead)
        if len(ahead) > _FETCHES or num_reserved > self.host.num_slots // _FETCH_SHARE:
            raise InvariantBroken(
                f"{len(ahead)} fetches have reserved {num_reserved} of {self.host.num_slots} host slots"
            )


def no_tiers(pool: BlockPool, block_tokens: int) -> Loads:
    """For a cache with device memory only: a host tier without slots, and no cold tiers."""
    layout = BlockLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=block_tokens, dtype="float32")
    host = HostTier(BlockPool(0, HOST), block_tokens, 0.0)
    return Loads(Saves(pool, host, (), NoMover(), layout, TierLimits(0, 0.0)), NoMover())

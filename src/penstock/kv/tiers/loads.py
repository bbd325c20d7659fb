"""Blocks on their way up: from host memory to the device, and from cold tiers into host memory, ahead of that
or ahead of any request. Owns every load, with the host slots that it reads into. The engine thread is the
only caller, apart from `lease`.

    cold tiers asked  ->  host slots taken  ->  blocks read into them, group by group  ->  copied to the
                      device in parts, the first while
    later ones are being read; or left as ordinary blocks of the host tier, where nobody has a table for them
    yet

What host memory has already needs no reading: such a load is one copy. Room for all that is read is taken
before the first byte moves: nothing here waits for room while it holds some.
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

_MIN_LAYERS = 3  # smaller groups lose the link's rate: their copies get too small
# about a millisecond of a fast link: how much may be left when a step is launched behind a load
_LAST_BYTES = 48 << 20
_PATIENCE_S = 1.0  # with a store that is asked what it has, at most
# that are copied at once while others are read: enough for the link, little enough to begin soon
_PART_BYTES = 16 << 20
# groups of one load that are being read: what a tier reads while the engine thread is at a long step
_READ_AHEAD = 256
_READ_AT_ONCE = 32  # that are begun in one turn: about a millisecond
_FETCHES = 4  # at once
_FETCH_SHARE = 4  # one in so many host slots may be reserved for them: saves and loads need the others
_FETCH_AHEAD_S = 0.1  # of a tier's time is queued for them at most: a load that comes now waits no longer
_FETCH_UNMEASURED = 2  # groups, where nobody knows how much that is


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
    num_emptied: int | None  # of the first cold tier, when it was begun; None: one was under way


class Reads:
    """What a load and a fetch have in common: blocks `first..` of a prefix, those of them that are read, and
    how far that is."""

    def __init__(
        self, label: str, first: int, num_blocks: int, keys: Sequence[bytes], deadline_s: float
    ) -> None:
        self.label = label
        self.first = first  # its blocks are those of the prefix from this number on
        self.keys = keys  # of its first blocks
        self.deadline_s = deadline_s
        self.room = Taken([], [], [])  # host slots for what is not being read yet
        self.unread: deque[tuple[str, Sequence[int]]] = deque()  # (tier, blocks) of that, in order
        self.staged: deque[Staged] = deque()  # being read, in order
        self.limit = num_blocks  # blocks from here on do not come

    @property
    def ended(self) -> bool:
        """Nobody wants more of it: what is being read still lands, the rest is not read."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """Nothing of it touches a slot any more."""
        return not self.staged and not self.unread

    @property
    def overdue(self) -> bool:
        """It takes longer than anybody should wait for it. Also where its request has gone: others wait for
        what is being read."""
        return not self.over and time.monotonic() > self.deadline_s

    def touches(self, slots: frozenset[int] | None) -> bool:
        """Whether it is going to send blocks into one of these slots of the device; None: whether it is not
        over."""
        return slots is None and not self.over

    def wait_reads(self, deadline_s: float) -> None:
        """Block until what is being read for it now is over. Raises DeadlineExceeded."""
        for staged in self.staged:
            staged.reading.wait_over(deadline_s)

    def came(self, block: int, slot: int) -> None:
        """`block` is in host memory."""
        raise NotImplementedError

    def cut(self, limit: int) -> None:
        """Blocks from `limit` on do not come, or are not wanted."""
        self.limit = min(self.limit, limit)


class Fetch(Reads):
    """Implements `contract.Prefetch`. It may end short: then the blocks before the first that did not come
    are there all the same. What has landed is not protected: it stays for as long as any other block of the
    host tier would."""

    def __init__(
        self, owner: str, first: int, keys: Sequence[bytes], deadline_s: float, asked: Sequence[Part]
    ) -> None:
        super().__init__(f"fetch of {owner}", first, len(keys), keys, deadline_s)
        self.asked = asked  # what cold tiers were asked for, until all have answered
        self.is_next = False  # its request waits for nothing else
        self.keeps = True  # what is read lands in the host tier
        self.num_blocks = 0  # that it reads, or has read
        self.num_came = 0  # of those
        self.origins: dict[int, str] = {}
        self._ended = False

    @property
    def settled(self) -> bool:
        """Nothing of it is to come any more."""
        return self.over

    def end(self) -> None:
        """As far as nobody else shares it. Idempotent; the next `settle` gives its room back."""
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
        """Host slots that it has taken, and that nothing has landed in yet."""
        return len(self.room.keys) + sum(len(staged.blocks) for staged in self.staged)

    def came(self, block: int, slot: int) -> None:
        self.num_came += 1


class BlockLoad(Reads):
    """Implements `contract.Load`: none or several reads from cold tiers, then copies to the device. It may
    end short: then the blocks before the first that did not come are there all the same.

    The hold that it fills may end before it; then nothing more is copied, and what is being read still lands
    in host memory.
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
        self.after = tuple(after)  # earlier users of the slots
        self.layered = False
        self.is_cold = False  # some of it comes from cold tiers
        # a few blocks of a context, which nobody waits for: how long that takes says nothing about the link
        self.is_part = False
        self.sources: Slots = np.full(num_blocks, ABSENT)  # host slots
        # blocks that a fetch was reading already, by key
        self.awaited: dict[bytes, tuple[int, StoreGroup]] = {}
        self.kept: list[Handle] = []  # protection of the sources
        self.copies: list[Copy] = []
        self.num_sent = 0  # blocks handed to copies
        self._num_ready = 0
        self.is_short = False  # the hold knows that it ended short

    # ------------------------------------------------------------------------------------------ contract.Load

    @property
    def arrivals(self) -> tuple[Arrival, ...] | None:
        if self.num_sent < self.num_blocks:
            return None
        arrivals = [copy.arrivals for copy in self.copies if not copy.settled]
        return None if None in arrivals else tuple(arrival for some in arrivals for arrival in some or ())

    @property
    def settled(self) -> bool:
        """As far as its request is concerned: reads behind what did not come may go on."""
        return self.num_sent == self.limit and all(copy.settled for copy in self.copies)

    def error(self) -> BaseException | None:
        if self.limit < self.num_blocks:
            return TransferFailed(f"{self.limit} of {self.num_blocks} blocks came for {self.hold.owner}")
        return next((error for copy in self.copies if (error := copy.error()) is not None), None)

    def nearly_landed(self) -> bool:
        arrivals = self.arrivals
        # of one lane: it comes after all before it
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
        """Whether block `number` of a prefix, which has `key`, is one of its own."""
        return 0 <= number - self.first < len(self.keys) and self.keys[number - self.first] == key

    def touches(self, slots: frozenset[int] | None) -> bool:
        """Whether it is going to send blocks into one of these slots of the device; None: whether it is not
        over. What was sent is its copies' business, and into the slots of a table that has ended nothing is
        sent."""
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
        """What was sent already is not called back."""
        self.limit = max(self.num_sent, min(self.limit, limit))

    def forget_keys(self) -> None:
        """Its blocks get none when they have come. What is being read is found in host memory all the
        same."""
        for copy in self.copies:
            copy.keys = ()
        if not self.is_cold:
            self.keys = ()


def _answer_in(answered: Sequence[Part], tier: str, missing: Sequence[int]) -> Finding | None:
    """What `tier` has said about all blocks `missing`; None where it was not asked for each of them, or has
    not answered."""
    for part in answered:
        if part.tier == tier and part.finding.ready and set(missing) <= set(part.blocks):
            there = set(part.blocks[: part.finding.num])
            return Finding(
                num=next((num for num, number in enumerate(missing) if number not in there), len(missing))
            )
    return None


class Loads:
    """Fills slots of the device from the tiers that `saves` writes to, and tells it what has come into host
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
        """Slots of the device that only copies have, their tables having ended: of those that are `late`, or
        of the others."""
        copies = (
            copy for load in self.in_flight.values() if load.ended for copy in load.copies if not copy.settled
        )
        return sum(copy.num_blocks for copy in copies if copy.overdue == late)

    def pins(self) -> set[Pin]:
        """Of the device, for what is under way."""
        return {pin for copy in self.mover.flying for pin in copy.pins}

    # ------------------------------------------------------------------------------------------------ looking

    def lease(
        self, keys: Sequence[bytes], owner: str, first: int, answered: Sequence[Part] = ()
    ) -> HostLease | None:
        """Find, and want, what colder tiers have of `keys` from number `first` on; None where that is nothing
        and nobody far was asked. For any thread: a store far away is asked, not waited for, and only for as
        long as computing would take. What it has `answered` to an earlier lease of the same keys it is not
        asked again."""
        if not self.cold and not self.host.has(keys[first]):
            # what lies behind a gap is of no use where nothing fills it, and looking for it takes as long as
            # the prefix is
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
                lease.end()  # nobody else knows of it
            raise
        if parts and lease is None:
            lease = self.host.lease(keys, owner, first, even_empty=True)
        if lease is not None:
            lease.parts = parts
        return lease

    def find(
        self, keys: Sequence[bytes], missing: Sequence[int], patience_s: float, answered: Sequence[Part] = ()
    ) -> list[Part]:
        """Ask for blocks number `missing` of `keys`, hottest tier first, each for what those before it do not
        have; a store far away not for what it has `answered` before. For any thread. Its answer is returned
        also where it has nothing, so that it is remembered."""
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
                break  # nobody behind it is asked before it has answered
            missing = missing[finding.num :]
        return parts

    def worth(self, lease: Lease, depth: int) -> int:
        """How many blocks of `lease` behind `depth` others are loaded rather than computed: up to where
        another tier begins, or all that follow without a gap."""
        if isinstance(lease, SavedLease) and not self.mover.is_late():
            return lease.num_from(depth)
        return self._worth(lease.runs_from(depth), depth)

    def _worth(self, runs: Sequence[tuple[str, int]], depth: int) -> int:
        if self.mover.is_late():
            return 0  # whatever is wrong with the tier, nobody else waits for it
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
        """Fill the slots of `hold` from number `first` on with the same blocks of `lease`, of which the first
        have `keys`; they may be written after `after`. What host memory has is copied, what is colder is read
        first. The lease ends with the load; if this raises, it is as it was."""
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
        """Host memory has all of it."""
        sources = lease.slots[load.first : load.first + load.num_blocks]
        if len(sources) != load.num_blocks or ABSENT in sources:
            raise InvariantBroken(
                f"the lease of {lease.owner!r} does not have {load.num_blocks} blocks from {load.first} on"
            )
        load.sources, load.layered = sources, layered
        self._submit(self._copy(load, load.num_blocks, self._groups(load.num_blocks, layered)))
        self._note_hit(load)

    def begin_whole(
        self,
        holds: Sequence[Hold],
        kept: Pin,
        after: Sequence[Fence],
        first: int = 0,
        keys: Sequence[bytes] = (),
    ) -> BlockLoad:
        """Fill the slots of `holds`, one behind the other, with the blocks that `kept` protects, as whole
        blocks: nobody begins with a part of them. They are those of a prefix from number `first` on, and have
        `keys`; or they get none, and are a part of a context that is there already. If this raises, nothing
        is kept."""
        load = BlockLoad(holds[0], first, len(kept.run), keys, after, self._deadline_s)
        load.kept, load.sources, load.is_part = [kept], np.array(kept.slots, np.int64), not keys
        pins = [self.saves.pool.pin_run(hold, 0, hold.num_slots, hold.owner) for hold in holds]
        try:
            self._submit(Copy(load, pins, load.sources, self._whole))
        except BaseException:
            self.host.end_handles([kept])
            raise
        if keys:
            self._note_hit(load)
        return load

    def _note_hit(self, load: BlockLoad) -> None:
        self.link.note_try()
        self.saves.used(load.keys)

    def _copy(self, load: BlockLoad, end: int, groups: Sequence[Group]) -> Copy:
        """Of its blocks that were not sent, up to `end`."""
        first = load.num_sent
        pin = self.saves.pool.pin_run(load.hold, load.first + first, end - first, load.hold.owner)
        return Copy(load, [pin], load.sources[first:end].copy(), groups)

    def _submit(self, copy: Copy) -> None:
        """Where this raises, its slots of the device have been given back."""
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
        """By layers where a step can start on the first; otherwise whole blocks, which is faster, the last of
        them apart: a step may be launched when the others have come."""
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
        """Some of it is colder than host memory: that is read while the rest is copied."""
        self.in_flight[load.hold] = load
        wanted: list[tuple[int, str]] = []  # blocks that are not in host memory, and who has them
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
        """Host slots for all of it, at once; where there are not enough, the load ends before the first block
        without, and `_advance` gives back those behind it."""
        coming = self._take_over({load.keys[block] for block, _ in wanted})
        slots, pin = self.host.pin_each([load.keys[block] for block, _ in wanted], load.label)
        if pin is not None:
            load.kept.append(pin)
        absent: list[tuple[int, str]] = []
        for (block, tier), slot in zip(wanted, slots, strict=True):
            key = load.keys[block]
            if slot != ABSENT:  # it has come since the match
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
        if num < len(absent):  # no room, or somebody else's read of the same block is under way
            load.cut(absent[num][0])
        self._queue(load, absent[:num])

    def _queue(self, reads: Reads, blocks: Sequence[tuple[int, str]]) -> None:
        """It has room for these, which that tier has each of."""
        for tier, same in groupby(blocks, key=lambda one: one[1]):
            run, size = [block for block, _ in same], self.cold[tier].group_blocks
            reads.unread.extend((tier, run[start : start + size]) for start in range(0, len(run), size))

    def _take_over(self, wanted: set[bytes]) -> dict[bytes, StoreGroup]:
        """A load wants these. Fetches of the same blocks read no further, and so do all where their room is
        needed. What is being read for them already is not read twice: returned by key."""
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
        # So far ahead that nobody waits for the engine thread to come round, and so little at once that
        # nobody waits for it.
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
        """Whether one more group of it is begun: of a fetch not while the tier has enough to do."""
        if isinstance(reads, BlockLoad):
            return len(reads.staged) < _READ_AHEAD
        tier = self.cold[reads.unread[0][0]]
        queued_s = tier.rate.seconds(tier.queued_read_bytes)
        return len(reads.staged) < _FETCH_UNMEASURED if queued_s is None else queued_s < _FETCH_AHEAD_S

    def _read_no_further(self, reads: Reads) -> None:
        """What lies behind the limit is not wanted, nor anything of what has ended."""
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
        """The next group of it is over."""
        staged = reads.staged[0]
        outcomes = staged.reading.take_outcomes()
        # not before: a defect of ours is raised above, and its slots are given back when somebody looks again
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
            self.host.end_handles([pin])  # not before: others could take the slots of what was just shared

    def _share(self, keys: Sequence[bytes]) -> None:
        """A fetch has read these, or could not: loads that wait for some of them go on, or end there."""
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
        """Host slots that fetches may still reserve. Never those of blocks that somebody wants, but for a
        request that `is_next`: that one has its share whatever others have."""
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
        """Have what cold tiers have of `keys` from number `first` on read into host memory, as far as host
        memory lacks it, it is worth it and there is room, once all have answered; None where that is nothing,
        or as much is under way as may be and its request is not next. A store far away is asked and not
        waited for."""
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
        """Nothing more is read for any of them; without `keeps` what is being read is not published
        either."""
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
        """It takes room for the first blocks that are worth it, as many as there is room for. Those that
        others bring are theirs."""
        asked, fetch.asked = fetch.asked, ()
        # blocks of a prefix do not make room for those that follow them
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
        """Take in copies that are over. Those that have landed are given out, in order, for whoever gives
        their blocks keys: the slots are pinned meanwhile."""
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
                # the slots are computed instead: by whoever has the table, after those whom the copy was to
                # wait for
                copy.load.hold.add_after(copy.load.after)
            for pin in copy.pins:
                pin.end()

    def advance(self) -> None:
        """Take in what was read, and send on what is ready."""
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
        # the slots behind are computed, after their earlier users
        if load.settled and load.limit < load.num_blocks and not load.is_short:
            load.is_short = True
            load.hold.add_after(load.after)

    def _try_send(self, load: BlockLoad, end: int) -> bool:
        """False where the lane is closed."""
        try:
            self._submit(self._copy(load, end, self._whole))
        except LaneClosed:
            return False
        return True

    def _end(self, load: BlockLoad) -> None:
        """It is over: nothing protects its sources any more."""
        self.host.end_handles(load.kept)
        del self.in_flight[load.hold]

    def check(self) -> None:
        """Raises where fetches have reserved more than they may."""
        ahead = [fetch for fetch in self.fetches if not fetch.is_next]
        num_reserved = sum(fetch.num_reserved for fetch in ahead)
        if len(ahead) > _FETCHES or num_reserved > self.host.num_slots // _FETCH_SHARE:
            raise InvariantBroken(
                f"{len(ahead)} fetches have reserved {num_reserved} of {self.host.num_slots} host slots"
            )


def no_tiers(pool: BlockPool, block_tokens: int) -> Loads:
    """For a cache that has the device alone: host memory without a slot, and nothing colder."""
    layout = BlockLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=block_tokens, dtype="float32")
    host = HostTier(BlockPool(0, HOST), block_tokens, 0.0)
    return Loads(Saves(pool, host, (), NoMover(), layout, TierLimits(0, 0.0)), NoMover())

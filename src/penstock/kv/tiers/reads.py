"""Blocks on their way from cold tiers into host memory, as part of a load or ahead of any request. Owns the
host slots that they are read into, and what loading is worth. Only the engine thread calls it, except `find`.

    cold tiers asked -> host slots taken -> blocks read into them, group by group -> found in host memory
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Handle
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.calls import StoreGroup
from penstock.kv.tiers.cold import ColdTier, Finding
from penstock.kv.tiers.host import (
    ABSENT,
    HOST,
    Displaces,
    HostTier,
    Part,
    Taken,
    TierRuns,
    blocks_by_tier,
    tier_runs,
    tiers_of,
)
from penstock.kv.tiers.policy import LinkRate, PrefillRate, TierLimits, TierRun, choose
from penstock.kv.tiers.store import Outcome
from penstock.kv.tiers.writeback import Writeback
from penstock.kv.transfer import Mover

PATIENCE_S = 1.0  # longest wait for a store's answer about what it has
# Groups of one load that may be in flight, so that a tier keeps reading during a long step.
_READ_AHEAD = 256
_READ_AT_ONCE = 32  # groups begun in one turn: about a millisecond
_FETCHES = 4  # at most this many at once
_FETCH_SHARE = 4  # fetches may reserve 1 / this of the host slots; saves and loads need the others
_FETCH_AHEAD_S = 0.1  # longest queue of fetches on a tier, so that a new load waits no longer
_FETCH_UNMEASURED = 2  # groups in flight while the tier's speed is unknown


class Costs:
    """What loading and computing take, by measurement."""

    def __init__(
        self, mover: Mover, cold: dict[str, ColdTier], layout: BlockLayout, limits: TierLimits
    ) -> None:
        self.prefill = PrefillRate()
        self.link = LinkRate(clock=time.monotonic)  # from host memory to the device
        self._mover = mover
        self._cold = cold
        self._layout = layout
        self.limits = limits

    def compute_s(self, first: int, num_blocks: int) -> float | None:
        """Time to compute `num_blocks` blocks after `first` others. None: nothing was measured."""
        tokens = self._layout.block_tokens
        return self.prefill.seconds(num_blocks * tokens, (first + num_blocks / 2) * tokens)

    def patience_s(self, first: int, num_blocks: int) -> float:
        """How long to wait for the answer of a store that may have these blocks."""
        compute_s = None if self.limits.load_always else self.compute_s(first, num_blocks)
        return PATIENCE_S if compute_s is None else min(PATIENCE_S, compute_s)

    def worth(self, runs: TierRuns, depth: int, compute_from: int | None = None) -> int:
        """Number of blocks of `runs` after `depth` others that are worth loading: up to the next tier, or
        all. `compute_from`: a part is of no use. Without all of them, this block is the first to compute."""
        if self._mover.is_late():
            return 0  # a late tier gets no more requests
        if self.limits.load_always:
            return sum(num_blocks for _, num_blocks in runs)
        block, pieces = self._layout.block_bytes, list[TierRun]()
        for tier, num_blocks in runs:
            cold = self._cold.get(tier)
            if cold is None:
                load_s = self.link.seconds((num_blocks + self._mover.num_blocks) * block)
            elif cold.usable:
                load_s = cold.read_s(num_blocks * block)
            else:
                break
            pieces.append(TierRun(num_blocks, load_s))
        if compute_from is None:
            return choose(pieces, lambda first, num: self.compute_s(depth + first, num))
        num_blocks = sum(piece.num_blocks for piece in pieces)
        whole = TierRun(num_blocks, sum(piece.load_s or 0.0 for piece in pieces))
        num_computed = depth + num_blocks - compute_from
        return choose([whole], lambda *_: self.compute_s(compute_from, num_computed))


class BlocksToRead(NamedTuple):
    """Blocks `first..end` of a prefix. Without all of them, `compute_from` is the first to compute."""

    first: int
    end: int
    compute_from: int


class ToRead(NamedTuple):
    """Blocks of a prefix to be read into host memory. `choose` says which of them, when it is known which
    blocks host memory or a cold tier has; None: the leading ones."""

    first: int
    keys: Sequence[bytes]  # of all blocks up to the last
    choose: Callable[[NDArray[np.bool_]], BlocksToRead] | None = None


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
        self.kept: list[Handle] = []  # protection of the blocks in host memory

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

    def end_kept(self) -> None:
        while self.kept:
            self.kept.pop().end()

    def cut(self, limit: int) -> None:
        """Blocks from `limit` on failed or are not wanted."""
        self.limit = min(self.limit, limit)


class Fetch(Reads):
    """Implements `contract.Prefetch`. It may end short; blocks before the first missing one are usable.
    Landed blocks are not protected: they are ordinary blocks of the host tier."""

    def __init__(
        self, owner: str, wanted: ToRead, deadline_s: float, asked: Sequence[Part], is_next: bool
    ) -> None:
        keys = wanted.keys[wanted.first :]
        super().__init__(f"fetch of {owner}", wanted.first, len(keys), keys, deadline_s)
        self.wanted = wanted
        self.asked = asked  # questions to cold tiers, until all have answered
        self.is_next = is_next  # its request waits for nothing else
        self.keeps = True  # blocks that are read land in the host tier
        self.num_blocks = 0  # blocks that it reads or has read
        self.num_came = 0  # blocks of these that arrived
        self.origins: dict[int, str] = {}
        self._ended = False

    @property
    def settled(self) -> bool:
        """No more blocks will arrive."""
        return self.over

    def keep_only(self, first: int, end: int) -> None:
        """Other blocks are not read. Before any is."""
        self.keys = self.keys[first - self.first : end - self.first]
        self.first, self.limit = first, len(self.keys)

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


class ColdReader:
    """Reads from the cold tiers of `writeback`, and tells it which blocks came into host memory. `landed`
    gets the keys of a fetch's group that is over, while its blocks are pinned."""

    def __init__(
        self, host: HostTier, writeback: Writeback, costs: Costs, landed: Callable[[Sequence[bytes]], None]
    ) -> None:
        self.fetches: list[Fetch] = []  # not over
        self._host = host
        self._cold = writeback.cold
        self._writeback = writeback
        self._costs = costs
        self._landed = landed

    def find(
        self, keys: Sequence[bytes], missing: Sequence[int], patience_s: float, answered: Sequence[Part] = ()
    ) -> list[Part]:
        """Ask for blocks number `missing` of `keys`, hottest tier first; each tier is asked only for blocks
        that hotter ones lack. Findings that a remote store `answered` before are reused. For any thread.
        Empty answers are returned, too, so that they are remembered."""
        parts: list[Part] = []
        for tier in self._cold.values():
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

    # ---------------------------------------------------------------------------------------------- any reads

    def queue(self, reads: Reads, blocks: Sequence[tuple[int, str]]) -> None:
        """`reads` has host slots for these (block, tier) pairs."""
        for tier, same in groupby(blocks, key=lambda one: one[1]):
            run, size = [block for block, _ in same], self._cold[tier].group_blocks
            reads.unread.extend((tier, run[start : start + size]) for start in range(0, len(run), size))

    def read_up(self, reads: Reads) -> None:
        """Take in finished groups, and begin more."""
        while reads.staged and reads.staged[0].reading.over():
            self._take_in(reads)
        if reads.ended or reads.limit < len(reads.keys):
            self.read_no_further(reads)
        # Enough reads in flight that a tier does not idle until the next turn, and few enough that a turn
        # stays short.
        for _ in range(_READ_AT_ONCE):
            if not reads.unread or not self._may_read(reads):
                return
            name, blocks = reads.unread.popleft()
            taken = self._host.split(reads.room, len(blocks))
            if taken.reservation is None:
                raise InvariantBroken(f"the {reads.label} reads blocks that it has no room for")
            tier = self._cold[name]
            reading = tier.read(taken.keys, taken.reservation.slots, taken.reservation.after, reads.label)
            num_emptied = None if tier.is_resetting else self._writeback.num_emptied
            reads.staged.append(Staged(blocks, taken, tier, reading, num_emptied))

    def _may_read(self, reads: Reads) -> bool:
        """Whether to begin one more group. A fetch does not, while the tier is busy enough."""
        if not isinstance(reads, Fetch):
            return len(reads.staged) < _READ_AHEAD
        queued_s = self._cold[reads.unread[0][0]].read_s()
        return len(reads.staged) < _FETCH_UNMEASURED if queued_s is None else queued_s < _FETCH_AHEAD_S

    def read_no_further(self, reads: Reads) -> None:
        """Drop blocks after the limit, and all blocks if the request has ended."""
        limit = 0 if reads.ended else reads.limit
        while reads.unread and reads.unread[-1][1][-1] >= limit:
            name, blocks = reads.unread.pop()
            wanted = [block for block in blocks if block < limit]
            if wanted:
                reads.unread.append((name, wanted))
        num_wanted = sum(len(blocks) for _, blocks in reads.unread)
        if num_wanted < len(reads.room.keys):
            rest, reads.room = reads.room, self._host.split(reads.room, num_wanted)
            self._host.drop(rest)

    def _take_in(self, reads: Reads) -> None:
        """Take in the next group, which is over."""
        staged = reads.staged[0]
        outcomes = staged.reading.take_outcomes()
        # Only now: if a defect was raised above, the slots are given back at the next look.
        reads.staged.popleft()
        taken = staged.taken
        keeps = not isinstance(reads, Fetch) or reads.keeps
        done = [place for place, outcome in enumerate(outcomes) if keeps and outcome is Outcome.DONE]
        slots = () if taken.reservation is None else taken.reservation.slots
        pin = self._host.land(taken, done, reads.label)
        for place in done:
            reads.came(staged.blocks[place], slots[place])
        if len(done) < len(outcomes):
            reads.cut(next(block for place, block in enumerate(staged.blocks) if place not in done))
        is_there_still = (
            staged.tier is not self._writeback.first or staged.num_emptied == self._writeback.num_emptied
        )
        self._writeback.landed(
            [taken.keys[place] for place in done],
            staged.tier.name if is_there_still else "",
        )
        reads.kept += [] if pin is None else [pin]
        if isinstance(reads, Fetch):
            self._landed(taken.keys)
            reads.end_kept()  # only now: the slots of blocks just shared could be evicted

    # ------------------------------------------------------------------------------------------------ fetches

    def take_over(self, wanted: set[bytes]) -> dict[bytes, StoreGroup]:
        """A load wants these blocks. Fetches of the same blocks stop, and so do all fetches if their slots
        are needed. Reads in flight are shared: returned by key."""
        coming: dict[bytes, StoreGroup] = {}
        short = self._host.pool.num_available < len(wanted)
        for fetch in self.fetches:
            under_way = {
                key: staged.reading for staged in fetch.staged for key in staged.taken.keys if key in wanted
            }
            if short or under_way or not wanted.isdisjoint(fetch.room.keys):
                fetch.end()
                self.read_no_further(fetch)
            if fetch.keeps and not fetch.overdue:
                coming.update(under_way)
        return coming

    @property
    def may_fetch(self) -> bool:
        """Whether there is room for one more fetch: in number, and in host slots that fetches may reserve."""
        return bool(self._cold) and len(self.fetches) < _FETCHES and self._num_fetchable() > 0

    def _num_fetchable(self, is_next: bool = False) -> int:
        """Host slots that fetches may still reserve. Slots of wanted blocks are excluded, except for a
        request that `is_next`, which always gets its share."""
        pool = self._host.pool
        most = pool.num_slots // _FETCH_SHARE
        if is_next:
            return min(pool.num_available, most)
        return min(pool.num_unwanted, most - sum(fetch.num_reserved for fetch in self.fetches))

    def fetch(
        self,
        owner: str,
        wanted: ToRead,
        deadline_s: float,
        answered: Sequence[Part] = (),
        is_next: bool = False,
    ) -> Fetch | None:
        """Read the `wanted` blocks from cold tiers into host memory, once all tiers have answered. Only those
        that host memory lacks, that are worth it, and that have room. None if there are none, or if fetches
        are at their limit and the request is not next. A remote store is asked without waiting."""
        if not self.may_fetch and not is_next:
            return None
        there = self._host.has_each(wanted.keys[wanted.first :])
        missing = [number for number, is_here in enumerate(there, wanted.first) if not is_here]
        asked = self.find(wanted.keys, missing, PATIENCE_S, answered)
        fetch = Fetch(owner, wanted, deadline_s, asked, is_next)
        self._advance(fetch)
        if fetch.over:
            return None
        self.fetches.append(fetch)
        return fetch

    def advance(self) -> None:
        for fetch in self.fetches:
            self._advance(fetch)
        self.fetches = [fetch for fetch in self.fetches if not fetch.over]

    def end_fetches(self, keeps: bool = True) -> None:
        """End all fetches. Without `keeps`, reads in flight do not land either."""
        for fetch in self.fetches:
            fetch.keeps &= keeps
            fetch.end()
            self.read_no_further(fetch)

    def _advance(self, fetch: Fetch) -> None:
        if fetch.asked and all(part.finding.ready for part in fetch.asked):
            self._begin(fetch)
        if fetch.overdue or (fetch.unread and not self._cold[fetch.unread[0][0]].usable):
            fetch.end()
        self.read_up(fetch)

    def _begin(self, fetch: Fetch) -> None:
        """Take slots for the leading blocks that are worth reading, as many as are free. Blocks that other
        reads bring are left to them."""
        asked, fetch.asked = fetch.asked, ()
        compute_from = self._choose(fetch, asked)
        # pinned, so that blocks of a prefix are not evicted for its later blocks
        slots, pin = self._host.pin_each(fetch.keys, fetch.label)
        try:
            runs = tier_runs(np.array(slots, np.int64), asked, fetch.first)
            found = blocks_by_tier(runs, self._costs.worth(runs, fetch.first, compute_from))
            wanted = [(block, tier) for block, tier in found if tier != HOST]
            fetch.origins = {fetch.first + block: tier for block, tier in wanted}
            keys, depths = [fetch.keys[block] for block, _ in wanted], list(fetch.origins)
            displaces = Displaces.ANYTHING if fetch.is_next else Displaces.UNWANTED
            fetch.room = self._host.take(
                keys, depths, fetch.label, displaces, max(0, self._num_fetchable(fetch.is_next))
            )
        finally:
            if pin is not None:
                pin.end()
        fetch.num_blocks = len(fetch.room.keys)
        self.queue(fetch, [wanted[place] for place in fetch.room.places])

    def _choose(self, fetch: Fetch, asked: Sequence[Part]) -> int | None:
        """Reduce it to the blocks that are of use. Returns the first block to compute without all of them;
        None: a part is of use, too."""
        wanted = fetch.wanted
        if wanted.choose is None:
            return None
        slots = np.where(self._host.has_each(wanted.keys), 0, ABSENT)
        chosen = wanted.choose(tiers_of(slots, asked, 0) != ABSENT)
        first = max(fetch.first, chosen.first)
        fetch.keep_only(first, max(first, chosen.end))
        return chosen.compute_from

    def check(self) -> None:
        """Raises if fetches have reserved more than they may."""
        ahead = [fetch for fetch in self.fetches if not fetch.is_next]
        num_reserved = sum(fetch.num_reserved for fetch in ahead)
        if len(ahead) > _FETCHES or num_reserved > self._host.num_slots // _FETCH_SHARE:
            raise InvariantBroken(
                f"{len(ahead)} fetches have reserved {num_reserved} of {self._host.num_slots} host slots"
            )


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

"""Everything behind the host tier: cold tiers, hottest first. Owns what is read up from them and written down to them; the bytes
themselves move on the tiers' lanes. The engine thread is its only caller, apart from `find`.

Writes go down from host memory: to the first tier as its admission says, to those behind it always. A block that the first tier does not
have is dirty; `persist` writes whatever is. Many blocks are handed over in slices, one in each turn of the engine.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.config import AdmissionName
from penstock.contract import Fence
from penstock.errors import InvariantBroken, StoreFailed
from penstock.kv.blocks.handles import Hold
from penstock.kv.tiers.cold import ColdTier, Finding, Reading, Writing
from penstock.kv.tiers.host import ABSENT, HOST, Displaces, HostLease, HostTier, Part
from penstock.kv.tiers.loads import Fetch, Haul, Promotion, Reads, Staged, runs_of, whose
from penstock.kv.tiers.store import Outcome
from penstock.kv.transfer.mover import Settling

log = logging.getLogger(__name__)

_PART_BYTES = 16 << 20  # that a haul promotes at once: enough for the link, little enough to begin soon
_READ_AHEAD = 256  # groups of one haul that are being read: what a tier reads while the engine thread is at a long step
_READ_AT_ONCE = 32  # that are begun in one turn: about a millisecond
_FETCHES = 4  # at once
_FETCH_SHARE = 4  # one in so many host slots may be reserved for them: saves and hauls need the others
_FETCH_AHEAD_S = 0.1  # of a tier's time is queued for them at most: a haul that comes now waits no longer
_FETCH_UNMEASURED = 2  # groups, where nobody knows how much that is
_CLEAN_SHARE = 8  # one in so many host slots is kept free or clean, where blocks are written when they are about to leave
_CLEAN_BLOCKS = 64  # that are written together for it
_GONE_AT_ONCE = 4096  # blocks that left host memory and are taken note of in one turn: a reset empties it
_WRITE_AT_ONCE = 256  # blocks that are handed over in one turn, where many wait for it: about a millisecond


def _answer_in(answered: Sequence[Part], tier: str, missing: Sequence[int]) -> Finding | None:
    """What `tier` has said about all blocks `missing`; None where it was not asked for each of them, or has not answered."""
    for part in answered:
        if part.tier == tier and part.finding.ready and set(missing) <= set(part.blocks):
            there = set(part.blocks[: part.finding.num])
            finding = Finding()
            finding.answer(next((num for num, number in enumerate(missing) if number not in there), len(missing)))
            return finding
    return None


@dataclass(slots=True)
class Persisting:
    """Everything sealed so far on its way into the first cold tier. Settled when it is safe there, or when it is known that it will not
    be."""

    saved: Settling | None  # what must be in host memory first
    keys: dict[bytes, int]  # what is to be written, with depths
    unwritten: Iterator[bytes] = field(default_factory=lambda: iter(()))  # those of them that were not handed over
    lost: set[bytes] = field(default_factory=set)  # those that could not be written, or left host memory before they were
    sync: Writing | None = None
    num_emptied: int = -1  # of the first tier, when writing began; -1: it has not
    settled: bool = False
    error: BaseException | None = None

    @property
    def handing_over(self) -> bool:
        """The next turn hands over some of it, or all that is left."""
        return self.sync is None and (self.saved is None or self.saved.settled)


@dataclass(slots=True)
class Resetting:
    """Tiers on their way to being empty. Those in memory are, from the beginning."""

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


class Behind:
    """`send` has a part of a haul copied to the device: (haul, blocks from, to) -> the promotion, or None where it could not be. `worth`
    says how many blocks of such runs, behind so many others, are fetched rather than computed."""

    def __init__(self, host: HostTier, tiers: Sequence[ColdTier], block_bytes: int, admission: AdmissionName = "always") -> None:
        self.tiers = {tier.name: tier for tier in tiers}
        self.send: Callable[[Haul, int, int], Promotion | None] = lambda haul, first, end: None
        self.worth: Callable[[Sequence[tuple[str, int]], int], int] = lambda runs, depth: 0
        self._first = tiers[0]
        self._host = host
        self._admission = admission
        self._part_blocks = max(1, _PART_BYTES // block_bytes)
        self._hauls: list[Haul] = []  # not over
        self._fetches: list[Fetch] = []  # not over
        self._dirty: dict[bytes, int] = {}  # depth by key, of blocks in host memory that the first tier was not seen to have
        self._writing: set[bytes] = set()  # of those: on their way
        self._num_emptied = 0  # resets of the first tier, submitted so far, and times that it lost its blocks. What was read or written
        # before says nothing about what it has
        self._emptied_before: dict[Writing, int] = {}  # that number, by writes to it that are not over
        self._num_losses = 0  # of the first tier, seen so far
        self._rests = False  # nothing was left to clean, or it could not be written: until more blocks land
        self._persisting: list[Persisting] = []
        self._later: deque[tuple[ColdTier, Sequence[bytes], Sequence[int]]] = deque()  # slices that are to be written in later turns
        host.watch_gone()

    # ------------------------------------------------------------------------------------------------------------ questions

    @property
    def num_in_flight(self) -> int:
        """Fetches, reads and writes that are not over, and questions that are not answered."""
        num = sum(tier.num_reading + tier.num_writing + tier.num_asking for tier in self.tiers.values())
        return num + len(self._fetches) + len(self._persisting) + len(self._later)

    @property
    def reads(self) -> Sequence[Reads]:
        """Hauls and fetches that are not over."""
        return [*self._hauls, *self._fetches]

    @property
    def may_fetch(self) -> bool:
        """Whether there is room for one more fetch: in number, and in host slots that fetches may reserve."""
        return len(self._fetches) < _FETCHES and self._num_fetchable > 0

    @property
    def _num_fetchable(self) -> int:
        """Host slots that fetches may still reserve. Never those of blocks that somebody wants."""
        num_reserved = sum(fetch.num_reserved for fetch in self._fetches)
        return min(self._host.num_spare, self._host.num_slots // _FETCH_SHARE - num_reserved)

    def find(self, keys: Sequence[bytes], missing: Sequence[int], patience_s: float, answered: Sequence[Part] = ()) -> list[Part]:
        """Ask for blocks number `missing` of `keys`, hottest tier first, each for what those before it do not have; a store far away not
        for what it has `answered` before. For any thread. Its answer is returned also where it has nothing, so that it is remembered."""
        parts: list[Part] = []
        for tier in self.tiers.values():
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

    # -------------------------------------------------------------------------------------------------------------- read up

    def haul(self, hold: Hold, first: int, lease: HostLease, keys: Sequence[bytes], after: Sequence[Fence], deadline_s: float) -> Haul:
        """Bring blocks `first..` of `lease`, which have `keys`, into the same blocks of `hold`."""
        kept = self._host.take_lease(lease)
        if kept is None:
            raise InvariantBroken(f"the lease of {lease.owner!r} has expired")
        haul = Haul(hold, first, keys, after, deadline_s)
        haul.kept += kept
        self._hauls.append(haul)
        wanted: list[tuple[int, str]] = []  # blocks that are not in host memory, and who has them
        block = 0
        for tier, num_blocks in lease.runs_from(first):
            run = range(block, min(block + num_blocks, len(keys)))
            block = run.stop
            if tier != HOST:
                wanted += ((place, tier) for place in run)
                continue
            self.used(keys[run.start : run.stop])
            for place in run:
                haul.came(place, int(lease.slots[first + place]))
        haul.cut(block)
        self._take_room(haul, wanted)
        self._advance(haul)
        return haul

    def _take_room(self, haul: Haul, wanted: Sequence[tuple[int, str]]) -> None:
        """Host slots for all of it, at once; where there are not enough, the haul ends before the first block without."""
        coming = self._take_over({haul.keys[block] for block, _ in wanted})
        slots, pin = self._host.pin_each([haul.keys[block] for block, _ in wanted], haul.label)
        if pin is not None:
            haul.kept.append(pin)
        absent: list[tuple[int, str]] = []
        for (block, tier), slot in zip(wanted, slots, strict=True):
            key = haul.keys[block]
            if slot != ABSENT:  # it has come since the match
                haul.came(block, slot)
            elif key in coming:
                haul.awaited[key] = block, coming[key]
            else:
                absent.append((block, tier))
        keys = [haul.keys[block] for block, _ in absent]
        haul.room = self._host.take(keys, [haul.first + block for block, _ in absent], haul.label, Displaces.ANYTHING)
        num = next((i for i, (key, taken) in enumerate(zip(keys, haul.room.keys, strict=False)) if key != taken), len(haul.room.keys))
        if num < len(absent):  # no room, or somebody else's read of the same block is under way
            haul.cut(absent[num][0])
            behind, haul.room = haul.room, self._host.split(haul.room, num)
            self._host.drop(behind)
        self._queue(haul, absent[:num])

    def _queue(self, reads: Reads, blocks: Sequence[tuple[int, str]]) -> None:
        """It has room for these, which that tier has each of."""
        for tier, same in itertools.groupby(blocks, key=lambda one: one[1]):
            run, size = [block for block, _ in same], self.tiers[tier].group_blocks
            reads.unread.extend((tier, run[start : start + size]) for start in range(0, len(run), size))

    def _take_over(self, wanted: set[bytes]) -> dict[bytes, Reading]:
        """A haul wants these. Fetches of the same blocks read no further, and so do all where their room is needed. What is being read for
        them already is not read twice: returned by key."""
        coming: dict[bytes, Reading] = {}
        short = self._host.num_available < len(wanted)
        for fetch in self._fetches:
            under_way = {key: staged.reading for staged in fetch.staged for key in staged.taken.keys if key in wanted}
            if short or under_way or not wanted.isdisjoint(fetch.room.keys):
                fetch.end()
                self._read_no_further(fetch)
            if fetch.keeps and not fetch.overdue:
                coming.update(under_way)
        return coming

    def fetch(self, owner: str, first: int, keys: Sequence[bytes], asked: Sequence[Part], deadline_s: float) -> Fetch | None:
        """Bring what cold tiers have of `keys`, the blocks of a prefix from number `first` on, into host memory: as much as is worth it and
        has room, once all have answered what they were `asked`. None where that is nothing."""
        fetch = Fetch(owner, first, keys, deadline_s, asked)
        self._advance_fetch(fetch)
        if fetch.over:
            return None
        self._fetches.append(fetch)
        return fetch

    def end_fetches(self, keeps: bool = True) -> None:
        """Nothing more is read for any of them; without `keeps` what is being read is not published either."""
        for fetch in self._fetches:
            fetch.keeps &= keeps
            fetch.end()
            self._read_no_further(fetch)

    def _advance_fetch(self, fetch: Fetch) -> None:
        if fetch.asked and all(part.finding.ready for part in fetch.asked):
            self._begin_fetch(fetch)
        if fetch.overdue or (fetch.unread and not self.tiers[fetch.unread[0][0]].usable):
            fetch.end()
        self._read_up(fetch)

    def _begin_fetch(self, fetch: Fetch) -> None:
        """It takes room for the first blocks that are worth it, as many as there is room for. Those that others bring are theirs."""
        asked, fetch.asked = fetch.asked, ()
        slots, pin = self._host.pin_each(fetch.keys, fetch.label)  # blocks of a prefix do not make room for those that follow them
        try:
            tiers = whose(slots, asked, fetch.first)
            wanted = [(block, tier) for block, tier in enumerate(tiers[: self.worth(runs_of(tiers), fetch.first)]) if tier != HOST]
            keys, depths = [fetch.keys[block] for block, _ in wanted], [fetch.first + block for block, _ in wanted]
            fetch.room = self._host.take(keys, depths, fetch.label, most=max(0, self._num_fetchable))
        finally:
            self._host.end_handles([] if pin is None else [pin])
        fetch.num_blocks = len(fetch.room.keys)
        self._queue(fetch, [wanted[place] for place in fetch.room.places])

    def _read_on(self, reads: Reads) -> None:
        """So far ahead that nobody waits for the engine thread to come round, and so little at once that nobody waits for it."""
        for _ in range(_READ_AT_ONCE):
            if not reads.unread or not self._may_read(reads):
                return
            name, blocks = reads.unread.popleft()
            taken = self._host.split(reads.room, len(blocks))
            if taken.reservation is None:
                raise InvariantBroken(f"the {reads.label} reads blocks that it has no room for")
            tier = self.tiers[name]
            reading = tier.read(taken.keys, taken.reservation.slots, taken.reservation.after, reads.label)
            reads.staged.append(Staged(blocks, taken, tier, reading, None if tier.is_resetting else self._num_emptied))

    def _may_read(self, reads: Reads) -> bool:
        """Whether one more group of it is begun: of a fetch not while the tier has enough to do."""
        if isinstance(reads, Haul):
            return len(reads.staged) < _READ_AHEAD
        tier = self.tiers[reads.unread[0][0]]
        queued_s = tier.rate.seconds(tier.queued_read_bytes)
        return len(reads.staged) < _FETCH_UNMEASURED if queued_s is None else queued_s < _FETCH_AHEAD_S

    def advance(self) -> None:
        """Take in what was read, send on what is ready, forget hauls and fetches that are over."""
        for fetch in self._fetches:
            self._advance_fetch(fetch)
        self._fetches = [fetch for fetch in self._fetches if not fetch.over]
        for haul in self._hauls:
            self._advance(haul)
        for haul in [haul for haul in self._hauls if haul.over]:
            self._host.end_handles(haul.kept)
            self._hauls.remove(haul)

    def _read_up(self, reads: Reads) -> None:
        while reads.staged and reads.staged[0].reading.over:
            self._take_in(reads)
        if reads.ended or reads.limit < len(reads.keys):
            self._read_no_further(reads)
        self._read_on(reads)

    def _advance(self, haul: Haul) -> None:
        self._read_up(haul)
        if any(part.settled and part.error() is not None for part in haul.parts):
            haul.cut(haul.num_sent)
        num_ready = haul.num_ready
        if num_ready > haul.num_sent and (num_ready - haul.num_sent >= self._part_blocks or num_ready == haul.limit):
            part = None if haul.hold.ended else self.send(haul, haul.num_sent, num_ready)
            if part is None:
                haul.cut(haul.num_sent)
            else:
                haul.parts.append(part)
                haul.num_sent = num_ready
        elif haul.hold.ended:
            haul.cut(haul.num_sent)

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
            rest, reads.room = reads.room, self._host.split(reads.room, num_wanted)
            self._host.drop(rest)

    def _take_in(self, reads: Reads) -> None:
        """The next group of it is over."""
        staged = reads.staged[0]
        outcomes = [outcome for group in staged.reading.take_arrived() for outcome in group.outcomes]
        reads.staged.popleft()  # not before: a defect of ours is raised above, and its slots are given back when somebody looks again
        if isinstance(reads, Fetch) and not reads.keeps:
            outcomes = [Outcome.MISSING] * len(outcomes)
        done = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.DONE]
        slots = () if staged.taken.reservation is None else staged.taken.reservation.slots
        pin = self._host.land_some(staged.taken, done, reads.label)
        for place in done:
            reads.came(staged.blocks[place], slots[place])
        lost = [block for block, outcome in zip(staged.blocks, outcomes, strict=True) if outcome is not Outcome.DONE]
        if lost:
            reads.cut(lost[0])
        keys, depths = [staged.taken.keys[place] for place in done], [staged.taken.depths[place] for place in done]
        is_there_still = staged.tier is not self._first or staged.num_emptied == self._num_emptied
        self.landed(keys, depths, staged.tier.name if is_there_still else "")
        if isinstance(reads, Haul):
            reads.kept += [] if pin is None else [pin]
        else:
            self._share(staged.taken.keys)
            self._host.end_handles([] if pin is None else [pin])  # not before: others could take the slots of what was just shared

    def _share(self, keys: Sequence[bytes]) -> None:
        """A fetch has read these, or could not: hauls that wait for some of them go on, or end there."""
        for haul in self._hauls:
            awaited = {key: haul.awaited.pop(key)[0] for key in keys if key in haul.awaited}
            slots, pin = self._host.pin_each(list(awaited), haul.label)
            if pin is not None:
                haul.kept.append(pin)
            for block, slot in zip(awaited.values(), slots, strict=True):
                haul.cut(block) if slot == ABSENT else haul.came(block, slot)

    # ----------------------------------------------------------------------------------------------------------- write down

    def landed(self, keys: Sequence[bytes], depths: Sequence[int], source: str = "device") -> None:
        """Blocks have landed in host memory, out of `source`: what is written of them now is written."""
        self._rests = False
        if source != self._first.name:
            self._dirty.update(zip(keys, depths, strict=True))
            if self._admission == "always":
                self._write_in_slices(self._first, keys, depths)
        for tier in list(self.tiers.values())[1:]:
            if tier.name != source:
                self._write_in_slices(tier, keys, depths)

    def used(self, keys: Sequence[bytes]) -> None:
        """Blocks in host memory were asked for again."""
        if self._admission == "reuse":
            dirty = [key for key in keys if key in self._dirty and key not in self._writing]
            self._write_in_slices(self._first, dirty, [self._dirty[key] for key in dirty])

    def _clean(self) -> None:
        """Write what is about to leave host memory, a little at a time."""
        if self._admission != "evict" or self._rests or self._writing:
            return
        if self._host.slots.free * _CLEAN_SHARE < self._host.num_slots:
            coldest = self._host.coldest(max(_CLEAN_BLOCKS, self._host.num_slots // _CLEAN_SHARE))
            self._rests = self._write_dirty([key for key in coldest if key in self._dirty][:_CLEAN_BLOCKS]) is None

    def _write_in_slices(self, tier: ColdTier, keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """The first slice now, the others in later turns."""
        for start in range(0, len(keys), _WRITE_AT_ONCE):
            part = slice(start, start + _WRITE_AT_ONCE)
            if start:
                self._later.append((tier, keys[part], depths[part]))
            else:
                self._write(tier, keys[part], depths[part])

    def _write_next_slice(self) -> None:
        if self._later:
            tier, keys, depths = self._later.popleft()
            if tier is self._first:  # it may have been written meanwhile
                self._write_dirty([key for key in keys if key in self._dirty])
            else:
                self._write(tier, keys, depths)

    def _write_dirty(self, keys: Sequence[bytes], must: bool = False) -> Writing | None:
        wanted = [key for key in keys if key not in self._writing]
        return self._write(self._first, wanted, [self._dirty[key] for key in wanted], must) if wanted else None

    def _write(self, tier: ColdTier, keys: Sequence[bytes], depths: Sequence[int], must: bool = False) -> Writing | None:
        slots, pin = self._host.pin_each(keys, f"write to {tier.name}")
        if pin is None:
            return None
        places = [place for place, slot in enumerate(slots) if slot != ABSENT]
        kept = [keys[place] for place in places]
        try:
            writing = tier.try_write(kept, [depths[place] for place in places], [slots[place] for place in places], pin, (), must)
        except BaseException:
            self._host.end_handles([pin])
            raise
        if writing is None:
            self._host.end_handles([pin])
        elif tier is self._first:
            self._emptied_before[writing] = self._num_emptied
            self._writing.update(key for group in writing.groups for key in group.keys)  # not those that the queue had no room for
        return writing

    # ------------------------------------------------------------------------------------------------------------- persist

    def persist(self, saved: Settling | None) -> Persisting:
        """Have everything that is in host memory once `saved` is settled written to the first tier, and made safe there."""
        while self._host.any_gone:
            self._forget_gone()  # what has left host memory before this call is nobody's loss
        persisting = Persisting(saved, self._dirty.copy())
        self._persisting.append(persisting)
        return persisting

    def reset(self, tier: str) -> Writing:
        """Have `tier` emptied. From now on nothing counts as being there: what host memory has is written again when somebody asks for it,
        behind the reset. A `persist` that is under way begins again."""
        writing = self.tiers[tier].reset()
        if tier == self._first.name:
            self._begin_anew()
        return writing

    def _begin_anew(self) -> None:
        """Nothing counts as being in the first tier: what host memory has is dirty."""
        self._num_emptied += 1
        self._writing.clear()
        self._dirty = {**dict.fromkeys(self._host.keys(), 0), **self._dirty}

    def _advance_persisting(self, one: Persisting) -> None:
        if one.sync is None and not one.handing_over:
            return
        if one.num_emptied != self._num_emptied and (one.sync is None or one.sync.settled):
            self._begin(one)
        if one.sync is None:
            if self._hand_over(one):
                return
            one.sync = self._first.persist()
        if one.sync.settled:
            lost = StoreFailed(f"{len(one.lost)} of {len(one.keys)} blocks could not be written to the {self._first.name} tier")
            one.error = one.sync.error or (lost if one.lost else None)
            one.settled = True

    def _begin(self, one: Persisting) -> None:
        """With what is dirty now: `saved` has landed, or the tier was emptied. What has left host memory unwritten meanwhile is lost."""
        one.lost = {key for key in one.lost if key not in self._dirty}
        one.keys = {**dict.fromkeys(one.lost, 0), **self._dirty}
        one.unwritten = iter(one.keys)
        one.sync, one.num_emptied = None, self._num_emptied

    def _hand_over(self, one: Persisting) -> bool:
        """The next slice of it; says whether there may be more. What is on its way already, or clean by now, is passed over."""
        keys = list(itertools.islice(one.unwritten, _WRITE_AT_ONCE))
        dirty = [key for key in keys if key in self._dirty and key not in self._writing]
        for start in range(0, len(dirty), _CLEAN_BLOCKS):
            some = dirty[start : start + _CLEAN_BLOCKS]
            if self._write_dirty(some, must=True) is None:
                one.lost.update(some)
        return len(keys) == _WRITE_AT_ONCE

    def _note_lost(self, keys: Sequence[bytes]) -> None:
        """They are still dirty though they were written, or not in host memory any more though they are dirty."""
        for one in self._persisting:
            one.lost.update(key for key in keys if key in one.keys)

    def _forget_gone(self) -> None:
        """What has left host memory cannot be written from there; what is being written cannot leave."""
        gone = [key for key in self._host.take_gone(_GONE_AT_ONCE) if key in self._dirty]
        for key in gone:
            del self._dirty[key]
        self._note_lost(gone)

    # -------------------------------------------------------------------------------------------------------------- settle

    def settle(self) -> bool:
        """Take in what is over; says whether there was anything, or there is more to hand over."""
        before = self.num_in_flight
        if self._num_losses != self._first.exchanges.num_losses:
            self._num_losses = self._first.exchanges.num_losses
            self._begin_anew()
        for tier in self.tiers.values():
            for writing in tier.settle():
                self._host.end_handles([writing.handle] if writing.handle is not None else [])
                if tier is self._first:
                    self._end_write(writing)
        self._forget_gone()
        self.advance()
        self._clean()
        self._write_next_slice()
        for one in self._persisting:
            self._advance_persisting(one)
        self._persisting = [one for one in self._persisting if not one.settled]
        return self.num_in_flight != before or any(one.handing_over for one in self._persisting)

    def _end_write(self, writing: Writing) -> None:
        done = writing.done_keys
        tried = [key for group in writing.groups for key in group.keys]
        if self._emptied_before.pop(writing, self._num_emptied) == self._num_emptied:
            for key in done:
                self._dirty.pop(key, None)
            for one in self._persisting:
                one.lost.difference_update(done)
            self._writing.difference_update(tried)
            self._note_lost([key for key in tried if key in self._dirty])
        self._rests |= bool(writing.keys) and not done

    # --------------------------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Raises where fetches have reserved more than they may."""
        num_reserved = sum(fetch.num_reserved for fetch in self._fetches)
        if len(self._fetches) > _FETCHES or num_reserved > self._host.num_slots // _FETCH_SHARE:
            raise InvariantBroken(f"{len(self._fetches)} fetches have reserved {num_reserved} of {self._host.num_slots} host slots")

"""The requests that run or load, in order of admission. Owns what each of them holds until it leaves: a row,
a table, and the promise of the blocks that it may still draw. The scheduler decides which requests enter and
leave."""

from __future__ import annotations

import heapq

from penstock.contract import Fence, KvLedger, Match, Residency
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.lengths import LEAST, Lengths
from penstock.engine.scheduling.residency import Division, KeptContexts, ResidentSet
from penstock.engine.scheduling.steps import Steps
from penstock.engine.scheduling.track import State, Track
from penstock.errors import InvariantBroken

# One slot in 64 is never promised while requests run: blocks that leave the device keep their slots until
# their copy ends.
_SPARE_SHARE = 64
# Slots kept free for answers: this many plus half a slot per request, up to a share of all slots. Below half
# of that, more are freed.
_ANSWER_BLOCKS = 32
_ANSWER_SHARE = 32
_NEXT_RANK = -1e12  # below every rank that arrival and priority can give
# one step of a deep request computes at most this part (1/n) of the blocks that it may have on the device
_CHUNK_SHARE = 2
_SAVED_TOGETHER = 256  # blocks saved in one transfer, for the link's bandwidth


class Running:
    """A request is admitted by what it is likely to need. That many blocks are promised to it, and it can
    always draw them. It draws those of its prompt at once, in the room just made for it; later, other blocks
    may be the first to be evicted. The rest serves as cache until it is drawn.

    A request that outlives its promise gets more if unpromised blocks are left. If not, a request that has
    outlived its promise is retracted. It comes back when twice what it has written can be promised to it. So
    a request is retracted no more often than its answer can double.
    """

    def __init__(self, ledger: KvLedger, budget: Budget, lengths: Lengths) -> None:
        self._lengths = lengths
        self.tracks: dict[str, Track] = {}
        self.num_loading = 0
        self.num_scored = 0
        self.kept = KeptContexts(budget.division, ledger.num_pageable)
        self._ledger = ledger
        self._budget = budget
        self._num_promised = 0  # blocks
        self.num_deep = 0  # blocks that deep requests may need in host memory
        # remaining blocks of a promise at which it grows
        self._num_grown_at = blocks_for(LEAST, ledger.block_tokens)
        # want rank of the next request; each new one is lower than the last
        self._next_rank = _NEXT_RANK
        self.free_rows = list(range(budget.max_batch))  # heap: low rows first

    def __len__(self) -> int:
        return len(self.tracks)

    def fits(self, track: Track, match: Match) -> bool:
        """True if its likely need can be promised on top of all other promises. Matched idle blocks are no
        longer evictable, so they count as taken; matched blocks that other requests hold cost nothing. Call
        `enter` right after it: the answer holds only until the pool changes."""
        available = self._ledger.num_available - match.num_idle
        needed = self._needs(track, match)
        matched = (match.num_blocks + match.num_colder) * self._ledger.block_tokens
        first_step = (
            blocks_for(
                min(len(track.tokens), matched + self._budget.prefill_chunk), self._ledger.block_tokens
            )
            - match.num_blocks
        )
        if track.is_deep:
            first_step = needed
            if not self.fits_host(track):
                return False
        # A second retraction of the same request would be thrashing: it comes back only when all of it fits.
        overcommit = 1.0 if track.state is State.RETRACTED or track.is_deep else self._budget.overcommit
        num_spare = self._ledger.num_blocks // _SPARE_SHARE if self.tracks else 0
        promised = self._num_promised + needed + num_spare
        return promised <= available * overcommit and first_step <= available

    def fits_host(self, track: Track) -> bool:
        """True if host memory has room for all blocks of a deep request beside the running ones."""
        return self.num_deep + self._lifetime(track) <= self._ledger.num_pageable

    def fits_free(self, track: Track, match: Match) -> bool:
        """True if it also needs no eviction, now or for the promises to running requests."""
        return self._num_promised + self._needs(track, match) <= self._ledger.num_free and self.fits(
            track, match
        )

    def has_room(self, track: Track, match: Match) -> bool:
        """True if it can enter without evicting a block's only copy. If False, room is being made; the
        promises to other requests stay drawable meanwhile. It is next, so its own blocks on the device are
        not evicted for it."""
        if track.prefix is not None and track.want is not None:
            self._next_rank -= 1.0
            track.want = self._ledger.want(track.prefix.keys, self._next_rank, track.want)
        floor = self._num_promised + match.num_idle
        return self._ledger.make_room(self._num_promised + self._needs(track, match), floor)

    def _needs(self, track: Track, match: Match) -> int:
        """Blocks to promise to it: its likely need on the device at one time, less the blocks already
        there."""
        return self.most_blocks(track) - match.num_blocks

    def most_blocks(self, track: Track) -> int:
        """Blocks that it is likely to have on the device at one time."""
        return self._budget.resident_blocks if track.is_deep else track.promised or self._likely(track)

    def _likely(self, track: Track) -> int:
        """Blocks that it is likely to need. A retracted request needed more than expected: it gets room for
        twice what it has written."""
        num_written = len(track.tokens) - track.num_prompt
        num = self._lengths.expected(track.request, num_written)
        if track.state is State.RETRACTED:
            num = min(track.request.sampling.max_tokens, max(num, 2 * num_written))
        num_kept = track.num_prompt + max(0, num - 1)  # the last one is never fed back
        return blocks_for(num_kept, self._ledger.block_tokens)

    def _lifetime(self, track: Track) -> int:
        """Blocks that it needs at most."""
        return blocks_for(track.lifetime_tokens, self._ledger.block_tokens)

    def enter(self, track: Track, match: Match) -> bool:
        """Give it a row, a table that begins with the match, and the promise of the rest. Its state is
        LOADING if blocks have to be loaded; otherwise the caller sets it off. False: the match of a deep
        request was evicted meanwhile."""
        prefix = track.prefix
        is_deep = track.is_deep and prefix is not None
        if prefix is not None and track.is_deep and track.continues is not None:
            context, num_blocks = track.continues
            prefix = prefix._replace(keys=context.keys[:num_blocks])
        num_paged = match.num_paged if is_deep else None
        table = track.table = self._ledger.open(track.request.id, prefix, match.num_blocks, num_paged)
        if table is None:
            return False
        if is_deep:
            self.num_deep += self._lifetime(track)
        else:
            track.promised = track.assured = self._likely(track)
        num_now = min(
            self._needs(track, match),
            blocks_for(len(track.tokens), self._ledger.block_tokens) - match.num_blocks,
        )
        num_promised = self._num_promised + self._needs(track, match)
        # keeps the slots for answers free besides what it draws now
        self._ledger.free_up(min(num_promised, num_now + self._num_for_answers))
        track.row = heapq.heappop(self.free_rows)
        track.begin(match, self._ledger.block_tokens)
        if track.is_deep and track.request.residency is not None and self._budget.division is not None:
            self._choose_residents(track, self._budget.division, track.request.residency)
        self.tracks[track.request.id] = track
        if match.num_colder and track.lease is not None:
            num_next = min(len(track.tokens) - track.num_planned, self._budget.prefill_chunk)
            lease, track.lease = track.lease, None
            track.load = table.promote(lease, match.num_colder, num_next)
            track.move(State.LOADING)
            self.num_loading += 1
        else:
            track.end_lease()
        if track.want is not None:  # the table holds its blocks
            track.want.end()
            track.want = None
        self._draw_first(track)
        self._num_promised += self._may_draw(track)
        return True

    def _choose_residents(self, track: Track, division: Division, asked: Residency) -> None:
        self.num_scored += 1
        # only the first generated token attends to the full context
        track.is_partial |= track.continues is not None or track.request.sampling.max_tokens > 1
        if track.continues is not None:
            self.kept.use(track.continues[0])
        track.resident = ResidentSet(
            division, asked.pins, len(track.tokens), track.lifetime_tokens, track.continues
        )

    def _draw_first(self, track: Track) -> None:
        """The slots of its prompt; step by step where memory is promised more than once, or not all of it is
        there at the same time."""
        num_blocks = blocks_for(len(track.tokens), self._ledger.block_tokens) - track.held_table().num_slots
        if self._budget.overcommit > 1.0 or num_blocks <= 0 or track.is_deep:
            return
        if not track.held_table().try_extend(num_blocks):
            raise InvariantBroken(f"request {track.request.id} was admitted without room for its prompt")

    def set_off(self, track: Track) -> None:
        """It takes part in steps from now on."""
        self.num_loading -= track.state is State.LOADING
        track.move(State.RUNNING)

    def try_draw(self, track: Track, num_blocks: int) -> bool:
        """Draw promised blocks, and more if there is room. All or nothing."""
        if not track.is_deep and self._may_draw(track) - num_blocks < self._num_grown_at:
            self._grow(track, num_blocks)
            if num_blocks > self._may_draw(track):
                return False
        if not track.held_table().try_extend(num_blocks):
            return False
        self._num_promised -= num_blocks
        return True

    def _grow(self, track: Track, num_blocks: int) -> None:
        """It draws `num_blocks` and comes near the end of its promise. Promise it more if blocks are
        unpromised. This happens some blocks early, so that other requests can end meanwhile; then one slot in
        64 stays unpromised, as at admission."""
        if track.promised == self._lifetime(track):
            return
        num_beyond = num_blocks - self._may_draw(track)
        room = self._num_unpromised - (0 if num_beyond > 0 else self._ledger.num_blocks // _SPARE_SHARE)
        num_more = min(room, max(num_beyond, self._likely(track) - track.promised))
        if num_more >= max(1, num_beyond):
            track.promised += num_more
            self._num_promised += num_more

    def num_short(self, track: Track, num_blocks: int) -> int:
        """Blocks that other requests must give up before it can draw `num_blocks`."""
        num_beyond = num_blocks - self._may_draw(track)
        num_lacking = num_blocks - self._ledger.num_available
        return max(num_lacking, num_beyond - self._num_unpromised) if num_beyond > 0 else num_lacking

    @property
    def _num_unpromised(self) -> int:
        return int(self._ledger.num_available * self._budget.overcommit) - self._num_promised

    def num_fitting(self, track: Track, num_tokens: int, fence: Fence | None) -> int:
        """How many of the next `num_tokens` of a deep request fit on the device. Its oldest blocks there are
        paged out; `fence` follows all launched steps. 0 while these blocks are still being saved."""
        table, size = track.held_table(), self._ledger.block_tokens
        most = self._budget.resident_blocks - self._take_lent_back(track)
        # while one chunk is computed, the chunk before it is saved
        num_tokens = min(num_tokens, max(1, most // _CHUNK_SHARE) * size)
        most -= table.num_fetched
        num_short = blocks_for(track.num_planned + num_tokens, size) - table.num_paged - most
        num_short = -(-num_short // track.unit) * track.unit
        if (resident := track.deciding) is not None:
            num_short = resident.num_making_way(table, num_short, most)
        if num_short > 0:
            num_before = self._ledger.num_available
            num_paged = table.page_out(num_short, fence, track.unit)
            num_free = self._ledger.num_available - num_before
            self._num_promised += num_free  # only the freed ones: the rest may be promised to other requests
            track.num_lent += num_paged - num_free
            most -= num_paged - num_free
            if resident is not None and num_paged < num_short and not resident.shows_needed(table):
                return 0  # no room yet for the parts that the next tokens must attend to
        return max(0, min(num_tokens, (table.num_paged + most) * size - track.num_planned))

    def rearrange(self, track: Track, num_tokens: int, fence: Fence | None) -> int:
        """Move the resident set of a scored request towards its target, in room that its next `num_tokens` do
        not need; returns the number of parts being fetched. `fence` follows all launched steps."""
        resident, table = track.deciding, track.held_table()
        if resident is None:
            return 0
        for fetched in (*resident.take_landed(), *resident.take_surplus(table)):
            self._num_promised += len(fetched.slots)
            fetched.end(fence)
        size = resident.division.part_blocks
        next_blocks = max(
            0, blocks_for(track.num_planned + num_tokens, self._ledger.block_tokens) - table.num_slots
        )
        room = min(
            resident.most_fetched(table) - track.num_lent - table.num_fetched,
            self._may_draw(track) - next_blocks,
        )
        parts = resident.wanted(table)[: max(0, room // size)]
        coming = table.fetch([part * size for part in parts], size) if parts else ()
        for part, one in zip(parts, coming, strict=False):
            self._num_promised -= size
            resident.coming(part, one)
        return len(coming)

    def _take_lent_back(self, track: Track) -> int:
        """Other requests released blocks that it paged out, or there is unpromised room: it may draw that
        many again. Returns the blocks still lent."""
        num_back = min(track.num_lent, max(0, self._ledger.num_available - self._num_promised))
        track.num_lent -= num_back
        self._num_promised += num_back
        return track.num_lent

    @property
    def _num_for_answers(self) -> int:
        return min(_ANSWER_BLOCKS + len(self.tracks) // 2, self._ledger.num_blocks // _ANSWER_SHARE)

    def keep_free(self) -> None:
        """Answers draw block by block and never wait. So blocks that only the device has are saved before
        answers take their slots: losing a block in the middle of a prefix makes all later ones useless."""
        num_blocks = min(self._num_promised, self._num_for_answers)
        if num_blocks > 2 * self._ledger.num_free and self._ledger.make_room(
            num_blocks, self._num_promised, _SAVED_TOGETHER
        ):
            self._ledger.free_up(num_blocks)

    def next_to_leave(self, track: Track) -> Track:
        """`track` needs a block and none is left. Returns the request to retract: the youngest of the lowest
        priority among those that have outlived their promise, or among all if promises exceed memory."""
        if self._budget.overcommit > 1.0:
            leaving = list(self.tracks.values())
        else:
            others = (other for other in self.tracks.values() if not other.is_deep)
            leaving = [one for one in others if one is track or one.held_table().num_slots > one.assured]
        return max(leaving, key=lambda other: (other.request.priority, other.order))

    def keep_context(self, track: Track, is_answered: bool) -> range:
        """A scored request leaves. If it `is_answered`, its context is kept for the next turn of its
        conversation. Returns the range of its kept key bounds; empty if they are not kept."""
        resident, table = track.resident, track.held_table()
        if resident is None:
            return range(0)
        if resident.context is not None:
            self.kept.leave(resident.context)
        num_blocks = resident.num_keeping(table) if is_answered and track.prefix is not None else 0
        if num_blocks == 0 or track.prefix is None:
            return range(0)
        name = self._ledger.extend_prefix(track.prefix, track.tokens).keys[num_blocks - 1]
        context = resident.kept(name, tuple(table.sealed_keys[:num_blocks]))
        forgotten = self.kept.keep(context, resident.context)
        if context.place:
            table.keep_closed(name, context.num_open, num_blocks)
        self._ledger.forget_closed(forgotten)
        return context.place

    def leave(self, track: Track, steps: Steps, saves: bool, num_tokens: int) -> None:
        """Give back row and table. A launched step may still use both: rows are reset in lane order, slots
        carry a fence. Slots of a running transfer stay with it. `saves`: the KV of the first `num_tokens` is
        needed again. Call it before the request's state changes."""
        self.num_loading -= track.state is State.LOADING
        self._num_promised -= self._may_draw(track)
        self.num_deep -= self._lifetime(track) if track.is_deep else 0
        track.num_lent = 0
        self.num_scored -= track.resident is not None
        if saves and track.request.may_match and not track.computes:
            track.lease = track.held_table().retract(num_tokens, steps.last_fence)
        else:
            steps.release(track.held_table())
        heapq.heappush(self.free_rows, track.row)
        del self.tracks[track.request.id]
        track.table, track.row, track.resident = None, -1, None
        track.promised = track.assured = 0

    def check(self) -> None:
        """Recount the running totals; raises InvariantBroken if they differ."""
        promised = sum(self._may_draw(track) for track in self.tracks.values())
        if promised != self._num_promised:
            raise InvariantBroken(f"{self._num_promised} blocks are promised, requests may draw {promised}")
        if self._budget.overcommit == 1.0 and promised > self._ledger.num_available:
            raise InvariantBroken(
                f"{promised} blocks are promised, {self._ledger.num_available} can be drawn"
            )
        deep = sum(self._lifetime(track) for track in self.tracks.values() if track.is_deep)
        if deep != self.num_deep or (deep and deep > self._ledger.num_pageable):
            raise InvariantBroken(
                f"deep requests may need {deep} host blocks; {self.num_deep} are counted, "
                f"{self._ledger.num_pageable} exist"
            )
        if self.num_scored != sum(track.resident is not None for track in self.tracks.values()):
            raise InvariantBroken(
                f"{self.num_scored} scored requests are counted, but a different number runs"
            )
        rows = sorted([track.row for track in self.tracks.values()] + self.free_rows)
        if rows != list(range(self._budget.max_batch)):
            raise InvariantBroken(f"rows do not add up: {rows}")

    def _may_draw(self, track: Track) -> int:
        """Promised blocks that its table does not have yet."""
        table = track.held_table()
        most = track.promised
        if track.is_deep:
            most = self._budget.resident_blocks - track.num_lent + table.num_paged
        return most - table.num_slots - table.num_fetched

"""The requests that run or load, in order of admission. Owns what each of them holds until it leaves: a row,
a table, and the promise of the blocks that it may still draw. The scheduler decides which requests enter and
leave."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter

from penstock.contract import Fence, KvLedger, Lease, Match
from penstock.engine.scheduling.budget import Budget, Promises, blocks_for
from penstock.engine.scheduling.lengths import LEAST, Lengths
from penstock.engine.scheduling.stages import Life, RunningRequest, State, WaitingRequest, begin
from penstock.engine.scheduling.steps import Steps
from penstock.errors import InvariantBroken

# One slot in 64 is never promised while requests run: blocks that leave the device keep their slots until
# their copy ends.
_SPARE_SHARE = 64
# Slots kept free for answers: this many plus half a slot per request, up to a share of all slots. Below half
# of that, more are freed.
_ANSWER_BLOCKS = 32
_ANSWER_SHARE = 32
_NEXT_RANK = -1e12  # below every rank that arrival and priority can give
_SAVED_TOGETHER = 256  # blocks saved in one transfer, for the link's bandwidth
_SAVED_FOR_LINE = 512  # blocks saved at most for requests that are not next in line yet


class Running:
    """A request is admitted by what it is likely to need. That many blocks are promised to it, and it can
    always draw them. It draws those of its prompt at once, in the room just made for it; later, other blocks
    may be the first to be evicted. The rest serves as cache until it is drawn.

    A request that outlives its promise gets more if unpromised blocks are left. If not, a request that has
    outlived its promise is retracted. It comes back when twice what it has written can be promised to it. So
    a request is retracted no more often than its answer can double.
    """

    def __init__(self, ledger: KvLedger, budget: Budget, lengths: Lengths, promises: Promises) -> None:
        self.requests: dict[str, RunningRequest] = {}
        self.num_loading = 0
        self._lengths = lengths
        self._ledger = ledger
        self._budget = budget
        self._promises = promises
        # remaining blocks of a promise at which it grows
        self._num_grown_at = blocks_for(LEAST, ledger.block_tokens)
        # want rank of the next request; each new one is lower than the last
        self._next_rank = _NEXT_RANK
        self.free_rows = list(range(budget.max_batch))  # heap: low rows first

    def __len__(self) -> int:
        return len(self.requests)

    def in_turn(self, shortest_first: bool) -> Sequence[tuple[RunningRequest, int]]:
        """In planning order, each with the number of its tokens that are left to compute. Prompts are served
        shortest first in one step and oldest first in the next: a short question does not wait for a long
        prompt, and the long prompt gets at least half of the steps."""
        requests = [(one, one.num_left) for one in self.requests.values()]
        if shortest_first:
            requests.sort(key=itemgetter(1))
        return requests

    # ------------------------------------------------------------------------------------------ does it fit?

    def fits(self, waiting: WaitingRequest, match: Match) -> bool:
        """True if its likely need can be promised on top of all other promises. Matched idle blocks are no
        longer evictable, so they count as taken; matched blocks that other requests hold cost nothing. Call
        `enter` right after it: the answer holds only until the pool changes."""
        life, size, budget = waiting.life, self._ledger.block_tokens, self._budget
        available = self._ledger.num_available - match.num_idle
        needed = self._needs(life, match)
        if life.placement.fixed_blocks is not None:
            if not life.placement.has_host_room:
                return False
            first_step, overcommit = needed, 1.0
        else:
            matched = (match.num_blocks + match.num_colder) * size
            first_step = blocks_for(min(len(life.tokens), matched + budget.prefill_chunk), size)
            first_step -= match.num_blocks
            # a second retraction would be thrashing: it comes back only when all of it fits
            overcommit = 1.0 if waiting.is_retracted else budget.overcommit
        num_spare = self._ledger.num_blocks // _SPARE_SHARE if self.requests else 0
        promised = self._promises.num + needed + num_spare
        return promised <= available * overcommit and first_step <= available

    def fits_free(self, waiting: WaitingRequest, match: Match) -> bool:
        """True if it also needs no eviction, now or for the promises to running requests."""
        needed = self._promises.num + self._needs(waiting.life, match)
        return needed <= self._ledger.num_free and self.fits(waiting, match)

    def has_room(self, waiting: WaitingRequest, match: Match, num_behind: int) -> bool:
        """True if it can enter without evicting a block's only copy. If False, room is being made; the
        promises to other requests stay drawable meanwhile. It is next, so its own blocks on the device are
        not evicted for it. `num_behind`: requests after it in line. Room is made for some of them, too: one
        transfer for each request would admit one request a step, over a link that mostly rests."""
        prefix = waiting.life.prefix
        if prefix is not None and waiting.want is not None:
            self._next_rank -= 1.0
            waiting.want = self._ledger.want(prefix.keys, self._next_rank, waiting.want)
        needs, floor = self._needs(waiting.life, match), self._promises.num + match.num_idle
        num_more = min(needs * num_behind, _SAVED_FOR_LINE)
        return self._ledger.make_room(self._promises.num + needs, floor, num_more)

    def _needs(self, life: Life, match: Match) -> int:
        """Blocks to promise to it: its likely need on the device at one time, less the blocks already
        there."""
        return self.most_blocks(life) - match.num_held

    def most_blocks(self, life: Life) -> int:
        """Blocks that it is likely to have on the device at one time."""
        if life.placement.fixed_blocks is not None:
            return life.placement.fixed_blocks
        return self._likely(life) if life.running is None else life.running.promised

    def _likely(self, life: Life) -> int:
        """Blocks that it is likely to need. A retracted request needed more than expected: it gets room for
        twice what it has written."""
        num = self._lengths.expected(life.request, life.num_written)
        if life.state is State.RETRACTED:
            num = min(life.request.sampling.max_tokens, max(num, 2 * life.num_written))
        num_kept = life.num_prompt + max(0, num - 1)  # the last one is never fed back
        return life.placement.most_blocks(life, num_kept)

    # -------------------------------------------------------------------------------------------- in and out

    def enter(self, waiting: WaitingRequest, match: Match) -> RunningRequest | None:
        """Give it a row, a table that begins with the match, and the promise of the rest. Its state is
        LOADING if blocks have to be loaded; otherwise the caller sets it off. None: the match was evicted
        meanwhile, and nothing has changed."""
        life, placement, size = waiting.life, waiting.life.placement, self._ledger.block_tokens
        table = placement.open(waiting, match)
        if table is None:
            return None
        promised = self.most_blocks(life)
        needed = promised - match.num_held
        num_now = min(needed, blocks_for(len(life.tokens), size) - match.num_blocks)
        # keeps the slots for answers free besides what it draws now
        self._ledger.free_up(min(self._promises.num + needed, num_now + self._num_for_answers))
        running = begin(waiting, heapq.heappop(self.free_rows), table, match, size)
        running.promised = running.assured = promised
        placement.enter(running)
        self.requests[life.request.id] = running
        if match.num_colder and waiting.lease is not None:
            num_next = min(len(life.tokens) - running.num_planned, self._budget.prefill_chunk)
            lease, waiting.lease = waiting.lease, None
            running.load = table.promote(lease, match.num_colder, num_next)
            life.move(State.LOADING)
            self.num_loading += 1
        waiting.end_lease()
        waiting.end_want()  # the table holds its blocks
        life.waiting = None
        self._draw_first(running)
        self._promises.num += placement.may_draw(running)
        return running

    def _draw_first(self, running: RunningRequest) -> None:
        """The slots of its prompt, as far as they are promised; step by step where memory is promised more
        than once, or not all of it is there at the same time."""
        life, table = running.life, running.table
        num_blocks = blocks_for(len(life.tokens), self._ledger.block_tokens) - table.num_slots
        num_blocks = min(num_blocks, life.placement.may_draw(running))
        if self._budget.overcommit > 1.0 or num_blocks <= 0 or life.placement.fixed_blocks is not None:
            return
        if not table.try_extend(num_blocks):
            raise InvariantBroken(f"request {life.request.id} was admitted without room for its prompt")

    def set_off(self, running: RunningRequest) -> None:
        """It takes part in steps from now on."""
        self.num_loading -= running.life.state is State.LOADING
        running.life.move(State.RUNNING)

    def leave(
        self, running: RunningRequest, steps: Steps, saves: bool, num_tokens: int, is_answered: bool
    ) -> Lease | None:
        """Give back row and table. A launched step may still use both: rows are reset in lane order, slots
        carry a fence. Slots of a running transfer stay with it. `saves`: the KV of the first `num_tokens` is
        needed again; returns the lease on it. Call it before the request's state changes."""
        life, lease = running.life, None
        self.num_loading -= life.state is State.LOADING
        self._promises.num -= life.placement.may_draw(running)
        life.placement.leave(running, is_answered, steps.last_fence)
        if saves and life.request.may_match and not life.computes and life.placement.saves_rest:
            lease = running.table.retract(num_tokens, steps.last_fence)
        else:
            steps.release(running.table)
        heapq.heappush(self.free_rows, running.row)
        del self.requests[life.request.id]
        life.running = None
        return lease

    def next_to_leave(self, running: RunningRequest) -> RunningRequest:
        """`running` needs a block and none is left. Returns the request to retract: the youngest of the
        lowest priority among those that have outlived their promise, or among all if promises exceed
        memory."""
        leaving = list(self.requests.values())
        if self._budget.overcommit <= 1.0:
            leaving = [
                one
                for one in leaving
                if one.life.placement.fixed_blocks is None
                and (one is running or one.promised - one.life.placement.may_draw(one) > one.assured)
            ]
        return max(leaving, key=lambda other: (other.request.priority, other.life.order))

    # ------------------------------------------------------------------------------------------------ drawing

    def make_way(self, running: RunningRequest, num_blocks: int, fence: Fence | None) -> None:
        """Before it draws: take back the blocks that it no longer needs. `fence` follows all launched
        steps."""
        self._promises.num += running.life.placement.make_way(running, num_blocks, fence)

    def try_draw(self, running: RunningRequest, num_blocks: int) -> bool:
        """Draw promised blocks, and more if there is room. All or nothing."""
        placement = running.life.placement
        if placement.fixed_blocks is None and placement.may_draw(running) - num_blocks < self._num_grown_at:
            self._grow(running, num_blocks)
            if num_blocks > placement.may_draw(running):
                return False
        if not running.table.try_extend(num_blocks):
            return False
        self._promises.num -= num_blocks
        return True

    def _grow(self, running: RunningRequest, num_blocks: int) -> None:
        """It draws `num_blocks` and comes near the end of its promise. Promise it more if blocks are
        unpromised. This happens some blocks early, so that other requests can end meanwhile; then one slot in
        64 stays unpromised, as at admission."""
        life = running.life
        num_beyond = num_blocks - life.placement.may_draw(running)
        if num_beyond <= 0 and running.promised == life.placement.most_blocks(life, life.lifetime_tokens):
            return
        room = self._num_unpromised - (0 if num_beyond > 0 else self._ledger.num_blocks // _SPARE_SHARE)
        num_more = min(room, max(num_beyond, self._likely(life) - running.promised))
        if num_more >= max(1, num_beyond):
            running.promised += num_more
            self._promises.num += num_more

    def num_short(self, running: RunningRequest, num_blocks: int) -> int:
        """Blocks that other requests must give up before it can draw `num_blocks`."""
        num_beyond = num_blocks - running.life.placement.may_draw(running)
        num_lacking = num_blocks - self._ledger.num_available
        return max(num_lacking, num_beyond - self._num_unpromised) if num_beyond > 0 else num_lacking

    @property
    def _num_unpromised(self) -> int:
        return int(self._ledger.num_available * self._budget.overcommit) - self._promises.num

    @property
    def _num_for_answers(self) -> int:
        return min(_ANSWER_BLOCKS + len(self.requests) // 2, self._ledger.num_blocks // _ANSWER_SHARE)

    def keep_free(self) -> None:
        """Answers draw block by block and never wait. So blocks that only the device has are saved before
        answers take their slots: losing a block in the middle of a prefix makes all later ones useless."""
        num_blocks = min(self._promises.num, self._num_for_answers)
        if num_blocks > 2 * self._ledger.num_free and self._ledger.make_room(
            num_blocks, self._promises.num, _SAVED_TOGETHER
        ):
            self._ledger.free_up(num_blocks)

    # -------------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Recount the running totals; raises InvariantBroken if they differ."""
        running = self.requests.values()
        promised = sum(one.life.placement.may_draw(one) for one in running)
        if promised != self._promises.num:
            raise InvariantBroken(f"{self._promises.num} blocks are promised, requests may draw {promised}")
        num_backed = self._ledger.num_available + self._ledger.num_leaving
        if self._budget.overcommit == 1.0 and promised > num_backed:
            raise InvariantBroken(f"{promised} blocks are promised, {num_backed} can be drawn or soon can")
        rows = sorted([one.row for one in running] + self.free_rows)
        if rows != list(range(self._budget.max_batch)):
            raise InvariantBroken(f"rows do not add up: {rows}")

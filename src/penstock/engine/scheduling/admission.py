"""Which waiting request starts next. Owns the line, what is matched and read ahead for requests in it, and
their want of blocks. `Running` knows whether one fits; the scheduler starts it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from penstock.contract import KvLedger, Lease, Match, Request
from penstock.engine.scheduling import conversations
from penstock.engine.scheduling.budget import Budget, PrefillTimes
from penstock.engine.scheduling.conversations import Conversations, begins
from penstock.engine.scheduling.line import Line, want_rank
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.stages import Life, WaitingRequest

# requests in line that a plan looks at: requests that wait for a prefix may be overtaken, but not by
# thousands
_LOOK_AHEAD = 64
# requests in line that a plan ranks again: what is cached of them changes while they wait
_LOOK_AGAIN = 4
# while the next request does not fit, one plan in this many makes room for it ahead
_LOOK_FOR_ROOM = 8
_PREFETCHED = 4  # requests at the head of the line whose cold blocks are prefetched

Start = Callable[[WaitingRequest, Match], bool]


class Admission:
    """Takes requests from the line in its order, as long as they fit."""

    def __init__(
        self, ledger: KvLedger, budget: Budget, running: Running, times: PrefillTimes | None
    ) -> None:
        self.line = Line(budget.max_overtaken_s)
        self.conversations = Conversations(ledger, budget.max_overtaken_s)
        self._running = running
        self._ledger = ledger
        self._times = times
        self._num_looks = 0
        self._num_came = 0

    def came(self, request: Request) -> int:
        """A new request; returns its number in order of arrival."""
        self._num_came += 1
        self.conversations.came(request)
        return self._num_came

    def wait(self, life: Life, lease: Lease | None) -> None:
        """It joins the line, for the first time or again."""
        life.waiting = WaitingRequest(life, lease)
        self.line.add(life.waiting)

    def leave(self, waiting: WaitingRequest) -> None:
        """It ends before it is admitted. Call it before its state changes."""
        self.line.remove(waiting)
        waiting.life.waiting = None
        waiting.end_prefetch()
        waiting.end_lease()
        waiting.end_want()

    def admit(self, start: Start) -> None:
        """`start` gives a request its row and table; it returns False if its match was evicted."""
        if len(self.line) == 1 and self._start_alone(next(iter(self.line)), start):
            return
        for known in self.line.look_again(_LOOK_AGAIN):
            if known.life.placement.is_ready(known):
                self._rank(known, known.life.placement.find(known))
        passed: set[WaitingRequest] = set()  # waiting requests that others may overtake
        # the first deferred long conversation; all further new long ones are deferred too
        late: WaitingRequest | None = None
        waiting = iter(self.line)
        for _ in range(2 * _LOOK_AHEAD):
            next_one = next((one for one in waiting if one not in passed), None)
            if next_one is None or len(passed) >= _LOOK_AHEAD or not self._running.free_rows:
                return
            if late is not None and next_one.request.priority != late.request.priority:
                return  # a deferred request may be overtaken by rank, not by priority
            match = self._try_match(next_one)
            if match is None:
                passed.add(next_one)
                continue
            if not self._rank(next_one, match):  # it is still next
                if begins(next_one) and (late is not None or self._begins_later(next_one)):
                    late = late or next_one
                    passed.add(next_one)
                elif not self._start_next(next_one, match, start, passed):
                    return
                elif next_one in passed:
                    continue
            waiting = (
                iter(self.line) if late is None else self.line.passing(conversations.LONG_TOKENS, _LOOK_AHEAD)
            )

    def _start_next(
        self, waiting: WaitingRequest, match: Match, start: Start, passed: set[WaitingRequest]
    ) -> bool:
        """It is next: start it if it fits. False: no request starts now. One that reads first is added to
        `passed`."""
        if self._holds_back(waiting, match):
            return False
        if not self._running.fits(waiting, match):
            self._make_room_ahead(waiting, match)
            return False  # no request overtakes it: freed blocks go to the first in line
        if waiting.life.placement.reads_first(waiting, match):
            passed.add(waiting)
            return True
        if not self._running.has_room(waiting, match, len(self.line) - 1):
            return False
        self._start(waiting, match, start)
        return True

    def _start_alone(self, waiting: WaitingRequest, start: Start) -> bool:
        """It is the only request in line. If enough slots are free for it, it starts now, without a rank or a
        want."""
        match = self._try_match(waiting) if self._running.free_rows else None
        if match is None or self._holds_back(waiting, match):
            return False
        if not self._running.fits_free(waiting, match):
            return False
        return not waiting.life.placement.reads_first(waiting, match) and self._start(waiting, match, start)

    def _start(self, waiting: WaitingRequest, match: Match, start: Start) -> bool:
        """Pin its match in colder tiers, and start it. False if some of the match was evicted meanwhile."""
        lease = waiting.lease
        if match.num_colder and lease is not None and not lease.claim(match.num_blocks, match.num_colder):
            return False
        self.line.remove(waiting)  # before its state changes
        if not start(waiting, match):
            self.line.add(waiting)
            return False
        return True

    def _holds_back(self, waiting: WaitingRequest, match: Match) -> bool:
        """True while its room is kept for a conversation that was just answered. Only while other requests
        run: the wait is counted in their steps."""
        return self.conversations.keep_room and len(self._running) > 0 and not self._is_here(waiting, match)

    def _begins_later(self, waiting: WaitingRequest) -> bool:
        measured = self._times is None or self._times.seconds(1, 0.0) is not None
        return self.conversations.need_room(waiting, measured, self._running, self.line)

    def _is_here(self, waiting: WaitingRequest, match: Match) -> bool:
        """True if the device has KV of at least half of its tokens."""
        return 2 * match.num_blocks * self._ledger.block_tokens >= waiting.num_tokens

    def _make_room_ahead(self, waiting: WaitingRequest, match: Match) -> None:
        """It is next and waits for others to end. Use the time to save blocks that would be lost when it
        starts. Done in one plan of several."""
        self._num_looks += 1
        if self._num_looks % _LOOK_FOR_ROOM == 0:
            self._running.has_room(waiting, match, len(self.line) - 1)

    def _rank(self, waiting: WaitingRequest, match: Match) -> bool:
        """Rank it by what is cached, and want these blocks. Returns True if its place has changed."""
        life, ledger = waiting.life, self._ledger
        start_s = ledger.start_s(waiting.num_tokens, match)
        num_found = (match.num_blocks + match.num_colder + match.num_paged) * ledger.block_tokens
        share = min(1.0, num_found / waiting.num_tokens)
        changed = self.line.rank(waiting, start_s, share, self._is_here(waiting, match))
        rank = want_rank(waiting.request, waiting.rank)
        if life.prefix is not None and waiting.request.may_match:
            waiting.want = ledger.want(life.prefix.keys, rank, waiting.want)
        if waiting.lease is not None:
            waiting.lease.set_rank(rank)
        return changed

    def _try_match(self, waiting: WaitingRequest) -> Match | None:
        """None: it waits, and other requests may overtake it."""
        if not waiting.life.placement.is_ready(waiting):
            return None
        if self.is_pending(waiting) and (len(self._running) or self._ledger.num_settling):
            return None  # another request or transfer produces what it lacks: share it
        return waiting.life.placement.find(waiting)

    def is_pending(self, waiting: WaitingRequest) -> bool:
        """True if another request or a transfer will produce the blocks it lacks, and it waits for them. Also
        extends its keys to its newest tokens."""
        life, ledger = waiting.life, self._ledger
        if life.prefix is None or not waiting.request.may_match:
            return False
        if len(life.prefix.keys) < len(life.tokens) // ledger.block_tokens:  # it has generated tokens since
            life.prefix = ledger.extend_prefix(life.prefix, life.tokens)
        return not life.computes and ledger.is_pending(life.prefix.keys, waiting.want)

    def prefetch(self) -> None:
        """Read the cold blocks of the first requests in line into host memory: once per wait, and for one
        more request in each plan, since a lookup takes time in proportion to the prefix."""
        is_next = True
        for waiting in islice(self.line, _PREFETCHED):
            life = waiting.life
            life.placement.read_on(waiting)
            # True only for the first request, if this read is all that it waits for
            is_next = is_next and life.placement.has_host_room
            if not is_next and not self._ledger.may_prefetch:
                return
            lease = waiting.lease
            if waiting.may_prefetch and not life.computes and lease is not None and lease.ready:
                waiting.may_prefetch = False
                waiting.prefetch = life.placement.prefetch(waiting, is_next)
                if waiting.prefetch is not None:
                    return
            is_next = False

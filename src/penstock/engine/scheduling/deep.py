"""Deep requests: sequences that do not fit on the device. Only their last blocks are there; those before them
are in host memory. Owns paging, lending, the copies of chosen parts, and kept contexts; `residency.py`
chooses the parts. The rest of the scheduler knows nothing of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from penstock.contract import Fence, KvLedger, Match, PartScores, Prefetch, Request, Table
from penstock.engine.scheduling.boundaries import AtBoundaries
from penstock.engine.scheduling.budget import Budget, Promises, blocks_for
from penstock.engine.scheduling.events import SchedulerCounts
from penstock.engine.scheduling.placement import NO_MATCH, Placed, Placement
from penstock.engine.scheduling.residency import AroundDrafts, KeptContext, KeptContexts, ResidentSet
from penstock.engine.scheduling.stages import RunningRequest, WaitingRequest
from penstock.engine.scheduling.steps import NextStep
from penstock.engine.scheduling.windowed import Windowed
from penstock.errors import InvariantBroken

# one step of a deep request computes at most this part (1/n) of the blocks that it may have on the device
_CHUNK_SHARE = 2


class DeepContexts:
    """What all deep requests share: host memory, contexts kept between turns, and turns at scoring."""

    def __init__(
        self,
        ledger: KvLedger,
        budget: Budget,
        promises: Promises,
        tau: Callable[[], int],
        counts: SchedulerCounts,
    ) -> None:
        """`tau`: steps between two scorings, by their measured cost."""
        self.ledger = ledger
        self.budget = budget
        self.promises = promises
        self.counts = counts
        self.kept = KeptContexts(budget.division, ledger.num_pageable)
        self.num_host_blocks = 0  # blocks that running deep requests may need in host memory
        self.num_scored = 0
        # (id, range of kept key bounds) of scored requests that left since the last call of `take_left`
        self._left: list[tuple[str, range]] = []
        self._tau = tau
        self._on_device = _on_device(ledger, budget)

    def placement(self, request: Request, num_tokens: int) -> Placement:
        """For a request that has at most `num_tokens` tokens of KV."""
        num_blocks = blocks_for(num_tokens, self.ledger.block_tokens)
        if request.prefix is None or not 0 < self.budget.deep_blocks < num_blocks:
            return self._on_device
        if isinstance(self._on_device, AtBoundaries):
            return DeepAtBoundaries(self, request, num_blocks, self._on_device)
        return Deep(self, request, num_blocks)

    @property
    def tau(self) -> int:
        """Tokens between two scorings of one request: one request scores per step, in turn."""
        return self._tau() * self.num_scored

    def leave_scored(self, request_id: str, kept: range) -> None:
        self.num_scored -= 1
        self._left.append((request_id, kept))

    def take_left(self) -> list[tuple[str, range]]:
        left, self._left = self._left, []
        return left

    def check(self, running: Iterable[RunningRequest]) -> None:
        """Recount; raises InvariantBroken if totals differ."""
        deep = [one.life.placement for one in running if isinstance(one.life.placement, Deep)]
        needed, num_scored = sum(one.num_host_blocks for one in deep), sum(one.is_scored for one in deep)
        if needed != self.num_host_blocks or (needed and needed > self.ledger.num_pageable):
            raise InvariantBroken(
                f"deep requests may need {needed} host blocks; {self.num_host_blocks} are counted, "
                f"{self.ledger.num_pageable} exist"
            )
        if num_scored != self.num_scored:
            raise InvariantBroken(f"{self.num_scored} scored requests are counted, {num_scored} run")


def _on_device(ledger: KvLedger, budget: Budget) -> Placement:
    """Of requests that fit."""
    if ledger.states is not None:
        unit = 1 if budget.division is None else budget.division.part_blocks
        return AtBoundaries(ledger, ledger.states, budget.state_every, unit)
    return Placement(ledger) if ledger.keeps_all else Windowed(ledger, budget)


class Deep(Placement):
    """The placement of one request. With `residency` it is scored: it decodes over a chosen part of
    its context."""

    def __init__(self, contexts: DeepContexts, request: Request, num_host_blocks: int) -> None:
        super().__init__(contexts.ledger)
        self._contexts = contexts
        self.fixed_blocks = contexts.budget.resident_blocks
        self.num_host_blocks = num_host_blocks  # blocks that it needs at most, all of them in host memory
        self._division = contexts.budget.division if request.residency is not None else None
        # its blocks are paged out in multiples of this; of a scored request, in whole parts
        self._unit = 1 if self._division is None else self._division.part_blocks
        self._num_read = 0  # blocks found in host memory at the last lookup
        # context kept from an earlier turn and its usable blocks, from the last match
        self._continues: tuple[KeptContext, int] | None = None
        self.resident: ResidentSet | None = None  # of a scored request that has a table
        # blocks that it paged out while other requests still hold them on the device; lowers its limit there
        self.num_lent = 0

    # ------------------------------------------------------------------------------------------------ in line

    def is_ready(self, waiting: WaitingRequest) -> bool:
        return super().is_ready(waiting) and not self._is_being_read(waiting)

    def _is_being_read(self, waiting: WaitingRequest) -> bool:
        """True if colder tiers have blocks of it that are not in host memory yet, and no read is late."""
        if waiting.life.computes:
            return False
        if waiting.prefetch is not None:
            return not waiting.prefetch.overdue
        lease = waiting.lease
        return (
            waiting.may_prefetch
            and lease is not None
            and any(tier != "host" for tier, _ in lease.runs_from(0))
        )

    def find(self, waiting: WaitingRequest) -> Match:
        life, ledger, kept = waiting.life, self._ledger, self._contexts.kept
        if life.prefix is None or not waiting.request.may_match:
            return NO_MATCH
        keys = life.prefix.keys[: (len(life.tokens) - 1) // ledger.block_tokens]  # a token is computed
        self._continues = None
        if (
            kept
            and waiting.request.residency is not None
            and not life.computes
            and (context := kept.find(keys)) is not None
        ):
            num = kept.num_usable(self._match(context.keys, 0).num_paged, len(life.tokens))
            if num:
                self._continues = context, num
                return Match(0, 0, False, num_paged=num)
        return self._match(keys, self.fixed_blocks)

    def _match(self, keys: Sequence[bytes], most_resident: int | None) -> Match:
        """Of its blocks in host memory, whole units."""
        match = self._ledger.match(keys, most_resident=most_resident)
        return match._replace(num_paged=self._whole(match.num_paged))

    def reads_first(self, waiting: WaitingRequest, match: Match) -> bool:
        """Its lease may have expired, blocks read for it may have been evicted, or there was no room for all
        of them. The tiers are asked once for each longer match."""
        life = waiting.life
        num_found = match.num_blocks + match.num_paged
        num_usable = self._whole((len(life.tokens) - 1) // self._ledger.block_tokens)
        if life.computes or self._continues is not None or waiting.prefetch is not None:
            return False
        if life.prefix is None or not waiting.request.may_match:
            return False
        if not waiting.leased_at < num_found < num_usable:
            return False
        waiting.leased_at = num_found
        self._lease_again(waiting, whole=True)
        waiting.may_prefetch, self._num_read = True, match.num_paged
        lease = waiting.lease
        return lease is not None and (not lease.ready or self._whole(lease.num_from(0)) > num_found)

    def _whole(self, num_blocks: int) -> int:
        """Rounded down to the unit in which its blocks are paged out."""
        return num_blocks // self._unit * self._unit

    def read_on(self, waiting: WaitingRequest) -> None:
        """It runs once all of it is in host memory, and one read may bring only a part. As long as reads
        bring something, there may be more. If host memory had no room, or the read was ended early, it is
        tried again later."""
        if waiting.prefetch is None or not waiting.prefetch.settled:
            return
        was_ended = waiting.prefetch.ended
        waiting.end_prefetch()
        self._lease_again(waiting, whole=True)
        runs = () if waiting.lease is None else waiting.lease.runs_from(0)
        num_read = sum(num for tier, num in runs[:1] if tier == "host")
        waiting.may_prefetch, self._num_read = num_read > self._num_read, num_read
        if not waiting.may_prefetch and self.has_host_room and not was_ended:
            waiting.leased_at = num_read

    def prefetch(self, waiting: WaitingRequest, is_next: bool) -> Prefetch | None:
        prefix = waiting.life.prefix
        if prefix is None:
            return None
        return self._ledger.prefetch(prefix, waiting.request.id, waiting.lease, whole=True, is_next=is_next)

    @property
    def has_host_room(self) -> bool:
        return self._contexts.num_host_blocks + self.num_host_blocks <= self._ledger.num_pageable

    # ---------------------------------------------------------------------------------------------- admission

    def open(self, waiting: WaitingRequest, match: Match) -> Table | None:
        prefix = waiting.life.prefix
        assert prefix is not None
        if self._continues is not None:
            context, num_blocks = self._continues
            prefix = prefix._replace(keys=context.keys[:num_blocks])
        return self._ledger.open(waiting.request.id, prefix, match.num_blocks, match.num_paged)

    def cached(self, waiting: WaitingRequest, match: Match) -> tuple[int, Sequence[tuple[str, int]]]:
        num_blocks = match.num_blocks + match.num_paged
        runs = ("device", match.num_blocks), ("host", match.num_paged)
        return num_blocks * self._ledger.block_tokens, runs

    def enter(self, running: RunningRequest) -> None:
        self._contexts.num_host_blocks += self.num_host_blocks
        life, asked = running.life, running.request.residency
        if self._division is None or asked is None:
            return
        self._contexts.num_scored += 1
        # only the first generated token attends to the full context
        self.is_partial |= self._continues is not None or running.request.sampling.max_tokens > 1
        if self._continues is not None:
            self._contexts.kept.use(self._continues[0])
        self.resident = ResidentSet(
            self._division, asked.pins, len(life.tokens), life.lifetime_tokens, self._continues
        )

    # ------------------------------------------------------------------------------------------------ running

    @property
    def is_scored(self) -> bool:
        return self.resident is not None

    def _deciding(self, running: RunningRequest) -> ResidentSet | None:
        """The resident set that its next tokens attend to; None if they attend to all tokens."""
        resident = self.resident
        return resident if resident is not None and resident.decodes(running.num_planned) else None

    def reads_host(self, running: RunningRequest) -> bool:
        return running.table.num_paged > 0 and self._deciding(running) is None

    def may_draw(self, running: RunningRequest) -> int:
        table = running.table
        most = self._contexts.budget.resident_blocks - self.num_lent + table.num_paged
        return most - table.num_slots - table.num_fetched

    def num_fitting(
        self, running: RunningRequest, num_tokens: int, step: NextStep, fence: Fence | None
    ) -> int:
        """Paging out blocks for them may make it read host memory for the first time."""
        if not step.reads_host and self.reads_host(running):
            return 0
        num_fitting = self._num_after_paging(running, num_tokens, fence)
        if (resident := self._deciding(running)) is not None:
            resident.scorings.tau = self._contexts.tau
            running.table.close_scope(running.num_planned)
            self._rearrange(running, resident, num_fitting, fence)
            if resident.is_filling(running.table):
                return 0
            if not (step.reads_host or resident.shows_needed(running.table)):
                return 0
        return 0 if not step.reads_host and self.reads_host(running) else num_fitting

    def _num_after_paging(self, running: RunningRequest, num_tokens: int, fence: Fence | None) -> int:
        """How many of its next tokens fit on the device when its oldest blocks there are paged out. 0 while
        these blocks are still being saved."""
        table, size, ledger = running.table, self._ledger.block_tokens, self._ledger
        most = self._contexts.budget.resident_blocks - self._take_lent_back()
        # while one chunk is computed, the chunk before it is saved
        num_tokens = min(num_tokens, max(1, most // _CHUNK_SHARE) * size)
        most -= table.num_fetched
        num_short = blocks_for(running.num_planned + num_tokens, size) - table.num_paged - most
        num_short = -(-num_short // self._unit) * self._unit
        if (resident := self._deciding(running)) is not None:
            num_short = resident.num_making_way(table, num_short, most)
        if num_short > 0:
            num_before = ledger.num_available
            num_paged = table.page_out(num_short, fence, self._unit)
            num_free = ledger.num_available - num_before
            # only the freed ones: the rest may be promised to other requests
            self._contexts.promises.num += num_free
            self.num_lent += num_paged - num_free
            most -= num_paged - num_free
            if resident is not None and num_paged < num_short and not resident.shows_needed(table):
                return 0  # no room yet for the parts that the next tokens must attend to
        return max(0, min(num_tokens, (table.num_paged + most) * size - running.num_planned))

    def _take_lent_back(self) -> int:
        """Other requests released blocks that it paged out, or there is unpromised room: it may draw that
        many again. Returns the blocks still lent."""
        promises = self._contexts.promises
        num_back = min(self.num_lent, max(0, self._ledger.num_available - promises.num))
        self.num_lent -= num_back
        promises.num += num_back
        return self.num_lent

    def _rearrange(
        self, running: RunningRequest, resident: ResidentSet, num_tokens: int, fence: Fence | None
    ) -> None:
        """Move the resident set towards its target, in room that its next `num_tokens` do not need."""
        table, promises, size = running.table, self._contexts.promises, self._unit
        for fetched in (*resident.take_landed(), *resident.take_surplus(table)):
            promises.num += len(fetched.slots)
            fetched.end(fence)
        next_blocks = blocks_for(running.num_planned + num_tokens, self._ledger.block_tokens)
        room = min(
            resident.most_fetched(table) - self.num_lent - table.num_fetched,
            self.may_draw(running) - max(0, next_blocks - table.num_slots),
        )
        parts = resident.wanted(table)[: max(0, room // size)]
        coming = table.fetch([part * size for part in parts], size) if parts else ()
        for part, one in zip(parts, coming, strict=False):
            promises.num -= size
            resident.coming(part, one)
        self._contexts.counts.parts_fetched += len(coming)

    def place(self, running: RunningRequest, start: int, end: int, room: int, step: NextStep) -> Placed:
        table = running.table
        if self.resident is not None:
            drafts = AroundDrafts(running.num_drafted, room)
            return self.resident.place(table, start, end, not step.scores, step.reads_host, drafts)
        return Placed(table.slots(end + room), table.paged_slots if table.num_paged else None)

    def take_scores(self, given: PartScores) -> None:
        if self.resident is not None:
            self.resident.take_scores(given.scores)
            self._contexts.counts.see_scoring(given.recall)

    def leave(self, running: RunningRequest, is_answered: bool, fence: Fence | None) -> None:
        if (resident := self.resident) is not None:
            kept = self._keep_context(running, resident, is_answered)
            self._contexts.leave_scored(running.request.id, kept)
        self._contexts.num_host_blocks -= self.num_host_blocks
        self.num_lent, self.resident = 0, None

    def _keep_context(self, running: RunningRequest, resident: ResidentSet, is_answered: bool) -> range:
        """If it `is_answered`, its context is kept for the next turn of its conversation. Returns the range
        of its kept key bounds; empty if they are not kept."""
        table, life, contexts = running.table, running.life, self._contexts
        if resident.context is not None:
            contexts.kept.leave(resident.context)
        num_blocks = resident.num_keeping(table) if is_answered else 0
        if num_blocks == 0 or life.prefix is None:
            return range(0)
        name = self._ledger.extend_prefix(life.prefix, life.tokens).keys[num_blocks - 1]
        context = resident.kept(name, tuple(table.sealed_keys[:num_blocks]))
        forgotten = contexts.kept.keep(context, resident.context)
        if context.place:
            table.keep_closed(name, context.num_open, num_blocks)
        self._ledger.forget_closed(forgotten)
        return context.place


class DeepAtBoundaries(Deep):
    """Of a model with recurrent layers: its blocks are paged out, its state stays in its row. `boundaries`:
    of all requests of this model, also of those that fit."""

    saves_rest = False
    divides = False

    def __init__(
        self, contexts: DeepContexts, request: Request, num_host_blocks: int, boundaries: AtBoundaries
    ) -> None:
        super().__init__(contexts, request, num_host_blocks)
        self._boundaries = boundaries

    def is_ready(self, waiting: WaitingRequest) -> bool:
        is_known = self._boundaries.is_known(waiting)
        return super().is_ready(waiting) and is_known

    def _match(self, keys: Sequence[bytes], most_resident: int | None) -> Match:
        """As far as there is a state behind a whole unit."""
        match = self._ledger.match(keys, most_resident=most_resident)
        while (num := self._whole(match.num_paged)) < match.num_paged:
            keys = keys[:num]
            match = self._ledger.match(keys, most_resident=most_resident)
        return match

    def reads_first(self, waiting: WaitingRequest, match: Match) -> bool:
        if super().reads_first(waiting, match):
            return True
        num = match.num_blocks + match.num_paged
        return self._continues is None and self._boundaries.reads_state_first(
            waiting, num, waiting.num_tokens
        )

    def open(self, waiting: WaitingRequest, match: Match) -> Table | None:
        table = super().open(waiting, match)
        if table is None:
            return None
        num_shared = sys.maxsize
        if self._division is not None:  # of the tokens that see all before them
            num_paged = table.num_paged * self._ledger.block_tokens
            num_shared = waiting.num_tokens if self._continues is None else num_paged
        if not self._boundaries.begin(waiting, table.sealed_keys, num_shared=num_shared):
            table.release(None)
            return None
        return table

    def enter(self, running: RunningRequest) -> None:
        super().enter(running)
        self._boundaries.enter(running)

    def until_boundary(self, running: RunningRequest, num_tokens: int) -> int:
        return self._boundaries.until_boundary(running, num_tokens)

    def most_drafts(self, running: RunningRequest) -> int:
        return min(super().most_drafts(running), self._boundaries.most_drafts(running))

    def place(self, running: RunningRequest, start: int, end: int, room: int, step: NextStep) -> Placed:
        placed = super().place(running, start, end, room, step)
        return placed._replace(state=self._boundaries.move(running, end))

    def computed(self, running: RunningRequest, fence: Fence | None) -> None:
        self._boundaries.computed(running, fence)

    def leave(self, running: RunningRequest, is_answered: bool, fence: Fence | None) -> None:
        super().leave(running, is_answered, fence)
        self._boundaries.leave(running, is_answered, fence)

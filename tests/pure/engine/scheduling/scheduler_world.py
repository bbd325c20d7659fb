"""A world for the scheduler: the real KV books, a device that disbelieves its plans, and listeners who know
what they must get.

Steps run as late as possible, just before their result is taken in, and copies between tiers when they are
told to: whatever is wrong about order shows.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.contract import (
    Fence,
    FinishReason,
    Lease,
    Match,
    Prefix,
    Request,
    SamplingParams,
    StepFailure,
    StepPlan,
    StepResult,
    TokenEvent,
    Waits,
)
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.lengths import Lengths
from penstock.engine.scheduling.scheduler import Estimates, Scheduler
from penstock.engine.scheduling.stages import State
from penstock.errors import TransferFailed
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.rules import PrefixRule, rule_for
from penstock.kv.states import KEPT_STATES, KeptStates
from penstock.kv.table import BlockTable
from penstock.kv.tiers.loads import BlockLoad, Copy
from penstock.kv.tiers.reads import Fetch
from tests.pure.engine.scheduling.scheduler_device import BLOCK, EOS, SCOPE, Device, generate
from tests.pure.engine.scheduling.scheduler_rules import check_event, check_plan, check_turn, check_wants
from tests.pure.engine.scheduling.scheduler_tiers import Cold, Tiers
from tests.pure.engine.scheduling.scheduler_times import UNTIMED, Timed, check_time


class StepFence:
    """Lies behind step `number`."""

    lane = "compute"

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.number = number

    def passed(self) -> bool:
        return self._world.num_run >= self.number

    def wait_passed(self, timeout_s: float | None = None) -> None:
        raise AssertionError("the scheduler never waits")


class WatchedTable(BlockTable):
    """One of a `WatchedCache`, which knows what is done to it."""

    __slots__ = ()

    @property
    def _cache(self) -> WatchedCache:
        return self._tables.watched  # type: ignore[attr-defined, no-any-return]

    def page_out(self, num_blocks: int, fence: Fence | None, unit: int = 1) -> int:
        cache, world = self._cache, self._cache.world
        newest, held = world.newest_fence, list(self.hold.slots)
        assert fence is newest, (
            f"slots of {self.owner} go back with {fence} and not with the newest step's fence"
        )
        num_before = cache.num_available
        num = super().page_out(num_blocks, fence, unit)
        world.seen["paged out what others have"] += cache.num_available < num_before + num
        cache.lent[self] = cache.lent.get(self, 0) + num_before + num - cache.num_available
        if newest is not None:
            cache.last_fence.update(dict.fromkeys(held[:num], newest))
        world.seen["paged out"] += num > 0
        world.seen["paged out in part"] += 0 < num < num_blocks
        return num

    def let_go(self, num_tokens: int, fence: Fence | None) -> int:
        cache, world = self._cache, self._cache.world
        held = list(self.hold.slots)
        assert fence is world.newest_fence, (
            f"slots of {self.owner} go back with another fence than the newest"
        )
        num = super().let_go(num_tokens, fence)
        gone = held[:num]
        if world.newest_fence is not None:
            cache.last_fence.update(dict.fromkeys(gone, world.newest_fence))
        world.seen["left the window"] += num > 0
        world.seen["left the window while it is saved"] += any(cache.pool.book.pins[slot] for slot in gone)
        world.seen["left the window while others have it"] += any(
            cache.pool.book.holds[slot] for slot in gone
        )
        world.seen["left the window and is found"] += any(map(cache.key_of, gone))
        return num

    def promote(self, lease: Lease, num_blocks: int, num_next: int) -> BlockLoad:
        world = self._cache.world
        asked, first = world.asked[self.owner], self.num_slots
        tiers = [tier for tier, num in lease.runs_from(first) for _ in range(num)]
        if self.num_gone == first:  # what is before the window counts with its first block
            origin = asked.origin(first, tiers[0])
            asked.sources, asked.num_landed = [origin] * first * BLOCK, asked.num_landed + first * BLOCK
            if tiers[0] == "host":
                asked.sources = [asked.origin(block, "host") for block in range(first) for _ in range(BLOCK)]
        world.seen["load of a window"] += self.num_gone > 0
        world.seen["load behind a part of a window"] += 0 < self.num_gone < first
        asked.sources += [
            asked.origin(block, tier) for block, tier in enumerate(tiers, first) for _ in range(BLOCK)
        ]
        load = super().promote(lease, num_blocks, num_next)
        assert asked.request.may_match, "it cannot use what is cached"
        asked.load, asked.load_waited, asked.num_asked = load, False, num_blocks
        self._cache.check_covered(self.hold.slots[first : first + num_blocks], load.after)
        world.seen["cold load" if load.is_cold else "promotion"] += 1
        world.seen["cold load that shares a fetch"] += bool(load.awaited)
        world.seen["promotion of what was fetched"] += not load.is_cold and asked.was_fetched
        return load

    def retract(self, num_tokens: int, fence: Fence | None) -> Lease | None:
        world = self._cache.world
        asked = world.asked[self.owner]
        lease = super().retract(num_tokens, fence)
        assert lease is None or not self.is_deep, (
            "what a deep request has is in host memory, and is matched again"
        )
        world.seen["deep request that was retracted"] += self.is_deep
        asked.ran |= lease is not None and any(end <= num_tokens for end in world.ends_in_flight(self.owner))
        return lease

    def release(self, fence: Fence | None) -> None:
        cache, newest = self._cache, self._cache.world.newest_fence
        assert fence is newest, (
            f"slots of {self.owner} go back with {fence} and not with the newest step's fence"
        )
        if newest is not None:
            cache.last_fence.update(dict.fromkeys(self.hold.slots, newest))
        super().release(fence)
        del cache.tables[self.owner]
        if self.owner in cache.world.asked:
            # whatever is still on its way is nothing to it any more
            cache.world.asked[self.owner].load = None


class WatchedCache(KvCache):
    """The real cache. Checks that slots are given back with the fence of the newest step, and knows what is
    out."""

    def __init__(
        self, world: World, pool: BlockPool, prefix_cache: bool, tiers: Tiers | None, rule: PrefixRule
    ) -> None:
        super().__init__(pool, SCOPE, prefix_cache, None if tiers is None else tiers.wired, rule)
        self._tables.watched = self  # type: ignore[attr-defined]
        self.world = world
        self.pool = pool
        self.tables: dict[str, BlockTable] = {}
        self.last_fence: dict[int, StepFence] = {}  # by slot
        # blocks that a table has paged out, and that others had on the device then
        self.lent: dict[BlockTable, int] = {}

    def open(  # type: ignore[override]
        self,
        owner: str,
        prefix: Prefix | None,
        num_blocks: int,
        num_paged: int | None = None,
        num_gone: int = 0,
    ) -> BlockTable | None:
        assert owner not in self.tables, f"{owner} opens a second table"
        if num_paged is not None:
            assert num_paged == 0 or num_blocks == 0, "what matched is in one place"
            assert num_blocks <= self.world.budget.resident_blocks, (
                "it begins with more on the device than it may have there"
            )
            if self.world.loses is not None:
                assert prefix is not None
                self.world.loses(prefix, Match(num_blocks, 0, False, num_paged=num_paged))
        # with windows, a block that a request in line waited for may have been evicted for one behind it
        if owner in self.world.asked and not self.world.window and self.states is None:
            check_turn(self.world, owner)
        table = super().open(owner, prefix, num_blocks, num_paged, num_gone)
        self.world.seen["what matched of a deep request has gone"] += table is None
        if table is None:
            return None
        assert table.num_paged == (num_paged or 0), "what matched has gone, and nobody was told"
        self.tables[owner] = table
        table.__class__ = WatchedTable
        if (asked := self.world.asked.get(owner)) is not None:
            self.world.log.admitted.append(owner)
            asked.open(num_blocks, num_paged or 0)
        self.world.seen["deep match in host memory"] += bool(num_paged)
        self.world.seen["match without what left the window"] += num_gone > 0
        return table

    def check_covered(self, slots: Sequence[int], after: Sequence[Fence]) -> None:
        covered = max((fence.number for fence in after), default=0)  # type: ignore[attr-defined]
        for slot in slots:
            fence = self.last_fence.get(slot)
            assert fence is None or fence.passed() or covered >= fence.number, (
                f"slot {slot} is promoted into under step {fence.number}"
            )

    def prefetch(
        self,
        prefix: Prefix,
        owner: str,
        lease: Lease | None = None,
        whole: bool = False,
        is_next: bool = False,
    ) -> Fetch | None:
        asked = self.world.asked[owner]
        assert asked.request.may_match and self.world.state_of(owner) in ("waiting", "retracted"), (
            "nobody waits for it"
        )
        fetch = super().prefetch(prefix, owner, lease, whole, is_next)
        is_deep = 0 < self.world.budget.deep_blocks < asked.lifetime_blocks  # not all of it is read at once
        assert fetch is None or asked.may_fetch or is_deep, f"{owner} has its blocks read ahead twice"
        asked.was_fetched |= fetch is not None
        asked.may_fetch = asked.may_fetch and fetch is None
        asked.fetches += [] if fetch is None else [fetch]
        self.world.seen["prefetch"] += fetch is not None
        return fetch

    def _land(self, copy: Copy) -> None:
        super()._land(copy)
        asked = self.world.asked[copy.load.hold.owner]
        asked.num_landed += copy.num_blocks * BLOCK

    def is_private(self, slot: int) -> bool:
        """Held by one table and without a key."""
        return self.pool.book.holds[slot] == 1 and self.key_of(slot) is None

    def key_of(self, slot: int) -> bytes | None:
        return self.pool.index.key_of[slot]


@dataclass
class Life:
    """A request from its start on a row to its end or retraction, as its plans show it."""

    row: int
    end: int = 0  # positions planned so far
    slots: list[int] = field(default_factory=list)
    paged: list[int] = field(default_factory=list)  # slots of host memory, of the blocks before those
    num_elsewhere: int = 0  # blocks before `slots`
    covered: int = 0  # its steps come behind step number so much


@dataclass
class Asked:
    """A request, what it must produce, and what its listener has got."""

    request: Request
    tokens: list[int]
    finish: FinishReason
    stop_token: int | None
    got: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    lives: list[Life] = field(default_factory=list)
    first: TokenEvent | None = None
    num_opened: int = 0  # blocks found on the device, for its newest table
    num_landed: int = 0  # tokens that came from colder tiers for it
    # of its newest table: for each token that was there, or was to be loaded, the tier
    sources: list[str] = field(default_factory=list)
    num_asked: int = 0  # blocks of its newest load
    ran: bool = False  # a step has computed some of it, or will have before what it has is saved
    # for each prompt token that was not computed, the tier that had it
    came: list[str] = field(default_factory=list)
    load: BlockLoad | None = None  # the newest for it
    was_fetched: bool = False  # something was read into host memory for it while it waited
    may_fetch: bool = True  # nothing was, since it last had a table
    fetches: list[Fetch] = field(default_factory=list)
    load_waited: bool = False  # a step has waited for it

    @property
    def known(self) -> list[int]:
        return [*self.request.prompt, *self.got]

    @property
    def lifetime_blocks(self) -> int:
        return blocks_for(len(self.request.prompt) + max(0, self.request.sampling.max_tokens - 1), BLOCK)

    def begin(self, row: int) -> None:
        self.lives.append(Life(row))

    def found(self, num_tokens: int) -> None:
        """A life begins with so many tokens there. Until it has computed anything itself that is all others'
        work."""
        if self.first is None:
            self.came = (self.came if self.ran else self.sources)[:num_tokens]

    def origin(self, block: int, tier: str = "host") -> str:
        """The tier that the block came from, which `tier` has now: what host memory has may have been read
        for it."""
        return (
            next((fetch.origins[block] for fetch in self.fetches[::-1] if block in fetch.origins), tier)
            if tier == "host"
            else tier
        )

    def open(self, num_blocks: int, num_paged: int) -> None:
        """Its table begins with so many blocks of the device, or so many that stay in host memory."""
        self.may_fetch = True
        self.num_opened = num_blocks
        tiers = ["device"] * num_blocks + [self.origin(block) for block in range(num_paged)]
        self.sources = [tier for tier in tiers for _ in range(BLOCK)]
        self.num_landed += num_paged * BLOCK


@dataclass(frozen=True)
class Sizes:
    """What a world is made of."""

    num_slots: int = 8
    max_batch: int = 4
    prefill_chunk: int = 8
    overcommit: float = 1.0
    prefix_cache: bool = True
    cold: Cold | None = None
    timed: Timed = UNTIMED
    max_overtaken_s: float = 0.0
    num_resident: int = 0
    num_deep: int = 0
    lengths: Lengths | None = None
    window: int = 0  # tokens that each token sees; 0: all
    num_states: int = 0  # slots of kept states; 0: no layer is recurrent
    state_every: int = 0

    @property
    def budget(self) -> Budget:
        step = self.max_batch, self.prefill_chunk, self.overcommit, self.max_overtaken_s
        deep = self.num_deep or self.num_resident, self.num_resident
        timed = self.timed.chunk_s, self.timed.min_chunk
        return Budget(*step, *timed, *deep, state_every=self.state_every)


@dataclass
class Log:
    """All that went between the scheduler and its engine."""

    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    waits: dict[int, Waits] = field(default_factory=dict)  # by step: what the ids of its plan stand for
    moves: list[tuple[str, State]] = field(default_factory=list)  # of requests between states
    states: dict[str, State] = field(default_factory=dict)  # of requests that have moved
    admitted: list[str] = field(default_factory=list)  # in order; those that were admitted again again

    def hear(self, moves: Iterable[tuple[str, State]]) -> None:
        for move in moves:
            self.moves.append(move)
            self.states[move[0]] = move[1]


class World:
    """Requests, a scheduler, the KV books and a device; every plan and event that goes between them is
    checked."""

    def __init__(self, make: type[Scheduler] = Scheduler, **sizes: Any) -> None:
        self.sizes = sizes_ = Sizes(**sizes)
        cold, lengths, times = sizes_.cold, sizes_.lengths, sizes_.timed.times
        self.budget = sizes_.budget
        self.window = sizes_.window
        # called when a deep request was matched and is about to begin
        self.loses: Callable[[Prefix, Match], None] | None = None
        self.now_s = 0.0  # when requests arrive
        self.newest_fence: StepFence | None = None
        self.num_run = 0
        self.asked: dict[str, Asked] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.log = Log()
        self.void: set[tuple[int, str]] = set()  # steps of requests that were undone before their result came
        self.seen: Counter[str] = Counter()
        has_stores = cold is not None and bool(cold.stores)
        self.device = Device(sizes_.num_slots, 1 if cold is None else cold.num_host, has_stores)
        pool = BlockPool(sizes_.num_slots, "device")
        self.tiers = None if cold is None else Tiers(cold, pool, self.device)
        states = KeptStates(BlockPool(sizes_.num_states, KEPT_STATES)) if sizes_.num_states else None
        self.device.has_states = states is not None
        self.cache = WatchedCache(
            self, pool, sizes_.prefix_cache, self.tiers, rule_for((sizes_.window,), BLOCK, states)
        )
        self.scheduler = make(self.cache, self.budget, [EOS], None, Estimates(times, lengths))

    # ----------------------------------------------------------------------------------------------- requests

    def submit(self, prompt: Sequence[int], max_tokens: int = 4, priority: int = 0, **sampling: Any) -> str:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        assert blocks_for(len(prompt) + max_tokens, BLOCK) <= self.most_blocks, (
            "the engine refuses what can never fit"
        )
        prefix = self.cache.prefix_of(prompt)
        request = Request(f"r{len(self.asked)}", list(prompt), params, prefix, self.now_s, priority=priority)
        self.asked[request.id] = Asked(request, *generate(prompt, params))
        self.device.requests[request.id] = request
        lease = (
            self.cache.lease(request.id, request.prefix)
            if request.prefix is not None and request.may_match
            else None
        )
        self.scheduler.add(request, lease)
        return request.id

    def cancel(self, request_id: str) -> None:
        state = self.state_of(request_id)
        self._end(request_id, self.scheduler.cancel(request_id), FinishReason.CANCELLED)
        self.seen[f"cancelled while {state}"] += 1

    def _end(self, request_id: str, event: TokenEvent | None, finish: FinishReason) -> None:
        asked = self.asked[request_id]
        assert (event is None) == (asked.ended is not None)
        if event is not None:
            assert event.finish is finish and event.tokens == () and event.request_id == request_id
            assert request_id not in self.cache.tables, f"{request_id} ended and keeps its blocks"
            self.seen[f"{finish} with a step in flight"] += bool(self.samples_in_flight(request_id))
            asked.ended = finish

    def outcome(self, request_id: str) -> tuple[list[int], FinishReason | None]:
        asked = self.asked[request_id]
        return asked.got, asked.ended

    def in_line(self) -> list[str]:
        """Whoever is next first."""
        return [one.request.id for one in self.scheduler.admission.line]

    def state_of(self, request_id: str) -> str:
        life = self.scheduler.lives.get(request_id)
        return "ended" if life is None else life.state.value

    def samples_in_flight(self, request_id: str) -> int:
        steps = [plan for plan in self.in_flight if (plan.number, request_id) not in self.void]
        return sum(c.num_logits for plan in steps for c in plan.chunks if c.request_id == request_id)

    def ends_in_flight(self, request_id: str) -> list[int]:
        """How far its steps in flight have computed it, once they are over."""
        steps = [plan for plan in self.in_flight if (plan.number, request_id) not in self.void]
        return [c.kv_len for plan in steps for c in plan.chunks if c.request_id == request_id]

    @property
    def most_blocks(self) -> int:
        """Of one request."""
        if self.cache.most_slots(sys.maxsize, self.budget.prefill_chunk) <= self.cache.num_blocks:
            return 10 * self.cache.num_blocks
        return max(self.cache.num_blocks, self.cache.num_pageable if self.budget.deep_blocks else 0)

    def num_promised(self) -> int:
        """Blocks of the device that those who run may still draw."""
        budget = self.budget
        most = {owner: self.asked[owner].lifetime_blocks for owner in self.cache.tables}
        deep = {owner for owner, num in most.items() if 0 < budget.deep_blocks < num}
        if self.sizes.lengths is not None or self.window:
            running = self.scheduler.running.requests
            most |= {owner: running[owner].promised for owner in most if owner not in deep}
        tables = self.cache.tables.items()
        lent = {owner: self.num_lent(owner) for owner in deep}
        return sum(
            (budget.resident_blocks - lent[o] + table.num_paged if o in deep else most[o])
            - table.num_slots
            + table.num_gone
            for o, table in tables
        )

    def num_lent(self, owner: str) -> int:
        """Blocks that a running deep request has paged out while others hold them."""
        return getattr(self.scheduler.lives[owner].placement, "num_lent", 0)

    # -------------------------------------------------------------------------------------------------- steps

    def plan(self, reads_host: bool = True) -> StepPlan | None:
        """Plan a step and launch it."""
        retractions = self.scheduler.counts.retractions
        self.seen["planned over two unread steps"] += len(self.in_flight) > 1
        loading = [i for i in self.cache.tables if self.state_of(i) == "loading"]
        planned = self.scheduler.plan() if reads_host else self.scheduler.plan(reads_host=False)
        plan = planned.plan
        self.log.hear(planned.news.moves)
        self.seen["retraction"] += self.scheduler.counts.retractions - retractions
        self.seen["retracted while loading"] += sum(self.state_of(i) == "retracted" for i in loading)
        if plan is not None:
            self.log.waits[plan.number] = planned.waits
            self.log.plans.append(plan)
            assert reads_host or not any(chunk.num_paged for chunk in plan.chunks), (
                "it reads host memory, and may not"
            )
            check_time(self, plan)
            check_plan(self, plan)
            self.in_flight.append(plan)
            self.newest_fence = StepFence(self, plan.number)
            self.scheduler.launched(self.newest_fence)
        for owner, table in self.cache.tables.items():
            lent = self.num_lent(owner)
            assert 0 <= lent <= self.cache.lent.get(table, 0), (
                f"{owner} is said to have lent {lent} blocks, and has paged out fewer"
            )
        return plan

    def commit(self, error: Exception | None = None) -> list[TokenEvent]:
        """Run the oldest step and take in its result."""
        plan = self.in_flight.popleft()
        for chunk in plan.chunks:
            written = (
                chunk.slots[chunk.start // BLOCK - chunk.num_elsewhere :].tolist() if chunk.writes else []
            )
            assert not any(map(self.cache.key_of, written)), (
                f"a step of {chunk.request_id} writes what others may read"
            )
        result = self._run(plan, error)
        self.log.results.append(result)
        still_open = {
            c.request_id
            for c in plan.chunks
            if self.asked[c.request_id].ended is None and (plan.number, c.request_id) not in self.void
        }
        self.num_run = plan.number
        self.cache.settle()  # the engine does, too: what the step has waited for has come
        outcome = self.scheduler.commit(result)
        events = list(outcome.events)
        self.log.hear(outcome.news.moves)
        told = [event.request_id for event in events]
        assert len(set(told)) == len(told) and set(told) <= still_open, (
            "one event per step, and none after the last"
        )
        if result.error is not None and result.error.lacked_kv:
            assert not events, "nobody ends because a tier failed"
            self.void |= {(later.number, request_id) for later in self.in_flight for request_id in still_open}
            self.seen["step without its load"] += 1
        elif result.error is None:
            for request_id in still_open:
                self.asked[request_id].ran = True
            for event in events:
                check_event(self, event)
        else:
            self._check_failed(events, still_open, result.error)
        self.cache.submit_saves()
        return events

    def _run(self, plan: StepPlan, error: Exception | None) -> StepResult:
        """The compute lane waits for what the plan says, then runs the step."""
        after, loads = self.log.waits[plan.number].of(plan)
        fences = [*after, *(arrival.fence for load in loads for arrival in load.arrivals or ())]
        self.device.lanes.run_until(
            lambda: all(f.passed() or f.lane == "compute" for f in fences), f"step {plan.number}"
        )
        for load in loads:
            if load.error() is not None:
                error = TransferFailed(str(load.error()))
        return self.device.run(plan) if error is None else self.device.fail(plan, error)

    def _check_failed(self, events: Sequence[TokenEvent], still_open: set[str], error: StepFailure) -> None:
        for event in events:
            assert (
                event.finish is FinishReason.ERROR
                and event.error == (f"{error.kind}: {error.message}")
                and not event.tokens
            )
            self.asked[event.request_id].ended = event.finish
        assert {event.request_id for event in events} == still_open, "every request of a failed step ends"
        self.seen["failed step"] += bool(events)

    def settle(self) -> bool:
        return self.cache.settle()

    def step(self) -> bool:
        """One turn of the engine: take in transfers, plan, then read the step before. Lanes go on
        meanwhile."""
        self.device.lanes.run_all()
        settled = self.settle()
        behind = bool(self.in_flight)
        plan = self.plan()
        if behind:
            self.commit()
        return behind or plan is not None or settled or self.cache.num_in_flight > 0

    def finish(self) -> None:
        """Step on until every request has ended, within the turns that it would take one after the other,
        each of them computed twice; then nothing may be left."""
        sizes = [
            len(a.request.prompt) + a.request.sampling.max_tokens
            for a in self.asked.values()
            if a.ended is None
        ]
        for _ in range(sum(2 * size + 4 for size in sizes) + 4):
            if not self.step():
                break
            self.check()
        assert all(asked.ended is not None for asked in self.asked.values()), "a request was left behind"
        assert not self.scheduler.has_work() and not self.scheduler.lives and not self.cache.tables
        assert sorted(self.scheduler.running.free_rows) == list(range(self.budget.max_batch))
        assert self.cache.num_in_flight == 0
        assert not self.cache.loads.reads
        for counts in self.cache.stats().slots.values():
            assert counts.free + counts.idle == sum(counts), f"something is still held: {counts}"
        if self.tiers is not None:
            assert len(self.tiers.host.leases) == 0, "a lease is left"
            assert len(self.tiers.host.pool.idle.wants) == 0, (
                "host blocks are wanted by somebody who has ended"
            )
        assert len(self.cache.pool.idle.wants) == 0, "blocks are wanted by somebody who has ended"
        assert self.scheduler.num_by_state() == {"waiting": 0, "loading": 0, "running": 0, "retracted": 0}

    def close(self) -> None:
        self.finish()
        self.check()
        self.cache.close()

    def check(self) -> None:
        """What holds between any two calls."""
        self.scheduler.check()
        self.cache.check()
        check_wants(self)
        for request_id, life in self.scheduler.lives.items():
            assert self.log.states.get(request_id, State.WAITING) is life.state, "its moves tell its state"
        slots = self.cache.stats().slots
        assert sum(slots["device"]) == self.cache.num_blocks
        if self.budget.overcommit == 1.0:
            promised = self.num_promised()
            num_backed = self.cache.num_available + self.cache.num_leaving
            assert promised <= num_backed, f"{promised} blocks are promised, {num_backed} can be drawn"
            pushed_out = self.scheduler.counts.retractions > 0 and not self.seen["step without its load"]
            # a block leaves its window when it is sealed; the engine plans with one unread step at most
            pushed_out &= not (self.window and self.seen["planned over two unread steps"])
            assert self.sizes.lengths is not None or not pushed_out, (
                "nobody is pushed out of what was promised"
            )
        for slot in range(self.cache.num_blocks):
            if (key := self.cache.key_of(slot)) is not None:
                self.device.check_sealed(self.device.arena, slot, key)
        if (states := self.cache.states) is not None:
            for slot, kept in enumerate(states.pool.index.key_of):
                if kept is not None:
                    self.device.check_kept(slot, kept)
        if self.tiers is not None:
            pool = self.tiers.host.pool
            assert sum(slots["host"]) == pool.num_slots
            for slot, host_key in enumerate(pool.index.key_of):
                if host_key is not None:
                    self.device.check_sealed(self.device.host, slot, host_key)

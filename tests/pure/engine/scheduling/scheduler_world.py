"""A world for the scheduler: the real KV books, a device that disbelieves its plans, and listeners who know what they must get.

Steps run as late as possible, just before their result is taken in: whatever is wrong about order shows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_device import BLOCK, EOS, SCOPE, Device, generate
from scheduler_rules import check_event, check_plan

from penstock.contract import Fence, FinishReason, Prefix, Request, SamplingParams, StepPlan, Table, TokenEvent
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.table import BlockTable
from penstock.kv.cache import KvCache


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


class WatchedCache(KvCache):
    """The real cache. Checks that slots are given back with the fence of the newest step, and knows what is out."""

    def __init__(self, world: World, pool: BlockPool, prefix_cache: bool) -> None:
        super().__init__(pool, SCOPE, prefix_cache)
        self._world = world
        self.pool = pool
        self.tables: dict[str, BlockTable] = {}
        self.last_fence: dict[int, StepFence] = {}  # by slot

    def open(self, owner: str, prefix: Prefix | None, num_blocks: int) -> BlockTable:
        assert owner not in self.tables, f"{owner} opens a second table"
        self.tables[owner] = super().open(owner, prefix, num_blocks)
        return self.tables[owner]

    def release(self, table: Table, fence: Fence | None) -> None:
        assert isinstance(table, BlockTable)
        newest = self._world.newest_fence
        assert fence is newest, f"slots of {table.owner} go back with {fence} and not with the newest step's fence"
        if newest is not None:
            self.last_fence.update(dict.fromkeys(table.hold.slots, newest))
        super().release(table, fence)
        del self.tables[table.owner]

    def is_private(self, slot: int) -> bool:
        """Held by one table and without a key."""
        return self.pool._book.holds[slot] == 1 and self.key_of(slot) is None

    def key_of(self, slot: int) -> bytes | None:
        return self.pool._index.key_of[slot]


@dataclass
class Life:
    """A request from its start on a row to its end or retraction, as its plans show it."""

    row: int
    end: int = 0  # positions planned so far
    slots: list[int] = field(default_factory=list)


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
    num_cached: int = 0  # prompt tokens that were there when it first ran

    @property
    def known(self) -> list[int]:
        return [*self.request.prompt, *self.got]

    @property
    def lifetime_blocks(self) -> int:
        return blocks_for(len(self.request.prompt) + max(0, self.request.sampling.max_tokens - 1), BLOCK)

    def begin(self, row: int) -> None:
        self.lives.append(Life(row))


class World:
    """Requests, a scheduler, the KV books and a device; every plan and event that goes between them is checked."""

    def __init__(
        self,
        num_slots: int = 8,
        max_batch: int = 4,
        prefill_chunk: int = 8,
        overcommit: float = 1.0,
        prefix_cache: bool = True,
        make: type[Scheduler] = Scheduler,
    ) -> None:
        self.budget = Budget(max_batch, prefill_chunk, overcommit)
        self.newest_fence: StepFence | None = None
        self.num_run = 0
        self.sound = True  # False once a check has failed: what comes after that means nothing
        self.cache = WatchedCache(self, BlockPool(num_slots, "device"), prefix_cache)
        self.scheduler = make(self.cache, self.budget, [EOS])
        self.device = Device(num_slots)
        self.asked: dict[str, Asked] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.seen: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, prompt: Sequence[int], max_tokens: int = 4, **sampling: Any) -> str:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        assert blocks_for(len(prompt) + max_tokens, BLOCK) <= self.cache.num_blocks, "the engine refuses what can never fit"
        request = Request(f"r{len(self.asked)}", list(prompt), params, self.cache.prefix_of(prompt))
        self.asked[request.id] = Asked(request, *generate(prompt, params))
        self.scheduler.add(request)
        return request.id

    def cancel(self, request_id: str) -> None:
        self._end(request_id, self.scheduler.cancel(request_id), FinishReason.CANCELLED)

    def _end(self, request_id: str, event: TokenEvent | None, finish: FinishReason) -> None:
        self.sound = False
        asked = self.asked[request_id]
        assert (event is None) == (asked.ended is not None)
        if event is not None:
            assert event.finish is finish and event.tokens == () and event.request_id == request_id
            assert request_id not in self.cache.tables, f"{request_id} ended and keeps its blocks"
            self.seen[f"{finish} with a step in flight"] += bool(self.samples_in_flight(request_id))
            asked.ended = finish
        self.sound = True

    def outcome(self, request_id: str) -> tuple[list[int], FinishReason | None]:
        asked = self.asked[request_id]
        return asked.got, asked.ended

    def samples_in_flight(self, request_id: str) -> int:
        return sum(c.samples for plan in self.in_flight for c in plan.chunks if c.request_id == request_id)

    # ---------------------------------------------------------------------------------------------------------- steps

    def plan(self) -> StepPlan | None:
        """Plan a step and launch it."""
        self.sound = False
        retractions = self.scheduler.counts.retractions
        plan = self.scheduler.plan()
        self.seen["retraction"] += self.scheduler.counts.retractions - retractions
        if plan is not None:
            check_plan(self, plan)
            self.in_flight.append(plan)
            self.newest_fence = StepFence(self, plan.number)
            self.scheduler.launched(self.newest_fence)
        self.sound = True
        return plan

    def commit(self, error: Exception | None = None) -> list[TokenEvent]:
        """Run the oldest step and take in its result."""
        self.sound = False
        plan = self.in_flight.popleft()
        result = self.device.run(plan) if error is None else self.device.fail(plan, error)
        self.num_run = plan.number
        still_open = {c.request_id for c in plan.chunks if self.asked[c.request_id].ended is None}
        events = self.scheduler.commit(result)
        told = [event.request_id for event in events]
        assert len(set(told)) == len(told) and set(told) <= still_open, "one event per step, and none after the last"
        for event in events:
            if error is None:
                check_event(self, event)
            else:
                assert event.finish is FinishReason.ERROR and event.error == f"{type(error).__name__}: {error}" and not event.tokens
                self.asked[event.request_id].ended = event.finish
        if error is not None:
            assert set(told) == still_open, "every request of a failed step ends"
            self.seen["failed step"] += bool(events)
        self.sound = True
        return events

    def step(self) -> bool:
        """One turn of the engine: plan, then read the step before."""
        behind = bool(self.in_flight)
        plan = self.plan()
        if behind:
            self.commit()
        return behind or plan is not None

    def finish(self) -> None:
        """Step on until every request has ended, within the turns that it would take one after the other, each of them computed twice;
        then nothing may be left."""
        sizes = [len(a.request.prompt) + a.request.sampling.max_tokens for a in self.asked.values() if a.ended is None]
        for _ in range(sum(2 * size + 4 for size in sizes) + 4):
            if not self.step():
                break
            self.check()
        assert all(asked.ended is not None for asked in self.asked.values()), "a request was left behind"
        assert not self.scheduler.has_work() and not self.scheduler._tracks and not self.cache.tables
        assert sorted(self.scheduler._free_rows) == list(range(self.budget.max_batch))
        counts = self.cache.stats().slots
        assert counts.free + counts.idle == self.cache.num_blocks
        assert self.scheduler.num_by_state() == {"waiting": 0, "running": 0, "retracted": 0}

    def close(self) -> None:
        self.finish()
        self.check()
        self.cache.close()

    def check(self) -> None:
        """What holds between any two calls."""
        self.sound = False
        self.scheduler.check()
        self.cache.check()
        assert sum(self.cache.stats().slots) == self.cache.num_blocks
        if self.budget.overcommit == 1.0:
            promised = sum(self.asked[owner].lifetime_blocks - table.num_slots for owner, table in self.cache.tables.items())
            assert promised <= self.cache.num_available, f"{promised} blocks are promised, {self.cache.num_available} can be drawn"
            assert self.scheduler.counts.retractions == 0, "nobody is pushed out where promises are kept"
        for slot in range(self.cache.num_blocks):
            if (key := self.cache.key_of(slot)) is not None:
                self.device.check_sealed(slot, key)
        self.sound = True

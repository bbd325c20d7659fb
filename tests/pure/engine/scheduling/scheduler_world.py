"""A world for the scheduler: the real KV books, and a device made of Python that runs its plans and disbelieves them.

The device keeps what is in every slot. The KV of a token is a node of the tree of all token sequences: it stands for the token and
for everything before it. So a chunk that reads a wrong block, or one that was overwritten, reads a wrong node. The model is a function of the
whole sequence, so what a request must produce is known in advance, however it was batched, shared, retracted or resumed.

Steps run as late as possible, just before their result is taken in: whatever is wrong about order shows.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.contract import (
    TOKEN_IN_FLIGHT,
    Chunk,
    Fence,
    FinishReason,
    Prefix,
    Request,
    Sampled,
    SamplingParams,
    Start,
    StepPlan,
    StepResult,
    Table,
    TokenEvent,
    TokenLogprob,
)
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.blocks.key import Scope, prefix_keys
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.table import BlockTable
from penstock.kv.cache import KvCache

BLOCK = 4
VOCAB = 8
EOS = 7
SCOPE = Scope(weights=b"w", kv_dtype="float32", layout=b"l", block_tokens=BLOCK, position_scheme="none")


class StepFence:
    """Lies behind step `number`."""

    lane = "compute"

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.number = number

    def passed(self) -> bool:
        return self._world.num_executed >= self.number

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
        assert fence is self._world.newest_fence, f"slots of {table.owner} go back with {fence} and not with the newest step's fence"
        if fence is not None:
            self.last_fence.update(dict.fromkeys(table.hold.slots, self._world.newest_fence))  # type: ignore[arg-type]
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
    """A request and what its listener has got."""

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


@dataclass
class Row:
    request_id: str
    tokens: list[int]
    nodes: list[int]
    broken: bool = False  # a step of it failed: what it computes is garbage


def next_token(tokens: Sequence[int]) -> int:
    """The model."""
    return zlib.crc32(bytes(tokens)) % VOCAB


def generate(prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], FinishReason, int | None]:
    """What a request produces when it is alone and nothing goes wrong."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        token = next_token(tokens)
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            return tokens[len(prompt) :], FinishReason.STOP, token
        tokens.append(token)
    return tokens[len(prompt) :], FinishReason.LENGTH, None


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
        self.num_executed = 0
        self.sound = True  # False once a check has failed: what comes after that means nothing
        self.cache = WatchedCache(self, BlockPool(num_slots, "device"), prefix_cache)
        self.scheduler = make(self.cache, self.budget, [EOS])
        self.asked: dict[str, Asked] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.seen: Counter[str] = Counter()
        self._rows: dict[int, Row] = {}
        self._content: list[list[int]] = [[0] * BLOCK for _ in range(num_slots)]
        self._nodes: dict[tuple[int, int], int] = {}
        self._paths: dict[int, tuple[int, ...]] = {0: ()}
        self._num_garbage = 0

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

    def fail(self, request_id: str) -> None:
        self._end(request_id, self.scheduler.fail(request_id, "boom"), FinishReason.ERROR)

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
            self._check_plan(plan)
            self.in_flight.append(plan)
            self.newest_fence = StepFence(self, plan.number)
            self.scheduler.launched(self.newest_fence)
        self.sound = True
        return plan

    def commit(self, error: Exception | None = None) -> list[TokenEvent]:
        """Run the oldest step and take in its result."""
        self.sound = False
        plan = self.in_flight.popleft()
        result = self._execute(plan) if error is None else self._break(plan, error)
        self.num_executed = plan.number
        open_before = {c.request_id for c in plan.chunks if self.asked[c.request_id].ended is None}
        events = self.scheduler.commit(result)
        for event in events:
            self._check_event(event, open_before, error)
        if error is not None:
            assert {event.request_id for event in events} == open_before, "every request of a failed step ends"
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
        promised = sum(
            blocks_for(len(a.request.prompt) + max(0, a.request.sampling.max_tokens - 1), BLOCK) - self.cache.tables[a.request.id].num_slots
            for a in self.asked.values()
            if a.request.id in self.cache.tables
        )
        if self.budget.overcommit == 1.0:
            assert promised <= self.cache.num_available, f"{promised} blocks are promised, {self.cache.num_available} can be drawn"
            assert self.scheduler.counts.retractions == 0, "nobody is pushed out where promises are kept"
        for slot in range(self.cache.num_blocks):
            self._check_sealed(slot)
        self.sound = True

    def _check_sealed(self, slot: int) -> None:
        """What a key promises is what lies in its slot."""
        key = self.cache.key_of(slot)
        if key is None:
            return
        tokens = self._paths.get(self._content[slot][-1])
        assert tokens is not None, f"slot {slot} has a key and holds garbage"
        assert tokens and prefix_keys(tokens, BLOCK, SCOPE.digest())[-1:] == (key,), f"slot {slot} has the key of other tokens"
        assert [self._paths[n] for n in self._content[slot]] == [tokens[: len(tokens) - BLOCK + i + 1] for i in range(BLOCK)]

    # --------------------------------------------------------------------------------------------------------- a plan

    def _check_plan(self, plan: StepPlan) -> None:
        sizes = [c.num_tokens for c in plan.chunks]
        assert sizes and min(sizes) >= 1
        num_ones = sizes.count(1)
        assert sizes[:num_ones] == [1] * num_ones, f"chunks of one token come first: {sizes}"
        assert sum(size for size in sizes if size > 1) <= self.budget.prefill_chunk, f"prompts take more than the budget: {sizes}"
        assert len(sizes) <= self.budget.max_batch
        ids = [c.request_id for c in plan.chunks]
        assert len(set(ids)) == len(ids) and len({c.row for c in plan.chunks}) == len(ids)
        assert plan.is_decode == (num_ones == len(sizes)) and plan.num_tokens == sum(sizes)
        for start in plan.starts:
            self._check_start(start)
        rows = [self.asked[owner].lives[-1].row for owner in self.cache.tables]
        assert len(set(rows)) == len(rows), "two requests run on one row"
        started = {start.request.id for start in plan.starts}
        assert started <= set(ids), "a request that starts computes something at once"
        for chunk in plan.chunks:
            self._check_chunk(chunk, chunk.request_id in started)
        self._check_after(plan)

    def _check_start(self, start: Start) -> None:
        asked = self.asked[start.request.id]
        assert asked.ended is None
        assert self.samples_in_flight(start.request.id) == 0, "it resumes before its newest token is known"
        assert list(start.output) == asked.got, "it resumes with other tokens than it has sent"
        self.seen["resume with tokens"] += bool(asked.got)
        self.seen["resume inside the prompt"] += bool(asked.lives and not asked.got)
        asked.lives.append(Life(start.row))

    def _check_chunk(self, chunk: Chunk, starts: bool) -> None:
        asked = self.asked[chunk.request_id]
        life, known, sampling = asked.lives[-1], asked.known, asked.request.sampling
        slots = chunk.slots.tolist()
        assert asked.ended is None and chunk.request_id in self.cache.tables
        assert chunk.row == life.row
        if starts:
            self._check_first(chunk, asked)
        else:
            assert chunk.start == life.end, "positions are computed once, in order"
        assert len(slots) == blocks_for(chunk.kv_len, BLOCK) and len(set(slots)) == len(slots)
        assert slots[: len(life.slots)] == life.slots, "a table only grows"
        in_flight = self.samples_in_flight(chunk.request_id)
        expected = [*known, *[TOKEN_IN_FLIGHT] * in_flight]
        assert list(chunk.tokens) == expected[chunk.start : chunk.kv_len]
        assert chunk.samples == (sampling.max_tokens > 0 and chunk.kv_len == len(expected)), "only the newest token's logits are of use"
        assert len(asked.got) + in_flight + chunk.samples <= sampling.max_tokens, "more is sampled than was asked for"
        if chunk.writes:
            written = slots[chunk.start // BLOCK :]
            assert all(map(self.cache.is_private, written)), "a block that others may read is written"
        life.end, life.slots = chunk.kv_len, slots

    def _check_first(self, chunk: Chunk, asked: Asked) -> None:
        known = asked.known
        assert chunk.start <= len(known) - 1, "at least one token is computed"
        assert chunk.start % BLOCK == 0 or chunk.start == len(known) - 1
        if not asked.request.may_match:
            assert chunk.start == 0 and chunk.writes, "it cannot use what is cached"
        if chunk.start % BLOCK or not chunk.writes:
            assert not chunk.writes and chunk.num_tokens == 1 and chunk.kv_len == len(known) and len(known) % BLOCK == 0
            self.seen["full match"] += 1
        self.seen["partial match"] += bool(chunk.start and chunk.writes)
        if len(asked.lives) == 1:
            asked.num_cached = chunk.start

    def _check_after(self, plan: StepPlan) -> None:
        """Slots that a launched step still uses are written behind it."""
        covered = max((f.number for f in plan.after), default=0)  # type: ignore[attr-defined]
        for chunk in plan.chunks:
            for slot in chunk.slots[chunk.start // BLOCK :].tolist() if chunk.writes else ():
                fence = self.cache.last_fence.pop(slot, None)
                if fence is not None and not fence.passed():
                    self.seen["slot reused under a fence"] += 1
                    assert covered >= fence.number, f"slot {slot} is written without waiting for step {fence.number}"

    # ------------------------------------------------------------------------------------------------------ the device

    def _node(self, parent: int, token: int) -> int:
        key = (parent, token)
        if key not in self._nodes:
            self._nodes[key] = len(self._nodes) + 1
            self._paths[self._nodes[key]] = (*self._paths[parent], token)
        return self._nodes[key]

    def _start_row(self, start: Start) -> None:
        row = Row(start.request.id, [], [])
        for token in (*start.request.prompt, *start.output):
            self._append(row, token)
        self._rows[start.row] = row

    def _append(self, row: Row, token: int) -> None:
        row.nodes.append(self._node(row.nodes[-1] if row.nodes else 0, token))
        row.tokens.append(token)

    def _execute(self, plan: StepPlan) -> StepResult:
        for start in plan.starts:
            self._start_row(start)
        sampled: list[Sampled] = []
        prompt_logprobs: dict[str, tuple[TokenLogprob, ...]] = {}
        for chunk in plan.chunks:
            row, sampling = self._rows[chunk.row], self.asked[chunk.request_id].request.sampling
            assert row.request_id == chunk.request_id
            if row.broken:
                self._scribble(chunk)
                sampled.append(Sampled(chunk.request_id, (0,)))
                continue
            self._compute(chunk, row)
            if sampling.prompt_logprobs is not None:
                prompt_logprobs[chunk.request_id] = _prompt_logprobs(self.asked[chunk.request_id].request.prompt, chunk)
            if chunk.samples:
                assert chunk.kv_len == len(row.tokens)
                token = next_token(row.tokens)
                logprobs = None if sampling.logprobs is None else (TokenLogprob(token, float(len(row.tokens)), 1, ()),)
                self._append(row, token)
                sampled.append(Sampled(chunk.request_id, (token,), logprobs))
        return StepResult(plan.number, sampled, prompt_logprobs)

    def _compute(self, chunk: Chunk, row: Row) -> None:
        place = [self._content[slot] for slot in chunk.slots.tolist()]
        for at, token in enumerate(chunk.tokens, chunk.start):
            assert token in (row.tokens[at], TOKEN_IN_FLIGHT)
            if chunk.writes:
                place[at // BLOCK][at % BLOCK] = row.nodes[at]
        for at in range(chunk.kv_len):
            assert place[at // BLOCK][at % BLOCK] == row.nodes[at], f"{chunk.request_id} reads a wrong token at position {at}"

    def _break(self, plan: StepPlan, error: Exception) -> StepResult:
        """The step fails half way: what it should have written is garbage, and its rows are lost."""
        for start in plan.starts:
            self._start_row(start)
        for chunk in plan.chunks:
            self._rows[chunk.row].broken = True
            self._scribble(chunk)
        return StepResult(plan.number, (), error=error)

    def _scribble(self, chunk: Chunk) -> None:
        for at in range(chunk.start, chunk.kv_len) if chunk.writes else ():
            self._num_garbage += 1
            self._content[int(chunk.slots[at // BLOCK])][at % BLOCK] = -self._num_garbage

    # --------------------------------------------------------------------------------------------------------- events

    def _check_event(self, event: TokenEvent, open_before: set[str], error: Exception | None) -> None:
        asked = self.asked[event.request_id]
        assert event.request_id in open_before and asked.ended is None
        if error is not None:
            assert event.finish is FinishReason.ERROR and event.error is not None and str(error) in event.error and not event.tokens
            asked.ended = event.finish
            return
        self._check_first_event(event, asked)
        asked.got += event.tokens
        assert asked.got == asked.tokens[: len(asked.got)], f"{event.request_id} got a wrong token"
        if asked.request.sampling.logprobs is None:
            assert event.logprobs is None
        elif event.tokens or event.stop_token is not None:
            assert event.logprobs is not None and tuple(entry.token for entry in event.logprobs) == event.tokens
        if event.finish is not None:
            assert (asked.got, event.finish, event.stop_token) == (asked.tokens, asked.finish, asked.stop_token)
            assert event.request_id not in self.cache.tables
            asked.ended = event.finish
        assert len(asked.got) < len(asked.tokens) or asked.finish is FinishReason.STOP or event.finish is not None

    def _check_first_event(self, event: TokenEvent, asked: Asked) -> None:
        if asked.first is not None:
            assert event.source is None and event.prompt_logprobs is None
            return
        asked.first = event
        prompt = asked.request.prompt
        assert event.source is not None
        assert (event.source.device, event.source.computed) == (asked.num_cached, len(prompt) - asked.num_cached)
        if asked.request.sampling.prompt_logprobs is None:
            assert event.prompt_logprobs is None
        else:
            assert event.prompt_logprobs == (None, *_logprobs_of(prompt, 1, len(prompt))), "prompt logprobs are lost or doubled"


def _logprobs_of(prompt: Sequence[int], start: int, end: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(prompt[at], -float(at), 1, ()) for at in range(start, end))


def _prompt_logprobs(prompt: Sequence[int], chunk: Chunk) -> tuple[TokenLogprob, ...]:
    """Position p tells how likely the prompt's token p + 1 was."""
    return _logprobs_of(prompt, chunk.start + 1, min(chunk.kv_len + 1, len(prompt)))

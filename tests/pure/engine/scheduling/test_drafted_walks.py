"""Plans with drafts over a real cache, beside a device that knows what every request says: whatever is
proposed, kept, stopped, retracted or cancelled, each row reads the KV of its own tokens, a block gets the key
of what lies in it, and everybody gets their own tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.contract import (
    TOKEN_IN_FLIGHT,
    Chunk,
    Fence,
    FinishReason,
    Grammar,
    Prefix,
    Request,
    Sampled,
    SamplingParams,
    StepFailure,
    StepPlan,
    StepResult,
)
from penstock.engine.scheduling.budget import Budget
from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.scheduler import Estimates, Scheduler
from penstock.engine.scheduling.stages import Life, RunningRequest
from penstock.errors import InvariantBroken
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from tests.support.guesses import guessed

BLOCK, STOP = 4, 999
SCOPE = Scope(weights=b"w", kv_dtype="float32", layout=b"l", block_tokens=BLOCK, position_scheme="rope")


@dataclass
class Passed:
    """A fence of the compute lane, which has run all that was put on it."""

    number: int
    lane: str = "compute"

    def passed(self) -> bool:
        return True

    def wait_passed(self, timeout_s: float | None = None) -> None:
        """Nothing to wait for."""


@dataclass
class Said:
    """A request, what it says, and what its listener got."""

    request: Request
    answer: list[int]
    got: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def all(self) -> list[int]:
        return [*self.request.prompt, *self.answer]

    @property
    def expected(self) -> list[int]:
        most = self.answer[: self.request.sampling.max_tokens]
        return most[: most.index(STOP)] if STOP in most else most


class Script:
    """Implements `Drafter`: what the request will say, with mistakes."""

    def __init__(self, world: World, ahead: bool) -> None:
        self.needs_results, self.num_ahead = not ahead, 0
        self.world, self.alive = world, dict[str, int]()

    def started(self, life: Life) -> None:
        """Each may have drafts at any time."""

    def considers(self, num_requests: int) -> bool:
        return True

    def wants(self, running: RunningRequest) -> bool:
        return True

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        return [self._drafts(one) for one in requests]

    def _drafts(self, one: Decoding) -> tuple[int, ...]:
        rng, life, running = self.world.rng, one.life, one.life.running
        assert one.most > 0 and running is not None
        if self.world.overcommit > 1.0:
            num_held = running.table.num_slots * BLOCK
            assert running.num_planned + 1 + one.most <= num_held, (
                "a draft draws no block: somebody may have to leave for it"
            )
        assert running.num_planned + 1 + one.most <= running.promised * BLOCK, (
            "no draft draws what was not promised"
        )
        self.alive[life.request.id] = 0
        num = rng.randrange(min(one.most, 5) + 1)
        right = self.world.said[life.request.id].all[life.num_expected : life.num_expected + num]
        return tuple(token if rng.random() < 0.8 else rng.randrange(500) for token in right)

    def saw(self, life: Life, num_drafts: int, num_kept: int) -> None:
        assert 0 <= num_kept <= num_drafts and num_drafts > 0 and life.request.id in self.alive

    def ended(self, life: Life) -> None:
        self.alive.pop(life.request.id, None)


class TableWatched(BlockTable):
    """Gets keys for what lies in its slots, and for nothing that a step may still write."""

    __slots__ = ()

    def seal(self, tokens: Sequence[int], num_computed: int, fence: Fence | None) -> None:
        world: World = self._tables.world  # type: ignore[attr-defined]
        assert num_computed <= len(tokens), "a key needs all tokens of its block"
        for place in range(num_computed // BLOCK * BLOCK):
            slot = int(self.slots(num_computed)[place // BLOCK])
            assert world.kv[slot * BLOCK + place % BLOCK] == tuple(tokens[: place + 1]), (
                "a key is that of what lies there"
            )
        for plan, _ in world.launched:
            for chunk in plan.chunks:
                if (
                    chunk.request_id == self.owner
                    and chunk.writes
                    and len(chunk.tokens) == chunk.num_logits > 0
                ):
                    assert num_computed // BLOCK * BLOCK <= chunk.start - chunk.num_unsure, (
                        "a step may still write there"
                    )
        super().seal(tokens, num_computed, fence)


class SealsWatched(KvCache):
    def __init__(self, world: World, num_blocks: int) -> None:
        super().__init__(BlockPool(num_blocks, "device"), SCOPE)
        self._tables.world = world  # type: ignore[attr-defined]

    def open(self, owner: str, prefix: Prefix | None, num_blocks: int) -> BlockTable:
        table = super().open(owner, prefix, num_blocks)
        table.__class__ = TableWatched
        return table


class World:
    def __init__(
        self, seed: int, ahead: bool, num_blocks: int, overcommit: float, failing: float, expects: int = 0
    ) -> None:
        self.rng = random.Random(seed)
        self.masks = random.Random(seed)
        self.overcommit = overcommit
        self.cache = SealsWatched(self, num_blocks)
        self.said: dict[str, Said] = {}
        self.script = Script(self, ahead)
        budget = Budget(max_batch=4, prefill_chunk=8, overcommit=overcommit)
        estimates = Estimates(lengths=guessed(expects))
        self.scheduler = Scheduler(self.cache, budget, [STOP], self.script, estimates)
        self.kv: dict[int, tuple[int, ...]] = {}  # by place: all tokens up to the one whose KV is there
        self.launched: list[tuple[StepPlan, StepResult]] = []  # whose results were not taken in
        self.failing = failing  # how often a step fails, or lacks KV
        self.rejected: dict[str, int] = {}  # by request: drafts of its last step
        self.num_drafted = self.num_full_matches = 0

    # ------------------------------------------------------------------------------------------- what happens

    def submit(self) -> None:
        prompt = [self.rng.randrange(100) for _ in range(self.rng.randrange(1, 20))]
        if self.said and self.rng.random() < 0.5:  # some of what another one has said, or all
            other = self.rng.choice(list(self.said.values())).all
            prompt = other[: self.rng.randrange(1, min(len(other), 24) + 1)]
            prompt = (
                prompt[: len(prompt) // BLOCK * BLOCK or len(prompt)] if self.rng.random() < 0.6 else prompt
            )
        prompt = [token for token in prompt if token != STOP] or [1]
        max_tokens = self.rng.choice([0, 1, 2, 7, 15, 24])
        key = hash(tuple(prompt)) & 0xFFFF
        answer = [(key * 31 + n * n * 7 + n) % 90 for n in range(40)]
        if self.rng.random() < 0.5:
            answer[self.rng.randrange(24)] = STOP
        id = f"r{len(self.said)}"
        request = Request(
            id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), self.cache.prefix_of(prompt)
        )
        self.said[id] = Said(request, answer)
        self.scheduler.add(request)

    def cancel(self) -> None:
        open_ = [id for id, one in self.said.items() if one.finish is None]
        if open_:
            self.hear([self.scheduler.cancel(self.rng.choice(open_))])

    def step(self) -> None:
        while len(self.launched) > 1:
            self.commit()
        planned = self.scheduler.plan()
        if planned.reads_first:
            self.commit()
            planned = self.scheduler.plan()
        plan = planned.plan
        if plan is not None:
            result = self.run(plan)
            self.launched.append((plan, result))
            if self.masks.random() < 0.3:  # its sampling waits for masks: the step before is read first
                self.scheduler.launched(Passed(plan.number), is_whole=False)
                while len(self.launched) > 1:
                    self.commit()
            self.scheduler.launched(Passed(plan.number))
        elif self.launched:
            self.commit()
        self.scheduler.check()

    def commit(self) -> None:
        _, result = self.launched.pop(0)
        if self.rng.random() < self.failing:
            what = self.rng.choice(
                [StepFailure("TransferFailed", "no", True), StepFailure("RuntimeError", "no")]
            )
            result = StepResult(result.number, (), error=what)
        self.hear(self.scheduler.commit(result).events)

    def hear(self, events: Sequence[object]) -> None:
        for event in events:
            if event is None:
                continue
            one = self.said[event.request_id]  # type: ignore[attr-defined]
            assert one.finish is None, "a listener hears nothing behind its last event"
            one.got += event.tokens  # type: ignore[attr-defined]
            one.finish = event.finish  # type: ignore[attr-defined]
            is_cut = one.finish in (None, FinishReason.CANCELLED, FinishReason.ERROR)
            assert one.got == one.expected[: len(one.got)] and (is_cut or one.got == one.expected)

    # --------------------------------------------------------------------------------------------- the device

    def run(self, plan: StepPlan) -> StepResult:
        for at, chunk in enumerate(plan.chunks):
            assert (at < plan.num_decodes) == (len(chunk.tokens) == 1 or chunk.num_logits > 1)
        sampled = [found for chunk in plan.chunks if (found := self._run(chunk)) is not None]
        return StepResult(plan.number, tuple(sampled))

    def _run(self, chunk: Chunk) -> Sampled | None:
        one = self.said[chunk.request_id]
        start = chunk.start - (self.rejected.get(chunk.request_id, 0) if chunk.num_unsure else 0)
        assert start >= chunk.start - chunk.num_unsure, "it may start so much earlier, and no more"
        tokens = [
            one.all[start + at] if token == TOKEN_IN_FLIGHT else token
            for at, token in enumerate(chunk.tokens)
        ]
        self.num_full_matches += not chunk.writes
        life = len(one.request.prompt) + max(0, one.request.sampling.max_tokens - 1)
        assert chunk.kv_len <= life, "no block is drawn that was not promised"
        before = one.all[:start]
        kept, sampled = 0, list[int]()
        for at in range(len(tokens)):
            for place in range(start + at):
                found = self.kv.get(int(chunk.slots[place // BLOCK]) * BLOCK + place % BLOCK)
                assert found == tuple([*before, *tokens][: place + 1]), (
                    f"{chunk.request_id} reads {found} at {place}"
                )
            where = start + at
            if chunk.writes:
                self.kv[int(chunk.slots[where // BLOCK]) * BLOCK + where % BLOCK] = tuple(
                    [*before, *tokens][: where + 1]
                )
            else:
                assert self.kv[int(chunk.slots[where // BLOCK]) * BLOCK + where % BLOCK] == tuple(
                    [*before, *tokens][: where + 1]
                )
        first = len(tokens) - chunk.num_logits
        for at in range(first, len(tokens)):
            sampled.append(one.all[start + at + 1])
            if at + 1 < len(tokens) and tokens[at + 1] != sampled[-1]:
                break
            kept += at + 1 < len(tokens)
        num_drafts = max(0, chunk.num_logits - 1)
        self.num_drafted += num_drafts
        self.rejected[chunk.request_id] = num_drafts - kept
        return Sampled(chunk.request_id, tuple(sampled)) if sampled else None

    def finish(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work() and not self.launched:
                break
            self.step()
        assert all(one.finish is not None for one in self.said.values())
        assert not self.script.alive, "nothing is kept of what is over"
        self.cache.close()


# Blocks, how many times they are promised, and tokens that each is believed to write besides what it has.
ROOMS = {"wide": (64, 1.0), "narrow": (20, 1.0), "overcommitted": (20, 2.5), "outlived": (20, 1.0, 1)}


@pytest.mark.parametrize("ahead", [False, True], ids=["reads first", "plans ahead"])
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("failing", [0.0, 0.1], ids=["sound", "failing"])
@pytest.mark.parametrize("seed", range(2))
def test_with_any_drafts_everybody_gets_what_they_say(
    seed: int, failing: float, room: Any, ahead: bool
) -> None:
    world = World(seed, ahead, *room[:2], failing, *room[2:])
    for _ in range(250):
        getattr(world, world.rng.choices(["submit", "step", "cancel"], [3, 12, 0.5])[0])()
    world.finish()
    assert world.num_drafted > 8 and world.num_full_matches, "drafts, and prompts that are all there"


class Kept:
    """A lease of what was saved of a retracted request."""

    ended = False

    def end(self) -> None:
        self.ended = True


def test_what_was_saved_of_a_request_whose_step_lacked_kv_is_let_go() -> None:
    """It was pushed out while the step ran, and its blocks were saved: what they hold was computed from what
    had not arrived."""
    world = World(0, False, 64, 1.0, 0.0)
    world.submit()
    plan = world.scheduler.plan().plan
    assert plan is not None
    world.scheduler.launched(Passed(plan.number))
    (life,) = world.scheduler.lives.values()
    assert life.running is not None
    world.scheduler.retract(life.running)
    assert life.waiting is not None
    kept = life.waiting.lease = Kept()  # type: ignore[assignment]
    failed = StepFailure("TransferFailed", "no", True)
    assert not world.scheduler.commit(StepResult(plan.number, (), error=failed)).events
    assert kept.ended and life.waiting.lease is None and life.computes and life.num_in_flight == 0
    world.finish()


def test_one_that_is_pushed_out_twice_before_its_steps_are_read_has_the_kv_of_its_last_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(0, False, 64, 1.0, 0.0)
    world.script.propose = lambda requests, num_requests: [()] * len(requests)  # type: ignore[method-assign]
    prompt = list(range(20))
    request = Request(
        "r", prompt, SamplingParams(max_tokens=9, temperature=0.0), world.cache.prefix_of(prompt)
    )
    world.said["r"] = Said(request, [n % 50 for n in range(40)])
    world.scheduler.add(request)
    saved, retract = list[int](), BlockTable.retract
    monkeypatch.setattr(
        BlockTable,
        "retract",
        lambda self, num_tokens, fence: saved.append(num_tokens) or retract(self, num_tokens, fence),
    )
    for num_steps in (2, 1):  # eight tokens of the prompt in each
        for _ in range(num_steps):
            plan = world.scheduler.plan().plan
            assert plan is not None
            world.launched.append((plan, world.run(plan)))
            world.scheduler.launched(Passed(plan.number))
        (running,) = world.scheduler.running.requests.values()
        world.scheduler.retract(running)
    assert saved == [16, 8]
    world.finish()


@pytest.mark.parametrize("num_said", [0, 4])
def test_a_result_that_does_not_say_how_many_drafts_were_kept_is_refused(num_said: int) -> None:
    """Of two drafts it has one token, two or three."""
    world = World(0, False, 64, 1.0, 0.0)
    world.script.propose = lambda requests, num_requests: [(7, 8)] * len(requests)  # type: ignore[method-assign]
    world.scheduler.add(
        Request(
            "r", [1, 2, 3], SamplingParams(max_tokens=9, temperature=0.0), world.cache.prefix_of([1, 2, 3])
        )
    )
    for num_logits, said in ((1, (5,)), (3, tuple(range(num_said)))):
        plan = world.scheduler.plan().plan
        assert plan is not None and plan.chunks[0].num_logits == num_logits
        world.scheduler.launched(Passed(plan.number))
        result = StepResult(plan.number, (Sampled("r", said),))
        if num_logits == 1:
            world.scheduler.commit(result)
    with pytest.raises(InvariantBroken, match="how many were accepted"):
        world.scheduler.commit(result)


class Asks(Script):
    """Makes no drafts, and notes for whom there is room for some."""

    def __init__(self, num_ahead: int) -> None:
        self.needs_results, self.num_ahead = True, num_ahead
        self.alive, self.asked = dict[str, int](), set[str]()
        # drafts that there is room for, by the tokens that were planned before
        self.most: dict[int, int] = {}

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        self.asked |= {one.life.request.id for one in requests}
        self.most |= {one.life.running.num_planned: one.most for one in requests if one.life.running}
        return [()] * len(requests)


@pytest.mark.parametrize("num_ahead", [0, 3])
def test_a_request_with_a_grammar_has_drafts_and_room_for_them(num_ahead: int) -> None:
    """Each draft has a mask of its own."""
    world = World(0, False, 64, 1.0, 0.0)
    asks = world.script = world.scheduler._drafts.drafter = Asks(num_ahead)
    for id, grammar in (("plain", None), ("shaped", Grammar("regex", "a*"))):
        sampling = SamplingParams(max_tokens=9, temperature=0.0, grammar=grammar)
        request = Request(id, [1, 2, 3], sampling, world.cache.prefix_of([1, 2, 3]))
        world.said[id] = Said(request, [n % 50 for n in range(40)])
        world.scheduler.add(request)
    rooms, run = list[tuple[str, int]](), world.run
    world.run = lambda plan: rooms.extend((one.request_id, one.room) for one in plan.chunks) or run(plan)  # type: ignore[method-assign, func-returns-value]
    world.finish()
    assert asks.asked == {"plain", "shaped"}
    assert {id: max(room for one, room in rooms if one == id) for id in world.said} == {
        "plain": num_ahead,
        "shaped": num_ahead,
    }


@pytest.mark.parametrize(
    ("overcommit", "rooms"),
    [(1.0, [0, 3, 3, 3, 3, 3, 3, 2, 1, 0]), (2.5, [0, 0, 3, 2, 1, 0, 3, 2, 1, 0])],
    ids=["to the end of its life", "in the blocks that it has"],
)
def test_there_is_room_for_drafts_behind_a_step_that_samples(overcommit: float, rooms: list[int]) -> None:
    """Of a prompt of 12 tokens and 9 generated ones, of which the last is not fed back: its life is 20
    tokens."""
    world = World(0, False, 64, overcommit, 0.0)
    asks = world.script = world.scheduler._drafts.drafter = Asks(num_ahead=3)
    prompt = list(range(12))
    request = Request(
        "r", prompt, SamplingParams(max_tokens=9, temperature=0.0), world.cache.prefix_of(prompt)
    )
    world.said["r"] = Said(request, [n % 50 for n in range(40)])
    world.scheduler.add(request)
    found, run = list[tuple[int, int]](), world.run
    world.run = lambda plan: found.extend((one.kv_len, one.room) for one in plan.chunks) or run(plan)  # type: ignore[method-assign, func-returns-value]
    world.finish()
    assert found == list(zip([8, *range(12, 21)], rooms, strict=True))
    if overcommit == 1.0:
        assert asks.most == {num: 20 - num - 1 for num in range(12, 19)}

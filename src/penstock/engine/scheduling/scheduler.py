"""Decides what each step computes: plan out, result in. Owns the states of requests and the order of events.
Admission, running requests, steps, drafts and events have files of their own. Touches no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from penstock.contract import (
    Fence,
    FinishReason,
    KvLedger,
    Lease,
    Load,
    Match,
    PromptLogprobs,
    Request,
    Sampled,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenScores,
    Totals,
    Waits,
)
from penstock.engine.scheduling.admission import Admission
from penstock.engine.scheduling.budget import Budget, PrefillTimes, Promises, Room, blocks_for
from penstock.engine.scheduling.deep import DeepContexts
from penstock.engine.scheduling.drafts import Drafter, Drafting
from penstock.engine.scheduling.events import Events, SchedulerCounts
from penstock.engine.scheduling.lengths import Lengths
from penstock.engine.scheduling.residency import FIRST_TAU
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.stages import Life, RunningRequest, State, WaitingRequest
from penstock.engine.scheduling.steps import NextStep, Sealing, Share, Steps, UnreadStep
from penstock.errors import InvariantBroken

_FIRST_LOGPROB = PromptLogprobs([None])  # the first prompt token has no logprob
_NO_WAITS = Waits()


class News(NamedTuple):
    """What happened to requests since the last plan or commit."""

    moves: Sequence[tuple[str, State]] = ()  # requests whose state has changed; their end is an event
    # scored requests that left, and the ranges of their key bounds that are kept
    left: Sequence[tuple[str, range]] = ()


class Planned(NamedTuple):
    """The next step, and what it waits for. `plan` is None if nothing can be computed now."""

    plan: StepPlan | None = None
    waits: Waits = _NO_WAITS
    news: News = News()
    reads_first: bool = False  # the step launched last has to be read before this plan can be made


class Committed(NamedTuple):
    """What a result means for the listeners of its requests."""

    events: Sequence[TokenEvent]
    news: News = News()


class Estimates(NamedTuple):
    """What is expected of steps and requests, by those before."""

    times: PrefillTimes | None = None  # size chunks if the budget limits their time
    lengths: Lengths | None = None  # of answers; None: every request is expected to reach its limit
    tau: Callable[[], int] = lambda: FIRST_TAU  # steps between two scorings, by their cost


_NO_ESTIMATES = Estimates()


class Scheduler:
    """Continuous batching: decodes first, then prompts in chunks, all in one step."""

    def __init__(
        self,
        ledger: KvLedger,
        budget: Budget,
        stop_ids: Iterable[int],
        drafter: Drafter | None = None,
        estimates: Estimates = _NO_ESTIMATES,
    ) -> None:
        """`drafter` None: no speculation."""
        self.lengths = estimates.lengths or Lengths()
        self.counts = SchedulerCounts()
        promises = Promises()
        self._ledger = ledger
        self._block_tokens = ledger.block_tokens
        # what a step has left for prompts
        self._room = partial(Room, budget, ledger.block_tokens, estimates.times)
        self.lives: dict[str, Life] = {}  # all open requests: each is either in line or running
        self.deep = DeepContexts(ledger, budget, promises, estimates.tau, self.counts)
        self.running = Running(ledger, budget, self.lengths, promises)
        self.admission = Admission(ledger, budget, self.running, estimates.times)
        self._drafts = Drafting(drafter or Drafter(), ledger, budget, self.running)
        self._next = NextStep()
        self._steps = Steps()
        self._sealing = Sealing(self._steps, ledger.block_tokens)
        if drafter is not None:
            self.counts.see_place(1)
        self._events = Events(stop_ids, self.counts)
        self._moves: list[tuple[str, State]] = []

    # ------------------------------------------------------------------------------------ requests in and out

    def add(self, request: Request, lease: Lease | None = None) -> None:
        """`lease`: its prefix in colder tiers; the scheduler owns it from now on."""
        if request.id in self.lives:
            raise InvariantBroken(f"request {request.id} was added twice")
        num_tokens = len(request.prompt) + max(0, request.sampling.max_tokens - 1)
        placement = self.deep.placement(request, num_tokens)
        order = self.admission.came(request)
        life = Life(request, order, placement, request.prefix, list(request.prompt))
        if request.sampling.prompt_logprobs is not None:
            life.prompt_logprobs = _FIRST_LOGPROB
        self.lives[request.id] = life
        self.admission.wait(life, lease)

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End it wherever it is; None if it has ended already."""
        life = self.lives.get(request_id)
        return None if life is None else self._end(life, self._events.of_end(life, FinishReason.CANCELLED))

    def stop(self, request_id: str, error: str | None) -> TokenEvent | None:
        """Its grammar or token rules allow no further token: the answer is complete, or `error` says why it
        cannot be completed. None if it has ended already."""
        life = self.lives.get(request_id)
        if life is None:
            return None
        finish = FinishReason.STOP if error is None else FinishReason.ERROR
        return self._end(life, self._events.of_end(life, finish)._replace(error=error))

    def has_work(self) -> bool:
        """True while a request is open."""
        return bool(self.lives)

    def num_by_state(self) -> dict[str, int]:
        """Safe to call from another thread: it reads sizes only."""
        line, loading = self.admission.line, self.running.num_loading
        waiting, running = len(line) - line.num_retracted, len(self.running) - loading
        return {"waiting": waiting, "loading": loading, "running": running, "retracted": line.num_retracted}

    # --------------------------------------------------------------------------------------------------- plan

    def plan(self, reads_host: bool = True, is_unread: bool = False) -> Planned:
        """The next step. `reads_host`: it may read KV of deep requests in host memory, which takes as long as
        dozens of other steps. `is_unread`: a launched step that samples has not been read; it is read before
        one that reads host memory."""
        if self._must_read_first(reads_host and is_unread):
            return Planned(reads_first=True)
        self._next.reads_host = reads_host
        num_retractions = self.counts.retractions
        self.admission.conversations.begin_plan()
        self._take_in_loads()
        self.running.keep_free()
        requests = self.running.in_turn(shortest_first=self._steps.num_planned % 2 == 0)
        num_decoding = sum(left == 1 and one.life.state is State.RUNNING for one, left in requests)
        room = self._room(num_decoding)
        drafts = self._drafts.propose([one for one, _ in requests]) if num_decoding else {}
        self._next.num_ahead = self._drafts.drafter.num_ahead
        for running, num_left in requests:
            if num_left and running.life.state is State.RUNNING:
                self._compute(running, num_left, room, drafts.get(running, ()))
        if self.counts.retractions == num_retractions:
            self.admission.admit(lambda waiting, match: self._start(waiting, match, room))
        self.admission.prefetch()
        chunks = self._next.chunks()
        if not chunks:
            return Planned(news=self._take_news())
        self.admission.conversations.step_planned(bool(self._next.prefills))
        step, self._next = self._next, NextStep()
        plan = step.plan(self._steps.add(chunks, self.running.requests, has_drafts=bool(drafts)), chunks)
        return Planned(plan, Waits(step.after, step.loads), self._take_news())

    def _must_read_first(self, reads_host: bool) -> bool:
        """True if drafts can be proposed only after the running step has been read, or if `reads_host` and
        the next tokens of a request read host memory."""
        if self._steps.num_drafted > 0 and self._drafts.drafter.needs_results:
            return True
        return reads_host and any(
            one.life.state is State.RUNNING and one.life.placement.reads_host(one)
            for one in self.running.requests.values()
        )

    def _take_news(self) -> News:
        moves, self._moves = self._moves, []
        return News(moves, self.deep.take_left())

    def _compute(
        self,
        running: RunningRequest,
        num_left: int,
        room: Room,
        drafts: tuple[int, ...] = (),
        is_new: bool = False,
    ) -> None:
        """The step computes its next tokens, if there is room and its KV is there. `is_new`: it was just
        admitted, and takes room even for one token."""
        placement, step, num_tokens = running.life.placement, self._next, 1
        takes_room = num_left > 1 or is_new  # decodes take no room from prompts
        num_due = placement.until_boundary(running, num_left) if takes_room else num_left
        if takes_room:
            num_tokens = room.size(running.num_planned, num_due)
        if num_tokens and placement.fixed_blocks is not None:
            num_fitting = placement.num_fitting(
                running, num_tokens + len(drafts), step, self._steps.last_fence
            )
            drafts = drafts[: max(0, num_fitting - num_tokens)]
            num_tokens = min(num_tokens, num_fitting)
        if num_tokens <= 0:
            return  # it takes part in a later step
        if not self._draw(running, num_tokens + len(drafts)):
            if is_new:
                raise InvariantBroken(
                    f"request {running.request.id} was admitted without room for its first step"
                )
            return
        if takes_room:
            room.spend(running.num_planned, num_tokens, num_due, ends_prompt=num_due == num_left)
        num_ahead = step.num_ahead
        if num_ahead:
            num_ahead = self._drafts.draw_room(running, num_tokens + len(drafts), num_ahead)
        step.add(running, num_tokens, drafts, num_ahead)

    def launched(self, fence: Fence, is_whole: bool = True) -> None:
        """The step planned last is on the compute lane; `fence` follows it and every step before. If its
        sampling is not launched yet, it is not whole, and this is called again. Slots of requests that end
        meanwhile are kept until then."""
        self._steps.launched(fence, is_whole)

    # ------------------------------------------------------------------------------------- moves of a request

    def _start(self, waiting: WaitingRequest, match: Match, room: Room) -> bool:
        """Admit it. The current plan computes some of it, if there is time and nothing has to be loaded
        first. False: its match was evicted meanwhile."""
        running = self.running.enter(waiting, match)
        if running is None:
            return False
        waiting.end_prefetch()  # its load brings the rest
        if running.load is None:
            self._set_off(running)
        else:
            self._moves.append((waiting.request.id, State.LOADING))
            if running.load.settled:  # no room on the way: no later event would report its end
                self._end_load(running, running.load)
        if waiting.life.state is State.RUNNING:
            self._compute(running, running.num_left, room, is_new=True)
        return True

    def _take_in_loads(self) -> None:
        """Loading requests whose KV has arrived, or is about to, join the steps."""
        for running in [one for one in self.running.requests.values() if one.load is not None]:
            load, state = running.load, running.life.state
            assert load is not None
            if load.settled:
                self._end_load(running, load)
            elif state is State.RUNNING:
                continue  # it runs, but no step had room for it yet
            elif load.overdue:  # the load keeps its slots
                self._go_back(running)
            elif self.running.num_loading == len(self.running) and load.error() is None and _may_begin(load):
                # No other request computes now, so a step that waits for this load delays none.
                self._set_off(running)

    def _end_load(self, running: RunningRequest, load: Load) -> None:
        if load.error() is not None:
            # what landed is not the beginning of its context, or no beginning that it can continue from
            if running.table.num_gone or not running.life.placement.divides:
                self._go_back(running)
                return
            running.compute_rest(load.num_landed, self._block_tokens)
        running.load = None
        if running.life.state is State.LOADING:
            self._set_off(running)

    def _go_back(self, running: RunningRequest) -> None:
        """It does not wait for its load any longer: it goes back in line, and computes its KV."""
        life = running.life
        self._leave(running)
        life.num_retractions += life.state is State.RUNNING
        life.move(State.RETRACTED if life.num_retractions else State.WAITING)
        life.computes = True
        self.admission.wait(life, None)
        self._moves.append((life.request.id, life.state))

    def _set_off(self, running: RunningRequest) -> None:
        """It joins the steps from now on."""
        self.running.set_off(running)
        self._moves.append((running.request.id, State.RUNNING))
        self._next.set_up(running)
        self._drafts.drafter.started(running.life)

    def _draw(self, running: RunningRequest, num_tokens: int) -> bool:
        """Extend its table for `num_tokens` more. If that exceeds its promise and no room is left, or if
        promises exceed memory, another request or itself is retracted. False: not now."""
        size = self._block_tokens
        num_lacking = running.num_planned + num_tokens - running.table.num_slots * size
        if num_lacking <= 0:
            return True
        wanted = blocks_for(num_lacking, size)
        self.running.make_way(running, wanted, self._steps.last_fence)
        while not self.running.try_draw(running, wanted):
            if self.running.num_short(running, wanted) <= self._ledger.num_settling:
                # running transfers will free enough: it waits for them, and no request is retracted
                return False
            victim = self.running.next_to_leave(running)
            self.retract(victim)
            if victim is running:
                return False
        return True

    def retract(self, running: RunningRequest, saves: bool = True) -> None:
        life = running.life
        shares = self._steps.shares_of(life)
        mine = [share for share in shares if share.running is running]
        num_computed, num_unsure = running.num_committed, 0  # when the last launched step is over
        for share in mine:
            num_unsure += share.num_drafts
            num_computed = max(num_computed, share.end - num_unsure)
        lease = self._leave(running, saves, num_computed)
        # their KV is saved, though their results may come later
        life.ran |= bool(mine) and lease is not None
        life.move(State.RETRACTED)
        life.num_retractions += 1
        # its chunk of the plan being made is dropped with it
        life.num_in_flight = sum(share.num_logits for share in shares)
        self.admission.wait(life, lease)
        self.counts.retractions += 1
        self._moves.append((life.request.id, State.RETRACTED))

    def _leave(
        self, running: RunningRequest, saves: bool = False, num_tokens: int = 0, is_answered: bool = False
    ) -> Lease | None:
        """It gives up row and table and leaves the next step. Call it before its state changes."""
        self._sealing.finish(running)
        lease = self.running.leave(running, self._steps, saves, num_tokens, is_answered)
        self._next.drop(running.request.id)
        return lease

    def _end(self, life: Life, event: TokenEvent) -> TokenEvent:
        """Give back all that it holds; `event` is its last."""
        if life.running is not None:
            is_answered = event.finish in (FinishReason.STOP, FinishReason.LENGTH)
            self._leave(life.running, is_answered=is_answered)
            if is_answered:
                self.admission.conversations.answered(life)
        elif life.waiting is not None:
            self.admission.leave(life.waiting)
        life.move(State.ENDED)
        self._drafts.drafter.ended(life)
        if event.finish is not None:
            self.lengths.saw(life.request, life.num_written, event.finish)
        del self.lives[life.request.id]
        if not self.lives:
            self.admission.conversations.forget()
        return event._replace(totals=Totals(life.num_written, life.num_drafted, life.num_accepted))

    # ------------------------------------------------------------------------------------------------- commit

    def commit(self, result: StepResult) -> Committed:
        """Take in a step's result, oldest step first."""
        step = self._steps.take(result.number)
        if result.error is not None and result.error.lacked_kv:
            self._undo(step)
            return Committed((), self._take_news())
        if result.error is not None:
            lives = [life for life in step.shares if life.state is not State.ENDED]
            failed = [self._end(life, self._events.of_failure(life, result.error)) for life in lives]
            return Committed(failed, self._take_news())
        sampled, scored = {s.request_id: s for s in result.sampled}, dict(result.prompt_logprobs)
        part_scores = {one.request_id: one for one in result.part_scores}
        events: list[TokenEvent] = []
        self._sealing.begin(step)
        for life, share in step.shares.items():
            if life.state is State.ENDED:
                continue
            request_id = life.request.id
            if request_id in part_scores and share.running.is_current:
                life.placement.take_scores(part_scores[request_id])
            event = self._commit_share(share, step.fence, sampled.get(request_id), scored.get(request_id))
            if event is not None:
                events.append(event)
        return Committed(events, self._take_news())

    def _undo(self, step: UnreadStep) -> None:
        """KV that the step needed did not arrive, so this step and later ones of its requests computed
        nothing valid. The requests start again from what is cached and use colder tiers no more."""
        lives = [life for life in step.shares if life.state is not State.ENDED]
        for life in lives:
            life.computes = True
            if life.running is not None and life.state is State.RUNNING:
                self.retract(life.running, saves=False)
            if life.waiting is not None:
                life.waiting.end_lease()  # if it was retracted meanwhile, the saved KV is not valid
            life.num_in_flight = 0
        self._steps.forget(lives)

    def _commit_share(
        self, share: Share, fence: Fence | None, sampled: Sampled | None, scores: TokenScores | None
    ) -> TokenEvent | None:
        running = share.running
        life = running.life
        life.ran = True
        if life.prompt_logprobs is not None and scores is not None:
            # They hold across retractions, and a resumed request computes some of them again: keep only new
            # ones.
            known = life.prompt_logprobs
            life.prompt_logprobs = known.followed_by(scores, len(known) - share.start - 1)
        if share.num_logits > 1:
            return self._commit_drafts(share, fence, sampled)
        if life.running is running:
            end = running.num_committed = share.end
            life.placement.computed(running, fence)
            if end - share.start > 1:
                running.num_sealed = end
                running.table.seal(life.tokens, end, fence)
            elif end // self._block_tokens > running.num_sealed // self._block_tokens:
                self._sealing.filled(running, fence)
        if not share.num_logits:
            done = life.request.sampling.max_tokens == 0 and share.end >= life.num_prompt
            return self._end(life, self._events.of_end(life, FinishReason.LENGTH)) if done else None
        if sampled is None:
            raise InvariantBroken(
                f"step sampled nothing for request {life.request.id}, though its plan asked for a token"
            )
        life.num_in_flight -= share.num_logits
        event = self._events.of_tokens(life, sampled)
        return event if event.finish is None else self._end(life, event)

    def _commit_drafts(self, share: Share, fence: Fence | None, sampled: Sampled | None) -> TokenEvent:
        """Keep the drafts that the target chose itself, and the token after them."""
        running, life = share.running, share.running.life
        if sampled is None or not 1 <= len(sampled.tokens) <= share.num_logits:
            raise InvariantBroken(
                f"step verified {share.num_drafts} drafts of request {life.request.id}, "
                f"but does not report how many were accepted"
            )
        num_kept = len(sampled.tokens) - 1
        life.num_in_flight -= share.num_logits
        event = self._events.of_tokens(life, sampled, share.num_drafts)
        self._drafts.drafter.saw(life, share.num_drafts, num_kept)
        if running.is_current:
            num_rejected = share.num_drafts - num_kept
            running.num_planned -= num_rejected
            if not self._steps.move(running, num_rejected):
                running.num_drafted = 0  # it has no later step: its position is certain
            running.num_committed = min(share.end - num_rejected, len(life.tokens))
            self._sealing.filled(running, fence)
        return event if event.finish is None else self._end(life, event)

    # -------------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Recount the running totals; raises InvariantBroken if they differ."""
        self.running.check()
        self.deep.check(self.running.requests.values())


def _may_begin(load: Load) -> bool:
    """True if a step may be launched over it: its fences exist, and the rest of it is short or overlaps with
    the first layers."""
    return load.arrivals is not None and (load.layered or load.nearly_landed())

"""Schedulers with one defect each, to show that the tests see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.contract import (
    Fence,
    FinishReason,
    KvLedger,
    Lease,
    Match,
    Sampled,
    StepResult,
    TokenEvent,
    TokenScores,
)
from penstock.engine.scheduling.admission import Admission
from penstock.engine.scheduling.budget import Budget, Room
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.scheduler import Committed, Planned, Scheduler
from penstock.engine.scheduling.stages import RunningRequest, State, WaitingRequest
from penstock.engine.scheduling.steps import Share

Scores = TokenScores | None


class ForgetsThatPromisesAreDrawn(Scheduler):
    def _draw(self, running: RunningRequest, num_tokens: int) -> bool:
        promises, retractions = self.running._promises, self.counts.retractions
        promised = promises.num
        drawn = super()._draw(running, num_tokens)
        if self.counts.retractions == retractions:
            promises.num = promised
        return drawn


class _CountsIdleBlocks(Running):
    def fits(self, waiting: WaitingRequest, match: Match) -> bool:
        return super().fits(waiting, match._replace(num_idle=0))


class CountsIdleBlocksTwice(Scheduler):
    """Restored blocks are credited, and still counted as room for others."""

    def __init__(self, ledger: KvLedger, budget: Budget, *args: Any) -> None:
        super().__init__(ledger, budget, *args)
        self.running.__class__ = _CountsIdleBlocks


class WritesOnAFullMatch(Scheduler):
    def plan(self, *args: bool) -> Planned:
        planned = super().plan(*args)
        plan = planned.plan
        if plan is None:
            return planned
        chunks = tuple(chunk._replace(writes=True) for chunk in plan.chunks)
        return planned._replace(plan=replace(plan, chunks=chunks))


class LeavesNothingToCompute(Scheduler):
    """A full match has no token left, so the step goes on with the one that nobody has sampled."""

    def _set_off(self, running: RunningRequest) -> None:
        super()._set_off(running)
        if running.num_cached == len(running.life.tokens):
            running.num_planned = running.num_cached
            running.life.num_in_flight += 1


class SealsWhatIsOnlyPlanned(Scheduler):
    def plan(self, *args: bool) -> Planned:
        planned = super().plan(*args)
        for chunk in planned.plan.chunks if planned.plan is not None else ():
            running = self.running.requests[chunk.request_id]
            tokens = running.life.tokens
            running.table.seal(tokens, min(chunk.kv_len, len(tokens)), self._steps.last_fence)
        return planned


class ResumesWithATokenInFlight(Scheduler):
    def plan(self, *args: bool) -> Planned:
        in_flight = {one.life: one.life.num_in_flight for one in self.admission.line}
        for life in in_flight:
            life.num_in_flight = 0
        planned = super().plan(*args)
        for life, num in in_flight.items():
            life.num_in_flight += num
        return planned


class KeepsTheBlocksOfTheCancelled(Scheduler):
    def cancel(self, request_id: str) -> TokenEvent | None:
        life = self.lives.get(request_id)
        if life is None or life.state is not State.RUNNING:
            return super().cancel(request_id)
        del self.running.requests[request_id], self.lives[request_id]
        life.move(State.ENDED)
        return TokenEvent(request_id, finish=FinishReason.CANCELLED)


class GivesSlotsBackWithoutAFence(Scheduler):
    def _leave(self, *args: Any, **named: Any) -> Lease | None:
        fence, self._steps.last_fence = self._steps.last_fence, None
        lease = super()._leave(*args, **named)
        self._steps.last_fence = fence
        return lease


class GivesSlotsBackWithTheFenceOfTheLastResult(Scheduler):
    """True for what finished; a step that is still in flight for the cancelled is forgotten."""

    def launched(self, fence: object, is_whole: bool = True) -> None:
        self._newest = fence

    def commit(self, result: StepResult) -> Committed:
        self._steps.last_fence = getattr(self, "_newest", None)
        return super().commit(result)


class SealsForAnEarlierLife(Scheduler):
    """A step of before the retraction seals blocks of the table after it, which it never wrote."""

    def _commit_share(self, share: Share, *args: Any) -> TokenEvent | None:
        if (running := share.running.life.running) is not None:
            running.table.seal(running.life.tokens, min(share.end, running.num_planned), args[0])
        return super()._commit_share(share, *args)


class _Echoes(Admission):
    def _try_match(self, waiting: WaitingRequest) -> Match | None:
        match, prefix = super()._try_match(waiting), waiting.life.prefix
        return match if match is None or prefix is None else self._ledger.match(prefix.keys)


class LetsEchoUseTheCache(Scheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.admission.__class__ = _Echoes


class RetractsTheOldest(Scheduler):
    """The one that nobody waits for never gets through: two push each other out."""

    def _draw(self, running: RunningRequest, num_tokens: int) -> bool:
        others = {one.life: one.life.order for one in self.running.requests.values()}
        for life in others:
            life.order = -life.order
        drawn = super()._draw(running, num_tokens)
        for life, order in others.items():
            life.order = order
        self.admission.line._ranked.sort(key=lambda one: one.life.order)
        return drawn


class ForgetsARetractedPlan(Scheduler):
    """Tokens planned in the very plan that retracts stay counted as in flight, so it waits for them for
    ever."""

    def retract(self, running: RunningRequest, saves: bool = True) -> None:
        in_flight = running.life.num_in_flight
        super().retract(running, saves)
        running.life.num_in_flight = in_flight


class IgnoresTheBudget(Scheduler):
    def _start(self, waiting: WaitingRequest, match: Match, room: Room) -> bool:
        room.tokens = max(room.tokens, 2)
        return super()._start(waiting, match, room)


class DoublesPromptLogprobs(Scheduler):
    def _commit_share(
        self, share: Share, fence: Fence | None, sampled: Sampled | None, scores: Scores
    ) -> TokenEvent | None:
        life = share.running.life
        if life.prompt_logprobs is not None and scores is not None and life.num_retractions:
            life.prompt_logprobs = life.prompt_logprobs.followed_by(scores)
        return super()._commit_share(share, fence, sampled, scores)


class LosesPromptLogprobsOfAnEarlierLife(Scheduler):
    def _commit_share(
        self, share: Share, fence: Fence | None, sampled: Sampled | None, scores: Scores
    ) -> TokenEvent | None:
        return super()._commit_share(share, fence, sampled, scores if share.running.is_current else None)


class LosesTheRowOfTheRetracted(Scheduler):
    def retract(self, running: RunningRequest, saves: bool = True) -> None:
        rows = list(self.running.free_rows)
        super().retract(running, saves)
        self.running.free_rows = rows


# Those that any walk brings to light sooner or later; the others need a story of their own.
FAULTS: list[type[Scheduler]] = [
    ForgetsThatPromisesAreDrawn,
    CountsIdleBlocksTwice,
    WritesOnAFullMatch,
    LeavesNothingToCompute,
    SealsWhatIsOnlyPlanned,
    ResumesWithATokenInFlight,
    KeepsTheBlocksOfTheCancelled,
    GivesSlotsBackWithoutAFence,
    GivesSlotsBackWithTheFenceOfTheLastResult,
    LetsEchoUseTheCache,
    ForgetsARetractedPlan,
    IgnoresTheBudget,
    DoublesPromptLogprobs,
    LosesPromptLogprobsOfAnEarlierLife,
    LosesTheRowOfTheRetracted,
]

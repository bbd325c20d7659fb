"""Schedulers with one defect each, to show that the tests see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.contract import (
    Fence,
    FinishReason,
    KvLedger,
    Match,
    Sampled,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenScores,
)
from penstock.engine.scheduling.budget import Budget, Room
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.steps import Share
from penstock.engine.scheduling.track import State, Track

Scores = TokenScores | None


class ForgetsThatPromisesAreDrawn(Scheduler):
    def _draw(self, track: Track, num_tokens: int) -> bool:
        promised, retractions = self._running._num_promised, self.counts.retractions
        drawn = super()._draw(track, num_tokens)
        if self.counts.retractions == retractions:
            self._running._num_promised = promised
        return drawn


class _CountsIdleBlocks(Running):
    def fits(self, track: Track, match: Match) -> bool:
        return super().fits(track, match._replace(num_idle=0))


class CountsIdleBlocksTwice(Scheduler):
    """Restored blocks are credited, and still counted as room for others."""

    def __init__(self, ledger: KvLedger, budget: Budget, *args: Any) -> None:
        super().__init__(ledger, budget, *args)
        self._running = _CountsIdleBlocks(ledger, budget, self.lengths)


class WritesOnAFullMatch(Scheduler):
    def plan(self) -> StepPlan | None:
        plan = super().plan()
        return plan and replace(plan, chunks=tuple(chunk._replace(writes=True) for chunk in plan.chunks))


class LeavesNothingToCompute(Scheduler):
    """A full match has no token left, so the step goes on with the one that nobody has sampled."""

    def _start(self, track: Track, match: Match) -> None:
        super()._start(track, match)
        if track.num_cached == len(track.tokens):
            track.num_planned = track.num_cached
            track.num_in_flight += 1


class SealsWhatIsOnlyPlanned(Scheduler):
    def plan(self) -> StepPlan | None:
        plan = super().plan()
        for chunk in plan.chunks if plan is not None else ():
            track = self._running.tracks[chunk.request_id]
            track.held_table().seal(
                track.tokens, min(chunk.kv_len, len(track.tokens)), self._steps.last_fence
            )
        return plan


class ResumesWithATokenInFlight(Scheduler):
    def _admit(self, room: int) -> None:
        in_flight = {track: track.num_in_flight for track in self._line}
        for track in in_flight:
            track.num_in_flight = 0
        super()._admit(room)
        for track, num in in_flight.items():
            track.num_in_flight += num


class KeepsTheBlocksOfTheCancelled(Scheduler):
    def cancel(self, request_id: str) -> TokenEvent | None:
        track = self._tracks.get(request_id)
        if track is None or track.state is not State.RUNNING:
            return super().cancel(request_id)
        del self._running.tracks[request_id], self._tracks[request_id]
        track.move(State.ENDED)
        return TokenEvent(request_id, finish=FinishReason.CANCELLED)


class GivesSlotsBackWithoutAFence(Scheduler):
    def _leave(self, track: Track, saves: bool, num_tokens: int = 0, is_answered: bool = False) -> None:
        fence, self._steps.last_fence = self._steps.last_fence, None
        super()._leave(track, saves, num_tokens, is_answered)
        self._steps.last_fence = fence


class GivesSlotsBackWithTheFenceOfTheLastResult(Scheduler):
    """True for what finished; a step that is still in flight for the cancelled is forgotten."""

    def launched(self, fence: object, is_whole: bool = True) -> None:
        self._newest = fence

    def commit(self, result: StepResult) -> list[TokenEvent]:
        self._steps.last_fence = getattr(self, "_newest", None)
        return super().commit(result)


class SealsForAnEarlierLife(Scheduler):
    """A step of before the retraction seals blocks of the table after it, which it never wrote."""

    def _commit_share(
        self, share: Share, fence: Fence | None, sampled: Sampled | None, scores: Scores
    ) -> TokenEvent | None:
        if share.track.table is not None:
            num_tokens = min(share.end, share.track.num_planned)
            share.track.table.seal(share.track.tokens, num_tokens, fence)
        return super()._commit_share(share, fence, sampled, scores)


class LetsEchoUseTheCache(Scheduler):
    def _try_match(self, track: Track) -> Match | None:
        match = super()._try_match(track)
        return match if match is None or track.prefix is None else self._ledger.match(track.prefix.keys)


class RetractsTheOldest(Scheduler):
    """The one that nobody waits for never gets through: two push each other out."""

    def _draw(self, track: Track, num_tokens: int) -> bool:
        others = {t: t.order for t in self._running.tracks.values()}
        for other in others:
            other.order = -other.order
        drawn = super()._draw(track, num_tokens)
        for other, order in others.items():
            other.order = order
        self._line._ranked.sort(key=lambda t: t.order)
        return drawn


class ForgetsARetractedPlan(Scheduler):
    """Tokens planned in the very plan that retracts stay counted as in flight, so it waits for them for
    ever."""

    def _retract(self, track: Track, saves: bool = True) -> None:
        in_flight = track.num_in_flight
        super()._retract(track, saves)
        track.num_in_flight = in_flight


class IgnoresTheBudget(Scheduler):
    def _admit(self, room: Room) -> None:
        room.tokens = max(room.tokens, 2)
        super()._admit(room)


class DoublesPromptLogprobs(Scheduler):
    def _commit_share(
        self, share: Share, fence: Fence | None, sampled: Sampled | None, scores: Scores
    ) -> TokenEvent | None:
        known = share.track.prompt_logprobs
        if known is not None and scores is not None and share.epoch:
            share.track.prompt_logprobs = known.followed_by(scores)
        return super()._commit_share(share, fence, sampled, scores)


class LosesPromptLogprobsOfAnEarlierLife(Scheduler):
    def _commit_share(
        self, share: Share, fence: Fence | None, sampled: Sampled | None, scores: Scores
    ) -> TokenEvent | None:
        return super()._commit_share(
            share, fence, sampled, scores if share.epoch == share.track.epoch else None
        )


class LosesTheRowOfTheRetracted(Scheduler):
    def _retract(self, track: Track, saves: bool = True) -> None:
        rows = list(self._running.free_rows)
        super()._retract(track, saves)
        self._running.free_rows = rows


# Those that any few events bring to light; the others need a story of their own.
FAULTS: list[type[Scheduler]] = [
    ForgetsThatPromisesAreDrawn,
    CountsIdleBlocksTwice,
    WritesOnAFullMatch,
    LeavesNothingToCompute,
    SealsWhatIsOnlyPlanned,
    KeepsTheBlocksOfTheCancelled,
    GivesSlotsBackWithoutAFence,
    GivesSlotsBackWithTheFenceOfTheLastResult,
    LetsEchoUseTheCache,
    IgnoresTheBudget,
    LosesTheRowOfTheRetracted,
]

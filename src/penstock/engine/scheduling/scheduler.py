"""Decides what each step computes: plan out, result in. Owns request states, rows and the promise of blocks; touches no bytes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.contract import (
    TOKEN_IN_FLIGHT,
    Chunk,
    Fence,
    FinishReason,
    KvLedger,
    KvSource,
    Match,
    Request,
    Sampled,
    Start,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprob,
)
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.line import Line, arrival
from penstock.engine.scheduling.track import State, Track
from penstock.errors import InvariantBroken

_NO_MATCH = Match(0, 0, False)
_LOOK_AHEAD = 64  # requests in line that a plan looks at: behind those that wait for a prefix others may go ahead, but not by thousands


@dataclass(slots=True)
class SchedulerCounts:
    """Running totals; plain numbers, read by whoever reports."""

    prompt_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "computed": 0})
    generated_tokens: int = 0
    retractions: int = 0


class _Share(NamedTuple):
    """What a launched step does for one request, and in which of its lives."""

    track: Track
    epoch: int
    start: int
    end: int  # tokens computed once the step is over
    samples: bool


class _Launched(NamedTuple):
    number: int
    shares: tuple[_Share, ...]


class Scheduler:
    """Continuous batching: decodes first, then prompts in chunks, all in one step; first come, first served."""

    def __init__(self, ledger: KvLedger, budget: Budget, stop_ids: Iterable[int]) -> None:
        self._ledger = ledger
        self._budget = budget
        self._stop_ids = frozenset(stop_ids)
        self._tracks: dict[str, Track] = {}
        self._line = Line()
        self._running: dict[str, Track] = {}  # in order of admission
        self._free_rows = list(range(budget.max_batch))  # heap: low rows first
        self._launched: deque[_Launched] = deque()
        self._last_fence: Fence | None = None
        self._after: dict[int, Fence] = {}  # what the next step waits for: earlier users of slots drawn for it
        self._num_promised = 0  # blocks that running requests may still draw
        self._num_orders = 0
        self._num_steps = 0
        self.counts = SchedulerCounts()

    # ------------------------------------------------------------------------------------------------ requests in and out

    def add(self, request: Request) -> None:
        if request.id in self._tracks:
            raise InvariantBroken(f"request {request.id} was added twice")
        self._num_orders += 1
        track = Track(request, self._num_orders, request.prefix, tokens=list(request.prompt))
        if request.sampling.prompt_logprobs is not None:
            track.prompt_logprobs = [None]
        self._tracks[request.id] = track
        self._line.add(track)

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End it wherever it is; None if it has ended already."""
        track = self._tracks.get(request_id)
        return None if track is None else self._end(track, FinishReason.CANCELLED)

    def has_work(self) -> bool:
        """Whether a further plan or commit can still do something."""
        return bool(self._tracks)

    def num_by_state(self) -> dict[str, int]:
        """Safe to call from another thread: it reads sizes only."""
        retracted = self._line.num_retracted
        return {"waiting": len(self._line) - retracted, "running": len(self._running), "retracted": retracted}

    # ------------------------------------------------------------------------------------------------------------- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        room = self._budget.prefill_chunk
        num_retractions = self.counts.retractions
        for track in tuple(self._running.values()):
            num_left = track.num_left
            if num_left == 0 or track.state is not State.RUNNING:
                continue
            if num_left == 1:
                if self._draw(track, 1):
                    decodes.append(self._chunk(track, 1))
            elif room > 0:
                num_tokens = min(num_left, room)
                if self._draw(track, num_tokens):
                    (decodes if num_tokens == 1 else prefills).append(self._chunk(track, num_tokens))
                    room -= num_tokens
        starts: list[Start] = []
        if self.counts.retractions == num_retractions:
            starts = self._admit(decodes, prefills, room)
        else:  # chunks planned above for a request that a later one then pushed out
            decodes = [c for c in decodes if c.request_id in self._running]
            prefills = [c for c in prefills if c.request_id in self._running]
        chunks = (*decodes, *prefills)
        if not chunks:
            return None
        self._num_steps += 1
        self._launched.append(_Launched(self._num_steps, tuple(self._share(c) for c in chunks)))
        after, self._after = tuple(self._after.values()), {}
        return StepPlan(self._num_steps, chunks, tuple(starts), after)

    def launched(self, fence: Fence) -> None:
        """The step planned last is on the compute lane; `fence` lies behind it and so behind every step before."""
        self._last_fence = fence

    def _admit(self, decodes: list[Chunk], prefills: list[Chunk], room: int) -> list[Start]:
        starts: list[Start] = []
        index = 0
        while index < min(len(self._line), _LOOK_AHEAD) and room > 0 and self._free_rows:
            track = self._line.tracks[index]
            if track.num_in_flight:  # retracted while a step still samples for it: its tokens are not all known yet
                index += 1
                continue
            match = self._match(track)
            if match.pending and self._running:  # a running request computes what this one needs: share it a little later
                index += 1
                continue
            if not self._fits(track, match):
                break  # nobody overtakes: what is freed goes to the first in line
            starts.append(self._start(track, match))
            num_tokens = min(track.num_left, room)
            if not self._draw(track, num_tokens):
                raise InvariantBroken(f"request {track.request.id} was admitted without room for its first step")
            (decodes if num_tokens == 1 else prefills).append(self._chunk(track, num_tokens))
            room -= num_tokens
        return starts

    def _match(self, track: Track) -> Match:
        if track.prefix is None or not track.request.may_match:
            return _NO_MATCH
        if len(track.prefix.keys) < len(track.tokens) // self._ledger.block_tokens:  # it has generated tokens since
            track.prefix = self._ledger.extend_prefix(track.prefix, track.tokens)
        return self._ledger.match(track.prefix.keys)

    def _fits(self, track: Track, match: Match) -> bool:
        """Whether its whole life can be promised on top of what is promised already. Matched idle blocks stop being evictable,
        so they count as taken; matched blocks that others hold cost nothing. `_start` claims in the same plan."""
        available = self._ledger.num_available - match.num_idle
        lifetime = blocks_for(track.lifetime_tokens, self._ledger.block_tokens) - match.num_blocks
        matched = match.num_blocks * self._ledger.block_tokens
        first_step = blocks_for(min(len(track.tokens), matched + self._budget.prefill_chunk), self._ledger.block_tokens) - match.num_blocks
        # A second retraction of the same request would be thrashing: it comes back only when all of it fits.
        overcommit = 1.0 if track.state is State.RETRACTED else self._budget.overcommit
        return self._num_promised + lifetime <= available * overcommit and first_step <= available

    def _start(self, track: Track, match: Match) -> Start:
        self._line.remove(track)
        track.move(State.RUNNING)
        track.table = self._ledger.open(track.request.id, track.prefix, match.num_blocks)
        track.row = heapq.heappop(self._free_rows)
        matched = match.num_blocks * self._ledger.block_tokens
        # At least one token is always computed: on a full match the last one, whose KV is there already and is not written again.
        track.num_cached = matched
        track.num_planned = track.num_committed = min(matched, len(track.tokens) - 1)
        if track.epoch == 0:  # what it finds after a retraction it has computed itself
            track.num_device = track.num_planned
        self._running[track.request.id] = track
        self._num_promised += blocks_for(track.lifetime_tokens, self._ledger.block_tokens) - match.num_blocks
        return Start(track.row, track.request, tuple(track.tokens[track.num_prompt :]))

    def _draw(self, track: Track, num_tokens: int) -> bool:
        """Give the table room for `num_tokens` more, retracting younger requests where promises exceed memory."""
        table = track.held_table()
        wanted = blocks_for(track.num_planned + num_tokens, self._ledger.block_tokens) - table.num_slots
        if wanted <= 0:
            return True
        while not self._ledger.try_extend(table, wanted):
            victim = max(self._running.values(), key=arrival)
            self._retract(victim)
            if victim is track:
                return False
        self._num_promised -= wanted
        for fence in table.take_after():
            self._after[id(fence)] = fence
        return True

    def _chunk(self, track: Track, num_tokens: int) -> Chunk:
        start, end = track.num_planned, track.num_planned + num_tokens
        tokens = track.tokens[start:end]
        tokens += [TOKEN_IN_FLIGHT] * (num_tokens - len(tokens))
        table = track.held_table()
        samples = end == track.num_expected and track.request.sampling.max_tokens > 0
        track.num_planned = end
        track.num_in_flight += samples
        return Chunk(track.request.id, track.row, start, tokens, table.slots(end), start >= track.num_cached, samples)

    def _share(self, chunk: Chunk) -> _Share:
        track = self._running[chunk.request_id]
        return _Share(track, track.epoch, chunk.start, chunk.kv_len, chunk.samples)

    def _retract(self, track: Track) -> None:
        planned_now = track.num_in_flight - sum(s.samples for step in self._launched for s in step.shares if s.track is track)
        self._leave(track)
        track.move(State.RETRACTED)
        track.epoch += 1
        track.num_planned = track.num_committed = 0
        track.num_in_flight -= planned_now  # its chunk of the plan being made is dropped with it
        self._line.add(track)
        self.counts.retractions += 1

    # ----------------------------------------------------------------------------------------------------------- commit

    def commit(self, result: StepResult) -> list[TokenEvent]:
        """Take in what a step did, oldest step first; returns what its requests' listeners get."""
        step = self._launched.popleft()
        if step.number != result.number:
            raise InvariantBroken(f"result of step {result.number} came while step {step.number} was due")
        if result.error is not None:
            failed = (self._fail_share(share, result.error) for share in step.shares)
            return [event for event in failed if event is not None]
        sampled = {s.request_id: s for s in result.sampled}
        events: list[TokenEvent] = []
        for share in step.shares:
            track = share.track
            if track.state is State.ENDED:
                continue
            event = self._commit_share(share, sampled.get(track.request.id), result.prompt_logprobs.get(track.request.id))
            if event is not None:
                events.append(event)
        return events

    def _commit_share(self, share: _Share, sampled: Sampled | None, prompt_logprobs: tuple[TokenLogprob, ...] | None) -> TokenEvent | None:
        track = share.track
        if track.prompt_logprobs is not None and prompt_logprobs is not None:
            # They hold in any life of the request, and a later one computes again what an earlier one had: keep only what is new.
            track.prompt_logprobs += prompt_logprobs[len(track.prompt_logprobs) - share.start - 1 :]
        if track.epoch == share.epoch:
            track.num_committed = share.end
            self._ledger.seal(track.held_table(), track.tokens, share.end)
        if not share.samples:
            done = track.request.sampling.max_tokens == 0 and share.end >= track.num_prompt
            return self._end(track, FinishReason.LENGTH) if done else None
        if sampled is None:
            raise InvariantBroken(f"step sampled nothing for request {track.request.id}, though its plan said so")
        track.num_in_flight -= 1
        return self._take_tokens(track, sampled)

    def _take_tokens(self, track: Track, sampled: Sampled) -> TokenEvent:
        sampling = track.request.sampling
        kept: list[int] = []
        finish: FinishReason | None = None
        stop_token: int | None = None
        for token in sampled.tokens:
            self.counts.generated_tokens += 1
            if token in sampling.stop_token_ids or (token in self._stop_ids and not sampling.ignore_eos):
                finish, stop_token = FinishReason.STOP, token
                break
            track.tokens.append(token)
            kept.append(token)
            if len(track.tokens) - track.num_prompt >= sampling.max_tokens:
                finish = FinishReason.LENGTH
                break
        logprobs = None if sampled.logprobs is None else sampled.logprobs[: len(kept)]
        prompt_logprobs, source = (None, None) if track.started else self._first_news(track)
        if finish is not None:
            self._leave_for_good(track, finish)
        return TokenEvent(track.request.id, tuple(kept), logprobs, prompt_logprobs, finish, stop_token, source)

    def _first_news(self, track: Track) -> tuple[tuple[TokenLogprob | None, ...] | None, KvSource]:
        """What a request's first event carries besides tokens: its prompt's logprobs, and where its prompt's KV came from."""
        track.started = True
        source = KvSource(device=track.num_device, computed=track.num_prompt - track.num_device)
        self.counts.prompt_tokens["device"] += source.device
        self.counts.prompt_tokens["computed"] += source.computed
        return None if track.prompt_logprobs is None else tuple(track.prompt_logprobs), source

    def _fail_share(self, share: _Share, error: BaseException) -> TokenEvent | None:
        if share.track.state is State.ENDED:
            return None
        return self._end(share.track, FinishReason.ERROR)._replace(error=f"{type(error).__name__}: {error}")

    # -------------------------------------------------------------------------------------------------------------- end

    def _end(self, track: Track, finish: FinishReason) -> TokenEvent:
        prompt_logprobs, source = (None, None) if track.started or finish is not FinishReason.LENGTH else self._first_news(track)
        self._leave_for_good(track, finish)
        return TokenEvent(track.request.id, prompt_logprobs=prompt_logprobs, finish=finish, source=source)

    def _leave_for_good(self, track: Track, finish: FinishReason) -> None:
        if track.state is State.RUNNING:
            self._leave(track)
        else:
            self._line.remove(track)
        track.move(State.ENDED)
        track.finish = finish
        del self._tracks[track.request.id]

    def _leave(self, track: Track) -> None:
        """Give back row and table. A launched step may still use both: rows are reset in lane order, slots carry the fence."""
        table = track.held_table()
        self._num_promised -= blocks_for(track.lifetime_tokens, self._ledger.block_tokens) - table.num_slots
        self._ledger.release(table, self._last_fence)
        heapq.heappush(self._free_rows, track.row)
        del self._running[track.request.id]
        track.table, track.row = None, -1

    # ------------------------------------------------------------------------------------------------------------ check

    def check(self) -> None:
        """Recount what is kept as running totals; raises InvariantBroken where they differ."""
        block = self._ledger.block_tokens
        promised = sum(blocks_for(t.lifetime_tokens, block) - t.held_table().num_slots for t in self._running.values())
        if promised != self._num_promised:
            raise InvariantBroken(f"{self._num_promised} blocks are promised, requests may draw {promised}")
        if self._budget.overcommit == 1.0 and promised > self._ledger.num_available:
            raise InvariantBroken(f"{promised} blocks are promised, {self._ledger.num_available} can be drawn")
        rows = sorted([t.row for t in self._running.values()] + self._free_rows)
        if rows != list(range(self._budget.max_batch)):
            raise InvariantBroken(f"rows do not add up: {rows}")

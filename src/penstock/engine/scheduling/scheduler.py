"""Decides what each step computes: plan out, result in. Owns request states, rows and the promise of blocks; touches no bytes."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from penstock.contract import (
    TOKEN_IN_FLIGHT,
    Chunk,
    Fence,
    FinishReason,
    KvLedger,
    KvSource,
    Lease,
    Load,
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
from penstock.errors import InvariantBroken, TransferFailed

_NO_MATCH = Match(0, 0, False)
_LOOK_AHEAD = 64  # requests in line that a plan looks at: behind those that wait for a prefix others may go ahead, but not by thousands


@dataclass(slots=True)
class SchedulerCounts:
    """Running totals; plain numbers, read by whoever reports."""

    prompt_tokens: dict[str, int] = field(default_factory=lambda: asdict(KvSource()))
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
    fence: Fence | None = None  # behind the step


class Scheduler:
    """Continuous batching: decodes first, then prompts in chunks, all in one step; first come, first served."""

    def __init__(self, ledger: KvLedger, budget: Budget, stop_ids: Iterable[int]) -> None:
        self._ledger = ledger
        self._budget = budget
        self._stop_ids = frozenset(stop_ids)
        self._tracks: dict[str, Track] = {}
        self._line = Line()
        self._running: dict[str, Track] = {}  # running and loading ones, in order of admission
        self._free_rows = list(range(budget.max_batch))  # heap: low rows first
        self._launched: deque[_Launched] = deque()
        self._last_fence: Fence | None = None
        self._after: dict[int, Fence] = {}  # what the next step waits for: earlier users of slots drawn for it
        self._loads: dict[str, Load] = {}  # by request: what the next step's layers wait for
        self._starts: list[Start] = []  # rows that the next step sets up
        self._num_loading = 0
        self._num_promised = 0  # blocks that running requests may still draw
        self._num_orders = 0
        self._num_steps = 0
        self.counts = SchedulerCounts()
        self.lives: list[tuple[str, State]] = []  # retractions and resumptions, for whoever times them and clears the list

    # ------------------------------------------------------------------------------------------------ requests in and out

    def add(self, request: Request, lease: Lease | None = None) -> None:
        """`lease` is what colder tiers have of its prefix; it is the scheduler's from now on."""
        if request.id in self._tracks:
            raise InvariantBroken(f"request {request.id} was added twice")
        self._num_orders += 1
        track = Track(request, self._num_orders, request.prefix, tokens=list(request.prompt), lease=lease)
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
        retracted, loading = self._line.num_retracted, self._num_loading
        waiting, running = len(self._line) - retracted, len(self._running) - loading
        return {"waiting": waiting, "loading": loading, "running": running, "retracted": retracted}

    # ------------------------------------------------------------------------------------------------------------- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        room = self._budget.prefill_chunk
        num_retractions = self.counts.retractions
        self._take_in_loads()
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
        if self.counts.retractions == num_retractions:
            self._admit(decodes, prefills, room)
        else:  # chunks planned above for a request that a later one then pushed out
            decodes = [c for c in decodes if c.request_id in self._running]
            prefills = [c for c in prefills if c.request_id in self._running]
        chunks = (*decodes, *prefills)
        if not chunks:
            return None
        self._num_steps += 1
        self._launched.append(_Launched(self._num_steps, tuple(self._share(c) for c in chunks)))
        after, self._after = tuple(self._after.values()), {}
        loads, self._loads = tuple(self._loads.values()), {}
        starts, self._starts = tuple(self._starts), []
        return StepPlan(self._num_steps, chunks, starts, after, loads)

    def launched(self, fence: Fence) -> None:
        """The step planned last is on the compute lane; `fence` lies behind it and so behind every step before."""
        self._last_fence = fence
        self._launched[-1] = self._launched[-1]._replace(fence=fence)

    def _take_in_loads(self) -> None:
        """Loading requests whose KV has come, or is about to, take part in steps from now on."""
        for track, load in [(track, track.load) for track in self._running.values() if track.load is not None]:
            if load.settled:
                self._end_load(track, load)
            elif track.state is State.RUNNING:
                continue  # set off, and no step has had room for it yet
            elif load.overdue:
                self._stop_waiting(track)
            elif self._num_loading == len(self._running) and load.error() is None and _may_begin(load):
                # Nobody else computes now, so nobody is kept waiting by a step that waits for this load.
                self._set_off(track)

    def _end_load(self, track: Track, load: Load) -> None:
        if load.error() is not None:
            self._compute_instead(track)
        track.load = None
        if track.state is State.LOADING:
            self._set_off(track)

    def _set_off(self, track: Track) -> None:
        """It takes part in steps from now on."""
        self._num_loading -= track.state is State.LOADING
        track.move(State.RUNNING)
        if track.epoch:
            self.lives.append((track.request.id, State.RUNNING))
        self._starts.append(Start(track.row, track.request, tuple(track.tokens[track.num_prompt :])))

    def _compute_instead(self, track: Track) -> None:
        """Not all of it arrived, and the copies are over: slots behind what did are computed like any others."""
        num_landed = 0 if track.load is None else track.load.num_landed
        track.load, track.computes = None, True
        track.num_cached = track.num_resident + num_landed * self._ledger.block_tokens
        track.num_planned = track.num_committed = min(track.num_cached, len(track.tokens) - 1)
        track.note_sources()
        self._wait_for_earlier_users(track)

    def _stop_waiting(self, track: Track) -> None:
        """The load takes too long. Its slots stay with it; the request goes back in line and will compute."""
        self._leave(track, saves=False)
        self._num_loading -= 1
        track.move(State.RETRACTED if track.epoch else State.WAITING)
        track.load, track.computes = None, True
        track.num_planned = track.num_committed = 0
        self._line.add(track)

    def _admit(self, decodes: list[Chunk], prefills: list[Chunk], room: int) -> None:
        index = 0
        while index < min(len(self._line), _LOOK_AHEAD) and room > 0 and self._free_rows:
            track = self._line.tracks[index]
            if track.num_in_flight:  # retracted while a step still samples for it: its tokens are not all known yet
                index += 1
                continue
            if track.lease is not None and not track.lease.ready:  # what it had is still being saved, or a store has not answered yet
                index += 1
                continue
            match = self._match(track)
            waits = match.pending and not track.computes
            if waits and (self._running or self._ledger.num_settling):  # it comes without this one's doing: share it
                index += 1
                continue
            if not self._fits(track, match):
                break  # nobody overtakes: what is freed goes to the first in line
            self._start(track, match)
            if track.load is not None and track.load.settled:  # there was no room on its way: nobody will say that it is over
                self._end_load(track, track.load)
            if track.state is State.LOADING:
                continue
            num_tokens = min(track.num_left, room)
            if not self._draw(track, num_tokens):
                raise InvariantBroken(f"request {track.request.id} was admitted without room for its first step")
            (decodes if num_tokens == 1 else prefills).append(self._chunk(track, num_tokens))
            room -= num_tokens

    def _match(self, track: Track) -> Match:
        if track.prefix is None or not track.request.may_match:
            return _NO_MATCH
        if len(track.prefix.keys) < len(track.tokens) // self._ledger.block_tokens:  # it has generated tokens since
            track.prefix = self._ledger.extend_prefix(track.prefix, track.tokens)
        if track.computes:
            track.end_lease()
            track.may_lease = False
        match = self._ledger.match(track.prefix.keys, track.lease)
        if (
            track.may_lease
            and not match.pending
            and match.num_blocks < len(track.prefix.keys)
            and not _covers(track.lease, match.num_blocks)
        ):
            # There was no lease, or the device has lost what came before it, or it has expired: look once more.
            track.may_lease = False
            track.end_lease()
            track.lease = self._ledger.lease(track.request.id, track.prefix)
            match = self._ledger.match(track.prefix.keys, track.lease)
        return match

    def _fits(self, track: Track, match: Match) -> bool:
        """Whether its whole life can be promised on top of what is promised already. Matched idle blocks stop being evictable,
        so they count as taken; matched blocks that others hold cost nothing. `_start` claims in the same plan."""
        available = self._ledger.num_available - match.num_idle
        lifetime = blocks_for(track.lifetime_tokens, self._ledger.block_tokens) - match.num_blocks
        matched = (match.num_blocks + match.num_colder) * self._ledger.block_tokens
        first_step = blocks_for(min(len(track.tokens), matched + self._budget.prefill_chunk), self._ledger.block_tokens) - match.num_blocks
        # A second retraction of the same request would be thrashing: it comes back only when all of it fits.
        overcommit = 1.0 if track.state is State.RETRACTED else self._budget.overcommit
        return self._num_promised + lifetime <= available * overcommit and first_step <= available

    def _start(self, track: Track, match: Match) -> None:
        self._line.remove(track)
        block, num_all = self._ledger.block_tokens, match.num_blocks + match.num_colder
        track.table = self._ledger.open(track.request.id, track.prefix, match.num_blocks)
        track.row = heapq.heappop(self._free_rows)
        # At least one token is always computed: on a full match the last one, whose KV is there already and is not written again.
        track.num_resident = match.num_blocks * block
        track.num_cached = num_all * block if track.lease is None else min(num_all * block, max(track.lease.num_tokens, track.num_resident))
        track.num_planned = track.num_committed = min(track.num_cached, len(track.tokens) - 1)
        runs = () if track.lease is None else track.lease.runs_from(match.num_blocks)
        track.loading = tuple((tier, num * block) for tier, num in runs)
        track.note_sources()
        self._running[track.request.id] = track
        if match.num_colder and track.lease is not None:
            num_next = min(len(track.tokens) - track.num_planned, self._budget.prefill_chunk)
            lease, track.lease = track.lease, None
            track.load = self._ledger.promote(track.table, lease, match.num_colder, num_next)
            track.move(State.LOADING)
            self._num_loading += 1
        else:
            track.end_lease()
            self._set_off(track)
        self._num_promised += blocks_for(track.lifetime_tokens, block) - track.table.num_slots

    def _draw(self, track: Track, num_tokens: int) -> bool:
        """Give the table room for `num_tokens` more, retracting younger requests where promises exceed memory."""
        table = track.held_table()
        wanted = blocks_for(track.num_planned + num_tokens, self._ledger.block_tokens) - table.num_slots
        if wanted <= 0:
            return True
        while not self._ledger.try_extend(table, wanted):
            if wanted <= self._ledger.num_available + self._ledger.num_settling:
                return False  # transfers that are under way free enough: it waits for them, and nobody is pushed out
            victim = max(self._running.values(), key=arrival)
            self._retract(victim)
            if victim is track:
                return False
        self._num_promised -= wanted
        self._wait_for_earlier_users(track)
        return True

    def _wait_for_earlier_users(self, track: Track) -> None:
        for fence in track.held_table().take_after():
            self._after[id(fence)] = fence

    def _chunk(self, track: Track, num_tokens: int) -> Chunk:
        start, end = track.num_planned, track.num_planned + num_tokens
        tokens = track.tokens[start:end]
        tokens += [TOKEN_IN_FLIGHT] * (num_tokens - len(tokens))
        table = track.held_table()
        samples = end == track.num_expected and track.request.sampling.max_tokens > 0
        track.num_planned = end
        track.num_in_flight += samples
        if track.load is not None:
            if not track.load.settled:
                self._loads[track.request.id] = track.load
            track.load = None
        adapter = track.request.adapter
        return Chunk(track.request.id, track.row, start, tokens, table.slots(end), start >= track.num_cached, samples, adapter)

    def _share(self, chunk: Chunk) -> _Share:
        track = self._running[chunk.request_id]
        return _Share(track, track.epoch, chunk.start, chunk.kv_len, chunk.samples)

    def _retract(self, track: Track, saves: bool = True) -> None:
        mine = [s for step in self._launched for s in step.shares if s.track is track and s.epoch == track.epoch]
        planned_now = track.num_in_flight - sum(s.samples for step in self._launched for s in step.shares if s.track is track)
        num_computed = max([track.num_committed, *(share.end for share in mine)])  # by the time that the last step launched is over
        self._num_loading -= track.state is State.LOADING
        self._leave(track, saves, num_computed)
        track.ran |= bool(mine) and track.lease is not None  # what they compute is saved, though their results may come later
        track.move(State.RETRACTED)
        track.epoch += 1
        track.load, track.may_lease = None, True
        track.num_planned = track.num_committed = 0
        track.num_in_flight -= planned_now  # its chunk of the plan being made is dropped with it
        self._line.add(track)
        self.counts.retractions += 1
        self.lives.append((track.request.id, State.RETRACTED))

    # ----------------------------------------------------------------------------------------------------------- commit

    def commit(self, result: StepResult) -> list[TokenEvent]:
        """Take in what a step did, oldest step first; returns what its requests' listeners get."""
        step = self._launched.popleft()
        if step.number != result.number:
            raise InvariantBroken(f"result of step {result.number} came while step {step.number} was due")
        if isinstance(result.error, TransferFailed):
            self._undo(step)
            return []
        if result.error is not None:
            failed = (self._fail_share(share, result.error) for share in step.shares)
            return [event for event in failed if event is not None]
        sampled = {s.request_id: s for s in result.sampled}
        events: list[TokenEvent] = []
        for share in step.shares:
            track = share.track
            if track.state is State.ENDED:
                continue
            event = self._commit_share(share, step.fence, sampled.get(track.request.id), result.prompt_logprobs.get(track.request.id))
            if event is not None:
                events.append(event)
        return events

    def _undo(self, step: _Launched) -> None:
        """KV that the step needed did not arrive, so neither it nor a later one of its requests has computed anything. They start again
        from what is cached, and rely on colder tiers no more."""
        tracks = {id(share.track): share.track for share in step.shares if share.track.state is not State.ENDED}
        for track in tracks.values():
            track.computes = True
            if track.state is State.RUNNING:
                self._retract(track, saves=False)
            track.end_lease()  # where it was retracted meanwhile, what was saved is not what it seems
            track.num_in_flight = 0
        for index, later in enumerate(self._launched):
            self._launched[index] = later._replace(shares=tuple(share for share in later.shares if id(share.track) not in tracks))

    def _commit_share(
        self, share: _Share, fence: Fence | None, sampled: Sampled | None, prompt_logprobs: tuple[TokenLogprob, ...] | None
    ) -> TokenEvent | None:
        track = share.track
        track.ran = True
        if track.prompt_logprobs is not None and prompt_logprobs is not None:
            # They hold in any life of the request, and a later one computes again what an earlier one had: keep only what is new.
            track.prompt_logprobs += prompt_logprobs[len(track.prompt_logprobs) - share.start - 1 :]
        if track.epoch == share.epoch:
            track.num_committed = share.end
            self._ledger.seal(track.held_table(), track.tokens, share.end, fence)
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
        tokens = Counter(device=track.num_device)
        for tier, num in track.colder:
            tokens[tier] += num
        source = KvSource(**tokens, computed=track.num_prompt - tokens.total())
        for tier, num_tokens in asdict(source).items():
            self.counts.prompt_tokens[tier] += num_tokens
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
        if track.state in (State.RUNNING, State.LOADING):
            self._num_loading -= track.state is State.LOADING
            self._leave(track, saves=False)
        else:
            self._line.remove(track)
        track.end_lease()
        track.move(State.ENDED)
        track.finish = finish
        del self._tracks[track.request.id]

    def _leave(self, track: Track, saves: bool, num_tokens: int = 0) -> None:
        """Give back row and table. A launched step may still use both: rows are reset in lane order, slots carry the fence. A transfer
        may, too: its slots stay with it. `saves`: the KV of the first `num_tokens` is wanted again."""
        table = track.held_table()
        self._num_promised -= blocks_for(track.lifetime_tokens, self._ledger.block_tokens) - table.num_slots
        if saves and track.request.may_match and not track.computes:
            track.lease = self._ledger.retract(table, num_tokens, self._last_fence)
        else:
            self._ledger.release(table, self._last_fence)
        heapq.heappush(self._free_rows, track.row)
        self._loads.pop(track.request.id, None)
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


def _covers(lease: Lease | None, block: int) -> bool:
    return lease is not None and lease.num_from(block) > 0


def _may_begin(load: Load) -> bool:
    """A step over it can be launched: its fences exist, and what is left of it is short, or hidden by the layers that come first."""
    return load.arrivals is not None and (load.layered or load.nearly_landed())

"""Decides what each step computes: plan out, result in. Owns the states of requests and the order of events.
Running requests, steps and events have files of their own. Touches no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.contract import (
    Fence,
    FinishReason,
    KvLedger,
    Lease,
    Load,
    Match,
    PartScores,
    PromptLogprobs,
    Request,
    Sampled,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenScores,
    Waits,
)
from penstock.engine.scheduling import conversations
from penstock.engine.scheduling.budget import Budget, PrefillTimes, Room, blocks_for
from penstock.engine.scheduling.conversations import Conversations, begins
from penstock.engine.scheduling.drafts import Decoding, Drafter
from penstock.engine.scheduling.events import Events, SchedulerCounts
from penstock.engine.scheduling.lengths import Lengths, WholeLife
from penstock.engine.scheduling.line import (
    Line,
    find_match,
    found_share,
    is_arriving,
    is_pending,
    is_ready,
    prefetch_waiting,
    promote_ahead,
    reads_first,
    want_rank,
)
from penstock.engine.scheduling.residency import FIRST_TAU, ResidentSet
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.steps import Draft, Share, Step, Steps
from penstock.engine.scheduling.track import State, Track
from penstock.errors import InvariantBroken

# requests in line that a plan looks at: requests that wait for a prefix may be overtaken, but not by
# thousands
_LOOK_AHEAD = 64
# requests in line that a plan ranks again: what is cached of them changes while they wait
_LOOK_AGAIN = 4
# while the next request does not fit, one plan in this many makes room for it ahead
_LOOK_FOR_ROOM = 8
# Blocks filled by decoding that one commit seals: this many, or twice the average number filled per step. If
# hundreds of requests fill a block in the same step, sealing and saving all of them would take as long as the
# step.
_SEALS_AT_ONCE = 16
_FIRST_LOGPROB = PromptLogprobs([None])  # the first prompt token has no logprob


class Scheduler:
    """Continuous batching: decodes first, then prompts in chunks, all in one step. `Line` orders the waiting
    requests."""

    def __init__(
        self,
        ledger: KvLedger,
        budget: Budget,
        stop_ids: Iterable[int],
        times: PrefillTimes | None = None,
        drafter: Drafter | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        """`times`: estimates that size chunks if the budget limits their time. `drafter` None: no
        speculation. `lengths`: expected answer lengths; None: every request is expected to reach its
        limit."""
        self.lengths = lengths or WholeLife()
        self._drafter = drafter
        self._ledger = ledger
        self._budget = budget
        self._times = times
        # requests with an unsealed block filled by decoding, oldest first
        self._unsealed: dict[Track, None] = {}
        self._seals_left = 0  # how many such blocks the current commit may still seal
        self._tracks: dict[str, Track] = {}  # all open requests: each is either in line or running
        self._line = Line(budget.max_overtaken_s)
        self._running = Running(ledger, budget, self.lengths)
        self._draft = Draft()
        self._steps = Steps()
        self.waits = Waits()  # fences and loads for the ids in the last plan
        self._num_orders = 0
        self._shortest_first = True  # in the next step
        self._num_looks = 0
        self._reads_host = True  # in the plan being made
        # the last plan admitted no request because blocks of the next one are still being copied
        self._is_held = False
        self._conversations = Conversations(ledger, budget.max_overtaken_s)
        self.counts = SchedulerCounts()
        if drafter is not None:
            self.counts.see_place(1)
        self._events = Events(stop_ids, self.counts)
        self.tau = FIRST_TAU  # steps between two scorings; the engine sets it from measured cost
        # (id, range of kept key bounds) of scored requests that ended; the engine drains it.
        self.left_scored: list[tuple[str, range]] = []
        # loads, retractions and resumptions; the outbox times and drains them
        self.lives: list[tuple[str, State]] = []

    # ------------------------------------------------------------------------------------ requests in and out

    def add(self, request: Request, lease: Lease | None = None) -> None:
        """`lease`: its prefix in colder tiers; the scheduler owns it from now on."""
        if request.id in self._tracks:
            raise InvariantBroken(f"request {request.id} was added twice")
        self._num_orders += 1
        self._conversations.came(request)
        track = Track(request, self._num_orders, request.prefix, tokens=list(request.prompt), lease=lease)
        most = self._budget.deep_blocks
        track.is_deep = (
            0 < most < blocks_for(track.lifetime_tokens, self._ledger.block_tokens)
            and request.prefix is not None
        )
        if track.is_deep and request.residency is not None and self._budget.division is not None:
            track.unit = self._budget.division.part_blocks
        if request.sampling.prompt_logprobs is not None:
            track.prompt_logprobs = _FIRST_LOGPROB
        self._tracks[request.id] = track
        self._line.add(track)

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End it wherever it is; None if it has ended already."""
        track = self._tracks.get(request_id)
        return None if track is None else self._end(track, self._events.of_end(track, FinishReason.CANCELLED))

    def stop(self, request_id: str, error: str | None) -> TokenEvent | None:
        """Its grammar allows no further token: the answer is complete, or `error` says why it cannot be
        completed. None if it has ended already."""
        track = self._tracks.get(request_id)
        if track is None:
            return None
        finish = FinishReason.STOP if error is None else FinishReason.ERROR
        return self._end(track, self._events.of_end(track, finish)._replace(error=error))

    def has_work(self) -> bool:
        """True while a request is open."""
        return bool(self._tracks)

    def num_by_state(self) -> dict[str, int]:
        """Safe to call from another thread: it reads sizes only."""
        retracted, loading = self._line.num_retracted, self._running.num_loading
        waiting, running = len(self._line) - retracted, len(self._running) - loading
        return {"waiting": waiting, "loading": loading, "running": running, "retracted": retracted}

    @property
    def deep_blocks(self) -> int:
        """Most blocks that a request may have on the device; one that may need more is deep."""
        return self._budget.deep_blocks or self._ledger.num_blocks

    @property
    def awaits_load(self) -> bool:
        """True if the last plan left requests out because their KV is still being loaded."""
        return self._is_held or self._running.num_loading > 0

    @property
    def needs_result(self) -> bool:
        """True if the next plan can propose drafts only after the running step has been read."""
        return self._steps.num_drafted > 0 and self._drafter is not None and self._drafter.needs_results

    @property
    def reads_host(self) -> bool:
        """True if the next tokens of a running request read KV in host memory."""
        running = self._running
        return running.num_deep > 0 and any(
            track.state is State.RUNNING and track.reads_host for track in running.tracks.values()
        )

    # --------------------------------------------------------------------------------------------------- plan

    def plan(self, reads_host: bool = True) -> StepPlan | None:
        """The next step, or None if nothing can be computed now. Launch it together with `waits`.
        `reads_host`: it may read KV of deep requests in host memory, which takes as long as dozens of other
        steps."""
        self._reads_host = self._draft.reads_host = reads_host
        num_retractions = self.counts.retractions
        self._conversations.begin_plan()
        self._take_in_loads()
        self._running.keep_free()
        tracks = self._in_turn()
        decodes = any(track.num_left == 1 and track.state is State.RUNNING for track in tracks)
        room = Room(self._budget, self._ledger.block_tokens, self._times, decodes)
        drafts = {} if self._drafter is None or not decodes else self._propose(self._drafter, tracks)
        self._draft.num_ahead = 0 if self._drafter is None else self._drafter.num_ahead
        for track in tracks:
            num_left = track.num_left
            if num_left == 0 or track.state is not State.RUNNING or (not reads_host and track.reads_host):
                continue
            num_tokens = 1 if num_left == 1 else room.size(track.num_planned, num_left)
            if track.is_deep:
                num_tokens = self._num_fitting(track, num_tokens)
            guesses = drafts.get(track, ())
            if num_tokens > 0 and self._draw(track, num_tokens + len(guesses)):
                if num_left > 1:  # decodes take no room from prompts
                    room.spend(track.num_planned, num_tokens, num_left)
                room_ahead = self._draw_room(track, num_tokens + len(guesses)) if self._draft.num_ahead else 0
                self._draft.add(track, num_tokens, guesses, room_ahead)
        if self.counts.retractions == num_retractions:
            self._admit(room)
        prefetch_waiting(self._line, self._ledger, self._running.fits_host)
        chunks = self._draft.chunks()
        if not chunks:
            return None
        self._conversations.step_planned(bool(self._draft.prefills))
        draft, self._draft = self._draft, Draft()
        # not after an empty plan: the next one may follow at once
        self._shortest_first = not self._shortest_first
        number = self._steps.add(chunks, self._running.tracks, has_drafts=bool(drafts))
        self.waits = Waits(draft.after, draft.loads)
        waits = tuple(draft.after), tuple(draft.loads)
        return StepPlan(number, chunks, draft.num_single, tuple(draft.starts), *waits, draft.num_ahead)

    def _propose(self, drafter: Drafter, tracks: Sequence[Track]) -> dict[Track, tuple[int, ...]]:
        """Draft tokens for the next step, by decoding request."""
        if not drafter.considers(len(tracks)):
            return {}
        found = [
            Decoding(track, most, track.num_pending)
            for track in tracks
            if drafter.wants(track) and (most := self._most_drafts(track)) > 0
        ]
        proposed = drafter.propose(found, len(tracks)) if found else ()
        return {one.track: drafts for one, drafts in zip(found, proposed, strict=True) if drafts}

    def _most_drafts(self, track: Track) -> int:
        """How many drafts fit into its promised blocks, or into its table if promises exceed memory. No
        request is retracted for a draft. A request that is paged out or has a grammar decodes one token at a
        time."""
        sampling = track.request.sampling
        is_decoding = track.state is State.RUNNING and track.num_left == 1
        if not is_decoding or track.is_deep or track.num_planned < track.num_cached:
            return 0
        most = min(sampling.max_tokens - (track.num_expected - track.num_prompt) - 1, track.num_unmasked)
        num_blocks = track.held_table().num_slots if self._budget.overcommit > 1.0 else track.promised
        return min(most, num_blocks * self._ledger.block_tokens - track.num_planned - 1)

    def _stays_out(self, track: Track) -> bool:
        return not self._reads_host and track.reads_host

    def _num_fitting(self, track: Track, num_tokens: int) -> int:
        """How many of a deep request's next tokens this plan computes. Paging out blocks for them may make it
        read host memory for the first time."""
        num_fitting = self._running.num_fitting(track, num_tokens, self._steps.last_fence)
        if (resident := track.deciding) is not None:
            resident.tau = self.tau * self._running.num_scored  # one request scores per step, in turn
            track.held_table().close_scope(track.num_planned)
            self.counts.parts_fetched += self._running.rearrange(track, num_fitting, self._steps.last_fence)
            table = track.held_table()
            if resident.is_filling(table) or not (self._reads_host or resident.shows_needed(table)):
                return 0
        return 0 if self._stays_out(track) else num_fitting

    def _in_turn(self) -> Sequence[Track]:
        """Running requests in planning order. Prompts are served shortest first in one step and oldest first
        in the next: a short question does not wait for a long prompt, and the long prompt gets at least half
        of the steps."""
        tracks = tuple(self._running.tracks.values())
        return sorted(tracks, key=lambda track: track.num_left) if self._shortest_first else tracks

    def launched(self, fence: Fence, is_whole: bool = True) -> None:
        """The step planned last is on the compute lane; `fence` follows it and every step before. If its
        sampling is not launched yet, it is not whole, and this is called again. Slots of requests that end
        meanwhile are kept until then."""
        self._steps.launched(fence, is_whole)

    def _take_in_loads(self) -> None:
        """Loading requests whose KV has arrived, or is about to, join the steps."""
        for track, load in [
            (track, track.load) for track in self._running.tracks.values() if track.load is not None
        ]:
            if load.settled:
                self._end_load(track, load)
            elif track.state is State.RUNNING:
                continue  # it runs, but no step had room for it yet
            elif load.overdue:
                self._stop_waiting(track)
            elif (
                self._running.num_loading == len(self._running) and load.error() is None and _may_begin(load)
            ):
                # No other request computes now, so a step that waits for this load delays none.
                self._set_off(track)

    def _end_load(self, track: Track, load: Load) -> None:
        if load.error() is not None:
            track.compute_rest(load.num_landed, self._ledger.block_tokens)
        track.load = None
        if track.state is State.LOADING:
            self._set_off(track)

    def _set_off(self, track: Track) -> None:
        """It joins the steps from now on."""
        self._running.set_off(track)
        if track.epoch:
            self.lives.append((track.request.id, State.RUNNING))
        self._draft.set_up(track)
        if self._drafter is not None:
            self._drafter.started(track)

    def _stop_waiting(self, track: Track) -> None:
        """The load takes too long. The load keeps its slots; the request goes back in line and will compute
        its KV."""
        self._leave(track, saves=False)
        track.move(State.RETRACTED if track.epoch else State.WAITING)
        track.start_over()
        track.computes = True
        self._line.add(track)

    def _admit(self, room: Room) -> None:
        self._is_held = False
        if len(self._line) == 1 and self._start_alone(next(iter(self._line)), room):
            return
        for known in self._line.look_again(_LOOK_AGAIN):
            # until its copy has landed, a match would miss those blocks
            if is_ready(known) and not is_arriving(known):
                self._rank(known, self._find_match(known))
        passed: set[Track] = set()  # waiting requests that others may overtake
        # the first deferred long conversation; all further new long ones are deferred too
        late: Track | None = None
        waiting = iter(self._line)
        for _ in range(2 * _LOOK_AHEAD):
            track = next((one for one in waiting if one not in passed), None)
            if track is None or len(passed) >= _LOOK_AHEAD or not self._running.free_rows:
                return
            if late is not None and track.request.priority != late.request.priority:
                return  # a deferred request may be overtaken by rank, not by priority
            match = self._try_match(track)
            if match is None:
                if is_arriving(track):
                    self._is_held = True
                    return  # its blocks are copied for it alone: no request overtakes it
                passed.add(track)
                continue
            if not self._rank(track, match):  # it is still next
                if begins(track) and (late is not None or self._begins_later(track)):
                    late = late or track
                    passed.add(track)
                    waiting = self._line.passing(conversations.LONG_TOKENS, _LOOK_AHEAD)
                    continue
                if self._holds_back(track, match):
                    return
                if not self._running.fits(track, match):
                    self._make_room_ahead(track, match)
                    promote_ahead(track, match, self._running.num_spare(match), self._ledger)
                    return  # no request overtakes it: freed blocks go to the first in line
                if reads_first(track, match, self._ledger):
                    passed.add(track)
                    continue
                if not self._running.has_room(track, match):
                    return
                if self._claim(track, match) and self._start(track, match):
                    self._take_first_tokens(track, room)
            waiting = (
                iter(self._line)
                if late is None
                else self._line.passing(conversations.LONG_TOKENS, _LOOK_AHEAD)
            )

    def _start_alone(self, track: Track, room: Room) -> bool:
        """It is the only request in line. If enough slots are free for it, it starts now, without a rank or a
        want."""
        match = self._try_match(track) if self._running.free_rows else None
        if match is None or self._holds_back(track, match):
            return False
        if not self._running.fits_free(track, match) or reads_first(track, match, self._ledger):
            return False
        if not self._claim(track, match) or not self._start(track, match):
            return False
        self._take_first_tokens(track, room)
        return True

    def _holds_back(self, track: Track, match: Match) -> bool:
        """True while its room is kept for a conversation that was just answered. Only while other requests
        run: the wait is counted in their steps."""
        return self._conversations.keep_room and len(self._running) > 0 and not self._is_here(track, match)

    def _begins_later(self, track: Track) -> bool:
        measured = self._times is None or self._times.seconds(1, 0.0) is not None
        return self._conversations.need_room(track, measured, self._running, self._line)

    def _is_here(self, track: Track, match: Match) -> bool:
        """True if the device has KV of at least half of its tokens."""
        return 2 * match.num_blocks * self._ledger.block_tokens >= len(track.tokens)

    def _make_room_ahead(self, track: Track, match: Match) -> None:
        """It is next and waits for others to end. Use the time to save blocks that would be lost when it
        starts. Done in one plan of several."""
        self._num_looks += 1
        if self._num_looks % _LOOK_FOR_ROOM == 0:
            self._running.has_room(track, match)

    def _claim(self, track: Track, match: Match) -> bool:
        """Pin its match in colder tiers; False if some of it was evicted meanwhile."""
        return (
            not match.num_colder
            or track.lease is None
            or track.lease.claim(match.num_blocks, match.num_colder)
        )

    def _take_first_tokens(self, track: Track, room: Room) -> None:
        """The current plan computes some of it, if there is time and nothing has to be loaded first."""
        num_tokens = 0 if track.state is State.LOADING else room.size(track.num_planned, track.num_left)
        if track.is_deep and num_tokens:
            num_tokens = self._num_fitting(track, num_tokens)
        if num_tokens == 0:
            return  # it joins the next step
        if not self._draw(track, num_tokens):
            raise InvariantBroken(f"request {track.request.id} was admitted without room for its first step")
        room.spend(track.num_planned, num_tokens, track.num_left)
        self._draft.add(
            track, num_tokens, (), self._draw_room(track, num_tokens) if self._draft.num_ahead else 0
        )

    def _rank(self, track: Track, match: Match) -> bool:
        """Rank it by what is cached, and want these blocks. Returns True if its place has changed."""
        start_s = self._ledger.start_s(len(track.tokens), match)
        share = found_share(track, match, self._ledger.block_tokens)
        changed = self._line.rank(track, start_s, share, self._is_here(track, match))
        if track.prefix is not None and track.request.may_match:
            track.want = self._ledger.want(track.prefix.keys, want_rank(track), track.want)
        if track.lease is not None:
            track.lease.set_rank(want_rank(track))
        return changed

    def _try_match(self, track: Track) -> Match | None:
        """None: it waits, and other requests may overtake it."""
        if not is_ready(track) or is_arriving(track):
            return None
        if is_pending(track, self._ledger) and (self._running or self._ledger.num_settling):
            return None  # another request or transfer produces what it lacks: share it
        return self._find_match(track)

    def _find_match(self, track: Track) -> Match:
        return find_match(track, self._ledger, self._budget.resident_blocks, self._running.kept)

    def _start(self, track: Track, match: Match) -> bool:
        self._line.remove(track)  # before its state changes
        if not self._running.enter(track, match):
            self._line.add(track)
            return False
        track.end_prefetch()  # its load brings the rest
        if track.load is None:
            self._set_off(track)
            return True
        self.lives.append((track.request.id, State.LOADING))
        if track.load.settled:  # no room on the way: no later event would report its end
            self._end_load(track, track.load)
        return True

    def _draw(self, track: Track, num_tokens: int) -> bool:
        """Extend its table for `num_tokens` more. If that exceeds its promise and no room is left, or if
        promises exceed memory, another request or itself is retracted. False: not now."""
        size, table = self._ledger.block_tokens, track.held_table()
        num_lacking = track.num_planned + num_tokens - table.num_slots * size
        if num_lacking <= 0:
            return True
        wanted = blocks_for(num_lacking, size)
        while not self._running.try_draw(track, wanted):
            if self._running.num_short(track, wanted) <= self._ledger.num_settling:
                # running transfers will free enough: it waits for them, and no request is retracted
                return False
            victim = self._running.next_to_leave(track)
            self._retract(victim)
            if victim is track:
                return False
        return True

    def _draw_room(self, track: Track, num_tokens: int) -> int:
        """How many of the drafts made after its next `num_tokens` get slots, within its promise. If promises
        exceed memory, no request is retracted for a draft; drafts without slots are not verified."""
        end = track.num_planned + num_tokens
        size, table = self._ledger.block_tokens, track.held_table()
        most = min(self._draft.num_ahead, track.lifetime_tokens - end, track.promised * size - end)
        most = min(most, track.num_unmasked)
        if most <= 0 or end < track.num_expected or track.is_deep:
            return 0
        wanted = blocks_for(end + most, size) - table.num_slots
        if wanted > 0 and (self._budget.overcommit > 1.0 or not self._running.try_draw(track, wanted)):
            return table.num_slots * size - end
        return most

    def _retract(self, track: Track, saves: bool = True) -> None:
        shares = self._steps.shares_of(track)
        mine = [share for share in shares if share.epoch == track.epoch]
        num_computed, num_unsure = track.num_committed, 0  # when the last launched step is over
        for share in mine:
            num_unsure += share.num_drafts
            num_computed = max(num_computed, share.end - num_unsure)
        self._leave(track, saves, num_computed)
        # their KV is saved, though their results may come later
        track.ran |= bool(mine) and track.lease is not None
        track.move(State.RETRACTED)
        track.start_over()
        track.epoch += 1
        track.leased_at = -1
        # its chunk of the plan being made is dropped with it
        track.num_in_flight = sum(share.num_logits for share in shares)
        self._line.add(track)
        self.counts.retractions += 1
        self.lives.append((track.request.id, State.RETRACTED))

    # ------------------------------------------------------------------------------------------------- commit

    def commit(self, result: StepResult) -> list[TokenEvent]:
        """Take in a step's result, oldest step first; returns events for the listeners of its requests."""
        step = self._steps.take(result.number)
        if result.error is not None and result.error.lacked_kv:
            self._undo(step)
            return []
        if result.error is not None:
            tracks = (share.track for share in step.shares.values() if share.track.state is not State.ENDED)
            return [self._end(track, self._events.of_failure(track, result.error)) for track in tracks]
        sampled, scored = {s.request_id: s for s in result.sampled}, dict(result.prompt_logprobs)
        events: list[TokenEvent] = []
        part_scores = {one.request_id: one for one in result.part_scores}
        self._seals_left = max(_SEALS_AT_ONCE, 2 * len(step.shares) // self._ledger.block_tokens)
        self._seal_some(step.fence)  # blocks that earlier commits left unsealed
        for share in step.shares.values():
            track = share.track
            if track.state is State.ENDED:
                continue
            request_id = track.request.id
            if request_id in part_scores and track.epoch == share.epoch and track.resident is not None:
                self._take_scores(track.resident, part_scores[request_id])
            event = self._commit_share(share, step.fence, sampled.get(request_id), scored.get(request_id))
            if event is not None:
                events.append(event)
        return events

    def _take_scores(self, resident: ResidentSet, given: PartScores) -> None:
        resident.take_scores(given.scores)
        self.counts.scorings += 1
        if given.recall is not None:
            self.counts.recall.add(given.recall)

    def _seal_filled(self, track: Track, fence: Fence | None) -> None:
        """It has decoded: seal the blocks that it filled."""
        size = self._ledger.block_tokens
        num_full, num_sealed = self._num_sealable(track) // size, track.num_sealed // size
        if num_full > num_sealed:
            self._unsealed[track] = None
            self._seal_some(fence)

    def _seal_some(self, fence: Fence | None) -> None:
        while self._unsealed and self._seals_left > 0:
            self._seals_left -= 1
            self._seal(next(iter(self._unsealed)), fence)

    def _seal(self, track: Track, fence: Fence | None) -> None:
        """Seal the blocks that it filled by decoding; `fence` follows the steps that filled them."""
        del self._unsealed[track]
        track.num_sealed = self._num_sealable(track)
        track.held_table().seal(track.tokens, track.num_sealed, fence)

    def _num_sealable(self, track: Track) -> int:
        """Computed tokens that no launched step may still write: a step after unverified drafts may begin
        earlier than planned."""
        size, num = self._ledger.block_tokens, track.num_committed
        if num // size == track.num_sealed // size or not self._steps.num_rewriting:
            return num
        return min(num, self._steps.writes_from(track))

    def _undo(self, step: Step) -> None:
        """KV that the step needed did not arrive, so this step and later ones of its requests computed
        nothing valid. The requests start again from what is cached and use colder tiers no more."""
        tracks = [share.track for share in step.shares.values() if share.track.state is not State.ENDED]
        for track in tracks:
            track.computes = True
            if track.state is State.RUNNING:
                self._retract(track, saves=False)
            track.end_lease()  # if it was retracted meanwhile, the saved KV is not valid
            track.num_in_flight = 0
        self._steps.forget(tracks)

    def _commit_share(
        self, share: Share, fence: Fence | None, sampled: Sampled | None, scores: TokenScores | None
    ) -> TokenEvent | None:
        track = share.track
        track.ran = True
        if track.prompt_logprobs is not None and scores is not None:
            # They hold across retractions, and a resumed request computes some of them again: keep only new
            # ones.
            known = track.prompt_logprobs
            track.prompt_logprobs = known.followed_by(scores, len(known) - share.start - 1)
        if share.num_logits > 1:
            return self._commit_drafts(share, fence, sampled)
        size = self._ledger.block_tokens
        if track.epoch == share.epoch:
            track.num_committed = share.end
            if share.end - share.start > 1:
                track.num_sealed = share.end
                track.held_table().seal(track.tokens, share.end, fence)
            elif share.end // size > track.num_sealed // size:
                self._seal_filled(track, fence)
        if not share.num_logits:
            done = track.request.sampling.max_tokens == 0 and share.end >= track.num_prompt
            return self._end(track, self._events.of_end(track, FinishReason.LENGTH)) if done else None
        if sampled is None:
            raise InvariantBroken(
                f"step sampled nothing for request {track.request.id}, though its plan asked for a token"
            )
        track.num_in_flight -= share.num_logits
        event = self._events.of_tokens(track, sampled)
        return event if event.finish is None else self._end(track, event)

    def _commit_drafts(self, share: Share, fence: Fence | None, sampled: Sampled | None) -> TokenEvent:
        """Keep the drafts that the target chose itself, and the token after them."""
        track = share.track
        if sampled is None or not 1 <= len(sampled.tokens) <= share.num_logits:
            raise InvariantBroken(
                f"step verified {share.num_drafts} drafts of request {track.request.id}, "
                f"but does not report how many were accepted"
            )
        num_kept = len(sampled.tokens) - 1
        track.num_in_flight -= share.num_logits
        event = self._events.of_tokens(track, sampled, share.num_drafts)
        if self._drafter is not None:
            self._drafter.saw(track, share.num_drafts, num_kept)
        if track.epoch == share.epoch:
            num_rejected = share.num_drafts - num_kept
            track.num_planned -= num_rejected
            if not self._steps.move(track, num_rejected):
                track.num_drafted = 0  # it has no later step: its position is certain
            track.num_committed = min(share.end - num_rejected, len(track.tokens))
            self._seal_filled(track, fence)
        return event if event.finish is None else self._end(track, event)

    # ---------------------------------------------------------------------------------------------------- end

    def _end(self, track: Track, event: TokenEvent) -> TokenEvent:
        """Give back all that it holds; `event` is its last."""
        if track.state in (State.RUNNING, State.LOADING):
            is_answered = event.finish in (FinishReason.STOP, FinishReason.LENGTH)
            self._leave(track, saves=False, is_answered=is_answered)
            if is_answered:
                self._conversations.answered(track)
        else:
            self._line.remove(track)
        track.end_prefetch()
        track.end_lease()
        if track.want is not None:
            track.want.end()
            track.want = None
        track.move(State.ENDED)
        if self._drafter is not None:
            self._drafter.ended(track)
        track.finish = event.finish
        if event.finish is not None:
            self.lengths.saw(track.request, len(track.tokens) - track.num_prompt, event.finish)
        del self._tracks[track.request.id]
        if not self._tracks:
            self._conversations.forget()
        return event

    def _leave(self, track: Track, saves: bool, num_tokens: int = 0, is_answered: bool = False) -> None:
        """It gives up row and table and leaves the next step. Call it before its state changes."""
        if track in self._unsealed:
            self._seal(track, self._steps.last_fence)
        if track.resident is not None:
            self.left_scored.append((track.request.id, self._running.keep_context(track, is_answered)))
        self._running.leave(track, self._steps, saves, num_tokens)
        self._draft.drop(track)

    # -------------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Recount the running totals; raises InvariantBroken if they differ."""
        self._running.check()


def _may_begin(load: Load) -> bool:
    """True if a step may be launched over it: its fences exist, and the rest of it is short or overlaps with
    the first layers."""
    return load.arrivals is not None and (load.layered or load.nearly_landed())

"""The step being built, and the steps whose results are outstanding. Owns their order and their fences. The
scheduler decides which requests take part, and handles the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.contract import TOKEN_IN_FLIGHT, Chunk, Echo, Fence, FenceId, Load, Request, Start, Table
from penstock.engine.scheduling.track import Track
from penstock.errors import InvariantBroken


class Draft:
    """The step being built. It is kept until something is computed, so its row setups and waits are not
    lost."""

    def __init__(self) -> None:
        self.decodes: list[Chunk] = []
        self.silent: list[Chunk] = []  # one token each, nothing is sampled
        self.prefills: list[Chunk] = []
        self.starts: list[Start] = []  # rows that it sets up
        self.num_ahead = 0  # drafts per request to make after it
        self.after: dict[FenceId, Fence] = {}  # earlier users of slots drawn for it
        self.loads: dict[str, Load] = {}  # by request: loads that its layers wait for
        self.scores = False  # some chunk asks for scores of its context
        self.reads_host = True  # it may read KV in host memory

    def set_up(self, track: Track) -> None:
        self.starts.append(Start.of(track.row, track.request, track.tokens[track.num_prompt :]))

    def add(self, track: Track, num_tokens: int, drafts: tuple[int, ...] = (), room: int = 0) -> None:
        """Compute its next `num_tokens` and verify `drafts` after them. Slots exist for all of these, and for
        `room` tokens that are drafted after the step."""
        start, end = track.num_planned, track.num_planned + num_tokens
        table, request = track.held_table(), track.request
        sampling = request.sampling
        tokens = tuple(track.tokens[start:end])
        if len(tokens) < num_tokens:
            tokens += (TOKEN_IN_FLIGHT,) * (num_tokens - len(tokens))
        num_drafts, num_known = len(drafts), len(track.tokens)
        num_logits = (
            1 + num_drafts if end == num_known + track.num_in_flight and sampling.max_tokens > 0 else 0
        )
        tokens, end = tokens + drafts, end + num_drafts
        num_unsure, track.num_drafted = track.num_drafted, num_drafts
        track.num_pending = self.num_ahead if num_logits else 0
        next_token = track.tokens[end] if end < num_known else 0
        track.num_planned = end
        track.num_in_flight += num_logits
        if track.load is not None:
            if not track.load.settled:
                self.loads[request.id] = track.load
            track.load = None
        for fence in table.take_after():
            self.after[FenceId(fence.lane, fence.number)] = fence
        echo = None if sampling.prompt_logprobs is None else _echo(request, start, end)
        writes = start >= track.num_cached
        paged, num_left_out, scoring = None, 0, None
        if track.resident is not None:
            placed = track.resident.place(
                table, start, end, may_score=not self.scores, may_read=self.reads_host
            )
            slots, paged, num_left_out, scoring = placed
            self.scores |= scoring is not None and scoring.num_parts > 0
        else:
            slots = table.slots(end + room)
            paged = table.paged_slots if track.is_deep and table.num_paged else None
        chunk = Chunk(
            *(request.id, track.row, start, tokens, slots, writes, num_logits, request.adapter, echo, paged),
            *(num_unsure, next_token, num_left_out, scoring, room),
        )
        (self.prefills if num_tokens > 1 else self.decodes if num_logits else self.silent).append(chunk)

    @property
    def num_single(self) -> int:
        """Chunks of one token, drafts aside."""
        return len(self.decodes) + len(self.silent)

    def chunks(self) -> tuple[Chunk, ...]:
        """In step order: single tokens first, and of these the sampled ones first, so that a chunk and its
        sample have the same index."""
        return (*self.decodes, *self.silent, *self.prefills)

    def drop(self, track: Track) -> None:
        """It leaves before the step is launched. Its row may still be set up: the setup of the row's next
        request comes later in lane order."""
        self.loads.pop(track.request.id, None)
        for chunks in (self.decodes, self.silent, self.prefills):
            chunks[:] = [chunk for chunk in chunks if chunk.request_id != track.request.id]


class Share(NamedTuple):
    """One request's part of a launched step, and its epoch."""

    track: Track
    epoch: int
    start: int
    end: int  # tokens computed when the step is over, if all drafts are accepted
    num_logits: int
    writes_from: int = 0  # first token that it may write, as known at planning

    @property
    def num_drafts(self) -> int:
        return max(0, self.num_logits - 1)


class Step(NamedTuple):
    number: int
    shares: dict[Track, Share]
    fence: Fence | None = None  # after the step
    has_drafts: bool = False  # it verifies drafts
    rewrites: bool = False  # it may begin earlier than planned, since drafts before it are not verified yet


class Steps:
    """Planned steps whose results are outstanding, oldest first."""

    def __init__(self) -> None:
        self.last_fence: Fence | None = None  # after every step launched so far
        self._num_steps = 0
        self._unread: deque[Step] = deque()
        self.num_drafted = 0  # of these, steps that verify drafts
        self.num_rewriting = 0  # of these, steps with drafts, or after unverified ones
        self._is_whole = True  # all of the step launched last is on the lane
        self._released: list[Table] = []  # tables to release when it is

    def add(self, chunks: Sequence[Chunk], tracks: Mapping[str, Track], has_drafts: bool = False) -> int:
        """A step of these chunks was planned; returns its number. `tracks`: running requests by id."""
        self._num_steps += 1
        # the start of a step after unverified drafts is not known yet
        rewrites = has_drafts or self.num_drafted > 0
        self.num_drafted += has_drafts
        self.num_rewriting += rewrites
        shares = {(track := tracks[chunk.request_id]): _share(track, chunk) for chunk in chunks}
        self._unread.append(Step(self._num_steps, shares, has_drafts=has_drafts, rewrites=rewrites))
        return self._num_steps

    def launched(self, fence: Fence, is_whole: bool = True) -> None:
        """The step added last is on the compute lane; `fence` follows it. If it is not whole, this is called
        again when the rest is there."""
        self.last_fence, self._is_whole = fence, is_whole
        self._unread[-1] = self._unread[-1]._replace(fence=fence)
        if is_whole:
            released, self._released = self._released, []
            for table in released:
                table.release(fence)

    def release(self, table: Table) -> None:
        """Release the table after all steps that may use its slots. If the last step is not whole, wait for
        the rest of it."""
        if self._is_whole:
            table.release(self.last_fence)
        else:
            self._released.append(table)

    def take(self, number: int) -> Step:
        """The oldest one, which has to be `number`: its result is in."""
        step = self._unread.popleft()
        if step.number != number:
            raise InvariantBroken(f"result of step {number} arrived, but step {step.number} was due")
        self.num_drafted -= step.has_drafts
        self.num_rewriting -= step.rewrites
        return step

    def shares_of(self, track: Track) -> list[Share]:
        return [step.shares[track] for step in self._unread if track in step.shares]

    def writes_from(self, track: Track) -> int:
        """The first token that an outstanding step of this epoch may write."""
        return min(
            (share.writes_from for share in self.shares_of(track) if share.epoch == track.epoch),
            default=track.num_planned,
        )

    def move(self, track: Track, num_tokens: int) -> bool:
        """Its shares in later steps of this epoch start `num_tokens` earlier than planned. False if there are
        none."""
        found = False
        for step in self._unread:
            share = step.shares.get(track)
            if share is not None and share.epoch == track.epoch:
                found = True
                step.shares[track] = share._replace(
                    start=share.start - num_tokens, end=share.end - num_tokens
                )
        return found

    def forget(self, tracks: Iterable[Track]) -> None:
        """Drop their shares in later steps."""
        for track in tracks:
            for step in self._unread:
                step.shares.pop(track, None)


def _share(track: Track, chunk: Chunk) -> Share:
    start, first = chunk.start, chunk.start - chunk.num_unsure
    return Share(track, track.epoch, start, start + len(chunk.tokens), chunk.num_logits, first)


def _echo(request: Request, start: int, end: int) -> Echo | None:
    """The prompt tokens that positions `start` to `end` predict; none after the last prompt token."""
    tokens = tuple(request.prompt[start + 1 : end + 1])
    return Echo(tokens, request.sampling.prompt_logprobs or 0) if tokens else None

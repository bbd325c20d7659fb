"""The step being built, and the steps whose results are outstanding. Owns their order, their fences, and when
the blocks that they fill are sealed. The scheduler decides which requests take part."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.contract import (
    TOKEN_IN_FLIGHT,
    Chunk,
    Echo,
    Fence,
    FenceId,
    Load,
    Request,
    Start,
    StepPlan,
    Table,
)
from penstock.engine.scheduling.stages import Life, RunningRequest
from penstock.errors import InvariantBroken

# Blocks filled by decoding that one commit seals: this many, or twice the average number filled per step. If
# hundreds of requests fill a block in the same step, sealing and saving all of them would take as long as the
# step.
_SEALS_AT_ONCE = 16


class NextStep:
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

    def set_up(self, running: RunningRequest) -> None:
        life = running.life
        self.starts.append(Start.of(running.row, life.request, life.tokens[life.num_prompt :]))

    def add(
        self, running: RunningRequest, num_tokens: int, drafts: tuple[int, ...] = (), room: int = 0
    ) -> None:
        """Compute its next `num_tokens` and verify `drafts` after them. Slots exist for all of these, and for
        `room` tokens that are drafted after the step."""
        life = running.life
        request, known, num_drafts = life.request, life.tokens, len(drafts)
        start, end = running.num_planned, running.num_planned + num_tokens
        tokens = tuple(known[start:end])
        if len(tokens) < num_tokens:
            tokens += (TOKEN_IN_FLIGHT,) * (num_tokens - len(tokens))
        samples = end == len(known) + life.num_in_flight and request.sampling.max_tokens > 0
        num_logits = 1 + num_drafts if samples else 0
        tokens, end = tokens + drafts, end + num_drafts
        placed = life.placement.place(running, start, end, room, self)
        num_unsure, running.num_drafted = running.num_drafted, num_drafts
        running.num_pending = self.num_ahead if num_logits else 0
        running.num_planned = end
        life.num_in_flight += num_logits
        self._wait_for(running)
        self.scores |= placed.scoring is not None and placed.scoring.num_parts > 0
        writes = start >= running.num_cached
        next_token = known[end] if end < len(known) else 0
        echo = None if request.sampling.prompt_logprobs is None else _echo(request, start, end)
        chunk = Chunk(
            *(request.id, running.row, start, tokens, placed.slots, writes, num_logits, request.adapter),
            *(echo, placed.paged, num_unsure, next_token, placed.num_left_out, placed.scoring, room),
            placed.state,
        )
        (self.prefills if num_tokens > 1 else self.decodes if num_logits else self.silent).append(chunk)

    def _wait_for(self, running: RunningRequest) -> None:
        """The step waits for the load into its table, and for earlier users of its newest slots."""
        if running.load is not None:
            if not running.load.settled:
                self.loads[running.request.id] = running.load
            running.load = None
        for fence in running.table.take_after():
            self.after[FenceId(fence.lane, fence.number)] = fence

    def chunks(self) -> tuple[Chunk, ...]:
        """In step order: single tokens first, and of these the sampled ones first, so that a chunk and its
        sample have the same index."""
        return (*self.decodes, *self.silent, *self.prefills)

    def plan(self, number: int, chunks: tuple[Chunk, ...]) -> StepPlan:
        num_single = len(self.decodes) + len(self.silent)
        waits = tuple(self.after), tuple(self.loads)
        return StepPlan(number, chunks, num_single, tuple(self.starts), *waits, self.num_ahead)

    def drop(self, request_id: str) -> None:
        """The request leaves before the step is launched. Its row may still be set up: the setup of the row's
        next request comes later in lane order."""
        self.loads.pop(request_id, None)
        for chunks in (self.decodes, self.silent, self.prefills):
            chunks[:] = [chunk for chunk in chunks if chunk.request_id != request_id]


class Share(NamedTuple):
    """One request's part of a launched step."""

    running: RunningRequest  # the stage that was planned; a retraction ends it
    start: int
    end: int  # tokens computed when the step is over, if all drafts are accepted
    num_logits: int
    writes_from: int = 0  # first token that it may write, as known at planning

    @property
    def num_drafts(self) -> int:
        return max(0, self.num_logits - 1)


class UnreadStep(NamedTuple):
    number: int
    shares: dict[Life, Share]
    fence: Fence | None = None  # after the step
    has_drafts: bool = False  # it verifies drafts
    rewrites: bool = False  # it may begin earlier than planned, since drafts before it are not verified yet


class Steps:
    """Planned steps whose results are outstanding, oldest first."""

    def __init__(self) -> None:
        self.last_fence: Fence | None = None  # after every step launched so far
        self.num_planned = 0
        self._unread: deque[UnreadStep] = deque()
        self.num_drafted = 0  # of these, steps that verify drafts
        self.num_rewriting = 0  # of these, steps with drafts, or after unverified ones
        self._is_whole = True  # all of the step launched last is on the lane
        self._released: list[Table] = []  # tables to release when it is

    def add(
        self, chunks: Sequence[Chunk], requests: Mapping[str, RunningRequest], has_drafts: bool = False
    ) -> int:
        """A step of these chunks was planned; returns its number. `requests`: running requests by id."""
        self.num_planned += 1
        # the start of a step after unverified drafts is not known yet
        rewrites = has_drafts or self.num_drafted > 0
        self.num_drafted += has_drafts
        self.num_rewriting += rewrites
        shares = {}
        for chunk in chunks:
            running, start = requests[chunk.request_id], chunk.start
            shares[running.life] = Share(
                running, start, chunk.kv_len, chunk.num_logits, start - chunk.num_unsure
            )
        self._unread.append(UnreadStep(self.num_planned, shares, has_drafts=has_drafts, rewrites=rewrites))
        return self.num_planned

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

    def take(self, number: int) -> UnreadStep:
        """The oldest one, which has to be `number`: its result is in."""
        step = self._unread.popleft()
        if step.number != number:
            raise InvariantBroken(f"result of step {number} arrived, but step {step.number} was due")
        self.num_drafted -= step.has_drafts
        self.num_rewriting -= step.rewrites
        return step

    def shares_of(self, life: Life) -> list[Share]:
        """Of every stage; a step from before a retraction may still be outstanding."""
        return [step.shares[life] for step in self._unread if life in step.shares]

    def writes_from(self, running: RunningRequest) -> int:
        """The first token that an outstanding step of this stage may write."""
        shares = self.shares_of(running.life)
        return min(
            (share.writes_from for share in shares if share.running is running), default=running.num_planned
        )

    def move(self, running: RunningRequest, num_tokens: int) -> bool:
        """Its shares in later steps start `num_tokens` earlier than planned. False if there are none."""
        found = False
        for step in self._unread:
            share = step.shares.get(running.life)
            if share is not None and share.running is running:
                found = True
                step.shares[running.life] = share._replace(
                    start=share.start - num_tokens, end=share.end - num_tokens
                )
        return found

    def forget(self, lives: Iterable[Life]) -> None:
        """Drop their shares in later steps."""
        for life in lives:
            for step in self._unread:
                step.shares.pop(life, None)


class Sealing:
    """Seals the blocks that requests fill by decoding, a bounded number in each commit."""

    def __init__(self, steps: Steps, block_tokens: int) -> None:
        self._steps = steps
        self._block_tokens = block_tokens
        # requests with an unsealed block filled by decoding, oldest first
        self._unsealed: dict[RunningRequest, None] = {}
        self._num_left = 0  # how many such blocks the current commit may still seal

    def begin(self, step: UnreadStep) -> None:
        """A commit of `step` begins: first the blocks that earlier commits left."""
        self._num_left = max(_SEALS_AT_ONCE, 2 * len(step.shares) // self._block_tokens)
        self._seal_some(step.fence)

    def filled(self, running: RunningRequest, fence: Fence | None) -> None:
        """It has decoded; `fence` follows the step."""
        if self._num_sealable(running) // self._block_tokens > running.num_sealed // self._block_tokens:
            self._unsealed[running] = None
            self._seal_some(fence)

    def finish(self, running: RunningRequest) -> None:
        """It leaves: seal what is left of it."""
        if running in self._unsealed:
            self._seal(running, self._steps.last_fence)

    def _seal_some(self, fence: Fence | None) -> None:
        while self._unsealed and self._num_left > 0:
            self._num_left -= 1
            self._seal(next(iter(self._unsealed)), fence)

    def _seal(self, running: RunningRequest, fence: Fence | None) -> None:
        del self._unsealed[running]
        running.num_sealed = self._num_sealable(running)
        running.table.seal(running.life.tokens, running.num_sealed, fence)

    def _num_sealable(self, running: RunningRequest) -> int:
        """Computed tokens that no launched step may still write: a step after unverified drafts may begin
        earlier than planned."""
        size, num = self._block_tokens, running.num_committed
        if num // size == running.num_sealed // size or not self._steps.num_rewriting:
            return num
        return min(num, self._steps.writes_from(running))


def _echo(request: Request, start: int, end: int) -> Echo | None:
    """The prompt tokens that positions `start` to `end` predict; none after the last prompt token."""
    tokens = tuple(request.prompt[start + 1 : end + 1])
    return Echo(tokens, request.sampling.prompt_logprobs or 0) if tokens else None

"""A request and the stages of its life: it waits in line, then it runs, perhaps several times. Owns the
states and the legal moves between them. `Life` stays with the request; the other two types are made anew for
each stage."""

from __future__ import annotations

import enum
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.contract import (
    Lease,
    Load,
    Match,
    Prefetch,
    Prefix,
    PromptLogprobs,
    Request,
    StateSearch,
    Table,
    Want,
)
from penstock.engine.scheduling.placement import Placement
from penstock.errors import IllegalTransition


class State(enum.Enum):
    WAITING = "waiting"  # holds nothing but a lease
    LOADING = "loading"  # has a row, a table and the promise of its blocks; some of its KV is on its way
    RUNNING = "running"  # has a row and a table
    RETRACTED = "retracted"  # gave both up under pressure; will run again
    ENDED = "ended"


Runs = tuple[tuple[str, int], ...]  # (tier, tokens)

_LEGAL = {
    State.WAITING: {State.LOADING, State.RUNNING, State.ENDED},
    State.LOADING: {State.RUNNING, State.WAITING, State.RETRACTED, State.ENDED},
    State.RUNNING: {State.RETRACTED, State.ENDED},
    State.RETRACTED: {State.LOADING, State.RUNNING, State.ENDED},
    State.ENDED: set(),
}


class Sources:
    """The tiers that the KV of a request's prompt came from."""

    def __init__(self) -> None:
        self.found: Runs = ()  # prompt tokens that were cached when it first ran, in order
        self._origins: dict[int, str] = {}  # by block number: tier of blocks read into host memory for it

    def read(self, prefetch: Prefetch) -> None:
        self._origins.update(prefetch.origins)

    def of_table(self, runs: Sequence[tuple[str, int]], block_tokens: int) -> Runs:
        """The sources of a table that begins with `runs`, in blocks. A block in host memory may have been
        read from a colder tier for it."""
        found: list[tuple[str, int]] = []
        end = 0
        for tier, num in runs:
            first, end = end, end + num
            tiers = (
                self._origins.get(block, tier) if tier == "host" else tier for block in range(first, end)
            )
            found += [(origin, len(list(same)) * block_tokens) for origin, same in itertools.groupby(tiers)]
        return tuple(found)


@dataclass(slots=True, eq=False)
class Life:
    """What stays with a request through all stages. `tokens` are known; those in flight come after them."""

    request: Request
    order: int  # of arrival; decides which request waits for which
    placement: Placement  # where its KV is: all on the device, or deep
    prefix: Prefix | None
    tokens: list[int]
    state: State = State.WAITING
    # its present stage: one of the two, until it has ended
    waiting: WaitingRequest | None = None
    running: RunningRequest | None = None
    num_in_flight: int = 0  # tokens being sampled, not yet known; an upper bound while drafts are verified
    num_retractions: int = 0
    num_drafted: int = 0  # drafts verified for it
    num_accepted: int = 0  # of these, kept
    computes: bool = False  # a load from colder tiers failed: it computes its KV instead
    ran: bool = False  # a step computed some of it: what it matches from now on may be its own KV
    started: bool = False  # its prompt has been counted and its first event sent
    sources: Sources = field(default_factory=Sources)
    prompt_logprobs: PromptLogprobs | None = None

    def move(self, new: State) -> None:
        if new not in _LEGAL[self.state]:
            raise IllegalTransition(f"request {self.request.id}", self.state.value, new.value)
        self.state = new

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_written(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_expected(self) -> int:
        """Tokens known once everything in flight has landed."""
        return len(self.tokens) + self.num_in_flight

    @property
    def lifetime_tokens(self) -> int:
        """KV entries it needs at most: the last generated token is never fed back."""
        return self.num_prompt + max(0, self.request.sampling.max_tokens - 1)

    def note_sources(self, runs: Runs, num_tokens: int) -> None:
        """It begins with `num_tokens` cached tokens, of `runs`. Tokens that it computed itself before a
        retraction do not count as found."""
        if not self.ran:
            self.sources.found = _first(runs, num_tokens)
        elif not self.started:
            self.sources.found = _first(self.sources.found, num_tokens)


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request in line: its place, what colder tiers keep for it, and what is read ahead for it."""

    life: Life
    lease: Lease | None = None  # blocks that colder tiers keep for it until it is admitted
    want: Want | None = None  # the device blocks that it will use
    rank: float = 0.0  # its place in line; set by `Line`
    is_ranked: bool = True  # in the ranked queue of `Line`, not in the one by arrival
    # it continues a conversation: a good part of its prompt is cached, or it ran before
    goes_on: bool = False
    # Length of the match, in blocks, when the engine thread last asked colder tiers; -1: never asked.
    leased_at: int = -1
    prefetch: Prefetch | None = None  # its read into host memory
    may_prefetch: bool = True  # no prefetch was tried yet, or more may come
    search: StateSearch | None = None  # for the state of its prefix in cold tiers; None: not begun, or none

    @property
    def request(self) -> Request:
        return self.life.request

    @property
    def num_tokens(self) -> int:
        return len(self.life.tokens)

    @property
    def is_retracted(self) -> bool:
        return self.life.state is State.RETRACTED

    def end_lease(self) -> None:
        """Idempotent."""
        if self.lease is not None:
            self.lease.end()
            self.lease = None

    def end_want(self) -> None:
        """Idempotent."""
        if self.want is not None:
            self.want.end()
            self.want = None

    def end_prefetch(self) -> None:
        """Idempotent."""
        if self.prefetch is not None:
            self.life.sources.read(self.prefetch)
            self.prefetch.end()
            self.prefetch = None


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request with a row and a table.

    num_committed <= num_planned <= len(tokens) + num_in_flight, where the first two count tokens whose KV is
    computed.
    """

    life: Life
    row: int
    table: Table
    num_resident: int  # tokens whose KV was on the device when its table was opened
    num_cached: int  # tokens whose KV came with the table and is shared: never written again
    sources: Runs  # of its table when it was opened, its load included
    load: Load | None = None  # transfer into its table, until a step waits for it
    num_planned: int = 0  # tokens whose KV launched steps have computed or will
    num_committed: int = 0  # tokens whose KV a finished step has computed
    num_sealed: int = 0  # tokens whose full blocks have their keys
    num_pending: int = 0  # its drafts that the last planned step leaves on the device
    num_drafted: int = 0  # drafts that the last planned step verifies, result not known yet
    promised: int = 0  # blocks that its table may have; of a deep request, its placement knows
    assured: int = 0  # of these, promised at admission: no other request gets them
    _most: float = field(init=False)  # tokens that it may have in the end

    def __post_init__(self) -> None:
        max_tokens = self.life.request.sampling.max_tokens
        self._most = self.life.num_prompt + max_tokens if max_tokens else math.inf
        self._begin()

    def _begin(self) -> None:
        """At least one token is always computed: on a full match the last one, whose KV exists and is not
        written again."""
        known = min(self.num_cached, len(self.life.tokens) - 1)
        self.num_sealed = self.num_planned = self.num_committed = known
        self.life.note_sources(self.sources, known)

    @property
    def request(self) -> Request:
        return self.life.request

    @property
    def is_current(self) -> bool:
        """False for a stage that a retraction or the end of the request has closed."""
        return self.life.running is self

    @property
    def num_left(self) -> int:
        """Tokens that the next steps can compute; 0 if all tokens up to its limit are known or in flight."""
        num_expected = len(self.life.tokens) + self.life.num_in_flight
        return num_expected - self.num_planned if num_expected < self._most else 0

    @property
    def num_undisturbed(self) -> int:
        """Drafts that may be verified next before its reasoning may be forced to end. The step after them is
        planned before their result is known, so it must be before that, too."""
        masked_from = self.request.sampling.masked_from
        if masked_from is None or self.request.sampling.thought is None:
            return sys.maxsize
        return masked_from - (self.life.num_expected - self.life.num_prompt) - 2

    def compute_rest(self, num_landed: int, block_tokens: int) -> None:
        """Its load has ended after `num_landed` blocks. The tokens after them are computed."""
        self.load, self.life.computes = None, True
        self.num_cached = self.num_resident + num_landed * block_tokens
        self._begin()


def begin(waiting: WaitingRequest, row: int, table: Table, match: Match, block_tokens: int) -> RunningRequest:
    """The admission: the next stage of a request whose table begins with `match`."""
    if waiting.prefetch is not None:
        waiting.life.sources.read(waiting.prefetch)
    num_tokens, runs = waiting.life.placement.cached(waiting, match)
    sources = waiting.life.sources.of_table(runs, block_tokens)
    running = RunningRequest(waiting.life, row, table, match.num_blocks * block_tokens, num_tokens, sources)
    waiting.life.running = running
    return running


def _first(runs: Runs, num_tokens: int) -> Runs:
    """The first `num_tokens` of them."""
    taken: list[tuple[str, int]] = []
    for tier, num in runs:
        num = min(num, num_tokens)
        if num > 0:
            taken.append((tier, num))
        num_tokens -= num
    return tuple(taken)

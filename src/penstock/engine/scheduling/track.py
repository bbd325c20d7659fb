"""One request as the scheduler sees it: its state, its tokens, how far it is planned and how far it is
computed."""

from __future__ import annotations

import enum
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.contract import (
    FinishReason,
    Lease,
    Load,
    Match,
    Prefetch,
    Prefix,
    PromptLogprobs,
    Request,
    Table,
    Want,
)
from penstock.engine.scheduling.residency import KeptContext, ResidentSet
from penstock.errors import IllegalTransition, InvariantBroken


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


@dataclass(slots=True, eq=False)
class Track:
    """Progress of one request. `tokens` are known; the newest may still be in flight and come on top of them.

    num_committed <= num_planned <= len(tokens) + num_in_flight, where the first two count tokens whose KV is
    computed.
    """

    request: Request
    order: int  # of arrival; decides which request waits for which
    prefix: Prefix | None
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    num_planned: int = 0  # tokens whose KV launched steps have computed or will
    num_committed: int = 0  # tokens whose KV a finished step has computed
    num_in_flight: int = 0  # tokens being sampled, not yet known; an upper bound while drafts are verified
    num_pending: int = 0  # its drafts that the last planned step leaves on the device
    num_drafted: int = 0  # drafts that the last planned step verifies, result not known yet
    num_sealed: int = 0  # tokens whose full blocks have their keys
    num_cached: int = 0  # tokens whose KV came with the table and is shared: never written again
    found: Runs = ()  # prompt tokens that were cached when it first ran, by tier, in order
    sources: Runs = ()  # the same for its table when it was opened, its load included
    num_resident: int = 0  # tokens whose KV was on the device when its table was opened
    lease: Lease | None = None  # blocks that colder tiers keep for it until it is admitted
    load: Load | None = None  # transfer into its table, until a step waits for it
    # Length of the device's match, in blocks (of a deep request: of the whole match), when the engine thread
    # last asked colder tiers; -1: never asked.
    leased_at: int = -1
    want: Want | None = None  # while it waits: the device blocks that it will use
    # it continues a conversation: a good part of its prompt is cached, or it ran before
    goes_on: bool = False
    rank: float = 0.0  # its place in line; set by `Line`
    is_ranked: bool = True  # in the ranked queue of `Line`, not in the one by arrival
    prefetch: Prefetch | None = None  # its read into host memory while it waits
    # source tier of each block read that way, by block number
    origins: dict[int, str] = field(default_factory=dict)
    may_prefetch: bool = True  # no prefetch was tried yet, or more may come
    num_read: int = 0  # blocks of a deep request found in host memory at the last lookup
    ahead: Load | None = None  # its copy from host memory to the device while it waits
    ahead_first: int = 0  # first block of that copy
    may_promote_ahead: bool = True  # no such copy has failed
    brought: tuple[range, ...] = ()  # blocks that arrived that way, in order
    computes: bool = False  # a load from colder tiers failed: it computes its KV instead
    ran: bool = False  # a step computed some of it: what it matches from now on may be its own KV
    is_deep: bool = False  # only its last blocks are on the device, those before them in host memory
    # some of its tokens attend to a part of their context, or to KV computed that way
    is_partial: bool = False
    unit: int = 1  # its blocks are paged out in multiples of this; of a scored request, in whole parts
    resident: ResidentSet | None = None  # of a scored request that has a table
    # context kept from an earlier turn and its usable blocks, from the last match
    continues: tuple[KeptContext, int] | None = None
    promised: int = 0  # blocks that its table may have, while it has one and is not deep
    assured: int = 0  # of these, promised at admission: no other request gets them
    # blocks that it paged out while other requests still hold them on the device; lowers its limit there
    num_lent: int = 0
    epoch: int = 0  # number of retractions; tells steps of an earlier life apart
    row: int = -1
    table: Table | None = None
    prompt_logprobs: PromptLogprobs | None = None
    started: bool = False  # its prompt has been counted and its first event sent
    finish: FinishReason | None = None
    num_prompt: int = field(init=False)  # tokens
    _most: float = field(init=False)  # tokens that it may have in the end

    def __post_init__(self) -> None:
        max_tokens = self.request.sampling.max_tokens
        self.num_prompt = len(self.request.prompt)
        self._most = self.num_prompt + max_tokens if max_tokens else math.inf

    def move(self, new: State) -> None:
        if new not in _LEGAL[self.state]:
            raise IllegalTransition(f"request {self.request.id}", self.state.value, new.value)
        self.state = new

    @property
    def deciding(self) -> ResidentSet | None:
        """The resident set that its next tokens attend to; None if they attend to all tokens."""
        return (
            self.resident if self.resident is not None and self.resident.decodes(self.num_planned) else None
        )

    @property
    def reads_host(self) -> bool:
        """True if its next tokens read KV in host memory."""
        return self.is_deep and self.held_table().num_paged > 0 and self.deciding is None

    @property
    def num_expected(self) -> int:
        """Tokens known once everything in flight has landed."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_unmasked(self) -> int:
        """Drafts that may be verified next without a grammar mask. The step after them is planned before
        their result is known, so it must need no mask either."""
        masked_from = self.request.sampling.masked_from
        return sys.maxsize if masked_from is None else masked_from - (self.num_expected - self.num_prompt) - 2

    @property
    def num_left(self) -> int:
        """Tokens that the next steps can compute; 0 if all tokens up to its limit are known or in flight."""
        num_expected = len(self.tokens) + self.num_in_flight
        return num_expected - self.num_planned if num_expected < self._most else 0

    @property
    def lifetime_tokens(self) -> int:
        """KV entries it needs at most: the last generated token is never fed back."""
        return self.num_prompt + max(0, self.request.sampling.max_tokens - 1)

    def begin(self, match: Match, block_tokens: int) -> None:
        """Its table starts with the match. At least one token is always computed: on a full match the last
        one, whose KV exists and is not written again."""
        num_all = (match.num_blocks + match.num_colder + match.num_paged) * block_tokens
        self.end_ahead()
        self.num_resident = match.num_blocks * block_tokens
        self.num_cached = (
            num_all
            if self.lease is None or self.is_deep
            else min(num_all, max(self.lease.num_tokens, self.num_resident))
        )
        self.num_sealed = self.num_planned = self.num_committed = min(self.num_cached, len(self.tokens) - 1)
        runs: Sequence[tuple[str, int]] = () if self.lease is None else self.lease.runs_from(match.num_blocks)
        if self.is_deep:
            runs = (("host", match.num_paged),)
        self._note_origins()
        runs = self._by_origin((*self._resident_runs(match.num_blocks), *runs))
        self.sources = tuple((tier, num * block_tokens) for tier, num in runs)
        self.note_sources()

    def _by_origin(self, runs: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Runs of its first blocks by source tier: a block in host memory may have been read from a colder
        tier for it."""
        if not self.origins:
            return list(runs)
        found: list[tuple[str, int]] = []
        end = 0
        for tier, num in runs:
            first, end = end, end + num
            origins = (
                self.origins.get(block, tier) if tier == "host" else tier for block in range(first, end)
            )
            found += [(origin, len(list(same))) for origin, same in itertools.groupby(origins)]
        return found

    def _note_origins(self) -> None:
        if self.prefetch is not None:
            self.origins.update(self.prefetch.origins)

    def _resident_runs(self, num_blocks: int) -> list[tuple[str, int]]:
        """Source tiers of its first `num_blocks` blocks, all on the device now: those copied there for it
        came from host memory."""
        runs: list[tuple[str, int]] = []
        end = 0
        for brought in self.brought:
            first, end_before, end = min(brought.start, num_blocks), end, min(brought.stop, num_blocks)
            runs += [("device", first - end_before), ("host", end - first)]
        return [*runs, ("device", num_blocks - end)]

    def num_brought(self, num_blocks: int) -> int:
        """How many of its first `num_blocks` blocks were copied to the device for it while it waited."""
        return sum(max(0, min(some.stop, num_blocks) - some.start) for some in self.brought)

    def compute_rest(self, num_landed: int, block_tokens: int) -> None:
        """Its load has ended after `num_landed` blocks. The tokens after them are computed."""
        self.load, self.computes = None, True
        self.num_cached = self.num_resident + num_landed * block_tokens
        self.num_sealed = self.num_planned = self.num_committed = min(self.num_cached, len(self.tokens) - 1)
        self.note_sources()

    def start_over(self) -> None:
        """It lost its table with all KV that was computed or loading."""
        self.load = None
        self.num_planned = self.num_committed = self.num_drafted = self.num_pending = 0

    def note_sources(self) -> None:
        """It begins with `num_planned` cached tokens. Tokens that it computed itself before a retraction do
        not count as found."""
        if not self.ran:
            self.found = _first(self.sources, self.num_planned)
        elif not self.started:
            self.found = _first(self.found, self.num_planned)

    def end_lease(self) -> None:
        """Idempotent."""
        if self.lease is not None:
            self.lease.end()
            self.lease = None

    def end_prefetch(self) -> None:
        """Idempotent."""
        self._note_origins()
        if self.prefetch is not None:
            self.prefetch.end()
            self.prefetch = None

    def end_ahead(self) -> None:
        """Stop waiting for the copy to the device: it has arrived, has failed, or is late. Idempotent."""
        if self.ahead is not None:
            first, num_blocks = self.ahead_first, self.ahead.num_landed
            # the device had lost the blocks from `first` on
            kept = (range(some.start, min(some.stop, first)) for some in self.brought)
            self.brought = *(some for some in kept if some), range(first, first + num_blocks)
            self.may_promote_ahead = num_blocks > 0
            self.ahead = None

    def held_table(self) -> Table:
        if self.table is None:
            raise InvariantBroken(f"request {self.request.id} has no table in state {self.state.value}")
        return self.table


def _first(runs: Runs, num_tokens: int) -> Runs:
    """The first `num_tokens` of them."""
    taken: list[tuple[str, int]] = []
    for tier, num in runs:
        num = min(num, num_tokens)
        if num > 0:
            taken.append((tier, num))
        num_tokens -= num
    return tuple(taken)

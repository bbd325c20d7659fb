"""Where the KV of a request is, and what follows from it in every stage. `Placement` itself is that of
ordinary requests: all of it is on the device while they run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence, KvLedger, Match, PartScores, Prefetch, Scoring, StateMove, Table

if TYPE_CHECKING:
    from penstock.engine.scheduling.stages import Life, RunningRequest, WaitingRequest
    from penstock.engine.scheduling.steps import NextStep

NO_MATCH = Match(0, 0, False)


class Placed(NamedTuple):
    """Where the context of one chunk is: these fields of `Chunk`."""

    slots: NDArray[np.int32]
    paged: NDArray[np.int32] | None = None
    num_left_out: int = 0
    scoring: Scoring | None = None
    state: StateMove | None = None


class Placement:
    """Has no state of a request: one serves all ordinary ones. `Windowed` overrides it for models whose
    tokens see only the last ones, `Deep` for a request that has only its last blocks on the device."""

    # Blocks that it has on the device at most, however long it gets. None: all of its blocks.
    fixed_blocks: int | None = None
    saves_rest = True  # a retraction saves its last blocks, too, though they are not full
    divides = True  # it may continue behind any of its cached blocks
    is_partial = False  # some of its tokens attend to a part of their context, or to KV computed that way

    def __init__(self, ledger: KvLedger) -> None:
        self._ledger = ledger

    # ------------------------------------------------------------------------------------------------ in line

    def is_ready(self, waiting: WaitingRequest) -> bool:
        """True if it can be matched now. False while a step from before its retraction still samples for it
        (its tokens are not all known), while its KV is being saved, or while a store has not answered."""
        return not waiting.life.num_in_flight and (waiting.lease is None or waiting.lease.ready)

    def find(self, waiting: WaitingRequest) -> Match:
        """What is cached of it. Ends or renews its lease if that helps."""
        life, ledger, keys = waiting.life, self._ledger, self.usable_keys(waiting)
        if not keys:
            return NO_MATCH
        if life.computes:
            waiting.end_lease()
        # its blocks are now in a hotter tier than the lease says
        if waiting.prefetch is not None and waiting.prefetch.settled:
            waiting.end_prefetch()
            self._lease_again(waiting)
        match = ledger.match(keys, waiting.lease, waiting.want)
        if not life.computes and not match.pending and self._may_lease(waiting, match):
            # There was no lease, the device lost the blocks before it, or it has expired: ask again.
            waiting.leased_at = self.num_here(match)
            self._lease_again(waiting)
            match = ledger.match(keys, waiting.lease, waiting.want)
        return match

    def usable_keys(self, waiting: WaitingRequest) -> Sequence[bytes]:
        """Of blocks that it can begin with."""
        prefix = waiting.life.prefix
        return () if prefix is None or not waiting.request.may_match else prefix.keys

    def _may_lease(self, waiting: WaitingRequest, match: Match) -> bool:
        """True if colder tiers may have blocks that neither the device nor the lease covers. They are asked
        once for each length of the device's match, so a waiting request does not ask in every plan."""
        prefix, lease = waiting.life.prefix, waiting.lease
        num_here = self.num_here(match)
        if prefix is None or num_here == len(prefix.keys):
            return False
        if lease is not None and lease.expired:
            return True  # a request may wait longer than its lease lasts
        if num_here == waiting.leased_at:
            return False
        return lease is None or lease.num_from(num_here) == 0

    def num_here(self, match: Match) -> int:
        """Leading blocks on the device, of use or not."""
        return match.num_blocks

    def _lease_again(self, waiting: WaitingRequest, whole: bool = False) -> None:
        """Ask colder tiers what they have of it now; of all its blocks if `whole`."""
        earlier = waiting.lease
        waiting.end_lease()
        if waiting.life.prefix is not None:
            waiting.lease = self._ledger.lease(waiting.request.id, waiting.life.prefix, earlier, whole)

    def reads_first(self, waiting: WaitingRequest, match: Match) -> bool:
        """It could start now with `match`. True if it waits because colder tiers have more of it."""
        return False  # its load brings the rest while it has a table

    def read_on(self, waiting: WaitingRequest) -> None:
        """Its prefetch may be over: ask whether there is more to read."""

    def prefetch(self, waiting: WaitingRequest, is_next: bool) -> Prefetch | None:
        """Read its blocks from cold tiers into host memory. `is_next`: it waits for nothing else."""
        prefix = waiting.life.prefix
        return None if prefix is None else self._ledger.prefetch(prefix, waiting.request.id, waiting.lease)

    @property
    def has_host_room(self) -> bool:
        """True if it runs from host memory, and all of it fits there beside the running ones."""
        return False

    # ---------------------------------------------------------------------------------------------- admission

    def open(self, waiting: WaitingRequest, match: Match) -> Table | None:
        """A table that begins with `match`; None if some of it was evicted meanwhile."""
        return self._ledger.open(waiting.request.id, waiting.life.prefix, match.num_blocks)

    def cached(self, waiting: WaitingRequest, match: Match) -> tuple[int, Sequence[tuple[str, int]]]:
        """Cached tokens of a table that begins with `match`, and the tiers of its blocks."""
        size, lease = self._ledger.block_tokens, waiting.lease
        num_tokens, on_device = (match.num_blocks + match.num_colder) * size, ("device", match.num_blocks)
        if lease is None:
            return num_tokens, (on_device,)
        # after a retraction the lease ends inside a block
        num_tokens = min(num_tokens, max(lease.num_tokens, match.num_blocks * size))
        return num_tokens, (on_device, *lease.runs_from(match.num_blocks))

    def most_blocks(self, life: Life, num_tokens: int) -> int:
        """Blocks that it has on the device at one time until it has `num_tokens` tokens. Not asked with
        `fixed_blocks`."""
        return self._ledger.most_slots(num_tokens, num_tokens)

    def enter(self, running: RunningRequest) -> None:
        """It has a table."""

    # ------------------------------------------------------------------------------------------------ running

    def may_draw(self, running: RunningRequest) -> int:
        """Promised blocks that its table does not have yet."""
        return running.promised - running.table.num_slots

    def make_way(self, running: RunningRequest, num_blocks: int, fence: Fence | None) -> int:
        """It is about to draw `num_blocks`: give back those that it no longer needs. Returns the change of
        `may_draw`. `fence` follows all launched steps."""
        return 0

    def num_fitting(
        self, running: RunningRequest, num_tokens: int, step: NextStep, fence: Fence | None
    ) -> int:
        """How many of its next `num_tokens` the step can compute. `fence` follows all launched steps. Asked
        only with `fixed_blocks`."""
        return num_tokens

    def until_boundary(self, running: RunningRequest, num_tokens: int) -> int:
        """How many of its next `num_tokens` come before a boundary at which a chunk has to end."""
        return num_tokens

    def most_drafts(self, running: RunningRequest) -> int:
        """Drafts that may be verified with its next token."""
        return sys.maxsize

    def computed(self, running: RunningRequest, fence: Fence | None) -> None:
        """A step with tokens of it was read; `fence` follows the step."""

    def reads_host(self, running: RunningRequest) -> bool:
        """True if its next tokens read KV in host memory."""
        return False

    def place(self, running: RunningRequest, start: int, end: int, room: int, step: NextStep) -> Placed:
        """Where tokens `start` to `end` and `room` more are, and the context of these tokens. The real start
        may be as many tokens earlier as drafts of it are not verified yet (`num_drafted`)."""
        return Placed(running.table.slots(end + room))

    def take_scores(self, given: PartScores) -> None:
        """A step has scored its context."""

    def leave(self, running: RunningRequest, is_answered: bool, fence: Fence | None) -> None:
        """It gives up row and table. `is_answered`: its conversation may go on. `fence` follows all launched
        steps."""

"""The placement of ordinary requests: all their KV is on the device while they run. Owns when a waiting
request asks colder tiers again."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract import Fence, KvLedger, Match, PartScores, Prefetch, Table
from penstock.engine.scheduling.budget import blocks_for
from penstock.engine.scheduling.stages import Life, Placed, RunningRequest, StepRules, WaitingRequest

NO_MATCH = Match(0, 0, False)


class OnDevice:
    """Implements `Placement`. Has no state of a request: one serves all of them."""

    may_draft = True
    fixed_blocks: int | None = None
    is_partial = False
    has_host_room = False

    def __init__(self, ledger: KvLedger) -> None:
        self._ledger = ledger

    def is_ready(self, waiting: WaitingRequest) -> bool:
        return has_known_tokens(waiting)

    def find(self, waiting: WaitingRequest) -> Match:
        life, ledger = waiting.life, self._ledger
        if life.prefix is None or not waiting.request.may_match:
            return NO_MATCH
        if life.computes:
            waiting.end_lease()
        # its blocks are now in a hotter tier than the lease says
        if waiting.prefetch is not None and waiting.prefetch.settled:
            waiting.end_prefetch()
            lease_again(waiting, ledger)
        match = ledger.match(life.prefix.keys, waiting.lease, waiting.want)
        if not life.computes and not match.pending and self._may_lease(waiting, match):
            # There was no lease, the device lost the blocks before it, or it has expired: ask again.
            waiting.leased_at = match.num_blocks
            lease_again(waiting, ledger)
            match = ledger.match(life.prefix.keys, waiting.lease, waiting.want)
        return match

    def _may_lease(self, waiting: WaitingRequest, match: Match) -> bool:
        """True if colder tiers may have blocks that neither the device nor the lease covers. They are asked
        once for each length of the device's match, so a waiting request does not ask in every plan."""
        prefix, lease = waiting.life.prefix, waiting.lease
        if prefix is None or match.num_blocks == len(prefix.keys):
            return False
        if lease is not None and lease.expired:
            return True  # a request may wait longer than its lease lasts
        if match.num_blocks == waiting.leased_at:
            return False
        return lease is None or lease.num_from(match.num_blocks) == 0

    def reads_first(self, waiting: WaitingRequest, match: Match) -> bool:
        return False  # its load brings the rest while it has a table

    def read_on(self, waiting: WaitingRequest) -> None:
        pass  # one read is enough: its load brings the rest

    def prefetch(self, waiting: WaitingRequest, is_next: bool) -> Prefetch | None:
        prefix = waiting.life.prefix
        return None if prefix is None else self._ledger.prefetch(prefix, waiting.request.id, waiting.lease)

    def open(self, waiting: WaitingRequest, match: Match) -> Table | None:
        return self._ledger.open(waiting.request.id, waiting.life.prefix, match.num_blocks)

    def cached(self, waiting: WaitingRequest, match: Match) -> tuple[int, Sequence[tuple[str, int]]]:
        size, lease = self._ledger.block_tokens, waiting.lease
        num_tokens, on_device = (match.num_blocks + match.num_colder) * size, ("device", match.num_blocks)
        if lease is None:
            return num_tokens, (on_device,)
        # after a retraction the lease ends inside a block
        num_tokens = min(num_tokens, max(lease.num_tokens, match.num_blocks * size))
        return num_tokens, (on_device, *lease.runs_from(match.num_blocks))

    def most_blocks(self, life: Life, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._ledger.block_tokens)

    def enter(self, running: RunningRequest) -> None:
        pass

    def may_draw(self, running: RunningRequest) -> int:
        return running.promised - running.table.num_slots

    def make_way(self, running: RunningRequest, num_blocks: int, fence: Fence | None) -> int:
        return 0

    def num_fitting(
        self, running: RunningRequest, num_tokens: int, step: StepRules, fence: Fence | None
    ) -> int:
        return num_tokens

    def reads_host(self, running: RunningRequest) -> bool:
        return False

    def place(self, running: RunningRequest, start: int, end: int, room: int, step: StepRules) -> Placed:
        return running.table.slots(end + room), None, 0, None

    def take_scores(self, given: PartScores) -> None:
        pass

    def leave(self, running: RunningRequest, is_answered: bool) -> None:
        pass


def has_known_tokens(waiting: WaitingRequest) -> bool:
    """False while a step from before its retraction still samples for it (its tokens are not all known),
    while its KV is being saved, or while a store has not answered."""
    return not waiting.life.num_in_flight and (waiting.lease is None or waiting.lease.ready)


def lease_again(waiting: WaitingRequest, ledger: KvLedger, whole: bool = False) -> None:
    """Ask colder tiers what they have of it now; of all its blocks if `whole`."""
    earlier = waiting.lease
    waiting.end_lease()
    if waiting.life.prefix is not None:
        waiting.lease = ledger.lease(waiting.request.id, waiting.life.prefix, earlier, whole)

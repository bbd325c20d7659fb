"""Drafts in the scheduler: what it asks a proposer, and how many drafts fit into a request's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract import KvLedger
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.stages import Life, RunningRequest, State


class Decoding(NamedTuple):
    """A request that gets one token from the next step, and may get more."""

    life: Life
    most: int  # drafts that fit
    num_pending: int = 0  # its drafts already on the device


class Drafter:
    """Proposes nothing; `penstock.speculation` overrides it. Called by the engine thread."""

    @property
    def needs_results(self) -> bool:
        """True if it cannot propose for a request whose drafts are still being verified: the engine reads
        that step first."""
        return False

    @property
    def num_ahead(self) -> int:
        """Drafts per request that the device makes after the next step."""
        return 0

    def started(self, life: Life) -> None:
        """The request joins the steps. If drafting is on, it is drafted from now on."""

    def considers(self, num_requests: int) -> bool:
        """True if a step of so many requests may have drafts. Called once for every step in which a request
        decodes."""
        return False

    def wants(self, running: RunningRequest) -> bool:
        """True if the request may have drafts in the next step."""
        return False

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        """Drafts for each of `requests`, in a step of `num_requests` in all."""
        return [()] * len(requests)

    def saw(self, life: Life, num_drafts: int, num_kept: int) -> None:
        """The target accepted the first `num_kept` of a request's `num_drafts` drafts."""

    def ended(self, life: Life) -> None:
        """The request is over."""


class Drafting:
    """Asks a proposer for the drafts of each step. No request is retracted for a draft."""

    def __init__(self, drafter: Drafter, ledger: KvLedger, budget: Budget, running: Running) -> None:
        self.drafter = drafter
        self._block_tokens = ledger.block_tokens
        self._may_draw = budget.overcommit <= 1.0  # promises do not exceed memory
        self._running = running

    def propose(self, requests: Sequence[RunningRequest]) -> dict[RunningRequest, tuple[int, ...]]:
        """Draft tokens for the next step, by decoding request."""
        if not self.drafter.considers(len(requests)):
            return {}
        found = [
            (one, most)
            for one in requests
            if self.drafter.wants(one) and (most := self._most_verified(one)) > 0
        ]
        if not found:
            return {}
        asked = [Decoding(one.life, most, one.num_pending) for one, most in found]
        proposed = self.drafter.propose(asked, len(requests))
        return {one: drafts for (one, _), drafts in zip(found, proposed, strict=True) if drafts}

    def _most_verified(self, running: RunningRequest) -> int:
        """How many drafts fit into its promised blocks, or into its table if promises exceed memory."""
        life, sampling = running.life, running.request.sampling
        if life.state is not State.RUNNING or running.num_left != 1:
            return 0
        if running.num_planned < running.num_cached:
            return 0
        most = sampling.max_tokens - (life.num_expected - life.num_prompt) - 1
        most = min(most, running.num_undisturbed, life.placement.most_drafts(running))
        if life.placement.fixed_blocks is not None:
            return most  # it makes room for them, if it can, when the step is planned
        num_blocks = running.table.num_slots
        if self._may_draw:
            num_blocks += life.placement.may_draw(running)
        return min(most, num_blocks * self._block_tokens - running.num_planned - 1)

    def draw_room(self, running: RunningRequest, num_tokens: int, num_ahead: int) -> int:
        """How many of the `num_ahead` drafts made after its next `num_tokens` get slots, within its promise.
        Drafts without slots are not verified."""
        life, table, size = running.life, running.table, self._block_tokens
        end = running.num_planned + num_tokens
        capacity = (table.num_slots + life.placement.may_draw(running)) * size
        most = min(num_ahead, life.lifetime_tokens - end, capacity - end, running.num_undisturbed)
        if most <= 0 or end < life.num_expected or not life.placement.most_drafts(running):
            return 0
        wanted = blocks_for(end + most, size) - table.num_slots
        if wanted > 0 and not (self._may_draw and self._running.try_draw(running, wanted)):
            return table.num_slots * size - end
        return most

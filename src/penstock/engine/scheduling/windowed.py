"""The placement of requests of a model in which a token sees only the last ones before it: blocks leave the
device when no later token sees them. Owns what such a request needs at one time."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract import Fence, KvLedger, Match, Table
from penstock.engine.scheduling.budget import Budget
from penstock.engine.scheduling.placement import Placed, Placement
from penstock.engine.scheduling.stages import Life, RunningRequest, WaitingRequest
from penstock.engine.scheduling.steps import NextStep


class Windowed(Placement):
    """Has no state of a request: one serves all of them."""

    def __init__(self, ledger: KvLedger, budget: Budget) -> None:
        super().__init__(ledger)
        self._prefill_chunk = budget.prefill_chunk

    def open(self, waiting: WaitingRequest, match: Match) -> Table | None:
        life = waiting.life
        return self._ledger.open(life.request.id, life.prefix, match.num_blocks, num_gone=match.num_gone)

    def cached(self, waiting: WaitingRequest, match: Match) -> tuple[int, Sequence[tuple[str, int]]]:
        """Blocks before the window count as found where its first block was."""
        num_tokens, runs = super().cached(waiting, match)
        if match.num_held or not match.num_colder:
            return num_tokens, runs
        (_, num_gone), (tier, num), *others = runs
        return num_tokens, ((tier, num_gone + num), *others)

    def most_blocks(self, life: Life, num_tokens: int) -> int:
        running = life.running
        num_left = len(life.tokens) if running is None else running.num_left
        return self._ledger.most_slots(num_tokens, max(1, min(num_left, self._prefill_chunk)))

    def may_draw(self, running: RunningRequest) -> int:
        return running.promised - running.table.num_slots + running.table.num_gone

    def make_way(self, running: RunningRequest, num_blocks: int, fence: Fence | None) -> int:
        """A prompt needs more at one time than its answer: what is needed no longer is not promised."""
        table, life = running.table, running.life
        num = table.let_go(running.num_planned - running.num_drafted, fence)
        num_needed = table.num_slots - table.num_gone + num_blocks
        num_over = running.promised - max(num_needed, self.most_blocks(life, life.lifetime_tokens))
        if num_over > 0:
            running.promised -= num_over
            num -= num_over
        return num

    def place(self, running: RunningRequest, start: int, end: int, room: int, step: NextStep) -> Placed:
        return Placed(running.table.slots(end + room), num_left_out=running.table.num_gone)

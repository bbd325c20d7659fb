"""Defects of order, lifetime and identity, one function each, to show that the walks see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import FinishReason
from penstock.engine.scheduling import scheduler as scheduler_module
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.stages import State
from penstock.engine.scheduling.steps import NextStep
from penstock.kv.blocks.handles import Hold
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.tiers.loads import BlockLoad, Copy, Loads
from penstock.kv.tiers.saves import Saves

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def _around(patch: Patch, owner: type, name: str, faulty: Callable[..., Any]) -> None:
    """`faulty` gets the method that it replaces, and then the arguments."""
    whole = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: faulty(whole, *args, **named))


# --------------------------------------------------------------------------------------------- the scheduler


def seals_what_is_only_planned(patch: Patch) -> None:
    def plan(whole: Any, self: Scheduler, *args: bool) -> Any:
        planned = whole(self, *args)
        for chunk in planned.plan.chunks if planned.plan is not None else ():
            running = self.running.requests[chunk.request_id]
            tokens = running.life.tokens
            running.table.seal(tokens, min(chunk.kv_len, len(tokens)), self._steps.last_fence)
        return planned

    _around(patch, Scheduler, "plan", plan)


def keeps_the_blocks_of_the_cancelled(patch: Patch) -> None:
    def cancel(whole: Any, self: Scheduler, request_id: str) -> Any:
        life = self.lives.get(request_id)
        event = whole(self, request_id) if life is None or life.state is not State.RUNNING else None
        if event is None and life is not None:
            del self.running.requests[request_id], self.lives[request_id]
            life.move(State.ENDED)
            event = self._events.of_end(life, FinishReason.CANCELLED)
        return event

    _around(patch, Scheduler, "cancel", cancel)


def gives_slots_back_without_a_fence(patch: Patch) -> None:
    def leave(whole: Any, self: Scheduler, *args: Any, **named: Any) -> Any:
        fence, self._steps.last_fence = self._steps.last_fence, None
        lease = whole(self, *args, **named)
        self._steps.last_fence = fence
        return lease

    _around(patch, Scheduler, "_leave", leave)


def forgets_what_is_promised(patch: Patch) -> None:
    def fits(whole: Any, self: Running, *args: Any) -> bool:
        promised, self._promises.num = self._promises.num, 0
        fitting: bool = whole(self, *args)
        self._promises.num = promised
        return fitting

    _around(patch, Running, "fits", fits)


def forgets_the_lease_of_a_request_that_ends(patch: Patch) -> None:
    def end(whole: Any, self: Scheduler, life: Any, event: Any) -> Any:
        if life.waiting is not None:
            life.waiting.lease = None
        return whole(self, life, event)

    _around(patch, Scheduler, "_end", end)


def computes_over_what_has_not_come(patch: Patch) -> None:
    def add(whole: Any, self: NextStep, running: Any, *others: Any) -> None:
        running.load = None
        whole(self, running, *others)

    _around(patch, NextStep, "add", add)


def begins_before_the_copies_are_launched(patch: Patch) -> None:
    patch.setattr(scheduler_module, "_may_begin", lambda load: True)


# -------------------------------------------------------------------------------------------------- transfers


def frees_the_slots_of_a_transfer_with_its_table(patch: Patch) -> None:
    def take_back(whole: Any, self: BlockPool, handle: Any, fence: Any) -> None:
        pins = self.book.pins.copy()
        if isinstance(handle, Hold):
            self.book.pins[handle.run] = 0
        whole(self, handle, fence)
        self.book.pins[:] = pins

    _around(patch, BlockPool, "take_back", take_back)


def promotes_into_slots_that_a_step_still_uses(patch: Patch) -> None:
    def begin(whole: Any, self: Loads, *args: Any) -> Any:
        *before, _, num_next = args  # the fences to wait for, and the tokens computed first
        return whole(self, *before, (), num_next)

    _around(patch, Loads, "begin", begin)


def saves_a_tail_before_its_step_has_ended(patch: Patch) -> None:
    def retract(whole: Any, self: Saves, hold: Any, num_blocks: int, keys: Any, num: int, fence: Any) -> Any:
        return whole(self, hold, num_blocks, keys, num, None)

    _around(patch, Saves, "retract", retract)


def publishes_a_promotion_that_failed(patch: Patch) -> None:
    patch.setattr(Copy, "error", lambda self: None)


WALKED: list[Fault] = [
    seals_what_is_only_planned,
    keeps_the_blocks_of_the_cancelled,
    gives_slots_back_without_a_fence,
    forgets_what_is_promised,
    forgets_the_lease_of_a_request_that_ends,
    computes_over_what_has_not_come,
    begins_before_the_copies_are_launched,
    frees_the_slots_of_a_transfer_with_its_table,
    promotes_into_slots_that_a_step_still_uses,
    saves_a_tail_before_its_step_has_ended,
    publishes_a_promotion_that_failed,
]


# -------------------------------------------------------------------------------------- loads from cold tiers


def believes_that_all_of_a_short_load_came(patch: Patch) -> None:
    patch.setattr(BlockLoad, "num_landed", property(lambda self: self.num_blocks))


def begins_before_all_of_it_is_sent(patch: Patch) -> None:
    def arrivals(self: BlockLoad) -> Any:
        return tuple(arrival for copy in self.copies for arrival in copy.arrivals or ())

    patch.setattr(BlockLoad, "arrivals", property(arrivals))


def gives_keys_to_the_blocks_after_a_part_that_failed(patch: Patch) -> None:
    def land(self: KvCache, copy: Copy) -> None:
        table = self._tables.open.get(copy.load.hold)
        if table is not None:
            table.give_keys(copy.keys)

    patch.setattr(KvCache, "_land", land)


WALKED_COLD: list[Fault] = [
    believes_that_all_of_a_short_load_came,
    begins_before_all_of_it_is_sent,
    gives_keys_to_the_blocks_after_a_part_that_failed,
]

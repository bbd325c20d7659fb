"""Defects in what the scheduler, the cache, its loads and saves do about colder tiers, one function each, to
show that the tests see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import Request, StepResult
from penstock.engine.scheduling import scheduler as scheduler_module
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.stages import Life, RunningRequest, State
from penstock.engine.scheduling.steps import NextStep
from penstock.errors import TransferFailed
from penstock.kv.blocks.handles import Hold, Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from penstock.kv.tiers.host import HostLease, HostTier, Taken
from penstock.kv.tiers.loads import BlockLoad, Copy, Loads
from penstock.kv.tiers.reads import Reads
from penstock.kv.tiers.saves import Saves
from penstock.kv.transfer import Mover
from tests.pure.engine.scheduling.scheduler_device import BLOCK

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def _around(
    patch: Patch, owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


# ---------------------------------------------------------------------------------------------- the scheduler


def computes_over_what_has_not_come(patch: Patch) -> None:
    def make(add: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: NextStep, running: RunningRequest, *others: Any) -> None:
            running.load = None
            add(self, running, *others)

        return faulty

    _around(patch, NextStep, "add", make)


def begins_before_the_copies_are_launched(patch: Patch) -> None:
    patch.setattr(scheduler_module, "_may_begin", lambda load: True)


def believes_a_load_that_failed(patch: Patch) -> None:
    patch.setattr(RunningRequest, "compute_rest", lambda self, num_landed, block_tokens: None)


def forgets_a_load_that_fails_when_it_has_set_off(patch: Patch) -> None:
    def make(take_in: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Scheduler) -> None:
            requests = self.running.requests.values()
            hidden = {one: one.load for one in requests if one.life.state is State.RUNNING}
            for one in hidden:
                one.load = None
            take_in(self)
            for one, load in hidden.items():
                one.load = load

        return faulty

    _around(patch, Scheduler, "_take_in_loads", make)


def waits_for_ever_for_a_late_load(patch: Patch) -> None:
    patch.setattr(Reads, "overdue", False)
    patch.setattr(BlockLoad, "overdue", False)


def keeps_others_waiting_for_a_late_load(patch: Patch) -> None:
    patch.setattr(Reads, "overdue", False)
    patch.setattr(Copy, "overdue", False)


def takes_back_the_slots_of_a_late_load(patch: Patch) -> None:
    def make(leave: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Scheduler, running: RunningRequest, *args: Any, **named: Any) -> Any:
            load = running.load
            lease = leave(self, running, *args, **named)
            if isinstance(load, BlockLoad) and not load.settled and load.overdue:
                load.copies[0].pins[0].end()
            return lease

        return faulty

    _around(patch, Scheduler, "_leave", make)


def counts_restored_blocks_twice(patch: Patch) -> None:
    """What will be promoted is credited as if it were there, and drawn all the same."""

    def make(fits: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, waiting, match: fits(
            self, waiting, match._replace(num_blocks=match.num_blocks + match.num_colder)
        )

    _around(patch, Running, "fits", make)


def forgets_what_is_promised(patch: Patch) -> None:
    def make(fits: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Running, waiting: Any, match: Any) -> bool:
            promised, self._promises.num = self._promises.num, 0
            fitting: bool = fits(self, waiting, match)
            self._promises.num = promised
            return fitting

        return faulty

    _around(patch, Running, "fits", make)


def leaves_nothing_to_compute(patch: Patch) -> None:
    """A full match has no token left, so the step goes on with the one that nobody has sampled."""

    def make(enter: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Running, waiting: Any, match: Any) -> RunningRequest | None:
            running: RunningRequest | None = enter(self, waiting, match)
            if running is not None and running.num_cached == len(running.life.tokens):
                running.num_planned = running.num_cached
                running.life.num_in_flight += 1
            return running

        return faulty

    _around(patch, Running, "enter", make)


def forgets_the_lease_of_whoever_ends(patch: Patch) -> None:
    def make(end: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Scheduler, life: Life, event: Any) -> Any:
            if life.waiting is not None:
                life.waiting.lease = None
            return end(self, life, event)

        return faulty

    _around(patch, Scheduler, "_end", make)


def ends_requests_whose_load_failed(patch: Patch) -> None:
    def make(commit: Any) -> Any:
        def faulty(self: Scheduler, result: StepResult) -> Any:
            error = None if result.error is None else result.error._replace(lacked_kv=False)
            return commit(self, dataclasses.replace(result, error=error))

        return faulty

    _around(patch, Scheduler, "commit", make)


def goes_on_without_the_step_that_failed(patch: Patch) -> None:
    patch.setattr(Scheduler, "_undo", lambda self, step: None)


def reports_what_never_came(patch: Patch) -> None:
    def make(compute: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: RunningRequest, num_landed: int, block_tokens: int) -> None:
            found = self.life.sources.found
            compute(self, num_landed, block_tokens)
            self.life.sources.found = found

        return faulty

    _around(patch, RunningRequest, "compute_rest", make)


def lets_echo_use_a_prefix(patch: Patch) -> None:
    patch.setattr(Request, "may_match", property(lambda self: self.prefix is not None))


def never_saves(patch: Patch) -> None:
    def make(leave: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, running, saves=False, *more, **named: leave(self, running, False, *more, **named)

    _around(patch, Scheduler, "_leave", make)


def pushes_out_while_transfers_free_enough(patch: Patch) -> None:
    patch.setattr(KvCache, "num_settling", 0)


# -------------------------------------------------------------------------------------------- cache and pools


def gives_a_half_saved_tail_a_key(patch: Patch) -> None:
    def make(promote: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: BlockTable, lease: Any, num_blocks: int, num_next: int) -> BlockLoad:
            first = self.num_slots
            load: BlockLoad = promote(self, lease, num_blocks, num_next)
            for copy in load.copies:
                copy.keys = self.prefix.keys[first : first + num_blocks]
            return load

        return faulty

    _around(patch, BlockTable, "promote", make)


def saves_a_full_match_short_of_its_end(patch: Patch) -> None:
    def make(save: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Saves, hold: Hold, num_blocks: int, keys: Any, num_tokens: int, fence: Any) -> Any:
            return save(self, hold, num_blocks, keys, num_tokens - (num_tokens == len(keys) * BLOCK), fence)

        return faulty

    _around(patch, Saves, "retract", make)


def frees_the_slots_of_a_transfer_with_its_table(patch: Patch) -> None:
    def make(take_back: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: BlockPool, handle: Any, fence: Any) -> None:
            pins = self.book.pins.copy()
            if isinstance(handle, Hold):
                self.book.pins[handle.run] = 0
            take_back(self, handle, fence)
            self.book.pins[:] = pins

        return faulty

    _around(patch, BlockPool, "take_back", make)


# -------------------------------------------------------------------------------------------- loads and saves


def promotes_into_slots_that_a_step_still_uses(patch: Patch) -> None:
    def make(promote: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, hold, first, lease, keys, after, num_next: promote(
            self, hold, first, lease, keys, (), num_next
        )

    _around(patch, Loads, "begin", make)


def saves_a_tail_before_its_step_has_ended(patch: Patch) -> None:
    def make(save: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, hold, num_blocks, keys, num_tokens, fence: save(
            self, hold, num_blocks, keys, num_tokens, None
        )

    _around(patch, Saves, "retract", make)


def publishes_before_the_bytes_have_landed(patch: Patch) -> None:
    land = HostTier.land

    def make(take: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: HostTier, *args: Any) -> Taken:
            taken: Taken = take(self, *args)
            land(self, taken)
            return taken

        return faulty

    _around(patch, HostTier, "take", make)
    for later in ("land", "drop"):
        patch.setattr(HostTier, later, lambda self, taken, *rest: None)


def publishes_a_demotion_that_failed(patch: Patch) -> None:
    patch.setattr(HostTier, "drop", HostTier.land)


def publishes_a_promotion_that_failed(patch: Patch) -> None:
    patch.setattr(Copy, "error", lambda self: None)


def evicts_what_is_leased(patch: Patch) -> None:
    """As if nobody had said that he wants it."""

    def make(lease: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: HostTier, *args: Any) -> HostLease | None:
            given: HostLease | None = lease(self, *args)
            if given is not None and given.want is not None:
                given.want.end()
            return given

        return faulty

    _around(patch, HostTier, "lease", make)


def promotes_what_has_gone_since_it_was_found(patch: Patch) -> None:
    patch.setattr(HostLease, "refresh", lambda self: None)


def forgets_the_sources_of_a_load_that_failed(patch: Patch) -> None:
    def make(settle: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Loads) -> Any:
            for copy in self.mover.flying:
                if isinstance(copy, Copy) and copy.error() is not None:
                    copy.load.kept = []
            return settle(self)

        return faulty

    _around(patch, Loads, "settle", make)


def keeps_what_was_saved_for_one_request(patch: Patch) -> None:
    def make(end: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: HostLease) -> None:
            self._handles = [handle for handle in self._handles if not isinstance(handle, Reservation)]
            end(self)

        return faulty

    _around(patch, HostLease, "end", make)


def takes_one_end_for_the_end_of_all(patch: Patch) -> None:
    """One completion flag for all transfers of a request: the first that is over ends the others."""

    def make(settle: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Mover) -> list[Any]:
            over = settle(self)
            labels = {transfer.label for transfer in over}
            for transfer in [transfer for transfer in self.flying if transfer.label in labels]:
                self.flying.remove(transfer)
                transfer.settled = True
                over.append(transfer)
            return over

        return faulty

    _around(patch, Mover, "settle", make)


def refuses_to_save_into_a_full_host(patch: Patch) -> None:
    def make(submit_saves: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(self: Saves) -> None:
            if not self._host.pool.counts.free:
                raise TransferFailed("the host tier is full")
            submit_saves(self)

        return faulty

    _around(patch, Saves, "submit", make)


# Those that any walk brings to light sooner or later; the others need a story of their own.
WALKED: list[Fault] = [
    computes_over_what_has_not_come,
    begins_before_the_copies_are_launched,
    believes_a_load_that_failed,
    takes_back_the_slots_of_a_late_load,
    counts_restored_blocks_twice,
    forgets_what_is_promised,
    leaves_nothing_to_compute,
    forgets_the_lease_of_whoever_ends,
    ends_requests_whose_load_failed,
    goes_on_without_the_step_that_failed,
    reports_what_never_came,
    lets_echo_use_a_prefix,
    gives_a_half_saved_tail_a_key,
    saves_a_full_match_short_of_its_end,
    frees_the_slots_of_a_transfer_with_its_table,
    promotes_into_slots_that_a_step_still_uses,
    saves_a_tail_before_its_step_has_ended,
    publishes_before_the_bytes_have_landed,
    publishes_a_demotion_that_failed,
    publishes_a_promotion_that_failed,
    promotes_what_has_gone_since_it_was_found,
    forgets_the_sources_of_a_load_that_failed,
    keeps_what_was_saved_for_one_request,
    takes_one_end_for_the_end_of_all,
    refuses_to_save_into_a_full_host,
]

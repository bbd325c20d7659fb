"""Defects in what scheduler and cache do about loads that come from cold tiers, one function each, to show
that the tests see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.scheduling.stages import Life, RunningRequest, Runs
from penstock.kv.cache import KvCache
from penstock.kv.tiers.host import HostLease
from penstock.kv.tiers.loads import BlockLoad, Copy, Loads

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def computes_all_of_it_where_a_load_ended_short(patch: Patch) -> None:
    patch.setattr(BlockLoad, "num_landed", 0)


def believes_that_all_of_a_short_load_came(patch: Patch) -> None:
    patch.setattr(BlockLoad, "num_landed", property(lambda self: self.num_blocks))


def takes_a_short_load_for_a_whole_one(patch: Patch) -> None:
    patch.setattr(BlockLoad, "error", lambda self: None)


def counts_every_colder_token_to_the_host(patch: Patch) -> None:
    note = Life.note_sources

    def faulty(self: Life, runs: Runs, num_tokens: int) -> None:
        note(self, tuple((tier if tier == "device" else "host", num) for tier, num in runs), num_tokens)

    patch.setattr(Life, "note_sources", faulty)


def counts_tokens_that_did_not_come_to_their_tier(patch: Patch) -> None:
    compute = RunningRequest.compute_rest

    def faulty(self: RunningRequest, num_landed: int, block_tokens: int) -> None:
        found = self.life.sources.found
        compute(self, num_landed, block_tokens)
        self.life.sources.found = found

    patch.setattr(RunningRequest, "compute_rest", faulty)


def counts_from_the_wrong_end(patch: Patch) -> None:
    """Of a load that ended short the first blocks came, and the last are counted."""
    note = Life.note_sources

    def faulty(self: Life, runs: Runs, num_tokens: int) -> None:
        device = tuple(run for run in runs if run[0] == "device")
        note(self, (*device, *(run for run in runs[::-1] if run[0] != "device")), num_tokens)

    patch.setattr(Life, "note_sources", faulty)


def begins_before_all_of_it_is_sent(patch: Patch) -> None:
    def arrivals(self: BlockLoad) -> Any:
        return tuple(arrival for copy in self.copies for arrival in copy.arrivals or ())

    patch.setattr(BlockLoad, "arrivals", property(arrivals))


def waits_for_the_rest_of_a_load_that_ended_short(patch: Patch) -> None:
    patch.setattr(
        BlockLoad,
        "settled",
        property(lambda self: self.num_sent == self.num_blocks and all(copy.settled for copy in self.copies)),
    )


def waits_for_a_store_that_never_answers(patch: Patch) -> None:
    patch.setattr(HostLease, "ready", property(lambda self: not self.saving and not self.parts))


def gives_keys_to_the_blocks_behind_a_part_that_failed(patch: Patch) -> None:
    def faulty(self: KvCache, copy: Copy) -> None:
        table = self._tables.open.get(copy.load.hold)
        if table is not None:
            table.give_keys(copy.keys)

    patch.setattr(KvCache, "_land", faulty)


def keeps_those_in_line_waiting_for_a_load_that_is_over(patch: Patch) -> None:
    patch.setattr(Loads, "_end", lambda self, load: load.end_kept())
    patch.setattr(
        Loads,
        "is_coming",
        lambda self, number, key: any(load.covers(number, key) for load in self.in_flight.values()),
    )


# Those that any walk brings to light sooner or later.
WALKED: list[Fault] = [
    computes_all_of_it_where_a_load_ended_short,
    believes_that_all_of_a_short_load_came,
    takes_a_short_load_for_a_whole_one,
    counts_every_colder_token_to_the_host,
    counts_tokens_that_did_not_come_to_their_tier,
    counts_from_the_wrong_end,
    begins_before_all_of_it_is_sent,
    waits_for_the_rest_of_a_load_that_ended_short,
    waits_for_a_store_that_never_answers,
    gives_keys_to_the_blocks_behind_a_part_that_failed,
    keeps_those_in_line_waiting_for_a_load_that_is_over,
]

"""The rate of the link, and the figures of transfers, as real promotions and saves make them: each by its own
time, what was not seen to end says nothing, and what copied nothing or failed is neither timed nor counted as
moved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.kv import transfer as mover
from penstock.kv.table import BlockTable
from penstock.kv.tiers import loads, reads, saves
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.tiers.policy import STALE_S
from penstock.testing.stores import HandClock
from tests.pure.kv.storage_rig import BLOCK, LAYOUT
from tests.pure.kv.test_cache_tiers import Cached

TWO = 2 * LAYOUT.block_bytes
FIRST, SECOND = list(range(8)), list(range(100, 108))  # two blocks each


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    for module in (mover, loads, reads, saves):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


class Timed(Cached):
    """Two prompts in host memory, and whatever is known of the link is forgotten."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self.clock = clock
        for tokens in (FIRST, SECOND):
            self.remembered(tokens)
        self.loaded: list[BlockTable] = []

    def begin(self, tokens: list[int]) -> BlockLoad:
        table, promotion = self.loading(f"request {tokens[0]}", tokens)
        self.loaded.append(table)
        return promotion

    def over(self, after_s: float, unseen_s: float = 0.0) -> None:
        """The next transfer takes so long, and in the last `unseen_s` of it nobody looks."""
        self.clock.advance(after_s - unseen_s)
        self.cache.settle()
        self.clock.advance(unseen_s)
        first = next(iter(self.loads.mover.flying), None)
        while first is not None and not first.over():
            assert self.lane("load").step() or self.lane("launch load").step()
        self.cache.settle()

    def end(self) -> None:
        for table in self.loaded:
            table.release(None)
        super().end()


def test_a_part_of_a_context_that_is_fetched_says_nothing_about_the_link(clock: HandClock) -> None:
    rig = Timed(clock)
    table = rig.run("deep", list(range(200, 208)))
    rig.finish()
    assert table.page_out(2, None) == 2
    (fetched,) = table.fetch([0], 2)
    rig.over(2.0)
    assert fetched.settled and rig.loads.costs.link.bytes_per_s is None
    table.release(None)
    rig.end()


def test_one_that_waited_behind_another_is_measured_from_the_end_of_that(clock: HandClock) -> None:
    rig = Timed(clock)
    rig.begin(FIRST)
    rig.begin(SECOND)
    rig.over(4.0)
    rig.over(1.0)
    assert rig.cache.num_in_flight == 0
    assert rig.loads.costs.link.bytes_per_s == pytest.approx(0.95 * TWO / 4.0 + 0.05 * TWO / 1.0)
    rig.end()


@pytest.mark.parametrize(("unseen_s", "counts"), [(0.0, True), (1.0, True), (1.5, False), (4.0, False)])
def test_an_end_that_nobody_saw_in_time_says_nothing_about_the_link(
    clock: HandClock, unseen_s: float, counts: bool
) -> None:
    rig = Timed(clock)
    rig.begin(FIRST)
    rig.over(4.0, unseen_s)
    assert rig.cache.num_in_flight == 0
    assert rig.loads.costs.link.bytes_per_s == (TWO / 4.0 if counts else None)
    rig.end()


def test_one_that_fails_says_nothing_about_the_link_and_is_counted_as_a_failure(clock: HandClock) -> None:
    rig = Timed(clock)
    before = rig.cache.stats().traffic
    rig.begin(FIRST)
    rig.load_copier.fail_next = 1
    rig.over(4.0)
    traffic = rig.cache.stats().traffic
    assert before is not None and traffic is not None and rig.loads.costs.link.bytes_per_s is None
    assert (
        traffic.failures == {("host", "copy"): 1}
        and traffic.bytes == before.bytes
        and traffic.seconds == before.seconds
    )
    rig.end()


def test_a_stale_rate_is_tried_by_the_first_who_promotes_and_by_nobody_else(clock: HandClock) -> None:
    """A slow link is hoped to have become faster: one request finds out, and the others go on computing
    meanwhile."""
    rig = Timed(clock)
    rig.loads.costs.prefill.add(BLOCK, 0.0, 1.0)
    rig.loads.costs.link.add(TWO, 2.0 * 2)  # twice as long as computing
    keys = rig.prefix(SECOND).keys
    lease = rig.cache.lease("other", rig.prefix(SECOND))
    assert rig.cache.match(keys, lease).num_colder == 0
    clock.advance(STALE_S + 1.0)
    assert rig.cache.match(keys, lease).num_colder == 2
    rig.begin(FIRST)
    assert rig.cache.match(keys, lease).num_colder == 0, "somebody is finding out"
    rig.over(1.0)
    assert rig.loads.costs.link.bytes_per_s == TWO / 1.0, "what he met replaces what was known"
    assert rig.cache.match(keys, lease).num_colder == 2
    assert lease is not None
    lease.end()
    rig.end()

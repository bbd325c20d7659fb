"""The cache over a host tier: what it matches, waits for and gives keys to, whatever becomes of tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import Adapter, Match, Prefix
from penstock.errors import InvariantBroken, LaneClosed, Leaked
from penstock.kv import cache as cache_module
from penstock.kv.blocks.key import Scope
from penstock.kv.cache import KvCache
from penstock.kv.memory import HostMemory
from penstock.kv.table import BlockTable
from penstock.kv.tiers.loads import BlockLoad
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK, KEYS, LAYERS, Rig

SCOPE = Scope(weights=b"w", kv_dtype="float32", layout=b"l", block_tokens=BLOCK, position_scheme="rope")
PROMPT = list(range(10))  # two full blocks and a half


class Cached(Rig):
    """A rig with a cache, whose blocks hold the tokens that they stand for."""

    def __init__(self, prefix_cache: bool = True, **rig: int) -> None:
        super().__init__(**rig)
        self.cache = KvCache(self.pool, SCOPE, prefix_cache, self.tiers)

    def prefix(self, tokens: list[int] = PROMPT) -> Prefix:
        prefix = self.cache.prefix_of(tokens)
        assert prefix is not None
        return prefix

    def run(self, owner: str, tokens: list[int] = PROMPT) -> BlockTable:
        """A request that has computed all of `tokens`."""
        table = self.cache.open(owner, self.prefix(tokens), 0)
        assert table.try_extend(-(-len(tokens) // BLOCK))
        for at, slot in enumerate(table.hold.slots):
            self.device.cells[slot] = [tuple(tokens[at * BLOCK : (at + 1) * BLOCK])] * LAYERS
        table.seal(tokens, len(tokens), None)
        self.cache.submit_saves()
        return table

    def remembered(self, tokens: list[int] = PROMPT) -> None:
        """In the host tier, and no longer on the device."""
        table = self.run("earlier", tokens)
        slots = list(table.hold.slots)
        table.release(None)
        self.finish()
        self.cache.reset(["device"])
        self.device.spoil(slots, (0, LAYERS))  # the next to be drawn

    def loading(self, owner: str = "request", tokens: list[int] = PROMPT) -> tuple[BlockTable, BlockLoad]:
        prefix = self.prefix(tokens)
        match = self.cache.match(prefix.keys, lease := self.cache.lease(owner, prefix))
        assert lease is not None
        table = self.cache.open(owner, prefix, match.num_blocks)
        return table, table.promote(lease, match.num_colder, 1)

    def finish(self) -> bool:
        self.lanes.run_all()
        return self.cache.settle()

    def content(self, tokens: list[int] = PROMPT) -> list[object]:
        """What lies on the device under the keys of `tokens`."""
        return [self.device.cells[slot][0] for slot in self.pool.find(self.prefix(tokens).keys)]

    def end(self) -> None:
        self.cache.check()
        self.cache.close()


BLOCKS = [tuple(PROMPT[:4]), tuple(PROMPT[4:8])]


def test_what_host_memory_has_behind_the_device_is_found_though_it_lacks_what_the_device_has() -> None:
    rig = Cached()
    rig.remembered()
    rig.run("earlier", PROMPT[:5]).release(None)
    rig.finish()
    rig.host.forget(rig.prefix().keys[:1])
    lease = rig.cache.lease("request", rig.prefix())
    assert lease is not None and rig.cache.match(rig.prefix().keys, lease) == Match(1, 1, False, 1)
    lease.end()
    rig.end()


def test_a_save_waits_for_the_step_that_read_its_slots_in_host_memory() -> None:
    rig = Cached(num_host=2)
    rig.remembered()
    deep = rig.cache.open("deep", rig.prefix(), 0, 2)
    assert deep is not None
    deep.release(rig.step())
    others = list(range(50, 58))
    other = rig.run("other", others)
    while any(lane.step() for lane in rig.lanes if lane.name in ("launch save", "save")):
        pass
    assert sorted(rig.host_arena.read([slot], (0, 1))[0][0] for slot in range(2)) == BLOCKS, (
        "the step may still read them"
    )
    rig.finish()
    assert rig.cache.num_in_flight == 0 and rig.host.num_leading(rig.prefix(others).keys) == 2
    other.release(None)
    rig.end()


def test_what_a_transfer_or_a_lease_reads_can_be_forgotten_and_is_read_to_the_end() -> None:
    rig = Cached()
    rig.remembered()
    table, _ = rig.loading()
    lease = rig.cache.lease("other", rig.prefix())
    assert lease is not None and rig.cache.forget(rig.prefix().keys) == 2 and rig.host.pool.num_keys == 0
    assert rig.host.pool.counts.free == rig.host.num_slots - 2
    assert rig.finish() and rig.content() == BLOCKS
    lease.end()
    assert rig.host.pool.counts.free == rig.host.num_slots
    table.release(None)
    rig.end()


@pytest.mark.parametrize("firsts", [[0], [0, 1]])
def test_a_fetch_that_cannot_be_submitted_takes_no_slot_and_keeps_nothing_in_host_memory(
    firsts: list[int],
) -> None:
    rig = Cached()
    table = rig.run("request")
    rig.finish()
    assert table.page_out(2, None) == 2
    before = rig.pool.counts, rig.host.pool.counts
    rig.lane("launch load").refuses = LaneClosed("the launcher is closed")
    with pytest.raises(LaneClosed):
        table.fetch(firsts, 1)
    rig.cache.check()
    assert (rig.pool.counts, rig.host.pool.counts) == before and table.num_fetched == 0
    table.release(None)
    rig.end()


# Holds invariant 8: a promotion that failed gives no key.
def test_a_promotion_that_fails_gives_no_keys_and_its_table_may_compute() -> None:
    rig = Cached()
    rig.remembered()
    table, promotion = rig.loading()
    rig.load_copier.fail_next = 1
    rig.finish()
    assert promotion.error() is not None and rig.cache.stats().num_keys == 0 and table.num_keyed == 0
    assert rig.cache.match(rig.prefix().keys).pending, (
        "the table announces them still: it is going to compute them"
    )
    table.seal(PROMPT, 8, None)
    assert rig.cache.match(rig.prefix().keys).num_blocks == 2
    table.release(None)
    rig.finish()
    rig.end()


def test_a_table_that_computes_after_a_failed_promotion_waits_for_those_before_it() -> None:
    rig = Cached(num_device=3)
    rig.remembered()
    fence = rig.step()
    earlier = rig.cache.open("earlier", None, 0)
    assert earlier.try_extend(3)
    earlier.release(fence)
    table, promotion = rig.loading()
    assert promotion.after == (fence,) and table.take_after() == ()
    promotion.copies[0].prepare = lambda: (_ for _ in ()).throw(OSError("gone"))  # type: ignore[method-assign]
    rig.lane("launch load").step()
    rig.cache.settle()
    assert promotion.settled and table.take_after() == (fence,)
    table.release(None)
    rig.lanes.run_all()
    rig.end()


# Holds invariant 11: a load that lands late changes nothing and is counted.
def test_what_lands_twice_is_kept_once() -> None:
    rig = Cached()
    rig.remembered()
    table, promotion = rig.loading()
    promotion.deadline_s = 0.0
    other = rig.run("other")  # it waits for nobody and computes the same
    rig.finish()
    assert rig.cache.stats().duplicate_seals_total == 2 and rig.content() == BLOCKS
    for each in (table, other):
        each.release(None)
    assert rig.cache.stats().slots["device"].idle == 2
    rig.end()


def test_nothing_is_sealed_behind_blocks_that_have_not_come() -> None:
    rig = Cached()
    rig.remembered()
    table, _ = rig.loading()
    assert table.try_extend(1)
    with pytest.raises(InvariantBroken, match="still on their way"):
        table.seal([*PROMPT, 10, 11], 12, None)
    rig.finish()
    table.seal([*PROMPT, 10, 11], 12, None)
    assert table.num_keyed == 3
    table.release(None)
    rig.end()


def test_a_full_match_is_retracted_to_its_end() -> None:
    """Its last token is to be computed once more, and is there: nobody may take its block for half empty."""
    rig = Cached()
    tokens = PROMPT[:8]
    rig.run("earlier", tokens).release(None)
    table = rig.cache.open("request", rig.prefix(tokens), 2)
    lease = table.retract(7, None)
    assert lease is not None and lease.num_tokens == 8
    rig.finish()
    assert lease.num_from(0) == 2
    lease.end()
    rig.end()


def test_adapter_reloaded_under_the_same_name_hits_stale_kv() -> None:
    rig = Cached()
    rig.remembered()
    old, new = (rig.cache.prefix_of(PROMPT, adapter=Adapter("sql", digest)) for digest in ("old", "new"))
    plain, salted = rig.prefix(), rig.cache.prefix_of(PROMPT, salt="sql")
    assert old is not None and new is not None and salted is not None
    keys = [key for prefix in (old, new, plain, salted) for key in prefix.keys]
    assert len(set(keys)) == len(keys) == 8
    assert rig.cache.lease("request", new) is None and rig.cache.lease("request", salted) is None
    rig.end()


# Holds invariant 11: close raises while a table or a lease is out.
@pytest.mark.parametrize("left", ["table", "lease"])
def test_closing_with_something_left_raises(left: str) -> None:
    rig = Cached()
    rig.remembered()
    if left == "table":
        rig.loading()
    else:
        rig.cache.lease("request", rig.prefix())
    with pytest.raises(Leaked):
        rig.cache.close()


def test_all_tiers_together_have_the_time_that_closing_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, now, given = Stacked("ssd", "remote"), [0.0], list[float]()
    monkeypatch.setattr(cache_module.time, "monotonic", lambda: now[0])

    def close(timeout_s: float) -> None:
        given.append(timeout_s)
        now[0] += 4.0

    parts = (rig.cache.saves.mover, rig.cache.loads.mover, *rig.cache.cold_tiers.values())
    closed = [part.close for part in parts]
    monkeypatch.setattr(rig.cache, "drain", lambda timeout_s: None)
    for part in parts:
        monkeypatch.setattr(part, "close", close)
    rig.cache.close(10.0)
    assert given == [10.0, 6.0, 2.0, 1.0], "and a moment where nothing is left"
    monkeypatch.undo()
    for ends in closed:
        ends(1.0)


class Memory:
    """An arena that is ready at once, and knows whether it is closed."""

    closed = False

    def prepare(
        self, ready: Callable[[range], None], progress: Callable[[int, int], None], stop: Callable[[], bool]
    ) -> None:
        ready(range(16))

    def close(self) -> None:
        self.closed = True


def test_host_memory_is_given_back_with_the_tier_over_it() -> None:
    rig, arena = Rig(), Memory()
    rig.host.memory = HostMemory(arena, rig.host.ready)
    rig.save(KEYS[:2]).end()
    assert not arena.closed
    rig.close()
    assert arena.closed


@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_a_read_that_is_over_wakes_who_waits_for_it(tier: str) -> None:
    rig = Stacked(tier)
    rig.remembered(2, tiers=[tier])
    woken: list[str] = []
    rig.cache.call_when_launched(lambda: woken.append("woken"))
    lease = rig.cache.lease("request", rig.prefix(2))
    assert lease is not None
    rig.lanes.run_all()
    assert lease.ready and len(woken) == (0 if tier == "ssd" else 1), "an answer from memory is there at once"
    woken.clear()
    table = rig.cache.open("request", rig.prefix(2), 0)
    table.promote(lease, 2, 1)
    rig.lanes.run_all()
    assert rig.cache.num_in_flight and len(woken) == 1
    rig.flow()
    woken.clear()
    rig.cache.persist()
    rig.cache.settle()
    rig.lanes.run_all()
    assert woken, "and so does a sync"
    rig.end(table)


def test_what_a_table_holds_is_not_forgotten_in_any_tier() -> None:
    rig = Cached()
    table = rig.run("request")
    rig.finish()
    assert rig.cache.forget(rig.prefix().keys) == 0
    assert (len(rig.pool.find(rig.prefix().keys)), rig.host.pool.num_keys) == (2, 2)
    table.release(None)
    rig.end()

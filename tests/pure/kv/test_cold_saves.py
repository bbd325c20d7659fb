"""What is written down from host memory, when, and what `persist` may say: for every admission, with stores
that fail, are full or are emptied, and host memory that evicts meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.config import AdmissionName
from penstock.contract import Access, Mode
from penstock.errors import LaneClosed, StoreFailed
from penstock.kv.tiers import writeback
from penstock.kv.tiers.calls import BreakerState
from penstock.kv.tiers.host import HostLease
from penstock.kv.tiers.store import Outcome
from tests.pure.kv.stacked_rig import ALL, Stacked
from tests.pure.kv.storage_rig import BLOCK, LAYERS

ADMISSIONS: tuple[AdmissionName, ...] = ("always", "reuse", "evict")


def in_host_only(admission: AdmissionName, num_blocks: int = 4, **rig: int) -> Stacked:
    """A prefix in host memory, which the disk does not have, though nothing is wrong with it."""
    made = Stacked(admission=admission, **rig)
    made.stores["ssd"].fails.update(made.keys(num_blocks))
    made.remembered(num_blocks)
    made.stores["ssd"].fails.clear()
    return made


# -------------------------------------------------------------------------------------------------- admission


def test_with_always_a_block_is_written_when_it_lands() -> None:
    rig = Stacked(admission="always")
    rig.ran(4).release(None)
    rig.run("launch save", "save")
    assert len(rig.tiers["ssd"].writings) == 1 and rig.host.pool.counts.pinned == 4, (
        "protected while they are written"
    )
    rig.run("write ssd")
    assert (
        rig.store_has(rig.keys(4)) == [True] * 4
        and rig.host.pool.counts.pinned == 0
        and rig.writeback._dirty == {}
    )
    rig.end()


def test_with_reuse_a_block_is_written_when_it_is_asked_for_again() -> None:
    rig = Stacked(admission="reuse")
    rig.remembered(4)
    assert rig.store_has(rig.keys(4)) == [False] * 4
    table, _ = rig.promote_all(2)
    rig.flow()
    assert rig.store_has(rig.keys(4)) == [True, True, False, False]
    rig.end(table)


@pytest.mark.parametrize("postpones", [False, True])
def test_nobody_who_waits_for_blocks_in_host_memory_keeps_others_from_the_disk(postpones: bool) -> None:
    rig = Stacked(num_host=4)
    rig.set_limits(replace(rig.saves.limits, postpones=postpones))
    rig.remembered(4, "a")
    wanted = rig.cache.retain(rig.prefix(4, "a"), 0.0)
    table = rig.ran(4, "b")
    rig.flow()
    assert rig.store_has(rig.keys(4, "b")) == [True] * 4
    wanted.end()
    rig.end(table)


def test_with_evict_blocks_are_written_when_room_is_short_the_first_to_go_first() -> None:
    rig = Stacked(admission="evict", num_device=16, num_host=16)
    rig.remembered(8, "a")
    rig.remembered(6, "b")
    assert not rig.stores["ssd"].blocks, "two slots are free: one in eight"
    rig.remembered(1, "c")
    assert rig.store_has(rig.keys(8, "a")) == [True] * 8
    rig.remembered(8, "d")
    assert rig.store_has(rig.keys(6, "b")) == [True] * 6, (
        "nothing left host memory that the disk does not have"
    )
    rig.end()


@pytest.mark.parametrize("trouble", ["full", "fails", "dies"])
def test_blocks_that_cannot_be_written_before_they_leave_are_not_tried_again_and_again(trouble: str) -> None:
    rig = Stacked(admission="evict", num_host=4)
    if trouble == "full":
        rig.stores["ssd"].max_blocks = 0
    elif trouble == "fails":
        rig.stores["ssd"].fails.update(rig.keys(4))
    else:
        rig.stores["ssd"].die()
    rig.remembered(4)
    tried = rig.stores["ssd"].calls.count("write")
    for _ in range(10):
        rig.run("write ssd")
    assert rig.stores["ssd"].calls.count("write") == tried <= 2, "it would be at it for ever"
    rig.stores["ssd"].raises = rig.stores["ssd"].max_blocks = None
    rig.stores["ssd"].fails.clear()
    rig.clock.advance(100.0)
    rig.flow()
    rig.remembered(1, "b")
    assert rig.store_has(rig.keys(4)).count(True) == 3, "the next time that room is short it is tried again"
    rig.end()


def test_a_second_tier_gets_everything_at_once_and_what_it_gave_is_not_given_back() -> None:
    rig = Stacked("ssd", "remote", admission="evict")
    rig.remembered(4, "a", tiers=("host", "remote"))
    assert rig.store_has(rig.keys(4), "remote") == [True] * 4 and not rig.stores["ssd"].blocks
    rig.cache.reset(["host"])
    lease = rig.cache.lease("request", rig.prefix(4))
    rig.run("ask remote")
    assert lease is not None and lease.runs_from(0) == [("remote", 4)]
    writes = rig.stores["remote"].calls.count("write")
    table = rig.cache.open("request", rig.prefix(4), 0)
    load = table.promote(lease, 4, 1)
    rig.flow()
    assert load.num_landed == 4 and rig.stores["remote"].calls.count("write") == writes
    assert set(rig.writeback._dirty) == set(rig.keys(4)), "the disk does not have it"
    assert rig.persisted().error is None and rig.store_has(rig.keys(4)) == [True] * 4
    rig.end(table)


def test_nobody_behind_a_tier_that_has_not_answered_is_asked_and_an_answer_of_nothing_ends_the_lease() -> (
    None
):
    rig = Stacked("remote", "farther")
    lease = rig.cache.lease("request", rig.prefix(4))
    assert lease is not None and not lease.ready and lease.num_from(0) == 0
    assert len(rig.lane("ask remote")) and not len(rig.lane("ask farther"))
    rig.run("ask remote")
    assert (
        lease.ready
        and lease.runs_from(0) == []
        and rig.cache.match(rig.prefix(4).keys, lease).num_colder == 0
    )
    lease.end()
    rig.end()


# ------------------------------------------------------------------------------------------------- asked once


def asked(rig: Stacked, num_blocks: int = 4, first: HostLease | None = None) -> HostLease:
    lease = rig.cache.lease("request", rig.prefix(num_blocks), first)
    rig.run("ask remote")
    assert isinstance(lease, HostLease) and lease.ready
    return lease


def test_what_a_store_has_answered_it_is_not_asked_again() -> None:
    rig = Stacked("ssd", "remote")
    lease = asked(rig)
    assert lease.runs_from(0) == [] and rig.stores["remote"].calls.count("find") == 1
    lease.end()
    again = asked(rig, first=lease)
    assert again.runs_from(0) == [] and rig.stores["remote"].calls.count("find") == 1
    again.end()
    rig.end()


def test_a_store_that_has_not_answered_a_lease_has_not_said_that_it_has_nothing() -> None:
    rig = Stacked("remote")
    rig.put("remote", rig.keys(4))
    lease = rig.cache.lease("request", rig.prefix(4))
    assert lease is not None and not lease.ready and rig.cache.num_in_flight == 1
    lease.end()
    again = rig.cache.lease("request", rig.prefix(4), lease)
    assert again is not None and not again.ready
    rig.run("ask remote")
    assert again.ready and again.runs_from(0) == [("remote", 4)] and rig.cache.num_in_flight == 0
    again.end()
    rig.end()


def test_what_it_has_is_remembered_and_what_has_come_here_since_is_found() -> None:
    rig = Stacked("ssd", "remote")
    rig.put("remote", [rig.keys(6)[number] for number in (0, 1, 2, 3)])
    lease = asked(rig, 6)
    assert lease.runs_from(0) == [("remote", 4)]
    lease.end()
    rig.put("ssd", rig.keys(1))
    again = asked(rig, 6, lease)
    assert again.runs_from(0) == [("ssd", 1), ("remote", 3)] and rig.stores["remote"].calls.count("find") == 1
    again.end()
    rig.end()


def test_blocks_that_it_was_not_asked_for_are_asked_for() -> None:
    rig = Stacked("ssd", "remote")
    table = rig.ran(2)
    lease = asked(rig)
    assert lease.parts[0].blocks == [2, 3], "the device has the others"
    lease.end()
    table.release(None)
    rig.flow()
    rig.forget_device()
    rig.cache.reset(["host"])
    rig.stores["ssd"].lose()
    num = rig.stores["remote"].calls.count("find")
    again = asked(rig, first=lease)
    assert again.runs_from(0) == [("remote", 2)] and rig.stores["remote"].calls.count("find") == num + 1
    again.end()
    rig.end()


def test_a_question_that_cannot_be_asked_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Stacked("remote")
    rig.remembered(2)

    def fails(*args: object, **more: object) -> None:
        raise MemoryError("no room for a question")

    with monkeypatch.context() as broken:
        broken.setattr(rig.lane("ask remote"), "submit", fails)
        with pytest.raises(MemoryError):
            rig.cache.lease("request", rig.prefix(4))
    assert len(rig.host.leases) == 0 and rig.host.pool.counts.pinned == 0
    rig.cache.settle()
    assert len(rig.tiers["remote"].findings) == 0, "nobody waits for an answer"
    lease = asked(rig)
    assert lease.num_from(0) == 2
    lease.end()
    rig.end()


# ---------------------------------------------------------------------------------------------------- persist


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_what_persist_acknowledges_is_in_the_store_and_the_store_was_told_to_keep_it(
    admission: AdmissionName,
) -> None:
    rig = Stacked(admission=admission)
    table = rig.ran(6)
    one = rig.cache.persist()
    assert one is not None and not one.settled
    rig.run("launch save", "save")
    assert not one.settled, "in host memory, and not on disk"
    rig.run("write ssd")
    assert one.settled and one.error is None and rig.store_has(rig.keys(6)) == [True] * 6
    assert rig.stores["ssd"].calls[-1] == "persist", "behind the last write"
    rig.end(table)


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("trouble", ["full", "fails", "dies", "dies at the sync"])
def test_persist_says_so_where_the_store_did_not_take_everything(
    admission: AdmissionName, trouble: str
) -> None:
    rig = in_host_only(admission)
    store = rig.stores["ssd"]
    if trouble == "full":
        store.max_blocks = 2
    elif trouble == "fails":
        store.fails.add(rig.keys(4)[2])
    elif trouble == "dies":
        store.die()
    else:
        store.on_call = lambda call: store.die() if call == "persist" else None
    one = rig.persisted()
    assert isinstance(one.error, StoreFailed)
    store.on_call = lambda call: None
    store.raises = store.max_blocks = None
    store.fails.clear()
    rig.clock.advance(100.0)
    rig.flow()
    again = rig.persisted()
    assert again.error is None and rig.store_has(rig.keys(4)) == [True] * 4, (
        "what was not written is still to be written"
    )
    rig.end()


def test_persist_is_not_kept_from_writing_by_the_limit_of_the_queue() -> None:
    rig = in_host_only("evict", 12)
    one = rig.persisted()
    assert one.error is None and rig.store_has(rig.keys(12)) == [True] * 12, "eight fit into the queue"
    rig.end()


def test_the_set_of_dirty_blocks_stays_small_though_they_come_and_go() -> None:
    rig = Stacked(admission="reuse", num_host=4)
    for number in range(20):
        rig.remembered(4, chr(ord("a") + number))
        assert len(rig.writeback._dirty) <= rig.host.num_slots
    rig.end()


# -------------------------------------------------------------------------------------- slices of many blocks


def count_writes(rig: Stacked, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks are handed over to the disk by each call, from now on."""
    nums: list[int] = []
    tier = rig.tiers["ssd"]
    try_write = tier.try_write

    def counted(keys, *rest):  # type: ignore[no-untyped-def]
        nums.append(len(keys))
        return try_write(keys, *rest)

    monkeypatch.setattr(tier, "try_write", counted)
    return nums


def test_a_flush_hands_over_a_slice_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = in_host_only("evict", 600, num_device=700, num_host=800)
    nums = count_writes(rig, monkeypatch)
    one = rig.cache.persist()
    assert one is not None
    for num_before in (0, 256, 512):
        assert rig.cache.settle() and num_before < sum(nums) <= num_before + 256
    assert sum(nums) == 600 and one.sync is not None, "all of it, and the sync behind it"
    rig.flow()
    assert one.settled and one.error is None and all(rig.store_has(rig.keys(600)))
    rig.end()


def test_a_flush_says_so_where_its_first_slice_failed_long_before_the_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sync knows of writes that are under way when it is submitted, and this one is over by then."""
    monkeypatch.setattr(writeback, "_WRITE_AT_ONCE", 2)
    rig = in_host_only("evict", 6)
    rig.stores["ssd"].fails.add(rig.keys(1)[0])
    one = rig.persisted()
    assert (
        isinstance(one.error, StoreFailed)
        and ("1 of 6") in str(one.error)
        and rig.store_has(rig.keys(6)) == [False] + [True] * 5
    )
    rig.stores["ssd"].fails.clear()
    assert rig.persisted().error is None and rig.store_has(rig.keys(6)) == [True] * 6
    rig.end()


def test_what_left_in_the_turn_before_is_none_of_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have left: it begins when all of them are taken note of."""
    monkeypatch.setattr(writeback, "_GONE_AT_ONCE", 2)
    rig = in_host_only("evict", 9)
    rig.remembered(1, "b")
    assert rig.host.pool.evict(99) == 10
    rig.remembered(2, "c")
    one = rig.persisted()
    assert one.error is None and len(one.keys or ()) == 2 and rig.writeback._dirty == {}
    rig.end()


# ------------------------------------------------------------------------------------------------------ reset


def emptied(rig: Stacked, tier: str) -> int:
    """What the store had."""
    resetting = rig.cache.reset([tier])
    rig.flow()
    assert resetting.settled and resetting.error is None
    return resetting.forgotten[tier]


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_after_a_reset_of_the_store_everything_in_host_memory_is_written_again(
    admission: AdmissionName,
) -> None:
    rig = Stacked(admission=admission)
    rig.remembered(4, tiers=("host", "ssd"))
    assert rig.persisted().error is None
    assert emptied(rig, "ssd") == 4
    assert rig.persisted().error is None and rig.store_has(rig.keys(4)) == [True] * 4
    rig.end()


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_a_store_that_was_away_may_come_back_empty_and_is_given_everything_again(
    admission: AdmissionName, tier: str
) -> None:
    rig = Stacked(tier, admission=admission)
    rig.remembered(4, tiers=("host", tier))
    assert rig.persisted().error is None
    rig.first.die()
    assert isinstance(rig.persisted().error, StoreFailed) and not rig.tiers[tier].usable
    rig.first.raises = None
    rig.first.lose()
    rig.clock.advance(60.0)
    rig.flow()
    assert rig.tiers[tier].usable
    assert rig.persisted().error is None and rig.store_has(rig.keys(4), tier) == [True] * 4
    rig.end()


@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_a_reset_that_fails_halfway_leaves_nothing_that_is_only_believed_to_be_there(tier: str) -> None:
    """It has failed, and some of the blocks are gone all the same."""
    rig = Stacked(tier)
    rig.remembered(4, tiers=("host", tier))
    rig.first.on_call = lambda call: rig.first.lose(*rig.keys(4)[1:]) if call == "reset" else None
    rig.first.die()
    resetting = rig.cache.reset([tier])
    rig.flow()
    assert isinstance(resetting.error, StoreFailed)
    rig.first.raises = None
    rig.tiers[tier].calls.breaker.state = BreakerState.CLOSED  # somebody else has found it in order meanwhile
    assert rig.persisted().error is None and rig.store_has(rig.keys(4), tier) == [True] * 4
    rig.end()


@pytest.mark.parametrize("way", ["write", "part"])
def test_what_cannot_be_submitted_gives_its_pin_back(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def refuses(*args: object, **more: object) -> None:
        raise MemoryError

    tables = []
    if way == "write":
        rig = in_host_only("always")
        with monkeypatch.context() as patch:
            patch.setattr(rig.tiers["ssd"]._writers, "deal", refuses)
            with pytest.raises(MemoryError):
                rig.persisted()
        assert rig.host.pool.counts.pinned == 0
    else:
        rig = Stacked()
        rig.remembered(4, tiers=("ssd",))
        table, load = rig.load(4)
        tables.append(table)
        rig.lanes.run_all()
        with monkeypatch.context() as patch:
            patch.setattr(rig.lane("launch load"), "submit", refuses)
            with pytest.raises(MemoryError):
                rig.cache.settle()
        assert rig.pool.counts.pinned == 0 and not load.copies
        rig.flow()
        assert load.num_landed == 4, "the next turn sends it"
    assert rig.persisted().error is None and rig.store_has(rig.keys(4)) == [True] * 4
    rig.end(*tables)


def test_a_block_that_is_read_while_the_store_waits_to_be_emptied_is_not_in_the_store_behind_it() -> None:
    rig = Stacked()
    rig.remembered(2, tiers=("ssd",))
    resetting = rig.cache.reset(["ssd"])  # on its lane, and not begun
    table, load = rig.load(2)
    rig.read(0)
    assert load.num_sent == 2 and not resetting.settled
    rig.flow()
    assert resetting.forgotten == {"ssd": 2}
    assert rig.persisted().error is None and rig.store_has(rig.keys(2)) == [True] * 2
    rig.end(table)


@pytest.mark.parametrize("num_writes", range(4))
def test_a_reset_at_any_moment_of_a_persist_makes_it_write_again(num_writes: int) -> None:
    rig = in_host_only("evict")
    one = rig.cache.persist()
    rig.cache.settle()
    for _ in range(3 * num_writes):
        rig.lane("write ssd").step()
    resetting = rig.cache.reset(["ssd"])
    again = rig.cache.persist()
    rig.flow()
    assert resetting.settled and one is not None and again is not None and one.settled and again.settled
    assert one.error is None and again.error is None and rig.store_has(rig.keys(4)) == [True] * 4
    rig.end()


@pytest.mark.parametrize("admission", ["reuse", "evict"])
def test_blocks_that_a_reset_of_host_memory_takes_from_a_persist_are_its_loss(
    admission: AdmissionName,
) -> None:
    rig = in_host_only(admission)
    table = rig.ran(2, "b", "other")
    one = rig.cache.persist()  # it waits for the save of the second
    assert rig.cache.reset(["host"]).forgotten == {"host": 4}
    rig.flow()
    assert (
        one is not None
        and one.settled
        and isinstance(one.error, StoreFailed)
        and ("4 of 6") in str(one.error)
    )
    assert rig.store_has(rig.keys(2, "b")) == [True] * 2, "what is left is written all the same"
    assert rig.persisted().error is None, "what had left host memory before is nobody's loss"
    rig.end(table)


def test_what_a_full_queue_refuses_is_not_kept_from_leaving() -> None:
    rig = Stacked(num_host=32, num_device=32)
    tables = [rig.ran(4, name) for name in "abcdef"]  # more than the queue takes while nothing is written
    rig.run("launch save", "save")
    assert rig.host.pool.counts.pinned <= 8, "the queue's eight blocks, and no others"
    rig.flow()
    assert rig.host.pool.counts.pinned == 0
    rig.end(*tables)


def test_a_reset_of_a_tier_whose_lanes_are_closed_ends_with_an_error() -> None:
    rig = Stacked()
    rig.lane("write ssd").close()
    resetting = rig.cache.reset(["ssd"])
    rig.cache.settle()
    assert resetting.settled and isinstance(resetting.error, LaneClosed)


def test_a_drain_ends_behind_the_last_slice_also_where_one_before_it_has_nothing_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writeback, "_WRITE_AT_ONCE", 2)
    rig = Stacked("ssd")
    for name in "ac":
        rig.remembered(2, name)
    keys = [*rig.keys(2, "a"), *rig.keys(2, "b"), *rig.keys(2, "c")]
    rig.writeback.landed(keys)  # those in the middle have left host memory since
    rig.cache.drain(10.0)
    assert rig.cache.num_in_flight == 0 and rig.store_has(keys) == [True, True, False, False, True, True]
    rig.end()


@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_what_waits_for_its_turn_is_forgotten_by_a_reset_with_what_was_queued_before_it(
    monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    monkeypatch.setattr(writeback, "_WRITE_AT_ONCE", 2)
    rig = Stacked("ssd", "remote")
    rig.remembered(6, tiers=("host",))
    rig.tiers["remote"].calls.known.clear()
    keys = rig.keys(6)
    rig.writeback.landed(keys)
    assert {one.name for one, _ in rig.writeback.later} == {"ssd", "remote"}
    rig.cache.reset([tier])
    rig.flow()
    other = "remote" if tier == "ssd" else "ssd"
    assert rig.store_has(keys, tier) == [False] * 6 and rig.store_has(keys, other) == [True] * 6
    rig.end()


SIX = 6


def count_written(rig: Stacked, tier: str) -> Counter[bytes]:
    """How often the store is given each key from now on."""
    counted: Counter[bytes] = Counter()
    write = rig.stores[tier].write

    def counting(keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        counted.update(keys)
        return write(keys, depths, blocks)

    rig.stores[tier].write = counting  # type: ignore[method-assign]
    return counted


def promoted(rig: Stacked) -> None:
    """A request comes for the prefix, gets it from host memory and goes."""
    table, _ = rig.promote_all(SIX)
    rig.copy()
    table.release(None)
    rig.forget_device()


@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_what_two_ask_for_while_it_is_written_in_slices_is_written_once(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Stacked(tier, admission="reuse")
    rig.remembered(SIX)
    counted = count_written(rig, tier)
    monkeypatch.setattr(writeback, "_WRITE_AT_ONCE", 1)
    # the second comes when some are written, some are on their way and some wait for their turn
    for _ in range(2):
        promoted(rig)
    rig.flow()
    assert counted == dict.fromkeys(rig.keys(SIX), 1) and rig.store_has(rig.keys(SIX), tier) == [True] * SIX
    promoted(rig)
    rig.flow()
    assert sum(counted.values()) == SIX, "it is there"
    rig.end()


@pytest.mark.parametrize("reset", [False, True])
def test_a_block_is_written_with_its_depth(reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Stacked("ssd", admission="reuse")
    written: dict[bytes, int] = {}
    write = rig.first.write
    monkeypatch.setattr(
        rig.first,
        "write",
        lambda keys, depths, blocks: (
            written.update(zip(keys, depths, strict=True)) or write(keys, depths, blocks)
        ),
    )
    rig.ran(3).release(None)
    rig.flow()
    assert not written
    if reset:
        rig.cache.reset(["ssd"])
    assert rig.persisted().error is None
    assert written == {key: depth for depth, key in enumerate(rig.keys(3))}
    rig.end()


def test_what_a_store_has_behind_a_prefix_on_the_device_is_written_to_the_disk_with_its_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Stacked("ssd", "remote")
    rig.remembered(6, tiers=("remote",))
    first = rig.ran(2)
    rig.flow()
    written: dict[bytes, int] = {}
    write = rig.first.write
    monkeypatch.setattr(
        rig.first,
        "write",
        lambda keys, depths, blocks: (
            written.update(zip(keys, depths, strict=True)) or write(keys, depths, blocks)
        ),
    )
    prefix = rig.prefix(6)
    lease = rig.cache.lease("request", prefix)
    assert lease is not None
    rig.run("ask remote")
    table = rig.cache.open("request", prefix, 2)
    table.promote(lease, 4, 1)
    rig.flow()
    assert written == {key: depth for depth, key in enumerate(prefix.keys) if depth >= 2}
    rig.end(first, table)


@pytest.mark.parametrize("lost", [False, True])
def test_blocks_that_nobody_else_can_know_are_not_written_by_the_next_flush(lost: bool) -> None:
    rig = Stacked("ssd")
    table = rig.cache.open("closed", rig.prefix(2), 0)
    table.close_scope(2 * BLOCK)
    tokens = [ord("a")] * (4 * BLOCK)
    keys = table.next_keys(tokens, 4)
    assert table.try_extend(4)
    slots = table.hold.slots[:4]
    rig.lanes.touch(Access("device", slots, ALL, Mode.WRITE), table.owner)
    rig.device.write(slots, ALL, [[key] * LAYERS for key in keys])
    table.seal(tokens, 4 * BLOCK, None)
    rig.cache.submit_saves()
    rig.flow()
    assert all(rig.host_has(keys)) and rig.store_has(keys) == [True, True, False, False]
    if lost:
        rig.first.lose()
        rig.tiers["ssd"].calls.num_losses += 1  # as a probe does
    else:
        rig.cache.reset(["ssd"])
    rig.flow()
    assert rig.persisted().error is None
    assert rig.store_has(keys) == [True, True, False, False]
    rig.end(table)


def test_a_flush_fails_where_blocks_of_a_slice_have_left_host_memory_however_many_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has left is taken note of some at a time. A flush of a few blocks is over before that."""
    monkeypatch.setattr(writeback, "_GONE_AT_ONCE", 1)
    rig = Stacked("ssd", admission="reuse")
    for name in "ba":
        rig.ran(4, name).release(None)
        rig.flow()
        rig.forget_device()
        if name == "b":
            assert rig.persisted().error is None
    flush = rig.cache.persist()
    assert flush is not None
    _, pin = rig.host.pin_each(rig.keys(4)[:1], "a request")
    rig.cache.reset(["host"])
    rig.flow()
    assert rig.store_has(rig.keys(4)) == [True, False, False, False]
    assert flush.settled and flush.error is not None and "3 of 4 blocks" in str(flush.error)
    pin.end()
    rig.end()


def test_a_block_that_failed_and_was_written_after_all_is_no_loss_of_a_persist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Stacked("ssd", admission="reuse")
    rig.remembered(SIX)
    monkeypatch.setattr(writeback, "_WRITE_AT_ONCE", 1)
    keys = rig.keys(SIX)
    persisting = rig.cache.persist()
    assert persisting is not None
    rig.first.fails = {keys[0]}
    rig.cache.settle()
    rig.run("write ssd")
    assert rig.store_has(keys[:1]) == [False] and persisting.lost == {keys[0]} and persisting.sync is None
    rig.first.fails = set()
    table, _ = rig.promote_all(SIX)  # asked for again, so that it is written again
    rig.flow()
    assert persisting.settled and persisting.error is None and rig.store_has(keys) == [True] * SIX
    rig.end(table)

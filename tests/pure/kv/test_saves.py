"""Blocks on their way to the host: what is in flight, what becomes visible when, what is given back on every
path."""

from __future__ import annotations

import pytest

from penstock.errors import InvariantBroken
from penstock.kv.tiers import saves
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.saves import Save
from penstock.kv.transfer import Transfer
from tests.pure.kv.storage_rig import KEYS, LAYOUT, Rig, leased

BOTH = (("device", "host"), ("host", "device"))


# ----------------------------------------------------------------------------------------------------- demote


# Holds invariant 8: no key before the last byte.
def test_a_block_is_visible_in_the_host_tier_when_all_its_bytes_have_landed() -> None:
    rig = Rig()
    hold = rig.computed(KEYS[:2])
    rig.saves.offer(hold, 0, KEYS[:2], None)
    rig.saves.submit()
    assert rig.cache.num_in_flight == 1 and rig.in_host(KEYS[:2]) == [None, None]
    for lane in ("launch save", "save"):
        assert rig.lane(lane).step()
        rig.settle()
        assert rig.in_host(KEYS[:2]) == [None, None]
    rig.land()
    assert rig.in_host(KEYS[:2]) == KEYS[:2] and rig.cache.num_in_flight == 0
    hold.end()
    rig.close()


# -------------------------------------------------------------------------------- for somebody who names them


# Holds invariant 1.
def test_blocks_that_are_saved_by_their_keys_are_read_behind_all_that_was_launched() -> None:
    """A step that has been planned may still write what is known to be computed: the books are ahead of the
    device."""
    rig = Rig()
    hold = rig.computed(KEYS[:2])
    rig.saves.save(KEYS[:2], rig.step())
    assert rig.lane("launch save").step()
    assert not rig.lane("save").step(), "the copy waits on its lane"
    rig.land()
    assert rig.in_host(KEYS[:2]) == KEYS[:2]
    hold.end()
    rig.close()


def offered(save: Transfer) -> list[bytes]:
    assert isinstance(save, Save)
    return sorted(key for offer in save.offers for key in offer.keys)


def test_of_blocks_that_are_named_those_are_saved_that_only_the_device_has() -> None:
    rig = Rig(num_device=10)
    rig.save(KEYS[:2], "before").end()
    on_its_way, alone = rig.computed(KEYS[2:4], "on its way"), rig.computed(KEYS[4:6], "alone")
    rig.saves.offer(on_its_way, 0, KEYS[2:4], None)
    rig.saves.save(KEYS[:9], None)
    assert next(offered(save) for save in rig.saves.mover.flying) == KEYS[2:4], "what was offered goes first"
    rig.land()
    assert rig.saves.mover.counts.num_blocks == 6, "each once, and none that nobody has"
    assert rig.in_host(KEYS[:9]) == [*KEYS[:6], None, None, None]
    assert rig.pool.find_each(KEYS[4:6]) == list(alone.slots), "they stay on the device"
    assert rig.pool.counts.pinned == rig.host.pool.counts.pinned == 0
    rig.saves.save(KEYS[:9], None)
    assert not rig.saves.mover.flying
    on_its_way.end()
    alone.end()
    rig.close()


# Holds invariant 6: handing over a save of any size is one item for the launcher, and no launch.
def test_a_save_of_any_size_is_handed_over_as_one_item_and_launched_by_another_thread() -> None:
    for num_blocks in (1, 6):
        rig = Rig()
        hold = rig.computed(KEYS[:num_blocks])
        rig.saves.offer(hold, 0, KEYS[:num_blocks], None)
        rig.saves.submit()
        assert (len(rig.lane("launch save")), len(rig.lane("save"))) == (1, 0)
        rig.land()
        assert rig.in_host(KEYS[:num_blocks]) == KEYS[:num_blocks]
        hold.end()
        rig.close()


def test_what_was_offered_by_several_requests_goes_as_one_transfer_and_each_key_once() -> None:
    rig = Rig()
    one, two = rig.computed(KEYS[:2], "one"), rig.computed(KEYS[2:4], "two")
    # the second has computed the first block as well
    for hold, keys in ((one, KEYS[:2]), (two, [KEYS[0], KEYS[3]])):
        rig.saves.offer(hold, 0, keys, None)
    rig.saves.submit()
    rig.saves.submit()
    assert rig.cache.num_in_flight == 1
    rig.land()
    assert rig.in_host(KEYS[:4]) == [KEYS[0], KEYS[1], None, KEYS[3]] and rig.host.counts.deduplicated == 1
    for hold in (one, two):
        hold.end()
    rig.close()


# Holds invariant 24: a full host tier costs a save.
def test_a_save_that_finds_the_host_full_is_skipped_and_counted() -> None:
    rig = Rig(num_host=2)
    rig.save(KEYS[:2], "first").end()
    lease = leased(rig, KEYS[:2])
    rig.save(KEYS[2:4], "second").end()
    assert rig.in_host(KEYS[:4]) == [KEYS[0], KEYS[1], None, None] and rig.cache.stats().traffic.skipped == {
        "full": 2,
        "late": 0,
    }
    assert rig.cache.num_in_flight == 0 and rig.loads.mover.counts.failures == {}
    lease.end()
    rig.close()


def test_a_long_demotion_lands_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "_PART_BLOCKS", 2)
    rig = Rig()
    hold = rig.computed(KEYS[:5])
    rig.saves.offer(hold, 0, KEYS[:5], None)
    rig.saves.submit()
    rig.lane("launch save").step()
    landed = []
    while rig.cache.num_in_flight:
        assert rig.lane("save").step()
        rig.settle()
        landed.append(rig.host.pool.num_keys)
    assert sorted(set(landed)) == [0, 2, 4, 5] and rig.in_host(KEYS[:5]) == KEYS[:5]
    hold.end()
    rig.close()


# Holds invariant 8: a part that failed gets no key.
@pytest.mark.parametrize("failing", range(3))
def test_a_demotion_that_fails_publishes_nothing_of_what_did_not_arrive(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "_PART_BLOCKS", 2)
    rig = Rig()
    hold = rig.computed(KEYS[:5])
    rig.saves.offer(hold, 0, KEYS[:5], None)
    rig.saves.submit()
    rig.lane("launch save").step()
    for _ in range(2 * failing):
        rig.lane("save").step()
    rig.save_copier.fail_next = 1
    rig.land()
    assert rig.in_host(KEYS[:5]) == [*KEYS[: 2 * failing], *[None] * (5 - 2 * failing)]
    assert rig.cache.stats().traffic.failures == {("host", "copy"): 1} and rig.host.pool.counts.reserved == 0
    rig.saves.offer(hold, 0, KEYS[:5], None)  # and it can be tried again
    rig.saves.submit()
    rig.land()
    assert rig.in_host(KEYS[:5]) == KEYS[:5]
    hold.end()
    rig.close()


# ----------------------------------------------------------------------------------------------------- settle


def test_metrics_that_read_zero() -> None:
    rig = Rig()
    rig.save(KEYS[:2]).end()
    rig.pool.evict(8)
    lease, other = leased(rig, KEYS[:2]), leased(rig, KEYS[:1])
    hold = rig.hold(2)
    rig.promote(hold, lease, 2)
    flying = rig.cache.stats().traffic
    assert flying.in_flight == {("host", "device"): 1, ("device", "host"): 0} and flying.leases_open == 1
    rig.land()
    traffic = rig.cache.stats().traffic
    assert traffic.bytes == dict.fromkeys(BOTH, 2 * LAYOUT.block_bytes)
    assert {pair: sum(histogram.counts) for pair, histogram in traffic.seconds.items()} == dict.fromkeys(
        BOTH, 1
    )
    assert sum(traffic.in_flight.values()) == 0 and traffic.failures == {}
    other.end()
    hold.end()
    rig.close()


# Holds invariant 25: what a launcher raises is told to the engine thread.
def test_worker_exception_deadlocks_the_engine() -> None:
    fails_on_the_launcher()


def fails_on_the_launcher() -> None:
    rig = Rig()
    hold = rig.computed(KEYS[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "prepare", lambda self: (_ for _ in ()).throw(MemoryError("no room for a list")))
        rig.saves.offer(hold, 0, KEYS[:1], None)
        rig.saves.submit()
        rig.land()
    assert rig.cache.num_in_flight == 0 and rig.cache.stats().traffic.failures == {("host", "MemoryError"): 1}
    rig.saves.offer(hold, 0, KEYS[:2], None)
    rig.saves.submit()
    rig.land()
    assert rig.in_host(KEYS[:2]) == KEYS[:2], "the launcher goes on"
    hold.end()
    rig.close()


# ------------------------------------------------------------------------------------------------------ drain


# Holds invariant 10: a drain covers what is submitted and not launched.
def test_flush_between_submit_and_launch() -> None:
    rig = Rig()
    hold = rig.computed(KEYS[:2])
    rig.saves.offer(hold, 0, KEYS[:1], None)
    rig.saves.submit()
    rig.saves.offer(hold, 1, KEYS[1:2], None)  # this one was not even submitted
    assert len(rig.lane("save")) == 0, "nothing is launched"
    rig.cache.drain(2.0)  # a drain that misses something spins until then
    rig.settle()
    assert rig.in_host(KEYS[:2]) == KEYS[:2]
    hold.end()
    rig.close()


# ----------------------------------------------------------------------------------------- launches that fail


def test_a_defect_in_a_copy_is_not_taken_for_a_failure_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def broken(*args: object) -> None:
        raise InvariantBroken("no such slot")

    monkeypatch.setattr(rig.save_copier, "copy", broken)
    hold = rig.computed(KEYS[:1])
    rig.saves.offer(hold, 0, KEYS[:1], None)
    rig.saves.submit()
    rig.lanes.run_all()
    with pytest.raises(InvariantBroken, match="no such slot"):
        rig.settle()
    assert rig.cache.stats().traffic.failures == {}


# Holds invariant 9: what was enqueued ends first.
def test_a_launch_that_raised_behind_its_copies_is_waited_for_and_gives_everything_back() -> None:
    rig = Rig()

    def fails() -> None:
        raise RuntimeError("nobody can be woken")

    rig.cache.call_when_launched(fails)
    hold = rig.computed(KEYS[:2])
    rig.saves.offer(hold, 0, KEYS[:2], None)
    rig.saves.submit()
    rig.cache.drain(5.0)
    rig.settle()
    assert rig.cache.num_in_flight == 0 and rig.cache.stats().traffic.failures == {
        ("host", "RuntimeError"): 1
    }
    rig.cache.call_when_launched(lambda: None)
    hold.end()
    assert rig.pool.counts.pinned == 0 and rig.host.pool.counts.reserved == rig.host.pool.counts.pinned == 0
    rig.save(KEYS[4:6]).end()
    assert rig.in_host(KEYS[4:6]) == KEYS[4:6]
    rig.close()


@pytest.mark.parametrize("what", ["offers", "retraction"])
def test_a_save_that_cannot_be_handed_over_gives_its_pins_back(what: str) -> None:
    rig = Rig()
    hold = rig.computed(KEYS[:2], num_more=1)
    if what == "offers":
        rig.saves.offer(hold, 0, KEYS[:2], None)
    rig.lane("launch save").refuses = MemoryError()
    with pytest.raises(MemoryError):
        _ = rig.saves.submit() if what == "offers" else rig.saves.retract(hold, 3, KEYS[:2], 2 * 4 + 1, None)  # type: ignore[func-returns-value]
    assert rig.cache.num_in_flight == 0 and len(rig.host.leases) == 0
    hold.end()
    assert rig.pool.counts.pinned == 0
    rig.close()


def test_a_retraction_whose_launch_fails_halfway_drops_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots were taken in the host tier for blocks with a key, those of the others could not be had."""
    rig = Rig()
    hold = rig.computed(KEYS[:2], num_more=1)

    def fails(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "take_private", fails)
        lease = rig.saves.retract(hold, 3, KEYS[:2], 2 * 4 + 1, None)
        assert lease is not None
        rig.land()
    assert (
        lease.ready
        and lease.num_from(0) == 0
        and rig.host.pool.counts.reserved == 0
        and not rig.host._arriving
    )
    lease.end()
    assert rig.cache.stats().traffic.failures == {("host", "MemoryError"): 1}
    again = rig.saves.retract(hold, 3, KEYS[:2], 2 * 4 + 1, None)
    rig.land()
    assert again is not None and again.num_from(0) == 3, "the same can be saved again"
    again.end()
    hold.end()
    rig.close()

"""Blocks that leave the device for somebody's room: device and host memory are one capacity, promises hold
meanwhile, and slots come back on every path."""

from __future__ import annotations

import random

import pytest

from penstock.contract import Prefix
from penstock.kv.table import BlockTable
from penstock.kv.tiers import saves as saves_module
from penstock.kv.tiers.host import Displaces
from penstock.kv.tiers.policy import TierLimits
from tests.pure.kv.storage_rig import KEYS, LAYERS, Rig, leased


class Full(Rig):
    """As the engine builds it without a disk or store: a full host memory takes nothing, and the device keeps
    it alone."""

    def __init__(self, num_device: int = 8, num_host: int = 16) -> None:
        super().__init__(num_device, num_host)
        self.set_limits(TierLimits(0, 1e9, postpones=True))

    def idle(self, keys: list[bytes]) -> None:
        """A request that has come and gone: saved as far as there is room."""
        self.save(keys).end()

    def alone(self, keys: list[bytes]) -> None:
        """Blocks that only the device has."""
        self.computed(keys).end()

    def table(self, keys: list[bytes]) -> BlockTable:
        """A running request that found `keys` on the device."""
        return self.cache.open("runs", Prefix(b"scope", tuple(keys)), len(keys))

    def make_room(self, num: int, floor: int = 0) -> int:
        """Until there is; returns how many times it was asked."""
        for turn in range(50):
            self.check_bytes()
            if self.cache.make_room(num, floor):
                return turn
            assert self.pool.num_available >= floor, "what others were promised can be drawn meanwhile"
            self.land()
        raise AssertionError("whoever waits for the room waits for ever")

    def check_bytes(self) -> None:
        self.check()
        self.cache.check()
        for key in KEYS:
            for slot in self.pool.find_each([key]):
                assert slot < 0 or self.device.read([slot], (0, LAYERS)) == [[key] * LAYERS]
        self.in_host(KEYS)

    def everywhere(self) -> set[bytes]:
        return {*self.pool.keys(), *self.host.pool.keys()}


def test_blocks_that_only_the_device_has_are_saved_before_their_room_is_given_away() -> None:
    rig = Full(num_device=4)
    rig.alone(KEYS[:4])
    assert not rig.cache.make_room(3, 0) and rig.pool.counts.pinned == 3 and rig.pool.num_available == 1
    assert rig.in_host(KEYS[:4]) == [None] * 4
    assert not rig.cache.make_room(3, 0), "what is under way comes first"
    assert rig.cache.num_in_flight == 1
    rig.land()
    assert rig.pool.num_free == 3 and rig.pool.find_each(KEYS[:1]) != [-1], (
        "the first of a prefix leaves last"
    )
    assert rig.in_host(KEYS[:4]) == [None, *KEYS[1:4]] and rig.cache.make_room(3, 0)
    rig.close()


def test_those_that_would_be_next_leave_with_the_first_that_has_to() -> None:
    rig = Full(num_device=6)
    rig.alone(KEYS[:6])
    assert not rig.cache.make_room(1, 0, 3) and rig.pool.counts.pinned == 4
    rig.land()
    assert rig.pool.num_free == 4 and rig.cache.make_room(1, 0, 3) and rig.cache.num_in_flight == 0
    rig.close()


def test_what_can_be_forgotten_ends_before_the_first_that_only_the_device_has() -> None:
    rig = Full(num_device=6)
    rig.idle(KEYS[:3])
    rig.alone(KEYS[3:6])
    assert [rig.saves.num_safe(num) for num in (0, 1, 3, 4, 6)] == [0, 1, 3, 3, 3]
    rig.close()


# Holds invariant 17: making room takes nothing that was promised.
def test_what_was_promised_stays_available_and_nobody_waits_where_there_is_no_more() -> None:
    rig = Full(num_device=4)
    rig.alone(KEYS[:4])
    assert not rig.cache.make_room(4, 3)
    assert (rig.pool.counts.pinned, rig.pool.num_available) == (1, 3)
    rig.land()
    assert rig.cache.make_room(4, 4), "all that is left was promised: it is drawn, whatever it holds"
    rig.close()


def test_many_blocks_leave_in_parts_and_the_first_are_free_before_the_last_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saves_module, "_MOVE_BLOCKS", 2)
    rig = Full(num_device=6)
    rig.alone(KEYS[:6])
    assert not rig.cache.make_room(6, 0) and rig.cache.num_in_flight == 3
    assert rig.lane("launch save").step() and rig.lane("save").step()
    while rig.lane("save").step():
        pass
    rig.settle()
    assert rig.pool.num_free == rig.pool.num_available == 2 and rig.cache.num_in_flight == 2
    assert rig.cache.make_room(2, 0), "there is room for somebody smaller"
    rig.land()
    assert rig.pool.num_free == 6 and rig.cache.make_room(6, 0)
    rig.close()


@pytest.mark.parametrize("trouble", ["copy", "late", "full"])
def test_slots_come_back_when_a_move_comes_to_nothing(trouble: str) -> None:
    rig = Full(num_device=3, num_host=2)
    rig.alone(KEYS[:3])
    if trouble == "copy":
        rig.save_copier.fail_next = 1
    lease = None
    if trouble == "full":
        taken = rig.host.take(KEYS[10:12], range(2), "cold load", Displaces.ANYTHING)
        rig.host.land(taken)
        lease = leased(rig, KEYS[10:12])
        assert lease.claim(0, 2)
    assert not rig.cache.make_room(2, 0)
    if trouble == "late":
        rig.saves.mover.flying[0].deadline_s = 0.0
        assert rig.cache.make_room(1, 0), "nobody waits for what is overdue"
        assert rig.pool.num_available == 1, "its slots stay with it"
    rig.land()
    assert rig.pool.num_free == 2
    assert rig.cache.make_room(2, 0)
    if lease is not None:
        assert set(rig.host.pool.keys()) == {*KEYS[10:12]} and rig.host.pool.counts.pinned == 2, (
            "what is claimed stays"
        )
        lease.end()
    rig.close()


def test_a_move_that_cannot_be_submitted_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Full(num_device=2)
    rig.alone(KEYS[:2])

    def refuse(*args: object, **named: object) -> object:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(rig.lane("launch save"), "submit", refuse)
        with pytest.raises(OSError, match="no"):
            rig.cache.make_room(2, 0)
    assert rig.pool.counts.idle == 2
    rig.make_room(2)
    assert rig.in_host(KEYS[:2]) == KEYS[:2]
    rig.close()


def test_a_block_that_somebody_shares_while_it_is_moved_stays() -> None:
    rig = Full(num_device=2)
    rig.alone(KEYS[:2])
    assert not rig.cache.make_room(2, 0)
    hold = rig.pool.hold("came", rig.pool.find_each(KEYS[:1]))
    rig.land()
    assert (
        rig.pool.find_each(KEYS[:1]) == hold.slots
        and rig.pool.num_free == 1
        and rig.in_host(KEYS[:2]) == KEYS[:2]
    )
    hold.end()
    rig.close()


def test_nobody_waits_for_ever_where_all_is_wanted_and_host_memory_is_full() -> None:
    """The request that is next needs room; all that could leave is wanted by one behind it, who looks again
    in every plan."""
    rig = Full(num_device=2, num_host=3)
    rig.host.land(rig.host.take(KEYS[10:13], range(3), "cold load", Displaces.ANYTHING))
    lease = leased(rig, KEYS[10:12])  # one slot is to be had, and two are needed
    rig.alone(KEYS[:2])
    want, num_asked = rig.pool.want(rig.pool.find(tuple(KEYS[:2])), 9.0), 0
    while not rig.cache.make_room(2, 0):
        num_asked += 1
        assert num_asked < 3, "whoever waits for the room waits for ever"
        want = rig.pool.want(rig.pool.find(tuple(KEYS[:2])), 9.0, want)
        rig.land()
    want.end()
    lease.end()
    rig.close()


def test_host_memory_gives_way_only_with_what_running_requests_hold() -> None:
    rig = Full(num_device=6, num_host=4)
    rig.idle(KEYS[10:12])  # used longer ago than those that are to give way
    rig.idle(KEYS[:2])  # host memory is full
    table = rig.table(KEYS[:2])
    rig.pool.evict_these(rig.pool.find_each(KEYS[10:12]))  # host memory alone has them
    rig.alone(KEYS[20:24])
    assert rig.pool.num_free == 0
    rig.make_room(2)
    assert rig.in_host(KEYS[10:12]) == KEYS[10:12], "nobody has them but host memory"
    assert rig.in_host(KEYS[:2]) == [None, None] and rig.in_host(KEYS[20:24]).count(None) == 2
    assert rig.everywhere() == {*KEYS[:2], *KEYS[10:12], *KEYS[20:24]}, "nothing is lost"
    table.release(None)
    assert rig.make_room(6) > 0, "what gave way is saved again before it leaves"
    rig.close()


def test_host_memory_keeps_what_a_deep_request_is_about_to_have_there_alone() -> None:
    rig = Full(num_device=8, num_host=4)
    rig.idle(KEYS[:2])
    rig.idle(KEYS[2:4])  # host memory is full
    deep, other = rig.table(KEYS[:2]), rig.table(KEYS[2:4])
    deep.is_deep = True
    rig.alone(KEYS[20:24])
    rig.make_room(2)
    assert rig.in_host(KEYS[:4]) == [*KEYS[:2], None, None]
    deep.release(None)
    other.release(None)
    rig.close()


def test_a_full_host_memory_takes_nothing_when_blocks_are_sealed_and_counts_it() -> None:
    rig = Full(num_host=2)
    rig.idle(KEYS[:2])
    rig.idle(KEYS[10:13])
    assert rig.in_host(KEYS[:2]) == KEYS[:2] and rig.in_host(KEYS[10:13]) == [None] * 3
    assert (rig.host.counts.postponed, rig.host.counts.skipped_full) == (3, 0)
    rig.close()


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_while_there_is_room_in_either(seed: int) -> None:
    """Random requests whose blocks fit into device and host memory together, whatever order they come and go
    in."""
    r = random.Random(seed)
    num_device, num_host = r.randint(3, 8), r.randint(2, 10)
    rig = Full(num_device, num_host)
    known: list[list[bytes]] = []
    next_key = 0
    for _ in range(r.randint(3, 12)):
        num = r.randint(1, min(3, num_device))
        if sum(map(len, known)) + num > num_host + num_device - num or next_key + num > len(KEYS):
            break
        running = r.choice(known) if known and r.random() < 0.5 else []
        running = (
            running if -1 not in rig.pool.find_each(running) and len(running) + num <= num_device else []
        )
        table = rig.table(running)
        before = rig.everywhere()
        # idle here, and there: those take two places
        num_twice = len({*rig.pool.keys(), *running} & set(rig.host.pool.keys()) - set(running))
        rig.make_room(num)
        lost = before - rig.everywhere()
        assert len(lost) <= num_twice, "room was made, and something was lost"
        known = [[key for key in keys if key not in lost] for keys in known]
        keys = KEYS[next_key : next_key + num]
        next_key += num
        new = rig.computed(keys)
        assert rig.everywhere() == (before | set(keys)) - lost, (
            "drawing what there was room for has cost somebody his only copy"
        )
        rig.saves.offer(new, 0, keys, None)
        rig.saves.submit()
        if r.random() < 0.7:
            rig.land()
        new.end()
        table.release(None)
        rig.land()
        known.append(keys)
    assert known and rig.everywhere() == {key for keys in known for key in keys}
    rig.check_bytes()
    rig.close()

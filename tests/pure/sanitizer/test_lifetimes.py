"""The sanitizer on a real pool and real lanes: slots that are given back, published or touched too early or
by the wrong one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.contract import Access, Fence, Mode
from penstock.errors import HandleEnded, Leaked
from penstock.kv.blocks.handles import Hold
from penstock.kv.blocks.pool import BlockPool
from penstock.lanes.cpu import CpuLane
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer

KEYS = [bytes([number]) * 16 for number in range(8)]
ALL = (0, 4)


class House:
    """A pool of one arena and lanes that touch it, under one sanitizer."""

    def __init__(self, strict: bool = False) -> None:
        self.sanitizer = Sanitizer(strict)
        self.pool = BlockPool(8, "device", self.sanitizer)
        self.lanes = {name: CpuLane(name, self.sanitizer) for name in ("compute", "load", "save")}

    def draw(self, num_slots: int, owner: str = "r1") -> Hold:
        reservation = self.pool.try_reserve(num_slots, owner)
        assert reservation is not None
        for fence in reservation.after:
            self.lanes["compute"].wait(fence)
        hold = self.pool.hold(owner)
        reservation.commit(hold)
        return hold

    def touch(self, lane: str, slots: list[int], mode: Mode = Mode.WRITE, label: str = "work") -> Fence:
        self.lanes[lane].submit(lambda: None, [Access("device", slots, ALL, mode)], label=label)
        return self.lanes[lane].record()

    def told(self, kind: Kind = Kind.LIFETIME) -> list[str]:
        assert all(report.kind is kind for report in self.sanitizer.reports), [
            str(report) for report in self.sanitizer.reports
        ]
        return [report.sentence for report in self.sanitizer.reports]


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    for lane in made.lanes.values():
        lane.close(10.0)


def on_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


# ------------------------------------------------------------------------------------------------- given back


def test_a_slot_given_back_with_the_fence_of_its_last_use_is_fine_and_so_is_its_next_owner(
    house: House,
) -> None:
    for owner in ("r1", "r2", "r3"):
        hold = house.draw(8, owner)
        hold.end(house.touch("compute", hold.slots))
    assert house.told() == []


def test_a_slot_given_back_while_a_transfer_is_in_flight_is_found_without_its_being_used_again(
    house: House,
) -> None:
    hold = house.draw(2)
    slots = hold.slots
    written = house.touch("compute", slots)
    house.lanes["save"].wait(written)
    house.touch("save", slots, Mode.READ, "demote of r1")
    hold.end(written)  # covers the step, not the demotion
    (sentence,) = house.told()
    assert (
        "slots 0, 1 of device are given back for 'r1' while read of layers 0 to 3 by 'demote of r1' on lane "
        "save may still"
    ) in sentence
    assert "has seen item 2 of lane save to be over, and no fence behind that travels with it" in sentence
    assert house.sanitizer.reports[0].deeds[0].label == "demote of r1" and house.sanitizer.reports[0].stack


def test_a_slot_that_changed_hands_says_nothing_about_others(house: House) -> None:
    """A thread that gives one slot back hands over what it knows with that slot only: the pool's lock orders
    no bytes of others."""
    house.draw(8).end()
    one, other = house.draw(1), house.draw(1)
    (slot,) = one.slots
    read = house.touch("save", other.slots, Mode.READ)
    on_another_thread(lambda: (read.wait_passed(10.0), one.end()))
    again = house.draw(6)
    house.touch("compute", other.slots)
    assert [report.kind for report in house.sanitizer.reports] == [Kind.RACE] and slot not in again.slots


# Holds invariant 7: the sanitizer reports where it is broken.
@pytest.mark.parametrize("seen", [True, False])
def test_a_pin_keeps_a_slot_for_its_transfer_until_that_was_seen_to_be_over(house: House, seen: bool) -> None:
    hold = house.draw(2)
    pin = house.pool.pin(hold.slots, "demote of r1")
    written = house.touch("compute", hold.slots)
    house.lanes["save"].wait(written)
    saved = house.touch("save", hold.slots, Mode.READ)
    hold.end(written)
    assert house.told() == [], "the pin has it"
    if seen:
        saved.wait_passed(10.0)
    pin.end()
    assert len(house.told()) == (0 if seen else 1)


def given_back(house: House, fenced: list[str]) -> list[str]:
    """Pins of readers on every lane end, those of `fenced` lanes with a fence; no thread has looked whether
    their work is over."""
    hold = house.draw(2)
    pins = {name: house.pool.pin(hold.slots, name) for name in house.lanes}
    slots = hold.slots
    hold.end()
    for name, pin in pins.items():
        fence = house.touch(name, slots, Mode.READ)
        pin.end(fence if name in fenced else None)
    return [report.deeds[0].lane for report in house.sanitizer.reports]


@pytest.mark.parametrize("missing", ["compute", "load", "save", "none"])
def test_every_fence_that_came_back_with_a_slot_counts_and_none_stands_for_that_of_another_lane(
    house: House, missing: str
) -> None:
    found = given_back(house, [name for name in house.lanes if name != missing])
    assert found == [name for name in house.lanes if name == missing]


def landing(seen: bool) -> Sanitizer:
    """A save lands in a slot; the thread that moved the slot on last has `seen` that, or has not."""
    sanitizer = Sanitizer()
    sanitizer.opened("host", 2)
    sanitizer.moved("host", [0], "free", "reserved", "r")
    sanitizer.submitted("save", 1, "save", [Access("host", [0], ALL, Mode.WRITE)])
    if seen:
        sanitizer.host_waited("save", 1, 0.0)
    sanitizer.moved("host", [0], "reserved", "active", "r")
    return sanitizer


@pytest.mark.parametrize("seen", [True, False])
def test_a_key_is_a_change_of_hands_too(seen: bool) -> None:
    """Who gives it has seen what was seen before; who gives the slot back, what was seen when it got it."""
    sanitizer = landing(seen)
    on_another_thread(lambda: sanitizer.sealed("host", 0, KEYS[0]))
    assert len(sanitizer.reports) == (0 if seen else 1)
    sanitizer = landing(seen=True)
    sanitizer.submitted("load", 1, "load", [Access("host", [0], ALL, Mode.READ)])

    def seal() -> None:
        if seen:
            sanitizer.host_waited("load", 1, 0.0)
        sanitizer.sealed("host", 0, KEYS[0])

    on_another_thread(seal)
    on_another_thread(lambda: sanitizer.moved("host", [0], "active", "idle", "r"))
    assert len(sanitizer.reports) == (0 if seen else 1)


# -------------------------------------------------------------------------------------------------- published


# Holds invariant 8: the sanitizer reports where it is broken.
def test_a_copy_visible_before_its_bytes_landed_is_found(house: House) -> None:
    hold = house.draw(2)
    landed = house.touch("load", hold.slots, label="promote of r1")
    house.pool.seal(hold.slots[:1], KEYS[:1])
    (sentence,) = house.told()
    assert sentence == (
        "slot 0 of device gets its key, and write of layers 0 to 3 by 'promote of r1' on lane load may not "
        "have landed: the thread that gives the key has not seen item 1 of lane load to be over"
    )
    landed.wait_passed(10.0)
    house.pool.seal(hold.slots[1:], KEYS[1:2])
    assert len(house.told()) == 1


def test_nobody_writes_a_block_that_has_a_key_until_it_is_forgotten(house: House) -> None:
    hold = house.draw(1)
    house.touch("compute", hold.slots).wait_passed(10.0)
    house.pool.seal(hold.slots, KEYS[:1])
    hold.end()
    house.pool.evict(1)
    again = house.draw(8)
    house.touch("compute", again.slots).wait_passed(10.0)
    assert house.told() == []
    house.pool.seal(again.slots[:1], KEYS[:1])
    house.touch("compute", again.slots, label="step")
    (sentence,) = house.told()
    assert (
        sentence == f"write of layers 0 to 3 by 'step' on lane compute changes slot {again.slots[0]} of "
        "device, which others may find under a key"
    )


def test_two_keys_for_one_slot_are_found() -> None:
    sanitizer = Sanitizer()
    sanitizer.opened("device", 2)
    sanitizer.sealed("device", 1, KEYS[0])
    sanitizer.sealed("device", 1, KEYS[1])
    assert "two keys name the same bytes" in sanitizer.reports[0].sentence


# -------------------------------------------------------------------------------------------------------- end


def test_a_pin_that_outlives_its_pool_is_named_with_its_owner(house: House) -> None:
    hold = house.draw(2)
    pin = house.pool.pin(hold.slots, "lease of r7")
    hold.end()
    with pytest.raises(Leaked):
        house.pool.close()
    (sentence,) = house.told()
    assert "pin of 'lease of r7' (2 slots) has not ended" in sentence
    pin.end()
    house.pool.close()
    assert len(house.told()) == 1


def test_work_on_the_arena_of_a_closed_pool_is_found(house: House) -> None:
    house.draw(1).end()
    house.pool.close()
    with pytest.raises(HandleEnded):
        house.draw(1)
    assert house.told() == []
    house.touch("compute", [0])
    (sentence,) = house.told()
    assert sentence.endswith("touches device, whose pool is closed")


def test_a_state_that_does_not_follow_is_found_and_the_books_go_on_from_what_was_said() -> None:
    sanitizer = Sanitizer()
    sanitizer.opened("device", 4)
    sanitizer.moved("device", [0, 1], "free", "reserved", "r1")
    sanitizer.moved("device", [0, 2], "reserved", "active", "r1")
    (report,) = sanitizer.reports
    assert report.kind is Kind.ACCOUNTING and report.slots == (2,) and "but it was free" in report.sentence
    sanitizer.turns.balanced("device", {"free": 1, "reserved": 1, "active": 2, "idle": 0})
    assert len(sanitizer.reports) == 1

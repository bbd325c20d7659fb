"""Pins on a run of a hold's slots: free of charge while the hold is open, booked slot by slot where it ends
first; and faults that these tests must notice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import HandleEnded, InvariantBroken, Leaked, PenstockError
from penstock.kv.blocks import handles
from penstock.kv.blocks.handles import Hold, RunPin
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotBook, SlotCounts
from tests.pure.kv.kv_fakes import FakeLane, Heard

KEYS = [bytes([i]) * 16 for i in range(8)]


def draw(pool: BlockPool, num: int, num_sealed: int = 0, owner: str = "request") -> Hold:
    hold = pool.hold(owner)
    reservation = pool.try_reserve(num, owner)
    assert reservation is not None
    reservation.commit(hold)
    pool.seal(hold.slots[:num_sealed], KEYS[:num_sealed])
    return hold


# ------------------------------------------------------------------------------------------- the hold is open


# Holds invariant 6: handing over a save takes as long for any size.
def test_a_run_pin_on_an_open_hold_costs_the_same_for_any_number_of_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = BlockPool(2000, "device")
    hold = draw(pool, 2000)
    for walks in ("move", "require", "those_in"):
        monkeypatch.setattr(SlotBook, walks, lambda *_: pytest.fail("nothing is done slot by slot"))
    monkeypatch.setattr(
        RunPin, "slots", property(lambda self: pytest.fail("the run is not even written down"))
    )
    pin = pool.pin_run(hold, 3, 1997, "demote")
    assert (pin.num_slots, pin.hold.ended) == (1997, False)
    pin.end()
    assert pool.counts.active == 2000


def test_a_run_pin_names_exactly_its_run() -> None:
    pool = BlockPool(8, "device")
    hold = draw(pool, 6)
    pin = pool.pin_run(hold, 2, 3, "demote")
    assert list(pin.slots) == pin.array.tolist() == list(hold.slots)[2:5]
    assert pool.pin_run(hold, 6, 0, "nothing").slots == []
    hold.end()
    assert list(pin.slots) == list(hold.slots)[2:5], "also when the hold has ended"


def test_a_run_pin_that_ends_before_its_hold_leaves_no_trace() -> None:
    pool = BlockPool(4, "device")
    hold = draw(pool, 3, num_sealed=1)
    pool.pin_run(hold, 0, 3, "demote").end()
    pool.check()
    assert pool.counts == SlotCounts(free=1, reserved=0, active=3, pinned=0, idle=0)
    hold.end()
    assert pool.counts == SlotCounts(free=3, reserved=0, active=0, pinned=0, idle=1)
    pool.close()


def test_a_hold_gives_back_its_first_slots_and_none_that_a_transfer_uses() -> None:
    pool = BlockPool(6, "device")
    hold = draw(pool, 6)
    slots = list(hold.slots)
    pin = pool.pin_run(hold, 2, 3, "demote")
    for wrong in (-1, 3):
        with pytest.raises(InvariantBroken, match="cannot be given back"):
            hold.drop_first(wrong)
    hold.drop_first(0)
    assert pool.num_free == 0
    hold.drop_first(2)
    assert pool.num_free == 2 and list(hold.slots) == slots[2:]
    pin.end()
    with pytest.raises(InvariantBroken, match="cannot be given back"):
        hold.drop_first(5)
    hold.drop_first(4)
    assert pool.num_free == 6 and not len(hold.slots)
    pool.check()
    hold.end()
    pool.close()


def test_a_hold_grows_under_a_run_pin() -> None:
    pool = BlockPool(64, "device")
    hold = draw(pool, 2)
    pin = pool.pin_run(hold, 0, 2, "demote")
    before = list(pin.slots)
    reservation = pool.try_reserve(40, "request")
    assert reservation is not None
    reservation.commit(hold)
    assert list(pin.slots) == before == list(hold.slots)[:2]
    hold.end()
    assert pool.counts == SlotCounts(free=62, reserved=0, active=0, pinned=2, idle=0)
    pin.end()
    pool.check()


# ---------------------------------------------------------------------------------------- the hold ends first


def test_a_hold_that_ends_first_leaves_the_run_with_its_pin() -> None:
    pool = BlockPool(4, "device")
    hold = draw(pool, 4, num_sealed=3)
    pin = pool.pin_run(hold, 1, 2, "demote")
    hold.end()
    assert pin.hold.ended
    assert pool.counts == SlotCounts(free=1, reserved=0, active=0, pinned=2, idle=1)
    pool.check()
    greedy = pool.try_reserve(2, "other")
    assert greedy is not None and set(greedy.slots).isdisjoint(pin.slots)
    assert pool.try_reserve(1, "other") is None
    assert len(pool.find_each(KEYS[1:3])) == 2 and -1 not in pool.find_each(KEYS[1:3]), (
        "pinned blocks can be found"
    )
    pin.end()
    assert pool.counts == SlotCounts(free=0, reserved=2, active=0, pinned=0, idle=2)
    pool.check()


def test_run_pins_that_overlap_are_counted_one_by_one() -> None:
    pool = BlockPool(4, "device")
    hold = draw(pool, 4)
    one, two, three = (
        pool.pin_run(hold, 0, 3, "one"),
        pool.pin_run(hold, 1, 3, "two"),
        pool.pin_run(hold, 2, 1, "three"),
    )
    two.end()
    hold.end()
    assert pool.counts == SlotCounts(free=1, reserved=0, active=0, pinned=3, idle=0)
    one.end()
    assert pool.counts == SlotCounts(free=3, reserved=0, active=0, pinned=1, idle=0)
    three.end()
    assert pool.counts.free == 4
    pool.check()


def test_a_slot_that_two_tables_share_stays_active_until_the_second_ends_and_pinned_until_both_transfers_do() -> (  # noqa: E501
    None
):
    pool = BlockPool(4, "device")
    one = draw(pool, 2, num_sealed=2)
    two = pool.hold("two", one.slots)
    mine, yours = pool.pin_run(one, 0, 2, "mine"), pool.pin_run(two, 0, 2, "yours")
    one.end()
    assert (mine.hold.ended, yours.hold.ended) == (True, False)
    assert pool.counts.active == 2, "a table still holds them"
    pool.check()
    two.end()
    assert pool.counts.pinned == 2
    mine.end()
    assert pool.counts.pinned == 2
    yours.end()
    assert pool.counts.idle == 2
    pool.check()


def test_a_pinned_run_of_a_released_table_can_be_shared_and_sealed() -> None:
    pool = BlockPool(4, "device")
    hold = draw(pool, 2)
    pin = pool.pin_run(hold, 0, 2, "promote")
    hold.end()
    pool.seal(pin.slots, KEYS[:2])
    again = pool.hold("next", pool.find(KEYS[:2]))
    assert pool.counts.active == 2
    pin.end()
    assert pool.counts.active == 2
    again.end()
    assert pool.counts.idle == 2
    pool.check()


# -------------------------------------------------------------------------------------------- fences and ends


@pytest.mark.parametrize("hold_first", [True, False])
def test_the_fences_of_table_and_transfer_both_travel_with_the_slots(hold_first: bool) -> None:
    pool, compute, demote = BlockPool(2, "device"), FakeLane("compute"), FakeLane("demote")
    hold = draw(pool, 2)
    pin = pool.pin_run(hold, 1, 1, "demote")
    step, copy = compute.record(), demote.record()
    for end in (lambda: hold.end(step), lambda: pin.end(copy))[:: 1 if hold_first else -1]:
        end()
    first, second = pool.try_reserve(1, "next"), pool.try_reserve(1, "next")
    assert first is not None and second is not None
    by_slot = {reservation.slots[0]: set(reservation.after) for reservation in (first, second)}
    assert by_slot == {hold.slots[0]: {step}, hold.slots[1]: {step, copy}}


@pytest.mark.parametrize("booked", [True, False])
def test_a_run_pin_ends_exactly_once(booked: bool) -> None:
    pool = BlockPool(2, "device")
    hold = draw(pool, 2)
    pin = pool.pin_run(hold, 0, 2, "demote")
    if booked:
        hold.end()
    pin.end()
    before = pool.counts
    with pytest.raises(HandleEnded):
        pin.end()
    assert pool.counts == before
    pool.check()


@pytest.mark.parametrize("booked", [True, False])
def test_closing_with_a_run_pin_out_raises_and_names_it(booked: bool) -> None:
    pool = BlockPool(2, "device")
    hold = draw(pool, 2)
    pin = pool.pin_run(hold, 0, 1, "demote of r7")
    if booked:
        hold.end()
    with pytest.raises(Leaked, match="pin of 'demote of r7' \\(1 slots\\)"):
        pool.close()
    pin.end()
    if not booked:
        hold.end()
    pool.close()


@pytest.mark.parametrize(("first", "num"), [(-1, 1), (0, 3), (2, 1), (1, -1)])
def test_a_run_outside_its_hold_is_refused(first: int, num: int) -> None:
    pool = BlockPool(4, "device")
    hold = draw(pool, 2)
    with pytest.raises(InvariantBroken, match="pins slots"):
        pool.pin_run(hold, first, num, "demote")
    pool.check()
    hold.end()
    pool.close()


def test_no_run_of_an_ended_or_foreign_hold_can_be_pinned() -> None:
    pool, other = BlockPool(2, "device"), BlockPool(2, "other")
    with pytest.raises(InvariantBroken):
        pool.pin_run(draw(other, 1), 0, 1, "demote")
    hold = draw(pool, 1)
    hold.end()
    with pytest.raises(HandleEnded):
        pool.pin_run(hold, 0, 1, "demote")


def test_an_observer_hears_whose_use_of_which_slots_ended() -> None:
    heard = Heard()
    pool = BlockPool(3, "device", heard)
    hold = draw(pool, 3)
    fence = FakeLane("demote").record()
    pin = pool.pin_run(hold, 1, 2, "demote")
    hold.end()
    pin.end(fence)
    assert ("returned", tuple(hold.slots[1:]), "demote", fence) in heard.handed_over
    assert heard.events[-1] == ("moved", tuple(hold.slots[1:]), "pinned", "free", "demote")


# --------------------------------------------------------------------------------------------- another thread


def seen_during(grow: Callable[[], None], shown: Callable[[], list[int]]) -> list[list[int]]:
    """What somebody would see who looks between any two lines of it."""
    seen: list[list[int]] = []

    def look(frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        sys.settrace(None)
        seen.append(shown())
        sys.settrace(look)
        frame.f_trace = look if frame.f_code.co_filename in (handles.__file__, __file__) else None
        return frame.f_trace

    sys.settrace(look)
    try:
        grow()
    finally:
        sys.settrace(None)
    return seen


def test_a_launcher_that_reads_a_run_while_the_table_grows_sees_the_run() -> None:
    pool = BlockPool(200, "device")
    hold = draw(pool, 10)
    pin = pool.pin_run(hold, 0, 10, "demote")
    expected = list(pin.slots)
    reservation = pool.try_reserve(100, "request")
    assert reservation is not None
    seen = seen_during(lambda: reservation.commit(hold), lambda: list(pin.slots))
    assert len(seen) > 5 and all(moment == expected for moment in seen)
    assert hold.num_slots == 110


def test_a_hold_that_shows_its_new_room_before_it_has_filled_it_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faulty(self: Hold, size: int, held: NDArray[np.int32] | None = None) -> None:
        self._buffer = np.full(size, -1, np.int32)
        self._shown = self._buffer.view()
        if held is not None:
            self._buffer[: held.size] = held

    monkeypatch.setattr(Hold, "_make_room", faulty)
    with pytest.raises(AssertionError):
        test_a_launcher_that_reads_a_run_while_the_table_grows_sees_the_run()


# ----------------------------------------------------------------------------------------------------- faults


def forgets_the_run_when_its_hold_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    take_back = BlockPool.take_back

    def faulty(self: BlockPool, handle, fence):
        if isinstance(handle, Hold):
            handle.run_pins.clear()
        take_back(self, handle, fence)

    monkeypatch.setattr(BlockPool, "take_back", faulty)


def books_a_run_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    take_back = BlockPool.take_back

    def faulty(self: BlockPool, handle, fence):
        unbooked = isinstance(handle, RunPin) and not handle.hold.ended
        take_back(self, handle, fence)
        if unbooked:
            handle.hold.run_pins.add(handle)

    monkeypatch.setattr(BlockPool, "take_back", faulty)


def counts_a_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_run = BlockPool.pin_run

    def faulty(self: BlockPool, hold, first, num_slots, owner):
        pin = pin_run(self, hold, first, num_slots, owner)
        for slot in pin.slots:
            self._book.pins.at[slot] += 1
        return pin

    monkeypatch.setattr(BlockPool, "pin_run", faulty)


def drops_the_fence_of_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    end = RunPin.end
    monkeypatch.setattr(RunPin, "end", lambda self, fence=None: end(self, None))


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (forgets_the_run_when_its_hold_ends, test_a_hold_that_ends_first_leaves_the_run_with_its_pin),
        (books_a_run_that_has_ended, test_a_run_pin_that_ends_before_its_hold_leaves_no_trace),
        (counts_a_run_twice, test_a_run_pin_that_ends_before_its_hold_leaves_no_trace),
        (
            drops_the_fence_of_the_transfer,
            lambda: test_the_fences_of_table_and_transfer_both_travel_with_the_slots(False),
        ),
        (
            drops_the_fence_of_the_transfer,
            lambda: test_the_fences_of_table_and_transfer_both_travel_with_the_slots(True),
        ),
    ],
)
def test_a_broken_pool_turns_its_test_red(
    fault: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, PenstockError)):
        test()

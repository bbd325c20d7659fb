"""Lanes that are run by hand: what happens between the begin and the end of an item, and what touching its
slots meanwhile leads to."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.contract import Access, Mode
from penstock.errors import InvariantBroken
from tests.support.stepped import SteppedLanes, TagArena, TagCopier

BOTH = (0, 2)


class Pair:
    """Two arenas of two layers, and a lane that copies slot 0 of one to slot 1 of the other."""

    def __init__(self) -> None:
        self.one, self.two = TagArena("one", 2, 2), TagArena("two", 2, 2)
        self.one.write([0], BOTH, [["a", "b"]])
        self.lanes = SteppedLanes(self.one, self.two)
        self.lane = self.lanes.lane("copy")
        self.copier = TagCopier(self.one, self.two)

    def copy(self, layers: tuple[int, int] = BOTH) -> None:
        accesses = (Access("one", [0], layers, Mode.READ), Access("two", [1], layers, Mode.WRITE))
        self.lane.submit(
            lambda: self.copier.copy(np.array([0]), np.array([1]), layers), accesses, label="copy"
        )


def test_a_copy_takes_effect_at_its_end_and_leaves_garbage_from_its_begin_on() -> None:
    pair = Pair()
    before = list(pair.two.cells[1])
    pair.copy((0, 1))
    assert pair.two.cells[1] == before and pair.lane.begun() is None
    assert pair.lane.step() and pair.lane.begun() is not None
    spoiled = pair.two.cells[1][0]
    assert spoiled not in ("a", before[0]) and pair.two.cells[1][1] is before[1]
    assert pair.lane.step() and pair.two.cells[1] == ["a", before[1]]
    assert not pair.lane.step()


def test_a_source_that_changes_under_a_copy_is_told() -> None:
    pair = Pair()
    pair.copy()
    pair.lane.step()
    pair.one.write([0], BOTH, [["a", "c"]])
    with pytest.raises(InvariantBroken, match="reads slots that somebody writes"):
        pair.lane.step()


@pytest.mark.parametrize(
    ("access", "conflicts"),
    [
        (Access("one", [0], BOTH, Mode.READ), False),
        (Access("one", [0], BOTH, Mode.WRITE), True),
        (Access("one", [1], BOTH, Mode.WRITE), False),
        (Access("two", [0, 1], BOTH, Mode.READ), True),
        (Access("two", [1], (1, 2), Mode.WRITE), False),
        (Access("three", [1], BOTH, Mode.WRITE), False),
    ],
)
def test_whoever_touches_what_a_copy_is_at_is_told(access: Access, conflicts: bool) -> None:
    pair = Pair()
    pair.copy((0, 1))
    pair.lanes.touch(access, "a step")
    pair.lane.step()
    if conflicts:
        with pytest.raises(InvariantBroken, match="a step would"):
            pair.lanes.touch(access, "a step")
    else:
        pair.lanes.touch(access, "a step")
    pair.lane.step()
    pair.lanes.touch(access, "a step")


def test_a_lane_waits_for_another_and_a_failure_skips_what_comes_after_it() -> None:
    pair = Pair()
    other = pair.lanes.lane("other")
    first = other.submit(lambda: None, label="first")
    pair.lane.wait(other.record())
    pair.copier.fail_next = 1
    pair.copy()
    skipped = pair.lane.submit(
        lambda: pytest.fail("not after a failure"), label="skipped", after=pair.lane._queue[-1].ticket
    )
    assert not pair.lane.step() and not first.done()
    assert other.step() and first.done()
    pair.lanes.run_all()
    assert isinstance(skipped.error(), OSError) and len(pair.lane) == 0
    with pytest.raises(OSError, match="told to fail"):
        skipped.wait_done()

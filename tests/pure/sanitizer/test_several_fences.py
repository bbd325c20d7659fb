"""A slot that goes back from several hands, each with a fence of another lane: all of them count, and each
for its own lane only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.contract import Access, Mode
from penstock.kv.blocks.pool import BlockPool
from penstock.lanes.cpu import CpuLane
from penstock.sanitizer.sanitizer import Sanitizer

Lanes = dict[str, CpuLane]


@pytest.fixture
def sanitizer() -> Sanitizer:
    return Sanitizer()


@pytest.fixture
def lanes(sanitizer: Sanitizer) -> Iterator[Lanes]:
    made = {name: CpuLane(name, sanitizer) for name in ("save", "load", "check")}
    yield made
    for lane in made.values():
        lane.close(10.0)


def given_back(sanitizer: Sanitizer, lanes: Lanes, fenced: list[str]) -> list[str]:
    """Pins of readers on every lane end, those of `fenced` lanes with a fence, and nobody has looked whether
    their work is over."""
    pool = BlockPool(2, "device", sanitizer)
    reservation = pool.try_reserve(2, "r1")
    assert reservation is not None
    hold = pool.hold("r1")
    reservation.commit(hold)
    pins = {name: pool.pin(hold.slots, name) for name in lanes}
    hold.end()
    for name, lane in lanes.items():
        lane.submit(lambda: None, [Access("device", pins[name].slots, (0, 4), Mode.READ)], label=name)
        pins[name].end(lane.record() if name in fenced else None)
    return [report.deeds[0].lane for report in sanitizer.reports]


def test_every_fence_that_came_back_with_a_slot_counts(sanitizer: Sanitizer, lanes: Lanes) -> None:
    assert given_back(sanitizer, lanes, list(lanes)) == []


@pytest.mark.parametrize("missing", ["save", "load", "check"])
def test_no_fence_stands_for_that_of_another_lane(sanitizer: Sanitizer, lanes: Lanes, missing: str) -> None:
    assert given_back(sanitizer, lanes, [name for name in lanes if name != missing]) == [missing]

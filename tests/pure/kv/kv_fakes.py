"""Lanes and observers for bookkeeping tests: a lane whose progress the test decides, and an observer that
writes down what it hears."""

from __future__ import annotations

from collections.abc import Sequence


class FakeLane:
    """Fences `1..num_recorded`, of which the first `num_passed` have passed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_recorded = 0
        self.num_passed = 0

    def record(self) -> FakeFence:
        self.num_recorded += 1
        return FakeFence(self, self.num_recorded)

    def pass_all(self) -> None:
        self.num_passed = self.num_recorded


class FakeFence:
    def __init__(self, on: FakeLane, number: int) -> None:
        self.on = on
        self.number = number

    @property
    def lane(self) -> str:
        return self.on.name

    def passed(self) -> bool:
        return self.on.num_passed >= self.number

    def wait_passed(self, timeout_s: float | None = None) -> None:
        raise AssertionError("bookkeeping never waits")

    def __repr__(self) -> str:
        return f"{self.lane}@{self.number}"


class Heard:
    """A pool observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.handed_over: list[tuple[object, ...]] = []
        self.left: tuple[str, ...] | None = None  # by a close

    def opened(self, pool: str, num_slots: int) -> None:
        self.num_slots = num_slots

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        self.events.append(("moved", tuple(slots), old, new, owner))

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        self.handed_over.append(("lent", tuple(slots), owner))

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: object) -> None:
        self.handed_over.append(("returned", tuple(slots), owner, fence))

    def closed(self, pool: str, left: Sequence[str]) -> None:
        self.left = tuple(left)

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        self.events.append(("sealed", slot, key))

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        self.events.append(("evicted", slot, key))

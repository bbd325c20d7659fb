"""The order in which idle slots are evicted. Owns the order, not the states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class LruOrder:
    """Idle slots, least recently used first. Holds exactly the idle ones, so nothing held or pinned can be popped."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def add(self, slots: Sequence[int]) -> None:
        """`slots` became idle; of these the first is to go first."""
        order = self._order
        for slot in slots:
            order[slot] = None

    def remove(self, slots: Sequence[int]) -> None:
        """`slots` are in use again."""
        order = self._order
        for slot in slots:
            del order[slot]

    def pop(self, num: int) -> list[int]:
        """Take out the first `num`, or all where there are fewer."""
        order = self._order
        return [order.popitem(last=False)[0] for _ in range(min(num, len(order)))]

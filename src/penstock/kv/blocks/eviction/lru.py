"""Least recently used first. Owns one queue; knows neither keys nor depths."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class LruOrder:
    """Idle slots in the order in which they became idle."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """What a block is plays no part."""

    def hit(self, slots: Sequence[int]) -> None:
        """A block that was used goes to the end when it becomes idle again; that is all."""

    def add(self, slots: Sequence[int]) -> None:
        order = self._order
        for slot in slots:
            order[slot] = None

    def remove(self, slots: Sequence[int]) -> None:
        order = self._order
        for slot in slots:
            del order[slot]

    def pop(self, num: int) -> list[int]:
        order = self._order
        return [order.popitem(last=False)[0] for _ in range(min(num, len(order)))]

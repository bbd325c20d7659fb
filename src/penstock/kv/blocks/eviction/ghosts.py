"""Keys of blocks that were evicted not long ago, and how often each had been hit. Owns no slots: a ghost has no copy of its block."""

from __future__ import annotations

from collections import OrderedDict

GHOSTS_PER_SLOT = 4  # measured on both Mooncake traces; together a kilobyte beside a block of a megabyte or so


class Ghosts:
    """The newest ones, a few for each slot of the pool."""

    def __init__(self, num_slots: int) -> None:
        self._hits: OrderedDict[bytes, int] = OrderedDict()
        self._limit = GHOSTS_PER_SLOT * num_slots

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, key: bytes, num_hits: int) -> None:
        self._hits[key] = num_hits
        self._hits.move_to_end(key)
        if len(self._hits) > self._limit:
            self._hits.popitem(last=False)

    def take(self, key: bytes) -> int | None:
        """The block is back: forget its ghost, and say how often it had been hit; None where there is no ghost of it."""
        return self._hits.pop(key, None)

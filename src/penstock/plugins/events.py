"""Which blocks came to the disk and left it, under the engine's own names. Owns changes that were not taken,
and the names of blocks that this process wrote."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from penstock.contract import Fence

_MOST_WAITING = 100_000  # changes that nothing takes; then the oldest are dropped


class DiskChanges:
    """Observes the disk's pool; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[bytes, bytes] = {}  # by key, of blocks on their way to the disk or there
        self._here: set[bytes] = set()  # keys of these that are there
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=_MOST_WAITING)  # names, and if they left

    def name(self, keys: Sequence[bytes], names: Sequence[bytes]) -> None:
        """Before they are written. Blocks of an earlier process have no name and are not told of."""
        with self._lock:
            self._names.update(zip(keys, names, strict=True))

    def written(self, keys: Sequence[bytes]) -> None:
        """Their write is over. Those that are not on the disk need no name."""
        with self._lock:
            for key in keys:
                if key not in self._here:
                    self._names.pop(key, None)

    def take(self) -> list[tuple[bytes, bool]]:
        """The changes since the last call: each block's name, and whether it has left."""
        with self._lock:
            changes = list(self._changes)
            self._changes.clear()
        return changes

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        with self._lock:
            if (name := self._names.get(key)) is not None:
                self._here.add(key)
                self._changes.append((name, False))

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        with self._lock:
            if key in self._here:
                self._here.remove(key)
                self._changes.append((self._names.pop(key), True))

    def opened(self, pool: str, num_slots: int) -> None:
        """Does nothing."""

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        """Does nothing."""

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        """Does nothing."""

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: Fence | None) -> None:
        """Does nothing."""

    def closed(self, pool: str, left: Sequence[str]) -> None:
        """Does nothing."""

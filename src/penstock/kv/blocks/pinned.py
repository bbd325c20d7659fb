"""Blocks of a pool that have to stay for somebody, by their keys, whether they are here yet or not. Owns which keys those are; what
protects a slot is the pool's. Its owner has the pool's lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import Run, as_run


class PinnedKeys:
    """`protect` keeps slots from being evicted, and returns what ends that."""

    def __init__(self, pool: BlockPool, protect: Callable[[Run], Callable[[], None]]) -> None:
        self._pool = pool
        self._protect = protect
        self._keys: dict[str, frozenset[bytes]] = {}  # by owner
        self._num_owners: Counter[bytes] = Counter()  # by key
        self._ends: list[Callable[[], None]] = []  # of what protects those that are here

    def __contains__(self, key: bytes) -> bool:
        return key in self._num_owners

    def pin(self, owner: str, keys: Iterable[bytes]) -> None:
        """None of `keys` is evicted until `unpin`, nor is one that lands later. Idempotent."""
        if owner not in self._keys:
            self._keys[owner] = frozenset(keys)
            self._num_owners.update(self._keys[owner])
            self.landed(self._keys[owner])

    def unpin(self, owner: str) -> None:
        """What others pin as well stays. Idempotent."""
        for key in self._keys.pop(owner, frozenset()):
            self._num_owners[key] -= 1
            if not self._num_owners[key]:
                del self._num_owners[key]
        ended, self._ends = self._ends, []
        self.landed(list(self._num_owners))
        for end in ended:
            end()

    def landed(self, keys: Iterable[bytes]) -> None:
        """These have got slots, sealed and not evicted yet: those of them that are pinned are protected from now on."""
        slots = [slot for slot in self._pool.find_each([key for key in keys if key in self._num_owners]) if slot >= 0]
        if slots:
            self._ends.append(self._protect(as_run(slots)))

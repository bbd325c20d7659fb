"""Kept states of recurrent layers: which slot has the state of which block boundary. Owns their pool, no
bytes; steps copy states between these slots and the rows of requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from penstock.contract import Fence, SlotHandle
from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Pin, Reservation
from penstock.kv.blocks.pool import BlockPool

KEPT_STATES = "kept states"  # their memory, in declared accesses


class KeptStates:
    """Implements `contract.StateLedger`. A slot has a key as blocks have: that of the last block before its
    boundary, and with it of all tokens there."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        pool.gone = []
        self.num_skipped = 0  # states that were not kept, since every slot was in use
        # By depth, in blocks: keys that have a state. Prefixes have far more blocks than there are depths.
        self._at = defaultdict[int, set[bytes]](set)
        self.expected = Counter[tuple[int, bytes]]()  # depth and key

    def last_before(self, keys: Sequence[bytes], end: int) -> int:
        """The last boundary, in blocks, at or before `end` that has a state; 0: none."""
        self._drop_gone()
        depths = sorted((depth for depth in self._at if depth <= min(end, len(keys))), reverse=True)
        return next((depth for depth in depths if keys[depth - 1] in self._at[depth]), 0)

    def _drop_gone(self) -> None:
        with self.pool.lock:
            gone, self.pool.gone = set(self.pool.gone or ()), []
        for depth in list(self._at) if gone else ():
            self._at[depth] -= gone
            if not self._at[depth]:
                del self._at[depth]

    def is_expected(self, keys: Sequence[bytes], after: int = 0) -> bool:
        """True if a running request will keep a state of one of these boundaries, `after` so many blocks."""
        return any(after < depth <= len(keys) and keys[depth - 1] == key for depth, key in self.expected)

    def pin(self, owner: str, key: bytes) -> Pin | None:
        with self.pool.lock:
            slots = self.pool.find((key,))
            if not len(slots):
                return None
            self.pool.note_hits(slots)
            return self.pool.pin(slots, owner)

    def expect(self, key: bytes, depth: int, change: int) -> None:
        self.expected[depth, key] += change
        if self.expected[depth, key] < 0:
            raise InvariantBroken("a state is expected less often than never")
        if not self.expected[depth, key]:
            del self.expected[depth, key]

    def try_reserve(self, owner: str, key: bytes | None) -> Reservation | None:
        with self.pool.lock:
            if key is not None and len(self.pool.find((key,))):
                return None
            reservation = self.pool.try_reserve(1, owner)
        self.num_skipped += reservation is None
        return reservation

    def publish(self, handle: SlotHandle, key: bytes, depth: int, fence: Fence | None) -> None:
        assert isinstance(handle, Reservation)
        hold = self.pool.hold(handle.owner)
        handle.commit(hold)
        if self.pool.seal(hold.run, [key], [depth]):
            self._drop_gone()  # the key may be among them, of an earlier slot
            self._at[depth].add(key)
        hold.end(fence)

    def forget(self) -> int:
        """All that no request uses; returns how many."""
        return self.pool.evict(self.pool.num_slots)

    def check(self) -> None:
        self.pool.check()

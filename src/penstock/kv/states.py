"""Kept states of recurrent layers: which slot has the state of which block boundary. Owns their pool, no
bytes; steps copy states between these slots and the rows of requests."""

from __future__ import annotations

from collections import Counter
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
        self.num_skipped = 0  # states that were not kept, since every slot was in use
        self._expected = Counter[bytes]()

    def last_before(self, keys: Sequence[bytes], end: int) -> int:
        """The last boundary, in blocks, at or before `end` that has a state; 0: none."""
        slots = self.pool.find_each(keys[:end])
        return next((num for num in range(len(slots), 0, -1) if slots[num - 1] >= 0), 0)

    def is_expected(self, keys: Sequence[bytes]) -> bool:
        """True if a running request will keep a state of one of these boundaries."""
        return bool(self._expected) and any(key in self._expected for key in keys)

    def pin(self, owner: str, key: bytes) -> Pin | None:
        with self.pool.lock:
            slots = self.pool.find((key,))
            if not len(slots):
                return None
            self.pool.note_hits(slots)
            return self.pool.pin(slots, owner)

    def expect(self, key: bytes, change: int) -> None:
        self._expected[key] += change
        if self._expected[key] < 0:
            raise InvariantBroken("a state is expected less often than never")
        if not self._expected[key]:
            del self._expected[key]

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
        self.pool.seal(hold.run, [key], [depth])
        hold.end(fence)

    def forget(self) -> int:
        """All that no request uses; returns how many."""
        return self.pool.evict(self.pool.num_slots)

    def check(self) -> None:
        self.pool.check()

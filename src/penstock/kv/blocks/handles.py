"""Handles of a pool: one per run of slots, which ends exactly once. Owns the runs, not the bookkeeping behind
them; decides nothing. For any thread: every call takes the pool's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence
from penstock.errors import HandleEnded, InvariantBroken
from penstock.kv.blocks.slots import Run, SlotEvent, SlotState

if TYPE_CHECKING:
    from penstock.kv.blocks.pool import BlockPool

_FIRST_ROOM = 16  # initial capacity of a hold, in slots
_NO_SLOT = -1
_NO_SLOTS: Run = np.empty(0, np.intp)


class Handle:
    """Slots that are out on behalf of `owner`."""

    kind: ClassVar[str] = "handle"
    __slots__ = ("_pool", "_run", "ended", "owner")

    def __init__(self, owner: str, pool: BlockPool, run: Run) -> None:
        self.owner = owner
        self.ended = False
        self._pool = pool
        self._run = run

    @property
    def run(self) -> Run:
        """Its slots as the pool's books take them."""
        return self._run

    @property
    def slots(self) -> Sequence[int]:
        plain: list[int] = self.run.tolist()
        return plain

    def require_open(self) -> None:
        if self.ended:
            raise HandleEnded(f"{self} has ended")

    def __str__(self) -> str:
        return f"{self.kind} of {self.owner!r} ({len(self.run)} slots)"

    def end(self, fence: Fence | None = None) -> None:
        """Give the slots back. `fence` covers their last use, unless that is known to be over."""
        with self._pool.lock:
            self.require_open()
            self._pool.take_back(self, fence)
            self.ended = True


class Pin(Handle):
    """A transfer's protection of slots; it holds even after the requests that use them have ended."""

    kind = "pin"
    __slots__ = ()


class Reservation(Handle):
    """Slots taken for an operation that may still fail. Ends by `commit` or by `rollback`.

    A write into the slots comes after all fences in `after`.
    """

    kind = "reservation"
    __slots__ = ("after",)

    def __init__(self, owner: str, pool: BlockPool, run: Run, after: tuple[Fence, ...]) -> None:
        super().__init__(owner, pool, run)
        self.after = after

    def commit(self, hold: Hold) -> None:
        """The slots go to the end of `hold`."""
        with self._pool.lock:
            self.require_open()
            hold.require_open()
            if hold not in self._pool.handles:
                raise InvariantBroken(f"the {hold} is not out of pool {self._pool.name!r}")
            self._pool.book.move(self._run, SlotEvent.COMMIT, SlotState.ACTIVE, hold.owner)
            hold.append(self._run)
            del self._pool.handles[self]
            self.ended = True

    def split(self, num_slots: int) -> Reservation:
        """The first `num_slots` as a new reservation; this one keeps the others."""
        with self._pool.lock:
            self.require_open()
            if self not in self._pool.handles or not 0 < num_slots < len(self._run):
                raise InvariantBroken(
                    f"pool {self._pool.name!r}: {num_slots} slots of the {self} are not to be had"
                )
            first = Reservation(self.owner, self._pool, self._run[:num_slots], self.after)
            self._pool.handles[first] = None
            self._run = self._run[num_slots:]
            return first

    rollback = Handle.end


class Hold(Handle):
    """The slots of one table, in token order, as kernels read them. It grows at its end and may give back its
    first slots. Values once visible never change, so a step may keep a view while the next one is
    prepared."""

    kind = "hold"
    __slots__ = ("_buffer", "_shown", "after", "num_dropped", "num_slots")

    def __init__(self, owner: str, pool: BlockPool, num_dropped: int = 0) -> None:
        """`num_dropped`: leading places that never have a slot."""
        super().__init__(owner, pool, _NO_SLOTS)
        # `num_slots` includes places without a slot
        self.num_slots = self.num_dropped = num_dropped
        self.after: tuple[Fence, ...] = ()  # fences before a write into its newly drawn slots
        self._make_room(num_dropped + _FIRST_ROOM)
        self._buffer[:num_dropped] = _NO_SLOT

    @property
    def run(self) -> Run:
        return self._shown[self.num_dropped : self.num_slots]

    def first(self, num: int) -> NDArray[np.int32]:
        """Read-only view of the first `num` places; the values of the first `num_dropped` are meaningless."""
        if not 0 <= num <= self.num_slots:
            raise InvariantBroken(f"{num} slots were asked of the {self}")
        return self._shown[:num]

    def append(self, slots: Run) -> None:
        """For the pool, which counts them as held."""
        end = self.num_slots + len(slots)
        if end > self._buffer.size:
            self._make_room(max(end, 2 * self._buffer.size), self.first(self.num_slots))
        self._buffer[self.num_slots : end] = slots
        self.num_slots = end

    def drop_first(self, num: int, fence: Fence | None = None) -> None:
        """Give back its first `num` slots. `fence` covers their last use by this hold."""
        with self._pool.lock:
            self.require_open()
            end = self.num_dropped + num
            if self not in self._pool.handles or num < 0 or end > self.num_slots:
                raise InvariantBroken(
                    f"pool {self._pool.name!r}: the first {num} slots of the {self} cannot be given back"
                )
            self._pool.give_back(
                self._pool.book.holds, self._shown[self.num_dropped : end], self.owner, fence
            )
            self.num_dropped = end

    def add_after(self, fences: tuple[Fence, ...]) -> None:
        """Slots were drawn that may not be written before `fences`."""
        if fences:
            known = [fence for fence in self.after if not fence.passed()]
            self.after = (*known, *(fence for fence in fences if all(fence is not other for other in known)))

    def _make_room(self, size: int, held: NDArray[np.int32] | None = None) -> None:
        """Steps keep views of the old array, whose content stays the same."""
        buffer = np.empty(size, np.int32)
        if held is not None:
            buffer[: held.size] = held
        shown = buffer.view()
        shown.flags.writeable = False
        self._buffer, self._shown = buffer, shown

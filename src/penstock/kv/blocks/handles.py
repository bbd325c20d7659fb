"""Handles of a pool: one per run of slots, which ends exactly once. Owns the runs, not the bookkeeping behind
them; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence
from penstock.errors import HandleEnded, InvariantBroken
from penstock.kv.blocks.slots import Run, as_list, as_run

if TYPE_CHECKING:
    from penstock.kv.blocks.pool import BlockPool

_FIRST_ROOM = 16  # initial capacity of a hold, in slots
_NO_SLOT = -1


class Handle:
    """Slots that are out on behalf of `owner`."""

    kind: ClassVar[str] = "handle"
    __slots__ = ("_lender", "_run", "ended", "owner")

    def __init__(self, owner: str, lender: BlockPool, run: Run) -> None:
        self.owner = owner
        self.ended = False
        self._lender = lender
        self._run = run

    @property
    def run(self) -> Run:
        """Its slots as the pool's books take them."""
        return self._run

    @property
    def slots(self) -> Sequence[int]:
        return as_list(self.run)

    def require_open(self) -> None:
        if self.ended:
            raise HandleEnded(f"{self} has ended")

    def __str__(self) -> str:
        return f"{self.kind} of {self.owner!r} ({len(self.run)} slots)"

    def end(self, fence: Fence | None = None) -> None:
        """Give the slots back. `fence` covers their last use, unless that is known to be over."""
        self.require_open()
        self._lender.take_back(self, fence)
        self.ended = True


class Reservation(Handle):
    """Slots taken for an operation that may still fail. Ends by `commit` or by `rollback`.

    A write into the slots comes after all fences in `after`.
    """

    kind = "reservation"
    __slots__ = ("after",)

    def __init__(self, owner: str, lender: BlockPool, run: Run, after: tuple[Fence, ...]) -> None:
        super().__init__(owner, lender, run)
        self.after = after

    def commit(self, hold: Hold) -> None:
        """The slots go to the end of `hold`."""
        self.require_open()
        self._lender.commit(self, hold)
        self.ended = True

    def split(self, num_slots: int) -> Reservation:
        """The first `num_slots` as a new reservation; this one keeps the others."""
        self.require_open()
        first = self._lender.split(self, num_slots)
        self._run = self._run[num_slots:]
        return first

    rollback = Handle.end


class Pin(Handle):
    """A transfer's protection of slots; it holds even after the requests that use them have ended."""

    kind = "pin"
    __slots__ = ()

    @property
    def array(self) -> NDArray[np.int32]:
        return np.asarray(self._run, np.int32)


class RunPin(Pin):
    """A transfer's protection of consecutive slots of one hold. Free of cost while the hold is open, since
    its slots cannot be taken. If the hold ends first, the pool books the pin slot by slot."""

    __slots__ = ("first", "hold", "num_slots")

    def __init__(self, owner: str, lender: BlockPool, hold: Hold, first: int, num_slots: int) -> None:
        super().__init__(owner, lender, [])
        self.hold = hold
        self.num_slots = num_slots
        self.first = first

    @property
    def run(self) -> Run:
        return as_run(self.array)

    @property
    def array(self) -> NDArray[np.int32]:
        return self.hold.first(self.first + self.num_slots)[self.first :]


class Hold(Handle):
    """The slots of one table, in token order, as kernels read them. It grows at its end and may give back its
    first slots. Values once visible never change, so a step may keep a view while the next one is
    prepared."""

    kind = "hold"
    __slots__ = ("_buffer", "_shown", "after", "num_dropped", "num_slots", "run_pins")

    def __init__(self, owner: str, lender: BlockPool, num_dropped: int = 0) -> None:
        """`num_dropped`: leading places that never have a slot."""
        super().__init__(owner, lender, [])
        # `num_slots` includes places without a slot
        self.num_slots = self.num_dropped = num_dropped
        self.run_pins: set[RunPin] = set()  # transfers that use some of its slots
        self.after: tuple[Fence, ...] = ()  # fences before a write into its newly drawn slots
        self._make_room(num_dropped + _FIRST_ROOM)
        self._buffer[:num_dropped] = _NO_SLOT

    @property
    def run(self) -> Run:
        return as_run(self._shown[self.num_dropped : self.num_slots])

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
        """Give back its first `num` slots, which no transfer uses. `fence` covers their last use by this
        hold."""
        self.require_open()
        self._lender.drop_first(self, num, fence)
        self.num_dropped += num

    def add_after(self, fences: tuple[Fence, ...]) -> None:
        """Slots were drawn that may not be written before `fences`."""
        if fences:
            known = [fence for fence in self.after if not fence.passed()]
            self.after = (*known, *(fence for fence in fences if all(fence is not other for other in known)))

    def _make_room(self, size: int, held: NDArray[np.int32] | None = None) -> None:
        """A launcher may read a pinned run while its table grows: it sees the old array, or the new one with
        the same content."""
        buffer = np.empty(size, np.int32)
        if held is not None:
            buffer[: held.size] = held
        shown = buffer.view()
        shown.flags.writeable = False
        self._buffer, self._shown = buffer, shown

"""What somebody in line will use is forgotten last. Owns who wants which idle blocks; among the others any policy decides.

A want protects, and never holds: where nothing else is left to forget, the want of the greatest rank is dropped, and its blocks go like any
others. Whoever has a want can see which of its blocks have gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kv.blocks.eviction.order import EvictionOrder
from penstock.kv.blocks.slots import PerSlot, Run, as_run

_NO_SLOTS = np.empty(0, np.intp)


class PoolWant:
    """Blocks that somebody will use. `rank`: among wants the one with the greatest is dropped first."""

    __slots__ = ("found", "losses", "rank", "slots")

    def __init__(self, slots: NDArray[np.intp], rank: float, losses: NDArray[np.int64]) -> None:
        self.rank = rank
        self.slots = slots
        self.found: Any = None  # the newest answer of the pool's index when it was made, most likely about these blocks
        self.losses = losses  # of these slots, when it was made

    @property
    def num_blocks(self) -> int:
        return len(self.slots)


class WantedLast:
    """An order of eviction over another one, which has the idle slots that nobody wants."""

    def __init__(self, others: EvictionOrder, num_slots: int) -> None:
        self._others = others
        self._num_wants = PerSlot("i", num_slots)
        self._aside = PerSlot("B", num_slots)  # 1: idle and wanted
        self._losses = PerSlot("q", num_slots)  # blocks that it has lost
        self._num_aside = 0
        self._wants: dict[PoolWant, None] = {}
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._others) + self._num_aside

    def __iter__(self) -> Iterator[int]:
        """Those that nobody wants first."""
        yield from self._others
        yield from np.flatnonzero(self._aside.array).tolist()

    @property
    def num_unwanted(self) -> int:
        """Idle slots that nobody wants."""
        return len(self._others)

    @property
    def num_wants(self) -> int:
        return len(self._wants)

    # ---------------------------------------------------------------------------------------------------------------- wants

    def want(self, slots: Run, idle: Run, rank: float) -> PoolWant:
        """`slots` have blocks, and those of them that are `idle` are forgotten last from now on."""
        run = np.asarray(slots, np.intp) if len(slots) else _NO_SLOTS
        want = PoolWant(run, rank, self._losses.array[run])
        self._wants[want] = None
        self._num_wants.array[run] += 1
        resting = np.asarray(idle, np.intp) if len(idle) else _NO_SLOTS
        resting = resting[self._aside.array[resting] == 0]
        if resting.size:
            self._others.remove(as_run(resting))
            self._set_aside(resting, True)
        return want

    def end(self, want: PoolWant) -> None:
        """Idempotent."""
        if want not in self._wants:
            return
        del self._wants[want]
        run = want.slots[~self.gone(want)]
        self._num_wants.array[run] -= 1
        resting = run[(self._num_wants.array[run] == 0) & (self._aside.array[run] != 0)]
        if resting.size:
            self._set_aside(resting, False)
            self._others.add(as_run(resting[::-1]))  # the deepest goes first

    def __contains__(self, want: object) -> bool:
        """Whether it protects: it has neither ended nor been dropped."""
        return want in self._wants

    def gone(self, want: PoolWant) -> NDArray[np.bool_]:
        """Which of its slots have lost their block since it was made."""
        changed: NDArray[np.bool_] = self._losses.array[want.slots] != want.losses
        return changed

    def expose(self, num: int) -> None:
        """Drop wants, the greatest rank first, until so many idle slots are wanted by nobody, or none is wanted."""
        if len(self._others) >= num:
            return
        for want in sorted(self._wants, key=lambda want: want.rank, reverse=True):
            if len(self._others) >= num or not self._num_aside:
                return
            self.num_dropped += 1
            self.end(want)

    # ------------------------------------------------------------------------------------------------------- as every order

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        self._others.sealed(slots, keys, depths)

    def hit(self, slots: Run) -> None:
        self._others.hit(slots)

    def add(self, slots: Run) -> None:
        if not self._wants:
            self._others.add(slots)
            return
        wanted, unwanted = self._num_wants.parted(slots)
        self._set_aside(wanted, True)
        if len(unwanted):
            self._others.add(unwanted)

    def remove(self, slots: Run) -> None:
        if not self._num_aside:
            self._others.remove(slots)
            return
        aside, others = self._aside.parted(slots)
        self._set_aside(aside, False)
        if len(others):
            self._others.remove(others)

    def pop(self, num: int) -> list[int]:
        self.expose(num)
        popped = self._others.pop(num)
        self.lost(popped)
        return popped

    def lost(self, slots: Sequence[int]) -> None:
        """Their blocks have gone: nobody wants what comes into these slots next."""
        for slot in slots:
            self._losses.at[slot] += 1
            self._num_wants.at[slot] = 0

    def _set_aside(self, slots: Run, aside: bool) -> None:
        if len(slots):
            self._aside.array[slots] = aside
            self._num_aside += len(slots) if aside else -len(slots)

"""The fences that travel with slots: until when a slot's earlier users may still touch it. Owns no lane and never waits.

A fence does not say where on its lane it lies, so fences are numbered as they arrive. Per slot and lane one number is kept, that of the
newest. A slot's next owner gets every fence of the lane, up to that number, that has not passed: where fences arrive in lane order the last
of them covers the others, and where they do not (a table that rested is released with the fence of a step long ago) none is lost.
"""

from __future__ import annotations

from array import array

import numpy as np

from penstock.contract import Fence
from penstock.kv.blocks.slots import Run


class LastUse:
    """By lane and slot, the newest fence of those who gave the slot back."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._arrivals = 0
        self._newest: dict[str, array[int]] = {}  # by lane: per slot the number of its newest fence; 0: none
        self._live: dict[str, dict[int, Fence]] = {}  # by lane: fences by number, in order of arrival; passed ones are dropped when met

    def note(self, slots: Run, fence: Fence | None) -> None:
        """`fence` covers the last use of `slots` by somebody who gives them back; None: that use is over already."""
        if fence is None or fence.passed():
            return
        number = self._number(fence)
        newest = self._newest[fence.lane]
        if isinstance(slots, np.ndarray):
            run = np.frombuffer(newest, np.int64)
            run[slots] = np.maximum(run[slots], number)
            return
        for slot in slots:
            if newest[slot] < number:
                newest[slot] = number

    def after(self, slots: Run) -> tuple[Fence, ...]:
        """What must have passed before `slots` are written by a new owner."""
        fences: list[Fence] = []
        for lane, live in self._live.items():
            upto = self._upto(self._newest[lane], slots) if live else 0
            if upto >= next(iter(live), upto + 1):
                self._drop_passed(live)
                fences += [fence for number, fence in live.items() if number <= upto]
        return tuple(fences)

    @staticmethod
    def _upto(newest: array[int], slots: Run) -> int:
        if isinstance(slots, np.ndarray):
            return int(np.frombuffer(newest, np.int64)[slots].max(initial=0))
        return max(map(newest.__getitem__, slots), default=0)

    def _number(self, fence: Fence) -> int:
        if fence.lane not in self._live:
            self._live[fence.lane], self._newest[fence.lane] = {}, array("q", bytes(8 * self._num_slots))
        live = self._live[fence.lane]
        for number, known in reversed(live.items()):
            if known is fence:
                return number
        self._drop_passed(live)
        self._arrivals += 1
        live[self._arrivals] = fence
        return self._arrivals

    @staticmethod
    def _drop_passed(live: dict[int, Fence]) -> None:
        for number in [number for number, fence in live.items() if fence.passed()]:
            del live[number]

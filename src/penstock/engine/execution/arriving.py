"""KV that is still being loaded when its step is launched. Owns the step's waits for it: layer by layer, or
for all layers before a replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from penstock.contract import Arrival, Load
from penstock.errors import InvariantBroken, TransferFailed
from penstock.lanes.lane import Lane


class Arriving:
    """The loads of one step. Each fence is waited for once, on the compute lane, before the first layer that
    reads what it covers."""

    def __init__(self, loads: Iterable[Load]) -> None:
        self._loads = tuple(loads)
        self._left = deque(
            sorted(
                (arrival for load in self._loads for arrival in _arrivals(load)),
                key=lambda arrival: arrival.layers,
            )
        )

    @property
    def overlaps(self) -> bool:
        """True if the step can start on its first layers before all KV has arrived."""
        return bool(self._left) and any(load.layered for load in self._loads)

    def wait_on(self, lane: Lane, end: int) -> bool:
        """Make later work on `lane` wait for layers below `end`; returns True if there was a fence to wait
        for."""
        waited = False
        while self._left and self._left[0].layers[0] < end:
            lane.wait(self._left.popleft().fence)
            waited = True
        return waited

    def check(self) -> None:
        """An op of the step after those waits. If a load failed, it fails, and with it the rest of the
        step."""
        for load in self._loads:
            if (error := load.error()) is not None:
                raise (
                    error
                    if isinstance(error, TransferFailed)
                    else TransferFailed(f"{type(error).__name__}: {error}")
                )


def _arrivals(load: Load) -> tuple[Arrival, ...]:
    if load.arrivals is None:
        raise InvariantBroken(
            "a step was planned over a promotion that is not launched: there is nothing to wait for yet"
        )
    return load.arrivals

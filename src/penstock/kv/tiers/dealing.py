"""How exchanges get onto lanes: in turn, behind what they must wait for, with the accesses they make. Owns the turns and the fences, not
what is said to the store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

from penstock.contract import Access, Fence, Mode
from penstock.errors import DeadlineExceeded, LaneClosed
from penstock.kv.tiers.exchange import StoreGroup
from penstock.kv.tiers.tally import Tally, Way
from penstock.lanes.lane import Lane


class Dealer:
    """Exchanges of one way, dealt out to lanes in turn. The `wake` of each comes behind its fence, so that whoever is woken sees it
    passed."""

    def __init__(self, lanes: Sequence[Lane], arena: tuple[str, int], way: Way, tally: Tally, wake: Callable[[], None]) -> None:
        self._lanes = lanes
        self._next = cycle(lanes)
        self._arena, num_layers = arena
        self._layers = (0, num_layers)
        self._way = way
        self._tally = tally
        self._wake = wake

    def deal(self, groups: Sequence[StoreGroup], after: Sequence[Fence], run: Callable[[StoreGroup], None], label: str) -> None:
        """Never raises: what cannot be submitted fails, and what was submitted before it keeps its slots until it is over."""
        self._tally.submitted(self._way, sum(len(group.keys) for group in groups))
        mode = Mode.WRITE if self._way is Way.READ else Mode.READ  # a read of the store writes into host memory
        behind: set[str] = set()  # lanes that wait for `after`
        for group, lane in zip(groups, self._next, strict=False):
            try:
                for fence in after if lane.name not in behind else ():
                    lane.wait(fence)
                behind.add(lane.name)
                access = Access(self._arena, group.slots, self._layers, mode)
                group.ticket = lane.submit(partial(run, group), (access,), label=label)
            except Exception as error:
                group.error = error
                self._tally.over(self._way, group.span, group.outcomes)
            self._close_group(group, lane)

    def behind_all(self, group: StoreGroup, run: Callable[[], None], label: str) -> None:
        """`run` when everything dealt out so far is over."""
        lane, *others = self._lanes
        try:
            for other in others:
                lane.wait(other.record())
            group.ticket = lane.submit(run, label=label)
        except LaneClosed as error:
            group.error = error
        self._close_group(group, lane)

    def between(self, group: StoreGroup, run: Callable[[], None], label: str) -> None:
        """As `behind_all`, and everything dealt out later comes behind it."""
        self.behind_all(group, run, label)
        if group.fence is not None:
            for other in self._lanes[1:]:
                with contextlib.suppress(LaneClosed):  # then nothing comes later
                    other.wait(group.fence)

    def _close_group(self, group: StoreGroup, lane: Lane) -> None:
        group.fence = lane.record()
        with contextlib.suppress(LaneClosed):
            lane.submit(self._wake, label="wake")


def close_lane(lane: Lane, deadline_s: float) -> DeadlineExceeded | None:
    """By then; what is late is returned."""
    try:
        lane.close(None if deadline_s == float("inf") else max(0.0, deadline_s - time.monotonic()))
    except DeadlineExceeded as late:
        return late
    return None

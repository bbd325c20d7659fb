"""What ranks add to a step: rank 0 announces it to the others before it launches it, and shares the tokens
that it has sampled. Owns which steps were announced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from penstock.contract import Access, Mode, StepPlan
from penstock.engine.execution.passes import LAST, SAMPLER, Pass, Step, StepOps
from penstock.engine.execution.sampler import SamplePlan
from penstock.errors import RankLost, TransferFailed
from penstock.lanes.lane import Ticket
from penstock.ranks.collectives import Collectives

_NO_SAMPLES = SamplePlan(np.empty(0, np.int32), True, False, False, [], None)


class Announces(Protocol):
    """The other ranks, as rank 0 sees them when it launches a step."""

    def announce(self, plan: StepPlan) -> None:
        """They launch it, too."""

    def lose(self, error: RankLost) -> None:
        """The engine cannot go on."""


class SharedTokens(Pass):
    """After the sampling: the last token of every row, and how many of its drafts were rejected, become those
    of rank 0 on every rank. The sizes are the same in every step."""

    is_late = True

    def __init__(self, together: Collectives, tensors: tuple[Tensor, ...]) -> None:
        self._together, self._tensors = together, tensors
        self._rows = np.arange(len(tensors[0]), dtype=np.int32)

    def submit(self, step: Step) -> None:
        access = Access(SAMPLER, self._rows, LAST, Mode.WRITE)
        step.ops.submit(self._share, "share tokens", [access])

    def _share(self) -> None:
        for tensor in self._tensors:
            self._together.tell(tensor)


class LedSteps(SharedTokens):
    """On rank 0. A step whose KV did not arrive is not announced: it fails here alone, before its first
    collective. Any other step that fails here has left the other ranks in the middle of it, so that none may
    follow."""

    runs_adapters = False

    def __init__(self, together: Collectives, tensors: tuple[Tensor, ...], others: Announces) -> None:
        super().__init__(together, tensors)
        self._others = others
        self._is_announced = False
        self._last: Ticket | None = None  # of the step announced last

    def begin(self, plan: StepPlan, ops: StepOps) -> None:
        try:
            ops.arriving.check()  # loads are over before a step may begin over them
        except TransferFailed:
            self._is_announced = False
            ops.submit(ops.arriving.check, "arrived")
            return
        self._is_announced = True
        if self._last is not None:
            ops.submit(_checked(self._last, self._others), "the step before")
        self._others.announce(plan)

    def submit(self, step: Step) -> None:
        super().submit(step)
        if self._is_announced:
            self._last = step.ops.newest()


def _checked(last: Ticket, others: Announces) -> Callable[[], None]:
    def check() -> None:
        error = last.error()
        if error is None:
            return
        lost = error if isinstance(error, RankLost) else RankLost(f"a step failed on rank 0: {error}")
        others.lose(lost)
        raise lost

    return check


class FollowedSteps(SharedTokens):
    """On the other ranks: they sample nothing."""

    def pack(self, step: Step) -> None:
        step.sampling = _NO_SAMPLES

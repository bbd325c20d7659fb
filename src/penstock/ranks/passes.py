"""What ranks add to a step: rank 0 announces it to the others before it launches it, and shares the tokens
that it has sampled. Owns which steps were announced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Access, Mode, StepPlan
from penstock.engine.execution.ahead import Drafts
from penstock.engine.execution.draws import DrawKind, Draws
from penstock.engine.execution.passes import LAST, SAMPLER, Pass, Step, StepOps
from penstock.engine.execution.sampler import SampleOutput, SamplePlan
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
    of rank 0 on every rank. The sizes are the same in every step. So do the samples that drafts are made
    from."""

    is_late = True

    def __init__(self, together: Collectives, tensors: tuple[Tensor, ...], makes_drafts: bool) -> None:
        self._together, self._tensors, self._makes_drafts = together, tensors, makes_drafts
        self._rows = np.arange(len(tensors[0]), dtype=np.int32)

    def submit(self, step: Step) -> None:
        access = Access(SAMPLER, self._rows, LAST, Mode.WRITE)
        step.ops.submit(partial(self._share, step), "share tokens", [access])

    def _share(self, step: Step) -> None:
        for tensor in (*self._tensors, *self._samples(step)):
            self._together.tell(tensor)

    def _samples(self, step: Step) -> tuple[Tensor, ...]:
        plan, num = step.plan, step.packed.shape.num_samples
        if not self._makes_drafts or not num or not (plan.num_ahead or not plan.is_decode):
            return ()
        made = step.outputs.made = step.outputs.made or self._room(step)
        return (made.tokens,) if made.lasts is None else (made.tokens, made.lasts)

    def _room(self, step: Step) -> SampleOutput:
        """For the samples of rank 0."""
        device, drafted = self._tensors[0].device, step.packed.drafted
        tokens = torch.empty(step.packed.shape.num_samples, dtype=torch.int32, device=device)
        if drafted is None:
            return SampleOutput(tokens)
        lasts = torch.empty(drafted.num_groups, dtype=torch.int64, device=device)
        return SampleOutput(tokens, lasts=lasts)


class LedSteps(SharedTokens):
    """On rank 0. A step whose KV did not arrive is not announced: it fails here alone, before its first
    collective. Any other step that fails here has left the other ranks in the middle of it, so that none may
    follow."""

    def __init__(
        self, together: Collectives, tensors: tuple[Tensor, ...], makes_drafts: bool, others: Announces
    ) -> None:
        super().__init__(together, tensors, makes_drafts)
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


class SharedDraws:
    """Rank 0 chooses the drafts, and tells them: the logits are there on every rank, the parameters of
    requests are not. Implements `Draws`."""

    def __init__(self, own: Draws | None, together: Collectives) -> None:
        """`own`: on rank 0."""
        self._own, self._together = own, together

    def load(self, words: NDArray[np.int32]) -> None:
        if self._own is not None:
            self._own.load(words)

    def choose(
        self, logits: Tensor, target_ids: Tensor | None, rows: Tensor, positions: Tensor, choice: DrawKind
    ) -> Tensor:
        if self._own is None:
            chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        else:
            chosen = self._own.choose(logits, target_ids, rows, positions, choice)
        self._together.tell(chosen)
        return chosen


class SharedDrafts(Drafts):
    """A pass that fails is no reason to go on without drafts: other ranks are in the middle of it."""

    def attempt(self, work: Callable[..., None], *args: object) -> None:
        work(*args)

"""Which experts the steps of an engine run tokens through, counted on the device and written to a file. Owns
the counts; `experts.routing` is the file. They are read back with the step, and no thread waits for them."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Access, Mode, StepPlan, StepResult
from penstock.engine.execution.passes import Pass, Step, StepOps, only
from penstock.engine.execution.staging import StagingRing, move
from penstock.experts.routing import RoutedStep, RoutingWriter
from penstock.lanes.lane import Lane
from penstock.models.layers import OpsAround
from penstock.models.model import Experts, LayerOps

_COUNTS = "routing counts"


class RoutingCounts:
    """Tokens of the step that runs, by layer with experts and expert."""

    def __init__(self, layers: tuple[int, ...], num_experts: int, device: torch.device) -> None:
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self.tensor = torch.zeros(len(layers), num_experts, dtype=torch.int32, device=device)

    def add(self, layer: int, ids: Tensor) -> None:
        ids = ids.flatten().long()
        self.tensor[self._row_of[layer]].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))


class RecordingOps(OpsAround):
    """Counts every choice."""

    def __init__(self, ops: LayerOps, counts: RoutingCounts) -> None:
        super().__init__(ops)
        self._counts = counts

    def choose(self, x: Tensor, experts: Experts) -> Any:
        chosen = self.ops.choose(x, experts)
        self._counts.add(experts.layer, chosen.ids)
        return chosen


class _Unread(NamedTuple):
    """Counts of a step that was launched."""

    step: int
    num_tokens: int
    counts: NDArray[np.int32]
    access: Access


class RoutingPass(Pass):
    """Brings the counts to the host. Also observes steps: what was read is written. Steps that only warm up
    are not."""

    def __init__(self, counts: RoutingCounts, writer: RoutingWriter, lane: Lane) -> None:
        self._counts, self._writer, self._lane = counts.tensor, writer, lane
        self._ring = StagingRing(counts.tensor.numel(), lane, "staged routing", counts.tensor.is_cuda)
        self._newest: _Unread | None = None
        self._unread: deque[_Unread] = deque()

    def begin(self, plan: StepPlan, ops: StepOps) -> None:
        ops.submit(self._counts.zero_, "clear routing", [only(_COUNTS, Mode.WRITE)])

    def submit(self, step: Step) -> None:
        room, array = self._ring.next()
        counts = self._counts
        accesses = [only(_COUNTS, Mode.READ), self._ring.access(Mode.WRITE)]
        step.ops.submit(lambda: move(room.view_as(counts), counts), "routing", accesses)
        self._ring.used_until(step.ops.lane.record())
        read = self._ring.access(Mode.READ)
        self._newest = _Unread(step.plan.number, step.plan.num_tokens, array.reshape(counts.shape), read)

    def step_launched(self, plan: StepPlan, at_s: float) -> None:
        assert self._newest is not None and self._newest.step == plan.number
        self._unread.append(self._newest)

    def step_read(self, result: StepResult, at_s: float) -> None:
        _, num_tokens, counts, access = self._unread.popleft()
        if result.error is not None:
            return
        self._lane.touch((access,), label="read routing")
        experts = tuple(np.flatnonzero(own) for own in counts)
        found = tuple(own[which].astype(np.int64) for own, which in zip(counts, experts, strict=True))
        self._writer.put(RoutedStep(num_tokens, experts, found))

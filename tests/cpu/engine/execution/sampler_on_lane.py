"""A sampler for tests of its arithmetic: on a lane of its own, as its state wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.contract import Request, SamplingParams, Start
from penstock.engine.execution.batch import DraftedInputs
from penstock.engine.execution.sampler import Rows, SampleOutput, SamplePlan, Sampler
from penstock.engine.execution.staging import Uploads
from penstock.lanes.cpu import CpuLane


class OnLane:
    """A sampler and the parameters of its rows. Its calls are work of its lane, one after the other."""

    def __init__(self, max_batch: int, vocab: int) -> None:
        self.rows = Rows(max_batch)
        self.lane = CpuLane("compute", around=torch.inference_mode)
        self.sampler = Sampler(max_batch, vocab, self.lane, Uploads(torch.device("cpu"), self.lane))

    def begin(
        self, row: int = 0, prompt: Sequence[int] = (1,), output: Sequence[int] = (), **how: Any
    ) -> None:
        """A request takes a row."""
        start = start_of(row, prompt, output, **how)
        self.rows.start(start)
        self.lane.submit(lambda: self.sampler.start(start), label="start").wait_done(30)

    def plan(self, index: Sequence[int], positions: Sequence[int]) -> SamplePlan:
        return self.rows.sample_plan(np.array(index, np.int32), np.array(positions, np.int32))

    def draw(
        self,
        logits: torch.Tensor,
        index: Sequence[int],
        positions: Sequence[int],
        *more: DraftedInputs | None,
    ) -> SampleOutput:
        """A token for each of the rows `index`."""
        plan = self.plan(index, positions)
        return self.sample(
            logits, index, plan, None if plan.params is None else torch.from_numpy(plan.params), *more
        )

    def sample(
        self,
        logits: torch.Tensor,
        index: Sequence[int],
        plan: SamplePlan,
        params: torch.Tensor | None,
        *more: Any,
    ) -> SampleOutput:
        found: list[SampleOutput] = []
        rows = torch.tensor(index, dtype=torch.int32)
        op = lambda: found.append(self.sampler.sample(logits, rows, plan, params, *more))  # noqa: E731
        self.lane.submit(op, label="sample").wait_done(30)
        return found[0]


def start_of(row: int, prompt: Sequence[int] = (1,), output: Sequence[int] = (), **how: Any) -> Start:
    return Start.of(row, Request("r", prompt, SamplingParams(max_tokens=9, **{"seed": 5, **how})), output)

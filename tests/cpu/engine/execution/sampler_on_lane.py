"""A sampler for tests of its arithmetic: on a lane of its own, as its state wants it."""

from __future__ import annotations

from typing import Any

import torch

from penstock.contract import Start
from penstock.engine.execution.sampler import SampleOutput, Sampler
from penstock.engine.execution.staging import Uploads
from penstock.lanes.cpu import CpuLane


class OnLane:
    """A sampler whose calls are work of its lane, one after the other."""

    def __init__(self, max_batch: int, vocab: int) -> None:
        self.lane = CpuLane("compute", around=torch.inference_mode)
        self.sampler = Sampler(max_batch, vocab, self.lane, Uploads(torch.device("cpu"), self.lane))

    def start(self, start: Start) -> None:
        self.lane.submit(lambda: self.sampler.start(start), label="start").wait_done(30)

    def sample(self, *given: Any) -> SampleOutput:
        found: list[SampleOutput] = []
        self.lane.submit(lambda: found.append(self.sampler.sample(*given)), label="sample").wait_done(30)
        return found[0]

    def forget(self) -> None:
        with torch.inference_mode():
            self.sampler._counts.zero_()

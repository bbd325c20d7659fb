"""Decode steps captured once per batch size and replayed. Owns the input buffer that all of them read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.engine.execution.batch import Packer
from penstock.engine.execution.forward import Flow, Forward
from penstock.lanes.lane import Lane, Replay


class Captured(NamedTuple):
    """A replay and where it leaves its logits."""

    replay: Replay
    flow: Flow


def cuda_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: dense where a step is latency, sparse where it is work."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    steps += range(320, max_batch + 64, 64)
    return (*(b for b in steps if b < max_batch), max_batch)


class Replays:
    """One captured decode step per bucket. Replays follow each other on one lane, so one input buffer serves them all."""

    def __init__(self, lane: Lane, forward: Forward, packer: Packer, inputs: Tensor, buckets: Sequence[int]) -> None:
        self._lane = lane
        self._forward = forward
        self._packer = packer
        self._captured: dict[int, Captured] = {}
        self.inputs = inputs
        self.buckets = tuple(sorted(buckets))

    def bucket_for(self, num_chunks: int) -> int:
        """The smallest batch size that holds the step; 0 where it has to run eagerly."""
        index = bisect_left(self.buckets, num_chunks)
        return self.buckets[index] if index < len(self.buckets) else 0

    def get(self, bucket: int) -> Captured:
        if bucket not in self._captured:
            self._captured[bucket] = self._capture(bucket)
        return self._captured[bucket]

    def _capture(self, bucket: int) -> Captured:
        """Nothing runs while a capture is open; kernels that compile or pick a plan on first use need one run before it."""
        host = np.empty(16 * bucket + 16, np.int32)
        packed = self._packer.pack((), bucket, host)
        flow = Flow(packed.shape.views(self.inputs, num_decodes=bucket, max_q_len=0, max_kv_len=0))
        ops = self._forward.ops(flow)
        if self.inputs.device.type == "cuda":
            self._lane.drain()
            ints = torch.from_numpy(packed.ints)
            self._lane.submit(lambda: self.inputs[: len(ints)].copy_(ints), label="padding").wait_done()
            for op, _, label in ops:
                self._lane.submit(op, label=label).wait_done()
        with self._lane.capture(f"decode {bucket}") as capture:
            for op, _, label in ops:
                self._lane.submit(op, label=label)
        return Captured(capture.replay, flow)

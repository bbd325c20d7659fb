"""A lane for a device: a stream on a GPU, a thread elsewhere. Owns that choice."""

from __future__ import annotations

import torch

from penstock.lanes import cuda
from penstock.lanes.cpu import CpuLane
from penstock.lanes.lane import Lane
from penstock.observe import LaneObserver


def make_lane(name: str, device: torch.device, observer: LaneObserver | None = None, priority: int = 0) -> Lane:
    if device.type == "cuda":
        return cuda.CudaLane(name, device, observer, priority)
    return CpuLane(name, observer, around=torch.inference_mode)


def make_launcher(lane: Lane, observer: LaneObserver | None = None) -> CpuLane:
    """Where transfers on `lane` are launched; a stream is its thread's for life."""
    around = lane.current if isinstance(lane, cuda.CudaLane) else torch.inference_mode
    return CpuLane(f"launch-{lane.name}", observer, around=around)

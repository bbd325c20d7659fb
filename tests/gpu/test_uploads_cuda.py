"""Lists that go to the device through pinned pieces: right beyond the end of a piece and of the ring, and
without a copy engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine.execution import staging
from penstock.engine.execution.staging import Uploads
from penstock.lanes.cuda import CudaLane

pytestmark = pytest.mark.gpu


def test_lists_of_any_length_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PIECE_INTS", 64)
    monkeypatch.setattr(staging, "_NUM_PIECES", 3)
    device = torch.device("cuda", 0)
    lane = CudaLane("compute", device)
    uploads = Uploads(device, lane)
    rng = np.random.default_rng(1)
    lists = [rng.integers(0, 150_000, num).astype(np.int32) for num in (0, 1, 63, 64, 65, 128, 1000, 7, 200)]
    sent: list[torch.Tensor] = []
    # The device is kept busy meanwhile: a piece that is refilled too early would show in what arrives.
    lane.submit(lambda: torch.cuda._sleep(100_000_000), label="busy")
    for numbers in lists:
        lane.submit(lambda numbers=numbers: sent.append(uploads.send(numbers)), label="send")  # type: ignore[misc]
    lane.drain(30.0)
    for numbers, tensor in zip(lists, sent, strict=True):
        assert tensor.dtype == torch.int64 and np.array_equal(tensor.cpu().numpy(), numbers.astype(np.int64))
    lane.close(10.0)

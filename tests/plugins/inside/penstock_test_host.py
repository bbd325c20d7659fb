"""What vLLM lacks on a CPU, and what the tests look at inside it. vLLM loads this file in its own process: it
imports nothing of the tests. Owns copies between vLLM's KV cache and its host memory, block by block."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from penstock.plugins.vllm import PenstockTier


class CopyingWorker(OffloadingWorker):
    """Copies at once: vLLM's own worker needs a GPU."""

    def __init__(self, spec: TieringOffloadingSpec, kv_caches: Any) -> None:
        self._region = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._device, self._host = [], []
        for one in kv_caches.tensors:
            flat = one.tensor.view(torch.int8).reshape(one.tensor.shape[0], -1)
            assert flat.data_ptr() == one.tensor.data_ptr(), "the cache was copied"
            assert flat.shape[1] == one.page_size_bytes, "one block is one page here"
            self._device.append(flat)
            self._host.append(self._region.create_next_worker_view(one.page_size_bytes))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def _copy(self, job_id: int, source: Any, here: Any, dest: Any, there: Any) -> bool:
        places = torch.from_numpy(here.block_ids.astype("int64"))
        slots = torch.from_numpy(there.block_ids.astype("int64"))
        assert len(places) == len(slots)
        for one, other in zip(source, dest, strict=True):
            other[slots] = one[places]
        self._finished.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Everything submitted is over."""


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return CopyingWorker(self, kv_caches)


_SECONDS: dict[str, list[float]] = {}


class TimedTier(PenstockTier):
    """Writes how long the scheduler's thread is in each call to the file that the environment names."""

    def shutdown(self) -> None:
        super().shutdown()
        if path := os.environ.get("PENSTOCK_TEST_TIMES"):
            with open(path, "w") as file:
                json.dump(_SECONDS, file)


def _timed(name: str) -> Any:
    def call(self: TimedTier, *given: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return getattr(super(TimedTier, self), name)(*given)
        finally:
            _SECONDS.setdefault(name, []).append(time.perf_counter() - began_s)

    return call


for _name in ("lookup", "touch", "submit_store", "submit_load", "get_finished_jobs", "on_schedule_end"):
    setattr(TimedTier, _name, _timed(_name))
TimedTier.__abstractmethods__ = frozenset()

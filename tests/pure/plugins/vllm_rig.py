"""The tier as vLLM's manager drives it: primary memory, requests, jobs. Owns the memory and job numbers."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.plugins.vllm_host import Configured, configured
from tests.support.fake_vllm import RECORDS, config_of

SLOT_BYTES = 4096
NUM_SLOTS = 32
SOON_S = 30.0


def vllm_key(number: int, group: int = 0) -> bytes:
    """A block hash, and the number of its KV group."""
    return number.to_bytes(32, "little") + group.to_bytes(4, "big")


def content(key: bytes) -> bytes:
    return (key * (SLOT_BYTES // len(key) + 1))[:SLOT_BYTES]


class VllmRig:
    """One scheduler. `plugin` is the module, imported beside a version of vLLM."""

    def __init__(
        self,
        plugin: Any,
        version: str,
        model: Path,
        config: Any = None,
        events: Any = False,
        **options: Any,
    ) -> None:
        self.plugin = plugin
        self.map = mmap.mmap(-1, NUM_SLOTS * SLOT_BYTES)
        self.memory = np.frombuffer(self.map, np.int8).reshape(NUM_SLOTS, SLOT_BYTES)
        self.view = memoryview(self.memory)
        self.record = RECORDS[version]
        self.config = config or config_of(model, version)
        self.results = plugin.offload.LookupResult
        events = SimpleNamespace(enable_kv_cache_events=events)
        with configured(Configured(*self.config)):
            self.tier = plugin.PenstockTier(
                offloading_spec=SimpleNamespace(extra_config={"block_size": 16}, kv_events_config=events),
                primary_kv_view=self.view,
                tier_type="PenstockTier",
                **options,
            )
        self._jobs = itertools.count()

    def job(self, keys: Sequence[bytes], slots: Sequence[int], request: Any) -> Any:
        name, fields = self.record["job"]
        ids = "chunk_ids" if "chunk_ids" in fields else "block_ids"
        return getattr(self.plugin.tiering, name)(
            job_id=next(self._jobs), keys=keys, req_context=request, **{ids: np.array(slots, np.int64)}
        )

    def finished(self, job: Any) -> Any:
        until = time.monotonic() + SOON_S
        while True:
            for result in self.tier.get_finished_jobs():
                assert result.job_id == job.job_id
                return result
            assert time.monotonic() < until, "the job never finished"

    def store(self, keys: Sequence[bytes]) -> Any:
        for slot, key in enumerate(keys):
            self.memory[slot] = np.frombuffer(content(key), np.int8)
        job = self.job(keys, range(len(keys)), request("store"))
        self.tier.submit_store(job)
        return self.finished(job)

    def load(self, keys: Sequence[bytes], name: str = "request") -> Any:
        """The result; whatever it says was loaded is compared."""
        self.memory[:] = 0
        job = self.job(keys, range(len(keys)), request(name))
        self.tier.submit_load(job)
        result = self.finished(job)
        loaded = keys if result.success else getattr(result, "successful_keys", None) or ()
        for slot, key in enumerate(keys):
            assert key not in loaded or bytes(self.memory[slot].view(np.uint8)) == content(key)
        return result

    def lookup(self, keys: Sequence[bytes], name: str = "request") -> list[Any]:
        """Step by step, as a scheduler does."""
        until = time.monotonic() + SOON_S
        while True:
            found = [self.tier.lookup(key, request(name)) for key in keys]
            if self.results.RETRY not in found:
                return found
            assert time.monotonic() < until, "the lookup was never answered"
            self.tier.on_schedule_end(None)
            assert list(self.tier.get_finished_jobs()) == []


def request(name: str) -> Any:
    return SimpleNamespace(req_id=name)

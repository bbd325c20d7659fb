"""Penstock's tier under vLLM's own manager of tiers, without a model: stores, evicts, promotes and compares
bytes. Run by the Python of an environment; also for a vLLM whose compiled part does not load there.

`drive_manager.py FOLDER URL`: prints a line for each thing that held."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import vllm
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from penstock.plugins.vllm_host import Configured, configured, register
from tests.support.fake_vllm import config_of

SLOTS, SLOT_BYTES = 8, 8192
SOON_S = 60.0
HIT, MISS = base.LookupResult.HIT, base.LookupResult.MISS


def content(key: bytes) -> bytes:
    return (key * (SLOT_BYTES // len(key) + 1))[:SLOT_BYTES]


class Driven:
    """A manager with host memory of eight slots."""

    def __init__(self, model: Path, tier: dict[str, Any]) -> None:
        sizes = (str(uuid.uuid4()), SLOTS, None, SLOT_BYTES, SLOT_BYTES)
        self.region = SharedOffloadRegion(*sizes)
        primary = CPUPrimaryTierOffloadingManager(SLOTS, self.region)
        self.memory = np.asarray(primary.get_kv_memoryview()).view(np.uint8)
        events = SimpleNamespace(enable_kv_cache_events=True)
        spec = SimpleNamespace(extra_config={}, kv_events_config=events)
        with configured(Configured(*config_of(model, vllm.__version__))):
            made = SecondaryTierFactory.create_secondary_tier(
                {"type": "PenstockTier", **tier}, primary.get_kv_memoryview(), spec
            )
        self.manager = TieringOffloadingManager(primary, [made])
        self._step()

    def store(self, keys: Sequence[bytes]) -> None:
        """As if the device had written them."""
        request = self._begin()
        prepared = self.manager.prepare_store(keys, request)
        assert prepared is not None, "host memory is pinned"
        for key, slot in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.memory[slot] = np.frombuffer(content(key), np.uint8)
        self.manager.complete_store(prepared.keys_to_store, request)
        self._end(request)

    def load(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks come; their bytes are compared."""
        request, until = self._begin(), time.monotonic() + SOON_S
        while True:
            found = []
            for key in keys:
                found.append(self.manager.lookup(key, request))
                if found[-1] is MISS:
                    break
            if set(found) <= {HIT, MISS}:
                break
            assert time.monotonic() < until, f"the lookup was never answered: {found}"
            self._step()
        num = found.count(HIT)
        if num:
            spec = self.manager.prepare_load(keys[:num], request)
            for key, slot in zip(keys, spec.block_ids, strict=False):
                assert bytes(self.memory[slot]) == content(key), "wrong bytes served"
            self.manager.complete_load(keys[:num], request)
        self._end(request)
        return num

    def wait_idle(self) -> None:
        until = time.monotonic() + SOON_S
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "a job never ended"
            self._step()

    def _begin(self) -> Any:
        request = base.ReqContext(req_id=str(uuid.uuid4()))
        self.manager.on_new_request(request)
        return request

    def _end(self, request: Any) -> None:
        self.manager.on_request_finished(request)
        self.wait_idle()

    def _step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()


def main(folder: Path, url: str) -> None:
    register()
    model = folder / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    keys = [base.make_offload_key(number.to_bytes(32, "big"), 0) for number in range(24)]
    tier = {"ssd_dir": str(folder / "kv"), "ssd_gib": 0.01, "remote": url, "remote_timeout_s": 30.0}

    one = Driven(model, tier)
    for first in range(0, 24, 4):
        one.store(keys[first : first + 4])
    assert one.load(keys[:4]) == 4
    print("evicted blocks return", vllm.__version__)
    assert one.load([keys[20], base.make_offload_key(b"x" * 32, 0)]) == 1
    print("a block that is nowhere is a miss")
    figures = one.manager.get_stats()
    assert any("penstock_blocks_written" in name for name in figures.data["data"])
    print("metrics go vLLM's way")
    told = {key for event in one.manager.take_events() for key in event.keys}
    assert told == (set(keys) if hasattr(base, "Medium") else set())
    print("events name what is on the disk")
    one.close()

    again = Driven(model, {**tier, "ssd_dir": str(folder / "other")})
    assert again.load(keys[:6]) == 6
    print("another server finds them in the store")
    again.manager.reset_cache()
    getattr(again.manager, "on_reset_flushed", lambda: None)()
    assert again.load(keys[:6]) == 0
    print("a reset hides them")
    again.close()

    other = Driven(model, {**tier, "weights_id": "other weights", "ssd_dir": str(folder / "third")})
    assert other.load(keys[:6]) == 0
    print("other weights find nothing")
    other.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

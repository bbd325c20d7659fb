"""One vLLM of `vllm_disk.py`: an engine in this process, and a tier under its host memory that is watched.
Owns the engine and the figures taken inside it. Run by vLLM's Python. A line on stdin is a question, a line
of JSON on another descriptor its answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.tiering.base import ScheduleEndContext
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from penstock.plugins.vllm import PenstockTier
from penstock.plugins.vllm_host import register

TAIL_TOKENS = 16  # after the prefix: less than what a tier keeps
ANSWER_TOKENS = 8
VOCAB = range(3, 500)
ANSWERS_FD = 3  # vLLM writes to the first two
MARK_BYTES = 32  # of a block's middle, by which it is found on the disk
SOON_S = 60.0


class Ledger:
    """What was in each block when it was stored, in a file that a killed process leaves whole."""

    def __init__(self, path: str | None) -> None:
        self.digests: dict[str, str] = {}
        self.written: set[str] = set()
        self.keeps = path is not None
        self._fd = -1 if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        if path is not None:
            for line in Path(path).read_text().splitlines():
                self._take(json.loads(line))

    def store(self, key: bytes, value: memoryview, prompt: int) -> None:
        at = len(value) // 2
        mark = bytes(value[at : at + MARK_BYTES]).hex()
        self._note({"stored": key.hex(), "digest": _digest(value), "mark": mark, "prompt": prompt})

    def write(self, key: bytes) -> None:
        self._note({"written": key.hex()})

    def is_other(self, key: bytes, value: memoryview) -> bool:
        known = self.digests.get(key.hex())
        return known is not None and known != _digest(value)

    def _note(self, entry: dict[str, Any]) -> None:
        if self.keeps:
            self._take(entry)
            os.write(self._fd, json.dumps(entry).encode() + b"\n")

    def _take(self, entry: dict[str, Any]) -> None:
        if "stored" in entry:
            self.digests.setdefault(entry["stored"], entry["digest"])
        else:
            self.written.add(entry["written"])


def _digest(value: memoryview) -> str:
    return hashlib.blake2b(value, digest_size=16).hexdigest()


class Watch:
    """Times of the scheduler's thread inside the tier, and the blocks that went through it."""

    def __init__(self, view: memoryview, ledger: Ledger) -> None:
        strides = view.strides
        assert strides is not None
        self.slot_bytes = strides[0]
        self.memory = view.cast("B")
        self.ledger = ledger
        self.prompt = 0
        self.stores: dict[int, list[bytes]] = {}  # in flight, by job
        self.loads: dict[int, list[tuple[bytes, int]]] = {}
        self.load_s = 0.0  # from a submit to the step that sees its end
        self._began_s: dict[int, float] = {}
        self.num = {"stored": 0, "loaded": 0, "other_bytes": 0}
        self._times: dict[str, list[tuple[float, int]]] = {}

    def timed(self, name: str, num_blocks: int, call: Callable[..., Any], *given: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*given)
        finally:
            self._times.setdefault(name, []).append((time.perf_counter() - began_s, num_blocks))

    def store(self, job: Any) -> None:
        self.stores[job.job_id] = list(job.keys)
        self.num["stored"] += len(self.stores[job.job_id])
        if self.ledger.keeps:
            for key, slot in zip(self.stores[job.job_id], _slots(job), strict=True):
                self.ledger.store(key, self._value(slot), self.prompt)

    def load(self, job: Any) -> None:
        self.loads[job.job_id] = list(zip(job.keys, _slots(job), strict=True))
        self._began_s[job.job_id] = time.perf_counter()

    def finish(self, results: Sequence[Any]) -> None:
        now_s = time.perf_counter()
        for result in results:
            self.load_s = max(self.load_s, now_s - self._began_s.pop(result.job_id, now_s))
            if (keys := self.stores.pop(result.job_id, None)) is not None:
                for key in keys if result.success else ():
                    self.ledger.write(key)
            for key, slot in self.loads.pop(result.job_id, ()):
                if result.success or key in (getattr(result, "successful_keys", None) or ()):
                    self.num["loaded"] += 1
                    self.num["other_bytes"] += self.ledger.is_other(key, self._value(slot))

    def _value(self, slot: int) -> memoryview:
        return self.memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def take(self) -> dict[str, Any]:
        """Since the last call: blocks, and for each method its calls, their blocks and their times."""
        taken, self._times = self._times, {}
        numbers, self.num = self.num, dict.fromkeys(self.num, 0)
        load_ms, self.load_s = 1000 * self.load_s, 0.0
        calls = {
            name: {
                "calls": len(all_of),
                "blocks": sum(num for _, num in all_of),
                "us": 1e6 * sum(seconds for seconds, _ in all_of),
                "median_us": 1e6 * statistics.median(seconds for seconds, _ in all_of),
            }
            for name, all_of in taken.items()
        }
        return {**numbers, "load_ms": load_ms, "engine_thread": calls}


def _slots(job: Any) -> list[int]:
    return [int(slot) for slot in (job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids)]


_made: list[Any] = []  # vLLM makes the tier


def watched(kind: Any) -> Any:
    class Watched(kind):  # type: ignore[misc]
        def __init__(
            self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any
        ) -> None:
            ledger = options.pop("ledger")
            super().__init__(offloading_spec, primary_kv_view, tier_type, **options)
            self.watch = Watch(primary_kv_view, Ledger(ledger))
            _made.append(self)

        def lookup(self, key: bytes, req_context: Any) -> Any:
            return self.watch.timed("lookup", 1, super().lookup, key, req_context)

        def submit_store(self, job_metadata: Any) -> None:
            self.watch.store(job_metadata)
            num = len(job_metadata.keys)
            self.watch.timed("submit_store", num, super().submit_store, job_metadata)

        def submit_load(self, job_metadata: Any) -> None:
            self.watch.load(job_metadata)
            num = len(job_metadata.keys)
            self.watch.timed("submit_load", num, super().submit_load, job_metadata)

        def get_finished_jobs(self) -> list[Any]:
            finished = super().get_finished_jobs
            results: list[Any] = self.watch.timed("get_finished_jobs", 0, lambda: list(finished()))
            self.watch.finish(results)
            return results

        def on_schedule_end(self, context: Any) -> None:
            self.watch.timed("on_schedule_end", 0, super().on_schedule_end, context)

        def shutdown(self) -> None:
            self.watch.memory.release()
            super().shutdown()

    return Watched


Penstock, FileSystem = watched(PenstockTier), watched(FileSystemTierManager)


class Copying(offload.OffloadingWorker):  # type: ignore[misc]
    """Copies between vLLM's KV cache and its host memory at once: on a CPU vLLM has no worker of its own."""

    def __init__(self, kv_caches: Any) -> None:
        tensors = [one.tensor for one in kv_caches.tensors]
        self._device = [one.view(torch.int8).reshape(one.shape[0], -1).numpy() for one in tensors]
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for rows, blocks in self._rows():
            rows[dst_spec.block_ids] = blocks[src_spec.block_ids]
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        for rows, blocks in self._rows():
            blocks[dst_spec.block_ids] = rows[src_spec.block_ids]
        return self._finish(job_id)

    def _rows(self) -> Iterator[tuple[Any, Any]]:
        """Each tensor's part of all slots, and the tensor."""
        watch: Watch = _made[0].watch
        memory = np.frombuffer(watch.memory, np.int8).reshape(-1, watch.slot_bytes)
        start = 0
        for blocks in self._device:
            yield memory[:, start : start + blocks.shape[1]], blocks
            start += blocks.shape[1]

    def _finish(self, job_id: int) -> bool:
        self._finished.append(offload.TransferResult(job_id, True, 0, 0.0))
        return True

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Everything submitted is over."""


class CopyingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> Any:
        return Copying(kv_caches)


class Host:
    """The engine and the questions that it answers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        register()
        SecondaryTierFactory.register_tier("watched", __name__, settings["tier"])
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": settings["host_bytes"],
            "secondary_tiers": [{"type": "watched", **settings["options"]}],
        }
        if settings["device"] == "cpu":
            extra |= {"spec_name": "CopyingSpec", "spec_module_path": __name__}
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(kv_transfer_config=transfer, **settings["engine"])
        )
        (self._tier,) = _made
        self._num_asked = 0

    @property
    def _watch(self) -> Watch:
        watch: Watch = self._tier.watch
        return watch

    def ready(self) -> dict[str, Any]:
        mapped = Path("/proc/self/maps").read_text().split()
        found = {word for word in mapped if word.startswith("/dev/shm/vllm_offload")}
        try:
            name = version("vllm")
        except PackageNotFoundError:
            name = __import__("vllm").__version__
        return {"vllm": name, "shared_memory": sorted(found), "block_bytes": self._watch.slot_bytes}

    def ask(self, prompt: str, tokens: str, salt: str = "") -> dict[str, Any]:
        """With a `salt` nothing is found anywhere."""
        self._watch.prompt = int(prompt)
        rng = random.Random(int(prompt))
        found = self._answer(rng.choices(VOCAB, k=int(tokens) + TAIL_TOKENS), ANSWER_TOKENS, salt)
        return {**found, **self._watch.take()}

    def burst(self, first: str, num: str, tokens: str) -> dict[str, Any]:
        return {"answers": [self.ask(str(int(first) + i), tokens) for i in range(int(num))]}

    def settle(self) -> dict[str, Any]:
        """Go on until nothing is on its way to the disk. vLLM hands blocks over in later steps."""
        quiet, until = 0, time.monotonic() + SOON_S
        while quiet < 3:
            self._answer([1, 2, 3, 4], 2, "")
            quiet = 0 if self._watch.stores or self._watch.loads else quiet + 1
            if time.monotonic() > until:
                raise SystemExit("blocks are still on their way to the disk")
        return self._watch.take()

    def present(self) -> dict[str, Any]:
        """Of the blocks that the tier once reported as written, those that it finds."""
        written = sorted(self._watch.ledger.written)
        return {"written": len(written), "found": sum(self._has(bytes.fromhex(key)) for key in written)}

    def _has(self, key: bytes) -> bool:
        self._num_asked += 1
        context, until = offload.ReqContext(req_id=f"present {self._num_asked}"), time.monotonic() + SOON_S
        while (result := self._tier.lookup(key, context)) is offload.LookupResult.RETRY:
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.0005)
            if time.monotonic() > until:
                raise SystemExit("a lookup was never answered")
        self._tier.on_request_finished(context)
        return bool(result is offload.LookupResult.HIT)

    def _answer(self, ids: list[int], num: int, salt: str) -> dict[str, Any]:
        self._num_asked += 1
        prompt = {"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})}
        params = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True, detokenize=False)
        first_s, outputs = 0.0, []
        began_s = time.perf_counter()
        self._engine.add_request(str(self._num_asked), prompt, params)
        while self._engine.has_unfinished_requests():
            if made := self._engine.step():
                first_s, outputs = first_s or time.perf_counter() - began_s, made
            else:
                time.sleep(0.001)  # as vLLM's own loop, which is not this one: threads of tiers get the GIL
        (last,) = outputs
        return {
            "ttft_ms": 1000 * first_s,
            "tokens": list(last.outputs[0].token_ids),
            "cached": last.num_cached_tokens,
        }

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(ANSWERS_FD, "w", buffering=1)
    host = Host(settings)
    print(json.dumps(host.ready()), file=answers)
    for line in sys.stdin:
        name, *words = line.split()
        print(json.dumps(getattr(host, name)(*words)), file=answers)
    with contextlib.suppress(BufferError):
        host.close()


if __name__ == "__main__":
    main()

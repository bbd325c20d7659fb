"""Penstock's disk and store as a secondary tier of vLLM's offloading connector. Owns the translation of
vLLM's keys, jobs and metrics; runs in the scheduler's process, in which nothing here may block."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import os
import time
from collections.abc import Hashable, Iterable
from importlib.metadata import version
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.tiering import base as tiering

from penstock.errors import ConfigError, DeadlineExceeded
from penstock.kv.tiers.store import Space
from penstock.plugins.events import DiskChanges
from penstock.plugins.matches import Matches
from penstock.plugins.options import TierOptions
from penstock.plugins.tiers import Finished, key_of, open_tiers
from penstock.plugins.vllm_host import (
    Configured,
    check_hashes,
    current_config,
    data_parallel_folder,
    digest_of,
    facts_of,
)

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
_DRAIN_S = 30.0
_STATS_S = 1.0  # between two reports: they copy histograms
_GROUP_BYTES = 4  # at the end of vLLM's keys: the number of the KV group

_RESULTS = {
    True: offload.LookupResult.HIT,
    False: offload.LookupResult.MISS,
    None: offload.LookupResult.RETRY,
}
_RESULT_FIELDS = {field.name for field in dataclasses.fields(tiering.JobResult)}

_COUNTERS = {
    "blocks_read": "KV blocks read, by place (ssd, remote).",
    "blocks_written": "KV blocks written, by place.",
    "blocks_damaged": "KV blocks whose bytes were damaged; they were removed and computed again, by place.",
    "blocks_skipped": "KV blocks not written, by reason (queue, full, broken).",
    "failures": "Failed calls, by place and reason.",
}
_USABLE = "vllm:penstock_usable"
_LABELS = {"blocks_skipped": ("reason",), "failures": ("place", "reason")}


class _Memory:
    """vLLM's host memory as slots of bytes."""

    def __init__(self, view: memoryview) -> None:
        strides = view.strides
        assert strides is not None
        self.slot_bytes = strides[0]
        self._bytes = view.cast("B")

    def __call__(self, slot: int) -> memoryview:
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def release(self) -> None:
        """Nothing touches a slot any more. vLLM unmaps the memory, which it cannot while views are left."""
        gc.collect()  # errors of calls may hold some
        self._bytes.release()


class PenstockTier(tiering.SecondaryTierManager):
    """One per scheduler. Not for several threads at once: vLLM holds a lock around each call."""

    medium = getattr(getattr(offload, "Medium", None), "STORAGE", None)  # since 0.28

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        # 0.32 has one, 0.28 has none
        more = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *more)
        options.pop("module_path", None)  # vLLM before 0.28 does not use it, and passes it on
        config, given = current_config(), TierOptions.of(options)
        check(config, given)
        if given.ssd_dir is not None:
            given = dataclasses.replace(
                given, ssd_dir=os.path.join(given.ssd_dir, data_parallel_folder(config))
            )
        facts = facts_of(
            config, offloading_spec.extra_config, version_of_vllm(), device_name(), given.weights_id
        )
        has_events = self.medium is not None and offloading_spec.kv_events_config.enable_kv_cache_events
        self._changes = DiskChanges() if has_events else None
        self._memory = _Memory(primary_kv_view)
        space = Space(digest_of(facts), self._memory.slot_bytes)
        try:
            self._tiers = open_tiers(given, space, self._memory, self._changes)
        except BaseException:
            self._memory.release()
            raise
        self._matches = Matches(self._tiers.tiers, given.remote_timeout_s)
        self._windowed = _windowed_groups(config)
        self._loads: dict[Hashable, Any] = {}  # vLLM's jobs
        self._stores: dict[Hashable, list[bytes]] = {}  # keys by job, where events are told
        self._epoch = b""  # part of the keys once vLLM's caches were reset
        self._told: dict[tuple[str, ...], float] = {}  # figures of the last report
        self._told_s = 0.0

    # ------------------------------------------------------------------------------------------------- asking

    def lookup(self, key: bytes, req_context: Any) -> Any:
        group = key[-_GROUP_BYTES:]
        chain = key if group in self._windowed else group  # a window may be there without what is before it
        return _RESULTS[self._matches.find(self._key(key), req_context.req_id, chain)]

    def on_new_request(self, req_context: Any) -> Any:
        return offload.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._matches.release(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._matches.ask()

    def _key(self, key: bytes) -> bytes:
        return key_of(self._epoch + key)

    # --------------------------------------------------------------------------------------------------- jobs

    def submit_store(self, job_metadata: Any) -> None:
        names = list(job_metadata.keys)
        keys = [self._key(name) for name in names]
        if self._changes is not None:
            self._changes.name(keys, names)
            self._stores[job_metadata.job_id] = keys
        self._tiers.write(job_metadata.job_id, keys, _slots_of(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        self._loads[job_metadata.job_id] = job_metadata
        keys = [self._key(name) for name in job_metadata.keys]
        self._tiers.touch(keys)
        self._tiers.read(job_metadata.job_id, keys, _slots_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        """vLLM calls it in each step, before it asks."""
        finished = self._tiers.settle()
        self._matches.take_in()
        return [self._result(one) for one in finished]

    def _result(self, finished: Finished) -> Any:
        loaded = self._loads.pop(finished.job, None)
        if self._changes is not None:
            self._changes.written(self._stores.pop(finished.job, ()))
        more: dict[str, Any] = {
            "transfer_time": finished.seconds,
            "transfer_bytes": sum(finished.done) * self._memory.slot_bytes,
        }
        if loaded is not None and not finished.whole:
            more["successful_keys"] = done = list(itertools.compress(loaded.keys, finished.done))
            lost = set(loaded.keys).difference(done)
            self._matches.give_up(loaded.req_context.req_id, map(self._key, lost))
        # what this version of vLLM does not ask for is left out: before 0.28 a load is whole or failed
        fields = {name: value for name, value in more.items() if name in _RESULT_FIELDS}
        return tiering.JobResult(job_id=finished.job, success=finished.whole, **fields)

    def take_events(self) -> Iterable[Any]:
        """What came to the disk and left it. A store that servers share is not told of."""
        changes = () if self._changes is None else self._changes.take()
        return [
            offload.OffloadingEvent(keys=[name], medium=self.medium, removed=removed)
            for name, removed in changes
        ]

    def drain_jobs(self) -> None:
        """vLLM resets its caches, for example for new weights: earlier blocks are not found any more."""
        while True:
            try:
                self._tiers.drain(_DRAIN_S)
                break
            except DeadlineExceeded:  # vLLM would use the memory: a copy in flight has to end first
                log.warning("penstock still waits for reads or writes of the KV cache to end")
        self._epoch = os.urandom(16)

    def shutdown(self) -> None:
        """Raises DeadlineExceeded while a call in flight still uses vLLM's memory."""
        self._tiers.close(_CLOSE_S)
        self._tiers.settle()
        self._memory.release()

    # ------------------------------------------------------------------------------------------------ metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        counters = {
            f"vllm:penstock_{name}": offload.OffloadingCounterMetadata(
                documentation=text, labelnames=_LABELS.get(name, ("place",))
            )
            for name, text in _COUNTERS.items()
        }
        text = "1 if the place is used, 0 while it is left alone because it failed."
        return {
            **counters,
            _USABLE: offload.OffloadingGaugeMetadata(documentation=text, labelnames=("place",)),
        }

    def get_stats(self) -> Any:
        now_s = time.monotonic()
        if now_s < self._told_s + _STATS_S:
            return None
        self._told_s = now_s
        stats, traffic = OffloadingConnectorStats(), self._tiers.traffic()
        for place, usable in traffic.usable.items():
            stats.set_gauge(_USABLE, int(usable), (place,))
        for figure, value in self._figures(traffic).items():
            if increase := value - self._told.get(figure, 0):
                stats.increase_counter(f"vllm:penstock_{figure[0]}", increase, figure[1:])
                self._told[figure] = value
        return stats

    def _figures(self, traffic: Any) -> dict[tuple[str, ...], float]:
        """Totals by name and labels."""
        found: dict[tuple[str, ...], float] = {}
        for (source, dest), num_bytes in traffic.bytes.items():
            name, place = ("blocks_written", dest) if source == "host" else ("blocks_read", source)
            found[name, place] = num_bytes // self._memory.slot_bytes
        found |= {("blocks_damaged", place): num for place, num in traffic.checksum_failures.items()}
        found |= {("blocks_skipped", reason): num for reason, num in traffic.skipped.items()}
        return found | {("failures", *where): num for where, num in traffic.failures.items()}


# -------------------------------------------------------------------------------------------------- the host


def check(config: Configured, options: TierOptions) -> None:
    """Raises ConfigError for what would find nothing, or something wrong."""
    check_hashes(config)
    if config.vllm.lora_config is not None and not options.trust_adapters:
        raise ConfigError(
            "penstock: the option trust_adapters must be true with LoRA: vLLM's keys have an adapter's name "
            "and not its content, so an adapter that changes under its name would meet KV of the old one"
        )


def version_of_vllm() -> str:
    import vllm

    return str(getattr(vllm, "__version__", None) or version("vllm"))


def device_name() -> str:
    return f"{current_platform.device_type} {current_platform.get_device_name()}"


def _windowed_groups(config: Configured) -> frozenset[bytes]:
    """Numbers of groups whose layers do not see the whole context, as they end a key."""
    return frozenset(
        number.to_bytes(_GROUP_BYTES, "big")
        for number, group in enumerate(config.kv_cache.kv_cache_groups)
        if not type(group.kv_cache_spec).__name__.endswith(("FullAttentionSpec", "MLAAttentionSpec"))
    )


def _slots_of(job: Any) -> list[int]:
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # the former in 0.32, not in 0.28
    found: list[int] = ids.tolist()
    return found

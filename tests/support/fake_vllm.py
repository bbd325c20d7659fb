"""A vLLM that is not there: modules with the interface that a version has, as recorded in tests/data, and a
configuration. Owns no behaviour of vLLM; `make plugins` has the real one."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

RECORDS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "vllm-tiers.json").read_text()
)
NEWEST, OLDEST = "0.33.0", "0.25.1"
PLUGIN = "penstock.plugins.vllm"


class Stats:
    """Takes what vLLM's own takes."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}

    def increase_counter(self, name: str, by: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.values[name, labelvalues] = self.values.get((name, labelvalues), 0) + by

    def set_gauge(self, name: str, value: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.values[name, labelvalues] = value


class Factory:
    """Of tiers and of connectors."""

    _registry: dict[str, Any] = {}  # noqa: RUF012
    made: Any = None  # what makes a connector

    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None:
        if tier_type in cls._registry:
            raise ValueError(f"Tier '{tier_type}' is already registered.")
        cls._registry[tier_type] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def create_connector(cls, config: Any, role: Any, kv_cache_config: Any) -> Any:
        return cls.made()


def _dataclass(name: str, fields: list[str]) -> type:
    """All fields may be left out, as far as these tests go."""
    return dataclasses.make_dataclass(name, [(one, Any, None) for one in fields])


def _tier_class(record: dict[str, Any]) -> type:
    takes_detector = "backpressure_detector" in record["methods"]["__init__"]

    def init(self: Any, offloading_spec: Any, primary_kv_view: Any, tier_type: str, *more: Any) -> None:
        assert len(more) <= takes_detector
        self._offloading_spec, self._primary_kv_view = offloading_spec, primary_kv_view
        self.tier_type = tier_type

    def missing(self: Any, *given: Any) -> None:
        raise AssertionError("abstract")

    body = {name: abstractmethod(missing) for name in record["abstract"]}
    return type("SecondaryTierManager", (ABC,), {"__init__": init, **body})


def _modules(version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    record = RECORDS[version]
    base: dict[str, Any] = {
        "LookupResult": enum.Enum("LookupResult", record["lookup"]),
        "RequestOffloadingContext": _dataclass("RequestOffloadingContext", []),
        "OffloadingCounterMetadata": _dataclass("OffloadingCounterMetadata", ["documentation", "labelnames"]),
        "OffloadingGaugeMetadata": _dataclass("OffloadingGaugeMetadata", ["documentation", "labelnames"]),
    }
    if record["media"]:
        base["OffloadingEvent"] = _dataclass("OffloadingEvent", ["keys", "medium", "removed", "locality"])
        base["Medium"] = enum.Enum("Medium", record["media"])
    name, fields = record["job"]
    tiering = {
        "SecondaryTierManager": _tier_class(record),
        "JobResult": _dataclass("JobResult", record["result"]),
        name: _dataclass(name, fields),
    }
    platform = SimpleNamespace(device_type="cpu", get_device_name=lambda: "cpu")
    yield "vllm", {"__version__": version}
    for parent in ("v1", "v1.core", "v1.kv_offload", "distributed", "distributed.kv_transfer"):
        yield f"vllm.{parent}", {}
    connectors = "vllm.distributed.kv_transfer.kv_connector"
    yield connectors, {}
    yield f"{connectors}.v1", {}
    yield f"{connectors}.v1.offloading", {}
    yield f"{connectors}.v1.offloading.metrics", {"OffloadingConnectorStats": Stats}
    yield f"{connectors}.factory", {"KVConnectorFactory": type("KVConnectorFactory", (Factory,), {})}
    yield "vllm.platforms", {"current_platform": platform}
    yield "vllm.v1.kv_offload.base", base
    yield "vllm.v1.kv_offload.tiering", {"base": None}
    yield "vllm.v1.kv_offload.tiering.base", tiering
    tiers = type("SecondaryTierFactory", (Factory,), {"_registry": {}})
    yield "vllm.v1.kv_offload.tiering.factory", {"SecondaryTierFactory": tiers}
    seed = {"resolve_none_hash_seed": lambda hash_fn: ""} if record["fixed_seed"] else {}
    yield "vllm.v1.core.kv_cache_utils", seed


@contextlib.contextmanager
def fake_vllm(version: str = NEWEST, hash_seed: str | None = "0") -> Iterator[ModuleType]:
    """The plug-in, imported beside this version. `hash_seed` is what PYTHONHASHSEED says."""
    modules = {}
    for name, content in _modules(version):
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, modules[name])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    with mock.patch.dict(sys.modules, modules), mock.patch.dict(os.environ, environment, clear=True):
        sys.modules.pop(PLUGIN, None)
        try:
            yield importlib.import_module(PLUGIN)
        finally:
            sys.modules.pop(PLUGIN, None)


# ---------------------------------------------------------------------------------------------- configuration


class FullAttentionSpec(SimpleNamespace):
    """A KV group in which each layer sees the whole context."""


class SlidingWindowSpec(SimpleNamespace):
    """A KV group with a window."""


def config_of(model: Path, version: str = NEWEST) -> Any:
    """A VllmConfig and a KVCacheConfig, with the attributes that the version has."""
    has = RECORDS[version]["configs"]
    values: dict[str, dict[str, Any]] = {
        "model": {
            "model": str(model),
            "hf_config": HfConfig({"hidden_size": 64, "_name_or_path": str(model)}),
            "dtype": "bfloat16",
            "quantization": None,
            "max_model_len": 4096,
            "disable_sliding_window": False,
            "seed": 0,
            "revision": None,
            "override_attention_dtype": None,
        },
        "cache": {
            "cache_dtype": "auto",
            "calculate_kv_scales": False,
            "kv_cache_layout": "NHD",
            "prefix_caching_hash_algo": "sha256",
        },
        "parallel": dict.fromkeys(has["parallel"], 1) | {"data_parallel_index": 0},
        "attention": {"backend": None},
        "load": {"load_format": "auto", "download_dir": None},
    }
    parts = {
        f"{kind}_config": SimpleNamespace(**{name: fields[name] for name in has[kind]})
        for kind, fields in values.items()
    }
    vllm = SimpleNamespace(**parts, lora_config=None, speculative_config=None, use_v2_model_runner=False)
    group = SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=FullAttentionSpec(block_size=16))
    tensor = SimpleNamespace(layers=["layers.0"], block_stride=1024, size=1 << 20)
    return vllm, SimpleNamespace(kv_cache_groups=[group], kv_cache_tensors=[tensor], num_blocks=1024)


class HfConfig:
    def __init__(self, words: dict[str, Any]) -> None:
        self.words = words

    def to_dict(self) -> dict[str, Any]:
        return self.words

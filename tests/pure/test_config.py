"""Configuration refuses what cannot work before anything starts, and names the flag."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, ServerConfig
from penstock.errors import ConfigError, UserError

GOOD: list[tuple[type, dict[str, Any]]] = [
    (ModelSource, {"load_format": "dummy", "device": "cpu", "dtype": "float32"}),
    (ModelSource, {"device": "cuda", "dtype": "bfloat16"}),
    *((KvConfig, {"block_tokens": size}) for size in (8, 16, 32, 64, 128)),
    (KvConfig, {"device_gib": 0.001}),
    (KvConfig, {"device_blocks": 2}),
    (EngineConfig, {"max_model_len": 2}),
    (EngineConfig, {"max_batch": 1}),
    (EngineConfig, {"max_batch": 4096}),
    (EngineConfig, {"prefill_chunk": 0}),
    (EngineConfig, {"overcommit": 1.0}),
    (EngineConfig, {"overcommit": 64.0}),
    (ServerConfig, {"port": 0}),
    (ServerConfig, {"port": 65535}),
    (ServerConfig, {"max_body_bytes": 1024, "max_concurrent": 1, "shutdown_s": 0.0}),
]
BAD: list[tuple[type, dict[str, Any], str]] = [
    (ModelSource, {"load_format": "gguf"}, "--load-format"),
    (ModelSource, {"device": "tpu"}, "--device"),
    (ModelSource, {"dtype": "float16"}, "--dtype"),
    (KvConfig, {"block_tokens": 0}, "--block-tokens"),
    (KvConfig, {"block_tokens": 17}, "--block-tokens"),
    (KvConfig, {"block_tokens": -16}, "--block-tokens"),
    (KvConfig, {"device_gib": 0.0}, "--device-kv-gib"),
    (KvConfig, {"device_gib": -1.0}, "--device-kv-gib"),
    (KvConfig, {"device_gib": math.nan}, "--device-kv-gib"),
    (KvConfig, {"device_gib": math.inf}, "--device-kv-gib"),
    (KvConfig, {"device_blocks": 1}, "--device-kv-blocks"),
    (KvConfig, {"device_gib": 1.0, "device_blocks": 8}, "--device-kv-gib or --device-kv-blocks"),
    (EngineConfig, {"max_model_len": 1}, "--max-model-len"),
    (EngineConfig, {"max_batch": 0}, "--max-batch"),
    (EngineConfig, {"max_batch": 4097}, "--max-batch"),
    (EngineConfig, {"prefill_chunk": -1}, "--prefill-chunk"),
    (EngineConfig, {"overcommit": 0.99}, "--overcommit"),
    (EngineConfig, {"overcommit": 65.0}, "--overcommit"),
    (EngineConfig, {"overcommit": math.nan}, "--overcommit"),
    (ServerConfig, {"port": -1}, "--port"),
    (ServerConfig, {"port": 65536}, "--port"),
    (ServerConfig, {"max_body_bytes": 1023}, "--max-body-bytes"),
    (ServerConfig, {"max_concurrent": 0}, "--max-concurrent"),
    (ServerConfig, {"shutdown_s": -0.1}, "--shutdown-s"),
    (ServerConfig, {"shutdown_s": math.nan}, "--shutdown-s"),
    (ServerConfig, {"shutdown_s": math.inf}, "--shutdown-s"),
]


@pytest.mark.parametrize(("make", "values"), GOOD)
def test_values_at_the_edge_are_taken_as_they_are(make: type, values: dict[str, Any]) -> None:
    made = make(**values)
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(("make", "values", "flag"), BAD)
def test_a_value_that_cannot_work_is_refused_and_names_its_flag(make: type, values: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**values)
    assert flag in str(refused.value) and isinstance(refused.value, UserError)
    if len(values) == 1:
        assert str(next(iter(values.values()))) in str(refused.value), "the message says what came"


@pytest.mark.parametrize("make", [ModelSource, KvConfig, EngineConfig, ServerConfig, Config])
def test_the_defaults_are_valid_and_frozen(make: type) -> None:
    made = make()
    first = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, first, None)

"""Configuration refuses what cannot work before anything starts, and names the flag.

Holds invariant 26: settings that cannot work together are refused before the start."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.config import (
    ADMISSIONS,
    DEVICE_EVICTIONS,
    EVICTIONS,
    FEWEST_RESIDENT,
    MAX_DRAFTS,
    MAX_SPANS,
    Config,
    EngineConfig,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    SanitizeConfig,
    ServerConfig,
    SpeculationConfig,
    place_of,
)
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
    (EngineConfig, {"prefill_chunk_ms": 0.0}),
    (EngineConfig, {"prefill_chunk_ms": 60_000.0}),
    (EngineConfig, {"overcommit": 1.0}),
    (EngineConfig, {"overcommit": 64.0}),
    (OffloadConfig, {"host_gib": 0.001, "eviction": "cost"}),
    (OffloadConfig, {"enabled": False, "eviction": "lru"}),
    (OffloadConfig, {"ssd_dir": "kv", "ssd_gib": 0.001, "ssd_admission": "evict"}),
    (OffloadConfig, {"remote": "valkey://localhost", "remote_timeout_s": 60.0}),
    (OffloadConfig, {"enabled": False}),
    (ServerConfig, {"port": 0}),
    (ServerConfig, {"port": 65535}),
    (ServerConfig, {"max_body_bytes": 1024, "max_concurrent": 1, "shutdown_s": 0.0}),
    (ServerConfig, {"read_timeout_s": 86400.0, "write_timeout_s": 0.001}),
    (ServerConfig, {"read_timeout_s": 0.001, "write_timeout_s": 86400.0}),
    (ServerConfig, {"shutdown_s": 86400.0}),
    (ModelSource, {"load_format": "dummy", "positions": 4096}),
    (EngineConfig, {"max_overtaken_s": 0.001, "scheduling": "fifo"}),
    (EngineConfig, {"max_overtaken_s": 3600.0}),
    (OffloadConfig, {"lease_s": 0.001, "load_deadline_s": 0.001}),
    *((OffloadConfig, {"enabled": False, "eviction": eviction}) for eviction in DEVICE_EVICTIONS),
    *((OffloadConfig, {"eviction": eviction}) for eviction in EVICTIONS),
    *((OffloadConfig, {"ssd_admission": admission}) for admission in ADMISSIONS),
    (SanitizeConfig, {"mode": "report", "json_file": "f.json", "check_bytes": True}),
    (SanitizeConfig, {"mode": "strict"}),
    (LoraConfig, {"adapters": (("a" * 128, "x"), ("B.b_c:d/e@f+g-h", "y"))}),
    (LoraConfig, {"dir": "adapters"}),
    (KvConfig, {"block_tokens": 8, "resident_tokens": FEWEST_RESIDENT * 8}),
    (KvConfig, {"residency": "scored", "pin_spans": ((0, 1),) * MAX_SPANS}),
    (SpeculationConfig, {"proposer": "ngram", "max_drafts": 1}),
    (SpeculationConfig, {"proposer": "draft:model", "max_drafts": MAX_DRAFTS}),
    (ServerConfig, {"api_processes": 0}),
    (ServerConfig, {"api_processes": 64}),
]
BAD: list[tuple[type, dict[str, Any], str]] = [
    (ModelSource, {"load_format": "gguf"}, "--load-format"),
    (ModelSource, {"device": "tpu"}, "--device"),
    (ModelSource, {"dtype": "float16"}, "--dtype"),
    (ModelSource, {"positions": 4096}, "only dummy weights"),
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
    (EngineConfig, {"prefill_chunk_ms": -1.0}, "--prefill-chunk-ms"),
    (EngineConfig, {"prefill_chunk_ms": 60_001.0}, "--prefill-chunk-ms"),
    (EngineConfig, {"prefill_chunk_ms": float("nan")}, "--prefill-chunk-ms"),
    (EngineConfig, {"overcommit": 0.99}, "--overcommit"),
    (EngineConfig, {"overcommit": 65.0}, "--overcommit"),
    (EngineConfig, {"overcommit": math.nan}, "--overcommit"),
    (OffloadConfig, {"ssd_dir": ""}, "--kv-offload-ssd-dir"),
    (OffloadConfig, {"ssd_gib": 0.0}, "--kv-offload-ssd-gib"),
    (OffloadConfig, {"ssd_gib": math.nan}, "--kv-offload-ssd-gib"),
    (OffloadConfig, {"ssd_gib": math.inf}, "--kv-offload-ssd-gib"),
    (OffloadConfig, {"ssd_admission": "never"}, "--kv-offload-ssd-admission"),
    (OffloadConfig, {"remote_timeout_s": 0.0}, "--kv-offload-remote-timeout-s"),
    (OffloadConfig, {"remote_timeout_s": 61.0}, "--kv-offload-remote-timeout-s"),
    (OffloadConfig, {"remote_timeout_s": math.nan}, "--kv-offload-remote-timeout-s"),
    (OffloadConfig, {"enabled": False, "eviction": "cost"}, "--eviction cost needs --kv-offload"),
    (OffloadConfig, {"enabled": False, "ssd_dir": "kv"}, "--kv-offload-ssd-dir needs --kv-offload"),
    (OffloadConfig, {"enabled": False, "remote": "s3://bucket"}, "--kv-offload-remote needs --kv-offload"),
    (ServerConfig, {"port": -1}, "--port"),
    (ServerConfig, {"port": 65536}, "--port"),
    (ServerConfig, {"max_body_bytes": 1023}, "--max-body-bytes"),
    (ServerConfig, {"max_concurrent": 0}, "--max-concurrent"),
    (ServerConfig, {"shutdown_s": -0.1}, "--shutdown-s"),
    (ServerConfig, {"shutdown_s": math.nan}, "--shutdown-s"),
    (ServerConfig, {"shutdown_s": math.inf}, "--shutdown-s"),
    (ServerConfig, {"shutdown_s": 86400.1}, "--shutdown-s"),
    *(
        (ServerConfig, {f"{which}_timeout_s": value}, f"--{which}-timeout-s")
        for which in ("read", "write")
        for value in (0.0, -1.0, 86400.1, math.nan, math.inf)
    ),
    *(
        (EngineConfig, {"max_overtaken_s": value}, "--max-overtaken-s")
        for value in (0.0, -1.0, 3600.1, math.nan, math.inf)
    ),
    (EngineConfig, {"scheduling": "lifo"}, "--scheduling"),
    *(
        (OffloadConfig, {"host_gib": value}, "--kv-offload-host-gib")
        for value in (0.0, -1.0, math.nan, math.inf)
    ),
    (OffloadConfig, {"enabled": False, "host_gib": 1.0}, "--kv-offload-host-gib needs --kv-offload"),
    (OffloadConfig, {"eviction": "fifo"}, "--eviction"),
    (OffloadConfig, {"lease_s": 0.0, "load_deadline_s": 1.0}, "must be positive"),
    (OffloadConfig, {"lease_s": 1.0, "load_deadline_s": 0.0}, "must be positive"),
    (SanitizeConfig, {"mode": "loud"}, "--sanitize"),
    (SanitizeConfig, {"mode": "off", "json_file": "f.json"}, "--sanitize-json needs --sanitize"),
    (SanitizeConfig, {"mode": "off", "check_bytes": True}, "--sanitize-bytes needs --sanitize"),
    (LoraConfig, {"adapters": (("", "x"),), "dir": None}, "--lora ''"),
    (LoraConfig, {"adapters": (("a" * 129, "x"),), "dir": None}, "at most 128"),
    (LoraConfig, {"adapters": (("-a", "x"),), "dir": None}, "--lora '-a'"),
    (LoraConfig, {"adapters": (("a", ""),), "dir": None}, "--lora a= names no directory"),
    (
        LoraConfig,
        {"adapters": (("a", "x"), ("b", "y"), ("a", "z")), "dir": None},
        "--lora a= is given more than once",
    ),
    (LoraConfig, {"adapters": (), "dir": ""}, "--lora-dir is empty"),
    (KvConfig, {"block_tokens": 8, "resident_tokens": FEWEST_RESIDENT * 8 - 1}, "--kv-resident-tokens"),
    (KvConfig, {"residency": "scored", "pin_spans": ((0, 1),) * (MAX_SPANS + 1)}, "--kv-pin-spans"),
    *(
        (KvConfig, {"residency": "scored", "pin_spans": (span,)}, "--kv-pin-spans")
        for span in ((-1, 1), (1, 1), (2, 1))
    ),
    (KvConfig, {"pin_spans": ((0, 1),), "residency": "exact"}, "--kv-pin-spans needs --kv-residency scored"),
    (SpeculationConfig, {"proposer": "ngram", "max_drafts": 0}, "--speculate-tokens"),
    (SpeculationConfig, {"proposer": "ngram", "max_drafts": MAX_DRAFTS + 1}, "--speculate-tokens"),
    (SpeculationConfig, {"proposer": None, "max_drafts": 1}, "--speculate-tokens needs --speculate"),
    *(
        (SpeculationConfig, {"proposer": name}, "--speculate")
        for name in ("", "ngram:x", "ngram:", "mtp:", "eagle", "eagle:x")
    ),
    *(
        (SpeculationConfig, {"proposer": name, "max_drafts": 1}, "--speculate")
        for name in ("draft", "draft:")
    ),
    (ServerConfig, {"api_processes": -1}, "--api-processes"),
    (ServerConfig, {"api_processes": 65}, "--api-processes"),
]


@pytest.mark.parametrize(("make", "values"), GOOD)
def test_values_at_the_edge_are_taken_as_they_are(make: type, values: dict[str, Any]) -> None:
    made = make(**values)
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(("make", "values", "flag"), BAD)
def test_a_value_that_cannot_work_is_refused_and_names_its_flag(
    make: type, values: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**values)
    assert flag in str(refused.value) and isinstance(refused.value, UserError)
    if len(values) == 1:
        assert str(next(iter(values.values()))) in str(refused.value), "the message says what came"


@pytest.mark.parametrize("make", [ModelSource, KvConfig, EngineConfig, OffloadConfig, ServerConfig, Config])
def test_the_defaults_are_valid_and_frozen(make: type) -> None:
    made = make()
    first = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, first, None)


def documented() -> list[tuple[str, str]]:
    """Rows of tables, made from the defaults."""
    kv, engine, offload, server = KvConfig(), EngineConfig(), OffloadConfig(), ServerConfig()
    return [
        ("serving.md", f"| `--block-tokens N` | {kv.block_tokens} |"),
        (
            "serving.md",
            f"| `--kv-offload-ssd-dir DIR`, `--kv-offload-ssd-gib X` | none, {offload.ssd_gib:g} |",
        ),
        ("serving.md", f"| `--scheduling` | `{engine.scheduling}` |"),
        ("serving.md", f"| `--max-overtaken-s S` | {engine.max_overtaken_s:g} |"),
        ("serving.md", f"| `--max-batch N` | {engine.max_batch} |"),
        ("serving.md", f"| size of a body | `--max-body-bytes` ({server.max_body_bytes >> 20} MiB) |"),
        ("serving.md", f"| `--max-concurrent` ({server.max_concurrent}) |"),
        ("serving.md", f"| `--read-timeout-s` ({server.read_timeout_s:g}) |"),
        ("serving.md", f"| `--write-timeout-s` ({server.write_timeout_s:g}) |"),
    ]


@pytest.mark.parametrize(("document", "row"), documented())
def test_a_default_is_the_one_that_the_document_says(document: str, row: str) -> None:
    assert row in (Path(__file__).parents[2] / "docs" / document).read_text()


def test_what_is_on_unless_it_is_turned_off() -> None:
    """Defaults that no table has."""
    offload, engine = OffloadConfig(), EngineConfig()
    assert (offload.enabled, offload.load_always, offload.ssd_admission, offload.eviction) == (
        True,
        False,
        "always",
        "returning",
    )
    assert (engine.overcommit, engine.capture, engine.seed, engine.prefill_chunk) == (1.0, True, 0, 0)
    assert (KvConfig().prefix_cache, ModelSource().model, ModelSource().device) == (
        True,
        "smollm2-135m",
        "auto",
    )
    assert (SanitizeConfig().mode, SanitizeConfig().check_bytes) == ("off", False)
    assert (ServerConfig().host, ServerConfig().port, ServerConfig().api_key) == ("127.0.0.1", 8000, None)
    assert not ServerConfig().allow_special_tokens_in_text and LoraConfig().dir is None
    assert (offload.load_deadline_s, offload.remote_timeout_s) == (30.0, 1.0)


# -------------------------------------------------------------------------------- URLs with passwords in them

SHOWN = {
    "valkey://localhost": "valkey://localhost",
    "valkey://:pa55word@kv.example:6379/0": "valkey://kv.example:6379",
    "valkeys://user:pa55word@[::1]:6379": "valkeys://[::1]:6379",
    "valkey://user:pa55word@a:1,b:2": "valkey://a:1,b:2",
    "valkey://user:pa55word@a:1,user:pa55word@b:2": "valkey://b:2",
    "valkey://host/?password=pa55word": "valkey://host",
    "s3://key:pa55word@bucket/folder": "s3://bucket",
    "mooncake://host:50051#pa55word": "mooncake://host:50051",
    # which part is the host cannot be told
    "valkey://user:pa55/word@host": "valkey://...",
    "valkey://user:pa55?word@host": "valkey://...",
    "valkey://pa55#word@host": "valkey://...",
    "valkey://:pa55word": "valkey://...",
    "valkey://user:pa55word": "valkey://...",
    "valkey://": "valkey://...",
    "user:pa55word@host": "...",
    "pa55 word://host": "...",
    "": "...",
}


@pytest.mark.parametrize("url", SHOWN)
def test_of_a_url_scheme_and_host_are_shown_and_never_a_password(url: str) -> None:
    assert place_of(url) == SHOWN[url]
    assert "pa55" not in place_of(url)


def test_a_config_is_shown_in_full_without_its_secret() -> None:
    config = Config(offload=OffloadConfig(remote="valkey://:pa55word@host:1"))
    shown = config.shown()
    assert shown["offload"]["remote"] == "valkey://host:1"
    assert "pa55" not in repr(config) + str(config) + repr(shown)
    shown["offload"]["remote"] = config.offload.remote
    assert shown == dataclasses.asdict(config), "nothing else is left out"
    assert Config().shown() == dataclasses.asdict(Config())


@pytest.mark.parametrize(
    "url", ["http://[", "http://host:99999", "http://host:port", "ftp://host", "http://"]
)
def test_a_collector_has_an_address(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        ServerConfig(otlp_endpoint=url)

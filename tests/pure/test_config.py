"""Configuration refuses what cannot work before anything starts, and names the flag.

Holds invariant 26: settings that cannot work together are refused before the start."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

import reference
from penstock.config import (
    DEVICE_EVICTIONS,
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
    Setting,
    SpeculationConfig,
    TraceConfig,
    place_of,
    settings_of,
)
from penstock.errors import ConfigError, UserError

CONFIGS = [type(part.default) for part in dataclasses.fields(Config)] + [ServerConfig]
RULED = [(make, one) for make in CONFIGS for one in settings_of(make) if one.rule is not None]


def edges(one: Setting) -> tuple[list[Any], list[Any]]:
    """Values that its rule just allows, and values that it just refuses."""
    step, rule = (1 if one.kind is int else 1e-6), str(one.rule)
    numbers = [float(word) if one.kind is float else int(word) for word in re.findall(r"\d+", rule)]
    if one.kind not in (int, float):
        return list(one.options["choices"]), ["", "other", f"{one.default} "]
    never = [math.nan, math.inf] if one.kind is float else []
    if rule == "positive":
        return [step, 1e9], [0.0, -step, *never]
    if rule.startswith("above 0"):
        return [step, numbers[-1]], [0, -step, numbers[-1] + step, *never]
    if rule.startswith("between"):
        low, high = numbers
        return [low, high], [low - step, high + step, *never]
    if rule.startswith("at least"):
        return [numbers[0], numbers[0] + 1], [numbers[0] - 1, -numbers[0] - 1]
    return numbers, [0, numbers[0] - 1, numbers[-1] + 1, -numbers[0]]


@pytest.mark.parametrize(("make", "one"), RULED, ids=[one.name for _, one in RULED])
def test_every_rule_holds_at_its_edges_and_a_refusal_names_flag_rule_and_value(
    make: type, one: Setting
) -> None:
    others: dict[str, Any] = {"proposer": "ngram"} if one.needs == "proposer" else {}
    allowed, refused = edges(one)
    for value in allowed:
        assert getattr(make(**{one.field: value}, **others), one.field) == value
    for value in refused:
        with pytest.raises(ConfigError) as error:
            make(**{one.field: value}, **others)
        must = "not be negative" if one.rule == "at least 0" else f"be {one.rule}"
        assert str(error.value) == f"{one.flag} must {must}, got {value!r}"
        assert isinstance(error.value, UserError)


def test_a_list_of_choices_reads_well() -> None:
    rules = {one.name: one.rule for _, one in RULED}
    assert (rules["dtype"], rules["load_format"]) == ("auto, float32 or bfloat16", "auto or dummy")
    assert (rules["sanitize"], rules["block_tokens"]) == ("report or strict", "8, 16, 32, 64 or 128")
    assert len(rules) > 30


GOOD: list[tuple[type, dict[str, Any]]] = [
    (ModelSource, {"load_format": "dummy", "positions": 4096}),
    *((OffloadConfig, {"enabled": False, "eviction": eviction}) for eviction in DEVICE_EVICTIONS),
    (OffloadConfig, {"ssd_dir": None, "ssd_gib": 0.5, "remote_timeout_s": 0.5}),  # set while it was there
    (SanitizeConfig, {"mode": "report", "json_file": "f.json", "check_bytes": True}),
    (LoraConfig, {"adapters": (("a" * 128, "x"), ("B.b_c:d/e@f+g-h", "y")), "dir": "adapters"}),
    (KvConfig, {"block_tokens": 8, "resident_tokens": FEWEST_RESIDENT * 8}),
    (KvConfig, {"residency": "scored", "pin_spans": ((0, 1),) * MAX_SPANS}),
    *((SpeculationConfig, {"proposer": name}) for name in ("ngram", "mtp", "mtp:h", "eagle:h", "draft:m")),
    (ServerConfig, {"api_key": "k", "public_metrics": True, "served_names": ("a", "b")}),
    (ServerConfig, {"cors_origins": ("*", "https://example.org:8443"), "otlp_endpoint": "http://h:4318"}),
]
BAD: list[tuple[type, dict[str, Any], str]] = [
    (ModelSource, {"positions": 4096}, "only dummy weights"),
    (KvConfig, {"device_gib": 1.0, "device_blocks": 8}, "--device-kv-gib or --device-kv-blocks"),
    (KvConfig, {"block_tokens": 8, "resident_tokens": FEWEST_RESIDENT * 8 - 1}, "--kv-resident-tokens"),
    (KvConfig, {"residency": "scored", "pin_spans": ((0, 1),) * (MAX_SPANS + 1)}, "--kv-pin-spans"),
    *(
        (KvConfig, {"residency": "scored", "pin_spans": (span,)}, "--kv-pin-spans")
        for span in ((-1, 1), (1, 1), (2, 1))
    ),
    (KvConfig, {"pin_spans": ((0, 1),), "residency": "exact"}, "--kv-pin-spans needs --kv-residency scored"),
    (OffloadConfig, {"ssd_dir": ""}, "--kv-offload-ssd-dir is empty"),
    (OffloadConfig, {"enabled": False, "eviction": "cost"}, "--eviction cost needs --kv-offload"),
    (OffloadConfig, {"enabled": False, "host_gib": 1.0}, "--kv-offload-host-gib needs --kv-offload"),
    (OffloadConfig, {"enabled": False, "ssd_dir": "kv"}, "--kv-offload-ssd-dir needs --kv-offload"),
    (OffloadConfig, {"enabled": False, "remote": "s3://bucket"}, "--kv-offload-remote needs --kv-offload"),
    (SanitizeConfig, {"json_file": "f.json"}, "--sanitize-json needs --sanitize"),
    (SanitizeConfig, {"check_bytes": True}, "--sanitize-bytes needs --sanitize"),
    (TraceConfig, {"file": "f.json", "most_mib": 0}, "--trace-mib must be positive"),
    (LoraConfig, {"adapters": (("", "x"),)}, "--lora ''"),
    (LoraConfig, {"adapters": (("a" * 129, "x"),)}, "at most 128"),
    (LoraConfig, {"adapters": (("a b", "x"),)}, "a name has letters"),
    (LoraConfig, {"adapters": (("a", ""),)}, "--lora a= names no directory"),
    (LoraConfig, {"adapters": (("a", "x"), ("b", "y"), ("a", "z"))}, "--lora a= is given more than once"),
    (LoraConfig, {"dir": ""}, "--lora-dir is empty"),
    (SpeculationConfig, {"max_drafts": 1}, "--speculate-tokens needs --speculate"),
    *(
        (SpeculationConfig, {"proposer": name}, "--speculate must be ngram, mtp")
        for name in ("", "ngram:x", "ngram:", "mtp:", "draft:", "eagle:", "eagle3:x")
    ),
    (SpeculationConfig, {"proposer": "draft"}, "--speculate draft needs a model"),
    (SpeculationConfig, {"proposer": "eagle"}, "--speculate eagle needs a directory with a head: eagle:PATH"),
    (ServerConfig, {"public_metrics": True}, "--public-metrics needs --api-key"),
    (ServerConfig, {"served_names": ("a", "a")}, "--served-model-name gives one name twice"),
    (ServerConfig, {"served_names": ("-a",)}, "--served-model-name '-a'"),
    (ServerConfig, {"cors_origins": ("example.org",)}, "--cors-origin 'example.org'"),
    *(
        (ServerConfig, {"otlp_endpoint": url}, f"--otlp-endpoint {url!r}")
        for url in (
            "http://[",
            "http://host:99999",
            "http://host:port",
            "ftp://host",
            "http://",
            "http://h?q",
        )
    ),
]


def test_values_that_go_together_are_taken_and_others_are_refused_by_their_flags() -> None:
    for make, values in GOOD:
        made = make(**values)
        assert {name: getattr(made, name) for name in values} == values
    for make, values, said in BAD:
        with pytest.raises(ConfigError) as refused:
            make(**values)
        assert said in str(refused.value)


def test_a_setting_that_is_given_needs_its_tier_even_at_its_default() -> None:
    assert OffloadConfig.of({"kv_offload_ssd_gib": 16.0, "kv_offload_ssd_dir": "kv"}).ssd_dir == "kv"
    for name, tier in (("ssd_gib", "ssd-dir"), ("ssd_admission", "ssd-dir"), ("remote_timeout_s", "remote")):
        with pytest.raises(
            ConfigError, match=f"--kv-offload-{name.replace('_', '-')} needs --kv-offload-{tier}"
        ):
            OffloadConfig.of({f"kv_offload_{name}": getattr(OffloadConfig(), name)})


@pytest.mark.parametrize("make", [*CONFIGS, Config])
def test_the_defaults_are_valid_and_frozen(make: type) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(make(), dataclasses.fields(make)[0].name, None)


def test_defaults_are_those_that_the_document_says(tmp_path: Path) -> None:
    """Of flags the generated reference; what a page repeats by hand is checked, too."""
    kv, engine, offload, server = KvConfig(), EngineConfig(), OffloadConfig(), ServerConfig()
    reference.write(tmp_path)
    defaults = dict(
        re.findall(r"^\| `(--[a-z-]+)` \| .* \| `(\S+)` \|", (tmp_path / "cli.md").read_text(), re.M)
    )
    assert {
        "--block-tokens": str(kv.block_tokens),
        "--max-body-bytes": str(server.max_body_bytes),
        "--max-concurrent": str(server.max_concurrent),
        "--read-timeout-s": f"{server.read_timeout_s:g}",
        "--write-timeout-s": f"{server.write_timeout_s:g}",
    }.items() <= defaults.items()
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "serving.md").read_text()
    assert f"| `--scheduling` | `{engine.scheduling}` |" in text
    assert f"| `--max-overtaken-s S` | {engine.max_overtaken_s:g} |" in text
    assert f"| `--max-batch N` | {engine.max_batch} |" in text
    assert f"| `--kv-offload-ssd-gib X` | {offload.ssd_gib:g} |" in (docs / "offload.md").read_text()


def test_what_is_on_unless_it_is_turned_off() -> None:
    """Defaults that no table has."""
    source, kv, engine, offload = ModelSource(), KvConfig(), EngineConfig(), OffloadConfig()
    server = ServerConfig()
    assert (offload.enabled, offload.load_always, offload.ssd_admission) == (True, False, "always")
    assert (offload.eviction, offload.load_deadline_s, offload.remote_timeout_s) == ("returning", 30.0, 1.0)
    assert (engine.overcommit, engine.capture, engine.seed, engine.prefill_chunk) == (1.0, True, 0, 0)
    assert (kv.prefix_cache, source.model, source.device) == (True, "smollm2-135m", "auto")
    assert (SanitizeConfig().mode, SanitizeConfig().check_bytes, LoraConfig().dir) == ("off", False, None)
    assert (server.host, server.port, server.api_key) == ("127.0.0.1", 8000, None)
    assert not server.allow_special_tokens_in_text
    assert (
        SpeculationConfig("ngram").drafts == 8 and SpeculationConfig("mtp:x", MAX_DRAFTS).drafts == MAX_DRAFTS
    )


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


def test_of_a_url_scheme_and_host_are_shown_and_never_a_password() -> None:
    assert {url: place_of(url) for url in SHOWN} == SHOWN
    assert not any("pa55" in shown for shown in SHOWN.values())


def test_a_config_is_shown_in_full_without_its_secret() -> None:
    config = Config(offload=OffloadConfig(remote="valkey://:pa55word@host:1"))
    shown = config.shown()
    assert shown["offload"]["remote"] == "valkey://host:1"
    assert "pa55" not in repr(config) + str(config) + repr(shown) + repr(ServerConfig(api_key="pa55word"))
    shown["offload"]["remote"] = config.offload.remote
    assert shown == dataclasses.asdict(config), "nothing else is left out"
    assert Config().shown() == dataclasses.asdict(Config())

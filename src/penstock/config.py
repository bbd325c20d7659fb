"""Frozen configuration, one dataclass per subsystem. Owns defaults, and what each flag is called, says and
takes: `penstock.flags` makes the command line from it. Owns no behaviour."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from penstock.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]
WeightsName = Literal["auto", "float32", "bfloat16", "int8", "int4"]
WEIGHT_FORMS: tuple[WeightsName, ...] = get_args(WeightsName)
EvictionName = Literal["returning", "lru", "cost"]
EVICTIONS: tuple[EvictionName, ...] = get_args(EvictionName)  # the default first
# cheap enough for the device: they work on whole runs
DEVICE_EVICTIONS: tuple[EvictionName, ...] = ("returning", "lru")
SchedulingName = Literal["cost", "fifo"]
ResidencyName = Literal["exact", "scored"]
ScorerName = Literal["qk", "lru"]
AdmissionName = Literal["always", "reuse", "evict"]
ADMISSIONS: tuple[AdmissionName, ...] = get_args(AdmissionName)
ExpertOrderName = Literal["lfu", "lru", "none"]
EXPERT_ORDERS: tuple[ExpertOrderName, ...] = get_args(ExpertOrderName)  # which experts stay on the device

# Built-in models: the one with weights, and those for dummy weights (`models.registry` has their dimensions).
EMBEDDED = "smollm2-135m"
DUMMIES = (
    *("qwen3-4b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3.5-4b", "qwen3.5-35b-a3b"),
    *("tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3.5", "tiny-llama"),
)

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")  # what clients write as `model`
_NAME_RULE = "letters, digits and ._:/@+-, at most 128, a letter or digit first"
_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?"
_HOSTS = re.compile(f"{_HOST}(?:,{_HOST})*")
_ENDPOINT = re.compile(r"tcp://(?:\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_ORIGIN = re.compile(rf"\*|[a-z][a-z0-9+.-]*://{_HOST}")

GIB = 1 << 30
# by proposer: most drafts of one request in one step
PROPOSERS = {"ngram": 8, "mtp": 4, "eagle": 4, "draft": 4}
MAX_DRAFTS = 16
MAX_SPANS = 64  # of pinned tokens
# Fewest blocks of a deep sequence on the device: blocks being computed, and blocks being saved.
FEWEST_RESIDENT = 8


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


# --------------------------------------------------------------------------------------------------- settings


class Setting(NamedTuple):
    """One field of a config, and its flag."""

    field: str
    default: Any
    kind: Any  # int, float, str, bool or tuple
    name: str  # of its flag, with underscores, as `LLM` takes it
    help: str  # empty: it has no flag
    rule: str | None  # what a value must be, in words that `_holds` knows
    needs: str | None  # a field that must be on, or this one would do nothing
    group: str | None  # of the help, if it is another than its config's
    options: Mapping[str, Any]  # of argparse's add_argument

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def check_needs(self, config: Settings) -> None:
        if self.needs is not None and getattr(config, self.needs) in (None, False, "off"):
            needed = next(one.flag for one in settings_of(type(config)) if one.field == self.needs)
            raise ConfigError(f"{self.flag} needs {needed}")


def setting(default: Any, help: str = "", repr: bool = True, **more: Any) -> Any:
    """A field with a flag, unless `help` is empty. `more`: `name`, if the flag is not called like the field;
    `rule`, `needs` and `group`; the rest is for argparse."""
    return field(default=default, repr=repr, metadata={"help": help, **more})


def _settings_of(config: type) -> tuple[Setting, ...]:
    """The fields of a config. Their types say what a flag takes; a Literal has its choices."""
    hints, found = get_type_hints(config), []
    for one in fields(config):
        more = {"name": one.name, "help": "", "rule": None, "needs": None, "group": None, **one.metadata}
        hint = hints[one.name]
        if isinstance(hint, UnionType):  # with None
            hint = get_args(hint)[0]
        if get_origin(hint) is Literal:
            *most, last = more.setdefault("choices", get_args(hint))
            more["rule"] = f"{', '.join(most)} or {last}"
        ours = {name: more.pop(name) for name in ("name", "help", "rule", "needs", "group")}
        found.append(Setting(one.name, one.default, get_origin(hint) or hint, **ours, options=more))
    return tuple(found)


settings_of: Callable[[type], tuple[Setting, ...]] = functools.cache(_settings_of)


def _holds(rule: str, value: Any) -> bool:
    match rule.split():
        case ["positive"]:
            return bool(0 < value < math.inf)
        case ["at", "least", low]:
            return bool(value >= float(low))
        case ["between", low, "and", high]:
            return bool(float(low) <= value <= float(high))
        case ["above", "0", "and", "at", "most", high]:
            return bool(0 < value <= float(high))
        case _:  # a list
            return str(value) in re.split(", | or ", rule)


class Settings:
    """A config. Refuses a value that breaks its field's rule, or one that needs another which is off."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for one in settings_of(type(self)):
            value = getattr(self, one.field)
            if value is None or value == one.default:
                continue
            if one.rule is not None and not _holds(one.rule, value):
                must = "not be negative" if one.rule == "at least 0" else f"be {one.rule}"
                raise ConfigError(f"{one.flag} must {must}, got {value!r}")
            if not one.default:  # else it may have been set for a while in which the other was on
                one.check_needs(self)
        self.check_together()

    def check_together(self) -> None:
        """Refuses values that do not go together."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From values by the names of flags; None: not given. One that needs another which is off is
        refused, even if it is the default."""
        given = [one for one in settings_of(cls) if values.get(one.name) is not None]
        made = cls(**{one.field: _value(one, values[one.name]) for one in given})
        for one in given:
            if one.default:
                one.check_needs(made)
        return made


def _value(one: Setting, given: Any) -> Any:
    if one.kind is tuple:
        return tuple(given)
    return not given if one.name.startswith("no_") else given


# ---------------------------------------------------------------------------------------------------- configs


@dataclass(frozen=True, slots=True)
class ModelSource(Settings):
    """Which weights to run, and how."""

    model: str = setting(
        EMBEDDED,
        f"a built-in name ({EMBEDDED}; for dummy weights also {', '.join(DUMMIES)}), a GGUF file, a "
        "directory with safetensors and a config, or ORG/NAME on the Hugging Face hub",
        metavar="NAME|PATH",
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "dummy: random weights, nothing is read from disk"
    )
    device: DeviceName = setting("auto", "auto: cuda where there is a usable GPU")
    # no bf16 units on most CPUs
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: float32 on the CPU, bfloat16 on CUDA"
    )
    seed: int = setting(0, "of dummy weights, and of requests that bring no seed of their own")
    # of dummy weights, if more tokens are needed than the model's config allows
    positions: int | None = None
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "auto: fields that a request leaves out are as the model's generation_config.json says; none: as "
        "docs/http-api.md says",
        group="server",
    )
    weights: WeightsName = setting(
        "auto",
        "form of matrices on the CPU; auto: what this CPU runs fastest, measured once: 8 bits, or 4 where "
        "the file has 4; float32: exact",
    )
    deterministic: bool = setting(
        False,
        "on the CPU: the same bits for the same tokens, whether they are computed or reused, alone or in a "
        "batch; prompts take longer",
    )
    download: bool = setting(
        True, "fetch nothing: a model that is not on this machine is an error", name="no_download"
    )
    # for tests: what is beyond is as if it were not there
    device_memory_gib: float | None = setting(
        None, "use so much of the GPU's memory, as if it had no more", rule="positive"
    )
    experts_in_host: bool = False  # where the device has a pool of them

    def check_together(self) -> None:
        own = f"{self.positions} positions: only dummy weights can have others than the model's own"
        _need(self.positions is None or self.load_format == "dummy", own)


def wrong_spans(spans: Sequence[tuple[int, int]]) -> str:
    """What is wrong with the spans; empty: each is (first token, token after the last)."""
    if len(spans) <= MAX_SPANS and all(0 <= first < end for first, end in spans):
        return ""
    return (
        f"pinned spans are at most {MAX_SPANS} pairs of a first token and the token after the last, "
        f"got {list(spans)[:3]}"
    )


@dataclass(frozen=True, slots=True)
class KvConfig(Settings):
    """The device arena."""

    # one block is the unit of identity and of movement
    block_tokens: int = setting(16, "tokens in one KV block", rule="8, 16, 32, 64 or 128")
    device_gib: float | None = setting(
        None,
        "GiB for KV (unset: 1 on the CPU, what weights leave free on CUDA)",
        name="device_kv_gib",
        rule="positive",
    )
    device_blocks: int | None = setting(
        None, "the same in blocks; give one of the two", name="device_kv_blocks", rule="at least 2"
    )
    prefix_cache: bool = setting(
        True,
        "reuse no KV across requests; with offload: none on the device, all from colder tiers",
        name="no_prefix_cache",
    )
    resident_tokens: int | None = setting(
        None,
        "tokens of one sequence that are on the device at most, the rest in host memory "
        "(unset: all where they fit, else half of the device)",
        name="kv_resident_tokens",
    )
    residency: ResidencyName = setting(
        "exact",
        "what a sequence that does not fit attends to while it decodes: all of its context, or what is on "
        "the device",
        name="kv_residency",
    )
    # [first, end) of each
    pin_spans: tuple[tuple[int, int], ...] = setting(
        (),
        "with scored residency: tokens A to B-1 are always on the device",
        name="kv_pin_spans",
        metavar="A-B,...",
    )
    scorer: ScorerName = setting(
        "qk", "with scored residency: which other parts are on the device", name="kv_scorer"
    )
    events: bool = False  # record which blocks are where, for the server's --kv-events

    def check_together(self) -> None:
        _need(not (wrong := wrong_spans(self.pin_spans)), f"--kv-pin-spans: {wrong}")
        _need(not self.pin_spans or self.residency == "scored", "--kv-pin-spans needs --kv-residency scored")
        both = self.device_gib is not None and self.device_blocks is not None
        _need(not both, "give --device-kv-gib or --device-kv-blocks, not both")
        fewest = FEWEST_RESIDENT * self.block_tokens
        _need(
            self.resident_tokens is None or self.resident_tokens >= fewest,
            f"--kv-resident-tokens must be at least {fewest} ({FEWEST_RESIDENT} blocks), "
            f"got {self.resident_tokens}",
        )


@dataclass(frozen=True, slots=True)
class OffloadConfig(Settings):
    """The tiers colder than the device."""

    enabled: bool = setting(True, "keep KV in host memory beyond its time on the device", name="kv_offload")
    host_gib: float | None = setting(
        None,
        "GiB of host memory for KV (unset: 4, or a quarter of what is free)",
        name="kv_offload_host_gib",
        rule="positive",
        needs="enabled",
    )
    eviction: EvictionName = setting("returning", "what a full tier forgets first")
    # how long a request in line keeps its prefix from being evicted; a backstop, not a wait
    lease_s: float = setting(120.0, rule="positive")
    load_always: bool = False  # load even if computing seems faster, to measure a tier
    # a slower promotion is abandoned; the request computes instead
    load_deadline_s: float = setting(30.0, rule="positive")
    ssd_dir: str | None = setting(
        None,
        "where KV blocks outlive the process",
        name="kv_offload_ssd_dir",
        metavar="DIR",
        needs="enabled",
    )
    # of all files together
    ssd_gib: float = setting(
        16.0, "GiB of disk at most", name="kv_offload_ssd_gib", rule="positive", needs="ssd_dir"
    )
    ssd_admission: AdmissionName = setting(
        "always",
        "which blocks are written to disk: all, those used twice, those that leave host memory",
        name="kv_offload_ssd_admission",
        needs="ssd_dir",
    )
    # may contain a password
    remote: str | None = setting(
        None,
        "a store that several engines share: valkey://, valkeys://, redis://, rediss://, mooncake://, s3://",
        name="kv_offload_remote",
        metavar="URL",
        needs="enabled",
        repr=False,
    )
    remote_timeout_s: float = setting(
        1.0,
        "seconds for one call to it; longer means that it is down",
        name="kv_offload_remote_timeout_s",
        rule="above 0 and at most 60",
        needs="remote",
    )
    states_gib: float | None = setting(
        None,
        "GiB of host memory for states that prefixes of models with recurrent layers need (unset: room "
        "for one per 8192 tokens of KV on the device and in host memory, at least 2, at most an eighth of "
        "what is free)",
        name="kv_offload_states_gib",
        rule="positive",
        needs="enabled",
    )
    state_every: int | None = setting(
        None,
        "with recurrent layers: keep a state also after every N tokens, a multiple of --block-tokens; 0: "
        "only near the end of a prompt and where prompts part (unset: 8192)",
        rule="at least 0",
        needs="enabled",
        metavar="N",
    )

    def check_together(self) -> None:
        _need(
            self.enabled or self.eviction in DEVICE_EVICTIONS,
            f"--eviction {self.eviction} needs --kv-offload: "
            f"the device supports {' or '.join(DEVICE_EVICTIONS)}",
        )
        _need(self.ssd_dir != "", "--kv-offload-ssd-dir is empty")


@dataclass(frozen=True, slots=True)
class EngineConfig(Settings):
    """How requests share steps."""

    max_model_len: int | None = setting(
        None,
        "tokens of prompt and output together (unset: all the model and memory allow; dummy weights allow "
        "any)",
        rule="at least 2",
    )
    # one row of device state each
    max_batch: int = setting(256, "requests that run at once", rule="between 1 and 4096")
    prefill_chunk: int = setting(
        0, "prompt tokens in one step at most; 0: 512 on the CPU, 8192 on CUDA", rule="at least 0"
    )
    prefill_chunk_ms: float | None = setting(
        None,
        "milliseconds that prompts may take of a step while others get tokens from it; 0: no limit (unset: "
        "on CUDA 1200 / the requests that decode, from 12 to 150; 0 on the CPU)",
        rule="between 0 and 60000",
    )
    overcommit: float = setting(
        1.0, "promise X times the KV memory; over 1 may retract requests", rule="between 1 and 64"
    )
    admission: Literal["expected", "lifetime"] = setting(
        "expected",
        "a request needs room for what it is likely to write (expected), or for all that it may (lifetime)",
    )
    scheduling: SchedulingName = setting(
        "cost",
        "which waiting request runs next: cost: the one that is cheapest to start, within a bound; fifo: "
        "the oldest",
    )
    max_overtaken_s: float = setting(
        60.0,
        "with --scheduling cost: no request is overtaken by one that arrived more than S seconds later",
        metavar="S",
        rule="above 0 and at most 3600",
    )
    capture: bool = setting(
        True, "run decode steps eagerly instead of as captured replays", name="no_capture"
    )
    seed: int = 0  # of requests without one: the flag is the model's


@dataclass(frozen=True, slots=True)
class SpeculationConfig(Settings):
    """Speculative decoding. Changes the speed of answers, never their tokens."""

    proposer: str | None = setting(
        None,
        "verify several proposed tokens in one step: ngram looks for what followed the same tokens before, "
        "mtp[:PATH] has a head that was trained for the model, eagle:PATH a published EAGLE-3 head, "
        "draft:PATH a smaller model with the same tokens (unset: one token at a time)",
        name="speculate",
        metavar="PROPOSER",
    )
    max_drafts: int | None = setting(
        None,
        "proposed tokens of one request in one step at most (unset: 8 for ngram, 4 for others)",
        name="speculate_tokens",
        rule=f"between 1 and {MAX_DRAFTS}",
        needs="proposer",
    )
    sampling: Literal["coupled", "rejection"] = setting(
        "coupled",
        "how drafts of sampled requests are verified: coupled keeps a draft that the same seed would have "
        "drawn, rejection keeps more of them if a request gives no seed",
        name="speculate_sampling",
        needs="proposer",
    )

    def check_together(self) -> None:
        if self.proposer is None:
            return
        kind, colon, path = self.proposer.partition(":")
        known = kind in PROPOSERS and not (colon and (kind == "ngram" or not path))
        must = "--speculate must be ngram, mtp, mtp:PATH, eagle:PATH or draft:PATH"
        _need(known, f"{must}, got {self.proposer!r}")
        _need(kind != "draft" or bool(path), "--speculate draft needs a model: draft:PATH")
        _need(kind != "eagle" or bool(path), "--speculate eagle needs a directory with a head: eagle:PATH")

    @property
    def kind(self) -> str | None:
        return None if self.proposer is None else self.proposer.partition(":")[0]

    @property
    def path(self) -> str | None:
        """Of a head, or of a smaller model; None: the head that comes with the embedded model."""
        return None if self.proposer is None else self.proposer.partition(":")[2] or None

    @property
    def drafts(self) -> int:
        return 0 if self.kind is None else self.max_drafts or PROPOSERS[self.kind]


@dataclass(frozen=True, slots=True)
class ExpertsConfig(Settings):
    """Experts that need not be on the device, and a record of which ones tokens run through."""

    on_device: str | None = setting(
        None,
        "keep all experts in host memory and so many of them on the device: GiB such as 8, a share such as "
        "25%%, or auto: what KV leaves, which is sized by the longest request (unset: all are on the device)",
        name="experts_on_device",
        metavar="X",
    )
    order: ExpertOrderName = setting(
        "lfu",
        "which experts stay on the device: the most used, the last used, the first that came",
        name="experts_policy",
        needs="on_device",
    )
    guesses: bool = setting(
        True,
        "copy experts only when a layer wants them, and none that the next layer is likely to want",
        name="no_experts_prefetch",
    )
    record: str | None = setting(
        None,
        "write there which experts each step runs tokens through, for bench routing; steps are not captured",
        name="record_routing",
        metavar="FILE",
    )

    def check_together(self) -> None:
        _need(self.guesses or self.on_device is not None, "--no-experts-prefetch needs --experts-on-device")
        self.wanted_bytes(1)

    def wanted_bytes(self, all_bytes: int) -> int | None:
        """Of the experts on the device, where all take `all_bytes`. None: as many as there is room for."""
        text = self.on_device
        if text is None:
            return all_bytes
        if text == "auto":
            return None
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            number = math.nan
        most = 100.0 if text.endswith("%") else math.inf
        must = "--experts-on-device must be GiB such as 8, a share such as 25%, or auto"
        _need(0 < number <= most and number < math.inf, f"{must}, got {text!r}")
        return int(all_bytes * number / 100) if text.endswith("%") else int(number * GIB)


@dataclass(frozen=True, slots=True)
class SanitizeConfig(Settings):
    """The race sanitizer, and where its findings go."""

    mode: Literal["off", "report", "strict"] = setting(
        "off",
        "check the order of every KV access; strict stops the engine at the first finding",
        name="sanitize",
        nargs="?",
        const="report",
        choices=("report", "strict"),
    )
    # the whole list each time
    json_file: str | None = setting(
        None, "write the findings there", name="sanitize_json", metavar="FILE", needs="mode"
    )
    check_bytes: bool = setting(
        False,
        "also spoil slots before they are written, and compare blocks that leave and return",
        name="sanitize_bytes",
        needs="mode",
    )


@dataclass(frozen=True, slots=True)
class TraceConfig(Settings):
    """A file in Chrome's trace format."""

    file: str | None = setting(
        None,
        "write what lanes, steps, transfers and requests do there, for ui.perfetto.dev",
        name="trace",
        metavar="FILE",
    )
    # some 150 bytes an event; a viewer in a browser takes little more
    most_mib: int = setting(
        256, "nothing is written after so many MiB", name="trace_mib", rule="positive", needs="file"
    )


@dataclass(frozen=True, slots=True)
class RanksConfig(Settings):
    """One model over several processes, each with a part of it."""

    tensor_parallel: int | None = setting(
        None,
        "divide the model among N processes, on CUDA one for each GPU (unset: 1)",
        rule="between 1 and 64",
        metavar="N",
    )
    # also how long a collective may take, such as the sum behind a layer of the longest prompt
    timeout_s: float = setting(
        30.0,
        "seconds after which a process that says nothing ends the engine",
        name="rank_timeout_s",
        rule="between 1 and 3600",
        needs="tensor_parallel",
    )

    @property
    def size(self) -> int:
        return self.tensor_parallel or 1


@dataclass(frozen=True, slots=True)
class LoraConfig(Settings):
    """Adapters in PEFT's format."""

    # name and directory of each
    adapters: tuple[tuple[str, str], ...] = setting(
        (),
        "a PEFT adapter directory; serve takes several, elsewhere answers come from it",
        name="lora",
        action="append",
        metavar="NAME=PATH",
    )
    dir: str | None = setting(
        None,
        "clients may load adapters from inside DIR (unset: they may load none)",
        name="lora_dir",
        metavar="DIR",
        group="server",
    )

    def check_together(self) -> None:
        names = [name for name, _ in self.adapters]
        for name, path in self.adapters:
            _need(ADAPTER_NAME.fullmatch(name) is not None, f"--lora {name!r}: a name has {_NAME_RULE}")
            _need(bool(path), f"--lora {name}= names no directory")
            _need(
                names.count(name) == 1,
                f"--lora {name}= is given more than once: give each adapter a name of its own",
            )
        _need(self.dir != "", "--lora-dir is empty: leave it out to keep clients from loading adapters")


@dataclass(frozen=True, slots=True)
class ServerConfig(Settings):
    """The HTTP front and its limits."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 picks a free one", rule="between 0 and 65535")
    # guards everything but /health and /live
    api_key: str | None = setting(
        None,
        "clients must send it as a bearer token (unset: $PENSTOCK_API_KEY, or none needed)",
        metavar="KEY",
        repr=False,
    )
    public_metrics: bool = setting(False, "with a key: /metrics is answered without it")
    otlp_endpoint: str | None = setting(
        None,
        "send a span for each request to this OpenTelemetry collector, by OTLP over HTTP (unset: none)",
        metavar="URL",
    )
    served_names: tuple[str, ...] = setting(
        (),
        "what clients call the model (unset: the name of its file)",
        name="served_model_name",
        nargs="+",
        metavar="NAME",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "scripts of this web origin may call; * for any; repeatable",
        name="cors_origin",
        action="append",
        metavar="ORIGIN",
    )
    # a larger body is refused with 413 before it is read to the end
    max_body_bytes: int = setting(4 << 20, "larger requests are refused", rule="at least 1024")
    # running or waiting
    max_concurrent: int = setting(256, "generations at once; more are answered 429", rule="at least 1")
    shutdown_s: float = setting(
        20.0, "seconds that running requests get at the end", rule="between 0 and 86400"
    )
    # slower clients would hold a connection and a seat
    read_timeout_s: float = setting(
        30.0, "seconds for a request's header, and again for its body", rule="above 0 and at most 86400"
    )
    # a client that reads nothing for this long is cut off, and its request cancelled
    write_timeout_s: float = setting(
        30.0, "seconds in which a client has to take some of its reply", rule="above 0 and at most 86400"
    )
    allow_special_tokens_in_text: bool = setting(
        False, "text of chat messages may spell special tokens, and open turns by that"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "json", "none"] = setting(
        "auto",
        "format in which the model writes calls of tools: hermes, llama3, mistral, json or none; auto: as "
        "its chat template says",
        metavar="NAME",
    )
    reasoning_parser: Literal["auto", "think", "none"] = setting(
        "auto",
        "think: text in <think> is reasoning_content; none: it is content; auto: think where the chat "
        "template has it",
        metavar="NAME",
    )
    api_processes: int | None = setting(
        None,
        "processes that speak HTTP, beside the engine's; 0: one does both (unset: 1 on the CPU, on CUDA 1 "
        "for 4 cores, up to 4)",
        rule="between 0 and 64",
    )
    # whoever connects sees the token ids of prompts
    kv_events: str | None = setting(
        None,
        "tell KV-aware routers there which blocks are where, in vLLM's words, over ZeroMQ: "
        "tcp://127.0.0.1:5557, or tcp://*:5557 for all addresses (unset: no events)",
        metavar="ENDPOINT",
    )
    kv_events_replay: str | None = setting(
        None,
        "repeat earlier events there to routers that ask (unset: none)",
        metavar="ENDPOINT",
        needs="kv_events",
    )
    kv_events_topic: str = setting("", "topic of the events", metavar="TOPIC", needs="kv_events")
    # without it GET / answers browsers as it answers programs
    has_viewers: bool = setting(
        True, "GET / is a page for browsers that shows what the server does", name="page"
    )
    log_format: Literal["text", "json"] = setting("text", "how lines on stderr look")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "what goes to stderr")

    def check_together(self) -> None:
        for served in self.served_names:
            _need(
                ADAPTER_NAME.fullmatch(served) is not None,
                f"--served-model-name {served!r}: a name has {_NAME_RULE}",
            )
        distinct = len(set(self.served_names)) == len(self.served_names)
        _need(distinct, "--served-model-name gives one name twice")
        for origin in self.cors_origins:
            _need(
                _ORIGIN.fullmatch(origin) is not None,
                f"--cors-origin {origin!r} must be * or like https://example.org:8443",
            )
        _need(
            self.otlp_endpoint is None or _is_collector(self.otlp_endpoint),
            f"--otlp-endpoint {self.otlp_endpoint!r} must be like http://127.0.0.1:4318",
        )
        for name, endpoint in (("", self.kv_events), ("-replay", self.kv_events_replay)):
            _need(
                endpoint is None or _is_endpoint(endpoint),
                f"--kv-events{name} {endpoint!r} must be like tcp://127.0.0.1:5557",
            )
        _need(
            self.kv_events is None or self.kv_events != self.kv_events_replay,
            "--kv-events and --kv-events-replay need ports of their own",
        )
        _need(
            not self.public_metrics or self.api_key is not None,
            "--public-metrics needs --api-key: without a key everything is public",
        )


def _is_endpoint(text: str) -> bool:
    """An address to listen on, by ZeroMQ."""
    found = _ENDPOINT.fullmatch(text)
    return found is not None and 0 < int(found[1]) < 65536


def _is_collector(url: str) -> bool:
    try:
        parts = urlsplit(url)
        web = parts.scheme in ("http", "https")
        return web and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:  # a bracket without its other, a port that is none
        return False


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that `engine.build` needs."""

    source: ModelSource = ModelSource()
    kv: KvConfig = KvConfig()
    engine: EngineConfig = EngineConfig()
    offload: OffloadConfig = OffloadConfig()
    sanitize: SanitizeConfig = SanitizeConfig()
    lora: LoraConfig = LoraConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    trace: TraceConfig = TraceConfig()
    experts: ExpertsConfig = ExpertsConfig()
    ranks: RanksConfig = RanksConfig()

    def shown(self) -> dict[str, Any]:
        """All fields, for reports. A store's URL is reduced to its scheme and host."""
        fields = asdict(self)
        if self.offload.remote is not None:
            fields["offload"]["remote"] = place_of(self.offload.remote)
        return fields


def place_of(url: str) -> str:
    """A store's URL for display: scheme and host. Leaves out the host if it is not certain which part that
    is."""
    scheme, colon, rest = url.partition("://")
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return "..."
    end = min((place for mark in "/?#" if (place := rest.find(mark)) >= 0), default=len(rest))
    host = rest[:end].rpartition("@")[2]  # a password with one of these marks has its "@" after them
    certain = "@" not in rest[end:] and _HOSTS.fullmatch(host) is not None
    return f"{scheme}://{host if certain else '...'}"

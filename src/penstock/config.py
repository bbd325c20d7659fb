"""Frozen configuration, one dataclass per subsystem; every field has a unit and a reason. Owns defaults, not
behaviour."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from penstock.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16"]
WeightsName = Literal["auto", "float32", "bfloat16", "int8", "int4"]
WEIGHT_FORMS: tuple[WeightsName, ...] = ("auto", "float32", "bfloat16", "int8", "int4")
LoadFormat = Literal["auto", "dummy"]
GenerationConfigName = Literal["auto", "none"]
SanitizeMode = Literal["off", "report", "strict"]
EvictionName = Literal["returning", "lru", "cost"]
EVICTIONS: tuple[EvictionName, ...] = ("returning", "lru", "cost")  # the default first
# cheap enough for the device: they work on whole runs
DEVICE_EVICTIONS: tuple[EvictionName, ...] = ("returning", "lru")
SchedulingName = Literal["cost", "fifo"]
SCHEDULINGS: tuple[SchedulingName, ...] = ("cost", "fifo")
PromiseName = Literal["expected", "lifetime"]
PROMISES: tuple[PromiseName, ...] = ("expected", "lifetime")
ResidencyName = Literal["exact", "scored"]
RESIDENCIES: tuple[ResidencyName, ...] = ("exact", "scored")
ScorerName = Literal["qk", "lru"]
SCORERS: tuple[ScorerName, ...] = ("qk", "lru")
AdmissionName = Literal["always", "reuse", "evict"]
ADMISSIONS: tuple[AdmissionName, ...] = ("always", "reuse", "evict")

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")  # what clients write as `model`
_NAME_RULE = "letters, digits and ._:/@+-, at most 128, a letter or digit first"
_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?"
_HOSTS = re.compile(f"{_HOST}(?:,{_HOST})*")
_ORIGIN = re.compile(rf"\*|[a-z][a-z0-9+.-]*://{_HOST}")

GIB = 1 << 30
# by proposer: most drafts of one request in one step
PROPOSERS = {"ngram": 8, "mtp": 4, "draft": 4}
MAX_DRAFTS = 16


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


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


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which weights to run, and how."""

    model: str = "smollm2-135m"  # built-in name, GGUF file, or a directory with safetensors and config.json
    # "dummy": random weights for a built-in or given config; nothing is read
    load_format: LoadFormat = "auto"
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"  # auto: float32 on CPU (no bf16 units there), bfloat16 on CUDA
    seed: int = 0  # of dummy weights
    # of dummy weights, if more tokens are needed than the model's config allows
    positions: int | None = None
    # whether generation_config.json sets defaults for fields that a request leaves out
    generation_config: GenerationConfigName = "auto"
    weights: WeightsName = "auto"  # form of matrices on the CPU; auto: the one measured as fastest
    # on the CPU: a token's logits are bitwise the same, with any reuse and in any batch
    deterministic: bool = False

    def __post_init__(self) -> None:
        _need(
            self.load_format in ("auto", "dummy"),
            f"--load-format must be auto or dummy, got {self.load_format!r}",
        )
        _need(
            self.generation_config in ("auto", "none"),
            f"--generation-config must be auto or none, got {self.generation_config!r}",
        )
        _need(
            self.device in ("auto", "cpu", "cuda"), f"--device must be auto, cpu or cuda, got {self.device!r}"
        )
        own = f"{self.positions} positions: only dummy weights can have others than the model's own"
        _need(self.positions is None or self.load_format == "dummy", own)
        _need(
            self.dtype in ("auto", "float32", "bfloat16"),
            f"--dtype must be auto, float32 or bfloat16, got {self.dtype!r}",
        )
        _need(
            self.weights in WEIGHT_FORMS,
            f"--weights must be one of {', '.join(WEIGHT_FORMS)}, got {self.weights!r}",
        )


MAX_SPANS = 64  # of pinned tokens


def wrong_spans(spans: Sequence[tuple[int, int]]) -> str:
    """What is wrong with the spans; empty: each is (first token, token after the last)."""
    if len(spans) <= MAX_SPANS and all(0 <= first < end for first, end in spans):
        return ""
    return (
        f"pinned spans are at most {MAX_SPANS} pairs of a first token and the token after the last, "
        f"got {list(spans)[:3]}"
    )


# Fewest blocks of a deep sequence on the device: blocks being computed, and blocks being saved.
FEWEST_RESIDENT = 8


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The device arena."""

    block_tokens: int = 16  # tokens per block; one block is the unit of identity and of movement
    # GiB of device memory for KV; None: 1 on CPU, on CUDA the memory that weights leave
    device_gib: float | None = None
    device_blocks: int | None = None  # the same in blocks; at most one of the two
    prefix_cache: bool = True  # reuse blocks across requests
    # Most tokens of a sequence on the device. None: all if they fit, else half of the device's KV memory.
    resident_tokens: int | None = None
    # what a sequence that does not fit attends to while it decodes: all, or the part on the device
    residency: ResidencyName = "exact"
    # with "scored": [first, end) of tokens that always stay on the device
    pin_spans: tuple[tuple[int, int], ...] = ()
    scorer: ScorerName = "qk"  # with "scored": how the other resident parts are chosen

    def __post_init__(self) -> None:
        _need(
            self.residency in RESIDENCIES,
            f"--kv-residency must be one of {', '.join(RESIDENCIES)}, got {self.residency!r}",
        )
        _need(self.scorer in SCORERS, f"--kv-scorer must be one of {', '.join(SCORERS)}, got {self.scorer!r}")
        _need(not (wrong := wrong_spans(self.pin_spans)), f"--kv-pin-spans: {wrong}")
        _need(not self.pin_spans or self.residency == "scored", "--kv-pin-spans needs --kv-residency scored")
        _need(
            self.block_tokens in (8, 16, 32, 64, 128),
            f"--block-tokens must be 8, 16, 32, 64 or 128, got {self.block_tokens}",
        )
        _need(
            self.device_gib is None or self.device_blocks is None,
            "give --device-kv-gib or --device-kv-blocks, not both",
        )
        fewest = FEWEST_RESIDENT * self.block_tokens
        some = self.resident_tokens is None or self.resident_tokens >= fewest
        _need(
            some,
            f"--kv-resident-tokens must be at least {fewest} ({FEWEST_RESIDENT} blocks), "
            f"got {self.resident_tokens}",
        )
        _need(
            self.device_gib is None or 0 < self.device_gib < math.inf,
            f"--device-kv-gib must be positive, got {self.device_gib}",
        )
        _need(
            self.device_blocks is None or self.device_blocks >= 2,
            f"--device-kv-blocks must be at least 2, got {self.device_blocks}",
        )


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The tiers colder than the device."""

    enabled: bool = True  # False: KV that leaves device memory is gone
    host_gib: float | None = None  # GiB of host memory for KV; None: 4, or less where less is free
    eviction: EvictionName = EVICTIONS[0]  # which blocks a full tier forgets first
    # how long a request in line keeps its prefix from being evicted; a backstop, not a wait
    lease_s: float = 120.0
    load_always: bool = False  # load even if computing seems faster, to measure a tier
    # a slower promotion is abandoned; the request computes instead
    load_deadline_s: float = 30.0
    ssd_dir: str | None = None  # directory for blocks that outlive the process; None: none
    ssd_gib: float = 16.0  # GiB of disk at most, all files together
    # which blocks are written to disk: all, those used twice, or those about to leave host memory
    ssd_admission: AdmissionName = "always"
    # URL of a store that several engines share; may contain a password
    remote: str | None = field(default=None, repr=False)
    remote_timeout_s: float = 1.0  # for one call; a slower store counts as down

    def __post_init__(self) -> None:
        _need(
            self.host_gib is None or 0 < self.host_gib < math.inf,
            f"--kv-offload-host-gib must be positive, got {self.host_gib}",
        )
        _need(
            self.eviction in EVICTIONS,
            f"--eviction must be one of {', '.join(EVICTIONS)}, got {self.eviction!r}",
        )
        _need(self.enabled or self.host_gib is None, "--kv-offload-host-gib needs --kv-offload")
        on_device = self.enabled or self.eviction in DEVICE_EVICTIONS
        _need(
            on_device,
            f"--eviction {self.eviction} needs --kv-offload: "
            f"the device supports {' or '.join(DEVICE_EVICTIONS)}",
        )
        _need(self.lease_s > 0 and self.load_deadline_s > 0, "lease_s and load_deadline_s must be positive")
        _need(self.ssd_dir is None or bool(self.ssd_dir), "--kv-offload-ssd-dir is empty")
        _need(self.ssd_dir is None or self.enabled, "--kv-offload-ssd-dir needs --kv-offload")
        _need(self.remote is None or self.enabled, "--kv-offload-remote needs --kv-offload")
        _need(0 < self.ssd_gib < math.inf, f"--kv-offload-ssd-gib must be positive, got {self.ssd_gib}")
        _need(
            self.ssd_admission in ADMISSIONS,
            f"--kv-offload-ssd-admission must be one of {', '.join(ADMISSIONS)}, got {self.ssd_admission!r}",
        )
        _need(
            0 < self.remote_timeout_s <= 60,
            f"--kv-offload-remote-timeout-s must be above 0 and at most 60, got {self.remote_timeout_s}",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How requests share steps."""

    # tokens of prompt plus output; None: the model's own limit, or less if KV memory is short
    max_model_len: int | None = None
    max_batch: int = 256  # requests that run at once; one row of device state each
    prefill_chunk: int = 0  # most prompt tokens computed in one step; 0: 512 on CPU, 8192 on CUDA
    overcommit: float = 1.0  # 1: promised blocks fit; 2: promises may sum to twice the memory
    # which waiting request runs next: the cheapest to start, within a bound, or the first that came
    scheduling: SchedulingName = "cost"
    max_overtaken_s: float = 60.0  # with "cost": no request is overtaken by one that arrived this much later
    capture: bool = True  # run decode steps as captured replays
    seed: int = 0  # for requests without a seed
    # room is promised for the likely length of an answer, or for its maximum
    admission: PromiseName = "expected"
    # most milliseconds of a step for prompts while other requests decode; 0: no limit; None: 150 on CUDA, 0
    # on CPU
    prefill_chunk_ms: float | None = None

    def __post_init__(self) -> None:
        _need(
            self.max_model_len is None or self.max_model_len >= 2,
            f"--max-model-len must be at least 2, got {self.max_model_len}",
        )
        _need(1 <= self.max_batch <= 4096, f"--max-batch must be between 1 and 4096, got {self.max_batch}")
        _need(self.prefill_chunk >= 0, f"--prefill-chunk must not be negative, got {self.prefill_chunk}")
        _need(
            self.scheduling in SCHEDULINGS,
            f"--scheduling must be one of {', '.join(SCHEDULINGS)}, got {self.scheduling!r}",
        )
        known = ", ".join(PROMISES)
        _need(self.admission in PROMISES, f"--admission must be one of {known}, got {self.admission!r}")
        _need(
            0 < self.max_overtaken_s <= 3600,
            f"--max-overtaken-s must be above 0 and at most 3600, got {self.max_overtaken_s}",
        )
        within = self.prefill_chunk_ms is None or 0 <= self.prefill_chunk_ms <= 60_000
        _need(within, f"--prefill-chunk-ms must be between 0 and 60000, got {self.prefill_chunk_ms}")
        _need(1.0 <= self.overcommit <= 64.0, f"--overcommit must be between 1 and 64, got {self.overcommit}")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding. Changes the speed of answers, never their tokens."""

    # "ngram", "mtp", "mtp:PATH", "draft:PATH"; None: every step decodes one token of a request
    proposer: str | None = None
    max_drafts: int | None = None  # of one request in one step; None: 8 for ngram, 4 for others

    def __post_init__(self) -> None:
        if self.proposer is None:
            _need(self.max_drafts is None, "--speculate-tokens needs --speculate")
            return
        kind, _, path = self.proposer.partition(":")
        known = (
            kind in PROPOSERS
            and (kind != "ngram" or self.proposer == kind)
            and (path or ":" not in self.proposer)
        )
        _need(bool(known), f"--speculate must be ngram, mtp, mtp:PATH or draft:PATH, got {self.proposer!r}")
        _need(kind != "draft" or bool(path), "--speculate draft needs a model: draft:PATH")
        within = self.max_drafts is None or 1 <= self.max_drafts <= MAX_DRAFTS
        _need(within, f"--speculate-tokens must be between 1 and {MAX_DRAFTS}, got {self.max_drafts}")

    @property
    def kind(self) -> str | None:
        return None if self.proposer is None else self.proposer.partition(":")[0]

    @property
    def path(self) -> str | None:
        """Of a head, or of a smaller model; None: the head that comes with the embedded model."""
        return None if self.proposer is None else self.proposer.partition(":")[2] or None

    @property
    def drafts(self) -> int:
        if self.proposer is None:
            return 0
        return self.max_drafts or PROPOSERS[self.proposer.partition(":")[0]]


@dataclass(frozen=True, slots=True)
class SanitizeConfig:
    """The race sanitizer, and where its findings go."""

    mode: SanitizeMode = "off"  # report: log and count; strict: stop the engine at the first finding
    json_file: str | None = None  # where findings are written, the whole list each time
    # also check bytes: poison slots before they are written, compare blocks that leave the device and return
    check_bytes: bool = False

    def __post_init__(self) -> None:
        _need(
            self.mode in ("off", "report", "strict"),
            f"--sanitize must be report or strict, got {self.mode!r}",
        )
        _need(self.json_file is None or self.mode != "off", "--sanitize-json needs --sanitize")
        _need(not self.check_bytes or self.mode != "off", "--sanitize-bytes needs --sanitize")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters in PEFT's format."""

    adapters: tuple[tuple[str, str], ...] = ()  # name and directory of each that is loaded at start
    dir: str | None = None  # the only directory that clients may load from; None: they may not

    def __post_init__(self) -> None:
        names = [name for name, _ in self.adapters]
        for name, path in self.adapters:
            _need(ADAPTER_NAME.fullmatch(name) is not None, f"--lora {name!r}: a name has {_NAME_RULE}")
            _need(bool(path), f"--lora {name}= names no directory")
            _need(
                names.count(name) == 1,
                f"--lora {name}= is given more than once: give each adapter a name of its own",
            )
        _need(
            self.dir is None or bool(self.dir),
            "--lora-dir is empty: leave it out to keep clients from loading adapters",
        )


ToolCallParser = Literal["auto", "hermes", "llama3", "mistral", "json", "none"]
ReasoningParser = Literal["auto", "think", "none"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front and its limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)  # guards everything but /health and /live
    max_body_bytes: int = 4 << 20  # a larger body is refused with 413 before it is read to the end
    max_concurrent: int = 256  # generations admitted at once, running or waiting; one more is answered 429
    shutdown_s: float = 20.0  # how long running requests may take to finish when the server stops
    # for a request's header, and again for its body; slower clients would hold a connection and a seat
    read_timeout_s: float = 30.0
    # a client that reads nothing for this long is cut off, and its request cancelled
    write_timeout_s: float = 30.0
    # whether messages of a chat may spell special tokens and so open turns of their own
    allow_special_tokens_in_text: bool = False
    # what clients call the model; empty: the name that it was loaded under
    served_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()  # web pages whose scripts may call; "*": any
    public_metrics: bool = False  # whether /metrics is answered without the key
    otlp_endpoint: str | None = None  # where spans of requests are sent, by OTLP over HTTP; None: nowhere
    # the format in which the model writes calls of tools; auto: its chat template says
    tool_call_parser: ToolCallParser = "auto"
    # whether <think>...</think> is reasoning; auto: where the chat template has it
    reasoning_parser: ReasoningParser = "auto"
    # HTTP processes beside the engine's; 0: one process does both; None: 1 on CPU, up to 4 on CUDA
    api_processes: int | None = None

    def __post_init__(self) -> None:
        _need(0 <= self.port <= 65535, f"--port must be between 0 and 65535, got {self.port}")
        _need(
            self.max_body_bytes >= 1024, f"--max-body-bytes must be at least 1024, got {self.max_body_bytes}"
        )
        _need(self.max_concurrent >= 1, f"--max-concurrent must be at least 1, got {self.max_concurrent}")
        _need(
            0 <= self.shutdown_s <= 86400, f"--shutdown-s must be between 0 and 86400, got {self.shutdown_s}"
        )
        for served in self.served_names:
            _need(
                ADAPTER_NAME.fullmatch(served) is not None,
                f"--served-model-name {served!r}: a name has {_NAME_RULE}",
            )
        _need(
            len(set(self.served_names)) == len(self.served_names), "--served-model-name gives one name twice"
        )
        for origin in self.cors_origins:
            _need(
                _ORIGIN.fullmatch(origin) is not None,
                f"--cors-origin {origin!r} must be * or like https://example.org:8443",
            )
        if self.otlp_endpoint is not None:
            try:
                url = urlsplit(self.otlp_endpoint)
                right = (
                    url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and not url.query
                )
            except ValueError:  # a bracket without its other, a port that is none
                right = False
            _need(right, f"--otlp-endpoint {self.otlp_endpoint!r} must be like http://127.0.0.1:4318")
        _need(
            not self.public_metrics or self.api_key is not None,
            "--public-metrics needs --api-key: without a key everything is public",
        )
        within = self.api_processes is None or 0 <= self.api_processes <= 64
        _need(within, f"--api-processes must be between 0 and 64, got {self.api_processes}")
        parsers = get_args(ToolCallParser)
        _need(
            self.tool_call_parser in parsers,
            f"--tool-call-parser must be one of {', '.join(parsers)}, got {self.tool_call_parser}",
        )
        thinking = get_args(ReasoningParser)
        _need(
            self.reasoning_parser in thinking,
            f"--reasoning-parser must be one of {', '.join(thinking)}, got {self.reasoning_parser}",
        )
        for name, value in (("read", self.read_timeout_s), ("write", self.write_timeout_s)):
            _need(0 < value <= 86400, f"--{name}-timeout-s must be above 0 and at most 86400, got {value}")


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

    def shown(self) -> dict[str, Any]:
        """All fields, for reports. A store's URL is reduced to its scheme and host."""
        fields = asdict(self)
        if self.offload.remote is not None:
            fields["offload"]["remote"] = place_of(self.offload.remote)
        return fields

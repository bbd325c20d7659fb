"""`penstock doctor`: can this machine run Penstock, and if not, what to do? Owns the checks; changes
nothing."""

from __future__ import annotations

import enum
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.bench.report import describe_machine, device_of, installed_version
from penstock.config import GIB, Config, DeviceName, KvConfig, ModelSource
from penstock.engine.execution.threads import threads_by_load
from penstock.errors import ConfigError, ModelError
from penstock.kv.memory import ITEM_BYTES, BlockLayout
from penstock.lanes.cuda import describe_gpus
from penstock.models import embedded
from penstock.models.form_choice import ROWS, cpu_name, kept_measurement, pinned_forms, wanted
from penstock.models.forms import Forms
from penstock.models.loader import ModelFacts, inspect_model
from penstock.models.model import ModelConfig
from penstock.models.registry import BUILT_IN
from penstock.models.registry import layout as weights_of

LOW_MEMORY_GIB = 2.0  # the embedded model and its KV take about that much
OLDEST_PYTHON = (3, 11)
OPTIONAL = {
    "gguf": "GGUF files, the embedded model among them: pip install gguf",
    "starlette": "penstock serve: pip install 'penstock[server]'",
    "uvicorn": "penstock serve: pip install 'penstock[server]'",
    "msgspec": "penstock serve: pip install 'penstock[server]'",
    "prometheus_client": "/metrics of penstock serve: pip install 'penstock[server]'",
    "matplotlib": "penstock bench --plot: pip install 'penstock[plots]'",
    "penstock_valkey": "--kv-offload-remote valkey://: pip install 'penstock[valkey]'",
    "penstock_s3": "--kv-offload-remote s3://: pip install 'penstock[s3]'",
}


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. A hint says what to do about one that is not ok."""

    name: str
    status: Status
    detail: str
    hint: str = ""


def doctor(config: Config, json_file: Path | None) -> int:
    checks = list(_checks(config))
    try:
        if json_file is not None:
            found = {"machine": describe_machine(), "checks": [asdict(check) for check in checks]}
            json_file.write_text(json.dumps(found, indent=2) + "\n")
    finally:
        Console().print(_table(checks))
    return 1 if any(check.status is Status.FAIL for check in checks) else 0


def _checks(config: Config) -> Iterator[Check]:
    yield from (_python(), _torch(), _threads(), _device(config))
    if device_of(config) == "cuda":
        yield _triton()
    yield _memory()
    yield from _model(config)
    yield _cache_folder()
    yield from (_optional(package, use) for package, use in OPTIONAL.items())
    yield _attempt("generation", lambda: _tiny_generation(config.source.device))


def _attempt(name: str, check: Callable[[], Check]) -> Check:
    """Runs one check; any exception is its result."""
    try:
        return check()
    except Exception as error:
        return Check(
            name,
            Status.FAIL,
            f"{type(error).__name__}: {error}",
            "report this with the output of `penstock doctor --json FILE`",
        )


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return Check("python", Status.FAIL, found, "install Python 3.11 or newer")
    return Check("python", Status.OK, found)


def _torch() -> Check:
    return Check("torch", Status.OK, f"{torch.__version__} on {cpu_name()}")


def _threads() -> Check:
    """What an engine would start with now. What was measured of this CPU is kept by that number."""
    threads = threads_by_load()
    threads.wait_first_look()
    return Check("threads", Status.OK, str(threads))


def _device(config: Config) -> Check:
    gpus = describe_gpus()
    named = "; ".join(
        f"{gpu['name']}, {gpu['free_gib']} of {gpu['memory_gib']} GiB free, capability {gpu['capability']}"
        for gpu in gpus
    )
    if gpus:
        return Check("device", Status.OK, f"{device_of(config)}; GPUs: {named}")
    if config.source.device == "cuda":
        return Check(
            "device",
            Status.FAIL,
            "no usable NVIDIA GPU",
            "check `nvidia-smi`, and that torch was built for CUDA; or use --device cpu",
        )
    return Check("device", Status.OK, "cpu; no usable NVIDIA GPU")


def _triton() -> Check:
    version = installed_version("triton")
    if version is None:
        return Check(
            "triton", Status.FAIL, "not installed, and CUDA needs its kernels", "pip install 'penstock[gpu]'"
        )
    return Check("triton", Status.OK, version)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    available_gib = memory.available / GIB
    low = available_gib < LOW_MEMORY_GIB
    detail = f"{available_gib:.1f} of {memory.total / GIB:.1f} GiB available"
    return Check(
        "memory",
        Status.WARN if low else Status.OK,
        detail,
        "close something, or lower --device-kv-gib" if low else "",
    )


def _model(config: Config) -> Iterator[Check]:
    """Whether it would load, and what it takes: from its config and the headers of its files, before any
    tensor is read."""
    model = config.source.model
    try:
        facts = inspect_model(config.source, config.engine.max_model_len)
    except (ModelError, ModuleNotFoundError) as error:
        status = Status.WARN if model == embedded.NAME else Status.FAIL  # most machines run other models
        yield Check(
            "model", status, str(error), f"give a path to a supported model, or one of {', '.join(BUILT_IN)}"
        )
        return
    dims = facts.config
    chat = "" if facts.has_chat_template else ", no chat template"
    kind = (
        f"{dims.architecture}, {dims.num_layers} layers, {dims.num_heads} heads over {dims.num_kv_heads} "
        f"for KV, width {dims.hidden}"
    )
    yield Check(
        "model", Status.OK, f"{facts.name}: {kind}, {_positions(dims)}, vocabulary {dims.vocab}{chat}"
    )
    yield from _sizes(config, facts)


def _positions(dims: ModelConfig) -> str:
    scheme = (
        ""
        if dims.rope_scaling is None
        else (f", {dims.rope_scaling.kind} positions up to {dims.max_position}")
    )
    windows = [window for window in dims.windows if window]
    window = f", a window of {max(windows)} in {len(windows)} layers" if windows else ""
    return f"context {dims.default_len}{scheme}{window}"


def _sizes(config: Config, facts: ModelFacts) -> Iterator[Check]:
    from penstock.engine.build import layout_for

    device = device_of(config)
    layout = layout_for(config, facts.config, torch.device(device))
    try:
        held, forms = _forms(config, facts, layout.dtype, device)
    except ConfigError as error:
        yield Check("weights", Status.FAIL, str(error), "leave --weights out")
        return
    shapes = [(weight.name, weight.shape) for weight in weights_of(facts.config)]
    plain_bytes = facts.num_parameters * ITEM_BYTES[layout.dtype]
    weight_bytes = (
        plain_bytes
        if forms is None
        else forms.num_bytes(shapes, facts.config.tied_embeddings, facts.in_4_bits)
    )
    room = _free_bytes(device)
    files = f", files {facts.file_bytes / GIB:.2f} GiB" if facts.file_bytes else "; it has none of its own"
    detail = (
        f"{facts.num_parameters / 1e6:.1f} million parameters, {weight_bytes / GIB:.2f} GiB in {held}{files}"
    )
    if weight_bytes > room:
        yield Check(
            "weights",
            Status.FAIL,
            f"{detail}; {room / GIB:.1f} GiB are free",
            "use a smaller model, or another --device or --dtype",
        )
    else:
        yield Check(
            "weights", Status.OK, detail, "" if facts.file_bytes else "it runs with --load-format dummy"
        )
    yield _kv(config, facts.config, layout, max(0.0, room - weight_bytes) / GIB)


def _forms(config: Config, facts: ModelFacts, dtype: str, device: str) -> tuple[str, Forms | None]:
    """How a start would hold the matrices, in words; None: in `dtype` alone."""
    name = wanted(config.source.weights, device, getattr(torch, dtype))
    if name != "auto" or not facts.file_bytes:
        forms = pinned_forms(name, facts.in_4_bits)
        return str(forms or dtype), forms
    found = kept_measurement(facts.config)
    if found is None:
        return f"{dtype} or less: the first start measures what this CPU runs fastest", None
    forms = found.forms if found.forms is None else found.forms.of(facts.in_4_bits)
    times = "; ".join(
        f"{rows} rows " + (" / ").join(f"{ms:.1f}" for ms in found.ms[str(rows)].values()) for rows in ROWS
    )
    return f"{forms or dtype} (measured, ms of {' / '.join(found.ms['1'])}: {times})", forms


def _kv(config: Config, dims: ModelConfig, layout: BlockLayout, left_gib: float) -> Check:
    """How many tokens fit into what KV gets; weights leave `left_gib`."""
    from penstock.engine.build import CPU_KV_GIB

    by_default = CPU_KV_GIB if device_of(config) == "cpu" else left_gib
    gib, source = (
        (by_default, "by default")
        if config.kv.device_gib is None
        else (config.kv.device_gib, "--device-kv-gib")
    )
    token_bytes = layout.block_bytes // layout.block_tokens
    held = int(gib * GIB) // layout.block_bytes * layout.block_tokens
    wanted = config.engine.max_model_len or dims.default_len
    detail = (
        f"{token_bytes} bytes per token in {layout.dtype}, "
        f"{GIB // layout.block_bytes * layout.block_tokens} tokens per GiB; {gib:.2f} GiB ({source}) hold "
        f"{held} tokens; one context of {wanted} takes {wanted * token_bytes / GIB:.2f} GiB"
    )
    if wanted > dims.max_position:
        return Check(
            "KV", Status.FAIL, detail, f"--max-model-len: the model has {dims.max_position} positions"
        )
    if gib > left_gib or held < 2 * layout.block_tokens:
        return Check(
            "KV",
            Status.FAIL,
            f"{detail}; weights leave {left_gib:.2f} GiB free",
            "change --device-kv-gib, or use a smaller model",
        )
    if held < wanted:
        return Check(
            "KV", Status.WARN, detail, f"a request has at most {held} tokens; raise --device-kv-gib for more"
        )
    return Check("KV", Status.OK, detail)


def _free_bytes(device: str) -> float:
    gpus = describe_gpus()
    return (
        float(gpus[0]["free_gib"]) * GIB
        if device == "cuda" and gpus
        else float(psutil.virtual_memory().available)
    )


def _cache_folder() -> Check:
    folder = embedded.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(
            "cache folder",
            Status.FAIL,
            f"{folder}: {error.strerror or error}",
            "set $PENSTOCK_CACHE to a folder that can be written",
        )
    return Check("cache folder", Status.OK, str(folder))


def _optional(package: str, use: str) -> Check:
    version = installed_version(package)
    return (
        Check(package, Status.WARN, "not installed", f"for {use}")
        if version is None
        else Check(package, Status.OK, version)
    )


def _tiny_generation(device: DeviceName) -> Check:
    """The same prompt twice: the answers agree, and the second one's prefix comes from the cache."""
    from penstock.bench.run import Driver, random_prompts
    from penstock.engine.build import build

    kv = KvConfig(device_blocks=16)
    engine = build(Config(ModelSource("tiny-llama", "dummy", device), kv))
    driver = Driver(engine)
    (prompt,) = random_prompts(1, 2 * kv.block_tokens + 1, engine.tokenizer.vocab_size, (0,))
    readers = []
    for _ in range(2):
        readers.append(driver.submit(prompt, max_tokens=8))
        driver.run_all()
    engine.close(timeout_s=20.0)
    first, second = readers
    cached = 0 if second.source is None else second.source.device
    if first.tokens != second.tokens or cached != 2 * kv.block_tokens:
        return Check(
            "generation",
            Status.FAIL,
            f"{first.tokens}, then {second.tokens} with {cached} cached tokens",
            "this is a defect: report it",
        )
    return Check(
        "generation",
        Status.OK,
        f"{len(first.tokens)} tokens of tiny-llama, twice the same, {cached} prompt tokens reused",
    )


def _table(checks: list[Check]) -> Table:
    colours = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
    drawn = Table("check", "")
    drawn.add_column("found", overflow="fold")
    drawn.add_column("hint", overflow="fold")
    for check in checks:
        drawn.add_row(
            check.name, Text(check.status.value, colours[check.status]), Text(check.detail), Text(check.hint)
        )
    return drawn

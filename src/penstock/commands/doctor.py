"""`penstock doctor`: can this machine run Penstock, and if not, what to do? Owns the checks; changes
nothing."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import psutil
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock import __version__
from penstock.bench.report import describe_machine, device_of, installed_version
from penstock.bench.run import Driver, random_prompts
from penstock.config import GIB, Config, DeviceName, KvConfig, ModelSource
from penstock.engine.build import build
from penstock.engine.execution.threads import threads_by_load
from penstock.engine.sizing import CPU_KV_GIB, layout_for
from penstock.errors import ConfigError, ModelError
from penstock.installation import source
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
SERVE = "penstock serve: pip install 'penstock[server]'"
OPTIONAL = {
    "gguf": "GGUF files, the embedded model among them: pip install gguf",
    "starlette": SERVE,
    "uvicorn": SERVE,
    "msgspec": SERVE,
    "prometheus_client": f"/metrics of {SERVE}",
    "matplotlib": "penstock bench --plot: pip install 'penstock[plots]'",
    "penstock_valkey": "--kv-offload-remote valkey://: pip install 'penstock[valkey]'",
    "penstock_s3": "--kv-offload-remote s3://: pip install 'penstock[s3]'",
}
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. A hint says what to do about one that is not ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    hint: str = ""


def run(args: Namespace, config: Config) -> int:
    checks = list(_checks(config))
    try:
        if args.json is not None:
            found = {"machine": describe_machine(), "checks": [asdict(check) for check in checks]}
            args.json.write_text(json.dumps(found, indent=2) + "\n")
    finally:
        drawn = Table("check", "")
        drawn.add_column("found", overflow="fold")
        drawn.add_column("hint", overflow="fold")
        for one in checks:
            drawn.add_row(one.name, Text(one.status, COLOURS[one.status]), Text(one.detail), Text(one.hint))
        Console().print(drawn)
    return 1 if any(check.status == "fail" for check in checks) else 0


def _checks(config: Config) -> Iterator[Check]:
    yield Check("penstock", "ok", f"{__version__} ({source()})")
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Check("torch", "ok", f"{torch.__version__} on {cpu_name()}")
    threads = threads_by_load()  # as an engine would start now; measurements of this CPU are kept by it
    threads.wait_first_look()
    yield Check("threads", "ok", str(threads))
    yield _device(config)
    if device_of(config) == "cuda":
        why = "not installed, and CUDA needs its kernels"
        yield _package("triton", "pip install 'penstock[gpu]'", "fail", why)
    yield _memory()
    yield from _model(config)
    yield _cache_folder()
    for package, use in OPTIONAL.items():
        yield _package(package, f"for {use}", "warn", "not installed")
    try:
        yield _tiny_generation(config.source.device)
    except Exception as error:
        hint = "report this with the output of `penstock doctor --json FILE`"
        yield Check("generation", "fail", f"{type(error).__name__}: {error}", hint)


def _device(config: Config) -> Check:
    named = "; ".join(
        f"{gpu['name']}, {gpu['free_gib']} of {gpu['memory_gib']} GiB free, capability {gpu['capability']}"
        for gpu in describe_gpus()
    )
    if named:
        return Check("device", "ok", f"{device_of(config)}; GPUs: {named}")
    if config.source.device != "cuda":
        return Check("device", "ok", "cpu; no usable NVIDIA GPU")
    hint = "check `nvidia-smi`, and that torch was built for CUDA; or use --device cpu"
    return Check("device", "fail", "no usable NVIDIA GPU", hint)


def _package(name: str, hint: str, status: Literal["warn", "fail"], missing: str) -> Check:
    version = installed_version(name)
    return Check(name, status, missing, hint) if version is None else Check(name, "ok", version)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if memory.available < LOW_MEMORY_GIB * GIB:
        return Check("memory", "warn", detail, "close something, or lower --device-kv-gib")
    return Check("memory", "ok", detail)


def _cache_folder() -> Check:
    folder = embedded.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return Check("cache folder", "ok", str(folder))
    except OSError as error:
        hint = "set $PENSTOCK_CACHE to a folder that can be written"
        return Check("cache folder", "fail", f"{folder}: {error.strerror or error}", hint)


# -------------------------------------------------------------------------------------------------- the model


def _model(config: Config) -> Iterator[Check]:
    """Whether it would load, and what it takes: from its config and the headers of its files, before any
    tensor is read."""
    try:
        facts = inspect_model(config.source, config.engine.max_model_len)
    except (ModelError, ModuleNotFoundError) as error:
        is_embedded = config.source.model == embedded.NAME  # most machines run other models
        hint = f"give a path to a supported model, or one of {', '.join(BUILT_IN)}"
        yield Check("model", "warn" if is_embedded else "fail", str(error), hint)
        return
    dims = facts.config
    heads = f"{dims.num_layers} layers, {dims.num_heads} heads over {dims.num_kv_heads} for KV"
    kind = f"{facts.name}: {dims.architecture}, {heads}, width {dims.hidden}"
    chat = "" if facts.has_chat_template else ", no chat template"
    yield Check("model", "ok", f"{kind}, {_positions(dims)}, vocabulary {dims.vocab}{chat}")
    yield from _sizes(config, facts)


def _positions(dims: ModelConfig) -> str:
    text = f"context {dims.default_len}"
    if dims.rope_scaling is not None:
        text += f", {dims.rope_scaling.kind} positions up to {dims.max_position}"
    if dims.recurrence is not None:
        num, size = len(dims.recurrence.layers), dims.state_bytes / (1 << 20)
        text += f", {num} recurrent layers with {size:.2f} MiB of state for each request"
    windows = [window for window in dims.windows if window]
    return f"{text}, a window of {max(windows)} in {len(windows)} layers" if windows else text


def _sizes(config: Config, facts: ModelFacts) -> Iterator[Check]:
    device = device_of(config)
    layout = layout_for(config, facts.config, torch.device(device))
    try:
        held, forms = _forms(config, facts, layout.dtype, device)
    except ConfigError as error:
        yield Check("weights", "fail", str(error), "leave --weights out")
        return
    weight_bytes = facts.num_parameters * ITEM_BYTES[layout.dtype]
    if forms is not None:
        shapes = [(weight.name, weight.shape) for weight in weights_of(facts.config)]
        weight_bytes = forms.num_bytes(shapes, facts.config.tied_embeddings, facts.in_4_bits)
    room = _free_bytes(device)
    files = f", files {facts.file_bytes / GIB:.2f} GiB" if facts.file_bytes else "; it has none of its own"
    millions = f"{facts.num_parameters / 1e6:.1f} million parameters"
    detail = f"{millions}, {weight_bytes / GIB:.2f} GiB in {held}{files}"
    if weight_bytes > room:
        hint = "use a smaller model, or another --device or --dtype"
        yield Check("weights", "fail", f"{detail}; {room / GIB:.1f} GiB are free", hint)
    else:
        hint = "" if facts.file_bytes else "it runs with --load-format dummy"
        yield Check("weights", "ok", detail, hint)
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
    forms = found.forms and found.forms.of(facts.in_4_bits)
    times = "; ".join(
        f"{rows} rows {' / '.join(f'{ms:.1f}' for ms in found.ms[str(rows)].values())}" for rows in ROWS
    )
    return f"{forms or dtype} (measured, ms of {' / '.join(found.ms['1'])}: {times})", forms


def _kv(config: Config, dims: ModelConfig, layout: BlockLayout, left_gib: float) -> Check:
    """How many tokens fit into what KV gets; weights leave `left_gib`."""
    gib, source = config.kv.device_gib, "--device-kv-gib"
    if gib is None:
        gib, source = CPU_KV_GIB if device_of(config) == "cpu" else left_gib, "by default"
    token_bytes = layout.block_bytes // layout.block_tokens
    held = int(gib * GIB) // layout.block_bytes * layout.block_tokens
    needed = config.engine.max_model_len or dims.default_len
    per_gib = f"{token_bytes} bytes per token in {layout.dtype}, "
    per_gib += f"{GIB // layout.block_bytes * layout.block_tokens} tokens per GiB"
    context = f"one context of {needed} takes {needed * token_bytes / GIB:.2f} GiB"
    detail = f"{per_gib}; {gib:.2f} GiB ({source}) hold {held} tokens; {context}"
    if needed > dims.max_position:
        return Check("KV", "fail", detail, f"--max-model-len: the model has {dims.max_position} positions")
    if gib > left_gib or held < 2 * layout.block_tokens:
        hint = "change --device-kv-gib, or use a smaller model"
        return Check("KV", "fail", f"{detail}; weights leave {left_gib:.2f} GiB free", hint)
    if held < needed:
        hint = f"a request has at most {held} tokens; raise --device-kv-gib for more"
        return Check("KV", "warn", detail, hint)
    return Check("KV", "ok", detail)


def _free_bytes(device: str) -> float:
    gpus = describe_gpus() if device == "cuda" else []
    return float(gpus[0]["free_gib"]) * GIB if gpus else float(psutil.virtual_memory().available)


def _tiny_generation(device: DeviceName) -> Check:
    """The same prompt twice: the answers agree, and the second one's prefix comes from the cache."""
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
        detail = f"{first.tokens}, then {second.tokens} with {cached} cached tokens"
        return Check("generation", "fail", detail, "this is a defect: report it")
    detail = f"{len(first.tokens)} tokens of tiny-llama, twice the same, {cached} prompt tokens reused"
    return Check("generation", "ok", detail)

"""`penstock doctor`: can this machine run Penstock, and if not, what is to be done? Owns the checks; changes nothing."""

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
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.bench.machine import cpu_name, describe_machine, device_of, installed_version
from penstock.config import GIB, Config, DeviceName, KvConfig, ModelSource
from penstock.errors import ModelError
from penstock.lanes.cuda import describe_gpus
from penstock.models.loader import embedded_file

LOW_MEMORY_GIB = 2.0  # the embedded model and its KV take about that much
OLDEST_PYTHON = (3, 11)
OPTIONAL = {
    "gguf": "GGUF files, the embedded model among them: pip install gguf",
    "starlette": "penstock serve: pip install 'penstock[server]'",
    "uvicorn": "penstock serve: pip install 'penstock[server]'",
    "msgspec": "penstock serve: pip install 'penstock[server]'",
    "prometheus_client": "/metrics of penstock serve: pip install 'penstock[server]'",
    "matplotlib": "penstock bench --plot: pip install 'penstock[plots]'",
    "valkey": "penstock bench transfer beside a Valkey's own client: pip install 'penstock[remote]'",
    "obstore": "--kv-offload-remote s3://: pip install 'penstock[remote]'",
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


def doctor(model: str, device: DeviceName, json_file: Path | None) -> int:
    config = Config(ModelSource(model, device=device))
    checks = list(_checks(config))
    Console().print(_table(checks))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": describe_machine(), "checks": [asdict(check) for check in checks]}, indent=2) + "\n")
    return 1 if any(check.status is Status.FAIL for check in checks) else 0


def _checks(config: Config) -> Iterator[Check]:
    yield from (_python(), _torch(), _device(config))
    if device_of(config) == "cuda":
        yield _triton()
    yield from (_memory(), _weights(config.source.model), _cache_folder())
    yield from (_optional(package, use) for package, use in OPTIONAL.items())
    yield _attempt("generation", lambda: _tiny_generation(config.source.device))


def _attempt(name: str, check: Callable[[], Check]) -> Check:
    """Whatever breaks is what was to be found out."""
    try:
        return check()
    except Exception as error:
        return Check(name, Status.FAIL, f"{type(error).__name__}: {error}", "report this with the output of `penstock doctor --json FILE`")


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return Check("python", Status.FAIL, found, "install Python 3.11 or newer")
    return Check("python", Status.OK, found)


def _torch() -> Check:
    import torch

    return Check("torch", Status.OK, f"{torch.__version__}, {torch.get_num_threads()} threads on {cpu_name()}")


def _device(config: Config) -> Check:
    gpus = describe_gpus()
    named = "; ".join(f"{gpu['name']}, {gpu['free_gib']} of {gpu['memory_gib']} GiB free, capability {gpu['capability']}" for gpu in gpus)
    if gpus:
        return Check("device", Status.OK, f"{device_of(config)}; GPUs: {named}")
    if config.source.device == "cuda":
        return Check(
            "device", Status.FAIL, "no usable NVIDIA GPU", "check `nvidia-smi`, and that torch was built for CUDA; or use --device cpu"
        )
    return Check("device", Status.OK, "cpu; no usable NVIDIA GPU")


def _triton() -> Check:
    version = installed_version("triton")
    if version is None:
        return Check("triton", Status.FAIL, "not installed, and CUDA needs its kernels", "pip install 'penstock[gpu]'")
    return Check("triton", Status.OK, version)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    available_gib = memory.available / GIB
    low = available_gib < LOW_MEMORY_GIB
    detail = f"{available_gib:.1f} of {memory.total / GIB:.1f} GiB available"
    return Check("memory", Status.WARN if low else Status.OK, detail, "close something, or lower --device-kv-gib" if low else "")


def _weights(model: str) -> Check:
    from penstock.models.registry import BUILT_IN, EMBEDDED

    if model == EMBEDDED:
        try:
            return Check("weights", Status.OK, f"{model}: {embedded_file()}")
        except ModelError as error:
            return Check("weights", Status.WARN, str(error), "or use --load-format dummy")
    if model in BUILT_IN:
        return Check("weights", Status.OK, f"{model} has none of its own", "it runs with --load-format dummy")
    if Path(model).expanduser().exists():
        return Check("weights", Status.OK, model)
    return Check("weights", Status.FAIL, f"{model} does not exist", f"give a path, or one of {', '.join(BUILT_IN)}")


def _cache_folder() -> Check:
    from penstock.models.gguf_convert import cache_dir

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(
            "cache folder", Status.FAIL, f"{folder}: {error.strerror or error}", "set $PENSTOCK_CACHE to a folder that can be written"
        )
    return Check("cache folder", Status.OK, str(folder))


def _optional(package: str, use: str) -> Check:
    version = installed_version(package)
    return Check(package, Status.WARN, "not installed", f"for {use}") if version is None else Check(package, Status.OK, version)


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
            "generation", Status.FAIL, f"{first.tokens}, then {second.tokens} with {cached} cached tokens", "this is a defect: report it"
        )
    return Check("generation", Status.OK, f"{len(first.tokens)} tokens of tiny-llama, twice the same, {cached} prompt tokens reused")


def _table(checks: list[Check]) -> Table:
    colours = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
    drawn = Table("check", "")
    drawn.add_column("found", overflow="fold")
    drawn.add_column("hint", overflow="fold")
    for check in checks:
        drawn.add_row(check.name, Text(check.status.value, colours[check.status]), Text(check.detail), Text(check.hint))
    return drawn

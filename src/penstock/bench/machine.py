"""What this machine is, for reports and `penstock doctor`. Owns the asking; nothing here is measured."""

from __future__ import annotations

import platform
import re
from importlib import metadata, util
from typing import Any

import psutil
import torch

from penstock import __version__
from penstock.config import GIB, Config
from penstock.lanes import cuda
from penstock.models.form_choice import cpu_name


def describe_machine() -> dict[str, Any]:
    gpus = cuda.describe_gpus()
    name = gpus[0]["name"] if gpus else cpu_name()
    return {
        "slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": gpus,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": installed_version("triton"),
        "penstock": __version__,
    }


def installed_version(package: str) -> str | None:
    """None: it cannot be imported."""
    if util.find_spec(package) is None:
        return None
    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"


def device_of(config: Config) -> str:
    """What `--device` comes to here."""
    if config.source.device != "auto":
        return config.source.device
    return "cuda" if cuda.is_usable() else "cpu"

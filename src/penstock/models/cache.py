"""The cache directory on disk: where it is. Owns nothing in it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$PENSTOCK_CACHE, or ~/.cache/penstock."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "penstock"


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

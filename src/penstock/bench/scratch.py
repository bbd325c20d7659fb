"""A disk cache's directory for the time of one measurement. Owns it and removes it; never touches a cache that was there before."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.errors import ConfigError


@contextmanager
def scratch_ssd(config: Config, needed: bool = False) -> Iterator[Config]:
    """`config` with an empty directory in place of the one that it names, inside that or as near as there is a folder: on the same file
    system. Where it names none, and one is `needed`, wherever temporary files are."""
    if config.offload.ssd_dir is None and not needed:
        yield config
        return
    try:
        near = None if config.offload.ssd_dir is None else _existing(Path(config.offload.ssd_dir).absolute())
        made = tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=near, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(f"no directory can be made near {config.offload.ssd_dir}: {error.strerror}") from error
    with made as folder:
        yield replace(config, offload=replace(config.offload, ssd_dir=folder))


def _existing(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--kv-offload-ssd-dir {path} is not a directory")
    return next(folder for folder in (path, *path.parents) if folder.is_dir())

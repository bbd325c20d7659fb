"""A disk directory for one measurement, removed however the process ends, short of a kill. Owns the directory
and the signals; needs no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError

_REMOVE_S = 5.0  # for a directory that is still being written to
_POLL_S = 0.001
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def scratch_ssd(config: Config, needed: bool = False) -> Iterator[Config]:
    """`config` with an empty directory in place of its own, inside that or in its nearest existing parent: on
    the same file system. If it has none and one is `needed`, among temporary files."""
    given = config.offload.ssd_dir
    if given is None and not needed:
        yield config
        return
    path = Path(given or tempfile.gettempdir()).absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--kv-offload-ssd-dir {path} is not a directory")
    near = next(folder for folder in (path, *path.parents) if folder.is_dir())
    # named before it is made: a signal right behind that finds it
    folder = near / f"penstock-bench-{secrets.token_hex(8)}"
    with _ended_by_signals():
        try:
            _make(folder, given)
            yield replace(config, offload=replace(config.offload, ssd_dir=str(folder)))
        finally:
            _remove(folder)


def _make(folder: Path, given: str | None) -> None:
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"no directory can be made near {given}: {error.strerror}") from error


def _remove(folder: Path) -> None:
    """Lanes of an engine that was interrupted may still write their last blocks into it. A second Ctrl-C does
    not end this."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    by_s = time.monotonic() + _REMOVE_S
    while folder.exists() and time.monotonic() < by_s:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_POLL_S)
    if in_main:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """While it lasts, SIGTERM and a closed terminal unwind the process like Ctrl-C, so that what fills a disk
    is removed. Then the process ends at once: threads of an interrupted engine may wait for each other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended: list[int] = []

    def end(number: int, frame: Any) -> None:
        ended.append(number)
        raise SystemExit(128 + number)

    # not one that is ignored, as by nohup
    numbers = [one for one in _ENDING if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if ended:
            with contextlib.suppress(OSError):  # the terminal may be gone
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(128 + ended[0])

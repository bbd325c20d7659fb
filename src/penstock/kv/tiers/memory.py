"""The host tier's memory on its way to being usable. Owns the thread that prepares it, piece by piece, while requests are served."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

_CLOSE_S = 60.0  # one piece is pinned in a fraction of a second


class GrowingArena(Protocol):
    """Memory whose slots become usable one after the other."""

    def prepare(self, ready: Callable[[range], None], progress: Callable[[int, int], None], stop: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...


class HostMemory:
    """One arena being prepared."""

    def __init__(self, arena: GrowingArena, ready: Callable[[range], None]) -> None:
        self._arena = arena
        self._ready = ready
        self._stop = threading.Event()
        self._told = 0  # tenths that have been logged
        self._thread = threading.Thread(target=self._prepare, name="host-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. No copy may be in flight."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
        self._arena.close()

    def _prepare(self) -> None:
        try:
            self._arena.prepare(self._ready, self._progress, self._stop.is_set)
        except BaseException:  # of any kind: the tier goes on with what is ready
            log.exception("host memory could not be prepared further; the host tier uses what it has")

    def _progress(self, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        if tenths > self._told:
            self._told = tenths
            log.info("host memory for KV: %.1f of %.1f GiB ready", done / 2**30, total / 2**30)

"""The engine's thread. Owns its start, heartbeat and orderly end; the engine runs the steps."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import sys
import threading
import time

from penstock.engine.engine import Engine
from penstock.errors import DeadlineExceeded, EngineClosed
from penstock.models.progress import Progress, silent

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005
# By generation. The youngest holds objects of a step or two and is scanned in a tenth of a millisecond. The
# others hold the state of open requests and take up to a step's time: with Python's defaults every ten steps.
_COLLECT_AFTER = (1000, 1000, 10)
_CLOSE_S = 20.0  # for transfers in flight when the engine closes
_MARGIN_S = 10.0  # for everything else that closing does
_IDLE_S = 0.5  # an idle loop wakes this often, so that its heartbeat stays fresh


def settle_process() -> None:
    """All objects of now live as long as the engine: keep the garbage collector from scanning them again,
    which takes tens of milliseconds. Also shorten the switch interval, so that threads that launch transfers
    give the interpreter back within a part of a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    sys.setswitchinterval(_SWITCH_S)


class EngineLoop:
    """Runs `engine.step()` until closed. An exception ends every open request with an error and shows in
    `failed()`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._beat_s = time.monotonic()
        self._stop_by_s: float | None = None  # set by close: the time at which running requests are cancelled
        self._error: BaseException | None = None
        self._warm = threading.Event()  # warm-up is over
        self.is_warm = False  # warm-up has succeeded; earlier requests wait
        self._starting = threading.Lock()  # the first start or close starts its thread
        self._progress: Progress = silent
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, progress: Progress = silent) -> None:
        """Blocks until the engine is warm: from then on all requests run at their usual speed. Idempotent.
        Raises EngineClosed if warm-up fails, which closes the engine, or if the loop was closed before."""
        if self.is_warm:
            return
        with self._starting:
            if self._thread.ident is None:
                self._progress = progress
                atexit.register(self._close_at_exit)
                self._thread.start()
        self._warm.wait()
        if self._error is not None and not self.is_warm:
            raise EngineClosed("the engine could not be warmed up; its error is above") from self._error
        if not self.is_warm:
            raise EngineClosed("the engine was closed before it was started")
        settle_process()

    def beat_age_s(self) -> float:
        """Seconds since the last turn of the loop, or the last progress of warm-up; grows without bound if it
        hangs."""
        return time.monotonic() - self._beat_s

    def failed(self) -> BaseException | None:
        return self._error

    def close(self, deadline_s: float) -> None:
        """Stop admission, give running requests `deadline_s` to end, cancel the rest, join. Idempotent. Works
        at any time: a loop closed before its start never runs."""
        self._stop_by_s = time.monotonic() + deadline_s
        self._engine.refuse("the server is shutting down")
        atexit.unregister(self._close_at_exit)
        if self._thread is threading.current_thread():
            return  # the owner was garbage-collected on this thread, which ends after its current turn
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()  # only to close the engine
        self._thread.join(deadline_s + _CLOSE_S + _MARGIN_S)
        if self._thread.is_alive():
            raise DeadlineExceeded("the engine thread did not end: a step is stuck on the device")

    def _close_at_exit(self) -> None:
        """The process ends without a close: the interpreter would stop the thread in the middle of a step."""
        with contextlib.suppress(DeadlineExceeded):
            self.close(0.0)

    def _run(self) -> None:
        try:
            if self._stop_by_s is None:
                self._engine.warm(self._tell_progress)
                self.is_warm = True
                self._warm.set()
            with self._engine.launching():
                while self._stop_by_s is None or (
                    self._engine.has_work() and time.monotonic() < self._stop_by_s
                ):
                    self._beat_s = time.monotonic()
                    if not self._engine.step():
                        # it wakes for its heartbeat and for the deadline of a close
                        left_s = _IDLE_S if self._stop_by_s is None else self._stop_by_s - time.monotonic()
                        self._engine.wait_work(max(0.0, min(_IDLE_S, left_s)))
            self._engine.close(timeout_s=_CLOSE_S)
        except BaseException as error:
            self._error = error
            self._engine.fail_all(error)
            log.exception("the engine loop failed")
            if not self.is_warm:  # otherwise its state of requests may be broken
                self._close_unused()
        finally:
            self._warm.set()

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        self._beat_s = time.monotonic()
        self._progress(stage, done, total)

    def _close_unused(self) -> None:
        """Warm-up failed before any request ran, so the state is sound. Close the engine to free what it
        holds, such as a directory lock."""
        try:
            self._engine.close(_CLOSE_S)
        except BaseException:
            log.exception("the engine that could not be warmed up could not be closed either")

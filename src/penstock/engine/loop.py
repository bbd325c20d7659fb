"""The engine's own thread. Owns its life: start, heartbeat, orderly end; what a step does is the engine's."""

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
# By generation. The youngest holds what a step or two have made, and is looked through in a tenth of a
# millisecond. The others hold what open requests keep, and take up to a step's time: by Python's own numbers
# every ten steps.
_COLLECT_AFTER = (1000, 1000, 10)
_CLOSE_S = 20.0  # for transfers that are under way when the engine closes
_MARGIN_S = 10.0  # for everything else that closing does
_IDLE_S = 0.5  # an idle loop comes round this often, so that its heartbeat stays fresh


def settle_process() -> None:
    """What exists now lives as long as the engine: keep the collector from walking it again, which costs a
    step tens of milliseconds. And threads that launch transfers give the interpreter back to the engine's
    within a part of a step, not within a whole one."""
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
        self._stop_by_s: float | None = None  # set by close: when running requests are cancelled
        self._error: BaseException | None = None
        self._warm = threading.Event()  # warming up is over,
        self._is_warm = False  # and has worked
        self._starting = threading.Lock()  # the first start or close starts its thread
        self._progress: Progress = silent
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, progress: Progress = silent) -> None:
        """Blocks until the engine is warm: requests of every kind are served at their usual speed from then
        on. Idempotent, also where it fails; then the engine is closed. So it is where the loop was closed
        before."""
        if self._is_warm:
            return
        with self._starting:
            if self._thread.ident is None:
                self._progress = progress
                atexit.register(self._close_at_exit)
                self._thread.start()
        self._warm.wait()
        if not self._is_warm:
            why = (
                ("was closed before it was started")
                if self._error is None
                else ("could not be warmed up; its error is above")
            )
            raise EngineClosed(f"the engine {why}") from self._error
        settle_process()

    @property
    def is_warm(self) -> bool:
        """Whether requests are served at their usual speed: those that come before wait."""
        return self._is_warm

    def beat_age_s(self) -> float:
        """Seconds since the loop last came round, or since it got further with warming up; grows without
        bound when it is wedged."""
        return time.monotonic() - self._beat_s

    def failed(self) -> BaseException | None:
        return self._error

    def close(self, deadline_s: float) -> None:
        """Stop admission, let running requests end for `deadline_s`, cancel the rest, join. Idempotent, and
        possible at any time: a loop that was not started never will be."""
        self._stop_by_s = time.monotonic() + deadline_s
        self._engine.refuse("the server is shutting down")
        atexit.unregister(self._close_at_exit)
        if self._thread is threading.current_thread():
            return  # its owner was collected here; this thread ends when it comes round
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()  # to close the engine, and for nothing else
        self._thread.join(deadline_s + _CLOSE_S + _MARGIN_S)
        if self._thread.is_alive():
            raise DeadlineExceeded("the engine thread did not end: a step is stuck on the device")

    def _close_at_exit(self) -> None:
        """It was not closed, and the process ends: the interpreter would stop its thread in the middle of a
        step."""
        with contextlib.suppress(DeadlineExceeded):
            self.close(0.0)

    def _run(self) -> None:
        try:
            if self._stop_by_s is None:
                self._engine.warm(self._tell_progress)
                self._is_warm = True
                self._warm.set()
            with self._engine.launching():
                while self._stop_by_s is None or (
                    self._engine.has_work() and time.monotonic() < self._stop_by_s
                ):
                    self._beat_s = time.monotonic()
                    if not self._engine.step():
                        self._engine.wait_work(self._patience_s())
            self._engine.close(timeout_s=_CLOSE_S)
        except BaseException as error:
            self._error = error
            self._engine.fail_all(error)
            log.exception("the engine loop failed")
            self._close_unused()
        finally:
            self._warm.set()

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        self._beat_s = time.monotonic()
        self._progress(stage, done, total)

    def _close_unused(self) -> None:
        """Where it could not be warmed up, no request has run, and nothing of it is in doubt: what it has, a
        directory for one, is free for the next."""
        if self._is_warm:
            return  # what it keeps of requests may be what is broken
        try:
            self._engine.close(_CLOSE_S)
        except BaseException:
            log.exception("the engine that could not be warmed up could not be closed either")

    def _patience_s(self) -> float:
        """How long it may wait for work: it comes round for its heartbeat, and for the deadline of a
        close."""
        return (
            _IDLE_S if self._stop_by_s is None else max(0.0, min(_IDLE_S, self._stop_by_s - time.monotonic()))
        )

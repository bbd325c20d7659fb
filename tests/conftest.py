"""What every test has in common: weights run in float32, the reference, where a test does not ask for another
form."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

with contextlib.suppress(ImportError):  # a machine with a GPU need not have it
    from hypothesis import HealthCheck, settings

    # No wall-clock limits: the first draw of a process alone takes seconds on a busy machine that runs these
    # tests for the first time.
    settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("penstock")

os.environ["PENSTOCK_WEIGHTS"] = "float32"  # for child processes, too

# before faulthandler ends the process: it names a hundred threads, and the one that waits is often not among
# them
SLOW_S = 240.0

_running: tuple[str, float] | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    threading.Thread(
        target=_watch,
        args=(session.config.stash[fault_handler_stderr_fd_key],),
        name="slow tests",
        daemon=True,
    ).start()


def pytest_collection_finish() -> None:
    _settle_heap()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        _settle_heap()


def _settle_heap() -> None:
    """What is alive between two files stays alive: modules, items, reports. The garbage collector would look
    at it again and again, for a fifth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_runtest_logstart(nodeid: str) -> None:
    global _running
    _running = (nodeid, time.monotonic())


def pytest_runtest_logfinish() -> None:
    global _running
    _running = None


def _watch(stderr: int) -> None:
    """Say of a test that takes very long where its own thread is."""
    said = None
    while True:
        time.sleep(5)
        running = _running
        if running is None or running is said or time.monotonic() - running[1] < SLOW_S:
            continue
        said = running
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines = traceback.format_stack(frame) if frame is not None else []
        os.write(stderr, f"{running[0]} still runs after {SLOW_S:.0f} s:\n{''.join(lines)}".encode())

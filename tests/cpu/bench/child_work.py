"""Work for processes that tests start: quick to import, since each of them does."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

from penstock.errors import ConfigError, IllegalTransition

# as this is imported, before the work begins
HELD_AT_START = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def fail(message: str, progress: Any) -> NoReturn:
    raise ConfigError(message)


def fail_oddly(progress: Any) -> NoReturn:
    raise IllegalTransition("a message", "one state", "no message says it")


def vanish(code: int, progress: Any) -> NoReturn:
    raise SystemExit(code)


def say(num: int, progress: Any) -> int:
    for done in range(num):
        progress("working", done, num)
    return os.getpid()


def interrupted(progress: Any) -> str:
    """As by a terminal, which tells all of its processes."""
    os.kill(os.getpid(), signal.SIGINT)
    return "went on"


def held(progress: Any) -> tuple[bool, bool]:
    """Whether Ctrl-C waits: at the start, and now."""
    return HELD_AT_START, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

"""How a host thread looks at lanes again and again until something is over. Owns how long it sleeps in between, not what it looks at."""

from __future__ import annotations

import ctypes
import sys

POLL_S = 20e-6  # at least this, while there is nothing else to do
POLL_MOST_S = 0.5e-3
_LATE_SHARE = 1 / 256  # of what has been waited already: as much is added to it by looking too late
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of linux/prctl.h
_TIMER_SLACK_NS = 1000


def look_again_s(waited_s: float) -> float:
    """For whoever has waited so long already: what takes milliseconds is looked at often, what takes longer costs no core."""
    return min(max(POLL_S, waited_s * _LATE_SHARE), POLL_MOST_S)


def sharpen_timers() -> bool:
    """Let sleeps of the calling thread end when they should: Linux adds up to 50 us to each, to wake less often. False: they stay as
    they are, which makes waits longer and nothing wrong."""
    if sys.platform != "linux":
        return False
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return False
    nothing = (ctypes.c_ulong(0),) * 3
    return bool(prctl(ctypes.c_int(_SET_TIMER_SLACK), ctypes.c_ulong(_TIMER_SLACK_NS), *nothing) == 0)

"""The threads that compute on a CPU: torch's number of them, kept to what others leave. Owns that number for
this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from penstock.cores import THREADS, Others, ThreadsByLoad, allowed_cores, busy_seconds


@functools.cache
def most_threads() -> int:
    """Torch's own number when it is asked for first: later it may be one that was set for a busy machine."""
    return torch.get_num_threads()


def threads_by_load(set_threads: Callable[[int], None] = torch.set_num_threads) -> ThreadsByLoad:
    """At most as many as torch has by itself, and as this process may use cores; as many as the environment
    says, where it does."""
    if os.environ.get(THREADS):
        return ThreadsByLoad(most_threads(), f"${THREADS}", None, set_threads)
    allowed = allowed_cores()
    others = Others(functools.partial(busy_seconds, allowed.cores))
    return ThreadsByLoad(min(most_threads(), allowed.num), str(allowed), others, set_threads)

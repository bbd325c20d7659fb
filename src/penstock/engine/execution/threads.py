"""The number of torch's compute threads on a CPU, limited to the cores that other processes leave free. Owns
that number for this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from penstock.cores import THREADS, Others, ThreadsByLoad, allowed_cores, busy_seconds


@functools.cache
def most_threads() -> int:
    """Torch's default, read at the first call: later the number may have been lowered for a busy machine."""
    return torch.get_num_threads()


def threads_by_load(set_threads: Callable[[int], None] = torch.set_num_threads) -> ThreadsByLoad:
    """At most torch's default and the cores that this process may use. The environment variable overrides
    both."""
    if os.environ.get(THREADS):
        return ThreadsByLoad(most_threads(), f"${THREADS}", None, set_threads)
    allowed = allowed_cores()
    others = Others(functools.partial(busy_seconds, allowed.cores))
    return ThreadsByLoad(min(most_threads(), allowed.num), str(allowed), others, set_threads)

"""The cores of this machine: how many this process may use, how many of them others use, and how many threads
that leaves. Owns no threads, and knows nothing of torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

THREADS = "OMP_NUM_THREADS"  # a user's setting is used and never changed
_ROOT = Path("/")


class AllowedCores(NamedTuple):
    """The cores that this process may use."""

    cores: frozenset[int]
    quota: float | None  # cores' worth of time that its control group may take; None: no limit

    @property
    def num(self) -> int:
        """Whole cores: a thread with part of a core would make all others wait for it."""
        return len(self.cores) if self.quota is None else max(1, min(len(self.cores), int(self.quota)))

    def __str__(self) -> str:
        cores = f"{len(self.cores)} cores" if len(self.cores) != 1 else "1 core"
        return cores if self.quota is None else f"{cores}, a quota of {self.quota:g}"


def allowed_cores(root: Path = _ROOT) -> AllowedCores:
    """By affinity and by the quotas of control groups, version 1 or 2."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return AllowedCores(frozenset(cores), min(_quotas(root), default=None))


def _quotas(root: Path) -> Iterator[float]:
    """Quotas of this process's group and all groups above it, if visible from here."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers  # of version 2 there is one tree, with no name
        for folder in (top, *(top / part for part in _paths(path))):
            quota = _quota(folder)
            if quota is not None:
                yield quota


def _paths(path: str) -> Iterator[str]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for num in range(1, len(parts) + 1):
        yield "/".join(parts[:num])


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most, period = ((folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return int(most) / int(period) if most != "max" and int(most) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        return None


def busy_seconds(cores: Collection[int], root: Path = _ROOT) -> float | None:
    """CPU time that `cores` have spent since boot. None: this system does not report it."""
    names = {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in (root / "proc/stat").read_text().splitlines()]
        ticks = [list(map(int, counts)) for name, *counts in lines if name in names]
    except (OSError, ValueError):
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user.
    return (
        sum(sum(counts[:3]) + sum(counts[5:8]) for counts in ticks) / os.sysconf("SC_CLK_TCK")
        if ticks
        else None
    )


class Others:
    """How many of the cores other processes use, from one look to the next."""

    def __init__(
        self,
        busy_s: Callable[[], float | None],
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy_s, self._own_s, self._clock = busy_s, own_s, clock
        self._last: tuple[float, float] | None = None  # when, and CPU time of others until then
        self.look()

    @property
    def since_s(self) -> float:
        """Seconds since the last look."""
        return self._clock() - self._at_s

    def look(self) -> float:
        """Cores that other processes have used since the last look, on average; 0 if unknown."""
        before = self._last
        self._at_s, busy_s = self._clock(), self._busy_s()
        self._last = None if busy_s is None else (self._at_s, busy_s - self._own_s())
        if before is None or self._last is None or self._last[0] <= before[0]:
            return 0.0
        return max(0.0, self._last[1] - before[1]) / (self._last[0] - before[0])


class ThreadsByLoad:
    """The number of compute threads: one per core that other processes leave free.

    Threads that share an operation spin while they wait for each other; with enough cores that is faster than
    sleeping. Beside another busy process, one of them has no core for milliseconds, and all others spin for
    it: one thread less is many times faster.
    """

    window_s = 0.25  # between two looks; /proc/stat counts in hundredths of a second
    stale_s = 2.0  # an average over a longer time says little about the present
    first_s = 0.1  # of the first look

    def __init__(
        self, most: int, why: str, others: Others | None, set_threads: Callable[[int], None]
    ) -> None:
        """`others` is None if the number is fixed; `why` explains the number."""
        self.num = most
        self._most, self._why, self._set_threads = most, why, set_threads
        self._others = others if most > 1 else None
        self._used = 0.0

    def wait_first_look(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Set the number on the calling thread, for work before any step."""
        if self._others is not None:
            self._others.look()
            sleep(self.first_s)
            self._use(self._others.look())
        self._set_threads(self.num)

    def look(self) -> None:
        """Called before each step, on the thread that computes."""
        others = self._others
        if others is None or (since_s := others.since_s) < self.window_s:
            return
        used, before = others.look(), self.num
        if since_s < self.stale_s:
            self._use(used)
        if self.num != before:
            self._set_threads(self.num)

    def _use(self, used: float) -> None:
        self._used, self.num = used, threads_beside(used, self._most)

    def __str__(self) -> str:
        return f"{self.num} ({self._why}{'' if self._others is None else f', others use {self._used:.1f}'})"


def threads_beside(used: float, most: int) -> int:
    """Threads for `most` cores of which other processes use `used`. A core that they use for more than a
    fifth of the time is left to them."""
    return max(1, int(most - used + 0.2))

"""How many cores a process may use, how many of them others use, and the threads that follow from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.cores import AllowedCores, Others, ThreadsByLoad, allowed_cores, busy_seconds, threads_beside

TICKS = os.sysconf("SC_CLK_TCK")


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/a/cpu.cfs_quota_us": "10000\n",
                "sys/fs/cgroup/memory/a/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            # In a container the path is the host's, and the group is the root of what can be seen.
            {
                "proc/self/cgroup": "1:cpu:/docker/0123\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\nnonsense\n", "sys/fs/cgroup/cpu.max": "many\n"}, None),
    ],
)
def test_quotas_of_all_groups_above_the_process_count(
    tmp_path: Path, files: Mapping[str, str], quota: float | None
) -> None:
    found = allowed_cores(machine(tmp_path, files))
    assert found.quota == quota and found.cores == os.sched_getaffinity(0)


def test_a_quota_allows_whole_cores_and_at_least_one() -> None:
    four = frozenset(range(4))
    assert [AllowedCores(four, quota).num for quota in (None, 0.2, 1.0, 2.9, 64.0)] == [4, 1, 1, 2, 4]
    assert str(AllowedCores(four, None)) == ("4 cores") and str(AllowedCores(four, 2.5)) == (
        "4 cores, a quota of 2.5"
    )


def test_only_the_cores_of_the_process_are_looked_at(tmp_path: Path) -> None:
    rows = {"cpu": 900, "cpu0": 100, "cpu1": 30, "cpu11": 500}
    stat = "".join(f"{name} {busy} 1 2 7000 80 3 4 5 6 7\n" for name, busy in rows.items()) + "intr 1 2 3\n"
    root = machine(tmp_path, {"proc/stat": stat})
    assert busy_seconds({0, 1}, root) == (100 + 30 + 2 * (1 + 2 + 3 + 4 + 5)) / TICKS
    assert busy_seconds({7}, root) is None and busy_seconds({0}, tmp_path / "none") is None


class Machine:
    """Two cores that others use in part. What this process uses is its own."""

    def __init__(self, used_by_others: float = 0.0) -> None:
        self.now_s, self.own_s, self.others_s = 100.0, 0.0, 50.0
        self.used_by_others = used_by_others
        self.set: list[int] = []

    def go_on(self, seconds: float, own: float = 1.0) -> None:
        self.now_s += seconds
        self.own_s += own * seconds
        self.others_s += self.used_by_others * seconds

    def others(self) -> Others:
        return Others(lambda: self.own_s + self.others_s, lambda: self.own_s, lambda: self.now_s)

    def threads(self, most: int = 2) -> ThreadsByLoad:
        return ThreadsByLoad(most, "2 cores", self.others(), self.set.append)


def test_what_others_use_is_what_cores_did_without_this_process() -> None:
    machine = Machine(0.75)
    others = machine.others()
    machine.go_on(2.0, own=1.25)
    assert others.look() == pytest.approx(0.75)
    assert others.look() == 0.0, "no time has passed"


def test_where_nothing_is_known_of_others_there_are_none() -> None:
    others = Others(lambda: None, lambda: 1.0, iter(range(100)).__next__)  # type: ignore[arg-type]
    assert others.look() == others.look() == 0.0


def test_a_core_that_others_use_is_left_to_them() -> None:
    assert [threads_beside(used, 2) for used in (0.0, 0.1, 0.3, 1.0, 2.0, 9.0)] == [2, 2, 1, 1, 1, 1]
    assert [threads_beside(used, 16) for used in (0.0, 1.0, 4.5, 20.0)] == [16, 15, 11, 1]


def test_threads_follow_what_others_use_while_requests_run() -> None:
    machine = Machine()
    threads = machine.threads()
    threads.wait_first_look(machine.go_on)
    assert threads.num == 2
    for used, expected in ((1.0, 1), (1.0, 1), (0.0, 2)):
        machine.used_by_others = used
        machine.go_on(ThreadsByLoad.window_s)
        threads.look()
        assert threads.num == expected
    assert machine.set == [2, 1, 2], "set where it changes, and at first for the thread that builds"


def test_a_start_beside_a_busy_process_begins_with_fewer_threads() -> None:
    machine = Machine(1.0)
    threads = machine.threads()
    threads.wait_first_look(machine.go_on)
    assert machine.set == [1] and str(threads) == "1 (2 cores, others use 1.0)"


def test_an_average_over_a_long_pause_changes_nothing() -> None:
    machine = Machine()
    threads = machine.threads()
    machine.used_by_others = 2.0
    machine.go_on(60.0)
    threads.look()
    assert threads.num == 2
    machine.go_on(ThreadsByLoad.window_s)
    threads.look()
    assert threads.num == 1


def test_a_look_comes_no_more_often_than_its_window() -> None:
    machine = Machine(2.0)
    threads = machine.threads()
    machine.go_on(0.9 * ThreadsByLoad.window_s)
    threads.look()
    assert threads.num == 2 and machine.set == []


def test_a_number_that_the_user_has_set_stays() -> None:
    numbers: list[int] = []
    threads = ThreadsByLoad(2, "$OMP_NUM_THREADS", None, numbers.append)
    threads.wait_first_look()
    threads.look()
    assert numbers == [2] and str(threads) == "2 ($OMP_NUM_THREADS)"

"""The file of `--trace` with threads and files of the test's own: what is bounded, what is dropped, and what
can be read after a bad end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.lanes.cpu import CpuLane
from penstock.trace import file as file_module
from penstock.trace import recorder
from penstock.trace.file import TraceEvent, TraceFile
from penstock.trace.recorder import LaneTracks
from tests.support.trace_reader import read_trace

MakeFile = Callable[..., TraceFile]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def make_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFile]:
    """Its thread writes at the end alone, unless told otherwise."""
    made: list[TraceFile] = []

    def make(most_bytes: int = 1 << 20, flush_s: float = 600.0) -> TraceFile:
        monkeypatch.setattr(file_module, "FLUSH_S", flush_s)
        made.append(TraceFile(str(path), most_bytes, {"version": "x"}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def mark(number: int) -> TraceEvent:
    return TraceEvent("i", f"mark {number}", "engine", time.monotonic(), {"s": "g"})


def named(path: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_trace(path).events if event["name"].startswith(name)]


def test_events_without_room_in_the_queue_are_dropped_and_counted(make_file: MakeFile, path: Path) -> None:
    file = make_file(most_bytes=1 << 30)
    num = file_module.MOST_QUEUED
    for number in range(num + 10):
        file.put(mark(number))
    file.close()
    (told,) = named(path, "events dropped")
    written = named(path, "mark")
    assert len(written) + file.num_dropped == num + 10 and 0 < file.num_dropped <= 11
    assert told["args"]["dropped so far"] == file.num_dropped


def test_nothing_is_written_beyond_the_limit_and_the_file_can_be_read(
    make_file: MakeFile, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make_file(most_bytes=12_000)
    for number in range(200):
        file.put(mark(number))
    file.close()
    assert 4_000 < path.stat().st_size < 12_500, "two last events are always written"
    assert file.num_dropped > 0 and "--trace-mib" in caplog.text
    assert len(named(path, "mark")) + file.num_dropped == 200
    assert named(path, "end of the trace")


def test_a_file_that_takes_no_bytes_holds_up_nobody_who_reports(path: Path, make_file: MakeFile) -> None:
    """Its reader has stopped: the thread that writes is stuck, and events are dropped."""
    # Holds invariant 6: the thread that reports waits for no file.
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = make_file(most_bytes=1 << 30, flush_s=0.001)
    while not file.num_dropped:
        file.put(*(mark(number) for number in range(1000)))
    with os.fdopen(reader, "rb") as left:  # let it end
        os.set_blocking(left.fileno(), True)
        ending = threading.Thread(target=file.close)
        ending.start()
        text = left.read()
        ending.join()
    assert json.loads(text)[-1]["name"] == "end of the trace"


def test_a_file_without_an_end_can_be_read(make_file: MakeFile, path: Path) -> None:
    file = make_file(flush_s=0.001)
    file.put(mark(1))
    while "mark 1" not in path.read_text():
        time.sleep(0.001)
    assert not path.read_text().endswith("]\n") and len(named(path, "mark")) == 1


FULL_DISK = """
import os, resource, sys, time
from penstock.trace.file import TraceEvent, TraceFile

file, lifted = TraceFile(sys.argv[1], 1 << 20, {}), sys.argv[2] == "lifted"
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
for number in range(5000):
    file.put(TraceEvent("i", f"mark {number}", "engine", time.monotonic(), {"s": "g"}))
deadline_s = time.monotonic() + 20
while lifted and not file.num_dropped and time.monotonic() < deadline_s:
    time.sleep(0.001)
if lifted:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    file.put(TraceEvent("i", "late mark", "engine", time.monotonic(), {"s": "g"}))
file.close()
print(file.num_dropped)
"""


@pytest.mark.parametrize("then", ["full", "lifted"])
def test_a_full_disk_leaves_whole_events_and_the_rest_is_counted(path: Path, then: str) -> None:
    """A process with a limit on its files meets the error of a full disk in the middle of an event."""
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path), then], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert "cannot be written any more" in run.stderr
    num_dropped = int(run.stdout)
    events = json.loads(path.read_text())
    names = [event["name"] for event in events]
    assert sum("mark" in name for name in names) + num_dropped == 5000 + (then == "lifted")
    assert names.count("mark 1") == 1 and "late mark" not in names
    assert events[-1]["name"] == "end of the trace"  # behind the last whole event there is room for it
    assert events[-1]["args"] == {"events dropped": num_dropped}


def test_a_reader_that_goes_away_leaves_all_later_events_counted(path: Path, make_file: MakeFile) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = make_file()
    os.close(reader)
    for number in range(100):
        file.put(mark(number))
    file.close()
    assert file.num_dropped == 101  # and what the file says of itself


@pytest.mark.parametrize("place", ["a folder", "/dev/full"])
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match=r"--trace .*cannot be written"):
        TraceFile(str(tmp_path) if place == "a folder" else place, 1 << 20, {})


def test_a_lane_shows_what_it_waited_for_with_an_arrow(
    make_file: MakeFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, gate = Clock(), threading.Event()
    monkeypatch.setattr(file_module, "time", clock)
    monkeypatch.setattr(recorder, "time", clock)
    file = make_file()
    tracks = LaneTracks(file)
    load, compute = CpuLane("load", tracks), CpuLane("compute", tracks)

    def copy() -> None:
        gate.wait(30)
        clock.now_s += 0.5

    load.submit(copy, label="promote of r1")
    compute.wait(load.record())
    compute.submit(lambda: None, label="layer 0")
    gate.set()
    compute.drain()
    compute.wait(load.record())  # it is over: no wait
    compute.submit(lambda: None, label="layer 1")
    for lane in (compute, load):
        lane.close()
    file.close()
    trace = read_trace(path)
    assert [(one.name, one.end_us - one.start_us) for one in trace.tracks["compute"]] == [
        ("wait for load: promote of r1", 500_000.0),
        ("layer 0", 0.0),
        ("layer 1", 0.0),
    ]
    assert trace.num_arrows == 1


def test_an_op_that_failed_says_so(make_file: MakeFile, path: Path) -> None:
    file = make_file()
    lane = CpuLane("load", LaneTracks(file))

    def fail() -> None:
        raise OSError("no")

    lane.submit(fail, label="promote of r1")
    lane.close()
    file.close()
    assert [one.args for one in read_trace(path).tracks["load"]] == [{"error": "OSError"}]


def test_a_lane_that_reports_only_launches_shows_no_waits(make_file: MakeFile, path: Path) -> None:
    """As CUDA lanes do: it is not known when the op ran."""
    file = make_file()
    tracks = LaneTracks(file)
    tracks.submitted("load", 1, "promote of r1", ())
    tracks.waited("compute", "load", 1)
    tracks.submitted("compute", 2, "layer 0", ())
    tracks.finished("load", 1, None)
    tracks.finished("compute", 2, None)
    file.close()
    trace = read_trace(path)
    assert [one.name for one in trace.tracks["compute"]] == ["layer 0"] and not trace.num_arrows

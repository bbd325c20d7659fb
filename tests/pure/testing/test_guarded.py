"""A guarded arena: declared work touches it, and undeclared work does not survive the attempt. Each case is a
process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "src"

SCENE = """
import ctypes, mmap, resource
from penstock.contract import Access, Mode
from penstock.lanes.cpu import CpuLane
from penstock.testing.guarded import GuardedArena, GuardedSanitizer

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
PAGE = mmap.PAGESIZE
memory = mmap.mmap(-1, 9 * 2 * PAGE)  # eight slots of two layers, and a padding block
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
sanitizer = GuardedSanitizer()
sanitizer.guard(GuardedArena("device", address, 2 * PAGE, 2, 8))
compute, load = CpuLane("compute", sanitizer), CpuLane("load", sanitizer)

def at(slot, layer):
    return address + (2 * slot + layer) * PAGE

def reads(slot, layer):
    return lambda: seen.append(ctypes.string_at(at(slot, layer), 1))

def writes(slot, layer):
    return lambda: ctypes.memset(at(slot, layer), 7, PAGE)

def submit(lane, op, slot, layers, mode):
    return lane.submit(op, [Access("device", [slot], layers, mode)], label="work")

seen = []
R, W = Mode.READ, Mode.WRITE
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    code = SCENE + body
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    return subprocess.run(
        command, env={"PYTHONPATH": str(SOURCES)}, capture_output=True, text=True, check=False
    )


def test_declared_work_of_several_lanes_goes_where_it_said() -> None:
    done = run("""
import threading
submit(compute, writes(3, 0), 3, (0, 1), W).wait_done(10)
submit(compute, writes(3, 1), 3, (0, 2), W).wait_done(10)
submit(load, reads(3, 1), 3, (1, 2), R).wait_done(10)
gate = threading.Event()
slow = submit(compute, lambda: (gate.wait(), reads(3, 0)()), 3, (0, 2), R)
submit(load, reads(3, 0), 3, (0, 1), R).wait_done(10)  # ends while the other still reads
gate.set()
slow.wait_done(10)
submit(compute, writes(8, 0), 8, (0, 1), W).wait_done(10)  # the padding block belongs to everybody
memory[16 * PAGE] = 1
with sanitizer.lifted():
    assert memory[7 * PAGE] == 7 and memory[0] == 0
assert seen == [bytes([7])] * 3 and not sanitizer.reports, sanitizer.reports
failed = compute.submit(lambda: 1 / 0, label="fails")
compute.submit(writes(0, 0), [Access("device", [0], (0, 1), W)], label="skipped", after=failed)
compute.drain(10)
print("done")
""")
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    "undeclared",
    [
        "submit(compute, reads(4, 0), 3, (0, 2), R)",  # another slot
        "submit(compute, reads(3, 1), 3, (0, 1), R)",  # another layer
        "submit(compute, writes(3, 0), 3, (0, 2), R)",  # a write where a read was declared
        "compute.submit(reads(3, 0), label='work')",  # nothing was declared
        # from outside, when it is over
        "submit(compute, writes(3, 0), 3, (0, 2), W).wait_done(10); reads(3, 0)()",
    ],
)
def test_undeclared_access_ends_the_process_and_shows_the_line(undeclared: str) -> None:
    done = run(f"{undeclared}\ncompute.drain(10)\nprint('survived')\n")
    assert done.returncode == -signal.SIGSEGV and "survived" not in done.stdout
    assert "Segmentation fault" in done.stderr and ("in <lambda>" in done.stderr or "<string>" in done.stderr)

"""What work has seen while it ran is known to whatever is put behind it on its lane, and to nobody else."""

from __future__ import annotations

import threading

from penstock.contract import Access, Mode
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer

WRITE = Access("device", [0], (0, 4), Mode.WRITE)


def found_behind(lane: str) -> list[Kind]:
    """Work on lane "launch" sees a load to be over; then the same slot is written on `lane`."""
    sanitizer = Sanitizer()
    sanitizer.submitted("load", 1, "load", [WRITE])
    sanitizer.submitted("launch", 1, "looks", [])

    def looks() -> None:
        sanitizer.started("launch", 1)
        sanitizer.host_waited("load", 1, 0.0)
        sanitizer.finished("launch", 1, None)

    thread = threading.Thread(target=looks)
    thread.start()
    thread.join()
    sanitizer.submitted(lane, 2, "writes", [WRITE])
    return [report.kind for report in sanitizer.reports]


def test_what_is_put_behind_work_that_saw_a_fence_comes_after_it() -> None:
    assert found_behind("launch") == []


def test_what_is_put_on_another_lane_does_not() -> None:
    assert found_behind("compute") == [Kind.RACE]

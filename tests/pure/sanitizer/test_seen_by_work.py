"""What work has seen while it ran is known to whatever is put behind it on its lane, and to nobody else."""

from __future__ import annotations

import threading

import pytest

from penstock.contract import Access, Mode
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer

WRITE = Access("device", [0], (0, 4), Mode.WRITE)


@pytest.mark.parametrize(("lane", "kinds"), [("launch", []), ("compute", [Kind.RACE])])
def test_what_is_put_behind_work_that_saw_a_fence_comes_after_it(lane: str, kinds: list[Kind]) -> None:
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
    assert [report.kind for report in sanitizer.reports] == kinds

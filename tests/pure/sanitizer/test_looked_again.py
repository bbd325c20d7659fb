"""What a second look at a fence shows, and what a pool that is opened anew inherits from the one before
it."""

from __future__ import annotations

import threading

from penstock.contract import Access, Mode
from penstock.sanitizer.sanitizer import Sanitizer

WRITE = Access("device", [0], (0, 4), Mode.WRITE)


def test_a_look_at_a_lane_that_is_known_to_be_over_shows_what_its_work_saw() -> None:
    """Another lane waited for the work before that had run, and so before it had seen anything."""
    sanitizer = Sanitizer()
    sanitizer.submitted("load", 1, "load", [WRITE])
    sanitizer.submitted("launch", 1, "looks", [])
    sanitizer.waited("other", "launch", 1)

    def looks() -> None:
        sanitizer.started("launch", 1)
        sanitizer.host_waited("load", 1, 0.0)
        sanitizer.finished("launch", 1, None)

    thread = threading.Thread(target=looks)
    thread.start()
    thread.join()
    sanitizer.host_waited("other", 1, 0.0)
    sanitizer.host_waited("launch", 1, 0.0)
    sanitizer.submitted("compute", 1, "writes", [WRITE])
    assert [report.sentence for report in sanitizer.reports] == []


def test_a_pool_that_is_opened_anew_has_no_accesses_yet() -> None:
    """Its memory is another one, whatever was done to that of its name before."""
    sanitizer = Sanitizer()
    for lane in ("before", "after"):
        sanitizer.opened("device", 4)
        sanitizer.moved("device", [0], "free", "reserved", lane)
        sanitizer.submitted(lane, 1, "writes", [WRITE])
    assert [report.sentence for report in sanitizer.reports] == []

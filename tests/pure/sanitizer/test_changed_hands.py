"""Slots that change hands between threads: whoever has one next comes after all that the one before had seen,
and after nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock.contract import Access, Mode
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer

KEY = b"k" * 16
WRITE = Access("host", [0], (0, 4), Mode.WRITE)


def elsewhere(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def landing(seen: bool) -> Sanitizer:
    """A save lands in a slot; the thread that moved the slot on last has `seen` that, or has not."""
    sanitizer = Sanitizer()
    sanitizer.opened("host", 2)
    sanitizer.moved("host", [0], "free", "reserved", "r")
    sanitizer.submitted("save", 1, "save", [WRITE])
    if seen:
        sanitizer.host_waited("save", 1, 0.0)
    sanitizer.moved("host", [0], "reserved", "active", "r")
    return sanitizer


@pytest.mark.parametrize(("seen", "found"), [(True, []), (False, [Kind.LIFETIME])])
def test_who_gives_a_key_has_seen_what_was_seen_before_the_slot_came_to_it(
    seen: bool, found: list[Kind]
) -> None:
    sanitizer = landing(seen)
    elsewhere(lambda: sanitizer.sealed("host", 0, KEY))
    assert [report.kind for report in sanitizer.reports] == found


@pytest.mark.parametrize(("seen", "found"), [(True, []), (False, [Kind.LIFETIME])])
def test_who_gives_a_slot_back_has_seen_what_was_seen_when_it_got_its_key(
    seen: bool, found: list[Kind]
) -> None:
    """A reader's end is seen by the thread that gives the key; another thread gives the slot back."""
    sanitizer = landing(seen=True)
    sanitizer.submitted("load", 1, "load", [Access("host", [0], (0, 4), Mode.READ)])

    def seal() -> None:
        if seen:
            sanitizer.host_waited("load", 1, 0.0)
        sanitizer.sealed("host", 0, KEY)

    elsewhere(seal)
    elsewhere(lambda: sanitizer.moved("host", [0], "active", "idle", "r"))
    assert [report.kind for report in sanitizer.reports] == found


@pytest.mark.parametrize("lent", [False, True])
def test_a_loan_carries_what_its_giver_knew(lent: bool) -> None:
    sanitizer = Sanitizer()
    sanitizer.opened("host", 2)
    sanitizer.moved("host", [0], "free", "active", "r")
    sanitizer.submitted("save", 1, "save", [WRITE])

    def lend() -> None:
        sanitizer.host_waited("save", 1, 0.0)
        if lent:
            sanitizer.lent("host", [0], "r")

    elsewhere(lend)
    elsewhere(lambda: sanitizer.moved("host", [0], "active", "free", "r"))
    assert [report.kind for report in sanitizer.reports] == ([] if lent else [Kind.LIFETIME])


def test_what_a_thread_did_itself_is_over_when_it_gives_the_slot_back() -> None:
    sanitizer = Sanitizer()
    sanitizer.opened("host", 2)
    sanitizer.moved("host", [0], "free", "active", "r")
    sanitizer.touched("copy", [WRITE])
    sanitizer.sealed("host", 0, KEY)
    sanitizer.moved("host", [0], "active", "idle", "r")
    assert sanitizer.reports == []
    elsewhere(lambda: sanitizer.touched("copy", [WRITE]))
    assert sanitizer.reports, "nobody holds it, and it has a key"

"""Whatever happens to an inbox between a look at it and what follows from that: a command is refused, failed
or run, and never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.inbox import Inbox
from penstock.errors import EngineClosed


class Before:
    """A lock; something else happens just before somebody gets it, once."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._happens: Callable[[], object] | None = happens

    def __enter__(self) -> None:
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("how", ["close", "end"])
def test_a_submission_that_comes_a_moment_after_the_end_is_refused(how: str) -> None:
    inbox, told = Inbox(), list[Any]()
    inbox._lock = Before(lambda: getattr(inbox, how)("over"))  # type: ignore[assignment]
    with pytest.raises(EngineClosed, match="over"):
        inbox.put(lambda: told.append("ran"), fail=told.append, only_open=True)
    assert not told and len(inbox) == 0


def test_a_submission_that_comes_a_moment_before_the_end_fails_with_it() -> None:
    inbox, told = Inbox(), list[Any]()
    inbox._lock = Before(lambda: inbox.put(lambda: told.append("ran"), fail=told.append, only_open=True))  # type: ignore[assignment]
    inbox.end("over")
    assert (
        [str(error) for error in told] == ["over"] and isinstance(told[0], EngineClosed) and len(inbox) == 0
    )


def test_other_commands_are_taken_until_the_end_and_dropped_behind_it() -> None:
    inbox, told = Inbox(), list[Any]()
    inbox.close("soon")
    inbox.put(lambda: told.append("cancelled"))
    inbox.run_all()
    inbox._lock = Before(lambda: inbox.end("over"))  # type: ignore[assignment]
    inbox.put(lambda: told.append("ran"), fail=told.append)
    assert told == ["cancelled"] and len(inbox) == 0


def test_whoever_waits_is_woken_after_a_command_is_there_and_not_before() -> None:
    inbox, seen = Inbox(), list[int]()
    inbox.wake = lambda: seen.append(len(inbox))  # type: ignore[method-assign]
    inbox.put(lambda: None)
    inbox.put(lambda: None)
    assert seen == [1, 2]


def test_the_newest_reason_of_a_close_counts_until_the_end_has_one() -> None:
    inbox = Inbox()
    for why in ("the server is shutting down", "the engine is closed"):
        inbox.close(why)
        with pytest.raises(EngineClosed, match=why):
            inbox.check_open()
    inbox.end("the device is gone")
    inbox.close("late")
    inbox.end("later")
    assert inbox.ended == "the device is gone"
    with pytest.raises(EngineClosed, match="the device is gone"):
        inbox.check_open()

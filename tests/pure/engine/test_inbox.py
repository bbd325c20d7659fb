"""What other threads ask of the engine thread: every command is run or failed, exactly once, and a wait is a
wait.

Holds invariant 25: whoever waits for the engine thread is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.inbox import Inbox
from penstock.errors import EngineClosed, Overloaded


class CountedBell:
    """In place of an inbox's own: says how often somebody waited, and lets nobody wait long."""

    def __init__(self) -> None:
        self.rung = False
        self.waits_s: list[float] = []

    def locked(self) -> bool:
        return not self.rung

    def release(self) -> None:
        self.rung = True

    def acquire(self, timeout: float) -> bool:
        self.waits_s.append(timeout)
        rung, self.rung = self.rung, False
        return rung


def fails(told: list[Any], name: str) -> Callable[[BaseException], None]:
    return lambda error: told.append((name, str(error)))


def burst() -> None:
    raise ZeroDivisionError("of all things")


def test_a_command_that_raises_tells_its_waiter_and_the_engine_thread_and_takes_no_other_with_it() -> None:
    inbox, told = Inbox(), list[Any]()
    inbox.put(burst, fail=fails(told, "first"))
    inbox.put(lambda: told.append("second"), fail=fails(told, "second"))
    with pytest.raises(ZeroDivisionError):
        inbox.run_all()
    assert told == [("first", "of all things")] and len(inbox) == 1
    inbox.run_all()
    assert told[1:] == ["second"]


def test_an_inbox_that_ends_fails_what_is_in_it_whatever_one_of_them_does() -> None:
    inbox, told = Inbox(), list[Any]()

    def raises(error: BaseException) -> None:
        raise SystemExit("also this")

    inbox.put(burst, fail=fails(told, "first"))
    inbox.put(burst, fail=raises)
    inbox.put(burst)
    inbox.put(burst, fail=fails(told, "last"))
    inbox.end("the device is gone")
    assert told == [("first", "the device is gone"), ("last", "the device is gone")] and len(inbox) == 0
    inbox.end("once more")
    assert len(told) == 2 and inbox.ended == "the device is gone"


def test_after_the_end_submissions_are_refused_and_everything_else_is_dropped() -> None:
    inbox, told = Inbox(), list[Any]()
    assert inbox.ended is None
    inbox.close("soon")
    assert inbox.ended is None, "somebody still runs what comes"
    inbox.put(lambda: told.append("ran"))
    inbox.end("over")
    inbox.close("the server is shutting down")
    with pytest.raises(EngineClosed, match="over"):
        inbox.put(burst, fail=fails(told, "late"), only_open=True)
    inbox.put(burst, fail=fails(told, "late"))
    assert len(inbox) == 0 and told == []


def test_a_turn_runs_the_oldest_commands_and_leaves_the_rest_to_the_next() -> None:
    inbox, ran = Inbox(), []
    for number in range(150):
        inbox.put(lambda number=number: ran.append(number))  # type: ignore[misc]
    sizes = []
    while inbox:
        inbox.run_some()
        sizes.append(len(ran))
    assert sizes == [64, 128, 150] and ran == list(range(150))


def test_nobody_waits_while_commands_are_left_of_the_turn_before() -> None:
    """Their bell was answered by the wait before that turn: it will not ring for them again."""
    inbox = Inbox()
    bell = inbox._bell = CountedBell()  # type: ignore[assignment]
    for _ in range(100):
        inbox.put(lambda: None)
    bell.acquire(7.0)
    inbox.run_some()
    inbox.wait(7.0)
    assert len(inbox) == 36 and bell.waits_s == [7.0], "the rest is run at once"
    inbox.run_some()
    inbox.wait(7.0)
    assert bell.waits_s == [7.0, 7.0]


class LateBell:
    """Seems not to be rung to whoever asks: as if two had asked before either rang it."""

    def __init__(self, bell: Any) -> None:
        self.release, self.acquire = bell.release, bell.acquire

    def locked(self) -> bool:
        return True


def test_two_who_wake_at_the_same_moment_end_one_wait() -> None:
    inbox = Inbox()
    inbox._bell = LateBell(inbox._bell)  # type: ignore[assignment]
    inbox.wake()
    inbox.wake()
    assert inbox._bell.acquire(timeout=0.0) and not inbox._bell.acquire(timeout=0.0)


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


def test_a_call_gives_its_result_or_error_to_its_caller_and_only_overload_spares_the_engine_thread() -> None:
    inbox, ran = Inbox(), list[int]()

    def full() -> None:
        raise Overloaded("enough")

    answered, refused, broken, late = (inbox.call(work) for work in (lambda: 7, full, burst, burst))
    cancelled = inbox.call(lambda: ran.append(1))
    assert cancelled.cancel()
    with pytest.raises(ZeroDivisionError):
        inbox.run_all()
    assert answered.result(0) == 7
    with pytest.raises(Overloaded):
        refused.result(0)
    with pytest.raises(ZeroDivisionError):
        broken.result(0)
    inbox.end("over")
    with pytest.raises(EngineClosed, match="over"):
        late.result(0)
    assert not ran
    with pytest.raises(EngineClosed):
        inbox.call(burst)

"""Questions to a lane: which wait, which leave, which are refused, and futures in a row behind one."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from penstock.errors import DeadlineExceeded, EngineClosed, Overloaded
from penstock.kv.questions import Questions, run_steps


class Busy:
    """A lane that is at something until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.questions = Questions("snapshots", most=2)
        self.questions.run(lambda: self.go_on.wait(60.0) and None)
        self.done: list[str] = []

    def ask(self, name: str, **options: Any) -> Future[str]:
        def work() -> str:
            self.done.append(name)
            return name

        return self.questions.begin(work, **options)


@pytest.fixture
def busy() -> Iterator[Busy]:
    made = Busy()
    yield made
    made.go_on.set()
    made.questions.close(60.0)


def test_questions_are_answered_in_order_and_one_more_than_may_wait_is_refused(busy: Busy) -> None:
    asked = [busy.ask("a"), busy.ask("b")]
    with pytest.raises(Overloaded, match="2 calls about snapshots wait already"):
        busy.ask("c")
    asked.append(busy.ask("d", goes_on=True))
    busy.go_on.set()
    assert [one.result(60.0) for one in asked] == busy.done == ["a", "b", "d"]


def test_one_that_is_cancelled_leaves_at_once_and_is_not_done(busy: Busy) -> None:
    asked = [busy.ask("a"), busy.ask("b")]
    assert asked[0].cancel() and busy.questions.num_waiting == 1
    asked.append(busy.ask("c"))
    busy.go_on.set()
    assert [one.result(60.0) for one in asked[1:]] == busy.done == ["b", "c"]


def test_equal_ones_share_an_answer_and_are_done_while_one_of_them_waits(busy: Busy) -> None:
    asked = [
        busy.ask("a", same="x"),
        busy.ask("b", same="x"),
        busy.ask("c", same="x"),
        busy.ask("d", same="y"),
    ]
    assert busy.questions.num_waiting == 4
    asked[0].cancel()
    asked[3].cancel()
    busy.go_on.set()
    assert [one.result(60.0) for one in asked[1:3]] == ["a", "a"]
    busy.questions.close(60.0)
    assert busy.done == ["a"]


def test_those_that_wait_are_told_when_it_closes(busy: Busy) -> None:
    asked = [busy.ask("a"), busy.ask("b")]
    with pytest.raises(DeadlineExceeded):
        busy.questions.close(0.0)
    for one in asked:
        with pytest.raises(EngineClosed):
            one.result(60.0)
    with pytest.raises(EngineClosed):
        busy.ask("c")
    busy.go_on.set()
    busy.questions.close(60.0)
    assert busy.done == []


# ------------------------------------------------------------------------------------------- futures in a row


def test_steps_go_on_with_what_each_future_gives_or_raises() -> None:
    first, second = Future[int](), Future[int]()

    def steps() -> Generator[Future[Any], Any, str]:
        number = yield first
        try:
            yield second
        except ValueError as error:
            return f"{number} {error}"
        return "no"

    run = run_steps(steps())
    first.set_result(7)
    assert not run.done()
    second.set_exception(ValueError("bad"))
    assert run.result(0.0) == "7 bad"


@pytest.mark.parametrize("begun", [False, True])
def test_a_cancel_ends_what_is_awaited_and_is_seen_by_the_steps(begun: bool) -> None:
    """Also where what is awaited has begun, once that is over."""
    awaited, seen = Future[int](), list[str]()

    def steps() -> Generator[Future[Any], Any, None]:
        try:
            yield awaited
        except CancelledError:
            seen.append("cancelled")
            raise

    run = run_steps(steps())
    if begun:
        awaited.set_running_or_notify_cancel()
    assert run.cancel() and (awaited.cancelled() or begun)
    if begun:
        awaited.set_result(1)
    assert seen == ["cancelled"] and run.cancelled()


def test_what_a_question_raises_is_the_answer_and_the_next_is_answered(busy: Busy) -> None:
    failing: Future[None] = busy.questions.begin(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    after = busy.ask("after")
    busy.go_on.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(60.0)
    assert after.result(60.0) == "after"

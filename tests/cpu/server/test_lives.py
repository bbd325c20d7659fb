"""The lives of requests: what one did when, how many are kept, and what a reader on another thread sees."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from penstock.contract import KvSource, Request, SamplingParams, Totals
from penstock.server.lives import MOST_CHANGED, MOST_ENDED, MOST_STATES, Lives

SECRETS = ("a name of a session",)


def arrive(lives: Lives, name: str, arrival_s: float = 100.0) -> None:
    lives.request_arrived(
        Request(name, [5] * 40, SamplingParams(), arrival_s=arrival_s, session=SECRETS[0], route="chat"), 0.25
    )


def end(lives: Lives, name: str, at_s: float = 109.0) -> None:
    lives.request_ended(name, "length", Totals(7, 3, 2), at_s)


def test_a_life_has_its_states_with_their_times_and_its_sources() -> None:
    lives, now_s = Lives(), time.monotonic()
    arrive(lives, "a", now_s)
    lives.request_moved("a", "loading", now_s + 1)
    lives.request_moved("a", "running", now_s + 3)
    lives.request_answered("a", KvSource(host=32, computed=8), 2.0, now_s + 4)
    open_one = lives.find("a")
    assert open_one is not None and open_one.finish is open_one.ended_s is open_one.totals is None
    end(lives, "a", now_s + 6)
    life = lives.find("a")
    assert life is not None
    times = [round(at_s, 3) for _, at_s in life.states]
    assert [state for state, _ in life.states] == ["waiting", "loading", "running"] and times == [0.25, 1, 3]
    assert (life.source, life.loaded_s, life.prompt_tokens) == (KvSource(host=32, computed=8), 2.0, 40)
    assert (round(life.first_s or 0, 3), round(life.ended_s or 0, 3)) == (4, 6)
    assert (life.finish, life.totals, life.route) == ("length", Totals(7, 3, 2), "chat")
    assert abs(life.arrived_s - time.time()) < 3600, "it is the time of day"
    assert SECRETS[0].encode() not in msgspec.json.encode(life)
    assert lives.find("b") is None


def test_a_thousand_that_ended_are_kept_and_all_that_are_open() -> None:
    lives = Lives()
    for number in range(3 * MOST_ENDED):
        arrive(lives, f"{number}")
        if number % 3:
            end(lives, f"{number}")
    kept = [number for number in range(3 * MOST_ENDED) if lives.find(f"{number}") is not None]
    assert [number for number in kept if number % 3 == 0] == list(range(0, 3 * MOST_ENDED, 3))
    ended = [number for number in kept if number % 3]
    assert len(ended) == MOST_ENDED and ended[-1] == 3 * MOST_ENDED - 1


def test_states_of_a_request_that_is_retracted_again_and_again_are_bounded() -> None:
    lives = Lives()
    arrive(lives, "a")
    for number in range(3 * MOST_STATES):
        lives.request_moved("a", "running" if number % 2 else "retracted", 101.0 + number)
    life = lives.find("a")
    assert life is not None and len(life.states) == MOST_STATES
    assert life.num_omitted == 2 * MOST_STATES + 1


def test_a_reader_gets_what_changed_since_it_last_asked() -> None:
    lives = Lives()
    arrive(lives, "a")
    arrive(lives, "b")
    first = lives.changed(0)
    assert first.is_all and [life.id for life in first.lives] == ["a", "b"]
    assert lives.changed(first.number).lives == []
    end(lives, "a")
    second = lives.changed(first.number)
    assert [life.id for life in second.lives] == ["a"] and not second.is_all
    assert lives.changed(second.number).lives == []


def test_a_reader_that_asks_late_gets_the_newest_and_is_told_so() -> None:
    lives = Lives()
    since = lives.changed(0).number
    for number in range(2 * MOST_CHANGED):
        arrive(lives, f"{number}")
        end(lives, f"{number}")
        since = since or lives.changed(0).number
    late = lives.changed(since)
    assert late.is_all and [life.id for life in late.lives] == [
        f"{number}" for number in range(MOST_CHANGED, 2 * MOST_CHANGED)
    ]


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """They take the interpreter from each other wherever they may."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_a_reader_on_another_thread_misses_no_request() -> None:
    """The writer goes on while the reader looks, but never so far that the reader is late."""
    lives, is_over = Lives(), threading.Event()
    seen: dict[str, str | None] = {}
    for number in range(100):  # reading takes long enough to be interrupted
        arrive(lives, f"open {number}")
    known = [lives.changed(0).number]
    failures: list[BaseException] = []

    def read() -> None:
        is_last = False
        try:
            while not is_last:
                is_last = is_over.is_set()
                change = lives.changed(known[0])
                assert not (change.is_all and known[0])
                seen.update((life.id, life.finish) for life in change.lives)
                known[0] = change.number
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    by_s = time.monotonic() + 120.0
    for number in range(2_000):
        while 100 + 3 * number - known[0] > MOST_CHANGED // 2 and not failures:
            assert time.monotonic() < by_s
        arrive(lives, f"{number}")
        lives.request_moved(f"{number}", "running", 101.0)
        end(lives, f"{number}")
    is_over.set()
    reader.join(120.0)
    assert not failures and not reader.is_alive()
    assert len(seen) == 2_000 and set(seen.values()) == {"length"}

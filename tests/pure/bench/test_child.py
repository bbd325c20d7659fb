"""Signals while a child starts: they wait, whichever thread gets them, and none is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.bench.child import signals_held

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handled() -> Iterator[list[str]]:
    """What happened; this process's own handlers are back afterwards."""
    before = {number: signal.getsignal(number) for number in ENDING}
    happened: list[str] = []

    def note(number: int, _: Any) -> None:
        happened.append(signal.Signals(number).name)

    for number in ENDING:
        signal.signal(number, note)
    yield happened
    for number, handler in before.items():
        signal.signal(number, handler)


class Other(threading.Thread):
    """A thread that takes signals: it runs before they are held."""

    def __init__(self) -> None:
        super().__init__()
        self._gate = threading.Event()
        self._numbers: tuple[signal.Signals, ...] = ()
        self.start()

    def run(self) -> None:
        self._gate.wait(30)
        for number in self._numbers:
            signal.raise_signal(number)

    def get(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._gate.set()
        self.join()


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_waits_whichever_thread_gets_it(handled: list[str], number: signal.Signals) -> None:
    other, mine = Other(), signal.getsignal(number)
    with signals_held():
        other.get(number)
        handled.append("started")
    assert handled == ["started", number.name]
    with signals_held():
        signal.raise_signal(number)
        handled.append("started")
    assert handled == ["started", number.name] * 2
    assert signal.getsignal(number) == mine and number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_handler_that_raises_does_so_behind_the_block_and_hides_no_other_signal(handled: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mine = signal.getsignal(signal.SIGTERM)
    other = Other()

    def start() -> None:
        with signals_held():
            other.get(signal.SIGINT, signal.SIGTERM)
            handled.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert handled == ["started", "SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) == mine


def test_a_child_inherits_the_mask_and_what_is_ignored(handled: list[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as with nohup
    program = (
        "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "
        "signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    )
    with signals_held():
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert child.stdout.split() == ["True", "True"]
    assert handled == []


def test_outside_the_main_thread_a_child_can_start_too(handled: list[str]) -> None:
    masked: list[bool] = []

    def start() -> None:
        with signals_held():
            masked.append(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert masked == [True] and handled == []

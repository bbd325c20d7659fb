"""`serve` and `chat` give back what they took of the process, however they end."""

from __future__ import annotations

import signal
import socket

from penstock.commands import serve
from penstock.commands.answer import Answer
from penstock.commands.chat import _interrupts
from penstock.commands.session import load_engine
from penstock.contract import SamplingParams
from support.scripted_engine import ScriptedEngine


def test_a_port_that_is_taken_closes_the_engine_that_was_loaded(penstock, tiny, monkeypatch):
    """Its lanes, and the lock of a disk cache, would otherwise stay for as long as the process does."""
    loaded = []
    monkeypatch.setattr(serve, "load_engine", lambda config: loaded.append(load_engine(config)) or loaded[0])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = penstock("serve", *tiny, "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
    assert ran.code == 2 and "cannot listen on 127.0.0.1" in ran.err
    assert loaded[0].ended == "the engine is closed"


def test_an_interrupt_ends_the_answer_while_it_lasts_and_is_the_callers_again_behind_it():
    answer = Answer(ScriptedEngine(), [1], SamplingParams(max_tokens=1))  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGINT)
    with _interrupts(answer):
        signal.raise_signal(signal.SIGINT)
    assert answer._events.get_nowait() is None
    assert signal.getsignal(signal.SIGINT) is before

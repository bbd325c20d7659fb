"""`chat`: turns, commands, a context that fills up, and an interrupt that ends an answer and not the
program."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from penstock.answer import Answer
from penstock.commands.chat import Chat, Conversation, _interrupts
from penstock.contract import SamplingParams
from penstock.errors import ConfigError, InvalidRequest
from penstock.models.tokenizer import ByteTokenizer
from penstock.testing.tiny_models import TINY_LLAMA
from tests.support.adapters import write_random_adapter
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def talk(penstock, tiny, monkeypatch):
    def run(lines: str, *argv: str):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        ran = penstock("chat", *tiny, "--max-tokens", "6", "--temperature", "0", *argv)
        assert ran.code == 0, ran.err
        return ran

    return run


def prompt_lengths(ran) -> list[int]:
    return [int(count) for count in re.findall(r"prompt (\d+) tokens", ran.err)]


def test_a_pipe_gets_one_answer_a_line_and_later_turns_reuse_the_conversations_kv(talk):
    ran = talk("hello\n\nand now?\n")
    assert len(ran.out.splitlines()) == 2 and ran.err.count("6 tokens") == 2
    first, second = prompt_lengths(ran)
    cached = [int(count) for count in re.findall(r"(\d+) from the device cache", ran.err)]
    assert second > first + len("and now?")
    assert cached[0] == 0 and cached[1] >= 16


def test_reset_forgets_quit_leaves_and_unknown_commands_are_named(talk):
    ran = talk("hello\n/reset\nhello\n/help\n/nothing here\n/quit\nnever asked\n")
    first, again = ran.out.splitlines()
    assert first == again
    assert "starts anew" in ran.err and "/reset forgets" in ran.err and "no command /nothing." in ran.err


def test_a_system_message_comes_first_and_an_adapter_answers_if_one_is_given(talk, tmp_path):
    plain, guided = talk("hello\n"), talk("hello\n", "--system", "be brief")
    assert prompt_lengths(guided)[0] - prompt_lengths(plain)[0] == len("system: be brief\n")
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
    assert talk("hello\n", "--lora", f"tuned={adapter}").out != plain.out


def test_a_message_that_cannot_fit_is_refused_and_the_next_one_is_answered(talk):
    ran = talk("x" * 3000 + "\nhello\n")
    assert "not asked: this message alone" in ran.err and len(ran.out.splitlines()) == 1


def test_the_oldest_turns_are_forgotten_aloud_when_the_context_is_full(talk):
    ran = talk("a" * 60 + "\n" + "b" * 60 + "\n" + "c" * 60 + "\n", "--max-model-len", "200")
    assert len(ran.out.splitlines()) == 3 and "the context is full: the oldest 1 " in ran.err


# ----------------------------------------------------------------------------------------------- conversation


def conversation(max_tokens: int = 8, system: str | None = None) -> Conversation:
    return Conversation(ByteTokenizer(512), 200, max_tokens, system)


def test_a_prompt_and_its_answer_always_fit_the_context():
    talk, forgotten = conversation(64), 0
    for i in range(12):
        turn = talk.ask("q" * (10 + 7 * i))
        assert 1 <= turn.max_tokens <= 64 and len(turn.prompt) + turn.max_tokens <= 200
        talk.add("q" * (10 + 7 * i), "a" * turn.max_tokens)
        forgotten += turn.num_forgotten
    assert forgotten > 0


def test_no_more_turns_are_forgotten_than_make_room_and_each_once():
    """Three turns of the same length; the question is longer by one character from step to step, and each
    turn goes when it must."""
    each = len("user: q\nassistant: a\n")
    room = 200 - 8 - 3 * each - len("user: \nassistant: ")
    for extra in range(3 * each + 1):
        talk = conversation()
        for _ in range(3):
            talk.add("q", "a")
        turn, expected = talk.ask("x" * (room + extra)), -(-extra // each)
        assert turn.num_forgotten == expected and turn.prompt.count(ord("q")) == 3 - expected
        assert talk.ask("x" * (room + extra)) == turn._replace(num_forgotten=0)


def test_a_refused_question_forgets_nothing():
    talk = conversation(64, "s")
    talk.add("hi", "ho")
    with pytest.raises(InvalidRequest, match="context holds 200"):
        talk.ask("x" * 180)
    prompt = bytes(talk.ask("next").prompt).decode()
    assert prompt == "system: s\nuser: hi\nassistant: ho\nuser: next\nassistant: "


def test_a_model_without_a_chat_template_cannot_chat():
    class Plain(ByteTokenizer):
        has_chat_template = False

    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(Plain(512), context=200, max_tokens=64)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_is_not_driven_by_what_a_model_writes_and_a_pipe_gets_it_all(is_terminal, monkeypatch):
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, soft_wrap=True, markup=False, color_system=None)
    monkeypatch.setattr("penstock.commands.chat.plain_console", lambda stderr=False: console)
    written = "a b\x1b[2J\x07\x08\x7f\x9bc\r\nd"
    Chat(ScriptedEngine(), conversation(), SamplingParams())._show(written)
    assert out.getvalue() == ("a b[2Jc\nd" if is_terminal else written)


def test_an_interrupt_ends_the_answer_while_it_lasts_and_is_the_callers_again_behind_it():
    answer = Answer(ScriptedEngine(), [1], SamplingParams(max_tokens=1))
    before = signal.getsignal(signal.SIGINT)
    with _interrupts(answer):
        signal.raise_signal(signal.SIGINT)
    assert answer._events.get_nowait() is None and signal.getsignal(signal.SIGINT) is before
    entered: list[bool] = []

    def elsewhere() -> None:
        with _interrupts(answer):  # another thread leaves the handlers of signals alone
            entered.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(30.0)
    assert entered == [True]


# -------------------------------------------------------------------------------------------------- processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}


def chat_argv(tiny) -> list[str]:
    return [sys.executable, "-m", "penstock", "chat", *tiny, "--temperature", "0", "--max-tokens", "1500"]


def test_an_interrupt_ends_the_answer_which_belongs_to_the_conversation_and_the_next_line_is_answered(tiny):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    said, lengths = [], []
    with subprocess.Popen(chat_argv(tiny), **pipes, env=ENVIRONMENT) as running:
        for question in (b"hello\n", b"more\n"):
            running.stdin.write(question)
            running.stdin.flush()
            said.append(running.stdout.read(1))
            assert said[-1] not in (b"", b"\n")
            running.send_signal(signal.SIGINT)
            figures = running.stderr.readline()
            assert b"(cancelled)" in figures
            lengths.append(int(re.search(rb"prompt (\d+) tokens", figures)[1]))
            said[-1] += running.stdout.readline()
        out, err = running.communicate(timeout=120)
    assert (running.returncode, out, err) == (0, b"", b"")
    assert lengths[1] >= lengths[0] + len(b"more\nuser: assistant: ") + 1


class Terminal:
    """The other end of a pseudo-terminal: what was shown, read up to where it was looked for last."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._unread = b""

    def wait_for(self, text: bytes, nudge=lambda: None) -> bytes:
        """`nudge` is done at once, and again for every second without an answer."""
        for _ in range(120):
            if text in self._unread:
                break
            nudge()
            while select.select([self._file], [], [], 1)[0] and text not in self._unread:
                self._unread += os.read(self._file, 4096)
        assert text in self._unread, f"{text!r} was never shown, only {self._unread!r}"
        seen, found, self._unread = self._unread.partition(text)
        return seen + found

    def type(self, text: bytes) -> None:
        os.write(self._file, text)


def test_at_a_terminal_an_interrupt_drops_the_line_and_control_d_leaves(tiny):
    master, slave = pty.openpty()
    running = subprocess.Popen(
        [*chat_argv(tiny), "--max-tokens", "6"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=ENVIRONMENT,
        # a test run in the background is started with the interrupt ignored, and its children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True,
    )
    try:
        os.close(slave)
        terminal = Terminal(master)
        assert b"context of" in terminal.wait_for(b"> ")
        terminal.type(b"typed but dropped")
        terminal.wait_for(b"dropped")
        # Python's line editor misses an interrupt that comes between two keystrokes, as a person's hardly
        # ever does.
        terminal.wait_for(b"> ", nudge=lambda: running.send_signal(signal.SIGINT))
        terminal.type(b"hello\n")
        assert b"6 tokens" in terminal.wait_for(b"device cache")
        terminal.wait_for(b"> ")
        terminal.type(b"\x04")
        assert running.wait(timeout=120) == 0
    finally:
        running.kill()
        running.wait()
        os.close(master)

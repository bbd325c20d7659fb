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

import pytest

from penstock.commands.chat import Conversation
from penstock.errors import ConfigError, InvalidRequest
from penstock.models.tokenizer import ByteTokenizer


@pytest.fixture
def talk(penstock, tiny, monkeypatch):
    def run(lines: str, *argv: str):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return penstock("chat", *tiny, "--max-tokens", "6", "--temperature", "0", *argv)

    return run


def test_a_pipe_gets_one_answer_a_line_and_figures_beside_them(talk):
    ran = talk("hello\n\nand now?\n")
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 2
    assert ran.err.count("6 tokens") == 2


def test_later_turns_carry_the_conversation_and_reuse_its_kv(talk):
    ran = talk("hello\nand now?\n")
    lengths = [int(count) for count in re.findall(r"prompt (\d+) tokens", ran.err)]
    cached = [int(count) for count in re.findall(r"(\d+) from the device cache", ran.err)]
    assert lengths[1] > lengths[0] + len("and now?")
    assert cached[0] == 0 and cached[1] >= 16


def test_reset_forgets_quit_leaves_and_unknown_commands_are_named(talk):
    ran = talk("hello\n/reset\nhello\n/help\n/nothing here\n/quit\nnever asked\n")
    first, again = ran.out.splitlines()
    assert first == again
    assert "starts anew" in ran.err and "/reset forgets" in ran.err and "no command /nothing." in ran.err


def test_a_system_message_comes_first(talk):
    plain, guided = talk("hello\n"), talk("hello\n", "--system", "be brief")
    added = [int(re.search(r"prompt (\d+) tokens", ran.err).group(1)) for ran in (plain, guided)]
    assert added[1] - added[0] == len("system: be brief\n")


def test_a_message_that_cannot_fit_is_refused_and_the_next_one_is_answered(talk):
    ran = talk("x" * 3000 + "\nhello\n")
    assert ran.code == 0
    assert "not asked: this message alone" in ran.err
    assert len(ran.out.splitlines()) == 1


def test_the_oldest_turns_are_forgotten_aloud_when_the_context_is_full(talk):
    ran = talk("a" * 60 + "\n" + "b" * 60 + "\n" + "c" * 60 + "\n", "--max-model-len", "200")
    assert ran.code == 0 and len(ran.out.splitlines()) == 3
    assert "the context is full: the oldest 1 " in ran.err


# ----------------------------------------------------------------------------------------------- conversation


def test_a_prompt_and_its_answer_always_fit_the_context():
    conversation = Conversation(ByteTokenizer(512), context=200, max_tokens=64)
    for i in range(12):
        turn = conversation.ask("q" * (10 + 7 * i))
        assert 1 <= turn.max_tokens <= 64
        assert len(turn.prompt) + turn.max_tokens <= 200
        conversation.add("q" * (10 + 7 * i), "a" * turn.max_tokens)
    assert len(conversation._turns) < 12


def test_no_more_turns_are_forgotten_than_make_room():
    """Three turns of the same length; the question is longer by one character from step to step, and each
    turn goes when it must."""
    each = len("user: q\nassistant: a\n")
    for extra in range(3 * each + 1):
        conversation = Conversation(ByteTokenizer(512), context=200, max_tokens=8)
        for _ in range(3):
            conversation.add("q", "a")
        room = 200 - 8 - 3 * each - len("user: \nassistant: ")
        turn = conversation.ask("x" * (room + extra))
        expected = -(-extra // each)
        assert (turn.num_forgotten, len(conversation._turns)) == (expected, 3 - expected)
        assert len(turn.prompt) + 8 <= 200 and turn.prompt.count(ord("q")) == 3 - expected


def test_a_refused_question_forgets_nothing():
    conversation = Conversation(ByteTokenizer(512), context=200, max_tokens=64, system="s")
    conversation.add("hi", "ho")
    with pytest.raises(InvalidRequest, match="context holds 200"):
        conversation.ask("x" * 180)
    assert len(conversation._turns) == 1
    prompt = bytes(conversation.ask("next").prompt).decode()
    assert prompt == "system: s\nuser: hi\nassistant: ho\nuser: next\nassistant: "


def test_a_model_without_a_chat_template_cannot_chat():
    class Plain(ByteTokenizer):
        has_chat_template = False

    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(Plain(512), context=200, max_tokens=64)


# -------------------------------------------------------------------------------------------------- processes


def _chat_argv(tiny) -> list[str]:
    return [sys.executable, "-m", "penstock", "chat", *tiny, "--temperature", "0", "--max-tokens", "1500"]


def test_an_interrupt_ends_the_answer_and_the_next_line_is_answered(tiny):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(_chat_argv(tiny), **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"}) as running:
        for question in (b"hello\n", b"more\n"):
            running.stdin.write(question)
            running.stdin.flush()
            assert running.stdout.read(1) not in (b"", b"\n")
            running.send_signal(signal.SIGINT)
            assert b"(cancelled)" in running.stderr.readline()
            running.stdout.readline()
        out, err = running.communicate(timeout=120)
    assert (running.returncode, out, err) == (0, b"", b"")


def _interruptible() -> None:
    """A test run in the background is started with the interrupt ignored, and its children would inherit
    that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _Terminal:
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
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    pipes = {"stdin": slave, "stdout": slave, "stderr": slave}
    running = subprocess.Popen(
        [*_chat_argv(tiny), "--max-tokens", "6"],
        **pipes,
        env=env,
        preexec_fn=_interruptible,
        start_new_session=True,
    )
    try:
        os.close(slave)
        terminal = _Terminal(master)
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

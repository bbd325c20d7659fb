"""`penstock generate` and `penstock chat`: one answer, or a conversation, at the terminal or through a pipe.
Owns where text and figures go, the turns, and what of them is forgotten where they do not fit; answers are
elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from rich.text import Text

from penstock.answer import Answer, given_adapter, running_engine
from penstock.config import Config
from penstock.contract import SamplingParams
from penstock.engine.engine import Engine
from penstock.engine.follower import follow_launcher
from penstock.errors import ConfigError, InvalidRequest
from penstock.models.tokenizer import TextCodec
from penstock.progress import plain_console
from penstock.ranks.launched import is_follower

# a quarter of the context is kept free for the answer, where that many tokens are wanted at all
ANSWER_SHARE = 4


def run(args: Namespace, config: Config) -> int:
    if is_follower(config, os.environ):
        follow_launcher(config)
        return 0
    if "prompt" in args:
        return _generate(args, config)
    with running_engine(config) as engine:
        context = engine.max_model_len
        conversation = Conversation(engine.tokenizer, context, args.sampling.max_tokens, args.system)
        Chat(engine, conversation, args.sampling).run()
    return 0


def _generate(args: Namespace, config: Config) -> int:
    """The prompt "-" is stdin; a `raw` one has no chat template."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text:
        raise ConfigError("PROMPT is empty")
    with running_engine(config) as engine:
        encoder, adapter = engine.tokenizer, given_adapter(engine)
        chat = not args.raw and encoder.has_chat_template
        tokens = encoder.encode_chat([_message("user", text)]) if chat else encoder.encode(text)
        sampling = args.sampling
        room = engine.max_model_len - len(tokens)
        # a default yields to the context; what was asked for does not, and the engine says why it cannot be
        if args.max_tokens is None and 1 <= room < sampling.max_tokens:
            sampling = dataclasses.replace(sampling, max_tokens=room)
        answer = Answer(engine, tokens, sampling, adapter, begins=chat)
        for piece in answer.pieces():
            print(piece, end="", flush=True)
        print()
        figures = answer.figures()
        print(figures.line(), file=sys.stderr)
        if args.json is not None:
            name = engine.name if adapter is None else adapter.name
            told = {**dataclasses.asdict(figures), "decode_tokens_per_s": figures.decode_tokens_per_s}
            report = {"model": name, **told, "text": answer.text, "config": config.shown()}
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


# ------------------------------------------------------------------------------------------------------- chat


class Turn(NamedTuple):
    """A question that fits."""

    prompt: list[int]
    max_tokens: int
    num_forgotten: int  # oldest turns that had to go to make room


class Conversation:
    """Messages so far. A turn is a question and its answer; the oldest are forgotten first, the system
    message never."""

    def __init__(
        self, tokenizer: TextCodec, context: int, max_tokens: int, system: str | None = None
    ) -> None:
        if not tokenizer.has_chat_template:
            raise ConfigError("this model has no chat template; use `penstock generate --raw`")
        self._tokenizer = tokenizer
        self._context = context
        self._max_tokens = max_tokens
        self._system = [] if system is None else [_message("system", system)]
        self._messages: list[dict[str, str]] = []  # two a turn

    def ask(self, question: str) -> Turn:
        """The prompt for `question`. Forgets the oldest turns if needed, but none if the question cannot
        fit."""
        reserve = max(1, min(self._max_tokens, self._context // ANSWER_SHARE))
        for first in range(0, len(self._messages) + 1, 2):
            kept = [*self._system, *self._messages[first:], _message("user", question)]
            prompt = self._tokenizer.encode_chat(kept)
            if len(prompt) + reserve <= self._context:
                del self._messages[:first]
                return Turn(prompt, min(self._max_tokens, self._context - len(prompt)), first // 2)
        raise InvalidRequest(
            f"this message alone makes a prompt of {len(prompt)} tokens; "
            f"the context holds {self._context}, of which {reserve} are for the answer"
        )

    def add(self, question: str, answer: str) -> None:
        self._messages += [_message("user", question), _message("assistant", answer)]

    def reset(self) -> None:
        self._messages.clear()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


HELP = "/reset forgets the conversation · /quit or Ctrl-D leaves · /help shows this · Ctrl-C stops an answer"
PROMPT = "\001\033[1;36m\002> \001\033[0m\002"  # the marks tell readline which characters take no room

# What a model writes must not drive the terminal: of the control characters only tab and newline go through.
_UNPRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class Chat:
    """Answers go to stdout, everything said about them to stderr, so that a pipe carries answers alone."""

    def __init__(self, engine: Engine, conversation: Conversation, sampling: SamplingParams) -> None:
        self._engine = engine
        self._adapter = given_adapter(engine)
        self._conversation = conversation
        self._sampling = sampling
        self._out = plain_console()
        self._notes = plain_console(stderr=True)

    def run(self) -> None:
        interactive = sys.stdin.isatty()
        if interactive:
            adapter = "" if self._adapter is None else f" with adapter {self._adapter.name}"
            context = f"context of {self._engine.max_model_len} tokens"
            self._note(f"{self._engine.name}{adapter}, {context}. {HELP}")
        for line in _typed_lines() if interactive else map(str.strip, sys.stdin):
            if line == "/quit":
                return
            if line == "/reset":
                self._conversation.reset()
                self._note("the conversation starts anew")
            elif line == "/help":
                self._note(HELP)
            elif line.startswith("/"):
                self._note(f"there is no command {line.split()[0]}. {HELP}")
            elif line:
                self._answer(line)

    def _answer(self, question: str) -> None:
        try:
            turn = self._conversation.ask(question)
        except InvalidRequest as error:
            self._note(f"not asked: {error}")
            return
        if turn.num_forgotten:
            self._note(
                f"the context is full: the oldest {turn.num_forgotten} of the conversation's turns no "
                "longer count"
            )
        sampling = dataclasses.replace(self._sampling, max_tokens=turn.max_tokens)
        answer = Answer(self._engine, turn.prompt, sampling, self._adapter)
        with _interrupts(answer):
            for piece in answer.pieces():
                self._show(piece)
        self._show("\n")
        self._conversation.add(question, answer.text)
        self._note(answer.figures().line())

    def _show(self, text: str) -> None:
        if self._out.is_terminal:
            self._out.print(Text(text.translate(_UNPRINTABLE)), end="")
        else:  # as it is: the console would drop control characters, carriage returns among them
            self._out.file.write(text)
        self._out.file.flush()

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim")


def _typed_lines() -> Iterator[str]:
    """Until Ctrl-D. Ctrl-C drops the line that is being typed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - editing and history for input()
    to_terminal = sys.stdout.isatty()
    while True:
        try:
            if not to_terminal:  # input() would write its prompt among the answers
                print("> ", end="", file=sys.stderr, flush=True)
            yield input(PROMPT if to_terminal else "").strip()
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


@contextlib.contextmanager
def _interrupts(answer: Answer) -> Iterator[None]:
    """While it lasts, Ctrl-C ends the answer, however often it is pressed, and nothing else."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGINT, lambda *_: answer.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

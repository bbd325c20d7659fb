"""The turns of a chat and how they fit into the context. Owns messages and what is forgotten; knows no terminal and no engine."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import ConfigError, InvalidRequest
from penstock.models.tokenizer import TextCodec

ANSWER_SHARE = 4  # a quarter of the context is kept free for the answer, where that many tokens are wanted at all


class Turn(NamedTuple):
    """A question that fits."""

    prompt: list[int]
    max_tokens: int
    num_forgotten: int  # oldest turns that had to go to make room


class Conversation:
    """Messages so far. A turn is a question and its answer; the oldest are forgotten first, the system message never."""

    def __init__(self, tokenizer: TextCodec, context: int, max_tokens: int, system: str | None = None) -> None:
        if not tokenizer.has_chat_template:
            raise ConfigError("this model has no chat template; use `penstock generate --raw`")
        self._tokenizer = tokenizer
        self._context = context
        self._max_tokens = max_tokens
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[tuple[str, str]] = []

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def ask(self, question: str) -> Turn:
        """The prompt for `question`. Changes nothing but what is forgotten, and not even that where the question cannot fit."""
        reserve = max(1, min(self._max_tokens, self._context // ANSWER_SHARE))
        for num_forgotten in range(len(self._turns) + 1):
            prompt = self._render(self._turns[num_forgotten:], question)
            if len(prompt) + reserve <= self._context:
                del self._turns[:num_forgotten]
                return Turn(prompt, min(self._max_tokens, self._context - len(prompt)), num_forgotten)
        raise InvalidRequest(
            f"this message alone makes a prompt of {len(prompt)} tokens; "
            f"the context holds {self._context}, of which {reserve} are for the answer"
        )

    def add(self, question: str, answer: str) -> None:
        self._turns.append((question, answer))

    def reset(self) -> None:
        self._turns.clear()

    def _render(self, turns: list[tuple[str, str]], question: str) -> list[int]:
        messages = list(self._system)
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": question})
        return self._tokenizer.encode_chat(messages)

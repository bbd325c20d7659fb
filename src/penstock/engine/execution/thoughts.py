"""Reasoning of bounded length. Owns the position of one answer in its reasoning; a grammar may constrain the
answer after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.contract import THINK_MARKS, Thought
from penstock.engine.execution.grammars import Matcher

_OPEN, _CLOSE = (mark.encode() for mark in THINK_MARKS)
_BLANK = b" \n\r\t"


class ThoughtMatcher:
    """Like a `Matcher` of one answer: any token during reasoning, then the tokens that end it, then what
    `answer` allows. With such a grammar, reasoning is forced to begin; without one it is optional. Used by
    one thread at a time."""

    def __init__(self, thought: Thought, token_bytes: Callable[[int], bytes], answer: Matcher | None) -> None:
        self._thought = thought
        self._token_bytes = token_bytes
        self._answer = answer
        self._num = 0  # tokens of reasoning
        self._read = b""  # bytes that may be part of a mark
        self._is_open = thought.begun
        self._due: list[int] = []  # forced tokens
        if not thought.begun and answer is not None:
            self._due = list(thought.opens)
        elif thought.begun and not thought.most:
            self._due = list(thought.closes)
        self.is_past = False  # reasoning is over; other threads may see it late

    @property
    def is_free(self) -> bool:
        """Any token is allowed from now on."""
        return self.is_past and self._answer is None

    @property
    def answering(self) -> Matcher | None:
        """The matcher whose mask applies now."""
        return self._answer if self.is_past else None

    @property
    def due(self) -> int | None:
        """The forced next token. None: any token, or what `answering` allows."""
        return self._due[0] if self._due else None

    def consume(self, tokens: Sequence[int]) -> None:
        for at, token in enumerate(tokens):
            if self.is_past:
                if self._answer is not None:
                    self._answer.consume(tokens[at:])
                return
            self._take(token)

    def _take(self, token: int) -> None:
        self._due = self._due[1:] if self.due == token else []
        self._read += self._token_bytes(token)
        if not self._is_open:
            begun = self._read.lstrip(_BLANK)
            self._is_open = begun.startswith(_OPEN)
            self.is_past = not self._is_open and not _OPEN.startswith(begun)
            self._read = begun.removeprefix(_OPEN) if self._is_open else self._read
        else:
            self._num += 1
        if self._is_open:
            self.is_past = _CLOSE in self._read
            self._read = self._read[1 - len(_CLOSE) :]
            if self._num >= self._thought.most and not self.is_past and not self._due:
                self._due = list(self._thought.closes)

    @property
    def is_over(self) -> bool:
        return self.answering is not None and self.answering.is_over

    @property
    def is_accepting(self) -> bool:
        return self.answering is None or self.answering.is_accepting

    @property
    def error(self) -> str | None:
        return None if self.answering is None else self.answering.error

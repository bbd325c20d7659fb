"""Prompt lookup: proposes the tokens that followed the same tokens before, in the request itself or in recent
requests of its scope. Owns recent texts.

There is no index. A text of 32,768 tokens is searched with one vectorised comparison, which takes as long as
a few dictionary operations and costs nothing for prompts that never need it. The longest match wins; of equal
ones the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST, LEAST = 16, 2  # tokens of a match; a match of one token is chance
OWN_TOKENS = 32768  # last tokens of a request that are searched

Tokens = NDArray[np.int32]
_NOTHING = np.empty(0, np.int32)
_BETWEEN = np.array([-1], np.int32)  # separates two texts


class _Match(NamedTuple):
    length: int  # tokens that agree
    place: int  # of the token after them


def longest(text: Tokens, run: Tokens) -> _Match | None:
    """The longest match of the end of `run` in `text` that is followed by a token of the same text."""
    if len(run) < LEAST or len(text) < LEAST + 1:
        return None
    places = np.flatnonzero((text[1:-1] == run[-1]) & (text[:-2] == run[-2])) + LEAST
    places = places[text[places] != _BETWEEN]
    if not len(places):
        return None
    for length in range(LEAST, min(MOST, len(run))):
        further = places[places > length]
        further = further[text[further - length - 1] == run[-length - 1]]
        if not len(further):
            return _Match(length, int(places[-1]))
        places = further
    return _Match(min(MOST, len(run)), int(places[-1]))


class SharedTexts:
    """Recent texts by scope: tenant, adapter and all else that separates requests. A request finds only texts
    of its own scope."""

    def __init__(self, tokens_per_scope: int = 65536, max_scopes: int = 64) -> None:
        self._tokens_per_scope, self._max_scopes = tokens_per_scope, max_scopes
        self._scopes: OrderedDict[bytes, Tokens] = OrderedDict()  # most recently used last

    def add(self, scope: bytes, text: Tokens) -> None:
        """A request has ended with these accepted tokens."""
        texts = np.concatenate([self.of(scope), text, _BETWEEN])
        self._scopes[scope] = texts[-self._tokens_per_scope - 1 :]
        if len(self._scopes) > self._max_scopes:
            self._scopes.popitem(last=False)

    def of(self, scope: bytes) -> Tokens:
        """The texts of this scope, the newest last."""
        if scope in self._scopes:
            self._scopes.move_to_end(scope)
        return self._scopes.get(scope, _NOTHING)


class NgramProposer:
    """Proposes for one request. Called by one thread; `end` shares its text with later requests."""

    def __init__(self, scope: bytes = b"", shared: SharedTexts | None = None) -> None:
        self._scope, self._shared = scope, shared
        self._text = _NOTHING  # a buffer that grows by half
        self._num = 0

    def propose(self, history: Sequence[int], k: int) -> tuple[int, ...]:
        """At most `k` tokens to follow `history`, perhaps none. `history` is that of the last call with
        accepted tokens appended."""
        text = self._latest(history)
        own = longest(text, text)
        texts = _NOTHING if self._shared is None else self._shared.of(self._scope)
        other = longest(texts, text)
        if other is not None and (own is None or other.length > own.length):
            found = texts[other.place : other.place + k]
            ends = np.flatnonzero(found == _BETWEEN)
            return tuple(found[: ends[0] if len(ends) else k].tolist())
        if own is None:
            return ()
        period = text[own.place :]  # a repeating text is expected to continue repeating
        return tuple(np.resize(period, k).tolist())

    def end(self, history: Sequence[int]) -> None:
        """The request is over with these accepted tokens."""
        if self._shared is not None:
            self._shared.add(self._scope, self._latest(history))

    def _latest(self, history: Sequence[int]) -> Tokens:
        """The last tokens of `history`, of which only the new ones are copied."""
        if len(history) > len(self._text):
            grown = np.empty(len(history) + len(history) // 2 + 64, np.int32)
            grown[: self._num] = self._text[: self._num]
            self._text = grown
        self._text[self._num : len(history)] = history[self._num :]
        self._num = len(history)
        return self._text[max(0, self._num - OWN_TOKENS) : self._num]

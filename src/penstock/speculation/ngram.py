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
_BETWEEN = -1  # separates two texts

Tokens = NDArray[np.int32]


class _Match(NamedTuple):
    length: int  # tokens that agree
    place: int  # of the token after them


def longest(text: Tokens, run: Tokens) -> _Match | None:
    """The longest match of the end of `run` in `text` that is followed by a token of the same text."""
    if len(run) < LEAST or len(text) < LEAST + 1:
        return None
    places = np.flatnonzero((text[1:-1] == run[-1]) & (text[:-2] == run[-2])) + LEAST
    if len(places):
        places = places[text[places] != _BETWEEN]
    length = LEAST
    while len(places) > 1 and length < min(MOST, len(run)):
        further = places[places > length]
        further = further[text[further - length - 1] == run[-length - 1]]
        if not len(further):
            break
        places, length = further, length + 1
    if not len(places):
        return None
    place = int(places[-1])
    most = min(MOST, len(run), place)
    if length < most and len(places) == 1:
        differ = np.flatnonzero(
            text[place - most : place - length] != run[len(run) - most : len(run) - length]
        )
        length = most - int(differ[-1]) - 1 if len(differ) else most
    return _Match(length, place)


class SharedTexts:
    """Recent texts by scope: tenant, adapter and all else that separates requests. A request finds only texts
    of its own scope."""

    def __init__(self, tokens_per_scope: int = 65536, max_scopes: int = 64) -> None:
        self._tokens_per_scope, self._max_scopes = tokens_per_scope, max_scopes
        self._scopes: OrderedDict[bytes, Tokens] = OrderedDict()  # most recently used last
        # not merged yet: texts are often never searched, and many requests end together
        self._new: dict[bytes, list[int]] = {}

    def add(self, scope: bytes, tokens: Sequence[int]) -> None:
        """A request has ended with these accepted tokens. Only the end of a long text is kept."""
        new = self._new.setdefault(scope, [])
        new += tokens[-self._tokens_per_scope :]
        new.append(_BETWEEN)
        self._scopes.setdefault(scope, np.empty(0, np.int32))
        self._scopes.move_to_end(scope)
        if len(new) > self._tokens_per_scope:
            self._take_in(scope)
        while len(self._scopes) > self._max_scopes:
            self._new.pop(self._scopes.popitem(last=False)[0], None)

    def of(self, scope: bytes) -> Tokens:
        """The texts of this scope, the newest last."""
        if scope in self._scopes:
            self._scopes.move_to_end(scope)
            self._take_in(scope)
        return self._scopes.get(scope, np.empty(0, np.int32))

    def _take_in(self, scope: bytes) -> None:
        new = self._new.pop(scope, None)
        if new:
            self._scopes[scope] = np.concatenate([self._scopes[scope], np.array(new, np.int32)])[
                -self._tokens_per_scope - 1 :
            ]

    @property
    def num_tokens(self) -> int:
        return sum(int((self.of(scope) != _BETWEEN).sum()) for scope in list(self._scopes))


class NgramProposer:
    """Proposes for one request. Called by one thread; `end` shares its text with later requests."""

    def __init__(self, scope: bytes = b"", shared: SharedTexts | None = None) -> None:
        self._scope, self._shared = scope, shared
        self._text = np.empty(0, np.int32)  # a buffer that grows by half
        self._num = 0

    def propose(self, history: Sequence[int], k: int) -> tuple[int, ...]:
        """At most `k` tokens to follow `history`, perhaps none. `history` is that of the last call with
        accepted tokens appended."""
        self._extend(history)
        text = self._text[max(0, self._num - OWN_TOKENS) : self._num]
        own = longest(text, text)
        texts = np.empty(0, np.int32) if self._shared is None else self._shared.of(self._scope)
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
            self._shared.add(self._scope, history[-OWN_TOKENS:])

    def _extend(self, history: Sequence[int]) -> None:
        if len(history) > len(self._text):
            grown = np.empty(len(history) + len(history) // 2 + 64, np.int32)
            grown[: self._num] = self._text[: self._num]
            self._text = grown
        self._text[self._num : len(history)] = history[self._num :]
        self._num = len(history)

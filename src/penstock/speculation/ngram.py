"""Prompt lookup: what followed the same tokens before, in the request itself or in recent requests of the same scope. Owns the indexes.

A text is indexed by the hashes of its last n tokens, for a few n; the longest that was seen before wins, and of equals the latest. Each
token costs a fixed number of dictionary operations, and what an index holds is bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.speculation.propose import NOTHING, Proposal

LENGTHS = (16, 8, 4, 3, 2)  # of a match, longest first; what two tokens have in common is often chance already


class _Match(NamedTuple):
    length: int  # tokens that agree
    text: Sequence[int]
    place: int  # of the token behind them


class TextIndex:
    """Where in texts a run of tokens was last seen. Forgets the oldest places beyond `max_places`."""

    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._places: dict[int, tuple[int, Sequence[int], int]] = {}  # by hash of the run and its length: text's number, text, place behind
        self._order: deque[tuple[int, int, int]] = deque()  # hash, text's number, place: in the order of their entry

    def __len__(self) -> int:
        return len(self._order)

    def add(self, number: int, text: Sequence[int], start: int, end: int) -> None:
        """Index the runs that are followed by the tokens from `start` to `end` of `text`, whose tokens never change."""
        for place in range(max(start, LENGTHS[-1]), end):
            for length in LENGTHS:
                if length <= place:
                    key = hash((length, *text[place - length : place]))
                    self._places[key] = (number, text, place)
                    self._order.append((key, number, place))
        while len(self._order) > self._max_places:
            self._forget_oldest()

    def forget(self, number: int) -> None:
        """Every place of the oldest text, which is `number`."""
        while self._order and self._order[0][1] == number:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        key, number, place = self._order.popleft()
        found = self._places.get(key)
        if found is not None and (found[0], found[2]) == (number, place):  # not seen again since
            del self._places[key]

    def longest(self, history: Sequence[int]) -> _Match | None:
        size = len(history)
        for length in LENGTHS:
            if length > size:
                continue
            run = tuple(history[size - length :])
            found = self._places.get(hash((length, *run)))
            if found is not None:
                _, text, place = found
                if tuple(text[place - length : place]) == run:  # and not only their hashes
                    return _Match(length, text, place)
        return None


class SharedTexts:
    """Recent texts by scope: tenant, adapter and whatever else keeps requests apart. A request finds texts of its own scope alone."""

    def __init__(self, tokens_per_scope: int = 65536, max_scopes: int = 64) -> None:
        self._tokens_per_scope, self._max_scopes = tokens_per_scope, max_scopes
        self._scopes: OrderedDict[str, _ScopeTexts] = OrderedDict()  # used last at the end

    def add(self, scope: str, tokens: Sequence[int]) -> None:
        """A request has ended with these accepted tokens. Of a long one the end is kept."""
        if scope not in self._scopes:
            self._scopes[scope] = _ScopeTexts(self._tokens_per_scope)
            while len(self._scopes) > self._max_scopes:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(scope)
        self._scopes[scope].add(tuple(tokens[-self._tokens_per_scope :]))

    def longest(self, scope: str, history: Sequence[int]) -> _Match | None:
        texts = self._scopes.get(scope)
        if texts is None:
            return None
        self._scopes.move_to_end(scope)
        return texts.index.longest(history)

    def forget(self, scope: str) -> None:
        self._scopes.pop(scope, None)

    @property
    def num_tokens(self) -> int:
        return sum(texts.num_tokens for texts in self._scopes.values())


class _ScopeTexts:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._texts: deque[tuple[int, int]] = deque()  # number and tokens, oldest first
        self._num_added = 0
        self.num_tokens = 0
        self.index = TextIndex(len(LENGTHS) * max_tokens)

    def add(self, text: tuple[int, ...]) -> None:
        self._num_added += 1
        self._texts.append((self._num_added, len(text)))
        self.num_tokens += len(text)
        self.index.add(self._num_added, text, 0, len(text))
        while self.num_tokens > self._max_tokens:
            number, size = self._texts.popleft()
            self.num_tokens -= size
            self.index.forget(number)


class NgramProposer:
    """Implements `Proposer` for one request. `end` hands its text to those that come after it."""

    def __init__(self, scope: str = "", shared: SharedTexts | None = None, max_tokens: int = 65536) -> None:
        self._scope, self._shared = scope, shared
        self._index = TextIndex(len(LENGTHS) * max_tokens)
        self._text: list[int] = []

    def propose(self, history: Sequence[int], k: int) -> Proposal:
        """The run that ends with the last token is indexed when something has followed it."""
        known = len(self._text)
        self._text.extend(history[known:])
        self._index.add(0, self._text, known, len(self._text))
        own = self._index.longest(self._text)
        other = None if self._shared is None else self._shared.longest(self._scope, self._text)
        match = other if own is None or (other is not None and other.length > own.length) else own
        if match is None or k <= 0:
            return NOTHING
        found = list(match.text[match.place : match.place + k])
        if match.text is self._text:  # a text that repeats itself goes on to do so
            period = len(self._text) - match.place
            while len(found) < k:
                found.append(found[len(found) - period])
        return Proposal(tuple(found))

    def end(self, history: Sequence[int]) -> None:
        """The request is over with these accepted tokens."""
        if self._shared is not None:
            self._shared.add(self._scope, history)

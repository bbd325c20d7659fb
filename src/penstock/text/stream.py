"""Token ids to text as they arrive: incremental decoding and stop strings. Owns no request; runs on the
thread of the reader.

`tokenizers.decoders.DecodeStream` is not used for any vocabulary: it loses an unfinished character at the
end, holds back U+FFFD that is real text, changes characters of byte tokens that it has emitted, and has no
offsets. docs/tokenizers.md says more.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TokenBytes(Protocol):
    """What a stream needs of a tokenizer: the bytes of its tokens, concatenated without special ones, are the
    text."""

    @property
    def errors(self) -> str:
        """Name of the codec error handler for bytes that are no character."""

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        """`first`: the first token of a text, which may have one blank less."""

    def is_special(self, id: int) -> bool: ...


class TextDelta(NamedTuple):
    """The text that one push made certain."""

    text: str
    stopped: bool  # a stop string is complete: the text ends before it; later tokens are ignored
    # per consumed token: index in the whole output where its text starts or continues
    offsets: tuple[int, ...]


class TextStream:
    """Incremental decoding of one output. Each token is decoded once, and nothing is emitted that a later
    token could take back: neither part of a character nor a possible start of a stop string.

    An output either `begins` a text of its own, decoded as if alone, or continues that of its prompt. A stop
    string that is complete within the first `least` tokens does not end it.
    """

    def __init__(
        self, tokenizer: TokenBytes, stops: Sequence[StopString] = (), begins: bool = False, least: int = 0
    ) -> None:
        self._least = least
        self.first: int | None = None  # index of the consumed token that began a text
        self.stopped_by: str | None = None  # the completed stop string
        self._tokenizer = tokenizer
        self._begins = begins  # and no token had text yet
        self._decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.errors)
        self._num_tokens = 0
        self._stops = stops
        self._matched = [0] * len(stops)  # length of each one's prefix that the decoded text ends with
        self._held = ""  # decoded, but may be the start of a stop string
        self._num_decoded = 0  # characters decoded so far, held ones included
        self._num_out = 0  # characters handed out
        # (tokens, characters) at which both end, from the first that is not emitted on
        self._ends: deque[tuple[int, int]] = deque([(0, 0)])
        self._stopped = False

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """Tokens after the one that completes a stop string are not consumed and have no offset."""
        pieces: list[str] = []
        offsets: list[int] = []
        for token in tokens:
            if self._stopped:
                break
            data = b"" if self._tokenizer.is_special(token) else self._tokenizer.token_bytes(token)
            if self._begins and data:
                self._begins, self.first = False, self._num_tokens
                data = self._tokenizer.token_bytes(token, first=True)
            pending = self._decoder.getstate()[0]
            if not pending:
                self._note_end()
            self._num_tokens += 1
            offsets.append(self._num_decoded + (self._num_broken(pending, data) if pending and data else 0))
            text = self._decoder.decode(data)
            self._num_decoded += len(text)
            piece = self._release(text) if self._stops else text
            self._num_out += len(piece)
            pieces.append(piece)
        return TextDelta("".join(pieces), self._stopped, tuple(offsets))

    def finish(self) -> str:
        """The held text, when no more tokens come. Empty after a stop string."""
        if self._stopped:
            return ""
        text = self._decoder.decode(b"", final=True)
        if self._stops:
            text = self._release(text)
            text, self._held = text + self._held, ""
        self._num_out += len(text)
        return text

    @property
    def num_shown(self) -> int:
        """Tokens whose whole text was emitted. Excludes a token that ends in a stop string, and all after
        it."""
        if not self._decoder.getstate()[0]:
            self._note_end()
        return max(tokens for tokens, characters in self._ends if characters <= self._num_out)

    def _note_end(self) -> None:
        """A character ends with the last token."""
        self._ends.append((self._num_tokens, self._num_decoded))
        while len(self._ends) > 1 and self._ends[1][1] <= self._num_out:
            self._ends.popleft()

    def _num_broken(self, pending: bytes, data: bytes) -> int:
        """Replacement characters for the unfinished character `pending`, if `data` does not continue it."""
        joined = pending + data[:1]
        try:
            joined.decode("utf-8")
        except UnicodeDecodeError as error:
            # "unexpected end of data": still unfinished, but going on. Anything else is a break.
            return (
                0
                if error.reason == ("unexpected end of data")
                else len(pending.decode("utf-8", self._tokenizer.errors))
            )
        return 0

    def _release(self, text: str) -> str:
        """The certain part of the held and the new text, up to a stop string."""
        start = len(self._held)
        self._held += text
        for end, character in enumerate(text, start + 1):
            # The longest stop string that ends here starts first. All of them advance independently.
            self._matched = [
                stop.advance(matched, character)
                for stop, matched in zip(self._stops, self._matched, strict=True)
            ]
            completed = max(
                matched if matched == stop.length else 0
                for stop, matched in zip(self._stops, self._matched, strict=True)
            )
            if completed and self._num_tokens > self._least:
                self.stopped_by = self._held[end - completed : end]
                certain, self._held, self._stopped = self._held[: end - completed], "", True
                return certain
        cut = len(self._held) - max(self._matched)
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


class StopString:
    """A stop string and how far a match of it survives a wrong character (Knuth-Morris-Pratt). Shared by all
    outputs of a request: its table grows with what they match, so its cost is that of the output, however
    long the stop string is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        # for every prefix met, the length of its longest proper suffix that is also a prefix
        self._borders = [0]

    def advance(self, matched: int, character: str) -> int:
        """Length of the match after `character`, given `matched` before. Constant amortised time."""
        while matched and (matched == self.length or self.text[matched] != character):
            matched = self._border(matched)
        return matched + (self.text[matched] == character)

    def _border(self, length: int) -> int:
        """Border of the prefix of `length` characters."""
        borders = self._borders
        while len(borders) < length:
            next_one, border = self.text[len(borders)], borders[-1]
            while border and self.text[border] != next_one:
                border = borders[border - 1]
            borders.append(border + (self.text[border] == next_one))
        return borders[length - 1]

"""Token ids to text as they arrive: incremental decoding and stop strings. Owns no request; runs on the reader's thread."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TokenBytes(Protocol):
    """What a stream needs of a tokenizer: its text is the bytes of its tokens in a row, special ones left out."""

    def token_bytes(self, id: int) -> bytes: ...

    def is_special(self, id: int) -> bool: ...


class TextDelta(NamedTuple):
    """What became certain by one push."""

    text: str
    stopped: bool  # a stop string is complete: the text ends before it, and further tokens are ignored
    offsets: tuple[int, ...]  # per consumed token, the character of the whole output at which its text starts or goes on


class TextStream:
    """Incremental decoding of one output. Each token is decoded once, and nothing is emitted that a later token could take back:
    neither part of a character nor a possible start of a stop string."""

    def __init__(self, tokenizer: TokenBytes, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopString(text) for text in stop]
        self._held = ""  # decoded, but possibly the start of a stop string
        self._num_decoded = 0  # characters decoded so far, held ones included
        self._stopped = False

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """Tokens behind the one that completes a stop string are not consumed and have no offset."""
        pieces: list[str] = []
        offsets: list[int] = []
        for token in tokens:
            if self._stopped:
                break
            data = b"" if self._tokenizer.is_special(token) else self._tokenizer.token_bytes(token)
            offsets.append(self._num_decoded + self._breaks_character(data))
            pieces.append(self._release(self._decoder.decode(data)))
        return TextDelta("".join(pieces), self._stopped, tuple(offsets))

    def finish(self) -> str:
        """What was held back, when no more tokens come. Empty after a stop string."""
        if self._stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _breaks_character(self, data: bytes) -> bool:
        """Whether `data` leaves the unfinished character before it unfinished for good, so that it becomes a replacement character."""
        pending = self._decoder.getstate()[0]
        if not pending or not data:
            return False
        joined = pending + data[:1]
        try:
            joined.decode("utf-8")
        except UnicodeDecodeError as error:
            # "unexpected end of data": still unfinished, but going on. Anything else is a break.
            return error.reason != "unexpected end of data"
        return False

    def _release(self, text: str) -> str:
        """The part of the held and the new text that is certain, up to a stop string."""
        self._num_decoded += len(text)
        if not self._stops:
            return text
        start = len(self._held)
        self._held += text
        for end, character in enumerate(text, start + 1):
            # The longest of those that end here starts first. All of them advance: each follows the text for itself.
            completed = max([stop.length for stop in self._stops if stop.advance(character)], default=0)
            if completed:
                certain, self._held, self._stopped = self._held[: end - completed], "", True
                return certain
        keep = max(stop.matched for stop in self._stops)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


class _StopString:
    """Knuth-Morris-Pratt: after each character, how much of the stop string the text ends with. Constant amortised time."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._borders = _borders(text)
        self.length = len(text)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Take one character; True when the stop string is complete."""
        while self.matched and self._text[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self._text[self.matched] == character:
            self.matched += 1
        return self.matched == self.length


def _borders(text: str) -> list[int]:
    """For every prefix, the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders

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

    def __init__(self, tokenizer: TokenBytes, stops: Sequence[StopString] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._matched = [0] * len(stops)  # how much of each the decoded text ends with
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
            self._matched = [stop.advance(matched, character) for stop, matched in zip(self._stops, self._matched, strict=True)]
            completed = max(matched if matched == stop.length else 0 for stop, matched in zip(self._stops, self._matched, strict=True))
            if completed:
                certain, self._held, self._stopped = self._held[: end - completed], "", True
                return certain
        cut = len(self._held) - max(self._matched)
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


class StopString:
    """A stop string and how far a match of it survives a wrong character (Knuth-Morris-Pratt). Shared by all outputs of a request:
    its table grows with what they match, so its cost is that of the output, however long the stop string is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        self._borders = [0]  # for every prefix met, the length of its longest proper suffix that is also a prefix

    def advance(self, matched: int, character: str) -> int:
        """How much of it the output ends with behind `character`, where it was `matched` before. Constant amortised time."""
        while matched and (matched == self.length or self.text[matched] != character):
            matched = self._border(matched)
        return matched + (self.text[matched] == character)

    def _border(self, length: int) -> int:
        """Of the prefix of `length` characters."""
        borders = self._borders
        while len(borders) < length:
            next_one, border = self.text[len(borders)], borders[-1]
            while border and self.text[border] != next_one:
                border = borders[border - 1]
            borders.append(border + (self.text[border] == next_one))
        return borders[length - 1]


def stop_strings(texts: Sequence[str]) -> tuple[StopString, ...]:
    return tuple(map(StopString, texts))

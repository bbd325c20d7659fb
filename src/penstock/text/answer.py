"""Token ids to text that is final, as they arrive: incremental decoding, stop strings, the choices of an
answer with their scores, and the format by which text is split into reasoning, content and calls. Owns no
request and no shape of an API; runs on the thread of the reader.

`tokenizers.decoders.DecodeStream` is not used for any vocabulary: it loses an unfinished character at the
end, holds back U+FFFD that is real text, changes characters of byte tokens that it has emitted, and has no
offsets. docs/tokenizers.md says more.
"""

from __future__ import annotations

import codecs
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import uuid4

from penstock.contract import FinishReason, KvSource, SamplingParams, TokenEvent, TokenLogprob
from penstock.errors import EngineClosed, PenstockError, StepFailed
from penstock.text.parsers import (
    MARKERS,
    READERS,
    THINK,
    MessageParser,
    calls_or_content,
    named_call,
    thinking,
)

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec


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


# ----------------------------------------------------------------------------------------------- the choices


class Prompt(NamedTuple):
    """One prompt as the engine takes it."""

    ids: Sequence[int]
    text: str = ""  # only if the client gave text, or asked for an echo
    # character offsets of its tokens in the text; only if they are to be scored
    offsets: Sequence[int] = ()
    ends: bool = False  # an answer to it is a separate text; otherwise it continues this one
    variables: Mapping[str, Any] = {}


class ScoredToken(NamedTuple):
    """A token with its score and the character of the choice's text at which it begins."""

    token: int
    score: TokenLogprob | None  # None: the first token of a prompt
    offset: int
    first: bool = False  # it began a text, and may lack a leading blank


class ChoiceDelta(NamedTuple):
    """New output of one choice since the last call."""

    text: str
    tokens: tuple[ScoredToken, ...]
    finish: str | None
    stop: str | None = None  # the stop string that ended it
    ids: tuple[int, ...] = ()  # token ids, if requested; not held back as text is
    # of the prompt's tokens, if requested: once, with the first output
    prompt: Sequence[TokenLogprob | None] | None = None


class Wants(NamedTuple):
    """Requested parts of a choice besides the generated text."""

    echo: bool = False  # the prompt before it
    ids: bool = False  # the ids of its tokens
    stop: bool = False  # the stop string that ended it
    prompt_scores: bool = False


class ChoiceText:
    """One choice of a reply: takes its token events, returns text that is final, and knows how and why it
    ended."""

    def __init__(
        self,
        tokenizer: TokenBytes,
        sampling: SamplingParams,
        stops: Sequence[StopString],
        prompt: Prompt,
        wants: Wants,
    ) -> None:
        self.num_tokens = 0  # generated tokens; includes a token that ended the choice, though it has no text
        self.num_drafts = self.num_accepted = 0  # drafts proposed for it, and kept
        self.source: KvSource | None = None
        self.scored = False  # it attends to a part of its context
        self.expert_wait_s: float | None = None  # None: no step waits for experts
        self.finish: str | None = None
        self.failure: PenstockError | None = None  # why there will be no finish
        # A grammar has seen the blank that a text may begin with, so the client gets it, too.
        self._stream = TextStream(
            tokenizer, stops, begins=prompt.ends and sampling.grammar is None, least=sampling.min_tokens
        )
        self._num_top = sampling.logprobs  # alternatives of each token; None: no scores
        self._wants_prompt_scores = wants.prompt_scores
        self._with_stop = wants.stop
        self._echo = prompt if wants.echo else None
        self._base = len(prompt.text) if wants.echo else 0  # characters before the generated text
        self._shown = 0  # characters returned
        self._ids: list[int] | None = [] if wants.ids else None  # since the last call
        self._held: list[ScoredToken] = []  # tokens whose text may still belong to a stop string

    @property
    def num_shown(self) -> int:
        """Generated tokens whose whole text was returned."""
        return self._stream.num_shown

    def feed(self, events: Sequence[TokenEvent]) -> ChoiceDelta:
        """If the engine gave the request up, earlier output is still returned, and `failure` is set."""
        parts: list[str] = []
        ended, of_prompt = False, None
        for event in events:
            if self.finish is not None or self.failure is not None:
                break
            if self.source is None:
                self.source, self.scored = event.source, event.scored
            if self._wants_prompt_scores and event.prompt_logprobs is not None:
                of_prompt = event.prompt_logprobs
            self.num_drafts += event.drafted
            self.num_accepted += event.accepted
            if event.expert_wait_s is not None:
                self.expert_wait_s = (self.expert_wait_s or 0.0) + event.expert_wait_s
            if self._echo is not None:
                parts.append(self._open(self._echo, event))
                self._echo = None
            parts.append(self._take(event))
            if event.finish is not None and self.finish is None:
                parts.append(self._end(event))
                ended = True
        text = "".join(parts)
        self._shown += len(text)
        # Tokens whose text is out; at an end without a stop string, also tokens without text of their own.
        ready = len(self._held) if ended else sum(token.offset < self._shown for token in self._held)
        released, self._held = tuple(self._held[:ready]), self._held[ready:]
        ids = tuple(self._ids or ())
        if self._ids is not None:
            self._ids.clear()
        return ChoiceDelta(text, released, self.finish, self._stream.stopped_by, ids, of_prompt)

    def _open(self, echo: Prompt, event: TokenEvent) -> str:
        """The echoed prompt, before anything else; it waits for the first event, which has its scores."""
        if self._num_top is not None and event.prompt_logprobs is not None:
            scores = (score and score.with_top(self._num_top) for score in event.prompt_logprobs)
            self._held.extend(map(ScoredToken, echo.ids, scores, echo.offsets))
        return echo.text

    def _take(self, event: TokenEvent) -> str:
        """Tokens after a stop string have no offset and do not count, in whatever batches they came."""
        delta = self._stream.push(event.tokens)
        if self._num_top is not None and event.logprobs is not None:
            offsets = (self._base + offset for offset in delta.offsets)
            firsts = (number == self._stream.first for number in itertools.count(self.num_tokens))
            self._held.extend(map(ScoredToken, event.tokens, event.logprobs, offsets, firsts))
        self.num_tokens += len(delta.offsets)
        if self._ids is not None:
            self._ids.extend(event.tokens[: len(delta.offsets)])
        if delta.stopped:
            self.finish = "stop"
        return (
            delta.text + (self._stream.stopped_by or "") if delta.stopped and self._with_stop else delta.text
        )

    def _end(self, event: TokenEvent) -> str:
        if event.finish is FinishReason.ERROR:
            self.failure = event.failure or StepFailed(event.error or "the generation failed")
        elif event.finish is FinishReason.CANCELLED:
            self.failure = EngineClosed("the server is shutting down and gave this request up")
        else:
            self.num_tokens += event.stop_token is not None
            if self._ids is not None and event.stop_token is not None:
                self._ids.append(event.stop_token)
            self.finish = str(event.finish)
        return self._stream.finish()


# ------------------------------------------------------------------------------------------- the format of it


class AnswerFormat(NamedTuple):
    """How to parse the answers to one request."""

    reader: str  # one of READERS
    forced: str | None  # the one function whose arguments are the whole text
    thinks: bool  # reasoning may come first
    begun: bool  # the prompt has already opened it
    most_calls: int | None
    names: frozenset[str] = frozenset()  # of the tools
    is_formed: bool = False  # a grammar makes the answer either calls of these or content

    def parser(self) -> MessageParser:
        parser = MessageParser(self.most_calls, self.names if self.is_formed else None, self.names)
        if self.is_formed:
            reading = calls_or_content(parser, self.reader)
        else:
            reading = (
                named_call(parser, self.forced) if self.forced is not None else READERS[self.reader](parser)
            )
        parser.start(thinking(parser, reading, self.begun) if self.thinks else reading)
        return parser

    def call_id(self) -> str:
        """Mistral's templates take ids of nine characters only."""
        return uuid4().hex[:9] if self.reader == "mistral" else f"call_{uuid4().hex[:24]}"


PLAIN = AnswerFormat("none", None, False, False, None)  # all of it is content


class MarkedTokens(NamedTuple):
    """A tokenizer whose markers have text, though they be special tokens: the parser has to see them. Alone,
    all of them have."""

    token_bytes: Callable[..., bytes]
    errors: str
    hidden: Callable[[int], bool] = lambda id: False
    shown: frozenset[int] = frozenset()

    def is_special(self, id: int) -> bool:
        return id not in self.shown and self.hidden(id)


def showing(tokenizer: TextCodec, reading: AnswerFormat) -> MarkedTokens:
    """What the text of an answer in that format is made with."""
    marks = (*MARKERS[reading.reader], *(THINK if reading.thinks else ()))
    ids = [tokenizer.encode(mark, add_special=False) for mark in marks]
    return MarkedTokens(
        tokenizer.token_bytes,
        tokenizer.errors,
        tokenizer.is_special,
        frozenset(some[0] for some in ids if len(some) == 1),
    )

"""One choice of an answer: from its token events to text that is final, with scores, and the format by which
that text is split into reasoning, content and calls. Owns no request and no shape of an API."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
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
from penstock.text.stream import StopString, TextStream, TokenBytes

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec


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


class Wants(NamedTuple):
    """Requested parts of a choice besides the generated text."""

    echo: bool = False  # the prompt before it
    ids: bool = False  # the ids of its tokens
    stop: bool = False  # the stop string that ended it


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
        self.finish: str | None = None
        self.failure: PenstockError | None = None  # why there will be no finish
        # A grammar has seen the blank that a text may begin with, so the client gets it, too.
        self._stream = TextStream(
            tokenizer, stops, begins=prompt.ends and sampling.grammar is None, least=sampling.min_tokens
        )
        self._scored = sampling.logprobs is not None
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
        ended = False
        for event in events:
            if self.finish is not None or self.failure is not None:
                break
            if self.source is None:
                self.source, self.scored = event.source, event.scored
            self.num_drafts += event.drafted
            self.num_accepted += event.accepted
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
        return ChoiceDelta(text, released, self.finish, self._stream.stopped_by, ids)

    def _open(self, echo: Prompt, event: TokenEvent) -> str:
        """The echoed prompt, before anything else; it waits for the first event, which has its scores."""
        if self._scored and event.prompt_logprobs is not None:
            self._held.extend(map(ScoredToken, echo.ids, event.prompt_logprobs, echo.offsets))
        return echo.text

    def _take(self, event: TokenEvent) -> str:
        """Tokens after a stop string have no offset and do not count, in whatever batches they came."""
        delta = self._stream.push(event.tokens)
        if self._scored and event.logprobs is not None:
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
    # of the tools, if a grammar makes the answer either calls or content
    names: frozenset[str] | None = None

    def parser(self) -> MessageParser:
        parser = MessageParser(self.most_calls, self.names)
        if self.names is not None:
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

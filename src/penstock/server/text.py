"""From what a client wrote to token ids, and from token events back to text with its scores. Owns no HTTP and no engine request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from penstock.contract import FinishReason, KvSource, SamplingParams, TokenEvent, TokenLogprob
from penstock.engine.text import TextStream
from penstock.errors import EngineClosed, InvalidRequest, StepFailed

if TYPE_CHECKING:
    from penstock.models.tokenizer import Tokenizer
    from penstock.server.schema import ChatBody, CompletionBody, Message


class Prompt(NamedTuple):
    """One prompt as the engine takes it."""

    ids: Sequence[int]
    text: str = ""  # only where the client gave text, or asked to have it echoed


class ScoredToken(NamedTuple):
    """A token with its score and the character of the choice's text at which it begins."""

    token: int
    score: TokenLogprob | None  # None: the first token of a prompt, which nothing precedes
    offset: int


class Piece(NamedTuple):
    """What one choice has to say since it was last asked."""

    text: str
    tokens: tuple[ScoredToken, ...]
    finish: str | None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish)


# -------------------------------------------------------------------------------------------------------------- prompts


def completion_prompts(tokenizer: Tokenizer, body: CompletionBody) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return [_encoded(tokenizer, given)]
    if isinstance(given[0], int):
        return [_checked(tokenizer, given, bool(body.echo))]
    if isinstance(given[0], str):
        return [_encoded(tokenizer, text) for text in given]
    return [_checked(tokenizer, ids, bool(body.echo)) for ids in given]


def chat_prompts(tokenizer: Tokenizer, body: ChatBody) -> list[Prompt]:
    return [Prompt(encode_chat(tokenizer, body.messages))]


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    if not tokenizer.has_chat_template:
        raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
    text = tokenizer.apply_chat([message.as_dict() for message in messages])
    return tokenizer.encode(text, add_special=False)


def _encoded(tokenizer: Tokenizer, text: str) -> Prompt:
    return Prompt(tokenizer.encode(text), text)


def _checked(tokenizer: Tokenizer, ids: Sequence[int], echo: bool) -> Prompt:
    check_ids(tokenizer, ids, "prompt")
    return Prompt(ids, tokenizer.decode(ids, skip_special=False) if echo else "")


def check_ids(tokenizer: Tokenizer, ids: Sequence[int], param: str) -> None:
    if ids and max(ids) >= tokenizer.vocab_size:
        raise InvalidRequest(f"{param}: token id {max(ids)} is outside the vocabulary of {tokenizer.vocab_size}", param)


def prompt_offsets(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The character of the prompt's text at which each of its tokens begins.

    Counted in bytes that begin a character, since a token may begin in the middle of one. Where the tokenizer put special tokens
    before the client's text, those lie at 0 and do not shift the rest.
    """
    pieces = [tokenizer.token_bytes(token) for token in prompt.ids]
    lengths = [sum((byte & 0xC0) != 0x80 for byte in piece) for piece in pieces]
    starts = [0, *accumulate(lengths)]
    total = starts.pop()
    extra = total - len(prompt.text) if b"".join(pieces).endswith(prompt.text.encode()) else 0
    return [max(0, start - extra) for start in starts]


# -------------------------------------------------------------------------------------------------------------- choices


class ChoiceText:
    """One choice of a reply: takes its token events, hands out text that is final, and knows how and why it ended."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, echo: Prompt | None) -> None:
        self.num_tokens = 0  # generated; a token that ended the choice counts, though it has no text
        self.source: KvSource | None = None
        self.finish: str | None = None
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, sampling.stop)
        self._by_token = bool(sampling.stop)  # so that where a choice stops does not depend on how its tokens were batched
        self._scored = sampling.logprobs is not None
        self._echo = echo
        self._base = 0 if echo is None else len(echo.text)  # characters before the generated text
        self._shown = 0  # characters handed out
        self._held: list[ScoredToken] = []  # their text may still turn out to belong to a stop string

    def feed(self, events: Sequence[TokenEvent]) -> Piece:
        """Raises StepFailed or EngineClosed where the engine gave the request up."""
        parts: list[str] = []
        ended = False
        for event in events:
            if self.finish is not None:
                break
            if self.source is None:
                self.source = event.source
            parts.append(self._open(event))
            parts.extend(self._take(event))
            if event.finish is not None and self.finish is None:
                parts.append(self._end(event))
                ended = True
        text = "".join(parts)
        self._shown += len(text)
        return Piece(text, self._release(ended), self.finish)

    def _open(self, event: TokenEvent) -> str:
        """The echoed prompt, before anything else; it waits for the first event, which has its scores."""
        echo, self._echo = self._echo, None
        if echo is None:
            return ""
        if self._scored and event.prompt_logprobs is not None:
            offsets = prompt_offsets(self._tokenizer, echo)
            self._held.extend(map(ScoredToken, echo.ids, event.prompt_logprobs, offsets))
        return echo.text

    def _take(self, event: TokenEvent) -> list[str]:
        parts: list[str] = []
        width = 1 if self._by_token else max(1, len(event.tokens))
        for start in range(0, len(event.tokens), width):
            run = event.tokens[start : start + width]
            delta = self._stream.push(run)
            parts.append(delta.text)
            self.num_tokens += len(run)
            if self._scored and event.logprobs is not None:
                scores = event.logprobs[start : start + width]
                offsets = (self._base + offset for offset in delta.offsets)
                self._held.extend(map(ScoredToken, run, scores, offsets))
            if delta.stopped:
                self.finish = "stop"
                break
        return parts

    def _end(self, event: TokenEvent) -> str:
        if event.finish is FinishReason.ERROR:
            raise StepFailed(event.error or "the generation failed")
        if event.finish is FinishReason.CANCELLED:
            raise EngineClosed("the server is shutting down and gave this request up")
        self.num_tokens += event.stop_token is not None
        self.finish = str(event.finish)
        return self._stream.finish()

    def _release(self, ended: bool) -> tuple[ScoredToken, ...]:
        """Tokens whose text is out; at an end that no stop string made, those without text of their own too."""
        ready = len(self._held) if ended else sum(token.offset < self._shown for token in self._held)
        released, self._held = tuple(self._held[:ready]), self._held[ready:]
        return released

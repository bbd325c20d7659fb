"""From what a client wrote to token ids, and from token events back to text with its scores. Owns no HTTP and no engine request."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from penstock.contract import FinishReason, KvSource, SamplingParams, SnapshotContent, TokenEvent, TokenLogprob
from penstock.engine.text import StopString, TextStream
from penstock.errors import ContextExceeded, EngineClosed, InvalidRequest, PenstockError, PromptTooLong, StepFailed
from penstock.server.schema import ChatBody, CompletionBody, Message, PrefetchBody
from penstock.server.tools import MarkedTokens, told

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec
    from penstock.server.tools import Tool


_MESSAGES = msgspec.json.Decoder(list[Message])


class Prompt(NamedTuple):
    """One prompt as the engine takes it."""

    ids: Sequence[int]
    text: str = ""  # only where the client gave text, or asked to have it echoed
    offsets: Sequence[int] = ()  # characters of the text at which its tokens begin; only where they are to be scored
    ends: bool = False  # an answer to it is a text of its own; elsewhere it goes on with this one's


class ScoredToken(NamedTuple):
    """A token with its score and the character of the choice's text at which it begins."""

    token: int
    score: TokenLogprob | None  # None: the first token of a prompt, which nothing precedes
    offset: int
    first: bool = False  # it began a text, and may have a blank less than elsewhere


class ChoiceDelta(NamedTuple):
    """What one choice has to say since it was last asked."""

    text: str
    tokens: tuple[ScoredToken, ...]
    finish: str | None
    stop: str | None = None  # the stop string that ended it

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish)


# -------------------------------------------------------------------------------------------------------------- prompts


class Rules(NamedTuple):
    """What a server takes as a prompt."""

    most: int  # tokens
    special_in_text: bool = False  # whether messages may spell special tokens


@contextlib.contextmanager
def within_context() -> Iterator[None]:
    """Around the making of a prompt that is to be computed: one that is too long does not fit the context."""
    try:
        yield
    except PromptTooLong as error:
        raise ContextExceeded(error.most, f"your prompt has {error.what}", error.param or "prompt") from None


def completion_prompts(tokenizer: TextCodec, body: CompletionBody, rules: Rules) -> list[Prompt]:
    """One for each item."""
    prompts = []
    for item in _items(body):
        ids = encode_prompt(tokenizer, item, rules)
        prompt = Prompt(ids, item if isinstance(item, str) else tokenizer.decode(item, skip_special=False) if body.echo else "")
        scored = body.echo and body.logprobs is not None
        prompts.append(prompt._replace(offsets=prompt_offsets(tokenizer, prompt)) if scored else prompt)
    return prompts


def _items(body: CompletionBody) -> Sequence[Any]:
    """A list of plain numbers is one prompt; a list of anything else is as many prompts as it has items."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [body.prompt] if isinstance(body.prompt[0], int) else body.prompt


def chat_prompts(tokenizer: TextCodec, body: ChatBody, rules: Rules) -> list[Prompt]:
    return [Prompt(encode_chat(tokenizer, body.messages, rules, body.asking.shown), ends=True)]


def prompts_after(content: SnapshotContent, tokenizer: TextCodec, body: CompletionBody | ChatBody, rules: Rules) -> list[Prompt]:
    """What goes on from a snapshot. Of a text: its tokens, then those of each prompt, cut by themselves. Of a conversation: its messages,
    then the request's, written by the template as one: the prompt of somebody who sends everything, whatever the template puts where."""
    if isinstance(body, CompletionBody):
        before = np.frombuffer(content.tokens, np.uint32).tolist()
        return [Prompt([*before, *encode_prompt(tokenizer, item, rules, begins=False)]) for item in _items(body)]
    if not content.messages:
        message = "this snapshot was not taken of messages, so a conversation cannot be continued from it: use /v1/completions"
        raise InvalidRequest(message, "snapshot")
    whole = msgspec.structs.replace(body, messages=[*_MESSAGES.decode(content.messages), *body.messages])
    return chat_prompts(tokenizer, whole, rules)


def encode_chat(tokenizer: TextCodec, messages: Sequence[Message], rules: Rules, tools: Sequence[Tool] = ()) -> list[int]:
    if not tokenizer.has_chat_template:
        raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
    as_dicts = [message.as_dict() for message in messages]
    if tools or any(message.tool_calls or message.role == "tool" for message in messages):
        told_messages, told_tools = told(as_dicts, tools, tokenizer)
        return tokenizer.encode_chat(told_messages, rules.most, rules.special_in_text, told_tools)
    return tokenizer.encode_chat(as_dicts, rules.most, rules.special_in_text)


def encode_prompt(tokenizer: TextCodec, given: str | Sequence[int], rules: Rules, begins: bool = True) -> Sequence[int]:
    """Ids that the model does not have are the engine's to refuse. `begins`: a text gets the tokens that stand before one."""
    if isinstance(given, str):
        return tokenizer.encode(given, add_special=begins, most=rules.most)
    check_num_tokens(given, rules.most, "prompt")
    return given


def encode_given(tokenizer: TextCodec, body: PrefetchBody, rules: Rules) -> list[int]:
    """The prompt or the messages of a body that has one of them, as a generating route would take it."""
    with within_context():
        if body.messages is not None:
            return encode_chat(tokenizer, body.messages, rules)
        return list(encode_prompt(tokenizer, body.prompt or "", rules))


def check_num_tokens(ids: Sequence[int], most: int, param: str) -> None:
    if len(ids) > most:
        raise PromptTooLong(f"{len(ids)} tokens", most, param)


def check_ids(tokenizer: TextCodec, ids: Sequence[int], param: str) -> None:
    highest = max(ids, default=0)
    if highest >= tokenizer.vocab_size:
        raise InvalidRequest(f"{param}: token id {highest} is outside the vocabulary of {tokenizer.vocab_size}", param)


def prompt_offsets(tokenizer: TextCodec, prompt: Prompt) -> list[int]:
    """The character of the prompt's text at which each of its tokens begins, or which it continues: as for generated tokens.

    What the tokenizer put around the client's text (special tokens, a leading blank) lies at its ends and does not shift the rest.
    """
    stream = TextStream(MarkedTokens(tokenizer.token_bytes, tokenizer.errors))  # special tokens are what the client wrote
    delta = stream.push(prompt.ids)
    text = delta.text + stream.finish()
    extra = max(0, text.rfind(prompt.text))
    return [min(max(0, offset - extra), len(prompt.text)) for offset in delta.offsets] if prompt.text in text else list(delta.offsets)


# -------------------------------------------------------------------------------------------------------------- choices


class ChoiceText:
    """One choice of a reply: takes its token events, hands out text that is final, and knows how and why it ended."""

    def __init__(self, tokenizer: TextCodec, sampling: SamplingParams, stops: Sequence[StopString], prompt: Prompt, echo: bool) -> None:
        self.num_tokens = 0  # generated; a token that ended the choice counts, though it has no text
        self.num_drafts = self.num_accepted = 0  # proposed for it, and kept
        self.source: KvSource | None = None
        self.scored = False  # it attends to a part of its context
        self.finish: str | None = None
        self.failure: PenstockError | None = None  # why there will be no finish
        self._stream = TextStream(tokenizer, stops, begins=prompt.ends)
        self._scored = sampling.logprobs is not None
        self._echo = prompt if echo else None
        self._base = len(prompt.text) if echo else 0  # characters before the generated text
        self._shown = 0  # characters handed out
        self._held: list[ScoredToken] = []  # their text may still turn out to belong to a stop string

    def feed(self, events: Sequence[TokenEvent]) -> ChoiceDelta:
        """Where the engine gave the request up, what came before is still said, and `failure` is set."""
        parts: list[str] = []
        ended = False
        for event in events:
            if self.finish is not None or self.failure is not None:
                break
            if self.source is None:
                self.source, self.scored = event.source, event.scored
            self.num_drafts += event.drafted
            self.num_accepted += event.accepted
            parts.append(self._open(event))
            parts.append(self._take(event))
            if event.finish is not None and self.finish is None:
                parts.append(self._end(event))
                ended = True
        text = "".join(parts)
        self._shown += len(text)
        return ChoiceDelta(text, self._release(ended), self.finish, self._stream.stopped_by)

    def _open(self, event: TokenEvent) -> str:
        """The echoed prompt, before anything else; it waits for the first event, which has its scores."""
        echo, self._echo = self._echo, None
        if echo is None:
            return ""
        if self._scored and event.prompt_logprobs is not None:
            self._held.extend(map(ScoredToken, echo.ids, event.prompt_logprobs, echo.offsets))
        return echo.text

    def _take(self, event: TokenEvent) -> str:
        """Tokens behind a stop string have no offset and do not count, however they were batched."""
        delta = self._stream.push(event.tokens)
        if self._scored and event.logprobs is not None:
            offsets = (self._base + offset for offset in delta.offsets)
            firsts = (number == self._stream.first for number in itertools.count(self.num_tokens))
            self._held.extend(map(ScoredToken, event.tokens, event.logprobs, offsets, firsts))
        self.num_tokens += len(delta.offsets)
        if delta.stopped:
            self.finish = "stop"
        return delta.text

    def _end(self, event: TokenEvent) -> str:
        if event.finish is FinishReason.ERROR:
            self.failure = event.failure or StepFailed(event.error or "the generation failed")
        elif event.finish is FinishReason.CANCELLED:
            self.failure = EngineClosed("the server is shutting down and gave this request up")
        else:
            self.num_tokens += event.stop_token is not None
            self.finish = str(event.finish)
        return self._stream.finish()

    def _release(self, ended: bool) -> tuple[ScoredToken, ...]:
        """Tokens whose text is out; at an end that no stop string made, those without text of their own too."""
        ready = len(self._held) if ended else sum(token.offset < self._shown for token in self._held)
        released, self._held = tuple(self._held[:ready]), self._held[ready:]
        return released

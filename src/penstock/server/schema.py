"""The JSON that clients send: strict types, no unknown fields, errors that name the field. Owns shapes, not
their meaning."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from starlette.datastructures import QueryParams

from penstock.config import MAX_SPANS, ResidencyName
from penstock.contract import (
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_RETAIN_S,
    MAX_SEED,
    CacheHint,
    SamplingParams,
    Weight,
)
from penstock.errors import InvalidRequest
from penstock.server.thinking import Effort, Variables, check_variables
from penstock.server.tools import (
    ASKING,
    MAX_DEPTH,
    Asked,
    ResponseFormat,
    Schema,
    Strict,
    StructuredOutputs,
    Text,
    ToolCall,
    ToolChoice,
    ToolRequest,
    Tools,
    Words,
    asked_of,
    is_deep,
)

MAX_INT = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_CONTAINERS = 16_384  # lists and objects in one body: each costs as much as hundreds of characters of text
MAX_LABEL = 1024  # characters of a label that is only compared
MAX_TTL_S = 10 * 365 * 86_400.0  # of a snapshot; a longer one lasts until it is deleted
ANY_LABEL = ("",)  # of a query: any text up to the length of a label

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Truncation = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT)]
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL)]
SnapshotName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$(?!\n)")]
Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)]
Spans = Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=MAX_SPANS)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
Bias = Annotated[float, msgspec.Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
Biases = Annotated[dict[TokenId, Bias], msgspec.Meta(max_length=MAX_LOGIT_BIAS)]
Metadata = Annotated[  # with OpenAI's own limits
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
Unsupported: TypeAlias = None  # a known field that is not supported: only null is accepted


_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES, "seed", "ignore_eos", "min_tokens")


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk
    # OpenAI's: padding, so that the size of a chunk does not reveal the length of its text
    include_obfuscation: bool | None = None


class CacheHintOptions(Strict):
    """Hints about a session's KV. Null leaves the earlier value."""

    retain_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_RETAIN_S)] | None = None
    priority: Literal["low", "normal", "high"] | None = None
    release: bool | None = None

    def hint(self) -> CacheHint:
        return CacheHint(
            self.retain_s,
            None if self.priority is None else Weight[self.priority.upper()],
            bool(self.release),
        )


class OwnFields(Strict):
    """Penstock's own fields, accepted by every generating route of every API."""

    seed: int | None = None
    cache_salt: Label | None = None
    priority: Priority | None = None  # lower is handled earlier
    session_id: Name | None = None
    cache_hint: CacheHintOptions | None = None
    kv_residency: ResidencyName | None = None
    kv_pin_spans: Spans | None = None
    snapshot: SnapshotName | None = None  # the snapshot that the prompt continues


def shared_fields(body: msgspec.Struct) -> dict[str, Any]:
    """Those of a body of another API that a chat has, too."""
    return {
        name: getattr(body, name) for name in body.__struct_fields__ if name in ChatBody.__struct_fields__
    }


class Generating(OwnFields, kw_only=True):
    """Fields that both generating routes share. Null means absent: some clients always send every field."""

    model: str
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_cache_key: Name | None = None  # OpenAI's name for a session_id
    logit_bias: Biases | None = None
    prompt_logprobs: int | None = None  # vLLM's, as are the next three
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: Truncation | None = None  # -1: what fits
    # At most one of these, listed in `tools.ASKING`, may be used.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Words | None = None
    guided_grammar: Text | None = None

    def asked(self) -> Asked | None:
        return asked_of(self) if any(getattr(self, name) is not None for name in ASKING) else None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _params(
        self,
        defaults: Mapping[str, Any],
        max_tokens: int,
        logprobs: int | None,
        echoed_logprobs: int | None = None,
    ) -> SamplingParams:
        allowed = self.allowed_token_ids
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=max(
                (num for num in (self.prompt_logprobs, echoed_logprobs) if num is not None), default=None
            ),
            allowed_token_ids=None if allowed is None else frozenset(allowed),
            bad_words=tuple(self.bad_words or ()),
            stop=self.stops,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            logit_bias=tuple((self.logit_bias or {}).items()),
            grammar=None if (asked := self.asked()) is None else asked.grammar,
            **{**defaults, **given},
        )

    def num_kept(self, fitting: int) -> int | None:
        """Tokens of each prompt that are kept, the last ones; None: all. `fitting`: those of a prompt and its
        answer that fit."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, fitting - (DEFAULT_COMPLETION_TOKENS if self.most_tokens is None else self.most_tokens))

    @property
    def most_tokens(self) -> int | None:
        """The given limit of the answer."""
        return self.max_tokens

    def options(self) -> dict[str, Any]:
        """Of a `Submission`: tenant, priority, session and residency."""
        return {
            "cache_salt": self.cache_salt or "",
            "priority": self.priority or 0,
            "session": self.session_id or self.prompt_cache_key or "",
            "hint": None if self.cache_hint is None else self.cache_hint.hint(),
            "residency": self.kv_residency,
            "pins": self.kv_pin_spans,
        }

    def _check_shared(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed where stream is true", "stream_options")
        if self.truncate_prompt_tokens is not None:
            self._check_truncated()
        if self.cache_hint is not None:
            self.cache_hint.hint()
            if self.session_id is None and self.prompt_cache_key is None:
                message = "cache_hint is about a session: name it by session_id or prompt_cache_key"
                raise InvalidRequest(message, "cache_hint")

    def _check_truncated(self) -> None:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be at least 1, or -1 for what fits", "truncate_prompt_tokens"
            )
        if self.snapshot is not None:
            message = "truncate_prompt_tokens and snapshot cannot be combined: the snapshot comes first"
            raise InvalidRequest(message, "truncate_prompt_tokens")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """In an error, a refused field has the name that the client used."""
    try:
        yield
    except InvalidRequest as error:
        if (name := names.get(error.param or "")) is not None:
            error.args = (
                str(error).replace(f"{error.param}", name, 1)
                if str(error).startswith(f"{error.param}")
                else str(error),
            )
            error.param = name
        raise


class CompletionBody(Generating, kw_only=True):
    api: ClassVar = "completions"  # whose fields without effect are accepted, see `ignored`
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = None

    @property
    def items(self) -> Sequence[Any]:
        """A list of plain numbers is one prompt; a list of anything else has one prompt per item."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    @property
    def num_prompts(self) -> int:
        return len(self.items)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        """Everything that can be refused before a token is counted."""
        self._check_shared()
        if isinstance(self.prompt, list):
            kinds = set(map(type, self.prompt))
            if len(kinds) != 1:
                what = (
                    ("must not be empty")
                    if not kinds
                    else ("must not mix strings, token ids and lists of token ids")
                )
                raise InvalidRequest(f"prompt {what}", "prompt")
        if self.snapshot is not None and self.echo:
            raise InvalidRequest(
                "echo and snapshot cannot be combined: the snapshot's text is not sent back", "echo"
            )
        self.sampling(MAX_INT, {})

    def sampling(self, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """`room`: tokens that fit the context after the prompt. `defaults`: the model's values for missing
        fields."""
        max_tokens = (
            min(DEFAULT_COMPLETION_TOKENS, max(room, 1)) if self.max_tokens is None else self.max_tokens
        )
        return self._params(defaults, max_tokens, self.num_logprobs, self.num_logprobs if self.echo else None)


class TextPart(Strict):
    type: Literal["text"]
    text: str


def text_of(content: Any) -> str:
    """Parts are separate pieces of text, so a line break keeps them apart."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


class Message(Strict):
    """One turn. The null-only fields are those that clients copy from our own replies."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None  # only an assistant that calls tools may leave it out
    name: Label | None = None  # of a participant; accepted without effect
    refusal: Unsupported = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None  # of a tool's result
    reasoning_content: str | None = None  # our earlier output; not shown to the model again
    function_call: Unsupported = None
    audio: Unsupported = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("content must not be `null`, but for an assistant's message with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id goes with the role tool, and with no other")

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role  # OpenAI's later name for it
        fields: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if self.tool_calls:
            fields["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return fields


Messages = Annotated[list[Message], msgspec.Meta(min_length=1)]


class ChatBody(Generating, kw_only=True):
    api: ClassVar = "chat"
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None  # vLLM's, as are those below
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    thinking_token_budget: Count | None = None

    num_prompts = 1
    echo = False

    @property
    def asking(self) -> ToolRequest:
        choice = self.tool_choice or ("auto" if self.tools else "none")
        return ToolRequest(self.tools or (), choice, self.parallel_tool_calls is not False)

    def asked(self) -> Asked | None:
        """A forced call comes before a form. If calls are optional, the form is that of an answer without
        calls."""
        return self.asking.asked() or super().asked()

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Everything that can be refused before a token is counted."""
        self._check_shared()
        self.asking.check(self.tool_choice)
        if is_deep(self.chat_template_kwargs):
            raise InvalidRequest(
                f"chat_template_kwargs is nested deeper than {MAX_DEPTH} lists and objects",
                "chat_template_kwargs",
            )
        check_variables(self.chat_template_kwargs or {})
        if self.continue_final_message:
            self._check_continued()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed where logprobs is true", "top_logprobs")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ: give one of them", "max_tokens"
            )
        with renamed({"logprobs": "top_logprobs"}):
            self.sampling(MAX_INT, {})

    def _check_continued(self) -> None:
        if self.add_generation_prompt:
            message = (
                "continue_final_message and add_generation_prompt cannot both be true: the prompt ends "
                "with the last message, or behind it"
            )
            raise InvalidRequest(message, "continue_final_message")
        if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
            message = "continue_final_message needs a last message of the role assistant, without tool_calls"
            raise InvalidRequest(message, "continue_final_message")

    def sampling(self, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """`room`: tokens that fit the context after the prompt; all of it, unless the client asks for less.
        `defaults`: as above."""
        given = self.most_tokens
        return self._params(defaults, max(room, 1) if given is None else given, self.num_logprobs)

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class TokenizeBody(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True  # of a prompt; a chat template writes its own

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give prompt or messages, and not both", "prompt")


class DetokenizeBody(Strict):
    tokens: list[TokenId]
    model: str | None = None


class PrefetchBody(Strict):
    """A session by name, or a prompt as a generating route would take it."""

    model: str | None = None
    cache_salt: Label | None = None
    session_id: Name | None = None
    prompt: str | Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    messages: Messages | None = None

    def check(self) -> None:
        if sum(one is not None for one in (self.session_id, self.prompt, self.messages)) != 1:
            raise InvalidRequest("give one of session_id, prompt and messages", "session_id")


class SnapshotBody(PrefetchBody):
    """The same, with the options of a snapshot."""

    name: SnapshotName | None = None
    # how much of it; all if left out
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)] | None = None
    # until it is deleted if left out
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] | None = None


class LoadLoraBody(Strict):
    lora_name: Label
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class UnloadLoraBody(Strict):
    lora_name: Label


class NoFields(Strict):
    """For routes that take a query: a field in a body would be ignored."""


def nth_seed(seed: int, i: int) -> int:
    """The seed of choice `i`; wraps around after the largest seed."""
    return (seed + i + MAX_SEED) % (2 * MAX_SEED + 1) - MAX_SEED


# --------------------------------------------------------------------------------------------------- decoding

Body = TypeVar("Body", bound=msgspec.Struct)

_AT = " - at `$"  # msgspec's separator between the fault and its place
_AT_KEY = " - at `key` in `$"  # the same if the fault is in a field's name
_KIND = re.compile(r"Invalid (enum )?value (?P<value>'.*')", re.DOTALL)
_FIELD = re.compile(r"Object (?P<verb>contains unknown|missing required) field `(?P<field>.*)`", re.DOTALL)


@functools.cache
def decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    """Cached: building one takes milliseconds. Generating routes build theirs before the first request."""
    return msgspec.json.Decoder(kind)


def decode(data: bytes, kind: type[Body]) -> Body:
    """`data` as `kind`; anything else is an InvalidRequest that names the field."""
    check_shape(data)
    try:
        body: Body = decoder(kind).decode(data)
        return body
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "valid UTF-8" if isinstance(error, UnicodeDecodeError) else "valid JSON"
        raise InvalidRequest(f"the body is not {what}: {error}") from None


def convert(given: Any, kind: type[Body]) -> Body:
    """The same for a value parsed from JSON."""
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


def check_query(given: QueryParams, **allowed: tuple[str, ...]) -> None:
    """Nothing in a query is ignored: each name must be known, given once, and have an allowed value."""
    for name, value in given.multi_items():
        if name not in allowed:
            raise InvalidRequest(f"{name} is not a query parameter of this path", name)
        if len(given.getlist(name)) > 1:
            raise InvalidRequest(f"{name} is given more than once", name)
        if allowed[name] is ANY_LABEL:
            if len(value) > MAX_LABEL:
                raise InvalidRequest(f"{name} has {len(value)} characters, and {MAX_LABEL} is the most", name)
        elif value not in allowed[name]:
            raise InvalidRequest(f"{name} must be one of {', '.join(allowed[name])}, got {value!r}", name)


def check_shape(data: bytes) -> None:
    """Decoding a body holds the GIL. Text and numbers are fast, but a million small lists take a second. So
    this counts brackets outside strings."""
    if data.count(b"[") + data.count(b"{") <= MAX_CONTAINERS:
        return
    # without escapes every quote begins or ends a string
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    # no legal body has more strings than this
    outside = b"".join(bare.split(b'"', 32 * MAX_CONTAINERS)[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        raise InvalidRequest(f"the body has more than {MAX_CONTAINERS} lists and objects")


def _no_such(path: str) -> str | None:
    """Why an object of an unknown type is refused, if known."""
    if not path.endswith(".type"):
        return None
    if path.startswith("tools["):
        return "this server runs no tools itself; functions are called by the client"
    return "this server reads and writes text" if re.search(r"(content|output|system)\[", path) else None


def _explain(text: str) -> InvalidRequest:
    what, found, path = text.replace(_AT_KEY, _AT).rpartition(_AT)
    what, path = (what, path.removeprefix(".").removesuffix("`")) if found else (text, "")
    if field := _FIELD.fullmatch(what):
        name = f"{path}.{field['field']}" if path else field["field"]
        known = (
            ("is required and missing")
            if field["verb"].startswith("missing")
            else ("is not a field that this server knows")
        )
        return InvalidRequest(f"{name} {known}", name)
    if (kind := _KIND.fullmatch(what)) and (reason := _no_such(path)):
        return InvalidRequest(f"{path}: {kind['value']} is not supported here: {reason}", path)
    if what.startswith("Expected `null`"):
        return InvalidRequest(f"{path} is not supported by this server", path)
    return InvalidRequest(f"{path or 'the body'}: {what[0].lower()}{what[1:]}", path or None)

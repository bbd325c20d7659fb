"""Anthropic's `/v1/messages`: what its clients send, as the chat that it means, and the chat's answer as they expect it. Owns these shapes;
the model sees a chat like any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from penstock.config import ResidencyName
from penstock.contract import SamplingParams
from penstock.errors import InvalidRequest
from penstock.server.replies import Blocks, BlockStep, Heading, Json, event
from penstock.server.schema import (
    CacheHintOptions,
    ChatBody,
    Count,
    Label,
    Message,
    Name,
    Neutral,
    Priority,
    Spans,
    TopK,
    Unsupported,
    check_neutral,
    own_fields,
)
from penstock.server.structured import JsonSchema, ResponseFormat
from penstock.server.text import ChoiceDelta
from penstock.server.tools import (
    MOST_TOOLS,
    PLAIN,
    AnswerFormat,
    CalledFunction,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec
    from penstock.server.faults import Fault

QUERIES = {"beta": ("true",)}  # of Anthropic's clients for what is in beta there; the fields say what is asked for
NEUTRAL: dict[str, Neutral] = {
    "service_tier": Neutral(("auto", "standard_only"), "there is one tier; priority says who goes first"),
    "speed": Neutral(("standard",), "there is one speed"),
}
NO_EFFECT = ("cache_control", "metadata")  # prefixes are cached wherever they are; labels are nobody's concern here
# What a field of the chat is called here.
NAMES = {"stop": "stop_sequences", "prompt": "messages", "response_format": "output_config.format"}
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}

CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
ToolName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    cache_control: CacheControl | None = None


class TextBlock(_Block, tag="text"):
    text: str
    citations: Unsupported = None


class ToolUseBlock(_Block, tag="tool_use"):
    id: CallId
    name: ToolName
    input: dict[str, Any]
    caller: Unsupported = None
    toolset_name: Unsupported = None


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: CallId
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    toolset_name: Unsupported = None


class ThinkingBlock(_Block, tag="thinking"):
    """What we gave out before: not shown to the model again."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
_ROLES: dict[type[_Block], tuple[str, ...]] = {
    ToolUseBlock: ("assistant",),
    ToolResultBlock: ("user",),
    ThinkingBlock: ("assistant",),
    RedactedThinkingBlock: ("assistant",),
}


class MessageTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        for block in self.content if isinstance(self.content, list) else ():
            if self.role not in _ROLES.get(type(block), (self.role,)):
                raise ValueError(f"a block of the type {block.__struct_config__.tag} is not of the role {self.role}")

    def messages(self) -> Iterator[Message]:
        """Results of tools are messages of their own; what else is said stays together, in its order."""
        if isinstance(self.content, str):
            yield Message(role=self.role, content=self.content)
            return
        said: list[str] = []
        calls: list[ToolCall] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                if said:
                    yield Message(role=self.role, content="\n".join(said))
                    said = []
                yield _result(block)
            elif isinstance(block, TextBlock):
                said.append(block.text)
            elif isinstance(block, ToolUseBlock):
                called = CalledFunction(block.name, json.dumps(block.input, ensure_ascii=False))
                calls.append(ToolCall(id=block.id, function=called))
        if said or calls or self.role == "assistant":
            yield Message(role=self.role, content="\n".join(said), tool_calls=calls or None)


def _result(block: ToolResultBlock) -> Message:
    """Chats have no mark for a failure, so the text says it."""
    text = block.content if isinstance(block.content, str) else "\n".join(part.text for part in block.content or ())
    return Message(role="tool", content=f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id)


class CustomTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None  # as of chats: forced calls always fit
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # inputs are always streamed as they come
    defer_loading: Literal[False] | None = None
    input_examples: Unsupported = None
    allowed_callers: Unsupported = None

    def tool(self) -> Tool:
        function = Function(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)
        return Tool(type="function", function=function)


class Choice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with the type tool, and with no other")

    def choice(self) -> ToolChoice:
        if self.name is not None:
            return NamedTool("function", NamedFunction(self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class ThinkingOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized"] | None = None

    def check(self, reasons: bool) -> None:
        if self.type == "enabled":
            message = "reasoning cannot be bounded: leave thinking out, or give the type adaptive; a model that reasons does so by itself"
            raise InvalidRequest(message, "thinking")
        if self.type == "disabled" and reasons:
            raise InvalidRequest("this model reasons before it answers, and cannot be told not to", "thinking")


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: OutputFormat | None = None
    effort: Literal["high"] | None = None  # Anthropic's default; these models have no such setting


class UserMetadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: Label | None = None


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Everything that a prompt is made of."""

    model: str
    messages: Annotated[list[MessageTurn], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[CustomTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: str | None = None
    context_management: Unsupported = None
    mcp_servers: Unsupported = None
    user_profile_id: Unsupported = None
    workspace_id: Unsupported = None

    def chat_messages(self) -> list[Message]:
        if self.messages[-1].role == "assistant":
            message = "messages: the last one is the assistant's; the model answers the last message and does not continue it"
            raise InvalidRequest(message, "messages")
        system = self.system if isinstance(self.system, str) else "\n".join(block.text for block in self.system or ())
        turns = [message for turn in self.messages for message in turn.messages()]
        return [Message(role="system", content=system), *turns] if system else turns

    def chat_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        form = None if self.output_config is None else self.output_config.format
        schema = None if form is None else JsonSchema(name="answer", schema=form.schema)
        return {
            "model": self.model,
            "messages": self.chat_messages(),
            "tools": None if self.tools is None else [tool.tool() for tool in self.tools],
            "tool_choice": None if choice is None else choice.choice(),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": None if schema is None else ResponseFormat(type="json_schema", json_schema=schema),
        }


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    metadata: UserMetadata | None = None
    service_tier: str | None = None
    container: Unsupported = None
    diagnostics: Unsupported = None
    inference_geo: Unsupported = None
    # Our own.
    seed: int | None = None
    cache_salt: Label | None = None
    priority: Priority | None = None
    session_id: Name | None = None
    cache_hint: CacheHintOptions | None = None
    kv_residency: ResidencyName | None = None
    kv_pin_spans: Spans | None = None


class FittingChat(ChatBody, kw_only=True):
    """A chat whose answer ends where the context does, though more was allowed: Anthropic's clients do not know the length of a prompt."""

    def sampling(self, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
        return self._params(defaults, min(self.max_tokens or 0, max(room, 1)), None)


def as_chat(given: MessagesBody, reasons: bool) -> ChatBody:
    """`reasons`: the model does, before it answers."""
    check_neutral(given, NEUTRAL)
    if given.thinking is not None:
        given.thinking.check(reasons)
    return FittingChat(
        **given.chat_fields(),
        **own_fields(given),
        max_tokens=given.max_tokens,
        stop=given.stop_sequences,
        stream=given.stream,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
    )


def as_counted(given: CountTokensBody, reasons: bool) -> ChatBody:
    check_neutral(given, NEUTRAL)
    if given.thinking is not None and given.thinking.type != "enabled":  # how long it thinks is no matter here
        given.thinking.check(reasons)
    return ChatBody(**given.chat_fields())


# ------------------------------------------------------------------------------------------------------------- the answer


class MessagesReply:
    """One message of blocks, as a whole or as the events that put it together."""

    def __init__(self, tokenizer: TextCodec, given: MessagesBody, head: Heading, read_as: AnswerFormat | None) -> None:
        self._most = given.max_tokens
        self._reading = read_as or PLAIN
        self._blocks = Blocks(self._reading)
        self._content: list[Json] = []
        self._input = ""  # of the call that is open
        self._stop: str | None = None  # the sequence that ended it
        self._message: Json = {"id": head.id, "type": "message", "role": "assistant", "model": head.model}
        self._begun = False

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Json) -> Json:
        list(self._take(pieces[0]))
        return {**self._message, "content": self._content, **self._end(usage), "usage": usage_of(usage)}

    def events(self, pieces: Mapping[int, ChoiceDelta], usage: Callable[[], Json]) -> bytes:
        return b"".join(map(event, [*self._begin(usage), *(made for piece in pieces.values() for made in self._take(piece))]))

    def closing(self, usage: Callable[[], Json]) -> bytes:
        counted = usage()
        delta = {"type": "message_delta", "delta": self._end(counted), "usage": usage_of(counted)}
        return event(delta) + event({"type": "message_stop"})

    def failed(self, fault: Fault) -> bytes:
        return event(fault.anthropic())

    def _begin(self, usage: Callable[[], Json]) -> Iterator[Json]:
        if not self._begun:
            self._begun = True
            open_end = {"stop_reason": None, "stop_sequence": None, "usage": usage_of(usage())}
            yield {"type": "message_start", "message": {**self._message, "content": [], **open_end}}

    def _take(self, piece: ChoiceDelta) -> Iterator[Json]:
        self._stop = piece.stop
        for step in self._blocks.steps(piece):
            yield from self._write(step)

    def _write(self, step: BlockStep) -> Iterator[Json]:
        if step.what == "open":
            self._content.append(self._block(step))
            yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(self._content[-1])}
            return
        index, block = len(self._content) - 1, self._content[-1]
        if step.what == "add":
            yield {"type": "content_block_delta", "index": index, "delta": self._add(step, block)}
            return
        if step.kind == "reasoning":
            yield {"type": "content_block_delta", "index": index, "delta": {"type": "signature_delta", "signature": ""}}
        elif step.kind == "call":
            block["input"] = _object(self._input)
        yield {"type": "content_block_stop", "index": index}

    def _block(self, step: BlockStep) -> Json:
        match step.kind:
            case "reasoning":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "text":
                return {"type": "text", "text": ""}
        self._input = ""
        return {"type": "tool_use", "id": self._reading.call_id().replace("call_", "toolu_"), "name": step.text, "input": {}}

    def _add(self, step: BlockStep, block: Json) -> Json:
        if step.kind == "call":
            self._input += step.text
            return {"type": "input_json_delta", "partial_json": step.text}
        name = "thinking" if step.kind == "reasoning" else "text"
        block[name] += step.text
        return {"type": f"{name}_delta", name: step.text}

    def _end(self, usage: Json) -> Json:
        finish = self._blocks.finish or "stop"
        reason = "stop_sequence" if self._stop is not None else STOP_REASONS[finish]
        if finish == "length" and usage["completion_tokens"] < self._most:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": self._stop}


def _object(text: str) -> Json:
    """Arguments that the model did not finish, or that are no object, are handed on in the way that Anthropic's clients know."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {"INVALID_JSON": text}
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def usage_of(usage: Json) -> Json:
    """Tokens that were cached are not among `input_tokens` there."""
    prompt = usage["prompt_tokens_details"]
    cached = prompt["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        **({"kv_residency": prompt["kv_residency"]} if "kv_residency" in prompt else {}),
    }

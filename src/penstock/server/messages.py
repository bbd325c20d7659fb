"""Anthropic's `/v1/messages`: requests as chats, and a chat's answer in Anthropic's shapes. Owns these
shapes; the model sees a normal chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from penstock.config import ResidencyName
from penstock.contract import SamplingParams
from penstock.errors import InvalidRequest
from penstock.server import schema
from penstock.server.replies import BlockKind, BlockReply, Heading, Json, expert_wait_of
from penstock.server.thinking import switched
from penstock.server.tools import (
    MAX_DEPTH,
    MOST_TOOLS,
    CalledFunction,
    CallId,
    Function,
    JsonSchema,
    ResponseFormat,
    Strict,
    Tool,
    ToolCall,
    ToolChoice,
    chosen,
    is_deep,
    parsed,
)
from penstock.text.answer import AnswerFormat, ChoiceDelta

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec
    from penstock.server.faults import Fault

# sent by Anthropic's clients for beta features; the fields say what is requested
QUERIES = {"beta": ("true",)}
# Names of the chat's fields in this API.
NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}

ToolName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$(?!\n)")]


class _Block(Strict, tag_field="type"):
    pass


class TextBlock(_Block, tag="text"):
    text: str


class ToolUseBlock(_Block, tag="tool_use"):
    id: CallId
    name: ToolName
    input: dict[str, Any]
    toolset_name: schema.Unsupported = None

    def __post_init__(self) -> None:
        if is_deep(self.input):
            raise ValueError(f"input is nested deeper than {MAX_DEPTH} lists and objects")


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: CallId
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    toolset_name: schema.Unsupported = None


class ThinkingBlock(_Block, tag="thinking"):
    """Our earlier output; not shown to the model again."""

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


class MessageTurn(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        for block in self.content if isinstance(self.content, list) else ():
            if self.role not in _ROLES.get(type(block), (self.role,)):
                raise ValueError(
                    f"a block of the type {block.__struct_config__.tag} is not of the role {self.role}"
                )

    def messages(self) -> Iterator[schema.Message]:
        """Tool results become messages of their own; other content stays together, in order."""
        if isinstance(self.content, str):
            yield schema.Message(role=self.role, content=self.content)
            return
        said: list[str] = []
        calls: list[ToolCall] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                if said:
                    yield schema.Message(role=self.role, content="\n".join(said))
                    said = []
                yield _result(block)
            elif isinstance(block, TextBlock):
                said.append(block.text)
            elif isinstance(block, ToolUseBlock):
                called = CalledFunction(block.name, json.dumps(block.input, ensure_ascii=False))
                calls.append(ToolCall(id=block.id, function=called))
        if said or calls or self.role == "assistant":
            yield schema.Message(role=self.role, content="\n".join(said), tool_calls=calls or None)


def _result(block: ToolResultBlock) -> schema.Message:
    """Chats have no mark for a failure, so the text says it."""
    text = schema.text_of(block.content)
    return schema.Message(
        role="tool", content=f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id
    )


class CustomTool(Strict):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None  # as in chats: forced calls always fit

    def tool(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with the type tool, and with no other")

    def choice(self) -> ToolChoice:
        if self.name is not None:
            return chosen(self.name)
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class ThinkingOptions(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=schema.MAX_INT)] | None = None
    display: Literal["summarized"] | None = None

    def __post_init__(self) -> None:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens goes with the type enabled, and with no other")

    def variables(self) -> dict[str, bool]:
        """Of the chat template."""
        return switched(self.type != "disabled")


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # for templates that know it


class CountTokensBody(Strict):
    """Everything that makes up a prompt."""

    api: ClassVar = "messages"
    model: str
    messages: Annotated[list[MessageTurn], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[CustomTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    def chat_messages(self) -> list[schema.Message]:
        system = schema.text_of(self.system)
        turns = [message for turn in self.messages for message in turn.messages()]
        return [schema.Message(role="system", content=system), *turns] if system else turns

    def chat_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        form = None if self.output_config is None else self.output_config.format
        schema = None if form is None else JsonSchema(name="answer", schema=form.schema)
        variables: dict[str, Any] = {} if self.thinking is None else {**self.thinking.variables()}
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return {
            "chat_template_kwargs": variables,
            "continue_final_message": self.messages[-1].role == "assistant",
            "model": self.model,
            "messages": self.chat_messages(),
            "tools": None if self.tools is None else [tool.tool() for tool in self.tools],
            "tool_choice": None if choice is None else choice.choice(),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": None
            if schema is None
            else ResponseFormat(type="json_schema", json_schema=schema),
        }


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: schema.Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: schema.TopK | None = None
    # The fields of schema.OwnFields: a struct with another parent cannot inherit them.
    seed: int | None = None
    cache_salt: schema.Label | None = None
    priority: schema.Priority | None = None
    session_id: schema.Name | None = None
    cache_hint: schema.CacheHintOptions | None = None
    kv_residency: ResidencyName | None = None
    kv_pin_spans: schema.Spans | None = None
    snapshot: schema.SnapshotName | None = None


class FittingChat(schema.ChatBody, kw_only=True):
    """A chat whose answer ends at the end of the context, even if more was allowed: Anthropic's clients do
    not know the length of a prompt."""

    def sampling(self, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
        return self._params(defaults, min(self.max_tokens or 0, max(room, 1)), None)


def as_chat(given: MessagesBody) -> schema.ChatBody:
    budget = None if given.thinking is None else given.thinking.budget_tokens
    if budget is not None and budget >= given.max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens must be below max_tokens, which is {given.max_tokens}",
            "thinking.budget_tokens",
        )
    fields = {**schema.shared_fields(given), **given.chat_fields()}
    return FittingChat(**fields, thinking_token_budget=budget, stop=given.stop_sequences)


def as_counted(given: CountTokensBody) -> schema.ChatBody:
    return schema.ChatBody(**given.chat_fields())


# ------------------------------------------------------------------------------------------------- the answer


class MessagesReply(BlockReply):
    """One message of blocks, as a whole or as events."""

    def __init__(
        self, tokenizer: TextCodec, given: MessagesBody, head: Heading, read_as: AnswerFormat | None
    ) -> None:
        super().__init__(read_as)
        self._most = given.max_tokens
        self._content: list[Json] = []
        self._input = ""  # of the call that is open
        self._stop: str | None = None  # the sequence that ended it
        self._message: Json = {"id": head.id, "type": "message", "role": "assistant", "model": head.model}

    def ended(self, usage: Json) -> Json:
        return {**self._message, "content": self._content, **self._end(usage), "usage": usage_of(usage)}

    def begin(self, usage: Callable[[], Json]) -> list[Json]:
        open_end = {"stop_reason": None, "stop_sequence": None, "usage": usage_of(usage())}
        return [{"type": "message_start", "message": {**self._message, "content": [], **open_end}}]

    def closing(self, usage: Callable[[], Json]) -> bytes:
        counted = usage()
        delta = {"type": "message_delta", "delta": self._end(counted), "usage": usage_of(counted)}
        return self.encoded(delta) + self.encoded({"type": "message_stop"})

    def failed(self, fault: Fault) -> bytes:
        return self.encoded(fault.anthropic())

    def take(self, piece: ChoiceDelta) -> Iterator[Json]:
        self._stop = piece.stop
        return super().take(piece)

    def opened(self, kind: BlockKind, name: str) -> Iterator[Json]:
        block: Json = {"type": "text", "text": ""}
        if kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == "call":
            self._input = ""
            block = {
                "type": "tool_use",
                "id": self.reading.call_id().replace("call_", "toolu_"),
                "name": name,
                "input": {},
            }
        self._content.append(block)
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def added(self, kind: BlockKind, text: str) -> Json:
        if kind == "call":
            self._input += text
            return self._delta("input_json_delta", "partial_json", text)
        name = "thinking" if kind == "reasoning" else "text"
        self._content[-1][name] += text
        return self._delta(f"{name}_delta", name, text)

    def closed(self, kind: BlockKind) -> Iterator[Json]:
        if kind == "reasoning":
            yield self._delta("signature_delta", "signature", "")
        elif kind == "call":
            self._content[-1]["input"] = _object(self._input)
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, kind: str, name: str, text: str) -> Json:
        return {
            "type": "content_block_delta",
            "index": len(self._content) - 1,
            "delta": {"type": kind, name: text},
        }

    def _end(self, usage: Json) -> Json:
        finish = self.finish or "stop"
        reason = "stop_sequence" if self._stop is not None else STOP_REASONS[finish]
        if finish == "length" and usage["completion_tokens"] < self._most:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": self._stop}


def _object(text: str) -> Json:
    """Unfinished arguments, or arguments that are not an object, are passed on in a form that Anthropic's
    clients know."""
    try:
        value = parsed(text or "{}")
    except ValueError:
        return {"INVALID_JSON": text}
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def usage_of(usage: Json) -> Json:
    """Cached tokens are not among `input_tokens` there."""
    details = dict(usage["prompt_tokens_details"])
    cached = details.pop("cached_tokens")
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        **details,
        **expert_wait_of(usage),
    }

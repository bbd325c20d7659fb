"""OpenAI's `/v1/responses`: what its clients send, as the chat that it means, and the chat's answer as items and events. Owns these shapes;
nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from penstock.config import ResidencyName
from penstock.errors import InvalidRequest
from penstock.server.replies import Blocks, BlockStep, Heading, Json, event, obfuscated
from penstock.server.schema import (
    CacheHintOptions,
    ChatBody,
    Count,
    Label,
    Message,
    Metadata,
    Name,
    Neutral,
    Priority,
    Spans,
    StreamOptions,
    Unsupported,
    check_neutral,
    own_fields,
)
from penstock.server.structured import JsonSchema, ResponseFormat, Schema
from penstock.server.text import ChoiceDelta
from penstock.server.tools import (
    MOST_TOOLS,
    PLAIN,
    AnswerFormat,
    CalledFunction,
    Function,
    FunctionName,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec
    from penstock.server.faults import Fault

_NOT_STORED = "answers are not stored: send the whole conversation as input"
NEUTRAL: dict[str, Neutral] = {
    "background": Neutral((False,), "answers come while the client waits"),
    "conversation": Neutral((), _NOT_STORED),
    "include": Neutral(([], ["reasoning.encrypted_content"]), "answers have nothing else to include; reasoning is not encrypted"),
    "max_tool_calls": Neutral((), "this server runs no tools itself"),
    "previous_response_id": Neutral((), _NOT_STORED),
    "prompt": Neutral((), "prompts are not stored: send instructions and input"),
    "prompt_cache_retention": Neutral(("in_memory", "in-memory"), "cache_hint.retain_s says how long KV is wanted"),
    "service_tier": Neutral(("auto", "default"), "there is one tier; priority says who goes first"),
    "store": Neutral((False,), _NOT_STORED),
    "top_logprobs": Neutral((0,), "logprobs are a field of /v1/chat/completions"),
    "truncation": Neutral(("disabled",), "a conversation that does not fit is refused and not cut"),
}
NO_EFFECT = ("metadata", "safety_identifier", "user")
# What a field of the chat is called here.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_STATUS = Literal["in_progress", "completed", "incomplete"]


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None  # of what we or others gave out before
    logprobs: list[Any] | None = None


Content = str | list[ContentPart]
CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One item of the input. A message need not say that it is one, so the types share their fields."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: Label | None = None
    status: _STATUS | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    phase: Label | None = None
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[Any] | None = None  # of reasoning, which is not shown to the model again
    encrypted_content: str | None = None
    namespace: Unsupported = None
    caller: Unsupported = None

    def __post_init__(self) -> None:
        needed, allowed = _FIELDS[self.type]
        for name in (*needed, *_ALL_FIELDS):
            given = getattr(self, name) is not None
            if given != (name in needed) and not (given and name in allowed) and (given or name in needed):
                raise ValueError(f"{name} is {'not a field of' if given else 'required for'} an item of the type {self.type}")

    @property
    def text(self) -> str:
        said = self.output if self.type == "function_call_output" else self.content
        return said if isinstance(said, str) else "\n".join(part.text for part in said or ())


_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # by type: what is needed, what else there may be
    "message": (("role", "content"), ("phase",)),
    "function_call": (("call_id", "name", "arguments"), ()),
    "function_call_output": (("call_id", "output"), ()),
    "reasoning": ((), ("content", "summary", "encrypted_content")),
}
_ALL_FIELDS = ("role", "content", "phase", "call_id", "name", "arguments", "output", "summary", "encrypted_content")


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # as of chats: forced calls always fit
    defer_loading: Literal[False] | None = None

    def tool(self) -> Tool:
        function = Function(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)
        return Tool(type="function", function=function)


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("name", "schema") if getattr(self, name) is not None]
        if len(given) != (2 if self.type == "json_schema" else 0):
            raise ValueError("name and schema go with the type json_schema, and with no other")

    def response_format(self) -> ResponseFormat:
        if self.name is None:
            return ResponseFormat(type=self.type)
        schema = JsonSchema(name=self.name, schema=self.schema, description=self.description, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # OpenAI's default; these models have no such setting


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """These models have no such settings."""

    effort: Unsupported = None
    summary: Literal["auto"] | None = None
    generate_summary: Unsupported = None


class EventOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | Annotated[list[Item], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    prompt_cache_key: Name | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    metadata: Metadata | None = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    prompt_cache_options: Unsupported = None
    # Our own.
    seed: int | None = None
    cache_salt: Label | None = None
    priority: Priority | None = None
    session_id: Name | None = None
    cache_hint: CacheHintOptions | None = None
    kv_residency: ResidencyName | None = None
    kv_pin_spans: Spans | None = None
    # What follows is in NEUTRAL.
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[str] | None = None
    max_tool_calls: Count | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    top_logprobs: Count | None = None
    truncation: str | None = None

    def messages(self) -> list[Message]:
        said = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*said, Message(role="user", content=self.input)]
        said += _messages(self.input)
        if not said:
            raise InvalidRequest("input has no message", "input")
        return said

    def choice(self) -> ToolChoice | None:
        chosen = self.tool_choice
        return NamedTool("function", NamedFunction(chosen.name)) if isinstance(chosen, ChosenFunction) else chosen


def _messages(items: Sequence[Item]) -> list[Message]:
    """Calls in a row are one message of the assistant, together with what it said right before them."""
    made: list[Message] = []
    for item in items:
        if item.type == "function_call":
            call = ToolCall(id=item.call_id or "", function=CalledFunction(item.name or "", item.arguments or ""))
            if not made or made[-1].role != "assistant":
                made.append(Message(role="assistant", content=""))
            made[-1].tool_calls = [*(made[-1].tool_calls or ()), call]
        elif item.type == "function_call_output":
            made.append(Message(role="tool", content=item.text, tool_call_id=item.call_id))
        elif item.role is not None:
            made.append(Message(role=item.role, content=item.text))
    return made


def as_chat(given: ResponsesBody, reasons: bool) -> ChatBody:
    check_neutral(given, NEUTRAL)
    form = None if given.text is None or given.text.format is None else given.text.format.response_format()
    options = None if given.stream_options is None else StreamOptions(include_obfuscation=given.stream_options.include_obfuscation)
    return ChatBody(
        **own_fields(given),
        model=given.model,
        messages=given.messages(),
        max_tokens=given.max_output_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        stream=given.stream,
        stream_options=options,
        tools=None if given.tools is None else [tool.tool() for tool in given.tools],
        tool_choice=given.choice(),
        parallel_tool_calls=given.parallel_tool_calls,
        response_format=form,
        prompt_cache_key=given.prompt_cache_key,
    )


# ------------------------------------------------------------------------------------------------------------- the answer


class ResponsesReply:
    """One response of items, as a whole or as the numbered events that put it together."""

    def __init__(self, tokenizer: TextCodec, given: ResponsesBody, head: Heading, read_as: AnswerFormat | None) -> None:
        self._tokenizer = tokenizer
        self._reading = read_as or PLAIN
        self._blocks = Blocks(self._reading)
        self._output: list[Json] = []
        self._response = _echoed(given, head)
        self._unique = head.id.removeprefix("resp_")
        self._padded = given.stream_options is not None and bool(given.stream_options.include_obfuscation)
        self._number = 0  # of the next event

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Json) -> Json:
        list(self._take(pieces[0]))
        return self._ended(usage)

    def events(self, pieces: Mapping[int, ChoiceDelta], usage: Callable[[], Json]) -> bytes:
        made = [] if self._number else [("response.created", self._so_far()), ("response.in_progress", self._so_far())]
        made += [one for piece in pieces.values() for one in self._take(piece)]
        return b"".join(self._event(name, fields) for name, fields in made)

    def closing(self, usage: Callable[[], Json]) -> bytes:
        response = self._ended(usage())
        return self._event(f"response.{response['status']}", {"response": response})

    def failed(self, fault: Fault) -> bytes:
        error = {"code": "server_error", "message": fault.body()["error"]["message"]}
        return self._event("response.failed", {"response": {**self._response, "status": "failed", "output": self._output, "error": error}})

    def _event(self, name: str, fields: Json) -> bytes:
        made = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event(obfuscated(made) if self._padded and name.endswith(".delta") else made)

    def _so_far(self) -> Json:
        return {"response": {**self._response, "output": []}}

    def _ended(self, usage: Json) -> Json:
        cut = self._blocks.finish == "length"
        details = {"reason": "max_output_tokens"} if cut else None
        ending = {"status": "incomplete" if cut else "completed", "incomplete_details": details, "output": self._output}
        return {**self._response, **ending, "usage": self._usage(usage)}

    def _usage(self, usage: Json) -> Json:
        prompt = usage["prompt_tokens_details"]
        residency = {name: prompt[name] for name in ("kv_residency",) if name in prompt}
        thought = "".join(part["text"] for item in self._output if item["type"] == "reasoning" for part in item["content"])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": prompt["cached_tokens"], "cache_write_tokens": 0, **residency},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(self._tokenizer.encode(thought, add_special=False)) if thought else 0},
            "total_tokens": usage["total_tokens"],
        }

    # ---- items

    def _take(self, piece: ChoiceDelta) -> Iterator[tuple[str, Json]]:
        for step in self._blocks.steps(piece):
            if step.what == "open":
                yield from self._open(step)
            elif step.what == "add":
                yield self._add(step)
            else:
                yield from self._close(step)

    def _open(self, step: BlockStep) -> Iterator[tuple[str, Json]]:
        number = len(self._output)
        prefix = {"text": "msg", "call": "fc", "reasoning": "rs"}[step.kind]
        item: Json = {"id": f"{prefix}_{self._unique}_{number}", "status": "in_progress"}
        match step.kind:
            case "text":
                item |= {"type": "message", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"type": "reasoning", "summary": [], "content": []}
            case "call":
                item |= {"type": "function_call", "call_id": self._reading.call_id(), "name": step.text, "arguments": ""}
        self._output.append(item)
        yield "response.output_item.added", {"output_index": number, "item": _copied(item)}
        if step.kind != "call":
            item["content"].append(_part(step.kind))
            yield "response.content_part.added", {**self._at(item), "part": _part(step.kind)}

    def _add(self, step: BlockStep) -> tuple[str, Json]:
        item = self._output[-1]
        if step.kind == "call":
            item["arguments"] += step.text
            return "response.function_call_arguments.delta", {**self._of(item), "delta": step.text}
        item["content"][0]["text"] += step.text
        scores: Json = {"logprobs": []} if step.kind == "text" else {}
        return f"response.{_STREAMED[step.kind]}.delta", {**self._at(item), "delta": step.text, **scores}

    def _close(self, step: BlockStep) -> Iterator[tuple[str, Json]]:
        item = self._output[-1]
        item["status"] = "incomplete" if self._blocks.finish == "length" else "completed"
        if step.kind == "call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._of(item), **done}
        else:
            part = item["content"][0]
            scores: Json = {"logprobs": []} if step.kind == "text" else {}
            yield f"response.{_STREAMED[step.kind]}.done", {**self._at(item), "text": part["text"], **scores}
            yield "response.content_part.done", {**self._at(item), "part": dict(part)}
        yield "response.output_item.done", {"output_index": len(self._output) - 1, "item": _copied(item)}

    def _of(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": len(self._output) - 1}

    def _at(self, item: Json) -> Json:
        return {**self._of(item), "content_index": 0}


_STREAMED = {"text": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copied(item: Json) -> Json:
    """As it is now; it may be added to before it is written."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _echoed(given: ResponsesBody, head: Heading) -> Json:
    """What every state of a response repeats: its head, and what was asked for."""
    text = given.text or TextOptions()
    form = {"type": "text"} if text.format is None else _plain(text.format)
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "metadata": given.metadata or {},
        "parallel_tool_calls": given.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": given.temperature,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": "auto" if given.tool_choice is None else msgspec.to_builtins(given.tool_choice),
        "tools": [{"parameters": None, "strict": None, **_plain(tool)} for tool in given.tools or ()],
        "top_p": given.top_p,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "usage": None,
        "user": given.user,
    }


def _plain(struct: msgspec.Struct) -> Json:
    return {name: value for name, value in msgspec.to_builtins(struct).items() if value is not None}

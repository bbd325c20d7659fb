"""OpenAI's `/v1/responses`: requests as chats, and a chat's answer as items and events. Owns these shapes;
`kept` decides how long answers are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from penstock.errors import InvalidRequest, ResponseMissing
from penstock.server import schema
from penstock.server.kept import KeptResponse
from penstock.server.replies import (
    BlockKind,
    BlockReply,
    ChatScores,
    Heading,
    Json,
    expert_wait_of,
    obfuscated,
)
from penstock.server.thinking import Effort
from penstock.server.tools import (
    MOST_TOOLS,
    CalledFunction,
    CallId,
    Function,
    FunctionName,
    JsonSchema,
    ResponseFormat,
    Schema,
    Strict,
    Tool,
    ToolCall,
    chosen,
)
from penstock.text.answer import AnswerFormat, ChoiceDelta, ScoredToken

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec
    from penstock.server.faults import Fault

# Names of the chat's fields in this API.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_LOGPROBS = "message.output_text.logprobs"
# what may be included; but for logprobs, parts of items that answers here never have
_Included = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_STATUS = Literal["in_progress", "completed", "incomplete"]


class ContentPart(Strict):
    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None  # of earlier answers
    logprobs: list[Any] | None = None


Content = str | list[ContentPart]
SpaceName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$(?!\n)")]


class Item(Strict):
    """One item of the input. A message need not have a type, so the types share their fields."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: schema.Label | None = None
    status: _STATUS | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    phase: schema.Label | None = None
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[Any] | None = None  # of reasoning, which is not shown to the model again
    encrypted_content: str | None = None
    namespace: SpaceName | None = None  # of the function that is called

    def __post_init__(self) -> None:
        needed, allowed = _FIELDS[self.type]
        for name in (*needed, *_ALL_FIELDS):
            given = getattr(self, name) is not None
            if given != (name in needed) and not (given and name in allowed) and (given or name in needed):
                raise ValueError(
                    f"{name} is {'not a field of' if given else 'required for'} an item of the type "
                    f"{self.type}"
                )

    @property
    def text(self) -> str:
        return schema.text_of(self.output if self.type == "function_call_output" else self.content)


# by type: required fields, optional fields
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "message": (("role", "content"), ("phase",)),
    "function_call": (("call_id", "name", "arguments"), ("namespace",)),
    "function_call_output": (("call_id", "output"), ("name", "namespace")),
    "reasoning": ((), ("content", "summary", "encrypted_content")),
}
_ALL_FIELDS = dict.fromkeys(name for sets in _FIELDS.values() for names in sets for name in names)


class FunctionTool(Function, tag_field="type", tag="function"):
    pass


class NamespaceTool(Strict, tag_field="type", tag="namespace"):
    """Functions that share a name prefix. The model sees them one by one under the joined name; clients see
    both names."""

    name: SpaceName
    tools: Annotated[list[FunctionTool], msgspec.Meta(min_length=1, max_length=MOST_TOOLS)]
    description: str | None = None

    def functions(self) -> Iterator[Function]:
        about = self.description
        for tool in self.tools:
            said = "\n\n".join(filter(None, (about, tool.description)))
            yield Function(
                name=spaced(self.name, tool.name),
                description=said or None,
                parameters=tool.parameters,
                strict=tool.strict,
            )
            about = None  # once is enough


def spaced(namespace: str | None, name: str) -> str:
    """The model's name for a function of a namespace."""
    return name if not namespace else f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


class ChosenFunction(Strict):
    type: Literal["function"]
    name: FunctionName


class TextFormat(Strict):
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
        schema = JsonSchema(
            name=self.name, schema=self.schema, description=self.description, strict=self.strict
        )
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Strict):
    format: TextFormat | None = None


class ReasoningOptions(Strict):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: schema.Unsupported = None


class EventOptions(Strict):
    include_obfuscation: bool | None = None


class ResponsesBody(schema.OwnFields, kw_only=True):
    api: ClassVar = "responses"
    model: str
    input: str | Annotated[list[Item], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: schema.Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    tools: Annotated[list[FunctionTool | NamespaceTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    prompt_cache_key: schema.Name | None = None
    user: schema.Label | None = None
    metadata: schema.Metadata | None = None
    previous_response_id: schema.Name | None = None
    store: bool | None = None
    include: list[_Included] | None = None
    top_logprobs: int | None = None

    @property
    def is_scored(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def items(self) -> list[Item]:
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def functions(self) -> list[Function] | None:
        """All callable functions, one by one."""
        if self.tools is None:
            return None
        return [
            one
            for tool in self.tools
            for one in (tool.functions() if isinstance(tool, NamespaceTool) else (tool,))
        ]

    def messages(self) -> list[schema.Message]:
        said = [schema.Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*said, schema.Message(role="user", content=self.input)]
        said += _messages(self.input)
        if not said:
            raise InvalidRequest("input has no message", "input")
        return said


def _messages(items: Sequence[Item]) -> list[schema.Message]:
    """Consecutive calls are one message of the assistant, together with its text right before them."""
    made: list[schema.Message] = []
    for item in items:
        if item.type == "function_call":
            call = ToolCall(
                id=item.call_id or "",
                function=CalledFunction(spaced(item.namespace, item.name or ""), item.arguments or ""),
            )
            if not made or made[-1].role != "assistant":
                made.append(schema.Message(role="assistant", content=""))
            made[-1].tool_calls = [*(made[-1].tool_calls or ()), call]
        elif item.type == "function_call_output":
            made.append(schema.Message(role="tool", content=item.text, tool_call_id=item.call_id))
        elif item.role is not None:
            made.append(schema.Message(role=item.role, content=item.text))
    return made


def as_chat(given: ResponsesBody) -> schema.ChatBody:
    form = None if given.text is None or given.text.format is None else given.text.format.response_format()
    options, functions, choice = given.stream_options, given.functions(), given.tool_choice
    changed: Json = {
        "messages": given.messages(),
        "max_tokens": given.max_output_tokens,
        "stream_options": options and schema.StreamOptions(include_obfuscation=options.include_obfuscation),
        "tools": functions and [Tool(type="function", function=one) for one in functions],
        "tool_choice": chosen(choice.name) if isinstance(choice, ChosenFunction) else choice,
        "response_format": form,
        "reasoning_effort": given.reasoning and given.reasoning.effort,
        "logprobs": given.is_scored or None,
        "top_logprobs": given.top_logprobs if given.is_scored else None,
    }
    return schema.ChatBody(**{**schema.shared_fields(given), **changed})


# --------------------------------------------------------------------------------------- what is gone on from

_ITEMS = msgspec.json.Decoder(list[Item])


class _KeptOutput(msgspec.Struct):
    output: list[Item]


_KEPT_OUTPUT = msgspec.json.Decoder(_KeptOutput)


def continued(given: ResponsesBody, kept: KeptResponse) -> ResponsesBody:
    """The whole conversation as input. Instructions belong to one request only, as in OpenAI's API."""
    said = [*_ITEMS.decode(kept.items), *_KEPT_OUTPUT.decode(kept.response).output]
    return msgspec.structs.replace(given, input=[*said, *given.items()])


def missing(id: str) -> ResponseMissing:
    """In the words of OpenAI's API, by which clients know to send the whole conversation."""
    error = ResponseMissing(f"Previous response with id '{id}' not found.")
    error.param = "previous_response_id"
    return error


# ------------------------------------------------------------------------------------------------- the answer


class ResponsesReply(BlockReply):
    """One response of items, as a whole or as numbered events."""

    def __init__(
        self, tokenizer: TextCodec, given: ResponsesBody, head: Heading, read_as: AnswerFormat | None
    ) -> None:
        super().__init__(read_as)
        self._tokenizer = tokenizer
        self._output: list[Json] = []
        self._response = _echoed(given, head)
        self._spaces = {
            spaced(one.name, tool.name): (one.name, tool.name)
            for one in _namespaces(given)
            for tool in one.tools
        }
        self._unique = head.id.removeprefix("resp_")
        self._padded = given.stream_options is not None and bool(given.stream_options.include_obfuscation)
        self._number = 0  # of the next event
        self._scores = _MessageScores(ChatScores(tokenizer)) if given.is_scored else None

    def begin(self, usage: Callable[[], Json]) -> list[Json]:
        so_far = {"response": {**self._response, "output": []}}
        return [{"type": name, **so_far} for name in ("response.created", "response.in_progress")]

    def closing(self, usage: Callable[[], Json]) -> bytes:
        response = self.ended(usage())
        return self.encoded({"type": f"response.{response['status']}", "response": response})

    def failed(self, fault: Fault) -> bytes:
        error = {"code": "server_error", "message": fault.body()["error"]["message"]}
        response = {**self._response, "status": "failed", "output": self._output, "error": error}
        return self.encoded({"type": "response.failed", "response": response})

    def encoded(self, event: Json) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return super().encoded(
            obfuscated(event) if self._padded and event["type"].endswith(".delta") else event
        )

    def ended(self, usage: Json) -> Json:
        cut = self.finish == "length"
        details = {"reason": "max_output_tokens"} if cut else None
        ending = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": details,
            "output": self._output,
        }
        return {**self._response, **ending, "usage": self._usage(usage)}

    def _usage(self, usage: Json) -> Json:
        thought = "".join(
            part["text"] for item in self._output if item["type"] == "reasoning" for part in item["content"]
        )
        details = dict(usage["prompt_tokens_details"])
        cached = {"cached_tokens": details.pop("cached_tokens"), "cache_write_tokens": 0}
        return {
            **details,  # some clients take nothing but numbers in `input_tokens_details`
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": len(self._tokenizer.encode(thought, add_special=False)) if thought else 0
            },
            "total_tokens": usage["total_tokens"],
            **expert_wait_of(usage),
        }

    # ---- items

    def take(self, piece: ChoiceDelta) -> Iterator[Json]:
        """With scores, one token after another: each belongs to the item that its text came out in."""
        for part in [piece] if self._scores is None else self._scores.parts(piece):
            yield from super().take(part)

    def opened(self, kind: BlockKind, name: str) -> Iterator[Json]:
        number = len(self._output)
        prefix = {"text": "msg", "call": "fc", "reasoning": "rs"}[kind]
        item: Json = {"id": f"{prefix}_{self._unique}_{number}", "status": "in_progress"}
        match kind:
            case "text":
                item |= {"type": "message", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"type": "reasoning", "summary": [], "content": []}
            case "call":
                item |= {
                    "type": "function_call",
                    "call_id": self.reading.call_id(),
                    "name": name,
                    "arguments": "",
                }
                if name in self._spaces:
                    item["namespace"], item["name"] = self._spaces[name]
        self._output.append(item)
        yield {"type": "response.output_item.added", "output_index": number, "item": _copied(item)}
        if kind != "call":
            item["content"].append(_part(kind))
            yield self._at("content_part.added", part=_part(kind))

    def added(self, kind: BlockKind, text: str) -> Json:
        item = self._output[-1]
        if kind == "call":
            item["arguments"] += text
            return self._of("function_call_arguments.delta", delta=text)
        part = item["content"][0]
        part["text"] += text
        scores: Json = {}
        if kind == "text":
            scores["logprobs"] = [] if self._scores is None else self._scores.placed(text)
            part["logprobs"] += scores["logprobs"]
        return self._at(f"{_STREAMED[kind]}.delta", delta=text, **scores)

    def closed(self, kind: BlockKind) -> Iterator[Json]:
        item = self._output[-1]
        item["status"] = "incomplete" if self.finish == "length" else "completed"
        if kind == "call":
            yield self._of("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            scores = {"logprobs": list(part["logprobs"])} if kind == "text" else {}
            yield self._at(f"{_STREAMED[kind]}.done", text=part["text"], **scores)
            yield self._at("content_part.done", part=dict(part))
        yield {
            "type": "response.output_item.done",
            "output_index": len(self._output) - 1,
            "item": _copied(item),
        }

    def _of(self, kind: str, **fields: Any) -> Json:
        """About the open item."""
        return {
            "type": f"response.{kind}",
            "item_id": self._output[-1]["id"],
            "output_index": len(self._output) - 1,
            **fields,
        }

    def _at(self, kind: str, **fields: Any) -> Json:
        return self._of(kind, content_index=0, **fields)


class _MessageScores:
    """Finds the tokens whose text a message has. A parser takes markers out, and may hold text back."""

    def __init__(self, scores: ChatScores) -> None:
        self._scores = scores
        self._num_read = 0  # characters of the choice so far
        # tokens that no message has yet, with their text; None: the rest of one that a message has
        self._unplaced: list[tuple[ScoredToken | None, str]] = []

    def parts(self, piece: ChoiceDelta) -> Iterator[ChoiceDelta]:
        """The piece, cut behind each token."""
        starts = [max(0, token.offset - self._num_read) for token in piece.tokens]
        cuts = [0, *starts[1:], len(piece.text)]
        self._num_read += len(piece.text)
        if not starts:
            yield piece
        for at, token in enumerate(piece.tokens):
            text = piece.text[cuts[at] : cuts[at + 1]]
            self._unplaced.append((token, text))
            finish = piece.finish if at == len(starts) - 1 else None
            yield ChoiceDelta(text, (token,), finish, piece.stop)

    def placed(self, text: str) -> list[Json]:
        """Scores of the tokens of that text, which is part of a message. Tokens before it are not."""
        first = max(0, "".join(said for _, said in self._unplaced).rfind(text))
        last, at = first + len(text), 0
        found: list[ScoredToken] = []
        left: list[tuple[ScoredToken | None, str]] = []
        for token, said in self._unplaced:
            begin, at = at, at + len(said)
            is_in = begin < last and (at > first or begin == at == first)
            if is_in and token is not None:
                found.append(token)
            if at > last or begin == last:
                left.append((None if is_in else token, said[max(0, last - begin) :]))
        self._unplaced = left
        return [self._scores.of(one.score, one.first) for one in found if one.score is not None]


_STREAMED = {"text": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copied(item: Json) -> Json:
    """A copy of the present state; the item may be extended before it is written."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _echoed(given: ResponsesBody, head: Heading) -> Json:
    """Fields that every state of a response repeats: its head, and the request's settings."""
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
        "previous_response_id": given.previous_response_id,
        "reasoning": {"effort": None if given.reasoning is None else given.reasoning.effort, "summary": None},
        "store": given.store is not False,
        "temperature": given.temperature,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": "auto" if given.tool_choice is None else msgspec.to_builtins(given.tool_choice),
        "tools": [_shown(tool) for tool in given.tools or ()],
        "top_logprobs": given.top_logprobs or 0,
        "top_p": given.top_p,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "usage": None,
        "user": given.user,
    }


def _namespaces(given: ResponsesBody) -> list[NamespaceTool]:
    return [tool for tool in given.tools or () if isinstance(tool, NamespaceTool)]


def _shown(tool: FunctionTool | NamespaceTool) -> Json:
    return (
        _plain(tool)
        if isinstance(tool, NamespaceTool)
        else {"parameters": None, "strict": None, **_plain(tool)}
    )


def _plain(struct: msgspec.Struct) -> Json:
    return {name: value for name, value in msgspec.to_builtins(struct).items() if value is not None}

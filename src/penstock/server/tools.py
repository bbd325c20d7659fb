"""The form of an answer that a client asks for (OpenAI's `response_format`, vLLM's `structured_outputs` and
its older spelling), and the tools that the model may call. Owns these fields, their grammar, the description
of tools in the prompt, and the parsing of answers. The engine compiles grammars; the formats of calls are in
`tool_parsers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from penstock.contract import MAX_GRAMMAR_CHARS, Grammar
from penstock.errors import InvalidRequest
from penstock.text.answer import AnswerFormat
from penstock.text.parsers import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    THINK,
)

if TYPE_CHECKING:
    from penstock.config import ServerConfig
    from penstock.models.tokenizer import TextCodec

MOST_TOOLS = 128  # OpenAI's limit
MOST_CALLS = 16  # in one answer that has to call
MAX_DEPTH = 100  # nesting of lists and objects: later recursion needs stack for each level

Schema = dict[str, Any] | bool
Text = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)]
Words = Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# for a tool without parameters
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
Fields = dict[str, Any]
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$(?!\n)")]
CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Refuses unknown fields."""


def is_deep(value: Any) -> bool:
    """Whether lists and objects are nested deeper than `MAX_DEPTH`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for some in inside for one in some if isinstance(one, dict | list)]
    return bool(level)


def parsed(text: str) -> Any:
    """JSON. Raises ValueError if it is invalid, nested too deeply, or has half a surrogate pair, which cannot
    be encoded again."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_deep(value):
        raise ValueError("nested too deeply")
    return value


# --------------------------------------------------------------------------------------------------- the form


class JsonSchema(Strict):
    """OpenAI's frame around a schema. Always enforced, `strict` or not."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    schema: Schema | None = None  # None: any JSON
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")


class StructuredOutputs(Strict):
    """vLLM's. Exactly one of them; `json` may be the schema's text."""

    json: Schema | Text | None = None
    regex: Text | None = None
    choice: Words | None = None
    grammar: Text | None = None
    json_object: bool | None = None


_FORMS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}  # kinds of grammars
# fields of a body
ASKING = ("response_format", "structured_outputs", *(f"guided_{name}" for name in _FORMS))


class Asked(NamedTuple):
    """A grammar, and the field that asked for it, for errors."""

    field: str
    grammar: Grammar


def asked_of(body: Any) -> Asked | None:
    """Raises InvalidRequest if several fields ask, or one asks for nothing."""
    given, outputs = body.response_format, body.structured_outputs or StructuredOutputs()
    schema: Schema | None = None
    if given is not None and given.type != "text":
        schema = ANY_OBJECT if given.json_schema is None else given.json_schema.schema
        schema = {} if schema is None else schema
    fields: list[tuple[str, Any, Any]] = [("response_format", "json_schema", schema)]
    fields += [(f"structured_outputs.{name}", kind, getattr(outputs, name)) for name, kind in _FORMS.items()]
    fields.append(
        ("structured_outputs.json_object", "json_schema", ANY_OBJECT if outputs.json_object else None)
    )
    fields += [(f"guided_{name}", kind, getattr(body, f"guided_{name}")) for name, kind in _FORMS.items()]
    for field, _, value in fields:
        if is_deep(value):
            raise InvalidRequest(f"{field} is nested deeper than {MAX_DEPTH} lists and objects", field)
    found = [Asked(field, _grammar(kind, value)) for field, kind, value in fields if value is not None]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].field} and {found[1].field} both say what the answer is to be: give one of them",
            found[1].field,
        )
    if body.structured_outputs is not None and not found:
        raise InvalidRequest(
            "structured_outputs needs one of json, regex, choice, grammar and json_object",
            "structured_outputs",
        )
    if found and len(found[0].grammar.text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"a schema or grammar has at most {MAX_GRAMMAR_CHARS} characters", found[0].field
        )
    return found[0] if found else None


def _grammar(kind: Any, value: Schema | list[Any] | str) -> Grammar:
    """A schema may come as its text."""
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


# -------------------------------------------------------------------------------------------------- the tools


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # forced calls always match their schema; no effect on other calls


class Tool(Strict):
    type: Literal["function"]
    function: Function

    @property
    def arguments(self) -> dict[str, Any]:
        """Their schema. An empty one only says that they are an object."""
        return NO_ARGUMENTS if self.function.parameters is None else self.function.parameters or ANY_OBJECT

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        given = {
            name: value
            for name in ("name", "description", "parameters")
            if (value := getattr(self.function, name)) is not None
        }
        return {"type": "function", "function": {"parameters": NO_ARGUMENTS, **given}}


Tools = Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)]


class NamedFunction(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def chosen(name: str) -> NamedTool:
    return NamedTool("function", NamedFunction(name))


class CalledFunction(Strict):
    name: FunctionName
    arguments: str


class ToolCall(Strict):
    """A call in an assistant's message, from us or another server."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # for clients that assemble streams

    def as_dict(self) -> dict[str, Any]:
        """Templates write arguments as JSON themselves; arguments that are not JSON are passed on
        unchanged."""
        try:
            arguments = parsed(self.function.arguments or "{}")
        except ValueError:
            arguments = self.function.arguments
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ToolRequest(NamedTuple):
    """The fields of one request."""

    tools: Sequence[Tool]
    choice: Literal["none", "auto", "required"] | NamedTool
    parallel: bool

    @property
    def shown(self) -> Sequence[Tool]:
        """The tools that the prompt describes."""
        return () if self.choice == "none" else self.tools

    def check(self, given: ToolChoice | None) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("two tools have the same name", "tools")
        if deep := next((tool for tool in self.tools if is_deep(tool.function.parameters)), None):
            message = (
                f"the parameters of {deep.function.name!r} are nested deeper than {MAX_DEPTH} lists and "
                "objects"
            )
            raise InvalidRequest(message, "tools")
        if not self.tools and given not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is only allowed where there are tools", "tool_choice")
        if isinstance(self.choice, NamedTool) and self.choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice names {self.choice.function.name!r}, and no tool has that name", "tool_choice"
            )

    def asked(self) -> Asked | None:
        """The grammar of a forced call."""
        if isinstance(self.choice, NamedTool):
            name = self.choice.function.name
            schema = next((tool.arguments for tool in self.tools if tool.function.name == name), NO_ARGUMENTS)
            return Asked("tools", _grammar("json_schema", schema))
        if self.choice == "required":
            return Asked(
                "tools", _grammar("json_schema", _one_of(self.tools, MOST_CALLS if self.parallel else 1))
            )
        return None


def _one_of(tools: Sequence[Tool], most: int) -> dict[str, Any]:
    """A list of calls."""
    call = _call_of(tools)
    return {
        "type": "array",
        "items": {"anyOf": call["anyOf"]},
        "minItems": 1,
        "maxItems": most,
        "$defs": call["$defs"],
    }


def _call_of(tools: Sequence[Tool], arguments: str = "arguments") -> dict[str, Any]:
    """One call. The schemas of `arguments` are in the definitions; their references are moved accordingly."""
    items, definitions = [], {}
    for number, tool in enumerate(tools):
        own = f"tool{number}"
        definitions[own] = _moved(tool.arguments, f"#/$defs/{own}")
        fields = {"name": {"const": tool.function.name}, arguments: {"$ref": f"#/$defs/{own}"}}
        items.append(
            {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        )
    return {"anyOf": items, "$defs": definitions}


def calls_or_form(asking: ToolRequest, form: Asked, reader: str, tokenizer: TextCodec) -> Asked:
    """The grammar of an answer that either calls tools in the reader's format, with valid arguments, or
    matches `form`."""
    if reader == "none":
        return form
    rule, calls = _calls(asking, reader, tokenizer)
    parts = {"form": form.grammar, **calls}
    asked = Asked(form.field, _grammar("parts", [f"start: @form | calls\n{rule}", parts]))
    if len(asked.grammar.text) > MAX_GRAMMAR_CHARS:
        message = f"{form.field} and the tools beside it have at most {MAX_GRAMMAR_CHARS} characters together"
        raise InvalidRequest(message, form.field)
    return asked


def _calls(asking: ToolRequest, reader: str, tokenizer: TextCodec) -> tuple[str, dict[str, Grammar]]:
    """The rule of calls in the reader's format, and the grammars that it names."""

    def mark(text: str) -> str:
        """A special token is not text to a grammar."""
        ids = tokenizer.encode(text, add_special=False)
        return f"<[{ids[0]}]>" if len(ids) == 1 and tokenizer.is_special(ids[0]) else json.dumps(text)

    def many(first: str, next_one: str) -> str:
        return f"{first} ({next_one}){{0,{MOST_CALLS - 1}}}" if asking.parallel else first

    tools, line = asking.tools, "/\\n?/"
    if reader == "mistral" and MISTRAL_ARGS in _template_of(asking, tokenizer):
        named = (
            f"{json.dumps(tool.function.name)} {mark(MISTRAL_ARGS)} @call{number}"
            for number, tool in enumerate(tools)
        )
        rule = f"calls: {many('one', 'one')}\none: {mark(MISTRAL)} ({' | '.join(named)})"
        calls = (_grammar("json_schema", tool.arguments) for tool in tools)
        return rule, {f"call{number}": call for number, call in enumerate(calls)}
    row = f'"[" {many("@call", "/, ?/ @call")} "]"'
    match reader:
        case "hermes":
            one = f"{mark(HERMES[0])} {line} @call {line} {mark(HERMES[1])}"
            rule = f"calls: {many('one', f'{line} one')}\none: {one}"
        case "llama3":
            rule = f"calls: {mark(LLAMA3)}? {many('@call', '/; ?/ @call')}"
        case "mistral":
            rule = f"calls: {mark(MISTRAL)} {row}"
        case _:  # a list, or one object
            rule = f"calls: @call | {row}"
    name = "parameters" if reader == "llama3" else "arguments"
    return rule, {"call": _grammar("json_schema", _call_of(tools, name))}


def _moved(schema: Any, to: str) -> Any:
    """`schema` under another root: `#/...` begins at `to`."""
    if isinstance(schema, Mapping):
        moved = {name: _moved(value, to) for name, value in schema.items()}
        if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
            moved["$ref"] = to + ref[1:]
        return moved
    return [_moved(one, to) for one in schema] if isinstance(schema, list) else schema


# ------------------------------------------------------------------------------------------------- the prompt

_ABOUT = """You may call functions to help with the user's request. Their signatures are between <tools> and </tools>:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object of its name and arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>"""  # noqa: E501


def told(
    messages: Sequence[Fields], tools: Sequence[Tool], tokenizer: TextCodec
) -> tuple[list[Fields], list[Fields] | None]:
    """Messages and tools as the model's template takes them. If the template knows no tools, the system
    message describes them in the Hermes format, and calls and results become text."""
    as_dicts = [tool.as_dict() for tool in tools]
    template = tokenizer.chat_template
    if template is not None and template.of(tools).takes_tools:
        return list(messages), as_dicts or None
    plain = [_plain(message) for message in messages]
    if as_dicts:
        about = _ABOUT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in as_dicts))
        if plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{about}"}
        else:
            plain.insert(0, {"role": "system", "content": about})
    return plain, None


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = "\n".join(
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message["tool_calls"]
    )
    return {"role": message["role"], "content": f"{message['content']}\n{calls}".strip()}


# ------------------------------------------------------------------------------------------------- the answer


def format_of(
    asking: ToolRequest,
    is_formed: bool,
    thinks: bool,
    tokenizer: TextCodec,
    reader: str,
    prompt: Sequence[int],
) -> AnswerFormat | None:
    """None: all of the answer is content. `is_formed`: a grammar says what it is. `thinks`: reasoning may
    come before."""
    forced = asking.choice.function.name if isinstance(asking.choice, NamedTool) else None
    if reader == "none" and forced is None and not thinks:
        return None
    begun = thinks and tokenizer.decode(prompt[-8:], skip_special=False).rstrip().endswith(THINK[0])
    names = frozenset(tool.function.name for tool in asking.shown)
    most = None if asking.parallel else 1
    return AnswerFormat(reader, forced, thinks, begun, most, names, is_formed and asking.choice == "auto")


def reader_of(asking: ToolRequest, config: ServerConfig, tokenizer: TextCodec) -> str:
    if asking.choice == "required":
        return "json"
    return parser_name(config.tool_call_parser, _template_of(asking, tokenizer)) if asking.shown else "none"


def _template_of(asking: ToolRequest, tokenizer: TextCodec) -> str:
    return "" if tokenizer.chat_template is None else tokenizer.chat_template.of(asking.shown).source


def parser_name(chosen: str, template: str) -> str:
    """The format that a template asks its model to write; if it asks for none, the format that `told` asks
    for."""
    if chosen != "auto":
        return chosen
    marks = (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama3", "<|python_tag|>"))
    found = next((name for name, mark in marks if mark in template), None)
    return found or ("llama3" if '"parameters"' in template else "hermes")

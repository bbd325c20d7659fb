"""Fields of other servers' APIs that have no effect here, sorted by meaning. Owns the one table of them for
all generating routes, and removes them from a body before it is decoded; the types of bodies have only fields
with an effect.

A field that describes the request, hints, or asks for the existing behaviour is accepted and named to the
client. A value that would change the answer is refused with the reason. A field in neither the table nor the
type may change the answer, and is refused, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from penstock.errors import InvalidRequest
from penstock.server import schema
from penstock.server.schema import Label, Metadata

Meaning = Literal["label", "hint", "same", "change"]
MEANINGS: Mapping[Meaning, str] = {
    "label": "describes the request",
    "hint": "a hint",
    "same": "asks for what is done anyway",
    "change": "would change the answer",
}
MOST_NAMED = 32  # in one header
# type of a tool that is left out: a client's word, which goes into a header
_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# -------------------------------------------------------------------------------------------------- the table


class IgnoredField(NamedTuple):
    """One field. Its path begins at the body; `tools[].strict` is a field of every tool. Accepts the values
    that `takes` allows: listed ones, or those of a type. Any other value is refused."""

    path: str
    apis: str
    meaning: Meaning
    why: str
    takes: Any = Any  # a tuple of values, or a type

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def refusal(self, value: Any) -> str | None:
        if not isinstance(self.takes, tuple):
            try:
                msgspec.convert(value, self.takes)
            except msgspec.ValidationError as error:
                return f"has a value that is not supported by this server ({str(error)[:200]}): {self.why}"
            return None
        if any(type(value) is type(one) and value == one for one in self.takes):
            return None
        allowed = (
            (", except as ") + (" or ").join(msgspec.json.encode(one).decode() for one in self.takes)
            if self.takes
            else ""
        )
        return f"is not supported by this server{allowed}: {self.why}"


class _ThinkingEdit(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class _ContextEdits(msgspec.Struct, forbid_unknown_fields=True):
    """Thinking of earlier turns is never shown to the model again, so clearing or keeping it changes
    nothing."""

    edits: list[_ThinkingEdit] = []


class _DirectCaller(msgspec.Struct):
    type: Literal["direct"]


_Level = Literal["low", "medium", "high"]
_Included = Literal[  # parts of items that answers here never have
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_Callers = Annotated[list[str], msgspec.Meta(min_length=1)]
_TEXT, _OPENAI, _ALL = "completions chat", "completions chat responses", "completions chat responses messages"
_CACHED = "every prefix is cached wherever it ends"
_NO_SETTING = "these models have no such setting: say it in the prompt"
_THOUGHT = "reasoning of earlier turns is not shown to the model again"
_RUNS_NONE = "this server runs no tools itself"
_NOT_STORED = "conversations and prompts are not stored: send input, or go on by previous_response_id"

ROWS: tuple[IgnoredField, ...] = (
    # Labels of the client.
    IgnoredField("user", _TEXT, "label", "a label", Label),
    IgnoredField("safety_identifier", _OPENAI, "label", "a label", Label),
    IgnoredField("metadata", _TEXT, "label", "labels: at most 16, of 64 and 512 characters", Metadata),
    IgnoredField("metadata", "messages", "label", "labels", dict[str, Any]),
    IgnoredField("client_metadata", _ALL, "label", "labels of a client's own", dict[str, Any]),
    IgnoredField("request_id", _TEXT, "label", "the header x-request-id names a request"),
    IgnoredField("rid", _TEXT, "label", "the header x-request-id names a request"),
    IgnoredField("trace_id", _ALL, "label", "the header traceparent names a trace"),
    IgnoredField("litellm_metadata", _ALL, "label", "labels of a proxy's own"),
    IgnoredField("litellm_call_id", _ALL, "label", "labels of a proxy's own"),
    IgnoredField("litellm_trace_id", _ALL, "label", "labels of a proxy's own"),
    IgnoredField("litellm_session_id", _ALL, "label", "labels of a proxy's own"),
    IgnoredField("billing_policy", "messages", "label", "nothing is billed"),
    IgnoredField("fallback_credit_token", "messages", "label", "nothing is billed"),
    IgnoredField("user_profile_id", "messages", "label", "a label"),
    IgnoredField("workspace_id", "messages", "label", "a label"),
    IgnoredField("diagnostics", "messages", "label", "usage says what was cached"),
    IgnoredField("betas", "messages", "label", "the fields say what is asked for"),
    IgnoredField("anthropic_beta", "messages", "label", "the fields say what is asked for"),
    IgnoredField("anthropic_version", "messages", "label", "there is one version"),
    # Speed, price and caching.
    IgnoredField("service_tier", _ALL, "hint", "there is one tier; priority says who goes first", Label),
    IgnoredField("speed", "messages", "hint", "there is one speed; priority says who goes first", Label),
    IgnoredField("fallbacks", "messages", "hint", "there is one model"),
    IgnoredField(
        "prediction", "chat", "hint", "answers are not made faster by it; --speculate does that for all"
    ),
    IgnoredField("store", _TEXT, "hint", "answers are kept for /v1/responses only", bool),
    IgnoredField(
        "prompt_cache_retention", _OPENAI, "hint", "cache_hint.retain_s says how long KV is wanted", Label
    ),
    IgnoredField(
        "prompt_cache_options",
        "chat responses",
        "hint",
        "cache_hint.retain_s says how long KV is wanted",
        dict[str, Any],
    ),
    IgnoredField("cache_prompt", _TEXT, "hint", _CACHED, bool),
    IgnoredField("cache_control", "chat messages", "hint", _CACHED),
    IgnoredField("messages[].cache_control", "chat messages", "hint", _CACHED),
    IgnoredField("messages[].content[].cache_control", "chat messages", "hint", _CACHED),
    IgnoredField("messages[].content[].content[].cache_control", "messages", "hint", _CACHED),
    IgnoredField("system[].cache_control", "messages", "hint", _CACHED),
    IgnoredField("tools[].cache_control", "chat responses messages", "hint", _CACHED),
    IgnoredField("tools[].function.cache_control", "chat", "hint", _CACHED),
    IgnoredField("messages[].content[].prompt_cache_breakpoint", "chat", "hint", _CACHED),
    IgnoredField("input[].content[].prompt_cache_breakpoint", "responses", "hint", _CACHED),
    IgnoredField("id_slot", _TEXT, "hint", "session_id names a session"),
    IgnoredField("keep_alive", _TEXT, "hint", "a model stays while the server runs"),
    IgnoredField("ttl", _TEXT, "hint", "a model stays while the server runs"),
    IgnoredField("draft_model", _TEXT, "hint", "--speculate says it for all"),
    IgnoredField(
        "timings_per_token", _TEXT, "hint", "stream_options.continuous_usage_stats gives usage in every chunk"
    ),
    IgnoredField(
        "return_progress", _TEXT, "hint", "stream_options.continuous_usage_stats gives usage in every chunk"
    ),
    IgnoredField(
        "usage", "chat", "hint", "stream_options.include_usage gives the usage of a stream", dict[str, Any]
    ),
    # Length and effort.
    IgnoredField("verbosity", "chat", "hint", _NO_SETTING, _Level),
    IgnoredField("text.verbosity", "responses", "hint", _NO_SETTING, _Level),
    IgnoredField("output_config.task_budget", "messages", "hint", "max_tokens bounds an answer"),
    IgnoredField(
        "truncation",
        "responses",
        "hint",
        "a conversation that does not fit is refused and not cut",
        Literal["auto", "disabled"],
    ),
    IgnoredField(
        "transforms", "chat", "hint", "a conversation that does not fit is refused and not cut", list[str]
    ),
    IgnoredField("max_tool_calls", "responses", "hint", _RUNS_NONE, schema.Count),
    IgnoredField(
        "include", "responses", "hint", "logprobs are a field of /v1/chat/completions", list[_Included]
    ),
    IgnoredField(
        "context_management",
        "messages",
        "same",
        "tool results are not cleared, and conversations not compacted",
        _ContextEdits,
    ),
    IgnoredField("context_management", "responses", "same", "conversations are not compacted", ([],)),
    # Of tools.
    IgnoredField(
        "tools[].defer_loading",
        "chat responses messages",
        "hint",
        "every tool is shown from the beginning",
        bool,
    ),
    IgnoredField(
        "tools[].tools[].defer_loading", "responses", "hint", "every tool is shown from the beginning", bool
    ),
    IgnoredField("tools[].output_schema", "responses", "hint", "the model is shown what a tool takes"),
    IgnoredField(
        "tools[].tools[].output_schema", "responses", "hint", "the model is shown what a tool takes"
    ),
    IgnoredField("tools[].input_examples", "messages", "hint", "the model is shown the schema", list[Any]),
    IgnoredField(
        "tools[].eager_input_streaming", "messages", "same", "inputs are streamed as they come", (True, False)
    ),
    IgnoredField(
        "tools[].allowed_callers",
        "responses messages",
        "same",
        "the model calls tools, and no program does",
        (["direct"],),
    ),
    # Parts of earlier answers that clients send back.
    IgnoredField("messages[].annotations", "chat", "label", "of an earlier answer", list[Any]),
    IgnoredField("messages[].provider_specific_fields", "chat", "label", "of an earlier answer"),
    IgnoredField("messages[].reasoning", "chat", "same", _THOUGHT, str),
    IgnoredField("messages[].reasoning_details", "chat", "same", _THOUGHT, list[Any]),
    IgnoredField("messages[].thinking_blocks", "chat", "same", _THOUGHT, list[Any]),
    IgnoredField("messages[].tool_calls[].extra_content", "chat", "label", "of an earlier answer"),
    IgnoredField("messages[].tool_calls[].provider_specific_fields", "chat", "label", "of an earlier answer"),
    IgnoredField("messages[].content[].citations", "messages", "label", "of an earlier answer", list[Any]),
    IgnoredField(
        "messages[].content[].content[].citations", "messages", "label", "of an earlier answer", list[Any]
    ),
    IgnoredField("system[].citations", "messages", "label", "of an earlier answer", list[Any]),
    IgnoredField(
        "messages[].content[].caller",
        "messages",
        "same",
        "the model calls tools, and no program does",
        _DirectCaller,
    ),
    IgnoredField("messages[].id", "chat messages", "label", "of an earlier answer", Label),
    IgnoredField(
        "input[].caller", "responses", "same", "the model calls tools, and no program does", _DirectCaller
    ),
    IgnoredField(
        "input[].internal_chat_message_metadata_passthrough", "responses", "label", "of a client's own"
    ),
    # Here, the listed values ask for the existing behaviour.
    IgnoredField("bad_words", _TEXT, "same", "words cannot be ruled out", ([],)),
    IgnoredField("best_of", "completions", "same", "choices are not ranked: ask for n of them", (1,)),
    IgnoredField(
        "suffix", "completions", "same", "these models continue a text and do not fill a gap in it", ("",)
    ),
    IgnoredField("use_beam_search", _TEXT, "same", "there is no beam search", (False,)),
    IgnoredField("length_penalty", _TEXT, "same", "there is no beam search", (1.0,)),
    IgnoredField(
        "spaces_between_special_tokens",
        _TEXT,
        "same",
        "special tokens have no text in an answer",
        (True, False),
    ),
    IgnoredField(
        "include_reasoning",
        "chat",
        "same",
        "reasoning is a field of the answer where the model reasons",
        (True,),
    ),
    IgnoredField(
        "separate_reasoning",
        "chat",
        "same",
        "reasoning is a field of the answer where the model reasons",
        (True,),
    ),
    IgnoredField("stream_reasoning", "chat", "same", "reasoning is streamed as it comes", (True,)),
    IgnoredField("safe_prompt", "chat", "same", "nothing is put before a prompt", (False,)),
    IgnoredField("documents", "chat", "same", "chat templates are given the messages alone", ([],)),
    IgnoredField("functions", "chat", "same", "functions are called tools now", ([],)),
    IgnoredField("modalities", "chat", "same", "answers are text", (["text"],)),
    IgnoredField("plugins", "chat", "same", "there are none", ([],)),
    IgnoredField("background", "responses", "same", "answers come while the client waits", (False,)),
    IgnoredField("top_logprobs", "responses", "same", "logprobs are a field of /v1/chat/completions", (0,)),
    # others are left out where there are tools
    IgnoredField("mcp_servers", "messages", "same", _RUNS_NONE, ([],)),
    IgnoredField("inference_geo", "messages", "same", "a server is where its operator put it", ("global",)),
    # Known, and refused with the reason.
    IgnoredField("audio", "chat", "change", "answers are text", ()),
    IgnoredField("function_call", "chat", "change", "functions are called tools now", ()),
    IgnoredField("web_search_options", "chat", "change", _RUNS_NONE, ()),
    IgnoredField("search_parameters", "chat", "change", _RUNS_NONE, ()),
    IgnoredField("moderation", "chat responses", "change", "answers are neither scored nor blocked", ()),
    IgnoredField("access_programs", "responses", "change", "there are none", ()),
    IgnoredField("conversation", "responses", "change", _NOT_STORED, ()),
    IgnoredField("prompt", "responses", "change", _NOT_STORED, ()),
    IgnoredField("image", "responses", "change", "this server reads and writes text", ()),
    IgnoredField("compaction", "messages", "change", "conversations are not compacted", ()),
    IgnoredField("container", "messages", "change", _RUNS_NONE, ()),
    IgnoredField("thread", "messages", "change", "conversations are not stored", ()),
    IgnoredField("chat_template", "chat", "change", "the model's own template is used", ()),
    IgnoredField("prompt_embeds", _TEXT, "change", "prompts are text or token ids", ()),
    IgnoredField("logits_processors", _TEXT, "change", "clients bring no code", ()),
)

# Types of tools that can be described to the model. A tool of any other type would be run by the server, or
# is known to a special model.
TOOL_TYPES: Mapping[str, tuple[str | None, ...]] = {
    "chat": ("function",),
    "responses": ("function", "namespace"),
    "messages": (None, "custom"),
}


def rows_of(api: str) -> dict[str, IgnoredField]:
    """By path."""
    return {row.path: row for row in ROWS if api in row.apis.split()}


# --------------------------------------------------------------------------------------------------- decoding


class DecodedBody(NamedTuple):
    body: Any
    ignored: Sequence[str]  # fields without effect, as named to the client


def decode(data: bytes, kind: type[msgspec.Struct]) -> DecodedBody:
    """Like `schema.decode`. A body is searched for fields of the table only if it does not match its type."""
    schema.check_shape(data)
    try:
        return DecodedBody(schema.decode(data, kind), ())
    except InvalidRequest:
        api = getattr(kind, "api", None)
        given = _parsed(data)
        if api is None or not isinstance(given, dict):
            raise
        named = [*_without_tools(given, api), *_without_fields(given, api)]
    return DecodedBody(schema.convert(given, kind), list(dict.fromkeys(named))[:MOST_NAMED])


def _parsed(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _without_fields(given: dict[str, Any], api: str) -> Iterator[str]:
    """Remove the fields of the table from a body, and yield the names of those with a value."""
    for row in rows_of(api).values():
        for holder, at in _holders(given, row.path.replace("[]", ".[]").split(".")[:-1], ""):
            if row.name not in holder or holder[row.name] is None:
                holder.pop(row.name, None)
                continue
            if (refusal := row.refusal(holder[row.name])) is not None:
                raise InvalidRequest(f"{at}{row.name} {refusal}", f"{at}{row.name}")
            del holder[row.name]
            yield row.path


def _holders(value: Any, steps: Sequence[str], at: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Objects at the end of the path, with their locations."""
    if not steps:
        if isinstance(value, dict):
            yield value, at
    elif steps[0] == "[]":
        for number, one in enumerate(value if isinstance(value, list) else ()):
            yield from _holders(one, steps[1:], f"{at.removesuffix('.')}[{number}].")
    elif isinstance(value, dict):
        yield from _holders(value.get(steps[0]), steps[1:], f"{at}{steps[0]}.")


def _without_tools(given: dict[str, Any], api: str) -> Iterator[str]:
    """Remove tools that cannot be run, if others remain. Alone they are refused: an answer without them would
    look as if it had used them."""
    tools = given.get("tools") or []
    if not isinstance(tools, list) or api not in TOOL_TYPES:
        return
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            kept, out = _sorted(tool["tools"], ("function",))
            tool["tools"] = kept
            yield from out
    remain, out = _sorted(tools, TOOL_TYPES[api])
    choice = given.get("tool_choice")
    if out and (remain or choice == "none" or choice == {"type": "none"}):
        if isinstance(choice, dict) and any(_is_of(choice, tool) for tool in tools if tool not in remain):
            raise InvalidRequest(
                f"tool_choice names a tool that is not supported here: {_RUNS_NONE}", "tool_choice"
            )
        given["tools"] = remain
        yield from out
    servers = given.get("mcp_servers")
    if remain and servers and isinstance(servers, list):
        del given["mcp_servers"]
        yield "mcp_servers"


def _sorted(tools: Sequence[Any], types: Sequence[str | None]) -> tuple[list[Any], list[str]]:
    """Tools to keep, and the names of the others. An item that is not a tool is kept, and refused later."""
    kept, out = [], []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in types and _TYPE.fullmatch(kind):
            out.append(f"tools[{kind}]")
        elif not (kind == "namespace" and tool.get("tools") == []):
            kept.append(tool)
    return kept, out


def _is_of(choice: dict[str, Any], tool: Any) -> bool:
    """Whether a choice names the tool: by its name, or by its type if it is the only one."""
    return choice.get("type") == tool.get("type") or (
        choice.get("name") is not None and choice["name"] == tool.get("name")
    )

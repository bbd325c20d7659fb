"""Fields of other servers' APIs that have no effect here, sorted by meaning. Owns the one table of them for
all generating routes, and removes them from a body before it is decoded; the types of bodies have only fields
with an effect.

A field that describes the request, hints, or asks for the existing behaviour is accepted and named to the
client. A value that would change the answer is refused with the reason. A field in neither the table nor the
type may change the answer, and is refused, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.errors import InvalidRequest
from penstock.server import schema
from penstock.server.schema import Label, Metadata
from penstock.server.tools import Strict

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


class _ThinkingEdit(Strict):
    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class _ContextEdits(Strict):
    """Thinking of earlier turns is never shown to the model again, so clearing or keeping it changes
    nothing."""

    edits: list[_ThinkingEdit] = msgspec.field(default_factory=list)


class _DirectCaller(msgspec.Struct):
    type: Literal["direct"]


# Words of the table for what a field takes; anything else there is a list of values.
_TYPES: Mapping[str, Any] = {
    "any": Any,
    "bool": bool,
    "str": str,
    "list": list[Any],
    "strings": list[str],
    "object": dict[str, Any],
    "Label": Label,
    "Metadata": Metadata,
    "Count": schema.Count,
    "Level": Literal["low", "medium", "high"],
    "truncation": Literal["auto", "disabled"],
    "Edits": _ContextEdits,
    "Caller": _DirectCaller,
}
_ALL = "completions chat responses messages"
_RUNS_NONE = "this server runs no tools itself"
# Meaning, APIs, values that are taken and reason; below, the fields.
_TABLE = """
label; completions chat; Label; a label
    user
label; completions chat responses; Label; a label
    safety_identifier
label; completions chat; Metadata; labels: at most 16, of 64 and 512 characters
    metadata
label; messages; object; labels
    metadata
label; all; object; labels of a client's own
    client_metadata
label; completions chat; any; the header x-request-id names a request
    request_id rid
label; all; any; the header traceparent names a trace
    trace_id
label; all; any; labels of a proxy's own
    litellm_metadata litellm_call_id litellm_trace_id litellm_session_id
label; messages; any; nothing is billed
    billing_policy fallback_credit_token
label; messages; any; a label
    user_profile_id workspace_id
label; messages; any; usage says what was cached
    diagnostics
label; messages; any; the fields say what is asked for
    betas anthropic_beta
label; messages; any; there is one version
    anthropic_version
hint; all; Label; there is one tier; priority says who goes first
    service_tier
hint; messages; Label; there is one speed; priority says who goes first
    speed
hint; messages; any; there is one model
    fallbacks
hint; chat; any; answers are not made faster by it; --speculate does that for all
    prediction
hint; completions chat; bool; answers are kept for /v1/responses only
    store
hint; completions chat responses; Label; cache_hint.retain_s says how long KV is wanted
    prompt_cache_retention
hint; chat responses; object; cache_hint.retain_s says how long KV is wanted
    prompt_cache_options
hint; completions chat; bool; every prefix is cached wherever it ends
    cache_prompt
hint; chat messages; any; every prefix is cached wherever it ends
    cache_control messages[].cache_control messages[].content[].cache_control
hint; messages; any; every prefix is cached wherever it ends
    messages[].content[].content[].cache_control system[].cache_control
hint; chat responses messages; any; every prefix is cached wherever it ends
    tools[].cache_control
hint; chat; any; every prefix is cached wherever it ends
    tools[].function.cache_control messages[].content[].prompt_cache_breakpoint
hint; responses; any; every prefix is cached wherever it ends
    input[].content[].prompt_cache_breakpoint
hint; completions chat; any; session_id names a session
    id_slot
hint; completions chat; any; a model stays while the server runs
    keep_alive ttl
hint; completions chat; any; --speculate says it for all
    draft_model
hint; completions chat; Count; tokens are sent as they come
    stream_interval
hint; completions chat; any; there is one engine behind each server
    data_parallel_rank routed_dp_rank
hint; chat; any; one server answers, with the model that is named
    provider models route
label; completions chat; object; labels of a client's own
    custom_labels
hint; completions chat; any; stream_options.continuous_usage_stats gives usage in every chunk
    timings_per_token return_progress
hint; chat; object; stream_options.include_usage gives the usage of a stream
    usage
hint; chat; Level; these models have no such setting: say it in the prompt
    verbosity
hint; responses; Level; these models have no such setting: say it in the prompt
    text.verbosity
hint; messages; any; max_tokens bounds an answer
    output_config.task_budget
hint; responses; truncation; a conversation that does not fit is refused and not cut
    truncation
hint; chat; strings; a conversation that does not fit is refused and not cut
    transforms
hint; responses; Count; this server runs no tools itself
    max_tool_calls
same; messages; Edits; tool results are not cleared, and conversations not compacted
    context_management
same; responses; [[]]; conversations are not compacted
    context_management
hint; chat responses messages; bool; every tool is shown from the beginning
    tools[].defer_loading
hint; responses; bool; every tool is shown from the beginning
    tools[].tools[].defer_loading
hint; responses; any; the model is shown what a tool takes
    tools[].output_schema tools[].tools[].output_schema
hint; messages; list; the model is shown the schema
    tools[].input_examples
same; messages; [true,false]; inputs are streamed as they come
    tools[].eager_input_streaming
same; responses messages; [["direct"]]; the model calls tools, and no program does
    tools[].allowed_callers
label; chat; list; of an earlier answer
    messages[].annotations
label; chat; any; of an earlier answer
    messages[].provider_specific_fields
same; chat; str; reasoning of earlier turns is not shown to the model again
    messages[].reasoning
same; chat; list; reasoning of earlier turns is not shown to the model again
    messages[].reasoning_details messages[].thinking_blocks
label; chat; any; of an earlier answer
    messages[].tool_calls[].extra_content messages[].tool_calls[].provider_specific_fields
label; messages; list; of an earlier answer
    messages[].content[].citations messages[].content[].content[].citations system[].citations
same; messages; Caller; the model calls tools, and no program does
    messages[].content[].caller
label; chat messages; Label; of an earlier answer
    messages[].id
same; responses; Caller; the model calls tools, and no program does
    input[].caller
label; responses; any; of a client's own
    input[].internal_chat_message_metadata_passthrough
same; completions; [1]; choices are not ranked: ask for n of them
    best_of
same; completions; [""]; these models continue a text and do not fill a gap in it
    suffix
same; completions chat; [false]; there is no beam search
    use_beam_search
same; completions chat; [1.0]; there is no beam search
    length_penalty
same; completions chat; [true,false]; special tokens have no text in an answer
    spaces_between_special_tokens
same; chat; [true]; reasoning is a field of the answer where the model reasons
    include_reasoning separate_reasoning
same; chat; [true]; reasoning is streamed as it comes
    stream_reasoning
same; completions chat; [false]; stop strings are cut off unless include_stop_str_in_output is true
    no_stop_trim
same; completions chat; [false]; hidden states are not given
    return_hidden_states
same; completions chat; [false]; which experts a token took is not given
    return_routed_experts
same; completions chat; [false]; return_token_ids gives a prompt's tokens
    return_prompt_text return_token_offsets
same; completions chat; bool; usage.prompt_tokens_details says it
    return_cached_tokens_details
same; completions chat; ["left"]; the last tokens of a prompt are kept
    truncation_side
same; completions chat; [false]; answers have no watermark
    watermarking
same; completions chat; [{}]; prompts are text
    mm_processor_kwargs media_io_kwargs
same; completions chat; [{}]; there are no extensions
    vllm_xargs custom_params
same; chat; [false]; an answer is its new text alone
    echo
same; chat; [false]; the chat template writes the special tokens
    add_special_tokens
same; chat; [false]; nothing is put before a prompt
    safe_prompt
same; chat; [[]]; chat templates are given the messages alone
    documents
same; chat; [[]]; functions are called tools now
    functions
same; chat; [["text"]]; answers are text
    modalities
same; chat; [[]]; there are none
    plugins
same; responses; [false]; answers come while the client waits
    background
same; responses; [false]; a call is answered before the conversation goes on
    tools[].async tools[].tools[].async input[].async
same; responses; ["auto","current_turn"]; reasoning of earlier turns is not shown to the model again
    reasoning.context
same; responses; ["standard"]; there is one mode
    reasoning.mode
same; messages; [[]]; this server runs no tools itself
    mcp_servers
same; messages; ["global"]; a server is where its operator put it
    inference_geo
change; chat; []; answers are text
    audio
change; chat; []; functions are called tools now
    function_call
change; chat; []; this server runs no tools itself
    web_search_options search_parameters
change; chat responses; []; answers are neither scored nor blocked
    moderation
change; responses; []; there are none
    access_programs
change; responses; []; conversations and prompts are not stored: send input, or go on by previous_response_id
    conversation prompt
change; responses; []; this server reads and writes text
    image
change; messages; []; conversations are not compacted
    compaction
change; messages; []; this server runs no tools itself
    container
change; messages; []; conversations are not stored
    thread
change; chat; []; the model's own template is used
    chat_template
change; chat; []; chat_template_kwargs.enable_thinking, reasoning_effort and thinking_token_budget say it
    enable_thinking thinking thinking_budget reasoning
change; completions chat; []; adapters are models: name one in model
    lora_path
change; completions chat; []; structured_outputs and response_format say it
    json_schema regex ebnf grammar
change; completions chat; []; stop and stop_token_ids say it
    stop_regex
change; completions chat; []; repetition_penalty and frequency_penalty are there
    repetition_detection
change; completions chat; []; alternatives are the likeliest tokens: see logprobs and top_logprobs
    logprob_token_ids
change; completions chat; []; engines share KV through a store: --kv-offload-remote
    kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room
change; completions chat; []; prompts are text or token ids
    prompt_embeds
change; completions chat; []; clients bring no code
    logits_processors custom_logit_processor
"""


def _rows() -> Iterator[IgnoredField]:
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            meaning, apis, word, why = line.split("; ", 3)
            takes = _TYPES[word] if word in _TYPES else tuple(json.loads(word))
            apis = _ALL if apis == "all" else apis
        else:
            yield from (IgnoredField(path, apis, meaning, why, takes) for path in line.split())  # type: ignore[arg-type]


ROWS = tuple(_rows())

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

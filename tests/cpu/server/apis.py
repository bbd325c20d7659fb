"""The three APIs that have messages, tools and reasoning, as one: how each is asked, and what its answers
say, whole or streamed. Owns the engine that says what a test has set."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import httpx

from penstock.models.chat import ChatTemplate
from tests.cpu.server.served import MODEL
from tests.support.scripted_engine import EOS, ScriptedEngine

Json = dict[str, Any]

QUESTION = "How warm is it in Bern?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "Bern"]}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
FUNCTIONS: tuple[Json, ...] = (
    {"name": "weather", "description": "How warm it is", "parameters": WEATHER},
    {"name": "now"},
)
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>'  # noqa: E501
KNOWS_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]{{ "
    "m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | "
    "tojson }}</tool_call>{% endfor %}{% endfor %}"
)
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# <think></think> #}"


class Speaking(ScriptedEngine):
    """Says what it was last told to say."""

    def __init__(self, text: str = "", template: str | None = None, **options: Any) -> None:
        super().__init__(lambda prompt, sampling: [*self._text.encode(), EOS], **options)
        self._plain = self.tokenizer.chat_template
        self.says(text, template)

    def says(self, text: str, template: str | None = None) -> None:
        self._text = text
        self.tokenizer.chat_template = self._plain if template is None else ChatTemplate(template, {})

    @property
    def prompt(self) -> str:
        """Of the last request."""
        return bytes(self.submitted[-1][0]).decode()


class CalledTool(NamedTuple):
    name: str
    arguments: Any  # parsed where they are JSON
    id: str = ""


class Said(NamedTuple):
    """An answer: its parts in order, of which a chat keeps only that within each kind."""

    parts: list[tuple[str, Any]]  # reasoning, text and call
    finish: str  # in a chat's words
    raw: Json

    @property
    def text(self) -> str:
        return "".join(said for kind, said in self.parts if kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(said for kind, said in self.parts if kind == "reasoning")

    @property
    def calls(self) -> list[CalledTool]:
        return [said for kind, said in self.parts if kind == "call"]

    def without_ids(self) -> tuple[list[tuple[str, Any]], str]:
        return [(kind, said[:2] if kind == "call" else said) for kind, said in self.parts], self.finish


class Api:
    """One API. `path`, names of fields, and the shapes of its answers."""

    path = most = form = ""  # names of fields: the bound of an answer, and its form

    def body(self, **fields: Any) -> Json:
        raise NotImplementedError

    def tools(self, *functions: Json) -> list[Json]:
        raise NotImplementedError

    def choice(self, name: str) -> Json:
        """`tool_choice` for "auto", "none", "required", or a function."""
        raise NotImplementedError

    def one_call(self) -> Json:
        """Fields for at most one call."""
        return {"parallel_tool_calls": False}

    def formed(self, schema: Json) -> Json:
        """Fields for an answer of that form."""
        raise NotImplementedError

    def after(self, said: Said, *results: str) -> Json:
        """Fields that send an answer back, with the results of its calls, and a new question."""
        raise NotImplementedError

    def read(self, answer: Json) -> Said:
        raise NotImplementedError

    def joined(self, events: list[Json]) -> Json:
        """The answer that a client puts together from a stream; checks the order of events."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ asking

    def post(self, served: Any, status: int = 200, model: str = MODEL, **fields: Any) -> httpx.Response:
        reply: httpx.Response = served.http.post(self.path, json={"model": model, **self.body(**fields)})
        assert reply.status_code == status, reply.text
        return reply

    def ask(self, served: Any, **fields: Any) -> Said:
        return self.read(self.post(served, **fields).json())

    def ask_streamed(self, served: Any, **fields: Any) -> Said:
        return self.read(self.joined(events_of(self.post(served, stream=True, **fields).text)))

    def ask_both(self, served: Any, **fields: Any) -> Said:
        """The whole answer; the streamed one says the same."""
        whole, streamed = self.ask(served, **fields), self.ask_streamed(served, **fields)
        assert whole.without_ids() == streamed.without_ids()
        return whole

    def refusal(self, served: Any, status: int = 400, **fields: Any) -> Json:
        error: Json = self.post(served, status, **fields).json()["error"]
        return error


def events_of(text: str) -> list[Json]:
    """Of a stream. An event that has a name has it twice."""
    found = []
    for block in filter(None, text.split("\n\n")):
        *name, data = block.split("\n")
        if data != "data: [DONE]":
            found.append(json.loads(data.removeprefix("data: ")))
            assert not name or name == [f"event: {found[-1]['type']}"]
    return found


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class ChatApi(Api):
    path, most, form = "/v1/chat/completions", "max_tokens", "response_format"

    def body(self, **fields: Any) -> Json:
        return {"messages": [{"role": "user", "content": QUESTION}], **fields}

    def tools(self, *functions: Json) -> list[Json]:
        return [{"type": "function", "function": one} for one in functions]

    def choice(self, name: str) -> Json:
        plain = name in ("auto", "none", "required")
        return {"tool_choice": name if plain else {"type": "function", "function": {"name": name}}}

    def formed(self, schema: Json) -> Json:
        return {
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        }

    def after(self, said: Said, *results: str) -> Json:
        told = [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(said.calls, results, strict=True)
        ]
        message = said.raw["choices"][0]["message"]
        question = {"role": "user", "content": "Well?"}
        return {"messages": [*self.body()["messages"], message, *told, question]}

    def read(self, answer: Json) -> Said:
        (choice,) = answer["choices"]
        message, parts = choice["message"], list[tuple[str, Any]]()
        for kind, name in (("reasoning", "reasoning_content"), ("text", "content")):
            if message.get(name):
                parts.append((kind, message[name]))
        for call in message.get("tool_calls") or ():
            assert call["type"] == "function"
            function = call["function"]
            called = CalledTool(function["name"], _arguments(function["arguments"]), call["id"])
            parts.append(("call", called))
        return Said(parts, choice["finish_reason"], answer)

    def joined(self, events: list[Json]) -> Json:
        """Only the first part of a call has its id and name."""
        message: Json = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: dict[int, Json] = {}
        finish = None
        for choice in (choice for event in events for choice in event["choices"]):
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                assert ("id" in call) == ("name" in function) == (call["index"] not in calls)
                known = calls.setdefault(
                    call["index"], {**call, "function": {"name": function.get("name"), "arguments": ""}}
                )
                known["function"]["arguments"] += function.get("arguments", "")
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"choices": [{"message": message, "finish_reason": finish}], **_usage_in(events)}


def _usage_in(events: list[Json]) -> Json:
    usage = events[-1].get("usage") if events else None
    return {} if usage is None else {"usage": usage}


class ResponsesApi(Api):
    path, most, form = "/v1/responses", "max_output_tokens", "text.format"

    def body(self, **fields: Any) -> Json:
        return {"input": QUESTION, **fields}

    def tools(self, *functions: Json) -> list[Json]:
        return [{"type": "function", **one} for one in functions]

    def choice(self, name: str) -> Json:
        plain = name in ("auto", "none", "required")
        return {"tool_choice": name if plain else {"type": "function", "name": name}}

    def formed(self, schema: Json) -> Json:
        return {"text": {"format": {"type": "json_schema", "name": "answer", "schema": schema}}}

    def after(self, said: Said, *results: str) -> Json:
        told = [
            {"type": "function_call_output", "call_id": call.id, "output": result}
            for call, result in zip(said.calls, results, strict=True)
        ]
        first, question = ({"role": "user", "content": text} for text in (QUESTION, "Well?"))
        return {"input": [first, *said.raw["output"], *told, question]}

    def read(self, answer: Json) -> Said:
        parts = list[tuple[str, Any]]()
        for item in answer["output"]:
            if item["type"] == "function_call":
                name = "__".join(filter(None, (item.get("namespace"), item["name"])))
                parts.append(("call", CalledTool(name, _arguments(item["arguments"]), item["call_id"])))
            else:
                kind = {"message": "text", "reasoning": "reasoning"}[item["type"]]
                parts += [(kind, part["text"]) for part in item["content"]]
        if answer["status"] == "incomplete":
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert answer["output"][-1]["status"] == "incomplete"
            return Said(parts, "length", answer)
        return Said(parts, "tool_calls" if any(kind == "call" for kind, _ in parts) else "stop", answer)

    def joined(self, events: list[Json]) -> Json:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        *_, last = events
        answer: Json = last["response"]
        assert last["type"] == f"response.{answer['status']}"
        added = [event["output_index"] for event in events if event["type"].endswith("output_item.added")]
        assert added == list(range(len(answer["output"])))
        deltas = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
        texts = (
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            for item in answer["output"]
        )
        assert deltas == "".join(texts)
        return answer


FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


class MessagesApi(Api):
    path, most, form = "/v1/messages", "max_tokens", "output_config.format"

    def body(self, **fields: Any) -> Json:
        return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 600, **fields}

    def tools(self, *functions: Json) -> list[Json]:
        return [
            {
                "input_schema": one.get("parameters", {"type": "object"}),
                **{name: value for name, value in one.items() if name != "parameters"},
            }
            for one in functions
        ]

    def choice(self, name: str) -> Json:
        kinds = {"auto": "auto", "none": "none", "required": "any"}
        return {"tool_choice": {"type": kinds[name]} if name in kinds else {"type": "tool", "name": name}}

    def one_call(self) -> Json:
        return {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}

    def formed(self, schema: Json) -> Json:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def after(self, said: Said, *results: str) -> Json:
        told = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result}
            for call, result in zip(said.calls, results, strict=True)
        ]
        answer = {"role": "assistant", "content": said.raw["content"]}
        question = {"role": "user", "content": [*told, {"type": "text", "text": "Well?"}]}
        return {"messages": [*self.body()["messages"], answer, question]}

    def read(self, answer: Json) -> Said:
        parts = list[tuple[str, Any]]()
        for block in answer["content"]:
            if block["type"] == "tool_use":
                parts.append(("call", CalledTool(block["name"], block["input"], block["id"])))
            elif block["type"] == "thinking":
                parts.append(("reasoning", block["thinking"]))
            else:
                parts.append(("text", block["text"]))
        return Said(parts, FINISHES[answer["stop_reason"]], answer)

    def joined(self, events: list[Json]) -> Json:
        start, *middle, delta, stop = events
        assert (start["type"], delta["type"], stop) == (
            "message_start",
            "message_delta",
            {"type": "message_stop"},
        )
        message = start["message"]
        assert message["content"] == [] and message["stop_reason"] is None
        content, arguments = message["content"], ""
        for event in middle:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(content)
                    content.append(event["content_block"])
                    arguments = ""
                case "content_block_delta":
                    assert event["index"] == len(content) - 1
                    kind = event["delta"]["type"].partition("_")[0]
                    if kind == "input":
                        arguments += event["delta"]["partial_json"]
                    else:
                        content[-1][kind] += event["delta"][kind]
                case "content_block_stop" if content[-1]["type"] == "tool_use":
                    found = _arguments(arguments or "{}")
                    content[-1]["input"] = found if isinstance(found, dict) else {"INVALID_JSON": arguments}
        assert sum(event["type"] == "content_block_stop" for event in middle) == len(content)
        return {**message, **delta["delta"], "usage": delta["usage"]}


CHAT, RESPONSES, MESSAGES = APIS = ChatApi(), ResponsesApi(), MessagesApi()

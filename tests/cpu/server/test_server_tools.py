"""What a model is told of tools, and how its calls are found, in chats; what all APIs share is in
test_server_apis.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.models.chat import ChatTemplate
from tests.cpu.server.apis import CALL, CHAT, FUNCTIONS, KNOWS_TOOLS, THINKS, Speaking
from tests.cpu.server.served import Served, serving

TOOLS = CHAT.tools(*FUNCTIONS)
MISTRAL = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'


@pytest.fixture(scope="module")
def model() -> Speaking:
    return Speaking(max_model_len=1 << 20)


@pytest.fixture(scope="module")
def served(model: Speaking) -> Iterator[Served]:
    with serving(model) as running:
        yield running


@pytest.mark.parametrize(
    ("stop", "finish"), [("Bern", "stop"), ("</tool_call>", "tool_calls"), ("now", "tool_calls")]
)
def test_a_stop_string_inside_a_call_is_no_call(
    served: Served, model: Speaking, stop: str, finish: str
) -> None:
    """Behind all of its arguments it is one: clients stop there to have one call. So it is where the next one
    has no name yet."""
    model.says(CALL)
    for said in (CHAT.ask(served, tools=TOOLS, stop=stop), CHAT.ask_streamed(served, tools=TOOLS, stop=stop)):
        assert said.finish == finish


@pytest.mark.parametrize("depth", [101, 950, 100_000])
def test_arguments_that_are_nested_without_end_are_passed_on_as_text(
    served: Served, model: Speaking, depth: int
) -> None:
    """They need not be JSON, so the client that sends them gets no error; no stack is deep enough to take
    them apart."""
    arguments = "[" * depth + "]" * depth
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    turns: list[Any] = [
        *CHAT.body()["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    model.says("Yes.", KNOWS_TOOLS)
    assert CHAT.ask(served, messages=turns).text == "Yes."
    assert f'<tool_call>now"{arguments}"</tool_call>' in model.prompt


def test_a_template_that_knows_no_tools_is_told_of_them_in_the_system_message(
    served: Served, model: Speaking
) -> None:
    model.says(CALL)
    said = CHAT.ask(served, tools=TOOLS)
    assert model.prompt.startswith("system: You may call functions")
    assert model.prompt.index("</tools>") < model.prompt.index("user: How warm")
    after = CHAT.after(said, "21 C", "noon")["messages"]
    CHAT.ask(served, tools=TOOLS, messages=[{"role": "system", "content": "Be brief."}, *after])
    assert model.prompt.startswith("system: Be brief.\n\nYou may call functions")
    assert model.prompt.count("<tools>\n") == 1
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    assert f"assistant: Let me see.\n{call}" in model.prompt
    assert "user: <tool_response>\n21 C\n</tool_response>" in model.prompt


def test_a_model_with_a_template_for_tools_is_told_of_them_by_that_one(
    served: Served, model: Speaking
) -> None:
    """And its calls are read as that one has them; without tools it is the other's."""
    model.says(MISTRAL)
    default = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"
    for_tools = KNOWS_TOOLS.replace("<tool_call>", "[TOOL_CALLS]")
    model.tokenizer.chat_template = ChatTemplate(default, {}, for_tools)
    said = CHAT.ask(served, tools=TOOLS)
    assert said.calls[0][:2] == ("now", {}) and len(said.calls[0].id) == 9 and said.calls[0].id.isalnum()
    assert model.prompt.startswith("<tools>[{") and model.prompt.endswith("[user]How warm is it in Bern?")
    CHAT.ask(served, **CHAT.after(said, "21 C"))
    assert model.prompt.startswith("(user)How warm") and "(user)<tool_response>\n21 C" in model.prompt


def test_flags_choose_the_parsers() -> None:
    for text, template, flags, num_calls, reasoning in (
        ('{"name": "now", "arguments": {}}', None, {"tool_call_parser": "json"}, 1, ""),
        ('{"name": "now", "arguments": {}}', None, {"tool_call_parser": "none"}, 0, ""),
        ('{"name": "now", "arguments": {}}', None, {"tool_call_parser": "hermes"}, 1, ""),
        ('{"name": "now", "parameters": {}}', None, {"tool_call_parser": "hermes"}, 0, ""),
        ('{"name": "now", "parameters": {}}', None, {"tool_call_parser": "json"}, 1, ""),
        ("<think>hm</think>Hi", THINKS, {"reasoning_parser": "none"}, 0, ""),
        ("<think>hm</think>Hi", None, {"reasoning_parser": "auto"}, 0, ""),
        ("<think>hm</think>Hi", None, {"reasoning_parser": "think"}, 0, "hm"),
    ):
        with serving(Speaking(text, template), **flags) as served:
            said = CHAT.ask(served, tools=TOOLS)
            assert (len(said.calls), said.reasoning) == (num_calls, reasoning)
            assert num_calls or reasoning or said.text == text

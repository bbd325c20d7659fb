"""What clients ask of reasoning and of chat templates: what the template is given, and what is continued.
What is refused is in test_server_refusals.py, and bounds of reasoning in test_server_structured.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cpu.server.apis import CHAT, MESSAGES, QUESTION, RESPONSES, Api, Speaking
from tests.cpu.server.served import MODEL, Served, serving

TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}{% if add_generation_prompt "
    "%}[assistant]{% endif %}"
)
SWITCHED = TURNS + (
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{# </think> #}"
)
LEVELS = "{{ reasoning_effort | default('medium') }}:" + TURNS + "{# </think> #}"
THINKS = TURNS + "<think>{# </think> #}"
OFF, ON = "<think></think>", "[assistant]"
GIVEN: tuple[tuple[Api, str, dict[str, Any], str, str], ...] = (
    (CHAT, SWITCHED, {}, "[user]", ON),
    (CHAT, SWITCHED, {"reasoning_effort": "none"}, "[user]", OFF),
    (CHAT, SWITCHED, {"reasoning_effort": "minimal"}, "[user]", OFF),
    (CHAT, SWITCHED, {"reasoning_effort": "high"}, "[user]", ON),
    (CHAT, SWITCHED, {"chat_template_kwargs": {"enable_thinking": False}}, "[user]", OFF),
    (CHAT, SWITCHED.replace("enable_", ""), {"reasoning_effort": "none"}, "[user]", OFF),
    (CHAT, LEVELS, {}, "medium:", ON),
    (CHAT, LEVELS, {"reasoning_effort": "none"}, "none:", ON),
    (CHAT, LEVELS, {"chat_template_kwargs": {"reasoning_effort": "xhigh", "other": [1]}}, "xhigh:", ON),
    (CHAT, THINKS, {"reasoning_effort": "low"}, "[user]", "<think>"),
    (CHAT, TURNS, {"reasoning_effort": "high", "chat_template_kwargs": {"a": None}}, "[user]", ON),
    (CHAT, TURNS, {"chat_template_kwargs": {"enable_thinking": False}}, "[user]", ON),
    (RESPONSES, SWITCHED, {"reasoning": {"effort": "none"}}, "[user]", OFF),
    (MESSAGES, SWITCHED, {"thinking": {"type": "enabled", "budget_tokens": 100}}, "[user]", ON),
    (MESSAGES, SWITCHED, {"thinking": {"type": "adaptive"}}, "[user]", ON),
    (MESSAGES, SWITCHED, {"thinking": {"type": "disabled"}}, "[user]", OFF),
    (MESSAGES, LEVELS, {"output_config": {"effort": "low"}}, "low:", ON),
)
BEGUN: list[Any] = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is "}]


@pytest.fixture(scope="module")
def model() -> Speaking:
    return Speaking()


@pytest.fixture(scope="module")
def served(model: Speaking) -> Iterator[Served]:
    with serving(model) as running:
        yield running


def test_a_template_is_given_what_it_knows(served: Served, model: Speaking) -> None:
    for api, template, fields, starts, ends in GIVEN:
        model.says("Yes.", template)
        api.post(served, **fields)
        assert model.prompt.startswith(starts) and model.prompt.endswith(ends), (template, fields)


def test_the_last_message_is_continued_where_the_client_says_so(served: Served, model: Speaking) -> None:
    model.says(" 21 C.", TURNS)
    asked = f"[user]{QUESTION}[/][assistant]It is"
    for fields, prompt in (
        ({"continue_final_message": True, "add_generation_prompt": False}, f"{asked} "),
        ({}, f"{asked}[/][assistant]"),
        ({"add_generation_prompt": False}, f"{asked}[/]"),
    ):
        assert CHAT.ask(served, messages=BEGUN, **fields).text == " 21 C." and model.prompt == prompt
    MESSAGES.ask(served, messages=BEGUN)  # always: Anthropic's prefill
    assert model.prompt == f"{asked} "
    model.says("mm</think>21 C.", SWITCHED)
    begun = [BEGUN[0], {"role": "assistant", "content": "<think>"}]
    said = CHAT.ask(served, messages=begun, continue_final_message=True)
    assert (said.text, said.reasoning) == ("21 C.", "mm")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = [BEGUN[0], {"role": "assistant", "content": "x", "tool_calls": [call]}]
    refused = CHAT.refusal(served, model=MODEL, messages=calling, continue_final_message=True)
    assert refused["param"] == "continue_final_message"

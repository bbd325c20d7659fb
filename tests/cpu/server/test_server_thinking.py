"""What clients ask of reasoning and of chat templates over HTTP: what the template is given, what is refused,
what is continued."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.models.chat import ChatTemplate
from tests.cpu.server.served import MODEL, Served, serving
from tests.cpu.server.tiered_server import MODEL as REAL_MODEL
from tests.cpu.server.tiered_server import Tiered, tiered
from tests.support.scripted_engine import EOS, ScriptedEngine

ASK = [{"role": "user", "content": "How warm is it?"}]
TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}{% if add_generation_prompt "
    "%}[assistant]{% endif %}"
)
SWITCHED = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
LEVELS = "{{ reasoning_effort | default('medium') }}:" + TURNS
THINKS = TURNS + "<think>"  # always; </think> is what the model writes
PLAIN = TURNS


def saying(text: str, template: str) -> ScriptedEngine:
    engine = ScriptedEngine(lambda prompt, sampling: [*text.encode(), EOS])
    engine.tokenizer.chat_template = ChatTemplate(template + "{# </think> #}" * (template != PLAIN), {})
    return engine


def prompt_of(served: Served) -> str:
    return bytes(served.engine.submitted[-1][0]).decode()


def chat(served: Served, **fields: Any) -> Any:
    return served.http.post("/v1/chat/completions", json={"model": MODEL, "messages": ASK, **fields})


def error(reply: Any) -> tuple[int, str | None]:
    return reply.status_code, reply.json()["error"]["param"]


@pytest.mark.parametrize(
    ("template", "fields", "starts", "ends"),
    [
        (SWITCHED, {}, "[user]", "[assistant]"),
        (SWITCHED, {"reasoning_effort": "none"}, "[user]", "<think></think>"),
        (SWITCHED, {"reasoning_effort": "minimal"}, "[user]", "<think></think>"),
        (SWITCHED, {"reasoning_effort": "high"}, "[user]", "[assistant]"),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": False}}, "[user]", "<think></think>"),
        (SWITCHED.replace("enable_", ""), {"reasoning_effort": "none"}, "[user]", "<think></think>"),
        (LEVELS, {}, "medium:", "[assistant]"),
        (LEVELS, {"reasoning_effort": "none"}, "none:", "[assistant]"),
        (LEVELS, {"reasoning_effort": "low"}, "low:", "[assistant]"),
        (
            LEVELS,
            {"chat_template_kwargs": {"reasoning_effort": "xhigh", "other": [1, {"a": None}]}},
            "xhigh:",
            "[assistant]",
        ),
        (THINKS, {"reasoning_effort": "low"}, "[user]", "<think>"),
        (
            PLAIN,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}},
            "[user]",
            "[assistant]",
        ),
        (PLAIN, {"reasoning_effort": "high"}, "[user]", "[assistant]"),
    ],
)
def test_a_template_is_given_what_it_knows(
    template: str, fields: dict[str, Any], starts: str, ends: str
) -> None:
    with serving(saying("Yes.", template)) as served:
        assert chat(served, **fields).status_code == 200
        assert prompt_of(served).startswith(starts) and prompt_of(served).endswith(ends)


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (THINKS, {"reasoning_effort": "none"}, "reasoning_effort"),
        (THINKS, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        (
            SWITCHED,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
        ),
        (PLAIN, {"reasoning_effort": "much"}, "reasoning_effort"),
        (PLAIN, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (PLAIN, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (PLAIN, {"chat_template_kwargs": {"range": 1}}, "chat_template_kwargs"),
        (PLAIN, {"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        (PLAIN, {"chat_template_kwargs": {"no name": 1}}, "chat_template_kwargs"),
        (PLAIN, {"chat_template_kwargs": {"a": "x" * 4096}}, "chat_template_kwargs"),
        (PLAIN, {"chat_template_kwargs": {"a": eval("[" * 101 + "]" * 101)}}, "chat_template_kwargs"),
        (PLAIN, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_or_says_two_things_is_refused_by_name(
    template: str, fields: dict[str, Any], param: str
) -> None:
    with serving(saying("Yes.", template)) as served:
        assert error(chat(served, **fields)) == (400, param)
        assert not served.engine.submitted


def test_responses_take_an_effort_and_say_it_again() -> None:
    with serving(saying("Yes.", SWITCHED)) as served:
        asked = {"model": MODEL, "input": "How warm is it?"}
        reply = served.http.post("/v1/responses", json={**asked, "reasoning": {"effort": "none"}})
        assert reply.json()["reasoning"]["effort"] == "none" and prompt_of(served).endswith("<think></think>")
    with serving(saying("Yes.", THINKS)) as served:
        assert error(served.http.post("/v1/responses", json={**asked, "reasoning": {"effort": "none"}})) == (
            400,
            "reasoning.effort",
        )


# ------------------------------------------------------------------------------------------------- continuing

BEGUN = [*ASK, {"role": "assistant", "content": "It is "}]


def test_the_last_message_is_continued_where_the_client_says_so() -> None:
    with serving(saying(" 21 C.", PLAIN)) as served:
        reply = chat(served, messages=BEGUN, continue_final_message=True, add_generation_prompt=False).json()
        assert prompt_of(served) == "[user]How warm is it?[/][assistant]It is "
        assert reply["choices"][0]["message"]["content"] == " 21 C."
        chat(served, messages=BEGUN)
        assert prompt_of(served) == "[user]How warm is it?[/][assistant]It is[/][assistant]"
        chat(served, messages=BEGUN, add_generation_prompt=False)
        assert prompt_of(served) == "[user]How warm is it?[/][assistant]It is[/]"


def test_reasoning_that_the_last_message_has_begun_goes_on() -> None:
    with serving(saying("mm</think>21 C.", SWITCHED)) as served:
        begun = [*ASK, {"role": "assistant", "content": "<think>"}]
        message = chat(served, messages=begun, continue_final_message=True).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("21 C.", "mm")


def test_anthropics_prefill_is_continued_and_counted() -> None:
    with serving(saying("21 C.", PLAIN)) as served:
        asked = {"model": MODEL, "messages": BEGUN}
        reply = served.http.post("/v1/messages", json={**asked, "max_tokens": 20}).json()
        assert prompt_of(served) == "[user]How warm is it?[/][assistant]It is "
        assert reply["content"] == [{"type": "text", "text": "21 C."}]
        counted = served.http.post("/v1/messages/count_tokens", json=asked).json()
        assert counted["input_tokens"] == len(prompt_of(served)) == reply["usage"]["input_tokens"]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": ASK}, "continue_final_message"),
        ({"messages": BEGUN, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": "x", "tool_calls": [CALL]}]},
            "continue_final_message",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(fields: dict[str, Any], param: str) -> None:
    with serving(saying("21 C.", PLAIN)) as served:
        assert error(chat(served, continue_final_message=True, **fields)) == (400, param)
        block = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        asked = {
            "model": MODEL,
            "max_tokens": 9,
            "messages": [*ASK, {"role": "assistant", "content": [block]}],
        }
        assert error(served.http.post("/v1/messages", json=asked)) == (400, "messages")


# --------------------------------------------------------------------------------------- Anthropic's thinking


def ask(served: Served, **fields: Any) -> Any:
    return served.http.post(
        "/v1/messages", json={"model": MODEL, "messages": ASK, "max_tokens": 400, **fields}
    )


@pytest.mark.parametrize(
    ("thinking", "ends"),
    [
        ({"type": "enabled", "budget_tokens": 100}, "[assistant]"),
        ({"type": "adaptive"}, "[assistant]"),
        ({"type": "disabled"}, "<think></think>"),
    ],
)
def test_thinking_is_turned_on_and_off_by_the_template(thinking: dict[str, Any], ends: str) -> None:
    with serving(saying("Yes.", SWITCHED)) as served:
        assert ask(served, thinking=thinking).json()["content"] == [{"type": "text", "text": "Yes."}]
        assert prompt_of(served).endswith(ends)


@pytest.mark.parametrize(
    ("thinking", "param"),
    [
        ({"type": "enabled"}, "thinking"),
        ({"type": "disabled", "budget_tokens": 100}, "thinking"),
        ({"type": "disabled"}, "thinking"),
        ({"type": "enabled", "budget_tokens": 400}, "thinking"),
        ({"type": "enabled", "budget_tokens": 0}, "thinking"),
    ],
)
def test_thinking_that_cannot_be_is_refused(thinking: dict[str, Any], param: str) -> None:
    with serving(saying("hm</think>Yes.", THINKS)) as served:
        status, found = error(ask(served, thinking=thinking))
        assert status == 400 and str(found).startswith(param)


# ---------------------------------------------------------------------------------------------------- budgets


@pytest.fixture(scope="module")
def server() -> Iterator[Tiered]:
    """Random weights, of a model that always reasons and would never end it."""
    with tiered(host_blocks=0, blocks=1024) as running:
        running.engine.tokenizer.chat_template = ChatTemplate(THINKS + "{# </think> #}", {})
        yield running


def budgeted(server: Tiered, budget: int, **fields: Any) -> Any:
    asked = {
        "model": REAL_MODEL,
        "messages": ASK,
        "max_tokens": 90,
        "seed": 3,
        "thinking_token_budget": budget,
        **fields,
    }
    return server.http.post("/v1/chat/completions", json=asked).json()


@pytest.mark.parametrize("budget", [0, 1, 20])
def test_reasoning_is_ended_when_its_budget_is_spent(server: Tiered, budget: int) -> None:
    endless = budgeted(server, 90)["choices"][0]["message"]
    assert endless["reasoning_content"] and not endless["content"]
    reply = budgeted(server, budget, n=3, return_token_ids=True)
    for choice in reply["choices"]:
        assert bytes(choice["token_ids"][budget : budget + 8]) == b"</think>" and choice["message"]["content"]
        assert bool(choice["message"].get("reasoning_content")) == bool(budget)


def test_a_budget_is_kept_in_a_stream_and_in_front_of_a_form(server: Tiered) -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    for form in (None, {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [20, 21]}}}):
        whole = budgeted(server, 12, response_format=form)["choices"][0]
        assert form is None or (
            whole["message"]["content"].strip() in ("20", "21") and whole["finish_reason"] == "stop"
        )
        client = server._client.chat.completions
        asked: Any = {"response_format": form} if form else {}
        extra = {"thinking_token_budget": 12}
        deltas = [
            chunk.choices[0].delta
            for chunk in client.create(
                model=REAL_MODEL, messages=ASK, max_tokens=90, seed=3, stream=True, extra_body=extra, **asked
            )
        ]
        assert (
            "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            == whole["message"]["reasoning_content"]
        )
        assert "".join(delta.content or "" for delta in deltas) == whole["message"]["content"]


def test_anthropics_budget_makes_a_block_of_thinking_and_an_answer(server: Tiered) -> None:
    asked = {
        "model": REAL_MODEL,
        "messages": ASK,
        "max_tokens": 60,
        "seed": 3,
        "thinking": {"type": "enabled", "budget_tokens": 10},
    }
    blocks = server.http.post("/v1/messages", json=asked).json()["content"]
    assert (
        [block["type"] for block in blocks] == ["thinking", "text"]
        and blocks[0]["thinking"]
        and blocks[1]["text"]
    )

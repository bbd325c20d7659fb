"""A client's settings for reasoning, as variables of the chat template. Owns these fields and their meaning
to a template; reads the template's source, and renders nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from penstock.contract import Thought
from penstock.errors import InvalidRequest
from penstock.text.parsers import THINK

if TYPE_CHECKING:
    from penstock.config import ServerConfig
    from penstock.models.chat import ChatTemplate
    from penstock.models.tokenizer import TextCodec

MAX_VARIABLES_CHARS = 4096  # of chat_template_kwargs, as JSON
SWITCHES = ("enable_thinking", "thinking")  # names of the variable that turns reasoning on and off

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
VariableName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$(?!\n)")]
Variables = dict[VariableName, Any]


def check_variables(given: Variables) -> None:
    if len(msgspec.json.encode(given)) > MAX_VARIABLES_CHARS:
        raise InvalidRequest(
            f"chat_template_kwargs has at most {MAX_VARIABLES_CHARS} bytes of JSON", "chat_template_kwargs"
        )


def switched(on: bool) -> Variables:
    """For templates that have such a variable; others ignore it."""
    return dict.fromkeys(SWITCHES, on)


def variables_of(
    effort: Effort | None, given: Mapping[str, Any], template: ChatTemplate, reasons: bool
) -> dict[str, Any]:
    """Variables of a template beside the messages. A template that knows an effort gets it. Otherwise the
    effort turns reasoning on or off if the template can do that, or is only a hint. `reasons`: whether the
    model reasons, as far as known."""
    made: dict[str, Any] = {}
    if effort is not None:
        knows_effort = "reasoning_effort" in template.variables
        turns_off = effort == "none" or (effort == "minimal" and not knows_effort)
        made = {name: not turns_off for name in SWITCHES if name in template.variables}
        if knows_effort:
            made["reasoning_effort"] = effort
        if other := next((name for name in made if name in given and given[name] != made[name]), None):
            message = (
                f"reasoning_effort is {effort!r}, and chat_template_kwargs sets {other} to something else: "
                "give one of them"
            )
            raise InvalidRequest(message, "reasoning_effort")
    is_unwanted = effort == "none" or is_off(given)
    if is_unwanted and reasons and template.variables.isdisjoint((*SWITCHES, "reasoning_effort")):
        message = (
            "this model reasons before it answers, and its chat template has no variable to turn that off"
        )
        raise InvalidRequest(message, "reasoning_effort" if effort == "none" else "chat_template_kwargs")
    return {**made, **given}


def is_off(variables: Mapping[str, Any]) -> bool:
    return any(variables.get(name) is False for name in SWITCHES)


def thought_of(budget: int, begun: bool, tokenizer: TextCodec) -> Thought:
    """Reasoning of at most `budget` tokens. `begun`: the prompt has already opened it."""
    opens, closes = (tuple(tokenizer.encode(mark, add_special=False)) for mark in THINK)
    return Thought(budget, begun, opens, closes)


def reasons(config: ServerConfig, tokenizer: TextCodec) -> bool:
    """Whether reasoning may come before an answer."""
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    return config.reasoning_parser == "think" or (config.reasoning_parser == "auto" and THINK[1] in template)

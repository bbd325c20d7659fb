"""Chat templates: messages to one prompt string, in a sandbox. Owns rendering and telling the template's
words from the messages'; knows no tokens."""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import InvalidRequest, ModelError
from penstock.models.fields import Json

# characters without a meaning: they stand for one that must not be recognised
PRIVATE = range(0xF0000, 0xFFFFE)
# a template's variables: what the server gives, and the characters that stand for others
_GIVEN = ("messages", "add_generation_prompt", "tools", "documents")
_DISGUISES = "characters_in_disguise"


class Rendering(NamedTuple):
    """How a template is to write a conversation."""

    answers: bool = True  # the prompt ends where the assistant's next message begins
    continues: bool = False  # it ends where the text of the last message does
    variables: Json = {}  # noqa: RUF012


ANSWERED = Rendering()


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is only its
    contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's own template. It comes with the weights, so it is compiled once. Messages come from clients,
    so a failure is the client's."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """`tool_source`: the model's separate template for requests with tools, if it has one."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self.source = source
        try:
            # variables that it reads
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be parsed: {error}") from error
        self.takes_tools = "tools" in self.variables
        self.special_tokens = dict(special_tokens)
        self._own = {*_GIVEN, _DISGUISES, *special_tokens, *environment.globals}
        self._for_tools = None if tool_source is None else ChatTemplate(tool_source, special_tokens)

    @property
    def tool_source(self) -> str | None:
        return None if self._for_tools is None else self._for_tools.source

    def of(self, tools: Sequence[object] | None) -> ChatTemplate:
        """The one that renders requests with these tools."""
        return self._for_tools if tools and self._for_tools is not None else self

    def render(
        self,
        messages: Sequence[Json],
        add_generation_prompt: bool,
        disguises: str = "",
        tools: Tools | None = None,
        how: Rendering = ANSWERED,
    ) -> str:
        if how.continues:
            # after the last message's text: what a template strips ends before it
            mark = chr(secrets.choice(PRIVATE))
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
        answers = add_generation_prompt and how.answers and not how.continues
        given = dict(zip(_GIVEN, (messages, answers, tools, None), strict=True))
        try:
            text = self.of(tools)._template.render(
                {**how.variables, **given, **self.special_tokens, _DISGUISES: disguises}
            )
        except Exception as error:
            # templates index, add and call what the client sent: anything can come out of that
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error
        if not how.continues:
            return text
        before, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequest(
                "the chat template does not write the last message as it is, so it cannot be continued",
                "messages",
            )
        return before

    def check_variables(self, how: Rendering, controls: Sequence[str]) -> None:
        """Refuses variables that the server sets, and text that could be part of one of `controls`."""
        if own := sorted(self._own & how.variables.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {own[0]}: the server does", "chat_template_kwargs"
            )
        said = _said([{"": how.variables}])
        if bad := sorted({control[0] for control in controls if control[0] in said}):
            raise InvalidRequest(
                f"text in chat_template_kwargs cannot have the character {bad[0]!r}: special tokens of this "
                "model begin with it",
                "chat_template_kwargs",
            )

    def render_apart(
        self,
        messages: Sequence[Json],
        add_generation_prompt: bool,
        controls: Sequence[str],
        tools: Tools | None = None,
        how: Rendering = ANSWERED,
    ) -> Rendered:
        """Like `render`, but every spelling of one of `controls` in the result is the template's own.

        If messages spell one, its first character is disguised before the template sees it. A template could
        still assemble one from pieces of text. The count shows that: a conversation of the same shape without
        text must have as many.
        """
        said = _said([*messages, *(tools or ())])
        spelled = [control for control in controls if control in said]
        disguises = _disguises(said, {control[0] for control in spelled})

        def disguised(text: str) -> str:
            for control in spelled:
                while control in text:
                    text = text.replace(control, disguises[control[0]] + control[1:])
            return text

        (blank,) = _disguises(said, {" "}).values()

        def rendered_with(change: Callable[[str], str], disguises: str = "") -> str:
            changed = [_changed(message, change) for message in messages]
            changed_tools = tools and [_changed(tool, change) for tool in tools]
            return self.render(changed, add_generation_prompt, disguises, changed_tools, how)

        rendered = rendered_with(disguised, "".join(disguises.values()))
        silent = rendered_with(lambda text: _silenced(text, blank))
        if any(rendered.count(control) != silent.count(control) for control in controls):
            raise InvalidRequest(
                "the chat template would make control tokens of what these messages say", "messages"
            )
        return Rendered(rendered, {disguise: character for character, disguise in disguises.items()})


class Rendered(NamedTuple):
    """A prompt, and the characters in it that stand for others."""

    text: str
    disguises: dict[str, str]

    def plain(self, part: str) -> str:
        """`part` of the text as the messages have it."""
        for disguise, character in self.disguises.items():
            part = part.replace(disguise, character)
        return part


Tools = Sequence[Json]

# Words that templates read: names of fields, and kinds of values. They cannot spell a control token.
_FIELD_NAME = re.compile(r"[A-Za-z0-9_$-]{1,64}")
_KINDS = frozenset({"function", "object", "string", "number", "integer", "boolean", "array", "null"})


def _changed(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A message or tool with every string changed that its writer chose; a message's role is one of few. Keys
    inside it are the writer's, too, except those that templates read."""
    if isinstance(value, str):
        return value if value in _KINDS else change(value)
    if isinstance(value, Mapping):
        made: dict[str, Any] = {}
        for name, item in value.items():
            known = not depth or _FIELD_NAME.fullmatch(name)
            new = name if known else change(name)
            new = f"{new}{len(made)}" if new in made else new
            made[new] = item if name == "role" and not depth else _changed(item, change, depth + 1)
        return made
    return [_changed(item, change, depth + 1) for item in value] if isinstance(value, list | tuple) else value


def _said(values: Sequence[Json]) -> str:
    """Every string in messages or tools that their writer chose."""
    texts: list[str] = []

    def heard(text: str) -> str:
        texts.append(text)
        return text

    for value in values:
        _changed(value, heard)
    return "\0".join(texts)


def _disguises(said: str, characters: set[str]) -> dict[str, str]:
    """For each of `characters` one that is not in `said`. Drawn at random, so that a client cannot know which
    ones to write."""
    found: dict[str, str] = {}
    for character in sorted(characters):
        drawn = (chr(secrets.choice(PRIVATE)) for _ in range(16))
        free = next((d for d in drawn if d not in found.values() and d not in said), None)
        if free is None:
            raise InvalidRequest("the messages use too many private characters of Unicode", "messages")
        found[character] = free
    return found


def _silenced(text: str, blank: str) -> str:
    """As long as `text` and with its blanks around it, which templates may strip; between them it says
    nothing."""
    core = text.strip()
    start = text.find(core)
    return text[:start] + blank * len(core) + text[start + len(core) :]


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


@jinja2.pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Disguised characters are left alone; the originals are ASCII where it matters."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    kept: str = context.get(_DISGUISES, "")
    return (
        re.sub(r"[^\x00-\x7e]", lambda m: m[0] if m[0] in kept else json.dumps(m[0])[1:-1], text)
        if ensure_ascii
        else text
    )

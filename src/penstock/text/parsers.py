"""Parses a model's output as it comes: reasoning, content and tool calls. Owns the formats of the supported
models.

Text is read character by character, so that the same text gives the same parts however it was cut into
tokens. A reader is a generator that is sent one character after another, and at last an empty one: its
position is its state. It never takes back output: text that may still become a marker or a call is held until
that is known. Text that begins like a call and is none becomes content. The work for a character is constant:
a front's event loop does it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Literal, TypeVar

from penstock.contract import THINK_MARKS

_BLANK = " \n\r\t"
_AROUND = _BLANK + "[],;`"  # calls without markers
_FENCED = ("json", "tool_call")  # words behind the fence of a block
_MOST_HELD = 256  # characters around a call without a marker, and in each of its words
_ARGUMENTS = ("arguments", "parameters")  # names of the field in different models

HERMES = ("<tool_call>", "</tool_call>")
LLAMA3 = "<|python_tag|>"
MISTRAL, MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
THINK = THINK_MARKS
MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": HERMES,
    "llama3": (LLAMA3,),
    "mistral": (MISTRAL, MISTRAL_ARGS),
    "json": (),
    "none": (),
}

R = TypeVar("R")
Reading = Generator[None, str, R]
# a call's name comes first and once, then pieces of its arguments
Part = tuple[Literal["reasoning", "text", "call", "arguments"], str]


class FedReading:
    """A reading that its caller feeds. Text after its end is dropped."""

    def __init__(self, reading: Reading[None]) -> None:
        self._reading = reading
        next(reading)

    def push(self, text: str, last: bool = False) -> None:
        try:
            for character in (*text, "") if last else text:
                self._reading.send(character)
        except StopIteration:
            return


class MessageParser:
    """One choice's message, as its text comes. Its reading emits the parts in the order in which they were
    written."""

    def __init__(
        self,
        most_calls: int | None = None,
        names: Collection[str] | None = None,
        tools: Collection[str] = (),
    ) -> None:
        """Calls after the first `most_calls` are dropped. `names`: only an object with one of these names is
        a call. `tools`: an object with one of these names may be a call where no marker announces it."""
        self.names = names
        self.tools = tools
        self.num_calls = 0
        self.in_call = False  # the last call is not over
        self._most = most_calls
        self._dropped = False
        self._row: list[Part] = []

    def start(self, reading: Reading[None]) -> None:
        self._reader = FedReading(reading)

    def content(self, text: str) -> None:
        if text:
            self._row.append(("text", text))

    def reasoning(self, text: str) -> None:
        self._row.append(("reasoning", text))

    def call(self, name: str) -> None:
        self._dropped = self._most is not None and self.num_calls >= self._most
        if not self._dropped:
            self._row.append(("call", name))
            self.num_calls += 1
            self.in_call = True

    def end_call(self) -> None:
        self.in_call = False

    def arguments(self, text: str) -> None:
        if not self._dropped:
            self._row.append(("arguments", text))

    def push(self, text: str, last: bool = False) -> list[Part]:
        """The parts of `text`. Neighbours of one kind are joined, except calls."""
        self._reader.push(text, last)
        row, self._row = self._row, []
        made: list[Part] = []
        for kind, same in itertools.groupby(row, key=lambda part: part[0]):
            texts = [text for _, text in same]
            made += [(kind, text) for text in texts] if kind == "call" else [(kind, "".join(texts))]
        return made


def _begun(reading: Reading[None], text: str, over: bool = False) -> Reading[None]:
    """`reading` after it has read `text`; `over`: and the end of the text."""
    reader = FedReading(reading)
    reader.push(text, over)
    while not over:
        character = yield
        over = not character
        reader.push(character, over)


def _until(marker: str, say: Callable[[str], object], first: str = "") -> Reading[bool]:
    """Passes every character before the marker to `say`; returns whether the marker came. `first` was read
    before. A marker has its first character once, so none begins inside another."""
    matched = 0
    while matched < len(marker):
        character, first = first or (yield), ""
        if character == marker[matched]:
            matched += 1
            continue
        for one in marker[:matched]:
            say(one)
        if not character:
            return False
        matched = int(character == marker[0])
        if not matched:
            say(character)
    return True


def _blanks() -> Reading[tuple[str, str]]:
    """Blanks, and the character after them, which is empty if the text ended first."""
    blanks: list[str] = []
    while (character := (yield)) and character in _BLANK:
        blanks.append(character)
    return "".join(blanks), character


def _word(words: Sequence[str], text: str) -> Reading[tuple[str, bool]]:
    """`text`, and more while it only begins one of the words; and whether the whole text ended."""
    while text and text not in words and any(word.startswith(text) for word in words):
        if not (character := (yield)):
            return text, True
        text += character
    return text, not text


class Blanks:
    """Holds blanks back until something follows them."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self.held: list[str] = []

    def push(self, character: str) -> None:
        if character in _BLANK:
            self.held.append(character)
        else:
            self._say("".join((*self.held, character)))
            self.held.clear()


# ---------------------------------------------------------------------------------------------- calls in JSON


class Value:
    """Finds the end of a JSON value; does not validate it."""

    def __init__(self, first: str) -> None:
        self.is_bare = first not in '{["'  # it ends before the next character
        self._depth = 0
        self._quoted = self._escaped = False
        self.is_over = False
        self.push(first)

    def push(self, character: str) -> bool:
        """Whether the value is complete with this character."""
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            self.is_over = not self._quoted and self._depth == 0
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_over = self._depth <= 0
        return self.is_over


def _loaded(text: str) -> str:
    """A JSON string; empty if invalid. Half a surrogate pair, which cannot be sent, is replaced."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return (
        value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if isinstance(value, str)
        else ""
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class JsonCall:
    """One call as a JSON object: `name`, and `arguments` or `parameters`, in any order. Arguments are emitted
    as they come once the name is known."""

    def __init__(self, sink: MessageParser) -> None:
        self._sink = sink
        self._raw: list[str] = ["{"]
        self._named = False  # the name has been emitted and cannot be taken back
        self._arguments: str | None = None

    def read(self) -> Reading[str | None]:
        """Reads from after its brace. None: it was a call. Otherwise its text, or empty if that is lost."""
        character = yield from self._next()
        while character == '"' or (character and character in _BLANK + ","):
            if character != '"':
                character = yield from self._next()
                continue
            quoted, character = yield from self._value(character)
            key = _loaded(quoted)
            if key in _ARGUMENTS and self._arguments is not None:
                key = ""  # the first ones count
            if (
                not character
                or (yield from self._behind_blanks()) != ":"
                or not (first := (yield from self._behind_blanks()))
            ):
                break
            text, character = yield from self._value(first, streamed=key in _ARGUMENTS and self._named)
            if not character or not self._take(key, text.strip()):
                break
        if character != "}" or not self._named:
            return "" if self._named else "".join(self._raw)
        if self._arguments is None:
            self._sink.arguments("{}")
        self._sink.end_call()
        return None

    def _next(self) -> Reading[str]:
        character = yield
        self._raw.append(character)
        return character

    def _behind_blanks(self) -> Reading[str]:
        character = yield from self._next()
        while character and character in _BLANK:
            character = yield from self._next()
        return character

    def _value(self, first: str, streamed: bool = False) -> Reading[tuple[str, str]]:
        """A value and the character after it, which is empty if the text ended first."""
        value, text = Value(first), list[str]()
        character = first
        while character and not (text and value.is_bare and character in ",}"):
            if text:
                value.push(character)
            text.append(character)
            if streamed and first == "{":
                self._sink.arguments(character)
            if value.is_over:
                return "".join(text), " "
            character = yield from self._next()
        return "".join(text), character

    def _take(self, key: str, text: str) -> bool:
        if key == "name" and not self._named:
            if not (name := _loaded(text)) or (self._sink.names is not None and name not in self._sink.names):
                return False
            self._sink.call(name)
            self._named = True
            if self._arguments is not None:
                self._sink.arguments(self._arguments)
        elif key in _ARGUMENTS:
            given_out = self._named and text.startswith("{")
            if text.startswith('"'):  # some models write the object as a string
                text = _loaded(text)
            self._arguments = "{}" if text in ("", "null") else text
            if self._named and not given_out:
                self._sink.arguments(self._arguments)
        return True


def json_calls(sink: MessageParser) -> Reading[None]:
    """One or several calls: an object, objects with `;`, `,` or blanks between them, or a list of them.
    Anything else is content."""
    held: list[str] = []
    in_list = False
    while character := (yield):
        said = None
        if character == "{":
            if (said := (yield from JsonCall(sink).read())) is None:
                held, in_list = [], False
        elif character not in _BLANK + "[],;" or (character == "[" and in_list):
            said = character
        else:
            held.append(character)
            in_list = in_list or character == "["
        if said is not None:
            if said:
                sink.content("".join(held) + said)
            yield from content(sink)
            return
    if (text := "".join(held)).strip(_BLANK + "],;"):
        sink.content(text)


# ---------------------------------------------------------------------------------------------------- formats


def content(sink: MessageParser) -> Reading[None]:
    """No calls: all of it is content."""
    while character := (yield):
        sink.content(character)


def named_call(sink: MessageParser, name: str) -> Reading[None]:
    """The whole text is the arguments of one call, whose name is known."""
    begun = False
    value: Value | None = None  # its arguments
    while character := (yield):
        if not begun:
            sink.call(name)
            begun = True
        sink.arguments(character)
        if value is not None:
            value.push(character)
        elif character not in _BLANK:
            value = Value(character)
        if value is not None and value.is_over:
            sink.end_call()


def _unmarked_call(sink: MessageParser, held: list[str]) -> Reading[bool]:
    """An object with the name of a tool, an object of arguments, and nothing else, from after its brace. Held
    to its end: until then it may be an answer in JSON. What is read goes to `held`."""

    def word(words: Collection[str]) -> Reading[str]:
        """The one of them that comes next, behind blanks; empty if none does."""
        text, begun = "", len(held)
        while text not in words:
            if len(held) - begun == _MOST_HELD or not any(one.startswith(text) for one in words):
                return ""
            held.append(character := (yield))
            if not character:
                return ""
            if text or character not in _BLANK:
                text += character
        return text

    found: list[str] = []
    names = [f'"{tool}"' for tool in sink.tools]
    for words in (('"name"',), (":",), names, (",",), ('"arguments"',), (":",), ("{",)):
        found.append((yield from word(words)))
        if not found[-1]:
            return False
    begun, value = len(held) - 1, Value("{")
    while not value.is_over:
        held.append(character := (yield))
        if not character:
            return False
        value.push(character)
    arguments = "".join(held[begun:])
    if not (yield from word(("}",))) or not _is_json(arguments):
        return False
    sink.call(found[2][1:-1])
    sink.arguments(arguments)
    sink.end_call()
    return True


def _unmarked_calls(sink: MessageParser) -> Reading[tuple[str, bool]]:
    """Calls of `sink.tools` that begin a text without a marker, bare or in fences of Markdown, as small
    models write them. Returns the text behind them that it has read, and whether there is no more. Only the
    last character of that may begin a marker."""
    held: list[str] = []
    word = ""
    while sink.tools and len(held) < _MOST_HELD and any(one.startswith(word) for one in _FENCED):
        held.append(character := (yield))
        if not character:
            break
        if character == "{":
            if not (yield from _unmarked_call(sink, held)):
                break
            held.clear()
        word = "" if character in _AROUND + "{" else word + character
    text, is_over = "".join(held), bool(held) and not held[-1]
    return text.lstrip(_AROUND) if sink.num_calls else text, is_over


def hermes_calls(sink: MessageParser) -> Reading[None]:
    """Calls between markers, content around them: Hermes and Qwen. Blanks between or after calls are not
    content."""
    said = Blanks(sink.content)
    held, is_over = yield from _unmarked_calls(sink)
    for character in held if is_over else held[:-1]:
        said.push(character)
    held = held[-1:]
    while not is_over and (yield from _until(HERMES[0], said.push, held)):
        said.held.clear()
        held, calls = "", FedReading(json_calls(sink))
        is_over = not (yield from _until(HERMES[1], calls.push))
        calls.push("", last=True)
    if not sink.num_calls:
        sink.content("".join(said.held))


def llama3_calls(sink: MessageParser) -> Reading[None]:
    """Calls after `<|python_tag|>`, or a text that is nothing but calls."""
    blanks, text = yield from _blanks()
    if text == "{":
        yield from _begun(json_calls(sink), blanks + text)
        return
    text, is_over = yield from _word((LLAMA3,), text)
    if text != LLAMA3:
        sink.content(blanks + (text if is_over else text[:-1]))
        if is_over or not (yield from _until(LLAMA3, sink.content, text[-1:])):
            return
    yield from json_calls(sink)


def mistral_calls(sink: MessageParser) -> Reading[None]:
    """Calls after `[TOOL_CALLS]`: a list of objects, or a name followed by its arguments, with or without
    `[ARGS]` between them."""
    if not (yield from _until(MISTRAL, sink.content)):
        return
    held: list[str] = []
    while character := (yield):
        held.append(character)
        if character != "{":
            continue
        name = "".join(held[:-1]).strip().removeprefix(MISTRAL).removesuffix(MISTRAL_ARGS).strip()
        if name in ("", "["):
            yield from _begun(json_calls(sink), name + "{")
            return
        sink.call(name)
        sink.arguments("{")
        value, held = Value("{"), []
        while not value.is_over:
            if not (character := (yield)):
                return
            sink.arguments(character)
            value.push(character)
        sink.end_call()
    sink.content("".join(held))


READERS: dict[str, Callable[[MessageParser], Reading[None]]] = {
    "hermes": hermes_calls,
    "llama3": llama3_calls,
    "mistral": mistral_calls,
    "json": json_calls,
    "none": content,
}


STARTS: dict[str, tuple[str, ...]] = {
    "hermes": HERMES[:1],
    "llama3": ("{", LLAMA3),
    "mistral": (MISTRAL,),
    "json": ("{", "["),
    "none": (),
}


def calls_or_content(sink: MessageParser, reader: str) -> Reading[None]:
    """Calls, if the text begins like calls. Otherwise all of it is content: a grammar has made it one or the
    other."""
    starts = STARTS[reader]
    blanks, text = yield from _blanks()
    text, is_over = yield from _word(starts, text)
    if text in starts:
        yield from _begun(READERS[reader](sink), text)
    else:
        yield from _begun(content(sink), blanks + text, is_over)


def thinking(sink: MessageParser, rest: Reading[None], begun: bool) -> Reading[None]:
    """Reasoning between `<think>` and `</think>` at the start; the rest goes to the reading after it.
    `begun`: the prompt has opened it. Blanks around reasoning are not part of it."""
    if not begun:
        blanks, text = yield from _blanks()
        text, is_over = yield from _word(THINK[:1], text)
        if text != THINK[0]:
            yield from _begun(rest, blanks + text, is_over)
            return
    _, character = yield from _blanks()
    reasoning = Blanks(sink.reasoning)
    if character and (yield from _until(THINK[1], reasoning.push, character)):
        _, character = yield from _blanks()
        yield from _begun(rest, character, over=not character)
    else:
        yield from _begun(rest, "", over=True)

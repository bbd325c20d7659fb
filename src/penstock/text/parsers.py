"""Parses a model's output as it comes: reasoning, content and tool calls. Owns the formats of the supported
models.

Text is read character by character, so that the same text gives the same parts however it was cut into
tokens. A reader is a generator that is sent one character after another, and at last an empty one: its
position is its state. It never takes back output: text that may still become a marker or a call is held until
that is known. Text that begins like a call and is none becomes content.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Generator
from typing import Literal, TypeVar

from penstock.contract import THINK_MARKS

_BLANK = " \n\r\t"
_AROUND = _BLANK + "[],;`"  # calls without markers
_FENCED = ("json", "tool_call")  # words behind the fence of a block
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


def _until(marker: str, say: Callable[[str], object], held: str = "") -> Reading[bool]:
    """Passes every character before the marker to `say`; returns whether the marker came. `held` was read
    before."""
    while True:
        while held and not marker.startswith(held):
            say(held[0])
            held = held[1:]
        if held == marker:
            return True
        character = yield
        if not character:
            for one in held:
                say(one)
            return False
        held += character


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
    except ValueError:
        return ""
    return (
        value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if isinstance(value, str)
        else ""
    )


class JsonCall:
    """One call as a JSON object: `name`, and `arguments` or `parameters`, in any order. Arguments are emitted
    as they come once the name is known."""

    def __init__(self, sink: MessageParser, names: Collection[str] | None = None) -> None:
        """`names`: no marker announces a call, so it has one of these and, after it, `arguments`. A list of
        tools is none."""
        self._sink = sink
        self._names = sink.names if names is None else names
        self._is_unmarked = names is not None
        self._name = ""  # not emitted yet
        self._raw: list[str] = ["{"]
        self._named = False  # the name has been emitted and cannot be taken back
        self._arguments: str | None = None
        self.is_cut = False  # the text ended inside

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
            if key == "arguments" and self._name:
                self._emit()
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
        self.is_cut = not character
        return character

    def _behind_blanks(self) -> Reading[str]:
        character = yield from self._next()
        while character and character in _BLANK:
            character = yield from self._next()
        return character

    def _value(self, first: str, streamed: bool = False) -> Reading[tuple[str, str]]:
        """A value and the character after it, which is empty if the text ended first."""
        value, text = Value(first), ""
        character = first
        while character and not (text and value.is_bare and character in ",}"):
            if text:
                value.push(character)
            text += character
            if streamed and first == "{":
                self._sink.arguments(character)
            if value.is_over:
                return text, " "
            character = yield from self._next()
        return text, character

    def _emit(self) -> None:
        self._sink.call(self._name)
        self._name, self._named = "", True

    def _take(self, key: str, text: str) -> bool:
        if key == "name" and not self._named:
            if not (name := _loaded(text)) or (self._names is not None and name not in self._names):
                return False
            self._name = name
            if not self._is_unmarked:
                self._emit()
            if self._named and self._arguments is not None:
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
    held = ""
    while character := (yield):
        held += character
        said = None
        if character == "{":
            said = yield from JsonCall(sink).read()
            held = held[:-1] if said is not None else ""
        elif character not in _BLANK + "[],;" or (character == "[" and "[" in held[:-1]):
            said = character
            held = held[:-1]
        if said is not None:
            if said:
                sink.content(held + said)
            yield from content(sink)
            return
    if held.strip(_BLANK + "],;"):
        sink.content(held)


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


def _unmarked_calls(sink: MessageParser) -> Reading[tuple[str, bool]]:
    """Calls of `sink.tools` that begin a text without a marker, bare or in fences of Markdown, as small
    models write them. Returns the text behind them that it has read, and whether there is no more."""
    held, over = "", False
    while sink.tools and not over and any(word.startswith(held.strip(_AROUND)) for word in _FENCED):
        if not (character := (yield)):
            over = True
        elif character != "{":
            held += character
        elif (said := (yield from (call := JsonCall(sink, sink.tools)).read())) is None:
            held = ""
        else:
            held, over = held + said, call.is_cut
            break
    return held.lstrip(_AROUND) if sink.num_calls else held, over


def hermes_calls(sink: MessageParser) -> Reading[None]:
    """Calls between markers, content around them: Hermes and Qwen."""
    held, is_over = yield from _unmarked_calls(sink)
    blanks = ""  # between or after calls: not content

    def say(character: str) -> None:
        nonlocal blanks
        if character in _BLANK:
            blanks += character
        else:
            sink.content(blanks + character)
            blanks = ""

    if is_over:
        sink.content(held)
        return
    while (yield from _until(HERMES[0], say, held)):
        held, blanks, calls = "", "", FedReading(json_calls(sink))
        over = not (yield from _until(HERMES[1], calls.push))
        calls.push("", last=True)
        if over:
            return
    if not sink.num_calls and blanks:
        sink.content(blanks)


def llama3_calls(sink: MessageParser) -> Reading[None]:
    """Calls after `<|python_tag|>`, or a text that is nothing but calls."""
    held = start = ""
    while LLAMA3.startswith(start) and start != LLAMA3:
        if not (character := (yield)):
            sink.content(held)
            return
        held += character
        start = held.lstrip(_BLANK)
        if start[:1] == "{":
            yield from _begun(json_calls(sink), held)
            return
    if start == LLAMA3 or (yield from _until(LLAMA3, sink.content, held)):
        yield from json_calls(sink)


def mistral_calls(sink: MessageParser) -> Reading[None]:
    """Calls after `[TOOL_CALLS]`: a list of objects, or a name followed by its arguments, with or without
    `[ARGS]` between them."""
    if not (yield from _until(MISTRAL, sink.content)):
        return
    held = ""
    while character := (yield):
        held += character
        text = held.strip()
        bare = text.removeprefix(MISTRAL).removesuffix(MISTRAL_ARGS)
        in_list = (not bare and character == "[") or bare == "[" or text in ("[", "[{")
        name = bare.removesuffix("{").strip().removesuffix(MISTRAL_ARGS).strip()
        if text == "[{" if in_list else character == "{" and not name:
            yield from _begun(json_calls(sink), text)
            return
        if character == "{" and not in_list:
            sink.call(name)
            sink.arguments("{")
            value, held = Value("{"), ""
            while not value.is_over:
                if not (character := (yield)):
                    return
                sink.arguments(character)
                value.push(character)
            sink.end_call()
    sink.content(held)


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
    held, core, starts = "", "", STARTS[reader]
    while core not in starts and any(start.startswith(core) for start in starts):
        if not (character := (yield)):
            sink.content(held)
            return
        held += character
        core = held.lstrip(_BLANK)
    if core in starts:
        yield from _begun(READERS[reader](sink), core)
    else:
        yield from _begun(content(sink), held)


def thinking(sink: MessageParser, rest: Reading[None], begun: bool) -> Reading[None]:
    """Reasoning between `<think>` and `</think>` at the start; the rest goes to the reading after it.
    `begun`: the prompt has opened it. Blanks around reasoning are not part of it."""
    held = ""
    while not begun:
        character = yield
        held += character
        begun = held.lstrip(_BLANK) == THINK[0]
        if not character or not THINK[0].startswith(held.lstrip(_BLANK)):
            yield from _begun(rest, held, over=not character)
            return
    held, said = "", False
    while character := (yield):
        held += character
        core = held.lstrip(_BLANK)
        if core == THINK[1]:
            break
        while core and not THINK[1].startswith(core):
            sink.reasoning((held[: len(held) - len(core)] if said else "") + core[0])
            said, held = True, core[1:]
            core = held.lstrip(_BLANK)
    else:
        sink.reasoning(held.rstrip(_BLANK) if said else "")
        yield from _begun(rest, "", over=True)
        return
    character = yield
    while character and character in _BLANK:
        character = yield
    yield from _begun(rest, character, over=not character)

"""What a model wrote, taken apart as it comes: reasoning, content and calls of tools. Owns the formats of the models that are served.

Text is read character by character, so that the same text gives the same parts however it was cut into tokens. A parser never takes back
what it has given out: what may still turn out to be a marker or a call is held until that is known. Text that begins like a call and is
none becomes content.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

_BLANK = " \n\r\t"


class CallDelta(NamedTuple):
    """News of one call: its name comes first and once, then pieces of its arguments, which are JSON in a row."""

    number: int
    name: str | None = None
    arguments: str = ""


PartKind = Literal["reasoning", "text", "call", "arguments"]


class Parts(NamedTuple):
    """What some text adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    row: tuple[tuple[PartKind, str], ...] = ()  # the same in the order in which it was written; of a call its name


class Sink:
    """Gathers parts while text is read."""

    def __init__(self, most_calls: int | None = None) -> None:
        """JsonCalls behind the first `most_calls` are dropped."""
        self.num_calls = 0
        self._most = most_calls
        self._dropped = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self._row: list[tuple[PartKind, list[str]]] = []

    def content(self, text: str) -> None:
        self._content.append(text)
        self._add("text", text)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)
        self._add("reasoning", text)

    def _add(self, kind: PartKind, text: str) -> None:
        if self._row and self._row[-1][0] == kind != "call":
            self._row[-1][1].append(text)
        else:
            self._row.append((kind, [text]))

    def call(self, name: str) -> None:
        if self._is_full:
            self._dropped = True
            return
        self._calls.append(CallDelta(self.num_calls, name))
        self._add("call", name)
        self.num_calls += 1

    @property
    def _is_full(self) -> bool:
        return self._most is not None and self.num_calls >= self._most

    def arguments(self, text: str) -> None:
        if self._dropped:
            return
        self._add("arguments", text)
        last = self._calls[-1] if self._calls else None
        if last is not None and last.number == self.num_calls - 1:
            self._calls[-1] = last._replace(arguments=last.arguments + text)
        else:
            self._calls.append(CallDelta(self.num_calls - 1, None, text))

    def take(self) -> Parts:
        row = tuple((kind, "".join(texts)) for kind, texts in self._row)
        parts = Parts("".join(self._content), "".join(self._reasoning), tuple(self._calls), row)
        self._content, self._reasoning, self._calls, self._row = [], [], [], []
        return parts


class TextReader(Protocol):
    """Takes characters one by one."""

    def push(self, character: str) -> None: ...

    def finish(self) -> None:
        """The text is over."""


class Value:
    """Says where a JSON value ends, and nothing about whether it is right."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self._first = ""

    def push(self, character: str) -> bool:
        """Whether the value is complete with this character. One that is neither quoted nor bracketed ends before what follows it."""
        self._first = self._first or character
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
                return self._depth == 0
            return False
        if character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False

    @property
    def is_bare(self) -> bool:
        return self._first not in '{["'


class JsonCall:
    """One call as a JSON object: `name`, and `arguments` or `parameters`, in any order. Arguments are given out as they come once the name
    is known. What is no such object is `raw` text."""

    def __init__(self, sink: Sink) -> None:
        self.raw = ""
        self.done = False
        self.failed = False
        self.named = False  # it has been given out, and cannot be taken back
        self._sink = sink
        self._state = "open"
        self._key = ""
        self._text = ""  # of the key or value that is being read
        self._value = Value()
        self._arguments: str | None = None  # that came before the name

    def push(self, character: str) -> None:
        self.raw += character
        step = getattr(self, f"_{self._state}")
        step(character)

    def _open(self, character: str) -> None:
        if character == "{":
            self._state = "before_key"
        elif character not in _BLANK:
            self.failed = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._state, self._text, self._value = "in_key", '"', Value()
            self._value.push('"')
        elif character == "}":
            self._end()
        elif character not in _BLANK + ",":
            self.failed = True

    def _in_key(self, character: str) -> None:
        self._text += character
        if self._value.push(character):
            self._key, self._state = _loaded(self._text), "colon"

    def _colon(self, character: str) -> None:
        if character == ":":
            self._state = "before_value"
        elif character not in _BLANK:
            self.failed = True

    def _before_value(self, character: str) -> None:
        if character in _BLANK:
            return
        self._state, self._text, self._value = "in_value", "", Value()
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._text and self._value.is_bare and character in ",}":
            self._take_value()
            self._state = "before_key"
            self._before_key(character)
            return
        self._text += character
        over = self._value.push(character)
        if self._key in ("arguments", "parameters") and self.named and self._text[0] == "{":
            self._sink.arguments(character)
        if over:
            self._take_value()
            self._state = "before_key"

    def _take_value(self) -> None:
        text = self._text.strip()
        if self._key == "name":
            name = _loaded(text)
            if not name or self.named:
                self.failed = not self.named
                return
            self._sink.call(name)
            self.named = True
            if self._arguments is not None:
                self._sink.arguments(self._arguments)
        elif self._key in ("arguments", "parameters"):
            if text.startswith('"'):  # some models write the object as text
                text = _loaded(text) or "{}"
                if self.named:
                    self._sink.arguments(text)
            self._arguments = text

    def _end(self) -> None:
        self.done = True
        if not self.named:
            self.failed = True
        elif self._arguments is None:
            self._sink.arguments("{}")


def _loaded(text: str) -> str:
    """A JSON string; empty where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


class JsonCalls:
    """JsonCalls in JSON, one or several: an object, objects in a row with `;`, `,` or blanks between them, or a list of them. What does not
    begin like that is content."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._call: JsonCall | None = None
        self._held = ""  # before the first object
        self._plain = False

    def push(self, character: str) -> None:
        if self._plain:
            self._sink.content(character)
            return
        if self._call is None:
            self._between(character)
            return
        self._call.push(character)
        if self._call.failed:
            self._give_up()
        elif self._call.done:
            self._call, self._held = None, ""

    def _between(self, character: str) -> None:
        self._held += character
        if character == "{":
            self._call = JsonCall(self._sink)
            self._call.push(character)
        elif character not in _BLANK + "[],;" or (character == "[" and "[" in self._held[:-1]):
            self._give_up()

    def _give_up(self) -> None:
        raw = self._held + (self._call.raw[1:] if self._call is not None else "")
        lost = self._call is not None and self._call.named
        self._call, self._held, self._plain = None, "", True
        if not lost:
            self._sink.content(raw)

    def finish(self) -> None:
        begun = self._call is not None and not self._call.named
        said = self._call is None and self._held.strip(_BLANK + "],;") and not self._plain
        if begun or said:
            self._give_up()


class Arguments:
    """All of the text is the arguments of one call, whose name is known."""

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._begun = False

    def push(self, character: str) -> None:
        if not self._begun:
            self._begun = True
            self._sink.call(self._name)
        self._sink.arguments(character)

    def finish(self) -> None: ...


class HermesCalls:
    """JsonCalls between markers, content around them: Hermes and Qwen."""

    begin, end = "<tool_call>", "</tool_call>"

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""  # may be the start of a marker
        self._inside: JsonCalls | None = None
        self._blanks = ""  # between or behind calls: no content

    def push(self, character: str) -> None:
        self._held += character
        marker = self.begin if self._inside is None else self.end
        while self._held and not marker.startswith(self._held):
            self._say(self._held[0])
            self._held = self._held[1:]
        if self._held == marker:
            self._held = ""
            if self._inside is None:
                self._inside, self._blanks = JsonCalls(self._sink), ""
            else:
                self._inside.finish()
                self._inside = None

    def _say(self, character: str) -> None:
        if self._inside is not None:
            self._inside.push(character)
        elif character in _BLANK:
            self._blanks += character
        else:
            self._sink.content(self._blanks + character)
            self._blanks = ""

    def finish(self) -> None:
        for character in self._held:
            self._say(character)
        self._held = ""
        if self._inside is not None:
            self._inside.finish()
        elif not self._sink.num_calls and self._blanks:
            self._sink.content(self._blanks)


class Llama3Calls:
    """JsonCalls behind `<|python_tag|>`, or a text that is nothing but calls. `<|eom_id|>` may end it."""

    marker = "<|python_tag|>"

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""
        self._calls: JsonCalls | None = None
        self._plain = False

    def push(self, character: str) -> None:
        if self._calls is not None:
            self._calls.push(character)
            return
        self._held += character
        if not self._plain and self._held.strip(_BLANK)[:1] == "{":
            self._calls, held, self._held = JsonCalls(self._sink), self._held, ""
            for one in held:
                self._calls.push(one)
            return
        if not self._plain and self._held.strip(_BLANK) and not self.marker.startswith(self._held.lstrip(_BLANK)):
            self._plain = True
        if self._held.lstrip(_BLANK) == self.marker or (self._plain and self._held.endswith(self.marker)):
            before = self._held[: -len(self.marker)]
            self._sink.content(before if self._plain else "")
            self._held, self._calls = "", JsonCalls(self._sink)
        elif self._plain:
            keep = next((n for n in range(min(len(self.marker), len(self._held)), 0, -1) if self.marker.startswith(self._held[-n:])), 0)
            cut = len(self._held) - keep
            self._sink.content(self._held[:cut])
            self._held = self._held[cut:]

    def finish(self) -> None:
        if self._calls is not None:
            self._calls.finish()
        else:
            self._sink.content(self._held)
            self._held = ""


class MistralCalls:
    """JsonCalls behind `[TOOL_CALLS]`: a list of objects, or a name with its arguments behind it, with `[ARGS]` between them or without."""

    marker, args = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""
        self._calls: JsonCalls | None = None
        self._name: str | None = None  # of a call that is being read; None: content so far
        self._value: Value | None = None

    def push(self, character: str) -> None:
        if self._calls is not None:
            self._calls.push(character)
        elif self._value is not None:
            self._sink.arguments(character)
            if self._value.push(character):
                self._value, self._name = None, ""
        elif self._name is not None:
            self._named(character)
        else:
            self._look(character)

    def _look(self, character: str) -> None:
        self._held += character
        while self._held and not self.marker.startswith(self._held):
            self._sink.content(self._held[0])
            self._held = self._held[1:]
        if self._held == self.marker:
            self._held, self._name = "", ""

    def _named(self, character: str) -> None:
        name = (self._name or "") + character
        self._name = name
        bare = name.strip().removeprefix(self.marker).removesuffix(self.args)
        if (not bare and character == "[") or bare == "[" or name.strip() in ("[", "[{"):
            if name.strip() == "[{" or (name.strip().startswith("[") and character == "{"):
                self._begin_list(name)
            return
        if character == "{":
            name = bare.removesuffix("{").strip().removesuffix(self.args).strip()
            if not name:
                self._begin_list(self._name)
                return
            self._sink.call(name)
            self._value = Value()
            self._value.push("{")
            self._sink.arguments("{")

    def _begin_list(self, text: str) -> None:
        self._calls, self._name = JsonCalls(self._sink), None
        for one in text.strip():
            self._calls.push(one)

    def finish(self) -> None:
        if self._calls is not None:
            self._calls.finish()
        elif self._held or (self._value is None and self._name):
            self._sink.content(self._held + (self._name or ""))


class Content:
    """No calls: all of it is content."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def push(self, character: str) -> None:
        self._sink.content(character)

    def finish(self) -> None: ...


class Thinking:
    """Reasoning between `<think>` and `</think>` at the start, the rest to the reader behind it. `begun`: the prompt has opened it."""

    begin, end = "<think>", "</think>"

    def __init__(self, sink: Sink, rest: TextReader, begun: bool) -> None:
        self._sink = sink
        self._rest = rest
        self._state = "inside" if begun else "before"
        self._held = ""
        self._skips = begun  # blanks around reasoning are not part of it

    def push(self, character: str) -> None:
        if self._state == "over":
            if self._skips and character in _BLANK:
                return
            self._skips = False
            self._rest.push(character)
        elif self._state == "before":
            self._held += character
            if self._held.lstrip(_BLANK) == self.begin:
                self._held, self._state, self._skips = "", "inside", True
            elif not self.begin.startswith(self._held.lstrip(_BLANK)):
                self._hand_over()
        else:
            self._think(character)

    def _think(self, character: str) -> None:
        """Blanks are held until it is known whether the end comes behind them."""
        self._held += character
        core = self._held.lstrip(_BLANK)
        if core == self.end:
            self._held, self._state, self._skips = "", "over", True
            return
        while core and not self.end.startswith(core):
            blanks = "" if self._skips else self._held[: len(self._held) - len(core)]
            self._sink.reasoning(blanks + core[0])
            self._skips, self._held = False, core[1:]
            core = self._held.lstrip(_BLANK)

    def _hand_over(self) -> None:
        held, self._held, self._state, self._skips = self._held, "", "over", False
        for one in held:
            self._rest.push(one)

    def finish(self) -> None:
        if self._state == "before":
            self._hand_over()
        elif self._state == "inside":
            self._sink.reasoning(self._held.rstrip(_BLANK) if not self._skips else "")
        self._rest.finish()


READERS: dict[str, Callable[[Sink], TextReader]] = {
    "hermes": HermesCalls,
    "llama3": Llama3Calls,
    "mistral": MistralCalls,
    "json": JsonCalls,
    "none": Content,
}
MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": (HermesCalls.begin, HermesCalls.end),
    "llama3": (Llama3Calls.marker,),
    "mistral": (MistralCalls.marker, MistralCalls.args),
    "json": (),
    "none": (),
}


class MessageParser:
    """One choice's message, as its text comes."""

    def __init__(self, sink: Sink, reader: TextReader) -> None:
        self._sink = sink
        self._reader = reader

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def push(self, text: str, last: bool = False) -> Parts:
        for character in text:
            self._reader.push(character)
        if last:
            self._reader.finish()
        return self._sink.take()

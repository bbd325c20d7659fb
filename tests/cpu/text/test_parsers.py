"""Parsers of calls and reasoning: what each format means, and that no cut of the text changes it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import NamedTuple, SupportsIndex

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.text.parsers import (
    MARKERS,
    READERS,
    THINK,
    MessageParser,
    calls_or_content,
    named_call,
    thinking,
)


class Message(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def parse(
    kind: str,
    pieces: list[str],
    thinks: bool = False,
    begun: bool = False,
    most: int | None = None,
    names: list[str] | None = None,
    tools: tuple[str, ...] = (),
) -> Message:
    parser = MessageParser(most, names, tools)
    reading = (
        named_call(parser, "forced")
        if kind == "forced"
        else READERS[kind](parser)
        if names is None
        else calls_or_content(parser, kind)
    )
    parser.start(thinking(parser, reading, begun) if thinks else reading)
    said = {"text": "", "reasoning": ""}
    calls: list[tuple[str, str]] = []
    for number, piece in enumerate([*pieces, ""]):
        for part, text in parser.push(piece, last=number == len(pieces)):
            if part == "call":
                calls.append((text, ""))
            elif part == "arguments":
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            else:
                said[part] += text
    assert parser.num_calls == len(calls)
    return Message(said["text"], said["reasoning"], calls)


@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral", "json", "none"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(
            {
                "text": 'as in <tool_call>{"name": "now"}</tool_call> [TOOL_CALLS]now{} <|python_tag|>{"name": "now"}'  # noqa: E501
            }
        ),
        json.dumps({"name": "Ann", "arguments": {"of": "the answer"}}),
        json.dumps([{"name": "Ann"}]),
        json.dumps("<tool_call>"),
        *("21", "{}", "[]", "<", ""),
    ],
)
def test_an_answer_in_a_form_that_spells_a_call_or_has_a_name_is_no_call(kind: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(kind, pieces, names=["now"]) == Message(text, "", [])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        ("llama3", '{"name": "now", "parameters": {}}'),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
        ("json", '[{"name": "now", "arguments": {}}]'),
    ],
)
def test_beside_a_form_a_call_of_a_tool_is_a_call(kind: str, text: str) -> None:
    for pieces in ([text], list(text), ["\n ", text]):
        assert parse(kind, pieces, names=["now"]) == Message("", "", [("now", "{}")])


F = '{"name": "f", "arguments": {"a": "```"}}'
CALL = ("f", '{"a": "```"}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (F, Message("", "", [CALL])),
        (f"```json\n{F}\n```", Message("", "", [CALL])),
        (f"\n```\n{F}\n{F}\n```\n", Message("", "", [CALL, CALL])),
        (f"```tool_call\n{F}\n```\n\n```json\n[{F},\n{F}]\n```", Message("", "", [CALL] * 3)),
        (f"{F}\n<tool_call>{F}</tool_call>", Message("", "", [CALL, CALL])),
        (f"```json\n{F}\n```\nThis asks for it.", Message("This asks for it.", "", [CALL])),
        (f"Do this:\n```json\n{F}\n```", Message(f"Do this:\n```json\n{F}\n```", "", [])),
        (F.replace('"f"', '"g"'), Message(F.replace('"f"', '"g"'), "", [])),
        ('{"name": "f"}', Message('{"name": "f"}', "", [])),
        ('[{"name": "f", "parameters": {}}]', Message('[{"name": "f", "parameters": {}}]', "", [])),
        (f'[{F}, {{"name": "g"}}]', Message('{"name": "g"}]', "", [CALL])),
        ('{"a": 1} <tool_call>' + F, Message('{"a": 1}', "", [CALL])),
        *(
            (text, Message(text, "", []))
            for text in (
                *("```", "json", "[1] `a`", '```json\n{"a": "<', "{", "", "[", " ", "{ <tool", "`" * 600),
                # a list of tools, an example, a result, a call that is cut off or damaged
                '{"name":"f","description":"says it","arguments":"a city"}',
                '[{"name": "f", "arguments": "city"}, {"name": "g", "arguments": "x"}]',
                '{"name": "f", "arguments": ["city"], "returns": "text"}',
                '{"name":"f","arguments":{"a": 1},"result":"sunny"}',
                '{"arguments": {}, "name": "f"}',
                F[:-1],
                F[:-2],
                '{"name": "f", "arguments": {"a": }}',
                '{"name": "f", "arguments": {"a": ' + "[" * 9999 + "]" * 9999 + "}}",
            )
        ),
    ],
)
def test_a_call_of_a_tool_that_begins_a_text_needs_no_marker(text: str, said: Message) -> None:
    for pieces in ([text], list(text)):
        assert parse("hermes", pieces, tools=("f",)) == said


@pytest.mark.parametrize(
    ("common", "own"),
    [
        ('{"', 'answer":"xxx"}'),
        ('{"name": "', 'Ann"}'),
        ('[{"name": "f", "', 'description":"it"}]'),
        ('{"name": "f", "arguments": ', '"x"}'),
    ],
)
def test_an_answer_in_json_is_content_from_where_it_is_no_call(common: str, own: str) -> None:
    parser = MessageParser(tools=("f",))
    parser.start(READERS["hermes"](parser))
    assert parser.push(common) == []
    assert parser.push(own[0]) == [("text", common + own[0])]
    assert [parser.push(one) for one in own[1:]] == [[("text", one)] for one in own[1:]]


@pytest.mark.parametrize(
    "text", [" " * 400, '{"name":' + " " * 400, '{"name": "f", "arguments":' + " " * 400]
)
def test_blanks_alone_are_held_up_to_a_limit(text: str) -> None:
    parser = MessageParser(tools=("f",))
    parser.start(READERS["hermes"](parser))
    assert "".join(said for _, said in parser.push(text + "x")) == text + "x"
    parser = MessageParser(tools=("f",))
    parser.start(READERS["hermes"](parser))
    assert parser.push(text + '"f"') != []


class Counted(str):
    """Text that counts the characters that are copied or looked at, of it and of what is made of it."""

    work = 0

    def _made(self, text: str) -> Counted:
        Counted.work += max(len(self), len(text))
        return Counted(text)

    def __iter__(self) -> Iterator[str]:
        return map(Counted, str(self))

    def __add__(self, other: str) -> Counted:
        return self._made(str(self) + str(other))

    def __radd__(self, other: str) -> Counted:
        return self._made(str(other) + str(self))

    def __getitem__(self, index: SupportsIndex | slice) -> Counted:
        return self._made(str(self)[index])

    def strip(self, blanks: str | None = None) -> Counted:
        return self._made(str(self).strip(blanks))

    def lstrip(self, blanks: str | None = None) -> Counted:
        return self._made(str(self).lstrip(blanks))

    def rstrip(self, blanks: str | None = None) -> Counted:
        return self._made(str(self).rstrip(blanks))


BEGINNINGS = ["", "<think>", "<tool_call>", '<tool_call>{"name": ', "[TOOL_CALLS]", "<|python_tag|>"]
BEGINNINGS += ["[TOOL_CALLS][", "```json\n", '{"', '{"name":', '{"name": "f", "arguments": {"a": "', F, "hi"]


@pytest.mark.parametrize("way", ["as it is", "formed", "thinks", "begun"])
@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral", "json", "forced"])
def test_the_work_for_a_character_does_not_grow_with_the_text(kind: str, way: str) -> None:
    """The event loop of a front does it: others wait meanwhile."""
    for start, filler in itertools.product(BEGINNINGS, [" ", "`", "{", "[", '"', ",", "x", "<", "[T", "\n<"]):
        text = Counted(start + filler * (200 // len(filler)))
        Counted.work = 0
        names = ["f"] if way == "formed" else None
        parse(kind, [text], way in ("thinks", "begun"), way == "begun", names=names, tools=("f",))
        assert Counted.work < 8 * len(text), (start, filler)


def test_no_marker_begins_inside_another() -> None:
    """A search starts again at the character where it failed."""
    assert all(marker.count(marker[0]) == 1 for marker in itertools.chain(THINK, *MARKERS.values()))


def test_without_tools_an_object_is_content() -> None:
    assert parse("hermes", [F]) == Message(F, "", [])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {}}}'),
        ("llama3", '{"name": "f", "parameters": {"a": {}}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": {}}'),
        ("json", '[{"name": "f", "arguments": {"a": {}}}'),
        ("forced", ' {"a": {}}'),
    ],
)
def test_a_call_is_over_with_its_last_brace(kind: str, text: str) -> None:
    parser = MessageParser()
    parser.start(named_call(parser, "forced") if kind == "forced" else READERS[kind](parser))
    assert not parser.in_call
    parser.push(text[:-1])
    assert parser.in_call
    parser.push(text[-1:])
    assert not parser.in_call and parser.num_calls == 1


SAID: dict[str, tuple[str, str, Message]] = {
    "two calls": (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call"}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>',
        Message("Sure.", "", [("f", '{"a": "}</tool_call"}'), ("g", "{}")]),
    ),
    "arguments before the name": (
        "hermes",
        '<tool_call>{"arguments": {"b": [1, {"c": null}]}, "name": "g"}</tool_call>',
        Message("", "", [("g", '{"b": [1, {"c": null}]}')]),
    ),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Message("", "", [("f", '{"a": 1}')]),
    ),
    "no arguments as null": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": null}</tool_call><tool_call>{"arguments": null, "name": "g"}</tool_call>',  # noqa: E501
        Message("", "", [("f", "{}"), ("g", "{}")]),
    ),
    "no arguments as null of llama": (
        "llama3",
        '{"name": "f", "parameters": null}',
        Message("", "", [("f", "{}")]),
    ),
    "arguments that are no object": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call><tool_call>{"name": "g", "arguments": 5 }</tool_call>',  # noqa: E501
        Message("", "", [("f", "[1, 2]"), ("g", "5")]),
    ),
    "arguments under both names": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>'
        '<tool_call>{"arguments": {"a": 1}, "parameters": {"b": 2}, "name": "g"}</tool_call>',
        Message("", "", [("f", '{"a": 1}'), ("g", '{"a": 1}')]),
    ),
    "half a surrogate pair": (
        "hermes",
        '<tool_call>{"name": "f\\ud83d", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>'
        '<tool_call>{"name": "g\\ud83d\\ude00", "arguments": {"a": "\\ud83d"}}</tool_call>',
        Message("", "", [("f\ufffd", '{"a": "\ufffd"}'), ("g\U0001f600", '{"a": "\\ud83d"}')]),
    ),
    "an argument that ends with a backslash": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"path": "C:\\\\"}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"a": "\\\\\\""}}</tool_call>',
        Message("", "", [("f", '{"path": "C:\\\\"}'), ("g", '{"a": "\\\\\\""}')]),
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', Message("", "", [("f", "{}")])),
    "something like a marker": ("hermes", "a <tool_ca b <  c\n", Message("a <tool_ca b <  c\n", "", [])),
    "no call between markers": ("hermes", "<tool_call>what</tool_call> tail", Message("what tail", "", [])),
    "another object between markers": (
        "hermes",
        '<tool_call>{"x": 1}</tool_call>',
        Message('{"x": 1}', "", []),
    ),
    "a name that is no text": (
        "hermes",
        '<tool_call>{"name": ' + "[" * 9999 + "]" * 9999 + "}</tool_call>",
        Message('{"name": ' + "[" * 9999 + "]" * 9999 + "}", "", []),
    ),
    "cut off in the arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        Message("", "", [("f", '{"a": 1')]),
    ),
    "cut off in the name": ("hermes", '<tool_call>{"name": "f', Message('{"name": "f', "", [])),
    "cut off in the marker": ("hermes", "a <tool_c", Message("a <tool_c", "", [])),
    "llama behind its tag": (
        "llama3",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        Message("", "", [("f", '{"a": 1}')]),
    ),
    "llama without": (
        "llama3",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        Message("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "llama says something": (
        "llama3",
        'Hello {"name": 1} <|pyt x',
        Message('Hello {"name": 1} <|pyt x', "", []),
    ),
    "llama says something first": (
        "llama3",
        'Well <|python_tag|>{"name":"f","parameters":{}}',
        Message("Well ", "", [("f", "{}")]),
    ),
    "mistral's list": (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
        Message("", "", [("f", '{"a": [1]}'), ("g", "{}")]),
    ),
    "mistral's list with blanks": (
        "mistral",
        '[TOOL_CALLS] [ \n{"name": "f", "arguments": {}}]',
        Message("", "", [("f", "{}")]),
    ),
    "mistral's newer form": (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "}"}',
        Message("", "", [("f", '{"a": 1}'), ("g", '{"b": "}"}')]),
    ),
    "mistral without ARGS": ("mistral", '[TOOL_CALLS]f{"a": 1}', Message("", "", [("f", '{"a": 1}')])),
    "mistral says something": ("mistral", "hi [TOOL] [x]", Message("hi [TOOL] [x]", "", [])),
    "a list": (
        "json",
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        Message("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "a list of something else": ("json", "[1, 2]", Message("[1, 2]", "", [])),
    "text": ("json", "just text", Message("just text", "", [])),
    "a forced call": ("forced", '{"a": "x"}', Message("", "", [("forced", '{"a": "x"}')])),
    "none": (
        "none",
        '<tool_call>{"name": "f"}</tool_call>',
        Message('<tool_call>{"name": "f"}</tool_call>', "", []),
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_every_format_means_what_its_models_mean(name: str) -> None:
    kind, text, message = SAID[name]
    assert parse(kind, [text]) == message == parse(kind, list(text))


THOUGHT = {
    "reasoning first": (
        "<think>\nhm < x </thin> \n</think>\n\nHi",
        False,
        Message("Hi", "hm < x </thin>", []),
    ),
    "opened by the prompt": ("hm\n</think>Hi", True, Message("Hi", "hm", [])),
    "none": ("Hi <think>", False, Message("Hi <think>", "", [])),
    "never ended": ("<think>hm  ", False, Message("", "hm", [])),
    "and a call": (
        'hm</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        True,
        Message("", "hm", [("f", "{}")]),
    ),
    "only the start of a mark": ("<thi", False, Message("<thi", "", [])),
}


@pytest.mark.parametrize("name", THOUGHT)
def test_reasoning_goes_before_the_rest(name: str) -> None:
    text, begun, message = THOUGHT[name]
    assert parse("hermes", [text], True, begun) == message == parse("hermes", list(text), True, begun)


WORDS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<",
    "[T",
]
WORDS += ["f", " ", "\n", ";", ",", "[", "]", '"', "\\", "{", "}", ":", '"name"']
WORDS += ["```", "json", '"f"', "  " * 70, '"arguments"', '{"name": "f", "arguments": {']
WORDS += ['{"name": "f", "arguments": {"a": 1}}', '{"name": "g"', ', "arguments": {"b": "}\\""}}']


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(["hermes", "llama3", "mistral", "json", "none"]),
    words=st.lists(st.sampled_from(WORDS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    thinks=st.booleans(),
    begun=st.booleans(),
    tools=st.sampled_from([(), ("f",), ("f", "ff")]),
    formed=st.booleans(),
)
def test_no_cut_of_a_text_changes_what_it_means(
    kind: str,
    words: list[str],
    cuts: list[int],
    thinks: bool,
    begun: bool,
    tools: tuple[str, ...],
    formed: bool,
) -> None:
    text = "".join(words)
    ends = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    names = list(tools) if formed else None
    assert parse(kind, pieces, thinks, thinks and begun, None, names, tools) == parse(
        kind, [text], thinks, thinks and begun, None, names, tools
    )


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["hermes", "llama3", "mistral", "json"]),
    arguments=st.lists(
        st.dictionaries(st.sampled_from("ab"), st.text(alphabet='\\"{}[]<a/', max_size=6)),
        min_size=1,
        max_size=3,
    ),
)
@example(kind="json", arguments=[{"a": "\\"}, {"a": '\\"'}])
def test_calls_are_told_apart_whatever_their_arguments_hold(
    kind: str, arguments: list[dict[str, str]]
) -> None:
    said = [
        json.dumps({"name": "f", "parameters" if kind == "llama3" else "arguments": one}) for one in arguments
    ]
    text = {
        "hermes": "".join(f"<tool_call>{one}</tool_call>" for one in said),
        "llama3": "; ".join(said),
        "mistral": f"[TOOL_CALLS] [{', '.join(said)}]",
        "json": f"[{', '.join(said)}]",
    }[kind]
    assert [json.loads(given) for _, given in parse(kind, [text]).calls] == arguments


def test_calls_beyond_the_most_are_dropped() -> None:
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]'
    assert parse("json", list(text), most=1).calls == [("f", '{"a": 1}')]

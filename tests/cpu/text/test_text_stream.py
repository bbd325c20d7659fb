"""Incremental text: any split into pushes gives the text of the whole, stop strings never leak, and offsets
point at the text."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.models.tokenizer import ByteTokenizer, Tokenizer
from penstock.text.answer import StopString, TextStream
from tests.support.embedded import embedded_tokenizer

REAL = embedded_tokenizer()
BYTES = ByteTokenizer(256)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [REAL, BYTES], ids=["real", "bytes"])


def streamed(
    tokenizer: Tokenizer | ByteTokenizer, pushes: list[list[int]], stop: tuple[str, ...] = ()
) -> tuple[str, bool]:
    stream = TextStream(tokenizer, tuple(map(StopString, stop)))
    deltas = [stream.push(push) for push in pushes]
    return "".join(delta.text for delta in deltas) + stream.finish(), any(delta.stopped for delta in deltas)


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def text_before_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """Reference: the shortest prefix that ends with a stop string, less the longest one it ends with."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


# (text, stop strings, what is left of the text; None: all of it)
STOPS = [
    ("xabc", ("c", "abc"), "x"),  # two end at the same place: the longer one began first
    ("xabc", ("abc", "c"), "x"),
    ("xabc", ("bc", "abc", "c"), "x"),
    ("abcd", ("abcd", "bc"), "a"),  # a shorter one inside is complete sooner
    ("abcd", ("bc", "abcd"), "a"),
    # one is the beginning of the other: the shorter is complete sooner
    ("say stop!", ("stop!", "stop"), "say "),
    ("say stop!", ("stop", "stop!"), "say "),
    ("say stip", ("stop", "stop!"), None),
    ("aaab", ("aab",), "a"),  # falls back to a shorter beginning of itself
    ("abababac", ("ababac",), "ab"),
    ("aabaaab", ("aaab", "abb"), "aab"),
    ("aabaaabaaac", ("aabaaac",), "aaba"),  # and falls back twice in one place
    ("abcabd", ("abd",), "abc"),
    ("abab", ("ab",), ""),  # the first of several
    ("one\n\nUs: two\n\nUser: three", ("\n\nUser:",), "one\n\nUs: two"),  # given back once, then met
    ("ends with sto", ("stop",), None),
    ("stop", ("stop",), ""),
    ("", ("stop",), None),
    # characters of several tokens, cut anywhere
    ("na\u00efve \U0001f642 caf\u00e9", ("\U0001f642",), "na\u00efve "),
    ("na\u00efve \U0001f642 caf\u00e9", ("\u00e9", "caf\u00e9"), "na\u00efve \U0001f642 "),
    ("\u00e9\u00e8", ("\u00e8",), "\u00e9"),  # two that begin with the same byte
    ("\u00ea\u00e9", ("\u00e8",), None),
    ("a\ufffdb", ("\ufffd",), "a"),
]


def also(*cases: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Every one of these is tried each time, whatever else hypothesis comes upon."""

    def with_examples(test: Callable[..., None]) -> Callable[..., None]:
        for case in cases:
            test = example(*case)(test)
        return test

    return with_examples


@pytest.mark.parametrize(("text", "stop", "left"), STOPS)
@TOKENIZERS
def test_a_stop_string_cuts_the_text_where_it_began(
    tokenizer: Tokenizer | ByteTokenizer, text: str, stop: tuple[str, ...], left: str | None
) -> None:
    """At once, token by token, and in pushes of two."""
    ids = tokenizer.encode(text)
    for size in (max(1, len(ids)), 1, 2):
        pushes = [ids[at : at + size] for at in range(0, len(ids), size)]
        assert streamed(tokenizer, pushes, stop) == ((text, False) if left is None else (left, True))


@given(st.lists(st.integers(0, REAL.vocab_size - 1), max_size=40), st.lists(st.integers(0, 100), max_size=8))
@also(
    ([], []),
    ([0, 1, 2, 0], [1]),
    (REAL.encode("\U0001f642\u00e9 x"), list(range(20))),
    ([*REAL.encode("\U0001f642")[:1], 2, 260], [1, 2]),
)
def test_deltas_of_any_real_tokens_in_any_pushes_join_to_the_decoded_whole(
    ids: list[int], cuts: list[int]
) -> None:
    assert streamed(REAL, cut(ids, cuts)) == (REAL.decode(ids), False)


@given(st.lists(st.integers(0, 255), max_size=30), st.lists(st.integers(0, 100), max_size=8))
@also(
    ([0xE2, 0x82, 0x41], []),
    ([0xF0, 0x9F, 0xF0, 0x9F, 0x99, 0x82, 0xC0, 0x80], [1, 2, 3]),
    ([0x80, 0x41, 0xED, 0xA0, 0x80, 0xF4, 0x90, 0x80, 0x80], list(range(9))),
    ([0x41, 0xE2, 0x82], [1, 2]),
)
def test_deltas_of_any_bytes_join_to_the_decoded_whole(ids: list[int], cuts: list[int]) -> None:
    assert streamed(BYTES, cut(ids, cuts)) == (BYTES.decode(ids), False)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 100), max_size=8),
)
@also(*((text, list(stop), cuts) for text, stop, _ in STOPS for cuts in ([], list(range(40)))))
def test_the_text_ends_before_the_first_stop_string_to_be_complete(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    expected = text_before_stop(text, tuple(stop))
    result, stopped = streamed(BYTES, cut(BYTES.encode(text), cuts), tuple(stop))
    assert (result, stopped) == ((text, False) if expected is None else (expected, True))


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
@also(
    ("abababac", ["ababac"]),
    ("aab", ["aaa", "ab"]),
    ("aabaab", ["aabaabb", "abb"]),
    ("abb", ["abba", "bba", "ba"]),
    ("ba", ["a", "ab"]),
)
def test_what_is_emitted_never_has_to_be_taken_back(text: str, stop: list[str]) -> None:
    """Whatever comes next, the final text starts with what was emitted so far; and no more is held back than
    could be a stop string."""
    stream, so_far = TextStream(BYTES, tuple(map(StopString, stop))), ""
    for n, id in enumerate(BYTES.encode(text), 1):
        delta = stream.push([id])
        so_far += delta.text
        if delta.stopped:
            return
        held = text[len(so_far) : n]
        assert text[:n] == so_far + held
        assert held == "" or any(s.startswith(held) and s != held for s in stop)
        for s in stop:
            for overlap in range(1, len(s)):
                assert not text[:n].endswith(s[:overlap]) or overlap <= len(held)


def test_special_tokens_have_no_text_but_an_offset() -> None:
    ids = [*REAL.encode("hi"), 2, *REAL.encode(" you")]
    assert TextStream(REAL).push(ids) == ("hi you", False, (0, 2, 2))


def test_offsets_point_at_the_character_that_a_token_starts_or_goes_on_with() -> None:
    assert TextStream(BYTES).push(BYTES.encode("é🙂x")).offsets == (0, 0, 1, 1, 1, 1, 2)
    # 'A' and the second lead byte break off the character before them, which takes one place in the text.
    assert TextStream(BYTES).push([0xE2, 0x82, 0x41, 0xF0, 0xF0, 0x9F]) == (
        "\ufffdA\ufffd",
        False,
        (0, 0, 1, 2, 3, 3),
    )
    # A complete U+FFFD is a character like any other.
    assert TextStream(BYTES).push([*"\ufffd".encode(), 0x41]).offsets == (0, 0, 0, 1)


@given(st.text(min_size=1, max_size=40), st.lists(st.integers(0, 100), max_size=5))
@also(("\U0001f642x", [1]), ("a\u0300\u00e9 b", list(range(9))), ("\ufffd\ufffda", [1, 2]))
def test_offsets_do_not_depend_on_pushes_and_locate_each_tokens_text(text: str, cuts: list[int]) -> None:
    ids = REAL.encode(text)
    whole = TextStream(REAL).push(ids).offsets
    stream = TextStream(REAL, [StopString("never in here, since it is far too long for this")])
    assert sum((stream.push(push).offsets for push in cut(ids, cuts)), ()) == whole
    decoded = REAL.decode(ids)
    for id, offset in zip(ids, whole, strict=True):
        own = REAL.token_bytes(id).decode(errors="replace")
        if "\ufffd" not in own and not REAL.is_special(id):
            assert decoded[offset:].startswith(own)


class Looked(str):
    """Text that counts how often a character of it is looked at."""

    steps = 0

    def __getitem__(self, index: object) -> str:
        Looked.steps += 1
        return str.__getitem__(self, index)  # type: ignore[index]


def looks_at_stop(stop: str, outputs: list[str]) -> int:
    """Characters of the stop string that are looked at for all outputs of one request. Counted, not timed."""
    shared = StopString(stop)
    shared.text = Looked(stop)
    Looked.steps = 0
    for output in outputs:
        matched = 0
        for character in output:
            matched = shared.advance(matched, character)
    return Looked.steps


def test_a_stop_string_of_a_megabyte_costs_no_more_per_token_than_a_short_one() -> None:
    """Below a few looks per character of output, on average."""
    output = ("a" * 1000 + "c") * 20
    assert looks_at_stop("a" * 1_000_000 + "b", [output]) < 6 * len(output)


# -------------------------------------------------------------------------------------------------- held text


class Bytes:
    """Tokens are bytes; those from 256 on are special."""

    errors = "replace"

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        return bytes([id])

    def is_special(self, id: int) -> bool:
        return id >= 256


@pytest.mark.parametrize(
    ("data", "stops"),
    [
        (b"a\xe2\x82", ("ab", "\ufffdz")),
        (b"xa\xf0\x9f", ("ab", "\ufffdzz", "a\ufffd\ufffd")),
        (b"ab\xc3", ("abc", "\ufffdq")),
        (b"aaa\xe2", ("aaaa", "\ufffd\ufffd")),
    ],
)
def test_half_a_character_behind_what_may_be_a_stop_string_comes_behind_it(
    data: bytes, stops: tuple[str, ...]
) -> None:
    stream = TextStream(Bytes(), tuple(map(StopString, stops)))
    text = "".join(stream.push([byte]).text for byte in data)
    assert text + stream.finish() == data.decode("utf-8", "replace") and stream.finish() == ""


def test_a_stop_string_that_half_a_character_completes_ends_the_text() -> None:
    stream = TextStream(Bytes(), [StopString("b\ufffd")])
    assert stream.push(b"ab\xe2").text == "a"
    assert stream.finish() == "" and stream.push(b"c") == ("", True, ())


def test_half_a_character_behind_a_stop_string_is_no_part_of_the_answer() -> None:
    """A token may end a stop string and begin a character."""

    class Pairs(Bytes):
        def token_bytes(self, id: int, first: bool = False) -> bytes:
            return bytes([id, 0xE2])

    stream = TextStream(Pairs(), [StopString("b")])
    assert stream.push(b"b") == ("", True, (0,))
    assert stream.finish() == "" and stream.stopped_by == "b"


@pytest.mark.parametrize(
    ("data", "stop", "num_shown"),
    [
        (b"abSTOP", "STOP", 2),
        (b"abSTOPcd", "STOP", 2),
        (b"a\xc3\xa9STOP", "STOP", 3),
        (b"aSTO\xc3", "STOP", 5),  # the end of the output: all of it was shown
        (b"ab\xe2\x82\xac", "\u20ac", 2),  # the bytes of one character are shown together, or not
        (b"STOP", "STOP", 0),
    ],
)
def test_tokens_count_as_shown_where_their_whole_text_is_out(data: bytes, stop: str, num_shown: int) -> None:
    for at_once in (1, 3, len(data)):
        stream = TextStream(Bytes(), [StopString(stop)])
        for first in range(0, len(data), at_once):
            stream.push(data[first : first + at_once])
        stream.finish()
        assert stream.num_shown == num_shown

"""Text that is held back when the output ends: all of it comes, in its order."""

from __future__ import annotations

import pytest

from penstock.text.stream import StopString, TextStream


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


def test_a_token_that_breaks_a_character_starts_behind_what_becomes_of_it() -> None:
    stream = TextStream(Bytes(), ())
    assert stream.push([0x61, 0xE2, 0x62]) == ("a\ufffdb", False, (0, 1, 2))


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

"""What is read from and written to a connection comes out the same however it is cut into pieces, and nothing strange is put up with."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import StoreFailed
from penstock.kv.tiers.remote import wire as wires
from penstock.kv.tiers.remote.wire import Refusal, Wire, command, command_with_value

NEVER = time.monotonic() + 1e5


class Pieces:
    """As much of a socket as reading needs: gives out what it was made with, cut where it was told to. Empty: the other side is gone."""

    def __init__(self, data: bytes, cuts: Sequence[int]) -> None:
        self._data = data
        self._cuts = list(cuts)

    def settimeout(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def recv_into(self, target: memoryview) -> int:
        size = min(len(target), len(self._data), self._cuts.pop() if self._cuts else len(self._data))
        target[:size] = self._data[:size]
        self._data = self._data[size:]
        return size


def wire_of(data: bytes, cuts: Sequence[int] = ()) -> Wire:
    wire = Wire(Pieces(data, cuts), NEVER)  # type: ignore[arg-type]
    wire.num_owed = 1_000_000
    return wire


Value = bytes | None
values = st.lists(st.none() | st.binary(max_size=300) | st.integers(4000, 20000).map(lambda size: b"\r\n" * (size // 2)), max_size=8)
cut_lists = st.lists(st.integers(1, 50) | st.integers(1000, 5000), max_size=60)


def reply(value: Value) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


@given(values=values, cuts=cut_lists)
@settings(deadline=None)
def test_values_arrive_whole_however_they_are_cut(values: list[Value], cuts: list[int]) -> None:
    wire = wire_of(b"".join(map(reply, values)) + b"+END\r\n", cuts)
    for value in values:
        size = wire.read_value_size()
        if value is None:
            assert size is None
            continue
        assert size == len(value)
        target = bytearray(len(value))
        wire.read_into(memoryview(target))
        wire.end_value()
        assert target == value
    assert wire.read_answer() == b"END"
    assert wire.num_owed == 1_000_000 - len(values) - 1


@given(values=values, cuts=cut_lists)
@settings(deadline=None)
def test_what_is_skipped_leaves_the_next_answer_where_it_is(values: list[Value], cuts: list[int]) -> None:
    wire = wire_of(b"".join(map(reply, values)) + b":7\r\n", cuts)
    for _ in values:
        size = wire.read_value_size()
        if isinstance(size, int):
            wire.skip(size)
            wire.end_value()
    assert wire.read_answer() == 7


@given(data=st.binary(max_size=200), cuts=cut_lists)
@example(data=b"", cuts=[])
@example(data=b"$-1\r\n", cuts=[1, 2])
@example(data=b"$5\r\nhello\r", cuts=[3])
@example(data=b":999999999999999999999999\r\n", cuts=[])
@example(data=b"$999999999999\r\n", cuts=[])
@example(data=b"\r\n\r\n", cuts=[1])
@settings(deadline=None)
def test_no_bytes_at_all_lead_to_anything_but_an_answer_or_a_failure(data: bytes, cuts: list[int]) -> None:
    for read in (Wire.read_answer, Wire.read_value_size):
        wire = wire_of(data, cuts)
        try:
            answer = read(wire)
        except StoreFailed:
            continue
        assert answer is None or isinstance(answer, bytes | int | Refusal)


@pytest.mark.parametrize(
    "data",
    [
        b"$5\r\nhello\r\n",  # a value where a line belongs
        b"*1\r\n:1\r\n",
        b":12x\r\n",
        b":" + b"9" * 30 + b"\r\n",
        b"x" * 10000,
        b"",
        b"+OK",
        b"\r\n",
    ],
)
def test_what_is_no_line_is_a_failure(data: bytes) -> None:
    with pytest.raises(StoreFailed):
        wire_of(data).read_answer()


@pytest.mark.parametrize(
    "data", [b"+OK\r\n", b":1\r\n", b"*-1\r\n", b"$-2\r\n", b"$\r\n", b"$99999999999\r\n", b"$1e3\r\n", b"$ 5\r\n", b"$+5\r\n"]
)
def test_what_is_no_value_is_a_failure(data: bytes) -> None:
    wire = wire_of(data)
    with pytest.raises(StoreFailed):
        wire.read_value_size()
    assert wire.num_owed == 1_000_000  # so nobody uses it again


def test_a_value_that_is_longer_than_it_said_is_a_failure() -> None:
    wire = wire_of(b"$3\r\nabcd\r\n")
    assert wire.read_value_size() == 3
    wire.skip(3)
    with pytest.raises(StoreFailed):
        wire.end_value()
    assert wire.num_owed == 1_000_000


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "OOM"),
        (b"-NOPERM User joe has no permissions\r\n", "NOPERM"),
        (b"-MOVED 3999 10.0.0.1:6381\r\n", "MOVED"),
        (b"-secret words\r\n", "ERR"),
        (b"-\r\n", "ERR"),
        (b"-" + b"A" * 100 + b"\r\n", "ERR"),
        (b"-\xff\xfe x\r\n", "ERR"),
    ],
)
def test_of_a_refusal_only_its_kind_is_kept(text: bytes, word: str) -> None:
    assert wire_of(text).read_answer() == Refusal(word)
    assert wire_of(text).read_value_size() == Refusal(word)


# ------------------------------------------------------------------------------------------------------------- the deadline


@contextmanager
def stepping_clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> Iterator[list[float]]:
    """Every look at the clock takes `step_s`."""
    now = [0.0]

    def look() -> float:
        now[0] += step_s
        return now[0]

    with monkeypatch.context() as patch:
        patch.setattr(wires, "time", SimpleNamespace(monotonic=look))
        yield now


def test_bytes_that_come_one_by_one_do_not_extend_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with stepping_clock(monkeypatch, 0.1) as now:
        wire = Wire(Pieces(b"$1000\r\n" + b"x" * 1000 + b"\r\n", [1] * 2000), 1.0)  # type: ignore[arg-type]
        with pytest.raises(StoreFailed, match="in time"):
            wire.skip(1007)
        assert now[0] < 1.2


def test_a_deadline_for_each_piece_alone_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wire, "_arm", lambda self: self._socket.settimeout(1.0))
    with stepping_clock(monkeypatch, 0.1):
        wire = Wire(Pieces(b"$1000\r\n" + b"x" * 1000 + b"\r\n", [1] * 2000), 1.0)  # type: ignore[arg-type]
        assert wire.read_value_size() == 1000
        wire.skip(1000)  # hours of it


def test_a_silent_peer_ends_a_read_and_a_full_one_a_write() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for exchange in (lambda wire: wire.read_answer(), lambda wire: wire.send([bytes(1 << 24)], 1)):
            with pytest.raises(StoreFailed, match="in time"):
                exchange(Wire(ours, time.monotonic() + 0.05))


# ------------------------------------------------------------------------------------------------------------------ sending


@given(parts=st.lists(st.binary(max_size=200) | st.integers(1, 3).map(lambda size: b"z" * (size << 17)), max_size=40))
@settings(deadline=None, max_examples=30)
def test_parts_arrive_in_order_and_whole(parts: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that most sends are partial
    received = bytearray()

    def receive() -> None:
        while data := theirs.recv(65536):
            received.extend(data)

    reader = threading.Thread(target=receive)
    reader.start()
    wire = Wire(ours, NEVER)
    wire.send(parts, len(parts))
    wire.close()
    reader.join()
    theirs.close()
    assert received == b"".join(parts)
    assert wire.num_owed == len(parts)


def test_more_parts_than_the_system_takes_at_once_are_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Wire(ours, NEVER).send([b"ab"] * 3000, 1)
        received = b""
        while len(received) < 6000:
            received += theirs.recv(8192)
        assert received == b"ab" * 3000


def test_an_encrypted_socket_gets_its_parts_one_by_one_under_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    class Encrypted(ssl.SSLSocket):
        def __init__(self) -> None: ...
        def settimeout(self, timeout_s: float | None) -> None: ...
        def send(self, data: memoryview, flags: int = 0) -> int:  # type: ignore[override]
            sent.append(bytes(data[:1]))
            return 1

        def __del__(self) -> None: ...

    Wire(Encrypted.__new__(Encrypted), NEVER).send([b"ab", memoryview(b"c")], 1)
    assert sent == [b"a", b"b", b"c"]
    with stepping_clock(monkeypatch, 0.1), pytest.raises(StoreFailed, match="in time"):
        Wire(Encrypted.__new__(Encrypted), 1.0).send([b"x" * 1000], 1)


def test_commands_are_framed() -> None:
    assert command(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
    before, behind = command_with_value((b"SET", b"k"), 5, (b"EX", b"9"))
    assert before + b"hello" + behind == command(b"SET", b"k", b"hello", b"EX", b"9")
    before, behind = command_with_value((b"SET", b"k"), 5)
    assert before + b"hello" + behind == command(b"SET", b"k", b"hello")


def test_a_wire_is_quiet_until_something_comes_or_it_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        wire = Wire(ours, NEVER)
        assert wire.quiet
        theirs.send(b"+surprise\r\n")
        assert not wire.quiet
        wire.num_owed = 1
        wire.read_answer()
        assert wire.quiet
        theirs.close()
        assert not wire.quiet


def test_a_wire_that_owes_an_answer_or_has_more_than_was_asked_for_is_not_quiet() -> None:
    """What came behind the last answer lies in our own memory, where the system shows nothing of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(ours, NEVER)
        wire.send([command(b"PING")], 1)
        assert not wire.quiet and not wire.readable
        theirs.send(b"+PONG\r\n+surprise\r\n")
        assert wire.read_answer() == b"PONG"
        assert (wire.num_owed, wire.readable) == (0, False) and not wire.quiet


@pytest.mark.parametrize("encrypted", [False, True], ids=["parts", "whole"])
def test_a_peer_that_is_gone_is_a_failure_of_whoever_sends(encrypted: bool) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    timed = wires.TimedSocket(ours, NEVER)
    with ours, pytest.raises(StoreFailed) as raised:
        timed.sendall(b"PING") if encrypted else timed.send_parts([b"PI", b"NG"])
    assert raised.value.__cause__ is None

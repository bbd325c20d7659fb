"""What is read from and written to a connection comes out the same however it is cut into pieces, and nothing
strange is put up with."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import StoreFailed
from penstock.kv.tiers.remote import Node, valkey
from penstock.kv.tiers.remote.valkey import Refusal, ValkeyConnection, command, command_with_value
from tests.support.servers import ServerMissing, make_certificate

NEVER = time.monotonic() + 1e5
NODE = Node("store", 6379)


class Pieces:
    """As much of a socket as reading needs: gives out what it was made with, cut where it was told to. Empty:
    the other side is gone."""

    def __init__(self, data: bytes, cuts: Sequence[int]) -> None:
        self._data = data
        self._cuts = list(cuts)

    def settimeout(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        return sum(map(len, parts))

    def recv_into(self, target: memoryview) -> int:
        size = min(len(target), len(self._data), self._cuts.pop() if self._cuts else len(self._data))
        target[:size] = self._data[:size]
        self._data = self._data[size:]
        return size


def receiving(data: bytes, cuts: Sequence[int] = ()) -> ValkeyConnection:
    connection = ValkeyConnection(NODE, Pieces(data, cuts), NEVER)  # type: ignore[arg-type]
    connection.num_owed = 1_000_000
    return connection


Value = bytes | None
values = st.lists(
    st.none() | st.binary(max_size=300) | st.integers(4000, 20000).map(lambda size: b"\r\n" * (size // 2)),
    max_size=8,
)
cut_lists = st.lists(st.integers(1, 50) | st.integers(1000, 5000), max_size=60)


def reply(value: Value) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


@given(values=values, cuts=cut_lists)
@settings(deadline=None)
def test_values_arrive_whole_however_they_are_cut(values: list[Value], cuts: list[int]) -> None:
    connection = receiving(b"".join(map(reply, values)) + b"+END\r\n", cuts)
    for value in values:
        target = bytearray(len(value or b""))
        cut = len(target) // 3
        size = connection.read_value([memoryview(target)[:cut], memoryview(target)[cut:]])
        assert size == (None if value is None else len(value))
        assert value is None or target == value
    assert connection.read_answer() == b"END"
    assert connection.num_owed == 1_000_000 - len(values) - 1


@given(values=values, cuts=cut_lists)
@settings(deadline=None)
def test_what_is_skipped_leaves_the_next_answer_where_it_is(values: list[Value], cuts: list[int]) -> None:
    connection = receiving(b"".join(map(reply, values)) + b":7\r\n", cuts)
    for _ in values:
        wrong = bytearray(b"\xee" * 77777)
        connection.read_value([memoryview(wrong)])
        assert wrong == b"\xee" * 77777, "a value of another length is kept nowhere"
    assert connection.read_answer() == 7


def spelled(item: object) -> bytes:
    if isinstance(item, list):
        return b"*%d\r\n" % len(item) + b"".join(map(spelled, item))
    return b":%d\r\n" % item if isinstance(item, int) else reply(item)  # type: ignore[arg-type]


items = st.none() | st.integers(-99, 99) | st.binary(max_size=300)


@given(
    answer=st.lists(items | st.lists(items | st.lists(items, max_size=3), max_size=3), max_size=5),
    cuts=cut_lists,
)
@settings(deadline=None)
def test_lists_in_lists_arrive_whole_however_they_are_cut(answer: list[object], cuts: list[int]) -> None:
    connection = receiving(spelled(answer) + b"+END\r\n", cuts)
    assert connection.query(b"CLUSTER", b"SLOTS") == answer
    assert connection.read_answer() == b"END"


def test_a_slot_is_the_checksum_of_the_name() -> None:
    """The value that the specification of clusters gives as an example."""
    assert valkey.slot_of(b"123456789") == 0x31C3


@given(data=st.binary(max_size=200), cuts=cut_lists)
@example(data=b"", cuts=[])
@example(data=b"$-1\r\n", cuts=[1, 2])
@example(data=b"$5\r\nhello\r", cuts=[3])
@example(data=b":999999999999999999999999\r\n", cuts=[])
@example(data=b"$999999999999\r\n", cuts=[])
@example(data=b"\r\n\r\n", cuts=[1])
@settings(deadline=None)
def test_no_bytes_at_all_lead_to_anything_but_an_answer_or_a_failure(data: bytes, cuts: list[int]) -> None:
    for read in (
        ValkeyConnection.read_answer,
        lambda one: one.read_value([]),
        lambda one: one.query(b"SCAN"),
    ):
        connection = receiving(data, cuts)
        try:
            answer = read(connection)
        except StoreFailed:
            continue
        assert answer is None or isinstance(answer, bytes | int | Refusal | list)


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
        receiving(data).read_answer()


@pytest.mark.parametrize(
    "data",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"*-1\r\n",
        b"$-2\r\n",
        b"$\r\n",
        b"$99999999999\r\n",
        b"$1e3\r\n",
        b"$ 5\r\n",
        b"$+5\r\n",
    ],
)
def test_what_is_no_value_is_a_failure(data: bytes) -> None:
    connection = receiving(data)
    with pytest.raises(StoreFailed):
        connection.read_value([])
    assert connection.num_owed == 1_000_000  # so nobody uses it again


def test_a_value_that_no_block_and_no_manifest_can_have_is_not_received() -> None:
    connection = receiving(b"$%d\r\n" % ((1 << 31) + 1) + b"x" * 100)
    with pytest.raises(StoreFailed, match="something else than a value"):
        connection.read_value([])


def test_a_value_that_is_longer_than_it_said_is_a_failure() -> None:
    connection = receiving(b"$3\r\nabcd\r\n")
    with pytest.raises(StoreFailed):
        connection.read_value([memoryview(bytearray(3))])
    assert connection.num_owed == 1_000_000


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "OOM"),
        (b"-NOPERM User joe has no permissions\r\n", "NOPERM"),
        (b"-MOVED 3999 10.0.0.1:6381\r\n", "MOVED"),
        (b"-secret words\r\n", "ERR"),
        (b"-\r\n", "ERR"),
        (b"-ERR max number of clients reached\r\n", "MAXCLIENTS"),
        (b"-" + b"A" * 100 + b"\r\n", "ERR"),
        (b"-\xff\xfe x\r\n", "ERR"),
    ],
)
def test_of_a_refusal_only_its_kind_is_kept(text: bytes, word: str) -> None:
    assert receiving(text).read_answer() == Refusal(word)
    assert receiving(text).read_value([]) == Refusal(word)


# ----------------------------------------------------------------------------------------------- the deadline


@contextmanager
def stepping_clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> Iterator[list[float]]:
    """Every look at the clock takes `step_s`."""
    now = [0.0]

    def look() -> float:
        now[0] += step_s
        return now[0]

    with monkeypatch.context() as patch:
        patch.setattr(valkey, "time", SimpleNamespace(monotonic=look))
        yield now


def test_bytes_that_come_one_by_one_do_not_extend_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with stepping_clock(monkeypatch, 0.1) as now:
        connection = ValkeyConnection(NODE, Pieces(b"$1000\r\n" + b"x" * 1000 + b"\r\n", [1] * 2000), 1.0)  # type: ignore[arg-type]
        with pytest.raises(StoreFailed, match="in time"):
            connection.read_value([])
        assert now[0] < 1.2


def test_a_deadline_for_each_piece_alone_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ValkeyConnection, "_arm", lambda self: self._socket.settimeout(1.0))
    with stepping_clock(monkeypatch, 0.1):
        connection = ValkeyConnection(NODE, Pieces(b"$1000\r\n" + b"x" * 1000 + b"\r\n", [1] * 2000), 1.0)  # type: ignore[arg-type]
        assert connection.read_value([]) == 1000  # hours of it


def test_a_silent_peer_ends_a_read_and_a_full_one_a_write() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for exchange in (
            lambda connection: connection.read_answer(),
            lambda connection: connection.send([bytes(1 << 24)], 1),
        ):
            with pytest.raises(StoreFailed, match="in time"):
                exchange(ValkeyConnection(NODE, ours, time.monotonic() + 0.05))


# ---------------------------------------------------------------------------------------------------- sending


@given(
    parts=st.lists(
        st.binary(max_size=200) | st.integers(1, 3).map(lambda size: b"z" * (size << 17)), max_size=40
    )
)
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
    connection = ValkeyConnection(NODE, ours, NEVER)
    connection.send(parts, len(parts))
    connection.close()
    reader.join()
    theirs.close()
    assert received == b"".join(parts)
    assert connection.num_owed == len(parts)


def test_more_parts_than_the_system_takes_at_once_are_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ValkeyConnection(NODE, ours, NEVER).send([b"ab"] * 3000, 1)
        received = b""
        while len(received) < 6000:
            received += theirs.recv(8192)
        assert received == b"ab" * 3000


def test_an_encrypted_socket_gets_its_parts_one_by_one_under_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[bytes] = []

    class Encrypted(ssl.SSLSocket):
        def __init__(self) -> None: ...
        def settimeout(self, timeout_s: float | None) -> None: ...
        def send(self, data: memoryview, flags: int = 0) -> int:  # type: ignore[override]
            sent.append(bytes(data[:1]))
            return 1

        def __del__(self) -> None: ...

    ValkeyConnection(NODE, Encrypted.__new__(Encrypted), NEVER).send([b"ab", memoryview(b"c")], 1)
    assert sent == [b"a", b"b", b"c"]
    with stepping_clock(monkeypatch, 0.1), pytest.raises(StoreFailed, match="in time"):
        ValkeyConnection(NODE, Encrypted.__new__(Encrypted), 1.0).send([b"x" * 1000], 1)


def test_commands_are_framed() -> None:
    assert command(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
    before, behind = command_with_value((b"SET", b"k"), 5, (b"EX", b"9"))
    assert before + b"hello" + behind == command(b"SET", b"k", b"hello", b"EX", b"9")
    before, behind = command_with_value((b"SET", b"k"), 5)
    assert before + b"hello" + behind == command(b"SET", b"k", b"hello")


def test_a_connection_is_quiet_until_something_comes_or_it_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        connection = ValkeyConnection(NODE, ours, NEVER)
        assert connection.quiet
        theirs.send(b"+surprise\r\n")
        assert not connection.quiet
        connection.num_owed = 1
        connection.read_answer()
        assert connection.quiet
        theirs.close()
        assert not connection.quiet


def test_a_connection_that_owes_an_answer_or_has_more_than_was_asked_for_is_not_quiet() -> None:
    """What came behind the last answer lies in our own memory, where the system shows nothing of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = ValkeyConnection(NODE, ours, NEVER)
        connection.send([command(b"PING")], 1)
        assert not connection.quiet and not connection.readable
        theirs.send(b"+PONG\r\n+surprise\r\n")
        assert connection.read_answer() == b"PONG"
        assert (connection.num_owed, connection.readable) == (0, False) and not connection.quiet


@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
def test_a_peer_that_is_gone_is_a_failure_of_whoever_sends(whole: bool) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(StoreFailed) as raised:
        ValkeyConnection(NODE, ours, NEVER).send([b"PING"] if whole else [b"PI", b"NG"], 1)
    assert raised.value.__cause__ is None


def test_what_an_encrypted_peer_sends_behind_a_value_leaves_the_connection_not_quiet(tmp_path: Path) -> None:
    """It was decrypted together with the value, so that the system shows nothing of it; the next call would
    take it for its answer."""
    try:
        certificate, key = make_certificate(tmp_path)
    except ServerMissing as missing:
        pytest.skip(str(missing))
    theirs_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs_context.load_cert_chain(certificate, key)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with suppress(OSError), theirs_context.wrap_socket(theirs, server_side=True) as peer:
            for surprise in (b"", b"+surprise\r\n"):
                peer.recv(1000)
                peer.sendall(reply(b"v" * 9000) + surprise)
            peer.recv(1000)  # until the other side has ended

    thread = threading.Thread(target=serve)
    thread.start()
    with ssl.create_default_context(cafile=certificate).wrap_socket(
        ours, server_hostname="localhost"
    ) as encrypted:
        connection = ValkeyConnection(NODE, encrypted, NEVER)
        for quiet in (True, False):
            connection.ask_each(b"GET", [b"name"])
            assert connection.read_value([memoryview(bytearray(9000))]) == 9000
            assert connection.quiet is quiet
    thread.join(60.0)

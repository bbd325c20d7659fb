"""What a shared store may answer besides what was hoped for: each refusal, and each answer that is none, ends
as it should."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.remote import Node, open_store, valkey
from penstock.kv.tiers.remote.valkey import resolve
from penstock.kv.tiers.store import Outcome, Space, StoreUsage, Written
from tests.cpu.kv.valkey_rig import (
    BLOCK_BYTES,
    CALLS,
    DONE,
    PATIENT_S,
    keys_of,
    name_of,
    num_idle,
    opened,
    write,
)
from tests.support.servers import LOOPBACK

FINE = {
    b"PING": b"+PONG",
    b"EXISTS": b":1",
    b"TOUCH": b":0",
    b"SET": b"+OK",
    b"GET": b"$-1",
    b"SCAN": b"*2\r\n$1\r\n0\r\n*0",
}


def words_of(file: socket.SocketIO) -> list[bytes]:
    """One command; nothing where the other side is gone."""
    head = file.readline()
    words = []
    for _ in range(int(head[1:] or 0)):
        size = int(file.readline()[1:])
        words.append(file.read(size + 2)[:-2])
    return words


@contextlib.contextmanager
def answering(**answers: bytes | Callable[[list[bytes]], bytes]) -> Iterator[str]:
    """The URL of a server that answers each command with one line or a whole answer; one that has none here
    with OK."""
    said: dict[bytes, bytes | Callable[[list[bytes]], bytes]] = {
        **FINE,
        **{word.encode(): answer for word, answer in answers.items()},
    }
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        said[b"CLUSTER"] = (
            f"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n${len(LOOPBACK)}\r\n{LOOPBACK}\r\n:{port}".encode()
        )

        def serve(peer: socket.socket) -> None:
            with contextlib.suppress(OSError, ValueError), peer, peer.makefile("rb") as file:
                while words := words_of(file):  # type: ignore[arg-type]
                    answer = said.get(words[0], b"+OK")
                    peer.sendall((answer if isinstance(answer, bytes) else answer(words)) + b"\r\n")

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"valkey://{LOOPBACK}:{port}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def test_a_server_that_answers_as_it_should_is_used_over_one_connection() -> None:
    with answering() as url, contextlib.closing(opened(url)) as store:
        for call in CALLS.values():
            call(store)
        assert num_idle(store) == 1


ODD: dict[str, tuple[str, dict[str, bytes], str]] = {
    "it loads": ("probe", {"PING": b"-LOADING Valkey is loading"}, "refuses: LOADING"),
    "it refuses to look": ("find", {"EXISTS": b"-NOPERM secret"}, "refuses: NOPERM"),
    "a name is elsewhere, and it is no cluster": ("find", {"EXISTS": b"-MOVED 1 h:1"}, "add .cluster=1"),
    "it refuses to read": ("read", {"GET": b"-BUSY secret"}, "refuses: BUSY"),
    "it refuses to mark": ("write", {"TOUCH": b"-READONLY secret"}, "refuses: READONLY"),
    "it refuses to write": ("write", {"SET": b"-READONLY secret"}, "refuses: READONLY"),
    "a number for a write": ("write", {"SET": b":1"}, "answered SET with something else"),
    "another word for a write": ("write", {"SET": b"+QUEUED"}, "answered SET with something else"),
    "a value for a write": ("write", {"SET": b"$-1"}, "something else than a line"),
    "a word for names": ("reset", {"SCAN": b"+OK"}, "answered SCAN with something else"),
    "one page too many": (
        "reset",
        {"SCAN": b"*3\r\n$1\r\n0\r\n*0\r\n*0"},
        "answered SCAN with something else",
    ),
    "a cursor that is none": ("reset", {"SCAN": b"*2\r\n*0\r\n*0"}, "answered SCAN with something else"),
    "names that are none": (
        "reset",
        {"SCAN": b"*2\r\n$1\r\n0\r\n$1\r\nx"},
        "answered SCAN with something else",
    ),
    "a name that it does not let go": (
        "reset",
        {"SCAN": b"*2\r\n$1\r\n0\r\n*1\r\n$1\r\nx", "UNLINK": b"-NOPERM x"},
        "refuses: NOPERM",
    ),
    "it refuses to list names": ("reset", {"SCAN": b"-NOPERM secret"}, "refuses: NOPERM"),
    "names that are numbers": (
        "reset",
        {"SCAN": b"*2\r\n$1\r\n0\r\n*1\r\n:7"},
        "answered SCAN with something else",
    ),
    "names in too many lists": ("reset", {"SCAN": b"*1\r\n" * 6 + b":1"}, "something larger than a name"),
    "a name that is too long": (
        "reset",
        {"SCAN": b"*2\r\n$1\r\n0\r\n*1\r\n$99999999"},
        "something larger than a name",
    ),
    "a name of another length": (
        "reset",
        {"SCAN": b"*2\r\n$1\r\n0\r\n*1\r\n$1\r\nsecret"},
        "longer than it said",
    ),
    "names of another kind": ("reset", {"SCAN": b"*2\r\n%1\r\nsecret"}, "something else than a line"),
    "a refusal that spells something": ("probe", {"PING": b"-secret text"}, "refuses: ERR"),
}


@pytest.mark.parametrize(("call", "answers", "told"), ODD.values(), ids=ODD)
def test_an_answer_that_ends_a_call_is_told_in_one_word_and_its_connection_is_not_used_again(
    call: str, answers: dict[str, bytes], told: str
) -> None:
    with answering(**answers) as url, contextlib.closing(opened(url)) as store:
        with pytest.raises(StoreFailed, match=told) as raised:
            CALLS[call](store)
        assert "secret" not in str(raised.value)
        assert num_idle(store) == 0


GREETINGS: dict[str, tuple[str, dict[str, bytes], str]] = {
    "a wrong password": (":pw@", {"AUTH": b"-WRONGPASS secret"}, "refuses the password, or wants one"),
    "a password that nobody asked for": (
        ":pw@",
        {"AUTH": b"-ERR AUTH <password> called without secret"},
        "refuses the password",
    ),
    "a user that an old server does not know": (
        "joe:pw@",
        {"AUTH": b"-ERR wrong number of arguments"},
        "refuses the password",
    ),
    "too many clients": (
        ":pw@",
        {"AUTH": b"-ERR max number of clients reached secret"},
        "refuses: MAXCLIENTS",
    ),
    "another answer to a password": (":pw@", {"AUTH": b":7"}, "something else than OK"),
    "no such database": ("", {"SELECT": b"-ERR secret"}, "refuses: ERR"),
    "no password for a database": ("", {"SELECT": b"-NOAUTH secret"}, "refuses the password, or wants one"),
}


@pytest.mark.parametrize(("credentials", "answers", "told"), GREETINGS.values(), ids=GREETINGS)
def test_a_server_that_does_not_let_us_in_is_told_without_its_words(
    credentials: str, answers: dict[str, bytes], told: str
) -> None:
    with (
        answering(**answers) as url,
        contextlib.closing(opened(url.replace("://", f"://{credentials}") + "/5")) as store,
    ):
        with pytest.raises(StoreFailed, match=told) as raised:
            store.probe()
        assert not {"secret", "joe", "pw"} & set(str(raised.value).split())
        assert num_idle(store) == 0


def test_a_server_from_before_there_were_users_gets_the_password_alone() -> None:
    asked: list[list[bytes]] = []

    def answer(words: list[bytes]) -> bytes:
        asked.append(words)
        return b"-ERR wrong number of arguments for 'auth' command" if len(words) == 3 else b"+OK"

    with answering(AUTH=answer) as url, contextlib.closing(opened(url.replace("://", "://joe:pw@"))) as store:
        store.probe()
    assert asked == [[b"AUTH", b"joe", b"pw"], [b"AUTH", b"pw"]]


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
def test_in_a_cluster_a_name_that_has_moved_costs_its_block_and_the_map(word: bytes) -> None:
    moved = b"-%b 1 h:1" % word
    with (
        answering(SET=moved, GET=moved, EXISTS=moved) as url,
        contextlib.closing(opened(f"{url}?cluster=1")) as store,
    ):
        for call, outcome in (
            (lambda: write(store, keys_of(2)), [Outcome.FAILED] * 2),
            (lambda: CALLS["read"](store), [Outcome.MISSING] * 3),
            (lambda: store.find(keys_of(2)), 0),
        ):
            assert call() == outcome
            assert store._connections._slots is None, "who has what is asked anew"
            assert num_idle(store) == 1, "the connection is in order"


@pytest.mark.parametrize(("answer", "outcome"), [(b"+OK", DONE), (b"-OOM no room", Outcome.FULL)])
def test_a_full_server_is_full_and_not_broken(answer: bytes, outcome: Outcome) -> None:
    with answering(SET=answer) as url, contextlib.closing(opened(url)) as store:
        assert write(store, keys_of(3)) == [outcome] * 3
        assert num_idle(store) == 1


def test_a_value_under_our_name_that_is_no_block_is_removed() -> None:
    for answer in (b"-WRONGTYPE a list", b"$3\r\nabc"):
        with answering(GET=answer, UNLINK=b":1") as url, contextlib.closing(opened(url)) as store:
            assert CALLS["read"](store) == [Outcome.CORRUPT] * 3
            assert num_idle(store) == 1


# ------------------------------------------------------------------------------------------------- on the way


def test_a_name_is_resolved_and_one_without_an_address_is_told() -> None:
    places = resolve(Node("localhost", 7), PATIENT_S)
    assert places and all(kind == socket.SOCK_STREAM and address[1] == 7 for _, kind, _, _, address in places)
    with pytest.raises(StoreFailed, match="its name has no address"):
        resolve(Node("a" * 64 + ".invalid", 7), PATIENT_S)


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real: Callable[..., object] = socket.getaddrinfo

    def slow(host: str, port: int, **options: int) -> object:
        if not options["flags"]:
            gate.wait()
        return real(host, port, **options)

    monkeypatch.setattr(valkey.socket, "getaddrinfo", slow)
    with pytest.raises(StoreFailed, match="no answer in time"):
        resolve(Node("kv.invalid", 7), 0.0)
    gate.set()


def test_where_no_time_is_left_nobody_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey.socket, "socket", None)
    with pytest.raises(StoreFailed, match="cannot be reached"):
        valkey.dial(Node(LOOPBACK, 7), None, time.monotonic() - 1.0)


def test_without_its_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "penstock.kv.tiers.remote.s3", raising=False)
    with pytest.raises(ConfigError, match=r"s3:// needs its client library.*penstock\[remote\]"):
        open_store("s3://bucket", Space(b"s" * 32, BLOCK_BYTES), 1.0)


def test_nobody_here_counts_what_is_in_a_shared_store() -> None:
    with contextlib.closing(opened(f"valkey://{LOOPBACK}:1")) as store:
        assert store.usage() == StoreUsage(0) and store.usage().as_dict() == {}
        assert (store.name, store.local) == ("remote", False)
        store.persist()  # asks nobody


def test_each_block_has_the_answer_to_its_own_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come behind commands that were sent ahead of them."""
    keys = keys_of(7)
    full = {name_of(keys[place]).encode() for place in (1, 2, 5)}
    monkeypatch.setattr(valkey.ValkeyConnection, "at_once", lambda self, value_bytes: 2)
    with (
        answering(SET=lambda words: b"-OOM" if words[1] in full else b"+OK") as url,
        contextlib.closing(opened(url)) as store,
    ):
        assert write(store, keys) == [Outcome.FULL if place in (1, 2, 5) else DONE for place in range(7)]


# -------------------------------------------------------------------------------------------------- manifests


@pytest.mark.parametrize(
    ("answer", "written"), [(b"+OK", Written.DONE), (b"-OOM no room", Written.FULL), (b"$-1", Written.TAKEN)]
)
def test_a_manifest_counts_as_written_where_the_server_has_it(answer: bytes, written: Written) -> None:
    with answering(SET=answer) as url, contextlib.closing(opened(f"{url}?cluster=1")) as store:
        assert store.write_manifest("aa-1", b"text", None) is written


MANIFEST_CALLS: list[tuple[str, bytes, Callable[[valkey.ValkeyStore], object], object]] = [
    ("GET", b"$4\r\ntext", lambda store: store.read_manifest("aa-1"), b"text"),
    ("SET", b"+OK", lambda store: store.write_manifest("aa-1", b"text", None), Written.DONE),
    ("UNLINK", b":1", lambda store: store.remove_manifest("aa-1"), None),
]


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
@pytest.mark.parametrize(
    ("command", "answer", "call", "expected"), MANIFEST_CALLS, ids=[call[0] for call in MANIFEST_CALLS]
)
def test_a_manifest_that_has_moved_is_asked_for_where_it_is(
    command: str, answer: bytes, call: Callable[[valkey.ValkeyStore], object], expected: object, word: bytes
) -> None:
    """Of a block a miss would do. A snapshot that is not found, or not removed, is another answer than the
    right one."""
    asked: list[bytes] = []

    def moved_at_first(words: list[bytes]) -> bytes:
        asked.append(words[1])
        return b"-%b 1 h:1" % word if len(asked) == 1 else answer

    said = {"STRLEN": b":4", command: moved_at_first}
    with answering(**said) as url, contextlib.closing(opened(f"{url}?cluster=1")) as store:
        assert call(store) == expected
        assert len(asked) == 2 and num_idle(store) == 1


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize(
    ("command", "answer", "call", "expected"), MANIFEST_CALLS, ids=[call[0] for call in MANIFEST_CALLS]
)
def test_where_no_node_has_the_name_of_a_manifest_nobody_is_told_that_it_is_gone(
    command: str,
    answer: bytes,
    call: Callable[[valkey.ValkeyStore], object],
    expected: object,
    hole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if hole:
        monkeypatch.setattr(valkey, "slot_map", lambda answer, asked: [None] * 16384)
    said = {"STRLEN": b":4", command: b"-MOVED 1 h:1"}
    with (
        answering(**said) as url,
        contextlib.closing(opened(f"{url}?cluster=1")) as store,
        pytest.raises(StoreFailed, match="no node"),
    ):
        call(store)


def test_a_hole_in_the_map_is_asked_for_again_for_a_manifest() -> None:
    with (
        answering(STRLEN=b":4", GET=b"$4\r\ntext") as url,
        contextlib.closing(opened(f"{url}?cluster=1")) as store,
    ):
        store._connections._slots = [None] * 16384
        assert store.read_manifest("aa-1") == b"text"


def test_a_manifest_for_less_than_a_second_is_kept_for_one() -> None:
    """A server refuses a time to live of nothing."""
    asked: list[list[bytes]] = []

    def answer(words: list[bytes]) -> bytes:
        asked.append(words)
        return b"+OK"

    with answering(SET=answer) as url, contextlib.closing(opened(url)) as store:
        assert [
            store.write_manifest(id, b"text", left_s) for id, left_s in (("aa-1", 0.25), ("aa-2", -3.0))
        ] == [Written.DONE] * 2
    assert [words[3:] for words in asked] == [[b"NX", b"EX", b"1"]] * 2


def test_a_manifest_that_is_replaced_while_it_is_read_is_not_served_in_part() -> None:
    for length in (b":3", b":7"):
        with answering(STRLEN=length, GET=b"$5\r\nother") as url, contextlib.closing(opened(url)) as store:
            assert store.read_manifest("aa-1") is None


@pytest.mark.parametrize(
    ("command", "call"),
    [
        ("STRLEN", lambda store: store.read_manifest("aa-1")),
        ("GET", lambda store: store.read_manifest("aa-1")),
        ("SET", lambda store: store.write_manifest("aa-1", b"text", None)),
        ("UNLINK", lambda store: store.remove_manifest("aa-1")),
        ("SCAN", lambda store: store.manifests()),
    ],
)
def test_a_refusal_ends_what_is_said_about_manifests(
    command: str, call: Callable[[valkey.ValkeyStore], object]
) -> None:
    with (
        answering(**{"STRLEN": b":0", "GET": b"$0\r\n", command: b"-NOPERM secret"}) as url,
        contextlib.closing(opened(url)) as store,
    ):
        with pytest.raises(StoreFailed, match="refuses: NOPERM"):
            call(store)
        assert num_idle(store) == 0

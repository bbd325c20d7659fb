"""A `BlockStore` in Valkey or Redis, a single server or a cluster. Owns its connections, what is said over
them and the deadline of each call.

One block is one value, its header before its bytes, under `penstock:FORMAT:SPACE:KEY`; a manifest is one
under `penstock-snapshot:FORMAT:SPACE:ID`, where a reset of blocks does not find it. The server forgets blocks
as its own memory policy or their time to live says: that is a miss like any other.

The client is our own: a value is received where it shall lie, sent from where it lies, and commands go out
ahead of the answers to those before them. Beside valkey-py it reads and checks blocks at 4.2 times the rate,
and checksums and writes them at 0.9 (docs/figures.md).
"""

from __future__ import annotations

import binascii
import contextlib
import itertools
import math
import os
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, overload

from penstock.errors import ConfigError, InvariantBroken, StoreFailed
from penstock.kv.tiers.remote import FLAG, Node, SharedStore, StoreUrl, check_hosts, is_block, need, parse_url
from penstock.kv.tiers.store import FORMAT, HEADER_BYTES, BlockStore, Outcome, Space, Written, pack

PASSWORD_VARIABLE = "PENSTOCK_REMOTE_PASSWORD"
_FORM = (
    "valkey://[user:password@]host[:port][,host:port...][/db][?option=value&...], or valkeys:// for TLS; "
    "in user and password write / ? # and @ as %2F %3F %23 and %40"
)
_TLS_OPTIONS = ("ca", "cert", "key", "verify")
_PORT = 6379
_NUM_SLOTS = 16384  # of a cluster
_FIND_KEYS = 512  # questions in flight
_SCAN_KEYS = b"1000"
_MOST_MOVES = 3  # nodes asked for one name, in turn
# Values in flight from the same machine: more would only fall out of caches.
_NEAR_BYTES = 1 << 20
_FAR_BYTES = 4 << 20  # over a network, so that the next value is in flight while one is read
# the longest accepted line; also the largest part of a value that is copied once more
_LINE_BYTES = 4096
_MAX_VALUE_BYTES = 1 << 31
_MAX_DEPTH = 4  # of lists in lists: a map of slots has three
_SCRATCH_BYTES = 1 << 18
_MAX_PARTS = 512  # the system takes about a thousand at once
_END = b"\r\n"
_NOTHING = b"$-1"  # an answer without a value

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
_Places = list[tuple[int, int, int, str, tuple[object, ...]]]


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily. Raises ConfigError for what can never work."""
    address = parse_address(url, os.environ)
    check_hosts([node.host for node in address.nodes])
    return ValkeyStore(address, space, timeout_s)


# ---------------------------------------------------------------------------------------------------- address


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """Where the store is and how to talk to it."""

    nodes: tuple[Node, ...]  # of a cluster: the first nodes to ask for the others
    db: int = 0
    cluster: bool = False
    ttl_s: int | None = None  # after which the server forgets a block; None: its own policy decides
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def parse_address(url: str, environment: Mapping[str, str]) -> ValkeyAddress:
    """Raises ConfigError. A password in the URL goes before the one in `environment`."""
    parts = parse_url(url, _FORM, ("cluster", "ttl", *_TLS_OPTIONS))
    options = parts.options
    tls = parts.scheme in ("valkeys", "rediss")
    need(
        tls or not set(options) & set(_TLS_OPTIONS),
        f"has options for TLS ({', '.join(_TLS_OPTIONS)}) without it: write {parts.scheme}s://",
    )
    user, password = _credentials(parts, environment)
    nodes = parts.nodes(_PORT)
    need(options.get("cluster", "0") in ("0", "1"), "has a cluster= that is neither 0 nor 1")
    cluster = options.get("cluster") == "1"
    need(
        cluster or len(nodes) == 1,
        "names several hosts, which makes sense for a cluster only: add ?cluster=1",
    )
    db = _whole("the database", parts.path or "0", 0)
    need(not (cluster and db), "names a database, and a cluster has only number 0")
    ttl_s = _whole("ttl", options["ttl"], 1) if "ttl" in options else None
    return ValkeyAddress(nodes, db, cluster, ttl_s, user, password, _tls(options) if tls else None)


def _credentials(parts: StoreUrl, environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    secret = parts.password or environment.get(PASSWORD_VARIABLE) or None
    need(
        not parts.user or secret is not None,
        f"names a user without a password: add it, or set {PASSWORD_VARIABLE}",
    )
    try:
        f"{parts.user}{secret}".encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{FLAG} has a user or password that is not UTF-8") from None
    return parts.user or None, secret


def _whole(what: str, text: str, least: int) -> int:
    right = text.isascii() and text.isdigit() and len(text) <= 10 and int(text) >= least
    need(right, f"must have a whole number from {least} on for {what}")
    return int(text)


def _tls(options: Mapping[str, str]) -> ssl.SSLContext:
    """Server and name are verified unless that was switched off explicitly; `ca` replaces the system's
    authorities."""
    need(options.get("verify", "none") == "none", "has a verify= that is not none: leave it out to verify")
    need("cert" in options or "key" not in options, "has a key= without a cert=")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            # otherwise an encrypted key prompts on the terminal
            context.load_cert_chain(options["cert"], options.get("key"), password="")
    except OSError as error:  # what ssl raises, too
        raise ConfigError(
            f"{FLAG}: a file for TLS cannot be used: {error.strerror or type(error).__name__}"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if "verify" in options:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


# ------------------------------------------------------------------------------------------------------ store


class ValkeyStore(SharedStore):
    """Every call has its own connections while it runs, and ends within `timeout_s`, except `reset`, which
    has that for each round trip.

    Answers come in the order of their commands. If an answer ends a call, its connections still expect
    answers, so they are closed.
    """

    def __init__(self, address: ValkeyAddress, space: Space, timeout_s: float) -> None:
        super().__init__(space, timeout_s)
        self._address = address
        self._connections = ValkeyConnections(address)
        self._ttl = () if address.ttl_s is None else (b"%d" % address.ttl_s,)
        self._prefix = f"penstock:{FORMAT}:{space.digest.hex()}:".encode()
        self._manifest_prefix = f"penstock-snapshot:{FORMAT}:{space.digest.hex()}:".encode()

    def __repr__(self) -> str:
        kind = "cluster " if self._address.cluster else ""
        return (
            f"<ValkeyStore "
            f"{kind}{', '.join(map(str, self._address.nodes))}{' with TLS' if self._address.tls else ''}>"
        )

    def find(self, keys: Sequence[bytes]) -> int:
        deadline = self._until()
        for first in range(0, len(keys), _FIND_KEYS):
            there = self._ask_each(b"EXISTS", self._names(keys[first : first + _FIND_KEYS]), (), deadline)
            if not all(there):
                return first + there.index(False)
        return len(keys)

    def _ask_each(
        self, word: bytes, names: Sequence[bytes], after: Sequence[bytes], deadline: float
    ) -> list[bool]:
        """Ask a 0-or-1 question about each name. A name that has moved to another node counts as 0."""
        answers = [False] * len(names)
        with self._connections.holding(names, deadline) as holders:
            for connection, places in holders:
                connection.ask_each(word, [names[place] for place in places], *after)
            for connection, places in holders:
                for place in places:
                    answer = connection.read_answer()
                    if isinstance(answer, Refusal):
                        self._connections.moved_or_fail(connection, answer)
                    answers[place] = answer == 1
        return answers

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        _need_whole(into, self._value_bytes - HEADER_BYTES)
        names = self._names(keys)
        outcomes = [Outcome.MISSING] * len(keys)
        header = memoryview(bytearray(HEADER_BYTES))
        with self._connections.holding(names, self._until()) as holders:
            for connection, places in holders:
                connection.ask_each(
                    b"GET", [names[place] for place in places[: connection.at_once(self._value_bytes)]]
                )
            for connection, places in holders:
                ahead = connection.at_once(self._value_bytes)
                for index, place in enumerate(places):
                    received = connection.read_value([header, into[place]])
                    connection.ask_each(
                        b"GET", [names[later] for later in places[index + ahead : index + ahead + 1]]
                    )
                    if received == self._value_bytes and is_block(
                        header, keys[place], self._digest, into[place]
                    ):
                        outcomes[place] = Outcome.DONE
                    elif isinstance(received, int) or received == _WRONG_TYPE:
                        outcomes[place] = Outcome.CORRUPT
                    elif received is not None:
                        self._connections.moved_or_fail(connection, received)
                connection.unlink([names[place] for place in places if outcomes[place] is Outcome.CORRUPT])
        return outcomes

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        """Does not send existing values again; marks them as used, which restarts their time to live."""
        _need_whole(blocks, self._value_bytes - HEADER_BYTES)
        deadline = self._until()
        names = self._names(keys)
        there = self._ask_each(b"EXPIRE" if self._ttl else b"TOUCH", names, self._ttl, deadline)
        left = [place for place, known in enumerate(there) if not known]

        # just before it is sent, so that both passes hit the cache
        def value(place: int) -> Sequence[Buffer]:
            return pack(keys[left[place]], self._digest, blocks[left[place]]), blocks[left[place]]

        written = self._set_each(
            [names[place] for place in left], value, self._value_bytes, self._ttl, deadline
        )
        outcomes = [Outcome.DONE] * len(keys)
        for place, outcome in zip(left, written, strict=True):
            outcomes[place] = outcome
        return outcomes

    def _set_each(
        self,
        names: Sequence[bytes],
        value: Callable[[int], Sequence[Buffer]],
        value_bytes: int,
        ttl: Sequence[bytes],
        deadline: float,
    ) -> list[Outcome]:
        """The parts of each name's value, by index."""
        expiry = (b"EX", *ttl) if ttl else ()
        outcomes = [Outcome.FAILED] * len(names)
        with self._connections.holding(names, deadline) as holders:
            for connection, places in holders:
                ahead = connection.at_once(value_bytes)
                for index, place in enumerate(places):
                    if index >= ahead:
                        outcomes[places[index - ahead]] = self._read_written(connection)
                    before, behind = command_with_value((b"SET", names[place]), value_bytes, expiry)
                    connection.send([before, *value(place), behind], 1)
            for connection, places in holders:
                for place in places[-connection.num_owed :]:
                    outcomes[place] = self._read_written(connection)
        return outcomes

    def _read_written(self, connection: ValkeyConnection) -> Outcome:
        answer = connection.read_answer()
        if answer == b"OK":
            return Outcome.DONE
        if not isinstance(answer, Refusal):
            raise StoreFailed("the shared store answered SET with something else")
        if answer.word == "OOM":
            return Outcome.FULL
        self._connections.moved_or_fail(connection, answer)
        return Outcome.FAILED

    def probe(self) -> None:
        """Every node must answer: a missing one would lose its share of the blocks."""
        deadline = self._until()
        self._connections.forget()
        for node in self._connections.nodes(deadline):
            with self._connections.borrowed(node, deadline) as connection:
                if isinstance(answer := connection.ask(b"PING"), Refusal):
                    self._connections.moved_or_fail(connection, answer)

    def reset(self) -> int:
        """Each round trip has `timeout_s`; their sum is not limited."""
        num_gone = 0
        for node in self._connections.nodes(self._until()):
            with self._connections.borrowed(node, self._until()) as connection:
                num_gone += self._clear(connection)
        return num_gone

    def _clear(self, connection: ValkeyConnection) -> int:
        num_gone = 0
        for names in self._scan(connection, self._prefix):
            answers = connection.unlink(names)
            for refusal in (answer for answer in answers if isinstance(answer, Refusal)):
                self._connections.moved_or_fail(connection, refusal)
            num_gone += answers.count(1)
        return num_gone

    def _scan(self, connection: ValkeyConnection, start: bytes) -> Iterator[list[bytes]]:
        """Names of one node that begin with `start`, a few at a time."""
        cursor = b""
        while cursor != b"0":
            connection.deadline = self._until()
            answer = connection.query(b"SCAN", cursor or b"0", b"MATCH", start + b"*", b"COUNT", _SCAN_KEYS)
            match answer:
                case [bytes(cursor), list(names)] if all(isinstance(name, bytes) for name in names):
                    yield names
                case _:
                    raise StoreFailed("the shared store answered SCAN with something else")

    # ---------------------------------------------------------------------------------------------- manifests

    def manifests(self, start: str = "") -> list[str]:
        found: set[str] = set()
        for node in self._connections.nodes(self._until()):
            with self._connections.borrowed(node, self._until()) as connection:
                for names in self._scan(connection, self._manifest_prefix + start.encode()):
                    found.update(
                        name.removeprefix(self._manifest_prefix).decode("ascii", "replace") for name in names
                    )
        return sorted(found)

    def read_manifest(self, id: str) -> bytes | None:
        return self._of_manifest(id, _read_whole)

    def write_manifest(
        self, id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
    ) -> Written:
        expiry = () if expires_in_s is None else (b"EX", b"%d" % max(1, math.ceil(expires_in_s)))

        def write(connection: ValkeyConnection, name: bytes) -> Written | Refusal:
            if instead_of is not None:
                return _change_manifest(connection, name, instead_of, _set_command(name, data, expiry))
            connection.send(_set_command(name, data, (b"NX", *expiry)), 1)
            answer = connection.read_answer(or_nothing=True)
            if isinstance(answer, Refusal):
                return Written.FULL if answer.word == "OOM" else answer
            if answer not in (b"OK", None):
                raise StoreFailed("the shared store answered SET with something else")
            return Written.TAKEN if answer is None else Written.DONE

        return self._of_manifest(id, write)

    def remove_manifest(self, id: str, only: bytes | None = None) -> None:
        def remove(connection: ValkeyConnection, name: bytes) -> object:
            if only is None:
                return connection.ask(b"UNLINK", name)
            return _change_manifest(connection, name, only, [command(b"UNLINK", name)])

        self._of_manifest(id, remove)

    def _of_manifest(self, id: str, ask: Callable[[ValkeyConnection, bytes], T | Refusal]) -> T:
        """The answer of the node that has this name. If the name has moved, the new node is asked: for a
        block a miss would do, but not for a manifest. Raises if the nodes do not agree."""
        name, deadline = self._manifest_prefix + id.encode(), self._until()
        for _ in range(_MOST_MOVES):
            with self._connections.holding([name], deadline) as holders:
                for connection, _ in holders:
                    answer = ask(connection, name)
                    if not isinstance(answer, Refusal):
                        return answer
                    self._connections.moved_or_fail(connection, answer)
            self._connections.forget()
        raise StoreFailed("no node of the shared store has the name of this snapshot")

    def close(self) -> None:
        self._connections.close()

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + key.hex().encode() for key in keys]


def _read_whole(connection: ValkeyConnection, name: bytes) -> bytes | Refusal | None:
    """A value of any length; None: there is none, or it was replaced meanwhile."""
    size = connection.ask(b"STRLEN", name)
    data = bytearray(size if isinstance(size, int) else 0)
    connection.ask_each(b"GET", [name])
    received = connection.read_value([memoryview(data)])
    for answer in (size, received):
        if isinstance(answer, Refusal):
            return answer
    return bytes(data) if isinstance(received, int) and received == len(data) else None


def _set_command(name: bytes, data: bytes, after: Sequence[bytes]) -> list[bytes]:
    before, behind = command_with_value((b"SET", name), len(data), after)
    return [before, data, behind]


def _change_manifest(
    connection: ValkeyConnection, name: bytes, expected: bytes, change: Sequence[bytes]
) -> Written | Refusal:
    """One command, executed only if the name has the `expected` value at that moment."""
    if isinstance(watched := connection.ask(b"WATCH", name), Refusal):
        return watched
    found = _read_whole(connection, name)
    if isinstance(found, Refusal) or found != expected:
        connection.ask(b"UNWATCH")
        return found if isinstance(found, Refusal) else Written.TAKEN
    connection.ask(b"MULTI")
    connection.send(change, 1)
    if isinstance(queued := connection.read_answer(), Refusal):
        connection.ask(b"DISCARD")
        return Written.FULL if queued.word == "OOM" else queued
    return Written.TAKEN if connection.query(b"EXEC") is None else Written.DONE


def _need_whole(blocks: Sequence[memoryview], block_bytes: int) -> None:
    """Bytes beyond the announced length would be read as commands."""
    if any(len(view) != block_bytes or view.nbytes != block_bytes for view in blocks):
        raise InvariantBroken(f"a block is a view of {block_bytes} bytes")


# ------------------------------------------------------------------------------------------------ connections


class ValkeyConnections:
    """Idle connections, and the map of names to nodes of a cluster. For several threads; a connection belongs
    to one of them at a time."""

    def __init__(self, address: ValkeyAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: dict[Node, list[ValkeyConnection]] = {}
        self._slots: list[Node | None] | None = None
        self._known: tuple[Node, ...] = ()  # nodes of the last map
        self._closed = False

    @contextlib.contextmanager
    def borrowed(self, node: Node, deadline: float) -> Iterator[ValkeyConnection]:
        """A new or idle connection. After a failure it is closed, and so are the idle ones to the same
        node."""
        connection = self._take(node, deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            self.forget(node)
            raise
        if connection.num_owed or not self._put_back(connection):
            connection.close()

    @contextlib.contextmanager
    def holding(
        self, names: Sequence[bytes], deadline: float
    ) -> Iterator[list[tuple[ValkeyConnection, list[int]]]]:
        """A connection to each node that has some of `names`, with their indices. Names that no node has are
        left out."""
        places: dict[Node | None, list[int]] = {}
        slots = self._map(deadline) if self._address.cluster else None
        for place, name in enumerate(names):
            places.setdefault(self._address.nodes[0] if slots is None else slots[slot_of(name)], []).append(
                place
            )
        with contextlib.ExitStack() as stack:
            yield [
                (stack.enter_context(self.borrowed(node, deadline)), some)
                for node, some in places.items()
                if node is not None
            ]

    def _take(self, node: Node, deadline: float) -> ValkeyConnection:
        while (idle := self._pop(node)) is not None:
            if idle.quiet:
                idle.deadline = deadline
                return idle
            idle.close()
        try:
            return connect(node, self._address, deadline)
        except BaseException:
            self.forget(node)
            raise

    def _pop(self, node: Node) -> ValkeyConnection | None:
        with self._lock:
            if self._closed:
                raise StoreFailed("the shared store was closed")
            waiting = self._idle.get(node)
            return waiting.pop() if waiting else None

    def _put_back(self, connection: ValkeyConnection) -> bool:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(connection.node, []).append(connection)
            return not self._closed

    def forget(self, node: Node | None = None) -> None:
        """Forget idle connections to `node` and the map of slots: other nodes may have taken over."""
        with self._lock:
            self._slots = None
            gone = self._idle.pop(node, []) if node is not None else []
        for connection in gone:
            connection.close()

    def moved_or_fail(self, connection: ValkeyConnection, refusal: Refusal) -> None:
        """Returns if a name has moved to another node; the next call asks for the map again. Raises
        otherwise."""
        moved = refusal.word in ("MOVED", "ASK")
        if moved and self._address.cluster:
            self.forget()
            return
        raise connection.refused(refusal, ": it is a cluster, add ?cluster=1" if moved else "")

    def nodes(self, deadline: float) -> list[Node]:
        """Every node that keys are written to."""
        if not self._address.cluster:
            return [self._address.nodes[0]]
        self._map(deadline)
        return list(self._known)

    def _map(self, deadline: float) -> list[Node | None]:
        """Which node has which slot. Asks nodes in turn until one knows; each has its share of the time."""
        if (known := self._slots) is not None:
            return known
        seeds = list(dict.fromkeys((*self._known, *self._address.nodes)))
        for place, seed in enumerate(seeds):
            share_s = (deadline - time.monotonic()) / (len(seeds) - place)
            try:
                with self.borrowed(seed, time.monotonic() + share_s) as connection:
                    slots = slot_map(connection.query(b"CLUSTER", b"SLOTS"), seed)
            except StoreFailed:
                if place + 1 == len(seeds):
                    raise
                continue
            with self._lock:
                self._slots = slots
                self._known = tuple(sorted({node for node in slots if node is not None}))
            return slots
        raise StoreFailed("no node of the shared store knows the others")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            gone = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
        for connection in gone:
            connection.close()


def slot_of(name: bytes) -> int:
    """For a name without braces, such as ours."""
    return binascii.crc_hqx(name, 0) % _NUM_SLOTS


def slot_map(answer: object, asked: Node) -> list[Node | None]:
    """A node that does not know its own address is reachable at the one it was asked at."""
    slots: list[Node | None] = [None] * _NUM_SLOTS
    try:
        for first, last, (host, port, *_), *_ in answer:  # type: ignore[attr-defined]
            owner = Node(host.decode() if host else asked.host, port)
            if not (0 <= first <= last < len(slots) and 0 < port < 65536):
                raise ValueError
            slots[first : last + 1] = [owner] * (last + 1 - first)
    except (TypeError, ValueError, AttributeError):
        raise StoreFailed("the shared store sent a map of its slots that is none") from None
    return slots


# --------------------------------------------------------------------------------------------- one connection


class Refusal(NamedTuple):
    """An error answer of the server. Only the first word of its text is kept, which names its kind."""

    word: str


_WRONG_TYPE = Refusal("WRONGTYPE")  # another program's list or set under our name


class ValkeyConnection:
    """A socket with the subset of RESP2 that moving blocks needs. No call waits beyond the deadline, even if
    data comes in many pieces. Anything unexpected raises `StoreFailed`, and a connection that still expects
    answers is never used again."""

    def __init__(self, node: Node, connected: socket.socket, deadline: float) -> None:
        self.node = node
        self.deadline = deadline  # on the monotonic clock
        self.near = False  # the server is on this machine
        self.num_owed = 0  # answers that are still to come
        self._socket = connected
        self._buffer = bytearray(_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # the part that was received and not yet read

    @property
    def quiet(self) -> bool:
        """No answer is expected and no data arrives. Unrequested data, or a closed peer, makes it useless."""
        return not self.num_owed and self._start == self._end and not self.readable

    @property
    def readable(self) -> bool:
        """Data has arrived, or the peer is gone."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True  # already decrypted: the system no longer reports it
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def at_once(self, value_bytes: int) -> int:
        """How many values of that size to have in flight."""
        return max(1, _NEAR_BYTES // value_bytes) if self.near else max(2, _FAR_BYTES // value_bytes)

    def close(self) -> None:
        self._socket.close()

    def refused(self, refusal: Refusal, hint: str = "") -> StoreFailed:
        what = "refuses the password, or wants one" if refusal.word in ("NOAUTH", "WRONGPASS") else "refuses"
        return StoreFailed(f"the shared store at {self.node} {what}: {refusal.word}{hint}")

    # -------------------------------------------------------------------------------------------- round trips

    def ask(self, *words: bytes) -> bytes | int | Refusal:
        """One command whose answer is one line."""
        self.send([command(*words)], 1)
        return self.read_answer()

    def ask_each(self, word: bytes, names: Sequence[bytes], *after: bytes) -> None:
        """The same command for each name; the caller reads the answers."""
        if names:
            self.send([b"".join(command(word, name, *after) for name in names)], len(names))

    def unlink(self, names: Sequence[bytes]) -> list[bytes | int | Refusal]:
        """One command each, because of clusters."""
        self.ask_each(b"UNLINK", names)
        return [self.read_answer() for _ in names]

    def query(self, *words: bytes) -> object:
        """One command with a nested answer: lists, texts, numbers and None. Raises if it is refused."""
        self.send([command(*words)], 1)
        answer = self._read_item(0)
        self.num_owed -= 1
        if isinstance(answer, Refusal):
            raise self.refused(answer)
        return answer

    # ------------------------------------------------------------------------------------------------ answers

    @overload
    def read_answer(self) -> bytes | int | Refusal: ...
    @overload
    def read_answer(self, or_nothing: bool) -> bytes | int | Refusal | None: ...

    def read_answer(self, or_nothing: bool = False) -> bytes | int | Refusal | None:
        """A whole answer that is one line: a status, a number, a refusal, or with `or_nothing` None."""
        line = self._read_line()
        answer = None if or_nothing and line == _NOTHING else _in_line(line)
        self.num_owed -= 1
        return answer

    def read_value(self, parts: Sequence[memoryview]) -> int | Refusal | None:
        """The length of a value; None: there is none. A value as long as `parts` together is stored in them;
        any other is discarded."""
        line = self._read_line()
        if line[:1] == b"-":
            self.num_owed -= 1
            return _refusal(line[1:])
        size = _number(line[1:]) if line[:1] == b"$" else -2
        if not -1 <= size <= _MAX_VALUE_BYTES:
            raise StoreFailed("the shared store answered with something else than a value")
        if size >= 0:
            self._read_bytes(parts if size == sum(map(len, parts)) else _scratch(size))
        self.num_owed -= 1
        return size if size >= 0 else None

    def _read_item(self, depth: int) -> object:
        line = self._read_line()
        if line[:1] not in (b"*", b"$"):
            return _in_line(line)
        size = _number(line[1:])
        if line[:1] == b"*" and size < 0:
            return None
        if line[:1] == b"*" and depth < _MAX_DEPTH:
            return [self._read_item(depth + 1) for _ in range(size)]
        if line[:1] == b"*" or size > _SCRATCH_BYTES:
            raise StoreFailed("the shared store answered with something larger than a name")
        if size < 0:
            return None
        text = bytearray(size)
        self._read_bytes([memoryview(text)])
        return bytes(text)

    def _read_bytes(self, parts: Iterable[memoryview]) -> None:
        """Fill `parts`; the value must end after them."""
        end = bytearray(len(_END))
        for part in itertools.chain(parts, [memoryview(end)]):
            done = min(len(part), self._end - self._start)
            part[:done] = self._view[self._start : self._start + done]
            self._start += done
            while done < len(part):
                done += self._receive(part[done:])
        if end != _END:
            raise StoreFailed("the shared store sent a value longer than it said")

    def _read_line(self) -> bytes:
        """Without the line end."""
        while (found := self._buffer.find(_END, self._start, self._end)) < 0:
            if self._start:
                kept = self._end - self._start
                self._buffer[:kept] = self._buffer[self._start : self._end]
                self._start, self._end = 0, kept
            if self._end == len(self._buffer):
                raise StoreFailed("the shared store answered with a line that does not end")
            self._end += self._receive(self._view[self._end :])
        line = bytes(self._view[self._start : found])
        self._start = found + len(_END)
        return line

    # --------------------------------------------------------------------------------------------- the socket

    def send(self, parts: Sequence[Buffer], num_answers: int) -> None:
        """Send commands as scattered `parts`, without joining them."""
        self.num_owed += num_answers
        encrypted = isinstance(self._socket, ssl.SSLSocket)  # it takes one part at a time
        left = [view for part in parts if (view := memoryview(part))]
        while left:
            self._arm()
            try:
                sent = self._socket.send(left[0]) if encrypted else self._socket.sendmsg(left[:_MAX_PARTS])
            except OSError as error:
                raise self._failure(error) from None
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def _receive(self, target: memoryview) -> int:
        """Some bytes, at least one."""
        self._arm()
        try:
            received = self._socket.recv_into(target)
        except OSError as error:
            raise self._failure(error) from None
        if not received:
            raise StoreFailed(f"the shared store at {self.node} closed the connection")
        return received

    def _arm(self) -> None:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise self._failure(TimeoutError())
        self._socket.settimeout(remaining)

    def _failure(self, error: OSError) -> StoreFailed:
        if isinstance(error, TimeoutError):
            return StoreFailed(f"the shared store at {self.node} did not answer in time")
        return StoreFailed(
            f"the connection to the shared store at {self.node} broke: "
            f"{error.strerror or type(error).__name__}"
        )


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def command_with_value(
    words: Sequence[bytes], value_bytes: int, after: Sequence[bytes] = ()
) -> tuple[bytes, bytes]:
    """The bytes before and after a value of that length in a command: `words`, the value, and the words
    `after` it."""
    head = (
        b"*%d\r\n" % (len(words) + 1 + len(after))
        + command(*words).partition(_END)[2]
        + b"$%d\r\n" % value_bytes
    )
    return head, _END + command(*after).partition(_END)[2]


def _in_line(line: bytes) -> bytes | int | Refusal:
    kind, rest = line[:1], line[1:]
    if kind not in (b"+", b":", b"-"):
        raise StoreFailed("the shared store answered with something else than a line")
    return rest if kind == b"+" else _number(rest) if kind == b":" else _refusal(rest)


def _refusal(text: bytes) -> Refusal:
    if text.startswith(b"ERR max number of clients"):
        return Refusal("MAXCLIENTS")
    word = text.partition(b" ")[0].decode("ascii", "replace")
    return Refusal(word if word.isalnum() and word.isupper() and len(word) <= 32 else "ERR")


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 18:
        raise StoreFailed("the shared store sent something else where a number belongs")
    return int(text)


def _scratch(num_bytes: int) -> Iterator[memoryview]:
    """Buffers for bytes to discard, a piece at a time."""
    scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
    for first in range(0, num_bytes, _SCRATCH_BYTES):
        yield scratch[: num_bytes - first]


# --------------------------------------------------------------------------------------------------- dialling


def connect(node: Node, address: ValkeyAddress, deadline: float) -> ValkeyConnection:
    """A connection that is ready for commands."""
    connection = ValkeyConnection(node, connected := dial(node, address.tls, deadline), deadline)
    try:
        with contextlib.suppress(OSError):  # if the peer is gone again, the next round trip shows it
            connection.near = connected.getsockname()[0] == connected.getpeername()[0]
        _greet(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(connection: ValkeyConnection, address: ValkeyAddress) -> None:
    """Authenticates and selects the database."""
    if address.password is not None:
        secret = address.password.encode()
        answer = (
            connection.ask(b"AUTH", address.user.encode(), secret)
            if address.user
            else connection.ask(b"AUTH", secret)
        )
        if address.user and answer == Refusal("ERR"):  # a server from before there were users
            answer = connection.ask(b"AUTH", secret)
        _need_ok(connection, Refusal("WRONGPASS") if answer == Refusal("ERR") else answer)
    if address.db:
        _need_ok(connection, connection.ask(b"SELECT", b"%d" % address.db))


def _need_ok(connection: ValkeyConnection, answer: bytes | int | Refusal) -> None:
    if isinstance(answer, Refusal):
        raise connection.refused(answer)
    if answer != b"OK":
        raise StoreFailed(f"the shared store at {connection.node} answered with something else than OK")


def dial(node: Node, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    """A connected socket, encrypted with `tls`. If there are several addresses, each has its share of the
    time."""
    places = resolve(node, deadline - time.monotonic())
    reason = "no address"
    for place, (family, kind, protocol, _, address) in enumerate(places):
        share_s = (deadline - time.monotonic()) / (len(places) - place)
        if share_s <= 0:
            break
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(share_s)
            connected.connect(address)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.settimeout(max(0.001, deadline - time.monotonic()))
            return connected if tls is None else tls.wrap_socket(connected, server_hostname=node.host)
        except OSError as error:
            connected.close()
            reason = _reason(error)
    raise StoreFailed(f"the shared store at {node} cannot be reached: {reason}")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return error.strerror or type(error).__name__


def resolve(node: Node, patience_s: float) -> _Places:
    """The addresses of a host. The system's resolver has no deadline, so a name is resolved on a separate
    thread."""
    with contextlib.suppress(socket.gaierror):
        return _addresses(node, socket.AI_NUMERICHOST)
    answers: queue.Queue[_Places | OSError] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(_addresses(node, 0))
        except OSError as error:
            answers.put(error)

    threading.Thread(target=ask, name="penstock-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.0, patience_s))
    except queue.Empty:
        answer = TimeoutError()
    if isinstance(answer, OSError):
        raise StoreFailed(
            f"the shared store at {node} cannot be reached: its name has no address ({_reason(answer)})"
        )
    return answer


def _addresses(node: Node, flags: int) -> _Places:
    try:
        found = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "it is no name") from None
    return [(family, kind, protocol, name, address) for family, kind, protocol, name, address in found]

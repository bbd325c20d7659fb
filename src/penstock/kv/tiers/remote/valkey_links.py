"""Connections to the nodes of a Valkey or Redis store, and which node has which key. Owns the connections and the map of a cluster's slots;
what is asked over them is the store's business.

The client library greets, authenticates and reads the map; addresses are tried, and waited for, under one deadline, which the library does
not have.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

from valkey.cluster import parse_cluster_slots
from valkey.connection import Connection
from valkey.crc import VALKEY_CLUSTER_HASH_SLOTS, key_slot
from valkey.exceptions import AuthenticationError, ResponseError, ValkeyError

from penstock.errors import StoreFailed
from penstock.kv.tiers.remote.valkey_url import Node, ValkeyAddress
from penstock.kv.tiers.remote.wire import Wire

_NEAR_BYTES = 1 << 20  # of values on their way at once from the same machine: what is asked ahead only falls out of caches
_FAR_BYTES = 4 << 20  # over a network, where the next one shall be under way while one is taken in

_Places = list[tuple[int, int, int, str, tuple[object, ...]]]


class Link(Connection):
    """The library's connection over a wire of ours."""

    def __init__(self, node: Node, address: ValkeyAddress, deadline: float) -> None:
        super().__init__(
            host=node.host,
            port=node.port,
            db=address.db,
            username=address.user,
            password=address.password,
            lib_name=None,  # two more exchanges before the first answer
            lib_version=None,
            protocol=2,
        )
        self.node = node
        self._tls = address.tls
        self._until = deadline
        self.near = False  # the server is on this machine
        self.wire: Wire

    def _connect(self) -> Wire:
        connected = dial(self.node, self._tls, self._until)
        self.near = connected.getsockname()[0] == connected.getpeername()[0]
        self.wire = Wire(connected, self._until)
        return self.wire

    def at_once(self, value_bytes: int) -> int:
        """How many values of that size to have on their way."""
        return max(1, _NEAR_BYTES // value_bytes) if self.near else max(2, _FAR_BYTES // value_bytes)

    def ask(self, *words: bytes) -> object:
        """One exchange whose answer is more than a line."""
        with _told(self.node):
            self.wire.num_owed += 1
            self.send_command(*words)
            answer = self.read_response()
            self.wire.num_owed -= 1
            return answer


class Links:
    """What is connected now and used by nobody. For several threads; a link belongs to one of them at a time."""

    def __init__(self, address: ValkeyAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: dict[Node, list[Link]] = {}
        self._slots: list[Node | None] | None = None
        self._known: tuple[Node, ...] = ()  # nodes of the last map
        self._closed = False

    # ------------------------------------------------------------------------------------------------------------- connections

    @contextlib.contextmanager
    def link(self, node: Node, deadline: float) -> Iterator[Link]:
        """One that is new or was left in order. After a failure it is gone, and so are its idle siblings, which share its fate."""
        link = self._take(node, deadline)
        try:
            yield link
        except BaseException:
            link.disconnect()
            self.forget(node)
            raise
        if link.wire.num_owed or not self._put_back(link):
            link.disconnect()

    def _take(self, node: Node, deadline: float) -> Link:
        while (idle := self._pop(node)) is not None:
            if idle.wire.quiet:
                idle.wire.deadline = deadline
                return idle
            idle.disconnect()
        link = Link(node, self._address, deadline)
        try:
            with _told(node):
                link.connect()
        except BaseException:
            link.disconnect()
            self.forget(node)
            raise
        return link

    def _pop(self, node: Node) -> Link | None:
        with self._lock:
            if self._closed:
                raise StoreFailed("the shared store was closed")
            waiting = self._idle.get(node)
            return waiting.pop() if waiting else None

    def _put_back(self, link: Link) -> bool:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(link.node, []).append(link)
            return not self._closed

    def forget(self, node: Node | None = None) -> None:
        """Idle links to `node`, and where keys are: others may have taken over."""
        with self._lock:
            self._slots = None
            gone = self._idle.pop(node, []) if node is not None else []
        for link in gone:
            link.disconnect()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            gone = [link for links in self._idle.values() for link in links]
            self._idle.clear()
        for link in gone:
            link.disconnect()

    # ------------------------------------------------------------------------------------------------------------ who has what

    def nodes(self, deadline: float) -> list[Node]:
        """Every node that keys are written to."""
        if not self._address.cluster:
            return [self._address.nodes[0]]
        self._map(deadline)
        return list(self._known)

    def locator(self, deadline: float) -> Callable[[bytes], Node | None]:
        """Which node has a name; None: no node of the cluster has its slot now."""
        if not self._address.cluster:
            only = self._address.nodes[0]
            return lambda _: only
        slots = self._map(deadline)
        return lambda name: slots[key_slot(name)]

    def _map(self, deadline: float) -> list[Node | None]:
        """Asked from the first node that knows it; each has its share of the time."""
        if (known := self._slots) is not None:
            return known
        seeds = list(dict.fromkeys((*self._known, *self._address.nodes)))
        for place, seed in enumerate(seeds):
            share_s = (deadline - time.monotonic()) / (len(seeds) - place)
            try:
                with self.link(seed, time.monotonic() + share_s) as link:
                    slots = slot_map(link.ask(b"CLUSTER", b"SLOTS"), seed)
            except StoreFailed:
                if place + 1 == len(seeds):
                    raise
                continue
            with self._lock:
                self._slots = slots
                self._known = tuple(sorted({node for node in slots if node is not None}))
            return slots
        raise StoreFailed("no node of the shared store knows the others")


def slot_map(answer: object, asked: Node) -> list[Node | None]:
    """A node that does not know its own address is reachable under the one it was asked at."""
    slots: list[Node | None] = [None] * VALKEY_CLUSTER_HASH_SLOTS
    try:
        for (first, last), owners in parse_cluster_slots(answer, current_host=asked.host).items():
            host, port = owners["primary"]
            if not (0 <= first <= last < len(slots) and 0 < port < 65536 and isinstance(host, str)):
                raise ValueError
            slots[first : last + 1] = [Node(host, port)] * (last + 1 - first)
    except (TypeError, ValueError, KeyError, IndexError):
        raise StoreFailed("the shared store sent a map of its slots that is none") from None
    return slots


@contextlib.contextmanager
def _told(node: Node) -> Iterator[None]:
    """The library's errors as ours. Their text is the server's, which may name users: only their kind is kept."""
    try:
        yield
    except AuthenticationError:
        raise StoreFailed(f"the shared store at {node} refuses the password, or wants one") from None
    except ResponseError as error:
        raise StoreFailed(f"the shared store at {node} refuses: {type(error).__name__}") from None
    except (ValkeyError, OSError) as error:
        raise StoreFailed(f"the connection to the shared store at {node} failed: {type(error).__name__}") from None


# -------------------------------------------------------------------------------------------------------------------- dialling


def dial(node: Node, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    """A connected socket, encrypted with `tls`. Of several addresses each has its share of the time."""
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
    """The addresses of a host. The system's resolver knows no deadline, so a name is asked for on a thread of its own."""
    with contextlib.suppress(socket.gaierror):
        return _addresses(node, socket.AI_NUMERICHOST)
    answers: queue.SimpleQueue[_Places | OSError] = queue.SimpleQueue()

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
        raise StoreFailed(f"the shared store at {node} cannot be reached: its name has no address ({_reason(answer)})")
    return answer


def _addresses(node: Node, flags: int) -> _Places:
    try:
        found = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "it is no name") from None
    return [(family, kind, protocol, name, address) for family, kind, protocol, name, address in found]

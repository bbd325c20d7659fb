"""A `BlockStore` in Valkey or Redis, a single server or a cluster. Owns names, outcomes, and the deadline of
each call; connections, the protocol and the map of a cluster are valkey-py's.

One block is one value, its header before its bytes, under `penstock:FORMAT:SPACE:KEY`; a manifest is one
under `penstock-snapshot:FORMAT:SPACE:ID`, where a reset of blocks does not find it. The server forgets blocks
as its own memory policy or their time to live says: that is a miss like any other.

Only the calling thread touches a host slot: valkey-py with libvalkey reads into its own memory, and what is
sent was copied before. A client of our own, which received values where they shall lie, was hardly faster:
127 blocks of 4.7 MB over loopback on two cores were read and checked at 2.6 GB/s, and are at 2.4; they were
written at 1.4 GB/s, and are at 2.0.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import Any, TypeVar

import valkey
from valkey.cluster import ClusterNode, ValkeyCluster
from valkey.connection import PythonRespSerializer
from valkey.exceptions import (
    AuthenticationError,
    InvalidResponse,
    OutOfMemoryError,
    ResponseError,
    ValkeyClusterException,
)

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.remote import (
    FLAG,
    Node,
    Requests,
    SharedStore,
    StoreUrl,
    check_hosts,
    copy_checked,
    need,
    parse_url,
)
from penstock.kv.tiers.store import FORMAT, BlockStore, Outcome, Space, Written, pack

PASSWORD_VARIABLE = "PENSTOCK_REMOTE_PASSWORD"
_FORM = (
    "valkey://[user:password@]host[:port][,host:port...][/db][?option=value&...], or valkeys:// for TLS; "
    "in user and password write / ? # and @ as %2F %3F %23 and %40"
)
_TLS_OPTIONS = ("ca", "cert", "key", "verify")
_PORT = 6379
_FIND_KEYS = 512  # questions in flight
_SCAN_KEYS = 1000
_CHUNK_BYTES = 4 << 20  # of values in flight for one call, or one value if that is larger
_READ_BYTES = 1 << 17  # received at once
_THREADS = 16  # calls at once: the lanes of a tier, and questions about snapshots
# A client waits that share of a call's time for one address: the host may have others.
_CONNECT_SHARE = 3

# Executed only if the name has the expected value, the first argument.
_SET_IF = (
    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end "
    "redis.call('SET', KEYS[1], unpack(ARGV, 2)) return 1"
)
_REMOVE_IF = (
    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end redis.call('UNLINK', KEYS[1]) return 1"
)

_VALUE = bytes | None  # an answer to GET

T = TypeVar("T")
U = TypeVar("U")
Command = tuple[str | bytes, ...]


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
    """Every call ends within `timeout_s`; `reset` and `manifests` have that for each round trip. After a
    failure the client is dropped with all its connections; the next call makes another one."""

    def __init__(self, address: ValkeyAddress, space: Space, timeout_s: float) -> None:
        super().__init__(space, timeout_s)
        self._address = address
        self._ttl = () if address.ttl_s is None else (b"%d" % address.ttl_s,)
        self._prefix = f"penstock:{FORMAT}:{space.digest.hex()}:".encode()
        self._manifest_prefix = f"penstock-snapshot:{FORMAT}:{space.digest.hex()}:".encode()
        self._at_once = max(1, _CHUNK_BYTES // self._value_bytes)
        self._requests = Requests(timeout_s, _THREADS, self._failure)
        self._lock = threading.Lock()  # of the client
        self._client: Any = None

    def __repr__(self) -> str:
        kind = "cluster " if self._address.cluster else ""
        return f"<ValkeyStore {kind}{self._where}{' with TLS' if self._address.tls else ''}>"

    def find(self, keys: Sequence[bytes]) -> int:
        until = self._until()
        for first in range(0, len(keys), _FIND_KEYS):
            there = self._flags([("EXISTS", name) for name in self._names(keys[first:][:_FIND_KEYS])], until)
            if not all(there):
                return first + there.index(False)
        return len(keys)

    def find_last(self, keys: Sequence[bytes]) -> int:
        until, end = self._until(), len(keys)
        while end:
            first = max(0, end - _FIND_KEYS)
            there = self._flags([("EXISTS", name) for name in self._names(keys[first:end])], until)
            if any(there):
                return end - there[::-1].index(True)
            end = first
        return 0

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        until = self._until()
        names, outcomes = self._names(keys), []
        for first in range(0, len(keys), self._at_once):
            values = self._ask(_get_each, names[first : first + self._at_once], until)
            for place, value in enumerate(values, first):
                outcomes.append(
                    Outcome.MISSING
                    if value is None
                    else copy_checked(memoryview(value), keys[place], self._digest, into[place])
                )
        bad = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.CORRUPT]
        with contextlib.suppress(StoreFailed):  # the wrong value stays; the next reader tries again
            self._flags([("UNLINK", name) for name in bad], until)
        return outcomes

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        """Does not send existing values again; marks them as used, which restarts their time to live."""
        until = self._until()
        names = self._names(keys)
        known = self._flags([("EXPIRE" if self._ttl else "TOUCH", name, *self._ttl) for name in names], until)
        expiry = ("EX", *self._ttl) if self._ttl else ()
        outcomes = [Outcome.DONE] * len(keys)
        left = [place for place, there in enumerate(known) if not there]
        for first in range(0, len(left), self._at_once):
            some = left[first : first + self._at_once]
            values = [b"".join((pack(keys[i], self._digest, blocks[i]), blocks[i])) for i in some]
            commands = [("SET", names[i], value, *expiry) for i, value in zip(some, values, strict=True)]
            for i, outcome in zip(some, self._ask(_set_each, commands, until), strict=True):
                outcomes[i] = outcome
        return outcomes

    def probe(self) -> None:
        """Every node must answer: a missing one would lose its share of the blocks. Nodes of a cluster are
        asked for anew: others may have taken over."""
        if self._address.cluster:
            self._drop()
        self._ask(lambda client, _: [node.ping() for node in _nodes(client)], None)

    def reset(self) -> int:
        """Each round trip has `timeout_s`; their sum is not limited."""
        return sum(
            sum(self._try(partial(_answers, node), [("UNLINK", name) for name in names]))
            for node, names in self._scan(self._prefix)
        )

    def _scan(self, start: bytes) -> Iterator[tuple[Any, list[bytes]]]:
        """Names that begin with `start`, a few at a time, and the client of the node that has them."""
        for node in self._ask(lambda client, _: _nodes(client), None):
            cursor = None
            while cursor != 0:
                scan = partial(node.scan, match=start + b"*", count=_SCAN_KEYS)
                cursor, names = self._try(scan, cursor or 0)
                yield node, names

    def close(self) -> None:
        self._requests.close()
        self._drop()

    # ---------------------------------------------------------------------------------------------- manifests

    def manifests(self, start: str = "") -> list[str]:
        found = {name for _, names in self._scan(self._manifest_prefix + start.encode()) for name in names}
        return sorted(name.removeprefix(self._manifest_prefix).decode("ascii", "replace") for name in found)

    def read_manifest(self, id: str) -> bytes | None:
        return self._ask(
            lambda client, name: _checked(client.get(name), _VALUE), self._manifest_prefix + id.encode()
        )

    def write_manifest(
        self, id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
    ) -> Written:
        lasts_s = None if expires_in_s is None else max(1, math.ceil(expires_in_s))

        def write(client: Any, name: bytes) -> Written:
            try:
                if instead_of is None:
                    done = client.set(name, data, nx=True, ex=lasts_s)
                else:
                    expiry = () if lasts_s is None else ("EX", lasts_s)
                    done = _checked(client.eval(_SET_IF, 1, name, instead_of, data, *expiry), int)
            except OutOfMemoryError:
                return Written.FULL
            return Written.DONE if done else Written.TAKEN

        return self._ask(write, self._manifest_prefix + id.encode())

    def remove_manifest(self, id: str, only: bytes | None = None) -> None:
        def remove(client: Any, name: bytes) -> object:
            return client.unlink(name) if only is None else client.eval(_REMOVE_IF, 1, name, only)

        self._ask(remove, self._manifest_prefix + id.encode())

    # -------------------------------------------------------------------------------------------- round trips

    def _ask(self, job: Callable[[Any, U], T], thing: U, until: float | None = None) -> T:
        """The answer of a job that gets the client."""
        return self._try(lambda thing: job(self._connected(), thing), thing, until)

    def _try(self, job: Callable[[U], T], thing: U, until: float | None = None) -> T:
        try:
            return self._requests.one(job, thing, until)
        except StoreFailed:
            self._drop()
            raise

    def _flags(self, commands: Sequence[Command], until: float) -> list[bool]:
        """The answers of commands that say 0 or 1."""
        return [answer == 1 for answer in self._ask(_answers, commands, until)] if commands else []

    def _connected(self) -> Any:
        """Of two threads that connect at once, the first keeps its client."""
        if (client := self._client) is not None:
            return client
        made = connect(self._address, self._timeout_s)
        with self._lock:
            if self._client is None:
                self._client = made
            return self._client

    def _drop(self) -> None:
        """Calls in flight fail: their connections are closed."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            close = getattr(client, "disconnect_connection_pools", None)  # of a cluster
            (close or client.connection_pool.disconnect)()

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + key.hex().encode() for key in keys]

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self._address.nodes))

    def _failure(self, error: BaseException | None) -> StoreFailed:
        """Reports only the kind of an error: its message may contain what was said."""
        match error:
            case valkey.TimeoutError() | TimeoutError():
                return StoreFailed(f"the shared store did not answer within {self._timeout_s:g} s")
            case AuthenticationError():
                why = "refuses the password, or wants one"
            case OSError():
                why = f"cannot be reached: {_reason(error)}"
            case valkey.ConnectionError() if isinstance(error.__context__, OSError):
                return self._failure(error.__context__)
            case valkey.ConnectionError():
                why = "closed the connection, or takes no other"
            case ResponseError():
                word = str(error).partition(" ")[0]
                kind = "ERR" if type(error) is ResponseError else type(error).__name__
                why = f"refuses: {word if word.isupper() and word.isalpha() and len(word) <= 32 else kind}"
                if word in ("MOVED", "ASK"):
                    why += ": it is a cluster, add ?cluster=1"
            case ValkeyClusterException() if inner := error.__cause__ or error.__context__:
                return self._failure(inner)
            case _:
                why = f"answers with something else ({type(error).__name__})"
        return StoreFailed(f"the shared store at {self._where} {why}")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    return error.strerror or type(error).__name__


# ------------------------------------------------------------------------------------------------- the client


def connect(address: ValkeyAddress, timeout_s: float) -> Any:
    """A client of valkey-py, for several threads. That of a cluster asks for the map of its nodes."""
    settings: dict[str, Any] = {
        "username": address.user,
        "password": address.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s / _CONNECT_SHARE,
        "connection_class": _connection_class(address.tls),
        "lib_name": None,  # nor its version: two round trips that a new connection needs not make
        "lib_version": None,
    }
    (host, port), *others = address.nodes
    if address.cluster:
        return ValkeyCluster(
            url=f"valkey://{f'[{host}]' if ':' in host else host}:{port}",
            startup_nodes=[ClusterNode(*node) for node in others],
            cluster_error_retry_attempts=1,
            reinitialize_steps=1,
            **settings,
        )
    return valkey.Valkey(
        connection_pool=valkey.ConnectionPool(host=host, port=port, db=address.db, **settings)
    )


def _connection_class(tls: ssl.SSLContext | None) -> type[valkey.Connection]:
    """The library's own TLS would trust the system's authorities beside `ca`, and check no name. libvalkey
    packs a large value at a third of the rate of the packer in Python."""

    class StoreConnection(valkey.Connection):
        def __init__(self, **settings: Any) -> None:
            super().__init__(socket_read_size=_READ_BYTES, **settings)
            self._command_packer = PythonRespSerializer(_READ_BYTES, self.encoder.encode)

        def _connect(self) -> socket.socket:
            connected = super()._connect()
            try:
                return connected if tls is None else tls.wrap_socket(connected, server_hostname=self.host)
            except BaseException:
                connected.close()
                raise

    return StoreConnection


def _nodes(client: Any) -> list[Any]:
    """A client for each node that keys are written to."""
    if not isinstance(client, ValkeyCluster):
        return [client]
    return [client.get_valkey_connection(node) for node in client.get_primaries()]


def _pipelined(client: Any, commands: Sequence[Command]) -> list[Any]:
    """One answer or error per command, in their order."""
    with client.pipeline(transaction=False) as pipeline:
        for words in commands:
            pipeline.execute_command(*words)
        return pipeline.execute(raise_on_error=False)


def _answers(client: Any, commands: Sequence[Command]) -> list[int]:
    return [_checked(answer, int) for answer in _pipelined(client, commands)]


def _checked(answer: Any, kind: type | UnionType) -> Any:
    if isinstance(answer, Exception):
        raise answer
    if not isinstance(answer, kind):
        raise InvalidResponse
    return answer


def _get_each(client: Any, names: Sequence[bytes]) -> list[bytes | None]:
    """Values; None: there is none. What is no string (another program's list) is an empty one."""
    found = _pipelined(client, [("GET", name) for name in names])
    wrong = [isinstance(value, ResponseError) and str(value).startswith("WRONGTYPE") for value in found]
    return [
        b"" if is_wrong else _checked(value, _VALUE) for value, is_wrong in zip(found, wrong, strict=True)
    ]


def _set_each(client: Any, commands: Sequence[Command]) -> list[Outcome]:
    return [
        Outcome.FULL if isinstance(answer, OutOfMemoryError) else _checked(answer, bool) and Outcome.DONE
        for answer in _pipelined(client, commands)
    ]

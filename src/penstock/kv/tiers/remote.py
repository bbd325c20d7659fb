"""Stores that several engines share are plug-ins: a package with an entry point of the group
`penstock.stores` for each URL scheme. Owns the look-up of those, and the parts that stores have in common:
URLs, deadlines, and the check of received values. No message repeats a part of the URL: it may contain a
password anywhere."""

from __future__ import annotations

import concurrent.futures
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.store import HEADER_BYTES, BlockStore, Outcome, Space, StoreUsage, unpack

FLAG = "--kv-offload-remote"
GROUP = "penstock.stores"  # of entry points: scheme = "module:open_store"
logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

# Schemes of the stores that this project has, and the extra that installs each.
KINDS = {
    "valkey": "valkey",
    "valkeys": "valkey",
    "redis": "valkey",
    "rediss": "valkey",
    "mooncake": "mooncake",
    "s3": "s3",
}


def schemes() -> list[str]:
    """What a URL of a store may begin with: the project's own schemes, and those of installed plug-ins."""
    return list(dict.fromkeys((*KINDS, *(entry.name for entry in entry_points(group=GROUP)))))


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily: a store that is down at start is treated like one that fails later. Raises ConfigError
    for a URL that can never work; no message repeats the URL, which may contain a password."""
    scheme = url.partition("://")[0]  # urlsplit's own errors repeat what it was given
    found = [*entry_points(group=GROUP, name=scheme)]
    need(
        bool(found) or scheme in KINDS,
        f"must start with one of {', '.join(f'{kind}://' for kind in schemes())}",
    )
    hint = f"needs the package penstock-{KINDS.get(scheme)}: pip install 'penstock[{KINDS.get(scheme)}]'"
    need(bool(found), f"{scheme}:// {hint}")
    try:
        make: Callable[[str, Space, float], BlockStore] = found[0].load()
    except ImportError as error:
        raise ConfigError(f"{FLAG} {scheme}:// cannot be used: {error}") from None
    return make(url, space, timeout_s)


def check_hosts(hosts: Sequence[str]) -> None:
    """Refuses names of which none exists: a store may be down at start, but such a name is mistyped. Names
    that cannot be looked up now are a warning, and the store is tried again like one that is down."""
    failed: list[socket.gaierror] = []
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            failed.append(error)
        except UnicodeError:
            failed.append(socket.gaierror(socket.EAI_NONAME, "no name of a host"))
    which = "its host" if len(hosts) == 1 else f"{len(failed)} of its {len(hosts)} hosts"
    if failed:
        why = failed[0].strerror
        need(
            len(failed) < len(hosts) or failed[0].errno == socket.EAI_AGAIN,
            f"cannot work: {which} cannot be resolved ({why})",
        )
        logger.warning(
            "%s: %s cannot be resolved now (%s); goes on without it, and tries again", FLAG, which, why
        )


class SharedStore:
    """The common base: a place that other engines use, too. Every call but `reset` ends within
    `timeout_s`."""

    name = "remote"
    local = False

    def __init__(self, space: Space, timeout_s: float) -> None:
        self._digest = space.digest
        self._value_bytes = HEADER_BYTES + space.block_bytes
        self._timeout_s = timeout_s

    def _until(self) -> float:
        """The deadline of a call that begins now."""
        return time.monotonic() + self._timeout_s

    def persist(self) -> None:
        """Does nothing: an acknowledged write is kept as long as the store's owner decides."""

    def usage(self) -> StoreUsage:
        """Other engines write and remove there, too; only the store itself can count."""
        return StoreUsage(0)


class Requests:
    """Calls of a client library on their own threads, under a deadline. An overdue one is abandoned: a job
    must not touch a host slot. `failure` describes what a job raised."""

    def __init__(
        self, timeout_s: float, num_threads: int, failure: Callable[[Exception], StoreFailed]
    ) -> None:
        self._timeout_s = timeout_s
        self._failure = failure
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, "penstock-store")

    def one(self, job: Callable[[U], T], thing: U, until: float | None = None) -> T:
        """The answer of one job. Without `until`, the job has the whole timeout."""
        (answer,) = self.each(job, [thing], until or time.monotonic() + self._timeout_s)
        assert not isinstance(answer, Exception)  # the only one: it was raised
        return answer

    def each(self, job: Callable[[U], T], things: Sequence[U], until: float) -> list[T | Exception]:
        done = dict(self.together(job, things, until))
        return [done[place] for place in range(len(things))]

    def together(
        self, job: Callable[[U], T], things: Sequence[U], until: float
    ) -> Iterator[tuple[int, T | Exception]]:
        """Answers or errors with their indices, as they come. Raises StoreFailed if all are errors, or if
        some did not come by the deadline."""
        try:
            running = {self._threads.submit(job, thing): place for place, thing in enumerate(things)}
        except RuntimeError:
            raise StoreFailed("the shared store was closed") from None
        broken: list[Exception] = []
        try:
            for future in concurrent.futures.as_completed(running, max(0.0, until - time.monotonic())):
                error = future.exception()
                if isinstance(error, Exception):
                    broken.append(error)
                    yield running[future], error
                else:
                    yield running[future], future.result()
        except TimeoutError:
            raise StoreFailed(f"the shared store did not answer within {self._timeout_s:g} s") from None
        finally:
            for future in running:
                future.cancel()
        if broken and len(broken) == len(things):
            raise self._failure(broken[0])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_block(header: memoryview | bytes, key: bytes, space: bytes, payload: memoryview) -> bool:
    """Whether `payload` is the block of `key` in `space`, as its header says."""
    envelope = unpack(header)
    return envelope is not None and envelope.key == key and envelope.space == space and envelope.fits(payload)


def copy_checked(value: memoryview, key: bytes, space: bytes, slot: memoryview) -> Outcome:
    """Copy a whole value into the host slot and check it there: other writers may still change `value`."""
    if len(value) != HEADER_BYTES + len(slot):
        return Outcome.CORRUPT
    # without the GIL
    np.copyto(np.frombuffer(slot, np.uint8), np.frombuffer(value, np.uint8, offset=HEADER_BYTES))
    return Outcome.DONE if is_block(bytes(value[:HEADER_BYTES]), key, space, slot) else Outcome.CORRUPT


# ------------------------------------------------------------------------------------------------------- URLs

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[\w.-]+))(?::(?P<port>\d{0,5}))?")


class Node(NamedTuple):
    """One server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of a URL. `user` and `password` are decoded; None if the URL has none."""

    scheme: str
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    place: str  # hosts, or the name of a bucket
    path: str  # without the slashes around it
    options: Mapping[str, str] = field(repr=False)
    form: str = field(repr=False)  # what such a URL looks like, for messages

    def nodes(self, default_port: int) -> tuple[Node, ...]:
        """`place` as hosts and ports, separated by commas. Raises ConfigError."""
        return tuple(self._node(one, default_port) for one in self.place.split(","))

    def _node(self, text: str, default_port: int) -> Node:
        found = _HOST.fullmatch(text)
        if found is None:
            raise ConfigError(f"{FLAG} must look like {self.form}")
        port = int(found["port"] or default_port)
        need(0 < port < 65536, "has a port that is not between 1 and 65535")
        return Node(found["v6"] or found["name"], port)


def parse_url(url: str, form: str, options: Sequence[str]) -> StoreUrl:
    """`options` are the names that may follow the `?`. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError:  # its text repeats the URL
        raise ConfigError(f"{FLAG} must look like {form}") from None
    given = dict(pairs)
    need(
        len(given) == len(pairs) and set(given) <= set(options),
        f"knows the options {', '.join(options)}, each at most once",
    )
    need(not parts.fragment, "has a # in it: write it as %23")
    credentials, at, place = parts.netloc.rpartition("@")
    user, colon, password = credentials.partition(":")
    return StoreUrl(
        parts.scheme,
        unquote(user) if at else None,
        unquote(password) if colon else None,
        place,
        parts.path.strip("/"),
        given,
        form,
    )


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"{FLAG} {message}")

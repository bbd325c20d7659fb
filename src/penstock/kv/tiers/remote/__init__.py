"""Stores that several engines share: one module for each kind, with a `BlockStore` in it. Owns the table of
kinds, their common base, the check of received values, and the parsing of URLs. No message repeats a part of
the URL: it may contain a password anywhere."""

from __future__ import annotations

import importlib
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np

from penstock.errors import ConfigError
from penstock.kv.tiers.store import HEADER_BYTES, BlockStore, Outcome, Space, StoreUsage, unpack

FLAG = "--kv-offload-remote"
logger = logging.getLogger(__name__)

# By the URL's scheme: the module here that has `open_store(url, space, timeout_s) -> BlockStore`.
KINDS = {
    "valkey": "valkey",
    "valkeys": "valkey",
    "redis": "valkey",
    "rediss": "valkey",
    "mooncake": "mooncake",
    "s3": "s3",
}


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily: a store that is down at start is treated like one that fails later. Raises ConfigError
    for a URL that can never work; no message repeats the URL, which may contain a password."""
    scheme = url.partition("://")[0]  # urlsplit's own errors repeat what it was given
    if scheme not in KINDS:
        raise ConfigError(f"{FLAG} must start with one of {', '.join(f'{kind}://' for kind in KINDS)}")
    try:
        module = importlib.import_module(f"penstock.kv.tiers.remote.{KINDS[scheme]}")
    except ImportError as error:
        hint = f"needs its client library: pip install 'penstock[remote]' ({error})"
        raise ConfigError(f"{FLAG} {scheme}:// {hint}") from None
    make: Callable[[str, Space, float], BlockStore] = module.open_store
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

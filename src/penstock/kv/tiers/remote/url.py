"""The URL of a shared store, taken apart by the same rules for every kind. Owns no connection, and no option of any store. No message
repeats a part of the URL: a password may stand anywhere in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.errors import ConfigError

FLAG = "--kv-offload-remote"
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[\w.-]+))(?::(?P<port>\d{0,5}))?")


class Node(NamedTuple):
    """One server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of a URL. `user` and `password` are decoded, and None where the URL has none."""

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
    except ValueError:  # its text repeats what it is about
        raise ConfigError(f"{FLAG} must look like {form}") from None
    given = dict(pairs)
    need(len(given) == len(pairs) and set(given) <= set(options), f"knows the options {', '.join(options)}, each at most once")
    need(not parts.fragment, "has a # in it: write it as %23")
    credentials, at, place = parts.netloc.rpartition("@")
    user, colon, password = credentials.partition(":")
    return StoreUrl(
        parts.scheme, unquote(user) if at else None, unquote(password) if colon else None, place, parts.path.strip("/"), given, form
    )


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"{FLAG} {message}")

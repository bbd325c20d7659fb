"""The address of a Valkey or Redis server or cluster: what its URL may say, and the mistakes in one. Owns no connection. No message repeats
any part of the URL, which may have a password in it."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.errors import ConfigError

PASSWORD_VARIABLE = "PENSTOCK_REMOTE_PASSWORD"
_FLAG = "--kv-offload-remote"
_FORM = "valkey://[user:password@]host[:port][,host:port...][/db][?option=value&...], or valkeys:// for TLS"
_OPTIONS = ("cluster", "ttl", "ca", "cert", "key", "verify")
_TLS_OPTIONS = ("ca", "cert", "key", "verify")
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?")
_PORT = 6379


class Node(NamedTuple):
    """One server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """Where the store is and how to talk to it."""

    nodes: tuple[Node, ...]  # of a cluster, those to ask for the others
    db: int = 0
    cluster: bool = False
    ttl_s: int | None = None  # after which the server forgets a block; None: its own policy decides
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def parse(url: str, environment: Mapping[str, str]) -> ValkeyAddress:
    """Raises ConfigError. A password in the URL goes before the one in `environment`."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError:
        raise ConfigError(f"{_FLAG} must look like {_FORM}") from None  # the reason repeats what it is about
    options = dict(pairs)
    _need(len(options) == len(pairs) and set(options) <= set(_OPTIONS), f"knows the options {', '.join(_OPTIONS)}, each at most once")
    _need(not parts.fragment, "has a # in it: write it as %23 in a password")
    tls = parts.scheme == "valkeys"
    _need(tls or not set(options) & set(_TLS_OPTIONS), f"has options for TLS ({', '.join(_TLS_OPTIONS)}) without it: write valkeys://")
    credentials, _, places = parts.netloc.rpartition("@")
    user, password = _credentials(credentials, environment)
    nodes = tuple(_node(place) for place in places.split(","))
    cluster = _flag(options)
    _need(cluster or len(nodes) == 1, "names several hosts, which makes sense for a cluster only: add ?cluster=1")
    db = _whole("the database", parts.path.strip("/") or "0", 0)
    _need(not (cluster and db), "names a database, and a cluster has only number 0")
    ttl_s = _whole("ttl", options["ttl"], 1) if "ttl" in options else None
    return ValkeyAddress(nodes, db, cluster, ttl_s, user, password, _tls(options) if tls else None)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"{_FLAG} {message}")


def _credentials(text: str, environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    user, _, password = text.partition(":")
    secret = unquote(password) or environment.get(PASSWORD_VARIABLE) or None
    _need(not user or secret is not None, f"names a user without a password: add it, or set {PASSWORD_VARIABLE}")
    _need(_is_text(user) and _is_text(secret or ""), "has a user or password that is not UTF-8")
    return unquote(user) or None, secret


def _is_text(given: str) -> bool:
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def _node(place: str) -> Node:
    found = _HOST.fullmatch(place)
    if found is None:
        raise ConfigError(f"{_FLAG} must look like {_FORM}; in user and password write / ? # and @ as %2F %3F %23 and %40")
    port = int(found["port"] or _PORT)
    _need(0 < port < 65536, "has a port that is none")
    return Node(found["v6"] or found["name"], port)


def _flag(options: Mapping[str, str]) -> bool:
    _need(options.get("cluster", "0") in ("0", "1"), "has a cluster= that is neither 0 nor 1")
    return options.get("cluster") == "1"


def _whole(what: str, text: str, least: int) -> int:
    _need(
        text.isascii() and text.isdigit() and len(text) <= 10 and int(text) >= least, f"must have a whole number from {least} on for {what}"
    )
    return int(text)


def _tls(options: Mapping[str, str]) -> ssl.SSLContext:
    """Server and name are verified unless that was expressly given up; `ca` replaces the system's authorities."""
    _need(options.get("verify", "none") == "none", "has a verify= that is not none: leave it out to verify")
    _need("cert" in options or "key" not in options, "has a key= without a cert=")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"), password="")  # else a locked key asks on the terminal
    except OSError as error:  # what ssl raises, too
        raise ConfigError(f"{_FLAG}: a file for TLS cannot be used: {error.strerror or type(error).__name__}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if "verify" in options:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context

"""The address of a Mooncake store's master: what its URL may say, and the mistakes in one. Owns no connection; what is in the store is
`mooncake_store`'s business.

`mooncake://host[:port][?metadata=URL&protocol=tcp|rdma&device=NAME&local=HOST&segment_gib=N&buffer_gib=N]`
"""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from penstock.errors import ConfigError
from penstock.kv.tiers.store import BlockStore, Space

_FLAG = "--kv-offload-remote"
_OPTIONS = ("metadata", "protocol", "device", "local", "segment_gib", "buffer_gib")
_PORT = 50051


class MooncakeAddress(NamedTuple):
    """What the URL says."""

    host: str
    port: int
    metadata: str = "P2PHANDSHAKE"  # nodes find each other without a server for that
    protocol: str = "tcp"
    device: str = ""  # of RDMA; empty: the library chooses
    local: str = ""  # how other nodes call this one; empty: the address from which the master is reached
    segment_bytes: int = 0  # lent to the store by this engine
    buffer_bytes: int = 16 << 20  # for the library's own use


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily. Raises ConfigError for what can never work."""
    address = parse(url)
    _need(sys.platform == "linux", "mooncake:// works on Linux only")
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(f"{_FLAG} mooncake:// needs its client library: pip install 'penstock[mooncake]'; it needs libibverbs1, too")
    from penstock.kv.tiers.remote.mooncake_store import MooncakeStore

    return MooncakeStore(address, space, timeout_s)


def parse(url: str) -> MooncakeAddress:
    """Raises ConfigError."""
    form = "mooncake://host[:port][?option=value&...]"
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, strict_parsing=True) if parts.query else []
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"{_FLAG} must look like {form}") from None
    options = dict(pairs)
    _need(bool(host) and "@" not in parts.netloc and parts.path in ("", "/") and not parts.fragment, f"must look like {form}")
    _need(len(options) == len(pairs) and set(options) <= set(_OPTIONS), f"knows the options {', '.join(_OPTIONS)}, each at most once")
    _need(options.get("protocol", "tcp") in ("tcp", "rdma"), "has a protocol= that is neither tcp nor rdma")
    texts = {name: options[name] for name in ("metadata", "protocol", "device", "local") if name in options}
    sizes = {f"{name}_bytes": _gib(options[f"{name}_gib"]) for name in ("segment", "buffer") if f"{name}_gib" in options}
    return MooncakeAddress(host or "", port or _PORT)._replace(**texts, **sizes)  # type: ignore[arg-type]


def _gib(text: str) -> int:
    _need(re.fullmatch(r"\d{1,5}(\.\d{1,6})?", text) is not None, "has a size that is not a number of GiB")
    return int(float(text) * (1 << 30)) // 4096 * 4096


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"{_FLAG} {message}")

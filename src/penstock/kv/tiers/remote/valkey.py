"""A `BlockStore` in Valkey or Redis, a single server or a cluster, shared by all engines that name it. Owns the deadline of each call and
how much is on its way at once; what is exchanged is `valkey_exchange`'s business.

One block is one value, its header before its bytes, under `penstock:FORMAT:SPACE:KEY`. The server forgets blocks as its own memory policy
or their time to live says: that is a miss like any other.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.kv.tiers.envelope import HEADER_BYTES
from penstock.kv.tiers.remote.valkey_url import Address, parse
from penstock.kv.tiers.store import BlockStore, Outcome, Space, StoreUsage

if TYPE_CHECKING:  # both need the client library
    from penstock.kv.tiers.remote.valkey_exchange import Exchange
    from penstock.kv.tiers.remote.valkey_links import Links

_FIND_KEYS = 512  # questions on their way at once
_WINDOW_BYTES = 16 << 20  # of values on their way at once: the server keeps them in memory until they are taken


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily. Raises ConfigError for what can never work."""
    address = parse(url, os.environ)
    try:
        importlib.import_module("valkey")
    except ImportError:
        raise ConfigError("--kv-offload-remote valkey:// needs its client library: pip install 'penstock[remote]'") from None
    from penstock.kv.tiers.remote.valkey_exchange import Exchange
    from penstock.kv.tiers.remote.valkey_links import Links

    links = Links(address)
    window = max(1, _WINDOW_BYTES // (HEADER_BYTES + space.block_bytes))
    return ValkeyStore(address, links, Exchange(address, links, space), window, timeout_s)


class ValkeyStore:
    """Every call has connections of its own while it runs, and ends within `timeout_s`; `reset` alone has that for each exchange."""

    name = "remote"
    local = False

    def __init__(self, address: Address, links: Links, exchange: Exchange, window: int, timeout_s: float) -> None:
        self._address = address
        self._links = links
        self._exchange = exchange
        self._window = window  # blocks on their way at once
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        kind = "cluster " if self._address.cluster else ""
        return f"<ValkeyStore {kind}{', '.join(map(str, self._address.nodes))}{' with TLS' if self._address.tls else ''}>"

    def find(self, keys: Sequence[bytes]) -> int:
        deadline = self._deadline()
        num_found = 0
        for some in _runs(len(keys), _FIND_KEYS):
            there = self._exchange.exist(keys[some], deadline)
            if not all(there):
                return num_found + there.index(False)
            num_found += len(there)
        return num_found

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        deadline = self._deadline()
        runs = _runs(len(keys), self._window)
        return [outcome for some in runs for outcome in self._exchange.read(keys[some], into[some], deadline)]

    def write(self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        """What is there already is not sent again, only marked as used."""
        deadline = self._deadline()
        runs = _runs(len(keys), self._window)
        return [outcome for some in runs for outcome in self._exchange.write(keys[some], blocks[some], deadline)]

    def persist(self) -> None:
        """What outlives the server is for its owner to say: nothing is asked of it here."""

    def probe(self) -> None:
        """Every node must answer: one that does not would take its share of the blocks down with it."""
        deadline = self._deadline()
        self._links.forget()
        for node in self._links.nodes(deadline):
            self._exchange.ping(node, deadline)

    def reset(self) -> int:
        nodes = self._links.nodes(self._deadline())
        return sum(self._exchange.reset(node, self._timeout_s) for node in nodes)

    def usage(self) -> StoreUsage:
        """Others write and evict there, too: nobody counts but the server."""
        return StoreUsage(0)

    def close(self) -> None:
        self._links.close()

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s


def _runs(num: int, at_once: int) -> Iterator[slice]:
    for first in range(0, num, at_once):
        yield slice(first, min(num, first + at_once))

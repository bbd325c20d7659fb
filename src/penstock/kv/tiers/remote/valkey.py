"""A `BlockStore` in Valkey or Redis, a single server or a cluster, shared by all engines that name it. Owns the deadline of each
call; what is exchanged is `valkey_exchange`'s business, and connections are `valkey_links`'.

One block is one value, its header before its bytes, under `penstock:FORMAT:SPACE:KEY`. The server forgets blocks as its own memory policy
or their time to live says: that is a miss like any other.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.kv.tiers.remote.valkey_url import ValkeyAddress, parse
from penstock.kv.tiers.store import BlockStore, Outcome, Space, StoreUsage

if TYPE_CHECKING:  # both need the client library
    from penstock.kv.tiers.remote.valkey_exchange import Exchange
    from penstock.kv.tiers.remote.valkey_links import Links

_FIND_KEYS = 512  # questions on their way at once


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
    return ValkeyStore(address, links, Exchange(address, links, space), timeout_s)


class ValkeyStore:
    """Every call has connections of its own while it runs, and ends within `timeout_s`; `reset` alone has that for each exchange."""

    name = "remote"
    local = False

    def __init__(self, address: ValkeyAddress, links: Links, exchange: Exchange, timeout_s: float) -> None:
        self._address = address
        self._links = links
        self._exchange = exchange
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        kind = "cluster " if self._address.cluster else ""
        return f"<ValkeyStore {kind}{', '.join(map(str, self._address.nodes))}{' with TLS' if self._address.tls else ''}>"

    def find(self, keys: Sequence[bytes]) -> int:
        deadline = self._deadline()
        num_found = 0
        while num_found < len(keys):
            there = self._exchange.exist(keys[num_found : num_found + _FIND_KEYS], deadline)
            if not all(there):
                return num_found + there.index(False)
            num_found += len(there)
        return num_found

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        return self._exchange.read(keys, into, self._deadline())

    def write(self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        """What is there already is not sent again, only marked as used."""
        return self._exchange.write(keys, blocks, self._deadline())

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

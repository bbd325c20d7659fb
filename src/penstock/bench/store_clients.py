"""Clients of shared stores as anybody would use them: one value, one call. Owns their connections; who is compared with them is elsewhere.

Client libraries are imported when one is asked for, so that measurements without a store need none of them.
"""

from __future__ import annotations

import importlib
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from penstock.errors import ConfigError, StoreFailed

TIMEOUT_S = 60.0  # nothing is proven here, so that nothing has to be noticed soon

MOONCAKE_BUFFER_BYTES = 512 << 20  # for values on their way
S3_AT_ONCE = 16  # requests, as many as our store has


class Client(Protocol):
    """For several threads at once."""

    at_once: tuple[int, int]  # threads that read, threads that write: as many exchanges as our store has under way

    def write(self, name: str, value: bytes) -> None:
        """Under a name that was not used before."""

    def read(self, name: str) -> bytes | memoryview | None:
        """None: it is not there."""

    def remove(self, names: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def open_client(url: str, at_once: tuple[int, int]) -> Client:
    """`at_once` where the store has no number of its own. Raises ConfigError for a kind that there is no client of here."""
    scheme = urlsplit(url).scheme
    if scheme in ("valkey", "valkeys"):
        return ValkeyClient(url, at_once)
    if scheme == "s3":
        return BucketClient(url)
    if scheme == "mooncake":
        return MooncakeClient(url, at_once)
    raise ConfigError(f"bench transfer has no client of {scheme}:// to compare with")


class ValkeyClient:
    """GET and SET of valkey-py."""

    def __init__(self, url: str, at_once: tuple[int, int]) -> None:
        import valkey
        from valkey.cluster import ValkeyCluster

        from penstock.kv.tiers.remote.valkey_url import parse

        address = parse(url, os.environ)
        self.at_once = at_once
        settings: dict[str, Any] = {"username": address.user, "password": address.password, "socket_timeout": TIMEOUT_S}
        host, port = address.nodes[0]
        self._client: Any
        if address.cluster:
            if address.tls is not None:
                raise ConfigError("bench transfer compares with a cluster of Valkey without TLS only")
            self._client = ValkeyCluster(host=host, port=port, **settings)
        else:
            kind = valkey.Connection if address.tls is None else _with_tls(valkey.Connection, address.tls)
            pool = valkey.ConnectionPool(kind, host=host, port=port, db=address.db, **settings)
            self._client = valkey.Valkey(connection_pool=pool)

    def write(self, name: str, value: bytes) -> None:
        self._client.set(name, value)

    def read(self, name: str) -> bytes | None:
        found: bytes | None = self._client.get(name)
        return found

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._client.unlink(name)

    def close(self) -> None:
        self._client.close()


def _with_tls(plain: Any, context: ssl.SSLContext) -> Any:
    class Encrypted(plain):  # type: ignore[misc]
        """The library would make a context of its own."""

        def _connect(self) -> socket.socket:
            return context.wrap_socket(super()._connect(), server_hostname=self.host)

    return Encrypted


class BucketClient:
    """Objects through obstore."""

    def __init__(self, url: str) -> None:
        import obstore

        from penstock.kv.tiers.remote.s3 import parse
        from penstock.kv.tiers.remote.s3_bucket import connect

        self.at_once = S3_AT_ONCE, S3_AT_ONCE
        self._obstore: Any = obstore
        self._bucket = connect(parse(url), TIMEOUT_S)

    def write(self, name: str, value: bytes) -> None:
        self._obstore.put(self._bucket, name, value, use_multipart=False)

    def read(self, name: str) -> memoryview | None:
        try:
            return memoryview(self._obstore.get(self._bucket, name).bytes())
        except FileNotFoundError:
            return None

    def remove(self, names: Sequence[str]) -> None:
        self._obstore.delete(self._bucket, list(names))

    def close(self) -> None:
        """It has nothing to close."""


class MooncakeClient:
    """put and get of Mooncake's library, in this process."""

    def __init__(self, url: str, at_once: tuple[int, int]) -> None:
        from penstock.kv.tiers.remote.mooncake import parse

        address = parse(url)
        self.at_once = at_once
        try:
            library = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise ConfigError(f"Mooncake's client library cannot be used in this process: {error}") from None
        with socket.create_connection((address.host, address.port), TIMEOUT_S) as link:
            own = str(link.getsockname()[0])
        self._client: Any = library.MooncakeDistributedStore()
        where = (address.protocol, address.device, f"{address.host}:{address.port}")
        if code := self._client.setup(address.local or own, address.metadata, 0, MOONCAKE_BUFFER_BYTES, *where):
            raise StoreFailed(f"Mooncake's master does not take the library in ({code})")

    def write(self, name: str, value: bytes) -> None:
        if code := self._client.put(name, value):
            raise StoreFailed(f"Mooncake's library could not write ({code})")

    def read(self, name: str) -> bytes | None:
        return self._client.get(name) or None

    def remove(self, names: Sequence[str]) -> None:
        """What was read a moment ago stays for a while, whatever is asked."""
        for name in names:
            self._client.remove(name)

    def close(self) -> None:
        self._client.close()

"""A `BlockStore` in a bucket of S3, or of an object store that speaks like it. Owns the names of objects, the
requests that run at once and their deadline; connections and signatures are obstore's.

`s3://bucket[/prefix][?endpoint=http(s)://host:port&region=NAME&ca=FILE]`. Credentials come from the
environment (AWS_*) or from the machine, never from the URL.

One block is one object, its header before its bytes: `PREFIX/FORMAT/SPACE/KEY`. A manifest is one, too:
`PREFIX/snapshots/SPACE/ID`.

Only the calling thread touches a host slot: received bytes stay in separate memory until they are copied and
checked, and sent bytes were copied before. So a request that outlasts its deadline does no harm.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.remote import (
    FLAG,
    Requests,
    SharedStore,
    StoreUrl,
    check_hosts,
    copy_checked,
    need,
    parse_url,
)
from penstock.kv.tiers.store import FORMAT, BlockStore, Outcome, Space, Written, pack

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig

log = logging.getLogger(__name__)

_AT_ONCE = 16  # requests of this store that run at once
_MOST_LOOKED = 256  # keys that a search for the last one looks at
_REMOVE_AT_ONCE = 500  # objects that one request of a reset removes


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily. Raises ConfigError for what can never work."""
    address = parse_address(url)
    if host := urlsplit(address.options.get("endpoint", "")).hostname:
        check_hosts([host])
    return BucketStore(connect(address, timeout_s), address, space, timeout_s)


def parse_address(url: str) -> StoreUrl:
    """Its place is the bucket, its path the prefix. Raises ConfigError."""
    address = parse_url(url, "s3://bucket/prefix?endpoint=...&region=...", ("endpoint", "region", "ca"))
    hint = "give them in the environment, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    need(address.user is None, f"has credentials in its URL: {hint}")
    need(
        bool(address.place) and ":" not in address.place,
        "must name a bucket: s3://bucket/prefix; a host is an option, ?endpoint=...",
    )
    need(all(address.options.values()), "has an empty option")
    try:
        endpoint = urlsplit(address.options.get("endpoint", "https://default"))
    except ValueError:
        endpoint = urlsplit("")
    need(
        endpoint.scheme in ("http", "https") and bool(endpoint.hostname),
        "has an endpoint= that is not http://host or https://host",
    )
    need("@" not in endpoint.netloc, f"has credentials in its endpoint=: {hint}")
    return address


def connect(address: StoreUrl, timeout_s: float) -> S3Store:
    limit = timedelta(seconds=timeout_s)
    client: ClientConfig = {"timeout": limit, "connect_timeout": limit}
    endpoint = address.options.get("endpoint")
    if endpoint is not None:
        client["allow_http"] = endpoint.startswith("http://")
    try:
        if "ca" in address.options:
            client["root_certificate"] = Path(address.options["ca"]).read_bytes()
        named = {name: address.options[name] for name in ("endpoint", "region") if name in address.options}
        # A connection that the server has just closed is normal; longer failures are left to the breaker.
        pause: BackoffConfig = {"init_backoff": limit / 50, "max_backoff": limit / 10}
        again: RetryConfig = {"max_retries": 2, "retry_timeout": limit, "backoff": pause}
        return S3Store(
            address.place,
            prefix=address.path or None,
            client_options=client,
            retry_config=again,
            **named,  # type: ignore[arg-type]
        )
    except OSError as error:
        raise ConfigError(
            f"{FLAG}: the file for TLS cannot be read: {error.strerror or type(error).__name__}"
        ) from None
    except Exception as error:  # of obstore: its messages repeat settings
        raise ConfigError(
            f"{FLAG}: these settings, or the AWS_* variables, cannot be used ({type(error).__name__})"
        ) from None


class BucketStore(SharedStore):
    """Every call ends within `timeout_s`; `reset` alone has that for each request."""

    def __init__(self, bucket: S3Store, address: StoreUrl, space: Space, timeout_s: float) -> None:
        super().__init__(space, timeout_s)
        self._address = address
        self._bucket = bucket
        self._folder = f"{FORMAT}/{space.digest.hex()}"
        self._manifests = f"snapshots/{space.digest.hex()}"
        self._requests = Requests(timeout_s, _AT_ONCE, _failure)

    def __repr__(self) -> str:
        return f"<BucketStore {self._address.place}/{self._address.path}>"

    def find(self, keys: Sequence[bytes]) -> int:
        """Probes a few positions at once, then again between the last present and the first missing one. A
        hole further ahead is not seen; reading finds it."""
        until = self._until()
        # all before `there` count as there; `missing` is not, or does not exist
        there, missing = 0, len(keys)
        while there < missing:
            places = _spread(there, missing)
            found = self._requests.each(self._has, [keys[place] for place in places], until)
            first = next((i for i, has in enumerate(found) if has is not True), None)
            if first is None:
                there = places[-1] + 1
            else:
                missing = places[first]
                there = places[first - 1] + 1 if first else there
        return there

    def find_last(self, keys: Sequence[bytes]) -> int:
        """Looks at the last `_MOST_LOOKED` keys, from behind: each is a request."""
        until, end = self._until(), len(keys)
        while end > max(0, len(keys) - _MOST_LOOKED):
            first = max(0, end - _AT_ONCE)
            found = self._requests.each(self._has, keys[first:end], until)
            there = [place for place, has in enumerate(found, first + 1) if has is True]
            if there:
                return there[-1]
            end = first
        return 0

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        until = self._until()
        outcomes = [Outcome.FAILED] * len(keys)
        for i, value in self._requests.together(self._get, keys, until):
            if not isinstance(value, Exception):
                outcomes[i] = (
                    Outcome.MISSING if value is None else copy_checked(value, keys[i], self._digest, into[i])
                )
        bad = [
            self._path(key) for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.CORRUPT
        ]
        with contextlib.suppress(StoreFailed):  # the wrong object stays; the next reader tries again
            self._requests.each(partial(obstore.delete, self._bucket), bad, until)
        return outcomes

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        """Does not send existing objects again."""
        until = self._until()
        there = self._requests.each(self._has, keys, until)
        new = [i for i, has in enumerate(there) if has is not True]
        values = [(keys[i], b"".join((pack(keys[i], self._digest, blocks[i]), blocks[i]))) for i in new]
        outcomes = [Outcome.DONE] * len(keys)
        for i, answer in zip(new, self._requests.each(self._put, values, until), strict=True):
            if isinstance(answer, Exception):
                outcomes[i] = Outcome.FAILED
        return outcomes

    def probe(self) -> None:
        """An empty listing: needs the bucket, and the right to list it."""
        self._requests.one(self._some_paths, f"{self._folder}/probe")

    def reset(self) -> int:
        removed = 0
        before: list[str] = []
        while paths := self._requests.one(self._some_paths, self._folder):
            if paths == before:
                raise StoreFailed("the bucket does not let go of its objects")
            self._requests.one(partial(obstore.delete, self._bucket), paths)
            removed, before = removed + len(paths), paths
        return removed

    def close(self) -> None:
        self._requests.close()

    # ---------------------------------------------------------------------------------------------- manifests

    # A bucket has compare-and-write, but no compare-and-remove. A conditional remove therefore writes an
    # empty object, which counts as absent. The next manifest of that name replaces it.

    def manifests(self, start: str = "") -> list[str]:
        ids = [
            path.rpartition("/")[2] for path in self._requests.one(self._paths_with_content, self._manifests)
        ]
        return [id for id in ids if id.startswith(start)]

    def read_manifest(self, id: str) -> bytes | None:
        content, _ = self._requests.one(self._get_whole, f"{self._manifests}/{id}")
        return content or None

    def write_manifest(
        self, id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
    ) -> Written:
        """It never expires in the bucket: an engine that finds it expired ignores it."""
        path = f"{self._manifests}/{id}"
        if (
            instead_of is None
            and self._honours_conditions
            and self._requests.one(self._put_if, (path, data, "create"))
        ):
            return Written.DONE
        return Written.DONE if self._replace(path, data, instead_of or b"") else Written.TAKEN

    def remove_manifest(self, id: str, only: bytes | None = None) -> None:
        path = f"{self._manifests}/{id}"
        if only is None:
            self._requests.one(self._remove_one, path)
        else:
            self._replace(path, b"", only)

    def _replace(self, path: str, data: bytes, expected: bytes) -> bool:
        """Replace the object if it has that content. On a server that ignores conditions a missing object has
        no content, and the last write wins."""
        content, e_tag = self._requests.one(self._get_whole, path)
        if self._honours_conditions:
            version: PutMode = {"e_tag": e_tag}
            return content == expected and self._requests.one(self._put_if, (path, data, version))
        if (content or b"") != expected:
            return False
        self._requests.one(self._put_if, (path, data, "overwrite"))
        return self._requests.one(self._get_whole, path)[0] == data

    @functools.cached_property
    def _honours_conditions(self) -> bool:
        """Whether the server refuses to create an existing object. Some servers ignore that condition."""
        path = "snapshots/conditions"
        self._requests.one(self._put_if, (path, b"", "overwrite"))
        honours = not self._requests.one(self._put_if, (path, b"", "create"))
        if not honours:
            log.warning(
                "the bucket's server ignores conditions: two engines may both take one name, without an error"
            )
        return honours

    # --------------------------------------------------- one request each; they raise what the library raises

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}"

    def _has(self, key: bytes) -> bool:
        try:
            return obstore.head(self._bucket, self._path(key))["size"] == self._value_bytes
        except FileNotFoundError:
            return False

    def _get(self, key: bytes) -> memoryview | None:
        """Downloads nothing of an object whose length is not that of a block."""
        try:
            answer = obstore.get(self._bucket, self._path(key))
            right = answer.meta["size"] == self._value_bytes
            return memoryview(answer.bytes() if right else b"")
        except FileNotFoundError:
            return None

    def _put(self, named: tuple[bytes, bytes]) -> None:
        key, value = named
        # a broken multipart upload would stay and cost money
        obstore.put(self._bucket, self._path(key), value, use_multipart=False)

    def _put_if(self, asked: tuple[str, bytes, PutMode]) -> bool:
        """False: the object's state does not match `mode`."""
        path, value, mode = asked
        try:
            obstore.put(self._bucket, path, value, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def _get_whole(self, path: str) -> tuple[bytes | None, str | None]:
        """Its content and its version tag."""
        try:
            answer = obstore.get(self._bucket, path)
            return bytes(answer.bytes()), answer.meta["e_tag"]
        except FileNotFoundError:
            return None, None

    def _remove_one(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._bucket, path)

    def _paths_with_content(self, folder: str) -> list[str]:
        return [
            entry["path"] for chunk in obstore.list(self._bucket, folder) for entry in chunk if entry["size"]
        ]

    def _some_paths(self, folder: str) -> list[str]:
        chunk = next(iter(obstore.list(self._bucket, folder, chunk_size=_REMOVE_AT_ONCE)), [])
        return [entry["path"] for entry in chunk]


def _failure(error: Exception) -> StoreFailed:
    """Reports only the kind of an error: its message contains the request."""
    if isinstance(error, FileNotFoundError):
        return StoreFailed("the bucket does not exist, or not any more")
    return StoreFailed(f"the bucket refused or broke off a request ({type(error).__name__})")


def _spread(first: int, stop: int) -> list[int]:
    """At most `_AT_ONCE` positions of a range, evenly spaced, including the first and the last, which settle
    most searches."""
    num = min(_AT_ONCE, stop - first)
    return sorted({first + i * (stop - 1 - first) // max(1, num - 1) for i in range(num)})

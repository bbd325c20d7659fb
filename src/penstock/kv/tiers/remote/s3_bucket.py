"""A `BlockStore` in a bucket, shared by all engines that name it. Owns the names of objects, the exchanges that run at once and their
deadline; requests, connections and signatures are obstore's.

One block is one object, its header before its bytes: `PREFIX/FORMAT/SPACE/KEY`.

A host slot is touched by the calling thread only: what comes back lies in memory of its own until it is copied and checked, and what is
sent was copied before. So a request that outlasts its deadline can harm nobody.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import obstore
from obstore.store import S3Store

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.envelope import FORMAT, HEADER_BYTES, pack, unpack
from penstock.kv.tiers.store import Outcome, Space, StoreUsage

if TYPE_CHECKING:
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig

    from penstock.kv.tiers.remote.s3 import Address

T = TypeVar("T")
U = TypeVar("U")

_AT_ONCE = 16  # requests of this store that run at once
_REMOVE_AT_ONCE = 500  # objects that one request of a reset removes


def connect(address: Address, timeout_s: float) -> S3Store:
    limit = timedelta(seconds=timeout_s)
    client: ClientConfig = {"timeout": limit, "connect_timeout": limit}
    endpoint = address.options.get("endpoint")
    if endpoint is not None:
        client["allow_http"] = endpoint.startswith("http://")
    try:
        if "ca" in address.options:
            client["root_certificate"] = Path(address.options["ca"]).read_bytes()
        named = {name: address.options[name] for name in ("endpoint", "region") if name in address.options}
        # A connection that the server has just given up is met now and then; anything that lasts is the breaker's business.
        pause: BackoffConfig = {"init_backoff": limit / 50, "max_backoff": limit / 10}
        again: RetryConfig = {"max_retries": 2, "retry_timeout": limit, "backoff": pause}
        return S3Store(address.bucket, prefix=address.prefix or None, client_options=client, retry_config=again, **named)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(f"--kv-offload-remote: the file for TLS cannot be read: {error.strerror or type(error).__name__}") from None
    except Exception as error:  # of obstore: its messages repeat settings
        raise ConfigError(f"--kv-offload-remote: these settings, or the AWS_* variables, cannot be used ({type(error).__name__})") from None


class BucketStore:
    """Every call ends within `timeout_s`; `reset` alone has that for each exchange."""

    name = "remote"
    local = False

    def __init__(self, bucket: S3Store, address: Address, space: Space, timeout_s: float) -> None:
        self._bucket = bucket
        self._address = address
        self._space = space
        self._folder = f"{FORMAT}/{space.digest.hex()}"
        self._timeout_s = timeout_s
        self._threads = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "s3")

    def __repr__(self) -> str:
        return f"<BucketStore {self._address.bucket}/{self._address.prefix}>"

    # ------------------------------------------------------------------------------------------------------------- questions

    def find(self, keys: Sequence[bytes]) -> int:
        """Asks for a few places at once, and again between the last that is there and the first that is not. A hole further ahead is not
        seen: reading shows it."""
        until = self._until()
        there, missing = 0, len(keys)  # all before `there` count as there; `missing` is not, or does not exist
        while there < missing:
            places = _spread(there, missing)
            found = self._each(self._has, [keys[place] for place in places], until)
            first = next((i for i, has in enumerate(found) if has is not True), None)
            if first is None:
                there = places[-1] + 1
            else:
                missing = places[first]
                there = places[first - 1] + 1 if first else there
        return there

    def _has(self, key: bytes) -> bool:
        try:
            return obstore.head(self._bucket, self._path(key))["size"] == HEADER_BYTES + self._space.block_bytes
        except FileNotFoundError:
            return False

    # ---------------------------------------------------------------------------------------------------------------- blocks

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        until = self._until()
        outcomes = [Outcome.FAILED] * len(keys)
        for place, value in self._together(self._get, keys, until):
            if not isinstance(value, _Broken):
                outcomes[place] = Outcome.MISSING if value is None else self._place(value, keys[place], into[place])
        bad = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.CORRUPT]
        with contextlib.suppress(StoreFailed):  # it stays, and the next one to read it tries again
            self._each(self._remove, bad, until)
        return outcomes

    def _get(self, key: bytes) -> memoryview | None:
        """Nothing is received of an object whose length is not that of a block."""
        try:
            answer = obstore.get(self._bucket, self._path(key))
            right = answer.meta["size"] == HEADER_BYTES + self._space.block_bytes
            return memoryview(answer.bytes() if right else b"")
        except FileNotFoundError:
            return None

    def _place(self, value: memoryview, key: bytes, slot: memoryview) -> Outcome:
        """Checks what lies in the slot, after the copy."""
        if len(value) != HEADER_BYTES + len(slot):
            return Outcome.CORRUPT
        np.copyto(np.frombuffer(slot, np.uint8), np.frombuffer(value, np.uint8, offset=HEADER_BYTES))  # without the interpreter's lock
        envelope = unpack(value[:HEADER_BYTES])
        ours = envelope is not None and envelope.key == key and envelope.space == self._space.digest and envelope.fits(slot)
        return Outcome.DONE if ours else Outcome.CORRUPT

    def write(self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        """What is there already is not sent again."""
        until = self._until()
        there = self._each(self._has, keys, until)
        new = [place for place, has in enumerate(there) if has is not True]
        values = [(keys[place], self._value(keys[place], blocks[place])) for place in new]
        outcomes = [Outcome.DONE] * len(keys)
        for place, answer in zip(new, self._each(self._put, values, until), strict=True):
            if isinstance(answer, _Broken):
                outcomes[place] = Outcome.FAILED
        return outcomes

    def _value(self, key: bytes, block: memoryview) -> bytes:
        return b"".join((pack(key, self._space.digest, block), block))

    def _put(self, named: tuple[bytes, bytes]) -> None:
        key, value = named
        obstore.put(self._bucket, self._path(key), value, use_multipart=False)  # in parts, a broken upload would stay and cost money

    def _remove(self, key: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._bucket, self._path(key))

    # ------------------------------------------------------------------------------------------------------------- the whole

    def persist(self) -> None:
        """An object store has answered a write when it keeps it."""

    def probe(self) -> None:
        """A list of nothing: it needs the bucket, and the right to look into it."""
        self._one(self._some_paths, f"{self._folder}/probe")

    def reset(self) -> int:
        removed = 0
        before: list[str] = []
        while paths := self._one(self._some_paths, self._folder):
            if paths == before:
                raise StoreFailed("the bucket does not let go of its objects")
            self._one(lambda some: obstore.delete(self._bucket, some), paths)
            removed, before = removed + len(paths), paths
        return removed

    def _some_paths(self, folder: str) -> list[str]:
        chunk = next(iter(obstore.list(self._bucket, folder, chunk_size=_REMOVE_AT_ONCE)), [])
        return [entry["path"] for entry in chunk]

    def usage(self) -> StoreUsage:
        """Others write and remove there, too: nobody counts."""
        return StoreUsage(0)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------------- exchanges

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}"

    def _until(self) -> float:
        return time.monotonic() + self._timeout_s

    def _each(self, job: Callable[[U], T], things: Sequence[U], until: float) -> list[T | _Broken]:
        done = dict(self._together(job, things, until))
        return [done[place] for place in range(len(things))]

    def _one(self, job: Callable[[U], T], thing: U) -> T:
        (answer,) = self._each(job, [thing], self._until())
        if isinstance(answer, _Broken):
            raise answer.failure()
        return answer

    def _together(self, job: Callable[[U], T], things: Sequence[U], until: float) -> Iterator[tuple[int, T | _Broken]]:
        """Answers with their places, as they come. Raises StoreFailed where none came, or not all by the deadline."""
        running = {self._threads.submit(job, thing): place for place, thing in enumerate(things)}
        broken: list[_Broken] = []
        try:
            for future in concurrent.futures.as_completed(running, max(0.0, until - time.monotonic())):
                error = future.exception()
                if isinstance(error, Exception):
                    broken.append(_Broken(error))
                    yield running[future], broken[-1]
                else:
                    yield running[future], future.result()
        except TimeoutError:
            raise StoreFailed(f"the bucket did not answer within {self._timeout_s:g} s") from None
        finally:
            for future in running:
                future.cancel()
        if broken and len(broken) == len(things):
            raise broken[0].failure()


class _Broken:
    """A request that failed. Of its error only the kind is told: the message has the request in it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def failure(self) -> StoreFailed:
        if isinstance(self._error, FileNotFoundError):
            return StoreFailed("the bucket does not exist, or not any more")
        return StoreFailed(f"the bucket refused or broke off a request ({type(self._error).__name__})")


def _spread(first: int, stop: int) -> list[int]:
    """At most `_AT_ONCE` places of a range, evenly, the first and the last among them: most questions end with one of those."""
    num = min(_AT_ONCE, stop - first)
    return sorted({first + i * (stop - 1 - first) // max(1, num - 1) for i in range(num)})

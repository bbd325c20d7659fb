"""Answers of `/v1/responses` that a client may continue by `previous_response_id`. Owns their text, within a
limit of size and time.

One object for all front processes: it is beside the engine, so any front can take the next request.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.errors import ResponseMissing

MOST_BYTES = 64 << 20  # in total; the least recently used are forgotten first
LASTS_S = 24 * 3600.0  # after the last use


T = TypeVar("T")


class KeptResponse(NamedTuple):
    """Both as JSON."""

    items: bytes  # the conversation that was answered
    response: bytes  # the answer, as the client got it


class ResponseStore(Protocol):
    """An answer belongs to its `owner`; other owners do not find it. Never blocks; a missing one raises
    ResponseMissing in the future."""

    def keep(self, id: str, owner: str, kept: KeptResponse) -> Future[None]: ...

    def find(self, id: str, owner: str) -> Future[KeptResponse]: ...

    def delete(self, id: str, owner: str) -> Future[None]: ...


class KeptResponses:
    """Any thread may call."""

    def __init__(
        self,
        most_bytes: int = MOST_BYTES,
        lasts_s: float = LASTS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_bytes, self._lasts_s, self._clock = most_bytes, lasts_s, clock
        self._lock = threading.Lock()
        # with the time of last use, oldest first
        self._kept: OrderedDict[tuple[str, str], tuple[float, KeptResponse]] = OrderedDict()
        self._num_bytes = 0

    def keep(self, id: str, owner: str, kept: KeptResponse) -> Future[None]:
        with self._lock:
            self._drop((id, owner))
            self._kept[id, owner] = self._clock(), kept
            self._num_bytes += _size(kept)
            self._forget()
        return _done(None)

    def find(self, id: str, owner: str) -> Future[KeptResponse]:
        with self._lock:
            self._forget()
            if (id, owner) not in self._kept:
                return _missing(id)
            _, kept = self._kept[id, owner]
            self._kept[id, owner] = self._clock(), kept
            self._kept.move_to_end((id, owner))
        return _done(kept)

    def delete(self, id: str, owner: str) -> Future[None]:
        with self._lock:
            self._forget()
            return _done(None) if self._drop((id, owner)) else _missing(id)

    def _forget(self) -> None:
        """Drop expired answers, and the oldest while there are too many."""
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            if self._num_bytes <= self._most_bytes and now - self._kept[oldest][0] <= self._lasts_s:
                return
            self._drop(oldest)

    def _drop(self, key: tuple[str, str]) -> bool:
        if (found := self._kept.pop(key, None)) is None:
            return False
        self._num_bytes -= _size(found[1])
        return True


def _size(kept: KeptResponse) -> int:
    return len(kept.items) + len(kept.response)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _missing(id: str) -> Future[Any]:
    future: Future[Any] = Future()
    why = "it was not stored, has expired, or has another key or cache_salt"
    future.set_exception(ResponseMissing(f"there is no response {id!r} here: {why}"))
    return future

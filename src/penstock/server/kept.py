"""Answers of `/v1/responses` that a client may continue by `previous_response_id`. Owns their text, within a
limit of size and time.

One object for all front processes: it is beside the engine, so any front can take the next request.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from penstock.errors import ResponseMissing

MOST_BYTES = 64 << 20  # in total; the least recently used are forgotten first
LASTS_S = 24 * 3600.0  # after the last use


class KeptResponse(NamedTuple):
    """Both as JSON."""

    items: bytes  # the conversation that was answered
    response: bytes  # the answer, as the client got it


class KeptResponses:
    """An answer belongs to its `owner`; other owners do not find it: ResponseMissing. Any thread may call."""

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

    def keep(self, id: str, owner: str, kept: KeptResponse) -> None:
        with self._lock:
            self._drop((id, owner))
            self._kept[id, owner] = self._clock(), kept
            self._num_bytes += _size(kept)
            self._forget()

    def find(self, id: str, owner: str) -> KeptResponse:
        with self._lock:
            self._forget()
            if (id, owner) not in self._kept:
                raise _missing(id)
            _, kept = self._kept[id, owner]
            self._kept[id, owner] = self._clock(), kept
            self._kept.move_to_end((id, owner))
        return kept

    def delete(self, id: str, owner: str) -> None:
        with self._lock:
            self._forget()
            if not self._drop((id, owner)):
                raise _missing(id)

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


def _missing(id: str) -> ResponseMissing:
    why = "it was not stored, has expired, or has another key or cache_salt"
    return ResponseMissing(f"there is no response {id!r} here: {why}")

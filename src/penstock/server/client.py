"""The server's interface to an engine, in this process (`Engine` and `EngineLoop`) or in another one
(`RemoteEngine`). Owns the interface, and what fronts share: seats, and figures of HTTP exchanges."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.contract import (
    Adapter,
    Grammar,
    Listener,
    LoadedAdapter,
    Prefetched,
    SamplingParams,
    Snapshot,
    SnapshotContent,
    SnapshotList,
    SnapshotRequest,
)
from penstock.engine.stats import EngineStats
from penstock.figures import Histogram
from penstock.models.tokenizer import TextCodec
from penstock.server.kept import KeptResponses, ResponseStore
from penstock.server.seats import Gate, GateNumber, SeatBook

if TYPE_CHECKING:
    from penstock.server.access import Exchange

FlushLevel = Literal["captured", "visible", "persisted"]
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(0, 21, 2))  # 1 to a million


class AdapterNames(Protocol):
    """The adapters that requests may name. Only `load_inside` and `unload` take long."""

    @property
    def root(self) -> object:
        """None: clients may load none."""

    def all(self) -> Sequence[LoadedAdapter]: ...

    def find(self, name: str) -> LoadedAdapter | None: ...

    def try_hold(self, name: str) -> AbstractContextManager[Adapter] | None:
        """The adapter that has the name now. Until the hold ends, requests can be submitted to that
        content."""

    def load_inside(self, name: str, path: str) -> LoadedAdapter: ...

    def unload(self, name: str) -> bool: ...


class GrammarCompiler(Protocol):
    def begin(self, grammar: Grammar) -> Future[Any]:
        """Free of cost while the result is kept. A cancel ends it, unless other callers wait for the same
        grammar."""


class SnapshotStore(Protocol):
    """Snapshots by name. Never blocks. Cancelling a returned future ends the call if it has not begun."""

    def begin_take(self, asked: SnapshotRequest) -> Future[Snapshot]: ...

    def begin_all(self, cache_salt: str = "") -> Future[SnapshotList]: ...

    def begin_find(self, name: str, cache_salt: str = "") -> Future[Snapshot]: ...

    def begin_open(
        self, name: str, cache_salt: str = "", adapter: Adapter | None = None
    ) -> Future[SnapshotContent]: ...

    def begin_delete(self, name: str, cache_salt: str = "") -> Future[None]: ...


class EngineClient(Protocol):
    """Only `stats`, `reset_cache` and `wait_flushed` may block. All may be called from any thread."""

    name: str
    tokenizer: TextCodec
    max_model_len: int
    sampling: Mapping[str, Any]

    @property
    def tiers(self) -> tuple[str, ...]: ...

    @property
    def adapters(self) -> AdapterNames: ...

    @property
    def grammars(self) -> GrammarCompiler: ...

    @property
    def snapshots(self) -> SnapshotStore: ...

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, listener: Listener, *args: Any, **options: Any
    ) -> str:
        """`options` are those of `Engine.submit`."""

    def cancel(self, request_id: str) -> None: ...

    def note_seen(self, request_id: str, num_tokens: int) -> Future[None]:
        """As `Engine.note_seen`."""

    def prefetch(
        self,
        prompt: Sequence[int] | None = None,
        *,
        session: str = "",
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> Future[Prefetched | None]: ...

    def reset_cache(self, tiers: Sequence[str] = ("device", "host")) -> dict[str, int]: ...

    def wait_flushed(self, level: FlushLevel, timeout_s: float) -> None: ...

    def stats(self) -> EngineStats: ...


class EngineLife(Protocol):
    """The state of the engine's loop."""

    def start(self) -> None: ...

    @property
    def is_warm(self) -> bool: ...

    def failed(self) -> BaseException | None: ...

    def beat_age_s(self) -> float: ...

    def close(self, deadline_s: float) -> None: ...


@dataclass(slots=True)
class RequestFigures:
    """Lives on the event loop's thread. Plain data: fronts send theirs to each other."""

    by_status: dict[tuple[str, str], int] = field(default_factory=Counter)  # path, status
    by_finish: dict[str, int] = field(default_factory=Counter)  # choices by finish reason
    # of generating requests: from their first byte to the answer's last
    e2e: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue: Histogram = field(default_factory=lambda: Histogram(QUEUE_SECONDS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def add(self, exchange: Exchange) -> None:
        """An exchange is over."""
        self.by_status[exchange.route, str(exchange.status)] += 1
        if not exchange.generating:
            return
        for finish in exchange.finish:
            self.by_finish[finish] += 1
        self.e2e.add(exchange.ended_s - exchange.started_s)
        self.prompt_tokens.add(exchange.prompt_tokens)
        self.output_tokens.add(exchange.output_tokens)
        if exchange.queue_s is not None:
            self.queue.add(exchange.queue_s)

    def with_others(self, others: Iterable[RequestFigures]) -> RequestFigures:
        """The sum; the operands are unchanged."""
        total = RequestFigures()
        for one in (self, *others):
            for key, num in one.by_status.items():
                total.by_status[key] += num
            for finish, num in one.by_finish.items():
                total.by_finish[finish] += num
            for name in ("e2e", "queue", "prompt_tokens", "output_tokens"):
                getattr(total, name).take_in(getattr(one, name))
        return total


@dataclass(frozen=True, slots=True)
class Fronts:
    """What all front processes of a server share. By default this front is alone: HTTP and engine are one
    process."""

    book: SeatBook = field(default_factory=lambda: SeatBook.make(1))
    index: int = 0
    started_s: float = field(default_factory=time.time)  # start of the server, the same in all processes
    engine_pid: int | None = None  # None: it is this process
    # of the engine, and of all other fronts. May block
    stats: Callable[[], tuple[EngineStats, list[RequestFigures]]] | None = None

    responses: ResponseStore = field(default_factory=KeptResponses)

    def gate(self, limit: int, what: str, number: GateNumber) -> Gate:
        return Gate(limit, what, self.book, self.index, number)

    def note_connections(self, num: int) -> int:
        """This front has `num` connections open; returns the number of the front with the fewest."""
        return self.book.note_connections(self.index, num)

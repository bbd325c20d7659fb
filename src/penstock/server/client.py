"""What the server asks of an engine, wherever that runs: in this process (`Engine` and `EngineLoop` as they are) or in one of its own
(`RemoteEngine`). Owns the interface, and
what fronts have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

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
from penstock.models.tokenizer import TextCodec
from penstock.server.request_figures import RequestFigures
from penstock.server.seats import Gate, GateNumber, SeatBook

FlushLevel = Literal["captured", "visible", "persisted"]


class AdapterNames(Protocol):
    """The adapters that requests may name. Only `load_inside` and `unload` take long."""

    @property
    def root(self) -> object:
        """None: clients may load none."""

    def all(self) -> Sequence[LoadedAdapter]: ...

    def find(self, name: str) -> LoadedAdapter | None: ...

    def try_hold(self, name: str) -> AbstractContextManager[Adapter] | None:
        """The adapter that has the name now; until the hold ends, that content can be submitted to."""

    def load_inside(self, name: str, path: str) -> LoadedAdapter: ...

    def unload(self, name: str) -> bool: ...


class GrammarCompiler(Protocol):
    def begin(self, grammar: Grammar) -> Future[Any]:
        """Whoever keeps the result finds it again at no cost."""

    def late(self, future: Future[Any]) -> Exception:
        """Whose fault it is that it is not compiled by now."""


class SnapshotStore(Protocol):
    """Snapshots by their names. Everything may block."""

    def take(self, asked: SnapshotRequest) -> Snapshot: ...

    def all(self, cache_salt: str = "") -> SnapshotList: ...

    def find(self, name: str, cache_salt: str = "") -> Snapshot: ...

    def open(self, name: str, cache_salt: str = "", adapter: Adapter | None = None) -> SnapshotContent: ...

    def delete(self, name: str, cache_salt: str = "") -> None: ...


class EngineClient(Protocol):
    """`stats`, `reset_cache` and `wait_flushed` may block; nothing else does. All may be called from any thread."""

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

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, listener: Listener, *args: Any, **options: Any) -> str:
        """`options` are those of `Engine.submit`."""

    def cancel(self, request_id: str) -> None: ...

    def prefetch(
        self, prompt: Sequence[int] | None = None, *, session: str = "", cache_salt: str = "", adapter: Adapter | None = None
    ) -> Future[Prefetched | None]: ...

    def reset_cache(self, tiers: Sequence[str] = ("device", "host")) -> dict[str, int]: ...

    def wait_flushed(self, level: FlushLevel, timeout_s: float) -> None: ...

    def stats(self) -> EngineStats: ...


class EngineLife(Protocol):
    """How the engine's loop is doing."""

    def start(self) -> None: ...

    def failed(self) -> BaseException | None: ...

    def beat_age_s(self) -> float: ...

    def close(self, deadline_s: float) -> None: ...


class Fronts:
    """What all front processes of a server share. This one is alone: HTTP and engine are one process."""

    engine_pid: int | None = None  # None: it is this process

    def __init__(self, engine: EngineClient, book: SeatBook | None = None, index: int = 0) -> None:
        self.started_s = time.time()  # when the server was, as all of them say
        self.book = SeatBook.make(1) if book is None else book
        self.index = index
        self._engine = engine

    def gate(self, limit: int, what: str, number: GateNumber) -> Gate:
        return Gate(limit, what, self.book, self.index, number)

    def snapshot(self, own: RequestFigures) -> tuple[EngineStats, RequestFigures]:
        """Of the engine, and of all fronts, `own` included. May block."""
        return self._engine.stats(), own

"""Snapshots as callers of the engine request them. Owns the step from a session or a prompt to its tokens;
storage owns the snapshots."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.contract import SamplingParams, Snapshot, SnapshotRequest
from penstock.engine.inbox import Inbox, fail
from penstock.engine.sessions import SessionContent, Sessions
from penstock.errors import DeadlineExceeded, InvalidRequest, SessionMissing
from penstock.kv.questions import run_steps
from penstock.kv.snapshots import Snapshots, wait_answered

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

SAVE_S = 60.0  # for computed blocks to reach the tiers
TAKE_S = 150.0  # in all, with the wait for the engine thread and the lane
_NAME_BYTES = 8


class EngineSnapshots(Snapshots):
    """All methods but `step` may be called from any thread. `begin_x` never blocks."""

    def __init__(self, engine: Engine, sessions: Sessions, inbox: Inbox, most_in_host: int | None) -> None:
        self._engine = engine
        self._sessions = sessions
        self._inbox = inbox
        self._saving: deque[tuple[float, Future[None]]] = deque()  # with deadlines, in order
        super().__init__(engine.cache, most_in_host)

    def begin_take(self, asked: SnapshotRequest) -> Future[Snapshot]:
        """Raises SnapshotTaken, SnapshotSpace, SnapshotRefused, SessionMissing, StoreFailed."""
        asked = asked if asked.name else asked._replace(name=f"snapshot-{secrets.token_hex(_NAME_BYTES)}")
        if bool(asked.session) == bool(asked.prompt):
            raise InvalidRequest("give either a session or a prompt to take a snapshot of", "session_id")
        if not asked.session:
            self._engine.limits.checked(np.frombuffer(asked.prompt, np.uint32), SamplingParams(max_tokens=0))  # type: ignore[arg-type]
        return run_steps(self._taken(asked))

    def take(self, asked: SnapshotRequest) -> Snapshot:
        """Blocks."""
        return wait_answered(self.begin_take(asked), TAKE_S)

    def _taken(self, asked: SnapshotRequest) -> Generator[Future[Any], Any, Snapshot]:
        tokens = asked.prompt
        if asked.session:
            content: SessionContent | None = yield self._inbox.call(
                lambda: self._sessions.content_of(asked.cache_salt, asked.session)
            )
            if content is None:
                raise SessionMissing(
                    "no request of this session has ended here recently, or its cache_salt was different"
                )
            tokens, asked = content.tokens, asked._replace(adapter=content.adapter)
        return (yield from self.taking(asked, np.frombuffer(tokens, np.uint32), self._begin_save))

    def _begin_save(self, keys: Sequence[bytes]) -> Future[None]:
        """Ends when these blocks are in the first cold tier, or in host memory if there is none."""
        cache = self._engine.cache
        self._inbox.put(lambda: cache.save(keys, self._engine.launched()), only_open=True)
        saved = self._engine.begin_flush("persisted" if cache.cold_tiers else "visible")
        self._saving.append((time.monotonic() + SAVE_S, saved))
        return saved

    def step(self) -> None:
        while self._saving and (self._saving[0][1].done() or time.monotonic() >= self._saving[0][0]):
            fail(
                self._saving.popleft()[1],
                DeadlineExceeded(
                    f"its blocks were not saved within {SAVE_S:g} s; this continues in the background"
                ),
            )
        super().step()

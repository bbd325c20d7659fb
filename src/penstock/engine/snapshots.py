"""Snapshots as callers of an engine ask for them. Owns the way from a session or a prompt to the tokens that a snapshot is of; snapshots
themselves are storage's."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.contract import SamplingParams, Snapshot, SnapshotRequest
from penstock.engine.sessions import SessionContent, Sessions
from penstock.errors import DeadlineExceeded, InvalidRequest, SessionMissing
from penstock.kv.snapshots import Snapshots

if TYPE_CHECKING:
    from penstock.engine.engine import Engine, FlushLevel

SAVE_S = 60.0  # for what was computed to reach the tiers
_TURN_S = 30.0  # for the engine thread to come round
_NAME_BYTES = 8


class EngineSnapshots(Snapshots):
    """Everything may be called from any thread, and may block, but `step`."""

    def __init__(self, engine: Engine, sessions: Sessions, run: Callable[..., None], most_in_host: int | None) -> None:
        self._engine = engine
        self._sessions = sessions
        self._run = run  # on the engine thread
        super().__init__(engine.cache, most_in_host)

    def take(self, asked: SnapshotRequest) -> Snapshot:
        """Raises SnapshotTaken, SnapshotSpace, SnapshotRefused, SessionMissing, StoreFailed."""
        asked = asked if asked.name else asked._replace(name=f"snapshot-{secrets.token_hex(_NAME_BYTES)}")
        if bool(asked.session) == bool(asked.prompt):
            raise InvalidRequest("a snapshot is taken of a session or of a prompt, and not of both", "session_id")
        tokens = np.frombuffer(asked.prompt, np.uint32)
        if asked.session:
            content = self._content_of(asked.cache_salt, asked.session)
            tokens, asked = np.frombuffer(content.tokens, np.uint32), asked._replace(adapter=content.adapter)
        else:
            self._engine.limits.checked(tokens, SamplingParams(max_tokens=0))  # type: ignore[arg-type]
        return self.take_of(asked, tokens, functools.partial(self._wait_saved, asked, tokens))

    def _wait_saved(self, asked: SnapshotRequest, tokens: NDArray[np.uint32]) -> None:
        """Until its blocks are where they outlive the process, where they can, or in host memory."""
        cache = self._engine.cache
        prefix = cache.prefix_of(tokens[: asked.num_tokens], asked.cache_salt, asked.adapter)
        if prefix is not None:
            self._run(lambda: cache.save(prefix.keys, self._engine.launched()), only_open=True)
        level: FlushLevel = "persisted" if cache.cold_tiers else "visible"
        self._engine.wait_flushed(level, SAVE_S)

    def _content_of(self, salt: str, session: str) -> SessionContent:
        done: Future[SessionContent | None] = Future()
        self._run(lambda: done.set_result(self._sessions.content_of(salt, session)), fail=done.set_exception, only_open=True)
        try:
            found = done.result(_TURN_S)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine loop did not come round within {_TURN_S:g} s") from None
        if found is None:
            raise SessionMissing("no request of this session has ended here lately, or the cache_salt is not the one that it had")
        return found

"""What callers ask of an engine's KV besides requests: reset, flush, prefetch, snapshots. Owns the way from
the caller's thread to the engine thread and back; storage owns the blocks."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from penstock.contract import (
    Adapter,
    Fence,
    Prefetched,
    Prefix,
    PromptLimits,
    SamplingParams,
    Snapshot,
    SnapshotRequest,
)
from penstock.engine.inbox import Inbox, fail
from penstock.engine.sessions import RETAINED_SHARE, SessionContent, SessionLimits, Sessions
from penstock.errors import DeadlineExceeded, EngineClosed, InvalidRequest, SessionMissing
from penstock.kv.cache import KvCache, Persisting, Resetting, Settling, Storing
from penstock.kv.questions import run_steps
from penstock.kv.snapshots import Snapshots, wait_answered

T = TypeVar("T")
FlushLevel = Literal["captured", "visible", "persisted"]
RESET_DEADLINE_S = 600.0  # for the engine thread to start it, and for stores to be emptied
SAVE_S = 60.0  # for computed blocks to reach the tiers
TAKE_S = 150.0  # in all, with the wait for the engine thread and the lane
_NAME_BYTES = 8
_NOTHING = SamplingParams(max_tokens=0)


class Flushes:
    """Saves and resets in flight, with the futures that wait for them. For the engine thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Settling | None, Future[Any]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, save: Settling | None, done: Future[Any]) -> None:
        """`save` None: there is nothing to wait for."""
        self._waiting.append((save, done))

    def end(self) -> None:
        """End the futures of all that has settled."""
        for save, done in self._waiting:
            if (save is None or save.settled) and not done.done() and done.set_running_or_notify_cancel():
                error = save.error if isinstance(save, Persisting | Storing | Resetting) else None
                result = save.forgotten if isinstance(save, Resetting) else None
                done.set_result(result) if error is None else done.set_exception(error)
        self._waiting = [(save, done) for save, done in self._waiting if not done.done()]

    def fail(self, why: str) -> None:
        for _, done in self._waiting:
            fail(done, EngineClosed(why))
        self._waiting = []


class CacheCalls:
    """All methods may be called from any thread. Those that return a future never block."""

    def __init__(self, cache: KvCache, inbox: Inbox, limits: PromptLimits) -> None:
        self.cache = cache  # for the engine thread only
        stats = cache.stats()
        self.tiers = (*stats.slots, *stats.cold)  # all tiers, hottest first
        self.block_tokens = cache.block_tokens
        num_blocks = sum(sum(counts) for counts in stats.slots.values())
        self.sessions = Sessions(cache, SessionLimits(retained_blocks=int(num_blocks * RETAINED_SHARE)))
        self.flushes = Flushes()
        self.limits = limits  # of prompts
        self._inbox = inbox

    def reset(self, tiers: Sequence[str] = ("device", "host")) -> dict[str, int]:
        """Evict all KV that no request holds; returns the number of blocks by tier. Blocks until the engine
        thread, disks and stores are done. Raises StoreFailed if a store failed."""
        done: Future[dict[str, int]] = self._begin(lambda: self.cache.reset(tiers))
        return _wait(done, RESET_DEADLINE_S, "reset")

    def prefetch(
        self,
        prompt: Sequence[int] | None = None,
        *,
        session: str = "",
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> Future[Prefetched | None]:
        """Start to prefetch the KV of `prompt` or of `session` from cold tiers; the future ends when the read
        has started. None in it: the session is unknown. Overloaded in it: too many prefetches run."""
        asked: str | Prefix | None = session
        if prompt is not None:
            known = self.limits.checked(prompt, _NOTHING)[1]
            asked = self.cache.prefix_of(known, cache_salt, adapter)
        return self._inbox.call(
            lambda: Prefetched(0, False) if asked is None else self.sessions.prefetch(cache_salt, asked)
        )

    def wait_flushed(self, level: FlushLevel, timeout_s: float) -> None:
        """Block until all blocks sealed before this call are read from device memory (captured), can be found
        in the host tier (visible), or are stored in the first cold tier (persisted). Raises DeadlineExceeded,
        and StoreFailed if some could not be persisted."""
        _wait(self.begin_flush(level), timeout_s, level)

    def begin_flush(self, level: FlushLevel) -> Future[None]:
        """The future that `wait_flushed` waits for; it may be cancelled."""
        if level == "persisted" and not self.cache.cold_tiers:
            raise InvalidRequest(
                "nothing outlives this process: give --kv-offload-ssd-dir or --kv-offload-remote", "level"
            )
        return self._begin(self.cache.persist if level == "persisted" else self.cache.submit_saves)

    def note_seen(self, request_id: str, num_tokens: int) -> Future[None]:
        """The client received `num_tokens` of a request's tokens, so its session ends there. Call it after
        the request's end or cancel. The future ends when snapshots of the session see it. Raises
        EngineClosed."""
        done: Future[None] = Future()

        def run() -> None:  # even if the future was cancelled
            self.sessions.note_seen(request_id, num_tokens)
            if done.set_running_or_notify_cancel():
                done.set_result(None)

        self._inbox.put(run, fail=partial(fail, done), only_open=True)
        return done

    def content_of(self, salt: str, session: str) -> Future[SessionContent | None]:
        """The session's tokens; None in it: there is no such session."""
        return self._inbox.call(lambda: self.sessions.content_of(salt, session))

    def begin_save(self, keys: Sequence[bytes], launched: Callable[[], Fence]) -> Future[None]:
        """Ends when these blocks are in the first cold tier, or in host memory if there is none. `launched`:
        a fence after all work on the compute lane."""
        self._inbox.put(lambda: self.cache.save(keys, launched()), only_open=True)
        return self.begin_flush("persisted" if self.cache.cold_tiers else "visible")

    def _begin(self, start: Callable[[], Settling | None]) -> Future[Any]:
        """Run `start` on the engine thread. The future ends when its result is settled, or when the engine
        ends."""
        done: Future[Any] = Future()
        self._inbox.put(lambda: self.flushes.add(start(), done), fail=partial(fail, done), only_open=True)
        return done


def _wait(done: Future[T], timeout_s: float, what: str) -> T:
    try:
        return done.result(timeout=timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the cache was not {what} within {timeout_s:g} s; it continues in the background"
        ) from None


class EngineSnapshots(Snapshots):
    """All methods but `step` may be called from any thread. `begin_x` never blocks. Owns the step from a
    session or a prompt to its tokens."""

    def __init__(self, calls: CacheCalls, launched: Callable[[], Fence], most_in_host: int | None) -> None:
        """`launched`: a fence after all work on the compute lane. `most_in_host`: blocks of host memory that
        may be pinned; None: as many as of any tier."""
        self._calls = calls
        self._launched = launched
        self._saving: deque[tuple[float, Future[None]]] = deque()  # with deadlines, in order
        super().__init__(calls.cache, most_in_host)

    def begin_take(self, asked: SnapshotRequest) -> Future[Snapshot]:
        """Raises SnapshotTaken, SnapshotSpace, SnapshotRefused, SessionMissing, StoreFailed."""
        asked = asked if asked.name else asked._replace(name=f"snapshot-{secrets.token_hex(_NAME_BYTES)}")
        if bool(asked.session) == bool(asked.prompt):
            raise InvalidRequest("give either a session or a prompt to take a snapshot of", "session_id")
        if not asked.session:
            self._calls.limits.checked(np.frombuffer(asked.prompt, np.uint32), _NOTHING)  # type: ignore[arg-type]
        return run_steps(self._taken(asked))

    def take(self, asked: SnapshotRequest) -> Snapshot:
        """Blocks."""
        return wait_answered(self.begin_take(asked), TAKE_S)

    def _taken(self, asked: SnapshotRequest) -> Generator[Future[Any], Any, Snapshot]:
        tokens = asked.prompt
        if asked.session:
            content: SessionContent | None = yield self._calls.content_of(asked.cache_salt, asked.session)
            if content is None:
                raise SessionMissing(
                    "no request of this session has ended here recently, or its cache_salt was different"
                )
            tokens, asked = content.tokens, asked._replace(adapter=content.adapter)
        return (yield from self.taking(asked, np.frombuffer(tokens, np.uint32), self._begin_save))

    def _begin_save(self, keys: Sequence[bytes]) -> Future[None]:
        saved = self._calls.begin_save(keys, self._launched)
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

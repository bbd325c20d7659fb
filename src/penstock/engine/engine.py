"""The engine: requests in, tokens out, one step at a time. Owns the loop body; the scheduler decides the
steps and the executor runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from penstock.config import ResidencyName
from penstock.contract import (
    Adapter,
    CacheHint,
    Fence,
    Grammar,
    Lease,
    Listener,
    Prefetched,
    Prefix,
    PromptLimits,
    Request,
    SamplingParams,
    TokenEvent,
)
from penstock.engine.adapters import AdapterStore
from penstock.engine.execution import warm
from penstock.engine.execution.grammars import Grammars
from penstock.engine.inbox import Inbox, fail
from penstock.engine.outbox import Outbox
from penstock.engine.parts import EngineParts
from penstock.engine.scheduling.residency import ResidencyChoice
from penstock.engine.sessions import RETAINED_SHARE, SessionLimits, Sessions
from penstock.engine.snapshots import EngineSnapshots
from penstock.engine.stats import EngineStats
from penstock.engine.turns import EngineTurns, Flushes
from penstock.errors import DeadlineExceeded, InvalidRequest, Overloaded
from penstock.figures import ResidencyFigures
from penstock.kv.cache import KvCache, Settling
from penstock.kv.memory import DeviceArena
from penstock.lanes.cuda import as_current
from penstock.models.progress import Progress, silent
from penstock.observe import EngineObserver, Unwatched

log = logging.getLogger(__name__)

FlushLevel = Literal["captured", "visible", "persisted"]
RESET_DEADLINE_S = 600.0  # for the engine thread to start it, and for stores to be emptied
_GRACE_S = 1.0  # for an idle lane to end


class Engine:
    """`submit`, `cancel`, `stats` and `reset_cache` may be called from any thread; `step` and `close` from
    the engine thread only."""

    def __init__(self, parts: EngineParts) -> None:
        self.name = parts.name
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.sampling = parts.sampling
        self.weights = parts.weights
        self.threads = parts.threads
        self.parts = parts
        # without a GPU, compute needs the core
        self._inbox = Inbox(sharp=parts.arena.device.type == "cuda")
        self._outbox = Outbox()
        self._seeds = random.Random(parts.seed)
        self._load_exposed_s = 0.0
        self._watch: EngineObserver = Unwatched() if parts.sanitizer is None else parts.sanitizer.turns
        self._flushes = Flushes()
        self.turns = EngineTurns(parts, self._outbox, self._flushes, self._watch)
        cache = parts.cache
        stats = cache.stats()
        self.tiers = (*stats.slots, *stats.cold)  # all tiers, hottest first
        num_blocks = sum(sum(counts) for counts in stats.slots.values())
        self._sessions = Sessions(cache, SessionLimits(retained_blocks=int(num_blocks * RETAINED_SHARE)))
        # Host memory promised to deep requests may not be pinned by snapshots.
        may_be_deep = parts.max_model_len > parts.resident_blocks * cache.block_tokens
        most_in_host = sum(stats.slots.get("host", ())) - cache.num_pageable if may_be_deep else None
        self.snapshots = EngineSnapshots(self, self._sessions, self._inbox, most_in_host)
        parts.cache.call_when_launched(self._inbox.wake)

    # ---------------------------------------------------------------------------------------- from any thread

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        listener: Listener,
        *,
        cache_salt: str = "",
        request_id: str | None = None,
        adapter: Adapter | None = None,
        priority: int = 0,
        session: str = "",
        hint: CacheHint | None = None,
        residency: ResidencyName | None = None,
        pins: Sequence[tuple[int, int]] | None = None,
        route: str = "",
    ) -> str:
        """Check the request on the caller's thread and pass it to the engine thread. `listener` is called
        there, at most once per step. `hint` is about the KV of its `session`. `residency` and `pins`: what it
        attends to if it does not fit; None: as configured. `route`: requests of one route write answers of
        similar length."""
        self._inbox.check_open()
        if len(self._outbox) + len(self._inbox) >= self.parts.max_open:
            raise Overloaded(f"{self.parts.max_open} requests are open already")
        tokens, known = self.limits.checked(prompt, sampling)
        # compiled on the caller's thread, so no other request waits; kept while the request is open
        if sampling.grammar is not None:
            listener = functools.partial(_pass_on, listener, self.grammars.wait_compiled(sampling.grammar))
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=self._seeds.getrandbits(63))
        arrival_s = time.monotonic()
        cache = self.parts.cache
        prefix = cache.prefix_of(known, cache_salt, adapter)
        distinct = np.unique(known).astype(np.int32) if sampling.repetition_penalty != 1.0 else None
        own_id = request_id or uuid.uuid4().hex
        part, choice = None, self.parts.residency
        if choice.scored or residency is not None or pins is not None:
            part = choice.for_request(residency, pins, len(tokens), max(0, sampling.max_tokens - 1))
        about = priority, session, part, route
        request = Request(own_id, tokens, sampling, prefix, arrival_s, adapter, distinct, *about)
        listener = self._sessions.follow(request, cache_salt, hint, listener)
        with contextlib.ExitStack() as undo:  # releases what the request took if it is not accepted
            if adapter is not None:
                hold = self.adapters.hold(adapter)
                undo.callback(hold.end)
                listener = hold.until_finished(listener)
            # Colder tiers are matched on the caller's thread, and the lease keeps their blocks until the
            # scheduler has matched.
            lease = cache.lease(request.id, prefix) if prefix is not None and request.may_match else None
            if lease is not None:
                undo.callback(lease.end)
            matched_s = time.monotonic() - arrival_s
            run, fail = (
                functools.partial(self._add, request, listener, lease, matched_s),
                functools.partial(self._give_up, request, listener, lease),
            )
            self._inbox.put(run, fail=fail, only_open=True)
            undo.pop_all()
        return request.id

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars of structured output; from any thread."""
        return self.parts.grammars

    @property
    def adapters(self) -> AdapterStore:
        """Load, unload and find adapters; from any thread."""
        return self.parts.adapters

    def cancel(self, request_id: str) -> None:
        """End the request at the next turn. No error if it has ended."""
        self._inbox.put(lambda: self._outbox.publish([self.parts.scheduler.cancel(request_id)]))

    def note_seen(self, request_id: str, num_tokens: int) -> Future[None]:
        """The client received `num_tokens` of a request's tokens, so its session ends there. Call it after
        the request's end or cancel. The future ends when snapshots of the session see it. Raises
        EngineClosed."""
        done: Future[None] = Future()

        def run() -> None:
            self._sessions.note_seen(request_id, num_tokens)
            if done.set_running_or_notify_cancel():
                done.set_result(None)

        self._inbox.put(run, fail=functools.partial(fail, done), only_open=True)
        return done

    def call_after_events(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the engine thread after each batch of events, usually a step's. Call this before
        the first submission."""
        self._outbox.after.append(callback)

    @property
    def limits(self) -> PromptLimits:
        """Limits of every prompt."""
        cache = self.parts.cache
        kv_tokens = max(cache.num_blocks, cache.num_pageable) * cache.block_tokens
        if not cache.keeps_all:
            kv_tokens = max(kv_tokens, self.max_model_len)  # blocks leave the device
        return PromptLimits(self.max_model_len, self.parts.vocab, kv_tokens)

    @property
    def residency(self) -> ResidencyChoice:
        """What requests may ask for if they do not fit."""
        return self.parts.residency

    @property
    def max_open(self) -> int:
        """Open requests; one more is refused as overload."""
        return self.parts.max_open

    @property
    def resident_tokens(self) -> int:
        """Most tokens that a sequence has on the device before it is paged."""
        return self.parts.resident_blocks * self.parts.cache.block_tokens

    @property
    def cache(self) -> KvCache:
        """The KV cache; for the engine thread only."""
        return self.parts.cache

    @property
    def arena(self) -> DeviceArena:
        """The memory of its KV: device and layout."""
        return self.parts.arena

    def reset_cache(self, tiers: Sequence[str] = ("device", "host")) -> dict[str, int]:
        """Evict all KV that no request holds; returns the number of blocks by tier. Blocks until the engine
        thread, disks and stores are done. Raises StoreFailed if a store failed."""
        done = self._begin(lambda: self.parts.cache.reset(tiers))
        try:
            forgotten: dict[str, int] = done.result(timeout=RESET_DEADLINE_S)
            return forgotten
        except TimeoutError:
            raise DeadlineExceeded(
                f"the cache was not reset within {RESET_DEADLINE_S:g} s; it continues in the background"
            ) from None

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
            asked = self.parts.cache.prefix_of(
                self.limits.checked(prompt, SamplingParams(max_tokens=0))[1], cache_salt, adapter
            )
        return self._inbox.call(
            lambda: Prefetched(0, False) if asked is None else self._sessions.prefetch(cache_salt, asked)
        )

    def wait_flushed(self, level: FlushLevel, timeout_s: float) -> None:
        """Block until all blocks sealed before this call are read from device memory (captured), can be found
        in the host tier (visible), or are stored in the first cold tier (persisted). Raises DeadlineExceeded,
        and StoreFailed if some could not be persisted."""
        done = self.begin_flush(level)
        try:
            done.result(timeout=timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the cache was not {level} within {timeout_s:g} s; it continues in the background"
            ) from None

    def begin_flush(self, level: FlushLevel) -> Future[None]:
        """The future that `wait_flushed` waits for; it may be cancelled."""
        cache = self.parts.cache
        if level == "persisted" and not cache.cold_tiers:
            raise InvalidRequest(
                "nothing outlives this process: give --kv-offload-ssd-dir or --kv-offload-remote", "level"
            )
        return self._begin(cache.persist if level == "persisted" else cache.submit_saves)

    def _begin(self, start: Callable[[], Settling | None]) -> Future[Any]:
        """Run `start` on the engine thread. The future ends when its result is settled, or when the engine
        ends."""
        done: Future[Any] = Future()
        self._inbox.put(
            lambda: self._flushes.add(start(), done), fail=functools.partial(fail, done), only_open=True
        )
        return done

    @property
    def ended(self) -> str | None:
        """Why listeners get no more events; None while they may."""
        return self._inbox.ended

    def stats(self) -> EngineStats:
        scheduler, cache = self.parts.scheduler, self.parts.cache.stats()
        return EngineStats(
            requests=scheduler.num_by_state(),
            prompt_tokens=dict(scheduler.counts.prompt_tokens),
            generated_tokens=scheduler.counts.generated_tokens,
            kv_blocks={**{tier: slots._asdict() for tier, slots in cache.slots.items()}, **cache.cold},
            retractions=scheduler.counts.retractions,
            expected_tokens=scheduler.lengths.by_route(),
            blocked_s=dict(self.turns.blocked_s),
            ttft=self._outbox.ttft.copy(),
            inter_token=self._outbox.inter_token.copy(),
            steps=self.turns.num_steps,
            cache={
                "hits": cache.hits_total,
                "misses": cache.misses_total,
                "evictions": cache.evictions_total,
                "duplicate_seals": cache.duplicate_seals_total,
                "promoted": cache.promoted_total,
            },
            traffic=cache.traffic,
            resume=self._outbox.resume.copy(),
            load_exposed_s=self._load_exposed_s,
            sessions=self._sessions.figures(),
            residency=self._residency_figures(),
            snapshots=self.snapshots.figures(),
            host_steps=self.turns.num_host_steps,
            drafted=tuple(scheduler.counts.drafted_by_place),
            accepted=tuple(scheduler.counts.accepted_by_place),
            sanitizer={}
            if self.parts.sanitizer is None
            else {str(kind): n for kind, n in self.parts.sanitizer.num_by_kind.items()},
        )

    def _residency_figures(self) -> ResidencyFigures:
        counts = self.parts.scheduler.counts
        return ResidencyFigures(
            counts.parts_fetched, counts.scorings, self.parts.scoring.seconds, counts.recall.copy()
        )

    def wait_work(self, timeout_s: float) -> None:
        """Block until a command arrives or a transfer makes progress."""
        cache = self.parts.cache
        if not cache.num_in_flight:
            self._inbox.wait(timeout_s)
            return
        started = time.monotonic()
        self._inbox.wait(min(timeout_s, cache.look_again_s))
        if self.parts.scheduler.awaits_load:
            self._load_exposed_s += time.monotonic() - started

    def refuse(self, why: str) -> None:
        """Take no further submissions; open requests continue."""
        self._inbox.close(why)

    # -------------------------------------------------------------------------------------- the engine thread

    def launching(self) -> AbstractContextManager[None]:
        """Makes the compute lane current for the calling thread. Held around all steps, it saves the switch
        in each step."""
        return as_current(self.parts.lanes[0])

    def warm(self, progress: Progress = silent) -> None:
        """Run a step of every kind, so that no request pays for one-time work. Optional; before the first
        step, on the same thread."""
        # runs in the background; does nothing without the package
        self.grammars.begin(Grammar("choice", '["warm"]'))
        cache = self.parts.cache
        table = cache.open("warm-up", None, 0)
        assert table is not None
        try:
            if table.try_extend(1):
                slot = int(table.slots(1)[0])
                warm.run_all(self.parts.executor, slot, self.max_model_len, progress)
                if self.parts.speculation is not None:
                    measured = functools.partial(warm.measured_costs, self.parts.executor, slot)
                    self.parts.speculation.measure(measured)
        finally:
            table.release(self.parts.lanes[0].record())

    def step(self) -> bool:
        """One turn: plan and launch step N+1 while N runs, then read N. Returns whether anything was done."""
        with self._watch.turn(), self.launching():
            self._inbox.run_some()
            done = self.turns.run()
            done |= self._sessions.step()
            self.snapshots.step()
        if self.parts.sanitizer is not None:
            self.parts.cache.tell_balance(self._watch)
        return done

    def has_work(self) -> bool:
        """True while requests are open. Saves may still run; they end by themselves."""
        return bool(self._inbox) or self.turns.running is not None or self.parts.scheduler.has_work()

    def launched(self) -> Fence:
        """A fence after all work on the compute lane so far."""
        return self.parts.lanes[0].record()

    def is_transferring(self) -> bool:
        """True while KV moves between tiers."""
        return self.parts.cache.num_in_flight > 0

    def check(self) -> None:
        """Recount; raises InvariantBroken if totals do not add up. For the engine thread, or any thread after
        `close`."""
        self.parts.scheduler.check()
        self.parts.cache.check()

    def fail_all(self, error: BaseException) -> None:
        """The loop cannot continue: end every request and every waiting future with `error`. Touches neither
        scheduler nor cache, which may be broken. Never raises."""
        self._end_all(f"the engine stopped: {type(error).__name__}: {error}")

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel open requests, let the device finish, check that nothing is left. Transfers and lanes have
        `timeout_s` together; if they take longer, this raises DeadlineExceeded and may be called again."""
        self.refuse("the engine is closed")
        by_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._inbox.run_all()
            for request_id in self._outbox.open_ids():
                self._outbox.publish([self.parts.scheduler.cancel(request_id)])
            self.turns.read_running()
            self._sessions.close()
            self.snapshots.close(timeout_s)
            self.parts.cache.close(None if timeout_s is None else max(0.0, by_s - time.monotonic()))
            for lane in self.parts.lanes:
                lane.close(None if timeout_s is None else max(_GRACE_S, by_s - time.monotonic()))
            self._flushes.end()
            self.parts.executor.masks.close()
            self.parts.grammars.close()
        except BaseException as error:
            self.fail_all(error)
            raise
        self._end_all("the engine is closed")

    def _end_all(self, why: str) -> None:
        """Fail every waiting caller and end every open request. No events follow."""
        self._inbox.end(why)
        self._flushes.fail(why)
        self._outbox.end_all(why)

    def _add(self, request: Request, listener: Listener, lease: Lease | None, matched_s: float) -> None:
        if request.id in self._outbox:
            self._give_up(request, listener, lease, InvalidRequest(f"request id {request.id} is in use"))
            return
        self.parts.scheduler.add(request, lease)  # if it raises, the request was never open
        self._outbox.open(request.id, listener, request.arrival_s, matched_s)

    def _give_up(
        self, request: Request, listener: Listener, lease: Lease | None, error: BaseException
    ) -> None:
        """Refuse a submitted request."""
        try:
            if lease is not None:
                lease.end()
        finally:
            self._outbox.refuse(request.id, listener, str(error))


def _pass_on(listener: Listener, kept: object, event: TokenEvent) -> None:
    """`kept` lives as long as the request."""
    listener(event)

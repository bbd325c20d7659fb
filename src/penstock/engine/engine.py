"""The engine: requests in, tokens out, one step at a time. Owns the loop body; the scheduler decides the
steps and the executor runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence, Grammar, Lease, Listener, Request, Submission, TokenEvent
from penstock.engine.adapters import AdapterStore
from penstock.engine.cache_calls import CacheCalls, EngineSnapshots
from penstock.engine.execution import warm
from penstock.engine.execution.grammars import Grammars
from penstock.engine.inbox import Inbox
from penstock.engine.outbox import Outbox
from penstock.engine.parts import EngineParts
from penstock.engine.stats import EngineStats
from penstock.engine.turns import EngineTurns
from penstock.errors import InvalidRequest, Overloaded
from penstock.figures import ResidencyFigures
from penstock.kv.cache import KvCache
from penstock.lanes.cuda import as_current
from penstock.models.progress import Progress, silent
from penstock.observe import EngineObserver, Unwatched, all_of

log = logging.getLogger(__name__)

_GRACE_S = 1.0  # for an idle lane to end
_LISTED_S = 10.0  # for a disk to say which snapshots it has


class Engine:
    """`submit`, `cancel`, `stats`, and the calls of `kv` and `snapshots` are for any thread; `step` and
    `close` for the engine thread only."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.name = parts.name
        self.tokenizer = parts.tokenizer
        self.sampling = parts.sampling  # the model's defaults
        self.limits = parts.limits  # of every prompt
        self.max_open = parts.max_open  # requests; one more is refused as overload
        self.residency = parts.residency  # what requests may ask for if they do not fit
        # without a GPU, compute needs the core
        self._inbox = Inbox(sharp=parts.arena.device.type == "cuda")
        waits = None if parts.experts is None else parts.experts.seconds_waited
        self._outbox = Outbox(all_of(parts.observers.requests), waits)
        self._seeds = random.Random(parts.seed)
        self._load_exposed_s = 0.0
        self._watch: EngineObserver = all_of(parts.observers.turns) or Unwatched()
        self.kv = CacheCalls(parts.cache, self._inbox, parts.limits)
        self.turns = EngineTurns(parts, self._outbox, self.kv.flushes, self._watch)
        # Host memory promised to deep requests may not be pinned by snapshots.
        most_in_host, num_pageable = None, parts.cache.num_pageable
        if num_pageable and parts.limits.max_model_len > parts.resident_tokens:
            most_in_host = sum(parts.cache.stats().slots.get("host", ())) - num_pageable
        self.snapshots = EngineSnapshots(self.kv, self.launched, most_in_host)
        parts.cache.call_when_launched(self._inbox.wake)
        parts.ranks.watch(lambda error: self._inbox.put(partial(_raise, error)))

    # ---------------------------------------------------------------------------------------- from any thread

    def submit(self, asked: Submission, listener: Listener) -> str:
        """Check the request on the caller's thread and pass it to the engine thread. `listener` is called
        there, at most once per step. Returns the request's id."""
        self._inbox.check_open()
        if len(self._outbox) + len(self._inbox) >= self.max_open:
            raise Overloaded(f"{self.max_open} requests are open already")
        if asked.sampling.bad_words:
            asked = dataclasses.replace(asked, sampling=asked.sampling.spelled(self.tokenizer.bad_token_ids))
        tokens, known = self.limits.checked(asked.prompt, asked.sampling)
        # compiled on the caller's thread, so no other request waits; kept while the request is open
        if (grammar := asked.sampling.grammar) is not None:
            listener = partial(_pass_on, listener, self.grammars.wait_compiled(grammar))
        request = self._request(asked, tokens, known)
        listener = self.kv.sessions.follow(request, asked.cache_salt, asked.hint, listener)
        with contextlib.ExitStack() as undo:  # releases what the request took if it is not accepted
            if asked.adapter is not None:
                hold = self.adapters.hold(asked.adapter)
                undo.callback(hold.end)
                listener = hold.until_finished(listener)
            # Colder tiers are matched on the caller's thread, and the lease keeps their blocks until the
            # scheduler has matched.
            lease = None
            if request.prefix is not None and request.may_match:
                lease = self.cache.lease(request.id, request.prefix)
            if lease is not None:
                undo.callback(lease.end)
            matched_s = time.monotonic() - request.arrival_s
            run = partial(self._add, request, listener, lease, matched_s)
            self._inbox.put(run, fail=partial(self._give_up, request, listener, lease), only_open=True)
            undo.pop_all()
        return request.id

    def _request(self, asked: Submission, tokens: list[int], known: NDArray[np.uint32]) -> Request:
        """`known`: its tokens as an array. Raises InvalidRequest if it asks for a residency that is not
        possible."""
        arrival_s, sampling, residency = time.monotonic(), asked.sampling, None
        if self.residency.scored or asked.residency is not None or asked.pins is not None:
            num_more = max(0, sampling.max_tokens - 1)
            residency = self.residency.for_request(asked.residency, asked.pins, len(tokens), num_more)
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=self._seeds.getrandbits(63), is_free=True)
        return Request(
            asked.id or uuid.uuid4().hex,
            tokens,
            sampling,
            self.cache.prefix_of(known, asked.cache_salt, asked.adapter),
            arrival_s,
            asked.adapter,
            np.unique(known).astype(np.int32) if sampling.repetition_penalty != 1.0 else None,
            asked.priority,
            asked.session,
            residency,
            asked.route,
        )

    def cancel(self, request_id: str) -> None:
        """End the request at the next turn. No error if it has ended."""
        self._inbox.put(lambda: self._outbox.publish([self.parts.scheduler.cancel(request_id)]))

    def call_after_events(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the engine thread after each batch of events, usually a step's. Call this before
        the first submission."""
        self._outbox.after.append(callback)

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars of structured output; from any thread."""
        return self.parts.grammars

    @property
    def adapters(self) -> AdapterStore:
        """Load, unload and find adapters; from any thread."""
        return self.parts.adapters

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def cache(self) -> KvCache:
        """The KV cache; for the engine thread only."""
        return self.parts.cache

    @property
    def ended(self) -> str | None:
        """Why listeners get no more events; None while they may."""
        return self._inbox.ended

    def stats(self) -> EngineStats:
        scheduler, cache = self.parts.scheduler, self.cache.stats()
        counts = scheduler.counts
        return EngineStats(
            requests=scheduler.num_by_state(),
            prompt_tokens=dict(counts.prompt_tokens),
            generated_tokens=counts.generated_tokens,
            kv_blocks=cache.by_tier,
            retractions=counts.retractions,
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
            sessions=self.kv.sessions.figures(),
            residency=ResidencyFigures(
                counts.parts_fetched, counts.scorings, self.parts.scoring.seconds, counts.recall.copy()
            ),
            snapshots=self.snapshots.figures(),
            kv_events=None if self.cache.events is None else self.cache.events.figures(),
            host_steps=self.turns.num_host_steps,
            drafted=tuple(counts.drafted_by_place),
            accepted=tuple(counts.accepted_by_place),
            experts=None if self.parts.experts is None else self.parts.experts.figures(),
            sanitizer={}
            if self.parts.sanitizer is None
            else {str(kind): n for kind, n in self.parts.sanitizer.num_by_kind.items()},
        )

    def wait_work(self, timeout_s: float) -> None:
        """Block until a command arrives or a transfer makes progress."""
        cache = self.parts.cache
        if not cache.num_in_flight:
            self._inbox.wait(timeout_s)
            return
        started = time.monotonic()
        self._inbox.wait(min(timeout_s, cache.look_again_s))
        if self.parts.scheduler.running.num_loading:
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
                    measured = partial(warm.measured_costs, self.parts.executor, slot)
                    self.parts.speculation.measure(measured)
        finally:
            table.release(self.parts.lanes[0].record())
        self.snapshots.wait_listed(_LISTED_S)

    def step(self) -> bool:
        """One turn: plan and launch step N+1 while N runs, then read N. Returns whether anything was done."""
        with self._watch.turn(), self.launching():
            self._inbox.run_some()
            done = self.turns.run()
            done |= self.kv.sessions.step()
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
        self.parts.ranks.close()

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
            self.kv.sessions.close()
            self.snapshots.close(timeout_s)
            self.parts.cache.close(None if timeout_s is None else max(0.0, by_s - time.monotonic()))
            for lane in self.parts.lanes:
                lane.close(None if timeout_s is None else max(_GRACE_S, by_s - time.monotonic()))
            if self.parts.experts is not None:
                self.parts.experts.close()
            self.parts.ranks.close()
            self.kv.flushes.end()
            self.parts.executor.masks.close()
            self.parts.grammars.close()
        except BaseException as error:
            self.fail_all(error)
            raise
        self._end_all("the engine is closed")
        if self.parts.trace is not None:
            self.parts.trace.close()
        if self.parts.routing is not None:
            self.parts.routing.close()

    def _end_all(self, why: str) -> None:
        """Fail every waiting caller and end every open request. No events follow."""
        self._inbox.end(why)
        self.kv.flushes.fail(why)
        self._outbox.end_all(why)

    def _add(self, request: Request, listener: Listener, lease: Lease | None, matched_s: float) -> None:
        if request.id in self._outbox:
            self._give_up(request, listener, lease, InvalidRequest(f"request id {request.id} is in use"))
            return
        self.parts.scheduler.add(request, lease)  # if it raises, the request was never open
        self._outbox.open(request, listener, matched_s)

    def _give_up(
        self, request: Request, listener: Listener, lease: Lease | None, error: BaseException
    ) -> None:
        """Refuse a submitted request."""
        try:
            if lease is not None:
                lease.end()
        finally:
            self._outbox.refuse(request.id, listener, str(error))


def _raise(error: BaseException) -> None:
    raise error


def _pass_on(listener: Listener, kept: object, event: TokenEvent) -> None:
    """`kept` lives as long as the request."""
    listener(event)

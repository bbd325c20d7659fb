"""The engine: requests in, tokens out, one step at a time. Owns the loop body and the inbox between callers and the engine thread."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from penstock.contract import FinishReason, Listener, Request, SamplingParams, StepPlan, TokenEvent
from penstock.engine.execution.executor import Executor
from penstock.engine.execution.outcome import RunningStep
from penstock.engine.scheduling.budget import blocks_for
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.stats import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S, EngineStats, Histogram
from penstock.errors import EngineClosed, InvalidRequest, Overloaded
from penstock.kv.cache import KvCache
from penstock.kv.memory.arena import DeviceArena
from penstock.lanes.lane import Lane
from penstock.models.tokenizer import TextCodec

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineParts:
    """What `engine.build` puts together."""

    name: str
    tokenizer: TextCodec
    scheduler: Scheduler
    executor: Executor
    cache: KvCache
    arena: DeviceArena
    lanes: Sequence[Lane]
    vocab: int
    max_model_len: int
    max_open: int  # requests known to the engine at once; one more is refused as overload
    seed: int


@dataclass(slots=True)
class _Open:
    """A request that has not ended, as its listener sees it."""

    listener: Listener
    arrival_s: float
    last_token_s: float = 0.0


class Engine:
    """`submit`, `cancel`, `stats` and `reset_cache` may be called from any thread; `step` and `close` from the engine thread only."""

    def __init__(self, parts: EngineParts) -> None:
        self.name = parts.name
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self._parts = parts
        self._inbox: deque[Callable[[], None]] = deque()
        self._work = threading.Condition()
        self._running: RunningStep | None = None
        self._open: dict[str, _Open] = {}
        self._closing: str | None = None  # why submissions are refused; set under `_work`, so that none slips in behind it
        self._failure: str | None = None  # why the loop cannot go on
        self._seeds = random.Random(parts.seed)
        self._ttft = Histogram(TTFT_BOUNDS_S)
        self._inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self._blocked_s = {"result": 0.0}
        self._num_steps = 0

    # -------------------------------------------------------------------------------------------------- from any thread

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        listener: Listener,
        *,
        cache_salt: str = "",
        request_id: str | None = None,
    ) -> str:
        """Check the request on the caller's thread and hand it to the engine's. `listener` is called there, once per step at most."""
        if self._closing is not None:
            raise EngineClosed(self._closing)
        if len(self._open) + len(self._inbox) >= self._parts.max_open:
            raise Overloaded(f"{self._parts.max_open} requests are open already")
        tokens = self._checked_prompt(prompt, sampling)
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=self._seeds.getrandbits(63))
        request = Request(
            id=request_id or uuid.uuid4().hex,
            prompt=tokens,
            sampling=sampling,
            prefix=self._parts.cache.prefix_of(tokens, cache_salt),
            arrival_s=time.monotonic(),
        )
        self._tell(lambda: self._add(request, listener), only_open=True)
        return request.id

    def cancel(self, request_id: str) -> None:
        """Ask for the request to end; it does at the next step, wherever it is. No error if it has ended."""
        self._tell(lambda: self._publish([self._parts.scheduler.cancel(request_id)]))

    def reset_cache(self) -> int:
        """Forget all KV that no request holds; returns the number of blocks. Blocks until the engine thread has done it."""
        done: Future[int] = Future()
        self._tell(lambda: done.set_result(self._parts.cache.reset()), only_open=True)
        return done.result(timeout=60.0)

    def stats(self) -> EngineStats:
        scheduler, cache = self._parts.scheduler, self._parts.cache.stats()
        return EngineStats(
            requests=scheduler.num_by_state(),
            prompt_tokens=dict(scheduler.counts.prompt_tokens),
            generated_tokens=scheduler.counts.generated_tokens,
            kv_blocks={name: getattr(cache.slots, name) for name in ("free", "idle", "active", "pinned", "reserved")},
            retractions=scheduler.counts.retractions,
            blocked_s=dict(self._blocked_s),
            ttft=self._ttft.copy(),
            inter_token=self._inter_token.copy(),
            steps=self._num_steps,
            cache={
                "hits": cache.hits_total,
                "misses": cache.misses_total,
                "evictions": cache.evictions_total,
                "duplicate_seals": cache.duplicate_seals_total,
            },
        )

    def wait_work(self, timeout_s: float) -> None:
        """Block until something was put into the inbox."""
        with self._work:
            self._work.wait_for(lambda: bool(self._inbox) or self._closing is not None, timeout_s)

    def refuse(self, why: str) -> None:
        """Take no further submissions; what is open goes on."""
        with self._work:
            self._closing = why
            self._work.notify()

    # ------------------------------------------------------------------------------------------------- the engine thread

    def step(self) -> bool:
        """One turn: plan and launch step N+1 while N runs, then read N. Returns whether anything was done."""
        while self._inbox:
            self._inbox.popleft()()
        plan = self._parts.scheduler.plan()
        launched = None if plan is None else self._launch(plan)
        previous, self._running = self._running, launched
        if previous is not None:
            started = time.monotonic()
            result = previous.wait_result()
            self._blocked_s["result"] += time.monotonic() - started
            if result.error is not None:
                log.error("step %d failed", result.number, exc_info=result.error)
            self._publish(self._parts.scheduler.commit(result))
        return launched is not None or previous is not None

    def has_work(self) -> bool:
        return bool(self._inbox) or self._running is not None or self._parts.scheduler.has_work()

    def fail_all(self, error: BaseException) -> None:
        """End every request with `error`: the loop cannot go on."""
        self._failure = f"the engine stopped: {type(error).__name__}: {error}"
        self.refuse(self._failure)
        while self._inbox:
            self._inbox.popleft()()
        for request_id in list(self._open):
            self._publish([TokenEvent(request_id, finish=FinishReason.ERROR, error=self._failure)])

    def cancel_all(self) -> None:
        for request_id in self._parts.scheduler.request_ids():
            self._publish([self._parts.scheduler.cancel(request_id)])

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel what is open, let the device finish, check that nothing is left. Bounded by `timeout_s` per lane."""
        self.refuse("the engine is closed")
        while self._inbox:
            self._inbox.popleft()()
        self.cancel_all()
        if self._running is not None:
            self._publish(self._parts.scheduler.commit(self._running.wait_result()))
            self._running = None
        for lane in self._parts.lanes:
            lane.close(timeout_s)
        self._parts.cache.close()

    # -------------------------------------------------------------------------------------------------------- internals

    def _tell(self, command: Callable[[], None], only_open: bool = False) -> None:
        with self._work:
            if only_open and self._closing is not None:
                raise EngineClosed(self._closing)
            self._inbox.append(command)
            self._work.notify()

    def _checked_prompt(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
        total = len(prompt) + sampling.max_tokens
        if total > self.max_model_len:
            asked = f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}: {total} in all"
            param = "prompt" if len(prompt) >= self.max_model_len else "max_tokens"
            raise InvalidRequest(f"{asked}, but the context holds {self.max_model_len}", param)
        try:
            tokens = np.asarray(prompt, dtype=np.int64)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(f"the prompt must be a list of token ids: {error}", "prompt") from None
        if tokens.ndim != 1 or int(tokens.min()) < 0 or int(tokens.max()) >= self._parts.vocab:
            raise InvalidRequest(f"token ids must lie between 0 and {self._parts.vocab - 1}", "prompt")
        cache = self._parts.cache
        if blocks_for(total, cache.block_tokens) > cache.num_blocks:
            raise InvalidRequest(f"{total} tokens do not fit into the {cache.num_blocks * cache.block_tokens} of KV memory", "max_tokens")
        result: list[int] = tokens.tolist()
        return result

    def _add(self, request: Request, listener: Listener) -> None:
        error = f"request id {request.id} is in use" if request.id in self._open else self._failure
        if error is not None:
            listener(TokenEvent(request.id, finish=FinishReason.ERROR, error=error))
            return
        self._open[request.id] = _Open(listener, request.arrival_s)
        self._parts.scheduler.add(request)

    def _launch(self, plan: StepPlan) -> RunningStep:
        running = self._parts.executor.launch(plan)
        self._parts.scheduler.launched(running.fence)
        self._num_steps += 1
        return running

    def _publish(self, events: Iterable[TokenEvent | None]) -> None:
        now = time.monotonic()
        for event in events:
            if event is None:
                continue
            entry = self._open[event.request_id]
            if event.tokens:
                if entry.last_token_s:
                    self._inter_token.add((now - entry.last_token_s) / len(event.tokens), len(event.tokens))
                else:
                    self._ttft.add(now - entry.arrival_s)
                entry.last_token_s = now
            if event.finish is not None:
                del self._open[event.request_id]
            try:
                entry.listener(event)
            except Exception:
                log.exception("the listener of request %s raised; the request goes on", event.request_id)

"""The engine: requests in, tokens out, one step at a time. Owns the loop body; what steps do is decided and done elsewhere."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from penstock.contract import FinishReason, Listener, Request, SamplingParams, StepPlan, TokenEvent
from penstock.engine.execution.executor import Executor
from penstock.engine.execution.outcome import RunningStep
from penstock.engine.inbox import Inbox
from penstock.engine.outbox import Outbox
from penstock.engine.scheduling.budget import blocks_for
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.stats import EngineStats
from penstock.errors import InvalidRequest, Overloaded
from penstock.kv.cache import KvCache
from penstock.kv.memory.arena import DeviceArena
from penstock.lanes.lane import Lane
from penstock.models.tokenizer import TextCodec
from penstock.sanitizer.sanitizer import Sanitizer

log = logging.getLogger(__name__)

RESET_DEADLINE_S = 60.0  # for the engine thread to come round; a step takes seconds at most


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
    sanitizer: Sanitizer | None = None  # listening to all of the above, where it was asked for


class Engine:
    """`submit`, `cancel`, `stats` and `reset_cache` may be called from any thread; `step` and `close` from the engine thread only."""

    def __init__(self, parts: EngineParts) -> None:
        self.name = parts.name
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self._parts = parts
        self._inbox = Inbox()
        self._outbox = Outbox()
        self._running: RunningStep | None = None
        self._failure: str | None = None  # why the loop cannot go on
        self._seeds = random.Random(parts.seed)
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
        self._inbox.check_open()
        if len(self._outbox) + len(self._inbox) >= self._parts.max_open:
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
        self._inbox.put(lambda: self._add(request, listener), only_open=True)
        return request.id

    def cancel(self, request_id: str) -> None:
        """Ask for the request to end; it does at the next step, wherever it is. No error if it has ended."""
        self._inbox.put(lambda: self._outbox.publish([self._parts.scheduler.cancel(request_id)]))

    def reset_cache(self) -> int:
        """Forget all KV that no request holds; returns the number of blocks. Blocks until the engine thread has done it."""
        done: Future[int] = Future()
        self._inbox.put(lambda: done.set_result(self._parts.cache.reset()), only_open=True)
        return done.result(timeout=RESET_DEADLINE_S)

    def stats(self) -> EngineStats:
        scheduler, cache = self._parts.scheduler, self._parts.cache.stats()
        return EngineStats(
            requests=scheduler.num_by_state(),
            prompt_tokens=dict(scheduler.counts.prompt_tokens),
            generated_tokens=scheduler.counts.generated_tokens,
            kv_blocks={name: getattr(cache.slots, name) for name in ("free", "idle", "active", "pinned", "reserved")},
            retractions=scheduler.counts.retractions,
            blocked_s=dict(self._blocked_s),
            ttft=self._outbox.ttft.copy(),
            inter_token=self._outbox.inter_token.copy(),
            steps=self._num_steps,
            cache={
                "hits": cache.hits_total,
                "misses": cache.misses_total,
                "evictions": cache.evictions_total,
                "duplicate_seals": cache.duplicate_seals_total,
            },
            sanitizer={} if self._parts.sanitizer is None else {str(kind): n for kind, n in self._parts.sanitizer.num_by_kind.items()},
        )

    def wait_work(self, timeout_s: float) -> None:
        """Block until somebody asks for something."""
        self._inbox.wait(timeout_s)

    def refuse(self, why: str) -> None:
        """Take no further submissions; what is open goes on."""
        self._inbox.close(why)

    # ------------------------------------------------------------------------------------------------- the engine thread

    def step(self) -> bool:
        """One turn: plan and launch step N+1 while N runs, then read N. Returns whether anything was done."""
        self._inbox.run_all()
        plan = self._parts.scheduler.plan()
        launched = None if plan is None else self._launch(plan)
        previous, self._running = self._running, launched
        if previous is not None:
            self._read(previous)
        return launched is not None or previous is not None

    def has_work(self) -> bool:
        return bool(self._inbox) or self._running is not None or self._parts.scheduler.has_work()

    def fail_all(self, error: BaseException) -> None:
        """End every request with `error`: the loop cannot go on."""
        self._failure = f"the engine stopped: {type(error).__name__}: {error}"
        self.refuse(self._failure)
        self._inbox.run_all()
        for request_id in self._outbox.open_ids():
            self._outbox.publish([TokenEvent(request_id, finish=FinishReason.ERROR, error=self._failure)])

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel what is open, let the device finish, check that nothing is left. Bounded by `timeout_s` per lane."""
        self.refuse("the engine is closed")
        self._inbox.run_all()
        for request_id in self._outbox.open_ids():
            self._outbox.publish([self._parts.scheduler.cancel(request_id)])
        if self._running is not None:
            self._read(self._running)
            self._running = None
        for lane in self._parts.lanes:
            lane.close(timeout_s)
        self._parts.cache.close()

    def _launch(self, plan: StepPlan) -> RunningStep:
        running = self._parts.executor.launch(plan)
        self._parts.scheduler.launched(running.fence)
        self._num_steps += 1
        return running

    def _read(self, step: RunningStep) -> None:
        started = time.monotonic()
        result = step.wait_result()
        self._blocked_s["result"] += time.monotonic() - started
        if result.error is not None:
            log.error("step %d failed", result.number, exc_info=result.error)
        self._outbox.publish(self._parts.scheduler.commit(result))

    def _add(self, request: Request, listener: Listener) -> None:
        error = f"request id {request.id} is in use" if request.id in self._outbox else self._failure
        if error is not None:
            listener(TokenEvent(request.id, finish=FinishReason.ERROR, error=error))
            return
        self._outbox.open(request.id, listener, request.arrival_s)
        self._parts.scheduler.add(request)

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

"""An engine whose tokens are scripted, for tests of what stands in front of one. Owns its thread and its
books; computes nothing.

It keeps the promises of the real engine's surface: submit and cancel from any thread, events from its own,
one last event per request, counters that add up. A test can hold it, step it, fail it, and ask what is still
open.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config import ResidencyName
from penstock.contract import (
    Adapter,
    CacheHint,
    FinishReason,
    KvSource,
    Listener,
    Prefetched,
    PromptLimits,
    PromptLogprobs,
    SamplingParams,
    Submission,
    TokenEvent,
    TokenLogprob,
    TokenScores,
)
from penstock.engine.adapters import AdapterStore
from penstock.engine.scheduling.residency import ResidencyChoice
from penstock.engine.stats import TTFT_BOUNDS_S, EngineStats
from penstock.errors import EngineClosed
from penstock.figures import Histogram
from penstock.models.adapters import AdapterFiles
from penstock.models.lora import AdapterWeights
from penstock.models.tokenizer import ByteTokenizer

Script = Callable[[Sequence[int], SamplingParams], Iterable["int | BaseException"]]

EOS = 256
BLOCK_TOKENS = 16
NUM_BLOCKS = 1 << 20


class ScriptedTokenizer(ByteTokenizer):
    """One token per byte, and a special one that ends a text. Counts what it encodes."""

    eos_ids = frozenset({EOS})

    def __init__(self) -> None:
        super().__init__(EOS + 1)
        self.num_encoded = 0

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        self.num_encoded += 1
        return super().encode(text, add_special, most)

    def is_special(self, id: int) -> bool:
        return id == EOS


@dataclass(slots=True)
class _Open:
    """A request that has not had its last event."""

    id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    scope: tuple[str, str]  # salt, and content of the adapter
    listener: Listener
    tokens: Iterator[int | BaseException]
    num_generated: int = 0
    started: bool = False
    cancelled: bool = False


def words(prompt: Sequence[int], sampling: SamplingParams) -> Iterator[int]:
    """Text without an end, which differs by seed."""
    return itertools.cycle(f"choice {sampling.seed}: one two three four five six seven. ".encode())


class ScriptedEngine:
    """See the module. `hold` stops tokens, not cancels; `permit` lets a number of steps through while held.

    `pace_s` is what a step takes at least; a real one leaves the interpreter to others for as long as the
    device works.
    """

    def __init__(
        self,
        script: Script = words,
        max_model_len: int = 100_000,
        name: str = "scripted",
        pace_s: float = 0.0,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.name = name
        self.adapters = adapters or AdapterStore(name, lambda directory: AdapterFiles("", AdapterWeights(())))
        self.tokenizer = ScriptedTokenizer()
        self.max_model_len = max_model_len
        self.sampling: dict[str, Any] = {}
        self.submitted: list[tuple[Sequence[int], SamplingParams, str]] = []
        self.adapted: list[Adapter | None] = []  # by what was submitted
        # priority, session and hint, by what was submitted
        self.hinted: list[tuple[int, str, CacheHint | None]] = []
        # by what was submitted
        self.resident: list[tuple[ResidencyName | None, Sequence[tuple[int, int]] | None]] = []
        self._script = script
        self._pace_s = pace_s
        self._lock = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._permits: int | None = None  # None: not held
        self._closed = False
        # prompts in the cache, by salt and adapter content
        self._seen: set[tuple[tuple[str, str], tuple[int, ...]]] = set()
        # tokens by source, and what was generated in how many steps
        self._counts = Counter(device=0, computed=0)
        self._after: list[Callable[[], None]] = []

    # ---- what the server calls

    max_open = 1 << 20
    residency = ResidencyChoice(0, BLOCK_TOKENS, False, (), None)

    @property
    def limits(self) -> PromptLimits:
        return PromptLimits(self.max_model_len, self.tokenizer.vocab_size, 1 << 31)

    def call_after_events(self, callback: Callable[[], None]) -> None:
        self._after.append(callback)

    def note_seen(self, request_id: str, num_tokens: int) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def submit(
        self,
        asked: Submission,
        listener: Listener,
    ) -> str:
        adapter, cache_salt, sampling = asked.adapter, asked.cache_salt, asked.sampling
        prompt, _ = self.limits.checked(asked.prompt, sampling)
        tokens = self._script(prompt, sampling)
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if adapter is not None:
                listener = self.adapters.hold(adapter).until_finished(listener)
            request_id = asked.id or f"request-{len(self.submitted)}"
            self.submitted.append((prompt, sampling, cache_salt))
            self.adapted.append(adapter)
            self.hinted.append((asked.priority, asked.session, asked.hint))
            self.resident.append((asked.residency, asked.pins))
            scope = (cache_salt, "" if adapter is None else adapter.digest)
            self._open[request_id] = _Open(request_id, prompt, sampling, scope, listener, iter(tokens))
            self._lock.notify_all()
        return request_id

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._open:
                self._open[request_id].cancelled = True
                self._lock.notify_all()

    def stats(self) -> EngineStats:
        with self._lock:
            running = sum(request.started for request in self._open.values())
            active = sum(-(-len(request.prompt) // BLOCK_TOKENS) for request in self._open.values())
            return EngineStats(
                requests={"waiting": len(self._open) - running, "running": running},
                prompt_tokens={
                    source: self._counts[source] for source in ("device", "host", "ssd", "remote", "computed")
                },
                generated_tokens=self._counts["generated"],
                kv_blocks={"device": {"free": NUM_BLOCKS - active, "active": active}},
                retractions=0,
                blocked_s={"result": 0.5},
                ttft=Histogram(TTFT_BOUNDS_S, [1] * (len(TTFT_BOUNDS_S) + 1), 42.0),
                inter_token=Histogram(TTFT_BOUNDS_S),
                steps=self._counts["steps"],
                sanitizer={},
                cache={"hits": 0, "misses": 0, "evictions": 0, "duplicate_seals": 0, "promoted": 0},
                traffic=None,
                resume=Histogram(TTFT_BOUNDS_S),
                load_exposed_s=0.0,
            )

    def prefetch(
        self,
        prompt: Sequence[int] | None = None,
        *,
        session: str = "",
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> Future[Prefetched | None]:
        """It has no colder tier, so there is nothing to bring up."""
        done: Future[Prefetched | None] = Future()
        done.set_result(
            Prefetched(0, False)
            if prompt is not None or any(named == session for _, named, _ in self.hinted)
            else None
        )
        return done

    @property
    def kv(self) -> ScriptedEngine:
        """Calls about its cache."""
        return self

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    @property
    def tiers(self) -> tuple[str, ...]:
        return ("device",)

    def reset(self, tiers: Sequence[str] = ("device",)) -> dict[str, int]:
        with self._lock:
            num_blocks = sum(len(prompt) // BLOCK_TOKENS for _, prompt in self._seen)
            self._seen.clear()
        return {"device": num_blocks}

    def wait_flushed(self, level: str, timeout_s: float) -> None:
        """There is no colder tier: everything is where it will ever be."""

    # ---- what a test calls

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def hold(self) -> None:
        with self._lock:
            self._permits = 0

    def permit(self, num_steps: int) -> None:
        with self._lock:
            self._permits = (self._permits or 0) + num_steps
            self._lock.notify_all()

    def release(self) -> None:
        with self._lock:
            self._permits = None
            self._lock.notify_all()

    # ---- what its loop calls

    def step(self, timeout_s: float) -> None:
        """One token for everyone, or the wait for something to do."""
        with self._lock:
            events = [
                self._end(request, FinishReason.CANCELLED)
                for request in list(self._open.values())
                if request.cancelled
            ]
            if self._open and self._permits != 0:
                self._permits = None if self._permits is None else self._permits - 1
                self._counts["steps"] += 1
                events += [self._advance(request) for request in list(self._open.values())]
            elif not events:
                self._lock.wait(timeout_s)
        for listener, event in events:
            listener(event)
        for callback in self._after if events else ():
            callback()
        if self._pace_s:
            time.sleep(self._pace_s)

    def close_admission(self) -> None:
        with self._lock:
            self._closed = True

    def cancel_all(self) -> None:
        with self._lock:
            for request in self._open.values():
                request.cancelled = True
            self._lock.notify_all()

    def _advance(self, request: _Open) -> tuple[Listener, TokenEvent]:
        first = {} if request.started else self._first(request)
        if request.num_generated == request.sampling.max_tokens:
            return self._end(request, FinishReason.LENGTH, **first)
        token = next(request.tokens, EOS)
        if isinstance(token, BaseException):
            return self._end(request, FinishReason.ERROR, error=str(token), **first)
        if token == EOS and not request.sampling.ignore_eos:
            return self._end(request, FinishReason.STOP, stop_token=EOS, **first)
        request.num_generated += 1
        self._counts["generated"] += 1
        logprobs = None if request.sampling.logprobs is None else (_score(token, request.sampling.logprobs),)
        if request.num_generated == request.sampling.max_tokens:
            return self._end(request, FinishReason.LENGTH, tokens=(token,), logprobs=logprobs, **first)
        return request.listener, TokenEvent(request.id, (token,), logprobs, **first)

    def _first(self, request: _Open) -> dict[str, Any]:
        request.started = True
        key = (request.scope, tuple(request.prompt))
        reusable = key in self._seen and request.sampling.prompt_logprobs is None
        num_cached = (len(request.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS if reusable else 0
        self._seen.add(key)
        source = KvSource(device=num_cached, computed=len(request.prompt) - num_cached)
        self._counts.update(device=source.device, computed=source.computed)
        count = request.sampling.prompt_logprobs
        scores = None if count is None else _scores(request.prompt[1:], count)
        return {"source": source, "prompt_logprobs": scores}

    def _end(self, request: _Open, finish: FinishReason, **fields: Any) -> tuple[Listener, TokenEvent]:
        del self._open[request.id]
        return request.listener, TokenEvent(request.id, finish=finish, **fields)


def _score(token: int, count: int) -> TokenLogprob:
    """The chosen token is the second likeliest, so that it is missing from a list of one."""
    others = [(token + i) % EOS for i in (1, *range(2, count + 1))]
    ranked = [
        (others[0], -0.25),
        (token, -0.5),
        *((other, -float(i)) for i, other in enumerate(others[1:], 1)),
    ]
    return TokenLogprob(token, -0.5, 2, tuple(ranked[:count]))


def _scores(tokens: Sequence[int], count: int) -> PromptLogprobs:
    if not tokens:
        return PromptLogprobs((None,))
    scored = [_score(token, count) for token in tokens]
    ranks = np.array([one.rank for one in scored], np.int32)
    logprobs = np.array([one.logprob for one in scored], np.float32)
    chosen = np.array([one.token for one in scored], np.int32)
    top = [one.top for one in scored]
    ids = np.array([[id for id, _ in one] for one in top], np.int32).reshape(len(scored), -1)
    values = np.array([[value for _, value in one] for one in top], np.float32).reshape(len(scored), -1)
    return PromptLogprobs((None, TokenScores(chosen, logprobs, ranks, ids, values)))


class ScriptedLoop:
    """Steps a scripted engine on a thread of its own."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.age_s: float | None = None  # set: what `beat_age_s` says
        self.is_warm = True
        self.engine = engine
        self._beat_s = time.monotonic()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="scripted-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fail(self, error: BaseException) -> None:
        """As if a step had raised: the thread ends, and nobody gets a last event."""
        self._error = error
        self._stop.set()

    def failed(self) -> BaseException | None:
        return self._error

    def beat_age_s(self) -> float:
        return time.monotonic() - self._beat_s if self.age_s is None else self.age_s

    def close(self, deadline_s: float) -> None:
        self.engine.close_admission()
        by_s = time.monotonic() + deadline_s
        while self._thread.is_alive() and self.engine.num_open and time.monotonic() < by_s:
            time.sleep(0.005)
        self.engine.cancel_all()
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() or (self.engine.num_open and self._error is None):
            self._beat_s = time.monotonic()
            self.engine.step(0.01)

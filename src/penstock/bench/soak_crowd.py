"""The crowd of a soak: what is asked, by many threads at once, and what came of it. Owns the requests; checks nothing itself."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from penstock.contract import FinishReason, KvSource, SamplingParams, TokenEvent
from penstock.engine.engine import Engine
from penstock.errors import EngineClosed

NAME = "soak"  # of the adapter whose content changes all the time
NUM_ASKS = 96  # different requests: few enough to come back often, and to be run alone afterwards
NUM_STEMS = 5
CANCELLED = 0.25  # share of requests that somebody cancels
ADAPTED = 0.4  # share of requests for the adapter, where there is one
PAUSE_S = 0.02  # at most, between two requests of a thread
OPEN_PER_THREAD = 8


class Ask(NamedTuple):
    """One of the requests that are made again and again."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str


def random_asks(rng: random.Random, num: int, vocab: int, most_tokens: int) -> list[Ask]:
    """Prompts that share their beginnings, with any mixture of what can be asked; `most_tokens` for prompt and answer together."""
    length = most_tokens // 2
    stems = [[rng.randrange(vocab) for _ in range(length)] for _ in range(NUM_STEMS)]
    asks = []
    for _ in range(num):
        shared = rng.choice((0, 5, 16, 48, length // 2, length))
        prompt = rng.choice(stems)[:shared] + [rng.randrange(vocab) for _ in range(rng.choice((1, 3, 16, 40)))]
        prompt = prompt[: most_tokens - 1]
        fields: dict[str, Any] = {"max_tokens": min(rng.choice((0, 1, 2, 9, 24, 60)), most_tokens - len(prompt)), "temperature": 0.0}
        if rng.random() < 0.4:
            fields |= {"temperature": rng.choice((0.5, 1.0)), "seed": rng.randrange(100), "top_p": rng.choice((0.8, 1.0))}
        if rng.random() < 0.2:
            fields |= rng.choice(({"frequency_penalty": 0.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3}))
        if rng.random() < 0.1:
            fields |= {"prompt_logprobs": 1}
        asks.append(Ask(tuple(prompt), SamplingParams(ignore_eos=True, **fields), rng.choice(("", "", "", "tenant"))))
    return asks


class Outcome(NamedTuple):
    """What came of one request; equal ones are counted, so that days of them fit into memory."""

    ask: int
    adapter: str | None  # digest of its content
    finish: FinishReason
    tokens: tuple[int, ...]
    source: KvSource | None  # of its prompt's KV; None: it ended before its first token
    error: str | None


@dataclass(slots=True)
class Tally:
    """What the crowd has got. Filled on the engine's thread, read when all have ended."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    source: Counter[str] = field(default_factory=Counter)  # prompt tokens
    faults: list[str] = field(default_factory=list)  # what is wrong with an event itself


class Listening:
    """Listens to one request, and cancels it after `cancel_at` tokens where that is said."""

    def __init__(self, tally: Tally, ask: int, length: int, adapter: str | None) -> None:
        self.ended = threading.Event()
        self.on_tokens: Any = None  # called with the number of tokens so far
        self._tally = tally
        self._ask = ask
        self._length = length
        self._adapter = adapter
        self._tokens: list[int] = []
        self._source: KvSource | None = None

    def __call__(self, event: TokenEvent) -> None:
        self._tokens.extend(event.tokens)
        if event.source is not None:
            self._source = event.source
            self._tally.source.update(asdict(event.source))
            if sum(asdict(event.source).values()) != self._length:
                self._tally.faults.append(f"a prompt of {self._length} tokens came from {event.source}")
        if event.finish is not None:
            outcome = Outcome(self._ask, self._adapter, event.finish, tuple(self._tokens), self._source, event.error)
            self._tally.outcomes[outcome] += 1
            self.ended.set()
        elif self.on_tokens is not None:
            self.on_tokens(len(self._tokens))


class Submitter:
    """One thread that asks until it is told to stop. It never has more than a few requests open."""

    def __init__(self, engine: Engine, asks: list[Ask], tally: Tally, rng: random.Random) -> None:
        self.num_submitted = 0
        self.num_cancels = 0
        self.open: list[Listening] = []
        self._engine = engine
        self._asks = asks
        self._tally = tally
        self._rng = rng

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.open = [listening for listening in self.open if not listening.ended.is_set()]
                if len(self.open) >= OPEN_PER_THREAD:
                    self.open[0].ended.wait(PAUSE_S)
                    continue
                self._submit()
                if self._rng.random() < 0.3:
                    stop.wait(self._rng.random() * PAUSE_S)
        except EngineClosed:
            return  # the engine has stopped, and says why itself

    def _submit(self) -> None:
        rng, number = self._rng, self._rng.randrange(len(self._asks))
        ask = self._asks[number]
        hold = self._engine.adapters.try_hold(NAME) if rng.random() < ADAPTED else None
        listening = Listening(self._tally, number, len(ask.prompt), None if hold is None else hold.adapter.digest)
        try:
            adapter = None if hold is None else hold.adapter
            request_id = self._engine.submit(ask.prompt, ask.sampling, listening, cache_salt=ask.salt, adapter=adapter)
        finally:
            if hold is not None:
                hold.end()
        self.open.append(listening)
        self.num_submitted += 1
        if rng.random() < CANCELLED:
            self._cancel(request_id, listening)

    def _cancel(self, request_id: str, listening: Listening) -> None:
        """At once, after a moment, or when some tokens have come."""
        self.num_cancels += 1
        when = self._rng.randrange(3)
        if when == 0:
            after = self._rng.randrange(1, 20)
            listening.on_tokens = lambda num: self._engine.cancel(request_id) if num >= after else None
            return
        if when == 1:
            listening.ended.wait(self._rng.random() * PAUSE_S)
        self._engine.cancel(request_id)

"""The first request of each kind after `ready`, beside the second one of the same kind. Fresh process, one
engine, its own loop.

    PYTHONPATH=src python3 benchmarks/first_requests.py [--model qwen3-4b --load-format dummy --device cuda
    ...] [--json FILE]

Every request has a prompt of its own, so that nothing is reused but what the kind is about. The time is that
from submit to the last token. With --overcommit above 1 there is one kind more, a retraction: its time is the
longest between two tokens of the request that stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from driver import flags, show, text, write
from penstock.contract import Adapter, FinishReason, SamplingParams, Submission, TokenEvent
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.flags import config_of

LIMIT_S = 300.0
OUTPUT = 8


@dataclass
class Asker:
    """Submits requests and waits for them, from a thread that is not the engine's."""

    engine: Engine
    vocab: int
    seed: int = 0

    def prompt(self, num_tokens: int) -> list[int]:
        self.seed += 1
        return [int(x) for x in np.random.default_rng(self.seed).integers(0, self.vocab, num_tokens)]

    def send(
        self,
        prompt: list[int],
        adapter: Adapter | None = None,
        times: list[float] | None = None,
        **sampling: Any,
    ) -> Future[None]:
        done: Future[None] = Future()

        def listen(event: TokenEvent) -> None:
            if times is not None:
                times.append(time.perf_counter())
            if event.finish is FinishReason.LENGTH:
                done.set_result(None)
            elif event.finish is not None:
                done.set_exception(RuntimeError(event.error or str(event.finish)))

        params = SamplingParams(
            **{"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True, "seed": 1, **sampling}
        )
        self.engine.submit(Submission(prompt, params, adapter=adapter), listen)
        return done

    def ask(self, num_tokens: int, **sampling: Any) -> None:
        self.send(self.prompt(num_tokens), **sampling).result(LIMIT_S)

    def ask_many(self, *lengths: int, **sampling: Any) -> None:
        for done in [self.send(self.prompt(length), **sampling) for length in lengths]:
            done.result(LIMIT_S)

    def promote(self, num_tokens: int) -> Callable[[], None]:
        """Brings a prefix to host memory alone; what is timed is asking for it again."""
        prompt = self.prompt(num_tokens)
        self.send(prompt).result(LIMIT_S)
        self.engine.kv.wait_flushed("visible", LIMIT_S)
        self.engine.kv.reset(("device",))
        return lambda: self.send(prompt).result(LIMIT_S)

    def retract(self) -> float:
        """Two requests that fit until they have written a little; returns the longest pause of the one that
        stays, in milliseconds."""
        num_tokens = self.engine.cache.num_blocks * self.engine.cache.block_tokens
        before = self.engine.stats().retractions
        times: list[float] = []
        both = [
            self.send(self.prompt(num_tokens * 31 // 64), times=some, max_tokens=num_tokens // 32)
            for some in (times, None)
        ]
        for done in both:
            done.result(LIMIT_S)
        if self.engine.stats().retractions == before:
            raise RuntimeError("nothing was retracted")
        return float(np.diff(times).max() * 1e3)


SetUp = Callable[[], Callable[[], float | None]]


def kinds(asker: Asker, adapter: Adapter | None, retracts: bool) -> dict[str, SetUp]:
    """By name: what sets one up, which returns what is timed, unless that names its own time."""

    def plain(*lengths: int, **sampling: Any) -> SetUp:
        return lambda: lambda: asker.ask_many(*lengths, **sampling)

    found: dict[str, SetUp] = {
        "greedy": plain(100),
        "temperature": plain(100, temperature=0.8),
        "top_p": plain(100, temperature=0.8, top_p=0.9),
        "top_k and min_p": plain(100, temperature=0.8, top_k=40, min_p=0.05),
        "penalties": plain(100, presence_penalty=0.5, repetition_penalty=1.1),
        "logprobs": plain(100, logprobs=5),
        "everything": plain(100, temperature=0.7, top_p=0.9, top_k=50, frequency_penalty=0.2, logprobs=20),
        "echo": plain(700, prompt_logprobs=5),
        "2,000 tokens": plain(2000),
        "5,000 tokens": plain(5000),
        "9,000 tokens": plain(9000),
        "20,000 tokens": plain(20000),
        "one of 300 beside seven": plain(*[50] * 7, 300),
        "one of 3,000 beside forty": plain(*[50] * 40, 3000),
        "fifty sampled": plain(*[60] * 50, temperature=0.8, top_p=0.9, logprobs=2),
        "promotion of 2,000": lambda: asker.promote(2000),
        "promotion of 9,000": lambda: asker.promote(9000),
        "flush": lambda: lambda: asker.engine.kv.wait_flushed("visible", LIMIT_S),
    }
    if retracts:
        found["retraction"] = lambda: asker.retract
    if adapter is not None:
        found["adapter"] = plain(100, adapter=adapter)
    return found


def timed(name: str, make: SetUp, rounds: int) -> dict[str, Any] | None:
    """Of requests of one kind. None: there is no such request here."""
    times = []
    for _ in range(rounds):
        try:
            run = make()
            begun = time.perf_counter()
            own_ms = run()
        except Exception as error:
            print(f"{name}: skipped, {error}")
            return None
        times.append((time.perf_counter() - begun) * 1e3 if own_ms is None else own_ms)
    later_ms = float(np.median(times[1:]))
    return {"kind": name, "first_ms": times[0], "later_ms": later_ms, "ratio": times[0] / later_ms}


def main() -> None:
    rounds = (3, "requests of each kind; the first is compared with the median of the others")
    args = flags(__doc__, engine=True, rounds=rounds).parse_args()
    config = config_of(args)
    started = time.perf_counter()
    engine = build(config)
    loop = EngineLoop(engine)
    loop.start()
    ready_s = time.perf_counter() - started
    adapters = engine.adapters.all()
    asker = Asker(engine, engine.tokenizer.vocab_size)
    asker.prompt(1)  # what this script itself does for the first time is not the engine's
    makers = kinds(asker, adapters[0].adapter if adapters else None, config.engine.overcommit > 1)
    try:
        found = [timed(name, make, args.rounds) for name, make in makers.items()]
    finally:
        loop.close(deadline_s=0.0)
    rows = [row for row in found if row is not None]
    print(f"ready after {ready_s:.1f} s")
    columns = [("first ms", "first_ms", 1), ("later ms", "later_ms", 1), ("ratio", "ratio", 2)]
    show(rows, [text("kind", "kind"), *columns])
    write(args.json, {"ready_s": ready_s, "rows": rows})


if __name__ == "__main__":
    main()

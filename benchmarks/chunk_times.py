"""Time between tokens of running requests while long prompts are computed beside them, and the rate of those
prompts, for several targets.

    PYTHONPATH=src python3 benchmarks/chunk_times.py [--model qwen3-4b --load-format dummy --device cuda ...]
    [--targets 0,50,150]

A target is what `--prefill-chunk-ms` sets; 0 is a chunk of so many tokens, whatever it takes. All targets
take turns on one engine, and the first round only warms up. In each run `--batch` requests decode, then
`--prompts` new prompts arrive at once; the run ends with the first token of the last of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from driver import flags, show, warmed, write
from penstock.bench.run import random_prompts
from penstock.contract import FinishReason, SamplingParams, Submission, TokenEvent
from penstock.engine.engine import Engine
from penstock.engine.scheduling.budget import Room

STEADY = 8  # tokens of every running request before prompts arrive


@dataclass
class Listener:
    """When one request's tokens came."""

    id: str = ""
    times_s: list[float] = field(default_factory=list)
    finish: FinishReason | None = None

    def __call__(self, event: TokenEvent) -> None:
        if event.finish not in (None, FinishReason.LENGTH, FinishReason.CANCELLED):
            raise RuntimeError(event.error or str(event.finish))
        if event.tokens:
            self.times_s.append(time.perf_counter())
        self.finish = event.finish


@dataclass
class Runs:
    """All that was measured with one target."""

    gaps_s: list[float] = field(default_factory=list)
    prompt_rates: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)

    def row(self, target_ms: float) -> dict[str, float]:
        p50, p99 = (float(np.percentile(self.gaps_s, percent)) * 1e3 for percent in (50, 99))
        return {
            "target_ms": target_ms,
            "p50_ms": p50,
            "p99_ms": p99,
            "max_ms": max(self.gaps_s) * 1e3,
            "steps": len(self.gaps_s),
            "prompt_tokens_per_s": float(np.median(self.prompt_rates)),
            "ttft_s": float(np.mean(self.ttfts_s)),
        }


class Bench:
    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self._engine = engine
        self._args = args
        self._vocab = engine.tokenizer.vocab_size
        self._num_runs = 0

    def run(self, target_ms: float, runs: Runs) -> None:
        scheduler, args = self._engine.parts.scheduler, self._args
        # one engine: building it takes longer
        budget = dataclasses.replace(scheduler.deep.budget, chunk_s=target_ms / 1000)
        scheduler._room = partial(Room, budget, *scheduler._room.args[1:])
        self._num_runs += 1
        decoding = self._submit(args.batch, args.context, args.tokens, 1)
        while any(len(one.times_s) < STEADY for one in decoding):
            self._engine.step()
        begun_s = time.perf_counter()
        prompts = self._submit(args.prompts, args.prompt_tokens, 1, 2)
        while not all(one.times_s for one in prompts):
            self._engine.step()
        ended_s = time.perf_counter()
        if any(one.finish is not None for one in decoding):
            raise SystemExit("a running request ended before the last prompt was computed: raise --tokens")
        for one in decoding:
            self._engine.cancel(one.id)
        while self._engine.has_work() or self._engine.is_transferring():
            if not self._engine.step():
                self._engine.wait_work(0.01)
        for one in decoding:
            seen = [at for at in one.times_s if at <= ended_s]
            runs.gaps_s += [later - earlier for earlier, later in pairwise(seen) if later > begun_s]
        runs.prompt_rates.append(args.prompts * args.prompt_tokens / (ended_s - begun_s))
        runs.ttfts_s += [one.times_s[0] - begun_s for one in prompts]

    def _submit(self, num: int, num_tokens: int, max_tokens: int, kind: int) -> list[Listener]:
        """Of prompts that nobody has sent before."""
        made = []
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=1)
        for prompt in random_prompts(num, num_tokens, self._vocab, (self._num_runs, kind)):
            made.append(Listener())
            asked = Submission(prompt, sampling, cache_salt=str(self._num_runs))
            made[-1].id = self._engine.submit(asked, made[-1])
        return made


def measure(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    runs = {target: Runs() for target in args.targets}
    bench = Bench(engine, args)
    for number in range(1 + args.rounds):
        for target, found in runs.items():
            bench.run(target, found if number else Runs())
            print(f"round {number} of {args.rounds}, target {target:g} ms", flush=True)
    return [found.row(target) for target, found in runs.items()]


def main() -> None:
    args = flags(
        __doc__,
        engine=True,
        targets=([0.0, 50.0, 100.0, 150.0, 300.0], "ms"),
        batch=(8, "requests that decode"),
        context=(256, "tokens of their prompts"),
        tokens=(1024, "tokens that they may generate; they end when all prompts are computed"),
        prompts=(3, "prompts that arrive beside them"),
        prompt_tokens=(32768, "tokens of each"),
        rounds=(2, "measured, after one that warms up"),
    ).parse_args()
    with warmed(args) as engine:
        rows = measure(engine, args)
    columns = [
        ("target ms", "target_ms"),
        ("p50 ms", "p50_ms", 1),
        ("p99 ms", "p99_ms", 1),
        ("max ms", "max_ms", 1),
        ("prompt tokens/s", "prompt_tokens_per_s"),
        ("of the first", "prompt_tokens_per_s", 3, 1 / rows[0]["prompt_tokens_per_s"]),
        ("TTFT s", "ttft_s", 2),
    ]
    show(rows, columns)
    write(args.json, rows)


if __name__ == "__main__":
    main()

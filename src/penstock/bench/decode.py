"""Time of one decode step at a steady batch size. Owns which steps count: prompts are done, and nobody has finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.bench.run import Column, Driver, Results, Turn, blocks_for
from penstock.bench.workload import random_prompts
from penstock.config import Config
from penstock.engine.engine import Engine
from penstock.models.progress import Progress

WARM_UP = 0  # number of the run that is not measured


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """`batch` requests of `prompt_tokens` random tokens each, submitted at once, writing `tokens` tokens greedily."""

    batches: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    repeat: int
    seed: int

    name = "decode"
    columns = (
        Column("batch", lambda row: f"{row['batch']}"),
        Column("step median ms", lambda row: f"{row['step_ms']['median']:.3f}"),
        Column("mean ms", lambda row: f"{row['step_ms']['mean']:.3f}"),
        Column("p99 ms", lambda row: f"{row['step_ms']['p99']:.3f}"),
        Column("tok/s", lambda row: f"{row['tokens_per_s']:.0f}"),
        Column("steps", lambda row: f"{row['num_steps']}"),
    )

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        results = Results([], [])
        for batch in self.batches:
            refusal = self._refusal(batch, engine, config)
            if refusal is None:
                runs = self._runs(Driver(engine), batch, progress)
                if all(runs):
                    results.rows.append(_row(batch, runs))
                    continue
                refusal = "the first request finished before the last prompt was done; raise --tokens or --prefill-chunk"
            results.skipped.append(f"batch {batch}: {refusal}")
        return results

    def _refusal(self, batch: int, engine: Engine, config: Config) -> str | None:
        length = self.prompt_tokens + self.tokens
        if length > engine.max_model_len:
            return f"{length} tokens per request exceed the context of {engine.max_model_len}"
        if batch > config.engine.max_batch:
            return f"only {config.engine.max_batch} requests run at once; raise --max-batch"
        needed, there = batch * blocks_for(length, config), sum(engine.stats().kv_blocks["device"].values())
        if needed > there:
            return f"it needs {needed} KV blocks and the device has {there}; raise --device-kv-gib"
        return None

    def _runs(self, driver: Driver, batch: int, progress: Progress) -> list[list[float]]:
        """Steady step times in seconds, by run."""
        runs = []
        for run in range(1 + self.repeat):
            progress(f"decode, batch {batch}", run, 1 + self.repeat)
            for prompt in random_prompts(batch, self.prompt_tokens, driver.engine.tokenizer.vocab_size, (self.seed, batch, run)):
                driver.submit(prompt, self.tokens)
            times = steady_times(driver.run_all(), batch)
            if run != WARM_UP:
                runs.append(times)
        progress(f"decode, batch {batch}", 1 + self.repeat, 1 + self.repeat)
        return runs

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        batches = [row["batch"] for row in rows]
        for figure, style in (("median", "o-"), ("p99", "o:")):
            axes.plot(batches, [row["step_ms"][figure] for row in rows], style, label=f"step, {figure}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at once")
        axes.set_ylabel("ms per decode step")
        axes.legend()


def steady_times(turns: Sequence[Turn], batch: int) -> list[float]:
    """Seconds between turns in which every request got exactly one token and none finished, the turn before being such a one, too."""
    steady = [turn.num_tokens == batch and turn.num_finished == 0 for turn in turns]
    return [turns[i].end_s - turns[i - 1].end_s for i in range(1, len(turns)) if steady[i] and steady[i - 1]]


def _row(batch: int, runs: list[list[float]]) -> dict[str, Any]:
    times_ms = np.concatenate(runs) * 1000
    mean_ms = float(times_ms.mean())
    return {
        "batch": batch,
        "num_steps": len(times_ms),
        "step_ms": {
            "median": float(np.median(times_ms)),
            "mean": mean_ms,
            "p99": float(np.percentile(times_ms, 99)),
            "min": float(times_ms.min()),
        },
        "median_ms_by_run": [float(np.median(run)) * 1000 for run in runs],
        "tokens_per_s": batch / mean_ms * 1000,
    }

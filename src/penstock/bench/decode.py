"""Time between tokens at a steady batch size: alone, and while a large prefix comes back from host memory.
Owns which steps count."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.bench.report import Column, Results, draw_bars, figure
from penstock.bench.run import WARM_UP, Driver, Stepped, blocks_for, random_prompts, runs, shortage
from penstock.config import GIB, Config
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, InvariantBroken
from penstock.models.progress import Progress

STEADY = 8  # turns before anything is restored
MOST_TOKENS = 16384  # of one returning prompt: several make up the bytes


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """`batch` requests of `prompt_tokens` random tokens each, submitted at once, writing `tokens` tokens
    greedily."""

    batches: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    repeat: int
    seed: int

    name = "decode"
    columns = (
        figure("batch", "batch"),
        figure("step median ms", "step_ms.median", 3),
        figure("mean ms", "step_ms.mean", 3),
        figure("p99 ms", "step_ms.p99", 3),
        figure("tok/s", "tokens_per_s"),
        figure("steps", "num_steps"),
    )

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        results = Results([], [])
        for batch in self.batches:
            refusal = self._refusal(batch, engine, config)
            if refusal is None:
                taken = self._runs(Driver(engine), batch, progress)
                if all(taken):
                    results.rows.append(_row(batch, taken))
                    continue
                refusal = (
                    "the first request finished before the last prompt was done; raise --tokens or "
                    "--prefill-chunk"
                )
            results.skipped.append(f"batch {batch}: {refusal}")
        return results

    def _refusal(self, batch: int, engine: Engine, config: Config) -> str | None:
        length = self.prompt_tokens + self.tokens
        if length > engine.max_model_len:
            return f"{length} tokens per request exceed the context of {engine.max_model_len}"
        if batch > config.engine.max_batch:
            return f"only {config.engine.max_batch} requests run at once; raise --max-batch"
        return shortage("device", batch * blocks_for(length, config), engine, config)

    def _runs(self, driver: Driver, batch: int, progress: Progress) -> list[list[float]]:
        """Steady step times in seconds, by run."""
        taken = []
        for run in runs(f"decode, batch {batch}", self.repeat, progress):
            for prompt in random_prompts(
                batch, self.prompt_tokens, driver.engine.tokenizer.vocab_size, (self.seed, batch, run)
            ):
                driver.submit(prompt, self.tokens)
            times = steady_times(driver.run_all(), batch)
            if run != WARM_UP:
                taken.append(times)
        return taken

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        batches = [row["batch"] for row in rows]
        for name, style in (("median", "o-"), ("p99", "o:")):
            axes.plot(batches, [row["step_ms"][name] for row in rows], style, label=f"step, {name}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at once")
        axes.set_ylabel("ms per decode step")
        axes.legend()


def steady_times(turns: Sequence[Stepped], batch: int) -> list[float]:
    """Seconds between turns in which every request got exactly one token and none finished, the turn before
    being such a one, too."""
    steady = [turn.num_tokens == batch and turn.num_finished == 0 for turn in turns]
    return [turns[i].end_s - turns[i - 1].end_s for i in range(1, len(turns)) if steady[i] and steady[i - 1]]


def _row(batch: int, taken: list[list[float]]) -> dict[str, Any]:
    times_ms = np.concatenate(taken) * 1000
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
        "median_ms_by_run": [float(np.median(run)) * 1000 for run in taken],
        "tokens_per_s": batch / mean_ms * 1000,
    }


# ------------------------------------------------------------------------------------------- beside a restore

ALONE, RESTORING = "alone_ms", "restoring_ms"
CASES = {ALONE: "alone", RESTORING: "while KV comes back"}


@dataclass(frozen=True, slots=True)
class RestoreBench:
    """`batch` requests decode; in every second run prompts whose KV is `gib` GiB in host memory return
    meanwhile."""

    batches: tuple[int, ...]
    gib: float
    tokens: int
    repeat: int
    seed: int

    name = "restore"
    columns = (
        figure("batch", "batch"),
        Column(
            "alone median / p99 ms",
            lambda row: f"{row['alone_ms']['median']:.3f} / {row['alone_ms']['p99']:.3f}",
        ),
        Column(
            "restoring median / p99 ms",
            lambda row: f"{row['restoring_ms']['median']:.3f} / {row['restoring_ms']['p99']:.3f}",
        ),
        figure("p99 ratio", "p99_ratio", 3),
        figure("GiB restored", "restored_gib", 2),
        figure("blocks promoted", "promoted_blocks"),
    )

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        results = Results([], [])
        driver = Driver(engine)
        driver.wait_ready(progress)
        returning = self._returning(engine, config)
        if not returning:
            raise ConfigError(
                f"--gib {self.gib:g} is less than one KV block of {engine.arena.layout.block_bytes} bytes"
            )
        needed = sum(blocks_for(len(prompt) + 1, config) for prompt in returning)
        beside = max(self.batches) * blocks_for(128 + self.tokens, config)
        refusal = shortage("device", needed + beside, engine, config) or shortage(
            "host", needed, engine, config
        )
        if refusal is not None:
            results.skipped.append(
                f"{self.gib:g} GiB and {max(self.batches)} requests beside them: {refusal}"
            )
            return results
        for batch in self.batches:
            results.rows.append(self._row(driver, batch, returning, progress))
        return results

    def _returning(self, engine: Engine, config: Config) -> list[list[int]]:
        block_bytes = engine.cache.saves.layout.block_bytes
        num_tokens = int(self.gib * GIB / block_bytes) * config.kv.block_tokens
        most = min(MOST_TOKENS, (engine.max_model_len - 1) // config.kv.block_tokens * config.kv.block_tokens)
        lengths = [min(most, num_tokens - first) for first in range(0, num_tokens, most)]
        vocab = engine.tokenizer.vocab_size
        return [random_prompts(1, length, vocab, (self.seed, 1, i))[0] for i, length in enumerate(lengths)]

    def _row(
        self, driver: Driver, batch: int, returning: list[list[int]], progress: Progress
    ) -> dict[str, Any]:
        driver.reset_cache()
        for prompt in returning:
            driver.submit(prompt, 1)
        driver.run_all()
        times: dict[str, list[float]] = {case: [] for case in CASES}
        promoted = 0
        for run in runs(f"restore, batch {batch}", self.repeat, progress):
            for case in CASES:
                driver.flush()
                driver.reset_cache("device")
                before = driver.engine.stats().cache["promoted"]
                found = self._run(driver, batch, run, returning if case == RESTORING else [])
                promoted = driver.engine.stats().cache["promoted"] - before
                if run != WARM_UP:
                    times[case] += found
        if promoted != sum(len(prompt) for prompt in returning) // driver.engine.cache.block_tokens:
            raise InvariantBroken(f"{promoted} blocks were promoted, which is not what was to return")
        return _summary(batch, times, promoted, self.gib)

    def _run(self, driver: Driver, batch: int, run: int, returning: list[list[int]]) -> list[float]:
        """Seconds between tokens of the batch, from its steady state to its first end."""
        for prompt in random_prompts(
            batch, 128, driver.engine.tokenizer.vocab_size, (self.seed, 2, batch, run, len(returning))
        ):
            driver.submit(prompt, self.tokens)
        turns: list[Stepped] = []
        while len(turns) < STEADY:
            turn = driver.turn()
            if turn.num_finished:
                raise ConfigError(
                    f"a request ended before {batch} had written together for {STEADY} steps; raise "
                    "--tokens or --prefill-chunk"
                )
            turns = [*turns, turn] if turn.num_tokens == batch else []
        # As in a server: prompts are hashed and looked up by threads that are not the engine's.
        with ThreadPoolExecutor(1, "bench-submit") as pool:
            submitted = pool.submit(lambda: [driver.submit(prompt, 1) for prompt in returning])
            while True:
                turn = driver.turn()
                if turn.num_finished > len(returning) or (
                    turn.num_finished and turn.num_tokens - turn.num_finished < batch
                ):
                    break
                turns.append(turn)
            submitted.result()
        driver.run_all()
        kept = [turn for turn in turns if turn.num_tokens >= batch]
        return [later.end_s - earlier.end_s for earlier, later in pairwise(kept)]

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        bars = {f"p99, {name}": [row[case]["p99"] for row in rows] for case, name in CASES.items()}
        draw_bars(axes, [str(row["batch"]) for row in rows], bars, "%.2f")
        axes.set_xlabel("requests at once")
        axes.set_ylabel("ms between tokens")


def _summary(batch: int, times: dict[str, list[float]], promoted: int, gib: float) -> dict[str, Any]:
    figures = {}
    for case in CASES:
        in_ms = np.array(times[case]) * 1000
        percentiles = {"median": 50, "p90": 90, "p99": 99}
        figures[case] = {
            label: float(np.percentile(in_ms, percent)) for label, percent in percentiles.items()
        } | {"steps": len(in_ms)}
    ratio = figures[RESTORING]["p99"] / figures[ALONE]["p99"]
    return {"batch": batch, **figures, "p99_ratio": ratio, "restored_gib": gib, "promoted_blocks": promoted}

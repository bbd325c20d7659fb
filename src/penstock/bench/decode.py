"""Time between tokens at a steady batch size: alone, and while a large prefix comes back from host memory.
Owns which steps count."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.bench.report import Column, Results, Row, draw_points, figure
from penstock.bench.run import WARM_UP, Driver, Skipped, Stepped, measure_each, runs
from penstock.config import GIB
from penstock.errors import ConfigError, InvariantBroken

STEADY = 8  # turns before anything is restored
MOST_TOKENS = 16384  # of one returning prompt: several make up the bytes
PROMPT_TOKENS = 128  # of requests that decode beside a restore


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
        figure("waiting for experts ms", "expert_wait_ms", 3),
        figure("tok/s", "tokens_per_s"),
        figure("steps", "num_steps"),
    )

    def measure(self, driver: Driver) -> Results:
        return measure_each(self.batches, "batch {}", lambda batch: self._row(driver, batch))

    def _row(self, driver: Driver, batch: int) -> Row:
        length, longest = self.prompt_tokens + self.tokens, driver.engine.max_model_len
        if length > longest:
            raise Skipped(f"{length} tokens per request exceed the context of {longest}")
        if batch > (most := driver.config.engine.max_batch):
            raise Skipped(f"only {most} requests run at once; raise --max-batch")
        driver.require_room({"device": batch * driver.blocks(length)})
        taken, waits_s = [], list[float | None]()
        for run in runs(f"decode, batch {batch}", self.repeat, driver.progress):
            for prompt in driver.prompts(batch, self.prompt_tokens, self.seed, batch, run):
                last = driver.submit(prompt, self.tokens)
            times_ms = 1000 * np.array(steady_times(driver.run_all(), batch))
            waits_s.append(last.expert_wait_s)  # its steps decode all requests
            if not len(times_ms):
                raise Skipped(
                    "the first request finished before the last prompt was done; raise --tokens or "
                    "--prefill-chunk"
                )
            taken.append(times_ms)
        del taken[WARM_UP], waits_s[WARM_UP]
        steps_ms = np.concatenate(taken)
        mean_ms = float(steps_ms.mean())
        waited_s = [wait_s for wait_s in waits_s if wait_s is not None]
        waiting = {"expert_wait_ms": 1e3 * float(np.mean(waited_s)) / (self.tokens - 1)} if waited_s else {}
        return {
            "batch": batch,
            "num_steps": len(steps_ms),
            "step_ms": {
                "median": float(np.median(steps_ms)),
                "mean": mean_ms,
                "p99": float(np.percentile(steps_ms, 99)),
                "min": float(steps_ms.min()),
            },
            "median_ms_by_run": [float(np.median(run)) for run in taken],
            "tokens_per_s": batch / mean_ms * 1000,
            **waiting,
        }

    def draw(self, axes: Any, rows: list[Row]) -> None:
        points = [(name, row["batch"], row["step_ms"][name]) for row in rows for name in ("median", "p99")]
        draw_points(axes, points, "requests at once", "ms per decode step")


def steady_times(turns: Sequence[Stepped], batch: int) -> list[float]:
    """Seconds between turns in which every request got exactly one token and none finished, the turn before
    being such a one, too."""
    full = batch, 0
    return [
        later.end_s - earlier.end_s for earlier, later in pairwise(turns) if earlier[1:] == later[1:] == full
    ]


# ------------------------------------------------------------------------------------------- beside a restore

CASES = {"alone_ms": "alone", "restoring_ms": "while KV comes back"}


def _column(name: str) -> Column:
    def cell(row: Row) -> str:
        return "{median:.3f} / {p99:.3f}".format(**row[f"{name}_ms"])

    return Column(f"{name} median / p99 ms", cell)


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
        _column("alone"),
        _column("restoring"),
        figure("p99 ratio", "p99_ratio", 3),
        figure("GiB restored", "restored_gib", 2),
        figure("blocks promoted", "promoted_blocks"),
    )

    def measure(self, driver: Driver) -> Results:
        engine, block_tokens = driver.engine, driver.config.kv.block_tokens
        block_bytes = engine.cache.saves.layout.block_bytes
        num_tokens = int(self.gib * GIB / block_bytes) * block_tokens
        if not num_tokens:
            raise ConfigError(f"--gib {self.gib:g} is less than one KV block of {block_bytes} bytes")
        most = min(MOST_TOKENS, (engine.max_model_len - 1) // block_tokens * block_tokens)
        returning = [
            driver.prompts(1, min(most, num_tokens - first), self.seed, 1, first // most)[0]
            for first in range(0, num_tokens, most)
        ]
        needed = sum(driver.blocks(len(prompt) + 1) for prompt in returning)
        largest = max(self.batches)
        beside = largest * driver.blocks(PROMPT_TOKENS + self.tokens)
        try:
            driver.require_room({"device": needed + beside, "host": needed})
        except Skipped as why:
            return Results([], [f"{self.gib:g} GiB and {largest} requests beside them: {why}"])
        return Results([self._row(driver, batch, returning) for batch in self.batches], [])

    def _row(self, driver: Driver, batch: int, returning: list[list[int]]) -> Row:
        driver.reset_cache()
        for prompt in returning:
            driver.submit(prompt, 1)
        driver.run_all()
        times: dict[str, list[float]] = {case: [] for case in CASES}
        promoted = 0
        for run in runs(f"restore, batch {batch}", self.repeat, driver.progress):
            for case, taken in times.items():
                driver.flush()
                driver.reset_cache("device")
                before = driver.engine.stats().cache["promoted"]
                found = self._run(driver, batch, run, returning if case == "restoring_ms" else [])
                promoted = driver.engine.stats().cache["promoted"] - before
                taken += found if run != WARM_UP else []
        if promoted != sum(map(len, returning)) // driver.engine.cache.block_tokens:
            raise InvariantBroken(f"{promoted} blocks were promoted, which is not what was to return")
        figures: dict[str, dict[str, float]] = {}
        for case, taken in times.items():
            p50, p90, p99 = (np.percentile(taken, (50, 90, 99)) * 1000).tolist()
            figures[case] = {"median": p50, "p90": p90, "p99": p99, "steps": len(taken)}
        return {
            "batch": batch,
            **figures,
            "p99_ratio": figures["restoring_ms"]["p99"] / figures["alone_ms"]["p99"],
            "restored_gib": self.gib,
            "promoted_blocks": promoted,
        }

    def _run(self, driver: Driver, batch: int, run: int, returning: list[list[int]]) -> list[float]:
        """Seconds between tokens of the batch, from its steady state to its first end."""
        for prompt in driver.prompts(batch, PROMPT_TOKENS, self.seed, 2, batch, run, len(returning)):
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
                ended = turn.num_finished
                if ended > len(returning) or (ended and turn.num_tokens - ended < batch):
                    break
                turns.append(turn)
            submitted.result()
        driver.run_all()
        kept = [turn.end_s for turn in turns if turn.num_tokens >= batch]
        return [later - earlier for earlier, later in pairwise(kept)]

    def draw(self, axes: Any, rows: list[Row]) -> None:
        points = [
            (f"p99, {name}", row["batch"], row[case]["p99"]) for case, name in CASES.items() for row in rows
        ]
        draw_points(axes, points, "requests at once", "ms between tokens")

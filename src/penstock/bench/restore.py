"""Time between tokens of running requests while a large prefix comes back from host memory. Owns the comparison with a run without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.bench.run import Column, Driver, Results, Turn, blocks_for
from penstock.bench.workload import random_prompts
from penstock.config import GIB, Config
from penstock.engine.engine import Engine
from penstock.errors import InvariantBroken
from penstock.models.progress import Progress

WARM_UP = 0  # number of the run that is not measured
STEADY = 8  # turns before anything is restored
MOST_TOKENS = 16384  # of one returning prompt: several make up the bytes


@dataclass(frozen=True, slots=True)
class RestoreBench:
    """`batch` requests decode; in every second run prompts whose KV is `gib` GiB in host memory return meanwhile."""

    batches: tuple[int, ...]
    gib: float
    tokens: int
    repeat: int
    seed: int

    name = "restore"
    columns = (
        Column("batch", lambda row: f"{row['batch']}"),
        Column("alone median / p99 ms", lambda row: f"{row['alone_ms']['median']:.3f} / {row['alone_ms']['p99']:.3f}"),
        Column("restoring median / p99 ms", lambda row: f"{row['restoring_ms']['median']:.3f} / {row['restoring_ms']['p99']:.3f}"),
        Column("p99 ratio", lambda row: f"{row['p99_ratio']:.3f}"),
        Column("GiB restored", lambda row: f"{row['restored_gib']:.2f}"),
        Column("blocks promoted", lambda row: f"{row['promoted_blocks']}"),
    )

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        results = Results([], [])
        driver = Driver(engine)
        driver.wait_ready(progress)
        returning = self._returning(engine, config)
        needed = sum(blocks_for(len(prompt) + 1, config) for prompt in returning)
        there = engine.stats().kv_blocks
        room = sum(there["device"].values()) - max(self.batches) * blocks_for(128 + self.tokens, config)
        if "host" not in there or needed > min(room, sum(there["host"].values())):
            results.skipped.append(f"{self.gib:g} GiB need {needed} KV blocks in host memory, and free on the device beside the batch")
            return results
        for batch in self.batches:
            results.rows.append(self._row(driver, batch, returning, progress))
        return results

    def _returning(self, engine: Engine, config: Config) -> list[list[int]]:
        block_bytes = engine.cache.ladder.block_bytes if engine.cache.ladder is not None else 1
        num_tokens = int(self.gib * GIB / block_bytes) * config.kv.block_tokens
        most = min(MOST_TOKENS, (engine.max_model_len - 1) // config.kv.block_tokens * config.kv.block_tokens)
        lengths = [min(most, num_tokens - first) for first in range(0, num_tokens, most)]
        vocab = engine.tokenizer.vocab_size
        return [random_prompts(1, length, vocab, (self.seed, 1, i))[0] for i, length in enumerate(lengths)]

    def _row(self, driver: Driver, batch: int, returning: list[list[int]], progress: Progress) -> dict[str, Any]:
        driver.reset_cache()
        for prompt in returning:
            driver.submit(prompt, 1)
        driver.run_all()
        times: dict[bool, list[float]] = {False: [], True: []}
        promoted = 0
        for run in range(1 + self.repeat):
            progress(f"restore, batch {batch}", run, 1 + self.repeat)
            for restores in (False, True):
                driver.flush()
                driver.reset_cache("device")
                before = driver.engine.stats().cache["promoted"]
                found = self._run(driver, batch, run, returning if restores else [])
                promoted = driver.engine.stats().cache["promoted"] - before
                if run != WARM_UP:
                    times[restores] += found
        progress(f"restore, batch {batch}", 1 + self.repeat, 1 + self.repeat)
        if promoted != sum(len(prompt) for prompt in returning) // driver.engine.cache.block_tokens:
            raise InvariantBroken(f"{promoted} blocks were promoted, which is not what was to return")
        return _summary(batch, times, promoted, self.gib)

    def _run(self, driver: Driver, batch: int, run: int, returning: list[list[int]]) -> list[float]:
        """Seconds between tokens of the batch, from its steady state to its first end."""
        for prompt in random_prompts(batch, 128, driver.engine.tokenizer.vocab_size, (self.seed, 2, batch, run, len(returning))):
            driver.submit(prompt, self.tokens)
        turns: list[Turn] = []
        while len(turns) < STEADY:
            turn = driver.turn()
            turns = [*turns, turn] if turn.num_tokens == batch else []
        # As in a server: prompts are hashed and looked up by threads that are not the engine's.
        with ThreadPoolExecutor(1, "bench-submit") as pool:
            submitted = pool.submit(lambda: [driver.submit(prompt, 1) for prompt in returning])
            while True:
                turn = driver.turn()
                if turn.num_finished > len(returning) or (turn.num_finished and turn.num_tokens - turn.num_finished < batch):
                    break
                turns.append(turn)
            submitted.result()
        driver.run_all()
        kept = [turn for turn in turns if turn.num_tokens >= batch]
        return [later.end_s - earlier.end_s for earlier, later in pairwise(kept)]

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        for i, (case, name) in enumerate((("alone_ms", "alone"), ("restoring_ms", "while KV comes back"))):
            places = [at + (i - 0.5) * 0.4 for at in range(len(rows))]
            axes.bar_label(axes.bar(places, [row[case]["p99"] for row in rows], 0.4, label=f"p99, {name}"), fmt="%.2f", fontsize=7)
        axes.set_xticks(range(len(rows)), [str(row["batch"]) for row in rows])
        axes.set_xlabel("requests at once")
        axes.set_ylabel("ms between tokens")
        axes.legend()


def _summary(batch: int, times: dict[bool, list[float]], promoted: int, gib: float) -> dict[str, Any]:
    figures = {}
    for restores, name in ((False, "alone_ms"), (True, "restoring_ms")):
        in_ms = np.array(times[restores]) * 1000
        percentiles = {"median": 50, "p90": 90, "p99": 99}
        figures[name] = {label: float(np.percentile(in_ms, percent)) for label, percent in percentiles.items()} | {"steps": len(in_ms)}
    ratio = figures["restoring_ms"]["p99"] / figures["alone_ms"]["p99"]
    return {"batch": batch, **figures, "p99_ratio": ratio, "restored_gib": gib, "promoted_blocks": promoted}

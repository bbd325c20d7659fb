"""Time to first token from the disk after a restart: one process computes and ends, another opens the same directory and is asked for the
same. Owns the two processes and what goes between them; how a sample is taken and proven is `ttft`'s."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.bench.child import run_in_process
from penstock.bench.run import Column, Driver, Results
from penstock.bench.ttft import NAMES, WARM_UP, Sample, refusal_of, reusable, row_of, sample
from penstock.bench.workload import random_prompts
from penstock.config import Config
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import settle_process
from penstock.errors import DeadlineExceeded
from penstock.models.progress import Progress

SCAN_S = 120.0  # for the index of what was there before
SCAN_POLL_S = 0.005
FRESH = 1 << 16  # added to a run's number: prompts that nobody has seen
CLOSE_S = 60.0


class Job(NamedTuple):
    """What both processes work on."""

    config: Config
    lengths: tuple[int, ...]
    repeat: int
    seed: int
    salt: str

    def prompt(self, length: int, run: int, vocab: int) -> list[int]:
        return random_prompts(1, length, vocab, (self.seed, length, run))[0]


class Before(NamedTuple):
    """What the first process leaves behind."""

    model: str
    cold: dict[int, list[Sample]]  # by length
    refused: list[str]
    num_blocks: int  # on disk


class After(NamedTuple):
    """What the second one found."""

    samples: dict[int, dict[str, list[Sample]]]  # by length and case
    first: dict[int, Sample]  # the disk's in the run that only warms up: of the first length, the first request of the process
    scan_s: float  # from a built engine to a complete index


@dataclass(frozen=True, slots=True)
class RestartBench:
    """For each length: so many prompts computed and flushed by a process that ends; then each asked for again, and a fresh one of the
    same length computed, taking turns, in a process that has only the disk."""

    lengths: tuple[int, ...]
    repeat: int
    seed: int

    name = "ttft --restart"
    columns = (
        Column("prompt tokens", lambda row: f"{row['tokens']}"),
        Column("cold ms", lambda row: f"{row['ttft_ms']['cold']['median']:.2f}"),
        Column("cold before the restart ms", lambda row: f"{row['ttft_ms']['cold_before']['median']:.2f}"),
        Column("ssd ms", lambda row: f"{row['ttft_ms']['ssd']['median']:.2f}"),
        Column("ssd, first ms", lambda row: f"{row['first_ms']:.2f}"),
        Column("cold / ssd", lambda row: f"{row['ratio_ssd']:.1f}"),
        Column("blocks promoted", lambda row: f"{row['promoted_blocks']['ssd']}"),
        Column("scan ms", lambda row: f"{row['scan_ms']:.1f}"),
    )

    def measure(self, config: Config, progress: Progress) -> tuple[str, Results]:
        """With the model's name. The disk's directory is to be empty."""
        job = Job(config, self.lengths, self.repeat, self.seed, secrets.token_hex(8))
        before: Before = run_in_process(_compute, (job,), progress)
        if not before.cold:
            return before.model, Results([], before.refused)
        after: After = run_in_process(_ask_again, (job._replace(lengths=tuple(before.cold)), before.num_blocks), progress)
        rows = []
        for length, samples in after.samples.items():
            row = row_of(length, {**samples, "cold_before": before.cold[length]})
            rows.append({**row, "first_ms": after.first[length].ttft_s * 1000, "scan_ms": after.scan_s * 1000})
        return before.model, Results(rows, before.refused)

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        names = {"cold": NAMES["cold"], "ssd": f"{NAMES['ssd']}, after a restart"}
        for i, (case, name) in enumerate(names.items()):
            bars = axes.bar(
                [at + 0.4 * i - 0.2 for at in range(len(rows))], [row["ttft_ms"][case]["median"] for row in rows], 0.4, label=name
            )
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.set_yscale("log")
        axes.set_xticks(range(len(rows)), [str(row["tokens"]) for row in rows])
        axes.set_xlabel("prompt tokens")
        axes.set_ylabel("ms to first token")
        axes.legend()


# ------------------------------------------------------------------------------------------------------- in the two processes


def _compute(job: Job, progress: Progress) -> Before:
    engine = _built(job.config, progress)
    driver, vocab = Driver(engine, job.salt), engine.tokenizer.vocab_size
    driver.wait_ready(progress)
    cold: dict[int, list[Sample]] = {}
    refused = []
    for length in job.lengths:
        refusal = refusal_of(length, engine, job.config)
        if refusal is not None:
            refused.append(f"{length} tokens: {refusal}")
            continue
        for run in range(1 + job.repeat):
            progress(f"before the restart, {length} tokens", run, 1 + job.repeat)
            taken = sample(driver, job.prompt(length, run, vocab), "device", 0)
            if run != WARM_UP:
                cold.setdefault(length, []).append(taken)
            driver.flush("persisted")
    num_blocks = engine.stats().kv_blocks["ssd"]["used"]
    engine.close(timeout_s=CLOSE_S)
    return Before(engine.name, cold, refused, num_blocks)


def _ask_again(job: Job, num_blocks: int, progress: Progress) -> After:
    engine = _built(job.config, progress)
    scan_s = _wait_scanned(engine, num_blocks)
    driver, vocab = Driver(engine, job.salt), engine.tokenizer.vocab_size
    driver.wait_ready(progress)
    after = After({length: {"cold": [], "ssd": []} for length in job.lengths}, {}, scan_s)
    for length in job.lengths:
        expected = reusable(length, length, job.config.kv.block_tokens)
        for run in range(1 + job.repeat):
            progress(f"after the restart, {length} tokens", run, 1 + job.repeat)
            restored = sample(driver, job.prompt(length, run, vocab), "ssd", expected)
            computed = sample(driver, job.prompt(length, run + FRESH, vocab), "device", 0)
            driver.flush("persisted")  # nothing of this run is written beside the next,
            driver.reset_cache("device", "host")  # which begins as the first one did: with nothing in memory
            if run == WARM_UP:
                after.first[length] = restored
            else:
                after.samples[length]["ssd"].append(restored)
                after.samples[length]["cold"].append(computed)
    engine.close(timeout_s=CLOSE_S)
    return after


def _built(config: Config, progress: Progress) -> Engine:
    engine = build(config, progress)
    engine.warm(progress)
    settle_process()
    return engine


def _wait_scanned(engine: Engine, num_blocks: int) -> float:
    """Until the disk's index has all that was there; returns how long that took."""
    started = time.perf_counter()
    while (found := engine.stats().kv_blocks["ssd"]["used"]) < num_blocks:
        if time.perf_counter() - started > SCAN_S:
            raise DeadlineExceeded(f"{found} of {num_blocks} blocks were found on disk within {SCAN_S:g} s of a restart")
        time.sleep(SCAN_POLL_S)
    return time.perf_counter() - started

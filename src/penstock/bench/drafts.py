"""What drafts can reach: decoding with a number of drafts per step of which a given share is kept, beside
plain decoding. Which drafts are kept is made up, so this says nothing about a proposer. Owns what counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench.report import Results, Row, draw_points, figure
from penstock.bench.run import WARM_UP, Driver, Skipped, Stepped, runs
from penstock.errors import InvariantBroken


@dataclass(frozen=True, slots=True)
class DraftsBench:
    """As `DecodeBench`, for each number of drafts and each share. 0 drafts: plain decoding, without
    speculation."""

    batches: tuple[int, ...]
    drafts: tuple[int, ...]
    acceptance: tuple[float, ...]
    prompt_tokens: int
    tokens: int
    repeat: int
    seed: int

    name = "drafts (synthetic acceptance)"
    columns = (
        figure("drafts", "drafts"),
        figure("synthetic acceptance", "synthetic_acceptance", 2),
        figure("batch", "batch"),
        figure("tok/s", "tokens_per_s"),
        figure("against plain", "against_plain", 3),
        figure("tokens a step", "tokens_per_step", 2),
        figure("expected", "expected_tokens_per_step", 2),
        figure("step ms", "step_ms", 3),
    )

    def measure(self, engines: Callable[[int], Any]) -> Results:
        """`engines`: a context with the driver of an engine with so many drafts, and a call that sets the
        share."""
        results = Results([], [])
        plain: dict[int, float] = {}
        for num in (0, *self.drafts):
            with engines(num) as (driver, set_share):
                for share in self.acceptance if num else (0.0,):
                    set_share(share)
                    for batch in self.batches:
                        try:
                            row = self._row(driver, batch, num, share)
                        except Skipped as why:
                            results.skipped.append(f"batch {batch}, {num} drafts: {why}")
                            continue
                        if not num:
                            plain[batch] = row["tokens_per_s"]
                        beside = plain.get(batch)
                        row["against_plain"] = None if beside is None else row["tokens_per_s"] / beside
                        results.rows.append(row)
        return results

    def _row(self, driver: Driver, batch: int, num: int, share: float) -> Row:
        length, longest = self.prompt_tokens + self.tokens, driver.engine.max_model_len
        if length > longest:
            raise Skipped(f"{length} tokens per request exceed the context of {longest}")
        if batch > (most := driver.config.engine.max_batch):
            raise Skipped(f"only {most} requests run at once; raise --max-batch")
        driver.require_room({"device": batch * driver.blocks(length)})
        num_tokens = num_steps = 0
        seconds = 0.0
        for run in runs(f"{num} drafts, share {share:g}, batch {batch}", self.repeat, driver.progress):
            prompts = driver.prompts(batch, self.prompt_tokens, self.seed, batch, num, run)
            readers = [driver.submit(prompt, self.tokens) for prompt in prompts]
            turns = driver.run_all()
            firsts = [reader.first_s for reader in readers]
            if any(first is None for first in firsts):
                raise InvariantBroken("a request ended without a token")
            found = steady(turns, max(first for first in firsts if first is not None))
            if run != WARM_UP:
                num_tokens, num_steps = num_tokens + found[0], num_steps + found[1]
                seconds += found[2]
        if not num_steps:
            raise Skipped("the first request ended before the last prompt was done; raise --tokens")
        return {
            "synthetic": True,
            "drafts": num,
            "synthetic_acceptance": share if num else None,
            "batch": batch,
            "tokens_per_s": num_tokens / seconds,
            "tokens_per_step": num_tokens / num_steps / batch,
            "expected_tokens_per_step": sum(share**place for place in range(num + 1)) if num else 1.0,
            "step_ms": 1000 * seconds / num_steps,
        }

    def draw(self, axes: Any, rows: list[Row]) -> None:
        points = [
            (f"{row['drafts']} drafts, {row['synthetic_acceptance']:g}", row["batch"], row["against_plain"])
            for row in rows
            if row["drafts"] and row["against_plain"] is not None
        ]
        draw_points(axes, points, "requests at once", "against plain, synthetic acceptance")


def steady(turns: Sequence[Stepped], started_s: float) -> tuple[int, int, float]:
    """Tokens, steps and seconds from the turn in which the last request began to write, to the first end."""
    first = next(at for at, turn in enumerate(turns) if turn.end_s >= started_s)
    counted: list[Stepped] = []
    for turn in turns[first + 1 :]:
        if turn.num_finished:
            break
        counted.append(turn)
    written = [turn for turn in counted if turn.num_tokens]
    if not written:
        return 0, 0, 0.0
    return sum(turn.num_tokens for turn in written), len(written), written[-1].end_s - turns[first].end_s

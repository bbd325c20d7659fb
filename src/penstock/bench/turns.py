"""Many conversations that come back turn after turn, more of them than fit on the device. Owns what each turn
asks, and the figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from penstock.bench.report import Column, Results, Row, draw_points, figure
from penstock.bench.run import WARM_UP, Driver
from penstock.contract import KvSource
from penstock.errors import InvariantBroken

ALL = "all"  # the row that sums the turns


class TakenTurn(NamedTuple):
    """One turn of all conversations."""

    seconds: float
    prompt_tokens: Counter[str]  # by source
    generated_tokens: int
    retractions: int


def _percent(row: Row, tier: str) -> float:
    return 100 * row["source"][tier] / max(1, sum(row["source"].values()))


def _column(tier: str) -> Column:
    return Column(f"% {tier}", lambda row: f"{_percent(row, tier):.1f}")


@dataclass(frozen=True, slots=True)
class TurnsBench:
    """Each turn brings every conversation `prompt_tokens` new random tokens behind all that was said before,
    and writes `tokens` greedily. All conversations ask at once, and the next turn begins when the last has
    its answer."""

    conversations: int
    turns: int
    prompt_tokens: int
    tokens: int
    repeat: int
    seed: int

    name = "turns"
    columns = (
        Column("turn", lambda row: f"{row['turn']}"),
        figure("seconds", "seconds.median", 2),
        figure("generated tok/s", "tokens_per_s"),
        Column("prompt tokens", lambda row: f"{sum(row['source'].values())}"),
        _column("device"),
        _column("host"),
        _column("computed"),
        figure("retractions", "retractions"),
    )

    def measure(self, driver: Driver) -> Results:
        longest, most = self.turns * (self.prompt_tokens + self.tokens), driver.engine.max_model_len
        if longest > most:
            refusal = (
                f"{self.conversations} conversations: each ends with {longest} tokens, and the context holds "
                f"{most}, as far as the device's KV memory goes"
            )
            return Results([], [refusal])
        runs = [self._run(driver, run) for run in range(1 + self.repeat)][WARM_UP + 1 :]
        rows = [_row(turn, list(taken)) for turn, taken in enumerate(zip(*runs, strict=True), 1)]
        return Results([*rows, _row(ALL, [_sum(run) for run in runs])], [])

    def _run(self, driver: Driver, run: int) -> list[TakenTurn]:
        driver.reset_cache()
        said: list[list[int]] = [[] for _ in range(self.conversations)]
        taken: list[TakenTurn] = []
        for turn in range(self.turns):
            driver.progress(f"turns, run {run} of {self.repeat}", turn, self.turns)
            new = driver.prompts(self.conversations, self.prompt_tokens, self.seed, run, turn)
            said = self._turn(driver, [old + more for old, more in zip(said, new, strict=True)], taken)
        driver.progress(f"turns, run {run} of {self.repeat}", self.turns, self.turns)
        return taken

    def _turn(self, driver: Driver, prompts: list[list[int]], taken: list[TakenTurn]) -> list[list[int]]:
        """Ask all at once; returns the prompts with their answers."""
        before = driver.engine.stats().retractions
        started = perf_counter()
        readers = [driver.submit(prompt, self.tokens) for prompt in prompts]
        driver.run_all()
        seconds = perf_counter() - started
        source: Counter[str] = Counter()
        for reader in readers:
            source.update(asdict(reader.source or KvSource()))
        if source.total() != sum(map(len, prompts)):
            raise InvariantBroken(f"prompts of {sum(map(len, prompts))} tokens came from {dict(source)}")
        generated = sum(len(reader.tokens) for reader in readers)
        taken.append(TakenTurn(seconds, source, generated, driver.engine.stats().retractions - before))
        return [prompt + reader.tokens for prompt, reader in zip(prompts, readers, strict=True)]

    def draw(self, axes: Any, rows: list[Row]) -> None:
        """The time of each turn, divided by where its prompts' KV came from."""
        points = [
            (f"{tier}: share of the prompts' tokens", row["turn"], row["seconds"]["median"] * percent / 100)
            for tier in KvSource.__slots__
            for row in rows[:-1]
            if (percent := _percent(row, tier))
        ]
        xlabel = f"turn of {self.conversations} conversations"
        draw_points(axes, points, xlabel, "seconds until all have their answer")


def _sum(run: list[TakenTurn]) -> TakenTurn:
    seconds, sources, generated, retractions = zip(*run, strict=True)
    return TakenTurn(sum(seconds), sum(sources, Counter()), sum(generated), sum(retractions))


def _row(turn: int | str, runs: list[TakenTurn]) -> Row:
    """Times are the median's, counts the last run's."""
    seconds, last = [run.seconds for run in runs], runs[-1]
    return {
        "turn": turn,
        "seconds": {"median": median(seconds), "all": seconds},
        "generated_tokens": last.generated_tokens,
        "tokens_per_s": last.generated_tokens / median(seconds),
        "source": asdict(KvSource()) | last.prompt_tokens,
        "retractions": last.retractions,
    }

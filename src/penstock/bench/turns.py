"""Many conversations that come back turn after turn, more of them than fit on the device. Owns what each turn
asks, and the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from penstock.bench.report import Column, Results, figure
from penstock.bench.run import WARM_UP, Driver, random_prompts
from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.errors import InvariantBroken
from penstock.models.progress import Progress

ALL = "all"  # the row that sums the turns
SOURCES = ("device", "host", "computed")  # sources with a column


class TakenTurn(NamedTuple):
    """One turn of all conversations."""

    seconds: float
    prompt_tokens: Counter[str]  # by source
    generated_tokens: int
    retractions: int


def _percent(row: dict[str, Any], tier: str) -> float:
    return 100 * row["source"][tier] / max(1, sum(row["source"].values()))


def _cell(tier: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{_percent(row, tier):.1f}"


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
        *(Column(f"% {tier}", _cell(tier)) for tier in SOURCES),
        figure("retractions", "retractions"),
    )

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        refusal = self._refusal(engine)
        if refusal is not None:
            return Results([], [f"{self.conversations} conversations: {refusal}"])
        driver = Driver(engine)
        driver.wait_ready(progress)
        runs = [self._run(driver, run, progress) for run in range(1 + self.repeat)][WARM_UP + 1 :]
        rows = [_row(turn, [run[turn - 1] for run in runs]) for turn in range(1, self.turns + 1)]
        return Results([*rows, _row(ALL, [_sum(run) for run in runs])], [])

    def _refusal(self, engine: Engine) -> str | None:
        longest = self.turns * (self.prompt_tokens + self.tokens)
        if longest <= engine.max_model_len:
            return None
        return (
            f"each ends with {longest} tokens, and the context holds {engine.max_model_len}, as far as the "
            "device's KV memory goes"
        )

    def _run(self, driver: Driver, run: int, progress: Progress) -> list[TakenTurn]:
        driver.reset_cache()
        said: list[list[int]] = [[] for _ in range(self.conversations)]
        taken: list[TakenTurn] = []
        for turn in range(self.turns):
            progress(f"turns, run {run} of {self.repeat}", turn, self.turns)
            new = random_prompts(
                self.conversations,
                self.prompt_tokens,
                driver.engine.tokenizer.vocab_size,
                (self.seed, run, turn),
            )
            prompts = [old + more for old, more in zip(said, new, strict=True)]
            answers = self._turn(driver, prompts, taken)
            said = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        progress(f"turns, run {run} of {self.repeat}", self.turns, self.turns)
        return taken

    def _turn(self, driver: Driver, prompts: list[list[int]], taken: list[TakenTurn]) -> list[list[int]]:
        """Ask all at once; returns the answers."""
        before = driver.engine.stats().retractions
        started = perf_counter()
        readers = [driver.submit(prompt, self.tokens) for prompt in prompts]
        driver.run_all()
        seconds = perf_counter() - started
        source: Counter[str] = Counter(dict.fromkeys(asdict(KvSource()), 0))
        for reader in readers:
            source.update(asdict(reader.source or KvSource()))
        if source.total() != sum(map(len, prompts)):
            raise InvariantBroken(f"prompts of {sum(map(len, prompts))} tokens came from {dict(source)}")
        generated = sum(len(reader.tokens) for reader in readers)
        taken.append(TakenTurn(seconds, source, generated, driver.engine.stats().retractions - before))
        return [reader.tokens for reader in readers]

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        turns = [row for row in rows if row["turn"] != ALL]
        below = [0.0] * len(turns)
        places = range(len(turns))
        for tier in KvSource.__slots__:
            share = [row["seconds"]["median"] * _percent(row, tier) / 100 for row in turns]
            if any(share):
                axes.bar(places, share, bottom=below, label=f"{tier}: share of the prompt's tokens")
                below = [low + part for low, part in zip(below, share, strict=True)]
        for place, height in zip(places, below, strict=True):
            axes.annotate(f"{height:.2f} s", (place, height), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(places, [str(row["turn"]) for row in turns])
        axes.set_xlabel(f"turn of {self.conversations} conversations")
        axes.set_ylabel("seconds until all have their answer")
        axes.legend(fontsize=8)


def _sum(run: list[TakenTurn]) -> TakenTurn:
    seconds, sources, generated, retractions = zip(*run, strict=True)
    source: Counter[str] = Counter()
    for one in sources:
        source.update(one)
    return TakenTurn(sum(seconds), source, sum(generated), sum(retractions))


def _row(turn: int | str, runs: list[TakenTurn]) -> dict[str, Any]:
    """Times are the median's, counts the last run's."""
    seconds, last = median(run.seconds for run in runs), runs[-1]
    return {
        "turn": turn,
        "seconds": {"median": seconds, "all": [run.seconds for run in runs]},
        "generated_tokens": last.generated_tokens,
        "tokens_per_s": last.generated_tokens / seconds,
        "source": dict(last.prompt_tokens),
        "retractions": last.retractions,
    }

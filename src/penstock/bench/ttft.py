"""Time to first token, cold and with the prefix in device memory. Owns the proof that the device served what it is said to have served."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from penstock.bench.run import Column, Driver, Results, blocks_for
from penstock.bench.workload import random_prompts
from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.errors import InvariantBroken
from penstock.models.progress import Progress

NEW_TOKENS = 16  # of the follow-up: the cached prompt, then so many that nobody has seen
CASES = ("cold", "device", "device_new")
WARM_UP = 0  # number of the run that is not measured


class Sample(NamedTuple):
    ttft_s: float
    source: KvSource


@dataclass(frozen=True, slots=True)
class TtftBench:
    """For each length: a fresh prompt on an empty cache, the same prompt again, and the same with a few tokens more."""

    lengths: tuple[int, ...]
    repeat: int
    seed: int

    name = "ttft"
    columns = (
        Column("prompt tokens", lambda row: f"{row['tokens']}"),
        Column("cold ms", lambda row: f"{row['ttft_ms']['cold']['median']:.2f}"),
        Column("device ms", lambda row: f"{row['ttft_ms']['device']['median']:.2f}"),
        Column(f"device + {NEW_TOKENS} ms", lambda row: f"{row['ttft_ms']['device_new']['median']:.2f}"),
        Column("cold / device", lambda row: f"{row['ratio']:.1f}"),
        Column("tokens from device", lambda row: f"{row['source']['device']['device']}"),
    )

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        results = Results([], [])
        for length in self.lengths:
            refusal = _refusal(length, engine, config)
            if refusal is None:
                results.rows.append(self._row(Driver(engine), length, config.kv.block_tokens, progress))
            else:
                results.skipped.append(f"{length} tokens: {refusal}")
        return results

    def _row(self, driver: Driver, length: int, block_tokens: int, progress: Progress) -> dict[str, Any]:
        samples: dict[str, list[Sample]] = {case: [] for case in CASES}
        for run in range(1 + self.repeat):
            progress(f"ttft, {length} tokens", run, 1 + self.repeat)
            prompt = random_prompts(1, length + NEW_TOKENS, driver.engine.tokenizer.vocab_size, (self.seed, length, run))[0]
            driver.reset_cache()
            taken = {
                "cold": _sample(driver, prompt[:length], 0),
                "device": _sample(driver, prompt[:length], _reusable(length, block_tokens)),
                "device_new": _sample(driver, prompt, _reusable(length, block_tokens)),
            }
            if run != WARM_UP:
                for case, sample in taken.items():
                    samples[case].append(sample)
        progress(f"ttft, {length} tokens", 1 + self.repeat, 1 + self.repeat)
        return _Row(length, samples).as_dict()

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        names = {"cold": "nothing cached", "device": "prefix on the device", "device_new": f"prefix on the device, {NEW_TOKENS} new tokens"}
        width = 0.8 / len(names)
        for i, (case, name) in enumerate(names.items()):
            places = [at + (i - 1) * width for at in range(len(rows))]
            bars = axes.bar(places, [row["ttft_ms"][case]["median"] for row in rows], width, label=name)
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xticks(range(len(rows)), [str(row["tokens"]) for row in rows])
        axes.set_xlabel("prompt tokens")
        axes.set_ylabel("ms to first token")
        axes.legend()


@dataclass(frozen=True, slots=True)
class _Row:
    length: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        medians = {case: median(sample.ttft_s for sample in taken) * 1000 for case, taken in self.samples.items()}
        return {
            "tokens": self.length,
            "ttft_ms": {
                case: {"median": medians[case], "all": [sample.ttft_s * 1000 for sample in taken]} for case, taken in self.samples.items()
            },
            "source": {case: asdict(taken[-1].source) for case, taken in self.samples.items()},
            "ratio": medians["cold"] / medians["device"],
        }


def _refusal(length: int, engine: Engine, config: Config) -> str | None:
    total = length + NEW_TOKENS + 1
    if total > engine.max_model_len:
        return f"with {NEW_TOKENS} new ones and one to write they exceed the context of {engine.max_model_len}"
    needed, there = blocks_for(total, config), sum(engine.stats().kv_blocks.values())
    if needed > there:
        return f"they need {needed} KV blocks and the device has {there}; raise --device-kv-gib"
    return None


def _reusable(length: int, block_tokens: int) -> int:
    """Tokens of a prompt seen before that must come from the device: its full blocks, but never its last token."""
    return min(length // block_tokens * block_tokens, length - 1)


def _sample(driver: Driver, prompt: list[int], at_least: int) -> Sample:
    """`at_least` tokens must come from the device, and where that is 0 none may; the engine's own counters have to agree."""
    before = driver.engine.stats().prompt_tokens
    reader = driver.submit(prompt, max_tokens=1)
    driver.run_all()
    after = driver.engine.stats().prompt_tokens
    source = reader.source or KvSource()
    counted = KvSource(**{name: after.get(name, 0) - before.get(name, 0) for name in asdict(source)})
    if counted != source or source.device + source.computed != len(prompt):
        raise InvariantBroken(f"a prompt of {len(prompt)} tokens came from {source}, but the engine counted {counted}")
    if source.device < at_least or (at_least == 0 and source.device):
        raise InvariantBroken(f"{source.device} of {len(prompt)} prompt tokens came from the device; expected {at_least or 'none'}")
    return Sample(reader.ttft_s, source)

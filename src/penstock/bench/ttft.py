"""Time to first token: cold, and with the prefix in one tier alone. Owns the proof that a tier served what it is said to have served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from penstock.bench.run import Column, Driver, Results, blocks_for
from penstock.bench.workload import random_prompts
from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.engine.stats import EngineStats
from penstock.errors import InvariantBroken
from penstock.models.progress import Progress

NEW_TOKENS = 16  # of the follow-up: the cached prompt, then so many that nobody has seen
NAMES = {
    "cold": "nothing cached",
    "device": "prefix on the device",
    "device_new": f"prefix on the device, {NEW_TOKENS} new tokens",
    "host": "prefix in host memory",
    "host_new": f"prefix in host memory, {NEW_TOKENS} new tokens",
    "ssd": "prefix on the disk",
    "ssd_new": f"prefix on the disk, {NEW_TOKENS} new tokens",
    "remote": "prefix in the shared store",
    "remote_new": f"prefix in the shared store, {NEW_TOKENS} new tokens",
}
TIERS = ("device", "host", "ssd", "remote")
WARM_UP = 0  # number of the run that is not measured


class Sample(NamedTuple):
    ttft_s: float
    source: KvSource
    promoted_blocks: int


def _cell(case: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row['ttft_ms'][case]['median']:.2f}" if case in row["ttft_ms"] else "-"


def _ratio(tier: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[name]:.1f}" if (name := _ratio_name(tier)) in row else "-"


def _ratio_name(tier: str) -> str:
    return "ratio" if tier == "device" else f"ratio_{tier}"


@dataclass(frozen=True, slots=True)
class TtftBench:
    """For each length: a fresh prompt on an empty cache, the same prompt again, and the same with a few tokens more; the prefix on the
    device, and in each colder tier alone."""

    lengths: tuple[int, ...]
    repeat: int
    seed: int

    name = "ttft"
    columns = (
        Column("prompt tokens", lambda row: f"{row['tokens']}"),
        *(Column(f"{case.replace('_new', f' + {NEW_TOKENS}')} ms", _cell(case)) for case in NAMES),
        *(Column(f"cold / {tier}", _ratio(tier)) for tier in TIERS),
        Column("blocks promoted", lambda row: f"{max(row['promoted_blocks'].values())}"),
    )

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        results = Results([], [])
        Driver(engine).wait_ready(progress)
        for length in self.lengths:
            refusal = refusal_of(length, engine, config)
            if refusal is None:
                results.rows.append(self._row(Driver(engine), length, config, progress))
            else:
                results.skipped.append(f"{length} tokens: {refusal}")
        return results

    def _row(self, driver: Driver, length: int, config: Config, progress: Progress) -> dict[str, Any]:
        samples: dict[str, list[Sample]] = {}
        for run in range(1 + self.repeat):
            progress(f"ttft, {length} tokens", run, 1 + self.repeat)
            vocab, cases = driver.engine.tokenizer.vocab_size, cases_of(driver.engine, config)
            drawn = random_prompts(1, length + len(cases) * NEW_TOKENS, vocab, (self.seed, length, run))[0]
            prompt, new = drawn[:length], drawn[length:]
            driver.reset_cache()
            taken = {"cold": sample(driver, prompt, "device", 0)}
            for number, case in enumerate(cases):
                tier = case.removesuffix("_new")
                only_in(driver, tier)
                asked = prompt + (new[number * NEW_TOKENS : (number + 1) * NEW_TOKENS] if case.endswith("_new") else [])
                taken[case] = sample(driver, asked, tier, reusable(length, len(asked), config.kv.block_tokens))
            if run != WARM_UP:
                for case, one in taken.items():
                    samples.setdefault(case, []).append(one)
        progress(f"ttft, {length} tokens", 1 + self.repeat, 1 + self.repeat)
        return row_of(length, samples)

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        names = {case: name for case, name in NAMES.items() if case in rows[0]["ttft_ms"]}
        width = 0.85 / len(names)
        for i, (case, name) in enumerate(names.items()):
            places = [at + (i - (len(names) - 1) / 2) * width for at in range(len(rows))]
            bars = axes.bar(places, [row["ttft_ms"][case]["median"] for row in rows], width, label=name)
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xticks(range(len(rows)), [str(row["tokens"]) for row in rows])
        axes.set_xlabel("prompt tokens")
        axes.set_ylabel("ms to first token")
        axes.legend()


def row_of(length: int, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    medians = {case: median(sample.ttft_s for sample in taken) * 1000 for case, taken in samples.items()}
    return {
        "tokens": length,
        "ttft_ms": {case: {"median": medians[case], "all": [sample.ttft_s * 1000 for sample in taken]} for case, taken in samples.items()},
        "source": {case: asdict(taken[-1].source) for case, taken in samples.items()},
        "promoted_blocks": {case: taken[-1].promoted_blocks for case, taken in samples.items()},
        **{_ratio_name(tier): medians["cold"] / medians[tier] for tier in TIERS if tier in medians},
    }


def refusal_of(length: int, engine: Engine, config: Config) -> str | None:
    total = length + NEW_TOKENS + 1
    if total > engine.max_model_len:
        return f"with {NEW_TOKENS} new ones and one to write they exceed the context of {engine.max_model_len}"
    needed, there = blocks_for(total, config), sum(engine.stats().kv_blocks["device"].values())
    if needed > there:
        return f"they need {needed} KV blocks and the device has {there}; raise --device-kv-gib"
    return None


def cases_of(engine: Engine, config: Config) -> list[str]:
    """Those that this engine can show; with the device's prefix cache off, everything comes from colder tiers."""
    tiers = [tier for tier in engine.tiers if tier != "device" or config.kv.prefix_cache]
    return [case for tier in tiers for case in (tier, f"{tier}_new")]


def only_in(driver: Driver, tier: str) -> None:
    """What was computed is in `tier`, and nowhere hotter."""
    tiers = driver.engine.tiers
    driver.flush("persisted" if tiers.index(tier) > 1 else "visible")  # the case before is over, its saves included
    if hotter := tiers[: tiers.index(tier)]:
        driver.reset_cache(*hotter)


def reusable(length: int, asked: int, block_tokens: int) -> int:
    """Tokens of a prompt of `asked` tokens, of which `length` were seen before, that must come from a tier: the full blocks of those,
    but never the last token."""
    return min(length // block_tokens * block_tokens, asked - 1)


def sample(driver: Driver, prompt: list[int], tier: str, expected: int) -> Sample:
    """`expected` tokens must come from `tier` and none from another; the engine's own counters have to agree."""
    before = driver.engine.stats()
    reader = driver.submit(prompt, max_tokens=1)
    driver.run_all()
    after = driver.engine.stats()
    source = reader.source or KvSource()
    counted = KvSource(**{name: after.prompt_tokens[name] - before.prompt_tokens[name] for name in asdict(source)})
    if counted != source or sum(asdict(source).values()) != len(prompt):
        raise InvariantBroken(f"a prompt of {len(prompt)} tokens came from {source}, but the engine counted {counted}")
    if source != KvSource(**{tier: expected, "computed": len(prompt) - expected}):
        raise InvariantBroken(f"a prompt of {len(prompt)} tokens came from {source}; expected {expected or 'none'} from the {tier}")
    promoted = after.cache["promoted"] - before.cache["promoted"]
    if (promoted > 0) != (tier != "device" and expected > 0):
        raise InvariantBroken(f"{promoted} blocks were promoted for a prompt said to come from the {tier}")
    for cold in driver.engine.tiers[2:]:
        read = _bytes_read(after, cold) - _bytes_read(before, cold)
        if (read > 0) != (tier == cold and expected > 0):
            raise InvariantBroken(f"{read} bytes were read from the {cold} tier for a prompt said to come from the {tier}")
    return Sample(reader.ttft_s, source, promoted)


def _bytes_read(stats: EngineStats, tier: str) -> int:
    return 0 if stats.traffic is None else stats.traffic.bytes.get((tier, "host"), 0)

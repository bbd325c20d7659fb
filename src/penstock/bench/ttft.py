"""Time to first token: cold, with the prefix in one tier only, and from the disk after a restart. Owns the
proof that the named tier served the prefix."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from penstock.bench.child import run_in_process
from penstock.bench.report import Column, Results, Row, draw_points, figure
from penstock.bench.run import WARM_UP, Driver, measure_each, runs
from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import settle_process
from penstock.errors import DeadlineExceeded, InvariantBroken
from penstock.models.progress import Progress

NEW_TOKENS = 16  # new tokens of the follow-up, after the cached prompt
NEW = "_new"  # ending of a case with them
PLACES = {
    "device": "on the device",
    "host": "in host memory",
    "ssd": "on the disk",
    "remote": "in the shared store",
}
NAMES = {"cold": "nothing cached"}
for _tier, _place in PLACES.items():
    NAMES |= {_tier: f"prefix {_place}", _tier + NEW: f"prefix {_place}, {NEW_TOKENS} new tokens"}
RATIOS = {tier: "ratio" if tier == "device" else f"ratio_{tier}" for tier in PLACES}
SCAN_S = 120.0  # for the index of existing blocks
SCAN_POLL_S = 0.005
# A model with recurrent layers begins at the last state behind a prompt's blocks, at most so much earlier.
STATE_BACK_TOKENS = 128
FRESH = 1 << 16  # added to a run's number: prompts that are new
CLOSE_S = 60.0


class Sample(NamedTuple):
    ttft_s: float
    source: KvSource
    promoted_blocks: int


Samples = dict[str, list[Sample]]  # by case


def _cell(title: str, case: str) -> Column:
    return figure(title, f"ttft_ms.{case}.median", 2)


def _draw(axes: Any, rows: list[Row], names: dict[str, str]) -> None:
    points = [
        (name, row["tokens"], row["ttft_ms"][case]["median"])
        for case, name in names.items()
        for row in rows
        if case in row["ttft_ms"]
    ]
    draw_points(axes, points, "prompt tokens", "ms to first token", log=True)


@dataclass(frozen=True, slots=True)
class TtftBench:
    """For each length: a fresh prompt on an empty cache, the same prompt again, and the same with a few
    tokens more; the prefix on the device, and in each colder tier alone."""

    lengths: tuple[int, ...]
    repeat: int
    seed: int

    name = "ttft"
    columns = (
        figure("prompt tokens", "tokens"),
        *(_cell(f"{case.replace(NEW, f' + {NEW_TOKENS}')} ms", case) for case in NAMES),
        *(figure(f"cold / {tier}", ratio, 1) for tier, ratio in RATIOS.items()),
        Column("blocks promoted", lambda row: f"{max(row['promoted_blocks'].values())}"),
    )

    def measure(self, driver: Driver) -> Results:
        return measure_each(self.lengths, "{} tokens", lambda length: self._row(driver, length))

    def _row(self, driver: Driver, length: int) -> Row:
        tiers, block_tokens = driver.engine.kv.tiers, driver.config.kv.block_tokens
        # Without the device's prefix cache, everything comes from colder tiers.
        served = tiers if driver.config.kv.prefix_cache else tiers[1:]
        cases = [case for tier in served for case in (tier, tier + NEW)]
        # colder tiers have at the end those of the prompt, and of each case with new tokens one or more
        full = length // block_tokens
        new_blocks = (length + NEW_TOKENS) // block_tokens - full
        _require_room(driver, length, dict.fromkeys(tiers[1:], full + new_blocks * len(served)))
        samples: Samples = {}
        for run in runs(f"ttft, {length} tokens", self.repeat, driver.progress):
            (drawn,) = driver.prompts(1, length + len(cases) * NEW_TOKENS, self.seed, length, run)
            prompt, new = drawn[:length], drawn[length:]
            driver.reset_cache()
            taken = {"cold": sample(driver, prompt, "device", 0)}
            for number, case in enumerate(cases):
                tier = case.removesuffix(NEW)
                hotter = tiers[: tiers.index(tier)]
                # the case before is over, its saves included
                driver.flush("persisted" if len(hotter) > 1 else "visible")
                if hotter:
                    driver.reset_cache(*hotter)
                end = number * NEW_TOKENS + (NEW_TOKENS if case.endswith(NEW) else 0)
                asked = prompt + new[number * NEW_TOKENS : end]
                taken[case] = sample(driver, asked, tier, reusable(length, len(asked), block_tokens))
            if run != WARM_UP:
                for case, one in taken.items():
                    samples.setdefault(case, []).append(one)
        return row_of(length, samples)

    def draw(self, axes: Any, rows: list[Row]) -> None:
        _draw(axes, rows, NAMES)


def row_of(length: int, samples: Samples) -> Row:
    times = {case: [one.ttft_s * 1000 for one in taken] for case, taken in samples.items()}
    medians = {case: median(taken) for case, taken in times.items()}
    return {
        "tokens": length,
        "ttft_ms": {case: {"median": medians[case], "all": taken} for case, taken in times.items()},
        "source": {case: asdict(taken[-1].source) for case, taken in samples.items()},
        "promoted_blocks": {case: taken[-1].promoted_blocks for case, taken in samples.items()},
        **{ratio: medians["cold"] / medians[tier] for tier, ratio in RATIOS.items() if tier in medians},
    }


def _require_room(driver: Driver, length: int, colder: dict[str, int]) -> None:
    """`colder`: blocks that tiers behind the device have to hold together. Raises Skipped."""
    total, limit = length + NEW_TOKENS + 1, driver.engine.max_model_len
    too_long = f"with {NEW_TOKENS} new ones and one to write they exceed the context of {limit}"
    driver.require_room({"device": driver.blocks(total), **colder}, *([too_long] if total > limit else []))


def reusable(length: int, asked: int, block_tokens: int) -> int:
    """Tokens of a prompt of `asked` tokens, of which `length` were seen before, that must come from a tier:
    their full blocks, but never the last token."""
    return min(length // block_tokens * block_tokens, asked - 1)


def sample(driver: Driver, prompt: list[int], tier: str, expected: int) -> Sample:
    """`expected` tokens must come from `tier` and none from another; the engine's own counters have to
    agree. With recurrent layers a few less may come."""
    engine = driver.engine
    before, moved_before = engine.stats().prompt_tokens, _moved(engine)
    reader = driver.submit(prompt, max_tokens=1)
    driver.run_all()
    source, counted = reader.source or KvSource(), engine.stats().prompt_tokens
    given = expected
    if expected and engine.parts.executor.limits.state_layers:
        given = min(expected, max(expected - STATE_BACK_TOKENS, getattr(source, tier)))
    if source != KvSource(**{tier: given, "computed": len(prompt) - given}):
        raise InvariantBroken(
            f"a prompt of {len(prompt)} tokens came from {source}; expected {expected or 'none'} from the "
            f"{tier}"
        )
    if any(counted[name] - before[name] != num for name, num in asdict(source).items()):
        raise InvariantBroken(f"a prompt came from {source}, but the engine counted {before}, then {counted}")
    moved = {name: num - moved_before[name] for name, num in _moved(engine).items()}
    should = {tier, "host"} if expected and tier != "device" else set()
    if {name for name, num in moved.items() if num} != should:
        raise InvariantBroken(f"blocks and bytes moved: {moved}, for a prompt said to come from the {tier}")
    return Sample(reader.ttft_s, source, moved["host"])


def _moved(engine: Engine) -> dict[str, int]:
    """Blocks promoted from host memory, and bytes read from each colder tier."""
    stats = engine.stats()
    read = {} if stats.traffic is None else stats.traffic.bytes
    return {
        "host": stats.cache["promoted"],
        **{tier: read.get((tier, "host"), 0) for tier in engine.kv.tiers[2:]},
    }


# ------------------------------------------------------------------------------------------- across a restart


@dataclass(frozen=True, slots=True)
class RestartBench:
    """For each length: prompts are computed and flushed by a process that ends. Then, in a process that has
    only the disk, each is requested again, in turn with a fresh one of the same length."""

    lengths: tuple[int, ...]
    repeat: int
    seed: int

    name = "ttft --restart"
    columns = (
        figure("prompt tokens", "tokens"),
        _cell("cold ms", "cold"),
        _cell("cold before the restart ms", "cold_before"),
        _cell("ssd ms", "ssd"),
        figure("ssd, first ms", "first_ms", 2),
        figure("cold / ssd", "ratio_ssd", 1),
        figure("blocks promoted", "promoted_blocks.ssd"),
        figure("scan ms", "scan_ms", 1),
    )

    def measure(self, config: Config, progress: Progress) -> tuple[str, Results]:
        """With the model's name. The disk's directory is to be empty."""
        salt = secrets.token_hex(8)
        model, before, num_blocks = run_in_process(self.compute, (config, salt), progress)
        cold = {row["tokens"]: row["samples"] for row in before.rows}
        if not cold:
            return model, before
        found = replace(self, lengths=tuple(cold))
        rows = run_in_process(found.ask_again, (config, salt, num_blocks, cold), progress)
        return model, Results(rows, before.skipped)

    def draw(self, axes: Any, rows: list[Row]) -> None:
        _draw(axes, rows, {"cold": NAMES["cold"], "ssd": f"{NAMES['ssd']}, after a restart"})

    def compute(self, config: Config, salt: str, progress: Progress) -> tuple[str, Results, int]:
        """What the first process does: the model's name, samples by length, blocks on disk. Requests of both
        processes have the same `salt`."""
        driver = _driver(config, salt, progress)
        driver.wait_ready()
        # The disk has to hold all that the first process writes and beside it, until the last prompt is asked
        # for again, all that the second one computes.
        num_prompts, written = 2 * (1 + self.repeat), [0]

        def row(length: int) -> Row:
            full = length // config.kv.block_tokens
            needed = {"host": full, "ssd": sum(written) + (num_prompts - 1) * full}
            _require_room(driver, length, needed)
            written.append(num_prompts * full)
            samples = []
            for run in runs(f"before the restart, {length} tokens", self.repeat, progress):
                (prompt,) = driver.prompts(1, length, self.seed, length, run)
                samples.append(sample(driver, prompt, "device", 0))
                driver.flush("persisted")
            return {"tokens": length, "samples": samples[WARM_UP + 1 :]}

        results = measure_each(self.lengths, f"{{}} tokens, {num_prompts} prompts", row)
        num_blocks = driver.engine.stats().kv_blocks["ssd"]["used"]
        driver.engine.close(timeout_s=CLOSE_S)
        return driver.engine.name, results, num_blocks

    def ask_again(
        self, config: Config, salt: str, num_blocks: int, before: dict[int, list[Sample]], progress: Progress
    ) -> list[Row]:
        """What the second process does. `num_blocks`: on disk; `before`: samples of the first, by length."""
        driver = _driver(config, salt, progress)
        scan_s, rows = wait_scanned(driver.engine, num_blocks), []
        driver.wait_ready()
        for length in self.lengths:
            expected = reusable(length, length, config.kv.block_tokens)
            restored, computed = [], []
            for run in runs(f"after the restart, {length} tokens", self.repeat, progress):
                again, fresh = (
                    driver.prompts(1, length, self.seed, length, n)[0] for n in (run, run + FRESH)
                )
                restored.append(sample(driver, again, "ssd", expected))
                computed.append(sample(driver, fresh, "device", 0))
                driver.flush("persisted")  # nothing of this run is written beside the next,
                # which begins as the first one did: with nothing in memory
                driver.reset_cache("device", "host")
            # of the first length: the first request of the process
            times = {"first_ms": restored.pop(WARM_UP).ttft_s * 1000, "scan_ms": scan_s * 1000}
            samples = {"cold": computed[WARM_UP + 1 :], "ssd": restored, "cold_before": before[length]}
            rows.append(row_of(length, samples) | times)
        driver.engine.close(timeout_s=CLOSE_S)
        return rows


def _driver(config: Config, salt: str, progress: Progress) -> Driver:
    engine = build(config, progress)
    engine.warm(progress)
    settle_process()
    return Driver(engine, config, progress, salt)


def wait_scanned(engine: Engine, num_blocks: int) -> float:
    """Until the disk's index has all that was there; returns how long that took."""
    started = time.perf_counter()
    while (found := engine.stats().kv_blocks["ssd"]["used"]) < num_blocks:
        if time.perf_counter() - started > SCAN_S:
            raise DeadlineExceeded(
                f"{found} of {num_blocks} blocks were found on disk within {SCAN_S:g} s of a restart"
            )
        time.sleep(SCAN_POLL_S)
    return time.perf_counter() - started

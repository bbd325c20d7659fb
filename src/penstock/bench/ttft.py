"""Time to first token: cold, with the prefix in one tier only, and from the disk after a restart. Owns the
proof that the named tier served the prefix, and the processes of a restart."""

from __future__ import annotations

import multiprocessing
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

from penstock import errors
from penstock.bench.report import Column, Results, draw_bars, figure
from penstock.bench.run import WARM_UP, Driver, blocks_for, random_prompts, runs, shortage
from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import settle_process
from penstock.engine.stats import EngineStats
from penstock.errors import DeadlineExceeded, InvariantBroken, PenstockError, StepFailed
from penstock.models.progress import Progress

NEW_TOKENS = 16  # new tokens of the follow-up, after the cached prompt
PLACES = {
    "device": "on the device",
    "host": "in host memory",
    "ssd": "on the disk",
    "remote": "in the shared store",
}
NAMES = {"cold": "nothing cached"}
for _tier, _place in PLACES.items():
    NAMES |= {_tier: f"prefix {_place}", f"{_tier}_new": f"prefix {_place}, {NEW_TOKENS} new tokens"}
SCAN_S = 120.0  # for the index of existing blocks
SCAN_POLL_S = 0.005
FRESH = 1 << 16  # added to a run's number: prompts that are new
CLOSE_S = 60.0
END_S = 60.0  # for a process that has said everything


class Sample(NamedTuple):
    ttft_s: float
    source: KvSource
    promoted_blocks: int


def _cell(title: str, case: str) -> Column:
    return figure(title, f"ttft_ms.{case}.median", 2)


def _ratio_name(tier: str) -> str:
    return "ratio" if tier == "device" else f"ratio_{tier}"


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
        *(_cell(f"{case.replace('_new', f' + {NEW_TOKENS}')} ms", case) for case in NAMES),
        *(figure(f"cold / {tier}", _ratio_name(tier), 1) for tier in PLACES),
        Column("blocks promoted", lambda row: f"{max(row['promoted_blocks'].values())}"),
    )

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        Driver(engine).wait_ready(progress)
        refusals = [
            refusal_of(length, engine, config, self._blocks(length, engine, config))
            for length in self.lengths
        ]
        fits = [length for length, refusal in zip(self.lengths, refusals, strict=True) if refusal is None]
        skipped = [
            f"{length} tokens: {refusal}"
            for length, refusal in zip(self.lengths, refusals, strict=True)
            if refusal is not None
        ]
        return Results([self._row(Driver(engine), length, config, progress) for length in fits], skipped)

    def _blocks(self, length: int, engine: Engine, config: Config) -> dict[str, int]:
        """That are in each colder tier at the end of a run: those of the prompt, and of each case with new
        tokens one or more."""
        block_tokens = config.kv.block_tokens
        full = length // block_tokens
        new = (length + NEW_TOKENS) // block_tokens - full
        return dict.fromkeys(
            engine.tiers[1:], full + new * sum(case.endswith("_new") for case in cases_of(engine, config))
        )

    def _row(self, driver: Driver, length: int, config: Config, progress: Progress) -> dict[str, Any]:
        samples: dict[str, list[Sample]] = {}
        for run in runs(f"ttft, {length} tokens", self.repeat, progress):
            vocab, cases = driver.engine.tokenizer.vocab_size, cases_of(driver.engine, config)
            drawn = random_prompts(1, length + len(cases) * NEW_TOKENS, vocab, (self.seed, length, run))[0]
            prompt, new = drawn[:length], drawn[length:]
            driver.reset_cache()
            taken = {"cold": sample(driver, prompt, "device", 0)}
            for number, case in enumerate(cases):
                tier = case.removesuffix("_new")
                only_in(driver, tier)
                asked = prompt + (
                    new[number * NEW_TOKENS : (number + 1) * NEW_TOKENS] if case.endswith("_new") else []
                )
                taken[case] = sample(
                    driver, asked, tier, reusable(length, len(asked), config.kv.block_tokens)
                )
            if run != WARM_UP:
                for case, one in taken.items():
                    samples.setdefault(case, []).append(one)
        return row_of(length, samples)

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        _draw(axes, rows, {case: name for case, name in NAMES.items() if case in rows[0]["ttft_ms"]})


def _draw(axes: Any, rows: list[dict[str, Any]], names: dict[str, str]) -> None:
    bars = {name: [row["ttft_ms"][case]["median"] for row in rows] for case, name in names.items()}
    draw_bars(axes, [str(row["tokens"]) for row in rows], bars)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("ms to first token")


def row_of(length: int, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    medians = {case: median(sample.ttft_s for sample in taken) * 1000 for case, taken in samples.items()}
    return {
        "tokens": length,
        "ttft_ms": {
            case: {"median": medians[case], "all": [sample.ttft_s * 1000 for sample in taken]}
            for case, taken in samples.items()
        },
        "source": {case: asdict(taken[-1].source) for case, taken in samples.items()},
        "promoted_blocks": {case: taken[-1].promoted_blocks for case, taken in samples.items()},
        **{_ratio_name(tier): medians["cold"] / medians[tier] for tier in PLACES if tier in medians},
    }


def refusal_of(length: int, engine: Engine, config: Config, colder: dict[str, int]) -> str | None:
    """`colder`: blocks that tiers behind the device have to hold together."""
    total = length + NEW_TOKENS + 1
    too_long = (
        f"with {NEW_TOKENS} new ones and one to write they exceed the context of {engine.max_model_len}"
    )
    needed = {"device": blocks_for(total, config), **colder}
    said = [too_long] if total > engine.max_model_len else []
    said += filter(None, (shortage(tier, blocks, engine, config) for tier, blocks in needed.items()))
    return "; ".join(said) or None


def cases_of(engine: Engine, config: Config) -> list[str]:
    """Cases that this engine can show. Without the device's prefix cache, everything comes from colder
    tiers."""
    tiers = [tier for tier in engine.tiers if tier != "device" or config.kv.prefix_cache]
    return [case for tier in tiers for case in (tier, f"{tier}_new")]


def only_in(driver: Driver, tier: str) -> None:
    """Leave the computed blocks in `tier`, and in no hotter one."""
    tiers = driver.engine.tiers
    # the case before is over, its saves included
    driver.flush("persisted" if tiers.index(tier) > 1 else "visible")
    if hotter := tiers[: tiers.index(tier)]:
        driver.reset_cache(*hotter)


def reusable(length: int, asked: int, block_tokens: int) -> int:
    """Tokens of a prompt of `asked` tokens, of which `length` were seen before, that must come from a tier:
    their full blocks, but never the last token."""
    return min(length // block_tokens * block_tokens, asked - 1)


def sample(driver: Driver, prompt: list[int], tier: str, expected: int) -> Sample:
    """`expected` tokens must come from `tier` and none from another; the engine's own counters have to
    agree."""
    before = driver.engine.stats()
    reader = driver.submit(prompt, max_tokens=1)
    driver.run_all()
    after = driver.engine.stats()
    source = reader.source or KvSource()
    counted = KvSource(
        **{name: after.prompt_tokens[name] - before.prompt_tokens[name] for name in asdict(source)}
    )
    if counted != source or sum(asdict(source).values()) != len(prompt):
        raise InvariantBroken(
            f"a prompt of {len(prompt)} tokens came from {source}, but the engine counted {counted}"
        )
    if source != KvSource(**{tier: expected, "computed": len(prompt) - expected}):
        raise InvariantBroken(
            f"a prompt of {len(prompt)} tokens came from {source}; expected {expected or 'none'} from the "
            f"{tier}"
        )
    promoted = after.cache["promoted"] - before.cache["promoted"]
    if (promoted > 0) != (tier != "device" and expected > 0):
        raise InvariantBroken(f"{promoted} blocks were promoted for a prompt said to come from the {tier}")
    for cold in driver.engine.tiers[2:]:
        read = _bytes_read(after, cold) - _bytes_read(before, cold)
        if (read > 0) != (tier == cold and expected > 0):
            raise InvariantBroken(
                f"{read} bytes were read from the {cold} tier for a prompt said to come from the {tier}"
            )
    return Sample(reader.ttft_s, source, promoted)


def _bytes_read(stats: EngineStats, tier: str) -> int:
    return 0 if stats.traffic is None else stats.traffic.bytes.get((tier, "host"), 0)


# ------------------------------------------------------------------------------------------- across a restart


class BeforeRestart(NamedTuple):
    """What the first process leaves behind."""

    model: str
    cold: dict[int, list[Sample]]  # by length
    refused: list[str]
    num_blocks: int  # on disk


class AfterRestart(NamedTuple):
    """What the second one found."""

    samples: dict[int, dict[str, list[Sample]]]  # by length and case
    # the disk's in the run that only warms up: of the first length, the first request of the process
    first: dict[int, Sample]
    scan_s: float  # from a built engine to a complete index


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
        before: BeforeRestart = run_in_process(self.compute, (config, salt), progress)
        if not before.cold:
            return before.model, Results([], before.refused)
        found = replace(self, lengths=tuple(before.cold))
        after: AfterRestart = run_in_process(found.ask_again, (config, salt, before.num_blocks), progress)
        rows = []
        for length, samples in after.samples.items():
            row = row_of(length, {**samples, "cold_before": before.cold[length]})
            rows.append(
                {**row, "first_ms": after.first[length].ttft_s * 1000, "scan_ms": after.scan_s * 1000}
            )
        return before.model, Results(rows, before.refused)

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        _draw(axes, rows, {"cold": NAMES["cold"], "ssd": f"{NAMES['ssd']}, after a restart"})

    def _prompt(self, driver: Driver, length: int, run: int) -> list[int]:
        return random_prompts(1, length, driver.engine.tokenizer.vocab_size, (self.seed, length, run))[0]

    def compute(self, config: Config, salt: str, progress: Progress) -> BeforeRestart:
        """What the first process does. Requests of both have the same `salt`."""
        engine = _built(config, progress)
        driver = Driver(engine, salt)
        driver.wait_ready(progress)
        cold: dict[int, list[Sample]] = {}
        fits, refused = self._that_fit(engine, config)
        for length in fits:
            for run in runs(f"before the restart, {length} tokens", self.repeat, progress):
                taken = sample(driver, self._prompt(driver, length, run), "device", 0)
                if run != WARM_UP:
                    cold.setdefault(length, []).append(taken)
                driver.flush("persisted")
        num_blocks = engine.stats().kv_blocks["ssd"]["used"]
        engine.close(timeout_s=CLOSE_S)
        return BeforeRestart(engine.name, cold, refused, num_blocks)

    def _that_fit(self, engine: Engine, config: Config) -> tuple[list[int], list[str]]:
        """Lengths, and why others are left out. The disk has to hold all that the first process writes and
        beside it, until the last prompt is asked for again, all that the second one computes."""
        fits: list[int] = []
        refused = []
        num_prompts, on_disk = 2 * (1 + self.repeat), 0
        for length in self.lengths:
            full = length // config.kv.block_tokens
            refusal = refusal_of(
                length, engine, config, {"host": full, "ssd": on_disk + (num_prompts - 1) * full}
            )
            if refusal is None:
                fits.append(length)
                on_disk += num_prompts * full
            else:
                refused.append(f"{length} tokens, {num_prompts} prompts: {refusal}")
        return fits, refused

    def ask_again(self, config: Config, salt: str, num_blocks: int, progress: Progress) -> AfterRestart:
        """What the second process does. `num_blocks`: on disk."""
        engine = _built(config, progress)
        scan_s = _wait_scanned(engine, num_blocks)
        driver = Driver(engine, salt)
        driver.wait_ready(progress)
        after = AfterRestart({length: {"cold": [], "ssd": []} for length in self.lengths}, {}, scan_s)
        for length in self.lengths:
            expected = reusable(length, length, config.kv.block_tokens)
            for run in runs(f"after the restart, {length} tokens", self.repeat, progress):
                restored = sample(driver, self._prompt(driver, length, run), "ssd", expected)
                computed = sample(driver, self._prompt(driver, length, run + FRESH), "device", 0)
                driver.flush("persisted")  # nothing of this run is written beside the next,
                # which begins as the first one did: with nothing in memory
                driver.reset_cache("device", "host")
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
            raise DeadlineExceeded(
                f"{found} of {num_blocks} blocks were found on disk within {SCAN_S:g} s of a restart"
            )
        time.sleep(SCAN_POLL_S)
    return time.perf_counter() - started


def run_in_process(work: Callable[..., Any], args: tuple[Any, ...], progress: Progress) -> Any:
    """What `work` returns in a new process that has nothing of this one; its progress is shown here."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, work, args), name="penstock-bench")
    process.start()
    theirs.close()
    try:
        while True:
            kind, *said = ours.recv()
            if kind == "progress":
                progress(*said)
            elif kind == "error":
                raise _as_error(*said)
            else:
                return said[0]
    except (KeyboardInterrupt, SystemExit):
        process.kill()
        raise
    except EOFError:
        process.join()
        raise StepFailed(
            f"a process of the measurement ended with code {process.exitcode} and without a result"
        ) from None
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the parent's word counts
    try:
        pipe.send(("result", work(*args, lambda *said: pipe.send(("progress", *said)))))
    except PenstockError as error:
        pipe.send(("error", type(error).__name__, f"{error}"))


def _as_error(name: str, message: str) -> BaseException:
    """The same kind, if it can be made from a message alone."""
    kind: Callable[[str], BaseException] = getattr(errors, name, StepFailed)
    try:
        return kind(message)
    except TypeError:
        return StepFailed(message)

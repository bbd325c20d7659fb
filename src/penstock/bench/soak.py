"""A soak: minutes of random requests, cancels, retractions, resets and failing copies, and the proof that
nothing came of it. Owns the verdict: outputs as of a request alone, books that balance, no thread left, no
finding of the sanitizer."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from penstock.bench.soak_trouble import (
    COPIES_FAILED,
    COPIES_STALLED,
    NUM_ASKS,
    Ask,
    Disturber,
    Ending,
    SoakTally,
    Submitter,
    make_unreliable,
    random_asks,
    write_adapters,
)
from penstock.bench.transfer import dimensions_of
from penstock.config import Config, KvConfig, LoraConfig, OffloadConfig, SanitizeConfig
from penstock.contract import FinishReason, Submission
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import PenstockError
from penstock.models.progress import Progress

LOAD_DEADLINE_S = 0.05
# leases that run out while a request is in line, loads that are late, slow tiers that are used nevertheless
HOSTILE: dict[str, Any] = {"lease_s": 0.3, "load_deadline_s": LOAD_DEADLINE_S, "load_always": True}
STALL_S = 3 * LOAD_DEADLINE_S
END_S = 120.0  # for open requests at the end
POLL_S = 0.05
AT_REST = ("free", "idle", "used")  # the last: of disks and stores, which have no other
MOST_TOLD = 20  # violations of one kind that are spelled out


@dataclass(slots=True)
class Verdict:
    """Counts for the reader, and everything that must not be."""

    counts: dict[str, Any]
    violations: list[str]


@dataclass(frozen=True, slots=True)
class SoakBench:
    """`threads` threads ask for `seconds`; adapters are reloaded where `adapters` is not 0."""

    seconds: float
    threads: int
    adapters: int
    seed: int

    name = "soak"

    def measure(
        self, config: Config, progress: Progress, seen: Callable[[Engine], bool] = lambda engine: True
    ) -> Verdict:
        """`seen`: the soak goes on past its time until the engine shows this."""
        with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
            adapters: list[Path] = []
            if self.adapters:
                shape = dimensions_of(config.source.model)[1]
                adapters = write_adapters(Path(folder), shape, self.adapters, self.seed)
            verdict, outcomes, asks = self._soak(config, adapters, progress, seen)
            verdict.violations += _wrong_outputs(config, asks, outcomes, adapters, progress)
        return verdict

    def _soak(
        self, config: Config, adapters: list[Path], progress: Progress, seen: Callable[[Engine], bool]
    ) -> tuple[Verdict, Counter[Ending], list[Ask]]:
        rng, tally, before = random.Random(self.seed), SoakTally(), set(threading.enumerate())
        if config.offload.enabled:
            config = replace(config, offload=replace(config.offload, **HOSTILE))
        engine = build(config, progress)
        # of one request: several must fit at once, and a few more than fit
        num_tokens = sum(engine.stats().kv_blocks["device"].values()) * engine.cache.block_tokens
        most_tokens = min(engine.max_model_len, max(16, num_tokens // 3))
        asks = random_asks(rng, NUM_ASKS, engine.tokenizer.vocab_size, most_tokens)
        mischief = make_unreliable(engine, rng, STALL_S)
        crowd = [Submitter(engine, asks, tally, random.Random(rng.random())) for _ in range(self.threads)]
        disturber = Disturber(engine, adapters, random.Random(rng.random()))
        loop = EngineLoop(engine)
        loop.start()
        self._run(
            [*(submitter.run for submitter in crowd), disturber.run], loop, lambda: seen(engine), progress
        )
        violations = _unended(crowd) + _unsettled(engine)
        loop.close(0.0)
        violations += _unbalanced(engine, loop, tally, before) + tally.faults[:MOST_TOLD]
        counts = {"requests": sum(submitter.num_submitted for submitter in crowd)}
        counts |= _counts(engine, disturber, mischief, tally)
        # if it did not fit, its answer may differ from that of the request alone
        if config.kv.residency == "scored":
            approximate = [
                one
                for one in tally.outcomes
                if one.finish is not FinishReason.ERROR
                and asks[one.ask].most_tokens > engine.parts.resident_tokens
            ]
            num = sum(tally.outcomes.pop(one) for one in approximate)
            counts["scored answers, which are not compared"] = num
        return Verdict(counts, violations), tally.outcomes, asks

    def _run(
        self,
        jobs: list[Callable[[threading.Event], None]],
        loop: EngineLoop,
        seen: Callable[[], bool],
        progress: Progress,
    ) -> None:
        """Each job on its own thread until the time is over, or the engine; an exception of a job is raised
        here."""
        stop, started = threading.Event(), time.monotonic()
        raised: list[BaseException] = []

        def run(job: Callable[[threading.Event], None]) -> None:
            try:
                job(stop)
            except BaseException as error:
                raised.append(error)

        threads = [threading.Thread(target=run, args=(job,), name="soak", daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        while loop.failed() is None and (passed := time.monotonic() - started) < self.seconds + END_S:
            if passed >= self.seconds and seen():
                break
            progress("soaking", int(passed), int(self.seconds) or 1)
            time.sleep(POLL_S)
        stop.set()
        for thread in threads:
            thread.join(END_S)
        if raised:
            raise raised[0]


# ------------------------------------------------------------------------------------------- what must not be


def _unended(crowd: list[Submitter]) -> list[str]:
    by_s = time.monotonic() + END_S
    waits = [ended.wait(max(0.0, by_s - time.monotonic())) for one in crowd for ended in one.open]
    return [f"{waits.count(False)} requests have not ended within {END_S:g} s"] if False in waits else []


def _unsettled(engine: Engine) -> list[str]:
    """No more requests come; transfers end, and then every slot must be free or idle."""
    try:
        engine.kv.wait_flushed("visible", END_S)
    except PenstockError as error:
        return [f"the last flush: {error}"]
    by_s = time.monotonic() + END_S
    while engine.is_transferring() and time.monotonic() < by_s:
        time.sleep(POLL_S)
    stats = engine.stats()
    left = {f"requests are {state}": num for state, num in stats.requests.items()}
    for tier, states in stats.kv_blocks.items():
        left |= {f"slots of {tier} are {state}": num for state, num in states.items() if state not in AT_REST}
    if stats.traffic is not None:
        left |= {
            f"transfers from {source} to {dest} are in flight": num
            for (source, dest), num in stats.traffic.in_flight.items()
        }
        left["leases are open"] = stats.traffic.leases_open
    return [f"{num} {what}" for what, num in left.items() if num]


def _unbalanced(
    engine: Engine, loop: EngineLoop, tally: SoakTally, before: set[threading.Thread]
) -> list[str]:
    """After the engine has closed, which by itself raises where anything is still held."""
    found = []
    if (error := loop.failed()) is not None:
        found.append(f"the engine's loop failed: {type(error).__name__}: {error}")
    try:
        engine.check()
    except PenstockError as error:
        found.append(f"the books: {error}")
    stats = engine.stats()
    counted = {tier: num for tier, num in stats.prompt_tokens.items() if num}
    if counted != {tier: num for tier, num in tally.source.items() if num}:
        found.append(f"prompt tokens are counted as {counted}, and events report {dict(tally.source)}")
    found += [f"the sanitizer reports {num} times {kind}" for kind, num in stats.sanitizer.items() if num]
    left = [thread.name for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    return found + ([f"threads are left: {', '.join(left)}"] if left else [])


def _wrong_outputs(
    config: Config, asks: list[Ask], outcomes: Counter[Ending], adapters: list[Path], progress: Progress
) -> list[str]:
    """Every outcome against the same request alone, on an engine without tiers and without reuse."""
    found = []
    with _Reference(config, adapters, asks) as reference:
        for done, (outcome, times) in enumerate(outcomes.items()):
            progress("comparing with a reference run", done, len(outcomes))
            if outcome.finish is FinishReason.ERROR:
                found.append(f"request {outcome.ask} ended with {outcome.finish}: {outcome.error}")
            elif (wrong := reference.difference(asks[outcome.ask], outcome)) is not None:
                found.append(f"request {outcome.ask}, {times} times: {wrong}")
    more = len(found) - MOST_TOLD
    return found[:MOST_TOLD] + ([f"and {more} more like these"] if more > 0 else [])


class _Reference:
    """An engine that computes everything, one request at a time."""

    def __init__(self, config: Config, adapters: list[Path], asks: list[Ask]) -> None:
        kv = KvConfig(
            config.kv.block_tokens, config.kv.device_gib, config.kv.device_blocks, prefix_cache=False
        )
        longest = max(ask.most_tokens for ask in asks)
        plain = replace(config.engine, overcommit=1.0, capture=False, max_model_len=longest)
        lora = LoraConfig(tuple((f"adapter-{i}", str(path)) for i, path in enumerate(adapters)))
        self._engine = build(
            Config(config.source, kv, plain, OffloadConfig(enabled=False), SanitizeConfig(), lora)
        )
        self._by_digest = {loaded.adapter.digest: loaded.adapter for loaded in self._engine.adapters.all()}
        self._known: dict[tuple[int, str | None], tuple[int, ...]] = {}

    def __enter__(self) -> _Reference:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close(timeout_s=60.0)

    def difference(self, ask: Ask, outcome: Ending) -> str | None:
        """None: no difference. A cancelled request has the beginning of the full answer."""
        asked = outcome.ask, outcome.adapter
        if asked not in self._known:
            self._known[asked] = self._tokens(ask, outcome.adapter)
        expected, found = self._known[asked], outcome.tokens
        if found == (expected[: len(found)] if outcome.finish is FinishReason.CANCELLED else expected):
            return None
        same = takewhile(lambda pair: pair[0] == pair[1], zip(found, expected, strict=False))
        return (
            f"{len(found)} tokens differ from the {len(expected)} it gets alone, from number "
            f"{len(list(same))} on ({len(ask.prompt)} prompt tokens, adapter {outcome.adapter}, "
            f"{outcome.finish}, {outcome.source})"
        )

    def _tokens(self, ask: Ask, digest: str | None) -> tuple[int, ...]:
        tokens: list[int] = []
        adapter = None if digest is None else self._by_digest[digest]
        self._engine.submit(
            Submission(ask.prompt, ask.sampling, adapter=adapter), lambda event: tokens.extend(event.tokens)
        )
        while self._engine.has_work():
            self._engine.step()
        return tuple(tokens)


def _counts(engine: Engine, disturber: Disturber, mischief: Counter[str], tally: SoakTally) -> dict[str, Any]:
    stats, cold = engine.stats(), engine.kv.tiers[2:]
    traffic, done = stats.traffic, disturber.counts
    ended = [times for outcome, times in tally.outcomes.items() if outcome.finish is FinishReason.CANCELLED]
    counts = {
        "cancelled": sum(ended),
        "steps": stats.steps,
        "generated tokens": stats.generated_tokens,
        **{
            f"prompt tokens {'' if tier == 'computed' else 'from '}{tier}": num
            for tier, num in stats.prompt_tokens.items()
            if num
        },
        "retractions": stats.retractions,
        "steps that read host memory": stats.host_steps,
        "promoted blocks": stats.cache["promoted"],
        "evicted blocks": stats.cache["evictions"],
        COPIES_FAILED: mischief[COPIES_FAILED],
        COPIES_STALLED: mischief[COPIES_STALLED],
        "transfers seen to fail": 0 if traffic is None else sum(traffic.failures.values()),
        "saves skipped": 0 if traffic is None else sum(traffic.skipped.values()),
        "cache resets": done["resets"],
        "flushes": done["flushes"],
        "adapter reloads": done["reloads"],
        "sanitizer reports": sum(stats.sanitizer.values()) if stats.sanitizer else None,
    }
    if traffic is None or not cold:
        return counts
    for tier, num in traffic.checksum_failures.items():
        mischief[f"blocks of {tier} seen to be damaged"] = num
    moved = {f"MB read from {tier}": (tier, "host") for tier in cold}
    moved |= {f"MB written to {tier}": ("host", tier) for tier in cold}
    megabytes = {what: traffic.bytes.get(pair, 0) // 1_000_000 for what, pair in moved.items()}
    return counts | mischief | megabytes | {"flushes and resets refused": done["refusals"]}

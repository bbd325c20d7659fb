"""A soak: minutes of random requests, cancels, retractions, resets and failing copies, and the proof that
nothing came of it. Owns the verdict: outputs as of a request alone, books that balance, no thread left, no
finding of the sanitizer."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from penstock.contract import FinishReason
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import PenstockError
from penstock.models.progress import Progress

LEASE_S = 0.3  # short enough to run out while a request is in line
LOAD_DEADLINE_S = 0.05
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
                adapters = write_adapters(
                    Path(folder), dimensions_of(config.source.model)[1], self.adapters, self.seed
                )
            verdict, tally, asks = self._soak(_hostile(config), adapters, progress, seen)
            verdict.violations += _wrong_outputs(config, asks, tally, adapters, progress)
        return verdict

    def _soak(
        self, config: Config, adapters: list[Path], progress: Progress, seen: Callable[[Engine], bool]
    ) -> tuple[Verdict, SoakTally, list[Ask]]:
        rng, tally = random.Random(self.seed), SoakTally()
        before = set(threading.enumerate())
        engine = build(config, progress)
        asks = random_asks(rng, NUM_ASKS, engine.tokenizer.vocab_size, _most_tokens(engine))
        mischief = make_unreliable(engine, rng, STALL_S)
        submitters = [
            Submitter(engine, asks, tally, random.Random(rng.random())) for _ in range(self.threads)
        ]
        disturber = Disturber(engine, adapters, random.Random(rng.random()))
        loop = EngineLoop(engine)
        loop.start()
        with _running([*(submitter.run for submitter in submitters), disturber.run], self.seconds):
            self._watch(loop, lambda: seen(engine), progress)
        violations = _unended(submitters) + _unsettled(engine)
        loop.close(0.0)
        violations += _unbalanced(engine, loop, tally, before) + tally.faults[:MOST_TOLD]
        counts = _counts(engine, submitters, disturber, mischief, tally) | _cold_counts(
            engine, disturber, mischief
        )
        # if it did not fit, its answer may differ from that of the request alone
        if config.kv.residency == "scored":
            approximate = [
                one
                for one in tally.outcomes
                if one.finish is not FinishReason.ERROR and asks[one.ask].most_tokens > engine.resident_tokens
            ]
            counts["scored answers, which are not compared"] = sum(
                tally.outcomes.pop(one) for one in approximate
            )
        return Verdict(counts, violations), tally, asks

    def _watch(self, loop: EngineLoop, seen: Callable[[], bool], progress: Progress) -> None:
        """Until the time is over, or the engine."""
        started = time.monotonic()
        while loop.failed() is None and (passed := time.monotonic() - started) < self.seconds + END_S:
            if passed >= self.seconds and seen():
                return
            progress("soaking", int(passed), int(self.seconds) or 1)
            time.sleep(POLL_S)


@contextmanager
def _running(jobs: list[Callable[[threading.Event], None]], seconds: float) -> Iterator[None]:
    """Each job on its own thread until the block is left; an exception of a job is raised here."""
    stop = threading.Event()
    raised: list[BaseException] = []

    def run(job: Callable[[threading.Event], None]) -> None:
        try:
            job(stop)
        except BaseException as error:
            raised.append(error)

    threads = [
        threading.Thread(target=run, args=(job,), name=f"soak-{i}", daemon=True) for i, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(END_S)
    if raised:
        raise raised[0]


def _hostile(config: Config) -> Config:
    """Leases that run out, loads that are late, tiers that are used whether or not it pays."""
    offload = (
        replace(config.offload, lease_s=LEASE_S, load_deadline_s=LOAD_DEADLINE_S, load_always=True)
        if config.offload.enabled
        else config.offload
    )
    return replace(config, offload=offload)


def _most_tokens(engine: Engine) -> int:
    """Of one request: several must fit at once, and a few more than fit."""
    num_blocks = sum(engine.stats().kv_blocks["device"].values())
    return min(engine.max_model_len, max(16, num_blocks * engine.cache.block_tokens // 3))


# ------------------------------------------------------------------------------------------- what must not be


def _unended(submitters: list[Submitter]) -> list[str]:
    by_s = time.monotonic() + END_S
    left = sum(
        not listening.ended.wait(max(0.0, by_s - time.monotonic()))
        for submitter in submitters
        for listening in submitter.open
    )
    return [f"{left} requests have not ended within {END_S:g} s"] if left else []


def _unsettled(engine: Engine) -> list[str]:
    """No more requests come; transfers end, and then every slot must be free or idle."""
    try:
        engine.wait_flushed("visible", END_S)
    except PenstockError as error:
        return [f"the last flush: {error}"]
    by_s = time.monotonic() + END_S
    while engine.is_transferring() and time.monotonic() < by_s:
        time.sleep(POLL_S)
    stats = engine.stats()
    found = [f"{num} requests are {state}" for state, num in stats.requests.items() if num]
    for tier, states in stats.kv_blocks.items():
        found += [
            f"{num} slots of {tier} are {state}"
            for state, num in states.items()
            if num and state not in AT_REST
        ]
    if stats.traffic is not None:
        found += [
            f"{num} transfers from {pair[0]} to {pair[1]} are in flight"
            for pair, num in stats.traffic.in_flight.items()
            if num
        ]
        found += [f"{stats.traffic.leases_open} leases are open"] if stats.traffic.leases_open else []
    return found


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
    config: Config, asks: list[Ask], tally: SoakTally, adapters: list[Path], progress: Progress
) -> list[str]:
    """Every outcome against the same request alone, on an engine without tiers and without reuse."""
    found = [
        f"request {o.ask} ended with {o.finish}: {o.error}"
        for o in tally.outcomes
        if o.finish is FinishReason.ERROR
    ]
    with _Reference(config, adapters, asks) as reference:
        for done, (outcome, times) in enumerate(tally.outcomes.items()):
            progress("comparing with a reference run", done, len(tally.outcomes))
            if (
                outcome.finish is not FinishReason.ERROR
                and (wrong := reference.difference(asks[outcome.ask], outcome)) is not None
            ):
                found.append(f"request {outcome.ask}, {times} times: {wrong}")
    told = found[:MOST_TOLD]
    return told + ([f"and {len(found) - MOST_TOLD} more like these"] if len(found) > MOST_TOLD else [])


class _Reference:
    """An engine that computes everything, one request at a time."""

    def __init__(self, config: Config, adapters: list[Path], asks: list[Ask]) -> None:
        kv = KvConfig(
            config.kv.block_tokens, config.kv.device_gib, config.kv.device_blocks, prefix_cache=False
        )
        plain = replace(
            config.engine, overcommit=1.0, capture=False, max_model_len=max(ask.most_tokens for ask in asks)
        )
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
        expected, found = self._tokens(ask, outcome), outcome.tokens
        if found == (expected[: len(found)] if outcome.finish is FinishReason.CANCELLED else expected):
            return None
        at = next(
            (at for at, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
            min(len(found), len(expected)),
        )
        asked = (
            f"{len(ask.prompt)} prompt tokens, adapter {outcome.adapter}, {outcome.finish}, {outcome.source}"
        )
        return (
            f"{len(found)} tokens differ from the {len(expected)} it gets alone, from number {at} on "
            f"({asked})"
        )

    def _tokens(self, ask: Ask, outcome: Ending) -> tuple[int, ...]:
        known = self._known.get((outcome.ask, outcome.adapter))
        if known is None:
            tokens: list[int] = []
            adapter = None if outcome.adapter is None else self._by_digest[outcome.adapter]
            self._engine.submit(
                ask.prompt, ask.sampling, lambda event: tokens.extend(event.tokens), adapter=adapter
            )
            while self._engine.has_work():
                self._engine.step()
            known = self._known[outcome.ask, outcome.adapter] = tuple(tokens)
        return known


# ----------------------------------------------------------------------------------------------------- counts


def _counts(
    engine: Engine,
    submitters: list[Submitter],
    disturber: Disturber,
    mischief: Counter[str],
    tally: SoakTally,
) -> dict[str, Any]:
    stats = engine.stats()
    ended: Counter[str] = Counter()
    for outcome, times in tally.outcomes.items():
        ended[outcome.finish] += times
    return {
        "requests": sum(submitter.num_submitted for submitter in submitters),
        "cancelled": ended[FinishReason.CANCELLED],
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
        **{what: mischief[what] for what in (COPIES_FAILED, COPIES_STALLED)},
        "transfers seen to fail": 0 if stats.traffic is None else sum(stats.traffic.failures.values()),
        "saves skipped": 0 if stats.traffic is None else sum(stats.traffic.skipped.values()),
        "cache resets": disturber.counts["resets"],
        "flushes": disturber.counts["flushes"],
        "adapter reloads": disturber.counts["reloads"],
        "sanitizer reports": sum(stats.sanitizer.values()) if stats.sanitizer else None,
    }


def _cold_counts(engine: Engine, disturber: Disturber, mischief: Counter[str]) -> dict[str, Any]:
    """Of cold tiers, if there are any."""
    traffic = engine.stats().traffic
    if traffic is None or not engine.tiers[2:]:
        return {}
    return {
        **mischief,
        **{f"blocks of {tier} seen to be damaged": num for tier, num in traffic.checksum_failures.items()},
        **{
            f"MB read from {tier}": traffic.bytes.get((tier, "host"), 0) // 1_000_000
            for tier in engine.tiers[2:]
        },
        **{
            f"MB written to {tier}": traffic.bytes.get(("host", tier), 0) // 1_000_000
            for tier in engine.tiers[2:]
        },
        "flushes and resets refused": disturber.counts["refusals"],
    }

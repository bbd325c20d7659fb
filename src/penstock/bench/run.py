"""What measurements have in common: random prompts, an engine driven from the calling thread, sizes that do
not fit. Owns the clock of a measurement, not the measurement."""

from __future__ import annotations

import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.bench.report import Results, Row, Shown
from penstock.config import GIB, Config, ResidencyName
from penstock.contract import FinishReason, KvSource, SamplingParams, Submission, TokenEvent
from penstock.engine.cache_calls import FlushLevel
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, DeadlineExceeded, InvariantBroken, StepFailed
from penstock.kv.tiers.ssd.directory import LOCK_BYTES, SECTOR_BYTES
from penstock.kv.tiers.ssd.segments import slot_bytes
from penstock.models.progress import Progress, silent

RESET_POLL_S = 0.001
TRANSFER_WAIT_S = 0.1  # at most, before a turn looks again
FLUSH_S = 60.0
READY_POLL_S = 0.01
# The tier that other engines share: it is never emptied, and their blocks are never found.
SHARED = "remote"

WARM_UP = 0  # number of the run that is not measured
SSD_FILES = 300  # more than the disk tier divides itself into; each has a sector of its own

CONFIG = Config()

T = TypeVar("T")


class Bench(Shown, Protocol):
    """One kind of measurement that needs an engine."""

    def measure(self, driver: Driver) -> Results: ...


# ------------------------------------------------------------------------------------------ driving an engine


@dataclass(slots=True, eq=False)
class Reader:
    """Listens to one request."""

    driver: Driver
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    first_s: float | None = None
    source: KvSource | None = None
    expert_wait_s: float | None = None  # of steps after the one with its first token

    def __call__(self, event: TokenEvent) -> None:
        if event.tokens and self.first_s is None:
            self.first_s = time.perf_counter()
            self.expert_wait_s = None if event.expert_wait_s is None else 0.0
        elif self.expert_wait_s is not None:
            self.expert_wait_s += event.expert_wait_s or 0.0
        self.source = event.source or self.source
        self.tokens.extend(event.tokens)
        self.driver.num_tokens += len(event.tokens)
        if event.finish is not None:
            self.driver.ended.append(event)

    @property
    def ttft_s(self) -> float:
        if self.first_s is None:
            raise InvariantBroken("a request ended without a token")
        return self.first_s - self.submitted_s


class Stepped(NamedTuple):
    """The result of one call of `engine.step()`."""

    end_s: float
    num_tokens: int
    num_finished: int


class Driver:
    """Steps an engine that no other thread steps, and knows its `config`. Its requests have a salt of their
    own, so that nothing of an earlier run is found."""

    def __init__(
        self, engine: Engine, config: Config = CONFIG, progress: Progress = silent, salt: str | None = None
    ) -> None:
        self.engine, self.config, self.progress = engine, config, progress
        self.salt = secrets.token_hex(8) if salt is None else salt
        # what its requests got in the current turn; counted here, so that a turn's own cost is not measured
        self.num_tokens = 0
        self.ended: list[TokenEvent] = []
        self._num_submitted = 0  # written by the submitting thread, one at a time
        self._num_ended = 0  # written by who steps

    def prompts(self, num: int, num_tokens: int, *seed: int) -> list[list[int]]:
        return random_prompts(num, num_tokens, self.engine.tokenizer.vocab_size, seed)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, residency: ResidencyName | None = None
    ) -> Reader:
        """Greedy, and to the full length: what the model would like does not change the work."""
        reader = Reader(self, time.perf_counter())
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(Submission(prompt, sampling, cache_salt=self.salt, residency=residency), reader)
        self._num_submitted += 1
        return reader

    def turn(self) -> Stepped:
        self.num_tokens, self.ended = 0, []
        moved = self.engine.step()
        end_s = time.perf_counter()
        self._num_ended += len(self.ended)
        for event in self.ended:
            if event.finish is not FinishReason.LENGTH:
                raise StepFailed(event.error or f"a request ended early: {event.finish}")
        num_open = self._num_submitted - self._num_ended
        if not moved and num_open:
            if not self.engine.is_transferring():
                raise InvariantBroken(f"the engine has nothing to do, but {num_open} requests are open")
            self.engine.wait_work(TRANSFER_WAIT_S)
        return Stepped(end_s, self.num_tokens, len(self.ended))

    def run_all(self) -> list[Stepped]:
        """Until every request has ended and the engine is idle."""
        turns: list[Stepped] = []
        while self._num_submitted > self._num_ended or self.engine.has_work():
            turns.append(self.turn())
        return turns

    def reset_cache(self, *tiers: str) -> int:
        """Forget all blocks in `tiers`; by default in all tiers but a shared store."""
        own = tuple(tier for tier in self.engine.kv.tiers if tier != SHARED)
        return sum(self._ask(lambda: self.engine.kv.reset(tiers or own)).values())

    def flush(self, level: FlushLevel = "visible") -> None:
        """Block until computed blocks can be found in colder tiers; at `persisted`, in all of them."""
        self._ask(lambda: self.engine.kv.wait_flushed(level, FLUSH_S))
        by_s = time.monotonic() + FLUSH_S
        # tiers behind the first are written as well
        while level == "persisted" and self.engine.is_transferring():
            if time.monotonic() > by_s:
                raise DeadlineExceeded(f"KV is still on its way to colder tiers after {FLUSH_S:g} s")
            self.engine.step()
            self.engine.wait_work(RESET_POLL_S)

    def wait_ready(self) -> None:
        """Block until the host tier has all its memory: pinning takes seconds per GiB and goes on beside the
        first requests. Raises ConfigError if some of it cannot be pinned: the measurement would not be the
        requested one."""
        host = self.engine.cache.host
        while True:
            # read first: slots that it prepared last are counted below
            is_over = host.memory is None or host.memory.is_over
            if not (num_unready := host.num_unready):
                return
            if is_over:
                raise ConfigError(
                    f"{num_unready} of {host.num_slots} blocks of host memory cannot be pinned: ask for "
                    "less of it"
                )
            self.progress("preparing host memory", host.num_slots - num_unready, host.num_slots)
            self.engine.step()
            time.sleep(READY_POLL_S)

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.kv.block_tokens)

    def require_room(self, needs: dict[str, int], *said: str) -> None:
        """So many KV blocks must fit together into each empty tier. Raises Skipped, also with what was `said`
        before."""
        found = [*said, *filter(None, (self._shortage(tier, num) for tier, num in needs.items()))]
        if found:
            raise Skipped("; ".join(found))

    def _shortage(self, tier: str, needed: int) -> str | None:
        """What is short, and what would help. A shared store is assumed to have room."""
        kv, folder, block_bytes = (
            self.config.kv,
            self.config.offload.ssd_dir,
            self.engine.parts.arena.layout.block_bytes,
        )
        num_bytes = needed * block_bytes
        if tier == "ssd" and folder is not None:
            num_bytes = (needed + 1) * slot_bytes(block_bytes) + SSD_FILES * SECTOR_BYTES + LOCK_BYTES
            if num_bytes > (free := shutil.disk_usage(folder).free):
                room = f"{free / GIB:.2f} are free"
                return f"they need {num_bytes / GIB:.2f} GiB of the disk of {folder}, where {room}"
        there = sum(self.engine.stats().kv_blocks.get(tier, {}).values())
        if tier == SHARED or needed <= there:
            return None
        place, flag = {
            "device": ("on the device", "--device-kv-gib"),
            "host": ("in host memory", "--kv-offload-host-gib"),
            "ssd": ("on the disk", "--kv-offload-ssd-gib"),
        }[tier]
        would_do = f"{flag} {float(f'{1.006 * num_bytes / GIB:.3g}'):g}"  # rounded up to three digits
        if tier == "device" and kv.device_blocks is not None:
            would_do = f"--device-kv-blocks {needed}"
        return (
            f"they need {needed} KV blocks {place}, which holds {there} ({there * kv.block_tokens} tokens); "
            f"{would_do} would do"
        )

    def _ask(self, call: Callable[[], T]) -> T:
        """The engine does it between steps and its caller waits, so the caller is a thread of its own."""
        answer: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="bench-ask", daemon=True).start()
        while not answer.done():
            self.engine.step()
            futures.wait([answer], RESET_POLL_S)
        return answer.result()


# --------------------------------------------------------------------------------------------- sizes and runs


class Skipped(Exception):
    """A size cannot be measured; the message says why, and what would help."""


def measure_each(sizes: Iterable[int], what: str, row: Callable[[int], Row]) -> Results:
    """`what`: how a size is called, such as "batch {}". `row` may raise `Skipped`."""
    results = Results([], [])
    for size in sizes:
        try:
            results.rows.append(row(size))
        except Skipped as why:
            results.skipped.append(f"{what.format(size)}: {why}")
    return results


def runs(stage: str, repeat: int, progress: Progress) -> Iterator[int]:
    """Numbers of the runs: one that only warms up, and `repeat` that are measured."""
    for run in range(1 + repeat):
        progress(stage, run, 1 + repeat)
        yield run
    progress(stage, 1 + repeat, 1 + repeat)


def random_prompts(num: int, num_tokens: int, vocab: int, seed: tuple[int, ...]) -> list[list[int]]:
    """`num` different prompts of exactly `num_tokens` ids below `vocab`. `seed` may have several parts, such
    as a run's number."""
    if num_tokens * math.log(vocab) < math.log(2 * num):
        raise ConfigError(
            f"there are not enough prompts of {num_tokens} tokens over {vocab} ids to make {num} different "
            "ones"
        )
    source = np.random.default_rng([part % 2**63 for part in seed])
    prompts: dict[tuple[int, ...], None] = {}
    while len(prompts) < num:
        more = source.integers(0, vocab, (num - len(prompts), num_tokens)).tolist()
        prompts |= dict.fromkeys(map(tuple, more))
    return [list(prompt) for prompt in prompts]

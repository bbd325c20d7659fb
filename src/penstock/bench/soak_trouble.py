"""The load and the faults of a soak: many threads that submit requests, and failures in memory, on disks and
in stores. Owns the requests and the faults; checks nothing itself, and is used by the soak only."""

from __future__ import annotations

import errno
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from penstock.bench.run import SHARED
from penstock.contract import FinishReason, KvSource, SamplingParams, TokenEvent
from penstock.engine.engine import Engine, FlushLevel
from penstock.errors import EngineClosed, StoreFailed
from penstock.kv.tiers.ssd.directory import DiskIo
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import BlockStore, Outcome, StoreUsage
from penstock.kv.transfer import Copier, Layers, Slots
from penstock.models.model import ModelConfig
from penstock.models.registry import layout

NAME = "soak"  # of the adapter whose content changes all the time
NUM_ASKS = 96  # different requests: few enough to come back often, and to be run alone afterwards
NUM_STEMS = 5
CANCELLED = 0.25  # share of requests that are cancelled
ADAPTED = 0.4  # share of requests for the adapter, if there is one
PAUSE_S = 0.02  # at most, between two requests of a thread
OPEN_PER_THREAD = 8

COPY_FAILED = 0.03  # share of copies that fail halfway
COPY_STALLED = 0.01  # share of copies that take longer than requests wait
FAILED = 0.02  # share of the disk's calls that end with an error, and of a store's blocks
STALLED = 0.005  # share of calls that take longer than requests wait
# share of the disk's reads that bring a wrong bit, and of its writes that do not happen or only by half
SPOILED = 0.02
DOWN = 0.003  # share of a store's calls for which all of it is down
EXAGGERATED = 0.05  # share of answers of a store that it has everything
DISTURBED_S = 0.2  # at most, between two disturbances
FLUSH_S = 60.0
COPIES_FAILED, COPIES_STALLED = "copies failed on purpose", "copies stalled on purpose"
_RANK = 2
_ADAPTED = (".qkv", ".down")  # as the model calls them


class Ask(NamedTuple):
    """One of the requests that are made again and again."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens


def random_asks(rng: random.Random, num: int, vocab: int, most_tokens: int) -> list[Ask]:
    """Prompts that share their beginnings, with any mixture of what can be asked; `most_tokens` for prompt
    and answer together."""
    length = most_tokens // 2
    stems = [[rng.randrange(vocab) for _ in range(length)] for _ in range(NUM_STEMS)]
    asks = []
    for _ in range(num):
        shared = rng.choice((0, 5, 16, 48, length // 2, length))
        prompt = rng.choice(stems)[:shared] + [
            rng.randrange(vocab) for _ in range(rng.choice((1, 3, 16, 40)))
        ]
        prompt = prompt[: most_tokens - 1]
        fields: dict[str, Any] = {
            "max_tokens": min(rng.choice((0, 1, 2, 9, 24, 60)), most_tokens - len(prompt)),
            "temperature": 0.0,
        }
        if rng.random() < 0.4:
            fields |= {
                "temperature": rng.choice((0.5, 1.0)),
                "seed": rng.randrange(100),
                "top_p": rng.choice((0.8, 1.0)),
            }
        if rng.random() < 0.2:
            fields |= rng.choice(
                ({"frequency_penalty": 0.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3})
            )
        if rng.random() < 0.1:
            fields |= {"prompt_logprobs": 1}
        asks.append(
            Ask(tuple(prompt), SamplingParams(ignore_eos=True, **fields), rng.choice(("", "", "", "tenant")))
        )
    return asks


class Ending(NamedTuple):
    """Outcome of one request; equal ones are counted, so that days of them fit into memory."""

    ask: int
    adapter: str | None  # digest of its content
    finish: FinishReason
    tokens: tuple[int, ...]
    source: KvSource | None  # of its prompt's KV; None: it ended before its first token
    error: str | None


@dataclass(slots=True)
class SoakTally:
    """What the crowd has got. Filled on the engine's thread, read when all have ended."""

    outcomes: Counter[Ending] = field(default_factory=Counter)
    source: Counter[str] = field(default_factory=Counter)  # prompt tokens
    faults: list[str] = field(default_factory=list)  # faults of single events


class Listening:
    """Listens to one request, and cancels it after `cancel_at` tokens, if set."""

    def __init__(self, tally: SoakTally, ask: int, length: int, adapter: str | None) -> None:
        self.ended = threading.Event()
        self.on_tokens: Any = None  # called with the number of tokens so far
        self._tally = tally
        self._ask = ask
        self._length = length
        self._adapter = adapter
        self._tokens: list[int] = []
        self._source: KvSource | None = None

    def __call__(self, event: TokenEvent) -> None:
        self._tokens.extend(event.tokens)
        if event.source is not None:
            self._source = event.source
            self._tally.source.update(asdict(event.source))
            if sum(asdict(event.source).values()) != self._length:
                self._tally.faults.append(f"a prompt of {self._length} tokens came from {event.source}")
        if event.finish is not None:
            outcome = Ending(
                self._ask, self._adapter, event.finish, tuple(self._tokens), self._source, event.error
            )
            self._tally.outcomes[outcome] += 1
            self.ended.set()
        elif self.on_tokens is not None:
            self.on_tokens(len(self._tokens))


class Submitter:
    """One thread that submits requests until it is stopped. It never has more than a few requests open."""

    def __init__(self, engine: Engine, asks: list[Ask], tally: SoakTally, rng: random.Random) -> None:
        self.num_submitted = 0
        self.open: list[Listening] = []
        self._engine = engine
        self._asks = asks
        self._tally = tally
        self._rng = rng

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.open = [listening for listening in self.open if not listening.ended.is_set()]
                if len(self.open) >= OPEN_PER_THREAD:
                    self.open[0].ended.wait(PAUSE_S)
                    continue
                self._submit()
                if self._rng.random() < 0.3:
                    stop.wait(self._rng.random() * PAUSE_S)
        except EngineClosed:
            return  # the engine has stopped, and says why itself

    def _submit(self) -> None:
        rng, number = self._rng, self._rng.randrange(len(self._asks))
        ask = self._asks[number]
        hold = self._engine.adapters.try_hold(NAME) if rng.random() < ADAPTED else None
        listening = Listening(
            self._tally, number, len(ask.prompt), None if hold is None else hold.adapter.digest
        )
        try:
            adapter = None if hold is None else hold.adapter
            request_id = self._engine.submit(
                ask.prompt, ask.sampling, listening, cache_salt=ask.salt, adapter=adapter
            )
        finally:
            if hold is not None:
                hold.end()
        self.open.append(listening)
        self.num_submitted += 1
        if rng.random() < CANCELLED:
            self._cancel(request_id, listening)

    def _cancel(self, request_id: str, listening: Listening) -> None:
        """At once, after a moment, or when some tokens have come."""
        when = self._rng.randrange(3)
        if when == 0:
            after = self._rng.randrange(1, 20)
            listening.on_tokens = lambda num: self._engine.cancel(request_id) if num >= after else None
            return
        if when == 1:
            listening.ended.wait(self._rng.random() * PAUSE_S)
        self._engine.cancel(request_id)


# --------------------------------------------------------------------------------------------------- mischief


class Mischief:
    """When it happens, and how often it did. For several lanes at once."""

    def __init__(self, counts: Counter[str], rng: random.Random, stall_s: float) -> None:
        self._counts = counts
        self._rng = rng
        self._stall_s = stall_s
        self._lock = threading.Lock()

    def happens(self, share: float, what: str) -> bool:
        with self._lock:
            drawn = self._rng.random() < share
            self._counts[what] += drawn
        return drawn

    def below(self, end: int) -> int:
        with self._lock:
            return self._rng.randrange(end)

    def stall(self, share: float, what: str) -> None:
        if self.happens(share, what):
            time.sleep(self._stall_s)


class UnreliableCopier:
    """Copies as `inner` does, most of the time."""

    def __init__(self, inner: Copier, mischief: Mischief) -> None:
        self._inner = inner
        self._mischief = mischief

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        if self._mischief.happens(COPY_FAILED, COPIES_FAILED):
            half = len(source_slots) // 2
            self._inner.copy(source_slots[:half], dest_slots[:half], layers)
            raise OSError("this copy was made to fail halfway")
        self._mischief.stall(COPY_STALLED, COPIES_STALLED)
        self._inner.copy(source_slots, dest_slots, layers)


class UnreliableDisk(DiskIo):
    """The system's calls, most of the time."""

    def __init__(self, mischief: Mischief) -> None:
        self._mischief = mischief

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._mischief.stall(STALLED, "disk calls stalled on purpose")
        if self._mischief.happens(FAILED, "disk calls failed on purpose"):
            raise OSError(errno.EIO, "this read was made to fail")
        num = super().preadv(fd, buffers, offset)
        if num and self._mischief.happens(SPOILED, "disk reads spoiled on purpose"):
            spoiled = buffers[self._mischief.below(len(buffers))]
            spoiled[self._mischief.below(len(spoiled))] ^= 1 << self._mischief.below(8)
        return num

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._mischief.stall(STALLED, "disk calls stalled on purpose")
        if self._mischief.happens(FAILED, "disk calls failed on purpose"):
            super().pwritev(fd, buffers[:1], offset)
            raise OSError(errno.EIO, "this write was made to fail halfway")
        if self._mischief.happens(SPOILED, "disk writes lost on purpose"):
            kept = buffers[: self._mischief.below(len(buffers) + 1)]
            if kept:
                super().pwritev(fd, kept, offset)
            return sum(len(buffer) for buffer in buffers)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        if self._mischief.happens(FAILED, "disk calls failed on purpose"):
            raise OSError(errno.EIO, "this sync was made to fail")
        super().fdatasync(fd)


class UnreliableStore:
    """A `BlockStore` that mostly works like `inner`. `inner` has checked every block that it reports as
    done."""

    def __init__(self, inner: BlockStore, mischief: Mischief) -> None:
        self.name = inner.name
        self.local = inner.local
        self._inner = inner
        self._mischief = mischief

    def find(self, keys: Sequence[bytes]) -> int:
        self._call()
        exaggerates = self._mischief.happens(EXAGGERATED, "store answers exaggerated on purpose")
        return len(keys) if exaggerates else self._inner.find(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self._call()
        outcomes = self._inner.read(keys, into)
        for place in self._failing(len(keys)):
            into[place][:] = bytes(len(into[place]))
            outcomes[place] = Outcome.FAILED
        return outcomes

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        self._call()
        failing = self._failing(len(keys))
        kept = [place for place in range(len(keys)) if place not in failing]
        done = self._inner.write(
            [keys[place] for place in kept],
            [depths[place] for place in kept],
            [blocks[place] for place in kept],
        )
        outcomes = [Outcome.FAILED] * len(keys)
        for place, outcome in zip(kept, done, strict=True):
            outcomes[place] = outcome
        return outcomes

    def persist(self) -> None:
        self._call()
        self._inner.persist()

    def probe(self) -> None:
        self._inner.probe()

    def reset(self) -> int:
        self._call()
        return self._inner.reset()

    def usage(self) -> StoreUsage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def _call(self) -> None:
        self._mischief.stall(STALLED, "store calls stalled on purpose")
        if self._mischief.happens(DOWN, "store calls failed on purpose"):
            raise StoreFailed("the store was made to be down")

    def _failing(self, num: int) -> set[int]:
        return {
            place
            for place in range(num)
            if self._mischief.happens(FAILED, "blocks of a store failed on purpose")
        }


def make_unreliable(engine: Engine, rng: random.Random, stall_s: float) -> Counter[str]:
    """Call before the engine's first step: nothing may be in flight. Returns the counters of faults."""
    counts: Counter[str] = Counter({COPIES_FAILED: 0, COPIES_STALLED: 0})
    for mover in (engine.cache.loads.mover, engine.cache.saves.mover) if "host" in engine.tiers else ():
        mover.copier = UnreliableCopier(mover.copier, Mischief(counts, random.Random(rng.random()), stall_s))
    for tier in engine.cache.cold_tiers.values():
        mischief = Mischief(counts, random.Random(rng.random()), stall_s)
        store = tier.calls.store
        if isinstance(store, SsdStore):
            store.directory.io = UnreliableDisk(mischief)
        else:
            tier.calls.store = UnreliableStore(store, mischief)
    return counts


class Disturber:
    """One thread that empties caches, waits for saves, reloads the adapter and reads figures, in no order."""

    def __init__(self, engine: Engine, adapters: list[Path], rng: random.Random) -> None:
        self.counts: Counter[str] = Counter(resets=0, flushes=0, reloads=0, refusals=0)
        self._engine = engine
        self._adapters = adapters
        self._rng = rng

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.wait(self._rng.random() * DISTURBED_S):
                self._rng.choice(
                    (self._reset, self._flush, self._both, self._reload, self._reload, self._engine.stats)
                )()
        except EngineClosed:
            return  # the engine has stopped, and says why itself

    def _reset(self) -> None:
        tiers = tuple(tier for tier in self._engine.tiers if tier != SHARED)
        with self._may_refuse():
            self._engine.reset_cache(self._rng.choice((*((tier,) for tier in tiers), tiers)))
            self.counts["resets"] += 1

    def _flush(self) -> None:
        levels: tuple[FlushLevel, ...] = (
            "captured",
            "visible",
            *(("persisted",) if self._engine.tiers[2:] else ()),
        )
        with self._may_refuse():
            self._engine.wait_flushed(self._rng.choice(levels), FLUSH_S)
            self.counts["flushes"] += 1

    def _both(self) -> None:
        """A flush and a reset at once."""
        with ThreadPoolExecutor(1) as other:
            flushed = other.submit(self._flush)
            self._reset()
            flushed.result()

    @contextmanager
    def _may_refuse(self) -> Iterator[None]:
        """A disk or store that fails on purpose says so to its callers."""
        try:
            yield
        except StoreFailed:
            self.counts["refusals"] += 1

    def _reload(self) -> None:
        if self._adapters:
            self._engine.adapters.load(NAME, self._rng.choice(self._adapters))
            self.counts["reloads"] += 1


def write_adapters(folder: Path, config: ModelConfig, num: int, seed: int) -> list[Path]:
    """Random adapters in PEFT's files, one directory each."""
    parts = [part for weight in layout(config) if weight.name.endswith(_ADAPTED) for part in weight.parts]
    modules = {part.name.removesuffix(".weight"): part.shape for part in parts}
    targets = sorted({module.rpartition(".")[2] for module in modules})
    written = []
    for number in range(num):
        generator = torch.Generator().manual_seed(seed + number)
        tensors = {}
        for module, (num_out, num_in) in modules.items():
            tensors[f"base_model.model.{module}.lora_A.weight"] = (
                torch.randn(_RANK, num_in, generator=generator) * num_in**-0.5
            )
            tensors[f"base_model.model.{module}.lora_B.weight"] = (
                torch.randn(num_out, _RANK, generator=generator) * 0.2
            )
        directory = folder / f"adapter-{number}"
        directory.mkdir()
        settings = {
            "peft_type": "LORA",
            "r": _RANK,
            "lora_alpha": 2 * _RANK,
            "target_modules": targets,
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, directory / "adapter_model.safetensors")
        written.append(directory)
    return written

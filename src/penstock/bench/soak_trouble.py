"""The load and the faults of a soak: many threads that submit requests, and failures in memory, on disks and
in stores. Owns the requests and the faults; checks nothing itself, and is used by the soak only."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from penstock.bench.run import SHARED
from penstock.contract import FinishReason, KvSource, SamplingParams, Submission, TokenEvent
from penstock.engine.engine import Engine
from penstock.errors import EngineClosed, StoreFailed
from penstock.kv.tiers.ssd.directory import DiskIo
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import Outcome
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
    stems = [rng.choices(range(vocab), k=length) for _ in range(NUM_STEMS)]
    asks = []
    for _ in range(num):
        shared, own = rng.choice((0, 5, 16, 48, length // 2, length)), rng.choice((1, 3, 16, 40))
        prompt = (rng.choice(stems)[:shared] + rng.choices(range(vocab), k=own))[: most_tokens - 1]
        fields: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < 0.4:
            fields = {"temperature": rng.choice((0.5, 1.0)), "top_p": rng.choice((0.8, 1.0))}
            fields["seed"] = rng.randrange(100)
        if rng.random() < 0.2:
            fields |= rng.choice(
                ({"frequency_penalty": 0.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3})
            )
        if rng.random() < 0.1:
            fields["prompt_logprobs"] = 1
        fields["max_tokens"] = min(rng.choice((0, 1, 2, 9, 24, 60)), most_tokens - len(prompt))
        sampling = SamplingParams(ignore_eos=True, **fields)
        asks.append(Ask(tuple(prompt), sampling, rng.choice(("", "", "", "tenant"))))
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


class Submitter:
    """One thread that submits requests until it is stopped. It never has more than a few requests open."""

    def __init__(self, engine: Engine, asks: list[Ask], tally: SoakTally, rng: random.Random) -> None:
        self.num_submitted = 0
        self.open: list[threading.Event] = []  # each is set when its request ends
        self._engine = engine
        self._asks = asks
        self._tally = tally
        self._rng = rng

    def run(self, stop: threading.Event) -> None:
        with contextlib.suppress(EngineClosed):  # the engine has stopped, and says why itself
            while not stop.is_set():
                self.open = [ended for ended in self.open if not ended.is_set()]
                if len(self.open) >= OPEN_PER_THREAD:
                    self.open[0].wait(PAUSE_S)
                    continue
                self._submit()
                if self._rng.random() < 0.3:
                    stop.wait(self._rng.random() * PAUSE_S)

    def _submit(self) -> None:
        """A request may be cancelled at once, after a moment, or when some tokens have come."""
        rng, number = self._rng, self._rng.randrange(len(self._asks))
        ask, own_id, ended = self._asks[number], f"{id(self)}-{self.num_submitted}", threading.Event()
        when = rng.randrange(3) if rng.random() < CANCELLED else None
        cancel_at = rng.randrange(1, 20) if when == 0 else None
        hold = self._engine.adapters.try_hold(NAME) if rng.random() < ADAPTED else None
        adapter = None if hold is None else hold.adapter
        listen = self._listener(number, None if adapter is None else adapter.digest, ended, own_id, cancel_at)
        try:
            self._engine.submit(
                Submission(ask.prompt, ask.sampling, own_id, cache_salt=ask.salt, adapter=adapter), listen
            )
        finally:
            if hold is not None:
                hold.end()
        self.open.append(ended)
        self.num_submitted += 1
        if when == 1:
            ended.wait(rng.random() * PAUSE_S)
        if when:
            self._engine.cancel(own_id)

    def _listener(
        self, ask: int, adapter: str | None, ended: threading.Event, own_id: str, cancel_at: int | None
    ) -> Callable[[TokenEvent], None]:
        tokens: list[int] = []
        source: list[KvSource] = []
        tally, length = self._tally, len(self._asks[ask].prompt)

        def listen(event: TokenEvent) -> None:
            tokens.extend(event.tokens)
            if event.source is not None:
                source.append(event.source)
                tally.source.update(counted := asdict(event.source))
                if sum(counted.values()) != length:
                    tally.faults.append(f"a prompt of {length} tokens came from {event.source}")
            if event.finish is not None:
                came = source[-1] if source else None
                tally.outcomes[Ending(ask, adapter, event.finish, tuple(tokens), came, event.error)] += 1
                ended.set()
            elif cancel_at is not None and len(tokens) >= cancel_at:
                self._engine.cancel(own_id)

        return listen


# --------------------------------------------------------------------------------------------------- mischief


class Mischief:
    """When it happens, and how often it did. For several lanes at once."""

    def __init__(self, counts: Counter[str], rng: random.Random, stall_s: float) -> None:
        self.rng = rng
        self._counts = counts
        self._stall_s = stall_s
        self._lock = threading.Lock()

    def happens(self, share: float, what: str) -> bool:
        with self._lock:
            drawn = self.rng.random() < share
            self._counts[what] += drawn
        return drawn

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
        self._call("read")
        num = super().preadv(fd, buffers, offset)
        if num and self._mischief.happens(SPOILED, "disk reads spoiled on purpose"):
            spoiled, rng = self._mischief.rng.choice(buffers), self._mischief.rng
            spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        return num

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._call("write", lambda: super(UnreliableDisk, self).pwritev(fd, buffers[:1], offset))
        if self._mischief.happens(SPOILED, "disk writes lost on purpose"):
            if kept := buffers[: self._mischief.rng.randrange(len(buffers) + 1)]:
                super().pwritev(fd, kept, offset)
            return sum(len(buffer) for buffer in buffers)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._call("sync")
        super().fdatasync(fd)

    def _call(self, what: str, half: Callable[[], object] = lambda: None) -> None:
        """It may stall, or do `half` of it and fail."""
        self._mischief.stall(STALLED, "disk calls stalled on purpose")
        if self._mischief.happens(FAILED, "disk calls failed on purpose"):
            half()
            raise OSError(errno.EIO, f"this {what} was made to fail")


class UnreliableStore:
    """A `BlockStore` that mostly works like `inner`. `inner` has checked every block that it reports as
    done."""

    def __init__(self, inner: Any, mischief: Mischief) -> None:
        self._inner = inner
        self._mischief = mischief

    def __getattr__(self, name: str) -> Any:
        """What never fails on purpose: its name, a probe, usage, a close."""
        return getattr(self._inner, name)

    def find(self, keys: Sequence[bytes]) -> int:
        self._call()
        exaggerates = self._mischief.happens(EXAGGERATED, "store answers exaggerated on purpose")
        return len(keys) if exaggerates else self._inner.find(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self._call()
        outcomes: list[Outcome] = self._inner.read(keys, into)
        for place, works in enumerate(self._works(keys)):
            if not works:
                into[place][:] = bytes(len(into[place]))
                outcomes[place] = Outcome.FAILED
        return outcomes

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        self._call()
        works = self._works(keys)
        done = iter(
            self._inner.write(*(list(itertools.compress(all_, works)) for all_ in (keys, depths, blocks)))
        )
        return [next(done) if one else Outcome.FAILED for one in works]

    def persist(self) -> None:
        self._call()
        self._inner.persist()

    def reset(self) -> int:
        self._call()
        return self._inner.reset()

    def _call(self) -> None:
        self._mischief.stall(STALLED, "store calls stalled on purpose")
        if self._mischief.happens(DOWN, "store calls failed on purpose"):
            raise StoreFailed("the store was made to be down")

    def _works(self, keys: Sequence[bytes]) -> list[bool]:
        return [not self._mischief.happens(FAILED, "blocks of a store failed on purpose") for _ in keys]


def make_unreliable(engine: Engine, rng: random.Random, stall_s: float) -> Counter[str]:
    """Call before the engine's first step: nothing may be in flight. Returns the counters of faults."""
    counts: Counter[str] = Counter({COPIES_FAILED: 0, COPIES_STALLED: 0})

    def mischief() -> Mischief:
        return Mischief(counts, random.Random(rng.random()), stall_s)

    for mover in (engine.cache.loads.mover, engine.cache.saves.mover) if "host" in engine.kv.tiers else ():
        mover.copier = UnreliableCopier(mover.copier, mischief())
    for tier in engine.cache.cold_tiers.values():
        calls: Any = tier.calls
        if isinstance(calls.store, SsdStore):
            calls.store.directory.io = UnreliableDisk(mischief())
        else:
            calls.store = UnreliableStore(calls.store, mischief())
    return counts


class Disturber:
    """One thread that empties caches, waits for saves, reloads the adapter and reads figures, in no order."""

    def __init__(self, engine: Engine, adapters: list[Path], rng: random.Random) -> None:
        self.counts: Counter[str] = Counter(resets=0, flushes=0, reloads=0, refusals=0)
        self._engine = engine
        self._adapters = adapters
        self._rng = rng

    def run(self, stop: threading.Event) -> None:
        deeds = (self.reset, self.flush, self._both, self._reload, self._reload, self._engine.stats)
        with contextlib.suppress(EngineClosed):  # the engine has stopped, and says why itself
            while not stop.wait(self._rng.random() * DISTURBED_S):
                self._rng.choice(deeds)()

    def reset(self) -> None:
        tiers = tuple(tier for tier in self._engine.kv.tiers if tier != SHARED)
        self._try("resets", self._engine.kv.reset, self._rng.choice((*((tier,) for tier in tiers), tiers)))

    def flush(self) -> None:
        levels = ("captured", "visible", "persisted")[: 3 if self._engine.kv.tiers[2:] else 2]
        self._try("flushes", self._engine.kv.wait_flushed, self._rng.choice(levels), FLUSH_S)

    def _both(self) -> None:
        """A flush and a reset at once."""
        with ThreadPoolExecutor(1) as other:
            flushed = other.submit(self.flush)
            self.reset()
            flushed.result()

    def _try(self, what: str, call: Callable[..., object], *args: object) -> None:
        """A disk or store that fails on purpose says so to its callers."""
        try:
            call(*args)
        except StoreFailed:
            what = "refusals"
        self.counts[what] += 1

    def _reload(self) -> None:
        if self._adapters:
            self._engine.adapters.load(NAME, self._rng.choice(self._adapters))
            self.counts["reloads"] += 1


def write_adapters(folder: Path, config: ModelConfig, num: int, seed: int) -> list[Path]:
    """Random adapters in PEFT's files, one directory each."""
    parts = [part for weight in layout(config) if weight.name.endswith(_ADAPTED) for part in weight.parts]
    parts = [part for part in parts if "expert" not in part.name]
    modules = {part.name.removesuffix(".weight"): part.shape for part in parts}
    settings = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }
    written = [folder / f"adapter-{number}" for number in range(num)]
    for number, directory in enumerate(written):
        generator = torch.Generator().manual_seed(seed + number)
        tensors = {}
        for module, (num_out, num_in) in modules.items():
            for half, shape, scale in (("A", (_RANK, num_in), num_in**-0.5), ("B", (num_out, _RANK), 0.2)):
                name = f"base_model.model.{module}.lora_{half}.weight"
                tensors[name] = torch.randn(shape, generator=generator) * scale
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, directory / "adapter_model.safetensors")
    return written

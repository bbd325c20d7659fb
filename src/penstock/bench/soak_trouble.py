"""What disturbs an engine during a soak: copies that fail or stall, caches that are emptied, adapters that change. Owns the mischief."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.bench.run import SHARED
from penstock.bench.soak_crowd import NAME
from penstock.engine.engine import Engine, FlushLevel
from penstock.errors import EngineClosed, StoreFailed
from penstock.kv.transfer.mover import Copier, Layers, Slots
from penstock.models.model import ModelConfig
from penstock.models.registry import layout

FAILED = 0.03  # share of copies that fail halfway
STALLED = 0.01  # share of copies that take longer than anybody waits for them
PAUSE_S = 0.2  # at most, between two disturbances
FLUSH_S = 60.0
_RANK = 2
_ADAPTED = (".qkv", ".down")  # as the model calls them


class UnreliableCopier:
    """Copies as `inner` does, most of the time. Used by one lane, so it counts without a lock."""

    def __init__(self, inner: Copier, rng: random.Random, stall_s: float) -> None:
        self.num_failures = 0
        self.num_stalls = 0
        self._inner = inner
        self._rng = rng
        self._stall_s = stall_s

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        draw = self._rng.random()
        if draw < FAILED:
            self.num_failures += 1
            half = len(source_slots) // 2
            self._inner.copy(source_slots[:half], dest_slots[:half], layers)
            raise OSError("this copy was made to fail halfway")
        if draw < FAILED + STALLED:
            self.num_stalls += 1
            time.sleep(self._stall_s)
        self._inner.copy(source_slots, dest_slots, layers)


def make_unreliable(engine: Engine, rng: random.Random, stall_s: float) -> list[UnreliableCopier]:
    """Before the engine's first step: nothing may be in flight."""
    ladder = engine.cache.ladder
    copiers = []
    for mover in () if ladder is None else (ladder.promoter, ladder.demoter):
        mover.copier = UnreliableCopier(mover.copier, random.Random(rng.random()), stall_s)
        copiers.append(mover.copier)
    return copiers


class Disturber:
    """One thread that empties caches, waits for saves, reloads the adapter and reads figures, in no order."""

    def __init__(self, engine: Engine, adapters: list[Path], rng: random.Random) -> None:
        self.counts: Counter[str] = Counter(resets=0, flushes=0, reloads=0, refusals=0)
        self._engine = engine
        self._adapters = adapters
        self._rng = rng

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.wait(self._rng.random() * PAUSE_S):
                self._rng.choice((self._reset, self._flush, self._both, self._reload, self._reload, self._engine.stats))()
        except EngineClosed:
            return  # the engine has stopped, and says why itself

    def _reset(self) -> None:
        tiers = tuple(tier for tier in self._engine.tiers if tier != SHARED)
        with self._may_refuse():
            self._engine.reset_cache(self._rng.choice((*((tier,) for tier in tiers), tiers)))
            self.counts["resets"] += 1

    def _flush(self) -> None:
        levels: tuple[FlushLevel, ...] = ("captured", "visible", *(("persisted",) if self._engine.tiers[2:] else ()))
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
        """A disk or store that fails on purpose says so to whoever relies on it."""
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
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(_RANK, num_in, generator=generator) * num_in**-0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(num_out, _RANK, generator=generator) * 0.2
        directory = folder / f"adapter-{number}"
        directory.mkdir()
        settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": targets, "bias": "none"}
        (directory / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, directory / "adapter_model.safetensors")
        written.append(directory)
    return written

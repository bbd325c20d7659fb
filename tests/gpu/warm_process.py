"""An engine in a process of its own, warm, then one request of every kind: prints as JSON what was compiled,
allocated or imported under them. Run by `test_warm_cuda.py`."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from tests.cpu.engine.test_eagle_engine import write_random_eagle
from tests.cpu.engine.test_mtp_engine import model_of, with_head, write_random_head

from penstock.config import Config, LoraConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.models.registry import BUILT_IN
from tests.support.adapters import write_random_adapter
from tests.support.driving import run_all, submit, tiny_config
from tests.support.forced import forced

compiled: list[str] = []


def note(*_: Any, **what: Any) -> None:
    compiled.append(str(what.get("repr", what)))


def counts() -> dict[str, int]:
    """What only grows: pieces of device and of pinned memory that torch has asked the driver for."""
    return {
        "device": torch.cuda.memory_stats().get("num_device_alloc", 0),
        "pinned": torch.cuda.host_memory_stats().get("num_host_alloc", 0),
    }


class Kinds:
    """Requests of every kind, each with a prompt of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seed = 0
        self.prompt(1)  # what this does for the first time is not the engine's

    def prompt(self, length: int) -> list[int]:
        self.seed += 1
        return np.random.default_rng(self.seed).integers(1, 500, length).tolist()

    def ask(self, *lengths: int, **how: Any) -> None:
        for length in lengths:
            submit(self.engine, self.prompt(length), **{"max_tokens": 4, **how})
        run_all(self.engine)

    def sampled(self) -> None:
        for num in (1, 3, 9, 16):
            self.ask(*[30] * num, temperature=0.8, seed=1)
            self.ask(*[30] * num, temperature=0.8, seed=1, top_p=0.9)
            self.ask(*[30] * num, temperature=0.8, seed=1, top_k=7, min_p=0.1, logprobs=3)
            self.ask(*[30] * num, presence_penalty=0.5)
            self.ask(
                *[30] * num,
                repetition_penalty=1.3,
                frequency_penalty=0.1,
                temperature=0.9,
                seed=2,
                top_p=0.5,
                logprobs=20,
            )
            self.ask(*[30] * num, logprobs=0)

    def prompts(self) -> None:
        for lengths in ((1,), (40,), (600, 90, 300), (1100, 17, 1), (900, 900), (100, 1500, 20)):
            self.ask(*lengths)
        stem = self.prompt(1000)
        for more in (1, 300, 900):
            submit(self.engine, stem + self.prompt(more), max_tokens=2)
            run_all(self.engine)

    def echoed(self) -> None:
        for num in (0, 4, 20):
            self.ask(300, prompt_logprobs=num, logprobs=num)

    def adapted(self) -> None:
        adapter = self.engine.adapters.all()[0].adapter
        self.ask(50, adapter=adapter)
        self.ask(50, 300, 7, adapter=adapter)

    def returned(self) -> None:
        """From host memory: the device forgets, between two steps."""
        prompt = self.prompt(1200)
        for _ in range(2):
            submit(self.engine, prompt, max_tokens=3)
            run_all(self.engine)
            while self.engine.is_transferring():
                self.engine.step()
            self.engine.cache.reset(("device",))

    def drafted(self) -> None:
        """By a head: all along, and again after a while without drafts."""
        switch = forced(self.engine)
        for num in (1, 3, 9, 16):
            for how in (
                {},
                {"temperature": 0.8, "seed": 1},
                {"temperature": 0.8, "seed": 1, "top_p": 0.9, "logprobs": 3},
            ):
                switch.is_on = True
                found = [submit(self.engine, self.prompt(30), max_tokens=60, **how) for _ in range(num)]
                while len(found[0].tokens) < 50:
                    switch.is_on = not 10 < len(found[0].tokens) < 40
                    self.engine.step()
                run_all(self.engine)


HEADS = {"mtp": write_random_head, "eagle": write_random_eagle}


def config_of(dtype: str, scratch: Path, kind: str) -> Config:
    model = "tiny-qwen3.5" if kind == "hybrid" else "tiny-qwen3"
    config = tiny_config(model, device="cuda", host_blocks=512, prefill_chunk=1024, blocks=1024, max_batch=16)
    config = dataclasses.replace(config, source=dataclasses.replace(config.source, dtype=dtype))  # type: ignore[arg-type]
    if kind == "hybrid":  # takes no adapters
        return config
    adapter = write_random_adapter(scratch / "adapter", BUILT_IN[model], seed=3)
    config = dataclasses.replace(config, lora=LoraConfig((("other", str(adapter)),)))
    if kind in HEADS:
        plain = build(config)
        config = with_head(config, HEADS[kind](scratch / "head", model_of(plain)), kind)
        plain.close(timeout_s=30.0)
    return config


def main(dtype: str, scratch: Path, kind: str) -> None:
    triton.knobs.runtime.jit_cache_hook = note
    config = config_of(dtype, scratch, kind)
    engine = build(config)
    engine.warm()
    known = len(compiled)
    compiled.clear()
    kinds, found = Kinds(engine), {}
    names = ["prompts", "sampled", "echoed", "returned"]
    names += ["adapted"] * bool(config.lora.adapters) + ["drafted"] * (kind in HEADS)
    for name in names:
        gc.collect()
        before, modules = counts(), set(sys.modules)
        getattr(kinds, name)()
        after = counts()
        found[name] = {
            "compiled": compiled.copy(),
            "imported": sorted(set(sys.modules) - modules),
            **{memory: after[memory] - before[memory] for memory in after},
        }
        compiled.clear()
    engine.close(timeout_s=30.0)
    print(json.dumps({"compiled_before": known, "kinds": found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

"""Engines of several ranks in tests, and the processes that belong to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from penstock.config import Config, LoraConfig, RanksConfig, SanitizeConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.models.model import Split
from penstock.models.progress import Progress
from penstock.ranks.collectives import Collectives, process_group
from penstock.ranks.leader import Leader
from penstock.ranks.start import FOLLOWER, Led, Ranks
from tests.support.driving import tiny_config


def ranks_config(
    size: int,
    model: str = "tiny-qwen3",
    timeout_s: float = 30.0,
    directory: Path | None = None,
    lora: Path | None = None,
    **settings: Any,
) -> Config:
    """In float32, watched by a sanitizer that stops at its first finding. `directory`: of a model whose
    blocks are about as large as those of `model`; None: random weights. `lora`: of an adapter."""
    config = tiny_config(model, **settings)
    if directory is not None:
        source = replace(config.source, model=str(directory), load_format="auto")
        config = replace(config, source=source)
    ranks = RanksConfig(size, timeout_s) if size > 1 else RanksConfig()
    on_cpu = config.source.device == "cpu"
    source = replace(config.source, weights="float32" if on_cpu else "auto")
    if lora is not None:
        config = replace(config, lora=LoraConfig((("tuned", str(lora)),)))
    return replace(config, source=source, ranks=ranks, sanitize=SanitizeConfig("strict"))


def build_ranks(size: int, model: str = "tiny-qwen3", **settings: Any) -> Engine:
    return build(ranks_config(size, model, **settings))


def open_led_alone(backend: str) -> Callable[..., Ranks]:
    """In place of `penstock.ranks.start.open_ranks`: rank 0 of one, with every collective and message."""

    def opened(config: Config, num_devices: int, progress: Progress) -> Ranks:
        split = Split(0, 1)
        store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        leader = Leader([], 30.0)
        group = process_group(store, split, 30.0, backend, "127.0.0.1")
        return Led(leader, Collectives(group, split, leader.why), contextlib.ExitStack())

    return opened


def other_ranks() -> list[psutil.Process]:
    """Processes of this one's engines."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and FOLLOWER in child.cmdline()
    ]

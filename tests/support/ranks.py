"""Engines of several ranks in tests, and the processes that belong to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil

from penstock.config import Config, RanksConfig, SanitizeConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.ranks.start import FOLLOWER
from tests.support.driving import tiny_config


def ranks_config(size: int, model: str = "tiny-qwen3", timeout_s: float = 30.0, **settings: Any) -> Config:
    """In float32, watched by a sanitizer that stops at its first finding."""
    config = tiny_config(model, **settings)
    ranks = RanksConfig(size, timeout_s) if size > 1 else RanksConfig()
    source = replace(config.source, weights="float32")
    return replace(config, source=source, ranks=ranks, sanitize=SanitizeConfig("strict"))


def build_ranks(size: int, model: str = "tiny-qwen3", **settings: Any) -> Engine:
    return build(ranks_config(size, model, **settings))


def other_ranks() -> list[psutil.Process]:
    """Processes of this one's engines."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and FOLLOWER in child.cmdline()
    ]

"""Engines under the sanitizer: built with it listening, closed with nothing to report. Owns the pairing, not the engine."""

from __future__ import annotations

from penstock.config import Config
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.sanitizer.sanitizer import Sanitizer


def build_sanitized(config: Config) -> tuple[Engine, Sanitizer]:
    sanitizer = Sanitizer()
    return build(config, sanitizer=sanitizer), sanitizer


def check_silent(*sanitizers: Sanitizer) -> None:
    told = [str(report) for sanitizer in sanitizers for report in sanitizer.reports]
    assert not told, "the sanitizer reports:\n" + "\n".join(told)

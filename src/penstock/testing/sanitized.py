"""Engines under the sanitizer: built with it, and closed without findings. Owns the pairing, not the
engine."""

from __future__ import annotations

import dataclasses

from penstock.config import Config, SanitizeConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.observe import Observers
from penstock.sanitizer.sanitizer import Sanitizer


def build_sanitized(config: Config, observers: Observers | None = None) -> tuple[Engine, Sanitizer]:
    """In checked mode: slots are poisoned before they are written, and blocks compared when they return."""
    sanitizer = Sanitizer()
    checked = dataclasses.replace(config, sanitize=SanitizeConfig("report", check_bytes=True))
    return build(checked, sanitizer=sanitizer, observers=observers or Observers()), sanitizer


def check_silent(*sanitizers: Sanitizer) -> None:
    told = [str(report) for sanitizer in sanitizers for report in sanitizer.reports]
    assert not told, "the sanitizer reports:\n" + "\n".join(told)

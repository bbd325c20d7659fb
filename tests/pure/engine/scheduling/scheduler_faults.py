"""Schedulers with one defect each, to show that the tests see it."""
from __future__ import annotations

from penstock.engine.scheduling.scheduler import Scheduler
FAULTS: list[type[Scheduler]] = []

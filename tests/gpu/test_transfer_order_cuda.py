"""The same order of steps and copies on CUDA: a lane sleeps on the device, so no host thread can hide a
missing wait.

Holds invariant 1: a save is not ahead of the step. Holds invariant 3: a step waits for its own load. Holds
invariant 4: an eager step begins under it, a neighbour does not wait. Holds invariant 7: a save pins its
slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_transfer_order import *  # noqa: F403
from tests.cpu.engine.test_transfer_order import OrderRig

from penstock.config import SanitizeConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import check_silent
from tests.support.driving import tiny_config

pytestmark = pytest.mark.gpu
__all__ = ["prompts", "rig"]

SLEEP_CYCLES = 4_000_000_000  # two seconds of device time or so


class CudaOrderRig(OrderRig):
    """Holds streams: they sleep, and nothing can let them go on early."""

    def pause(self) -> None:
        if not self._let.is_set():
            torch.cuda._sleep(SLEEP_CYCLES)

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record()
        return event.query


@pytest.fixture
def rig() -> Iterator[CudaOrderRig]:
    """Its engines compare no bytes: a launcher that does waits for the device."""
    made: list[tuple[Engine, Sanitizer]] = []

    def make(**settings: Any) -> Engine:
        sanitizer = Sanitizer()
        config = dataclasses.replace(
            tiny_config(device="cuda", **settings), sanitize=SanitizeConfig("report", check_bytes=False)
        )
        made.append((build(config, sanitizer=sanitizer), sanitizer))
        return made[-1][0]

    yield CudaOrderRig(make)
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)

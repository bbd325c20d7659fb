"""Speculation that verifies as many drafts as a test says, at any cost, and that a test turns on and off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from penstock.engine.engine import Engine
from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.stages import RunningRequest
from penstock.speculation.drafter import DeviceDrafter, NgramDrafter


class ForcedDevice(DeviceDrafter):
    is_on = True
    num: Callable[[int], int]

    @property
    def num_ahead(self) -> int:
        return super().num_ahead if self.is_on else 0

    def considers(self, num_requests: int) -> bool:
        return self.is_on and not self._has_failed()

    def wants(self, running: RunningRequest) -> bool:
        return running.num_pending > 0

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        nums = [self.num(min(one.most, one.num_pending, self._max_drafts)) for one in requests]
        return [tuple(range(-2, -2 - num, -1)) for num in nums]


class ForcedNgram(NgramDrafter):
    is_on = True
    num: Callable[[int], int]

    def considers(self, num_requests: int) -> bool:
        return self.is_on

    def wants(self, running: RunningRequest) -> bool:
        request = self._requests.get(running.request.id)
        return request is not None and request.due < sys.maxsize

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        guesses = (self._guess(one) for one in requests)
        return [guess[: self.num(len(guess))] for guess in guesses]


def forced(engine: Engine, num: Callable[[int], int] = lambda most: most, is_on: bool = True) -> Any:
    """That of `engine`: it verifies `num` of the drafts that there are, while it `is_on`."""
    speculation: Any = engine.parts.speculation
    speculation.__class__ = ForcedDevice if isinstance(speculation, DeviceDrafter) else ForcedNgram
    speculation.num, speculation.is_on = num, is_on
    return speculation

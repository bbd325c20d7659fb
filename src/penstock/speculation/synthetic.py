"""Drafters that always have the most drafts verified, for `penstock bench drafts` alone."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.stages import RunningRequest
from penstock.speculation.drafter import DeviceDrafter, NgramDrafter


class EveryDeviceDraft(DeviceDrafter):
    """All drafts that the device makes."""

    def considers(self, num_requests: int) -> bool:
        return not self._has_failed()

    def wants(self, running: RunningRequest) -> bool:
        return running.num_pending > 0

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        nums = (min(one.most, one.num_pending, self._max_drafts) for one in requests)
        return [tuple(range(-2, -2 - num, -1)) for num in nums]


class MadeUpDrafts(NgramDrafter):
    """Looks nothing up: random prompts have nothing to find."""

    def wants(self, running: RunningRequest) -> bool:
        return True

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        return [(1,) * min(one.most, self._max_drafts) for one in requests]

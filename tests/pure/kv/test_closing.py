"""Closing a cache and its tiers: what has nothing to do gets a moment to end, and memory is given back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.kv import cache as cache_module
from penstock.kv.memory import HostMemory
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import KEYS, Rig


def test_all_tiers_together_have_the_time_that_closing_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, now, given = Stacked("ssd", "remote"), [0.0], list[float]()
    monkeypatch.setattr(cache_module.time, "monotonic", lambda: now[0])

    def close(timeout_s: float) -> None:
        given.append(timeout_s)
        now[0] += 4.0

    parts = (rig.cache.saves.mover, rig.cache.loads.mover, *rig.cache.cold_tiers.values())
    closed = [part.close for part in parts]
    monkeypatch.setattr(rig.cache, "drain", lambda timeout_s: None)
    for part in parts:
        monkeypatch.setattr(part, "close", close)
    rig.cache.close(10.0)
    assert given == [10.0, 6.0, 2.0, 1.0], "and a moment where nothing is left"
    monkeypatch.undo()
    for ends in closed:
        ends(1.0)


class Memory:
    """An arena that is ready at once, and knows whether it is closed."""

    closed = False

    def prepare(
        self, ready: Callable[[range], None], progress: Callable[[int, int], None], stop: Callable[[], bool]
    ) -> None:
        ready(range(16))

    def close(self) -> None:
        self.closed = True


def test_host_memory_is_given_back_with_the_tier_over_it() -> None:
    rig, arena = Rig(), Memory()
    rig.host.memory = HostMemory(arena, rig.host.ready)
    rig.save(KEYS[:2]).end()
    assert not arena.closed
    rig.close()
    assert arena.closed

"""Requests of several windows each, over host memory and what is behind it, in any order of events: a step
has every block that its tokens see, and what is promised can be drawn."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import walk_and_shorten

NUM_WALKS = 40
WANTED = (
    "step without what left the window",
    "match without what left the window",
    "left the window while it is saved",
    "left the window while others have it",
    "left the window and is found",
    "load of a window",
    "load behind a part of a window",
    "retraction",
    "resume with its tail",
    "slot reused under a fence",
    "failed step",
    "cancelled while running",
)


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


@pytest.mark.parametrize("behind", [False, True], ids=["host", "cold"])
def test_requests_with_windows_read_the_right_blocks_in_any_order_of_events(behind: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk_and_shorten(seed, behind, windowed=True)
    assert [name for name in WANTED if not seen[name]] == [], "the walks did not meet what this test is about"

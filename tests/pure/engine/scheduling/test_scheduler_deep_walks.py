"""Requests larger than what they may have on the device, beside others, over host memory and what is behind
it, in any order of events: every block that a step reads is the right one, wherever it is; and faults that
this must notice."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import walk_and_shorten

NUM_WALKS = 80
WANTED = (
    "deep step",
    "step that reads host memory",
    "paged out",
    "paged out in part",
    "paged out what others have",
    "deep match in host memory",
    "what matched of a deep request has gone",
    "retraction",
    "deep request that was retracted",
    "slot reused under a fence",
    "failed step",
    "cancelled while running",
)


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


@pytest.mark.parametrize("behind", [False, True], ids=["host", "cold"])
def test_deep_requests_read_the_right_blocks_in_any_order_of_events(behind: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk_and_shorten(seed, behind, deep=True)
    assert [name for name in WANTED if not seen[name]] == [], "the walks did not meet what this test is about"

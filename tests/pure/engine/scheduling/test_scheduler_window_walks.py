"""Requests of several windows each, over host memory and what is behind it, in any order of events: a step
has every block that its tokens see, and what is promised can be drawn."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import LONG, walk_and_shorten
from tests.pure.engine.scheduling.scheduler_world import World

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


@pytest.mark.parametrize("num_slots", [14, 17, 20, 23])
def test_requests_that_share_a_window_can_draw_their_own_when_they_part(num_slots: int) -> None:
    """The shared blocks leave the window of each; until then they are in memory once."""
    window = 4 * BLOCK
    world = World(num_slots=num_slots, prefill_chunk=BLOCK, window=window)
    stem = LONG[0][:window]
    world.submit(stem, max_tokens=1, ignore_eos=True)
    while world.step():
        pass
    for token in range(4):
        world.submit([*stem, token], max_tokens=30, ignore_eos=True)
    world.close()
    assert world.seen["match without what left the window"] == 0 and world.seen["partial match"] >= 4
    assert world.seen["left the window while others have it"] > 0 and not world.seen["retraction"]

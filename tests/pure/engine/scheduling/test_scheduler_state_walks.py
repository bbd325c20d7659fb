"""Requests of a model with recurrent layers, over host memory, in any order of events: each chunk runs
through the state of exactly the tokens before it, and every kept state is what its key says."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.engine.scheduling.boundaries import AtBoundaries
from penstock.engine.scheduling.placement import Placement
from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import walk_and_shorten

NUM_WALKS = 40
WANTED = ("promotion", "retraction", "failed step", "cancelled while running", "partial match")


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


def walk_all() -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk_and_shorten(seed, stateful=True)
    return seen


# Holds invariant 15a: no request begins where a block or the state is missing.
def test_requests_run_through_the_states_of_their_own_tokens_in_any_order_of_events() -> None:
    seen = walk_all()
    assert [name for name in WANTED if not seen[name]] == [], "the walks did not meet what this test is about"


@pytest.mark.parametrize("fault", ["usable_keys", "divides"])
def test_the_walks_notice(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state behind the last token, or a request that continues where a load ended."""
    monkeypatch.setattr(AtBoundaries, fault, getattr(Placement, fault))
    with pytest.raises(AssertionError):
        walk_all()

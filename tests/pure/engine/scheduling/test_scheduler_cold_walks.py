"""The scheduler over a disk and a store behind the host tier in any order of events: reads that are slow,
short or fail, stores that lose, damage, refuse and die; and faults that this must notice.

Sources sum to the prompt and name the tiers that had it. Where a load ended short exactly the rest is
computed. Nobody hangs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pure.engine.scheduling.cold_faults import WALKED, Fault
from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import choose, walk, walk_and_shorten

NUM_WALKS = 120
RARE = (654,)  # walks that meet what few others do: a part of a load that fails while a later one lands
WANTED = (
    "cold load",
    "promotion",
    "cold load that ended short",
    "cold load that brought nothing",
    "step over a load",
    "step without its load",
    "retraction",
    "retracted while loading",
    "cancelled while loading",
    "full match",
    "partial match",
    "prefetch",
    "promotion of what was fetched",
)


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


def test_the_scheduler_keeps_its_promises_over_cold_tiers_in_any_order_of_events() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk_and_shorten(seed, behind=True)
    assert [name for name in WANTED if not seen[name]] == [], "the walks did not meet what this test is about"


@pytest.mark.parametrize("fault", WALKED, ids=lambda fault: fault.__name__)
def test_a_walk_notices_a_defect_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in (*RARE, *range(2 * NUM_WALKS)):
        try:
            walk(*choose(seed, behind=True))
        except AttributeError:
            raise  # the defect itself is out of date
        except Exception:
            return
    pytest.fail(f"{2 * NUM_WALKS} walks went well with a defect that {fault.__name__}")

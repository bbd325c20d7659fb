"""The scheduler over a host tier in any order of events: submits, steps, cancels and failures, while
transfers are launched, land, fail and are late; and faults that this must notice."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from penstock.engine.scheduling.scheduler import Scheduler
from tests.pure.engine.scheduling import scheduler_walks
from tests.pure.engine.scheduling.scheduler_faults import FAULTS
from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import choose, walk, walk_and_shorten
from tests.pure.engine.scheduling.scheduler_world import World
from tests.pure.engine.scheduling.tier_faults import WALKED, Fault

NUM_WALKS = 150
WANTED = (
    "promotion",
    "step over a load",
    "step without its load",
    "retraction",
    "retracted while loading",
    "resume with its tail",
    "resume inside the prompt",
    "resume with tokens",
    "full match",
    "partial match",
    "cancelled while loading",
    "cancelled while retracted",
    "cancelled while running",
    "cancelled while waiting",
    "slot reused under a fence",
    "failed step",
)


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


# Holds invariant 1: what saves before its step has ended is noticed below.
# Holds invariant 7: so is what takes slots from a transfer, cancelled or late.
# Holds invariant 12: a load that fails leaves no lease.
# Holds invariant 16: pools add up after every event.
# Holds invariant 17: promises can be kept after every event.
# Holds invariant 18: blocks that are restored count once.
# Holds invariant 20: a cancel works in every state.
# Holds invariant 24: requests end as if the host tier had room.
# Holds invariant 21: a request that scores its prompt uses nothing that is cached.
def test_the_scheduler_keeps_its_promises_over_a_host_tier_in_any_order_of_events() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk_and_shorten(seed)
    assert [name for name in WANTED if not seen[name]] == [], "the walks did not meet what this test is about"


def assert_noticed(name: str) -> None:
    for seed in range(2 * NUM_WALKS):
        try:
            walk(*choose(seed))
        except AttributeError:
            raise  # the defect itself is out of date
        except Exception:
            return
    pytest.fail(f"{2 * NUM_WALKS} walks went well with a defect: {name}")


@pytest.mark.parametrize("fault", WALKED, ids=lambda fault: fault.__name__)
def test_a_walk_notices_a_defect_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert_noticed(fault.__name__)


# Holds invariant 14: a full match computes one token, and writes nothing.
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_walk_notices_a_scheduler_that(fault: type[Scheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_walks, "World", partial(World, make=fault))
    assert_noticed(fault.__name__)

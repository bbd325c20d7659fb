"""The scheduler over a host tier in any order of events: submits, steps, cancels and failures, while
transfers are launched, land, fail and are late; and faults that this must notice."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import choose, walk, walk_and_shorten
from tests.pure.engine.scheduling.tier_faults import WALKED, Fault, ends_requests_whose_load_failed

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
# Holds invariant 16: pools add up after every event.
# Holds invariant 17: promises can be kept after every event.
# Holds invariant 18: blocks that are restored count once.
# Holds invariant 20: a cancel works in every state.
# Holds invariant 21: a request that scores its prompt uses nothing that is cached.
def test_the_scheduler_keeps_its_promises_over_a_host_tier_in_any_order_of_events() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk_and_shorten(seed)
    assert [name for name in WANTED if not seen[name]] == [], "the walks did not meet what this test is about"


@pytest.mark.parametrize("fault", WALKED, ids=lambda fault: fault.__name__)
def test_a_walk_notices_a_defect_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in range(2 * NUM_WALKS):
        try:
            walk(*choose(seed))
        except AttributeError:
            raise  # the defect itself is out of date
        except Exception:
            return
    pytest.fail(f"{2 * NUM_WALKS} walks went well with a defect that {fault.__name__}")


def test_a_walk_that_fails_is_told_by_as_few_events_as_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_requests_whose_load_failed(monkeypatch)
    failed = None
    for seed in range(NUM_WALKS):
        try:
            walk_and_shorten(seed)
        except Exception as error:
            failed = error
            break
    assert failed is not None
    head, *events = failed.__notes__
    assert head.startswith("walk ") and 0 < len(events) < len(choose(seed)[1])

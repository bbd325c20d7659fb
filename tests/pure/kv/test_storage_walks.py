"""Device, host, disk and store in any order of events: bytes, books and promises hold; and faults that this
must notice."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pure.kv.storage_faults import FAULTS, Fault
from tests.pure.kv.storage_walks import choose, walk, walk_and_shorten

NUM_WALKS = 150
WANTED = (
    "cold load",
    "came",
    "ended short",
    "part of it under way",
    "pending",
    "cancelled while loading",
    "persisted",
    "fetched",
    "fetched in part",
    "cold load that shares a fetch",
    "room is being made",
)


def test_bytes_books_and_promises_hold_in_any_order_of_events() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk_and_shorten(seed)
    assert [name for name in WANTED if not seen[name]] == [], "the walks did not meet what this test is about"


def test_they_hold_for_blocks_that_leave_windows() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk_and_shorten(seed, windowed=True)
    wanted = (
        "match of a window",
        "left the window",
        "left the window while it is saved",
        "came",
        "ended short",
        "pending",
    )
    assert [name for name in wanted if not seen[name]] == [], "the walks did not meet what this test is about"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_walk_notices_a_defect_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in range(2 * NUM_WALKS):
        try:
            walk(*choose(seed))
        except Exception:
            return
    pytest.fail(f"{2 * NUM_WALKS} walks went well with a defect that {fault.__name__}")

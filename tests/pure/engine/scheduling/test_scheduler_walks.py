"""The scheduler over a host tier, over cold tiers, and with requests that do not fit on the device, in any
order of events: submits, steps, cancels and failures, while transfers are launched, land, fail and are late;
and faults that this must notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import choose, walk, walk_and_shorten
from tests.pure.engine.scheduling.walk_faults import WALKED, WALKED_COLD, Fault

LOADS = {"promotion", "step over a load", "step without its load", "retraction", "retracted while loading"}
MATCHES = {"full match", "partial match", "cancelled while loading"}


class Walks(NamedTuple):
    """Some seeds, what the walks are over, and what they have to meet."""

    num: int
    wanted: Iterable[str]
    cold: bool = False
    deep: bool = False


DEEP = {"deep step", "step that reads host memory", "paged out", "paged out in part"}
DEEP |= {"paged out what others have", "deep match in host memory", "retraction"}
DEEP |= {"what matched of a deep request has gone"}
DEEP |= {"slot reused under a fence", "failed step", "cancelled while running"}
KINDS = {
    "host": Walks(
        150,
        LOADS
        | MATCHES
        | {"resume with its tail", "resume inside the prompt", "resume with tokens", "failed step"}
        | {
            "slot reused under a fence",
            *(f"cancelled while {s}" for s in ("retracted", "running", "waiting")),
        },
    ),
    "cold": Walks(
        100,
        LOADS
        | MATCHES
        | {"cold load", "cold load that ended short", "cold load that brought nothing", "prefetch"}
        | {"promotion of what was fetched"},
        cold=True,
    ),
    "deep": Walks(50, DEEP | {"deep request that was retracted"}, deep=True),
    "deep and cold": Walks(50, DEEP, cold=True, deep=True),
}
RARE = (654,)  # walks that meet what few others do: a part of a load that fails while a later one lands


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


# Holds invariant 1: what saves before its step has ended is noticed below.
# Holds invariant 7: so is what takes slots from a transfer, cancelled or late.
# Holds invariant 12: a load that fails leaves no lease.
# Holds invariant 14: a full match computes one token, and writes nothing.
# Holds invariant 16: pools add up after every event.
# Holds invariant 17: promises can be kept after every event.
# Holds invariant 18: blocks that are restored count once.
# Holds invariant 20: a cancel works in every state.
# Holds invariant 21: a request that scores its prompt uses nothing that is cached.
# Holds invariant 24: requests end as if the host tier had room.
@pytest.mark.parametrize("walks", KINDS.values(), ids=KINDS)
def test_the_scheduler_keeps_its_promises_in_any_order_of_events(walks: Walks) -> None:
    seen: Counter[str] = Counter()
    for seed in range(walks.num):
        seen += walk_and_shorten(seed, walks.cold, walks.deep)
    assert [name for name in walks.wanted if not seen[name]] == [], (
        "the walks did not meet what this test is about"
    )


@pytest.mark.parametrize("fault", [*WALKED, *WALKED_COLD], ids=lambda fault: fault.__name__)
def test_a_walk_notices_a_defect_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    cold = fault in WALKED_COLD
    for seed in (*(RARE if cold else ()), *range(300)):
        try:
            walk(*choose(seed, cold))
        except AttributeError:
            raise  # the defect itself is out of date
        except Exception:
            return
    pytest.fail(f"300 walks went well with a defect: {fault.__name__}")

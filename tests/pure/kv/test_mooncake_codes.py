"""What Mooncake's answers to a write mean. A block that another engine has written meanwhile is there, and
that is all that was wanted."""

from __future__ import annotations

import pytest

from penstock.kv.tiers.remote.mooncake import MooncakeStore, parse_address
from penstock.kv.tiers.store import Outcome, Space


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, Outcome.DONE),
        (-705, Outcome.DONE),  # there already
        (-200, Outcome.FULL),
        (-1700, Outcome.FULL),
        (-706, Outcome.FAILED),
        (-800, Outcome.FAILED),  # a transfer that failed
    ],
)
def test_each_code_of_a_write_has_its_outcome(code: int, outcome: Outcome) -> None:
    # connects when it is used
    store = MooncakeStore(parse_address("mooncake://127.0.0.1:1"), Space(b"s" * 32, 4096), 1.0)
    try:
        assert store._written(code) is outcome
    finally:
        store.close()

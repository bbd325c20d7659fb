"""What loading and computing are taken to cost where they are weighed: tokens, not blocks, and with all that
is ahead on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.kv.tiers.calls import Way
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK, KEYS, LAYOUT, Rig, leased

FOUR = 4  # blocks
# of these, where each token costs a millisecond, and one for each before it
COMPUTE_S = FOUR * BLOCK * (1e-3 + 1e-3 * FOUR / 2 * BLOCK)
LOAD_S = 0.7 * COMPUTE_S


def measured(rig: Rig) -> None:
    """A token at depth d takes 1 + d milliseconds, and nothing is loaded unasked."""
    rig.set_limits(replace(rig.saves.limits, load_always=False))
    for depth in (0, 100):
        rig.loads.costs.prefill.add(BLOCK, depth, BLOCK * 1e-3 * (1 + depth))
    assert rig.loads.costs.prefill.seconds(FOUR * BLOCK, FOUR / 2 * BLOCK) == pytest.approx(COMPUTE_S)


def test_a_load_is_weighed_against_tokens_as_deep_as_they_lie() -> None:
    rig = Rig()
    rig.save(KEYS[:FOUR]).end()
    measured(rig)
    rig.loads.costs.link.add(FOUR * LAYOUT.block_bytes, LOAD_S)
    lease = leased(rig, KEYS[:FOUR])
    assert rig.loads.worth(lease, 0) == FOUR
    lease.end()
    rig.close()


def test_what_others_are_reading_already_counts_in_the_time_of_a_load() -> None:
    rig = Stacked("ssd")
    for name in "ab":
        rig.remembered(FOUR, name, ["ssd"])
    measured(rig)
    tier = rig.tiers["ssd"]
    tier.counts.rate.bytes_per_s = FOUR * LAYOUT.block_bytes / LOAD_S
    lease = rig.cache.lease("second", rig.prefix(FOUR, "b"))
    assert lease is not None and rig.loads.worth(lease, 0) == FOUR
    table, _ = rig.load(FOUR, "a")
    assert tier.counts.queued_bytes[Way.READ] > 0 and rig.loads.worth(lease, 0) == 0
    lease.end()
    rig.flow()
    rig.end(table)

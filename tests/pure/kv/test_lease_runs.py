"""What a lease says it has, asked from several places of the prompt one after the other: no answer is another question's."""

from __future__ import annotations

from stacked_rig import Stacked

from penstock.kv.tiers.host import HostLease


def test_a_lease_is_asked_from_another_block_than_before() -> None:
    rig = Stacked("ssd")
    rig.remembered(4, tiers=["ssd"])
    lease = rig.cache.lease("request", rig.prefix(4))
    assert isinstance(lease, HostLease)
    for block in (0, 3, 1, 4, 0):
        left = 4 - block
        assert lease.runs_from(block) == ([("ssd", left)] if left else []) and lease.num_from(block) == left
    lease.end()
    rig.end()

"""What is easily left out at the edges of a cold tier: how its store's close ended, how often a store is
looked at that is rarely looked at anyway, questions that come while others are put away, and how long a store
is waited for behind what is there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.errors import InvariantBroken, StoreFailed
from penstock.kv.tiers.host import HostLease
from penstock.kv.tiers.store import Outcome
from tests.pure.kv.cold_rig import KEYS, SOON_S, Make, make
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK
from tests.pure.kv.test_load_times import measured

__all__ = ["make"]


@pytest.mark.parametrize("error", [InvariantBroken("it was written to behind its end"), OSError("bad")])
@pytest.mark.parametrize("local", [True, False])
def test_a_store_whose_close_goes_wrong_is_told_by_whoever_closes_its_tier(
    make: Make, local: bool, error: Exception
) -> None:
    """Only a store that does not answer is left with a warning: nobody needs it any more."""
    rig = make(local=local)
    rig.store.raises = error
    for _ in range(2):
        with pytest.raises(type(error)):
            rig.tier.close(SOON_S)
    assert rig.store.calls == ["close"] and not rig.tier.usable


def test_a_defect_of_ours_is_the_error_of_a_write_also_where_the_store_failed_before_it(make: Make) -> None:
    """Two groups of one write go wrong at once: it is told what must be mended, not what goes away by
    itself."""
    rig = make()
    together = threading.Barrier(2)

    def write(keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        together.wait(SOON_S)
        raise StoreFailed("it is away") if keys[0] == KEYS[0] else InvariantBroken("nobody should come here")

    rig.store.write = write  # type: ignore[method-assign]
    writing = rig.submit_write(KEYS[:4])
    assert writing is not None and len(writing.groups) == 2
    with pytest.raises(InvariantBroken, match="nobody should"):
        rig.settle()
    assert (
        rig.settle() == [writing] and isinstance(writing.error, InvariantBroken) and writing.done_keys == []
    )


@pytest.mark.parametrize(("on_device", "in_host"), [(0, 0), (2, 0), (0, 2), (1, 2)])
def test_a_store_is_waited_for_as_long_as_what_it_may_have_takes_where_it_lies(
    on_device: int, in_host: int
) -> None:
    """Tokens behind others are dearer: who has much already may wait longer for the same number of blocks."""
    rig = Stacked("remote")
    num_there, num_asked = on_device + in_host, 4
    tables = []
    if num_there:
        rig.remembered(num_there)
        rig.stores["remote"].lose()
        if on_device:
            table, _ = rig.promote_all(on_device)
            rig.flow()
            tables.append(table)
        rig.host.forget(rig.keys(on_device))
    measured(rig)
    lease = rig.cache.lease("request", rig.prefix(num_there + num_asked))
    assert isinstance(lease, HostLease) and list(lease.parts[0].blocks) == list(
        range(num_there, num_there + num_asked)
    )
    depth = (num_there + num_asked / 2) * BLOCK
    expected = num_asked * BLOCK * 1e-3 * (1 + depth)
    assert lease.parts[0].finding.deadline_s - rig.clock() == pytest.approx(min(1.0, expected))
    lease.end()
    rig.flow()
    rig.end(*tables)


def test_a_store_is_not_waited_for_longer_than_a_second_however_long_computing_takes() -> None:
    rig = Stacked("remote")
    rig.set_limits(replace(rig.saves.limits, load_always=False))
    rig.loads.costs.prefill.add(BLOCK, 0.0, 100.0)
    lease = rig.cache.lease("request", rig.prefix(4))
    assert isinstance(lease, HostLease) and lease.parts[0].finding.deadline_s - rig.clock() == pytest.approx(
        1.0
    )
    lease.end()
    rig.flow()
    rig.end()

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

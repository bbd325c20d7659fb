"""The host tier used by several threads at once: nothing is lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from penstock.kv.tiers.host import ABSENT, Displaces
from tests.pure.kv.test_host_tier import KEYS, new_tier


def test_threads_that_lease_take_and_land_at_once_lose_nothing() -> None:
    tier = new_tier(num_slots=12)
    failures: list[BaseException] = []

    def run(work: Callable[[int], None]) -> None:
        try:
            start.wait(30.0)
            for turn in range(200):
                work(turn)
        except BaseException as error:
            failures.append(error)

    def lease(turn: int) -> None:
        """Callers of `submit`."""
        keys = [KEYS[(turn + i) % 20] for i in range(6)]
        lease = tier.lease(keys, "request")
        if lease is not None:
            with tier.pool.lock:
                lease.refresh()
                there = tier.pool.find_each(keys)
            assert all(slot in (ABSENT, found) for slot, found in zip(lease.slots, there, strict=True)), (
                "it has gone, and nobody says so"
            )
            lease.end()

    def write(turn: int) -> None:
        """The launcher takes, the engine's thread lands; here one after the other."""
        taken = tier.take([KEYS[(3 * turn + i) % 20] for i in range(4)], range(4), "demote")
        (tier.land if turn % 5 else tier.drop)(taken)

    def look(turn: int) -> None:
        assert sum(tier.pool.counts) == tier.num_slots
        tier.pool.check()

    def claim(turn: int) -> None:
        """The engine's thread admits: what it has claimed is where it was when its request was matched,
        whatever the launcher takes."""
        keys = [KEYS[(2 * turn + i) % 20] for i in range(5)]
        lease = tier.lease(keys, "request")
        if lease is None:
            return
        lease.refresh()
        matched = lease.slots
        if lease.claim(0, 5):
            with tier.pool.lock:
                there = tier.pool.find_each(keys)
            assert all(slot in (ABSENT, found) for slot, found in zip(matched, there, strict=True)), (
                "a claimed block has gone"
            )
            num_claimed.append(1)
        else:
            with tier.pool.lock:
                assert lease._handles == [], "a claim that fails pins nothing"
        lease.end()

    def load(turn: int) -> None:
        """Somebody who has a table takes what others want."""
        tier.land(
            tier.take(
                [KEYS[(7 * turn + i) % 20] for i in range(6)], range(6), "cold load", Displaces.ANYTHING
            )
        )

    num_claimed: list[int] = []
    load(0)
    claim(0)  # once where nobody is in its way; how often later on is a matter of luck
    assert num_claimed
    works = (lease, lease, claim, write, load, look)
    start = threading.Barrier(len(works))
    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads) and failures == []
    tier.pool.check()
    assert len(tier.leases) == 0 and tier.counts.landed > 0
    assert tier.pool.num_unwanted == tier.num_slots, "nobody wants anything any more"
    tier.close()

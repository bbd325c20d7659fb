"""The host tier used by several threads at once: every use of its pool is under its lock, and nothing is
lost."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

import pytest

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.host import ABSENT, Displaces, HostLease, HostTier
from tests.pure.kv.test_host_tier import BLOCK, KEYS, LEASE_S, Clock, fill, leased, new_tier, taken

GUARDED = {
    "find",
    "find_each",
    "pin",
    "hold",
    "seal",
    "try_reserve",
    "evict",
    "take_back",
    "commit",
    "counts",
    "check",
}
GUARDED |= {"want", "end_want", "gone_of", "protects", "forget_idle", "forget", "note_hits"}


class LockedPool(BlockPool):
    """Every use of it is under the tier's lock."""

    lock: threading.Lock | None = None

    def __getattribute__(self, name: str) -> object:
        lock = object.__getattribute__(self, "lock")
        if lock is not None and name in GUARDED:
            assert lock.locked(), f"{name} of the pool is used without the lock"
        return object.__getattribute__(self, name)


def every_use_is_under_the_lock(tier: HostTier, pool: LockedPool) -> None:
    pool.lock = tier._lock
    fill(tier, KEYS[:3])
    lease, other, third = leased(tier, KEYS[:2]), leased(tier, KEYS[:2]), leased(tier, KEYS[:2])
    tier.refresh(lease)
    kept = tier.take_lease(lease)
    tier.end_handles(kept or ())
    other.end()
    tier.claim(third, 0, 2)
    third.end()
    want = tier.want(KEYS[:3], 1.0)
    tier.end_want(tier.want(KEYS[:3], 1.0, want))
    tier.give_way(KEYS[2:3], 1)
    tier.absent(KEYS[:3])
    tier.drop(taken(tier, KEYS[5:6]))
    private = tier.take_private(1, "retract")
    saved = HostLease(tier, "request", [], 0)
    tier.keep(saved, *([private] if private is not None else []))
    saved.deadline_s = 0.0
    tier.expire()
    _, pin = tier.pin_each(KEYS[:1], "retract")
    tier.end_handles([pin] if pin is not None else [])
    assert sum(tier.slots) == tier.num_slots
    tier.check()
    tier.reset()
    tier.close()


def test_every_use_of_the_pool_is_under_the_lock() -> None:
    pool = LockedPool(8, "host")
    every_use_is_under_the_lock(HostTier(pool, BLOCK, LEASE_S, Clock()), pool)


METHODS = ["lease", "take", "land", "drop", "end_lease", "end_handles", "take_private", "pin_each", "reset"]
METHODS += ["refresh", "claim", "want", "end_want", "give_way", "absent", "take_lease"]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_forgets_the_lock_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = getattr(HostTier, method)

    def faulty(self: HostTier, *args: object) -> object:
        lock, self._lock = self._lock, contextlib.nullcontext()  # type: ignore[assignment]
        try:
            return honest(self, *args)
        finally:
            self._lock = lock

    monkeypatch.setattr(HostTier, method, faulty)
    with pytest.raises(AssertionError, match="without the lock"):
        test_every_use_of_the_pool_is_under_the_lock()


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
            with tier._lock:
                tier._refresh(lease)
                there = tier._pool.find_each(keys)
            assert all(slot in (ABSENT, found) for slot, found in zip(lease.slots, there, strict=True)), (
                "it has gone, and nobody says so"
            )
            lease.end()

    def write(turn: int) -> None:
        """The launcher takes, the engine's thread lands; here one after the other."""
        taken = tier.take([KEYS[(3 * turn + i) % 20] for i in range(4)], range(4), "demote")
        (tier.land if turn % 5 else tier.drop)(taken)

    def look(turn: int) -> None:
        assert sum(tier.slots) == tier.num_slots
        tier.check()

    def claim(turn: int) -> None:
        """The engine's thread admits: what it has claimed is where it was when its request was matched,
        whatever the launcher takes."""
        keys = [KEYS[(2 * turn + i) % 20] for i in range(5)]
        lease = tier.lease(keys, "request")
        if lease is None:
            return
        tier.refresh(lease)
        matched = lease.slots
        if tier.claim(lease, 0, 5):
            with tier._lock:
                there = tier._pool.find_each(keys)
            assert all(slot in (ABSENT, found) for slot, found in zip(matched, there, strict=True)), (
                "a claimed block has gone"
            )
            num_claimed.append(1)
        else:
            with tier._lock:
                assert tier._leases[lease] == [], "a claim that fails pins nothing"
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
    tier.check()
    assert tier.num_leases == 0 and tier.counts.landed > 0
    assert tier.num_spare == tier.num_slots, "nobody wants anything any more"
    tier.close()

"""Transfers in checked mode: each block that leaves the device or comes back is told with its own key, slot
and bytes, destinations are spoiled before they are copied to, and what did not come is not told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.kv.transfer import ByteChecks
from tests.pure.kv.storage_rig import BLOCK, KEYS, LAYERS, Rig, leased
from tests.pure.kv.test_loads import retracted
from tests.support.stepped import TagArena

ALL = (0, LAYERS)


class Told:
    """A guard and an observer of contents that write down what they hear."""

    def __init__(self, *arenas: TagArena) -> None:
        self.arenas = {arena.name: arena for arena in arenas}
        self.events: list[tuple[str, str, int, bytes, int]] = []
        self.spoiled: list[tuple[str, tuple[int, ...]]] = []

    def poison(self, arena: str, slots: Sequence[int]) -> None:
        self.spoiled.append((arena, tuple(slots)))
        self.arenas[arena].spoil(slots, ALL)

    def digests(self, arena: str, slots: Sequence[int]) -> list[int]:
        return [digest(cells[0]) for cells in self.arenas[arena].read(slots, ALL)]

    def demoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        self.events.append(("demoted", tier, slot, key, digest))

    def promoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        self.events.append(("promoted", tier, slot, key, digest))


def digest(tag: object) -> int:
    return hash(("digest", tag))


class Checked(Rig):
    def __init__(self) -> None:
        super().__init__(load_always=True)
        assert isinstance(self.device, TagArena) and isinstance(self.host_arena, TagArena)
        self.told = Told(self.device, self.host_arena)
        for mover in (self.loads.mover, self.saves.mover):
            mover.checks = ByteChecks(self.told, self.told, ALL)

    def expected(self, what: str, keys: Sequence[bytes]) -> list[tuple[str, str, int, bytes, int]]:
        slots = self.host.pool.find_each(keys)
        return [(what, "host", slot, key, digest(key)) for slot, key in zip(slots, keys, strict=True)]


@pytest.mark.parametrize("num_there", [0, 1, 2, 3])
def test_of_a_retraction_what_host_memory_has_not_is_told_and_the_tail_without_a_key_is_not(
    num_there: int,
) -> None:
    rig = Checked()
    if num_there:
        rig.save(KEYS[:num_there]).end()
    rig.told.events.clear()
    lease = retracted(rig, 3, 1, 3 * BLOCK + 2)
    rig.land()
    assert sorted(rig.told.events) == sorted(rig.expected("demoted", KEYS[num_there:3]))
    assert lease.num_from(0) == 4
    lease.end()
    rig.close()


def test_what_comes_back_is_told_from_where_it_came_and_with_what_landed() -> None:
    rig = Checked()
    rig.save(KEYS[:3]).end()
    rig.pool.evict(8)
    rig.told.events.clear()
    rig.told.spoiled.clear()
    lease, hold = leased(rig, KEYS[:3]), rig.hold(3)
    rig.load_from(hold, 0, lease, KEYS[:3])
    rig.land()
    assert rig.told.events == rig.expected("promoted", KEYS[:3])
    assert rig.told.spoiled == [("device", tuple(hold.slots))]
    hold.end()
    rig.close()


def test_what_did_not_come_is_not_told_as_if_it_had() -> None:
    rig = Checked()
    rig.save(KEYS[:2]).end()
    rig.pool.evict(8)
    rig.told.events.clear()
    lease, hold = leased(rig, KEYS[:2]), rig.hold(2)
    promotion = rig.load_from(hold, 0, lease, KEYS[:2])
    rig.load_copier.fail_next = 1
    rig.land()
    assert promotion.error() is not None and rig.told.events == []
    hold.end()
    rig.close()

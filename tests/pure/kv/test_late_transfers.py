"""Deadlines of saves, and what is not waited for once they have passed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.kv.tiers import saves
from penstock.kv.tiers.loads import BlockLoad
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK, KEYS, Rig


@pytest.mark.parametrize("load_s", [0.5, 1e9])
def test_a_save_has_as_long_as_a_load_and_never_so_long_that_the_device_fills_up_behind_it(
    load_s: float,
) -> None:
    rig = Rig()
    rig.set_limits(replace(rig.saves.limits, load_deadline_s=load_s))
    one, other = rig.computed(KEYS[:1]), rig.computed(KEYS[1:3])
    rig.saves.offer(one, 0, KEYS[:1], None)
    rig.saves.submit()
    lease = rig.saves.retract(other, 2, KEYS[1:3], 2 * BLOCK, None)
    assert lease is not None
    for transfer in rig.saves.mover.flying:
        assert transfer.deadline_s - transfer.times.submitted_s <= min(load_s, saves._PATIENCE_S)
    one.end()
    other.end()
    rig.land()
    lease.end()
    rig.close()


def test_slots_of_a_late_load_are_not_waited_for_while_a_save_is_late_too() -> None:
    rig = Stacked()
    rig.remembered(2, "a")
    table, load = rig.promote_all(2, "a")
    assert isinstance(load, BlockLoad)
    table.release(None)
    rig.ran(1, "b").release(None)
    assert rig.cache.num_settling == 3
    save = rig.saves.mover.flying[0]
    assert save is not None
    save.deadline_s = 0.0
    assert rig.cache.num_settling == 2, "nobody knows when the save ends; the load is in time"
    load.deadline_s = 0.0
    assert rig.cache.num_settling == 0
    rig.end()


def test_slots_of_an_open_table_are_not_expected_back_whether_its_load_is_late_or_not() -> None:
    rig = Stacked()
    rig.remembered(2, "a")
    table, load = rig.promote_all(2, "a")
    rig.ran(1, "b").release(None)
    assert rig.cache.num_settling == 1, "the one that is being saved"
    load.deadline_s, in_time_s = 0.0, load.deadline_s
    assert rig.cache.num_settling == 1
    load.deadline_s = in_time_s
    save = rig.saves.mover.flying[0]
    assert save is not None
    save.deadline_s = 0.0
    assert rig.cache.num_settling == 0
    rig.end(table)


def test_slots_of_parts_that_have_come_are_not_expected_back_once_more() -> None:
    rig = Stacked()
    rig.remembered(4, "a", tiers=("ssd",))
    table, load = rig.load(4, "a")
    rig.read(0)
    rig.copy()
    rig.read(1)
    assert load.num_landed == 2 and load.num_sent == 4
    table.release(None)
    rig.ran(1, "b").release(None)
    save = rig.saves.mover.flying[0]
    assert save is not None
    save.deadline_s = 0.0
    assert rig.cache.num_settling == 2
    rig.end()

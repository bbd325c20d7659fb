"""Deadlines of saves, and what is not waited for once they have passed."""

from __future__ import annotations

from penstock.kv.tiers.loads import BlockLoad
from tests.pure.kv.stacked_rig import Stacked


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

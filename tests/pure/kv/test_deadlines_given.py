"""By when each kind of transfer is to be over: a moment on the same clock, as far away as the configuration
says, and where two limits meet the nearer one. Rigs elsewhere give all the time there is, so that nothing
there depends on it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from penstock.kv.tiers import loads as loads_module
from penstock.kv.tiers import reads as reads_module
from penstock.kv.tiers import saves as saves_module
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.transfer import Transfer
from penstock.testing.stores import HandClock
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK, KEYS, Rig

NOW_S = 1e9  # later than any machine's own time: nothing is overdue by accident
SAVE_PATIENCE_S, ASK_PATIENCE_S = saves_module._PATIENCE_S, reads_module.PATIENCE_S
NEAR_S, FAR_S = SAVE_PATIENCE_S / 2, SAVE_PATIENCE_S * 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """What loads and saves look at; everybody else has the real time, which none of these tests is about."""
    clock = HandClock(NOW_S)
    for module in (loads_module, reads_module, saves_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


def limit(rig: Rig, load_deadline_s: float) -> None:
    rig.set_limits(dataclasses.replace(rig.saves.limits, load_deadline_s=load_deadline_s))


def only(rig: Rig) -> Transfer:
    (transfer,) = (*rig.saves.mover.flying, *rig.loads.mover.flying)
    return transfer


@pytest.mark.parametrize("load_s", [NEAR_S, FAR_S])
@pytest.mark.parametrize("kind", ["sealed", "retracted", "moved"])
def test_a_save_of_any_kind_is_due_by_the_nearer_of_its_limits(
    clock: HandClock, kind: str, load_s: float
) -> None:
    rig = Rig(num_device=2)
    limit(rig, load_s)
    hold = rig.computed(KEYS[:2])
    due_s = NOW_S + min(load_s, SAVE_PATIENCE_S)
    lease = None
    if kind == "sealed":
        rig.saves.offer(hold, 0, KEYS[:2], None)
        rig.saves.submit()
        hold.end()
    elif kind == "retracted":
        lease = rig.saves.retract(hold, 2, KEYS[:2], 2 * BLOCK, None)
        assert lease is not None and lease.wait_until_s == due_s, (
            "whoever comes back waits no longer than that"
        )
        hold.end()
    else:
        hold.end()
        assert not rig.cache.make_room(2, 0)
    assert only(rig).deadline_s == due_s
    rig.land()
    if lease is not None:
        lease.end()
    rig.close()


def test_a_load_and_each_of_its_parts_are_due_together(clock: HandClock) -> None:
    rig = Stacked("ssd")
    rig.put("ssd", rig.keys(4))
    limit(rig, FAR_S)
    table, load = rig.load(4)
    assert load.deadline_s == NOW_S + FAR_S
    clock.advance(5.0)
    rig.read(0, 1)
    assert len(load.copies) == 2 and not any(copy.overdue for copy in load.copies)
    clock.advance(FAR_S - 5.0 + 1.0)
    assert load.overdue and all(copy.overdue for copy in load.copies), "it began with the first read"
    rig.flow()
    rig.end(table)


# ------------------------------------------------------------------------------------------ said of both ways


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

"""Whoever is next and does not fit: what host memory has of it is copied into free slots of the device
meanwhile. Whose, how much, and what becomes of it when it is late, fails, is reset, or its request is
cancelled."""

from __future__ import annotations

import pytest

from penstock.contract import FinishReason, KvSource
from penstock.engine.scheduling import line
from penstock.engine.scheduling.track import Track
from penstock.kv.cache import KvCache
from penstock.kv.tiers.loads import BlockLoad
from tests.pure.engine.scheduling.scheduler_cases import (
    A,
    B,
    C,
    planned,
    remembered,
    shape,
    source_of,
    tiers_of,
)
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold, land_in_parts
from tests.pure.engine.scheduling.scheduler_world import World


@pytest.fixture(autouse=True)
def _few_blocks_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


def crowded(num_slots: int = 12, num_running: int = 7, **more: object) -> tuple[World, str, str]:
    """Host memory has the four blocks of A. One runs and is promised `num_running` blocks; one that begins
    with A is next, needs six, and does not fit."""
    world = remembered(A, num_slots=num_slots, **more)
    running = world.submit(B[:4], num_running * BLOCK - 3, ignore_eos=True)
    planned(world)
    waiting = world.submit([*A, 1], 8, ignore_eos=True)
    return world, running, waiting


def track_of(world: World, request_id: str) -> Track:
    return world.scheduler._tracks[request_id]


def ahead_of(world: World, request_id: str) -> BlockLoad:
    load = track_of(world, request_id).ahead
    assert isinstance(load, BlockLoad)
    return load


def land(world: World) -> None:
    world.device.lanes.run_all()
    world.settle()
    world.check()


def num_on_device(world: World, prompt: list[int]) -> int:
    return len(world.cache.pool.find(world.cache.prefix_of(prompt).keys))  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------- it is next


def test_a_request_finds_its_blocks_on_the_device_when_it_is_admitted() -> None:
    world, running, waiting = crowded()
    world.plan()
    assert ahead_of(world, waiting).num_blocks == 4 and world.state_of(waiting) == "waiting"
    assert world.scheduler.num_by_state() == {"waiting": 1, "loading": 0, "running": 1, "retracted": 0}
    land(world)
    assert num_on_device(world, A) == 4 and world.state_of(waiting) == "waiting"
    world.cancel(running)
    assert shape(planned(world))[-1] == (waiting, 16, 1), "it starts at once"
    world.finish()
    assert source_of(world, waiting) == KvSource(host=16, computed=1)
    assert world.scheduler.counts.prompt_tokens["host"] == 16
    assert world.seen["promotion"] == 0, "nothing is left to load"
    world.close()


def test_what_was_on_the_device_before_is_told_apart() -> None:
    world = remembered(A, num_slots=12)
    world.submit(A[:4], 1)
    world.finish()  # brings the first block back
    running = world.submit(B[:4], 25, ignore_eos=True)
    planned(world)
    waiting = world.submit([*A, 1], 8, ignore_eos=True)
    world.plan()
    assert (ahead_of(world, waiting).first, ahead_of(world, waiting).num_blocks) == (1, 3)
    land(world)
    world.cancel(running)
    world.finish()
    assert source_of(world, waiting) == KvSource(device=4, host=12, computed=1)
    world.close()


def test_what_becomes_free_later_is_filled_later() -> None:
    world = remembered(A, num_slots=12)
    second = world.submit(C[:4], 9, ignore_eos=True)
    first = world.submit(B[:4], 25, ignore_eos=True)
    waiting = world.submit([*A, 1], 8, ignore_eos=True)
    world.plan()
    world.plan()
    assert ahead_of(world, waiting).num_blocks == 2, "ten blocks are promised"
    land(world)
    world.cancel(second)
    world.cache.reset(["device"])
    world.plan()
    assert ahead_of(world, waiting).num_blocks == 4, "the reset has taken the first two"
    land(world)
    world.cancel(first)
    world.finish()
    assert source_of(world, waiting) == KvSource(host=16, computed=1)
    world.close()


def test_a_second_copy_goes_on_behind_the_first() -> None:
    world = remembered(A, num_slots=12)
    second = world.submit(C[:4], 9, ignore_eos=True)
    first = world.submit(B[:4], 25, ignore_eos=True)
    waiting = world.submit([*A, 1], 20, ignore_eos=True)
    world.plan()
    world.plan()
    land(world)
    world.cancel(second)
    world.plan()
    assert (ahead_of(world, waiting).first, ahead_of(world, waiting).num_blocks) == (2, 2)
    land(world)
    world.cancel(first)
    world.finish()
    assert source_of(world, waiting) == KvSource(host=16, computed=1)
    world.close()


def test_a_retracted_request_keeps_the_tail_that_was_saved_for_it() -> None:
    world = World(num_slots=8, cold=Cold(24))
    waiting = world.submit(A[:8], 9, ignore_eos=True)
    for _ in range(4):
        world.step()
    world.scheduler._retract(track_of(world, waiting))
    world.scheduler.counts.retractions = 0  # it was the test's
    while world.in_flight:
        world.commit()
    running = world.submit(B[:4], 21, priority=-1, ignore_eos=True)
    land(world)
    world.cache.reset(["device"])
    world.plan()
    assert ahead_of(world, waiting).num_blocks == 2 and len(track_of(world, waiting).tokens) > 8
    land(world)
    world.cancel(running)
    world.finish()
    assert world.seen["resume with its tail"] == 1
    world.close()


def test_slots_that_are_made_free_for_it_are_filled() -> None:
    """The device is full of what host memory does not have. Some of that is moved for whoever is next, and
    its own blocks come instead."""
    world = World(num_slots=12, prefill_chunk=64, cold=Cold(4, postpones=True))
    world.submit(A, 1, ignore_eos=True)
    world.finish()
    world.cache.reset(["device"])
    for number in (1, 2, 3):
        world.submit([number] * 16, 1, ignore_eos=True)
        world.finish()
    running = world.submit(B[:4], 25, ignore_eos=True)
    world.step()
    waiting = world.submit([*A, 1], 8, ignore_eos=True)
    assert world.cache.num_free == 0
    for _ in range(16):
        world.step()
        world.check()
    assert world.state_of(running) == "running" and num_on_device(world, A) == 4
    world.close()
    assert source_of(world, waiting) == KvSource(host=16, computed=1)


# --------------------------------------------------------------------------------------- what it may not take


def test_nothing_is_evicted_for_it() -> None:
    world = remembered(A, num_slots=12)
    for first in range(3):
        world.submit([first + 1] * 13, 1)
        world.finish()
    running = world.submit(B[:4], 25, ignore_eos=True)
    planned(world)
    waiting = world.submit([*A, 1], 8, ignore_eos=True)
    assert world.cache.num_free == 2
    world.plan()  # whoever runs draws the other
    assert ahead_of(world, waiting).num_blocks == 1
    land(world)
    world.plan()
    assert num_on_device(world, A) == 1 and track_of(world, waiting).ahead is None
    world.cancel(running)
    world.close()


@pytest.mark.parametrize("num_running", range(7, 12))
def test_what_others_were_promised_can_be_drawn_while_it_comes(num_running: int) -> None:
    world, running, waiting = crowded(num_running=num_running)
    world.plan()
    ahead = track_of(world, waiting).ahead
    assert (0 if ahead is None else ahead.num_blocks) == min(4, 12 - num_running)  # type: ignore[attr-defined]
    while world.state_of(running) == "running":  # and the copy hangs
        world.plan()
        world.commit()
        world.check()
    assert world.outcome(running)[1] is FinishReason.LENGTH and world.scheduler.counts.retractions == 0
    world.close()


def test_where_promises_may_exceed_memory_it_is_admitted_as_early_as_without() -> None:
    """What was copied ahead takes slots that could have been promised several times over, but for its own
    request alone."""
    world = remembered(A[:8], num_slots=12, prefill_chunk=64, overcommit=4.0)
    world.submit(list(range(6)) * 5 + [5, 5], 5, ignore_eos=True)
    second = world.submit([6, 6, 6], 2, ignore_eos=True)
    waiting = world.submit([*A[:8], 1], 39, ignore_eos=True)
    planned(world)
    assert ahead_of(world, waiting).num_blocks == 2
    land(world)
    world.cancel(second)
    world.plan()
    assert world.state_of(waiting) == "running"
    world.cancel(waiting)
    world.close()


@pytest.mark.parametrize(("least", "most", "num_blocks"), [(5, 512, 0), (4, 512, 4), (1, 3, 3)])
def test_a_copy_is_neither_small_nor_long(
    least: int, most: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_LEAST_AHEAD", least)
    monkeypatch.setattr(line, "_MOST_AHEAD", most)
    world, _, waiting = crowded()
    world.plan()
    assert (
        0 if track_of(world, waiting).ahead is None else ahead_of(world, waiting).num_blocks
    ) == num_blocks
    world.close()


def test_where_the_device_shares_nothing_nothing_is_copied() -> None:
    world, _, waiting = crowded(prefix_cache=False)
    asked: list[str] = []
    whole = world.cache.promote_ahead
    world.cache.promote_ahead = lambda owner, *args: asked.append(owner) or whole(owner, *args)  # type: ignore[method-assign]
    for _ in range(3):
        world.step()
    assert asked == [waiting] and world.seen["promotion ahead"] == 0, "it is not asked for again"
    world.close()
    assert source_of(world, waiting) == KvSource(host=16, computed=1)


def test_a_request_that_relies_on_colder_tiers_no_more_gets_nothing() -> None:
    world, _, waiting = crowded()
    track_of(world, waiting).computes = True
    world.plan()
    assert track_of(world, waiting).ahead is None
    world.close()


@pytest.mark.parametrize("num_lost", [4, 2])
def test_what_lies_behind_host_memory_is_not_copied_to_the_device_by_it(num_lost: int) -> None:
    """Nor is what host memory has behind such blocks."""
    world = World(num_slots=12, cold=Cold(24, stores=("ssd",)))
    world.submit(A, 1, ignore_eos=True)
    world.finish()
    world.cache.reset(["device"])
    tiers_of(world).host.forget(world.cache.prefix_of(A).keys[:num_lost])  # type: ignore[union-attr]
    world.submit(B[:4], 25, ignore_eos=True)
    planned(world)
    waiting = world.submit([*A, 1], 8, ignore_eos=True)
    world.plan()
    assert track_of(world, waiting).ahead is None and track_of(world, waiting).prefetch is not None
    for _ in range(2):
        land(world)
    world.plan()
    assert ahead_of(world, waiting).num_blocks == 4, "it has been read into host memory meanwhile"
    world.close()


# ------------------------------------------------------------------------------------------- nobody overtakes


def test_nobody_overtakes_while_its_blocks_come() -> None:
    world, running, waiting = crowded()
    behind = world.submit(C[:4], 4, ignore_eos=True)
    world.plan()
    assert ahead_of(world, waiting)
    while world.in_flight:
        world.commit()
    world.cancel(running)
    assert world.plan() is None and world.state_of(behind) == "waiting", (
        "there is room for it, and it is not its turn"
    )
    world.check()
    land(world)
    assert shape(planned(world)) == [(waiting, 16, 1), (behind, 0, 4)], (
        "both start in the first plan after the copy"
    )
    world.close()


def test_it_keeps_its_place_in_line_while_its_blocks_come() -> None:
    """Nothing of them is found meanwhile, and it is not to fall behind for that."""
    world = remembered(A, num_slots=12, max_overtaken_s=60.0)
    tiers_of(world).loads.prefill.add(100, 0.0, 100 * 0.1)
    world.submit(B[:4], 25, ignore_eos=True)
    planned(world)
    waiting = world.submit([*A, 1], 8, ignore_eos=True)
    world.plan()
    assert ahead_of(world, waiting)
    world.now_s += 15.0
    behind = world.submit([*B[:4], 5], 4, ignore_eos=True)  # finds nearly all of itself
    for _ in range(6):
        world.plan()
        world.commit()
        assert world.in_line() == [waiting, behind]
    land(world)
    world.plan()
    assert world.in_line() == [waiting, behind]
    world.close()


def test_whoever_is_of_a_higher_priority_goes_before_it_all_the_same() -> None:
    world, _, waiting = crowded()
    world.plan()
    assert ahead_of(world, waiting)
    urgent = world.submit(C[:3], 1, priority=-1, ignore_eos=True)
    world.plan()
    assert world.state_of(urgent) == "running" and world.state_of(waiting) == "waiting"
    world.close()


def test_others_with_the_same_prefix_wait_for_it_and_share_it() -> None:
    world, running, waiting = crowded()
    other = world.submit([*A, 2], 1, ignore_eos=True)
    world.plan()
    world.plan()
    land(world)
    world.cancel(running)
    world.finish()
    assert world.seen["promotion"] == 0 and world.seen["promotion ahead"] == 1
    assert (source_of(world, waiting).host, source_of(world, other).device) == (16, 16)
    world.close()


# ---------------------------------------------------------------------------------------------- it goes wrong


def test_a_late_copy_does_not_hold_the_line() -> None:
    world, running, waiting = crowded()
    behind = world.submit(C[:4], 4, ignore_eos=True)
    world.plan()
    tiers_of(world).make_late()
    world.cancel(running)
    assert shape(planned(world))[:2] == [(waiting, 0, 8)], "it computes"
    world.check()
    world.close()
    assert (
        source_of(world, waiting) == KvSource(computed=17) and world.outcome(behind)[1] is FinishReason.LENGTH
    )


def test_a_copy_that_was_late_and_came_counts_to_host_memory() -> None:
    world, running, waiting = crowded()
    world.plan()
    tiers_of(world).make_late()
    world.plan()
    land(world)
    world.cancel(running)
    world.close()
    assert source_of(world, waiting) == KvSource(host=16, computed=1)


def test_a_copy_that_fails_is_tried_once_more_when_the_request_is_admitted() -> None:
    world, running, waiting = crowded()
    world.plan()
    tiers_of(world).promotions.fail_next = 1
    land(world)
    world.plan()
    track = track_of(world, waiting)
    assert track.ahead is None and not track.computes and num_on_device(world, A) == 0, (
        "it goes on as if nothing had happened"
    )
    world.plan()
    assert world.seen["promotion ahead"] == 1, "not a second time ahead"
    world.cancel(running)
    world.plan()
    assert world.state_of(waiting) == "loading"
    world.close()
    assert source_of(world, waiting) == KvSource(host=16, computed=1)


def test_where_its_own_load_fails_too_it_computes() -> None:
    world, running, waiting = crowded()
    world.plan()
    tiers_of(world).promotions.fail_next = 2
    land(world)
    world.cancel(running)
    world.plan()
    assert world.state_of(waiting) == "loading"
    world.close()
    assert source_of(world, waiting) == KvSource(computed=17)


def test_a_cancel_while_its_blocks_come_leaves_them_to_others() -> None:
    world, running, waiting = crowded()
    world.plan()
    world.cancel(waiting)
    world.check()
    land(world)
    assert num_on_device(world, A) == 4
    again = world.submit([*A, 1], 1, ignore_eos=True)
    world.cancel(running)
    world.close()
    assert source_of(world, again) == KvSource(device=16, computed=1)


def test_a_reset_while_its_blocks_come_is_not_undone_by_them() -> None:
    world, running, waiting = crowded()
    world.plan()
    world.cache.reset(["device"])
    land(world)
    assert num_on_device(world, A) == 0 and world.cache.num_free == 12 - len(
        world.cache.tables[running].hold.slots
    )
    world.cancel(running)
    world.close()
    assert source_of(world, waiting) == KvSource(host=16, computed=1)


def test_it_is_asked_for_once_for_each_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan looks at what is known of the lease; blocks are looked for where a copy begins."""
    calls: list[int] = []
    whole = KvCache.promote_ahead

    def counting(self: KvCache, owner: str, prefix: object, first: int, num_blocks: int) -> object:
        calls.append(num_blocks)
        return whole(self, owner, prefix, first, num_blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(KvCache, "promote_ahead", counting)
    world, _, waiting = crowded()
    for _ in range(8):
        world.plan()
        world.commit()
    land(world)
    for _ in range(4):
        world.plan()
        world.commit()
    assert calls == [4] and world.state_of(waiting) == "waiting"
    world.close()

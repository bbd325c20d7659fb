"""The scheduler over a disk and a store behind the host tier, story by story: who waits, for what, and where
a prompt is said to have come from."""

from __future__ import annotations

import pytest

from penstock.contract import KvSource
from penstock.kv.tiers.loads import BlockLoad
from tests.pure.engine.scheduling.scheduler_cases import A, B, planned, shape, source_of, tiers_of
from tests.pure.engine.scheduling.scheduler_tiers import Cold, land_in_parts
from tests.pure.engine.scheduling.scheduler_world import World


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


def forgotten(*tiers: str, num_host: int = 24, **world: int) -> World:
    """A world in which A was computed; it is in the first of `tiers`, and nowhere hotter."""
    made = World(**world, cold=Cold(num_host, stores=tiers))
    made.submit(A, 1, ignore_eos=True)
    made.finish()
    made.cache.reset(["device", "host"])
    for store in list(tiers_of(made).stores.values())[1:]:
        store.lose()
    return made


def run_lane(world: World, name: str, steps: int = 100) -> None:
    for _ in range(steps):
        world.device.lanes.lane(name).step()
    world.settle()


@pytest.mark.parametrize("tiers", [("ssd",), ("remote",), ("ssd", "remote")])
def test_a_prefix_from_far_away_is_said_to_come_from_there(tiers: tuple[str, ...]) -> None:
    world = forgotten(*tiers)
    request = world.submit([*A, 1, 2], 2, ignore_eos=True)
    world.finish()
    assert source_of(world, request) == KvSource(**{tiers[0]: 16}, computed=2)
    assert world.scheduler.counts.prompt_tokens[tiers[0]] == 16
    world.close()


def test_each_tier_is_counted_for_its_own_blocks_also_on_a_full_match() -> None:
    world = forgotten("ssd", "remote")
    stores, keys = tiers_of(world).stores, world.cache.prefix_of(A).keys  # type: ignore[union-attr]
    stores["remote"].blocks.update({key: stores["ssd"].blocks.pop(key) for key in keys[2:]})
    other = world.submit(A[:4], 1, ignore_eos=True)
    world.finish()
    assert source_of(world, other) == KvSource(ssd=3, computed=1)
    world.cache.reset(["device"])
    request = world.submit(A, 2, ignore_eos=True)
    world.finish()
    assert source_of(world, request) == KvSource(host=4, ssd=4, remote=7, computed=1), (
        "the last token of a full match is computed"
    )
    world.close()


def test_where_a_block_is_lost_the_rest_is_computed_and_counted_so() -> None:
    world = forgotten("ssd")
    keys = world.cache.prefix_of(A).keys  # type: ignore[union-attr]
    request = world.submit(A, 2, ignore_eos=True)
    tiers_of(world).stores["ssd"].lose(keys[2])
    assert world.plan() is None and world.state_of(request) == "loading"
    world.device.lanes.run_all()
    while world.settle():
        world.device.lanes.run_all()
    assert shape(planned(world)) == [(request, 8, 8)]
    world.finish()
    assert source_of(world, request) == KvSource(ssd=8, computed=8)
    world.close()


def test_a_store_that_has_not_answered_is_waited_for_and_others_go_on() -> None:
    world = forgotten("remote")
    request, other = world.submit(A, 2, ignore_eos=True), world.submit(B[:3], 2, ignore_eos=True)
    assert [one for one, _, _ in shape(planned(world))] == [other] and world.state_of(request) == "waiting"
    run_lane(world, "ask remote")
    world.plan()
    assert world.state_of(request) == "loading"
    world.finish()
    assert source_of(world, request) == KvSource(remote=15, computed=1)
    world.close()


def test_a_store_that_never_answers_is_waited_for_no_longer_than_that() -> None:
    world = forgotten("remote")
    request = world.submit(A, 2, ignore_eos=True)
    assert world.plan() is None
    tiers_of(world).clock.advance(10.0)
    assert shape(planned(world)) == [(request, 0, 8)]
    world.finish()
    assert source_of(world, request) == KvSource(computed=16)
    world.close()


def test_where_host_memory_has_no_room_it_is_computed_in_the_same_step() -> None:
    world = forgotten("ssd", num_host=4)
    private = tiers_of(world).host.take_private(4, "somebody")
    assert private is not None
    request = world.submit(A, 2, ignore_eos=True)
    assert shape(planned(world)) == [(request, 0, 8)] and isinstance(world.asked[request].load, BlockLoad)
    private.rollback()
    world.finish()
    assert source_of(world, request) == KvSource(computed=16)
    world.close()


def test_a_step_starts_behind_the_last_part_where_nobody_else_computes() -> None:
    world = forgotten("ssd")
    request = world.submit([*A, 1], 2, ignore_eos=True)
    assert world.plan() is None
    for _ in range(4):
        run_lane(world, "read ssd 0")
        run_lane(world, "read ssd 1")
    run_lane(world, "launch to device")
    load = world.asked[request].load
    assert (
        isinstance(load, BlockLoad)
        and load.num_sent == 4
        and not load.nearly_landed()
        and world.plan() is None
    )
    while not load.nearly_landed():
        world.device.lanes.lane("to device").step()
    plan = planned(world)
    assert plan.loads == (request,) and not load.settled and shape(plan) == [(request, 16, 1)]
    world.finish()
    assert source_of(world, request) == KvSource(ssd=16, computed=1)
    world.close()

"""A request that does not fit on the device begins when all that disks and stores have of it is in host
memory, and not before; what cannot be read is computed, and is not asked for without end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.contract import KvSource
from penstock.engine.scheduling.deep import Deep
from penstock.kv.tiers import reads as reads_module
from tests.pure.engine.scheduling.scheduler_cases import source_of, tiers_of
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold, land_in_parts
from tests.pure.engine.scheduling.scheduler_world import World
from tests.pure.engine.scheduling.test_cold_loading import reads_of

LONG = [at * at % 5 + at // 7 % 2 for at in range(72)]
NUM_BLOCKS = len(LONG) // BLOCK


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


def on_disk(prompt: Sequence[int] = LONG, max_batch: int = 4) -> World:
    """A world with room for eight blocks of a request on the device, whose disk has `prompt` and nobody else
    does."""
    world = World(
        num_slots=12, max_batch=max_batch, prefill_chunk=8, cold=Cold(40, stores=("ssd",)), num_resident=8
    )
    world.submit(prompt, 1, ignore_eos=True)
    world.finish()
    world.cache.reset(["device", "host"])
    assert len(tiers_of(world).stores["ssd"].blocks) >= len(prompt) // BLOCK
    return world


def leading_in_host(world: World) -> int:
    return tiers_of(world).host.num_leading(world.cache.prefix_of(LONG).keys)  # type: ignore[union-attr]


@pytest.mark.parametrize("num_near", [0, 5, NUM_BLOCKS - 1])
def test_what_is_on_disk_behind_what_host_memory_has_is_waited_for(num_near: int) -> None:
    """Holds invariant 28: each block counts for where it was."""
    world = on_disk()
    if num_near:
        world.submit(LONG[: num_near * BLOCK + 1], 1, ignore_eos=True)
        world.finish()
        world.cache.reset(["device"])
    assert leading_in_host(world) == num_near
    deep = world.submit([*LONG, 1], 2, ignore_eos=True)
    world.finish()
    num_host = num_near * BLOCK
    assert source_of(world, deep) == KvSource(host=num_host, ssd=len(LONG) - num_host, computed=1)
    world.close()


@pytest.mark.parametrize("bad", [0, 6])
def test_a_block_that_cannot_be_read_is_asked_for_a_few_times_and_computed(bad: int) -> None:
    world = on_disk()
    keys = world.cache.prefix_of(LONG).keys  # type: ignore[union-attr]
    tiers_of(world).stores["ssd"].fails.add(keys[bad])
    reads = reads_of(world)
    deep = world.submit([*LONG, 1], 2, ignore_eos=True)
    world.finish()
    assert source_of(world, deep).ssd == bad * BLOCK and reads[keys[bad]] <= 2
    world.close()


def test_one_that_fits_on_the_device_to_its_last_block_is_not_deep() -> None:
    world = World(num_slots=12, prefill_chunk=8, cold=Cold(40), num_resident=8)
    most = world.budget.deep_blocks * BLOCK
    fits, deep = (world.submit(LONG[:num], 1) for num in (most, most + 1))
    assert [isinstance(world.scheduler.lives[one].placement, Deep) for one in (fits, deep)] == [False, True]
    world.finish()
    world.close()


# --------------------------------------------------------------------- what is looked for when its turn comes


@pytest.mark.parametrize("meanwhile", ["", "reads end", "blocks go"])
@pytest.mark.parametrize("num_host", [28, 32])
def test_one_that_waits_for_another_to_leave_host_memory_is_read_then(num_host: int, meanwhile: str) -> None:
    """Also where what was being read for it meanwhile, or had been, made way for others."""
    world = World(num_slots=12, prefill_chunk=8, cold=Cold(num_host, stores=("ssd",)), num_resident=8)
    other = [(at * at + 3) % 5 + at // 5 % 2 for at in range(72)]
    for prompt in (LONG, other):
        world.submit(prompt, 1, ignore_eos=True)
        world.finish()
    world.cache.reset(["device", "host"])
    first = world.submit([*LONG, 1], 12, ignore_eos=True)
    while world.state_of(first) != "running":
        world.step()
    second = world.submit([*other, 1], 2, ignore_eos=True)
    world.plan()
    waiting = world.scheduler.lives[second].waiting
    fetch = None if waiting is None else waiting.prefetch
    assert fetch is not None and world.state_of(first) == "running"
    if meanwhile == "reads end":
        world.cache.loads.reader.end_fetches(keeps=False)
    while meanwhile == "blocks go" and not fetch.settled:
        world.device.lanes.run_all()
        world.settle()
    if meanwhile == "blocks go":
        assert tiers_of(world).host.forget(world.cache.prefix_of(other).keys) > 0  # type: ignore[union-attr]
    world.finish()
    assert source_of(world, first).computed == source_of(world, second).computed == 1
    world.close()


def test_one_that_is_next_is_read_for_while_as_much_is_read_ahead_as_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = on_disk()
    monkeypatch.setattr(reads_module, "_FETCHES", 0)
    deep = world.submit([*LONG, 1], 2, ignore_eos=True)
    world.close()
    assert source_of(world, deep).computed == 1


def test_a_read_that_is_late_is_not_waited_for_any_longer() -> None:
    world = on_disk()
    deep = world.submit([*LONG, 1], 2, ignore_eos=True)
    stuck = [lane for lane in world.device.lanes if lane.name.startswith("read ssd")]
    for lane in stuck:
        lane.step = lambda: False  # type: ignore[method-assign]
    for _ in range(5):
        world.step()
    assert world.state_of(deep) == "waiting"
    tiers_of(world).make_late()
    world.plan()
    assert world.state_of(deep) == "running"
    for lane in stuck:
        del lane.step
    world.finish()
    assert source_of(world, deep).computed == len(LONG) + 1
    world.close()

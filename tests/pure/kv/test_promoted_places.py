"""Promoted blocks come to their own places under their own keys, and nobody waits for one that is late. Lanes
are sequenced; the bytes say which block they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import Fence, Prefix
from penstock.kv.table import BlockTable
from penstock.kv.tiers.saves import SavedLease
from penstock.testing.sequencer import Sequencer, run
from tests.pure.kv.test_transfer_races import BLOCK
from tests.pure.kv.watched_world import WatchedWorld


def numbered(world: WatchedWorld, num_blocks: int) -> tuple[BlockTable, Prefix, Fence]:
    """A table whose block i holds the number i, its blocks sealed and on their way to the host."""
    tokens = list(range(num_blocks * BLOCK))
    prefix = world.cache.prefix_of(tokens)
    assert prefix is not None
    table = world.cache.open("a", prefix, 0)
    assert table.try_extend(num_blocks)
    for fence in table.take_after():
        world.compute.wait(fence)
    for number, slot in enumerate(table.hold.slots):
        fence = world.write([slot], number)
    fence.wait_passed()
    table.seal(tokens, num_blocks * BLOCK, fence)
    return table, prefix, fence


def found(world: WatchedWorld, prefix: Prefix) -> list[object]:
    """What the device has under the keys of `prefix`, block by block."""
    cells = [set(world.device[slot]) for slot in world.cache.saves._pool.find(prefix.keys)]
    return [cell.pop() if len(cell) == 1 else cell for cell in cells]


def behind_a_prefix_on_the_device(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    table, prefix, fence = numbered(world, 3)
    world.finish(table, fence)
    world.cache.reset(("device",))
    lease = world.cache.lease("a", prefix)  # of all three: the device has none of them now
    assert lease is not None
    table, _, fence = numbered(world, 1)
    world.finish(table, fence)
    assert found(world, prefix) == [0]
    table = world.cache.open("a", prefix, 1)
    load = table.promote(lease, 2, num_next=1)
    world.sequencer.pause("waits for the launch", lambda: load.arrivals is not None)
    world.settle(load)
    assert found(world, prefix) == [0, 1, 2]
    assert [world.device[slot][0] for slot in table.hold.slots] == [0, 1, 2]
    world.finish(table, world.compute.record())
    world.close()


def a_tail_that_was_saved_half_full(sequencer: Sequencer) -> None:
    """Its request goes on in it, so it gets no key even where the prompt has one for it."""
    world = WatchedWorld(sequencer)
    tokens = list(range(2 * BLOCK))
    prefix = world.cache.prefix_of(tokens)
    assert prefix is not None
    table = world.cache.open("a", prefix, 0)
    assert table.try_extend(2)
    fence = world.write(table.hold.slots, "half")
    fence.wait_passed()
    table.seal(tokens, BLOCK + 3, fence)
    lease = table.retract(BLOCK + 3, fence)
    assert isinstance(lease, SavedLease)
    world.cache.drain(1.0)
    world.cache.reset(("device",))
    table = world.cache.open("a", prefix, 0)
    load = table.promote(lease, 2, num_next=1)
    world.sequencer.pause("waits for the launch", lambda: load.arrivals is not None)
    world.settle(load)
    assert len(world.cache.saves._pool.find(prefix.keys)) == 1
    world.finish(table, world.write(table.hold.slots[1:], "full"))
    world.close()


PROGRAMS = (
    behind_a_prefix_on_the_device,
    a_tail_that_was_saved_half_full,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_was_promoted_is_found_as_what_it_is(program: Callable[[Sequencer], None]) -> None:
    _, failure = run(program)
    assert failure is None, str(failure)

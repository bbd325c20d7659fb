"""Programs of transfers for the sanitizer to watch: what requests, tiers and movers do to slots when all goes
well, and when it does not. Real pools, tiers and movers on sequenced lanes; each program gives everything
back and closes the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from penstock.contract import Match
from penstock.engine.execution.arriving import Arriving
from penstock.errors import TransferFailed
from penstock.kv.tiers.saves import SavedLease
from penstock.testing.sequencer import Sequencer
from tests.pure.kv.test_transfer_races import BLOCK, LAYERS
from tests.pure.kv.watched_world import LEASE_ENDS_S, WatchedWorld

# -------------------------------------------------------------------------------------------------- demotions


def demote_behind_a_step_that_nobody_has_read(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, reuses=False)
    table, fence = world.compute_blocks("a", 2)
    world.seal(table, "a", 2, fence)
    world.cache.submit_saves()
    world.finish(table, fence)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host
    world.close()


def give_slots_to_another_while_they_are_demoted(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=2)
    table, fence = world.compute_blocks("a", 2)
    fence.wait_passed()
    world.seal(table, "a", 2, fence)
    world.cache.submit_saves()
    table.release(fence)
    world.finish(*world.compute_blocks("b", 2))
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host
    world.close()


def a_demotion_that_fails_and_is_made_again(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.demotions.num = 1
    world.bring_to_host("a", 2)
    assert world.in_host("a", 2) == [], "a failed copy publishes nothing"
    world.bring_to_host("a", 2)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host
    world.close()


def a_demotion_that_could_not_be_submitted(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    table, fence = world.compute_blocks("a", 2)
    fence.wait_passed()
    world.seal(table, "a", 2, fence)
    world.refuse_launch(world.cache.saves.mover)
    with contextlib.suppress(OSError):
        world.cache.submit_saves()
    world.finish(table, fence)
    assert world.in_host("a", 2) == []
    world.close()


def close_while_a_demotion_is_in_flight(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    table, fence = world.compute_blocks("a", 2)
    fence.wait_passed()
    world.seal(table, "a", 2, fence)
    world.cache.submit_saves()
    table.release(fence)
    world.cache.close(1.0)


def demote_what_the_host_has_already(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.bring_to_host("a", 2)
    world.bring_to_host("a", 2)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS and world.cache.saves._host.counts.deduplicated == 2
    world.close()


# ---------------------------------------------------------------------------------------------------- flushes


def overwrite_what_was_flushed(sequencer: Sequencer) -> None:
    _flush_and_overwrite(sequencer, lambda world: world.cache.submit_saves())


def overwrite_what_was_flushed_before_it_was_submitted(sequencer: Sequencer) -> None:
    _flush_and_overwrite(sequencer, lambda world: None)


def _flush_and_overwrite(sequencer: Sequencer, between: Callable[[WatchedWorld], None]) -> None:
    world = WatchedWorld(sequencer, reuses=False)
    table, fence = world.compute_blocks("a", 2)
    fence.wait_passed()
    world.seal(table, "a", 2, fence)
    between(world)
    world.cache.drain(1.0, table.hold.slots)
    # whoever flushed believes that nobody reads these any more
    fence = world.write(table.hold.slots, "overwritten")
    world.cache.submit_saves()  # as at the end of any turn of the engine
    world.finish(table, fence)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host
    world.close()


def overwrite_where_a_promotion_was_flushed(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, reuses=False)
    world.bring_to_host("a", 2)
    table, _ = world.promote("a", 2)
    world.cache.drain(1.0, table.hold.slots)
    fence = world.write(table.hold.slots, "overwritten")
    fence.wait_passed()
    assert [world.device[slot] for slot in table.hold.slots] == [["overwritten"] * LAYERS] * 2
    world.finish(table, fence)
    world.close()


# ------------------------------------------------------------------------------------------------- promotions


def promote_into_the_slots_of_a_cancelled_request(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=2)
    world.bring_to_host("a", 2)
    table, fence = world.compute_blocks("b", 2)
    seen: list[object] = []
    fence = world.read_blocks(table, 2, seen)
    table.release(fence)
    table, load = world.promote("a", 2)
    world.finish(table, world.read_blocks(table, 2, [], Arriving([load])))
    assert seen == ["b"] * 2 * LAYERS, seen
    world.close()


def cancel_during_a_promotion(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=2)
    world.bring_to_host("a", 2)
    table, _ = world.promote("a", 2)
    table.release(world.compute.record())
    table, _ = world.compute_blocks("b", 2)
    seen: list[object] = []
    world.finish(table, world.read_blocks(table, 2, seen))
    assert seen == ["b"] * 2 * LAYERS, seen
    world.close()


def a_promotion_that_nobody_waits_for_any_longer(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=2)
    world.bring_to_host("a", 2)
    table, load = world.promote("a", 2)
    load.deadline_s = 0.0
    table.release(world.compute.record())
    world.cache.settle()
    table, _ = world.compute_blocks("b", 2)
    seen: list[object] = []
    world.finish(table, world.read_blocks(table, 2, seen))
    assert seen == ["b"] * 2 * LAYERS, seen
    world.close()


def share_what_was_promoted_for_another(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.bring_to_host("a", 2)
    table, load = world.promote("a", 2)
    keys = world.prefix("a", 2).keys
    assert load.settled or world.cache.match(keys) == Match(0, 0, pending=True), (
        "it is waited for, not promoted once more"
    )
    world.settle(load)
    found = world.cache.match(keys)
    assert found.num_blocks == 2 and not found.pending
    other = world.cache.open("other", world.prefix("a", 2), 2)
    seen: list[object] = []
    world.finish(other, world.read_blocks(other, 2, seen))
    world.finish(table, world.compute.record())
    assert seen == ["a"] * 2 * LAYERS, seen
    world.cache.reset(("device",))
    assert world.cache.match(keys) == Match(0, 0, pending=False), "nobody waits for what came and went"
    world.close()


def a_promotion_that_fails_and_is_computed_instead(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.bring_to_host("a", 2)
    world.promotions.num = 1
    table, load = world.promote("a", 2)
    world.settle(load)
    assert (
        isinstance(load.error(), TransferFailed)
        and world.cache.match(world.prefix("a", 2).keys).num_blocks == 0
    )
    for fence in table.take_after():
        world.compute.wait(fence)
    world.finish(table, world.write(table.hold.slots, "computed"))
    world.close()


def a_promotion_of_which_only_the_first_copy_could_be_launched(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=2)
    world.bring_to_host("a", 2)
    world.refuse_copy(1)
    table, load = world.promote("a", 2)
    assert isinstance(load.error(), OSError) and len(load.arrivals or ()) == 1
    table.release(world.compute.record())
    world.settle(load)
    assert world.cache.match(world.prefix("a", 2).keys).num_blocks == 0
    table, _ = world.compute_blocks("b", 2)
    seen: list[object] = []
    world.finish(table, world.read_blocks(table, 2, seen))
    assert seen == ["b"] * 2 * LAYERS, seen
    world.close()


# ----------------------------------------------------------------------------------------------------- leases


def promote_what_was_claimed_under_pressure(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.bring_to_host("a", 2)
    lease = world.cache.lease("a", world.prefix("a", 2))
    assert lease is not None and lease.claim(0, 2)
    world.cache.reset(("host",))  # everything that is not protected is forgotten, and its slots go to others
    world.bring_to_host("b", 4)
    world.bring_to_host("c", 4)
    table = world.cache.open("a", world.prefix("a", 2), 0)
    load = table.promote(lease, 2, num_next=1)
    world.sequencer.pause("waits for the launch", lambda: load.arrivals is not None)
    seen: list[object] = []
    world.finish(table, world.read_blocks(table, 2, seen, Arriving([load])))
    assert seen == ["a"] * 2 * LAYERS, seen
    world.close()


def promote_what_was_wanted_under_pressure(sequencer: Sequencer) -> None:
    """Saves leave it alone, though host memory is full, whatever the launcher is at when it is claimed."""
    world = WatchedWorld(sequencer)
    world.bring_to_host("a", 2)
    lease = world.cache.lease("a", world.prefix("a", 2))
    assert lease is not None
    for name in "bcd":
        table, fence = world.compute_blocks(name, 2)
        fence.wait_passed()
        world.seal(table, name, 2, fence)
        table.release(fence)
        world.cache.submit_saves()
    assert lease.claim(0, 2)
    world.cache.reset(("host",))
    table = world.cache.open("a", world.prefix("a", 2), 0)
    while world.cache.num_available < 2:
        world.cache.drain(1.0)
    load = table.promote(lease, 2, num_next=1)
    world.sequencer.pause("waits for the launch", lambda: load.arrivals is not None)
    seen: list[object] = []
    world.finish(table, world.read_blocks(table, 2, seen, Arriving([load])))
    assert seen == ["a"] * 2 * LAYERS, seen
    world.close()


def a_lease_whose_time_ends_during_its_promotion(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.bring_to_host("a", 2)
    table, load = world.promote("a", 2)
    world.now_s += LEASE_ENDS_S
    world.cache.settle()
    seen: list[object] = []
    world.finish(table, world.read_blocks(table, 2, seen, Arriving([load])))
    assert seen == ["a"] * 2 * LAYERS, seen
    world.close()


def a_lease_whose_time_ends_before_it_is_used(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.bring_to_host("a", 2)
    lease = world.cache.lease("a", world.prefix("a", 2))
    assert lease is not None
    world.now_s += LEASE_ENDS_S
    world.cache.settle()
    world.cache.reset(("host",))
    prefix = world.prefix("a", 2)
    num_colder = world.cache.match(prefix.keys, lease).num_colder
    table = world.cache.open("a", prefix, 0)
    if num_colder:  # as the scheduler would
        world.settle(table.promote(lease, num_colder, num_next=1))
    world.finish(table, world.compute.record())
    assert num_colder == 0, "it covers nothing any more"
    world.close()


def a_promotion_that_could_not_be_submitted(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.bring_to_host("a", 2)
    lease = world.cache.lease("a", world.prefix("a", 2))
    assert lease is not None
    table = world.cache.open("a", world.prefix("a", 2), 0)
    world.refuse_launch(world.cache.loads.mover)
    try:
        table.promote(lease, 2, num_next=1)
    except OSError:
        world.cache.reset(("host",))
        assert lease.num_from(0) == 2 and world.in_host("a", 2) == ["a"] * 2 * LAYERS, (
            "the lease is as it was"
        )
    table.release(world.compute.record())
    lease.end()
    world.close()


# ------------------------------------------------------------------------------------------------------ moves


def keep_on_the_device_alone(world: WatchedWorld, name: str, num_blocks: int) -> list[object]:
    """Blocks that host memory does not have, and that a step still reads when their request has ended: what
    it sees."""
    seen: list[object] = []
    table, fence = world.compute_blocks(name, num_blocks)
    fence.wait_passed()
    world.seal(table, name, num_blocks, fence)
    world.cache.submit_saves()
    world.cache.drain(1.0)
    world.cache.reset(("host",))
    fence = world.read_blocks(table, num_blocks, seen)
    table.release(fence)
    return seen


def compute_where_room_was_made(world: WatchedWorld, name: str, num_blocks: int) -> None:
    while not world.cache.make_room(num_blocks, 0):
        world.cache.drain(1.0)
    world.finish(*world.compute_blocks(name, num_blocks))


def move_what_the_device_has_alone(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=3)
    seen = keep_on_the_device_alone(world, "a", 2)
    assert not world.cache.make_room(3, 0)
    compute_where_room_was_made(world, "b", 3)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host
    assert seen == ["a"] * 2 * LAYERS, seen
    world.close()


def draw_what_is_left_while_blocks_are_moved(sequencer: Sequencer) -> None:
    """What others were promised can be drawn at once; what is being moved cannot."""
    world = WatchedWorld(sequencer, num_slots=4)
    keep_on_the_device_alone(world, "a", 3)
    assert not world.cache.make_room(4, 2) and world.cache.num_available >= 2
    table, fence = world.compute_blocks("b", 2)
    assert world.cache.num_available <= 2
    world.finish(table, fence)
    compute_where_room_was_made(world, "c", 4)
    assert world.in_host("a", 3).count("a") >= 2 * LAYERS, world.host
    world.close()


def share_what_is_being_moved(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=3)
    keep_on_the_device_alone(world, "a", 2)
    assert not world.cache.make_room(3, 0)
    seen: list[object] = []
    table = world.cache.open("again", world.prefix("a", 2), 2)
    fence = world.read_blocks(table, 2, seen)
    world.cache.drain(1.0)
    assert world.cache.match(world.prefix("a", 2).keys).num_blocks == 2, "somebody has them again: they stay"
    world.finish(table, fence)
    assert seen == ["a"] * 2 * LAYERS and world.in_host("a", 2) == ["a"] * 2 * LAYERS, (seen, world.host)
    world.close()


def a_move_that_fails(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=2)
    keep_on_the_device_alone(world, "a", 2)
    world.demotions.num = 1
    assert not world.cache.make_room(2, 0)
    compute_where_room_was_made(world, "b", 2)
    assert world.in_host("a", 2) == []
    world.close()


def a_move_that_could_not_be_submitted(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=2)
    keep_on_the_device_alone(world, "a", 2)
    world.refuse_launch(world.cache.saves.mover)
    with contextlib.suppress(OSError):
        world.cache.make_room(2, 0)
        raise AssertionError("it was refused")
    world.cache.check()
    compute_where_room_was_made(world, "b", 2)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host
    world.close()


def reset_and_close_while_blocks_are_moved(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer, num_slots=2)
    keep_on_the_device_alone(world, "a", 2)
    assert not world.cache.make_room(2, 0)
    world.cache.check()
    assert world.cache.reset().forgotten == {"device": 0, "host": 0}
    world.close()


# ------------------------------------------------------------------------------------------------ retractions


def retract_behind_a_step_that_still_writes(sequencer: Sequencer) -> None:
    """A block with a key, on its way to the host, and a second one that a decoding step is still writing."""
    world = WatchedWorld(sequencer, num_slots=2)
    table, fence = world.compute_blocks("a", 2)
    fence.wait_passed()
    world.seal(table, "a", 1, fence)
    fence = world.write(table.hold.slots[1:], "tail")
    lease = table.retract(2 * BLOCK - 3, fence)
    assert isinstance(lease, SavedLease)
    world.finish(*world.compute_blocks("b", 2))
    assert lease.ready and lease.num_from(0) == 2, "both are kept for it"
    assert lease.claim(0, 2)
    world.cache.reset()  # but not what nobody has come for
    seen = world.resume("a", lease, 2)
    assert sorted(map(str, seen)) == ["a"] * LAYERS + ["tail"] * LAYERS, seen
    world.close()


def retract_behind_two_demotions(sequencer: Sequencer) -> None:
    """All three are over by the time that anybody looks; what the retracted request is kept is what the
    demotions brought."""
    world = WatchedWorld(sequencer)
    table, fence = world.compute_blocks("a", 2)
    fence.wait_passed()
    for num_blocks in (1, 2):
        world.seal(table, "a", num_blocks, fence)
        world.cache.submit_saves()
    lease = table.retract(2 * BLOCK, fence)
    assert isinstance(lease, SavedLease)
    world.cache.drain(1.0)
    world.cache.settle()
    assert lease.ready and lease.num_from(0) == 2, lease.slots
    lease.end()
    world.close()


def a_retraction_that_could_not_be_submitted(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    table, fence = world.compute_blocks("a", 2)
    world.refuse_launch(world.cache.saves.mover)
    with contextlib.suppress(OSError):
        table.retract(2 * BLOCK, fence)
    world.finish(table, fence)
    world.close()


def cancel_during_a_retraction(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    table, fence = world.compute_blocks("a", 2)
    lease = table.retract(2 * BLOCK, fence)
    assert lease is not None
    lease.end()
    world.close()


def a_retraction_that_fails(sequencer: Sequencer) -> None:
    world = WatchedWorld(sequencer)
    world.demotions.num = 1
    table, fence = world.compute_blocks("a", 2)
    lease = table.retract(2 * BLOCK, fence)
    assert lease is not None
    world.cache.drain(1.0)
    assert lease.ready and lease.num_from(0) == 0, "what did not arrive is not there"
    lease.end()
    world.close()

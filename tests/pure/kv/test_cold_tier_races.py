"""Cold tiers alone, under chosen interleavings and under the sanitizer. With all of the cache before them a
missing edge of theirs is hidden by another, so they are tried without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from penstock.contract import Access, Fence, Mode
from penstock.kv.blocks.handles import Pin, Reservation
from penstock.kv.tiers.calls import StoreGroup
from penstock.kv.tiers.cold import ColdLanes, ColdLimits, ColdTier, Writing
from penstock.kv.tiers.store import Outcome
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sequencer import Sequencer, explore, run_on
from penstock.testing.stores import HandClock, MemoryStore
from tests.pure.kv.cold_rig import ARENA, BLOCK_BYTES, KEYS, LAYERS, Host, are_over, content

OLD = KEYS[10:12]  # what lay in the slots before
NEW = KEYS[:2]


class World:
    """Two host slots, a tier with two lanes each way, one block an op, and the lanes of transfers with the
    device."""

    def __init__(self, sequencer: Sequencer, sanitizer: Sanitizer | None) -> None:
        lanes = {
            name: sequencer.lane(name)
            for name in ("ask", "load", "read-0", "read-1", "save", "write-0", "write-1")
        }
        self.sequencer = sequencer
        self.host = Host(2, sanitizer)
        self.store = MemoryStore()
        self.load, self.save = lanes["load"], lanes["save"]
        cold = ColdLanes(
            [lanes["read-0"], lanes["read-1"]], [lanes["write-0"], lanes["write-1"]], lanes["ask"]
        )
        self.tier = ColdTier(
            self.store, cold, self.host.view, ARENA, ColdLimits(group_bytes=BLOCK_BYTES), HandClock()
        )
        self.seen: list[bytes] = []

    def fill(self, keys: Sequence[bytes], after: Sequence[Fence]) -> Fence:
        """A save from the device into both slots."""
        for fence in after:
            self.save.wait(fence)
        access = Access("host", [0, 1], (0, LAYERS), Mode.WRITE)
        self.save.submit(partial(self.host.fill, [0, 1], keys), [access], label="save")
        return self.save.record()

    def look(self, after: Sequence[Fence] = ()) -> Fence:
        """A promotion: what it reads is `seen`."""
        for fence in after:
            self.load.wait(fence)
        access = Access("host", [0, 1], (0, LAYERS), Mode.READ)
        self.load.submit(
            lambda: self.seen.extend(bytes(self.host.view(slot)) for slot in (0, 1)),
            [access],
            label="promote",
        )
        return self.load.record()

    def saved(self, keys: Sequence[bytes]) -> Pin:
        """Blocks with keys that only a pin protects."""
        reservation = self.host.pool.try_reserve(2, "save")
        assert reservation is not None
        self.fill(keys, reservation.after).wait_passed()
        hold = self.host.pool.hold("save")
        reservation.commit(hold)
        self.host.pool.seal(list(reservation.slots), keys)
        pin = self.host.pool.pin([0, 1], "write")
        hold.end()
        return pin

    def reuse(self, keys: Sequence[bytes]) -> None:
        """Others take the slots, if they can be had."""
        reservation = self.host.pool.try_reserve(2, "other")
        if reservation is not None:
            fence = self.fill(keys, reservation.after)
            fence.wait_passed()
            reservation.rollback(fence)

    def read(self, keys: Sequence[bytes], into: Reservation) -> list[StoreGroup]:
        return [
            self.tier.read([key], [slot], into.after, "request")
            for key, slot in zip(keys, into.slots, strict=True)
        ]

    def settle(self) -> list[Writing]:
        given = self.tier.settle()
        for writing in given:
            if isinstance(writing.handle, Pin) and not writing.handle.ended:
                writing.handle.end()
        return given


# --------------------------------------------------------------------------------------------------- programs


def read_into_slots_that_a_promotion_still_reads(world: World) -> None:
    for key in NEW:
        world.store.write([key], [0], [memoryview(content(key))])
    pin = world.saved(OLD)
    fence = world.look()
    pin.end(fence)
    reservation = world.host.pool.try_reserve(2, "request")
    assert reservation is not None
    groups = world.read(NEW, reservation)
    world.tier.drain(1.0)
    assert are_over(groups)
    reservation.rollback()
    assert world.seen == [content(key) for key in OLD], "the promotion got what it was to get"


def give_slots_to_others_once_they_are_written(world: World) -> None:
    pin = world.saved(NEW)
    writing = world.tier.try_write(NEW, [0, 1], [0, 1], pin)
    assert writing is not None
    world.settle()
    world.reuse(OLD)
    world.tier.drain(1.0)
    world.settle()
    world.reuse(OLD)
    for key in NEW:
        assert world.store.blocks[key].endswith(content(key)), "what was stored is what lay there"
    assert writing.done_keys == NEW and pin.ended


def publish_what_was_read_and_promote_it(world: World) -> None:
    for key in NEW:
        world.store.write([key], [0], [memoryview(content(key))])
    reservation = world.host.pool.try_reserve(2, "request")
    assert reservation is not None
    groups = world.read(NEW, reservation)
    if not are_over(groups):
        world.tier.drain(1.0)
    assert [outcome for group in groups for outcome in group.take_outcomes()] == [Outcome.DONE] * 2
    hold = world.host.pool.hold("request")
    reservation.commit(hold)
    world.host.pool.seal([0, 1], NEW)
    fence = world.look([group.fence for group in groups])
    hold.end(fence)
    fence.wait_passed()
    assert world.seen == [content(key) for key in NEW]


def persist_what_is_being_written(world: World) -> None:
    pin = world.saved(NEW)
    writing = world.tier.try_write(NEW, [0, 1], [0, 1], pin)
    persisting = world.tier.persist()
    assert writing is not None
    for _ in range(2):
        world.settle()
        assert writing.settled or not persisting.settled, (
            "whoever sees it settled knows what became of every block"
        )
    world.tier.drain(1.0)
    world.settle()
    assert persisting.settled and persisting.error is None and writing.done_keys == NEW
    assert world.store.calls == ["write", "write", "persist"]


PROGRAMS = (
    read_into_slots_that_a_promotion_still_reads,
    give_slots_to_others_once_they_are_written,
    publish_what_was_read_and_promote_it,
    persist_what_is_being_written,
)


def of(program: Callable[[World], None]) -> Callable[[Sequencer], None]:
    return lambda sequencer: program(World(sequencer, None))


def sanitized(program: Callable[[World], None], seed: int | None) -> tuple[list[str], object]:
    """What the sanitizer says to one run, and how it failed if it did. `seed` None: the default schedule."""
    sanitizer = Sanitizer()
    sequencer = Sequencer(rng=None if seed is None else random.Random(seed), observer=sanitizer)
    _, failure = run_on(sequencer, lambda sequencer: program(World(sequencer, sanitizer)))
    return [str(report) for report in sanitizer.reports], failure


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_interleaving_shows_a_race(program: Callable[[World], None]) -> None:
    num_runs, failure = explore(of(program), max_preemptions=2, max_runs=400)
    assert failure is None, str(failure)
    assert num_runs > 50


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_sanitizer_is_silent_about(program: Callable[[World], None]) -> None:
    for seed in (None, *range(8)):
        said, failure = sanitized(program, seed)
        assert not said, f"with seed {seed}:\n" + "\n".join(said)
        assert failure is None, f"with seed {seed}: {failure}"

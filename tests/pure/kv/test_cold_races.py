"""The races of reads and writes behind host memory with copies to and from the device, under chosen
interleavings and under the sanitizer: ours do not happen. Real pools, tiers and movers; only the bytes are
few and the lanes are sequenced."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import Access, Fence, Mode, Prefix
from penstock.engine.execution.arriving import Arriving
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from penstock.kv.tiers.cold import ColdLanes, ColdLimits, ColdTier
from penstock.kv.tiers.host import HostLease, HostTier
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.reads import Fetch
from penstock.kv.tiers.tiers import Tiers
from penstock.kv.transfer import Mover
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sequencer import Sequencer, explore, run_on
from penstock.testing.stores import HandClock, MemoryStore
from tests.pure.kv.stacked_rig import ALL, BLOCK_BYTES, CELL
from tests.pure.kv.storage_rig import BLOCK, LAYERS, LAYOUT, SCOPE
from tests.support.stepped import ByteArena, TagArena, TagCopier

SEEDS = 10  # random schedules of each program, besides the default one


class World:
    """A device, host memory and a disk of one block an exchange, each with as many slots as a program
    needs."""

    def __init__(
        self, sequencer: Sequencer, sanitizer: Sanitizer | None, num_device: int = 4, num_host: int = 4
    ) -> None:
        lane, launcher = sequencer.lane, sequencer.launcher
        self.sequencer, self.compute = sequencer, lane("compute")
        self.device, self.host = (
            TagArena("device", num_device, LAYERS),
            ByteArena("host", num_host, LAYERS, CELL),
        )
        pool = BlockPool(num_device, "device", sanitizer)
        tier = HostTier(BlockPool(num_host, "host", sanitizer), BLOCK, 1e9)
        load = Mover(
            ("host", "device"), TagCopier(self.host, self.device), lane("load"), launcher("launch-load")
        )
        save = Mover(
            ("device", "host"), TagCopier(self.device, self.host), lane("save"), launcher("launch-save")
        )
        self.store = MemoryStore("ssd", local=True)
        lanes = ColdLanes([lane("read-0"), lane("read-1")], [lane("write")], None)
        limits = ColdLimits(group_bytes=BLOCK_BYTES, stuck_s=1e9)
        self.tier = ColdTier(self.store, lanes, self.host.view, ("host", LAYERS), limits, HandClock())
        limits = TierLimits(0, 1e9, load_always=True)
        tiers = Tiers.of(pool, tier, [self.tier], (load, save), LAYOUT, limits)
        tiers.loads._part_blocks = 1
        self.cache = KvCache(pool, SCOPE, tiers=tiers)

    def prefix(self, name: str, num_blocks: int = 2) -> Prefix:
        prefix = self.cache.prefix_of([ord(name)] * (num_blocks * BLOCK))
        assert prefix is not None
        return prefix

    def put(self, name: str, num_blocks: int = 2) -> None:
        keys = self.prefix(name, num_blocks).keys
        self.store.write(keys, range(num_blocks), [memoryview(key * LAYERS) for key in keys])

    def run(
        self, name: str, num_blocks: int = 2, table: BlockTable | None = None
    ) -> tuple[BlockTable, Fence]:
        """A request's prefill: one op that writes the blocks that it does not have yet."""
        own = self.cache.open(name, self.prefix(name, num_blocks), 0) if table is None else table
        while not own.try_extend(num_blocks - own.num_slots):
            self.cache.drain(20.0)
        for fence in own.take_after():
            self.compute.wait(fence)
        slots, keys = own.hold.slots[own.num_keyed :], self.prefix(name, num_blocks).keys[own.num_keyed :]

        def fill() -> None:
            self.device.write(slots, ALL, [[key] * LAYERS for key in keys])

        self.compute.submit(fill, [Access("device", slots, ALL, Mode.WRITE)], label=f"{name} is computed")
        return own, self.compute.record()

    def save(self, name: str, num_blocks: int = 2) -> None:
        """Computed, and on its way down."""
        table, fence = self.run(name, num_blocks)
        fence.wait_passed()
        table.seal([ord(name)] * (num_blocks * BLOCK), num_blocks * BLOCK, fence)
        self.cache.submit_saves()
        table.release(fence)

    def bring_to_host(self, name: str, num_blocks: int = 2) -> None:
        self.save(name, num_blocks)
        self.cache.drain(20.0)
        self.cache.reset(["device"])

    def load(self, name: str, num_blocks: int = 2, loses: bool = False) -> tuple[BlockTable, BlockLoad]:
        """`loses`: the disk has none of it any more when it is read."""
        prefix = self.prefix(name, num_blocks)
        lease = self.cache.lease(name, prefix)
        assert isinstance(lease, HostLease) and lease.num_from(0) == num_blocks
        table = self.cache.open(name, prefix, 0)
        if loses:
            self.store.lose()
        return table, table.promote(lease, num_blocks, 1)

    def fetch(self, name: str, num_blocks: int) -> Fetch | None:
        return self.cache.prefetch(self.prefix(name, num_blocks), name)

    def read(
        self, table: BlockTable, num_blocks: int, load: BlockLoad | None = None
    ) -> tuple[Fence, list[Any]]:
        """A step that reads the table's first blocks, behind `load`."""
        if load is not None:
            Arriving([load]).wait_on(self.compute, LAYERS)
        slots, seen = table.hold.slots[:num_blocks], list[Any]()
        access = Access("device", slots, ALL, Mode.READ)
        self.compute.submit(
            lambda: seen.extend(self.device.read(slots, ALL)), [access], label=f"{table.owner} is read"
        )
        return self.compute.record(), seen

    def turns(self, num: int = 3) -> None:
        """The engine comes round, whatever has happened meanwhile."""
        for _ in range(num):
            self.cache.settle()

    def finish(self, table: BlockTable, fence: Fence) -> None:
        fence.wait_passed()
        table.release(fence)

    def end(self) -> None:
        self.cache.drain(20.0)
        self.cache.check()
        for key, stored in self.store.blocks.items():
            assert stored.endswith(key * LAYERS), "the disk has wrong bytes"
        self.cache.close(1.0)


def whole(prefix: Prefix, num_blocks: int | None = None) -> list[Any]:
    return [[key] * LAYERS for key in prefix.keys[:num_blocks]]


# --------------------------------------------------------------------------------------------------- programs


def promote_what_is_still_being_read(sequencer: Sequencer, sanitizer: Sanitizer | None) -> None:
    world = World(sequencer, sanitizer)
    world.put("a", 3)
    table, load = world.load("a", 3)
    world.turns()
    world.cache.drain(20.0)
    assert load.settled and load.num_landed == 3
    fence, seen = world.read(table, 3, load)
    world.finish(table, fence)
    assert seen == whole(world.prefix("a", 3))
    world.end()


def read_into_host_slots_that_a_promotion_still_reads(
    sequencer: Sequencer, sanitizer: Sanitizer | None
) -> None:
    world = World(sequencer, sanitizer, num_host=2)
    world.bring_to_host("a")
    world.put("b")
    one, promotion = world.load("a")
    two, load = world.load("b")
    world.cache.drain(20.0)
    fence, seen = world.read(one, 2)
    world.finish(one, fence)
    assert promotion.error() is None and seen == whole(world.prefix("a"))
    assert load.settled
    world.finish(*world.run("b", 2, two))
    world.end()


def read_into_host_slots_that_the_copy_of_a_load_still_reads(
    sequencer: Sequencer, sanitizer: Sanitizer | None
) -> None:
    world = World(sequencer, sanitizer, num_device=6, num_host=2)
    world.put("a")
    world.put("b")
    one, first = world.load("a")
    sequencer.pause("waits for the reads", lambda: world.store.calls.count("read") == 2)
    world.turns(2)
    one.release(world.compute.record())
    world.turns(1)
    world.cache.reset(["host"])
    two, second = world.load("b")
    world.turns(2)
    world.cache.drain(20.0)
    assert isinstance(first, BlockLoad) and first.over and second.settled
    world.finish(*world.run("b", 2, two))
    world.end()


def evict_and_refill_a_slot_that_is_written_to_the_disk(
    sequencer: Sequencer, sanitizer: Sanitizer | None
) -> None:
    world = World(sequencer, sanitizer, num_host=2)
    world.save("a")
    sequencer.pause("waits for the copies", lambda: world.cache.saves.mover.lane.num_finished >= 2)  # type: ignore[attr-defined]
    world.turns(2)
    world.cache.reset()
    world.save("b")
    world.cache.drain(20.0)
    assert all(key in world.store.blocks for key in world.prefix("a").keys)
    world.end()


def read_over_a_slot_that_is_written_to_the_disk(sequencer: Sequencer, sanitizer: Sanitizer | None) -> None:
    world = World(sequencer, sanitizer, num_host=2)
    world.put("b")
    world.save("a")
    sequencer.pause("waits for the copies", lambda: world.cache.saves.mover.lane.num_finished >= 2)  # type: ignore[attr-defined]
    world.turns(2)
    world.cache.reset()
    table, load = world.load("b")
    world.cache.drain(20.0)
    assert load.settled
    world.finish(*world.run("b", 2, table))
    world.end()


def cancel_while_blocks_are_read(sequencer: Sequencer, sanitizer: Sanitizer | None) -> None:
    world = World(sequencer, sanitizer, num_host=2)
    world.put("a")
    table, load = world.load("a")
    table.release(world.compute.record())
    world.turns(1)
    world.save("b")
    world.cache.drain(20.0)
    assert isinstance(load, BlockLoad) and load.over
    world.end()


def load_into_slots_that_a_step_still_reads(sequencer: Sequencer, sanitizer: Sanitizer | None) -> None:
    world = World(sequencer, sanitizer, num_device=2)
    world.put("a")
    table, _ = world.run("b")
    fence, seen = world.read(table, 2)
    table.release(fence)  # cancelled while its step is on the lane
    table, load = world.load("a")
    world.turns()
    world.cache.drain(20.0)
    fence, _ = world.read(table, 2, load)
    world.finish(table, fence)
    assert seen == whole(world.prefix("b"))
    world.end()


def compute_where_a_load_ended_short_into_slots_that_a_step_still_reads(
    sequencer: Sequencer, sanitizer: Sanitizer | None
) -> None:
    world = World(sequencer, sanitizer, num_device=2)
    world.put("a")
    # the step that had the slots is on no lane that the table's own steps come behind
    other = sequencer.lane("other")
    table, fence = world.run("b")
    fence.wait_passed()
    slots, seen = table.hold.slots, list[Any]()
    other.submit(
        lambda: seen.extend(world.device.read(slots, ALL)),
        [Access("device", slots, ALL, Mode.READ)],
        label="b is read",
    )
    table.release(other.record())
    table, load = world.load("a", loses=True)
    world.tier.drain(20.0)
    world.turns(1)
    assert load.settled and load.num_landed == 0
    world.finish(*world.run("a", 2, table))
    assert seen == whole(world.prefix("b"))
    world.end()


def fetch_over_a_slot_that_is_written_to_the_disk(sequencer: Sequencer, sanitizer: Sanitizer | None) -> None:
    world = World(sequencer, sanitizer)
    world.put("b", 1)
    world.save("a", 4)
    sequencer.pause("waits for the copies", lambda: world.cache.saves.mover.lane.num_finished >= 2)  # type: ignore[attr-defined]
    world.turns(2)
    world.cache.reset()
    world.fetch("b", 1)
    world.cache.drain(20.0)
    world.end()


def save_while_a_fetch_that_nobody_wants_any_more_reads(
    sequencer: Sequencer, sanitizer: Sanitizer | None
) -> None:
    world = World(sequencer, sanitizer)
    world.put("a", 1)
    fetch = world.fetch("a", 1)
    if fetch is not None:
        fetch.end()
    world.turns(1)
    world.save("b", 4)
    world.cache.drain(20.0)
    assert fetch is not None and fetch.settled
    world.end()


def promote_what_a_fetch_is_still_reading(sequencer: Sequencer, sanitizer: Sanitizer | None) -> None:
    world = World(sequencer, sanitizer)
    world.put("a", 3)
    fetch = world.fetch("a", 3)
    world.turns(1)
    table, load = world.load("a", 3)
    world.turns(2)
    world.save("b", 1)  # wants a host slot while the copies are under way
    world.cache.drain(20.0)
    assert fetch is not None and fetch.settled and load.settled and load.num_landed == 3
    fence, seen = world.read(table, 3, load)
    world.finish(table, fence)
    assert seen == whole(world.prefix("a", 3)) and world.store.calls.count("read") == 3, (
        "each block was read once"
    )
    world.end()


Of = Callable[[Sequencer, Sanitizer | None], None]
PROGRAMS: tuple[Of, ...] = (
    promote_what_is_still_being_read,
    read_into_host_slots_that_a_promotion_still_reads,
    read_into_host_slots_that_the_copy_of_a_load_still_reads,
    evict_and_refill_a_slot_that_is_written_to_the_disk,
    read_over_a_slot_that_is_written_to_the_disk,
    cancel_while_blocks_are_read,
    fetch_over_a_slot_that_is_written_to_the_disk,
    save_while_a_fetch_that_nobody_wants_any_more_reads,
    promote_what_a_fetch_is_still_reading,
    load_into_slots_that_a_step_still_reads,
    compute_where_a_load_ended_short_into_slots_that_a_step_still_reads,
)


def sanitized(program: Of, seed: int | None) -> tuple[list[str], object]:
    """What the sanitizer says to one run, and how the run failed if it did. `seed` None: the default
    schedule."""
    sanitizer = Sanitizer()

    def to_the_end(sequencer: Sequencer) -> None:
        try:
            program(sequencer, sanitizer)
        finally:  # what was asked for before it failed still happens
            sequencer.run_all()

    _, failure = run_on(
        Sequencer(rng=None if seed is None else random.Random(seed), observer=sanitizer), to_the_end
    )
    return [str(report) for report in sanitizer.reports], failure


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_interleaving_shows_the_race(program: Of) -> None:
    num_runs, failure = explore(lambda sequencer: program(sequencer, None), max_preemptions=2, max_runs=150)
    assert failure is None, str(failure)
    assert num_runs > 50


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_sanitizer_is_silent_about(program: Of) -> None:
    for seed in (None, *range(SEEDS)):
        said, failure = sanitized(program, seed)
        assert not said, f"the sanitizer reports, with seed {seed}:\n" + "\n".join(said)
        assert failure is None, f"with seed {seed}: {failure}"

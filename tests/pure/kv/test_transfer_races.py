"""The classic races of KV transfers, under every interleaving of the lanes within a bound: ours do not
happen, and each one does as soon as the edge that forbids it is taken away. Real pools, tiers and movers;
only the bytes are Python values and the lanes are sequenced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from penstock.contract import Access, Fence, Mode, Prefix
from penstock.engine.execution.arriving import Arriving
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.memory import BlockLayout
from penstock.kv.table import BlockTable
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.saves import Save, Saves
from penstock.kv.tiers.tiers import Tiers
from penstock.kv.transfer import Layers, Mover, Slots, Transfer
from penstock.testing.sequencer import Failure, Program, SequencedLane, Sequencer, explore, run

BLOCK = 8
LAYERS = 6  # two groups of three
SCOPE = Scope(b"w" * 32, "float32", b"layout", BLOCK, "rope")
Cells = list[list[object]]  # by slot, by layer


class ListCopier:
    def __init__(self, source: Cells, dest: Cells) -> None:
        self._source, self._dest = source, dest

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        for source, dest in zip(source_slots.tolist(), dest_slots.tolist(), strict=True):
            self._dest[dest][layers[0] : layers[1]] = self._source[source][layers[0] : layers[1]]


@dataclass
class World:
    """A device of `num_slots` slots, a host tier and the lanes between them."""

    sequencer: Sequencer
    num_slots: int = 4
    device: Cells = field(default_factory=list)
    host: Cells = field(default_factory=list)

    def __post_init__(self) -> None:
        lane, launcher = self.sequencer.lane, self.sequencer.launcher
        self.compute: SequencedLane = lane("compute")
        self.device = [[None] * LAYERS for _ in range(self.num_slots)]
        self.host = [[None] * LAYERS for _ in range(8)]
        pool = BlockPool(self.num_slots, "device")
        tier = HostTier(BlockPool(8, "host"), BLOCK, lease_s=1e9)
        load = Mover(
            ("host", "device"), ListCopier(self.host, self.device), lane("load"), launcher("launch-load")
        )
        save = Mover(
            ("device", "host"), ListCopier(self.device, self.host), lane("save"), launcher("launch-save")
        )
        layout = BlockLayout(LAYERS, 1, 4, BLOCK, "float32")
        limits = TierLimits(overlap_tokens=0, load_deadline_s=1e9)
        tiers = Tiers.of(pool, tier, (), (load, save), layout, limits)
        self.tiers = tiers
        self.loads = tiers.loads
        self.cache = KvCache(pool, SCOPE, tiers=tiers)

    def tokens(self, name: str, num_blocks: int) -> list[int]:
        return [ord(name)] * (BLOCK * num_blocks)

    def prefix(self, name: str, num_blocks: int) -> Prefix:
        prefix = self.cache.prefix_of(self.tokens(name, num_blocks))
        assert prefix is not None
        return prefix

    def compute_blocks(self, name: str, num_blocks: int) -> tuple[BlockTable, Fence]:
        """A request's prefill: one op per layer that writes its name into its slots."""
        table = self.cache.open(name, self.prefix(name, num_blocks), 0)
        while not table.try_extend(num_blocks):
            self.cache.drain(20.0)
        for fence in table.take_after():
            self.compute.wait(fence)
        slots = table.slots(num_blocks * BLOCK).tolist()
        for layer in range(LAYERS):
            access = Access("device", slots, (layer, layer + 1), Mode.WRITE)
            self.compute.submit(
                lambda layer=layer: self._fill(slots, layer, name), [access], label=f"{name} layer {layer}"
            )
        return table, self.compute.record()

    def read_blocks(
        self, table: BlockTable, num_blocks: int, seen: list[object], arriving: Arriving | None = None
    ) -> Fence:
        """A step that reads: one op per layer, waiting layer by layer for what is on its way."""
        slots = table.slots(num_blocks * BLOCK).tolist()
        for layer in range(LAYERS):
            if arriving is not None:
                arriving.wait_on(self.compute, layer + 1)
            access = Access("device", slots, (layer, layer + 1), Mode.READ)
            self.compute.submit(
                lambda layer=layer: seen.extend(self.device[s][layer] for s in slots),
                [access],
                label=f"read {layer}",
            )
        return self.compute.record()

    def replay_blocks(
        self, table: BlockTable, num_blocks: int, seen: list[object], arriving: Arriving
    ) -> Fence:
        """The same as one captured unit: all waits stand before it."""
        slots = table.slots(num_blocks * BLOCK).tolist()
        with self.compute.capture("step") as capture:
            for layer in range(LAYERS):
                self.compute.submit(
                    lambda layer=layer: seen.extend(self.device[s][layer] for s in slots),
                    label=f"read {layer}",
                )
        arriving.wait_on(self.compute, LAYERS)
        self.compute.replay(capture.replay, [Access("device", slots, (0, LAYERS), Mode.READ)])
        return self.compute.record()

    def bring_to_host(self, name: str, num_blocks: int) -> None:
        table, fence = self.compute_blocks(name, num_blocks)
        fence.wait_passed()
        table.seal(self.tokens(name, num_blocks), num_blocks * BLOCK, fence)
        slots = list(table.hold.slots)
        table.release(fence)
        self.cache.drain(20.0)
        self.cache.reset(("device",))
        for slot in slots:  # the next to be drawn
            self.device[slot] = ["stale"] * LAYERS

    def promote(self, name: str, num_blocks: int) -> tuple[BlockTable, BlockLoad]:
        prefix = self.prefix(name, num_blocks)
        lease = self.cache.lease(name, prefix)
        assert lease is not None and lease.num_from(0) == num_blocks
        table = self.cache.open(name, prefix, 0)
        load = table.promote(lease, num_blocks, num_next=1)
        self.sequencer.pause("waits for the launch", lambda: load.arrivals is not None)
        return table, load

    def never_save(self) -> None:
        """What was offered is not sent: the device alone has it."""
        for offer in self.cache.saves._offers:
            offer.pin.end()
        self.cache.saves._offers.clear()

    def in_host(self, name: str, num_blocks: int) -> list[object]:
        slots = self.cache.saves._host.pool.find_each(self.prefix(name, num_blocks).keys)
        return [cell for slot in slots if slot >= 0 for cell in self.host[slot]]

    def finish(self, table: BlockTable, fence: Fence) -> None:
        self.leave(table, fence)
        self.cache.check()

    def leave(self, table: BlockTable, fence: Fence) -> None:
        fence.wait_passed()
        self.cache.settle()
        table.release(fence)
        self.cache.drain(20.0)

    def _fill(self, slots: Sequence[int], layer: int, name: str) -> None:
        for slot in slots:
            self.device[slot][layer] = name


# --------------------------------------------------------------------------------------------------- programs


# Holds invariant 1: a demotion reads a block behind the step that wrote it.
def demote_while_the_producer_runs(sequencer: Sequencer) -> None:
    world = World(sequencer)
    table, fence = world.compute_blocks("a", 2)
    # earlier than an engine would: the step has not been read
    table.seal(world.tokens("a", 2), 2 * BLOCK, fence)
    world.cache.submit_saves()
    world.finish(table, fence)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host


# Holds invariant 2: a promotion writes behind a step of a request that has left.
def promote_into_slots_that_a_step_still_reads(sequencer: Sequencer) -> None:
    world = World(sequencer, num_slots=2)
    world.bring_to_host("a", 2)
    table, fence = world.compute_blocks("b", 2)
    seen: list[object] = []
    fence = world.read_blocks(table, 2, seen)
    table.release(fence)  # a request that is cancelled while its step is on the lane
    table, load = world.promote("a", 2)
    fence = world.read_blocks(table, 2, [], Arriving([load]))
    world.finish(table, fence)
    assert seen == ["b"] * 2 * LAYERS, seen


# Holds invariant 7: what a demotion reads stays pinned when its request has ended.
def reuse_slots_while_they_are_demoted(sequencer: Sequencer) -> None:
    world = World(sequencer, num_slots=2)
    table, fence = world.compute_blocks("a", 2)
    fence.wait_passed()
    table.seal(world.tokens("a", 2), 2 * BLOCK, fence)
    world.cache.submit_saves()
    table.release(fence)
    table, fence = world.compute_blocks("b", 2)
    world.finish(table, fence)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host


# Holds invariant 3: each layer is read behind its own part of the promotion.
def read_what_is_being_promoted(sequencer: Sequencer, captured: bool = False) -> None:
    world = World(sequencer)
    world.bring_to_host("a", 2)
    table, load = world.promote("a", 2)
    seen: list[object] = []
    fence = (world.replay_blocks if captured else world.read_blocks)(table, 2, seen, Arriving([load]))
    world.finish(table, fence)
    assert seen == ["a"] * 2 * LAYERS, seen


# Holds invariant 3: a replay reads behind all parts.
def replay_what_is_being_promoted(sequencer: Sequencer) -> None:
    read_what_is_being_promoted(sequencer, captured=True)


# Holds invariant 10: a drain covers what is submitted and not launched.
def flush_between_submit_and_launch(sequencer: Sequencer) -> None:
    world = World(sequencer, num_slots=2)
    table, fence = world.compute_blocks("a", 2)
    fence.wait_passed()
    table.seal(world.tokens("a", 2), 2 * BLOCK, fence)
    world.cache.submit_saves()
    slots = list(table.hold.slots)
    world.cache.drain(20.0, slots)
    for slot in slots:  # whoever flushed believes that nobody reads these any more
        world.device[slot] = ["overwritten"] * LAYERS
    world.finish(table, fence)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host


# Holds invariant 1: a demotion that makes room reads behind the step too.
def move_what_a_step_still_writes(sequencer: Sequencer) -> None:
    """Blocks that were never saved leave the device for another request, which gets their slots."""
    world = World(sequencer, num_slots=2)
    table, fence = world.compute_blocks("a", 2)
    # earlier than an engine would: the step has not been read
    table.seal(world.tokens("a", 2), 2 * BLOCK, fence)
    world.never_save()
    table.release(fence)
    assert not world.cache.make_room(2, 0)
    while not world.cache.make_room(2, 0):
        world.cache.drain(20.0)
    table, fence = world.compute_blocks("b", 2)
    world.finish(table, fence)
    assert world.in_host("a", 2) == ["a"] * 2 * LAYERS, world.host


# ----------------------------------------------------------------------------------------------------- faults


def no_fence_of_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Saves.offer
    monkeypatch.setattr(
        Saves,
        "offer",
        lambda self, hold, first, keys, fence, due=False: offer(self, hold, first, keys, None, due),
    )


def pins_that_end_at_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Save.__init__

    def unpinned(self: Save, *args: object, **named: object) -> None:
        make(self, *args, **named)  # type: ignore[arg-type]
        for pin in self.pins:
            pin.end()
        self.pins = []

    monkeypatch.setattr(Save, "__init__", unpinned)


def waits_for_the_first_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Arriving.wait_on
    monkeypatch.setattr(Arriving, "wait_on", lambda self, lane, end: whole(self, lane, min(end, 1)))


def a_drain_that_sees_only_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slots that somebody flushes; at the end of a program everything is waited for."""
    touches = Transfer.touches
    monkeypatch.setattr(
        Transfer,
        "touches",
        lambda self, slots: touches(self, slots) and (slots is None or self.arrivals is not None),
    )


def a_move_that_gives_its_slots_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Saves._save_slots

    def faulty(self: Saves, slots: Sequence[int], *args: object, **named: bool) -> None:
        move(self, slots, *args, **named)  # type: ignore[arg-type]
        transfer = self.mover.flying[-1]
        for pin in transfer.pins:
            pin.end()
        assert isinstance(transfer, Save)
        transfer.pins, transfer.moves = [], False

    monkeypatch.setattr(Saves, "_save_slots", faulty)


PROGRAMS: tuple[Program, ...] = (
    demote_while_the_producer_runs,
    promote_into_slots_that_a_step_still_reads,
    reuse_slots_while_they_are_demoted,
    read_what_is_being_promoted,
    replay_what_is_being_promoted,
    flush_between_submit_and_launch,
    move_what_a_step_still_writes,
)
FAULTS: dict[Program, Callable[[pytest.MonkeyPatch], None]] = {
    demote_while_the_producer_runs: no_fence_of_the_producer,
    reuse_slots_while_they_are_demoted: pins_that_end_at_submit,
    read_what_is_being_promoted: waits_for_the_first_group_only,
    flush_between_submit_and_launch: a_drain_that_sees_only_what_is_launched,
    move_what_a_step_still_writes: a_move_that_gives_its_slots_back_at_once,
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_interleaving_shows_the_race(program: Program) -> None:
    num_runs, failure = explore(program, max_preemptions=2, max_runs=400)
    assert failure is None, str(failure)
    assert num_runs > 50


@pytest.mark.parametrize(("program", "fault"), FAULTS.items(), ids=lambda value: value.__name__)
def test_without_the_edge_some_interleaving_shows_it(
    program: Program, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    _, failure = explore(program, max_preemptions=2, max_runs=2000)
    assert isinstance(failure, Failure), "no schedule found what the fault breaks"
    assert run(program, failure.schedule)[1] is not None, (
        "a schedule that fails fails again when it is replayed"
    )
    monkeypatch.undo()
    assert run(program, failure.schedule)[1] is None, "the same schedule is harmless for the code as it is"

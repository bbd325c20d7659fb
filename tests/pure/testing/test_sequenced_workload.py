"""Random requests over the real cache, tiers and movers, under random interleavings of all lanes and with the
sanitizer listening: every read finds what was written for its tokens, and nothing is reported. Bytes are
Python values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import Access, Fence, Load, Mode
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.memory import BlockLayout
from penstock.kv.table import BlockTable
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.saves import Save
from penstock.kv.tiers.tiers import Tiers
from penstock.kv.transfer import Layers, Mover, Slots
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sequencer import Failure, Sequencer, explore, run

BLOCK, LAYERS, DEVICE_SLOTS, HOST_SLOTS = 4, 6, 3, 4  # too few slots for the prompts below, on either side
SCOPE = Scope(b"w" * 32, "float32", b"layout", BLOCK, "rope")
Cells = list[list[object]]  # by slot, by layer


class Visit(NamedTuple):
    """A request: its prompt is one of a few, so that its prefix comes back; a hasty one leaves while its step
    is on the lane."""

    prompt: str
    num_blocks: int
    hasty: bool


class CellCopier:
    def __init__(self, source: Cells, dest: Cells) -> None:
        self._source, self._dest = source, dest

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        for source, dest in zip(source_slots.tolist(), dest_slots.tolist(), strict=True):
            self._dest[dest][slice(*layers)] = self._source[source][slice(*layers)]


class Shop:
    """An engine without a model: a step writes what its prompt says into the slots it computes, and reads all
    of its table."""

    def __init__(self, sequencer: Sequencer) -> None:
        self.sanitizer = sanitizer = Sanitizer()
        sequencer.watch(sanitizer)
        self._sequencer = sequencer
        self._device: Cells = [[None] * LAYERS for _ in range(DEVICE_SLOTS)]
        host: Cells = [[None] * LAYERS for _ in range(HOST_SLOTS)]
        lane, launcher = sequencer.lane, sequencer.launcher
        self._compute = lane("compute")
        pool = BlockPool(DEVICE_SLOTS, "device", sanitizer)
        tier = HostTier(BlockPool(HOST_SLOTS, "host", sanitizer), BLOCK, lease_s=1e9)
        load = Mover(
            ("host", "device"), CellCopier(host, self._device), lane("load"), launcher("launch-load")
        )
        save = Mover(
            ("device", "host"), CellCopier(self._device, host), lane("save"), launcher("launch-save")
        )
        layout = BlockLayout(LAYERS, 1, 4, BLOCK, "float32")
        tiers = Tiers.of(pool, tier, (), (load, save), layout, TierLimits(0, 1e9))
        self._cache = KvCache(pool, SCOPE, tiers=tiers)
        self.num_promoted = 0
        self.wrong: list[tuple[object, ...]] = []  # what was read where something else was computed

    def serve(self, visit: Visit, number: int) -> None:
        cache, owner = self._cache, f"r{number}"
        tokens = [ord(visit.prompt)] * (BLOCK * visit.num_blocks)
        prefix = cache.prefix_of(tokens)
        assert prefix is not None
        lease = cache.lease(owner, prefix)
        cache.settle()
        num_here = cache.match(prefix.keys, lease).num_blocks
        table = cache.open(owner, prefix, num_here)
        load: Load | None = None
        if lease is not None and (num_colder := lease.num_from(num_here)):
            self._make_room(num_colder)
            load = table.promote(lease, num_colder, num_next=1)
            self.num_promoted += num_colder
            self._sequencer.pause("waits for the launch", lambda: load.arrivals is not None)
        elif lease is not None:
            lease.end()
        fence = self._step(visit, table, load)
        if not visit.hasty:
            fence.wait_passed()
            cache.settle()
            table.seal(tokens, len(tokens), fence)
            cache.submit_saves()
        table.release(fence)
        for tier, counts in cache.stats().slots.items():
            self.sanitizer.turns.balanced(tier, counts._asdict())

    def close(self) -> None:
        self._cache.drain(1.0)
        self._cache.check()
        assert not self.sanitizer.reports, "\n".join(map(str, self.sanitizer.reports))

    def _make_room(self, num_blocks: int) -> None:
        if self._cache.num_available < num_blocks:
            self._cache.drain(1.0)

    def _step(self, visit: Visit, table: BlockTable, load: Load | None) -> Fence:
        first = table.num_slots
        self._make_room(visit.num_blocks - first)
        assert table.try_extend(visit.num_blocks - first)
        for fence in table.take_after():
            self._compute.wait(fence)
        slots = table.slots(BLOCK * visit.num_blocks).tolist()
        arrivals = [] if load is None else list(load.arrivals or ())
        for layer in range(LAYERS):
            while arrivals and arrivals[0].layers[0] <= layer:
                self._compute.wait(arrivals.pop(0).fence)
            read = Access("device", slots, (layer, layer + 1), Mode.READ)
            write = read._replace(slots=slots[first:], mode=Mode.WRITE)
            op = self._layer(visit, slots, first, layer)
            self._compute.submit(op, (read, write), label=f"layer {layer} of {visit.prompt}")
        return self._compute.record()

    def _layer(self, visit: Visit, slots: list[int], first: int, layer: int) -> Callable[[], None]:
        def run_layer() -> None:
            for block in range(first, len(slots)):
                self._device[slots[block]][layer] = (visit.prompt, block, layer)
            for block, slot in enumerate(slots):
                if self._device[slot][layer] != (visit.prompt, block, layer):
                    self.wrong.append((visit, block, layer, self._device[slot][layer]))

        return run_layer


def served(visits: list[Visit], shops: list[Shop]) -> Callable[[Sequencer], None]:
    def program(sequencer: Sequencer) -> None:
        shop = Shop(sequencer)
        shops.append(shop)
        for number, visit in enumerate(visits):
            shop.serve(visit, number)
        shop.close()
        assert not shop.wrong, f"read something else than was computed: {shop.wrong[0]}"

    return program


visits_strategy = st.lists(
    st.builds(Visit, st.sampled_from("ab"), st.integers(1, 3), st.booleans()), min_size=2, max_size=6
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(visits_strategy, st.integers(0, 1 << 30))
def test_every_read_finds_what_was_computed_for_its_tokens_however_lanes_interleave(
    visits: list[Visit], seed: int
) -> None:
    for rng in (None, random.Random(seed)):
        failure = run(served(visits, []), rng=rng)[1]
        assert failure is None, str(failure)


A, B = Visit("a", 3, False), Visit("b", 3, False)
RETURNING = [A, B, A, B._replace(hasty=True), A]


def test_the_workload_brings_prefixes_back_from_the_host() -> None:
    shops: list[Shop] = []
    assert run(served(RETURNING, shops))[1] is None
    assert shops[0].num_promoted >= 3


def test_no_schedule_of_a_request_and_its_demotion_does_harm() -> None:
    num_runs, failure = explore(served([A._replace(num_blocks=1)], []), max_preemptions=2)
    assert failure is None and num_runs > 50, str(failure)


# ----------------------------------------------------------------------------------------------------- faults


def no_wait_for_what_arrives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Shop, "_step", lambda self, visit, table, load, whole=Shop._step: whole(self, visit, table, None)
    )


def pins_that_end_at_submit(patch: pytest.MonkeyPatch) -> None:
    def unpinned(self: Save, *args: object, whole: Callable[..., None] = Save.__init__) -> None:
        whole(self, *args)
        for pin in self.pins:
            pin.end()
        self.pins = []

    patch.setattr(Save, "__init__", unpinned)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Kind, str]] = [
    (no_wait_for_what_arrives, Kind.RACE, "is not ordered after write"),
    (pins_that_end_at_submit, Kind.RACE, "by 'demote of r0' on lane save is not ordered after write"),
]


@pytest.mark.parametrize(("fault", "kind", "words"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS])
def test_a_fault_is_reported_whether_or_not_its_schedule_does_harm(
    fault: Callable[[pytest.MonkeyPatch], None], kind: Kind, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    shops: list[Shop] = []
    failure = run(served(RETURNING, shops))[1]
    assert isinstance(failure, Failure)
    assert any(report.kind is kind and words in report.sentence for report in shops[0].sanitizer.reports), (
        str(failure)
    )

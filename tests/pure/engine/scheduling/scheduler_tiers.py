"""What is colder than the device in the scheduler's world: the real host tier, loads, saves, movers and cold
tiers, over lanes that are run by hand and stores that are the test's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers import loads as loads_module
from penstock.kv.tiers import reads as reads_module
from penstock.kv.tiers import saves as saves_module
from penstock.kv.tiers import tiers
from penstock.kv.tiers.cold import ColdLanes, ColdLimits, ColdTier
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.transfer import Mover
from penstock.testing.stores import HandClock, MemoryStore
from tests.pure.engine.scheduling.scheduler_device import BLOCK, LAYERS, Device
from tests.support.stepped import ByteArena, SteppedArena, SteppedLane, TagCopier

LEASE_S = 100.0
LAYOUT = BlockLayout(num_layers=LAYERS, num_kv_heads=1, head_dim=1, block_tokens=BLOCK, dtype="float32")


@dataclass
class Cold:
    """`num_host`: blocks of host memory. `overlap_tokens`: steps over fewer wait for all of a load. `stores`:
    cold tiers."""

    num_host: int
    overlap_tokens: int = 0
    stores: tuple[str, ...] = ()
    host: Callable[..., HostTier] = HostTier
    postpones: bool = False  # what the device keeps need not be in a full host memory as well


class Tiers:
    """Loads and saves whose launches, copies, failures and times are the test's."""

    def __init__(self, cold: Cold, pool: BlockPool, device: Device) -> None:
        self.now_s = 0.0
        self.worth = True  # whether loading is faster than computing
        self.host = cold.host(BlockPool(cold.num_host, "host"), BLOCK, LEASE_S, lambda: self.now_s)
        self._device = device
        self.promotions, self.demotions = (
            TagCopier(device.host, device.arena),
            TagCopier(device.arena, device.host),
        )
        loader, saver = (
            self._mover(device.host, device.arena, self.promotions),
            self._mover(device.arena, device.host, self.demotions),
        )
        self.clock = HandClock()
        self.stores = {name: MemoryStore(name, local=name == "ssd") for name in cold.stores}
        limits = TierLimits(cold.overlap_tokens, 1e9, postpones=cold.postpones)
        stores = [self._cold_tier(store) for store in self.stores.values()]
        self.wired = tiers.Tiers.of(pool, self.host, stores, (loader, saver), LAYOUT, limits)
        self.saves, self.loads, self.writeback = self.wired.saves, self.wired.loads, self.wired.writeback
        judge = self.loads.worth
        self.loads.worth = lambda *args: judge(*args) if self.worth else 0  # type: ignore[method-assign]

    def _cold_tier(self, store: MemoryStore) -> ColdTier:
        arena, lane = self._device.host, self._device.lanes.lane
        assert isinstance(arena, ByteArena)
        readers = [lane(f"read {store.name} {number}") for number in range(2)]
        lanes = ColdLanes(
            readers, [lane(f"write {store.name}")], None if store.local else lane(f"ask {store.name}")
        )
        limits = ColdLimits(group_bytes=arena.view(0).nbytes, stuck_s=1e9)
        return ColdTier(store, lanes, arena.view, ("host", LAYERS), limits, self.clock)

    def _mover(self, source: SteppedArena, dest: SteppedArena, copier: TagCopier) -> Mover:
        name = f"to {dest.name}"
        return Mover(
            (source.name, dest.name),
            copier,
            self._device.lanes.lane(name),
            self._device.lanes.lane(f"launch {name}"),
        )

    def lane(self, dest: str) -> SteppedLane:
        return self._device.lanes.lane(f"to {dest}")

    def launch(self, dest: str) -> bool:
        """The launcher of copies to that tier takes the next transfer."""
        return self._device.lanes.lane(f"launch to {dest}").step()

    def move(self, dest: str) -> bool:
        """The copy lane to that tier goes on by half an item."""
        return self.lane(dest).step()

    def make_late(self) -> None:
        """What is on its way to the device takes longer than anybody should wait."""
        for reads in self.loads.reads:
            reads.deadline_s = 0.0

    def heal(self) -> None:
        """Stores are well again, and the next look at them finds out."""
        for store in self.stores.values():
            store.raises = store.max_blocks = None
            store.fails.clear()
        self.clock.advance(100.0)

    def expire(self) -> None:
        """A lease's time goes by."""
        self.now_s += 2 * LEASE_S


def land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of a few blocks are in several parts already."""
    monkeypatch.setattr(saves_module, "_PART_BLOCKS", 2)
    monkeypatch.setattr(loads_module, "_LAST_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr(loads_module, "_PART_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr(reads_module, "_READ_AHEAD", 2)

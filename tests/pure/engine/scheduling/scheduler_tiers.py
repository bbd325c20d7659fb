"""What is colder than the device in the scheduler's world: the real host tier, ladder and movers, over lanes that are run by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_device import BLOCK, LAYERS, Device

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.memory.layout import BlockLayout
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.ladder import Ladder, LadderLimits
from penstock.kv.transfer.mover import Mover
from penstock.testing.stepped import SteppedLane, TagArena, TagCopier

LEASE_S = 100.0
LAYOUT = BlockLayout(num_layers=LAYERS, num_kv_heads=1, head_dim=1, block_tokens=BLOCK, dtype="float32")


@dataclass
class Cold:
    """`num_host`: blocks of host memory. `overlap_tokens`: steps over fewer wait for all of a load."""

    num_host: int
    overlap_tokens: int = 0
    ladder: Callable[..., Ladder] = Ladder
    host: Callable[..., HostTier] = HostTier


class Tiers:
    """A ladder whose launches, copies, failures and times are the test's."""

    def __init__(self, cold: Cold, pool: BlockPool, device: Device) -> None:
        self.now_s = 0.0
        self.worth = True  # whether loading is faster than computing
        self.host = cold.host(BlockPool(cold.num_host, "host"), BLOCK, LEASE_S, lambda: self.now_s)
        self._device = device
        self.promotions, self.demotions = TagCopier(device.host, device.arena), TagCopier(device.arena, device.host)
        movers = self._mover(device.host, device.arena, self.promotions), self._mover(device.arena, device.host, self.demotions)
        self.ladder = cold.ladder(pool, self.host, movers, LAYOUT, LadderLimits(cold.overlap_tokens, 1e9))
        judge = self.ladder.worth
        self.ladder.worth = lambda lease, depth: judge(lease, depth) if self.worth else 0  # type: ignore[method-assign]

    def _mover(self, source: TagArena, dest: TagArena, copier: TagCopier) -> Mover:
        name = f"to {dest.name}"
        return Mover((source.name, dest.name), copier, self._device.lanes.lane(name), self._device.lanes.lane(f"launch {name}"))

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
        for promotion in self.ladder.promoter.in_flight():
            promotion.deadline_s = 0.0

    def expire(self) -> None:
        """A lease's time goes by."""
        self.now_s += 2 * LEASE_S

"""All tiers colder than the device, with the traffic between them. Owns how they are wired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.cold import ColdTier
from penstock.kv.tiers.host import HOST, HostTier
from penstock.kv.tiers.loads import Loads
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.saves import Saves
from penstock.kv.tiers.writeback import Writeback
from penstock.kv.transfer import Mover, NoMover


@dataclass(frozen=True, slots=True)
class Tiers:
    """Everything that is colder than the device, and the traffic with it."""

    host: HostTier
    writeback: Writeback
    saves: Saves
    loads: Loads

    @classmethod
    def of(
        cls,
        pool: BlockPool,
        host: HostTier,
        cold: Sequence[ColdTier],
        movers: tuple[Mover, Mover],
        layout: BlockLayout,
        limits: TierLimits,
    ) -> Tiers:
        """Between the device's `pool`, `host` and the tiers behind it. `movers`: to the device, and back."""
        loader, saver = movers
        writeback = Writeback(host, cold, limits.admission)
        saves = Saves(pool, host, writeback, saver, layout, limits)
        return cls(host, writeback, saves, Loads(pool, host, writeback, loader, layout, limits))

    @classmethod
    def none(cls, pool: BlockPool, block_tokens: int) -> Tiers:
        """For a cache with device memory only: a host tier without slots, and no cold tiers."""
        layout = BlockLayout(
            num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=block_tokens, dtype="float32"
        )
        host = HostTier(BlockPool(0, HOST), block_tokens, 0.0)
        return cls.of(pool, host, (), (NoMover(), NoMover()), layout, TierLimits(0, 0.0))

"""A cache over arenas of tags and lanes that a test runs by hand, with the few moves that its tests are made
of."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import AdmissionName
from penstock.kv.blocks.handles import Hold
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.events import KvEvents
from penstock.kv.memory import BlockLayout
from penstock.kv.rules import rule_for
from penstock.kv.tiers.cold import ColdTier
from penstock.kv.tiers.host import HostLease, HostTier
from penstock.kv.tiers.loads import BlockLoad, Copy
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.tiers import Tiers
from penstock.kv.transfer import Mover
from tests.support.stepped import SteppedArena, SteppedFence, SteppedLane, SteppedLanes, TagArena, TagCopier

BLOCK = 4
LAYERS = 6
LAYOUT = BlockLayout(num_layers=LAYERS, num_kv_heads=1, head_dim=1, block_tokens=BLOCK, dtype="float32")
SCOPE = Scope(weights=b"w", kv_dtype="float32", layout=b"l", block_tokens=BLOCK, position_scheme="rope")
KEYS = [bytes([i]) * 16 for i in range(40)]


class Rig:
    """`device` and `host` hold tags; a block that was computed under a key holds that key in every layer."""

    def __init__(
        self,
        num_device: int = 8,
        num_host: int = 16,
        overlap_tokens: int = 0,
        load_always: bool = False,
        prefix_cache: bool = True,
        admission: AdmissionName = "always",
        window: int = 0,
        events: KvEvents | None = None,
    ) -> None:
        """`window`: tokens that a token sees; 0: all."""
        self.now_s = 0.0
        reports = None if events is None else events.reports
        self.device, self.host_arena = TagArena("device", num_device, LAYERS), self.make_host_arena(num_host)
        self.lanes = SteppedLanes(self.device, self.host_arena)
        self.pool = BlockPool(num_device, "device", reports)
        self.host = HostTier(BlockPool(num_host, "host", reports), BLOCK, 100.0, lambda: self.now_s)
        self.load_copier, self.save_copier = (
            TagCopier(self.host_arena, self.device),
            TagCopier(self.device, self.host_arena),
        )
        loader = Mover(("host", "device"), self.load_copier, self.lane("load"), self.lane("launch load"))
        saver = Mover(("device", "host"), self.save_copier, self.lane("save"), self.lane("launch save"))
        self.compute = self.lane("compute")
        limits = TierLimits(overlap_tokens, 1e9, load_always, admission=admission)
        tiers = Tiers.of(self.pool, self.host, self.make_cold(), (loader, saver), LAYOUT, limits)
        self.loads, self.saves, self.writeback = tiers.loads, tiers.saves, tiers.writeback
        self.tiers = tiers
        self.cache = KvCache(self.pool, SCOPE, prefix_cache, tiers, rule_for((window,), BLOCK), events)

    def set_limits(self, limits: TierLimits) -> None:
        self.saves.limits = self.loads.costs.limits = limits

    def make_cold(self) -> Sequence[ColdTier]:
        return ()

    def make_host_arena(self, num_slots: int) -> SteppedArena:
        return TagArena("host", num_slots, LAYERS)

    def lane(self, name: str) -> SteppedLane:
        return self.lanes.lane(name)

    # ------------------------------------------------------------------------------------------------- tables

    def hold(self, num: int, owner: str = "request") -> Hold:
        hold = self.pool.hold(owner)
        reservation = self.pool.try_reserve(num, owner)
        assert reservation is not None
        reservation.commit(hold)
        return hold

    def computed(self, keys: list[bytes], owner: str = "request", num_more: int = 0) -> Hold:
        """A table whose first blocks have `keys`, and `num_more` that have none."""
        hold = self.hold(len(keys) + num_more, owner)
        tags = [*keys, *(f"{owner} {i}" for i in range(num_more))]
        self.device.write(hold.slots, (0, LAYERS), [[tag] * LAYERS for tag in tags])
        self.pool.seal(hold.slots[: len(keys)], keys)
        return hold

    def step(self) -> SteppedFence:
        """A step that is on the compute lane and has not run."""
        self.compute.submit(lambda: None, label="step")
        return self.compute.record()

    # ---------------------------------------------------------------------------------------------- transfers

    def save(self, keys: list[bytes], owner: str = "request") -> Hold:
        """Blocks that are in the host tier when this returns."""
        hold = self.computed(keys, owner)
        self.saves.offer(hold, 0, keys, None)
        self.saves.submit()
        self.land()
        return hold

    def land(self) -> list[BlockLoad]:
        self.lanes.run_all()
        return self.settle()

    def settle(self) -> list[BlockLoad]:
        """Loads of which a copy is over; no block gets a key."""
        self.host.expire()
        self.saves.settle()
        copies = tuple(self.loads.mover.flying)
        for _ in self.loads.settle():
            pass
        return [copy.load for copy in copies if copy.settled and isinstance(copy, Copy)]

    def promote(self, hold: Hold, lease: HostLease, num: int, num_next: int = 1) -> BlockLoad:
        first = hold.num_slots - num
        # they may be those that had the same blocks before
        self.device.spoil(hold.slots[first:], (0, LAYERS))
        return self.load_from(hold, first, lease, (), num_next=num_next)

    def load_from(
        self, hold: Hold, first: int, lease: HostLease, keys: Sequence[bytes], num_next: int = 1
    ) -> BlockLoad:
        return self.loads.begin(hold, first, lease, keys, (), num_next)

    def in_host(self, keys: list[bytes]) -> list[object]:
        """What lies under each key, None where nothing does; the same in every layer."""
        found: list[object] = []
        for slot in self.host.pool.find_each(keys):
            cells = self.host_arena.read([slot], (0, LAYERS))[0] if slot >= 0 else [None]
            assert len(set(cells)) == 1, "one block, whole"
            found.append(cells[0])
        return found

    def check(self) -> None:
        self.pool.check()
        self.host.pool.check()

    def close(self) -> None:
        """Nothing may be left."""
        self.check()
        self.cache.close()


def leased(rig: Rig, keys: list[bytes]) -> HostLease:
    lease = rig.host.lease(keys, "request")
    assert lease is not None
    return lease

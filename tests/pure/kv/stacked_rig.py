"""A cache over device, host and cold tiers on lanes that a test runs by hand, with the few moves that its
tests are made of. A block under a key holds that key, in every layer and in every tier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.config import AdmissionName
from penstock.contract import Access, Fence, Mode, Prefix
from penstock.kv.blocks.key import KEY_BYTES
from penstock.kv.events import KvEvents
from penstock.kv.table import BlockTable
from penstock.kv.tiers.cold import ColdLanes, ColdLimits, ColdTier
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.tiers.store import HEADER_BYTES, unpack
from penstock.kv.tiers.writeback import Persisting
from penstock.testing.stores import HandClock, MemoryStore
from tests.pure.kv.storage_rig import BLOCK, LAYERS, Rig
from tests.support.stepped import ByteArena, Cell, SteppedArena

BLOCK_BYTES = LAYERS * KEY_BYTES
ALL = (0, LAYERS)
GROUP = PART = 2  # blocks that are read, and promoted, together
_garbage = itertools.count(1)


def garbage() -> bytes:
    return b"\xff" * 8 + next(_garbage).to_bytes(8, "big")


CELL = Cell(KEY_BYTES, bytes, bytes, garbage)


class Stacked(Rig):
    """`tiers` are those behind the host, hottest first: the ssd answers from memory, the remote one on a
    lane. Reads of a tier take turns on two lanes, so that groups can be over in any order."""

    def __init__(
        self,
        *tiers: str,
        admission: AdmissionName = "always",
        num_device: int = 12,
        num_host: int = 16,
        prefix_cache: bool = True,
        window: int = 0,
        events: KvEvents | None = None,
    ) -> None:
        self.clock = HandClock()
        self.stores = {name: MemoryStore(name, local=name == "ssd") for name in tiers or ("ssd",)}
        super().__init__(
            num_device,
            num_host,
            load_always=True,
            prefix_cache=prefix_cache,
            admission=admission,
            window=window,
            events=events,
        )
        self.tiers = self.cache.cold_tiers
        self.loads._part_blocks = PART

    def make_cold(self) -> Sequence[ColdTier]:
        return [self._tier(store) for store in self.stores.values()]

    def make_host_arena(self, num_slots: int) -> SteppedArena:
        return ByteArena("host", num_slots, LAYERS, CELL)

    def _tier(self, store: MemoryStore) -> ColdTier:
        assert isinstance(self.host_arena, ByteArena)
        names = ([f"read {store.name} {i}" for i in range(2)], [f"write {store.name}"])
        readers, writers = ([self.lane(name) for name in some] for some in names)
        asker = None if store.local else self.lane(f"ask {store.name}")
        limits = ColdLimits(group_bytes=GROUP * BLOCK_BYTES, queue_bytes=8 * BLOCK_BYTES, stuck_s=1e9)
        return ColdTier(
            store,
            ColdLanes(readers, writers, asker),
            self.host_arena.view,
            ("host", LAYERS),
            limits,
            self.clock,
        )

    @property
    def first(self) -> MemoryStore:
        """The store of the first cold tier."""
        return next(iter(self.stores.values()))

    # ----------------------------------------------------------------------------------------------- requests

    def prefix(self, num_blocks: int, name: str = "a") -> Prefix:
        prefix = self.cache.prefix_of([ord(name)] * (num_blocks * BLOCK))
        assert prefix is not None
        return prefix

    def keys(self, num_blocks: int, name: str = "a") -> list[bytes]:
        return list(self.prefix(num_blocks, name).keys)

    def load(self, num_blocks: int, name: str = "a", owner: str = "request") -> tuple[BlockTable, BlockLoad]:
        """A request that comes for that prefix, and finds some of it behind the host."""
        table, load = self.promote_all(num_blocks, name, owner)
        assert load.is_cold
        return table, load

    def promote_all(
        self, num_blocks: int, name: str = "a", owner: str = "request"
    ) -> tuple[BlockTable, BlockLoad]:
        prefix = self.prefix(num_blocks, name)
        lease = self.cache.lease(owner, prefix)
        assert lease is not None and lease.ready
        match = self.cache.match(prefix.keys, lease)
        table = self.cache.open(owner, prefix, match.num_blocks)
        return table, table.promote(lease, match.num_colder, 1)

    def fill(self, table: BlockTable, num_blocks: int, name: str = "a") -> None:
        """Its blocks up to there are computed, after whom they have to wait for, and sealed."""
        if table.num_slots < num_blocks:
            assert table.try_extend(num_blocks - table.num_slots)
        fences = table.take_after()
        while not all(fence.passed() for fence in fences):
            assert self.compute.step(), "it waits for something else than steps"
        keys = self.keys(num_blocks, name)
        slots = table.hold.first(num_blocks)[table.num_keyed :].tolist()
        self.lanes.touch(Access("device", slots, ALL, Mode.WRITE), table.owner)
        self.device.write(slots, ALL, [[key] * LAYERS for key in keys[table.num_keyed :]])
        table.seal([ord(name)] * (num_blocks * BLOCK), num_blocks * BLOCK, None)
        self.cache.submit_saves()

    def ran(self, num_blocks: int, name: str = "a", owner: str = "earlier") -> BlockTable:
        table = self.cache.open(owner, self.prefix(num_blocks, name), 0)
        self.fill(table, num_blocks, name)
        return table

    def forget_device(self) -> None:
        """Slots that are free hold nothing of use."""
        self.cache.reset(["device"])
        self.device.spoil(self.pool._free, ALL)

    def remembered(self, num_blocks: int, name: str = "a", tiers: Sequence[str] = ("host",)) -> None:
        """In those of the colder tiers and in no other."""
        self.ran(num_blocks, name).release(None)
        self.flow()
        self.forget_device()
        if "host" not in tiers:
            self.cache.reset(["host"])
        for tier, store in self.stores.items():
            if tier not in tiers:
                store.lose(*self.keys(num_blocks, name))

    def put(self, tier: str, keys: Sequence[bytes]) -> None:
        """Somebody else has written these."""
        self.stores[tier].write(keys, range(len(keys)), [memoryview(key * LAYERS) for key in keys])

    # -------------------------------------------------------------------------------------------------- lanes

    def run(self, *names: str) -> None:
        """These lanes go on as far as they can, and what is over is taken in."""
        while any(lane.step() for lane in self.lanes if lane.name in names):
            pass
        self.cache.settle()
        self.check()

    def read(self, *readers: int, tier: str = "ssd") -> None:
        """The next thing of those lanes is read; a group and what wakes for it."""
        for number in readers:
            lane = self.lane(f"read {tier} {number}")
            steps = itertools.takewhile(lambda _, lane=lane: lane.step(), range(3))  # type: ignore[misc]
            assert len(list(steps)) == 3, f"nothing is left on {lane.name}"
            self.cache.settle()
            self.check()

    def copy(self) -> None:
        """What was sent to the device gets there."""
        self.run("launch load", "load")

    def flow(self) -> None:
        """Everything that can happen by itself has happened."""
        busy = True
        while busy:
            self.lanes.run_all()
            # one that takes in as much as it sets off sees no change
            settled = [self.cache.settle() for _ in range(2)]
            busy = any(settled) or any(len(lane) for lane in self.lanes)
        self.check()

    def persisted(self) -> Persisting:
        one = self.cache.persist()
        assert one is not None
        self.flow()
        assert one.settled
        return one

    # -------------------------------------------------------------------------------------------------- looks

    def device_has(self, num_blocks: int, name: str = "a") -> list[bool]:
        return [slot >= 0 for slot in self.pool.find_each(self.keys(num_blocks, name))]

    def host_has(self, keys: Sequence[bytes]) -> list[bool]:
        return [slot >= 0 for slot in self.host.pool.find_each(keys)]

    def store_has(self, keys: Sequence[bytes], tier: str = "ssd") -> list[bool]:
        return [key in self.stores[tier].blocks for key in keys]

    def check(self) -> None:
        """The books, and the bytes under every key of every tier."""
        self.cache.check()
        for pool, arena in ((self.pool, self.device), (self.host.pool, self.host_arena)):
            assert sum(pool.counts) == pool.num_slots
            for slot, key in enumerate(pool.index.key_of):
                assert key is None or arena.read([slot], ALL) == [[key] * LAYERS], (
                    f"slot {slot} of {pool.name} is not what its key says"
                )
        for tier, store in self.stores.items():
            for key, stored in store.blocks.items():
                header = unpack(bytes(stored[:HEADER_BYTES]))
                # the rest is damaged, and will be seen to be
                if header is not None and header.fits(bytes(stored[HEADER_BYTES:])):
                    assert header.key == key and stored[HEADER_BYTES:] == key * LAYERS, (
                        f"the {tier} tier has wrong bytes"
                    )

    def end(self, *tables: BlockTable, fence: Fence | None = None) -> None:
        """Nothing is left of anything, but blocks that nobody needs."""
        for table in tables:
            table.release(fence)
        self.flow()
        assert not self.loads.reads
        assert len(self.host.leases) == 0 and not self.host._arriving and not self.writeback._writing
        for pool in (self.pool, self.host.pool):
            assert pool.counts.free + pool.counts.idle == pool.num_slots, f"{pool.name}: {pool.counts}"
        self.cache.close()
        assert all(store.closed for store in self.stores.values())

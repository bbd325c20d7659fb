"""The parts of a cache with one tier behind host memory, without an engine: real arenas, lanes, copies and books, and a store. Owns them
and the blocks in them; what is timed is the measurement's choice."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch

from penstock.bench.transfer_ways import DEMOTE, PROMOTE, make_lane, pin_all
from penstock.contract import Prefix
from penstock.engine.build import COLD_READERS, COLD_WRITERS
from penstock.engine.engine import POLL_BEHIND_S
from penstock.errors import DeadlineExceeded, InvariantBroken, PenstockError
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.memory.arena import DeviceArena
from penstock.kv.memory.host import HostArena
from penstock.kv.memory.layout import BlockLayout
from penstock.kv.tiers.behind import Behind
from penstock.kv.tiers.cold import ColdLanes, ColdTier
from penstock.kv.tiers.envelope import checksum
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.ladder import Ladder, LadderLimits
from penstock.kv.tiers.store import BlockStore, Space
from penstock.kv.transfer.copies import make_copier
from penstock.kv.transfer.mover import Mover
from penstock.lanes.cpu import CpuLane
from penstock.models.progress import Progress

OWNER = "bench"
_WAIT_S = 600.0
_CLOSE_S = 60.0


class Shape(NamedTuple):
    """Of what is moved, and how often."""

    layout: BlockLayout
    device: torch.device
    repeat: int
    seed: int


class ColdRig:
    """`num_blocks` blocks of random bytes in host memory, room for as many more there and on the device, and an empty store. Their keys
    are those of one prompt, in a space that nobody else has."""

    def __init__(self, shape: Shape, num_blocks: int, open_store: Callable[[Space], BlockStore]) -> None:
        layout, device, _, self._seed = shape
        self.layout = layout
        self.device = DeviceArena(layout, num_blocks, device)
        self.host = HostArena(layout, 2 * num_blocks, device)
        scope = Scope(secrets.token_bytes(32), layout.dtype, layout.fingerprint(), layout.block_tokens, "none")
        self.store = open_store(Space(scope.digest(), layout.block_bytes, self.host.bytes))
        self.tier = ColdTier(self.store, _lanes(self.store), self.host.view, (self.host.name, layout.num_layers))
        self.slots = HostTier(BlockPool(self.host.num_slots, self.host.name), layout.block_tokens, _WAIT_S)
        pool = BlockPool(num_blocks, self.device.name)
        self.cache = KvCache(pool, scope, ladder=self._ladder(pool))
        self._woken = threading.Event()
        self.cache.call_when_launched(self._woken.set)
        tokens = np.random.default_rng(self._seed).integers(0, 1 << 16, num_blocks * layout.block_tokens)
        prefix = self.cache.prefix_of(tokens, "", None)
        if prefix is None:
            raise InvariantBroken("a cache with colder tiers gives no keys")
        self.prefix: Prefix = prefix
        self.depths = range(num_blocks)
        self.checksums: list[bytes] = []  # of the blocks, in order

    def _ladder(self, pool: BlockPool) -> Ladder:
        def mover(name: str, source: DeviceArena | HostArena, dest: DeviceArena | HostArena) -> Mover:
            launcher = CpuLane(f"launch-{name}", around=torch.inference_mode)
            copier = make_copier(source.tensor, dest.tensor, self.layout)
            return Mover((source.name, dest.name), copier, make_lane(name, self.device.device), launcher)

        movers = mover(PROMOTE, self.host, self.device), mover(DEMOTE, self.device, self.host)
        ladder = Ladder(pool, self.slots, movers, self.layout, LadderLimits(overlap_tokens=1, load_deadline_s=_WAIT_S, load_always=True))
        ladder.put_behind(Behind(self.slots, [self.tier], self.layout.block_bytes))
        return ladder

    # --------------------------------------------------------------------------------------------------------------- blocks

    @property
    def keys(self) -> Sequence[bytes]:
        return self.prefix.keys

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return len(self.keys) * self.layout.block_bytes

    def fill(self, progress: Progress) -> None:
        """Pin host memory, and put the blocks there."""
        pin_all(self.host, progress)
        taken = self.slots.take(self.keys, self.depths, OWNER)
        if taken.reservation is None or taken.keys != list(self.keys):
            raise InvariantBroken(f"{len(taken.keys)} of {len(self.keys)} blocks fit into an empty host tier")
        generator = torch.Generator().manual_seed(self._seed)
        for slot in taken.reservation.slots:
            self.host.tensor[slot].view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)
            self.checksums.append(checksum(self.host.view(slot)))
        self.slots.land(taken)

    def spoil(self) -> None:
        """Nothing of what is to come is in host memory or on the device; over when this returns, on a GPU, too."""
        self.host.tensor.zero_()
        self.device.tensor.zero_()[0, 0, 0, 0, 0, 0].item()

    def check(self, views: Sequence[memoryview], what: str) -> None:
        """`views` hold the blocks, in order."""
        for number, (view, expected) in enumerate(zip(views, self.checksums, strict=True)):
            if checksum(view) != expected:
                raise InvariantBroken(f"{what}: block {number} is not what was written")

    def device_views(self, slots: Sequence[int]) -> list[memoryview]:
        """What is in these slots of the device, fetched."""
        return [memoryview(self.device.tensor[slot].cpu().flatten().view(torch.uint8).numpy().tobytes()) for slot in slots]

    # ----------------------------------------------------------------------------------------------------------------- waits

    def wait_until(self, over: Callable[[], bool]) -> None:
        """Settle what there is to settle, as an engine without other work does."""
        by_s = time.monotonic() + _WAIT_S
        while True:
            self._woken.clear()
            self.cache.settle()
            if over():
                return
            if time.monotonic() > by_s:
                raise DeadlineExceeded(f"blocks are still on their way after {_WAIT_S:g} s")
            self._woken.wait(self.cache.look_again_s if self.cache.num_in_flight and not self.cache.is_hauling else POLL_BEHIND_S)

    def empty_store(self) -> None:
        """Raises StoreFailed."""
        resetting = self.cache.begin_reset([self.tier.name])
        self.wait_until(lambda: resetting.settled)
        if resetting.error is not None:
            raise resetting.error

    def wait_idle(self) -> None:
        self.wait_until(lambda: not (self.cache.num_in_flight or self.cache.num_behind))

    # ------------------------------------------------------------------------------------------------------------------- end

    def __enter__(self) -> ColdRig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """What the store got is removed from it. After an error as much of that as can be done."""
        if kind is None:
            self.wait_idle()
            self.empty_store()
            self.cache.close(_CLOSE_S)
        else:
            with contextlib.suppress(PenstockError):
                self.empty_store()
            with contextlib.suppress(PenstockError):
                self.cache.close(_CLOSE_S)
        self.host.close()


def _lanes(store: BlockStore) -> ColdLanes:
    readers = [CpuLane(f"{store.name}-read-{number}") for number in range(COLD_READERS)]
    writers = [CpuLane(f"{store.name}-write-{number}") for number in range(COLD_WRITERS)]
    return ColdLanes(readers, writers, None if store.local else CpuLane(f"{store.name}-ask"))

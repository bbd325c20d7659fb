"""A world of transfers for the sanitizer to watch: that of `test_transfer_races`, in which copies fail, lanes
refuse and leases run out when told to, and which is closed at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.contract import Access, Fence, Mode
from penstock.engine.execution.arriving import Arriving
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.tiers.saves import SavedLease
from penstock.kv.transfer import Copier, Layers, Mover, Slots, Transfer
from penstock.testing.sequencer import SequencedFence
from tests.pure.kv.test_transfer_races import BLOCK, LAYERS, SCOPE, World

LEASE_ENDS_S = 2e9  # later than any lease's time


@dataclass
class Failing:
    """Copies, but for the next `num` calls."""

    inner: Copier
    num: int = 0

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        if self.num:
            self.num -= 1
            raise OSError("the copy was told to fail")
        self.inner.copy(source_slots, dest_slots, layers)


@dataclass
class WatchedWorld(World):
    """`reuses` off: the device keeps no blocks for others, so that nothing there has a key."""

    reuses: bool = True
    now_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cache = KvCache(self.cache._pool, SCOPE, self.reuses, self.tiers)
        self.cache.host.clock = lambda: self.now_s
        self.promotions, self.demotions = (
            self._failing(mover) for mover in (self.cache.loads.mover, self.cache.saves.mover)
        )

    def write(self, slots: Iterable[int], value: object) -> Fence:
        """One op that writes all layers of `slots`."""
        run = list(slots)

        def fill() -> None:
            for slot in run:
                self.device[slot] = [value] * LAYERS

        self.compute.submit(fill, [Access("device", run, (0, LAYERS), Mode.WRITE)], label=f"write {value}")
        return self.compute.record()

    def seal(self, table: BlockTable, name: str, num_blocks: int, fence: Fence) -> None:
        table.seal(self.tokens(name, num_blocks), num_blocks * BLOCK, fence)

    def resume(self, name: str, lease: SavedLease, num_blocks: int) -> list[object]:
        """A retracted request comes back with what was saved for it: what it then reads."""
        seen: list[object] = []
        table = self.cache.open(name, self.prefix(name, num_blocks), 0)
        load = table.promote(lease, num_blocks, num_next=1)
        self.sequencer.pause("waits for the launch", lambda: load.arrivals is not None)
        self.finish(table, self.read_blocks(table, num_blocks, seen, Arriving([load])))
        return seen

    def refuse_copy(self, number: int) -> None:
        """The lane of promotions takes no copy from that number on, once."""
        lane = self.cache.loads.mover.lane
        whole, calls = lane.submit, iter(range(1000))

        def submit(*args: Any, **named: Any) -> Any:
            if next(calls) == number:
                raise OSError("the lane was told to refuse")
            return whole(*args, **named)

        lane.submit = submit  # type: ignore[method-assign]

    def refuse_launch(self, mover: Mover) -> None:
        """Its launcher takes no transfer, once."""
        launcher = mover._launcher
        whole = launcher.submit

        def submit(*args: Any, **named: Any) -> Any:
            launcher.submit = whole  # type: ignore[method-assign]
            raise OSError("the launcher was told to refuse")

        launcher.submit = submit  # type: ignore[method-assign]

    def settle(self, load: Transfer | BlockLoad) -> None:
        """As the engine does: it looks, and comes back when there is something to see."""
        end = (load.copies[-1] if isinstance(load, BlockLoad) else load)._end
        assert end is None or isinstance(end, SequencedFence)
        self.cache.settle()
        self.sequencer.pause("comes back later", lambda: end is None or end.is_over())
        self.cache.settle()
        assert load.settled

    def finish(self, table: BlockTable, fence: Fence) -> None:
        """The books are looked at when it is closed: whoever watches is told of what is left then."""
        self.leave(table, fence)

    def close(self) -> None:
        self.cache.drain(20.0)
        try:
            self.cache.check()
        finally:  # whoever watches is told of what is left when the pools are closed
            self.cache.close(1.0)

    @staticmethod
    def _failing(mover: Mover) -> Failing:
        mover.copier = failing = Failing(mover.copier)
        return failing

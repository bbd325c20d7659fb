"""A tier behind the host tier: reads and writes blocks of a store on lanes of its own, between it and host slots. Owns those lanes, what is
under way on them and the breaker; which slots, and what becomes of them, is the ladder's business.

Nothing here blocks its caller but `drain` and `close`. A block is read into a host slot and promoted from there; it is written from a host
slot that somebody else protects until the write is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.contract import Fence
from penstock.kv.blocks.handles import Handle
from penstock.kv.tiers.store import BlockStore, Outcome
from penstock.kv.tiers.worth import LinkRate
from penstock.lanes.lane import Lane


@dataclass(frozen=True, slots=True)
class ColdLanes:
    """Reads do not queue behind writes, nor questions behind either."""

    readers: Sequence[Lane]
    writers: Sequence[Lane]
    asker: Lane | None  # None: the store answers from memory


@dataclass(frozen=True, slots=True)
class ColdLimits:
    group_bytes: int = 4 << 20  # about so much is one op: enough for the device behind it, little enough to follow it block by block
    queue_bytes: int = 512 << 20  # of writes that are not over; what comes on top is dropped and counted
    stuck_s: float = 10.0  # an op that takes longer makes the tier unusable until it is over
    probe_s: float = 1.0  # between two looks whether a broken store is back; doubles up to 30


class Finding:
    """How many of some leading keys a tier has. `num` is 0 until the answer is there."""

    num: int

    @property
    def ready(self) -> bool:
        """Answered, failed, or out of patience: it does not change any more. Never blocks."""
        raise NotImplementedError


class ReadGroup(NamedTuple):
    """Consecutive blocks of a reading that are over."""

    places: slice  # of the keys that were asked for
    outcomes: Sequence[Outcome]
    fence: Fence  # behind the op that wrote their slots


class Reading:
    """Blocks on their way from a store into host slots."""

    def take_arrived(self) -> Iterator[ReadGroup]:
        """Groups that are over and were not given out yet, in order."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """Nothing of it will touch its slots any more."""
        raise NotImplementedError


class Writing:
    """Blocks on their way from host slots into a store."""

    handle: Handle  # protects the slots
    keys: Sequence[bytes]
    settled: bool  # seen to be over, by `settle`
    error: BaseException | None


class ColdTier:
    """One store with its lanes. All calls but `find` come from the engine thread."""

    def __init__(
        self,
        store: BlockStore,
        lanes: ColdLanes,
        view: Callable[[int], memoryview],  # a host slot's bytes
        arena: tuple[str, int],  # the host arena's name, and the number of layers: what accesses are declared with
        limits: ColdLimits = ColdLimits(),
    ) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def usable(self) -> bool:
        """Whether it pays to ask: the breaker is closed and nothing is stuck."""

    @property
    def group_blocks(self) -> int:
        """Blocks that are read together."""

    @property
    def rate(self) -> LinkRate: ...

    @property
    def queued_read_bytes(self) -> int: ...

    def find(self, keys: Sequence[bytes], patience_s: float) -> Finding:
        """For any thread."""

    def read(self, keys: Sequence[bytes], slots: Sequence[int], after: Sequence[Fence], owner: str) -> Reading:
        """In groups of `group_blocks`, dealt out to the readers in order."""

    def try_write(
        self, keys: Sequence[bytes], depths: Sequence[int], slots: Sequence[int], handle: Handle, after: Sequence[Fence], must: bool = False
    ) -> Writing | None:
        """None: the queue is full or the store unusable; counted, and nothing is kept. `must`: the queue's limit does not count."""

    def settle(self) -> list[Writing]:
        """Writes that are over since the last call. Also probes a broken store, on a lane, when it is time."""

    def persist(self) -> Writing:
        """Settled when everything written so far is safe; its `error` says why it is not. Its handle is None."""

"""Blocks on their way from several tiers into the slots of one table. Owns how far they have come, on top of the reading; who
copies and decides is elsewhere.

    host slots taken  ->  blocks read into them, group by group  ->  promoted in parts, the first while later ones are being read

Room for all of it is taken before the first byte moves: nothing here waits for room while it holds some.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract import Arrival, Fence
from penstock.errors import TransferFailed
from penstock.kv.blocks.handles import Handle, Hold
from penstock.kv.tiers.cold import Reading
from penstock.kv.tiers.fetch import Reads
from penstock.kv.tiers.host import ABSENT
from penstock.kv.tiers.promotion import Promotion


class Haul(Reads):
    """Implements `contract.Load`. It may end short: then the blocks before the first that did not come are there all the same.

    The table may end before it; then nothing more is promoted, and what is being read still lands in host memory.
    """

    def __init__(self, hold: Hold, first: int, keys: Sequence[bytes], after: Sequence[Fence], deadline_s: float) -> None:
        super().__init__(f"haul of {hold.owner}", first, keys, deadline_s)
        self.hold = hold
        self.after = tuple(after)  # earlier users of the table's slots
        self.sources = [ABSENT] * len(keys)  # host slots
        self.awaited: dict[bytes, tuple[int, Reading]] = {}  # blocks that a fetch was reading already, by key
        self.kept: list[Handle] = []  # protection of the sources
        self.parts: list[Promotion] = []
        self.num_sent = 0  # blocks handed to parts
        self.told = False  # its table knows that it ended short
        self._here = [False] * len(keys)  # in host memory
        self._num_ready = 0

    # -------------------------------------------------------------------------------------------------- contract.Load

    @property
    def arrivals(self) -> tuple[Arrival, ...] | None:
        if self.num_sent < len(self.keys):
            return None
        arrivals = [part.arrivals for part in self.parts if not part.settled]
        return None if None in arrivals else tuple(arrival for some in arrivals for arrival in some or ())

    @property
    def settled(self) -> bool:
        """As far as its request is concerned: reads behind what did not come may go on."""
        return self.num_sent == self.limit and all(part.settled for part in self.parts)

    @property
    def layered(self) -> bool:
        return False

    def error(self) -> BaseException | None:
        if self.limit < len(self.keys):
            return TransferFailed(f"{self.limit} of {len(self.keys)} blocks came for {self.hold.owner}")
        return next((error for part in self.parts if (error := part.error()) is not None), None)

    def nearly_landed(self) -> bool:
        arrivals = self.arrivals
        return arrivals is not None and all(arrival.fence.passed() for arrival in arrivals[:-1])

    @property
    def num_landed(self) -> int:
        num = 0
        for part in self.parts:
            if part.error() is not None or not part.settled:
                break
            num += part.num_blocks
        return num

    # -------------------------------------------------------------------------------------------------- for whoever runs it

    @property
    def ended(self) -> bool:
        return self.hold.ended

    @property
    def over(self) -> bool:
        return super().over and self.settled

    @property
    def num_ready(self) -> int:
        """Leading blocks that are in host memory."""
        while self._num_ready < self.limit and self._here[self._num_ready]:
            self._num_ready += 1
        return self._num_ready

    def touches(self, slots: frozenset[int] | None) -> bool:
        """Whether it is going to send blocks into one of these slots of the device; None: whether it is not over. What was sent is its
        parts' business, and into the slots of a table that has ended nothing is sent."""
        if slots is None:
            return not self.over
        return not self.hold.ended and not slots.isdisjoint(self.hold.first(self.first + self.limit)[self.first + self.num_sent :].tolist())

    def wait_reads(self, deadline_s: float) -> None:
        super().wait_reads(deadline_s)
        for _, reading in self.awaited.values():
            reading.wait_over(deadline_s)

    def came(self, block: int, slot: int) -> None:
        self.sources[block], self._here[block] = slot, True

    def cut(self, limit: int) -> None:
        """What was sent already is not called back."""
        self.limit = max(self.num_sent, min(self.limit, limit))

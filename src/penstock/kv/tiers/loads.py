"""Blocks on their way up: from host memory to the device (`Promotion`), from cold tiers into host memory (`Fetch`), and from cold tiers
into the slots of a table (`Haul`). Owns how far each has come, and the host slots on the way; who copies, reads and decides is elsewhere.

    cold tiers asked  ->  host slots taken  ->  blocks read into them, group by group  ->  promoted in parts, the first while later
    ones are being read; or ordinary blocks of the host tier, where nobody has a table for them yet

Room for all of a haul is taken before the first byte moves: nothing here waits for room while it holds some.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

import numpy as np

from penstock.contract import Arrival, Fence
from penstock.errors import TransferFailed
from penstock.kv.blocks.handles import Handle, Hold, RunPin
from penstock.kv.tiers.cold import ColdTier, Reading
from penstock.kv.tiers.host import ABSENT, HOST, Part, Taken
from penstock.kv.transfer.mover import Group, Slots, Transfer


class Promotion(Transfer):
    """Blocks on their way into the slots of a table."""

    def __init__(self, pin: RunPin, sources: Sequence[int] | Slots, kept: Sequence[Handle], groups: Sequence[Group], layered: bool) -> None:
        super().__init__(f"promote of {pin.owner}", groups)
        self.pins = [pin]
        self.first = pin.first  # block of the table
        self.kept = kept  # the protection of the sources
        self.source_slots = np.array(sources, np.int64)
        self.dest_slots = pin.array.astype(np.int64)
        self._layered = layered

    @property
    def layered(self) -> bool:
        return self._layered


class Staged(NamedTuple):
    """Blocks that are read together: room for them in the host tier."""

    blocks: Sequence[int]  # of the fetch
    taken: Taken
    tier: ColdTier
    reading: Reading
    num_emptied: int | None  # of the first cold tier, when it was begun; None: one was under way


class Reads:
    """What a fetch and a haul have in common: blocks `first..` of a prefix, those of them that are read, and how far that is."""

    def __init__(self, label: str, first: int, keys: Sequence[bytes], deadline_s: float) -> None:
        self.label = label
        self.first = first  # its blocks are those of the prefix from this number on
        self.keys = keys
        self.deadline_s = deadline_s
        self.room = Taken([], [], [])  # host slots for what is not being read yet
        self.unread: deque[tuple[str, Sequence[int]]] = deque()  # (tier, blocks) of that, in order
        self.staged: deque[Staged] = deque()  # being read, in order
        self.limit = len(keys)  # blocks from here on do not come

    @property
    def ended(self) -> bool:
        """Nobody wants more of it: what is being read still lands, the rest is not read."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """Nothing of it touches a slot any more."""
        return not self.staged and not self.unread

    @property
    def overdue(self) -> bool:
        """It takes longer than anybody should wait for it. Also where its request has gone: others wait for what is being read."""
        return not self.over and time.monotonic() > self.deadline_s

    def touches(self, slots: frozenset[int] | None) -> bool:
        """Whether it is going to send blocks into one of these slots of the device; None: whether it is not over."""
        return slots is None and not self.over

    def wait_reads(self, deadline_s: float) -> None:
        """Block until what is being read for it now is over. Raises DeadlineExceeded."""
        for staged in self.staged:
            staged.reading.wait_over(deadline_s)

    def came(self, block: int, slot: int) -> None:
        """`block` is in host memory."""
        raise NotImplementedError

    def cut(self, limit: int) -> None:
        """Blocks from `limit` on do not come, or are not wanted."""
        self.limit = min(self.limit, limit)


class Fetch(Reads):
    """Implements `contract.Prefetch`. It may end short: then the blocks before the first that did not come are there all the same. What
    has landed is not protected: it stays for as long as any other block of the host tier would."""

    def __init__(self, owner: str, first: int, keys: Sequence[bytes], deadline_s: float, asked: Sequence[Part]) -> None:
        super().__init__(f"fetch of {owner}", first, keys, deadline_s)
        self.asked = asked  # what cold tiers were asked for, until all have answered
        self.keeps = True  # what is read lands in the host tier
        self.num_blocks = 0  # that it reads, or has read
        self.num_came = 0  # of those
        self._ended = False

    @property
    def settled(self) -> bool:
        """Nothing of it is to come any more."""
        return self.over

    def error(self) -> BaseException | None:
        """Why it brought less than it was to bring, once it is settled."""
        if not self.settled or self.num_came == self.num_blocks:
            return None
        return TransferFailed(f"{self.num_came} of {self.num_blocks} blocks came into host memory by the {self.label}")

    def end(self) -> None:
        """As far as nobody else shares it. Idempotent; the next `settle` gives its room back."""
        self._ended = True
        self.asked = ()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def over(self) -> bool:
        return super().over and not self.asked

    @property
    def num_reserved(self) -> int:
        """Host slots that it has taken, and that nothing has landed in yet."""
        return len(self.room.keys) + sum(len(staged.blocks) for staged in self.staged)

    def came(self, block: int, slot: int) -> None:
        self.num_came += 1


def whose(slots: Sequence[int], parts: Sequence[Part], first: int) -> list[str]:
    """The tier that has each block from number `first` on, up to the first that none has; `slots` are those in host memory."""
    found = {number: part.tier for part in parts if part.finding.ready for number in part.blocks[: part.finding.num]}
    places = (HOST if slot != ABSENT else found.get(number) for number, slot in enumerate(slots, first))
    return [place for place in takewhile(lambda place: place is not None, places) if place is not None]


def runs_of(tiers: Sequence[str]) -> list[tuple[str, int]]:
    """Neighbours that one tier has, counted."""
    return [(tier, len(list(same))) for tier, same in groupby(tiers)]


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

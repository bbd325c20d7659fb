"""Blocks on their way from cold tiers into host memory. Owns how far they have come and the host slots on the way; who reads them and
decides about them is elsewhere.

    cold tiers asked  ->  host slots taken  ->  blocks read into them, group by group  ->  ordinary blocks of the host tier

Nobody need have a table for them: a fetch reads ahead of a request that waits in line, or that has not come yet. A haul is one with a
table, and goes on from there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

from penstock.errors import TransferFailed
from penstock.kv.tiers.cold import ColdTier, Reading
from penstock.kv.tiers.host import ABSENT, HOST, Part, Taken


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

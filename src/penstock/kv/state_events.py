"""Events of a model with recurrent layers: a block is named while a prefix that has a kept state begins with
it. Others are of no use, so a router that counts leading blocks would expect too much. Owns which blocks
these are.

    block - block - block - block - block     named: the first three, as long as all of them are in some tier
                      |                       not named: those behind the last state
                    state

States in a shared store are not known, as its blocks are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.contract import Fence
from penstock.figures import STATES
from penstock.kv.events import Change, KvEvents, KvReports, Merged, Told
from penstock.kv.tiers.ssd.tokens import TokenFile


class StateReports:
    """A `PoolObserver` of the states on a disk, whose pool has the name of the blocks' one."""

    def __init__(self, reports: KvReports) -> None:
        self._reports = reports

    def opened(self, pool: str, num_slots: int) -> None:
        self._reports.opened(f"{pool} {STATES}", num_slots)

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        self._reports.sealed(f"{pool} {STATES}", slot, key)

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        self._reports.evicted(f"{pool} {STATES}", slot, key)

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        """Does nothing."""

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        """Does nothing."""

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: Fence | None) -> None:
        """Does nothing."""

    def closed(self, pool: str, left: Sequence[str]) -> None:
        """Does nothing."""


class KvEventsUpToStates(KvEvents):
    """A block is usable if some tier has it, and a state behind it or a usable block after it."""

    def __init__(self, reports: KvReports, block_tokens: int, kept: TokenFile | None = None) -> None:
        super().__init__(reports, block_tokens, kept)
        self._states: dict[str, set[bytes]] = {}  # keys by tier of states
        self._num_after = Counter[bytes]()  # by key: the states behind this block, and usable blocks after it
        self._usable: set[bytes] = set()
        self._named: dict[str, set[bytes]] = {}  # what subscribers know, by tier of blocks

    def _note(self, change: Told | Change | str, found: Merged) -> None:
        tier = change.tier if isinstance(change, Change) else change
        if isinstance(tier, Told) or not tier.endswith(STATES):
            super()._note(change, found)
        elif isinstance(change, Change):
            here = self._states[tier]
            if change.is_here != (change.key in here):
                here ^= {change.key}
                self._add(change.key, 1 if change.is_here else -1)
                self._look_again(change.key, found)
        else:
            gone, self._states[tier] = self._states.get(tier, set()), set()
            for key in gone:
                self._add(key, -1)
                self._look_again(key, found)

    def _begin(self, here: Mapping[str, set[bytes]]) -> None:
        super()._begin({tier: keys for tier, keys in here.items() if not tier.endswith(STATES)})
        self._states = {tier: keys for tier, keys in here.items() if tier.endswith(STATES)}
        self._num_after = Counter(key for keys in self._states.values() for key in keys)
        self._usable, self._named = set(), {}

    def _say(self, tier: str, key: bytes, found: Merged) -> None:
        self._look_again(key, found)
        if key in self._usable:
            self._name(tier, key, found)

    def _unsay(self, tier: str, key: bytes, found: Merged) -> None:
        self._unname(tier, key, found)
        self._look_again(key, found)

    def _add(self, key: bytes, change: int) -> None:
        self._num_after[key] += change
        if not self._num_after[key]:
            del self._num_after[key]

    def _look_again(self, key: bytes | None, found: Merged) -> None:
        """Something about this block has changed, and with it perhaps the blocks before it."""
        new: list[bytes] = []
        while key is not None:
            is_here = any(key in here for here in self._here.values())
            is_usable = is_here and self._num_after[key] > 0 and key in self._contents
            if is_usable == (key in self._usable):
                break
            self._usable ^= {key}
            if is_usable:
                new.append(key)
            for tier in () if is_usable else self._named:
                self._unname(tier, key, found)
            key = self._contents[key].parent
            if key is not None:
                self._add(key, 1 if is_usable else -1)
        for key in reversed(new):  # parents first
            for tier, here in self._here.items():
                if key in here:
                    self._name(tier, key, found)

    def _name(self, tier: str, key: bytes, found: Merged) -> None:
        named = self._named.setdefault(tier, set())
        if key not in named:
            named.add(key)
            super()._say(tier, key, found)

    def _unname(self, tier: str, key: bytes, found: Merged) -> None:
        if key in self._named.get(tier, ()):
            self._named[tier].remove(key)
            super()._unsay(tier, key, found)

"""Matches of an engine's requests: which tier has a block. Owns what was asked and answered for each
request. A disk answers at once; a shared store is asked on its lane, one question for a chain of keys."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.kv.tiers.cold import ColdTier, Finding

_MOST_KEYS = 1_000_000  # of all requests; then the oldest request's answers are forgotten


class Presence(enum.Enum):
    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"  # a shared store has not answered


@dataclass(slots=True)
class _OfRequest:
    """What one request asked."""

    answers: dict[bytes, bool | None] = field(default_factory=dict)  # None: not answered
    waiting: list[tuple[Finding, Sequence[bytes]]] = field(default_factory=list)
    unsent: dict[Hashable, list[bytes]] = field(default_factory=dict)  # by chain
    lost: set[bytes] = field(default_factory=set)  # keys that could not be read

    def take_in(self) -> None:
        """Answers that have come. A key after a missing one counts as missing."""
        waiting, self.waiting = self.waiting, []
        for finding, keys in waiting:
            if finding.ready:
                self.answers.update((key, place < finding.num) for place, key in enumerate(keys))
            else:
                self.waiting.append((finding, keys))


class Matches:
    """Not for several threads at once."""

    def __init__(self, tiers: Sequence[ColdTier], patience_s: float) -> None:
        self._tiers = tiers
        self._patience_s = patience_s
        self._asked: OrderedDict[Hashable, _OfRequest] = OrderedDict()
        self._unsent: dict[Hashable, None] = {}  # owners
        self._waiting: dict[Hashable, None] = {}  # owners
        self._num_keys = 0

    def find(self, key: bytes, owner: Hashable, chain: Hashable) -> Presence:
        asked = self._asked.get(owner)
        if asked is not None and key in asked.lost:
            return Presence.MISS
        for tier in self._tiers:
            if tier.local:
                if tier.has(key):  # the engine tells of blocks that it uses
                    return Presence.HIT
            elif tier.usable:
                return self._find_shared(tier, key, owner, chain)
        return Presence.MISS

    def _find_shared(self, tier: ColdTier, key: bytes, owner: Hashable, chain: Hashable) -> Presence:
        asked = self._of(owner)
        if key in asked.answers:
            answer = asked.answers[key]
            return Presence.PENDING if answer is None else Presence.HIT if answer else Presence.MISS
        (is_known,) = tier.calls.known.has_each((key,))
        asked.answers[key] = True if is_known else None
        self._add_keys(1)
        if is_known:
            return Presence.HIT
        asked.unsent.setdefault(chain, []).append(key)
        self._unsent[owner] = None
        return Presence.PENDING

    def ask(self) -> None:
        owners, self._unsent = self._unsent, {}
        shared = next((tier for tier in self._tiers if not tier.local), None)
        for owner in owners:
            if shared is None or (asked := self._asked.get(owner)) is None:
                continue
            for keys in asked.unsent.values():
                asked.waiting.append((shared.find(keys, self._patience_s), keys))
            asked.unsent = {}
            self._waiting[owner] = None

    def take_in(self) -> None:
        """Answers that have come since the last call."""
        for owner in list(self._waiting):
            asked = self._asked.get(owner)
            if asked is not None:
                asked.take_in()
            if asked is None or not asked.waiting:
                del self._waiting[owner]

    def give_up(self, owner: Hashable, keys: Iterable[bytes]) -> None:
        """They could not be read: `owner` must not try again for ever."""
        if lost := set(keys):
            asked = self._of(owner)
            self._add_keys(len(lost - asked.lost))
            asked.lost |= lost

    def release(self, owner: Hashable) -> None:
        asked = self._asked.pop(owner, None)
        if asked is not None:
            self._num_keys -= len(asked.answers) + len(asked.lost)

    def clear(self) -> None:
        self._asked.clear()
        self._num_keys = 0

    def _of(self, owner: Hashable) -> _OfRequest:
        asked = self._asked.get(owner)
        if asked is None:
            asked = self._asked[owner] = _OfRequest()
        return asked

    def _add_keys(self, num: int) -> None:
        self._num_keys += num
        while self._num_keys > _MOST_KEYS and len(self._asked) > 1:
            self.release(next(iter(self._asked)))

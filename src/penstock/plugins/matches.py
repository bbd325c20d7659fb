"""Matches of an engine's requests: whether a tier has a block. Owns what was asked and answered for each
request. A disk answers at once; a shared store is asked on its lane, one question for a chain of keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.kv.tiers.cold import ColdTier, Finding

_MOST_KEYS = 1_000_000  # of all requests; then the oldest request's answers are forgotten


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
    """Of one thread, which must not wait: questions to a disk take no lock. `take_in` begins a step."""

    def __init__(self, tiers: Sequence[ColdTier], patience_s: float) -> None:
        """`tiers`: disks before a shared store. `patience_s`: a store that has not answered by then does not
        have the block."""
        self._local = [tier for tier in tiers if tier.local]
        self._shared = next((tier for tier in tiers if not tier.local), None)
        self._patience_s = patience_s
        self._asked: OrderedDict[Hashable, _OfRequest] = OrderedDict()
        self._unsent: dict[Hashable, None] = {}  # owners
        self._waiting: dict[Hashable, None] = {}  # owners
        self._num_keys = 0
        self.take_in()

    def find(self, key: bytes, owner: Hashable, chain: Hashable = None) -> bool | None:
        """Whether a tier has the block. None: `ask` sends the question to a shared store, and a later
        `take_in` finds the answer. `owner` is a request: such answers do not change until `release`. Keys of
        one `chain` asked between two `ask` are a prefix: if one is missing, so are those after it."""
        asked = self._asked.get(owner)
        if asked is not None and key in asked.lost:
            return False
        for books in self._disks:
            if books.has_each((key,))[0]:
                return True
        return False if self._asked_tier is None else self._find_shared(self._asked_tier, key, owner, chain)

    def _find_shared(self, tier: ColdTier, key: bytes, owner: Hashable, chain: Hashable) -> bool | None:
        asked = self._of(owner)
        if key in asked.answers:
            return asked.answers[key]
        (is_known,) = tier.calls.known.has_each((key,))
        asked.answers[key] = answer = is_known or None
        self._add_keys(1)
        if answer is None:
            asked.unsent.setdefault(chain, []).append(key)
            self._unsent[owner] = None
        return answer

    def ask(self) -> None:
        """Send the questions that came since the last call, one for each chain."""
        owners, self._unsent = self._unsent, {}
        for owner in owners:
            if self._shared is None or (asked := self._asked.get(owner)) is None:
                continue
            for keys in asked.unsent.values():
                asked.waiting.append((self._shared.find(keys, self._patience_s), keys))
            asked.unsent = {}
            self._waiting[owner] = None

    def take_in(self) -> None:
        """Answers that have come since the last call. Tiers that are usable now are asked until the next
        one."""
        for owner in list(self._waiting):
            asked = self._asked.get(owner)
            if asked is not None:
                asked.take_in()
            if asked is None or not asked.waiting:
                del self._waiting[owner]
        self._disks = [tier.books for tier in self._local if tier.usable]
        self._asked_tier = self._shared if self._shared is not None and self._shared.usable else None

    def give_up(self, owner: Hashable, keys: Iterable[bytes]) -> None:
        """They could not be read: `owner` does not find them any more, or it would try for ever."""
        if lost := set(keys):
            asked = self._of(owner)
            self._add_keys(len(lost - asked.lost))
            asked.lost |= lost

    def release(self, owner: Hashable) -> None:
        """Forget the answers that `owner` got."""
        asked = self._asked.pop(owner, None)
        if asked is not None:
            self._num_keys -= len(asked.answers) + len(asked.lost)

    def _of(self, owner: Hashable) -> _OfRequest:
        asked = self._asked.get(owner)
        if asked is None:
            asked = self._asked[owner] = _OfRequest()
        return asked

    def _add_keys(self, num: int) -> None:
        self._num_keys += num
        while self._num_keys > _MOST_KEYS and len(self._asked) > 1:
            self.release(next(iter(self._asked)))

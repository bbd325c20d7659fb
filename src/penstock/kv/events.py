"""Which blocks are in which tier, as events for routers. Owns the queue of changes, the tokens of the blocks
that may be named, and what has been said; knows no wire format and no socket.

    pools: a block was sealed or evicted        (any thread)  --+
    ledger, tables: the tokens of these keys    (any thread)  --+--> queue --> `take` (one thread) --> events

Reporting never waits: it appends to a bounded queue. If the queue is full, what was lost is made up for by
`Cleared` and all that is there. A block is named only if its tokens are known, and they are told for public
scopes alone: blocks of tenants, and blocks that only their request may use, never are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.contract import Fence
from penstock.figures import KvEventFigures

MOST_WAITING = 100_000  # changes that `take` has not seen
MOST_BLOCKS = 256  # in one event
# Tokens of blocks that are in no tier, or not yet: the newest are kept.
_SPARE_CONTENTS = 1 << 16
_TOKEN_BYTES = 4


class Content(NamedTuple):
    """What a public block holds."""

    parent: bytes | None  # key of the block before it
    tokens: bytes  # little-endian, 32 bits each
    adapter: str  # empty: none


class Stored(NamedTuple):
    """Neighbouring blocks of one sequence came into a tier."""

    tier: str
    keys: list[bytes]
    parent: bytes | None  # of the first
    tokens: list[bytes]  # by block
    adapter: str


class Removed(NamedTuple):
    """Blocks left a tier."""

    tier: str
    keys: list[bytes]


class Cleared(NamedTuple):
    """No tier has a block, until others are stored."""


Event = Stored | Removed | Cleared


class _Told(NamedTuple):
    """The tokens of neighbouring blocks."""

    adapter: str
    parent: bytes | None
    keys: Sequence[bytes]
    tokens: bytes


class _Change(NamedTuple):
    tier: str
    key: bytes
    is_here: bool


class KvEvents:
    """`take` and `close` are for one thread, all else for any. As an observer of pools, it sees each pool's
    changes in order, under the pool's lock."""

    def __init__(self, block_tokens: int, most_waiting: int = MOST_WAITING) -> None:
        self.num_dropped = 0  # changes
        self.num_made: Counter[str] = Counter(stored=0, removed=0, cleared=0)  # events
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._most_waiting = most_waiting
        self._queue: deque[_Told | _Change | str] = deque()  # a name: its pool was opened anew
        self._is_behind = False  # a change was dropped
        self._public: dict[bytes, str] = {}  # adapter by digest of a scope
        # by tier and slot: what is there now. `take` reads it only to make up for lost changes
        self._now: dict[str, list[bytes | None]] = {}
        # the rest is that of the thread that takes
        self._here: dict[str, set[bytes]] = {}  # keys by tier, public or not
        self._contents: dict[bytes, Content] = {}
        self._num_named = 0  # copies of blocks that subscribers know

    # --------------------------------------------------------------------------------------- what is reported

    def make_public(self, scope: bytes, adapter: str = "") -> None:
        """Blocks of this scope may be named."""
        self._public[scope] = adapter

    def tell(self, scope: bytes, parent: bytes | None, keys: Sequence[bytes], tokens: bytes) -> None:
        """The blocks `keys`, which follow `parent`, hold `tokens`. Before one of them is sealed."""
        adapter = self._public.get(scope)
        if adapter is not None and keys:
            self._put(_Told(adapter, parent, keys, tokens))

    def _put(self, change: _Told | _Change | str) -> None:
        if len(self._queue) < self._most_waiting:
            self._queue.append(change)
        else:
            self.num_dropped += 1
            self._is_behind = True

    # as a PoolObserver

    def opened(self, pool: str, num_slots: int) -> None:
        self._now[pool] = [None] * num_slots
        self._put(pool)

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        self._now[pool][slot] = key
        self._put(_Change(pool, key, True))

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        self._now[pool][slot] = None
        self._put(_Change(pool, key, False))

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        """Does nothing."""

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        """Does nothing."""

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: Fence | None) -> None:
        """Does nothing."""

    def closed(self, pool: str, left: Sequence[str]) -> None:
        """Does nothing: an engine that closes says so by `close`."""

    # ------------------------------------------------------------------------------------------ what is taken

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def take(self, most: int = MOST_WAITING) -> list[Event]:
        """What has changed since the last call, up to so many changes."""
        found, num_named = _Merged(), self._num_named
        if self._is_behind:
            self._catch_up(found)
        for _ in range(min(most, len(self._queue))):
            self._note(self._queue.popleft(), found)
        self._drop_contents()
        events = found.events
        if num_named and not self._num_named:
            events = [Cleared()]
        self.num_made.update(type(event).__name__.lower() for event in events)
        return events

    def close(self) -> list[Event]:
        """The engine's memory is gone."""
        self.num_made["cleared"] += 1
        return [Cleared()]

    def figures(self) -> KvEventFigures:
        return KvEventFigures(dict(self.num_made), self.num_dropped)

    def _note(self, change: _Told | _Change | str, found: _Merged) -> None:
        if isinstance(change, _Change):
            here = self._here[change.tier]
            if change.is_here and change.key not in here:
                here.add(change.key)
                self._say(change.tier, change.key, found)
            elif not change.is_here and change.key in here:
                here.remove(change.key)
                self._unsay(change.tier, change.key, found)
        elif isinstance(change, _Told):
            self._learn(change, found)
        else:
            for key in self._here.get(change, ()):
                self._unsay(change, key, found)
            self._here[change] = set()

    def _learn(self, told: _Told, found: _Merged) -> None:
        """Of blocks that are in a tier already, an earlier process may have computed some."""
        parent, size = told.parent, self._block_bytes
        for place, key in enumerate(told.keys):
            if key not in self._contents:
                tokens = told.tokens[place * size : (place + 1) * size]
                self._contents[key] = Content(parent, tokens, told.adapter)
                for tier, here in self._here.items():
                    if key in here:
                        self._say(tier, key, found)
            parent = key

    def _say(self, tier: str, key: bytes, found: _Merged) -> None:
        content = self._contents.get(key)
        if content is not None:
            self._num_named += 1
            found.store(tier, key, content)

    def _unsay(self, tier: str, key: bytes, found: _Merged) -> None:
        if key in self._contents:
            self._num_named -= 1
            found.remove(tier, key)

    def _catch_up(self, found: _Merged) -> None:
        """Begin anew from what is in the pools now. Changes that are queued meanwhile may be noted twice,
        which does no harm."""
        self._is_behind = False
        for _ in range(len(self._queue)):
            if isinstance(change := self._queue.popleft(), _Told):
                self._learn(change, _Merged())
        self._here = {
            tier: {key for key in list(keys) if key is not None} for tier, keys in [*self._now.items()]
        }
        found.events, self._num_named = [Cleared()], 0
        for tier in self._here:
            for key in self._parents_first(tier):
                self._say(tier, key, found)

    def _parents_first(self, tier: str) -> Iterator[bytes]:
        """The blocks of a tier that may be named: a router may ignore one whose parent it does not know."""
        left = {key: None for key in self._here[tier] if key in self._contents}
        while left:
            chain: list[bytes] = []
            key: bytes | None = next(iter(left))
            while key in left:
                assert key is not None
                chain.append(key)
                del left[key]
                key = self._contents[key].parent
            yield from reversed(chain)

    def _drop_contents(self) -> None:
        num_here = sum(map(len, self._here.values()))
        if len(self._contents) > 2 * (num_here + _SPARE_CONTENTS):
            oldest = list(self._contents)[:-_SPARE_CONTENTS]
            for key in oldest:
                if not any(key in here for here in self._here.values()):
                    del self._contents[key]


class _Merged:
    """Events in order, neighbours made one."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def store(self, tier: str, key: bytes, content: Content) -> None:
        last = self.events[-1] if self.events else None
        if (
            isinstance(last, Stored)
            and (last.tier, last.keys[-1], last.adapter) == (tier, content.parent, content.adapter)
            and len(last.keys) < MOST_BLOCKS
        ):
            last.keys.append(key)
            last.tokens.append(content.tokens)
        else:
            self.events.append(Stored(tier, [key], content.parent, [content.tokens], content.adapter))

    def remove(self, tier: str, key: bytes) -> None:
        last = self.events[-1] if self.events else None
        if isinstance(last, Removed) and last.tier == tier and len(last.keys) < MOST_BLOCKS:
            last.keys.append(key)
        else:
            self.events.append(Removed(tier, [key]))

"""Which blocks are in which tier, as events for routers. Owns the queue of changes, the tokens of the blocks
that may be named, and what has been said; knows no wire format and no socket.

    pools: a block was sealed or evicted        (any thread)  --+
    ledger, tables: the tokens of these keys    (any thread)  --+--> queue --> `take` (one thread) --> events

Reporting never waits: it appends to a bounded queue. If the queue is full, lost changes are made up for by
`Cleared` and the blocks that are there. A block is named only if its tokens are known. If they were lost, it
is named when a request brings them again. They are told for public scopes alone: blocks of tenants, and
blocks that only their request may use, are never named.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.contract import Fence
from penstock.figures import KvEventFigures
from penstock.kv.tiers.ssd.directory import Directory
from penstock.kv.tiers.ssd.tokens import TokenFile, TokenRecord

MOST_WAITING = 100_000  # changes that `take` has not seen
MOST_WAITING_BYTES = 64 << 20  # of the tokens and keys among them, about
MOST_BLOCKS = 256  # in one event
# Tokens of blocks that are in no tier, or not yet: the newest are kept.
_SPARE_CONTENTS = 1 << 16
DISK = "ssd"
TOKEN_BYTES = 4
_KEY_BYTES = 64  # of memory for each key


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


class Told(NamedTuple):
    """The tokens of neighbouring blocks."""

    adapter: str
    parent: bytes | None
    keys: Sequence[bytes]
    tokens: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) + _KEY_BYTES * len(self.keys)


class Change(NamedTuple):
    tier: str
    key: bytes
    is_here: bool


class KvReports:
    """What is reported, by any thread; `KvEvents` takes it. As an observer of pools it sees each pool's
    changes in order, under the pool's lock."""

    def __init__(self, most_waiting: int = MOST_WAITING, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self.num_dropped = 0  # changes
        self.is_behind = False  # a change was dropped
        self.queue: deque[Told | Change | str] = deque()  # a name: its pool was opened anew
        self._most_waiting = most_waiting
        self._most_bytes = most_bytes
        self._num_bytes = 0  # of `Told` in the queue
        self._bytes_lock = threading.Lock()
        self._public: dict[bytes, str] = {}  # adapter by digest of a scope
        # By tier and slot: what is there now. Read only to make up for lost changes.
        self._now: dict[str, list[bytes | None]] = {}

    def make_public(self, scope: bytes, adapter: str = "") -> None:
        """Blocks of this scope may be named."""
        self._public[scope] = adapter

    def tell(self, scope: bytes, parent: bytes | None, keys: Sequence[bytes], tokens: bytes) -> None:
        """The blocks `keys`, which follow `parent`, hold `tokens`. Before one of them is sealed."""
        adapter = self._public.get(scope)
        if adapter is None or not keys:
            return
        told = Told(adapter, parent, keys, tokens)
        with self._bytes_lock:
            fits = self._num_bytes + told.num_bytes <= self._most_bytes
            fits = fits and len(self.queue) < self._most_waiting
            self._num_bytes += told.num_bytes if fits else 0
        if fits:
            self.queue.append(told)
        else:  # its blocks are not named; nothing that was said is wrong
            self.num_dropped += 1

    def take(self) -> Told | Change | str:
        """The next change. For one thread; there is one."""
        change = self.queue.popleft()
        if isinstance(change, Told):
            with self._bytes_lock:
                self._num_bytes -= change.num_bytes
        return change

    def stop(self) -> None:
        """Nothing takes changes any more: all are dropped from now on, and counted."""
        self._most_waiting = self._most_bytes = 0
        self.queue.clear()

    def _put(self, change: Change | str) -> None:
        if len(self.queue) < self._most_waiting:
            self.queue.append(change)
        else:
            self.num_dropped += 1
            self.is_behind = True

    # as a PoolObserver

    def opened(self, pool: str, num_slots: int) -> None:
        self._now[pool] = [None] * num_slots
        self._put(pool)

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        self._now[pool][slot] = key
        self._put(Change(pool, key, True))

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        self._now[pool][slot] = None
        self._put(Change(pool, key, False))

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        """Does nothing."""

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        """Does nothing."""

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: Fence | None) -> None:
        """Does nothing."""

    def closed(self, pool: str, left: Sequence[str]) -> None:
        """Does nothing: an engine that closes says so by `close`."""

    def here(self) -> dict[str, set[bytes]]:
        """The keys that are in each tier now."""
        return {tier: {key for key in list(keys) if key is not None} for tier, keys in [*self._now.items()]}


class KvEvents:
    """Events out of `reports`. One thread takes them; `figures` is for any. `kept` has the tokens of blocks
    on disk over restarts."""

    def __init__(self, reports: KvReports, block_tokens: int, kept: TokenFile | None = None) -> None:
        self.reports = reports
        self._num_made: Counter[str] = Counter(stored=0, removed=0, cleared=0)  # events
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._here: dict[str, set[bytes]] = {}  # keys by tier, public or not
        self._contents: dict[bytes, Content] = {}
        self._num_named = 0  # copies of blocks that subscribers know
        self._disk = None if kept is None else _OnDisk(kept)

    @property
    def num_waiting(self) -> int:
        return len(self.reports.queue)

    def take(self, most: int = MOST_WAITING) -> list[Event]:
        """What has changed since the last call, up to so many changes."""
        found, num_named = Merged(), self._num_named
        # before the queue, which has all blocks of a scan that is over
        scanned = None if self._disk is None else self._disk.file.scanned
        if self.reports.is_behind:
            self._catch_up(found)
        for _ in range(min(most, len(self.reports.queue))):
            self._note(self.reports.take(), found)
        if self._disk is not None:
            self._look_at(self._disk, scanned, found)
        self._drop_contents()
        events = found.events
        if num_named and not self._num_named:
            events = [Cleared()]
        self._num_made.update(type(event).__name__.lower() for event in events)
        return events

    def close(self) -> list[Event]:
        """The engine has closed: its memory is gone."""
        if self._disk is not None:
            self._disk.file.add(self._disk.new)
            self._disk.file.close()
        self._num_made["cleared"] += 1
        return [Cleared()]

    def stop(self) -> None:
        """The sender has failed: nothing is kept for it."""
        self.reports.stop()
        self._contents, self._here = {}, {}
        if self._disk is not None:
            self._disk.file.close()

    def figures(self) -> KvEventFigures:
        return KvEventFigures(dict(self._num_made), self.reports.num_dropped)

    def _note(self, change: Told | Change | str, found: Merged) -> None:
        if isinstance(change, Change):
            here = self._here[change.tier]
            if change.is_here and change.key not in here:
                here.add(change.key)
                self._say(change.tier, change.key, found)
            elif not change.is_here and change.key in here:
                here.remove(change.key)
                self._unsay(change.tier, change.key, found)
        elif isinstance(change, Told):
            self._learn(change, found)
        else:
            gone, self._here[change] = self._here.get(change, set()), set()
            for key in gone:
                self._unsay(change, key, found)

    def _learn(self, told: Told, found: Merged) -> None:
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

    def _say(self, tier: str, key: bytes, found: Merged) -> None:
        content = self._contents.get(key)
        if content is not None:
            self._num_named += 1
            found.store(tier, key, content)
            if self._disk is not None and tier == DISK and not content.adapter:
                self._disk.new.append(TokenRecord(key, content.parent, content.tokens))

    def _unsay(self, tier: str, key: bytes, found: Merged) -> None:
        if key in self._contents:
            self._num_named -= 1
            found.remove(tier, key)

    def _look_at(self, disk: _OnDisk, scanned: Directory | None, found: Merged) -> None:
        """Write down what is new on disk. The file is read, and written anew, only while all blocks of the
        directory `scanned` are known."""
        if scanned is None:
            return  # what is new is written down later
        here = self._here.get(DISK, set())
        is_complete = not self.reports.queue and not self.reports.is_behind
        if disk.read is not scanned:
            if not is_complete:
                return
            disk.file.follow(scanned)
            self._read(disk, here, found)
            disk.read = scanned
        records, disk.new = disk.new, []
        disk.file.add(records)
        if is_complete and disk.file.has_too_many(len(here)):
            disk.file.write_anew(self._records(here))

    def _read(self, disk: _OnDisk, here: set[bytes], found: Merged) -> None:
        """Tell of the blocks that an earlier process wrote. What the file lacks is new."""
        written: set[bytes] = set()
        new: set[bytes] = set()
        for record in disk.file.read():
            if record.key in here:
                written.add(record.key)
                if record.key not in self._contents:
                    self._contents[record.key] = Content(record.parent, record.tokens, "")
                    new.add(record.key)
        for key in self._parents_first(new):
            for tier in self._here:
                if key in self._here[tier]:
                    self._say(tier, key, found)
        disk.new = list(self._records(self._parents_first(here - written)))

    def _records(self, keys: Iterable[bytes]) -> Iterator[TokenRecord]:
        some = ((key, self._contents[key]) for key in keys if key in self._contents)
        return (TokenRecord(key, one.parent, one.tokens) for key, one in some if not one.adapter)

    def _catch_up(self, found: Merged) -> None:
        """Begin anew from what is in the pools now. Changes that are queued meanwhile may be noted twice,
        which does no harm."""
        self.reports.is_behind = False
        for _ in range(len(self.reports.queue)):
            if isinstance(change := self.reports.take(), Told):
                self._learn(change, Merged())
        self._begin(self.reports.here())
        found.events, self._num_named = [Cleared()], 0
        for tier in self._here:
            for key in self._parents_first(self._here[tier]):
                self._say(tier, key, found)

    def _begin(self, here: Mapping[str, set[bytes]]) -> None:
        self._here = dict(here)

    def _parents_first(self, keys: Iterable[bytes]) -> Iterator[bytes]:
        """Those of `keys` that may be named: a router may ignore a block whose parent it does not know."""
        left = {key: None for key in keys if key in self._contents}
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


class _OnDisk:
    """The file of tokens, and what is not in it yet."""

    def __init__(self, file: TokenFile) -> None:
        self.file = file
        self.read: Directory | None = None  # where its records were read
        self.new: list[TokenRecord] = []


class Merged:
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

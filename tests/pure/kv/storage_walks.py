"""Random walks of requests over device, host, disk and store: reads and copies half done, failing and late,
stores that lose, damage, refuse and die, resets and flushes. Owns the choice of events, and what must hold
between any two.

The model is short. Whatever has a key holds what the key says. The books add up. Blocks that a load says have
landed are there. What a flush acknowledged is in the first tier. When nothing goes wrong any more everything
ends, and nothing is left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from penstock.config import AdmissionName
from penstock.contract import Lease, Match, Prefix
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.events import KvEvents
from penstock.kv.table import BlockTable
from penstock.kv.tiers import reads as reads_module
from penstock.kv.tiers import writeback
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.tiers.reads import Fetch
from penstock.kv.tiers.writeback import Persisting
from penstock.testing.stores import MemoryStore
from tests.event_walks import Event, choose_events, told_shortly
from tests.pure.kv.stacked_rig import ALL, Stacked
from tests.pure.kv.storage_rig import BLOCK, LAYERS

MAX_OPEN = 5


@dataclass
class Asked:
    """One request."""

    name: str
    num_blocks: int
    prefix: Prefix
    lease: Lease | None
    table: BlockTable | None = None
    first: int = 0  # blocks that were on the device
    num_wanted: int = 0  # that are loaded behind them
    load: BlockLoad | None = None
    filled: bool = False
    want: PoolWant | None = None  # while it waits


@dataclass
class Claim:
    """A flush, and the blocks that it is about: in host memory when it was asked for, and ever since."""

    persisting: Persisting
    keys: set[bytes]


class Shape(NamedTuple):
    tiers: tuple[str, ...]
    admission: AdmissionName
    num_device: int
    num_host: int
    prefix_cache: bool
    read_ahead: int
    num_stored: int
    makes_room: bool  # requests in line want their blocks, and nothing is lost for those that are admitted
    window: int = 0  # tokens that a token sees; 0: all


class Walker:
    """Does events; the method's name is the event's."""

    def __init__(self, shape: Shape, events: KvEvents | None = None) -> None:
        self.rig = Stacked(
            *shape.tiers,
            admission=shape.admission,
            num_device=shape.num_device,
            num_host=shape.num_host,
            prefix_cache=shape.prefix_cache,
            window=shape.window,
            events=events,
        )
        self.window = shape.window
        self.makes_room = shape.makes_room
        self.asked: list[Asked] = []
        self.claims: list[Claim] = []
        self.fetches: list[Fetch] = []
        self.gone: set[bytes] = set()  # that stores have lost or damaged on their own account
        self.seen: Counter[str] = Counter()
        for tier in shape.tiers:
            self.rig.put(tier, self.rig.keys(shape.num_stored))

    def do(self, event: Event) -> None:
        name, number = event
        getattr(self, name)(random.Random(number))
        self.check()

    # ------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        self.rig.check()
        for asked in self.asked:
            if asked.load is not None and asked.table is not None and not asked.filled:
                self._check_load(asked, asked.load, asked.table)
        for fetch in self.fetches:
            assert fetch.num_came <= fetch.num_blocks
            self.seen["fetched"] += fetch.settled and fetch.num_came > 0
            self.seen["fetched in part"] += fetch.settled and 0 < fetch.num_came < fetch.num_blocks
        self.fetches = [fetch for fetch in self.fetches if not fetch.settled]
        for claim in self.claims:
            claim.keys.intersection_update(self.rig.host.pool.keys())
            if claim.persisting.settled and claim.persisting.error is None:
                there = self.rig.first.blocks.keys() | self.gone
                assert claim.keys <= there, "a flush has acknowledged what is not there"
                self.seen["persisted"] += bool(claim.keys)
        self.claims = [claim for claim in self.claims if not claim.persisting.settled]

    def _check_load(self, asked: Asked, load: BlockLoad, table: BlockTable) -> None:
        num, wanted = load.num_landed, asked.num_wanted
        keys = asked.prefix.keys[asked.first : asked.first + num]
        slots = table.hold.first(asked.first + num)[asked.first :].tolist()
        assert self.rig.device.read(slots, ALL) == [[key] * LAYERS for key in keys], (
            "what is said to have landed is not there"
        )
        assert num <= wanted and table.num_keyed == asked.first + num
        if load.settled:
            assert (load.error() is None) == (num == wanted), (
                "it says that all of it has come, and it has not"
            )
            self.seen["ended short"] += load.is_cold and 0 < num < wanted
            self.seen["came"] += load.is_cold and num == wanted
        if load.is_cold:
            assert num <= load.num_sent <= load.limit <= wanted
            assert load.arrivals is None or load.num_sent == wanted, (
                "a fence that does not exist cannot be waited for"
            )
            self.seen["part of it under way"] += (
                any(copy.settled for copy in load.copies) and not load.settled
            )

    # ----------------------------------------------------------------------------------------------- requests

    def _those(self, wanted: Callable[[Asked], bool]) -> list[Asked]:
        return [asked for asked in self.asked if wanted(asked)]

    def submit(self, r: random.Random) -> None:
        if len(self.asked) < MAX_OPEN:
            name, num_blocks = r.choice("aaab"), r.randint(1, 6)
            prefix = self.rig.prefix(num_blocks, name)
            self.asked.append(Asked(name, num_blocks, prefix, self.rig.cache.lease("request", prefix)))

    def start(self, r: random.Random) -> None:
        """As the scheduler would: those that wait for somebody else's blocks, or for room, do not."""
        waiting = self._those(lambda one: one.table is None and (one.lease is None or one.lease.ready))
        if not waiting:
            return
        asked, cache = r.choice(waiting), self.rig.cache
        match = cache.match(asked.prefix.keys, asked.lease)
        self._check_match(asked, match)
        self.seen["pending"] += match.pending
        num_new = asked.num_blocks - match.num_blocks
        if match.pending or num_new > cache.num_available - match.num_idle:
            return
        if self.makes_room and not cache.make_room(num_new, match.num_idle):
            self.seen["room is being made"] += 1
            return
        if asked.lease is not None and match.num_colder:
            assert asked.lease.claim(match.num_blocks, match.num_colder), (
                "nothing has happened since the match"
            )
        self._end_want(asked)
        name = f"request {self.asked.index(asked)}"
        asked.table = cache.open(name, asked.prefix, match.num_blocks, num_gone=match.num_gone)
        asked.first, asked.num_wanted = match.num_blocks, match.num_colder
        lease, asked.lease = asked.lease, None
        if lease is not None and match.num_colder:
            asked.load = asked.table.promote(lease, match.num_colder, 1)
            self.seen["cold load"] += asked.load.is_cold
            self.seen["cold load that shares a fetch"] += bool(asked.load.awaited)
        elif lease is not None:
            lease.end()

    def _check_match(self, asked: Asked, match: Match) -> None:
        """Every block that the token after it sees is on the device, or in the lease."""
        num_tokens = (match.num_blocks + match.num_colder) * BLOCK
        first = max(0, num_tokens - self.window) // BLOCK if self.window else 0
        assert match.num_gone <= first, "it lacks tokens that are seen"
        needed = asked.prefix.keys[match.num_gone : match.num_blocks]
        assert -1 not in self.rig.pool.find_each(needed), "the device does not have what matched"
        self.seen["match of a window"] += match.num_gone > 0

    def blocks_leave_the_window(self, r: random.Random) -> None:
        """As when it goes on: what no later token sees goes back, perhaps while it is being saved."""
        filled = self._those(lambda one: one.table is not None and one.filled)
        if filled:
            table = r.choice(filled).table
            assert table is not None
            pins = self.rig.pool.book.pins[table.hold.run]
            num = table.let_go(table.num_keyed * BLOCK, self.rig.step())
            assert num == 0 or self.window
            self.seen["left the window"] += num > 0
            self.seen["left the window while it is saved"] += bool(pins[:num].any())

    def rank(self, r: random.Random) -> None:
        """Those that wait are looked at again: what the device has of them is wanted."""
        for asked in self._those(lambda one: one.table is None):
            asked.want = self.rig.cache.want(asked.prefix.keys, r.random(), asked.want)
            if asked.lease is not None:
                asked.lease.set_rank(r.random())

    def _end_want(self, asked: Asked) -> None:
        if asked.want is not None:
            asked.want.end()

    def a_prefix_comes_back(self, r: random.Random) -> None:
        """It was computed, and hotter tiers have forgotten it."""
        self.compute(r)
        if r.random() < 0.5:
            self.rig.flow()
        self.rig.cache.reset(["device", "host"] if r.random() < 0.7 else ["device"])
        self.submit(r)
        if r.random() < 0.5:
            self.rig.run("ask remote")
        self.start(r)

    def prefetch(self, r: random.Random) -> None:
        prefix = self.rig.prefix(r.randint(1, 6), r.choice("aaab"))
        if (fetch := self.rig.cache.prefetch(prefix, "reader")) is not None:
            self.fetches.append(fetch)

    def a_fetch_is_not_wanted_any_more(self, r: random.Random) -> None:
        if self.fetches:
            r.choice(self.fetches).end()

    def compute(self, r: random.Random) -> None:
        ready = self._those(
            lambda one: one.table is not None and not one.filled and (one.load is None or one.load.settled)
        )
        if ready:
            asked = r.choice(ready)
            assert asked.table is not None
            if asked.table.num_gone and asked.load is not None and asked.load.error() is not None:
                self._end(asked, r)  # what landed is no prefix; it would begin again
                return
            if asked.num_blocks - asked.table.num_slots <= self.rig.cache.num_available:
                self.rig.fill(asked.table, asked.num_blocks, asked.name)
                asked.filled = True

    def end(self, r: random.Random) -> None:
        if self.asked:
            self._end(self.asked[r.randrange(len(self.asked))], r)

    def _end(self, asked: Asked, r: random.Random) -> None:
        self.asked.remove(asked)
        self._end_want(asked)
        if asked.lease is not None:
            asked.lease.end()
        if asked.table is not None:
            self.seen["cancelled while loading"] += (
                asked.load is not None and asked.load.is_cold and not asked.load.settled
            )
            asked.table.release(self.rig.step() if r.random() < 0.5 else None)

    # -------------------------------------------------------------------------------------------------- lanes

    def go_on(self, r: random.Random) -> None:
        busy = [lane for lane in self.rig.lanes if len(lane)]
        if busy:
            lane = r.choice(busy)
            for _ in range(r.randint(1, 6)):
                lane.step()
            if r.random() < 0.5:
                self.rig.cache.settle()

    def settle(self, r: random.Random) -> None:
        self.rig.cache.settle()

    def flow(self, r: random.Random) -> None:
        self.rig.flow()

    # ------------------------------------------------------------------------------------------------ trouble

    def _store(self, r: random.Random) -> MemoryStore:
        return r.choice(list(self.rig.stores.values()))

    def a_block_goes_bad(self, r: random.Random) -> None:
        store = self._store(r)
        if store.blocks:
            key, how = r.choice(sorted(store.blocks)), r.choice(["lose", "spoil", "fail"])
            if how == "fail":
                store.fails.add(key)
            else:
                (store.lose if how == "lose" else store.spoil)(key)
                self.gone.add(key)

    def a_store_dies(self, r: random.Random) -> None:
        self._store(r).die()

    def a_store_is_full(self, r: random.Random) -> None:
        store = self._store(r)
        store.max_blocks = len(store.blocks)

    def stores_are_well_again(self, r: random.Random) -> None:
        for store in self.rig.stores.values():
            store.raises = store.max_blocks = None
            store.fails.clear()
        self.rig.clock.advance(100.0)

    def copies_fail(self, r: random.Random) -> None:
        self.rig.load_copier.fail_next = r.randint(1, 2)

    def loads_are_late(self, r: random.Random) -> None:
        for reads in self.rig.loads.reads:
            reads.deadline_s = 0.0

    def leases_expire(self, r: random.Random) -> None:
        self.rig.now_s += 1000.0
        self.rig.cache.settle()

    def reset(self, r: random.Random) -> None:
        tier = r.choice(["device", "host", "first"])
        first = next(iter(self.rig.tiers.values()))
        self.rig.cache.reset([first.name if tier == "first" else tier])

    def persist(self, r: random.Random) -> None:
        persisting = self.rig.cache.persist()
        assert persisting is not None
        self.claims.append(Claim(persisting, set(self.rig.host.pool.keys())))

    # ---------------------------------------------------------------------------------------------------- end

    def finish(self) -> None:
        """Nothing goes wrong any more: everything ends, and nothing is left."""
        r = random.Random(0)
        self.stores_are_well_again(r)
        self.rig.load_copier.fail_next = 0
        self.rig.flow()
        self.check()
        for asked in self.asked:
            assert asked.load is None or asked.load.settled, "it would wait for ever"
            assert asked.lease is None or asked.lease.ready
        assert not self.claims, "a flush would wait for ever"
        assert not self.fetches, "a fetch would wait for ever"
        while self.asked:
            self.end(r)
        self.rig.end()


WEIGHTS = {
    "submit": 8,
    "start": 14,
    "a_prefix_comes_back": 8,
    "prefetch": 8,
    "a_fetch_is_not_wanted_any_more": 1,
    "compute": 10,
    "end": 6,
    "go_on": 40,
    "settle": 8,
    "flow": 3,
    "a_block_goes_bad": 4,
    "a_store_dies": 1,
    "a_store_is_full": 1,
    "stores_are_well_again": 3,
    "copies_fail": 3,
    "loads_are_late": 1,
    "leases_expire": 1,
    "reset": 5,
    "persist": 4,
}


CROWDED_WEIGHTS = {**WEIGHTS, "rank": 8}


WINDOW_WEIGHTS = {**WEIGHTS, "blocks_leave_the_window": 14}


def choose(seed: int, windowed: bool = False) -> tuple[Shape, list[Event]]:
    r = random.Random(seed)
    shape = Shape(
        tiers=r.choice([("ssd",), ("ssd",), ("remote",), ("ssd", "remote")]),
        admission=r.choice(["always", "reuse", "evict"]),
        num_device=r.choice([6, 12, 24]),
        num_host=r.choice([4, 8, 16, 32]),
        prefix_cache=r.random() < 0.8,
        read_ahead=r.choice([1, 2, 256]),
        num_stored=r.randint(0, 6),
        makes_room=seed % 3 == 0,
    )
    weights = CROWDED_WEIGHTS if shape.makes_room else WEIGHTS
    if windowed:
        shape, weights = shape._replace(window=r.choice([1, 4, 6, 9])), WINDOW_WEIGHTS
    return shape, choose_events(r, weights, r.randint(30, 100))


@contextmanager
def at_once(num_groups: int) -> Iterator[None]:
    """So much is read ahead, handed over and taken note of in one turn."""
    before = (
        reads_module._READ_AHEAD,
        reads_module._READ_AT_ONCE,
        writeback._WRITE_AT_ONCE,
        writeback._GONE_AT_ONCE,
    )
    reads_module._READ_AHEAD = reads_module._READ_AT_ONCE = writeback._WRITE_AT_ONCE = (
        writeback._GONE_AT_ONCE
    ) = num_groups
    try:
        yield
    finally:
        (
            reads_module._READ_AHEAD,
            reads_module._READ_AT_ONCE,
            writeback._WRITE_AT_ONCE,
            writeback._GONE_AT_ONCE,
        ) = before


def walk(shape: Shape, events: Sequence[Event]) -> Counter[str]:
    """What was met on the way, if nothing was wrong."""
    with at_once(shape.read_ahead):
        walker = Walker(shape)
        for event in events:
            walker.do(event)
        walker.finish()
        return walker.seen


def walk_and_shorten(seed: int, windowed: bool = False) -> Counter[str]:
    """A walk; where it fails, as few events as fail in the same way are named."""
    shape, events = choose(seed, windowed)
    return told_shortly(lambda some: walk(shape, some), events, f"walk {seed} through {shape}")

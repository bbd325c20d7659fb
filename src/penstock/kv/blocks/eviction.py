"""The order in which idle blocks are evicted. Owns the eviction orders, the wants on idle blocks, and the
choice of a policy by name.

An order holds exactly the idle slots, so a held or pinned slot cannot be popped. It also learns the key and
depth that a slot was sealed with, and when a block was found again. A pool calls it on the engine thread for
runs of slots, so the cost per slot is constant: no scans, and no deferred work.

A prefix is useful without its continuation, not the other way round. Of slots added together, the first is
the deepest, and goes first unless the policy prefers another.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config import EVICTIONS
from penstock.errors import ConfigError, InvariantBroken
from penstock.kv.blocks.slots import Run, as_run


class EvictionOrder(Protocol):
    """Idle slots, and the order in which they go."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """Every idle slot, in the order in which they would be popped now."""

    def sealed(self, slots: Run, keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """`slots`, which are in use, got these keys. `depths` are the blocks' positions in their prefixes,
        from 0."""

    def hit(self, slots: Run) -> None:
        """These blocks were found again and are used. They may be idle or not."""

    def add(self, slots: Run) -> None:
        """`slots` became idle; the first of them goes first."""

    def remove(self, slots: Run) -> None:
        """`slots`, which are idle, are in use again."""

    def pop(self, num: int) -> list[int]:
        """Take out `num` slots for eviction, or all if there are fewer, in order."""


class PoolWant:
    """Implements `contract.Want`: blocks that a request will use. The want with the greatest `rank` is
    dropped first."""

    __slots__ = ("_losses", "_order", "found", "rank", "slots")

    def __init__(self, order: WantedLast, slots: Run, rank: float) -> None:
        self._order = order
        self._losses = order.losses[slots]  # losses of these slots when it was made
        self.rank = rank
        self.slots = slots
        self.found: Any = None  # the answer of the pool's index that gave these slots, if one did

    @property
    def num_blocks(self) -> int:
        return len(self.slots)

    @property
    def gone(self) -> NDArray[np.bool_]:
        """Which of its slots have lost their block since it was made."""
        changed: NDArray[np.bool_] = self._order.losses[self.slots] != self._losses
        return changed

    @property
    def protects(self) -> bool:
        """Whether it still protects all its blocks: it has neither ended nor been dropped, and none was
        evicted."""
        return self in self._order.wants and not self.gone.any()

    def is_for(self, slots: Run) -> bool:
        """Whether it still protects all its blocks, and these are `slots`: the last block of a prefix says
        which prefix it is."""
        num = len(slots)
        return self.num_blocks == num and (not num or self.slots[-1] == slots[-1]) and self.protects

    def end(self) -> None:
        """Idempotent. For any thread."""
        self._order.end(self)


class WantedLast:
    """An eviction order on top of another one, which has the unwanted idle slots. Blocks that a waiting
    request will use are evicted last.

    A want protects but never holds: if nothing else is left to evict, the want of the greatest rank is
    dropped, and its blocks go like any others. The holder of a want can see which of its blocks were evicted.
    """

    def __init__(self, others: EvictionOrder, num_slots: int, lock: threading.RLock) -> None:
        self.others = others  # the pool reports seals and hits to it directly
        self.losses = np.zeros(num_slots, np.int64)  # number of blocks that each slot has lost
        self.wants: dict[PoolWant, None] = {}
        self._num_wants = np.zeros(num_slots, np.int32)
        self._aside = np.zeros(num_slots, np.bool_)  # idle and wanted
        self._num_aside = 0
        self._lock = lock  # of the pool

    def __len__(self) -> int:
        return len(self.others) + self._num_aside

    def __iter__(self) -> Iterator[int]:
        """Unwanted ones first."""
        yield from self.others
        yield from np.flatnonzero(self._aside).tolist()

    # -------------------------------------------------------------------------------------------------- wants

    def want(self, slots: Run, idle: Run, rank: float) -> PoolWant:
        """`slots` have blocks; the `idle` ones among them are evicted last from now on."""
        want = PoolWant(self, slots, rank)
        self.wants[want] = None
        self._num_wants[slots] += 1
        resting = idle[~self._aside[idle]]
        if resting.size:
            self.others.remove(resting)
            self._set_aside(resting, True)
        return want

    def end(self, want: PoolWant) -> None:
        with self._lock:
            if want not in self.wants:
                return
            del self.wants[want]
            run = want.slots[~want.gone]
            self._num_wants[run] -= 1
            resting = run[(self._num_wants[run] == 0) & self._aside[run]]
            if resting.size:
                self._set_aside(resting, False)
                self.others.add(resting[::-1])  # the deepest goes first

    def expose(self, num: int) -> None:
        """Drop wants, the greatest rank first, until `num` idle slots are unwanted or no want is left."""
        if len(self.others) >= num:
            return
        for want in sorted(self.wants, key=lambda want: want.rank, reverse=True):
            if len(self.others) >= num or not self._num_aside:
                return
            self.end(want)

    # ----------------------------------------------------------------------------------------- as every order

    def add(self, slots: Run) -> None:
        wanted = self._num_wants[slots] > 0
        self._set_aside(slots[wanted], True)
        self.others.add(slots[~wanted])

    def remove(self, slots: Run) -> None:
        aside = self._aside[slots]
        self._set_aside(slots[aside], False)
        self.others.remove(slots[~aside])

    def pop(self, num: int) -> list[int]:
        self.expose(num)
        popped = self.others.pop(num)
        self.lost(popped)
        return popped

    def lost(self, slots: Sequence[int]) -> None:
        """Their blocks are gone; the next blocks in these slots are unwanted."""
        run = as_run(slots)
        self.losses[run] += 1
        self._num_wants[run] = 0

    def _set_aside(self, slots: Run, aside: bool) -> None:
        self._aside[slots] = aside
        self._num_aside += len(slots) if aside else -len(slots)


@dataclass(slots=True)
class _Lot:
    """Slots that became idle together, in reverse order of eviction, and how many of them are still idle."""

    slots: Run
    num_left: int


class LruOrder:
    """Idle slots in the order in which they became idle; or several such queues, of which the head with the
    lowest rank goes first.

    The blocks of a long prompt become idle together, and are mostly used again together. Work for such a run
    is done once, not per slot. A slot that is used again without its neighbours stays in its run and is
    skipped there. A run with more than half such slots is rewritten, so the number of skipped slots never
    exceeds the number of idle ones.
    """

    def __init__(self, num_slots: int, num_queues: int = 1) -> None:
        # number of the lot in which it became idle; 0: in use
        self._lot_of = np.zeros(num_slots, np.int64)
        self._queues: list[OrderedDict[int, _Lot]] = [OrderedDict() for _ in range(num_queues)]
        self._clock = 0  # slots that have become idle so far
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        """In the order in which they would be popped now."""
        for number in heapq.merge(*self._queues, key=self._rank):
            yield from self._those_in(number, self._lot(number).slots)[::-1].tolist()

    def sealed(self, slots: Run, keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """Ignored by this policy."""

    def hit(self, slots: Run) -> None:
        """A used block goes to the end when it becomes idle again."""

    def add(self, slots: Run) -> None:
        self._enqueue(slots, 0)

    def remove(self, slots: Run) -> None:
        lots, nums = np.unique(self._lot_of[slots], return_counts=True)
        found = dict(zip(lots.tolist(), nums.tolist(), strict=True))
        if 0 in found:
            raise InvariantBroken(f"{found[0]} of {len(slots)} slots are to be used again, and are not idle")
        self._lot_of[slots] = 0
        for number, num in found.items():
            self._shorten(number, num)

    def pop(self, num: int) -> list[int]:
        popped: list[int] = []
        while len(popped) < num and any(self._queues):
            number = min((next(iter(queue)) for queue in self._queues if queue), key=self._rank)
            lot = self._lot(number)
            if not len(lot.slots):  # else an endless loop
                raise InvariantBroken(f"{lot.num_left} slots are idle in a lot that has none left")
            num_kept = max(0, len(lot.slots) - (num - len(popped)))
            lot.slots, tail = lot.slots[:num_kept], lot.slots[num_kept:]
            taken = self._those_in(number, tail)
            popped += taken[::-1].tolist()
            self._lot_of[taken] = 0
            self._shorten(number, len(taken))
        return popped

    def _rank(self, number: int) -> int:
        """Of a lot. On a tie the first queue goes first. Never falls within a queue."""
        return number

    def _enqueue(self, slots: Run, queue: int) -> None:
        """Add a lot at the end of that queue. Its number encodes the time and the queue."""
        if not len(slots):
            return
        if self._lot_of[slots].any():
            raise InvariantBroken(f"of {len(slots)} slots that become idle, some are idle already")
        self._clock += len(slots)
        number = self._clock * len(self._queues) + queue
        self._queues[queue][number] = _Lot(slots[::-1], len(slots))
        self._lot_of[slots] = number
        self._num += len(slots)

    def _lot(self, number: int) -> _Lot:
        return self._queues[number % len(self._queues)][number]

    def _shorten(self, number: int, num: int) -> None:
        """`num` of its slots are no longer idle."""
        lot = self._lot(number)
        self._num -= num
        lot.num_left -= num
        if not lot.num_left:
            del self._queues[number % len(self._queues)][number]
        elif 2 * lot.num_left < len(lot.slots):
            lot.slots = self._those_in(number, lot.slots)

    def _those_in(self, number: int, slots: Run) -> Run:
        those: Run = slots[self._lot_of[slots] == number]
        return those


# Measured on all traces of docs/eviction.md: with 4 a scan evicts more, with 16 slightly less than with 8.
PATIENCE = 8
KEYS_PER_SLOT = 4  # remembered keys, including those of present blocks
_FRESH, _RETURNED = 0, 1


class SeenKeys:
    """Keys that came before, in a hash table without chains: a newer key overwrites an older one in its
    place. Eight bytes per key, and constant work."""

    def __init__(self, num_slots: int) -> None:
        size = 1 << (KEYS_PER_SLOT * num_slots - 1).bit_length()
        # the second half of a key at the place that its first half names
        self._marks = np.zeros(size, np.uint64)
        self._mask = np.uint64(size - 1)

    def add(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which of `keys` came before."""
        halves = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
        places, marks = halves[:, 0] & self._mask, halves[:, 1]
        known: NDArray[np.bool_] = self._marks[places] == marks
        self._marks[places] = marks
        return known


class ReturningOrder(LruOrder):
    """Least recently used first, where a block that has come back counts as used later.

    A block that was found again, or whose key came again after it was forgotten, belongs to a conversation
    that goes on or to a prompt that many share. A document that is read once, and a scan of many, never do.
    So there are two queues by recency, and a block that has come back may be idle `PATIENCE` times as long as
    one that has not. Both age by what becomes idle, so a conversation that is over goes, too.

    A request that finds a block has found all blocks before it. So in a run that becomes idle together, all
    blocks before the deepest one that has come back count as come back, and no beginning goes before its
    continuation. The blocks behind it are new. Where they are the smaller part, they are the last turn of a
    conversation and stay with it. Else they may be a document behind a prompt that many share.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, num_queues=2)
        self._returned = np.zeros(num_slots, np.bool_)  # it has come back
        self._seen = SeenKeys(num_slots)

    def sealed(self, slots: Run, keys: Sequence[bytes], depths: Sequence[int]) -> None:
        self._returned[slots] = self._seen.add(keys)

    def hit(self, slots: Run) -> None:
        self._returned[slots] = True

    def add(self, slots: Run) -> None:
        """The leading (deepest) slots before the first that has come back are fresh, unless they are the
        smaller part."""
        returned = np.flatnonzero(self._returned[slots])
        num_fresh = int(returned[0]) if returned.size else len(slots)
        num_fresh = num_fresh if 2 * num_fresh >= len(slots) else 0
        self._enqueue(slots[:num_fresh], _FRESH)
        self.hit(slots[num_fresh:])
        self._enqueue(slots[num_fresh:], _RETURNED)

    def _rank(self, number: int) -> int:
        """By what has become idle since. This counts more for blocks that have not come back."""
        when, queue = divmod(number, len(self._queues))
        since = self._clock + 1 - when
        return -since if queue == _RETURNED else -PATIENCE * since


# From bench_results: 11,700 for Qwen3-4B on an H200, 2,100 for SmolLM2-135M on a CPU.
TOKENS_TO_DOUBLE = 8192
_MOST_HITS = 15
# measured on both Mooncake traces; together a kilobyte beside a block of a megabyte or so
GHOSTS_PER_SLOT = 4
_CLASSES_PER_DOUBLING = 4  # the cost that a class stands for is 2 ** (class / 4)
_NUM_CLASSES = 40  # enough for chains of a million tokens with any number of hits
_HIT_CLASSES = [_CLASSES_PER_DOUBLING * math.log2(1 + math.log2(1 + hits)) for hits in range(_MOST_HITS + 1)]
_COSTS = [2 ** (place / _CLASSES_PER_DOUBLING) for place in range(_NUM_CLASSES)]


def prefill_cost(num_tokens: int) -> float:
    """Cost of computing the first `num_tokens` tokens of a prompt, in units of its first token."""
    return num_tokens + num_tokens**2 / 2 / TOKENS_TO_DOUBLE


class Ghosts:
    """Keys of recently evicted blocks with their numbers of hits: the newest ones, a few per slot of the
    pool."""

    def __init__(self, num_slots: int) -> None:
        self._hits: OrderedDict[bytes, int] = OrderedDict()
        self._limit = GHOSTS_PER_SLOT * num_slots

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, key: bytes, num_hits: int) -> None:
        self._hits[key] = num_hits
        self._hits.move_to_end(key)
        if len(self._hits) > self._limit:
            self._hits.popitem(last=False)

    def take(self, key: bytes) -> int | None:
        """The block is back: remove its ghost and return its number of hits. None: there is no ghost."""
        return self._hits.pop(key, None)


class CostOrder:
    """Cheapest to recompute first, aged: GreedyDual over classes of cost. A queue per class; a slot's value
    in it is its rank.

    A token's prefill costs more the deeper it lies, because it attends to all before it: at
    `TOKENS_TO_DOUBLE` it costs twice what the first one does. But the beginning of a prefix is not worth less
    than its end for that: without it the end is of no use. What is lost with a chain is all of it, and what
    one slot of it saves is the mean of the chain's costs. So all blocks that are added as one chain rank by
    the mean cost of the chain, the deepest goes first among them, and longer chains outlive shorter ones of
    the same age.

    A block's rank is the floor when it was added plus its cost times its chance to be hit (a slow function of
    its hits so far, which ghosts remember). The floor is the rank of the last one evicted, so whatever is not
    used again sinks in the end, however dear it was. Ranks within one class of cost are in the order of
    adding, so a class is a queue and the next to go is at the head of one.
    """

    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._queues: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(_NUM_CLASSES)]
        self._num = 0
        self._floor = 0.0
        self._ghosts = Ghosts(num_slots)
        self._key = [b""] * num_slots
        self._depth = [0] * num_slots
        self._hits = [0] * num_slots
        self._class_of = [0] * num_slots

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        ranked = (
            zip(queue.values(), repeat(place), queue, strict=False)
            for place, queue in enumerate(self._queues)
            if queue
        )
        return (slot for _, _, slot in heapq.merge(*ranked))

    def sealed(self, slots: Run, keys: Sequence[bytes], depths: Sequence[int]) -> None:
        for slot, key, depth in zip(slots.tolist(), keys, depths, strict=True):
            earlier = self._ghosts.take(key)
            self._key[slot] = key
            self._depth[slot] = depth
            # a return after eviction counts as a missed hit
            self._hits[slot] = 0 if earlier is None else min(earlier + 1, _MOST_HITS)
            self._class_of[slot] = 0

    def hit(self, slots: Run) -> None:
        hits = self._hits
        for slot in slots.tolist():
            if hits[slot] < _MOST_HITS:
                hits[slot] += 1

    def add(self, slots: Run) -> None:
        depths, hits, class_of, queues = self._depth, self._hits, self._class_of, self._queues
        before, chain = -1, 0.0
        for slot in slots.tolist():
            depth = depths[slot]
            if depth >= before:  # another chain begins, with its deepest block
                chain = self._chain_class(depth)
            before = depth
            # Never lower than before: a short request must not make a beginning cheaper than its long
            # continuation.
            place = class_of[slot] = min(
                max(int(chain + _HIT_CLASSES[hits[slot]]), class_of[slot]), _NUM_CLASSES - 1
            )
            queues[place][slot] = self._floor + _COSTS[place]
        self._num += len(slots)

    def remove(self, slots: Run) -> None:
        queues, class_of = self._queues, self._class_of
        for slot in slots.tolist():
            del queues[class_of[slot]][slot]
        self._num -= len(slots)

    def pop(self, num: int) -> list[int]:
        num = min(num, self._num)
        popped: list[int] = []
        while len(popped) < num:
            self._pop_cheapest(num, popped)
        self._num -= num
        return popped

    def _pop_cheapest(self, num: int, popped: list[int]) -> None:
        """From the queue whose head ranks lowest (the cheapest on a tie), until another head is lower or
        `popped` has `num`."""
        heads = sorted(
            (next(iter(queue.values())), place) for place, queue in enumerate(self._queues) if queue
        )
        (self._floor, place), limit = heads[0], heads[1] if len(heads) > 1 else (math.inf, 0)
        queue = self._queues[place]
        while queue and len(popped) < num:
            rank = next(iter(queue.values()))
            if (rank, place) > limit:
                break
            self._floor = rank
            slot, _ = queue.popitem(last=False)
            self._ghosts.add(self._key[slot], self._hits[slot])
            popped.append(slot)

    def _chain_class(self, depth: int) -> float:
        """Class of the mean cost per token of a chain whose deepest block is `depth`."""
        num_tokens = (depth + 1) * self._block_tokens
        return _CLASSES_PER_DOUBLING * math.log2(prefill_cost(num_tokens) / num_tokens)


def make_order(name: str, num_slots: int, block_tokens: int = 16) -> EvictionOrder:
    """An order for one pool of `num_slots` blocks of `block_tokens` tokens."""
    if name == "returning":
        return ReturningOrder(num_slots)
    if name == "lru":
        return LruOrder(num_slots)
    if name == "cost":
        return CostOrder(num_slots, block_tokens)
    raise ConfigError(f"the order of eviction is one of {', '.join(EVICTIONS)}, got {name!r}")

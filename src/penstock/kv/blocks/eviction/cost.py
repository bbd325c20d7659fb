"""Cheapest to recompute first, aged: GreedyDual over classes of cost. Owns the classes, the ghosts and the model of what a block costs.

A token's prefill costs more the deeper it lies, because it attends to all before it: at `TOKENS_TO_DOUBLE` it costs twice what the first
one does. But the beginning of a prefix is not worth less than its end for that: without it the end is of no use. What is lost with a chain
is all of it, and what one slot of it saves is the mean of the chain's costs. So all blocks that are added as one chain rank by the mean
cost of the chain, the deepest goes first among them, and longer chains outlive shorter ones of the same age.

A block's rank is the floor when it was added plus its cost times its chance to be hit (a slow function of its hits so far, which ghosts
remember). The floor is the rank of the last one evicted, so whatever is not used again sinks in the end, however dear it was. Ranks
within one class of cost are in the order of adding, so a class is a queue and the next to go is at the head of one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from penstock.kv.blocks.slots import Run, as_list

# From bench_results: 11,700 for Qwen3-4B on an H200, 2,100 for SmolLM2-135M on a CPU.
TOKENS_TO_DOUBLE = 8192
_MOST_HITS = 15
GHOSTS_PER_SLOT = 4  # measured on both Mooncake traces; together a kilobyte beside a block of a megabyte or so
_CLASSES_PER_DOUBLING = 4  # the cost that a class stands for is 2 ** (class / 4)
_NUM_CLASSES = 40  # enough for chains of a million tokens with any number of hits
_HIT_CLASSES = [_CLASSES_PER_DOUBLING * math.log2(1 + math.log2(1 + hits)) for hits in range(_MOST_HITS + 1)]
_COSTS = [2 ** (place / _CLASSES_PER_DOUBLING) for place in range(_NUM_CLASSES)]


def prefill_cost(num_tokens: int) -> float:
    """What it costs to compute the first `num_tokens` tokens of a prompt, in units of its first token."""
    return num_tokens + num_tokens**2 / 2 / TOKENS_TO_DOUBLE


class Ghosts:
    """Keys of blocks that were evicted not long ago, and how often each had been hit: the newest ones, a few for each slot of the pool."""

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
        """The block is back: forget its ghost, and say how often it had been hit; None where there is no ghost of it."""
        return self._hits.pop(key, None)


class CostOrder:
    """A queue per class of cost; a slot's value in it is its rank."""

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
        for queue in self._queues:
            yield from queue

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        for slot, key, depth in zip(slots, keys, depths, strict=True):
            earlier = self._ghosts.take(key)
            self._key[slot] = key
            self._depth[slot] = depth
            self._hits[slot] = 0 if earlier is None else min(earlier + 1, _MOST_HITS)  # that it is wanted again is a hit that was missed
            self._class_of[slot] = 0

    def hit(self, slots: Run) -> None:
        hits = self._hits
        for slot in as_list(slots):
            if hits[slot] < _MOST_HITS:
                hits[slot] += 1

    def add(self, slots: Run) -> None:
        depths, hits, class_of, queues = self._depth, self._hits, self._class_of, self._queues
        before, chain = -1, 0.0
        for slot in as_list(slots):
            depth = depths[slot]
            if depth >= before:  # another chain begins, with its deepest
                chain = self._chain_class(depth)
            before = depth
            # Never lower than before: a short request must not make a beginning cheaper than the long continuation that is here too.
            place = class_of[slot] = min(max(int(chain + _HIT_CLASSES[hits[slot]]), class_of[slot]), _NUM_CLASSES - 1)
            queues[place][slot] = self._floor + _COSTS[place]
        self._num += len(slots)

    def remove(self, slots: Run) -> None:
        queues, class_of = self._queues, self._class_of
        for slot in as_list(slots):
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
        """From the queue whose head ranks lowest, of equal ones the cheapest, until another's does, or `popped` has `num`."""
        heads = sorted((next(iter(queue.values())), place) for place, queue in enumerate(self._queues) if queue)
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
        """Of the mean cost per token of a chain whose deepest block is `depth`."""
        num_tokens = (depth + 1) * self._block_tokens
        return _CLASSES_PER_DOUBLING * math.log2(prefill_cost(num_tokens) / num_tokens)

"""Which rank holds which experts of a layer, so that no rank has much more work than the others. Pure.

Each rank has the same number of slots. Experts that many tokens hit get several, on different ranks where
that is possible, and the tokens of an expert are shared evenly between its copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import InvariantBroken


class Spread(NamedTuple):
    """The expert of each slot of each rank, and the number of slots of each expert."""

    ranks: tuple[tuple[int, ...], ...]
    num_copies: tuple[int, ...]

    def loads(self, tokens: Sequence[float]) -> list[float]:
        """Of each rank, where expert e has `tokens[e]`."""
        return [sum(tokens[e] / self.num_copies[e] for e in rank) for rank in self.ranks]

    def imbalance(self, tokens: Sequence[float]) -> float:
        """The largest load over the mean. 1: all ranks have the same."""
        loads = self.loads(tokens)
        mean = sum(loads) / len(loads)
        return max(loads) / mean if mean else 1.0


def placed(tokens: Sequence[float], num_ranks: int, num_slots: int) -> Spread:
    """`num_slots` of each rank; together they hold every expert at least once.

    Copies go, one after the other, to the expert whose copies have most tokens each. Then the heaviest copies
    are placed first, each on the rank with the least load that has room and, if possible, does not have the
    expert. At last pairs are exchanged while that helps the heaviest rank.
    """
    num = len(tokens)
    if not num or num_ranks < 1 or num_ranks * num_slots < num:
        raise InvariantBroken(f"{num_ranks} ranks of {num_slots} slots cannot hold {num} experts")
    copies = _copies(tokens, num_ranks * num_slots, num_ranks)
    each = [tokens[e] / copies[e] for e in range(num)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for e in sorted(range(num), key=lambda e: (-each[e], e)):
        for _ in range(copies[e]):
            able = [r for r in range(num_ranks) if len(ranks[r]) < num_slots]
            rank = min(able, key=lambda r: (e in ranks[r], loads[r], len(ranks[r]), r))
            ranks[rank].append(e)
            loads[rank] += each[e]
    while _exchange(ranks, loads, each):
        pass
    return Spread(tuple(tuple(sorted(rank)) for rank in ranks), tuple(copies))


def _copies(tokens: Sequence[float], num_slots: int, most: int) -> list[int]:
    """`most` of one expert, unless all have so many."""
    copies = [1] * len(tokens)
    heap = [(-load, e) for e, load in enumerate(tokens)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(tokens)):
        if not heap:  # slots that are left over: all experts are everywhere
            heap = [(-load / copies[e], e) for e, load in enumerate(tokens)]
            heapq.heapify(heap)
            most = num_slots
        _, e = heapq.heappop(heap)
        copies[e] += 1
        if copies[e] < most:
            heapq.heappush(heap, (-tokens[e] / copies[e], e))
    return copies


def _exchange(ranks: list[list[int]], loads: list[float], each: Sequence[float]) -> bool:
    """Exchange the two experts that lower the heaviest rank most; False: there are none."""
    heavy = max(range(len(ranks)), key=loads.__getitem__)
    best: tuple[float, int, int, int] | None = None
    for other in range(len(ranks)):
        if other == heavy:
            continue
        for a, mine in enumerate(ranks[heavy]):
            for b, theirs in enumerate(ranks[other]):
                less = each[mine] - each[theirs]
                after = max(loads[heavy] - less, loads[other] + less)
                keeps = theirs not in ranks[heavy] and mine not in ranks[other]
                if less > 0 and keeps and after < loads[heavy] * (1 - 1e-9):
                    best = min(best or (after, other, a, b), (after, other, a, b))
    if best is None:
        return False
    _, other, a, b = best
    less = each[ranks[heavy][a]] - each[ranks[other][b]]
    ranks[heavy][a], ranks[other][b] = ranks[other][b], ranks[heavy][a]
    loads[heavy], loads[other] = loads[heavy] - less, loads[other] + less
    return True

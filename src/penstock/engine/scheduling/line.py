"""The queue of requests that wait to run. Owns their order; `admission.py` decides which request is
admitted.

A request's rank is its arrival time plus an allowance: some seconds for every second of work that its start
takes, up to a bound. The next request has the highest priority and, within it, the lowest rank. So a request
is never overtaken by one of its priority that arrived more than the bound later, even if the estimates are
wrong or change.

Requests that find nothing cached form a queue of their own, in order of arrival. Only its first request
competes: they do not overtake each other. One exception: if a long one is deferred so that running
conversations can continue, short ones pass it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import islice

from penstock.contract import Request
from penstock.engine.scheduling.stages import WaitingRequest

# Seconds of waiting that a second of work is worth. A request whose KV is on the device needs no new room for
# it. A request that loads its KV from colder tiers pushes out others that come back later. A request that
# finds nothing takes memory from others for good.
_HERE_PATIENCE = 20.0
_PATIENCE = 60.0
_COLD_PATIENCE = 240.0
# Share of the bound for requests that find a good part of their prompt: a conversation under way waits less
# than a new one.
_KNOWN_SHARE = 0.165
_GOOD_PART = 0.25
# distance of two priorities where one number holds priority and rank; above any arrival time
_PRIORITY_S = 1e8
_MOST_PRIORITY = 1000  # larger values are clamped
# prompt tokens that one plan matches for the first time, checked before each request: the time grows with the
# prompt
_NEW_TOKENS = 65_536


class Line:
    """`bound_s`: how much later a request may arrive and still go first; 0: first come, first served."""

    def __init__(self, bound_s: float = 0.0) -> None:
        self.num_retracted = 0
        self._bound_s = bound_s
        self._queued: list[WaitingRequest] = []  # requests that find nothing cached, by arrival
        self._ranked: list[WaitingRequest] = []  # all other requests, by rank
        # all requests: new ones first, then those whose match is oldest
        self._to_look_at: OrderedDict[WaitingRequest, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queued) + len(self._ranked)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """In order, next request first. Do not change the line while iterating."""
        queued, ranked = 0, 0
        while queued < len(self._queued) and ranked < len(self._ranked):
            first = _by_rank(self._queued[queued]) < _by_rank(self._ranked[ranked])
            yield self._queued[queued] if first else self._ranked[ranked]
            queued, ranked = queued + first, ranked + (not first)
        yield from self._queued[queued:]
        yield from self._ranked[ranked:]

    def passing(self, num_tokens: int, most: int) -> Iterator[WaitingRequest]:
        """Requests that may pass a deferred long conversation, next one first: those that find something
        cached and, of the first `most` that find nothing, those shorter than `num_tokens`. Do not change the
        line while iterating."""
        short = [one for one in islice(self._queued, most) if one.num_tokens < num_tokens]
        return merge(short, self._ranked, key=_by_rank)

    def going_on(self) -> Iterator[WaitingRequest]:
        """Requests that continue a conversation."""
        return (waiting for waiting in self._ranked if waiting.goes_on)

    def add(self, waiting: WaitingRequest) -> None:
        """Ranked by arrival until `rank` is called."""
        waiting.rank = waiting.request.arrival_s
        waiting.is_ranked = True
        insort(self._ranked, waiting, key=_by_rank)
        self.num_retracted += waiting.is_retracted
        if self._bound_s:
            self._to_look_at[waiting] = None
            # it was just matched, and the result is cached
            self._to_look_at.move_to_end(waiting, last=False)

    def remove(self, waiting: WaitingRequest) -> None:
        """Call it before the request's state changes."""
        self._take_out(waiting)
        self._to_look_at.pop(waiting, None)
        self.num_retracted -= waiting.is_retracted

    def rank(
        self, waiting: WaitingRequest, start_s: float | None, found_share: float, is_here: bool = False
    ) -> bool:
        """Set the rank of `waiting`. `start_s`: seconds that its start takes once admitted, None if unknown.
        `found_share`: share of its prompt that is cached. `is_here`: most of that is on the device. Returns
        True if its place may have changed. A retracted request and one of unknown cost are ranked by
        arrival."""
        known = self._bound_s > 0 and start_s is not None and not waiting.is_retracted
        offset_s = 0.0
        waiting.goes_on = found_share >= _GOOD_PART or waiting.is_retracted
        if known and start_s is not None:
            most_s = self._bound_s * (1.0 - (1.0 - _KNOWN_SHARE) * min(1.0, found_share / _GOOD_PART))
            patience = _COLD_PATIENCE if not found_share else _HERE_PATIENCE if is_here else _PATIENCE
            offset_s = min(most_s, patience * start_s)
        rank, is_ranked = waiting.request.arrival_s + offset_s, found_share > 0 or not known
        if rank == waiting.rank and is_ranked == waiting.is_ranked:
            return False
        self._take_out(waiting)
        waiting.rank, waiting.is_ranked = rank, is_ranked
        if is_ranked:
            insort(self._ranked, waiting, key=_by_rank)
        else:
            insort(self._queued, waiting, key=_by_arrival)
        return True

    def look_again(self, most: int) -> list[WaitingRequest]:
        """The requests to match again now, in rotation; unmatched ones first."""
        found: list[WaitingRequest] = []
        num_new = 0
        for waiting in islice(self._to_look_at, most):
            if waiting.want is None:
                if num_new >= _NEW_TOKENS:
                    break
                num_new += waiting.num_tokens
            found.append(waiting)
        for waiting in found:
            self._to_look_at.move_to_end(waiting)
        return found

    def _take_out(self, waiting: WaitingRequest) -> None:
        line, key = (self._ranked, _by_rank) if waiting.is_ranked else (self._queued, _by_arrival)
        place = bisect_left(line, key(waiting), key=key)
        del line[place]


def _by_rank(waiting: WaitingRequest) -> tuple[int, float, int]:
    return waiting.request.priority, waiting.rank, waiting.life.order


def _by_arrival(waiting: WaitingRequest) -> tuple[int, float, int]:
    return waiting.request.priority, waiting.request.arrival_s, waiting.life.order


def want_rank(request: Request, rank: float) -> float:
    """Priority and rank as one number: blocks wanted by the highest number are evicted first."""
    return rank + _PRIORITY_S * max(-_MOST_PRIORITY, min(_MOST_PRIORITY, request.priority))

"""The requests that wait to run, and who of them is next. Owns their order and nothing else of them.

A request's rank is its arrival plus what it may be overtaken for: so many seconds for every second of work that its start takes, and
never more than a bound. Whoever runs next is of the highest priority, and of these of the least rank. So nobody is overtaken
by a request of its priority that has arrived more than the bound later, whatever the figures say, and whether they change or not.

Those that find nothing cached are a queue of their own, in order of arrival, of which only the first competes: among each other they do
not overtake. But where a long one of them begins later, so that others can go on, short ones go ahead of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import islice

from penstock.engine.scheduling.track import State, Track

# Seconds of waiting that a second of work is worth. Whoever finds its KV on the device has its room there already. Whoever brings it from
# elsewhere makes others leave, who come back later; and what somebody computes who finds nothing takes memory from others for good.
_HERE_PATIENCE = 20.0
_PATIENCE = 60.0
_COLD_PATIENCE = 240.0
# Of the bound, for those that find a good part of their prompt: somebody who is in the middle of a conversation is not kept waiting as long
# as somebody who begins one.
_KNOWN_SHARE = 0.165
_GOOD_PART = 0.25
_PRIORITY_S = 1e8  # between priorities, where a number stands for both: above any time of arrival
_MOST_PRIORITY = 1000  # the same for all beyond
_NEW_TOKENS = 65_536  # of prompts that are looked at for the first time in one plan, but for one: that takes as long as they are


class Line:
    """`bound_s`: how much later a request may arrive and still go first; 0: first come, first served."""

    def __init__(self, bound_s: float = 0.0) -> None:
        self.num_retracted = 0
        self._bound_s = bound_s
        self._queued: list[Track] = []  # those that find nothing, by arrival
        self._ranked: list[Track] = []  # the others, by rank
        self._to_look_at: OrderedDict[Track, None] = OrderedDict()  # all of them: newcomers, then whoever was looked at longest ago

    def __len__(self) -> int:
        return len(self._queued) + len(self._ranked)

    def __iter__(self) -> Iterator[Track]:
        """Whoever is next first. It may not be changed meanwhile."""
        queued, ranked = 0, 0
        while queued < len(self._queued) and ranked < len(self._ranked):
            first = _by_rank(self._queued[queued]) < _by_rank(self._ranked[ranked])
            yield self._queued[queued] if first else self._ranked[ranked]
            queued, ranked = queued + first, ranked + (not first)
        yield from self._queued[queued:]
        yield from self._ranked[ranked:]

    def passing(self, num_tokens: int, most: int) -> Iterator[Track]:
        """Those that may go ahead of one which begins a long conversation later, whoever is next first: whoever finds something, and of the
        first `most` that find nothing those below `num_tokens`. It may not be changed meanwhile."""
        short = [track for track in islice(self._queued, most) if len(track.tokens) < num_tokens]
        return merge(short, self._ranked, key=_by_rank)

    def going_on(self) -> Iterator[Track]:
        """Those in the middle of a conversation."""
        return (track for track in self._ranked if track.goes_on)

    def add(self, track: Track) -> None:
        """By its arrival, until more is known: `rank` says so."""
        track.rank = track.request.arrival_s
        track.is_ranked = True
        insort(self._ranked, track, key=_by_rank)
        self.num_retracted += track.state is State.RETRACTED
        if self._bound_s:
            self._to_look_at[track] = None
            self._to_look_at.move_to_end(track, last=False)  # what is cached of it was looked up a moment ago, and is remembered

    def remove(self, track: Track) -> None:
        """Before its state changes."""
        self._take_out(track)
        self._to_look_at.pop(track, None)
        self.num_retracted -= track.state is State.RETRACTED

    def rank(self, track: Track, start_s: float | None, found_share: float, is_here: bool = False) -> bool:
        """`track` starts within `start_s` once it is admitted, None where that is not known, and finds so much of its prompt; `is_here`:
        most of it on the device. Says whether its place in line may have changed. One that ran before, and one whose cost nobody knows,
        keeps the place of its arrival."""
        known = self._bound_s > 0 and start_s is not None and track.state is not State.RETRACTED
        offset_s = 0.0
        track.goes_on = found_share >= _GOOD_PART or track.state is State.RETRACTED
        if known and start_s is not None:
            most_s = self._bound_s * (1.0 - (1.0 - _KNOWN_SHARE) * min(1.0, found_share / _GOOD_PART))
            patience = _COLD_PATIENCE if not found_share else _HERE_PATIENCE if is_here else _PATIENCE
            offset_s = min(most_s, patience * start_s)
        rank, is_ranked = track.request.arrival_s + offset_s, found_share > 0 or not known
        if rank == track.rank and is_ranked == track.is_ranked:
            return False
        self._take_out(track)
        track.rank, track.is_ranked = rank, is_ranked
        if is_ranked:
            insort(self._ranked, track, key=_by_rank)
        else:
            insort(self._queued, track, key=_by_arrival)
        return True

    def look_again(self, most: int) -> list[Track]:
        """Some of those in line, others each time: those that nobody has looked at first."""
        tracks: list[Track] = []
        num_new = 0
        for track in islice(self._to_look_at, most):
            if track.want is None:
                if num_new >= _NEW_TOKENS:
                    break
                num_new += len(track.tokens)
            tracks.append(track)
        for track in tracks:
            self._to_look_at.move_to_end(track)
        return tracks

    def _take_out(self, track: Track) -> None:
        line, key = (self._ranked, _by_rank) if track.is_ranked else (self._queued, _by_arrival)
        place = bisect_left(line, key(track), key=key)
        del line[place]


def _by_rank(track: Track) -> tuple[int, float, int]:
    return track.request.priority, track.rank, track.order


def _by_arrival(track: Track) -> tuple[int, float, int]:
    return track.request.priority, track.request.arrival_s, track.order


def want_rank(track: Track, rank: float | None = None) -> float:
    """How late it runs, as one number: what requests of a lower priority want is forgotten first. `rank`: in place of its own."""
    return (track.rank if rank is None else rank) + _PRIORITY_S * max(-_MOST_PRIORITY, min(_MOST_PRIORITY, track.request.priority))


def arrival(track: Track) -> int:
    return track.order

"""Long conversations that are under way. Owns what is kept for those that were just answered, since agents
often go on at once, and whether there is room for another one to begin. Who is admitted is the scheduler's
business."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

from penstock.contract import KvLedger, Prefix, Request, Want
from penstock.engine.scheduling.line import Line, want_rank
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.track import Track

LONG_TOKENS = 8192  # of a conversation that all this is done for
# A client whose long conversation has just been answered may go on at once, and its KV is still there: so
# long its room is not given to a request whose own KV is elsewhere. In steps that only decode; a step that
# computes prompts takes as long as several. Longer would not be better: three times as long left rooms empty
# that others could have used, and on an H200 more of those that went on had to wait.
GRACE = 4
_PROMPT_STEPS = 4
# Plans in which such a conversation counts as under way, and its KV as wanted, as if its next request had
# come already. Until it has come and was looked at no other request wants it, and the next draw of blocks
# would take them from it first.
KEPT_PLANS = 64
# Conversations grow. Another long one begins where all that are under way take at most so much of the device
# with it: if their first turns filled it, later ones would make each other leave. That holds as long as half
# of the long requests that come go on with one of those answered last; it is assumed at first, and the last
# so many count more than all before.
_BEGUN_SHARE = 0.75
_LEAST_GOING_ON = 0.5
_REQUESTS = 8
_REMEMBERED = 64  # of those answered last: by one key each


@dataclass(slots=True)
class _Answered:
    """A conversation that has just been answered."""

    track: Track
    until: int  # number of the plan from which on nothing is kept for it
    want: Want
    # the key of a block, and which it is: a request that has it there continues at least half of it
    middle: tuple[int, bytes]
    went_on: bool = False  # its next request has come


class Conversations:
    """`bound_s`: how much later a request may arrive and still go first; 0: first come, first served, and
    nothing is kept."""

    def __init__(self, ledger: KvLedger, bound_s: float) -> None:
        self._ledger = ledger
        self._bound_s = bound_s
        self._newest_s = 0.0  # the latest arrival
        self._num_plans = 0
        self._grace = 0  # how long the room of an ended request is kept for its next one
        self._kept: deque[_Answered] = deque()  # for which something is kept, oldest first
        self._middles: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED)  # of those answered last
        # how many of the long requests that came lately went on with one of these, as a share
        self._going_on = 1.0

    def came(self, request: Request) -> None:
        self._newest_s = max(self._newest_s, request.arrival_s)
        if request.prefix is None or len(request.prompt) < LONG_TOKENS:
            return
        for one in self._kept:
            one.went_on = one.went_on or _has(request.prefix, *one.middle)
        if self._middles:
            goes_on = any(_has(request.prefix, *middle) for middle in self._middles)
            self._going_on += (goes_on - self._going_on) / _REQUESTS

    def begin_plan(self) -> None:
        self._num_plans += 1
        while self._kept and self._kept[0].until <= self._num_plans:
            self._kept.popleft().want.end()

    def step_planned(self, prefills: bool) -> None:
        self._grace = max(0, self._grace - (_PROMPT_STEPS if prefills else 1))

    def answered(self, track: Track) -> None:
        """It has ended, and its client may go on at once."""
        if len(track.tokens) < LONG_TOKENS:
            return
        self._grace = GRACE
        if track.prefix is not None and track.prefix.keys and track.request.may_match and self._bound_s > 0:
            want = self._ledger.want(track.prefix.keys, want_rank(track, self._newest_s))
            if want is not None:
                place = len(track.prefix.keys) // 2
                middle = place, track.prefix.keys[place]
                self._kept.append(_Answered(track, self._num_plans + KEPT_PLANS, want, middle))
                self._middles.append(middle)

    def forget(self) -> None:
        """No request is left that would take the place of those that were answered."""
        while self._kept:
            self._kept.popleft().want.end()
        self._middles.clear()

    @property
    def keep_room(self) -> bool:
        """Whether one that has just been answered may be cheaper to go on with than another is to start, and
        is heard of in a moment."""
        return self._grace > 0 and self._bound_s > 0

    def need_room(self, track: Track, measured: bool, running: Running, line: Line) -> bool:
        """Whether those that are under way need the device more than `track`, which would begin a long
        conversation. Others overtake it meanwhile: so only until a request comes that may not overtake it.
        Not where no running request's end could make room."""
        # before anything was measured its rank is its arrival
        by_s = track.rank if measured else track.rank + self._bound_s
        if self._going_on < _LEAST_GOING_ON or self._newest_s >= by_s or not len(running):
            return False
        num_left = int(_BEGUN_SHARE * self._ledger.num_blocks) - running.most_blocks(track)
        answered = (one.track for one in self._kept if not one.went_on)
        for other in chain(running.tracks.values(), answered, line.going_on()):
            if len(other.tokens) >= LONG_TOKENS and other.request.priority <= track.request.priority:
                num_left -= running.most_blocks(other)
                if num_left < 0:
                    return True
        return False


def begins(track: Track) -> bool:
    """Whether it would begin a long conversation."""
    return not track.goes_on and len(track.tokens) >= LONG_TOKENS


def _has(prefix: Prefix, place: int, key: bytes) -> bool:
    return place < len(prefix.keys) and prefix.keys[place] == key

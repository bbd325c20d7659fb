"""Long conversations that are under way. Owns what is kept for those just answered, since agents often
continue at once, and whether another one may begin. The scheduler decides which request is admitted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

from penstock.contract import KvLedger, Prefix, Request, Want
from penstock.engine.scheduling.line import Line, want_rank
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.stages import Life, WaitingRequest

LONG_TOKENS = 8192  # least length of a long conversation
# A client whose long conversation was just answered may continue at once, while its KV is still on the
# device. For this many steps its room is not given to a request whose KV is elsewhere. Counted in decode
# steps; a step with prompts counts as several. Three times as long was worse on an H200: slots stayed empty,
# and more continuing requests had to wait.
GRACE = 4
_PROMPT_STEPS = 4
# Plans for which such a conversation counts as under way and its KV as wanted. Without that want its blocks
# would be evicted first, before its next request is matched.
KEPT_PLANS = 64
# Conversations grow. A new long one begins only if all that are under way, itself included, take at most this
# share of the device: if first turns filled it, later turns would push each other out. This holds while at
# least half of recent long requests continue a conversation answered lately. That share starts at 1 and is a
# moving average over about this many requests.
_BEGUN_SHARE = 0.75
_LEAST_GOING_ON = 0.5
_REQUESTS = 8
_REMEMBERED = 64  # conversations answered last, one key each


@dataclass(slots=True)
class _Answered:
    """A conversation that was just answered."""

    life: Life
    until: int  # plan number at which its want ends
    want: Want
    # index and key of its middle block: a request with that key there continues at least half of it
    middle: tuple[int, bytes]
    went_on: bool = False  # its next request has arrived


class Conversations:
    """`bound_s`: how much later a request may arrive and still go first; 0: first come, first served, and
    nothing is kept."""

    def __init__(self, ledger: KvLedger, bound_s: float) -> None:
        self._ledger = ledger
        self._bound_s = bound_s
        self._newest_s = 0.0  # the latest arrival
        self._num_plans = 0
        self._grace = 0  # steps for which the room of an ended request is still kept
        self._kept: deque[_Answered] = deque()  # conversations whose KV is wanted, oldest first
        self._middles: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED)  # of those answered last
        # share of recent long requests that continued one of these
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

    def answered(self, life: Life) -> None:
        """The request has ended; its client may continue at once."""
        if len(life.tokens) < LONG_TOKENS:
            return
        self._grace = GRACE
        prefix = life.prefix
        if prefix is not None and prefix.keys and life.request.may_match and self._bound_s > 0:
            want = self._ledger.want(prefix.keys, want_rank(life.request, self._newest_s))
            if want is not None:
                place = len(prefix.keys) // 2
                middle = place, prefix.keys[place]
                self._kept.append(_Answered(life, self._num_plans + KEPT_PLANS, want, middle))
                self._middles.append(middle)

    def forget(self) -> None:
        """No request is left, so no kept conversation competes for room."""
        while self._kept:
            self._kept.popleft().want.end()
        self._middles.clear()

    @property
    def keep_room(self) -> bool:
        """True while a just-answered conversation may continue, which is cheaper than to start another
        request."""
        return self._grace > 0 and self._bound_s > 0

    def need_room(self, waiting: WaitingRequest, measured: bool, running: Running, line: Line) -> bool:
        """True if `waiting`, which begins a long conversation, should wait for those under way. Others
        overtake it meanwhile, so this ends when a request arrives that may not overtake it. False if no
        request runs whose end could make room."""
        # before the first measurement its rank is its arrival
        by_s = waiting.rank if measured else waiting.rank + self._bound_s
        if self._going_on < _LEAST_GOING_ON or self._newest_s >= by_s or not len(running):
            return False
        num_left = int(_BEGUN_SHARE * self._ledger.num_blocks) - running.most_blocks(waiting.life)
        under_way = chain(
            (one.life for one in running.requests.values()),
            (one.life for one in self._kept if not one.went_on),
            (one.life for one in line.going_on()),
        )
        for other in under_way:
            if len(other.tokens) >= LONG_TOKENS and other.request.priority <= waiting.request.priority:
                num_left -= running.most_blocks(other)
                if num_left < 0:
                    return True
        return False


def begins(waiting: WaitingRequest) -> bool:
    """True if the request begins a long conversation."""
    return not waiting.goes_on and waiting.num_tokens >= LONG_TOKENS


def _has(prefix: Prefix, place: int, key: bytes) -> bool:
    return place < len(prefix.keys) and prefix.keys[place] == key

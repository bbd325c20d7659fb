"""Vector clocks: what a lane, a thread or a running item knows to be over. Owns happens-before; knows nothing
of slots.

Time on a lane is the number of the work submitted to it, so a clock maps lanes to numbers: "all work on that
lane up to this number happens before me". Clocks only grow, by these edges:

- a lane waits for a fence: it learns what the fence's lane knew when the fence was placed, and that lane's
  work up to it;
- a thread sees a fence pass, by blocking or by polling: it learns the same;
- a thread submits to a lane: the work happens after all that the submitter knows;
- a thread touches bytes itself: that is an item of its own, which it knows to be over at once;
- work begins on a thread: until it ends, that thread acts as the item, and knows what the item's lane knew
  when the item was submitted;
- work ends: what it has seen meanwhile is known behind it on its lane;
- a slot changes hands: its next owner learns what was known when it was given up (`learn` and `Actor.shown`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping

Clock = dict[str, int]
Known = Mapping[str, int]  # an immutable clock

# Remembered changes of one lane's knowledge; older fences are taken to know slightly more than they did.
_KEPT = 4096
_NOTHING: Known = {}


def join(clock: Clock, other: Known) -> bool:
    """Grow `clock` by `other`; returns whether it grew."""
    grew = False
    for lane, number in other.items():
        if clock.get(lane, 0) < number:
            clock[lane] = number
            grew = True
    return grew


class Actor:
    """The origin of a submission, a poll or a change of hands: a host thread, or the lane's item that runs on
    it."""

    __slots__ = ("_shown", "clock", "item", "learned")

    def __init__(self, clock: Clock, item: tuple[str, int] | None = None) -> None:
        self.clock = clock
        self.item = item  # None: the thread itself
        self.learned = False  # whether it has seen anything new since its start
        self._shown: Known | None = None

    def learn(self, known: Known) -> None:
        if known is not self._shown and join(self.clock, known):
            self._shown = None
            self.learned = True

    def shown(self) -> Known:
        """Its present knowledge; the same object until it learns more."""
        if self._shown is None:
            self._shown = dict(self.clock)
        return self._shown


class _Actors(threading.local):
    """The actors on the calling thread, innermost last. Thread-local, so that no thread inherits another
    one's knowledge."""

    def __init__(self) -> None:
        self.stack = [Actor({})]


class _Changes:
    """How a lane's knowledge grew: (item, knowledge from that item on)."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Known]] = deque(maxlen=_KEPT)

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, number: int, known: Known) -> None:
        """`number` never falls."""
        entries = self._entries
        if entries and entries[-1][0] == number:
            entries.pop()
        entries.append((number, known))

    def at(self, number: int) -> Known:
        entries = self._entries
        if not entries:
            return _NOTHING
        if entries[-1][0] <= number:  # most fences are young
            return entries[-1][1]
        index = bisect_right(entries, number, key=lambda entry: entry[0]) - 1
        return entries[max(index, 0)][1] if index >= 0 or len(entries) == _KEPT else _NOTHING


class Clocks:
    """The clocks of all lanes and actors."""

    def __init__(self) -> None:
        self._actors = _Actors()
        self._lanes: defaultdict[str, Clock] = defaultdict(dict)
        # by lane: knowledge with which its items were submitted
        self._changes: defaultdict[str, _Changes] = defaultdict(_Changes)
        # by lane: additional knowledge that its items gained while they ran
        self._seen: defaultdict[str, _Changes] = defaultdict(_Changes)
        self._newest: Clock = {}  # work submitted, by lane

    @property
    def actor(self) -> Actor:
        return self._actors.stack[-1]

    # -------------------------------------------------------------------------------------------------- edges

    def submit(self, lane: str, number: int) -> Known:
        """The actor submits work `number` to `lane`. Returns what happens before it; valid until the next
        call."""
        clock = self._lanes[lane]
        if join(clock, self.actor.clock):
            self._changes[lane].note(number, dict(clock))
        self._newest[lane] = number
        return clock

    def act(self) -> tuple[str, int, Known]:
        """The actor itself touches bytes. A thread's own deeds are numbered like a lane's work, and it knows
        them to be over. Returns the thread, the number and what happens before it."""
        thread = threading.current_thread()
        name = f"thread {thread.name} ({thread.ident})"
        number = self._newest.get(name, 0) + 1
        clock = self.submit(name, number)
        self.actor.learn({name: number})
        return name, number, clock

    def wait(self, lane: str, on_lane: str, fence: int) -> None:
        """A wait is an item of `lane` with the next number, and happens after its submitter's knowledge like
        any other."""
        clock = self._lanes[lane]
        self._newest[lane] = number = self._newest.get(lane, 0) + 1
        grew = join(clock, self.actor.clock)
        if self._learn(clock, on_lane, fence) or grew:
            self._changes[lane].note(number, dict(clock))

    def see(self, on_lane: str, fence: int) -> None:
        actor = self.actor
        if actor.clock.get(on_lane, 0) >= fence and on_lane not in self._seen:
            return  # most polls find nothing new
        actor.learn(self.covered(on_lane, fence))

    def start(self, lane: str, number: int) -> None:
        """Item `number` of `lane` runs on the calling thread from now on."""
        clock = self.covered(lane, number - 1)
        join(clock, self._known_at(self._changes, lane, number))
        self._actors.stack.append(Actor(clock, (lane, number)))

    def finish(self, lane: str, number: int) -> None:
        stack = self._actors.stack
        if stack[-1].item != (lane, number):
            return  # it was skipped, or only launched here
        actor = stack.pop()
        if actor.learned:
            self._seen[lane].note(number, actor.shown())
            join(self._lanes[lane], actor.clock)

    # ---------------------------------------------------------------------------------------------- knowledge

    def covered(self, lane: str, fence: int | None) -> Clock:
        """All that is over when a fence of `lane` has passed: the lane's work up to it, and all that happened
        before that work. None: a fence without a number, taken to cover all submitted work."""
        clock: Clock = {}
        self._learn(clock, lane, self._newest.get(lane, 0) if fence is None else fence)
        return clock

    def _learn(self, clock: Clock, lane: str, fence: int) -> bool:
        grew = join(clock, self._known_at(self._changes, lane, fence))
        grew = join(clock, self._known_at(self._seen, lane, fence)) or grew
        return join(clock, {lane: fence}) or grew

    @staticmethod
    def _known_at(changes: dict[str, _Changes], lane: str, number: int) -> Known:
        found = changes.get(lane)
        return _NOTHING if found is None else found.at(number)

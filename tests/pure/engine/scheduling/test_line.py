"""The order of those in line, without anything that they wait for: who is next, whatever is found out about
them meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import MAX_PRIORITY
from penstock.engine import sessions
from penstock.engine.scheduling import running
from penstock.engine.scheduling.line import _NEW_TOKENS, Line, want_rank
from penstock.engine.scheduling.stages import State, WaitingRequest
from tests.pure.engine.scheduling.staged import life_of


class Ops(NamedTuple):
    """What happens, one after the other: an event's name, which of those that it may concern, and its
    figures."""

    bound_s: float
    events: list[tuple[str, int, float, float, int]]


NAMES = ("add", "add", "add", "rank", "rank", "rank", "rank", "admit", "admit", "retract", "cancel", "look")
SECONDS = st.integers(0, 120).map(lambda quarters: quarters / 4)
ops = st.builds(
    Ops,
    st.sampled_from([0.0, 1.0, 5.0, 60.0]),
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.integers(0, 99),
            SECONDS,
            st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
            st.integers(-1, 1),
        ),
        min_size=12,
    ),
)


class Crowd:
    """A line, and everybody who was ever in it."""

    def __init__(self, bound_s: float) -> None:
        self.bound_s = bound_s
        self.line = Line(bound_s)
        self.waiting: list[WaitingRequest] = []
        self.running: list[WaitingRequest] = []
        self.now_s = 1000.0
        self.num_orders = 0

    def add(self, late_s: float = 0.0, priority: int = 0) -> WaitingRequest:
        """`late_s`: how long the request was on its way from where its arrival was noted. Others may have
        come in between."""
        self.num_orders += 1
        life = life_of([1], 1, name=f"r{self.num_orders}")
        life.request = replace(life.request, arrival_s=self.now_s - late_s, priority=priority)
        life.order, life.tokens = self.num_orders, []
        track = WaitingRequest(life)
        self.line.add(track)
        self.waiting.append(track)
        return track

    def admit(self) -> WaitingRequest | None:
        """Whoever is next, and nobody in line has more right to it."""
        track = next(iter(self.line), None)
        assert (track is None) == (not self.waiting)
        if track is None:
            return None
        for other in self.waiting:
            if other is track:
                continue
            assert track.request.priority <= other.request.priority, "one of a higher priority is in line"
            if track.request.priority < other.request.priority:
                continue
            late_s = track.request.arrival_s - other.request.arrival_s
            assert late_s <= self.bound_s, (
                f"{other.request.id} is overtaken by one that arrived {late_s} s later"
            )
            if self.bound_s == 0.0 or not (track.is_ranked or other.is_ranked):
                assert _arrival(track) < _arrival(other), "of two that find nothing the later one goes first"
        self.leave(track, State.RUNNING)
        self.running.append(track)
        return track

    def leave(self, track: WaitingRequest, state: State) -> None:
        self.line.remove(track)
        self.waiting.remove(track)
        track.life.move(state)

    def retract(self, track: WaitingRequest) -> None:
        self.running.remove(track)
        track.life.move(State.RETRACTED)
        self.line.add(track)
        self.waiting.append(track)

    def do(self, name: str, number: int, seconds: float, share: float, priority: int) -> None:
        if name == "add":
            self.add(seconds / 60, priority)
            self.now_s += seconds / 4
        elif name == "admit":
            self.admit()
        elif name == "retract" and self.running:
            self.retract(self.running[number % len(self.running)])
        elif name == "look":
            looked = self.line.look_again(number % 8)
            assert len(set(looked)) == len(looked) and set(looked) <= set(self.waiting)
        elif self.waiting and name in ("rank", "cancel"):
            track = self.waiting[number % len(self.waiting)]
            if name == "cancel":
                self.leave(track, State.ENDED)
            else:
                self.line.rank(track, None if number % 10 == 9 else seconds / 10, share)

    def check(self) -> None:
        tracks = list(self.line)
        assert len(tracks) == len(self.line) and set(tracks) == set(self.waiting), (
            "everybody in line is in it once"
        )
        assert self.line.num_retracted == sum(track.is_retracted for track in self.waiting)


def _arrival(track: WaitingRequest) -> tuple[float, int]:
    return track.request.arrival_s, track.life.order


@settings(deadline=None, max_examples=300)
@given(ops)
def test_nobody_is_overtaken_by_one_that_arrived_later_than_the_bound_whatever_is_found_out_about_them(
    ops: Ops,
) -> None:
    crowd = Crowd(ops.bound_s)
    for event in ops.events:
        crowd.do(*event)
        crowd.check()
    num = len(crowd.waiting)
    assert sum(crowd.admit() is not None for _ in range(num + 1)) == num, "everybody's turn comes"


def ranked(bound_s: float, *those: tuple[float, float | None, float]) -> list[int]:
    """The order of some that arrived then, start within so many seconds and find that much of their
    prompts."""
    crowd = Crowd(bound_s)
    tracks = []
    for arrival_s, start_s, share in those:
        crowd.now_s = arrival_s
        tracks.append(crowd.add())
        crowd.line.rank(tracks[-1], start_s, share)
    return [tracks.index(track) for track in crowd.line]


ORDERS = {
    "whoever is cheaper to start": (60.0, [(0.0, 0.5, 0.5), (1.0, 0.001, 0.9), (2.0, 0.1, 0.9)], [1, 2, 0]),
    "a known prompt is overtaken for a part of the bound": (
        60.0, [(0.0, 9.0, 0.25), (9.7, 0.0, 1.0), (10.1, 0.0, 1.0)], [1, 0, 2],
    ),
    "an unknown one for all of it": (
        60.0, [(0.0, 9.0, 0.0), (59.5, 0.0, 1.0), (60.5, 0.0, 1.0)], [1, 0, 2],
    ),
    "a second of work is worth a minute": (
        60.0, [(0.0, 0.1, 0.5), (5.5, 0.0, 1.0), (6.5, 0.0, 1.0)], [1, 0, 2],
    ),
    "four where nothing is found": (
        60.0, [(0.0, 0.1, 0.0), (23.0, 0.0, 1.0), (25.0, 0.0, 1.0)], [1, 0, 2],
    ),
    "those that find nothing by arrival": (
        60.0, [(0.0, 9.0, 0.0), (1.0, 0.001, 0.0), (2.0, 0.1, 0.0)], [0, 1, 2],
    ),
    "no bound, no figures": (0.0, [(0.0, 9.0, 0.0), (1.0, 0.001, 1.0), (1.0, 0.0, 1.0)], [0, 1, 2]),
    "nothing is known": (60.0, [(0.0, None, 0.0), (1.0, None, 1.0)], [0, 1]),
}  # fmt: skip


def test_who_goes_first() -> None:
    """Each has its arrival, the seconds that it takes to start, and the share of its prompt that it finds."""
    for why, (bound_s, those, order) in ORDERS.items():
        assert ranked(bound_s, *those) == order, why


def test_whoever_finds_a_good_part_of_his_prompt_or_ran_before_goes_on() -> None:
    crowd = Crowd(60.0)
    ran = crowd.add()
    assert crowd.admit() is ran
    crowd.retract(ran)
    found = {share: crowd.add() for share in (0.0, 0.24, 0.25)}
    new = crowd.add()
    for share, track in found.items():
        crowd.line.rank(track, 0.1, share)
    crowd.line.rank(ran, 0.1, 0.0)
    assert list(crowd.line.going_on()) == [ran, found[0.25]] and new in crowd.waiting
    crowd.line.rank(found[0.25], 0.1, 0.0)
    assert list(crowd.line.going_on()) == [ran], "what it had found is lost"


def test_all_in_line_are_looked_at_in_turn_and_nobody_twice() -> None:
    crowd = Crowd(60.0)
    tracks = [crowd.add() for _ in range(10)]
    for _ in range(3):  # away and back: it is in line once
        crowd.leave(tracks[0], State.RUNNING)
        crowd.running.append(tracks[0])
        crowd.retract(tracks[0])
    for _ in range(3):
        looked = [track for _ in range(5) for track in crowd.line.look_again(2)]
        assert set(looked) == set(tracks) and len(looked) == 10
    assert len(crowd.line.look_again(64)) == 10


def test_of_long_prompts_that_nobody_has_looked_at_one_is_looked_at_in_a_plan() -> None:
    """That takes as long as they are; to look at them again does not."""
    crowd = Crowd(60.0)
    tracks = [crowd.add() for _ in range(3)]
    for track in tracks:
        track.life.tokens = [1] * _NEW_TOKENS
    looked = [crowd.line.look_again(4) for _ in range(3)]
    assert [len(some) for some in looked] == [1, 1, 1] and {
        track for some in looked for track in some
    } == set(tracks)
    for track in tracks:
        track.want = Wanted()
    assert len(crowd.line.look_again(4)) == 3
    for track in tracks:
        track.want, track.life.tokens = None, [1] * 100
    assert len(crowd.line.look_again(4)) == 3


@pytest.mark.parametrize("priority", [-MAX_PRIORITY - 1, -1, 0, 1, MAX_PRIORITY])
def test_whatever_its_priority_what_one_in_line_wants_stays_behind_that_of_the_next_and_before_what_sessions_retain(  # noqa: E501
    priority: int,
) -> None:
    """Of what is wanted the greatest rank is forgotten first."""
    waits = Crowd(60.0).add(priority=priority)
    latest_s, longest_s = 1e9, 3600.0
    assert (
        want_rank(waits.request, waits.rank) > running._NEXT_RANK
        and want_rank(waits.request, latest_s + longest_s) < sessions._RANK_STEP - latest_s
    )


class Wanted:
    rank = 0.0

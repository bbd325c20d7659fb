"""The figures of a running engine on a clock of the test's own: what is counted, when, and on which side of a
bound."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.contract import (
    FinishReason,
    KvSource,
    Request,
    SamplingParams,
    Start,
    TokenEvent,
)
from penstock.engine import outbox as outbox_module
from penstock.engine.outbox import Outbox
from penstock.engine.scheduling.events import SchedulerCounts
from penstock.engine.scheduling.stages import State
from penstock.figures import Histogram


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(outbox_module, "time", made)
    return made


# ------------------------------------------------------------------------------------------------- histograms


def test_a_value_on_a_bound_belongs_to_what_lies_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, np.nextafter(1.0, 2.0), 2.0, np.nextafter(2.0, 3.0), 1e9):
        histogram.add(float(value))
    assert histogram.counts == [2, 2, 2]


# ----------------------------------------------------------------------------------------------------- outbox


def asked(name: str) -> Request:
    return Request(name, [1], SamplingParams(max_tokens=1), arrival_s=98.0)


def totals(outbox: Outbox) -> dict[str, tuple[int, float]]:
    kept = {"first": outbox.ttft, "between": outbox.inter_token, "resumed": outbox.resume}
    return {name: (sum(histogram.counts), round(histogram.total, 6)) for name, histogram in kept.items()}


def test_the_first_token_is_timed_from_the_arrival_and_later_ones_from_the_one_before(clock: Clock) -> None:
    outbox = Outbox()
    outbox.open(asked("r"), lambda event: None)
    for now, tokens in ((100.0, (1,)), (100.5, (2,)), (102.5, (3, 4, 5, 6))):
        clock.now = now
        outbox.publish([TokenEvent("r", tokens)])
    assert totals(outbox) == {"first": (1, 2.0), "between": (5, 2.5), "resumed": (0, 0.0)}
    assert outbox.inter_token.counts[outbox.inter_token.bounds.index(0.5)] == 5, (
        "four tokens in two seconds are four of half a second"
    )


def test_a_retraction_is_timed_until_the_request_runs_again(clock: Clock) -> None:
    outbox = Outbox()
    outbox.open(asked("r"), lambda event: None)
    outbox.note_moves([("r", State.RETRACTED), ("gone", State.RETRACTED)])
    clock.now += 3.0
    outbox.note_moves([("r", State.RUNNING), ("gone", State.RUNNING)])
    assert totals(outbox)["resumed"] == (1, 3.0)


def test_the_first_event_says_how_long_the_request_waited_for_loads(clock: Clock) -> None:
    """From its first load on, also where it was retracted and loads again, and nothing where it began
    before."""
    outbox = Outbox()
    heard: list[TokenEvent] = []
    for name in ("loads twice", "begins first", "loads nothing"):
        outbox.open(asked(name), heard.append, matched_s=0.25)

    def start(name: str) -> None:
        outbox.note_starts([Start.of(0, asked(name))])

    start("begins first")
    clock.now = 101.0
    outbox.note_moves([("loads twice", State.LOADING), ("begins first", State.LOADING)])
    clock.now = 103.0
    outbox.note_moves([("loads twice", State.LOADING)])
    clock.now = 104.0
    start("loads twice")
    start("loads nothing")
    outbox.publish(
        [
            TokenEvent(name, (1,), source=KvSource(computed=1))
            for name in ("loads twice", "begins first", "loads nothing")
        ]
    )
    assert [(event.loaded_s, event.matched_s) for event in heard] == [(3.0, 0.25), (0.0, 0.25), (0.0, 0.25)]


def test_events_say_how_long_steps_waited_for_experts_since_the_request_began(clock: Clock) -> None:
    """Each wait once, whatever steps waited before; and nothing where experts stay."""
    waited_s, heard = [5.0], list[TokenEvent]()
    outbox, plain = Outbox(expert_wait_s=lambda: waited_s[0]), Outbox()
    for one in (outbox, plain):
        one.open(asked("r"), heard.append)
        one.note_starts([Start.of(0, asked("r"))])
    for now_s, more in ((5.5, {"source": KvSource(computed=1)}), (5.5, {}), (7.0, {})):
        waited_s[0] = now_s
        for one in (outbox, plain):
            one.publish([TokenEvent("r", (1,), **more)])
    assert [event.expert_wait_s for event in heard] == [0.5, None, None, None, 1.5, None]


def test_a_request_is_closed_before_its_listener_hears_of_the_end(clock: Clock) -> None:
    """So that a listener may submit again under the same id."""
    outbox = Outbox()
    open_meanwhile: list[bool] = []
    outbox.open(asked("r"), lambda event: open_meanwhile.append("r" in outbox))
    outbox.publish([TokenEvent("r", (1,)), TokenEvent("r", finish=FinishReason.LENGTH)])
    assert open_meanwhile == [True, False]


def test_requests_that_end_with_an_error_are_closed_and_told_once() -> None:
    outbox, heard = Outbox(), list[tuple[str, bool, str | None]]()
    for name in ("one", "other"):
        outbox.open(
            asked(name),
            lambda event: heard.append((event.request_id, event.request_id in outbox, event.error)),
        )
    outbox.end_all("the device is gone")
    outbox.end_all("the engine is closed")
    assert heard == [("one", False, "the device is gone"), ("other", False, "the device is gone")]
    assert len(outbox) == 0 and outbox.open_ids() == []


# ------------------------------------------------------------------------------------------------------- pace


def test_drafts_are_counted_by_their_places_also_where_none_there_was_kept() -> None:
    counts = SchedulerCounts()
    counts.add_drafts(2, 0)
    assert (counts.drafted_by_place, counts.accepted_by_place) == ([1, 1], [0, 0])
    counts.add_drafts(4, 1)
    counts.add_drafts(1, 1)
    assert (counts.drafted_by_place, counts.accepted_by_place) == (
        [3, 2, 1, 1],
        [2, 0, 0, 0],
    ) and sum(counts.drafted_by_place) == 7

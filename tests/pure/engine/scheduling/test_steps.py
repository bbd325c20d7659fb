"""The step being put together, by itself: what a request adds to it, and what stays of one that leaves before
the launch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.contract import Fence, FenceId, Request, SamplingParams, Start
from penstock.engine.scheduling.stages import RunningRequest
from penstock.engine.scheduling.steps import NextStep, Sealing, Steps
from tests.pure.engine.scheduling.staged import BLOCK, life_of, running_of


@dataclass
class Table:
    """Slots from `first` on; `fences` are handed out once."""

    first: int
    fences: tuple[Any, ...] = ()
    num_slots: int = 9

    def slots(self, num_tokens: int) -> Any:
        return np.arange(self.first, self.first + -(-num_tokens // 4), dtype=np.int32)

    def take_after(self) -> tuple[Fence, ...]:
        fences, self.fences = self.fences, ()
        return fences


class Named(NamedTuple):
    """A fence, as far as its name goes."""

    lane: str
    number: int


@dataclass
class Load:
    settled: bool = False
    arrivals: tuple[()] = field(default_factory=tuple)


def running(
    name: str, num_tokens: int, *, row: int = 0, load: Load | None = None, **changes: Any
) -> RunningRequest:
    life = life_of(range(num_tokens), changes.pop("max_tokens", 4), name=name)
    life.request = dataclasses.replace(life.request, adapter=changes.pop("adapter", None))
    one = running_of(life, table=Table(10 * row), row=row)
    one.load = load  # type: ignore[assignment]
    for field_name, value in changes.items():
        setattr(one if hasattr(one, field_name) else life, field_name, value)
    return one


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_nothing_that_a_request_would_compute_or_wait_for_stays_when_it_leaves(num_tokens: int) -> None:
    draft, stays, leaves = (
        NextStep(),
        running("stays", 5, load=Load()),
        running("leaves", 5, row=1, load=Load()),
    )
    for track in (stays, leaves):
        draft.set_up(track)
        draft.add(track, num_tokens)
    kept = stays.request.id
    draft.drop("leaves")
    assert [chunk.request_id for chunk in draft.chunks()] == [kept] == list(draft.loads)
    assert [start.row for start in draft.starts] == [0, 1], (
        "its row is set up all the same: whoever gets it next comes behind"
    )


def test_of_chunks_of_one_token_those_that_sample_come_first() -> None:
    """So a row of theirs and its sample have the same number, which the device relies on where drafts are
    verified."""
    draft = NextStep()
    for row, (num, max_tokens) in enumerate([(5, 4), (1, 0), (1, 4), (1, 0), (4, 0), (1, 4)]):
        draft.add(running(str(row), 5, row=row, num_planned=5 - num, max_tokens=max_tokens), num)
    assert [chunk.row for chunk in draft.chunks()] == [2, 5, 1, 3, 0, 4] and draft.plan(
        1, draft.chunks()
    ).num_decodes == 4


@pytest.mark.parametrize(("settled", "waits"), [(True, False), (False, True)])
def test_a_step_waits_for_a_load_that_is_under_way_and_the_next_one_does_not(
    settled: bool, waits: bool
) -> None:
    draft, load = NextStep(), Load(settled)
    track = running("r", 9, load=load)
    draft.add(track, 4)
    assert draft.loads == ({"r": load} if waits else {}) and track.load is None
    later = NextStep()
    later.add(track, 4)
    assert later.loads == {}


def test_earlier_users_are_waited_for_once_each() -> None:
    draft, shared, own = NextStep(), Named("load", 2), Named("save", 2)
    for row, fences in enumerate([(shared,), (shared, own), ()]):
        track = running(str(row), 4, row=row)
        track.table.fences = fences  # type: ignore[union-attr]
        draft.add(track, 4)
    assert list(draft.after.items()) == [(FenceId("load", 2), shared), (FenceId("save", 2), own)]


@pytest.mark.parametrize("penalty", [1.0, 1.2, 0.8])
def test_a_start_has_the_prompt_only_where_a_penalty_looks_at_it(penalty: float) -> None:
    start = Start.of(
        3, Request("r", [5, 2, 5], SamplingParams(max_tokens=1, repetition_penalty=penalty)), [7, 7]
    )
    assert (start.row, start.request_id, start.output) == (3, "r", (7, 7))
    assert (None if start.prompt_tokens is None else start.prompt_tokens.tolist()) == (
        None if penalty == 1.0 else [2, 5]
    )


def steps_of(*planned: list[RunningRequest]) -> tuple[Steps, list[int]]:
    steps, numbers = Steps(), list[int]()
    for tracks in planned:
        draft = NextStep()
        for track in tracks:
            draft.add(track, 2)
        numbers.append(steps.add(draft.prefills, {track.request.id: track for track in tracks}))
    return steps, numbers


class Given:
    """A table that says with which fences it was given back."""

    def __init__(self) -> None:
        self.fences: list[object] = []

    def release(self, fence: object) -> None:
        self.fences.append(fence)


def test_tables_are_given_back_behind_the_whole_step_that_was_launched_last() -> None:
    steps, _ = steps_of([running("r", 9)])
    early, late, after = Given(), Given(), Given()
    forward, whole = object(), object()
    steps.release(early)  # type: ignore[arg-type]
    steps.launched(forward, is_whole=False)  # type: ignore[arg-type]
    steps.release(late)  # type: ignore[arg-type]
    assert early.fences == [None] and late.fences == [], "the rest of the step may use its slots"
    steps.launched(whole)  # type: ignore[arg-type]
    steps.release(after)  # type: ignore[arg-type]
    assert late.fences == after.fences == [whole] and steps.last_fence is whole


def test_a_request_that_leaves_before_its_turn_has_its_blocks_sealed_all_the_same() -> None:
    sealed = list[int]()
    one = running("r", 2 * BLOCK + 1)
    one.table.seal = lambda tokens, num, fence: sealed.append(num)  # type: ignore[method-assign]
    sealing = Sealing(Steps(), BLOCK)
    one.num_committed = 2 * BLOCK
    sealing.filled(one, None)
    assert not sealed, "no commit has begun"
    sealing.finish(one)
    sealing.finish(one)
    assert sealed == [2 * BLOCK]

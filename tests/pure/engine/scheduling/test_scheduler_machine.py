"""The scheduler in any order of submit, plan, commit, cancel, failure and finish; and faults that this must
notice."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import InvariantBroken
from tests.pure.engine.scheduling.scheduler_device import BLOCK, EOS
from tests.pure.engine.scheduling.scheduler_faults import FAULTS
from tests.pure.engine.scheduling.scheduler_world import World

# The first two share two blocks and part inside the third.
STEMS = [
    [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3],
    [1, 2, 3, 4, 5, 6, 1, 2, 3, 5, 5, 5, 5, 5, 5],
    [6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6],
]
KINDS = [
    {},
    {},
    {"ignore_eos": True},
    {"prompt_logprobs": 0},
    {"logprobs": 1},
    {"stop_token_ids": frozenset((2, 3))},
]
MAX_OPEN = 8
BOUNDED = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class Shape(NamedTuple):
    world: tuple[int, int, int, float, bool]  # slots, rows, tokens per step, overcommit, prefix cache
    depth: int  # steps in flight at most; the engine has two


shapes = st.builds(
    Shape,
    world=st.tuples(
        st.integers(4, 10),
        st.sampled_from([1, 2, 4, 4]),
        st.sampled_from([1, 3, 4, 5, 8, 64]),
        st.sampled_from([1.0, 2.0, 4.0]),
        st.sampled_from([True, True, True, False]),
    ),
    depth=st.sampled_from([2, 2, 3]),
)
index = st.integers(0, 1000)
max_tokens = st.sampled_from([0, 1, 1, 2, 5, 9, 9])
kind = st.sampled_from(KINDS)


class SchedulerMachine(RuleBasedStateMachine):
    make: ClassVar[type[Scheduler]] = Scheduler
    seen: ClassVar[Counter[str]] = Counter()
    world: World

    @initialize(shape=shapes)
    def begin(self, shape: Shape) -> None:
        self.world = World(*shape.world, make=self.make)
        self.depth = shape.depth

    # ----------------------------------------------------------------------------------------------- requests

    def _submit(self, prompt: list[int], max_tokens: int, kind: dict[str, object]) -> None:
        if len(self.world.scheduler.lives) >= MAX_OPEN:
            return
        room = self.world.cache.num_blocks * BLOCK
        self.world.submit(prompt[: room - max_tokens], max_tokens, **kind)

    @rule(stem=st.sampled_from(STEMS), length=st.integers(1, 15), max_tokens=max_tokens, kind=kind)
    def submit(self, stem: list[int], length: int, max_tokens: int, kind: dict[str, object]) -> None:
        self._submit(stem[:length], max_tokens, kind)

    @rule(stem=st.sampled_from(STEMS), blocks=st.integers(1, 3), max_tokens=max_tokens)
    def submit_full_blocks(self, stem: list[int], blocks: int, max_tokens: int) -> None:
        self._submit(stem[: blocks * BLOCK], max_tokens, {})

    @rule(
        num=st.integers(2, 4),
        first=st.integers(0, 4),
        length=st.sampled_from([4, 5, 11]),
        max_tokens=st.integers(6, 12),
    )
    def submit_a_crowd(self, num: int, first: int, length: int, max_tokens: int) -> None:
        """Together they want more than there is, for long."""
        for at in range(first, first + num):
            self._submit(STEMS[0][at : at + length], max_tokens, {"ignore_eos": True})

    @precondition(lambda self: self.world.asked)
    @rule(of=index, more=st.integers(0, 3), max_tokens=max_tokens)
    def continue_a_conversation(self, of: int, more: int, max_tokens: int) -> None:
        """A later turn: its prompt is an earlier one with what that had generated so far."""
        asked = list(self.world.asked.values())[of % len(self.world.asked)]
        self._submit([*asked.known, *STEMS[2][:more]], max_tokens, {})

    @precondition(lambda self: self.world.asked)
    @rule(of=index)
    def end(self, of: int) -> None:
        request_id = list(self.world.asked)[of % len(self.world.asked)]
        self.world.cancel(request_id)

    # -------------------------------------------------------------------------------------------------- steps

    @rule(turns=st.integers(1, 8))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            if len(self.world.in_flight) < self.depth:
                self.world.plan()
            if len(self.world.in_flight) == self.depth:
                self.world.commit()

    @precondition(lambda self: len(self.world.in_flight) < self.depth)
    @rule()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.in_flight)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def commit(self, fails: bool) -> None:
        self.world.commit(RuntimeError("device lost") if fails else None)

    # Holds invariant 16: pools add up after every event.
    # Holds invariant 17: promises can be kept after every event.
    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.sound:
            while len(self.world.in_flight) > 1:
                self.world.commit()
            self.world.close()
            type(self).seen.update(self.world.seen)


def run(make: type[Scheduler], bounds: settings) -> Counter[str]:
    machine = type("Machine", (SchedulerMachine,), {"make": make, "seen": Counter()})
    run_state_machine_as_test(machine, settings=bounds)
    return machine.seen  # type: ignore[attr-defined, no-any-return]


def test_the_scheduler_keeps_its_promises_in_any_order_of_events() -> None:
    seen = run(Scheduler, BOUNDED)
    wanted = (
        "retraction",
        "resume with tokens",
        "resume inside the prompt",
        "full match",
        "partial match",
        "slot reused under a fence",
        "failed step",
        "cancelled with a step in flight",
    )
    assert [name for name in wanted if not seen[name]] == [], (
        "the events did not meet what this test is about"
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_broken_scheduler_is_noticed(fault: type[Scheduler]) -> None:
    hasty = settings(
        BOUNDED,
        max_examples=600,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    with pytest.raises((AssertionError, InvariantBroken)):  # a rule of the world, or the books themselves
        run(fault, hasty)


def test_the_token_that_ends_a_generation_is_in_the_vocabulary() -> None:
    world = World(num_slots=10)
    ended = [world.asked[world.submit(stem[:n], 9)].stop_token for stem in STEMS for n in range(1, 12)]
    assert EOS in ended and None in ended

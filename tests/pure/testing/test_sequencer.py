"""The sequencer finds the interleavings that break a program, says which, and finds none in a program that is
in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from penstock.errors import LaneClosed
from penstock.lanes.lane import Ticket
from penstock.testing import sequencer as sequencer_module
from penstock.testing.sequencer import Deadlock, SequencedLane, Sequencer, explore, run, shrink, walk


def reload_behind_a_captured_step(wait: str) -> object:
    """A decode step captured as a graph reads a block that is being reloaded; `wait` says where the wait for
    the load stands."""

    def program(sequencer: Sequencer) -> None:
        load, compute = sequencer.lane("load"), sequencer.lane("compute")
        block, seen = ["stale"], []
        load.submit(lambda: block.__setitem__(0, "restored"), label="promote")
        landed = load.record()
        if wait == "before the replay":
            compute.wait(landed)
        with compute.capture("decode") as capture:
            if wait == "inside the capture":
                compute.wait(landed)
            compute.submit(lambda: seen.append(block[0]), label="layer")
        compute.replay(capture.replay)
        compute.drain()
        assert seen == ["restored"], "the replay read a block in the middle of its reload"

    return program


def test_the_graph_that_reads_mid_reload_is_found_and_said_step_by_step() -> None:
    _, failure = explore(reload_behind_a_captured_step("inside the capture"))  # type: ignore[arg-type]
    assert failure is not None and len(failure.schedule) <= 1
    steps = str(failure)
    assert steps.index("compute: decode") > steps.index("host: submits 'promote' to load")
    assert "load: promote" not in steps.split("compute: decode")[0]


def test_a_wait_before_the_replay_is_enough_in_every_schedule() -> None:
    num_runs, failure = explore(reload_behind_a_captured_step("before the replay"), max_preemptions=9)  # type: ignore[arg-type]
    assert failure is None and num_runs >= 10
    assert walk(reload_behind_a_captured_step("before the replay"), seed=1) == (1000, None)  # type: ignore[arg-type]


def test_a_random_walk_finds_it_too_and_shrinks_it() -> None:
    def program(sequencer: Sequencer) -> None:
        """Fails only where `b` runs between the two halves of `a`."""
        a, b = sequencer.lane("a"), sequencer.lane("b")
        seen: list[str] = []
        for label in ("a1", "a2"):
            a.submit(lambda label=label: seen.append(label), label=label)  # type: ignore[misc]
        for label in ("b1", "b2", "b3"):
            b.submit(lambda label=label: seen.append(label), label=label)  # type: ignore[misc]
        sequencer.run_all()
        assert ("a1", "b2") not in list(itertools.pairwise(seen))

    _, failure = walk(program, seed=0)
    assert failure is not None and len(failure.schedule) <= 3
    again = run(program, failure.schedule)[1]
    assert again is not None and again.trace == failure.trace, "a schedule replays exactly"
    assert shrink(program, failure).schedule == failure.schedule


def test_lanes_that_wait_for_each_other_are_a_deadlock_and_not_a_hang() -> None:
    def program(sequencer: Sequencer) -> None:
        a, b = sequencer.lane("a"), sequencer.lane("b")
        b.submit(lambda: None, label="never in time")
        later = b.record()
        later.number += 2  # type: ignore[attr-defined]
        a.wait(later)
        b.wait(a.record())
        b.submit(lambda: None, label="what a waits for")
        b.drain()

    _, failure = explore(program, max_preemptions=1)
    assert failure is not None and isinstance(failure.error, Deadlock)


def test_the_rules_of_lanes_hold() -> None:
    sequencer = Sequencer()
    lane = sequencer.lane("a")

    def burst() -> None:
        raise ValueError("burst")

    failed = lane.submit(burst, label="burst")
    skipped = lane.submit(lambda: pytest.fail("it ran"), label="skipped", after=failed)
    with pytest.raises(ValueError, match="burst"):
        skipped.wait_done()
    lane.close()
    with pytest.raises(LaneClosed):
        lane.submit(lambda: None, label="late")


# -------------------------------------------------------------------------------------------------- launchers


def transfers_of_two_launchers(seen: set[tuple[str, ...]]) -> Callable[[Sequencer], None]:
    """Two launchers put two copies each on their own lanes, while the program goes on; `seen` gets the order
    of everything."""

    def program(sequencer: Sequencer) -> None:
        order: list[str] = []

        def launch(lane: SequencedLane) -> None:
            for number in (1, 2):
                order.append(f"{lane.name}: launch {number}")
                lane.submit(
                    lambda number=number: order.append(f"{lane.name}: copy {number}"), label=f"copy {number}"
                )  # type: ignore[misc]

        for name in ("load", "save"):
            lane = sequencer.lane(name)
            sequencer.launcher(f"launch-{name}").submit(lambda lane=lane: launch(lane), label="launch")  # type: ignore[misc]
        order.append("the program goes on")
        sequencer.run_all()
        seen.add(tuple(order))

    return program


def test_the_program_goes_on_while_launchers_are_half_way_through_their_work() -> None:
    seen: set[tuple[str, ...]] = set()
    assert walk(transfers_of_two_launchers(seen), seed=0, num_runs=100)[1] is None
    at = {order: order.index("the program goes on") for order in seen}
    assert any("load: launch 1" in order[:i] and "load: launch 2" in order[i:] for order, i in at.items())
    assert any(
        {"load: launch 1", "save: launch 1"} <= set(order[:i]) and order[-1].endswith("copy 2")
        for order, i in at.items()
    )
    assert any(order.index("load: copy 1") < order.index("load: launch 2") for order in seen)
    for order in seen:
        for name in ("load", "save"):
            assert [step for step in order if step.startswith(f"{name}: copy")] == [
                f"{name}: copy 1",
                f"{name}: copy 2",
            ]


def test_launchers_that_wait_for_each_other_are_a_deadlock_and_their_threads_end() -> None:
    def program(sequencer: Sequencer) -> None:
        first, second = sequencer.launcher("first"), sequencer.launcher("second")
        tickets: list[Ticket] = []
        tickets.append(first.submit(lambda: tickets[1].wait_done(), label="waits for the second"))
        tickets.append(second.submit(lambda: tickets[0].wait_done(), label="waits for the first"))
        tickets[0].wait_done()

    before = threading.active_count()
    _, failure = run(program)
    assert (
        failure is not None
        and isinstance(failure.error, Deadlock)
        and ("second: waits for fence 1 of first") in str(failure.error)
    )
    assert threading.active_count() == before


def test_a_launcher_that_blocks_on_a_lock_is_named_instead_of_hanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What only a lock orders, a sequencer cannot: it says so."""
    monkeypatch.setattr(sequencer_module, "_PATIENCE_S", 0.05)
    lock = threading.Lock()

    def program(sequencer: Sequencer) -> None:
        lane, launcher = sequencer.lane("a"), sequencer.launcher("launcher")

        def launch() -> None:
            with lock:
                pass

        with lock:
            launcher.submit(launch, label="launch")
            lane.submit(lambda: None, label="copy")
            lane.drain()

    _, failure = run(program, {0: "launcher"})
    assert failure is not None and "launcher has not come back" in str(failure.error)


def test_work_on_a_plain_lane_that_uses_lanes_is_refused_aloud() -> None:
    """Its ticket alone would keep the error to itself, and fewer schedules would be tried than the program
    has."""

    def program(sequencer: Sequencer) -> None:
        a, b = sequencer.lane("a"), sequencer.lane("b")
        a.submit(lambda: b.submit(lambda: None, label="inner"), label="outer")

    _, failure = run(program)
    assert failure is not None and "make that lane with Sequencer.launcher" in str(failure.error)

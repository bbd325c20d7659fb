"""The sequencer finds the interleavings that break a program, says which, and finds none in a program that is in order."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.contract import Access, Mode
from penstock.errors import LaneClosed
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sequencer import Deadlock, Sequencer, explore, run, shrink, walk


def reload_behind_a_captured_step(wait: str) -> object:
    """A decode step captured as a graph reads a block that is being reloaded; `wait` says where the wait for the load stands."""

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


def flush_of_a_pending_save(covers_submitted: bool) -> object:
    """A save is handed to a background lane, which launches its gather later; a flush then frees the page, and it is written anew."""

    def program(sequencer: Sequencer) -> None:
        background, copies, compute = sequencer.launcher("background"), sequencer.lane("copies"), sequencer.lane("compute")
        page, saved, launched = ["mine"], [], []

        def gather() -> None:
            launched.append(True)
            copies.submit(lambda: saved.append(page[0]), label="gather")

        background.submit(gather, label="launch the gather")
        # flush: wait for what is in flight, then give the page to the next owner
        if covers_submitted:
            background.drain()
        if launched:
            copies.drain()
        compute.submit(lambda: page.__setitem__(0, "the next owner's"), label="next owner")
        sequencer.run_all()
        assert saved == ["mine"], "the save read a page that had been given away"

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


def test_the_flush_between_submit_and_launch_is_found() -> None:
    _, failure = explore(flush_of_a_pending_save(covers_submitted=False))  # type: ignore[arg-type]
    assert failure is not None and "given away" in str(failure.error)
    num_runs, failure = explore(flush_of_a_pending_save(covers_submitted=True), max_preemptions=9)  # type: ignore[arg-type]
    assert failure is None and num_runs >= 5


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


def test_the_same_seed_takes_the_same_way() -> None:
    def program(sequencer: Sequencer) -> None:
        for name in ("a", "b", "c"):
            lane = sequencer.lane(name)
            for number in range(4):
                lane.submit(lambda: None, label=f"{name}{number}")

    traces = [run(program, rng=random.Random(seed))[0].trace for seed in (5, 5, 6)]
    assert traces[0] == traces[1] != traces[2]


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


def test_the_sanitizer_needs_no_bad_luck_to_see_what_exploration_finds() -> None:
    """It reports the missing edge under the default schedule, in which nothing goes wrong."""
    sanitizer = Sanitizer()
    sequencer = Sequencer(observer=sanitizer)
    load, compute = sequencer.lane("load"), sequencer.lane("compute")
    access = Access("device", (3,), (0, 2), Mode.WRITE)
    landed = []
    load.submit(lambda: landed.append(True), [access], label="promote")
    fence = load.record()
    with compute.capture("decode") as capture:
        compute.wait(fence)
        compute.submit(lambda: None, label="layer")
    compute.replay(capture.replay, [access._replace(mode=Mode.READ)])
    sequencer.run_all()
    assert landed and sanitizer.num_by_kind[Kind.RACE] == 1
    load.submit(lambda: None, [access._replace(slots=(4,))], label="promote")
    load.drain()
    compute.submit(lambda: None, [access._replace(slots=(4,))], label="writer")
    assert sanitizer.num_by_kind[Kind.RACE] == 1


def test_a_lane_does_not_begin_its_next_item_while_one_is_running() -> None:
    def program(sequencer: Sequencer) -> None:
        a, b = sequencer.launcher("a"), sequencer.lane("b")
        seen: list[str] = []

        def outer() -> None:
            seen.append("begins")
            b.submit(lambda: None, label="inner")
            seen.append("ends")

        a.submit(outer, label="outer")
        a.submit(lambda: seen.append("next"), label="next")
        sequencer.run_all()
        assert seen == ["begins", "ends", "next"]

    assert explore(program, max_preemptions=5)[1] is None

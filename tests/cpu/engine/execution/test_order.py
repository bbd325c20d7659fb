"""What keeps a step's memory in order: it waits for the earlier users of its slots, and staging buffers are
never refilled under it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.contract import Access, Mode
from penstock.engine.engine import Engine
from penstock.engine.execution.running_step import Outputs, RunningStep
from penstock.engine.execution.sampling import SamplePass
from penstock.engine.execution.staging import StagingRing
from penstock.errors import InvariantBroken
from penstock.lanes.cpu import CpuLane
from tests.support.driving import pass_of, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def test_a_step_waits_for_the_earlier_users_of_the_slots_it_writes(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot was last used by a copy that is still running on another lane; a request then needs
    them."""
    engine = make_engine()
    other, gate, stepped, order = CpuLane("copies"), threading.Event(), threading.Event(), []
    other.submit(lambda: (gate.wait(30), order.append("earlier user")), label="copy")
    cache = engine.parts.cache
    table = cache.open("earlier user", None, 0)
    assert table.try_extend(cache.num_blocks)
    table.release(other.record())
    embed = engine.parts.executor.target.model.embed

    def noted(tokens: Any) -> Any:
        order.append("step")
        stepped.set()
        return embed(tokens)

    monkeypatch.setattr(engine.parts.executor.target.model, "embed", noted)
    submit(engine, prompts(20), max_tokens=1)
    engine.step()
    running = engine.turns.running
    assert running is not None
    stepped.wait(0.05)  # a step that does not wait has run by then
    gate.set()
    running.fence.wait_passed(30)
    run_all(engine)
    other.close(30)
    assert order == ["earlier user", "step"]


class Gate:
    """A fence that passes when it is told to."""

    lane, number = "compute", 0

    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    def wait_passed(self, timeout_s: float | None = None) -> None:
        raise AssertionError("nobody waits for a staging buffer")


@pytest.fixture
def lane() -> Iterator[CpuLane]:
    made = CpuLane("compute")
    yield made
    made.close(30)


def test_a_staging_buffer_that_comes_round_too_early_is_refused_not_refilled(lane: CpuLane) -> None:
    ring, gate = StagingRing(8, lane, "staging", pinned=False), Gate()
    first, _ = ring.next()
    ring.used_until(gate)
    others = [ring.next()[0] for _ in range(2)]
    assert len({buffer.data_ptr() for buffer in (first, *others)}) == 3
    with pytest.raises(InvariantBroken, match="still running"):
        ring.next()
    ring, gate = StagingRing(8, lane, "staging", pinned=False), Gate()
    first, _ = ring.next()
    ring.used_until(gate)
    ring.next(), ring.next()
    gate.open = True
    assert ring.next()[0].data_ptr() == first.data_ptr()


def test_the_penalty_state_of_a_row_is_set_up_behind_the_step_that_still_uses_it(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """A request takes a row while a step for the row's last one is running: that step's token must not count
    against it."""
    engine = make_engine(max_batch=1)
    prompt, penalties = prompts(20), {"max_tokens": 6, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    alone = submit(engine, prompt, **penalties)
    run_all(engine)
    first = submit(engine, prompts(30, seed=1), max_tokens=8, frequency_penalty=2.0)
    for _ in range(4):
        engine.step()
    began, gate = threading.Event(), threading.Event()
    lane, scheduler, sampler = (
        engine.parts.lanes[0],
        engine.parts.scheduler,
        pass_of(engine, SamplePass).sampler,
    )
    lane.submit(lambda: (began.set(), gate.wait(30)), label="a step that takes long")
    assert began.wait(30), "the step before it has not counted its token"
    try:
        running = engine.turns.running
        assert running is not None
        engine._outbox.publish([scheduler.cancel(first.request_id)])
        again = submit(engine, prompt, **penalties)
        engine._inbox.run_all()
        before = sampler._counts.clone()
        plan, waits = scheduler.plan()[:2]
        assert plan is not None and plan.starts
        launched = engine.turns.launch(plan, waits)
        assert torch.equal(sampler._counts, before) and int(before.sum()) > 0, (
            "the row is still the last request's"
        )
        engine.turns.running = launched
    finally:
        gate.set()
    engine.turns.read(running)
    run_all(engine)
    assert again.tokens == alone.tokens


def test_whether_a_step_has_failed_is_asked_when_it_is_over() -> None:
    """Its last op runs no sooner than somebody waits for it."""
    lane, gate = CpuLane("compute"), threading.Event()

    def fail() -> None:
        assert gate.wait(30)
        raise ValueError("it fails late")

    class Opening:
        lane, number = "compute", 1

        def wait_passed(self, timeout_s: float | None = None) -> None:
            gate.set()
            behind.wait_passed(timeout_s)

    last, behind = lane.submit(fail, label="step"), lane.record()
    outputs = Outputs(lane, torch.zeros(0, dtype=torch.int32), Access("results", (0,), (0, 1), Mode.READ))
    result = RunningStep(1, (), (), outputs, last, Opening()).wait_result()  # type: ignore[arg-type]
    assert result.error is not None and "it fails late" in str(result.error)
    lane.close(10.0)

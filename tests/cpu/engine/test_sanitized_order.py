"""The engine's own order and lifetimes, each brought to the moment at which a missing wait or pin would show:
copies are held back, steps are in flight, requests leave. The fixture fails where the sanitizer has anything
to report."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import Access, Fence, FinishReason, KvSource, Mode, StepPlan, Submission, Waits
from penstock.engine.engine import Engine
from penstock.kv.tiers.loads import BlockLoad
from penstock.lanes.cpu import CpuLane
from tests.cpu.engine.test_engine import check_at_rest
from tests.cpu.engine.test_tiers import busy, forget, overlap_from, states, turn, until
from tests.cpu.engine.test_transfer_order import copy_by_layer, destroy, replays
from tests.support.driving import generate, run_all, settle_all, submit
from tests.support.gates import GatedCopier, gates

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]

# what is held back is let go after that; whoever waits for it waits longer than a busy machine explains
SLOW_S = 0.05


def launched_plans(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, load: GatedCopier
) -> list[tuple[StepPlan, Waits]]:
    """Every plan from now on, and what its ids stand for. One that waits for a load lets it go, so that
    nobody waits for ever."""
    plans: list[tuple[StepPlan, Waits]] = []
    launch = engine.parts.executor.launch

    def noted(plan: StepPlan, waits: Waits) -> Any:
        plans.append((plan, waits))
        if plan.loads:
            load.let()
        return launch(plan, waits)

    monkeypatch.setattr(engine.parts.executor, "launch", noted)
    return plans


@pytest.mark.parametrize("captured", [True, False])
def test_a_step_has_waited_for_every_part_of_its_load_when_it_ends(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Holds invariant 5: what comes behind the step on its lane needs no wait of its own."""
    engine = make_engine(host_blocks=64)
    overlap_from(engine, 1 << 30 if captured else 0)
    num_parts = copy_by_layer(engine, monkeypatch)
    generate(engine, prompts(80), max_tokens=4)
    forget(engine)
    load, _ = gates(engine)
    load.hold()
    load.let(num_parts - 1 if captured else 0)  # a replay is launched when all but the last part has come
    labels, lane = replays(engine, monkeypatch), engine.parts.lanes[0]
    wait, waited = lane.wait, list[Fence]()
    monkeypatch.setattr(lane, "wait", lambda fence: (waited.append(fence), wait(fence)))
    submit(engine, prompts(80), max_tokens=4)
    until(engine, lambda: engine.turns.running is not None)
    running, was_replayed, waited_for = engine.turns.running, bool(labels), list(waited)
    load.let()
    run_all(engine)
    assert running is not None and was_replayed == captured
    copies = [copy for one in running.loads if isinstance(one, BlockLoad) for copy in one.copies]
    parts = [arrival.fence for copy in copies for arrival in copy.arrivals or ()]
    assert len(parts) == num_parts > 1 and all(fence in waited_for for fence in parts)


@pytest.mark.parametrize("captured", [True, False])
def test_a_step_launched_over_a_load_that_then_fails_is_computed_again(
    make_engine: MakeEngine, prompts: Prompts, captured: bool
) -> None:
    engine = make_engine(host_blocks=64)
    overlap_from(engine, 1 << 30 if captured else 0)
    cold = generate(engine, prompts(80), max_tokens=4)
    forget(engine)
    destroy(engine)
    load, _ = gates(engine)
    load.hold()
    returning = submit(engine, prompts(80), max_tokens=4)
    until(engine, lambda: engine.turns.running is not None)
    running = engine.turns.running
    load.fail_next = 1
    load.let()
    run_all(engine)
    assert running is not None and running.loads
    assert returning.tokens == cold.tokens and returning.source == KvSource(computed=80)
    settle_all(engine)
    check_at_rest(engine)


# Holds invariant 4: loads of others hold nobody up.
def test_a_step_waits_for_no_load_of_another_request(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(host_blocks=64)
    expected = [generate(engine, prompts(80, seed=seed), max_tokens=4).tokens for seed in (2, 3)]
    forget(engine)
    load, _ = gates(engine)
    load.hold()
    busy(engine, prompts)
    plans = launched_plans(engine, monkeypatch, load)
    first, second = (submit(engine, prompts(80, seed=seed), max_tokens=4) for seed in (2, 3))
    until(engine, lambda: engine.stats().requests["loading"] == 2)
    load.let(1)
    until(engine, lambda: first.finish is not None)
    assert second.tokens == [] and engine.stats().requests["loading"] == 1
    assert len(plans) > 3 and all(plan.loads == () for plan, _ in plans)
    load.let()
    run_all(engine)
    assert [first.tokens, second.tokens] == expected


# Holds invariant 2: a step of a cancelled request still counts.
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_slots_given_back_under_a_running_step_are_promoted_into_behind_it(
    make_engine: MakeEngine, prompts: Prompts, turns: int
) -> None:
    """A cancelled request's slots are the next ones to be drawn, its last step is held back, and a promotion
    goes into them."""
    engine = make_engine(host_blocks=64, blocks=12, prefill_chunk=16)
    expected = generate(engine, prompts(80), max_tokens=4).tokens
    forget(engine)
    doomed = submit(engine, prompts(120, seed=4), max_tokens=40)
    turn(engine, turns)
    gate = threading.Event()
    engine.parts.lanes[0].submit(lambda: gate.wait(30), label="the device is slow")
    threading.Timer(0.05, gate.set).start()
    turn(engine)
    engine.cancel(doomed.request_id)
    returning = submit(engine, prompts(80), max_tokens=4)
    run_all(engine)
    assert doomed.finish is FinishReason.CANCELLED and returning.tokens == expected
    settle_all(engine)
    check_at_rest(engine)


def test_a_step_waits_for_what_another_lane_still_writes_into_its_slots(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    cache, arena = engine.cache, engine.parts.arena
    gate = threading.Event()
    other = CpuLane("copies", engine.parts.sanitizer)
    table = cache.open("earlier user", None, 0)
    assert table.try_extend(cache.num_blocks)
    accesses = [Access(arena.name, table.hold.slots, (0, arena.layout.num_layers), Mode.WRITE)]  # type: ignore[attr-defined]
    other.submit(lambda: gate.wait(30), accesses, label="copy")
    table.release(other.record())
    found = submit(engine, prompts(20), max_tokens=2)
    engine.step()
    gate.set()
    run_all(engine)
    assert len(found.tokens) == 2
    other.close(30)


# ----------------------------------------------------------------------------------------------------- leases


# Holds invariant 12: a cancel gives the lease back.
def test_a_cancelled_request_that_waits_in_line_gives_its_lease_back(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(host_blocks=64, max_batch=1)
    generate(engine, prompts(80), max_tokens=1)
    forget(engine)
    busy(engine, prompts)
    waiting = submit(engine, prompts(80), max_tokens=1)
    turn(engine)
    assert states(engine) == {"running": 1, "waiting": 1}
    engine.cancel(waiting.request_id)
    run_all(engine)
    check_at_rest(engine)


# Holds invariant 12: a request that is refused for its id gives the lease back.
def test_a_request_under_an_id_in_use_gives_its_lease_back(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(host_blocks=64)
    generate(engine, prompts(80), max_tokens=1)
    forget(engine)
    first = busy(engine, prompts)
    events: list[Any] = []
    params = dataclasses.replace(
        engine.parts.scheduler.lives[first.request_id].request.sampling, max_tokens=1
    )
    engine.submit(Submission(prompts(80), params, id=first.request_id), events.append)
    run_all(engine)
    assert [event.finish for event in events] == [FinishReason.ERROR]
    check_at_rest(engine)


# ----------------------------------------------------------------------------------------------------- stalls


# Holds invariant 6: the engine thread waits for no copy.
def test_the_engine_thread_waits_for_no_save(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(host_blocks=64)
    cache = engine.cache
    _, save = gates(engine)
    whole = cache.saves.mover.submit

    def submit_slow(transfer: Any) -> None:
        save.hold()
        threading.Timer(SLOW_S, save.let).start()
        whole(transfer)

    monkeypatch.setattr(cache.saves.mover, "submit", submit_slow)
    generate(engine, prompts(80), max_tokens=4)
    settle_all(engine)
    assert engine.stats().kv_blocks["host"]["idle"] == 5


# Holds invariant 6: the engine thread waits for no step before it has planned the next.
def test_the_engine_thread_plans_while_a_step_runs(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine()
    found = submit(engine, prompts(20), max_tokens=8)
    turn(engine, 3)
    gate = threading.Event()
    engine.parts.lanes[0].submit(lambda: gate.wait(30), label="the device is slow")
    turn(engine)  # launches a step behind that, and reads the one before it
    assert engine.turns.running is not None and not engine.turns.running.fence.passed()
    threading.Timer(SLOW_S, gate.set).start()
    run_all(engine)
    assert len(found.tokens) == 8


# ---------------------------------------------------------------------------------------------------- flushes


def test_a_flush_waits_for_the_newest_save(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(host_blocks=64)
    _, save = gates(engine)
    save.hold()
    for seed in (1, 2):
        generate(engine, prompts(40, seed=seed), max_tokens=1)
    flushed = threading.Event()

    def flush() -> None:
        engine.kv.wait_flushed("visible", 30.0)
        flushed.set()

    thread = threading.Thread(target=flush)
    thread.start()
    until(engine, lambda: bool(engine.kv.flushes))
    save.let(1)
    until(engine, lambda: engine.cache.num_in_flight == 1)
    turn(engine, 3)
    assert not flushed.is_set() and engine.kv.flushes, "an earlier save that is over hides none that is not"
    save.let()
    until(engine, lambda: not engine.kv.flushes)
    thread.join(30.0)
    assert flushed.is_set() and engine.stats().kv_blocks["host"]["idle"] == 4

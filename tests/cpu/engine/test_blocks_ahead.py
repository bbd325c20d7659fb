"""Blocks copied to the device for a request that waits for room: real bytes, real lanes, under the sanitizer.
The tokens are those of a request alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from penstock.contract import FinishReason, KvSource, SamplingParams, StepPlan, TokenEvent
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import DeadlineExceeded
from penstock.kv.tiers.loads import BlockLoad
from penstock.lanes.lane import POLL_MOST_S
from tests.cpu.engine.test_engine import check_at_rest
from tests.cpu.engine.test_tiers import forget, states, turn, until
from tests.support.driving import Collected, generate, run_all, settle_all, submit
from tests.support.gates import GatedCopier, gates

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]

BLOCKS = 50  # of the device
LENGTH = 400  # of the prompt that waits: 25 blocks
RUNNING = 460  # tokens of whoever runs, which is promised 30 blocks: 20 are nobody's, and 26 are needed


def crowded(make_engine: MakeEngine, prompts: Prompts) -> tuple[Engine, GatedCopier, list[int]]:
    """An engine whose host memory has a prompt, and what that is answered with. Copies to the device are
    held."""
    engine = make_engine(blocks=BLOCKS, host_blocks=128, prefill_chunk=512)
    expected = generate(engine, prompts(LENGTH)).tokens
    forget(engine)
    load, _ = gates(engine)
    load.hold()
    return engine, load, expected


def settle_saves(engine: Engine) -> None:
    """What a save has is nobody's to draw, and counts as pinned."""
    while engine.is_transferring():
        engine.cache.settle()


def waiting(engine: Engine, prompts: Prompts) -> tuple[Collected, Collected, BlockLoad]:
    """One that runs, one that waits for it, and what is on its way to the device for that."""
    running = submit(engine, prompts(20, seed=9), max_tokens=RUNNING)
    until(engine, lambda: len(running.tokens) > 2)
    settle_saves(engine)
    behind = submit(engine, prompts(LENGTH))
    turn(engine)
    assert states(engine) == {"running": 1, "waiting": 1}
    ahead = engine._parts.scheduler._tracks[behind.request_id].ahead
    assert isinstance(ahead, BlockLoad) and ahead.num_blocks == BLOCKS - 30
    return running, behind, ahead


def test_a_request_that_waits_for_room_finds_its_blocks_on_the_device(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine, load, expected = crowded(make_engine, prompts)
    running, behind, ahead = waiting(engine, prompts)
    load.let()
    until(engine, lambda: ahead.settled)
    assert running.finish is None and not behind.tokens, "while the first one computes"
    assert engine.stats().kv_blocks["device"]["idle"] == 20
    engine.cancel(running.request_id)
    run_all(engine)
    assert behind.tokens == expected and behind.source == KvSource(host=399, computed=1)
    assert engine.stats().prompt_tokens["host"] == 399 and engine.stats().prompt_tokens["device"] == 0
    assert [len(sources) for sources, _, layers in load.passed if layers[0] == 0] == [20, 5], (
        "each block once"
    )
    settle_all(engine)
    check_at_rest(engine)


def test_the_bytes_are_those_that_were_saved(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine, load, _ = crowded(make_engine, prompts)
    prefix = engine.cache.prefix_of(prompts(LENGTH))
    assert prefix is not None
    load.let()
    generate(engine, prompts(LENGTH), max_tokens=1)
    arena, pool = engine._parts.arena.tensor, engine.cache._pool
    before = arena[pool.find(prefix.keys)[:20]].clone()
    forget(engine)
    arena[: engine.cache.num_blocks].fill_(float("nan"))  # the device's copy is destroyed
    running, _, ahead = waiting(engine, prompts)
    until(engine, lambda: ahead.settled)
    slots = pool.find(prefix.keys)
    assert len(slots) == 20 and torch.equal(arena[slots], before)
    engine.cancel(running.request_id)
    run_all(engine)


def test_the_engine_looks_at_a_copy_that_is_all_there_is_to_do(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, load, expected = crowded(make_engine, prompts)
    running, behind, ahead = waiting(engine, prompts)
    engine.cancel(running.request_id)
    until(engine, lambda: states(engine) == {"waiting": 1})
    turn(engine, 3)
    assert engine.has_work() and states(engine) == {"waiting": 1}, (
        "its blocks are on their way: nobody needs to be told"
    )
    waits: list[float] = []
    wait = engine._inbox.wait
    monkeypatch.setattr(engine._inbox, "wait", lambda timeout_s: waits.append(timeout_s) or wait(timeout_s))
    exposed_s = engine.stats().load_exposed_s
    turn(engine)
    exposed_s = engine.stats().load_exposed_s - exposed_s
    load.let()
    assert waits and max(waits) <= POLL_MOST_S, "it does not sleep until somebody asks for something"
    assert exposed_s > 0.0, "a request waits for its KV, and nothing else is computed"
    run_all(engine)
    assert ahead.settled and behind.tokens == expected and behind.source == KvSource(host=399, computed=1)


def test_a_loop_of_its_own_brings_it_to_its_end(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine, load, expected = crowded(make_engine, prompts)
    load.let()
    loop, over = EngineLoop(engine), threading.Event()
    got: list[TokenEvent] = []

    def listen(event: TokenEvent) -> None:
        got.append(event)
        if event.finish is not None:
            over.set()

    def ask(events: list[TokenEvent]) -> None:
        """The other one has set off: now there is no room for this one."""
        if len(events) == 1:
            engine.submit(
                prompts(LENGTH), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), listen
            )

    others: list[TokenEvent] = []
    params = SamplingParams(max_tokens=RUNNING, temperature=0.0, ignore_eos=True)
    engine.submit(prompts(20, seed=9), params, lambda event: (others.append(event), ask(others)))
    loop.start()
    assert over.wait(60.0), "it was left behind"
    loop.close(60.0)
    assert loop.failed() is None and others[-1].finish is FinishReason.LENGTH
    assert [token for event in got for token in event.tokens] == expected
    assert got[0].source == KvSource(host=399, computed=1)
    assert len(load.passed[0][0]) >= 16, "most of it came while the other one ran"


def test_a_copy_waits_for_a_step_that_still_uses_its_slots(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is cancelled while a step of it is under way, and its last slot is among those that are
    filled ahead."""
    engine, load, expected = crowded(make_engine, prompts)
    load.let()
    running = submit(engine, prompts(20, seed=9), max_tokens=RUNNING)
    other = submit(engine, prompts(70, seed=8), max_tokens=8)
    until(engine, lambda: len(running.tokens) > 2 and len(other.tokens) > 2)
    settle_saves(engine)
    behind = submit(engine, prompts(LENGTH))
    turn(engine)
    scheduler = engine._parts.scheduler
    track = scheduler._tracks[behind.request_id]
    assert track.ahead is None and other.finish is None, "15 slots are nobody's"
    last = int(scheduler._running.tracks[other.request_id].held_table().slots(70)[-1])
    gate = threading.Event()
    engine._parts.lanes[0].submit(lambda: gate.wait(30.0), label="gate")
    turn(engine)  # launches a step behind the gate
    engine.cancel(other.request_id)
    plan = scheduler.plan

    def plan_and_let_go() -> StepPlan | None:
        planned = plan()
        gate.set()
        return planned

    monkeypatch.setattr(scheduler, "plan", plan_and_let_go)
    turn(engine)
    ahead = track.ahead
    assert isinstance(ahead, BlockLoad) and last in ahead.copies[0].dest_slots and len(ahead.after) == 1
    until(engine, lambda: ahead.settled)
    engine.cancel(running.request_id)
    run_all(engine)
    assert behind.tokens == expected and behind.source == KvSource(host=399, computed=1)


def test_a_copy_that_fails_costs_nothing_but_time(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine, load, expected = crowded(make_engine, prompts)
    running, behind, ahead = waiting(engine, prompts)
    load.fail_next = 1
    load.let()
    until(engine, lambda: ahead.settled)
    assert ahead.error() is not None
    engine.cancel(running.request_id)
    run_all(engine)
    assert behind.tokens == expected and behind.source == KvSource(host=399, computed=1)
    traffic = engine.stats().traffic
    assert traffic is not None and traffic.failures["host", "copy"] == 1
    settle_all(engine)
    check_at_rest(engine)


@pytest.mark.parametrize("what", ["cancel", "reset", "close"])
def test_whatever_comes_between_leaves_nothing_behind(
    make_engine: MakeEngine, prompts: Prompts, what: str
) -> None:
    engine, load, expected = crowded(make_engine, prompts)
    running, behind, ahead = waiting(engine, prompts)
    if what == "close":
        with pytest.raises(DeadlineExceeded):
            engine.close(timeout_s=0.0)
        assert engine.stats().kv_blocks["device"]["pinned"] == 20, "a deadline ends no ownership"
        load.let()
        return  # it is closed once more, and nothing may be left
    if what == "cancel":
        engine.cancel(behind.request_id)
    else:
        engine.cache.reset(("device",))
    turn(engine)
    engine.check()
    load.let(1)  # its own copy: the next promotion ahead would be on the device at once
    until(engine, lambda: ahead.settled)
    assert engine.stats().kv_blocks["device"]["idle"] == (20 if what == "cancel" else 0)
    load.let()
    engine.cancel(running.request_id)
    run_all(engine)
    assert behind.finish is (FinishReason.CANCELLED if what == "cancel" else FinishReason.LENGTH)
    assert behind.tokens == ([] if what == "cancel" else expected)
    settle_all(engine)
    check_at_rest(engine)

"""Order between steps and copies, each brought to the moment at which a missing wait or pin would show. The
rules run on CPU lanes, and once more on CUDA; a rig says how a lane is held."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.kv.transfer import Group, Mover
from tests.cpu.engine.test_tiers import MakeEngine, Prompts, forget, overlap_from, states, turn, until
from tests.support.driving import Collected, generate, run_all, settle_all, submit
from tests.support.gates import gate

HELD_S = 30.0  # a test that forgets to let go fails instead of hanging


class OrderRig:
    """Holds CPU lanes: their threads wait in the op."""

    def __init__(self, make_engine: MakeEngine) -> None:
        self.make_engine = make_engine
        self._let = threading.Event()

    def pause(self) -> None:
        """As part of an op: what is behind it on the lane waits, until `resume` or for some seconds."""
        if not self._let.wait(HELD_S):
            raise TimeoutError("nothing let this lane go on")

    def resume(self) -> None:
        self._let.set()

    def mark(self) -> Callable[[], bool]:
        """As part of an op: asks whether the lane has come so far."""
        return lambda: True

    def hold_copies(self, mover: Mover, from_layer: int = 0) -> None:
        gate(mover).on_copy = lambda layers: self.pause() if layers[0] >= from_layer else None

    def hold_compute(self, engine: Engine) -> None:
        engine.parts.lanes[0].submit(self.pause, label="the device is slow")


@pytest.fixture
def rig(make_engine: MakeEngine) -> OrderRig:
    return OrderRig(make_engine)


def copy_by_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Its loads copy each layer by itself; returns the number of parts."""
    each = [Group((layer, layer + 1)) for layer in range(engine.parts.arena.layout.num_layers)]
    monkeypatch.setattr(engine.cache.loads, "_groups", lambda num_blocks, layered: each)
    return len(each)


def replays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of every replay from now on."""
    labels: list[str] = []
    lane = engine.parts.lanes[0]
    replay = lane.replay

    def noted(captured: Any, *rest: Any, **named: Any) -> Any:
        labels.append(captured.label)
        return replay(captured, *rest, **named)

    monkeypatch.setattr(lane, "replay", noted)
    return labels


def destroy(engine: Engine) -> None:
    """What is read before it is written cannot be right by chance."""
    engine.parts.arena.tensor[: engine.cache.num_blocks].fill_(math.nan)


def retract(engine: Engine, one: Collected) -> None:
    """Have it give up its device slots, as where memory runs out."""
    scheduler = engine.parts.scheduler
    scheduler.retract(scheduler.running.requests[one.request_id])


def until_launched(engine: Engine) -> Any:
    """The next step over a load."""
    until(engine, lambda: engine.turns.running is not None and bool(engine.turns.running.loads))
    return engine.turns.running


# Holds invariant 3: eager or replayed, a step waits for what it reads.
@pytest.mark.parametrize("captured", [True, False])
def test_a_step_launched_over_a_load_waits_for_it(
    rig: OrderRig, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    engine = rig.make_engine(host_blocks=64)
    overlap_from(engine, 1 << 30 if captured else 0)  # a replay behind the whole load, or layer by layer
    cold = generate(engine, prompts(80), max_tokens=4)
    forget(engine)
    generate(engine, prompts(80), max_tokens=4)  # nothing is compiled later, while a lane is held
    forget(engine)
    destroy(engine)
    rig.hold_copies(engine.cache.loads.mover)
    replayed = replays(engine, monkeypatch)
    returning = submit(engine, prompts(80), max_tokens=4)
    step = until_launched(engine)
    was_held, was_replayed = not step.fence.passed(), bool(replayed)
    rig.resume()
    run_all(engine)
    assert was_held and was_replayed == captured
    assert returning.tokens == cold.tokens and returning.source == KvSource(host=79, computed=1)


# Holds invariant 4: a step begins under its own load.
def test_an_eager_step_computes_its_first_layer_while_the_second_is_on_its_way(
    rig: OrderRig, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.make_engine(host_blocks=64)
    overlap_from(engine, 0)
    copy_by_layer(engine, monkeypatch)
    expected = generate(engine, prompts(90), max_tokens=4).tokens
    forget(engine)
    generate(engine, prompts(90), max_tokens=4)  # nothing is compiled later, while a lane is held
    forget(engine)
    destroy(engine)
    rig.hold_copies(engine.cache.loads.mover, from_layer=1)
    marks: dict[int, Callable[[], bool]] = {}
    model = type(engine.parts.executor.target.model)
    layer = model.layer

    def noted(self: Any, index: int, *rest: Any) -> Any:
        found = layer(self, index, *rest)
        marks.setdefault(index, rig.mark())
        return found

    monkeypatch.setattr(model, "layer", noted)
    returning = submit(engine, prompts(90), max_tokens=4)
    until_launched(engine)
    deadline_s = time.monotonic() + HELD_S / 2
    while not (0 in marks and marks[0]()):
        assert time.monotonic() < deadline_s, "the first layer waits for the load of the second"
        time.sleep(0.001)
    assert 1 not in marks or not marks[1](), "the second layer was computed before its KV can have come"
    rig.resume()
    run_all(engine)
    assert returning.tokens == expected and returning.source == KvSource(host=80, computed=10)


# Holds invariant 4: loads of others hold no request up.
def test_a_resumed_request_waits_for_its_own_load_and_its_neighbour_decodes_on(
    rig: OrderRig, prompts: Prompts
) -> None:
    engine, alone = rig.make_engine(host_blocks=64), rig.make_engine()
    resumed = submit(engine, prompts(40), max_tokens=60)
    beside = submit(engine, prompts(30, seed=1), max_tokens=200)
    until(engine, lambda: len(resumed.tokens) >= 4 and len(beside.tokens) >= 4)
    rig.hold_copies(engine.cache.loads.mover)
    retract(engine, resumed)
    until(engine, lambda: engine.stats().requests["loading"] == 1)
    had = len(resumed.tokens), len(beside.tokens)
    until(engine, lambda: len(beside.tokens) >= had[1] + 20)
    assert len(resumed.tokens) == had[0] and engine.stats().requests["loading"] == 1
    rig.resume()
    run_all(engine)
    assert resumed.tokens == generate(alone, prompts(40), max_tokens=60).tokens
    assert beside.tokens == generate(alone, prompts(30, seed=1), max_tokens=200).tokens
    assert engine.stats().retractions == 1


@pytest.mark.parametrize("captured", [True, False])
def test_a_resumed_request_goes_on_in_its_unfinished_block_behind_the_load_of_it(
    rig: OrderRig, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Layer by layer it writes into the first while the last is on its way."""
    engine = rig.make_engine(host_blocks=64)
    if captured:
        overlap_from(engine, 1 << 30)
    else:
        overlap_from(engine, 0)
        copy_by_layer(engine, monkeypatch)
    expected = generate(rig.make_engine(), prompts(40), max_tokens=60).tokens
    found = submit(engine, prompts(40), max_tokens=60)
    until(engine, lambda: len(found.tokens) == 4)
    retract(engine, found)
    until(engine, lambda: len(found.tokens) == 10)  # in the middle of a block, and nothing is compiled later
    rig.hold_copies(engine.cache.loads.mover)
    retract(engine, found)
    was_held = not until_launched(engine).fence.passed()
    rig.resume()
    run_all(engine)
    assert was_held and found.tokens == expected and engine.stats().retractions == 2


# Holds invariant 1: a demotion reads a block behind the step that wrote it.
def test_a_save_is_not_ahead_of_the_step_that_writes_its_last_block(rig: OrderRig, prompts: Prompts) -> None:
    engine = rig.make_engine(host_blocks=64)
    expected = generate(rig.make_engine(), prompts(40), max_tokens=60).tokens
    destroy(engine)
    found = submit(engine, prompts(40), max_tokens=60)
    until(engine, lambda: len(found.tokens) == 4 and engine.turns.running is not None)
    rig.hold_compute(engine)
    turn(engine)  # launches a step that writes behind the hold, and reads the one before
    retract(engine, found)
    engine.cache.submit_saves()
    assert engine.cache.num_in_flight
    assert engine.turns.running is not None and not engine.turns.running.fence.passed()
    rig.resume()
    run_all(engine)
    assert found.tokens == expected and engine.stats().retractions == 1


# Holds invariant 7: a save pins its slots until it is over.
def test_a_slot_is_not_used_again_while_a_save_reads_it(rig: OrderRig, prompts: Prompts) -> None:
    engine = rig.make_engine(blocks=6, host_blocks=64)
    cold = generate(engine, prompts(64), max_tokens=1)
    forget(engine)
    forget(engine, "host")
    rig.hold_copies(engine.cache.saves.mover)
    assert generate(engine, prompts(64), max_tokens=1).tokens == cold.tokens
    # four blocks; two are free, four wait for the save
    other = submit(engine, prompts(60, seed=9), max_tokens=2)
    turn(engine, 5)
    assert other.tokens == [] and states(engine) == {"waiting": 1}
    rig.resume()
    run_all(engine)
    settle_all(engine)
    forget(engine)
    again = generate(engine, prompts(64), max_tokens=1)
    assert again.tokens == cold.tokens and again.source == KvSource(host=63, computed=1)

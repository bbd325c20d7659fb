"""Scored requests of hybrid models: layers that attend choose parts, the state stays in the row. A state of
tokens that saw a part of their context is for the next turn of its conversation alone.

Where there is room for all parts, tokens are those of a state that runs through the whole sequence."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import KvSource
from penstock.engine import sizing
from penstock.engine.engine import Engine
from penstock.engine.pace import ScoringCost
from penstock.engine.scheduling import residency
from penstock.engine.scheduling.boundaries import AtBoundaries
from tests.cpu.engine.test_kept_states import all_at_rest, assert_right, expected, states_of
from tests.cpu.engine.test_speculation import PLANS, Script, answered
from tests.support.driving import Collected, assert_same, generate, run_all, settle_all, submit

Prompts = Callable[..., list[int]]
Start = Callable[..., Engine]
MODEL = "tiny-qwen3.5"
SMALL: dict[str, Any] = {
    "blocks": 200,
    "host_blocks": 500,
    "resident_tokens": 512,
    "max_model_len": 4000,
    "positions": 4096,
    "max_batch": 4,
    "states_gib": 0.002,
}


@pytest.fixture(autouse=True)
def _figures_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither how long steps take here, nor steps that measure recall: those see all of the context."""
    monkeypatch.setattr(ScoringCost, "tau", 16)
    monkeypatch.setattr(residency, "FIRST_RECALL", -1)


@pytest.fixture
def start(make_engine: Start) -> Start:
    """Engines of which a sequence has 512 tokens on the device."""
    return lambda **settings: make_engine(MODEL, **{**SMALL, **settings})


def give_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of more than 128 tokens are deep, and have room for all of their parts."""
    with_deep, room = sizing.with_deep, {"deep_blocks": 8, "resident_blocks": 180}
    monkeypatch.setattr(sizing, "with_deep", lambda *args: dataclasses.replace(with_deep(*args), **room))


@pytest.fixture
def roomy(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    give_room(monkeypatch)
    return start


def test_each_turn_of_a_scored_conversation_goes_on_at_the_last_state(
    roomy: Start, prompts: Prompts, tmp_path: Path
) -> None:
    """Also at one that was kept in an answer, which no disk is asked for."""
    engine = roomy(state_every=64, ssd_dir=str(tmp_path), ssd_gib=0.05)
    prompt, before = prompts(400), 0
    for turn in range(3):
        found = generate(engine, prompt, max_tokens=100, residency="scored")
        assert_right(engine, prompt, found, 100)
        assert found.source == KvSource(host=before, computed=len(prompt) - before)
        settle_all(engine)
        prompt = [*prompt, *found.tokens]
        before = (len(prompt) - 1) // 64 * 64
        prompt += prompts(50, seed=turn + 1)
    all_at_rest(engine)


def test_an_exact_request_begins_where_a_scored_one_has_attended_to_all(
    roomy: Start, prompts: Prompts
) -> None:
    engine, prompt = roomy(), prompts(400)
    first = generate(engine, prompt, max_tokens=60, residency="scored")
    settle_all(engine)
    longer = [*prompt, *first.tokens, 7]
    found = generate(engine, longer, max_tokens=20)
    assert found.source == KvSource(host=384, computed=len(longer) - 384)
    assert_right(engine, longer, found, 20)
    all_at_rest(engine)


def test_no_other_request_finds_a_state_of_tokens_that_saw_a_part(
    start: Start, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds invariant 15: the first writer wins, so it must not be a scored one. An exact
    request with the same tokens keeps states of its own."""
    engine = start(state_every=64)

    def last_found(prompt: list[int], mode: str) -> int:
        answer = generate(engine, prompt, max_tokens=200, residency=mode)
        prefix = engine.cache.prefix_of([*prompt, *answer.tokens])
        assert prefix is not None
        return states_of(engine).last_in_memory(prefix.keys, len(prefix.keys)) * 16

    prompt, last = prompts(720), (720 + 199) // 64 * 64
    assert (last_found(prompt, "scored"), last_found(prompt, "exact")) == (704, last)
    all_at_rest(engine)
    begin = AtBoundaries.begin
    monkeypatch.setattr(AtBoundaries, "begin", lambda *args, num_shared=0: begin(*args))
    assert last_found(prompts(720, seed=1), "scored") == last


def test_states_of_scored_answers_are_on_no_disk_and_end_with_their_conversation(
    start: Start, prompts: Prompts, tmp_path: Path
) -> None:
    engine, prompt = start(state_every=64, ssd_dir=str(tmp_path), ssd_gib=0.05), prompts(704)
    found = generate(engine, prompt, max_tokens=200, residency="scored")
    settle_all(engine)
    states = states_of(engine)
    in_prompt, in_answer = 704 // 64, (704 + 199) // 64 - 704 // 64
    assert states.pool.counts.idle == in_prompt + in_answer
    assert states.stats()["ssd states"]["used"] == in_prompt
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    engine.cache.forget(prefix.keys)
    assert not states.pool.counts.idle
    again = generate(engine, [*prompt, *found.tokens], residency="scored")
    assert again.source is not None and again.source.host == 0
    all_at_rest(engine)


@PLANS
def test_drafts_of_a_scored_request_leave_no_trace_in_its_state(
    start: Start, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """The second turn begins with a state that was kept behind drafts."""
    full = start(resident_tokens=None, max_model_len=1500)
    give_room(monkeypatch)
    engine = start(speculate="ngram", state_every=64)
    script = Script(ahead, 0.7)
    engine.parts.scheduler._drafts.drafter, engine.parts.speculation = script, None
    prompt = prompts(400)
    for _ in range(2):
        right = generate(full, prompt, max_tokens=100)
        found = answered(engine, script, prompt, right, max_tokens=100, residency="scored")
        run_all(engine)
        assert_same(found, right)
        assert found.events[0].scored and sum(event.drafted for event in found.events) > 10
        prompt = [*prompt, *found.tokens, 7]
    assert any(num > kept for num, kept in script.seen)
    all_at_rest(engine)


@pytest.mark.parametrize("seed", range(2))
def test_scored_exact_and_short_requests_beside_each_other_get_their_own_tokens(
    roomy: Start, prompts: Prompts, seed: int
) -> None:
    r = random.Random(seed)
    engine = roomy(prefill_chunk=r.choice([40, 100]), state_every=r.choice([0, 32, 64]))
    known = [prompts(r.randint(100, 400), seed=i) for i in range(3)]
    asked: list[tuple[list[int], Collected, int]] = []
    for _ in range(12):
        stem = r.choice(known)
        prompt = [*stem[: r.randint(1, len(stem))], *prompts(r.randint(1, 60), seed=r.randint(0, 9))]
        num, mode = r.randint(1, 70), r.choice(["scored", "scored", "exact"])
        asked.append((prompt, submit(engine, prompt, max_tokens=num, residency=mode), num))
        for _ in range(r.randint(0, 60)):
            engine.step()
        scheduler, running = engine.parts.scheduler, list(engine.parts.scheduler.running.requests.values())
        if running and r.random() < 0.3:
            scheduler.retract(r.choice(running))
        if r.random() < 0.1:
            engine.cancel(r.choice(asked)[1].request_id)
        if r.random() < 0.2:
            engine.cache.reset((r.choice(["device", "host"]),))
        prompt, one, _ = r.choice(asked)
        if one.finish is not None:
            known.append([*prompt, *one.tokens])
    run_all(engine)
    for prompt, one, num in asked:
        assert one.error is None
        assert one.tokens == expected(engine, prompt, num)[: len(one.tokens)]
    all_at_rest(engine)

"""Sequences of hybrid models that do not fit on the device: layers that attend stream their KV in from host
memory, the state stays in the row, and tokens are those of a state that runs through the whole sequence.

The reference computes one sequence, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.cpu.engine.test_kept_states import all_at_rest, assert_right, expected
from tests.cpu.engine.test_speculation import PLANS, Script, answered
from tests.support.driving import (
    Collected,
    assert_same,
    generate,
    run_all,
    settle_all,
    submit,
    tiny_config,
    wait_scanned,
)

Prompts = Callable[..., list[int]]
Start = Callable[..., Engine]
MODEL = "tiny-qwen3.5"
SMALL: dict[str, Any] = {
    "blocks": 24,
    "host_blocks": 200,
    "resident_tokens": 160,
    "max_model_len": 900,
    "max_batch": 4,
    "states_gib": 0.001,
}


@pytest.fixture
def start() -> Iterator[Start]:
    """Sanitized engines on a device of 384 tokens."""
    made = []

    def start(**settings: Any) -> Engine:
        made.append(build_sanitized(tiny_config(MODEL, **{**SMALL, **settings})))
        return made[-1][0]

    yield start
    for engine, sanitizer in made:
        engine.close(timeout_s=60.0)
        check_silent(sanitizer)


@pytest.mark.parametrize("chunk", [40, 64, 500])
def test_a_sequence_that_does_not_fit_gets_the_tokens_of_its_state(
    start: Start, prompts: Prompts, chunk: int
) -> None:
    engine, prompt = start(prefill_chunk=chunk), prompts(500)
    found = generate(engine, prompt, max_tokens=40)
    assert_right(engine, prompt, found, 40)
    assert engine.stats().host_steps > 0, "some of it was in host memory"
    all_at_rest(engine)


def test_a_conversation_that_does_not_fit_goes_on_where_its_last_state_is(
    start: Start, prompts: Prompts
) -> None:
    engine, prompt, before = start(), prompts(400), 0
    for turn in range(3):
        found = generate(engine, prompt, max_tokens=30)
        assert_right(engine, prompt, found, 30)
        assert found.source == KvSource(host=before, computed=len(prompt) - before)
        before = (len(prompt) - 1) // 16 * 16
        prompt = [*prompt, *found.tokens, *prompts(50, seed=turn + 1)]
    all_at_rest(engine)


def test_it_continues_from_disk_in_another_engine(start: Start, prompts: Prompts, tmp_path: Path) -> None:
    disk, prompt = {"ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 0.05}, prompts(400)
    first = start(**disk)
    cold = generate(first, prompt, max_tokens=20)
    settle_all(first)
    first.close(timeout_s=60.0)
    engine = start(**disk)
    wait_scanned(engine)
    found = generate(engine, prompt, max_tokens=20)
    assert found.tokens == cold.tokens
    assert found.source is not None and found.source.computed == 400 - 384
    all_at_rest(engine)


@pytest.mark.parametrize("seed", range(2))
def test_long_and_short_requests_beside_each_other_get_their_own_tokens(
    start: Start, prompts: Prompts, seed: int
) -> None:
    r = random.Random(seed)
    engine = start(prefill_chunk=r.choice([40, 100]), state_every=r.choice([0, 64]))
    known = [prompts(r.randint(100, 500), seed=i) for i in range(3)]
    asked: list[tuple[list[int], Collected, int]] = []
    for _ in range(10):
        stem = r.choice(known)
        prompt = [*stem[: r.randint(1, len(stem))], *prompts(r.randint(1, 60), seed=r.randint(0, 9))]
        num = r.randint(1, 40)
        asked.append((prompt, submit(engine, prompt, max_tokens=num), num))
        for _ in range(r.randint(0, 20)):
            engine.step()
        if r.random() < 0.2:
            engine.cancel(r.choice(asked)[1].request_id)
        if r.random() < 0.2:
            engine.cache.reset((r.choice(["device", "host"]),))
    run_all(engine)
    for prompt, one, num in asked:
        assert one.error is None
        assert one.tokens == expected(engine, prompt, num)[: len(one.tokens)]
    all_at_rest(engine)


@PLANS
def test_drafts_over_a_paged_out_sequence_leave_no_trace_in_its_state(
    start: Start, prompts: Prompts, ahead: bool
) -> None:
    """Beside a request that fits; the second turn begins with a state that was kept behind drafts."""
    full, engine = start(blocks=200, resident_tokens=None), start(speculate="ngram", state_every=32)
    script = Script(ahead, 0.7)
    engine.parts.scheduler._drafts.drafter, engine.parts.speculation = script, None
    asked = [prompts(400), prompts(90, seed=1)]
    for _ in range(2):
        rights = [generate(full, prompt, max_tokens=50) for prompt in asked]
        pairs = zip(asked, rights, strict=True)
        found = [answered(engine, script, prompt, right, max_tokens=50) for prompt, right in pairs]
        run_all(engine)
        for one, right in zip(found, rights, strict=True):
            assert_same(one, right)
            assert sum(event.drafted for event in one.events) > 10
        asked = [[*prompt, *one.tokens, 7] for prompt, one in zip(asked, found, strict=True)]
    assert any(num > kept for num, kept in script.seen) and engine.stats().host_steps > 0
    all_at_rest(engine)

"""Drafts for sequences that do not fit on the device: a step that reads their context from host memory, or a
chosen part of it, verifies several tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import GIB, Config, EngineConfig, KvConfig, ModelSource, OffloadConfig, SpeculationConfig
from penstock.contract import FinishReason
from penstock.engine.engine import Engine
from penstock.engine.execution import batch
from penstock.engine.pace import ScoringCost
from penstock.engine.scheduling import residency
from penstock.testing.sanitized import build_sanitized, check_silent
from retrieval import Retrieval, haystack, write_retrieval_model
from tests.cpu.engine.test_deep import LONG, deep_engine, full_engine
from tests.cpu.engine.test_scored import BLOCK_BYTES, assert_nothing_held, drive
from tests.cpu.engine.test_speculation import PLANS, SAMPLED, Script, answered, assert_same
from tests.support.driving import generate, run_all, submit

Make = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def script_of(engine: Engine, ahead: bool, right_share: float = 0.7) -> Script:
    script = Script(ahead, right_share)
    engine.parts.scheduler._drafts.drafter, engine.parts.speculation = script, None
    return script


@PLANS
@pytest.mark.parametrize("options", [{"logprobs": 2}, SAMPLED], ids=["greedy", "sampled"])
def test_a_sequence_that_is_paged_out_gets_what_it_gets_without_drafts(
    options: dict[str, Any], ahead: bool, make_engine: Make, prompts: Prompts
) -> None:
    """Over the ends of blocks that leave the device meanwhile, beside a request that fits."""
    full, engine = full_engine(make_engine), deep_engine(make_engine, 256, speculate="ngram")
    script = script_of(engine, ahead)
    asked = [(prompts(LONG), 60), (prompts(90, 1), 60)]
    rights = [generate(full, prompt, max_tokens=num, **options) for prompt, num in asked]
    found = [
        answered(engine, script, prompt, right, max_tokens=num, **options)
        for (prompt, num), right in zip(asked, rights, strict=True)
    ]
    run_all(engine)
    for one, right in zip(found, rights, strict=True):
        assert_same(one, right)
        assert sum(event.drafted for event in one.events) > 30
    assert sum(kept for _, kept in script.seen) > 40 and any(num > kept for num, kept in script.seen)
    assert_nothing_held(engine)


def test_its_steps_read_host_memory_once_for_several_tokens(make_engine: Make, prompts: Prompts) -> None:
    right = generate(full_engine(make_engine), prompts(LONG), max_tokens=60)
    num_steps = []
    for share in (0.0, 1.0):
        engine = deep_engine(make_engine, 256, speculate="ngram")
        script = script_of(engine, False, share)
        found = answered(engine, script, prompts(LONG), right, max_tokens=60)
        while not found.tokens:
            engine.step()
        before = engine.turns.num_host_steps
        run_all(engine)
        assert found.tokens == right.tokens
        num_steps.append(engine.turns.num_host_steps - before)
    assert num_steps[0] > 55 and num_steps[1] < 25


def test_drafts_that_miss_the_context_in_host_memory_are_noticed(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: only the first row of a request reads host memory."""

    def first_row(chunks: Any, rows: Any, parts: Any, table_at: int) -> Any:
        found = PACKED(chunks, rows, parts, table_at)
        if all(chunk.num_logits < 2 for chunk in chunks):
            return found
        return tuple(one._replace(rows=(one.rows[0], one.rows[0] + 1)) for one in found)

    right = generate(full_engine(make_engine), prompts(400), max_tokens=40)
    engine = deep_engine(make_engine, 256, speculate="ngram")
    script = script_of(engine, False, 1.0)
    monkeypatch.setattr(batch, "_pack_paged", first_row)
    found = answered(engine, script, prompts(400), right, max_tokens=40)
    run_all(engine)
    assert found.tokens != right.tokens


PACKED = batch._pack_paged


def test_under_retraction_and_cancels_it_leaves_nothing_behind(make_engine: Make, prompts: Prompts) -> None:
    asked = [(prompts(500, 1), 40), *((prompts(120, seed), 60) for seed in range(2, 6))]
    full = full_engine(make_engine)
    rights = [generate(full, prompt, max_tokens=num) for prompt, num in asked]
    engine = deep_engine(make_engine, 256, overcommit=4.0, blocks=40, speculate="ngram")
    script = script_of(engine, True)
    found = [
        answered(engine, script, prompt, right, max_tokens=num)
        for (prompt, num), right in zip(asked, rights, strict=True)
    ]
    gone = submit(engine, prompts(400, 9), max_tokens=80)
    for turn in range(10_000):
        if turn == 60:
            engine.cancel(gone.request_id)
        if not engine.step():
            engine.wait_work(0.01)
        engine.check()
        if not engine.has_work():
            break
    assert gone.finish in (FinishReason.CANCELLED, FinishReason.LENGTH)
    for one, right in zip(found, rights, strict=True):
        assert_same(one, right)
    assert_nothing_held(engine)


@PLANS
def test_needles_are_found_with_drafts_over_a_chosen_part_of_the_context(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft attends to what the token before it attends to. Parts are chosen by other tokens."""
    monkeypatch.setattr(ScoringCost, "tau", 16)
    monkeypatch.setattr(residency, "FIRST_RECALL", -1)
    model = Retrieval(num_layers=1, num_heads=2, num_kv_heads=1, tries=32)
    stack = haystack(4096, 16, (0.1, 0.5, 0.9), 0, model)
    total = 4096 + stack.most_tokens
    config = Config(
        source=ModelSource(model=str(write_retrieval_model(tmp_path, model)), device="cpu", dtype="float32"),
        kv=KvConfig(device_blocks=36, resident_tokens=576, residency="scored"),
        engine=EngineConfig(max_model_len=total, max_batch=2, prefill_chunk=512),
        offload=OffloadConfig(host_gib=(total // 16 * 1.2 + 64) * BLOCK_BYTES / 4 / GIB),
        speculation=SpeculationConfig("ngram"),
    )
    engine, sanitizer = build_sanitized(config)
    script = script_of(engine, ahead, 0.8)
    drive(engine, stack)  # what it says is known for the second time
    (answer,) = script.ended_texts
    script.default = answer
    found = drive(engine, stack)
    assert found.needles >= 15 and found.most_active <= 36
    assert sum(kept for _, kept in script.seen) > 15 and any(num > kept for num, kept in script.seen)
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)

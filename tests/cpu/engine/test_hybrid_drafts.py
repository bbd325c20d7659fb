"""Drafts for models with recurrent layers: a rejected draft leaves no trace in a state, neither in that of a
running request nor in one that is kept. What holds of drafts elsewhere holds here."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import SpeculationConfig
from penstock.contract import FinishReason, KvSource
from penstock.engine import build, sizing
from penstock.engine.engine import Engine
from penstock.engine.execution.passes import SettlePass, StatePass
from penstock.engine.execution.replays import cuda_buckets
from penstock.engine.execution.state_drafts import Groups, StateDrafts
from penstock.errors import ConfigError
from penstock.models.registry import BUILT_IN
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.cpu.engine import test_speculation as speculation
from tests.cpu.engine.test_draft_engine import drafted
from tests.cpu.engine.test_kept_states import all_at_rest, assert_right, expected
from tests.cpu.engine.test_speculation import PLANS, SAMPLED, answered, scripted
from tests.support.driving import assert_same, generate, run_all, settle_all, submit, tiny_config
from tests.support.eagle import eagle_config, eagle_tensors, write_eagle
from tests.support.forced import forced

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
MODEL, BLOCK = "tiny-qwen3.5", 16
ROOM = {"blocks": 128, "host_blocks": 256}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {**SAMPLED, "top_k": 20, "top_p": 0.9, "logprobs": 2},
    {**SAMPLED, "presence_penalty": 0.7, "repetition_penalty": 1.3},
)

# The suite of drafts, which finds the fixtures of this file.
test_many_requests_share_steps = speculation.test_many_requests_share_steps
test_it_ends_where_plain_decoding_ends = speculation.test_it_ends_where_plain_decoding_ends
test_beside_chunks_of_one_token_that_sample_nothing_everybody_gets_their_own_token = (
    speculation.test_beside_chunks_of_one_token_that_sample_nothing_everybody_gets_their_own_token
)


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    return functools.partial(make_engine, MODEL)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of steps that a GPU captures."""

    def buckets(config: Any, limits: Any, device: object) -> Any:
        return cuda_buckets(limits.max_rows, limits.prefill_chunk)

    monkeypatch.setattr(sizing, "buckets_for", buckets)


@PLANS
@pytest.mark.parametrize("options", OPTIONS, ids=[",".join(options) or "greedy" for options in OPTIONS])
def test_a_request_gets_the_tokens_and_scores_of_plain_decoding(
    options: dict[str, Any], ahead: bool, make_engine: MakeEngine, prompts: Prompts
) -> None:
    plain = make_engine()
    engine, script = scripted(make_engine, ahead)
    for n, length in enumerate((1, 17, 40)):
        right = generate(plain, prompts(length, seed=n), max_tokens=32, **options)
        found = answered(engine, script, prompts(length, seed=n), right, max_tokens=32, **options)
        run_all(engine)
        engine.check()
        assert_same(found, right)
    assert len({kept for _, kept in script.seen}) >= 4, "all sorts of lengths are kept"


@PLANS
@pytest.mark.usefixtures("padded")
def test_rows_of_padding_beside_drafts_touch_no_state_of_a_request(
    ahead: bool, make_engine: MakeEngine, prompts: Prompts
) -> None:
    plain = make_engine()
    engine, script = scripted(make_engine, ahead)
    asked = [prompts(length, seed=length) for length in (9, 20, 33, 50, 71)]
    rights = [generate(plain, prompt, max_tokens=30) for prompt in asked]
    found = [
        answered(engine, script, prompt, right, max_tokens=30)
        for prompt, right in zip(asked, rights, strict=True)
    ]
    run_all(engine)
    for one, right in zip(found, rights, strict=True):
        assert_same(one, right)
    slots = engine.parts.executor.target.forward.slots
    assert slots is not None
    for tensor in slots.tensors:
        assert not tensor[len(asked) : -1].any() and tensor[-1].isfinite().all()


def test_rows_are_taken_apart_by_request() -> None:
    """Padding is in one row, at position 0."""
    rows, positions = torch.tensor([4, 4, 4, 1, 7, 7, 9, 9]), torch.tensor([5, 6, 7, 8, 8, 9, 0, 0])
    groups = Groups.of(rows, positions)
    assert groups.firsts.tolist() == [0, 3, 4, 6, 7]
    assert groups.lengths.tolist() == [3, 1, 2, 1, 1] and groups.rows.tolist() == [4, 1, 7, 9, 9]


# ------------------------------------------------------------------------------------------------ kept states


@PLANS
@pytest.mark.parametrize("every", [16])
def test_states_kept_in_an_answer_with_drafts_are_those_of_plain_decoding(
    every: int, ahead: bool, make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Each conversation goes on behind the last boundary of its answer, with the tokens of a state that runs
    through all of it."""
    engine, script = scripted(make_engine, ahead, state_every=every, **ROOM)
    for seed in range(2):
        prompt = prompts(50 + 7 * seed, seed=seed)
        right = expected(engine, prompt, 90)
        found = submit(engine, prompt, max_tokens=90)
        script.answers[found.request_id] = right
        run_all(engine)
        assert found.tokens == right
        longer = [*prompt, *right, *prompts(5, seed=9)]
        boundary = (len(longer) - 6) // every * every
        again = generate(engine, longer, max_tokens=12)
        assert again.source == KvSource(device=boundary, computed=len(longer) - boundary)
        assert_right(engine, longer, again, 12)
    assert sum(num for num, _ in script.seen) > 100
    assert len({kept for _, kept in script.seen}) > 3
    all_at_rest(engine)


@PLANS
def test_random_crowds_with_drafts_tiers_and_kept_states(
    ahead: bool, make_engine: MakeEngine, prompts: Prompts
) -> None:
    r = random.Random(3)
    sizes = {"blocks": 24, "host_blocks": 300, "overcommit": 4.0, "max_batch": 5, "state_every": 32}
    plain = make_engine(blocks=200)
    engine, script = scripted(make_engine, ahead, prefill_chunk=40, max_model_len=300, **sizes)
    asked: list[tuple[Any, Any]] = []
    for number in range(14):
        prompt, num = prompts(r.randint(1, 90), seed=r.randrange(4)), r.randint(30, 80)
        options: dict[str, Any] = {**SAMPLED, "seed": number} if r.random() < 0.4 else {}
        right = generate(plain, prompt, max_tokens=num, **options)
        asked.append((answered(engine, script, prompt, right, max_tokens=num, **options), right))
        for _ in range(r.randint(0, 6)):
            engine.step()
        if r.random() < 0.2:
            engine.cancel(r.choice(asked)[0].request_id)
        if r.random() < 0.2:
            settle_all(engine)
            engine.cache.reset(("device",))
    run_all(engine)
    for found, right in asked:
        assert found.error is None and found.tokens == right.tokens[: len(found.tokens)]
        assert len(found.tokens) == len(right.tokens) or found.finish is FinishReason.CANCELLED
    assert engine.stats().retractions > 0 and sum(num for num, _ in script.seen) > 100
    all_at_rest(engine)


# ----------------------------------------------------------------------------------------------------- faults


def settled_twice(drafts: StateDrafts, inputs: Any) -> None:
    SETTLE(drafts, inputs)
    SETTLE(drafts, inputs)


def all_settled(drafts: StateDrafts, inputs: Any) -> None:
    rejected = drafts._rejected.clone()
    drafts._rejected.zero_()
    SETTLE(drafts, inputs)
    drafts._rejected.copy_(rejected)


SETTLE = StateDrafts.settle
FAULTS: dict[str, Callable[..., None]] = {
    "states are left behind": lambda drafts, inputs: None,
    "rejected drafts are in states": all_settled,
    "accepted tokens are in states twice": settled_twice,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_state_that_is_rolled_back_wrongly_is_noticed(
    fault: Callable[..., None], make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine()
    engine, script = scripted(make_engine, True)
    right = generate(plain, prompts(30), max_tokens=40)
    monkeypatch.setattr(StateDrafts, "settle", fault)
    found = answered(engine, script, prompts(30), right, max_tokens=40)
    run_all(engine)
    assert found.tokens != right.tokens


def test_states_that_are_kept_before_they_are_settled_are_noticed(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a request keeps a state in a step in which another one has drafts."""

    def keeps_first(own: SettlePass, step: Any) -> None:
        if step.packed.shape.has_drafts:
            own._states.keep(step)
            right, own._states = own._states, Mute()
            submit_right(own, step)
            own._states = right

    class Mute(StatePass):
        def __init__(self) -> None:
            pass

        def keep(self, step: Any) -> None:
            pass

    submit_right, wrong = SettlePass.submit, list[list[bool]]()
    for is_fault in (False, True):
        if is_fault:
            monkeypatch.setattr(SettlePass, "submit", keeps_first)
        engine, script = scripted(make_engine, False, state_every=16, **ROOM)
        asked = [prompts(40 + seed, seed=seed) for seed in range(3)]
        rights = [expected(engine, prompt, 60) for prompt in asked]
        for prompt, right in zip(asked, rights, strict=True):
            found = submit(engine, prompt, max_tokens=60)
            script.answers[found.request_id] = right
        run_all(engine)
        longer = [[*prompt, *right] for prompt, right in zip(asked, rights, strict=True)]
        wrong.append(
            [generate(engine, one, max_tokens=20).tokens != expected(engine, one, 20) for one in longer]
        )
    assert not any(wrong[0]) and any(wrong[1])


# -------------------------------------------------------------------------------------------------- proposers


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.mark.parametrize("proposer", ["ngram", "draft:tiny-llama", "eagle"])
def test_a_proposer_changes_no_answer_of_a_hybrid_model(
    proposer: str, make_engine: MakeEngine, prompts: Prompts, device: str, tmp_path: Path
) -> None:
    if proposer == "eagle":
        dims = BUILT_IN[MODEL]
        proposer = f"eagle:{write_eagle(tmp_path, eagle_tensors(dims), eagle_config(dims, (1, 2, 3)))}"
    plain, (engine, sanitizer) = (
        make_engine(),
        build_sanitized(
            dataclasses.replace(
                tiny_config(MODEL, device=device, host_blocks=64), speculation=SpeculationConfig(proposer)
            )
        ),
    )
    forced(engine)
    num = 0
    for length, options in itertools.product((1, 40), ({}, SAMPLED)):
        prompt = prompts(length, seed=length)
        prompt = prompt * 2 if proposer == "ngram" else prompt
        for _ in range(2):  # its prefix comes back
            found = generate(engine, prompt, max_tokens=40, **options)
            assert_same(found, generate(plain, prompt, max_tokens=40, **options))
            num += drafted(found)[0]
        engine.check()
    assert num > 30
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_a_draft_model_with_recurrent_layers_is_refused_by_name() -> None:
    config = dataclasses.replace(tiny_config(), speculation=SpeculationConfig(f"draft:{MODEL}"))
    with pytest.raises(ConfigError, match="a draft model with recurrent layers is not supported"):
        build.build(config)


def test_the_inputs_of_states_are_counted() -> None:
    """They take a small part of what a state for each draft would take."""
    dims = BUILT_IN["qwen3.5-35b-a3b"].recurrence
    assert dims is not None
    kept = StateDrafts.num_bytes(dims, 1)
    assert dims.num_bytes / kept > 60
    engine = build.build(dataclasses.replace(tiny_config(MODEL), speculation=SpeculationConfig("ngram", 4)))
    drafts, tiny = engine.parts.executor.target.forward.state_drafts, BUILT_IN[MODEL].recurrence
    assert drafts is not None and tiny is not None
    held = sum(tensor.nbytes for tensor in drafts.tensors[:-1])
    assert held == StateDrafts.num_bytes(tiny, 16 + 64)
    engine.close(timeout_s=20.0)

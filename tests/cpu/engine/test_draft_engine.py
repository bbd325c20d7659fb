"""A smaller model that proposes, in the engine: it never changes an answer, and where it is the target itself
all that it drafts is kept. That holds only where its KV is complete wherever a request goes on from:
computed, found on the device, in host memory, on disk."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import Config, SpeculationConfig
from penstock.contract import Fence, FinishReason, Grammar
from penstock.engine import sizing
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.ahead import ModelGuesser
from penstock.engine.execution.replays import cuda_buckets
from penstock.errors import ConfigError
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.transfer import Group
from penstock.models.registry import BUILT_IN
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.speculation import drafter
from penstock.speculation.length import StepCosts
from penstock.testing.sanitized import check_silent
from tests.cpu.engine.test_tiers import forget, overlap_from, until
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
from tests.support.forced import forced
from tests.support.gates import gates

Prompts = Callable[..., list[int]]
TARGET, OTHER = "tiny-qwen3", "tiny-llama"
SAMPLED = {"temperature": 0.9, "seed": 11}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {**SAMPLED, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {**SAMPLED, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 1},
    {"prompt_logprobs": 1, "logprobs": 1},
)


def drafting(config: Config, draft: str = TARGET, drafts: int = 4) -> Config:
    return replace(config, speculation=SpeculationConfig(f"draft:{draft}", drafts))


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def make(device: str) -> Any:
    """Engines whose drafts are all verified, under the sanitizer; `draft` None: one that drafts nothing."""
    made: list[tuple[Engine, Sanitizer]] = []

    def make(draft: str | None, drafts: int = 4, is_forced: bool = True, **settings: Any) -> Engine:
        config = tiny_config(**{"device": device, **settings})
        sanitizer = Sanitizer()
        engine = build(config if draft is None else drafting(config, draft, drafts), sanitizer=sanitizer)
        if draft is not None and is_forced:
            forced(engine)
        made.append((engine, sanitizer))
        return engine

    yield make
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)


def drafted(found: Collected) -> tuple[int, int]:
    """Tokens that were verified for it, and those that were kept."""
    return sum(event.drafted for event in found.events), sum(event.accepted for event in found.events)


def assert_all_kept(found: Collected) -> None:
    num, kept = drafted(found)
    assert num == kept > 0.4 * len(found.tokens)


# ------------------------------------------------------------------------------------ never changes an answer


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "greedy")
def test_a_draft_model_changes_no_answer(options: dict[str, Any], make: Any, prompts: Prompts) -> None:
    """Another architecture with narrower KV, whose drafts are mostly wrong."""
    plain, engine = make(None), make(OTHER)
    for n, length in enumerate((1, 16, 100)):
        right = generate(plain, prompts(length, seed=n), max_tokens=40, **options)
        assert_same(generate(engine, prompts(length, seed=n), max_tokens=40, **options), right)
        engine.check()
    counts = engine.parts.scheduler.counts
    assert sum(counts.drafted_by_place) > 100 and sum(counts.accepted_by_place) < sum(counts.drafted_by_place)


FORMS = (
    *(None, None, None),
    *(
        Grammar("regex", "([a-f]{3}[0-9]){9}"),
        Grammar("choice", '["yes", "no, not at all"]'),
        Grammar("regex", "[a-z]{60}"),
    ),
)
# with random weights top-k and top-p cut between tokens that are equal but for rounding
UNFILTERED = (*OPTIONS[:2], SAMPLED, OPTIONS[3])


@pytest.mark.parametrize(("draft", "seed"), [(TARGET, 0), (OTHER, 1)])
def test_crowds_with_grammars_stops_and_cancels_among_them_get_what_each_gets_alone(
    draft: str, seed: int, make: Any, prompts: Prompts
) -> None:
    """Masks come late, and drafts behind them: those who end, are pushed out or cancelled meanwhile give back
    nothing too early."""
    pytest.importorskip("llguidance", reason="structured output is an extra")
    sizes = {"blocks": 26, "host_blocks": 800, "overcommit": 3.0, "max_batch": 6, "max_model_len": 256}
    rng, alone, engine = random.Random(seed), make(None, **{**sizes, "overcommit": 1.0}), make(draft, **sizes)
    asked: list[tuple[Collected, Collected]] = []
    cancelled = set[int]()
    while len(asked) < 14 or engine.has_work():
        if len(asked) < 14 and rng.random() < 0.4:
            form, prompt = rng.choice(FORMS), prompts(rng.randrange(1, 60), seed=rng.randrange(3))
            options = {
                "grammar": form,
                "ignore_eos": form is None,
                **rng.choice(UNFILTERED),
                "max_tokens": rng.randrange(1, 70),
            }
            right = generate(alone, prompt, **options)
            if form is None and rng.random() < 0.5:
                options["stop_token_ids"] = frozenset({rng.choice(right.tokens)})
                right = generate(alone, prompt, **options)
            asked.append((submit(engine, prompt, **options), right))
        elif asked and rng.random() < 0.03:
            cancelled.add(number := rng.randrange(len(asked)))
            engine.cancel(asked[number][0].request_id)
        if not engine.step():
            engine.wait_work(0.01)
        engine.check()
    for number, (found, right) in enumerate(asked):
        if number in cancelled and found.finish is FinishReason.CANCELLED:
            assert found.tokens == right.tokens[: len(found.tokens)]
        else:
            assert_same(found, right)
    assert sum(engine.parts.scheduler.counts.drafted_by_place) > 50


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_slots_of_an_answer_with_a_grammar_are_given_back_behind_its_drafts(
    is_cancelled: bool, make: Any, prompts: Prompts
) -> None:
    """Its sampling waits for a mask, and drafts of all requests are made behind that: the sanitizer sees
    whose slots are free before."""
    pytest.importorskip("llguidance", reason="structured output is an extra")
    engine = make(TARGET)
    found = submit(
        engine, prompts(20), grammar=Grammar("choice", '["abcdefgh"]'), ignore_eos=False, max_tokens=40
    )
    if is_cancelled:
        for _ in range(3):
            engine.step()
        engine.cancel(found.request_id)
    run_all(engine)
    assert found.finish is (FinishReason.CANCELLED if is_cancelled else FinishReason.STOP)


def test_slots_of_who_ends_beside_a_grammar_are_given_back_behind_the_drafts(
    make: Any, prompts: Prompts
) -> None:
    """Its last token is read when the next step, in which it still has a row, is launched and its drafts are
    not."""
    pytest.importorskip("llguidance", reason="structured output is an extra")
    engine = make(TARGET)
    words = generate(engine, prompts(18), max_tokens=12).tokens
    last = next(place for place in range(3, 12) if words[place] not in words[:place])
    formed = submit(
        engine, prompts(20), grammar=Grammar("regex", "[a-z]{40}"), ignore_eos=False, max_tokens=12
    )
    found = submit(engine, prompts(18), max_tokens=12, stop_token_ids=frozenset({words[last]}))
    run_all(engine)
    assert found.finish is FinishReason.STOP and formed.finish is FinishReason.LENGTH


def test_a_sequence_that_does_not_fit_gets_drafts_beside_its_neighbours(make: Any, prompts: Prompts) -> None:
    """The draft model attends to the part that is on the device: its drafts may be worse, answers are not."""
    sizes = {"blocks": 64, "host_blocks": 512, "max_model_len": 2048, "resident_tokens": 256}
    plain, engine = make(None, **sizes), make(TARGET, **sizes)
    right = [generate(plain, prompts(length, seed=length), max_tokens=20) for length in (900, 60)]
    found = [submit(engine, prompts(length, seed=length), max_tokens=20) for length in (900, 60)]
    run_all(engine)
    engine.check()
    for one, wanted in zip(found, right, strict=True):
        assert_same(one, wanted)
    assert [drafted(one)[0] > 0 for one in found] == [True, True]


# --------------------------------------------------------------------------------- a draft that is the target


@pytest.mark.parametrize("drafts", [1, 4, 16])
def test_of_a_draft_that_is_the_target_all_is_kept(drafts: int, make: Any, prompts: Prompts) -> None:
    """Over the ends of blocks, whatever the prompt's length: drafts have slots ahead of their request."""
    engine = make(TARGET, drafts)
    for length in (1, 15, 16, 17, 100):
        assert_all_kept(generate(engine, prompts(length, seed=length), max_tokens=40))
        engine.check()


DRAWN: tuple[dict[str, Any], ...] = (
    SAMPLED,
    {"temperature": 1.3, "seed": -(2**62) - 5},
    {**SAMPLED, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
)


@pytest.mark.parametrize("options", DRAWN, ids=lambda options: ",".join(options))
def test_of_a_draft_that_is_the_target_all_is_kept_where_tokens_are_drawn(
    options: dict[str, Any], make: Any, prompts: Prompts
) -> None:
    """Both draw with the same noise: that of the request's seed, of the place and of the token."""
    plain, engine = make(None), make(TARGET)
    for length in (1, 100):
        found = generate(engine, prompts(length, seed=length), max_tokens=40, **options)
        assert_same(found, generate(plain, prompts(length, seed=length), max_tokens=40, **options))
        assert_all_kept(found)


def test_what_pads_a_step_drafts_for_nobody(
    make: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes as on CUDA. Who comes last of a step's prompts has padding behind it, and its drafts are its
    own."""
    monkeypatch.setattr(
        sizing,
        "buckets_for",
        lambda config, limits, device: cuda_buckets(limits.max_rows, limits.prefill_chunk),
    )
    engine = make(TARGET, 8)
    found = [submit(engine, prompts(24, seed=n), max_tokens=40, temperature=1.5, seed=n) for n in range(6)]
    run_all(engine)
    assert any(shape.num_beside for shape in engine.parts.executor.target.replays._captured)
    for one in found:
        assert_all_kept(one)


def test_its_kv_is_found_again_on_the_device_and_in_host_memory(make: Any, prompts: Prompts) -> None:
    engine = make(TARGET, host_blocks=128, prefill_chunk=32)
    first = generate(engine, prompts(90), max_tokens=40)
    history = [*prompts(90), *first.tokens, 3]
    again = generate(engine, history, max_tokens=30)
    assert again.source is not None and again.source.device >= 112
    assert_all_kept(again)
    settle_all(engine)
    engine.cache.reset(("device",))
    run_all(engine)
    third = generate(engine, history, max_tokens=30)
    assert third.source is not None and third.source.host >= 112
    assert_all_kept(third)
    assert third.tokens == again.tokens


def test_its_kv_is_found_again_on_disk_after_a_restart(make: Any, prompts: Prompts, tmp_path: Path) -> None:
    """And that of another draft model with the same shape is not."""
    dims, sources = BUILT_IN[TARGET], []
    shape = {
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "num_hidden_layers": dims.num_layers,
    }
    other = write_shape(tmp_path / "other", **shape)
    for draft in (TARGET, TARGET, other):
        engine = make(draft, host_blocks=128, ssd_dir=str(tmp_path / "ssd"), ssd_gib=0.05)
        wait_scanned(engine)
        found = generate(engine, prompts(90), max_tokens=30)
        assert draft == other or drafted(found)[0] == drafted(found)[1] > 15
        settle_all(engine)
        persisting = engine.cache.persist()
        while persisting is not None and not persisting.settled:
            engine.step()
            engine.wait_work(0.01)
        assert found.source is not None
        sources.append(found.source.ssd)
        engine.close(timeout_s=20.0)
    assert sources[0] == 0 and sources[1] >= 80 and sources[2] == 0


# ----------------------------------------------------------------------------------- while nothing is drafted


def needs_eager_passes(engine: Engine) -> None:
    if engine.parts.arena.tensor.is_cuda:
        pytest.skip("nobody sees a captured pass run, or can change it")


def counted_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every pass of the draft model."""
    run, sizes = ModelGuesser._run, []

    def count(self: ModelGuesser, inputs: Any, at: slice) -> Any:
        sizes.append(len(inputs.tokens))
        return run(self, inputs, at)

    monkeypatch.setattr(ModelGuesser, "_run", count)
    return sizes


def draft_rows(engine: Engine, found: Collected) -> torch.Tensor:
    """The draft's keys and values of a request that runs, by token."""
    engine.parts.lanes[0].drain()
    track = engine.parts.scheduler.running.requests[found.request_id]
    pages = engine.parts.arena.tensor[
        torch.from_numpy(track.table.slots(track.num_committed).astype("int64"))
    ]
    return (
        pages.permute(0, 3, 1, 2, 4, 5)
        .flatten(0, 1)[: track.num_committed, BUILT_IN[TARGET].num_layers :]
        .flatten(1)
    )


def test_what_is_decoded_while_drafts_do_not_pay_is_left_out_and_changes_no_answer(
    make: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass runs for it. Its KV is blank, the prompt's is not, and drafts that begin later have KV from
    then on."""
    plain, engine, sizes = make(None), make(TARGET, host_blocks=128), counted_passes(monkeypatch)
    engine.parts.arena.tensor.fill_(0.5)  # as if others had used it before
    speculation = forced(engine, is_on=False)
    right = [generate(plain, prompts(20 + 5 * n, seed=n), max_tokens=110) for n in range(3)]
    found = [submit(engine, prompts(20 + 5 * n, seed=n), max_tokens=110) for n in range(3)]
    while len(found[0].tokens) < 50:
        engine.step()
    num_passes = len(sizes)
    blank = [(draft_rows(engine, one) == 0).all(dim=1) for one in found]
    for n, (one, rows) in enumerate(zip(found, blank, strict=True)):
        beside = 20 + 5 * n + 3  # tokens that were decoded beside prompts
        assert (
            not rows[: beside - 3].any() and rows[beside:].all() and len(rows) >= beside + len(one.tokens) - 5
        )
    if not engine.parts.arena.tensor.is_cuda:
        assert num_passes <= 3, "those of prompts"
    speculation.is_on = True
    while len(found[0].tokens) < 90:
        engine.step()
    for n, one in enumerate(found):
        rows = (draft_rows(engine, one) == 0).all(dim=1)
        assert rows[20 + 5 * n + 3 : 20 + 5 * n + 32].all() and not rows[20 + 5 * n + 50 :].any()
    run_all(engine)
    engine.check()
    for one, wanted in zip(found, right, strict=True):
        assert_same(one, wanted)
        num, kept = drafted(one)
        assert num > kept > 0, "it sees less than the target"


def test_drafting_that_does_not_pay_goes_off_by_itself_and_later_requests_are_tried_again(
    make: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests stay undrafted: no pass runs over what they decode."""
    monkeypatch.setattr(drafter, "_REST_STEPS", 40)
    plain, engine, passes = make(None), make(OTHER, is_forced=False), counted_passes(monkeypatch)
    needs_eager_passes(engine)
    flat = StepCosts((1, 8, 64), (1e-3, 1.1e-3, 2e-3), 5e-4)
    engine.parts.speculation.measure(lambda costs: flat)
    for turn in range(2):
        right = [generate(plain, prompts(20 + n, seed=n + turn), max_tokens=100) for n in range(3)]
        found = [submit(engine, prompts(20 + n, seed=n + turn), max_tokens=100) for n in range(3)]
        while len(found[0].tokens) < 40:
            engine.step()
        num_passes = len(passes)
        run_all(engine)
        assert len(passes) == num_passes > 0, "it is off long before the end"
        for one, wanted in zip(found, right, strict=True):
            assert_same(one, wanted)
            assert 0 < drafted(one)[0] < 60
    engine.check()


@pytest.mark.parametrize("is_on", [True, False], ids=["drafting", "later"])
@pytest.mark.parametrize("captured", [True, False])
def test_a_step_launched_over_a_load_waits_for_the_drafts_layers_too(
    captured: bool, is_on: bool, make: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the end of the step at the latest: whoever passes over its tokens later has nothing to wait for. The
    sanitizer sees it."""
    engine = make(TARGET, host_blocks=64)
    speculation = forced(engine, is_on=False)
    speculation.is_on = is_on
    overlap_from(engine, 1 << 30 if captured else 0)
    each = [Group((layer, layer + 1)) for layer in range(engine.parts.arena.layout.num_layers)]
    monkeypatch.setattr(engine.cache.loads, "_groups", lambda num_blocks, layered: each)
    cold = generate(engine, prompts(80), max_tokens=4)
    forget(engine)
    load, _ = gates(engine)
    load.hold()
    load.let(len(each) - 1 if captured else 0)
    lane = engine.parts.lanes[0]
    wait, waited = lane.wait, list[Fence]()
    monkeypatch.setattr(lane, "wait", lambda fence: (waited.append(fence), wait(fence)))
    returning = submit(engine, prompts(80), max_tokens=30)
    until(engine, lambda: engine.turns.running is not None)
    running, waited_for = engine.turns.running, list(waited)
    load.let()
    speculation.is_on = True
    run_all(engine)
    assert running is not None and returning.tokens[:4] == cold.tokens
    copies = [copy for one in running.loads if isinstance(one, BlockLoad) for copy in one.copies]
    parts = [arrival.fence for copy in copies for arrival in copy.arrivals or ()]
    assert len(parts) == len(each) and all(fence in waited_for for fence in parts)
    assert_all_kept(returning)


# ----------------------------------------------------------------------------------------------------- faults


def test_a_pass_that_fails_costs_nobody_an_answer(
    make: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run and those that come later decode as without drafts."""
    plain, engine = make(None), make(TARGET)
    needs_eager_passes(engine)
    right = generate(plain, prompts(20), max_tokens=40)
    run, calls = ModelGuesser._run, []

    def fail(self: ModelGuesser, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("no idea")
        return run(self, *args)

    monkeypatch.setattr(ModelGuesser, "_run", fail)
    found = [submit(engine, prompts(20), max_tokens=40), submit(engine, prompts(20), max_tokens=40)]
    run_all(engine)
    found.append(generate(engine, prompts(20), max_tokens=40))
    for one in found:
        assert_same(one, right)
    assert drafted(found[0])[1] > 0 and drafted(found[2]) == (0, 0) and len(calls) == 9
    engine.check()


def test_other_tokens_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"draft: the draft model has other tokens than the target: 512 is b'<512>', not b''.*"
        r"and 125 more",
    ):
        build(drafting(tiny_config(), write_shape(tmp_path / "other", vocab_size=640)))
    with pytest.raises(ConfigError, match="draft needs a model: draft:PATH"):
        SpeculationConfig("draft")


def write_shape(directory: Path, **fields: Any) -> str:
    """The config.json of a tiny Llama, for random weights."""
    directory.mkdir()
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    sizes = {
        "intermediate_size": 96,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    stated = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **sizes, **fields}
    (directory / "config.json").write_text(json.dumps(stated))
    return str(directory)


def test_fewer_positions_are_refused_where_more_are_asked_for(make: Any, tmp_path: Path) -> None:
    short = write_shape(tmp_path / "short", max_position_embeddings=512)
    with pytest.raises(
        ConfigError, match="it has 512 positions, and sequences have up to 513 tokens; lower --max-model-len"
    ):
        build(drafting(tiny_config(max_model_len=513), short))
    assert make(short).max_model_len == 512


def test_drafts_that_would_lie_behind_its_last_position_are_made_all_the_same(
    make: Any, prompts: Prompts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are never kept, and no reason to stop drafting for others."""
    short = write_shape(tmp_path / "short", max_position_embeddings=512)
    plain, engine = make(None, max_model_len=512), make(short)
    right = generate(plain, prompts(480), max_tokens=32)
    found = generate(engine, prompts(480), max_tokens=32)
    assert_same(found, right)
    assert len(right.tokens) == 32 and "drafting failed" not in caplog.text
    assert drafted(generate(engine, prompts(20), max_tokens=20))[0] > 0


@pytest.mark.parametrize(
    ("heads", "head_dim", "layers"),
    [(1, 16, 1), (4, 48, 2), (3, 32, 3)],
    ids=["narrower", "wider", "of odd width"],
)
def test_kv_of_any_width_finds_room(
    heads: int, head_dim: int, layers: int, make: Any, prompts: Prompts, tmp_path: Path
) -> None:
    """As many layers of a block as it fills, and fewer than it is wide more, so that a slot is a whole number
    of its blocks."""
    shape = {
        "num_key_value_heads": heads,
        "num_attention_heads": 2 * heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
    }
    draft = write_shape(tmp_path / "draft", **shape)
    dims, config = BUILT_IN[TARGET], tiny_config()
    width = dims.num_kv_heads * dims.head_dim
    least = layers * heads * head_dim / width
    extra = sizing.layout_for(drafting(config, draft), dims, torch.device("cpu")).num_layers - dims.num_layers
    assert least <= extra < least + 1 + heads * head_dim / 16
    plain, engine = make(None), make(draft)
    for length in (5, 40, 100):
        right = generate(plain, prompts(length), max_tokens=40)
        assert_same(generate(engine, prompts(length), max_tokens=40), right)
        assert_same(
            generate(engine, [*prompts(length), *right.tokens], max_tokens=20),
            generate(plain, [*prompts(length), *right.tokens], max_tokens=20),
        )
    assert sum(engine.parts.scheduler.counts.drafted_by_place) > 100

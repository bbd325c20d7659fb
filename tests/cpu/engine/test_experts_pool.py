"""Experts that need not be on the device: the same tokens with all of them there, with a quarter, and with
the fewest; bad input; what is counted. Under the sanitizer, which knows their slots."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.bench.routing import replay
from penstock.config import (
    GIB,
    Config,
    EngineConfig,
    ExpertsConfig,
    KvConfig,
    ModelSource,
    SpeculationConfig,
)
from penstock.contract import FinishReason
from penstock.engine import build as build_module
from penstock.engine import routed, sizing
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution import pooled as pooled_module
from penstock.engine.execution.replays import cuda_buckets
from penstock.errors import ConfigError, ModelError
from penstock.experts.routing import read_routing
from penstock.models.experts import RoutedLayer
from penstock.models.loader import inspect_model
from penstock.models.model import Experts, Routing
from penstock.models.progress import silent
from penstock.models.registry import BUILT_IN
from penstock.observe import Observers
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import build_sanitized, check_silent
from penstock.testing.tiny_models import (
    TINY_MIXTRAL,
    TINY_QWEN2_MOE,
    TINY_QWEN3_MOE,
    tiny_tensors,
    write_tiny_model,
)
from tests.cpu.engine.test_stress import crowd, random_request
from tests.pure.lanes.lane_rules import Heard
from tests.support.crowds import crowds
from tests.support.driving import Collected, run_all, settle_all, submit, tiny_config
from tests.support.forced import forced
from tests.support.guesses import Guess

FEWEST = "9%"  # two of 24 experts: those of one token
SHARES = ("50%", "25%", FEWEST)
Make = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[tuple[Engine, Sanitizer]] = []

    def engine(on_device: str | None = None, experts: dict[str, Any] | None = None, **more: Any) -> Engine:
        config = pooled(tiny_config("tiny-qwen3-moe", **more), on_device, **(experts or {}))
        made.append(build_sanitized(config))
        return made[-1][0]

    yield engine
    for one, sanitizer in made:
        one.close(timeout_s=20.0)
        check_silent(sanitizer)


def pooled(config: Config, on_device: str | None, **experts: Any) -> Config:
    return dataclasses.replace(config, experts=ExpertsConfig(on_device, **experts))


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(1, 500, n).tolist() for n in lengths]


def answers(engine: Engine, asked: list[list[int]], **more: Any) -> list[list[int]]:
    """Greedy and sampled ones, at once."""
    found = [
        submit(engine, prompt, **{"max_tokens": 10, "temperature": 0.9 * (i % 2), "seed": i, **more})
        for i, prompt in enumerate(asked)
    ]
    run_all(engine)
    assert all(one.error is None for one in found), [one.error for one in found]
    return [one.tokens for one in found]


ASKED = prompts(3, 40, 90, 17, 150)


@pytest.mark.parametrize("guesses", [True, False], ids=["guessing", "not guessing"])
@pytest.mark.parametrize("share", SHARES)
def test_tokens_are_those_of_an_engine_with_all_experts_on_the_device(
    make: Make, share: str, guesses: bool
) -> None:
    engine = make(share, experts={"guesses": guesses})
    assert engine.parts.executor.target.replays.buckets
    assert answers(engine, ASKED) == answers(make(), ASKED)
    figures = engine.stats().experts
    assert figures is not None and figures.missed > 0
    assert (figures.guessed > 0) is guesses
    assert figures.copied_bytes == (figures.missed + figures.guessed) * 3 * 64 * 32 * 4


@pytest.mark.parametrize("share", ["25%", FEWEST])
def test_tokens_are_the_same_op_by_op(make: Make, share: str) -> None:
    assert answers(make(share, capture=False), ASKED) == answers(make(), ASKED)


def test_padding_of_a_captured_step_wants_no_experts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: three requests run in a step captured for four."""
    asked, settings = prompts(20, 21, 22), {"max_batch": 8}
    wanted = answers(make(), asked)
    found = []
    for buckets in (lambda *_: (), lambda *_: cuda_buckets(8, 64)):
        monkeypatch.setattr(sizing, "buckets_for", buckets)
        engine = make("75%", experts={"guesses": False}, **settings)
        assert answers(engine, asked) == wanted
        figures = engine.stats().experts
        assert figures is not None
        found.append((figures.hit, figures.missed))
    assert found[0] == found[1]


def test_a_wrong_guess_costs_a_copy_and_no_token(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_router(following: RoutedLayer, layer: RoutedLayer) -> Experts:
        experts = pooled_module.experts_of(following)
        return experts._replace(router=-experts.router)

    engine = make("50%")
    wanted = answers(engine, ASKED)
    right = engine.stats().experts
    monkeypatch.setattr(pooled_module, "_applied_before", reversed_router)
    engine = make("50%")
    assert answers(engine, ASKED) == wanted == answers(make(), ASKED)
    wrong = engine.stats().experts
    assert wrong is not None and right is not None
    assert wrong.foreseen < right.foreseen and wrong.guesses_used < wrong.guessed


def test_experts_of_the_next_layer_stream_in_while_this_one_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt of 64 tokens hits all eight experts of each layer. Of three layers, two fit: only the first is
    waited for."""
    heard = Heard()
    config = pooled(tiny_config("tiny-qwen3-moe"), "67%")
    engine = build(config, observers=Observers(lanes=(heard,)))
    submit(engine, prompts(64)[0], max_tokens=1)
    run_all(engine)
    engine.close(timeout_s=20.0)
    told = [event[2] for event in heard.of("submitted") if event[1] in ("experts", "compute, launched")]
    order = [label for label in told if "experts" in label]
    assert order == [
        "copy of experts",
        "prefetch of experts",
        "experts 0",
        "prefetch of experts",
        "experts 1",
        "experts 2",
    ]
    figures = engine.stats().experts
    assert figures is not None and (figures.missed, figures.hit) == (8, 16)


@pytest.mark.parametrize("order", ["lru", "none"])
def test_the_rule_changes_no_token(make: Make, order: str) -> None:
    assert answers(make("25%", experts={"order": order}), ASKED) == answers(make(), ASKED)


@pytest.mark.parametrize("share", ["25%", FEWEST])
def test_tokens_are_the_same_where_requests_are_retracted(
    make: Make, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(20, 33, 18, 25)
    alone = [answers(make(), [prompt], max_tokens=60)[0] for prompt in asked]
    monkeypatch.setattr(sizing, "lengths_for", lambda _: Guess(1))  # most answers are longer
    engine = make(share, blocks=12, host_blocks=80, overcommit=4.0)
    found = [submit(engine, prompt, max_tokens=60) for prompt in asked]
    run_all(engine)
    assert [one.tokens for one in found] == alone
    assert engine.stats().retractions > 0


@pytest.mark.parametrize("share", ["25%", FEWEST])
def test_tokens_are_the_same_with_tiers_and_contexts_that_do_not_fit(make: Make, share: str) -> None:
    asked = prompts(150, 60, 100, 200, 30, 45)
    settings: dict[str, Any] = {
        "blocks": 24,
        "host_blocks": 80,
        "resident_tokens": 128,
        "max_model_len": 300,
        "overcommit": 4.0,
        "max_batch": 4,
    }
    alone = [answers(make(), [prompt])[0] for prompt in asked]
    engine = make(share, **settings)
    for _ in range(2):  # the second time from host memory
        found = [submit(engine, prompt, max_tokens=10) for prompt in asked]
        run_all(engine)
        assert [one.tokens for one in found] == alone
        settle_all(engine)
        engine.cache.reset(("device",))
    stats = engine.stats()
    assert stats.host_steps > 0
    assert stats.prompt_tokens["host"] > 0


@pytest.mark.parametrize("seed", crowds(2))
def test_a_random_crowd_gets_the_tokens_it_would_get_alone(
    make: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    stems = [[rng.randrange(1, 500) for _ in range(150)] for _ in range(3)]
    alone = make(prefix_cache=False, capture=False, prefill_chunk=512)
    asked = [random_request(rng, stems) for _ in range(24)]
    asked += rng.choices(asked, k=10)
    monkeypatch.setattr(sizing, "lengths_for", lambda _: Guess(seed))
    if seed % 2:  # padded replays, as on CUDA
        monkeypatch.setattr(sizing, "buckets_for", lambda *_: cuda_buckets(32, 64))
    engine = make(
        rng.choice(SHARES),
        experts={"guesses": rng.random() < 0.7},
        max_batch=32 if seed % 2 else 8,
        blocks=rng.choice((16, 24, 200)),
        host_blocks=(40, 400)[seed % 2],
        overcommit=rng.choice((1.0, 4.0)),
        prefill_chunk=rng.choice((16, 64)),
        speculate=("ngram", "draft:tiny-qwen3", None)[seed % 3],
        **({"resident_tokens": 128, "max_model_len": 256} if seed % 2 == 0 else {}),
    )
    if engine.parts.speculation is not None:
        forced(engine, lambda most: rng.randrange(most + 1))
    for (prompt, sampling), found in crowd(engine, rng, asked):
        expected = submit(alone, prompt, **dict(sampling))
        run_all(alone)
        assert found.error is None
        assert found.tokens == expected.tokens[: len(found.tokens)], (prompt, sampling)
        assert found.finish in (expected.finish, FinishReason.CANCELLED)
    settle_all(engine)


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_shared_experts_and_dense_layers_stay_where_they_are(name: str, tmp_path: Path) -> None:
    """Mixtral's four experts of 128, and six of 32 in two of three layers of Qwen2."""
    write_tiny_model(tmp_path, TINY_QWEN2_MOE if name == "qwen2" else TINY_MIXTRAL)
    asked, found = prompts(9, 50), []
    for share in (None, "50%"):
        config = pooled(tiny_config(), share)
        source = dataclasses.replace(config.source, model=str(tmp_path), load_format="auto")
        engine, sanitizer = build_sanitized(dataclasses.replace(config, source=source))
        found.append(answers(engine, asked))
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)
    assert found[0] == found[1]


def test_recurrent_layers_have_experts_in_the_pool_too(monkeypatch: pytest.MonkeyPatch) -> None:
    routing = Routing(8, top_k=2, ffn=32, normalised=True, shared_ffn=32)
    hybrid = dataclasses.replace(BUILT_IN["tiny-qwen3.5"], architecture="qwen3_5_moe", routing=routing)
    monkeypatch.setitem(BUILT_IN, "tiny-hybrid", hybrid)
    asked, found = prompts(9, 150), []
    for share in (None, "25%"):
        config = pooled(tiny_config("tiny-hybrid", host_blocks=200), share)
        engine, sanitizer = build_sanitized(config)
        found.append([answers(engine, asked) for _ in range(2)])
        assert engine.stats().prompt_tokens["device"] > 0, "a kept state was used"
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)
    assert found[0] == found[1]


@pytest.mark.parametrize("speculate", ["ngram", "draft:tiny-qwen3-moe"])
def test_drafts_are_verified_through_the_pool(make: Make, speculate: str) -> None:
    asked = [prompts(30)[0] * 3, *prompts(20)]
    engine = make("25%", speculate=speculate)
    forced(engine)
    assert answers(engine, asked) == answers(make(), asked)


def test_logprobs_and_echoed_prompts_are_the_same(make: Make) -> None:
    def scored(engine: Engine) -> list[Collected]:
        found = [submit(engine, prompt, logprobs=2, prompt_logprobs=1) for prompt in ASKED[:3]]
        run_all(engine)
        return found

    for one, other in zip(scored(make("25%")), scored(make()), strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


def test_a_request_that_is_cancelled_leaves_the_pool_in_order(make: Make) -> None:
    engine, wanted = make("25%"), answers(make(), ASKED)
    for round_of in range(3):
        found = [submit(engine, prompt, max_tokens=30) for prompt in ASKED]
        for turn in range(4 + round_of):
            engine.step()
            if turn < len(found):
                engine.cancel(found[turn].request_id)
        run_all(engine)
    assert answers(engine, ASKED) == wanted


def test_a_share_that_holds_all_changes_nothing(make: Make) -> None:
    for share in ("100%", "auto", "1"):
        engine = make(share)
        assert engine.parts.experts is None and engine.stats().experts is None
        assert engine.parts.executor.target.replays.buckets


# --------------------------------------------------------------------------------------------------- failures


def test_a_copy_that_fails_fails_its_step_and_is_made_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, wanted = make("25%"), answers(make(), ASKED)
    pool = engine.parts.experts
    assert pool is not None
    whole, left = pool.memory.copy, [3]

    def copy(moves: Any) -> None:
        if left:
            left.pop()
            raise OSError("the link is gone")
        whole(moves)

    monkeypatch.setattr(pool.memory, "copy", copy)
    found = [submit(engine, prompt) for prompt in ASKED]
    run_all(engine)
    assert any(one.error is not None and "the link is gone" in one.error for one in found)
    assert answers(engine, ASKED) == wanted


def test_a_copy_that_cannot_be_submitted_fails_its_step_and_holds_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, wanted = make("25%"), answers(make(), ASKED)
    lane = next(one for one in engine.parts.lanes if one.name == "experts")
    submitted, left = lane.submit, [1, 2]

    def submit_copy(*args: Any, **more: Any) -> Any:
        if left:
            left.pop()
            raise OSError("no copy engine is left")
        return submitted(*args, **more)

    monkeypatch.setattr(lane, "submit", submit_copy)
    found = [submit(engine, prompt) for prompt in ASKED]
    run_all(engine)
    assert any(one.error is not None and "no copy engine" in one.error for one in found)
    assert answers(engine, ASKED) == wanted


# -------------------------------------------------------------------------------------------------- bad input


def test_a_pool_below_the_least_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as error:
        build(pooled(tiny_config("tiny-qwen3-moe"), "4%"))
    said = "--experts-on-device 4%: 0.0000 GiB hold 0 experts of 0.02 MiB, and a token runs through 2 of a "
    assert str(error.value) == f"{said}layer: give at least 0.0001"


def room_of(free_gib: float, config: Config) -> sizing.ExpertRoom:
    facts = inspect_model(config.source)
    rest = facts.num_parameters * 2 - routed.all_expert_bytes(facts.config, torch.bfloat16)
    room = sizing.room_for_experts(config, free_gib * GIB - rest, facts.config, torch.device("cuda", 0))
    assert room is not None
    return room


LARGE = ModelSource("qwen3-30b-a3b", load_format="dummy", device="cuda")


@pytest.mark.parametrize(
    ("free_gib", "kv_gib", "room_gib"),
    [(24, None, 10.08), (24, 8.0, 6.77), (48, None, 33.92), (80, 30.0, 40.77), (80, None, None)],
)
def test_auto_takes_what_kv_leaves_of_a_gpu(
    free_gib: int, kv_gib: float | None, room_gib: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Qwen3-30B-A3B, whose experts take 54 GiB and whose other weights 2.9. None: all of them fit."""
    monkeypatch.setattr(build_module, "free_bytes", lambda device: free_gib * GIB)
    monkeypatch.setattr(routed, "free_bytes", lambda device: 120 * GIB)
    config = Config(LARGE, KvConfig(device_gib=kv_gib), experts=ExpertsConfig("auto"))
    facts = inspect_model(LARGE)
    of = build_module._as_routed(config, facts, torch.device("cuda", 0))
    assert of.source.experts_in_host is (room_gib is not None)
    if room_gib is not None:
        assert room_of(free_gib, config).num_bytes / GIB == pytest.approx(room_gib, abs=0.01)


@pytest.mark.parametrize(
    ("engine", "kv", "beside"),
    [
        ({"max_model_len": 8192}, {}, "2.85 GiB for KV, an eighth of what is left"),
        ({}, {}, "4.69 GiB for KV, 1.25 times a request of 40960 tokens"),
        (
            {"max_model_len": 131072},
            {"resident_tokens": 65536},
            "7.50 GiB for KV, 1.25 times a request of 65536 tokens",
        ),
        ({"max_model_len": 131072}, {}, "11.38 GiB for KV, half of what is left"),
        ({"max_model_len": 8192, "max_batch": 4}, {}, "3.00 GiB for KV, 4 requests of 8192 tokens"),
        ({}, {"device_gib": 3.0}, "3.00 GiB for KV, as given"),
        ({}, {"device_blocks": 1024}, "1.50 GiB for KV, as given"),
    ],
)
def test_auto_gives_kv_what_the_requests_can_use_and_says_why(
    engine: dict[str, Any], kv: dict[str, Any], beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU with 32 GiB; 1,024 tokens of KV take 96 MiB. KV is sized by what is left then."""
    config = Config(LARGE, KvConfig(**kv), engine=EngineConfig(**engine))
    room = room_of(32, config)
    assert room.beside == beside
    facts, device = inspect_model(LARGE), torch.device("cuda", 0)
    rest = facts.num_parameters * 2 - routed.all_expert_bytes(facts.config, torch.bfloat16)
    monkeypatch.setattr(sizing, "free_bytes", lambda _: 32 * GIB - rest - room.num_bytes)
    layout = sizing.layout_for(config, facts.config, device)
    model: Any = SimpleNamespace(config=facts.config, device=device)
    blocks = sizing.blocks_that_fit(config, layout, model)
    assert blocks * layout.block_bytes / GIB == pytest.approx(float(beside.split()[0]), abs=0.01)


@pytest.mark.parametrize(("proposer", "is_pooled"), [(None, False), ("draft:qwen3-4b", True)])
def test_auto_counts_the_weights_of_a_draft_model(
    proposer: str | None, is_pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that holds all experts holds 7.5 GiB less of them beside a draft model."""
    monkeypatch.setattr(build_module, "free_bytes", lambda device: 74 * GIB)
    monkeypatch.setattr(routed, "free_bytes", lambda device: 120 * GIB)
    config = Config(
        LARGE,
        experts=ExpertsConfig("auto"),
        speculation=SpeculationConfig(proposer),
        kv=KvConfig(device_gib=4.0),
    )
    of = build_module._as_routed(config, inspect_model(LARGE), torch.device("cuda", 0))
    assert of.source.experts_in_host is is_pooled


def test_host_memory_that_cannot_hold_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"25%: all experts take 0.00 GiB of host memory, of which 0.00"):
        build(pooled(tiny_config("tiny-qwen3-moe"), "25%"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"deterministic": True}, "--deterministic holds all experts on the device"),
        ({"weights": "int8"}, "--weights int8 is not possible"),
    ],
)
def test_what_does_not_go_with_a_pool_is_refused(change: dict[str, Any], said: str) -> None:
    config = pooled(tiny_config("tiny-qwen3-moe"), "25%")
    with pytest.raises(ConfigError, match=said):
        build(dataclasses.replace(config, source=dataclasses.replace(config.source, **change)))


@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "of another shape"])
def test_a_missing_expert_and_one_of_another_shape_are_refused_by_name(
    name: str, is_missing: bool, tmp_path: Path
) -> None:
    tensor = f"model.layers.1.mlp.experts.5.{name}.weight"
    tensors = tiny_tensors(TINY_QWEN3_MOE)
    if is_missing:
        del tensors[tensor]
    else:
        tensors[tensor] = torch.zeros(8, 8)
    write_tiny_model(tmp_path, TINY_QWEN3_MOE, tensors=tensors)
    config = pooled(tiny_config(), "25%")
    source = dataclasses.replace(config.source, model=str(tmp_path), load_format="auto")
    with pytest.raises(ModelError, match=rf"{'missing' if is_missing else 'misshapen'} tensors.*{tensor}"):
        build(dataclasses.replace(config, source=source))


# --------------------------------------------------------------------------------------------------- recorded


@pytest.mark.parametrize("share", [None, "25%"])
def test_recorded_routing_is_what_the_steps_did(make: Make, share: str | None, tmp_path: Path) -> None:
    """With one step for each token but the first, the hits of a pool are those of a replay of the file."""
    path = tmp_path / "routing.jsonl"
    experts = {"record": str(path)} | ({"guesses": False} if share else {})
    engine = make(share, experts=experts)
    assert answers(engine, ASKED) == answers(make(), ASKED)
    engine.close(timeout_s=20.0)
    trace = read_routing(path)
    assert (trace.num_experts, trace.top_k, trace.layers) == (8, 2, (0, 1, 2))
    assert all(own.sum() == 2 * step.num_tokens for step in trace.steps for own in step.counts)
    assert sum(step.num_tokens for step in trace.steps) == sum(map(len, ASKED)) + 9 * len(ASKED)
    if share:
        figures = engine.stats().experts
        assert figures is not None
        assert replay(trace, "lfu", figures.num_slots, silent) == figures.hit
        assert figures.hit + figures.missed == sum(len(own) for step in trace.steps for own in step.experts)

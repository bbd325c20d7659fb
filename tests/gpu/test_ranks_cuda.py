"""Ranks on CUDA: NCCL inside captured steps, with one rank; and two processes on one GPU, which NCCL refuses,
by gloo and without captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.config import SanitizeConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution import warm
from tests.cpu.ranks.test_two_ranks import SAMPLINGS, prompt
from tests.support.driving import assert_same, generate, settle_all, tiny_config
from tests.support.ranks import build_ranks, open_led_alone, other_ranks

pytestmark = pytest.mark.gpu
CUDA: dict[str, Any] = {"device": "cuda", "max_batch": 4, "blocks": 64, "max_model_len": 256}


def decode_step_s(engine: Engine) -> float:
    """Of one request, in a pipeline."""
    executor = engine.parts.executor
    table = engine.cache.open("timed", None, 0)
    assert table is not None and table.try_extend(1)
    plan = warm.decode_plan(1, int(table.slots(1)[0]), 16, 0)
    seconds = min(warm.step_s(executor, plan) for _ in range(20))
    table.release(engine.parts.lanes[0].record())
    return seconds


@pytest.fixture
def nccl_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes an engine with NCCL's collectives of one rank."""

    def make(model: str = "tiny-qwen3", **settings: Any) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr("penstock.engine.build.open_ranks", open_led_alone("nccl"))
            config = tiny_config(model, **{**CUDA, **settings})
            return build(replace(config, sanitize=SanitizeConfig("strict")))

    return make


@pytest.mark.parametrize("capture", [True, False])
def test_nccl_with_one_rank_gives_the_tokens_of_none(
    nccl_alone: Callable[..., Engine], capture: bool
) -> None:
    plain, led = build(tiny_config("tiny-qwen3", capture=capture, **CUDA)), nccl_alone(capture=capture)
    for engine in (plain, led):
        with engine.launching():
            engine.warm()
    assert bool(led.parts.executor.target.replays.buckets) == capture
    for name, sampling in SAMPLINGS.items():
        right, found = (
            generate(engine, prompt(40, seed=len(name)), salt=name, **sampling) for engine in (plain, led)
        )
        assert_same(found, right)
    plain_s, led_s = decode_step_s(plain), decode_step_s(led)
    print(f"decode step: {1e6 * plain_s:.0f} us without ranks, {1e6 * led_s:.0f} us with NCCL and one rank")
    for engine in (plain, led):
        engine.close(timeout_s=20.0)


@pytest.mark.parametrize(
    ("model", "speculate"),
    [
        ("tiny-qwen3.5", None),
        ("tiny-qwen3.5", "mtp"),
        ("tiny-qwen3", "ngram"),
        ("tiny-qwen3", "draft:tiny-llama"),
    ],
)
def test_nccl_runs_states_and_drafts_inside_captured_steps(
    nccl_alone: Callable[..., Engine], model: str, speculate: str | None
) -> None:
    plain = build(tiny_config(model, **CUDA))
    led = nccl_alone(model, speculate=speculate, host_blocks=200)
    for engine in (plain, led):
        with engine.launching():
            engine.warm()
    assert led.parts.executor.target.replays.buckets
    for _ in range(2):
        for name in ("greedy", "random", "penalties"):
            right, found = (
                generate(engine, prompt(60, seed=1), salt=name, **{"max_tokens": 30} | SAMPLINGS[name])
                for engine in (plain, led)
            )
            assert_same(found, right)
        settle_all(led)
        led.cache.reset(("device",))
    for engine in (plain, led):
        engine.close(timeout_s=20.0)


def test_a_prefix_returns_from_host_memory_beside_captured_collectives(
    nccl_alone: Callable[..., Engine],
) -> None:
    engine = nccl_alone(host_blocks=200)
    first = generate(engine, prompt(200))
    settle_all(engine)
    engine.cache.reset(("device",))
    again = generate(engine, prompt(200))
    engine.close(timeout_s=20.0)
    assert_same(again, first)
    assert again.source is not None and again.source.host >= 192


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() > 1, reason="each has a GPU")
@pytest.mark.parametrize(
    ("model", "speculate"),
    [
        ("tiny-qwen3", None),
        ("tiny-qwen3-moe", None),
        ("tiny-qwen3.5", "mtp"),
        ("tiny-qwen3", "draft:tiny-llama"),
    ],
)
def test_two_ranks_share_one_gpu_by_gloo(model: str, speculate: str | None) -> None:
    plain = build_ranks(1, model, **CUDA)
    pair = build_ranks(2, model, host_blocks=200, speculate=speculate, **CUDA)
    assert not pair.parts.executor.target.replays.buckets
    for name in ("greedy", "random", "penalties", "logprobs"):
        right, found = (
            generate(engine, prompt(60, seed=1), salt=name, **SAMPLINGS[name]) for engine in (plain, pair)
        )
        assert_same(found, right)
    settle_all(pair)
    pair.cache.reset(("device",))
    right, again = (generate(engine, prompt(60, seed=1), salt="greedy") for engine in (plain, pair))
    assert_same(again, right)
    assert again.source is not None and again.source.host >= 48
    for engine in (plain, pair):
        engine.close(timeout_s=20.0)
    assert not other_ranks()


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("model", "speculate"),
    [("tiny-qwen3", None), ("tiny-qwen3.5", "mtp"), ("tiny-qwen3", "draft:tiny-llama")],
)
def test_two_ranks_on_two_gpus_by_nccl(model: str, speculate: str | None) -> None:
    plain, pair = build_ranks(1, model, **CUDA), build_ranks(2, model, speculate=speculate, **CUDA)
    assert pair.parts.executor.target.replays.buckets
    for name, sampling in SAMPLINGS.items():
        right, found = (
            generate(engine, prompt(60, seed=1), salt=name, **sampling) for engine in (plain, pair)
        )
        assert_same(found, right)
    for engine in (plain, pair):
        engine.close(timeout_s=20.0)
    assert not other_ranks()

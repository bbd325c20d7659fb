"""What a GPU would run, without one: engines of every kind are captured and made warm by the code for CUDA,
over tensors that have no memory. Of operands on two devices, products of two dtypes and values that are read
back, the first is an error here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="NOT TESTED: kernels need triton")

from triton.runtime.jit import JITFunction

from penstock.config import Config, KvConfig, SpeculationConfig
from penstock.contract import Chunk, Request, SamplingParams, Start, StateMove, StepPlan
from penstock.engine.build import build
from penstock.engine.execution import states
from penstock.engine.execution.batch import StepInputs
from penstock.models import triton_experts
from penstock.models.delta_net import DeltaLayer
from penstock.models.model import Experts, Routing
from penstock.models.registry import BUILT_IN
from tests.cpu.engine.test_eagle_engine import write_random_eagle
from tests.support.driving import tiny_config
from tests.support.fake_cuda import fake_cuda

HYBRID, WINDOWS = "tiny-qwen3.5", "tiny-windows"


def config_of(model: str, **settings: Any) -> Config:
    """In bfloat16, as on a GPU by default."""
    config = tiny_config(model, **{"device": "cuda", "blocks": 64, "max_batch": 2, **settings})
    return dataclasses.replace(config, source=dataclasses.replace(config.source, dtype="bfloat16"))


@pytest.fixture
def speculate(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    if request.param != "eagle":
        return request.param  # type: ignore[no-any-return]
    target: Any = SimpleNamespace(config=BUILT_IN["tiny-qwen3"])
    return f"eagle:{write_random_eagle(tmp_path / 'head', target)}"


@pytest.mark.parametrize(
    ("model", "speculate"),
    [("tiny-qwen3", "eagle"), ("tiny-qwen3-moe", None), (HYBRID, None)],
    indirect=["speculate"],
)
def test_every_kind_of_step_is_captured_and_launched(model: str, speculate: str | None) -> None:
    with fake_cuda() as gpu:
        engine = build(config_of(model, speculate=speculate))
        engine.warm()
        assert engine.parts.executor.target.replays.buckets
        assert gpu.num_launched > 100


def test_steps_with_windows_and_with_drafts_over_states_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = dataclasses.replace(BUILT_IN["tiny-qwen3"], windows=(32, 48, 32))
    monkeypatch.setitem(BUILT_IN, WINDOWS, windows)
    drafts = dataclasses.replace(config_of(HYBRID), speculation=SpeculationConfig("ngram", 2))
    for config in (config_of(WINDOWS), drafts):
        with fake_cuda() as gpu:
            assert build(config).parts.executor.target.replays.buckets
            assert gpu.num_launched > 100


def test_states_are_kept_and_begun_with_by_steps_that_wait_for_nothing() -> None:
    with fake_cuda():
        engine = build(config_of(HYBRID, host_blocks=16, states_gib=0.001))
        request = Request("a", [0] * 33, SamplingParams(max_tokens=1))
        slots = engine.parts.cache.open("a", None, 0)
        assert slots is not None and slots.try_extend(3)
        chunk = Chunk("a", 0, 16, (0,) * 16, slots.slots(32), True, 1, state=StateMove(0, 1))
        step = engine.parts.executor.launch(StepPlan(0, (chunk,), 0, (Start.of(0, request),)))
        assert step.wait_error() is None


def test_kv_gets_what_a_step_and_the_replays_leave() -> None:
    """By default, where states take most of the memory beside the weights."""
    config = dataclasses.replace(config_of(HYBRID), kv=KvConfig())
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, capture=False))
    with fake_cuda() as gpu:
        assert build(config).parts.arena.num_bytes < gpu.free_bytes


# ------------------------------------------------------------------------------------------------- the faults


def reads_back(advance: Callable[..., Any]) -> Callable[..., Any]:
    return lambda bound, layer, qkv, *rest: advance(bound, layer, qkv * qkv.max().item(), *rest)


def on_the_host(advance: Callable[..., Any]) -> Callable[..., Any]:
    return lambda bound, layer, qkv, *rest: advance(bound, layer, qkv + torch.ones(qkv.shape[1]), *rest)


def from_the_host(advance: Callable[..., Any]) -> Callable[..., Any]:
    return lambda bound, layer, qkv, *rest: advance(bound, layer, qkv + torch.ones(1).to(qkv.device), *rest)


def of_unknown_size(advance: Callable[..., Any]) -> Callable[..., Any]:
    return lambda bound, layer, qkv, *rest: advance(bound, layer, qkv, *rest)[bound._inputs.rows >= 0]


@pytest.mark.parametrize("fault", [reads_back, on_the_host, from_the_host, of_unknown_size])
def test_a_step_that_a_gpu_could_not_capture_is_noticed(
    fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states.BoundStates, "advance", fault(states.BoundStates.advance))
    with fake_cuda(), pytest.raises((RuntimeError, AssertionError)):
        build(config_of(HYBRID, max_batch=1))


def test_a_product_of_two_dtypes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = DeltaLayer.finish
    monkeypatch.setattr(DeltaLayer, "finish", lambda layer, x, *rest: finish(layer, x.float(), *rest))
    with fake_cuda(), pytest.raises(AssertionError, match="float32"):
        build(config_of(HYBRID, max_batch=1))


# ---------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("num_experts", [256, 512])
def test_the_router_of_many_experts_fits_into_a_multiprocessor(num_experts: int) -> None:
    """Compiled for Hopper, with the sizes of Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B."""
    routing = Routing(num_experts, top_k=8, ffn=512, normalised=True)
    with fake_cuda(compiles=True) as gpu:
        router = torch.empty(num_experts, 2048, dtype=torch.bfloat16, device="cuda")
        experts = Experts(router, None, None, torch.empty(0), routing)
        for num_tokens in (1, 1024):
            x = torch.empty(num_tokens, 2048, dtype=torch.bfloat16, device="cuda")
            sizes = {"NUM": num_experts, "PADDED": num_experts}
            triton_experts._logits(x, experts.router, sizes, overlaps=True)
        assert gpu.num_launched == len(gpu.kernels) == 2


def test_no_kernel_is_compiled_anew_because_a_step_s_inputs_lie_elsewhere() -> None:
    """They are views of one packed buffer, so their alignment changes with the sizes of a step."""
    from penstock.engine.execution import triton_states, triton_steps
    from penstock.engine.execution.attention import triton_kernels
    from penstock.models import triton_delta

    views = {f"{name}_ptr" for name in (*StepInputs.__dataclass_fields__, "starts", "lengths", "unsure")}
    kernels = [
        one
        for module in (triton_kernels, triton_steps, triton_states, triton_delta)
        for one in vars(module).values()
        if isinstance(one, JITFunction) and one.__name__.endswith("_kernel")
    ]
    met = [(one.__name__, param) for one in kernels for param in one.params if param.name in views]
    assert len({name for name, _ in met}) > 12
    assert [f"{name}: {param.name}" for name, param in met if not param.do_not_specialize] == []

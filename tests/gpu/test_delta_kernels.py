"""The kernels of gated delta layers agree with the readable form, for requests of any lengths in one step.

With TRITON_INTERPRET=1 the same tests run on CPU tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the kernels of delta layers need torch")
pytest.importorskip("triton", reason="NOT TESTED: the kernels of delta layers need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: the kernels of delta layers need an NVIDIA GPU, and there is none here",
        allow_module_level=True,
    )

from penstock.engine import sizing  # noqa: E402
from penstock.engine.execution import states as states_  # noqa: E402
from penstock.engine.execution.batch import Shape  # noqa: E402
from penstock.models.delta_rule import (  # noqa: E402
    DeltaInputs,
    LayerStates,
    Prompts,
    convolved,
    heads_of,
    many_steps,
    one_step,
)
from penstock.models import triton_delta  # noqa: E402
from penstock.models.layers import TorchLayerOps  # noqa: E402
from penstock.models.model import Recurrence  # noqa: E402
from penstock.models.triton_delta import CHUNK, TritonDelta  # noqa: E402
from penstock.testing.sanitized import build_sanitized, check_silent  # noqa: E402
from tests.support import contiguous_kv  # noqa: E402
from tests.support.driving import run_all, submit, tiny_config  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
TINY = Recurrence((0, 1, 2), 2, 4, 16, 16, window=4)
ODD = Recurrence((0, 1), 1, 3, 24, 40, window=3)  # nothing is a power of two
QWEN = Recurrence((0,), 16, 32, 128, 128, window=4)
DIMS = {"tiny": TINY, "odd": ODD} if INTERPRETED else {"tiny": TINY, "odd": ODD, "qwen": QWEN}
TOLERANCE = 2e-5  # of values of about 1
ROUNDED = 2e-5 if INTERPRETED else 2e-3  # of prompts of a model in 16 bits
dims_of = pytest.mark.parametrize("name", DIMS)
once = pytest.mark.parametrize("name", ["odd"] if INTERPRETED else DIMS)  # the interpreter is slow


class Case(NamedTuple):
    """A layer in the middle of all, and rows in no order. The first requests decode."""

    states: LayerStates
    rows: torch.Tensor
    inputs: DeltaInputs
    lengths: Sequence[int]
    num_decodes: int


def advance(case: Case) -> torch.Tensor:
    """As a step does it."""
    num, found, (qkv, conv, decay, beta) = case.num_decodes, [], case.inputs
    if num:
        given = DeltaInputs(qkv[:num], conv, decay[:num], beta[:num])
        found.append(TritonDelta().steps(case.states, case.rows[:num], given))
    if num < len(case.lengths):
        starts = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=DEVICE)
        lengths = case.lengths[num:]
        prompts = Prompts(case.rows[num:], starts[num:], num, max(lengths), lengths)
        given = DeltaInputs(qkv[num:], conv, decay[num:], beta[num:])
        found.append(TritonDelta().prompts(case.states, prompts, given))
    return torch.cat(found)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def made(
    dims: Recurrence, num_decodes: int, prompts: Sequence[int], dtype: torch.dtype, hard: bool = False
) -> Case:
    """`hard`: all keys of a request are alike, and nothing decays."""
    torch.manual_seed(len(prompts) + num_decodes)
    lengths = [1] * num_decodes + list(prompts)
    num, rows = sum(lengths), len(lengths) + 3
    windows = torch.randn(rows, 2, dims.window - 1, dims.qkv_width, device=DEVICE)
    heads = (dims.num_value_heads, dims.key_dim, dims.value_dim)
    matrices = torch.randn(rows, 2, *heads, device=DEVICE)
    wide = torch.randn(num, dims.qkv_width + 5, device=DEVICE)
    if hard:
        wide[:, : dims.qkv_width] = wide[:1, : dims.qkv_width] + 0.01 * wide[:, : dims.qkv_width]
    decay = -torch.rand(num, dims.num_value_heads, device=DEVICE) * (0.0 if hard else 0.3)
    beta = torch.rand(num, dims.num_value_heads, device=DEVICE)
    conv = torch.randn(dims.qkv_width, 1, dims.window, device=DEVICE)
    order = torch.randperm(rows)[: len(lengths)].to(torch.int32).to(DEVICE)
    qkv = wide.to(dtype)[:, : dims.qkv_width]
    given = DeltaInputs(qkv, conv, decay, torch.ones_like(beta) if hard else beta)
    return Case(LayerStates(windows[:, 1], matrices[:, 1]), order, given, lengths, num_decodes)


def readable(case: Case, dims: Recurrence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64, request by request: what is returned, and the states after it."""
    windows, matrices = (tensor.double() for tensor in case.states)
    conv, found, at = case.inputs.conv.double(), [], 0
    for row, length in zip(case.rows.tolist(), case.lengths, strict=True):
        own = slice(at, at + length)
        qkv, decay, beta = (
            part[own].double()[None] for part in (case.inputs.qkv, case.inputs.decay, case.inputs.beta)
        )
        mixed, windows[row : row + 1] = convolved(qkv, windows[row : row + 1].clone(), conv)
        heads = heads_of(mixed, decay, beta, dims)
        out, state = (one_step if length == 1 else many_steps)(heads, matrices[row : row + 1])
        matrices[row : row + 1] = state
        found.append(out[0].transpose(0, 1))
        at += length
    return torch.cat(found), windows, matrices


def check(case: Case, dims: Recurrence, tolerance: float = TOLERANCE) -> None:
    right = readable(case, dims)
    found = advance(case)
    for ours, theirs in zip((found, case.states.windows, case.states.matrices), right, strict=True):
        worst = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)
        assert worst < tolerance, float(worst)


@dims_of
@pytest.mark.parametrize(("num", "dtype"), [(1, torch.float32), (5, HALF)], ids=["single", "half"])
def test_one_token_of_each_request_runs_through_its_state_in_place(
    name: str, num: int, dtype: torch.dtype
) -> None:
    check(made(DIMS[name], num, (), dtype), DIMS[name])


STEPS = (
    (0, (CHUNK,), torch.float32),
    (0, (1, 2, CHUNK - 1, CHUNK + 1), HALF),
    (3, (2 * CHUNK + 5, 7), torch.float32),
)


@pytest.mark.parametrize(
    ("name", "num_decodes", "prompts", "dtype"),
    [
        (name, *step)
        for step in STEPS
        for name in DIMS
        if not INTERPRETED or (name == "odd") == (step is STEPS[1])  # the interpreter is slow
    ],
)
def test_prompts_of_any_lengths_run_through_their_states_in_one_step(
    name: str, num_decodes: int, prompts: tuple[int, ...], dtype: torch.dtype
) -> None:
    tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
    check(made(DIMS[name], num_decodes, prompts, dtype), DIMS[name], tolerance)


@dims_of
def test_keys_that_are_all_alike_without_decay_lose_no_precision(name: str) -> None:
    """The system of a chunk is at its worst then: powers of it would overflow."""
    check(made(DIMS[name], 0, (2 * CHUNK,), torch.float32, hard=True), DIMS[name], 2e-4)


@pytest.mark.parametrize("capture", [True] if INTERPRETED else [False, True])
def test_an_engine_with_these_kernels_gets_the_tokens_of_the_readable_form(
    capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and decodes in one step, in rows that others have left; in replays with tokens and requests of
    padding, whose lengths no host knows."""
    monkeypatch.setattr(states_, "form_for", lambda dims, device: TritonDelta())
    shapes = (Shape(1, 1, 1), Shape(2, 2, 2), Shape(8, 1, 1), Shape(17, 3, 3, num_beside=1))
    monkeypatch.setattr(sizing, "buckets_for", lambda config, limits, device: shapes if capture else ())
    config = tiny_config("tiny-qwen3.5", device=DEVICE, max_batch=2, prefill_chunk=16, capture=capture)
    engine, sanitizer = build_sanitized(config)
    asked = [[(7 * place + seed) % 500 for place in range(length)] for seed, length in enumerate((21, 5, 2))]
    found = [submit(engine, prompt, max_tokens=2) for prompt in asked]
    run_all(engine)
    for prompt, one in zip(asked, found, strict=True):
        assert one.tokens == contiguous_kv.generate(engine.parts.executor.target.model, prompt, 2)
    slots = engine.parts.executor.target.forward.slots
    assert slots is not None and all(tensor.isfinite().all() for tensor in slots.tensors)
    arena = engine.parts.arena
    assert arena.tensor[arena.padding_slot].isfinite().all()
    engine.close(timeout_s=60.0)
    check_silent(sanitizer)


@dims_of
@pytest.mark.parametrize("num", [1, 37])
def test_gates_and_norm_are_those_of_the_readable_form(name: str, num: int) -> None:
    dims, dtype = DIMS[name], HALF
    torch.manual_seed(num)
    heads, values = dims.num_value_heads, dims.value_dim
    rows = (20 * torch.randn(num, 2 * heads, device=DEVICE)).to(dtype)
    rate, bias = -torch.rand(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    for ours, theirs in zip(
        triton_delta.gates(rows, rate, bias), TorchLayerOps().delta_gates(rows, rate, bias), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    found = torch.randn(num, heads, values, device=DEVICE)
    gate = torch.randn(num, heads * values + 3, device=DEVICE).to(dtype)[:, : heads * values]
    weight = torch.rand(values, device=DEVICE)
    ours = triton_delta.gated_norm(found, gate, weight, 1e-6)
    theirs = TorchLayerOps().gated_norm(found, gate, weight, 1e-6)
    assert ours.dtype == dtype and torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=1e-3)


@once
def test_rows_of_other_requests_stay_as_they_are(name: str) -> None:
    case = made(DIMS[name], 2, (70,), torch.float32)
    others = [row for row in range(len(case.states.windows)) if row not in case.rows.tolist()]
    before = [tensor[others].clone() for tensor in case.states]
    advance(case)
    for tensor, kept in zip(case.states, before, strict=True):
        assert torch.equal(tensor[others], kept)


@once
def test_a_request_gets_the_same_numbers_whatever_shares_its_step(name: str) -> None:
    """A decode and a prompt, alone and beside others."""
    dims = DIMS[name]
    case = made(dims, 3, (90, 20), torch.float32)
    copies = [tensor.clone() for tensor in case.states]
    together = advance(case)
    at = 0
    for number, length in enumerate(case.lengths):
        states = LayerStates(*(tensor.clone() for tensor in copies))
        qkv, conv, decay, beta = case.inputs
        own, row = slice(at, at + length), case.rows[number : number + 1]
        given = DeltaInputs(qkv[own], conv, decay[own], beta[own])
        alone = advance(Case(states, row, given, [length], int(number < case.num_decodes)))
        assert torch.equal(alone, together[own])
        assert torch.equal(states.matrices[row], case.states.matrices[row])
        assert torch.equal(states.windows[row], case.states.windows[row])
        at += length

"""The fused elementwise kernels agree with float64, at any width and number of rows.

With TRITON_INTERPRET=1 the same tests run on CPU tensors, in float32 and float16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the layer kernels need torch")
pytest.importorskip("triton", reason="NOT TESTED: the layer kernels need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("NOT TESTED: the layer kernels need an NVIDIA GPU, and there is none here", allow_module_level=True)

from penstock.models import triton_layers  # noqa: E402
from penstock.models.triton_layers import TritonLayerOps  # noqa: E402
from penstock.testing.mutation import mutated  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5
SHAPES = [(1, 64), (3, 576), (2, 2560)] + ([] if INTERPRETED else [(7, 9728), (32768, 2560)])

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["single", "half"])


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: Any, seed: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def norm(x: Any, weight: Any) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


def check_rms_norm(ops: TritonLayerOps, shape: tuple[int, int], dtype: Any) -> None:
    x, weight = random(*shape, dtype=dtype, seed=1), random(shape[1], dtype=dtype, seed=2)
    assert_close(ops.rms_norm(x, weight, EPS), norm(x.double(), weight))


def check_add_rms_norm(ops: TritonLayerOps, shape: tuple[int, int], dtype: Any) -> None:
    x, residual, weight = random(*shape, dtype=dtype, seed=3), random(*shape, dtype=dtype, seed=4), random(shape[1], dtype=dtype, seed=5)
    kept = residual.clone()
    out, total = ops.add_rms_norm(x, residual, weight, EPS)
    assert_close(total, x.double() + residual.double())
    assert_close(out, norm(total.double(), weight))
    assert torch.equal(residual, kept)


def check_silu_mul(ops: TritonLayerOps, shape: tuple[int, int], dtype: Any) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype, seed=6)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(ops.silu_mul(gate_up), gate * gate.sigmoid() * up)


@shapes
@dtypes
def test_rms_norm_agrees_with_float64(shape: tuple[int, int], dtype: Any) -> None:
    check_rms_norm(TritonLayerOps(), shape, dtype)


@shapes
@dtypes
def test_adding_and_normalising_agrees_with_float64_and_keeps_its_inputs(shape: tuple[int, int], dtype: Any) -> None:
    check_add_rms_norm(TritonLayerOps(), shape, dtype)


@shapes
@dtypes
def test_silu_times_up_agrees_with_float64(shape: tuple[int, int], dtype: Any) -> None:
    check_silu_mul(TritonLayerOps(), shape, dtype)


def test_no_rows_and_rows_that_are_not_adjacent_are_fine() -> None:
    ops, weight = TritonLayerOps(), torch.ones(64, device=DEVICE)
    assert ops.rms_norm(torch.empty(0, 64, device=DEVICE), weight, EPS).shape == (0, 64)
    wide = random(4, 128, dtype=torch.float32, seed=7)
    assert_close(ops.rms_norm(wide[:, :64], weight, EPS), norm(wide[:, :64].double(), weight))


FAULTS = {
    "the mean is over the padded width": (check_rms_norm, "tl.sum(x * x, 0) / WIDTH", "tl.sum(x * x, 0) / 1024"),
    "the sum before the addition is normalised": (check_add_rms_norm, "_normalised(total.to(tl.float32)", "_normalised(x"),
    "gate and up confused": (check_silu_mul, "gate / (1.0 + tl.exp(-gate)) * up", "up / (1.0 + tl.exp(-up)) * gate"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_the_comparison_red(fault: str, tmp_path: Path) -> None:
    check, old, new = FAULTS[fault]
    check(TritonLayerOps(), (2, 576), torch.float32)
    with mutated(triton_layers, old, new, tmp_path) as mutant, pytest.raises(AssertionError):
        check(mutant.TritonLayerOps(), (2, 576), torch.float32)

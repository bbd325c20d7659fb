"""The fused elementwise kernels agree with float64, at any width and number of rows.

With TRITON_INTERPRET=1 the same tests run on CPU tensors, in float32 and float16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the layer kernels need torch")
pytest.importorskip("triton", reason="NOT TESTED: the layer kernels need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: the layer kernels need an NVIDIA GPU, and there is none here", allow_module_level=True
    )

from penstock.models import triton_layers  # noqa: E402
from penstock.models.triton_layers import TritonLayerOps  # noqa: E402

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


def gelu(x: Any) -> Any:
    return torch.nn.functional.gelu(x, approximate="tanh")


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


@shapes
@dtypes
def test_rms_norm_agrees_with_float64(shape: tuple[int, int], dtype: Any) -> None:
    x, weight = random(*shape, dtype=dtype, seed=1), random(shape[1], dtype=dtype, seed=2)
    assert_close(TritonLayerOps().rms_norm(x, weight, EPS), norm(x.double(), weight))


@shapes
@dtypes
def test_adding_and_normalising_agrees_with_float64_and_keeps_its_inputs(
    shape: tuple[int, int], dtype: Any
) -> None:
    x, residual, weight = (
        random(*shape, dtype=dtype, seed=3),
        random(*shape, dtype=dtype, seed=4),
        random(shape[1], dtype=dtype, seed=5),
    )
    kept = residual.clone()
    out, total = TritonLayerOps().add_rms_norm(x, residual, weight, EPS)
    assert_close(total, x.double() + residual.double())
    assert_close(out, norm(total.double(), weight))
    assert torch.equal(residual, kept)


@shapes
@dtypes
def test_silu_times_up_agrees_with_float64(shape: tuple[int, int], dtype: Any) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype, seed=6)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(TritonLayerOps().silu_mul(gate_up), gate * gate.sigmoid() * up)


@shapes
@dtypes
def test_gelu_times_up_agrees_with_float64(shape: tuple[int, int], dtype: Any) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype, seed=6) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(TritonLayerOps().gelu_mul(gate_up), gelu(gate) * up)


def test_gelu_of_far_values_is_zero_or_the_value_itself() -> None:
    gate = torch.tensor([[-1e30, -60.0, 0.0, 60.0, 1e10]], device=DEVICE)
    found = TritonLayerOps().gelu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert found.tolist() == torch.relu(gate).tolist()


# Rows of every tile and one more, depths that divide the width and that do not, and columns that fit no tile.
GATED = [
    (1, 128, 64),
    (3, 192, 96),
    (16, 128, 64),
    (17, 128, 64),
    (33, 64, 64),
    (64, 128, 64),
    (65, 128, 64),
    (2, 100, 48),
]


@pytest.mark.parametrize(
    "shape", GATED + ([] if INTERPRETED else [(1, 2560, 9728), (20, 2560, 9728), (64, 576, 1536)]), ids=str
)
@dtypes
def test_gate_and_up_in_one_launch_agree_with_float64(shape: tuple[int, int, int], dtype: Any) -> None:
    rows, width, ffn = shape
    x, weight = (
        random(rows, width, dtype=dtype, seed=8),
        random(2 * ffn, width, dtype=dtype, seed=9) * width**-0.5,
    )
    gate, up = (x.double() @ weight.double().t()).to(dtype).double().chunk(2, dim=-1)
    assert_close(TritonLayerOps().gated(x, weight), gate * gate.sigmoid() * up)
    assert_close(TritonLayerOps().gelu_gated(x, weight), gelu(gate) * up)


def test_the_launch_that_joins_gate_and_up_is_taken_where_its_tiles_fit() -> None:
    def is_taken(rows: int, width: int, ffn: int, dtype: Any = HALF) -> bool:
        x, weight = (
            torch.empty(rows, width, dtype=dtype, device=DEVICE),
            torch.empty(2 * ffn, width, dtype=dtype, device=DEVICE),
        )
        return triton_layers._gated_tile(x, weight) is not None

    assert all(is_taken(*shape) for shape in GATED[:6])
    assert not any(is_taken(*shape) for shape in GATED[6:])
    assert not is_taken(1, 128, 64, torch.float32)


# Rows of every tile and one more, widths that make no equal shares, outputs that fit no tile.
SHARED = [
    (1, 512, 64),
    (5, 1024, 192),
    (16, 512, 64),
    (17, 512, 64),
    (33, 512, 128),
    (64, 1024, 128),
    (65, 512, 128),
    (2, 576, 64),
    (3, 512, 80),
]


@pytest.mark.parametrize(
    "shape", SHARED + ([] if INTERPRETED else [(1, 4096, 2560), (20, 9728, 2560), (64, 9728, 2560)]), ids=str
)
@dtypes
def test_a_product_in_shares_is_summed_up_by_the_norm_behind_it(
    shape: tuple[int, int, int], dtype: Any
) -> None:
    rows, width, out_width = shape
    x, weight = (
        random(rows, width, dtype=dtype, seed=10),
        random(out_width, width, dtype=dtype, seed=11) * width**-0.5,
    )
    residual, norm_weight = (
        random(rows, out_width, dtype=dtype, seed=12),
        random(out_width, dtype=dtype, seed=13),
    )
    out, total = TritonLayerOps().add_rms_norm(
        TritonLayerOps().linear_shares(x, weight), residual, norm_weight, EPS
    )
    assert_close(total, x.double() @ weight.double().t() + residual.double())
    assert_close(out, norm(total.double(), norm_weight))


def test_shares_are_made_where_tiles_fit_and_multiprocessors_would_be_idle() -> None:
    def num_shares(rows: int, width: int, out_width: int, dtype: Any = HALF) -> int:
        x, weight = (
            torch.zeros(rows, width, dtype=dtype, device=DEVICE),
            torch.zeros(out_width, width, dtype=dtype, device=DEVICE),
        )
        made = TritonLayerOps().linear_shares(x, weight)
        assert made.shape[-2:] == (rows, out_width)
        return len(made) if made.dim() == 3 else 1

    assert [num_shares(*shape) for shape in SHARED] == [triton_layers.SHARES] * 6 + [1] * 3
    assert num_shares(1, 512, 64, torch.float32) == 1
    assert num_shares(1, 512, 64 * (triton_layers.SHARES_MAX_PROGRAMS + 1)) == 1


def test_no_rows_and_rows_that_are_not_adjacent_are_fine() -> None:
    ops, weight = TritonLayerOps(), torch.ones(64, device=DEVICE)
    assert ops.rms_norm(torch.empty(0, 64, device=DEVICE), weight, EPS).shape == (0, 64)
    wide = random(4, 128, dtype=torch.float32, seed=7)
    assert_close(ops.rms_norm(wide[:, :64], weight, EPS), norm(wide[:, :64].double(), weight))
    assert ops.gated(
        torch.empty(0, 64, device=DEVICE, dtype=HALF), torch.empty(128, 64, device=DEVICE, dtype=HALF)
    ).shape == (0, 64)

"""The elementwise pieces against formulas written out in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from penstock.models.layers import SteadyLayerOps, TorchLayerOps, rope_table
from penstock.models.llama import SMOLLM2_135M, TINY_LLAMA
from penstock.models.model import ModelConfig

OPS = TorchLayerOps()


def reference_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("width", "size"), [(32, 1e-6), (576, 1.0), (8192, 1e4)])
def test_the_norm_of_one_row_is_as_exact_as_that_of_many(width: int, size: float) -> None:
    """The smallest are those that eps outweighs."""
    x, weight = (
        torch.randn(1, width, generator=torch.Generator().manual_seed(width)) * size,
        torch.rand(width) + 0.5,
    )
    expected = reference_norm(x, weight, 1e-5)
    assert torch.allclose(OPS.rms_norm(x, weight, 1e-5).double(), expected, rtol=5e-7, atol=0)
    assert torch.allclose(
        OPS.rms_norm(x.expand(2, -1), weight, 1e-5).double(), expected.expand(2, -1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("num_rows", [3, 31, 33, 300])
@pytest.mark.parametrize("width", [1, 2, 6, 33, 576])
def test_steady_ops_compute_a_row_alone_and_among_others_in_the_same_bits(width: int, num_rows: int) -> None:
    ops, x = SteadyLayerOps(), 3 * torch.randn(num_rows, width)
    weight = torch.rand(width)
    assert torch.allclose(ops.sigmoid(x).double(), x.double().sigmoid(), rtol=1e-6, atol=1e-7)
    for found, op in (
        (ops.sigmoid(x), ops.sigmoid),
        (ops.rms_norm(x, weight, 1e-5), lambda row: ops.rms_norm(row, weight, 1e-5)),
        (ops.silu_mul(x.repeat(1, 2)), lambda row: ops.silu_mul(row.repeat(1, 2))),
        (ops.gelu_mul(x.repeat(1, 2)), lambda row: ops.gelu_mul(row.repeat(1, 2))),
    ):
        assert torch.equal(found, torch.cat([op(row) for row in x.split(1)]))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_add_rms_norm_returns_the_sum_as_the_next_residual_and_keeps_its_inputs(num_rows: int) -> None:
    x, residual, weight = torch.randn(num_rows, 32), torch.randn(num_rows, 32), torch.rand(32)
    x_before, residual_before = x.clone(), residual.clone()
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual_before + x_before)
    assert torch.allclose(normed.double(), reference_norm(total, weight, 1e-5), atol=1e-6)
    assert torch.equal(x, x_before) and torch.equal(residual, residual_before)


def test_steady_gelu_of_wide_rows_has_the_same_bits_with_any_number_of_threads() -> None:
    rows, found, before = torch.randn(2, 2 * 21504), [], torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found.append(SteadyLayerOps().gelu_mul(rows))
    torch.set_num_threads(before)
    gate, up = rows.double().chunk(2, dim=-1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert torch.equal(*found) and torch.allclose(found[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_silu_mul_gates_the_second_half_with_the_first_and_keeps_its_input() -> None:
    gate_up = torch.randn(5, 64)
    before = gate_up.clone()
    gate, up = before.double().chunk(2, dim=-1)
    assert torch.allclose(OPS.silu_mul(gate_up).double(), gate * torch.sigmoid(gate) * up, atol=1e-6)
    assert torch.equal(gate_up, before)


# ------------------------------------------- where arithmetic is rounded: to the bit as in training


@pytest.mark.parametrize(
    "config",
    [SMOLLM2_135M, dataclasses.replace(TINY_LLAMA, max_position=40960, rope_theta=1e6)],
    ids=["smollm2", "40960 positions"],
)
def test_angles_are_products_of_float32_to_the_last_position(config: ModelConfig) -> None:
    """In float64 they would be others by more than rounding at the end of the context, and the same at its
    beginning."""
    half = config.head_dim // 2
    frequencies = torch.tensor([1.0]) / (
        torch.tensor(config.rope_theta) ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    )
    table = rope_table(config)
    for position in (0, 1, 17, config.max_position // 2 + 1, config.max_position - 1):
        angles = torch.tensor(float(position)) * frequencies
        torch.testing.assert_close(table[position], torch.cat((angles.cos(), angles.sin())), rtol=0, atol=0)
    exact = (config.max_position - 1) * frequencies.double()
    assert (table[-1, :half].double() - exact.cos()).abs().max() > 1e-5, (
        "the two kinds of angles are told apart here"
    )


def test_a_norm_in_bfloat16_is_rounded_before_its_weight_is_applied_and_once_more_after() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(64, 256, generator=generator).bfloat16() for _ in range(2))
    weight = weight[0]
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    twice = (normed.bfloat16().float() * weight.float()).bfloat16()
    once = (normed * weight.float()).bfloat16()
    found = OPS.rms_norm(x, weight, 1e-5)
    assert (found != twice).float().mean() < 0.002, "float32 sums may differ in their order"
    assert (once != twice).float().mean() > 0.05, "and the two ways are told apart here"


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("input_major", [False, True])
def test_a_product_is_the_same_however_its_weights_lie_and_however_many_rows_there_are(
    num_rows: int, input_major: bool
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = torch.randn(num_rows, 48, generator=generator), torch.randn(20, 48, generator=generator)
    given = weight.t().contiguous().t() if input_major else weight
    # also where the input lies otherwise
    for rows in (x, torch.randn(48, num_rows, generator=generator).t()):
        torch.testing.assert_close(
            OPS.linear(rows, given).double(), rows.double() @ weight.double().t(), rtol=1e-5, atol=1e-5
        )

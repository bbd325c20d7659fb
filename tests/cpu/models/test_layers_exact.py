"""Where arithmetic is rounded: to the bit what the weights were trained with, not only close to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.models.layers import TorchLayerOps, rope_table
from penstock.models.llama import SMOLLM2_135M, TINY_LLAMA
from penstock.models.model import ModelConfig

OPS = TorchLayerOps()


@pytest.mark.parametrize(
    "config",
    [SMOLLM2_135M, replace(TINY_LLAMA, max_position=40960, rope_theta=1e6)],
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


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 16])
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

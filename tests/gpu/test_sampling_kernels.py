"""The small kernels around sampling: noise is that of the CPU whatever its size, and what is moved arrives
whole.

With TRITON_INTERPRET=1 the same tests run on CPU tensors.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the sampling kernels need torch")
pytest.importorskip("triton", reason="NOT TESTED: the sampling kernels need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: the sampling kernels need an NVIDIA GPU, and there is none here", allow_module_level=True
    )

from penstock.engine.execution import triton_steps  # noqa: E402
from penstock.engine.execution.sampler import Allowed, gumbel_noise, token_logprobs  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if INTERPRETED else "cuda"
BLOCK, TILE = triton_steps._BLOCK, triton_steps._TILE


def random_keys(num_rows: int) -> Any:
    generator = torch.Generator().manual_seed(num_rows)
    return (
        torch.randint(-(2**31), 2**31, (2, num_rows), generator=generator, dtype=torch.int64)
        .to(torch.int32)
        .to(DEVICE)
    )


@pytest.mark.parametrize("vocab", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("num_rows", [3] if INTERPRETED else [1, 3, 257])
def test_noise_is_that_of_the_cpu_in_every_row_and_block(num_rows: int, vocab: int) -> None:
    keys = random_keys(num_rows)
    found, expected = triton_steps.gumbel_noise(keys, vocab), gumbel_noise(keys.cpu(), vocab).to(DEVICE)
    assert found.shape == (num_rows, vocab) and found.dtype == torch.float32
    # float32 rounds uniform numbers close to 1 to steps of 6e-8: there, and only there, their logarithms
    # differ by more than a few bits.
    torch.testing.assert_close(found.clamp(min=-2.5), expected.clamp(min=-2.5), rtol=1e-5, atol=2e-5)


def test_noise_takes_keys_that_do_not_lie_in_one_piece() -> None:
    """As views of the parameters of a step do."""
    keys = random_keys(4)
    assert torch.equal(
        triton_steps.gumbel_noise(keys[:, ::2], BLOCK), triton_steps.gumbel_noise(keys[:, ::2].clone(), BLOCK)
    )


@pytest.mark.parametrize("vocab", [31, 32, BLOCK + 5])
def test_forbidden_tokens_are_minus_infinity_and_other_rows_as_they_were(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    words = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=generator).to(torch.int32)
    at, found = torch.tensor([4, 1]), logits.to(DEVICE)
    triton_steps.forbid(found, at.to(DEVICE), words.to(DEVICE))
    Allowed(at, words).forbid(logits)
    assert torch.equal(found.cpu(), logits) and torch.isinf(logits).any(dim=1).tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("num", [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 7])
def test_as_many_values_are_moved_as_there_are(num: int) -> None:
    source = torch.arange(1, num + 1, dtype=torch.int32, device=DEVICE)
    room = torch.full((num + 2,), -1, dtype=torch.int32, device=DEVICE)
    triton_steps.move(room[1 : num + 1], source)
    assert room.tolist() == [-1, *range(1, num + 1), -1]


def test_what_is_moved_takes_the_type_of_where_it_goes() -> None:
    dest = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    triton_steps.move(dest, torch.arange(-2, 3, dtype=torch.int32, device=DEVICE))
    assert dest.tolist() == [-2, -1, 0, 1, 2]


@pytest.mark.parametrize("vocab", [50, 49_152, 151_936])
@pytest.mark.parametrize("num_rows", [1, 3] if INTERPRETED else [1, 3, 32, 256])
def test_equally_likely_alternatives_come_by_their_ids_in_batches_of_every_size(
    num_rows: int, vocab: int
) -> None:
    """The first is what greedy decoding chooses."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(num_rows, vocab, generator=generator)).to(torch.bfloat16).to(DEVICE)
    chosen = logits.argmax(dim=-1)
    expected = logits.cpu().float().sort(dim=-1, descending=True, stable=True).indices
    for num_top in (1, 5, 20):
        found = token_logprobs(logits, chosen, num_top).top_ids
        assert found is not None and torch.equal(found.cpu(), expected[:, :num_top])
    assert torch.equal(chosen.cpu(), expected[:, 0])

"""The kernels between the passes of a step with drafts do what the references do: which drafts are kept,
where rows begin, what a captured pass reads, and which KV is left blank.

With TRITON_INTERPRET=1 the same tests run on CPU tensors.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the kernels of drafts need torch")
pytest.importorskip("triton", reason="NOT TESTED: the kernels of drafts need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: the kernels of drafts need an NVIDIA GPU, and there is none here",
        allow_module_level=True,
    )

from penstock.engine.execution import ahead, triton_steps  # noqa: E402
from penstock.engine.execution.batch import DraftedInputs, Shape  # noqa: E402
from penstock.engine.execution.target import place_unsure  # noqa: E402
from penstock.engine.execution.sampler import kept_tokens  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if INTERPRETED else "cuda"
BLOCK = 16


@pytest.mark.parametrize("seed", range(4))
def test_the_same_drafts_are_kept(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (9,), generator=generator)
    starts = (lengths + 1).cumsum(0) - lengths - 1
    num = int((lengths + 1).sum())
    step, chosen = (
        torch.randint(0, 2, (num,), generator=generator),
        torch.randint(0, 2, (num,), generator=generator),
    )
    rows = torch.repeat_interleave(torch.randperm(9, generator=generator), lengths + 1)
    found = []
    for function, device in ((kept_tokens, "cpu"), (triton_steps.kept_tokens, DEVICE)):
        pending, rejected = (
            torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((10, 5), (10,))
        )
        given = [one.to(torch.int32).to(device) for one in (starts, lengths, step, rows)]
        starts_at, num_drafts, of_step, rows_at = given
        drafting = DraftedInputs(rows_at, rows_at, starts_at, num_drafts, of_step, 4, 0)
        tokens, lasts = function(drafting, chosen.to(device), rows_at, pending, rejected)
        found.append([one.cpu().tolist() for one in (tokens, lasts, pending, rejected)])
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(3))
def test_rows_begin_at_the_same_places(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num = 11
    kv_lens = torch.randint(20, 60, (num,), generator=generator).to(torch.int32)
    shape = Shape(num, num, num)
    ints = torch.zeros(shape.fixed_ints + 4 * num, dtype=torch.int32)
    inputs = shape.views(ints, num, 1, 0)
    inputs.kv_lens.copy_(kv_lens)
    inputs.positions.copy_(kv_lens - 1)
    inputs.table_starts.copy_(4 * torch.arange(num))
    inputs.tables.copy_(torch.randperm(4 * num, generator=generator))
    inputs.rows.copy_(torch.arange(num))
    unsure = torch.randint(0, 2, (num,), generator=generator).to(torch.int32)
    rejected = torch.randint(0, 5, (num,), generator=generator).to(torch.int32)
    found = []
    for function, device in ((place_unsure, "cpu"), (triton_steps.place_unsure, DEVICE)):
        moved = ints.clone().to(device)
        function(shape.views(moved, num, 1, 0), unsure.to(device), rejected.to(device), BLOCK)
        found.append(moved.cpu())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], ints)


@pytest.mark.parametrize("has_lasts", [True, False])
def test_a_captured_pass_reads_no_place_of_a_request_twice_with_other_tokens(has_lasts: bool) -> None:
    """A step of 7 rows has 4 requests, or 7: for a request that there is not, the pass does what it does for
    the first, drawing as that one draws. With other tokens it would write over KV of the first's."""
    tokens = torch.tensor([5, 6, -1, 7, 8, 9, -1], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([3, 3, 3, 1, 0, 2, 2], dtype=torch.int32, device=DEVICE)
    lasts = torch.tensor([1, 3, 4, 5], device=DEVICE) if has_lasts else None
    into = tuple(
        torch.full((7,), 77, dtype=dtype, device=DEVICE) for dtype in (torch.int32, torch.int64, torch.int32)
    )
    triton_steps.fill_pass(tokens, lasts, rows, into)
    assert into[0].tolist() == [5, 6, 0, 7, 8, 9, 0]
    assert into[1].tolist() == ([1, 3, 4, 5, 1, 1, 1] if has_lasts else list(range(7)))
    assert into[2].tolist() == ([3, 1, 0, 2, 3, 3, 3] if has_lasts else rows.tolist())


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("heads", [(2, 16), (3, 40)])
def test_the_same_places_are_left_blank_and_no_others(heads: tuple[int, int], num_layers: int) -> None:
    """In layers behind others of the same slots."""
    arena = torch.randn((6, 2 + num_layers, 2, BLOCK, *heads), generator=torch.Generator().manual_seed(1)).to(
        torch.bfloat16
    )
    found, at = arena.clone().to(DEVICE), torch.tensor([0, 17, 33, 95, 47], dtype=torch.int32)
    ahead.blank(arena[:, 2:], at)
    triton_steps.blank(found[:, 2:], at.to(DEVICE))
    assert torch.equal(found.cpu(), arena)
    assert int((arena.flatten(4) == 0).all(dim=-1).sum()) == len(at) * 2 * num_layers

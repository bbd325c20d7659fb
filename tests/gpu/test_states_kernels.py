"""The kernels of states in a step with drafts do what the reference does: what tokens find, and the states
behind the accepted ones.

With TRITON_INTERPRET=1 the same tests run on CPU tensors.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the kernels of states need torch")
pytest.importorskip("triton", reason="NOT TESTED: the kernels of states need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: the kernels of states need an NVIDIA GPU, and there is none here",
        allow_module_level=True,
    )

from penstock.engine.execution import triton_states  # noqa: E402
from penstock.engine.execution.state_drafts import Groups, run_groups  # noqa: E402
from penstock.models.delta_rule import DeltaInputs  # noqa: E402
from penstock.models.model import Recurrence  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if INTERPRETED else "cuda"
DIMS = {
    "uneven": Recurrence((0, 1), 1, 3, 24, 40, window=3),
    **({} if INTERPRETED else {"published": Recurrence((0, 1, 2), 16, 32, 128, 128, window=4)}),
}


@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 4))
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_tokens_find_and_states_become_the_same(dims: Recurrence, seed: int) -> None:
    """Requests with no to sixteen drafts, of which any number is rejected, and rows of padding."""
    generator = torch.Generator().manual_seed(seed)
    longest = 4 if INTERPRETED else 17
    lengths, num_slots, num_layers = [1, 5, 3, longest, 2, 1, 1], 9, len(dims.layers)
    rows = torch.tensor([3, 0, 6, 1, 4, 8, 8]).repeat_interleave(torch.tensor(lengths)).to(torch.int32)
    starts = torch.tensor([7, 30, 2, 99, 31, 0, 0])
    positions = torch.cat([torch.arange(n) + s for n, s in zip(lengths, starts, strict=True)]).to(torch.int32)
    rejected = torch.tensor([4, 2, 9, 0, 1, 0, 2, 0, 0]).to(torch.int32)  # two of rows without drafts: stale
    num = len(rows)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    windows = some(num_slots, num_layers, dims.window - 1, dims.qkv_width)
    matrices = some(num_slots, num_layers, dims.num_value_heads, dims.key_dim, dims.value_dim)
    qkv, conv = some(num_layers, num, dims.qkv_width), some(num_layers, dims.qkv_width, 1, dims.window)
    decay, beta = (some(num_layers, num, dims.num_value_heads).sigmoid() for _ in range(2))
    own = [one.to(DEVICE) for one in (windows, matrices, qkv, conv, decay, beta)]
    where = tuple(one.to(DEVICE) for one in (rows, positions, rejected))
    groups = Groups.of(rows, positions)
    assert groups.lengths.tolist() == lengths
    kept = groups._replace(lengths=(groups.lengths - rejected.long()[groups.rows]).clamp(min=1))
    groups, kept = groups.longest_first(), kept.longest_first()
    right_windows, right_matrices = windows.clone(), matrices.clone()
    for layer in range(num_layers):
        given = DeltaInputs(qkv[layer], conv[layer], -decay[layer], beta[layer])
        right = torch.empty(num, dims.num_value_heads, dims.value_dim)
        run_groups(given, groups, windows[:, layer], matrices[:, layer], dims, right)
        window, state = run_groups(given, kept, windows[:, layer], matrices[:, layer], dims, None)
        right_windows[kept.rows, layer], right_matrices[kept.rows, layer] = window, state
        ours = DeltaInputs(own[2][layer], own[3][layer], -own[4][layer], own[5][layer])
        found = torch.empty_like(right, device=DEVICE)
        states = own[0][:, layer], own[1][:, layer]
        triton_states.advance_groups(ours, states, where, dims, found)
        assert torch.equal(own[1].cpu()[:, layer], matrices[:, layer]), "states stay as they are"
        torch.testing.assert_close(found.cpu(), right, rtol=1e-4, atol=1e-4)
        triton_states.advance_groups(ours, states, where, dims, None)
    triton_states.move_windows(own[0], own[2], where)
    real = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])  # not that of padding
    assert torch.equal(own[0].cpu()[real], right_windows[real])
    torch.testing.assert_close(own[1].cpu()[real], right_matrices[real], rtol=1e-4, atol=1e-4)
    assert own[1].isfinite().all()

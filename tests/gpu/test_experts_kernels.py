"""The kernels of routed experts agree with float64, for any number of tokens and any routing.

With TRITON_INTERPRET=1 the same tests run on CPU tensors, in float32 and float16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the kernels of experts need torch")
pytest.importorskip("triton", reason="NOT TESTED: the kernels of experts need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: the kernels of experts need an NVIDIA GPU, and there is none here",
        allow_module_level=True,
    )

from penstock.models import triton_experts  # noqa: E402
from penstock.models.layers import TorchLayerOps  # noqa: E402
from penstock.models.model import Experts, GroupedRouting, Routing  # noqa: E402
from penstock.models.triton_experts import FEW, SORTED, ExpertPlan, choose, plan_for  # noqa: E402
from penstock.models.triton_layers import TritonLayerOps  # noqa: E402
from tests.support.mutation import mutated  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PLANS = {"few": FEW, **{f"{rows} rows": plan for rows, plan in SORTED.items()}}


class Size(NamedTuple):
    """Of a layer: width, width inside an expert, experts, experts of a token."""

    hidden: int
    ffn: int
    num: int
    top_k: int


TINY = Size(64, 32, 8, 2)
ODD = Size(100, 40, 6, 3)  # nothing is a power of two, and no tile fits exactly
QWEN = Size(2048, 768, 128, 8)
MANY, MOST = Size(2048, 512, 256, 8), Size(2048, 512, 512, 10)  # Qwen3.5-35B-A3B, Qwen3-Next-80B-A3B
CROWD = Size(128, 16, 200, 4)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["single", "half"])


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: Any, seed: int) -> Any:
    made = torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    return (made * shape[-1] ** -0.5 if len(shape) > 1 else made).to(dtype)


def layer(size: Size, dtype: Any, bias: dict[int, float] | None = None, normalised: bool = True) -> Experts:
    """Random experts in slots of any order. `bias`: added to the logits of experts, whatever the token."""
    hidden, ffn, num, top_k = size
    router = random(num, hidden, dtype=dtype, seed=1) * 4
    router[:, 0] = 0
    for expert, value in (bias or {}).items():
        router[expert, 0] = value
    slots = torch.randperm(num, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.int32)
    return Experts(
        router,
        random(num, 2 * ffn, hidden, dtype=dtype, seed=3),
        random(num, hidden, ffn, dtype=dtype, seed=4),
        slots,
        Routing(num, top_k, ffn, normalised),
    )


def tokens(num: int, size: Size, dtype: Any, seed: int = 5) -> Any:
    x = random(num, size.hidden, dtype=torch.float32, seed=seed) * size.hidden**0.5
    x[:, 0] = 1
    return x.to(dtype)


def expected(x: Any, experts: Experts, ids: Any) -> Any:
    """float64, with the experts `ids` of each token; the router's weights are computed anew."""
    routing, x = experts.routing, x.double()
    shares = (x @ experts.router.double().t()).softmax(dim=-1)
    weights = shares.gather(1, ids.long())
    if routing.normalised:
        weights = weights / weights.sum(dim=1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        slot = int(experts.slots[expert])
        at, rank = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[at] @ experts.gate_up[slot].double().t()).chunk(2, dim=1)
        inner = gate * gate.sigmoid() * up
        out.index_add_(0, at, inner @ experts.down[slot].double().t() * weights[at, rank, None])
    return out


def check_choice(module: Any, x: Any, experts: Experts, is_sorted: bool) -> Any:
    """The likeliest experts of each token, in order; and the order of pairs by expert."""
    num, top_k = experts.routing.num_experts, experts.routing.top_k
    choice = module.choose(x, experts, is_sorted)
    ids = choice.ids.long()
    assert ids.shape == (len(x), top_k) and bool(((ids >= 0) & (ids < num)).all())
    logits = x.double() @ experts.router.double().t()
    wanted = logits.topk(top_k, dim=1).values
    torch.testing.assert_close(logits.gather(1, ids), wanted, rtol=1e-4, atol=1e-4)
    if is_sorted:
        order = choice.order.long()
        assert torch.equal(order.sort().values, torch.arange(ids.numel(), device=x.device))
        by_expert = ids.flatten()[order]
        assert bool((by_expert.diff() >= 0).all())
        counts = torch.bincount(ids.flatten(), minlength=num).cumsum(0)
        assert torch.equal(choice.bounds[1, :num].long(), counts)
        assert bool((order.diff() > 0)[by_expert.diff() == 0].all()), "not in the order of tokens"
    return choice.ids


def check(
    num: int,
    size: Size,
    dtype: Any,
    plan: ExpertPlan | None = None,
    bias: dict[int, float] | None = None,
    normalised: bool = True,
    module: Any = triton_experts,
) -> None:
    experts, x = layer(size, dtype, bias, normalised), tokens(num, size, dtype)
    is_sorted = (plan or plan_for(num * size.top_k, size.num)).is_sorted
    ids = check_choice(module, x, experts, is_sorted)
    shared = random(num, size.hidden, dtype=dtype, seed=6)
    found = module.routed(x, experts, shared, plan)
    assert found.shape == (size.top_k + 1, num, size.hidden) and found.dtype == dtype
    wanted = expected(x, experts, ids) + shared.double()
    largest = float((found.double().sum(0) - wanted).abs().max() / wanted.abs().max())
    assert largest < TOLERANCE[dtype], largest


SHORT = [(1, TINY), (1, ODD), (5, TINY), (40, TINY), (3, ODD), (70, ODD), (9, CROWD)]
LONG = [(num, QWEN) for num in (1, 2, 7, 8, 32, 64, 65, 128, 300, 1000, 8192)]
LONG += [(num, size) for size in (MANY, MOST) for num in (1, 40, 600, 3000)]
BATCHES = SHORT + ([] if INTERPRETED else LONG)


@pytest.mark.parametrize(("num", "size"), BATCHES, ids=str)
@dtypes
def test_any_number_of_tokens_agrees_with_float64(num: int, size: Size, dtype: Any) -> None:
    if size in (QWEN, MANY, MOST) and dtype == torch.float32 and num not in (1, 300, 600):
        pytest.skip("in bfloat16")
    check(num, size, dtype, normalised=num % 2 == 0)


@pytest.mark.parametrize("plan", PLANS)
@dtypes
def test_every_tile_agrees_with_float64(plan: str, dtype: Any) -> None:
    for num, size in ((20, TINY), (50, ODD)) if INTERPRETED else ((50, ODD), (60, QWEN)):
        check(num, size, dtype, PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_all_tokens_to_one_expert_and_none_to_another_agree(plan: str) -> None:
    check(100 if plan == "128 rows" else 40, TINY, HALF, PLANS[plan], bias={3: 30.0, 5: -30.0, 0: -30.0})


def test_one_expert_for_each_token_and_all_experts_for_each_agree() -> None:
    for plan in (FEW, SORTED[16]):
        check(33, TINY._replace(top_k=1), HALF, plan, bias={7: 30.0})
        check(9, TINY._replace(top_k=8), HALF, plan)


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit; interpreted, sums are numpy's, which follow where a row is."""
    assert torch.allclose(found, wanted, atol=2e-3) if INTERPRETED else torch.equal(found, wanted)


def test_the_order_of_a_token_s_sum_does_not_depend_on_the_batch() -> None:
    """Bit for bit: among other tokens, at other places."""
    experts, x = layer(ODD, HALF), tokens(40, ODD, HALF)
    for plan in (FEW, SORTED[16]):
        whole = triton_experts.routed(x, experts, None, plan)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(7)).to(DEVICE)
        assert_same(triton_experts.routed(x[order], experts, None, plan), whole[:, order])
        assert_same(triton_experts.routed(x[3:9], experts, None, plan), whole[:, 3:9])


def test_rows_that_are_no_numbers_harm_no_others() -> None:
    """A padded step computes rows of whatever is in memory."""
    experts, x = layer(TINY, HALF), tokens(20, TINY, HALF)
    for plan in (FEW, SORTED[16]):
        clean = triton_experts.routed(x, experts, None, plan)
        bad = torch.cat((x, torch.full_like(x[:3], float("nan")), torch.full_like(x[:1], float("inf"))))
        found = triton_experts.routed(bad, experts, None, plan)
        assert_same(found[:, :20], clean)
        ids = choose(bad, experts, plan.is_sorted).ids.long()
        assert bool(((ids >= 0) & (ids < 8)).all()) and bool((ids[:, 0] != ids[:, 1]).all())


def test_shares_are_summed_up_by_the_norm_behind_them() -> None:
    ops, experts, x = TritonLayerOps(), layer(TINY, HALF), tokens(6, TINY, HALF)
    residual, shared = random(6, 64, dtype=HALF, seed=8), random(6, 64, dtype=HALF, seed=9)
    found = ops.routed(x, experts, shared)
    _, total = ops.add_rms_norm(found, residual, torch.ones(64, device=DEVICE, dtype=HALF), 1e-6)
    wanted = found.double().sum(0) + residual.double()
    torch.testing.assert_close(total.double(), wanted, rtol=TOLERANCE[HALF], atol=TOLERANCE[HALF])


def test_no_tokens_are_fine() -> None:
    assert triton_experts.routed(tokens(0, TINY, HALF), layer(TINY, HALF), None).shape == (2, 0, 64)


@pytest.mark.skipif(INTERPRETED, reason="NOT TESTED: captures need a GPU")
@pytest.mark.parametrize("num", [1, 64, 300])
def test_a_capture_routes_what_it_is_replayed_with(num: int) -> None:
    experts, x = layer(QWEN, HALF), tokens(num, QWEN, HALF)
    triton_experts.routed(x, experts, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_experts.routed(x, experts, None)
    for seed in (11, 12):
        x.copy_(tokens(num, QWEN, HALF, seed))
        graph.replay()
        assert torch.equal(found, triton_experts.routed(x, experts, None))


FAULTS = {
    "the slot of another expert": (
        "slot = tl.load(slots_ptr + expert).to(tl.int64)\n    x_at = x_ptr + (pairs",
        "slot = expert.to(tl.int64)\n    x_at = x_ptr + (pairs",
    ),
    "up takes gate's weights": ("gate_at + FFN * WIDTH + start", "gate_at + start"),
    "a rank's share in another's place": ("(pairs % TOP_K).to(tl.int64)", "(pairs % 1).to(tl.int64)"),
    "the weights of another pair": ("tl.load(shares_ptr + pairs)", "tl.load(shares_ptr + pairs * 0)"),
    "the same expert twice": ("keys = tl.where(keys == best, -0x8000000000000000, keys)", "keys = keys + 0"),
    "tiles of an expert confused": ("(tile - behind + tiles) * TILE_ROWS", "(tile - behind + tiles) * 0"),
    "places of an earlier tile": ("tl.where(tiles < tile, counts, 0)", "tl.where(tiles < 0, counts, 0)"),
    "pairs left out": ("(num_pairs + experts.routing.num_experts * (rows - 1)) // rows", "num_pairs // rows"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_the_comparison_red(fault: str, tmp_path: Path) -> None:
    check(70, TINY, torch.float32, SORTED[16])
    with mutated(triton_experts, *FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError):
        check(70, TINY, torch.float32, SORTED[16], module=mutant)


# By name: experts, experts of a token, groups, groups that may be chosen from.
GROUPS = {"one": (8, 2, 1, 1), "two of four": (8, 3, 4, 2), "odd": (6, 2, 3, 1), "deepseek": (256, 8, 8, 4)}


def grouped(name: str, normalised: bool = True) -> Experts:
    num, top_k, groups, top_groups = GROUPS[name]
    routing = GroupedRouting(num, top_k, 32, normalised, num_groups=groups, top_groups=top_groups, scale=1.7)
    bias = random(num, dtype=torch.float32, seed=14) * 0.3
    return layer(Size(64, 32, num, top_k), torch.float32)._replace(routing=routing, bias=bias)


def check_grouped(name: str, num: int, module: Any = triton_experts, normalised: bool = True) -> None:
    """Against the definition in float64, token by token; scores are far enough apart."""
    experts, x = grouped(name, normalised), random(num, 64, dtype=torch.float32, seed=15) * 8
    size = experts.routing.num_experts // experts.routing.num_groups
    shares = (x.double() @ experts.router.double().t()).sigmoid()
    choice = module.choose(x, experts, True)
    for token, wanted in enumerate((shares + experts.bias.double()).tolist()):
        groups = [sorted(wanted[at : at + size])[-2:] for at in range(0, len(wanted), size)]
        best = sorted(range(len(groups)), key=lambda one: -sum(groups[one]))[: experts.routing.top_groups]
        allowed = [one for one in range(len(wanted)) if one // size in best]
        ids = sorted(allowed, key=lambda one: -wanted[one])[: experts.routing.top_k]
        assert choice.ids[token].tolist() == ids
        weights = shares[token, ids]
        weights = 1.7 * (weights / weights.sum() if normalised else weights)
        torch.testing.assert_close(choice.weights[token].double(), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("num", [1, 9])
def test_experts_of_the_best_groups_are_chosen_with_their_bias_and_weighed_without(
    name: str, num: int
) -> None:
    check_grouped(name, num, normalised=num == 9)


def test_a_layer_with_groups_agrees_with_the_same_on_a_cpu() -> None:
    for num in (1, 20):
        experts, x = grouped("two of four"), random(num, 64, dtype=torch.float32, seed=16) * 8
        on_cpu = experts._replace(
            router=experts.router.cpu(),
            gate_up=experts.gate_up.cpu(),
            down=experts.down.cpu(),
            slots=experts.slots.cpu(),
            bias=experts.bias.cpu(),
        )
        wanted = TorchLayerOps().routed(x.cpu(), on_cpu)
        torch.testing.assert_close(
            TritonLayerOps().routed(x, experts).sum(0).cpu(), wanted, rtol=1e-4, atol=1e-4
        )


def test_rows_that_are_no_numbers_choose_different_experts_of_groups_that_there_are() -> None:
    x = torch.full((3, 64), float("nan"), device=DEVICE)
    x[1], x[2] = float("inf"), -3e38
    for name in GROUPS:
        ids = choose(x, grouped(name), True).ids
        assert all(
            len(set(row)) == len(row) and 0 <= min(row) <= max(row) < GROUPS[name][0] for row in ids.tolist()
        )


GROUP_FAULTS = {
    "chosen without the bias": (
        "wanted = shares + tl.load(bias_ptr",
        "wanted = shares + 0 * tl.load(bias_ptr",
    ),
    "weighed with the bias": ("tl.where(is_best, shares, 0.0)", "tl.where(is_best, wanted, 0.0)"),
    "a group by its best alone": ("first + second", "first"),
    "every group": ("tl.where(is_in == 1, wanted, -3.3e38)", "wanted"),
    "not scaled": ("weights * scale", "weights"),
}


@pytest.mark.parametrize("fault", GROUP_FAULTS)
def test_a_fault_in_the_choice_from_groups_turns_the_comparison_red(fault: str, tmp_path: Path) -> None:
    check_grouped("two of four", 40)
    with mutated(triton_experts, *GROUP_FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError):
        check_grouped("two of four", 40, mutant)


PAIR_FAULTS = {
    "another expert": ("tl.load(ids_ptr + tl.program_id(1))", "tl.load(ids_ptr)"),
    "unweighted": ("* tl.load(shares_ptr + pair)", "* 1.0"),
    "up takes gate's weights": ("tl.load(gate_at + FFN * WIDTH, mask", "tl.load(gate_at, mask"),
}


@pytest.mark.parametrize("fault", PAIR_FAULTS)
def test_a_fault_in_the_products_of_a_single_token_turns_the_comparison_red(
    fault: str, tmp_path: Path
) -> None:
    check(1, TINY, torch.float32)
    with mutated(triton_experts, *PAIR_FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError):
        check(1, TINY, torch.float32, module=mutant)


def test_a_fault_among_few_pairs_turns_the_comparison_red(tmp_path: Path) -> None:
    for old, new in (
        ("before % TILE_ROWS != 0", "before != 0"),
        ("wanted < tl.sum(same, 0)", "wanted < tl.sum(same, 0) - 1"),
    ):
        with mutated(triton_experts, old, new, tmp_path) as mutant, pytest.raises(AssertionError):
            check(70, TINY, torch.float32, FEW, module=mutant)


@pytest.mark.parametrize("num", [2, 20, 50])
def test_terms_may_be_filled_in_by_several_calls(num: int) -> None:
    """Bit for bit what one call fills in: an expert without a slot is left out until it has one."""
    experts, x, ops = layer(TINY, HALF), tokens(num, TINY, HALF), TritonLayerOps()
    shared = random(num, TINY.hidden, dtype=HALF, seed=6)
    wanted = ops.routed(x, experts, shared)
    chosen = ops.choose(x, experts)
    terms = ops.terms(x, experts, has_shared=True)
    for some in ([0, 3], [1], [2, 4, 5, 6, 7]):
        slots = torch.full_like(experts.slots, -1)
        slots[some] = experts.slots[some]
        ops.add_terms(x, experts._replace(slots=slots), chosen, terms)
    assert torch.equal(ops.summed(terms, chosen, experts, shared), wanted)

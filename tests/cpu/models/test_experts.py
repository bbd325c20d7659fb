"""Routed experts on a CPU: the sum that a token gets, the forms of their weights, files that do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import ModelSource, WeightsName
from penstock.errors import ModelError
from penstock.models.decoder import Decoder
from penstock.models.experts import RoutedLayer
from penstock.models.forms import Matrix
from penstock.models.layers import SteadyLayerOps, TorchLayerOps
from penstock.models.loader import inspect_model
from penstock.models.model import Experts, GroupedRouting, ModelConfig, Routing
from penstock.models.qwen3_moe import QWEN3_30B_A3B
from penstock.models.registry import layout, parse_config
from penstock.models.weights import weights_digest
from penstock.testing.tiny_models import (
    TINY_MIXTRAL,
    TINY_QWEN2_MOE,
    TINY_QWEN3_MOE,
    config_json,
    tiny_tensors,
    write_tiny_model,
)
from tests.support.contiguous_kv import ContiguousKv, forward
from tests.support.loading import load_on_cpu
from tests.support.tiny_gguf import write_tiny_gguf

IDS = torch.randint(3, 512, (60,), generator=torch.Generator().manual_seed(5)).tolist()
MODELS = {"qwen3": TINY_QWEN3_MOE, "qwen2": TINY_QWEN2_MOE, "mixtral": TINY_MIXTRAL}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def load(path: Path, weights: WeightsName = "auto", dtype: torch.dtype = torch.float32) -> Decoder:
    return load_on_cpu(ModelSource(str(path), weights=weights), dtype).model


def logits(model: Decoder) -> Tensor:
    return forward(model, ContiguousKv(model.config, model.rope), IDS)


def random_experts(routing: Routing, hidden: int) -> Experts:
    """In slots of another order, and more slots than experts."""
    generator = torch.Generator().manual_seed(1)
    num_slots, ffn = routing.num_experts + 2, routing.ffn

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    slots = torch.randperm(num_slots, generator=generator)[: routing.num_experts].int()
    stacks = some(num_slots, 2 * ffn, hidden), some(num_slots, hidden, ffn)
    return Experts(4 * some(routing.num_experts, hidden), *stacks, slots, routing)


def test_a_token_s_choice_from_groups_has_the_same_bits_among_others() -> None:
    routing = GroupedRouting(30, 3, 8, True, num_groups=3, top_groups=2, scale=1.5)
    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(37, 30, generator=generator), torch.randn(30, generator=generator)
    weights, ids = routing.choose(logits, bias)
    for at in range(37):
        weight, id = routing.choose(logits[at : at + 1], bias)
        assert torch.equal(weight[0], weights[at]) and torch.equal(id[0], ids[at])


def by_token(x: Tensor, experts: Experts) -> Tensor:
    """One token and one expert after another, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, token in zip(out, x.double(), strict=True):
        shares = torch.softmax(experts.router.double() @ token, dim=0)
        best = sorted(range(len(shares)), key=lambda one: -float(shares[one]))[: experts.routing.top_k]
        total = sum(float(shares[one]) for one in best) if experts.routing.normalised else 1.0
        for one in best:
            slot = int(experts.slots[one])
            gate, up = (experts.gate_up[slot].double() @ token).chunk(2)
            inner = gate * torch.sigmoid(gate) * up
            row += float(shares[one]) / total * (experts.down[slot].double() @ inner)
    return out


@pytest.mark.parametrize("ops", [TorchLayerOps(), SteadyLayerOps()], ids=["plain", "steady"])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_token_gets_the_weighted_sum_of_its_experts_and_what_is_shared(
    ops: TorchLayerOps, normalised: bool
) -> None:
    experts = random_experts(Routing(7, top_k=3, ffn=20, normalised=normalised), hidden=24)
    for num_tokens in (1, 2, 33):
        x = torch.randn(num_tokens, 24, generator=torch.Generator().manual_seed(num_tokens))
        expected = by_token(x, experts)
        torch.testing.assert_close(ops.routed(x, experts).double(), expected, rtol=1e-5, atol=1e-5)
        found = ops.routed(x, experts, shared=x)
        torch.testing.assert_close(found.double(), expected + x.double(), rtol=1e-5, atol=1e-5)


def test_an_expert_that_no_token_hits_is_not_read() -> None:
    experts = random_experts(Routing(4, top_k=2, ffn=20, normalised=True), hidden=24)
    experts.router[2] = 0.0
    experts.router[2, 0] = -100.0
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 1.0
    expected = TorchLayerOps().routed(x, experts)
    slot = int(experts.slots[2])
    experts.gate_up[slot], experts.down[slot] = torch.nan, torch.nan
    assert torch.equal(TorchLayerOps().routed(x, experts), expected)


# ------------------------------------------------------------------------------------------------------ forms


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("weights", "most"), [("bfloat16", 0.05), ("int8", 0.08), ("int4", 0.05)])
def test_experts_in_a_narrow_form_differ_by_rounding_alone(
    name: str, weights: WeightsName, most: float, tmp_path: Path
) -> None:
    """By the median, as a token may be routed another way. Of a file in 4 bits, which that form has
    unchanged."""
    config = MODELS[name]
    assert config.routing is not None
    if name == "qwen2":  # GGUF has no dense layers between those with experts
        config = dataclasses.replace(config, routing=dataclasses.replace(config.routing, dense_layers=()))
    file = write_tiny_gguf(tmp_path / "a.gguf", config, encoding_of=of_4_bits)
    exact, found = logits(load(file)), logits(load(file, weights))
    assert off(found, exact) < most
    layer = load(file, weights).layers[0]
    assert isinstance(layer, RoutedLayer) and isinstance(layer.experts.router, Matrix)
    assert layer.experts.router.wide is not None and layer.experts.router.wide.dtype == torch.float32
    assert layer.experts.gate_up[0].is_in_4_bits == (weights == "int4")


def off(found: Tensor, exact: Tensor) -> float:
    """Relative error of a token's logits."""
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).median())


def of_4_bits(name: str) -> str:
    return "Q4_1" if ".layers." in name else "Q8_0"


def test_weights_in_bfloat16_choose_by_logits_in_float32(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", TINY_QWEN3_MOE)
    exact, found = logits(load(directory)), logits(load(directory, dtype=torch.bfloat16)).float()
    assert off(found, exact) < 0.05


# ----------------------------------------------------------------------------------------------- what is read


def test_the_layout_of_qwen3_30b_a3b_has_its_thirty_billion_parameters() -> None:
    assert sum(weight.numel for weight in layout(QWEN3_30B_A3B)) == 30_532_122_624
    shapes = {weight.name: weight.shape for weight in layout(QWEN3_30B_A3B)}
    assert shapes["layers.47.experts_gate_up"] == (128, 1536, 2048)
    assert shapes["layers.47.experts_down"] == (128, 2048, 768)


@pytest.mark.parametrize("name", MODELS)
def test_an_expert_s_gate_lies_before_its_up_in_its_slot(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    directory = write_tiny_model(tmp_path / "model", config, shards=3)
    model, tensors = load(directory), tiny_tensors(config)
    assert inspect_model(ModelSource(str(directory))).num_parameters == sum(
        map(Tensor.numel, tensors.values())
    )
    layer, routing = model.layers[-1], config.routing
    assert isinstance(layer, RoutedLayer) and routing is not None
    assert [type(one) is RoutedLayer for one in model.layers] == [
        i not in routing.dense_layers for i in range(config.num_layers)
    ]
    prefix = f"model.layers.{config.num_layers - 1}"
    named = ("block_sparse_moe.experts", "w1", "w3", "w2") if name == "mixtral" else QWEN
    for expert, slot in enumerate(layer.experts.slots.tolist()):
        gate, up, down = (tensors[f"{prefix}.{named[0]}.{expert}.{part}.weight"] for part in named[1:])
        assert torch.equal(layer.experts.gate_up[slot], torch.cat((gate, up)))
        assert torch.equal(layer.experts.down[slot], down)


QWEN = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
UP = "model.layers.1.mlp.experts.5.up_proj.weight"


def changed(**fields: Any) -> ModelConfig:
    assert TINY_QWEN3_MOE.routing is not None
    return dataclasses.replace(TINY_QWEN3_MOE, routing=dataclasses.replace(TINY_QWEN3_MOE.routing, **fields))


def test_experts_that_do_not_fit_the_config_are_one_line_that_names_them(tmp_path: Path) -> None:
    whole = tiny_tensors(TINY_QWEN3_MOE)
    cases = [
        (TINY_QWEN3_MOE, {n: t for n, t in whole.items() if n != UP}, f"missing tensors: {UP}$"),
        (
            TINY_QWEN3_MOE,
            {**whole, UP: torch.zeros(48, 64)},
            rf"misshapen tensors: {UP} is \[48, 64\], expected \[32, 64\]$",
        ),
        (changed(num_experts=9), whole, r"missing tensors: model\.layers\.0\.mlp\.experts\.8\."),
        (changed(num_experts=7), whole, r"unexpected tensors: model\.layers\.0\.mlp\.experts\.7\."),
        (changed(dense_layers=(1,)), whole, r"missing tensors: model\.layers\.1\.mlp\.gate_proj"),
    ]
    for number, (config, tensors, message) in enumerate(cases):
        directory = write_tiny_model(tmp_path / str(number), config, tensors=tensors)
        with pytest.raises(ModelError, match=message) as error:
            load(directory)
        assert "\n" not in str(error.value)


def test_a_gguf_file_whose_experts_are_not_as_many_as_it_says_is_refused(tmp_path: Path) -> None:
    data = write_tiny_gguf(tmp_path / "a.gguf", TINY_QWEN3_MOE).read_bytes()
    key = b"qwen3moe.expert_count"
    at = data.index(key) + len(key) + 4  # behind the type
    said = {9: r"missing tensors: .*experts\.8\.", 7: r"unexpected tensors: .*exps\.weight\[7\]"}
    for num, message in said.items():
        (tmp_path / "a.gguf").write_bytes(data[:at] + num.to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(ModelError, match=message):
            load(tmp_path / "a.gguf")


REFUSED = [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
    ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
    ({"num_experts": None}, "has no num_experts"),
    ({"num_experts": "8"}, "num_experts must be a positive whole number"),
    ({"num_experts": 10**6}, "num_experts is 1000000"),
    ({"num_local_experts": 4}, "num_experts and num_local_experts differ"),
    ({"moe_intermediate_size": -1}, "moe_intermediate_size must be"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
    ({"mlp_only_layers": [3]}, "mlp_only_layers must be layers below 3"),
    ({"mlp_only_layers": [0, 1, 2]}, "no layer has experts"),
    ({"decoder_sparse_step": 4}, "no layer has experts"),
    ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
]


def test_what_a_config_says_of_experts_is_checked() -> None:
    raw = config_json(TINY_QWEN3_MOE)
    for change, message in REFUSED:
        with pytest.raises(ModelError, match=message):
            parse_config({**raw, **change}, "config.json")
    del raw["num_experts"]
    assert parse_config({**raw, "num_local_experts": 8}, "config.json").routing == TINY_QWEN3_MOE.routing
    spaced = parse_config({**raw, "num_experts": 8, "decoder_sparse_step": 2}, "config.json").routing
    assert spaced is not None and spaced.dense_layers == (0, 2)


def test_how_tokens_are_routed_is_part_of_the_identity() -> None:
    configs = (TINY_QWEN3_MOE, changed(top_k=3), changed(normalised=False), changed(dense_layers=(1,)))
    assert len({weights_digest(config, torch.float32, []) for config in configs}) == len(configs)


def test_terms_may_be_filled_in_by_several_calls() -> None:
    """Bit for bit what one call fills in: an expert without a slot is left out until it has one."""
    ops, experts = TorchLayerOps(), random_experts(Routing(7, top_k=3, ffn=20, normalised=True), hidden=24)
    x = torch.randn(33, 24, generator=torch.Generator().manual_seed(3))
    chosen = ops.choose(x, experts)
    terms = ops.terms(x, experts, has_shared=False).fill_(torch.nan)
    for some in ([0, 3], [1], [2, 4, 5, 6]):
        slots = torch.full((7,), -1, dtype=torch.int32)
        slots[some] = experts.slots[some]
        ops.add_terms(x, experts._replace(slots=slots), chosen, terms)
    assert torch.equal(ops.summed(terms, chosen, experts, None), ops.routed(x, experts))

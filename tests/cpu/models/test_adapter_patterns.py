"""Which module an adapter's names stand for: whole endings, the first key that matches, rank and scale of
each module by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.models.adapters import AdapterConfig, parse_adapter_config

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
]


def config(**fields: Any) -> AdapterConfig:
    return parse_adapter_config(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **fields}, "here"
    )


def targeted(**fields: Any) -> list[str]:
    return [module.removeprefix("model.layers.") for module in MODULES if config(**fields).targets(module)]


def test_a_name_is_a_whole_ending_of_a_module() -> None:
    """Not any ending: layer 11 does not end in layer 1, nor up_proj in proj."""
    assert targeted(target_modules=["q_proj"]) == [
        "0.self_attn.q_proj",
        "1.self_attn.q_proj",
        "11.self_attn.q_proj",
    ]
    assert targeted(target_modules=["1.mlp.up_proj"]) == ["1.mlp.up_proj"]
    assert targeted(target_modules=["model.layers.11.mlp.up_proj"]) == ["11.mlp.up_proj"]
    assert targeted(target_modules=["proj", "p_proj", "attn.q_proj"]) == []


def test_what_is_excluded_is_not_adapted_though_it_is_named() -> None:
    assert targeted(target_modules=["q_proj", "up_proj"], exclude_modules=["1.mlp.up_proj",
    "layers.0.self_attn.q_proj"]) == [
        "0.mlp.up_proj", "1.self_attn.q_proj", "11.self_attn.q_proj", "11.mlp.up_proj",
    ]  # fmt: skip
    assert targeted(target_modules="all-linear", exclude_modules=["o_proj", "up_proj"]) == targeted(
        target_modules=["q_proj"]
    )


@pytest.mark.parametrize("written", ["all-linear", "All-Linear", "ALL-LINEAR"])
def test_all_linear_modules_are_targeted_however_it_is_written(written: str) -> None:
    """As PEFT reads it. Taken for a regular expression it would say nothing about which tensors are
    missing."""
    adapter = config(target_modules=written)
    assert [adapter.targets(module) for module in MODULES] == [True] * len(MODULES)
    assert adapter.targets("lm_head") is False and adapter.targets("model.embed_tokens") is False


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_of_several_patterns_the_first_that_matches_counts(field: str) -> None:
    keys = ("1.self_attn.q_proj", "q_proj", "self_attn.q_proj", "up_proj")
    adapter = config(**{field: {key: number for number, key in enumerate(keys, 2)}})
    found = {
        module: getattr(adapter, "rank_of" if field == "rank_pattern" else "scale_of")(module)
        for module in MODULES
    }
    of = (lambda number: number) if field == "rank_pattern" else (lambda number: number / 8)
    assert found["model.layers.1.self_attn.q_proj"] == of(2)
    assert found["model.layers.0.self_attn.q_proj"] == found["model.layers.11.self_attn.q_proj"] == of(3)
    assert found["model.layers.1.mlp.up_proj"] == of(5)
    assert found["model.layers.1.self_attn.o_proj"] == (8 if field == "rank_pattern" else 2.0), (
        "no pattern: the adapter's own"
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_a_scale_is_of_the_modules_own_rank_and_alpha(rslora: bool) -> None:
    adapter = config(use_rslora=rslora, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 3, "up_proj": 5})
    divided = math.sqrt if rslora else float
    for name, expected in (
        ("q_proj", 3 / divided(4)),
        ("up_proj", 5 / divided(8)),
        ("o_proj", 16 / divided(8)),
    ):
        assert adapter.scale_of(f"model.layers.0.self_attn.{name}") == pytest.approx(expected)


def test_a_key_that_begins_with_a_caret_is_the_whole_name() -> None:
    adapter = config(rank_pattern={"^model.layers.1.mlp.up_proj": 2, "^mlp.up_proj": 3, "^up_proj$": 4})
    ranks = {module: adapter.rank_of(module) for module in MODULES if module.endswith("up_proj")}
    assert ranks == {
        "model.layers.0.mlp.up_proj": 8,
        "model.layers.1.mlp.up_proj": 2,
        "model.layers.11.mlp.up_proj": 8,
    }

"""What a config.json must say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli import make_parser
from penstock.errors import ModelError
from penstock.models.llama import TINY_LLAMA
from penstock.models.qwen3 import TINY_QWEN3
from penstock.models.registry import ARCHITECTURES, BUILT_IN, parse_config
from penstock.testing.tiny_models import config_json


@pytest.mark.parametrize("config", BUILT_IN.values(), ids=BUILT_IN)
def test_a_config_survives_the_way_through_json(config: Any) -> None:
    parsed = parse_config(config_json(config), "config.json")
    assert parsed.eos_ids == (2,)
    assert {f: getattr(parsed, f) for f in parsed.__slots__ if f != "eos_ids"} == {
        f: getattr(config, f) for f in config.__slots__ if f != "eos_ids"
    }


def test_help_and_documents_name_every_architecture_and_built_in_model() -> None:
    models = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text()
    commands = next(action.choices for action in make_parser()._actions if action.choices)
    text = next(action.help for action in commands["generate"]._actions if "--model" in action.option_strings)
    assert [name for name in BUILT_IN if name not in text or f"`{name}`" not in models] == []
    assert [
        architecture.name for architecture in ARCHITECTURES if f"`{architecture.config_name}`" not in models
    ] == []


MISTRAL, QWEN2, PHI3 = ({"architectures": [f"{name}ForCausalLM"]} for name in ("Mistral", "Qwen2", "Phi3"))


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": kind, **fields}}


# what a config states -> what the refusal says
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**MISTRAL, "attention_bias": True}, "attention_bias is true, but MistralForCausalLM"),
    ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    ({"rope_scaling": {"rope_type": "mrope", "factor": 8.0}}, "rope scaling of type 'mrope'"),
    ({"rope_parameters": {"full_attention": {"a": 1}}}, "rope scaling with full_attention"),
    ({**rope("linear", factor=2.0), "rope_parameters": {"factor": 4.0}}, "do not agree on factor"),
    (rope("yarn"), "has no factor"),
    (rope("llama3", factor=8.0), "has no low_freq_factor"),
    (
        rope("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0),
        "must be above low_freq_factor",
    ),
    (rope("yarn", factor=8.0, beta_fast=1, beta_slow=2), "beta_fast 1.0 must be above beta_slow 2.0"),
    (rope("longrope", short_factor=[1.0], long_factor=[1.0] * 8), "short_factor must be a list of 8 numbers"),
    (rope("linear", factor=-2), "factor must be a positive number"),
    (rope("linear", factor=1e6), "reaches 2048000000 positions"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({**MISTRAL, "layer_types": ["chunked_attention"] * 2}, "layer_types must be full_attention or"),
    ({**MISTRAL, "sliding_window": -1}, "sliding_window must be a positive"),
    ({**PHI3, "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"sliding_window": 4096}, "sliding-window"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"architectures": ["Mamba"]}, "Mamba is not supported.*LlamaForCausalLM, MistralForCausalLM, Mixtral"),
    ({"architectures": None}, "does not name its architecture"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, got 0"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000"),
    ({"intermediate_size": None}, "has no intermediate_size"),
    ({"num_key_value_heads": 3}, "not a multiple"),
    ({"head_dim": 17}, "odd"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a positive number"),
    ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
]


def test_what_would_change_the_mathematics_or_is_malformed_is_refused_by_name() -> None:
    for change, message in REFUSED:
        with pytest.raises(ModelError, match=message):
            parse_config({**config_json(TINY_LLAMA), **change}, "config.json")


def test_plain_rope_may_be_spelled_in_both_ways() -> None:
    plain = config_json(TINY_LLAMA)
    del plain["rope_theta"]
    for rope in (
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
    ):
        assert parse_config({**plain, **rope}, "config.json").rope_theta == 5e5


def test_a_qwen3_config_may_name_a_window_that_it_does_not_use() -> None:
    for unused in (
        {"sliding_window": 40, "max_window_layers": 0, "use_sliding_window": False},
        {"sliding_window": 40, "max_window_layers": 0},
        {"layer_types": ["full_attention"] * 3},
        {"sliding_window": 40, "max_window_layers": 3, "use_sliding_window": True},
        {"sliding_window": 2048, "max_window_layers": 0, "use_sliding_window": True},  # no context is longer
    ):
        assert parse_config({**config_json(TINY_QWEN3), **unused}, "config.json").windows == ()


def test_a_config_says_which_layers_have_a_window() -> None:
    def windows(name: str, **fields: Any) -> tuple[int, ...]:
        raw = {**config_json(TINY_QWEN3), "architectures": [name], "max_position_embeddings": 8192, **fields}
        return parse_config(raw, "config.json").windows

    assert windows("MistralForCausalLM") == (4096,) * 3, (
        "as transformers takes it where a config does not say"
    )
    assert windows("MistralForCausalLM", sliding_window=None) == ()
    assert windows("Phi3ForCausalLM", sliding_window=2047) == (2047,) * 3
    assert windows("Phi3ForCausalLM") == windows("LlamaForCausalLM", sliding_window=None) == ()
    on = {"use_sliding_window": True, "sliding_window": 64}
    assert windows("Qwen2ForCausalLM", **on) == () and windows(
        "Qwen2ForCausalLM", **on, max_window_layers=1
    ) == (0, 64, 64)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("Qwen3ForCausalLM", **on, layer_types=kinds) == (64, 0, 64)


def test_llama_derives_the_head_size_and_kv_heads_that_old_configs_leave_out() -> None:
    raw = config_json(TINY_LLAMA)
    del raw["head_dim"], raw["num_key_value_heads"]
    config = parse_config(raw, "config.json")
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


@pytest.mark.parametrize(("field", "most"), [("num_hidden_layers", 4096), ("vocab_size", 1 << 24)])
def test_a_number_is_believed_up_to_what_can_be_right(field: str, most: int) -> None:
    parse_config({**config_json(TINY_LLAMA), field: most}, "config.json")
    with pytest.raises(ModelError, match=f"{field} is {most + 1}; more than {most} cannot be right"):
        parse_config({**config_json(TINY_LLAMA), field: most + 1}, "config.json")


def stated(model: str, sizes: tuple[int, ...], context: int, **fields: Any) -> dict[str, Any]:
    counts = (f"num_{kind}" for kind in ("hidden_layers", "attention_heads", "key_value_heads"))
    names = ("hidden_size", "intermediate_size", *counts, "vocab_size")
    unused = {"attention_dropout": 0.0, "use_cache": True, "torch_dtype": "bfloat16", "pretraining_tp": 1}
    usual = {"max_position_embeddings": context, "hidden_act": "silu", "rms_norm_eps": 1e-5, **unused}
    known = dict(zip(names, sizes, strict=True))
    return {"architectures": [f"{model}ForCausalLM"], **known, **usual, **fields}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}
PHI3_MINI, LONG_PHI = (3072, 8192, 32, 32, 32, 32064), {"original_max_position_embeddings": 4096}
# What published models state, as far as it matters, and what follows: context, positions, head size, window,
# scheme.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "Llama-3.1-8B": (
        stated("Llama", (4096, 14336, 32, 32, 8, 128256), 131072, rope_scaling=LLAMA3, rope_theta=5e5),
        (131072, 131072, 128, 0, "llama3"),
    ),
    "deepseek-coder-6.7b": (
        stated("Llama", (4096, 11008, 32, 32, 32, 32256), 16384, **rope("linear", factor=4.0)),
        (16384, 65536, 128, 0, "linear"),
    ),
    "Mistral-7B-v0.1": (
        stated("Mistral", (4096, 14336, 32, 32, 8, 32000), 32768, sliding_window=4096),
        (32768, 32768, 128, 4096, None),
    ),
    "Qwen2.5-7B": (
        stated("Qwen2", (3584, 18944, 28, 28, 4, 152064), 32768, sliding_window=131072),
        (32768, 32768, 128, 0, None),
    ),
    "Qwen3-8B with yarn": (
        stated("Qwen3", (4096, 12288, 36, 32, 8, 151936), 40960, head_dim=128, rope_scaling=YARN),
        (131072, 131072, 128, 0, "yarn"),
    ),
    "Phi-3-mini-4k": (stated("Phi3", PHI3_MINI, 4096, sliding_window=2047), (4096, 4096, 96, 2047, None)),
    "Phi-4-mini": (
        stated("Phi3", (3072, 8192, 32, 24, 8, 200064), 131072, **LONG_PHI, rope_scaling=LONG, mlp_bias=False)
        | {"partial_rotary_factor": 0.75, "lm_head_bias": False, "tie_word_embeddings": True},
        (131072, 131072, 128, 0, "longrope"),
    ),
}


def test_the_configs_of_published_models_are_understood() -> None:
    for name, (raw, expected) in PUBLISHED.items():
        config = parse_config(raw, "config.json")
        scheme = None if config.rope_scaling is None else config.rope_scaling.kind
        window = max(config.windows, default=0)
        assert (config.default_len, config.max_position, config.head_dim, window, scheme) == expected, name
        assert config.rotary_dim == (96 if name == "Phi-4-mini" else 0)
        assert config.qkv_bias == (name == "Qwen2.5-7B")


@pytest.mark.parametrize(("outside", "trained"), [(None, 32768), (16384, 16384)])
def test_a_trained_context_that_is_stated_twice_is_the_one_outside_the_scaling(
    outside: int | None, trained: int
) -> None:
    raw, _ = PUBLISHED["Qwen3-8B with yarn"]
    scaling = parse_config({**raw, "original_max_position_embeddings": outside}, "config.json").rope_scaling
    assert scaling is not None and scaling.trained_len == trained


def test_what_the_newer_spelling_of_positions_says_counts_before_what_stands_outside() -> None:
    raw, _ = PUBLISHED["Phi-4-mini"]
    for inside, theta, rotary_dim in (
        ({}, 1e4, 96),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, 5e5, 64),
    ):
        given = {
            **raw,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", **inside},
            "rope_theta": 1e4,
        }
        config = parse_config(given, "config.json")
        assert (config.rope_theta, config.rotary_dim) == (theta, rotary_dim)

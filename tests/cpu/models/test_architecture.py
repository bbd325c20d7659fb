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


def test_no_two_architectures_share_a_name() -> None:
    for names in (
        [a.name for a in ARCHITECTURES],
        [a.config_name for a in ARCHITECTURES],
        [n for a in ARCHITECTURES for n in a.presets],
    ):
        assert len(set(names)) == len(names)
    assert all(config.architecture == a.name for a in ARCHITECTURES for config in a.presets.values())


MISTRAL = {"architectures": ["MistralForCausalLM"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention_bias": ({**MISTRAL, "attention_bias": True}, "attention_bias is true, but MistralForCausalLM"),
    "mlp_bias": (
        {"architectures": ["Qwen2ForCausalLM"], "mlp_bias": True},
        "mlp_bias is true, but Qwen2ForCausalLM",
    ),
    "a textual bias": ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    "unknown rope_scaling": (
        {"rope_scaling": {"rope_type": "mrope", "factor": 8.0}},
        "rope scaling of type 'mrope'",
    ),
    "old rope_scaling": ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope scaling of type 'ntk'"),
    "rope_parameters": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6}},
        "rope scaling of type 'proportional'",
    ),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope scaling with full_attention",
    ),
    "rope section": (
        {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}},
        "rope scaling with mrope_section",
    ),
    "rope twice": (
        {"rope_scaling": {"factor": 2.0, "type": "linear"}, "rope_parameters": {"factor": 4.0}},
        "do not agree on factor",
    ),
    "linear without a factor": ({"rope_scaling": {"type": "linear"}}, "has no factor"),
    "yarn without a factor": ({"rope_scaling": {"type": "yarn"}}, "has no factor"),
    "llama3 without bounds": ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
    "llama3 bounds": (
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "high_freq_factor 1.0 must be above low_freq_factor 4.0",
    ),
    "yarn bounds": (
        {"rope_scaling": {"type": "yarn", "factor": 8.0, "beta_fast": 1, "beta_slow": 2}},
        "beta_fast 1.0 must be above beta_slow 2.0",
    ),
    "yarn without turns": (
        {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 8.0}},
        "rope_theta 1.0 must be above 1",
    ),
    "longrope of other heads": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
        "short_factor must be a list of 8 numbers",
    ),
    "factors of longrope in yarn": (
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
            }
        },
        "'yarn' with short_factor, long_factor",
    ),
    "a negative factor": (
        {"rope_scaling": {"type": "linear", "factor": -2}},
        "factor must be a positive number",
    ),
    "absurd scaling": ({"rope_scaling": {"type": "linear", "factor": 1e6}}, "reaches 2048000000 positions"),
    "softcapping": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "softcapping of logits": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "scaled logits": ({"logits_scaling": 8.0}, "logits_scaling"),
    "a bias of logits": ({"lm_head_bias": True}, "lm_head_bias"),
    "interleaved rotation": ({"rope_interleaved": True}, "rope_interleaved"),
    "experts": ({"num_local_experts": 8}, "num_local_experts"),
    "layers of another kind": (
        {**MISTRAL, "layer_types": ["chunked_attention"] * 2},
        "layer_types must be full_attention or",
    ),
    "too few kinds of layers": ({**MISTRAL, "layer_types": ["full_attention"]}, "layer_types"),
    "a negative window": ({**MISTRAL, "sliding_window": -1}, "sliding_window must be a positive"),
    "a negative first layer": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": -1},
        "max_window_layers",
    ),
    "more than a head rotated": (
        {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1.5},
        "partial_rotary_factor 1.5",
    ),
    "rope_scaling of a wrong type": ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "sliding window": ({"sliding_window": 4096}, "sliding-window"),
    "sliding window flag": ({"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    "quantization": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "unknown architecture": (
        {"architectures": ["MambaForCausalLM"]},
        "MambaForCausalLM is not supported.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
        "Qwen3ForCausalLM",
    ),
    "architecture of a wrong type": (
        {"architectures": [["LlamaForCausalLM"]]},
        r"architecture " r"\['LlamaForCausalLM'\] is not supported",
    ),
    "no architecture": ({"architectures": None}, "does not name its architecture"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, got 0"),
    "absurd layers": ({"num_hidden_layers": 10**9}, "more than 4096 cannot be right"),
    "absurd context": ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000"),
    "textual width": ({"hidden_size": "64"}, "hidden_size must be a positive whole number, got '64'"),
    "boolean count": ({"vocab_size": True}, "vocab_size"),
    "missing ffn": ({"intermediate_size": None}, "has no intermediate_size"),
    "uneven heads": ({"num_key_value_heads": 3}, "not a multiple"),
    "odd head": ({"head_dim": 17}, "odd"),
    "negative eps": ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a positive number"),
    "no eps": ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a positive number, got 0.0"),
    "no base": ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
    "an endless base": ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf"),
    "a boolean base": ({"rope_theta": True}, "rope_theta must be a positive number, got True"),
    "infinite theta": ({"rope_theta": float("inf")}, "rope_theta"),
    "textual tie": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    "textual eos": ({"eos_token_id": "</s>"}, "eos_token_id"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_change_the_mathematics_or_is_malformed_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
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


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("num_hidden_layers", 4096),
        ("max_position_embeddings", 1 << 22),
        ("vocab_size", 1 << 24),
        ("intermediate_size", 1 << 24),
    ],
)
def test_a_number_is_believed_up_to_what_can_be_right(field: str, most: int) -> None:
    parse_config({**config_json(TINY_LLAMA), field: most}, "config.json")
    with pytest.raises(ModelError, match=f"{field} is {most + 1}; more than {most} cannot be right"):
        parse_config({**config_json(TINY_LLAMA), field: most + 1}, "config.json")


def sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

# What published models state, as far as it matters: what they are called, and what follows (context,
# positions, head size, window, scheme).
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "Llama-2-7b": (
        {
            **sizes(4096, 11008, 32, 32, 32, 32000),
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "pretraining_tp": 1,
            "rope_scaling": None,
        },
        (4096, 4096, 128, 0, None),
    ),
    "Llama-3.1-8B": (
        {
            **sizes(4096, 14336, 32, 32, 8, 128256),
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 131072,
            "rope_scaling": LLAMA3,
            "rope_theta": 500000.0,
        },
        (131072, 131072, 128, 0, "llama3"),
    ),
    "deepseek-coder-6.7b": (
        {
            **sizes(4096, 11008, 32, 32, 32, 32256),
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 16384,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
            "rope_theta": 100000,
        },
        (16384, 65536, 128, 0, "linear"),
    ),
    "SmolLM2": (
        {
            **sizes(576, 1536, 30, 9, 3, 49152),
            "architectures": ["LlamaForCausalLM"],
            "is_llama_config": True,
            "rope_interleaved": False,
            "max_position_embeddings": 8192,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
        },
        (8192, 8192, 64, 0, None),
    ),
    "Mistral-7B-v0.1": (
        {
            **sizes(4096, 14336, 32, 32, 8, 32000),
            "architectures": ["MistralForCausalLM"],
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "rope_theta": 10000.0,
        },
        (32768, 32768, 128, 4096, None),
    ),
    "Mistral-Nemo": (
        {
            **sizes(5120, 14336, 40, 32, 8, 131072),
            "architectures": ["MistralForCausalLM"],
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "rope_theta": 1000000.0,
        },
        (131072, 131072, 128, 0, None),
    ),
    "Qwen2.5-7B": (
        {
            **sizes(3584, 18944, 28, 28, 4, 152064),
            "architectures": ["Qwen2ForCausalLM"],
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "use_mrope": False,
            "rope_theta": 1000000.0,
        },
        (32768, 32768, 128, 0, None),
    ),
    "Qwen3-8B with yarn": (
        {
            **sizes(4096, 12288, 36, 32, 8, 151936),
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "sliding_window": None,
            "use_sliding_window": False,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            "rope_theta": 1000000,
        },
        (131072, 131072, 128, 0, "yarn"),
    ),
    "Phi-3-mini-4k": (
        {
            **sizes(3072, 8192, 32, 32, 32, 32064),
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rope_scaling": None,
            "sliding_window": 2047,
        },
        (4096, 4096, 96, 2047, None),
    ),
    "Phi-3-mini-128k": (
        {
            **sizes(3072, 8192, 32, 32, 32, 32064),
            "architectures": ["Phi3ForCausalLM"],
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "sliding_window": 262144,
        },
        (131072, 131072, 96, 0, "longrope"),
    ),
    "Phi-4-mini": (
        {
            **sizes(3072, 8192, 32, 24, 8, 200064),
            "architectures": ["Phi3ForCausalLM"],
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        (131072, 131072, 128, 0, "longrope"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configs_of_published_models_are_understood(name: str) -> None:
    raw, expected = PUBLISHED[name]
    config = parse_config(raw, "config.json")
    scheme = None if config.rope_scaling is None else config.rope_scaling.kind
    assert (
        config.default_len,
        config.max_position,
        config.head_dim,
        max(config.windows, default=0),
        scheme,
    ) == expected
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

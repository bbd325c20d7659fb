"""Files and configs of Gemma 3, GLM-4.5, SmolLM3, OLMo 3 and Granite as they are published: parts that are
not read, numbers that they leave out, what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config import (
    GIB,
    Config,
    EngineConfig,
    KvConfig,
    ModelSource,
    OffloadConfig,
    SpeculationConfig,
)
from penstock.engine.build import build
from penstock.errors import ConfigError, ModelError
from penstock.models.model import GroupedRouting, ModelConfig, OtherRope
from penstock.models.registry import parse_config
from penstock.testing.sanitized import build_sanitized, check_silent
from penstock.testing.tiny_models import (
    TINY_GEMMA3,
    TINY_GLM4_MOE,
    TINY_GRANITE,
    TINY_OLMO2,
    TINY_SMOLLM3,
    config_json,
    tiny_tokenizer,
    write_tiny_model,
)
from tests.e2e.test_parity_families import (
    DECODED,
    FAMILIES,
    IDS,
    PROMPT,
    TOLERANCE,
    largest_error,
    their_logprobs,
    their_model,
)
from tests.e2e.test_parity_hybrid import served
from tests.support.contiguous_kv import logits_of
from tests.support.driving import run_all, submit
from tests.support.loading import load_on_cpu

SIZES = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
SIZES |= {"max_position_embeddings": 2048}


def parsed(name: str, **fields: Any) -> ModelConfig:
    return parse_config({**SIZES, "architectures": [f"{name}ForCausalLM"], **fields}, "config.json")


def saved(name: str, directory: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    family, fields = FAMILIES[name]
    reference = their_model(family, **fields)
    reference.save_pretrained(directory)
    return reference, load_file(directory / "model.safetensors")


def error_of(reference: Any, directory: Path) -> float:
    found = logits_of(load_on_cpu(directory).model, IDS[:100]).double().log_softmax(dim=-1)
    return float((found - their_logprobs(reference, IDS[:100])).abs().max())


def with_tokenizer(directory: Path) -> Path:
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("start", ["language_model.model.", "model.language_model."])
def test_of_a_gemma_that_takes_images_the_text_part_is_served(
    start: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the names of older files and of newer ones."""
    reference, tensors = saved("gemma3", with_tokenizer(tmp_path))
    renamed = {name.replace("model.", start, 1): tensor for name, tensor in tensors.items()}
    vision = "model." if start.startswith("model.") else ""
    renamed |= {
        f"{vision}vision_tower.a.weight": torch.zeros(2),
        f"{vision}multi_modal_projector.b": torch.ones(3),
    }
    save_file(renamed, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with caplog.at_level(logging.WARNING):
        assert error_of(reference, tmp_path) < TOLERANCE
    (line,) = [one.getMessage() for one in caplog.records if "not read" in one.getMessage()]
    assert "2 tensors of the vision part; only text is served" in line


def test_a_head_for_drafts_behind_the_last_layer_of_a_glm_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, tensors = saved("glm4-moe", with_tokenizer(tmp_path))
    last = reference.config.num_hidden_layers
    extra = {f"model.layers.{last}.{name}.weight": torch.zeros(4) for name in ("eh_proj", "self_attn.q_proj")}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert error_of(reference, tmp_path) < TOLERANCE
    (line,) = [one.getMessage() for one in caplog.records if "not read" in one.getMessage()]
    assert f"2 tensors of the head for drafts (model.layers.{last}.*)" in line
    save_file({**tensors, "model.layers.9.mlp.a": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.layers\.9\.mlp\.a"):
        load_on_cpu(tmp_path)


def test_what_a_gemma_config_leaves_out_is_what_transformers_takes() -> None:
    """As the config of a published model that takes images."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    found = parse_config(raw, "config.json")
    assert found.windows[:7] == (1024,) * 5 + (0, 1024) and len(found.windows) == 34
    assert found.other_rope is not None and found.other_rope.theta == 10_000.0
    assert found.other_rope.layers == tuple(i for i, window in enumerate(found.windows) if window)
    assert (found.vocab, found.num_heads, found.num_kv_heads, found.head_dim) == (262_208, 8, 4, 256)
    assert (found.max_position, found.default_len, found.scale) == (131_072, 131_072, 256**-0.5)
    assert found.rope_theta == 1e6 and found.tied_embeddings and found.eos_ids == (1, 106)


def test_what_other_configs_leave_out_is_what_transformers_takes() -> None:
    glm = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    found = parsed("Glm4Moe", **glm)
    assert found.routing == GroupedRouting(8, 2, 32, True, 32, (0,)) and found.rotary_dim == 8
    assert not found.normed_heads and parsed("Glm4Moe", **glm, use_qk_norm=True).normed_heads
    assert parsed("SmolLM3").other_rope == OtherRope((3, 7), 0.0)
    assert parsed("SmolLM3", no_rope_layers=[1] * 8).other_rope is None
    olmo = parsed("Olmo3")
    assert olmo.windows == () and olmo.rope_theta == 500_000.0  # 4096 is more than there are positions
    assert parsed("Olmo3", sliding_window=64).windows == (64, 64, 64, 0) * 2
    assert parsed("Granite").scale == 1.0


@pytest.mark.parametrize("chunk", [3, 17, 64])
@pytest.mark.parametrize("name", ["gemma3, stretched", "olmo3, stretched"])
def test_a_prompt_in_any_chunks_gives_the_same(name: str, chunk: int, tmp_path: Path) -> None:
    reference, _ = saved(name, with_tokenizer(tmp_path))
    with served(tmp_path, chunk) as engine:
        found = submit(engine, IDS[:PROMPT], max_tokens=DECODED, logprobs=0, prompt_logprobs=0)
        run_all(engine)
    expected = their_logprobs(reference, IDS[:PROMPT] + found.tokens)
    assert largest_error(expected, IDS[:PROMPT], found) < TOLERANCE


GLM = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 3}
GEMMA = {"architectures": ["Gemma3ForCausalLM"]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**GEMMA, "hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
    ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ({**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ({**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
    ({**GEMMA, "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "in layers with a window"),
    ({**GEMMA, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters with rope_theta"),
    ({**GEMMA, "layer_types": ["full_attention"]}, "layer_types must be"),
    ({**GLM, "n_group": 3}, "8 experts do not make 3 groups"),
    ({**GLM, "n_group": 8}, "do not make 8 groups .* of at least two"),
    ({**GLM, "n_group": 4, "topk_group": 5}, "topk_group is 5"),
    ({**GLM, "n_group": 4, "topk_group": 1}, "num_experts_per_tok is 3, more than 1 groups have"),
    ({**GLM, "first_k_dense_replace": 8}, "first_k_dense_replace must be layers below 8"),
    ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 2]}, "no_rope_layers must be 0 or 1"),
    ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling must be a positive"),
    ({"architectures": ["Olmo2ForCausalLM"], "sliding_window": 64}, "sliding-window attention"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_the_forward_pass_cannot_do_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**SIZES, **change}, "config.json")


@pytest.mark.parametrize("kind", ["mtp", "eagle:nowhere"])
def test_a_trained_head_for_a_model_of_another_shape_is_refused_at_start(kind: str, tmp_path: Path) -> None:
    source = ModelSource(str(write_tiny_model(tmp_path, TINY_GEMMA3)), device="cpu")
    with pytest.raises(ConfigError, match="is not supported for models of type gemma3_text"):
        build(Config(source, KvConfig(device_blocks=64), speculation=SpeculationConfig(kind)))


def test_another_rope_or_scale_is_another_identity(tmp_path: Path) -> None:
    plain = config_json(TINY_GEMMA3)
    scopes = set()
    for change in ({}, {"rope_local_base_freq": 900.0}, {"query_pre_attn_scalar": 9}, {"sliding_window": 41}):
        folder = write_tiny_model(tmp_path / str(len(scopes)), TINY_GEMMA3)
        (folder / "config.json").write_text(json.dumps({**plain, **change}))
        model = load_on_cpu(folder).model
        scopes.add((model.digest, model.config.positions))
    assert len({digest for digest, _ in scopes}) == 4 and len({positions for _, positions in scopes}) == 2


def answer_of(directory: Path, **settings: Any) -> tuple[list[int], list[Any]]:
    """A prompt of 300 tokens and 12 more."""
    config = Config(
        ModelSource(str(directory), device="cpu", dtype="float32"),
        engine=EngineConfig(512, prefill_chunk=64),
        **{
            "kv": KvConfig(device_blocks=64),
            "offload": OffloadConfig(host_gib=(1 << 26) / GIB, load_always=True),
            **settings,
        },
    )
    engine, sanitizer = build_sanitized(config)
    found = submit(engine, IDS + IDS[:20], max_tokens=12, logprobs=0, ignore_eos=True)
    run_all(engine)
    stats = engine.stats()
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)
    assert found.error is None
    return found.tokens, [entry.logprob for entry in found.logprobs] + [sum(stats.drafted)]


@pytest.mark.parametrize("model", [TINY_GLM4_MOE, TINY_GRANITE, TINY_OLMO2, TINY_SMOLLM3])
def test_a_context_larger_than_its_room_gives_what_the_full_cache_gives(
    model: ModelConfig, tmp_path: Path
) -> None:
    directory = write_tiny_model(tmp_path, model)
    tokens, full = answer_of(directory)
    in_part, found = answer_of(directory, kv=KvConfig(device_blocks=64, resident_tokens=192))
    assert in_part == tokens and found == pytest.approx(full, abs=1e-4)


def test_drafts_change_no_token_of_a_model_with_two_rotary_tables(tmp_path: Path) -> None:
    """By a draft model of the same kind, with layers of its own behind the target's."""
    target = write_tiny_model(tmp_path / "target", TINY_GEMMA3)
    small = dataclasses.replace(
        TINY_GEMMA3, num_layers=2, windows=(40, 0), other_rope=OtherRope((0,), 1000.0)
    )
    draft = write_tiny_model(tmp_path / "draft", small)
    tokens, _ = answer_of(target)
    for proposer in ("ngram", f"draft:{draft}", f"draft:{target}"):
        found, figures = answer_of(target, speculation=SpeculationConfig(proposer))
        assert found == tokens
    assert figures[-1] > 0

"""Hybrid models against `transformers`, whose layers run without compiled kernels: prompts in any chunks,
decode alone and beside prompts, files of the text part alone and of models that also take images."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config import (
    GIB,
    Config,
    DeviceName,
    EngineConfig,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    WeightsName,
)
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, ModelError
from penstock.models.loader import read_config
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.e2e.test_parity_families import (
    DECODED,
    IDS,
    TOTAL,
    assert_parity,
    largest_error,
    save,
    their_logprobs,
    their_model,
)
from tests.support.adapters import ALL_MODULES, ATTENTION, adapter_tensors, merged_into, write_adapter
from tests.support.driving import Collected, run_all, settle_all, submit

TOLERANCE = 1e-4  # of a log-probability, absolute
PROMPT = 150
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
SIZES = {**DELTA, "num_hidden_layers": 5, "head_dim": 32, "linear_value_head_dim": 24}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 40}
MIXED = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}  # positions of images
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {}, {**EXPERTS}),
    "qwen3-next with dense layers": (
        "Qwen3Next",
        {},
        {**EXPERTS, "mlp_only_layers": [1, 3], "layer_types": MIXED},
    ),
    "qwen3-next, choices as they are": ("Qwen3Next", {}, {**EXPERTS, "norm_topk_prob": False}),
    "qwen3.5": ("Qwen3_5Text", SECTIONS, {"tie_word_embeddings": True}),
    "qwen3.5 of other sizes": (
        "Qwen3_5Text",
        {**SECTIONS, "partial_rotary_factor": 0.5},
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "layer_types": MIXED},
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", SECTIONS, EXPERTS),
}
MODELS = {"Qwen3_5Text": "Qwen3_5", "Qwen3_5MoeText": "Qwen3_5Moe"}  # by config, where names differ


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def reference_of(family: str) -> Any:
    """States last for tens of tokens, so that an old one shows."""
    name, rope, fields = FAMILIES[family]
    reference = their_model(name, rope, model=MODELS.get(name), **{**SIZES, **fields})
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-5.0, -2.0)
            if parameter_name.endswith("conv1d.weight"):
                parameter.normal_(0.0, 0.5)
    return reference


@contextlib.contextmanager
def served(
    directory: Path,
    chunk: int = 48,
    weights: WeightsName = "float32",
    device: DeviceName = "cpu",
    lora: Path | None = None,
) -> Iterator[Engine]:
    config = Config(
        source=ModelSource(
            str(directory), device=device, dtype="float32", weights=weights if device == "cpu" else "auto"
        ),
        kv=KvConfig(device_blocks=64),
        engine=EngineConfig(TOTAL, max_batch=4, prefill_chunk=chunk),
        offload=OffloadConfig(host_gib=(1 << 26) / GIB, load_always=True),
        lora=LoraConfig(() if lora is None else (("tuned", str(lora)),)),
    )
    engine, sanitizer = build_sanitized(config)
    try:
        yield engine
    finally:
        engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def scored(engine: Engine, prompt: list[int], **more: Any) -> Collected:
    return submit(engine, prompt, max_tokens=DECODED, logprobs=0, prompt_logprobs=0, **more)


def error_of(reference: Any, prompt: list[int], found: Collected) -> float:
    expected = their_logprobs(reference, prompt + found.tokens)
    assert expected.std() > 0.5
    return largest_error(expected, prompt, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_model_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    """A prompt in chunks of 48, several requests in the same steps, and a prefix that comes back."""
    reference = reference_of(family)
    prompts = [IDS[:PROMPT], IDS[PROMPT : PROMPT + 70], IDS[30:31], IDS[40:104]]
    with served(save(reference, tmp_path)) as engine:
        found = [scored(engine, prompt) for prompt in prompts]
        run_all(engine)
        for prompt, one in zip(prompts, found, strict=True):
            assert error_of(reference, prompt, one) < TOLERANCE
        alone = submit(engine, prompts[0], max_tokens=DECODED, logprobs=0)
        run_all(engine)
        settle_all(engine)
        engine.parts.cache.reset(["device"])
        again = submit(engine, prompts[0], max_tokens=DECODED, logprobs=0)
        run_all(engine)
    assert alone.source == KvSource(computed=PROMPT), "with its prompt scored it kept no state"
    assert again.source == KvSource(host=144, computed=6)
    for one in (alone, again):
        assert error_of(reference, prompts[0], one) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 63, 64, 65, 150])
def test_a_prompt_in_any_chunks_gives_the_same(chunk: int, tmp_path: Path) -> None:
    reference = reference_of("qwen3.5")
    with served(save(reference, tmp_path), chunk) as engine:
        found = scored(engine, IDS[:PROMPT])
        run_all(engine)
    assert error_of(reference, IDS[:PROMPT], found) < TOLERANCE


LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj")


@pytest.mark.parametrize(
    "family", ["qwen3-next with dense layers", "qwen3.5", "qwen3.5 of other sizes", "qwen3.5-moe"]
)
def test_an_adapter_on_a_hybrid_model_computes_what_transformers_computes_with_merged_weights(
    family: str, tmp_path: Path
) -> None:
    """On projections of both kinds of layers, and on MLPs, by names of a model that also takes images."""
    reference = reference_of(family)
    directory = save(reference, tmp_path / "model")
    tensors = adapter_tensors(read_config(directory), seed=1, modules=(*ALL_MODULES, *LINEAR))
    adapted = {name.split(".")[-3] for name in tensors}
    assert len(adapted & {*LINEAR}) == (3 if "next" in family else 5) and {*ATTENTION} <= adapted
    before = their_logprobs(reference, IDS[:TOTAL])
    files = tensors
    if "next" not in family:
        files = {
            name.replace("model.layers.", "model.language_model.layers."): tensors[name] for name in tensors
        }
    with (
        served(directory, lora=write_adapter(tmp_path / "adapter", files)) as engine,
        merged_into(reference, tensors, scale=2.0),
    ):
        assert float((their_logprobs(reference, IDS[:TOTAL]) - before).abs().max()) > 100 * TOLERANCE
        loaded = engine.adapters.find("tuned")
        assert loaded is not None
        assert_parity(engine, reference, loaded.adapter, TOLERANCE)


def test_an_adapter_on_a_shared_expert_or_on_the_vision_part_is_refused_by_name(tmp_path: Path) -> None:
    directory = save(reference_of("qwen3.5-moe"), tmp_path / "model")
    tensors = adapter_tensors(read_config(directory), seed=1, modules=("q_proj",))
    for module, rows in (
        ("model.layers.0.mlp.shared_expert.up_proj", 40),
        ("model.visual.blocks.0.attn.qkv", 96),
    ):
        more = {"lora_A": torch.zeros(4, 64), "lora_B": torch.zeros(rows, 4)}
        own = {f"base_model.model.{module}.{which}.weight": tensor for which, tensor in more.items()}
        adapter = write_adapter(tmp_path / "adapter", {**tensors, **own})
        with pytest.raises(ConfigError, match=re.escape(module)), served(directory, lora=adapter):
            pass


# --------------------------------------------------------------------------- files of models that take images


def multimodal(kind: str, directory: Path) -> Any:
    """A whole model with a vision part, and tensors of a head for drafts, as published files have them."""
    transformers = pytest.importorskip("transformers")
    family = "qwen3.5-moe" if kind == "Qwen3_5Moe" else "qwen3.5"
    text = reference_of(family)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.config.to_dict(), vision_config={**vision, "num_position_embeddings": 16}
    )
    config.tie_word_embeddings = text.config.tie_word_embeddings
    reference = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    reference.model.language_model.load_state_dict(text.model.state_dict())
    reference.lm_head.load_state_dict(text.lm_head.state_dict())
    save(reference, directory)
    save_file({"mtp.fc.weight": torch.zeros(64, 128)}, directory / "model-draft.safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.fc.weight"] = "model-draft.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return reference


def rewritten(directory: Path, change: Mapping[str, Any]) -> None:
    """All weights in one file, some of them replaced or, with None, left out."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink()
    kept = {name: tensor for name, tensor in {**found, **change}.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")


def stacked_experts(directory: Path) -> dict[str, Any]:
    """The change that puts the experts of each layer into two tensors."""
    found: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= {name: tensor for name, tensor in load_file(file).items() if ".experts." in name}
    change: dict[str, Any] = dict.fromkeys(found)
    for start in {name.partition(".experts.")[0] for name in found}:
        own = [f"{start}.experts.{expert}" for expert in range(8)]
        both = [[found[f"{one}.{part}_proj.weight"] for part in ("gate", "up")] for one in own]
        change[f"{start}.experts.gate_up_proj"] = torch.stack([torch.cat(parts) for parts in both])
        change[f"{start}.experts.down_proj"] = torch.stack([found[f"{one}.down_proj.weight"] for one in own])
    return change


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe", "Qwen3_5Moe, experts stacked"])
def test_of_a_model_that_takes_images_the_text_part_is_served_and_the_rest_is_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, _, stacked = kind.partition(", ")
    reference = multimodal(kind, tmp_path)
    if stacked:
        rewritten(tmp_path, stacked_experts(tmp_path))
    with caplog.at_level(logging.WARNING), served(tmp_path) as engine:
        found = scored(engine, IDS[:PROMPT])
        run_all(engine)
    assert error_of(reference, IDS[:PROMPT], found) < TOLERANCE
    lines = [one.getMessage() for one in caplog.records]
    for what in (
        "the vision part (model.visual.*)",
        "1 tensors of the head for drafts, which --speculate mtp uses (mtp.*)",
    ):
        (line,) = [one for one in lines if what in one]
        assert "not read" in line and "only text is served" in line


def test_stacked_experts_and_single_ones_are_the_same_weights(tmp_path: Path) -> None:
    """Their identity does not follow from how a file has them."""
    multimodal("Qwen3_5Moe", tmp_path)
    with served(tmp_path) as engine:
        digest = engine.parts.executor.target.model.digest
    rewritten(tmp_path, stacked_experts(tmp_path))
    with served(tmp_path) as engine:
        assert engine.parts.executor.target.model.digest == digest


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    multimodal("Qwen3_5", tmp_path)
    rewritten(tmp_path, {"model.norm.weight": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight twice"), served(tmp_path):
        pass


REFUSED = {
    "attn_output_gate is false": {"attn_output_gate": False},
    "layer_types must be linear_attention or full_attention": {"layer_types": ["sliding_attention"] * 5},
    "no layer attends": {"layer_types": ["linear_attention"] * 5},
    "3 value heads are not a multiple of 2 key heads": {"linear_num_value_heads": 3},
    "linear_conv_kernel_dim is 1": {"linear_conv_kernel_dim": 1},
    "num_experts in Qwen3_5ForConditionalGeneration": {"num_experts": 4},
    "attention_bias is true": {"attention_bias": True},
}


@pytest.mark.parametrize("refusal", REFUSED)
def test_a_config_that_would_compute_something_else_is_refused_by_name(refusal: str, tmp_path: Path) -> None:
    reference_of("qwen3.5").config.save_pretrained(tmp_path)
    raw = {**json.loads((tmp_path / "config.json").read_text()), **REFUSED[refusal]}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["Qwen3_5ForCausalLM"]}))
    with pytest.raises(ModelError, match=refusal):
        read_config(tmp_path)


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_the_forms_of_a_cpu_keep_what_rounding_would_spoil(weights: WeightsName, tmp_path: Path) -> None:
    """Matrices are rounded; decays, convolutions and norms are not."""
    reference = reference_of("qwen3.5-moe")
    with served(save(reference, tmp_path), weights=weights) as engine:
        layer: Any = engine.parts.executor.target.model.layers[0]
        exact = layer.conv, layer.rate, layer.dt_bias, layer.state_norm, layer.gates.wide, layer.attn_norm
        assert {tensor.dtype for tensor in exact} == {torch.float32}
        theirs = reference.model.layers[0].linear_attn
        assert torch.equal(layer.conv, theirs.conv1d.weight) and torch.equal(layer.dt_bias, theirs.dt_bias)
        found = scored(engine, IDS[:PROMPT])
        run_all(engine)
    assert len(found.tokens) == DECODED and found.error is None

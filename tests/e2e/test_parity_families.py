"""Every family and every rotary scheme against `transformers`, through the engine: prompts in chunks, batched
decode, a prefix that comes back from host memory, adapters. Random small models with contexts that go beyond
the trained length, and beyond the window."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from penstock.config import (
    GIB,
    Config,
    DeviceName,
    EngineConfig,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
)
from penstock.engine.engine import Engine
from penstock.models.registry import parse_config
from penstock.models.weights import read_json
from penstock.testing.sanitized import build_sanitized, check_silent
from penstock.testing.tiny_models import tiny_tokenizer
from tests.support.adapters import ALL_MODULES, adapter_tensors, merged_into, write_adapter
from tests.support.driving import Collected, run_all, settle_all, submit

TOLERANCE = 2e-5  # of a log-probability, absolute
TRANSFORMERS = importlib.import_module("transformers")
TRAINED = 64  # tokens of the context before it is stretched
PROMPT, DECODED = 150, 8
TOTAL = PROMPT + DECODED
IDS = torch.randint(3, 512, (2 * PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
SHORT = [0.9 + 0.05 * i for i in range(8)]
LONG = [1.0 + 0.7 * i for i in range(8)]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 47}
SWITCHED = {"use_sliding_window": True, "max_window_layers": 1}
OUTSIDE = {"original_max_position_embeddings": TRAINED}
YARN = {"rope_type": "yarn", "factor": 4.0, **OUTSIDE}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LOCAL = {"sliding_attention": {**PLAIN, "rope_theta": 300.0}}
OLMO = {"sliding_attention": PLAIN}
GEMMA: dict[str, Any] = {"model": "Gemma3", "head_dim": 32, "sliding_window": 40, "query_pre_attn_scalar": 24}
# What a family's config says besides its sizes. Windows are shorter than the prompt, and some layers have
# none.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama with wide heads": ("Llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": 40, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": ("Qwen2", {**SWITCHED, "sliding_window": 21}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 with biases and windows": (
        "Qwen3",
        {"head_dim": 16, "attention_bias": True, **SWITCHED, "sliding_window": 33}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3": ("Phi3", {"sliding_window": 47, "num_key_value_heads": 4}),
    "phi4-mini": ("Phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe with dense layers": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "attention_bias": True, "decoder_sparse_step": 2, "mlp_only_layers": [2]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral with windows": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, **WINDOW}),
    "gemma3": (
        "Gemma3Text",
        {**GEMMA, "rope_parameters": {**LOCAL, "full_attention": PLAIN}, "num_hidden_layers": 7},
    ),
    "gemma3, stretched": (
        "Gemma3Text",
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {**LOCAL, "full_attention": {**PLAIN, "rope_type": "linear", "factor": 8.0}}},
    ),
    "glm4-moe": ("Glm4Moe", {**GLM, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe with groups": (
        "Glm4Moe",
        {**GLM, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8, "norm_topk_prob": False}
        | {"n_shared_experts": 2, "first_k_dense_replace": 2},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3 with windows": (
        "SmolLM3",
        {**SWITCHED, **WINDOW, "no_rope_layers": [1, 0, 1], "attention_bias": True},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 40, "num_hidden_layers": 5, "rope_parameters": {**OLMO, "full_attention": PLAIN}},
    ),
    "olmo3, stretched": (
        "Olmo3",
        {"sliding_window": 40, "num_hidden_layers": 4, "max_position_embeddings": 256}
        | {"rope_parameters": {**OLMO, "full_attention": {**PLAIN, **YARN}}},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6}
        | {"logits_scaling": 0.7, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
}

ALL_OF_YARN = {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OUTSIDE}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
PARTIAL = {"short_factor": SHORT[:6], "long_factor": LONG[:6], "partial_rotary_factor": 0.75}
STATED, LONGER = {"max_position_embeddings": TRAINED}, {"max_position_embeddings": 4 * TRAINED}

# By the family that it is tried with: its rope parameters, and other fields.
ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("Llama", {"rope_type": "linear", "factor": 4.0}, STATED),
    "dynamic": ("Llama", {"rope_type": "dynamic", "factor": 4.0}, STATED),
    "dynamic, not stretched": ("Llama", {"rope_type": "dynamic", "factor": 4.0}, {}),
    "llama3": ("Llama", LLAMA3, {}),
    "yarn": ("Qwen3", YARN, {"head_dim": 16}),
    "yarn beyond what the config states": ("Qwen2", YARN, STATED),
    "yarn, all its numbers": ("Llama", {**YARN, "factor": 3.0, **ALL_OF_YARN}, {}),
    "yarn with mscale": ("Mistral", {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7}, {"sliding_window": None}),
    "longrope": ("Phi3", LONGROPE, {**OUTSIDE, **LONGER}),
    "longrope, short": (
        "Phi3",
        LONGROPE,
        {"original_max_position_embeddings": 200, "max_position_embeddings": 800},
    ),
    "longrope of a part of each head": (
        "Phi3",
        {**LONGROPE, **PARTIAL},
        {**OUTSIDE, **LONGER, "sliding_window": 100},
    ),
    "longrope of a Llama": ("Llama", {**LONGROPE, **OUTSIDE, "factor": 4.0, "attention_factor": 1.1}, {}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def their_model(
    name: str, rope: dict[str, Any] | None = None, model: str | None = None, **fields: Any
) -> Any:
    """Random weights of `transformers`; norms and biases are moved off what they begin with, so that leaving
    one out shows. `model`: its name, if its config has another."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    usual = {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512}
    usual |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **(rope or {})}
    config = getattr(TRANSFORMERS, f"{name}Config")(
        **{**sizes, **usual, "rope_parameters": parameters, **fields}
    )
    torch.manual_seed(0)
    made = getattr(TRANSFORMERS, f"{model or name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(6)
        for name, buffer in made.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return made.eval()


def save(reference: Any, directory: Path) -> Path:
    reference.save_pretrained(directory, max_shard_size="100KB")
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


@contextlib.contextmanager
def served(directory: Path, lora: Path | None = None, device: DeviceName = "cpu") -> Iterator[Engine]:
    """Chunks of three blocks, a host tier that has room for all, the sanitizer, and sequences that are as
    long as the run allows."""
    adapters = () if lora is None else (("tuned", str(lora)),)
    config = Config(
        source=ModelSource(str(directory), device=device, dtype="float32"),
        kv=KvConfig(device_blocks=64),
        engine=EngineConfig(TOTAL, max_batch=4, prefill_chunk=48),
        offload=OffloadConfig(host_gib=(1 << 26) / GIB, load_always=True),
        lora=LoraConfig(adapters),
    )
    engine, sanitizer = build_sanitized(config)
    try:
        yield engine
    finally:
        engine.close(timeout_s=20.0)
    check_silent(sanitizer)


@torch.inference_mode()
def their_logprobs(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], all of them at once, so that a scheme that follows from the length has the whole
    one."""
    return reference(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)


def largest_error(expected: torch.Tensor, prompt: list[int], found: Collected) -> float:
    """Of the log-probabilities of all tokens, those of the prompt included where they were asked for."""
    assert len(found.tokens) == DECODED, found.error
    tokens = prompt + found.tokens
    scored = [entry for entry in found.prompt_logprobs or () if entry is not None] + found.logprobs
    first = len(tokens) - len(scored)
    assert first in (1, len(prompt))
    theirs = expected[range(first - 1, len(tokens) - 1), tokens[first:]]
    return float((torch.tensor([entry.logprob for entry in scored]).double() - theirs).abs().max())


def assert_parity(engine: Engine, reference: Any, adapter: Any = None, tolerance: float = TOLERANCE) -> None:
    """Alone with its prompt scored, beside another, and once more from host memory."""
    prompt = IDS[:PROMPT]
    scored = submit(engine, prompt, adapter=adapter, max_tokens=DECODED, logprobs=0, prompt_logprobs=0)
    run_all(engine)
    expected = their_logprobs(reference, prompt + scored.tokens)
    assert expected.std() > 0.5
    assert largest_error(expected, prompt, scored) < tolerance
    beside = submit(engine, IDS[PROMPT:], max_tokens=DECODED)
    first = submit(engine, prompt, adapter=adapter, max_tokens=DECODED, logprobs=0)
    run_all(engine)
    settle_all(engine)
    assert beside.tokens and first.tokens == scored.tokens
    assert largest_error(expected, prompt, first) < tolerance
    engine.parts.cache.reset(["device"])
    again = submit(engine, prompt, adapter=adapter, max_tokens=DECODED, logprobs=0)
    run_all(engine)
    assert again.source is not None and again.source.host == PROMPT // 16 * 16
    assert largest_error(expected, prompt, again) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    name, fields = FAMILIES[family]
    reference = their_model(name, **fields)
    with served(save(reference, tmp_path)) as engine:
        assert_parity(engine, reference)


@pytest.mark.parametrize("scheme", ROPES)
def test_a_rotary_scheme_computes_what_transformers_computes(scheme: str, tmp_path: Path) -> None:
    name, rope, fields = ROPES[scheme]
    reference = their_model(name, rope, **fields)
    with served(save(reference, tmp_path)) as engine:
        assert_parity(engine, reference)


ADAPTED = (
    "llama with biases",
    "gemma3, stretched",
    "glm4-moe",
    "granite",
    "mistral",
    "olmo2",
    "qwen2 with windows",
    "qwen3",
    "phi3",
    "phi4-mini",
    "qwen2-moe",
)


@pytest.mark.parametrize("family", ADAPTED)
def test_an_adapter_on_a_family_computes_what_transformers_computes_with_merged_weights(
    family: str, tmp_path: Path
) -> None:
    name, fields = FAMILIES[family]
    reference = their_model(name, **fields)
    directory = save(reference, tmp_path / "model")
    config = parse_config(read_json(directory / "config.json"), "config.json")
    tensors = adapter_tensors(config, seed=1, modules=(*ALL_MODULES, "qkv_proj", "gate_up_proj"))
    before = their_logprobs(reference, IDS[:TOTAL])
    with (
        served(directory, lora=write_adapter(tmp_path / "adapter", tensors)) as engine,
        merged_into(reference, tensors, scale=2.0),
    ):
        assert float((their_logprobs(reference, IDS[:TOTAL]) - before).abs().max()) > 100 * TOLERANCE
        loaded = engine.adapters.find("tuned")
        assert loaded is not None
        assert_parity(engine, reference, loaded.adapter)


def test_a_served_model_scores_a_prompt_as_transformers_does(
    tmp_path: Path, start_server: Callable[..., tuple[Any, str]]
) -> None:
    """Over HTTP: stretched positions, biases and a window, sharded safetensors, prompts in chunks."""
    fields = {**SWITCHED, "sliding_window": 40, **STATED}
    reference = their_model("Qwen2", YARN, **fields)
    directory = save(reference, tmp_path / "model")
    flags = ("--device", "cpu", "--prefill-chunk", "48", "--sanitize=strict")
    _, url = start_server("--model", str(directory), *flags)
    ask = {"model": "model", "prompt": IDS[:PROMPT], "max_tokens": DECODED, "temperature": 0}
    ask |= {"echo": True, "logprobs": 0}
    reply = httpx.post(f"{url}/v1/completions", json={**ask, "ignore_eos": True}, timeout=60).json()
    found = reply["choices"][0]["logprobs"]["token_logprobs"]
    assert len(found) == TOTAL and found[0] is None
    expected = their_logprobs(reference, IDS[:PROMPT])
    theirs = expected[range(PROMPT - 1), IDS[1:PROMPT]]
    assert float((torch.tensor(found[1:PROMPT]).double() - theirs).abs().max()) < TOLERANCE
    assert abs(found[PROMPT] - float(expected[-1].max())) < TOLERANCE

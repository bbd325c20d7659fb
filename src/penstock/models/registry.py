"""The architectures that there are, one line each, and the one that a config, a config.json or a GGUF file
means. Owns nothing else: CONTRIBUTING.md says how one is added."""

from __future__ import annotations

from collections.abc import Container, Mapping

from penstock.errors import ModelError
from penstock.models.architecture import Architecture, WeightSpec
from penstock.models.embedded import NAME
from penstock.models.fields import Json
from penstock.models.gemma3 import Gemma3
from penstock.models.glm4_moe import Glm4Moe
from penstock.models.granite import Granite
from penstock.models.llama import SMOLLM2_135M, TINY_LLAMA, Llama
from penstock.models.mistral import Mistral
from penstock.models.mixtral import Mixtral
from penstock.models.model import ModelConfig
from penstock.models.olmo2 import Olmo2
from penstock.models.olmo3 import Olmo3
from penstock.models.phi3 import Phi3
from penstock.models.qwen2 import Qwen2
from penstock.models.qwen2_moe import Qwen2Moe
from penstock.models.qwen3 import QWEN3_0_6B, QWEN3_4B, TINY_QWEN3, Qwen3
from penstock.models.qwen3_5 import QWEN3_5_4B, TINY_QWEN3_5, Qwen35
from penstock.models.qwen3_5_moe import QWEN3_5_35B_A3B, Qwen35Moe
from penstock.models.qwen3_moe import QWEN3_30B_A3B, TINY_QWEN3_MOE, Qwen3Moe
from penstock.models.qwen3_next import Qwen3Next
from penstock.models.rotary import RopeFactors
from penstock.models.smollm3 import SmolLM3

ARCHITECTURES: tuple[Architecture, ...] = (
    Llama(),
    Mistral(),
    Mixtral(),
    Qwen2(),
    Qwen2Moe(),
    Qwen3(),
    Qwen3Moe(),
    Qwen3Next(),
    Qwen35(),
    Qwen35Moe(),
    Phi3(),
    Gemma3(),
    Glm4Moe(),
    SmolLM3(),
    Olmo2(),
    Olmo3(),
    Granite(),
)

# Dimensions that users can ask for by name, as messages list them: the one with weights, then by size.
BUILT_IN: Mapping[str, ModelConfig] = {
    NAME: SMOLLM2_135M,
    "qwen3-4b": QWEN3_4B,
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3.5-4b": QWEN3_5_4B,
    "qwen3.5-35b-a3b": QWEN3_5_35B_A3B,
    "tiny-qwen3": TINY_QWEN3,
    "tiny-qwen3-moe": TINY_QWEN3_MOE,
    "tiny-qwen3.5": TINY_QWEN3_5,
    "tiny-llama": TINY_LLAMA,
}


def architecture_of(config: ModelConfig) -> Architecture:
    return next(architecture for architecture in ARCHITECTURES if architecture.name == config.architecture)


def layout(config: ModelConfig) -> tuple[WeightSpec, ...]:
    """Every tensor of the model, in the order in which a forward pass meets them."""
    return tuple(architecture_of(config).layout(config))


def parse_config(raw: Json, where: str) -> ModelConfig:
    """The dimensions in a parsed config.json; `where` names it in errors."""
    known = {name: one for one in ARCHITECTURES for name in (one.config_name, *one.other_config_names)}
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(f"{where} does not name its architecture; supported are {', '.join(known)}")
    for name in names:
        if isinstance(name, str) and name in known:
            return known[name].parse_config(raw, where)
    raise ModelError(
        f"{where}: architecture {', '.join(map(str, names))} is not supported; supported are "
        f"{', '.join(known)}"
    )


def config_of_gguf(metadata: Json, tensors: Container[str], factors: RopeFactors, where: str) -> Json:
    """The config.json that the metadata, the names of tensors and the rotary factors of a GGUF file amount
    to."""
    named = [(one.gguf_name or one.name, one) for one in ARCHITECTURES if one.in_gguf]
    name = metadata.get("general.architecture")
    # A dense one and one with experts may share a name.
    routes = bool(metadata.get(f"{name}.expert_count", 0))
    found = sorted((one for own, one in named if own == name), key=lambda one: one.routes != routes)
    if not found:
        supported = ", ".join(dict.fromkeys(own for own, _ in named))
        raise ModelError(f"{where}: architecture {name!r} is not supported; supported are {supported}")
    return found[0].config_of_gguf(metadata, tensors, factors, where)

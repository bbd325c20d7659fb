"""What a PEFT adapter_config.json asks for: which modules it adapts, at which rank and scale. Owns refusals; reads no tensors.

The facts of the format that matter here (PEFT's LoraConfig and its guide to adapter files, huggingface.co/docs/peft):
a module is targeted when its name is an entry of `target_modules` or ends in "." and one; the string "all-linear" means every linear
module but the output head, any other string is a regular expression over whole names. Ranks and alphas of single modules stand in
`rank_pattern` and `alpha_pattern`, the first key that matches counts. The update is scaled by alpha / r, or alpha / sqrt(r) with
`use_rslora`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ModelError

ALL_LINEAR = "all-linear"

# Fields that say how an adapter was trained or by what, and change nothing in what it computes.
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"),
    *("corda_config", "eva_config", "loftq_config", "lora_dropout", "qalora_group_size"),
    *("layers_pattern", "megatron_config", "megatron_core"),
)
_UNDERSTOOD = (
    *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "bias", "init_lora_weights"),
)
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "weights stored input-major (fan_in_fan_out)",
    "modules_to_save": "modules trained as a whole (modules_to_save)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "layers_to_transform": "a choice of layers (layers_to_transform)",
    "layer_replication": "replicated layers (layer_replication)",
    "lora_bias": "biases (lora_bias)",
    "use_qalora": "QALoRA",
    "target_parameters": "adapted parameters that are no linear modules (target_parameters)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "Arrow routing (arrow_config)",
}
_NEUTRAL_INITS = ("gaussian", "eva", "orthogonal")  # others (PiSSA, OLoRA, LoftQ ...) change the base model's weights, too
_PLAIN_KEY = re.compile(r"\^?[A-Za-z0-9_]+(\\?\.[A-Za-z0-9_]+)*\$?")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of an adapter_config.json that decides what the adapter computes."""

    rank: int
    alpha: float
    rslora: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]

    def targets(self, module: str) -> bool | None:
        """Whether `module` is to be adapted. None: a regular expression decides that, and is not tried. One out of a file can run for
        ever, nothing can interrupt it, and the tensors beside it show which modules it had matched."""
        if isinstance(self.exclude_modules, str) or (isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR):
            return None
        if any(_names(key, module) for key in self.exclude_modules):
            return False
        if self.target_modules == ALL_LINEAR:
            return module != "lm_head" and not module.endswith("embed_tokens")
        return any(_names(key, module) for key in self.target_modules)

    def rank_of(self, module: str) -> int:
        return next((rank for key, rank in self.rank_pattern if _names(key, module)), self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = next((alpha for key, alpha in self.alpha_pattern if _names(key, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def parse_adapter_config(raw: Mapping[str, Any], where: str) -> AdapterConfig:
    """The config of a LoRA adapter that can be run exactly; anything else is a ModelError that names the field."""
    if raw.get("peft_type") != "LORA":
        raise ModelError(f"{where}: peft_type is {raw.get('peft_type')!r}; only LORA adapters can be loaded")
    _refuse_unsupported(raw, where)
    rank, alpha, rslora = raw.get("r", 8), raw.get("lora_alpha", 8), raw.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise ModelError(f"{where}: use_rslora must be true or false, got {rslora!r}")
    targets = _modules(raw.get("target_modules"), "target_modules", where)
    if not targets:
        raise ModelError(f"{where}: target_modules is empty, so it adapts nothing")
    return AdapterConfig(
        rank=_rank(rank, "r", where),
        alpha=_alpha(alpha, "lora_alpha", where),
        rslora=rslora,
        target_modules=ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else targets,
        exclude_modules=_modules(raw.get("exclude_modules"), "exclude_modules", where) or (),
        rank_pattern=tuple((key, _rank(value, "rank_pattern", where)) for key, value in _pattern(raw, "rank_pattern", where)),
        alpha_pattern=tuple((key, _alpha(value, "alpha_pattern", where)) for key, value in _pattern(raw, "alpha_pattern", where)),
    )


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    for field, what in _UNSUPPORTED.items():
        if raw.get(field):
            raise ModelError(f"{where}: {what} is not supported")
    if raw.get("bias", "none") != "none":
        raise ModelError(f"{where}: bias is {raw['bias']!r}; only adapters without biases (none) are supported")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"{where}: task_type is {raw['task_type']!r}; only CAUSAL_LM adapters can be loaded")
    init = raw.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or init in _NEUTRAL_INITS):
        raise ModelError(f"{where}: init_lora_weights {init!r} goes with changed weights of the base model; convert it to plain LoRA first")
    known = {*_WITHOUT_EFFECT, *_UNDERSTOOD, *_UNSUPPORTED}
    unknown = [field for field, value in raw.items() if field not in known and value]
    if unknown:
        raise ModelError(f"{where}: unknown fields that may change what the adapter computes: {', '.join(map(repr, unknown))}")


def _names(key: str, module: str) -> bool:
    """Whether `key` is the module's name or a whole ending of it; with ^ before it, only the name."""
    if key.startswith("^"):
        return module == key[1:]
    return module == key or module.endswith(f".{key}")


def _modules(value: Any, field: str, where: str) -> tuple[str, ...] | str:
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ModelError(f"{where}: {field} must be a list of names or a string, got {value!r}")
    return tuple(sorted(value))


def _pattern(raw: Mapping[str, Any], field: str, where: str) -> list[tuple[str, Any]]:
    value = raw.get(field) or {}
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {field} must be an object, got {value!r}")
    regular = [key for key in value if not _PLAIN_KEY.fullmatch(key)]
    if regular:
        raise ModelError(f"{where}: {field} takes names of modules or endings of them, no regular expressions such as {regular[0]!r}")
    return [(key.replace("\\.", ".").removesuffix("$"), number) for key, number in value.items()]


def _rank(value: Any, field: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {field} must be a positive whole number, got {value!r}")
    return value


def _alpha(value: Any, field: str, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"{where}: {field} must be a number, got {value!r}")
    return float(value)

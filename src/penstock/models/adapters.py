"""A LoRA adapter directory in PEFT's format, from files to weights on the device. Owns what is refused, the
check against the model, and the digest.

The directory holds adapter_config.json and adapter_model.safetensors. Tensors are named after the module they
adapt, behind "base_model.model.": base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight is [r, in],
...lora_B.weight is [out, r].

The facts of the config that matter here (PEFT's LoraConfig and its guide to adapter files,
huggingface.co/docs/peft): a module is targeted when its name is an entry of `target_modules` or ends in "."
and one; the string "all-linear" means every linear module but the output head, any other string is a regular
expression over whole names. Ranks and alphas of single modules stand in `rank_pattern` and `alpha_pattern`,
the first key that matches counts. The update is scaled by alpha / r, or alpha / sqrt(r) with `use_rslora`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import EMBED, HEAD, WeightSpec
from penstock.models.decoder import Decoder
from penstock.models.hashed_file import DIGEST_BYTES
from penstock.models.layers import row_order
from penstock.models.lora import AdapterWeights, LoraPart, LoraWeight
from penstock.models.model import ModelConfig
from penstock.models.registry import architecture_of, layout
from penstock.models.weights import listed, read_json, read_tensors, refuse_any, unusable_tensors

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_PICKLE_FILE = "adapter_model.bin"
_OUTER_MODULES = (HEAD, EMBED)  # that PEFT can adapt and we cannot
_DIGEST_KEY = b"penstock lora adapter 1"

ALL_LINEAR = "all-linear"

# Fields that say how an adapter was trained or by what, and change nothing in what it computes.
_WITHOUT_EFFECT = (
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "runtime_config",
    ),
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
# others (PiSSA, OLoRA, LoftQ ...) change the base model's weights, too
_NEUTRAL_INITS = ("gaussian", "eva", "orthogonal")
_PLAIN_KEY = re.compile(r"\^?[A-Za-z0-9_]+(\\?\.[A-Za-z0-9_]+)*\$?")


class AdapterFiles(NamedTuple):
    """What one adapter was read from: the identity of its content, and its weights ready to be applied."""

    digest: str
    weights: AdapterWeights


class _Module(NamedTuple):
    """A linear module that can be adapted, as part of one of the model's weights."""

    name: str  # as the base model calls it
    rows: slice  # of the stacked weight
    num_in: int

    @property
    def a(self) -> str:
        return f"{PREFIX}{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        return f"{PREFIX}{self.name}.lora_B.weight"


def read_adapter(directory: Path, model: Decoder) -> AdapterFiles:
    """The adapter in `directory`, for `model`. Everything that is wrong with it is a ModelError. Files are
    read once, so what was digested is what runs, whatever is written to them meanwhile."""
    config_file, tensors_file = adapter_files(directory)
    config = parse_adapter_config(read_json(config_file), str(config_file))
    stacks = _stacks(model.config)
    modules = [module for _, parts in stacks for module in parts]
    _refuse_outer(config, config_file)
    tensors, _ = read_tensors(tensors_file)
    adapted = _check(tensors, config, modules, tensors_file)
    digest = _digest(tensors, config, adapted)
    try:
        return AdapterFiles(digest, _weights(tensors, config, stacks, model))
    except RuntimeError as error:
        # the CPU allocator's words
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ModelError(
            f"the adapter in {directory} does not fit into the memory of {model.device}: {error}"
        ) from error


def adapter_files(directory: Path) -> tuple[Path, Path]:
    """Its two files, both there."""
    try:
        if not directory.is_dir():
            raise ModelError(
                f"{directory} is no directory; an adapter is one with {CONFIG_FILE} and {TENSORS_FILE}"
            )
        for name in (CONFIG_FILE, TENSORS_FILE):
            if not (directory / name).is_file():
                pickled = name == TENSORS_FILE and (directory / _PICKLE_FILE).exists()
                hint = (
                    (f"; {_PICKLE_FILE} is a pickle, which can run code: save the adapter as safetensors")
                    if pickled
                    else ""
                )
                raise ModelError(f"{directory} has no {name}{hint}")
    except OSError as error:  # no permission, or a name that no file can have
        raise ModelError(f"{directory} cannot be read: {error.strerror or error}") from error
    return directory / CONFIG_FILE, directory / TENSORS_FILE


def _stacks(config: ModelConfig) -> list[tuple[WeightSpec, list[_Module]]]:
    """The model's matrices inside layers, with the modules that are stacked in each."""
    matrices = [
        weight for weight in layout(config) if weight.name.startswith("layers.") and len(weight.shape) == 2
    ]
    return [(weight, list(_modules(weight))) for weight in matrices]


def _modules(weight: WeightSpec) -> Iterator[_Module]:
    row = 0
    for part in weight.parts:
        yield _Module(part.name.removesuffix(".weight"), slice(row, row + part.shape[0]), part.shape[1])
        row += part.shape[0]


def blank_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, rank: int = 8
) -> AdapterWeights:
    """An adapter that changes nothing, to try steps with."""
    blank = functools.partial(torch.zeros, dtype=dtype, device=device)
    layer = {}
    for weight in (weight for weight in architecture_of(config).layer(config) if len(weight.shape) == 2):
        modules = list(_modules(weight))
        ranks = [slice(i * rank, (i + 1) * rank) for i in range(len(modules))]
        parts = (
            LoraPart(one.rows, its, blank(one.rows.stop - one.rows.start, rank))
            for one, its in zip(modules, ranks, strict=True)
        )
        layer[weight.name] = LoraWeight(blank(rank * len(modules), modules[0].num_in), tuple(parts))
    return AdapterWeights((layer,) * config.num_layers)


def _refuse_outer(config: AdapterConfig, where: Path) -> None:
    outer = [name for name in _OUTER_MODULES if config.targets(name)]
    if outer:
        raise ModelError(
            f"{where}: adapting {listed(outer)} is not supported, only the linear modules inside layers"
        )


def _check(
    tensors: Mapping[str, Tensor], config: AdapterConfig, modules: list[_Module], where: Path
) -> list[_Module]:
    """The modules that the adapter has tensors for. All that is wrong with the tensors is one ModelError."""
    shapes: dict[str, tuple[int, int]] = {}
    for module in modules:
        rank = config.rank_of(module.name)
        shapes |= {module.a: (rank, module.num_in), module.b: (module.rows.stop - module.rows.start, rank)}
    adapted = [module for module in modules if module.a in tensors or module.b in tensors]
    wanted = [module for module in modules if config.targets(module.name) or module in adapted]
    problems = {
        "missing tensors": [
            name for module in wanted for name in (module.a, module.b) if name not in tensors
        ],
        "tensors that fit no module of the model": [name for name in tensors if name not in shapes],
        "tensors of modules that are not targeted": [
            module.a for module in adapted if config.targets(module.name) is False
        ],
        **unusable_tensors(tensors, shapes),
    }
    refuse_any(problems, f"the tensors in {where} do not fit the model and {CONFIG_FILE}")
    if not adapted:
        raise ModelError(f"{where} holds no tensors")
    return adapted


def _digest(tensors: Mapping[str, Tensor], config: AdapterConfig, adapted: list[_Module]) -> str:
    """Of all that decides what the adapter computes: each module's name and scale, and dtype, shape and bytes
    of its two tensors. Each piece goes in behind its length, so that no two adapters read the same."""
    state = hashlib.blake2b(key=_DIGEST_KEY, digest_size=DIGEST_BYTES)
    for module in adapted:
        pieces = [module.name.encode(), config.scale_of(module.name).hex().encode()]
        for tensor in (tensors[module.a], tensors[module.b]):
            pieces += [
                (f"{tensor.dtype} {list(tensor.shape)}").encode(),
                tensor.contiguous().view(torch.uint8).numpy().tobytes(),
            ]
        for piece in pieces:
            state.update(len(piece).to_bytes(8, "little"))
            state.update(piece)
    return state.hexdigest()


def _weights(
    tensors: Mapping[str, Tensor],
    config: AdapterConfig,
    stacks: list[tuple[WeightSpec, list[_Module]]],
    model: Decoder,
) -> AdapterWeights:
    layers: list[dict[str, LoraWeight]] = [{} for _ in range(model.config.num_layers)]
    order = row_order(model.config)
    for weight, modules in stacks:
        _, layer, name = weight.name.split(".")
        adapted = [module for module in modules if module.a in tensors]
        if adapted:
            layers[int(layer)][name] = _stacked(
                tensors, config, adapted, model, order if name == "qkv" else None
            )
    return AdapterWeights(tuple(layers))


def _stacked(
    tensors: Mapping[str, Tensor],
    config: AdapterConfig,
    adapted: list[_Module],
    model: Decoder,
    order: Tensor | None,
) -> LoraWeight:
    """The scale goes into B in float32, and everything is rounded once to the model's dtype; all of it before
    the copy to the device, which is over when it returns: nothing is left for other lanes to wait for.
    `order`: of the stack's rows in the model."""
    a = _finite(torch.cat([tensors[module.a].float() for module in adapted]).to(model.dtype), adapted)
    parts = []
    at = 0
    for module in adapted:
        b = _finite((tensors[module.b].float() * config.scale_of(module.name)).to(model.dtype), [module])
        if order is not None:
            b = b[order[module.rows] - module.rows.start]  # within each head, hence within the module
        ranks = slice(at, at + b.shape[1])
        parts.append(LoraPart(module.rows, ranks, b.to(model.device)))
        at = ranks.stop
    return LoraWeight(a.to(model.device), tuple(parts))


def _finite(weight: Tensor, modules: list[_Module]) -> Tensor:
    """Numbers that are fine in their file may be too large once they are scaled, or for the model's dtype."""
    if not torch.isfinite(weight).all():
        names = listed([module.name for module in modules])
        raise ModelError(
            f"the adapter's weights of {names}, scaled and in the model's {weight.dtype}, are not finite"
        )
    return weight


# ---------------------------------------------------------------------------------------- adapter_config.json


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
        """Whether `module` is to be adapted. None: a regular expression decides that, and is not tried. One
        out of a file can run for ever, nothing can interrupt it, and the tensors beside it show which modules
        it had matched."""
        if isinstance(self.exclude_modules, str) or (
            isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR
        ):
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
    """The config of a LoRA adapter that can be run exactly; anything else is a ModelError that names the
    field."""
    if raw.get("peft_type") != "LORA":
        raise ModelError(f"{where}: peft_type is {raw.get('peft_type')!r}; only LORA adapters can be loaded")
    _refuse_unsupported(raw, where)
    rank, alpha, rslora = raw.get("r", 8), raw.get("lora_alpha", 8), raw.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise ModelError(f"{where}: use_rslora must be true or false, got {rslora!r}")
    targets = _module_names(raw.get("target_modules"), "target_modules", where)
    if not targets:
        raise ModelError(f"{where}: target_modules is empty, so it adapts nothing")
    return AdapterConfig(
        rank=_rank(rank, "r", where),
        alpha=_alpha(alpha, "lora_alpha", where),
        rslora=rslora,
        target_modules=ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else targets,
        exclude_modules=_module_names(raw.get("exclude_modules"), "exclude_modules", where) or (),
        rank_pattern=tuple(
            (key, _rank(value, "rank_pattern", where)) for key, value in _pattern(raw, "rank_pattern", where)
        ),
        alpha_pattern=tuple(
            (key, _alpha(value, "alpha_pattern", where))
            for key, value in _pattern(raw, "alpha_pattern", where)
        ),
    )


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    for field, what in _UNSUPPORTED.items():
        if raw.get(field):
            raise ModelError(f"{where}: {what} is not supported")
    if raw.get("bias", "none") != "none":
        raise ModelError(
            f"{where}: bias is {raw['bias']!r}; only adapters without biases (none) are supported"
        )
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"{where}: task_type is {raw['task_type']!r}; only CAUSAL_LM adapters can be loaded")
    init = raw.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or init in _NEUTRAL_INITS):
        raise ModelError(
            f"{where}: init_lora_weights {init!r} goes with changed weights of the base model; convert it "
            "to plain LoRA first"
        )
    known = {*_WITHOUT_EFFECT, *_UNDERSTOOD, *_UNSUPPORTED}
    unknown = [field for field, value in raw.items() if field not in known and value]
    if unknown:
        raise ModelError(
            f"{where}: unknown fields that may change what the adapter computes: "
            f"{', '.join(map(repr, unknown))}"
        )


def _names(key: str, module: str) -> bool:
    """Whether `key` is the module's name or a whole ending of it; with ^ before it, only the name."""
    if key.startswith("^"):
        return module == key[1:]
    return module == key or module.endswith(f".{key}")


def _module_names(value: Any, field: str, where: str) -> tuple[str, ...] | str:
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
        raise ModelError(
            f"{where}: {field} takes names of modules or endings of them, no regular expressions such as "
            f"{regular[0]!r}"
        )
    return [(key.replace("\\.", ".").removesuffix("$"), number) for key, number in value.items()]


def _rank(value: Any, field: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {field} must be a positive whole number, got {value!r}")
    return value


def _alpha(value: Any, field: str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number may have any number of digits
        number = math.inf
    if not math.isfinite(number):
        raise ModelError(f"{where}: {field} must be a number, got {value!r}")
    return number

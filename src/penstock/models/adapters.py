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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import EMBED, HEAD, WeightSpec
from penstock.models.decoder import Decoder
from penstock.models.fields import Fields, Json, is_number
from penstock.models.hashed_file import DIGEST_BYTES
from penstock.models.lora import AdapterWeights, LoraPart, LoraWeight
from penstock.models.model import ModelConfig, Split
from penstock.models.registry import architecture_of, layout
from penstock.models.split import Cut, Section, cut_of
from penstock.models.weights import (
    listed,
    memory_needed,
    read_json,
    read_tensors,
    refuse_any,
    unusable_tensors,
)

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_PICKLE_FILE = "adapter_model.bin"
_DIGEST_KEY = b"penstock lora adapter 1"

ALL_LINEAR = "all-linear"

# Fields that are understood, and fields that say how an adapter was trained or by what, and change nothing in
# what it computes.
_KNOWN = re.compile(
    "peft_type|task_type|r|lora_alpha|use_rslora|rank_pattern|alpha_pattern|target_modules|exclude_modules|bias"
    "|init_lora_weights|auto_mapping|base_model_name_or_path|inference_mode|peft_version|revision"
    "|runtime_config|corda_config|eva_config|loftq_config|lora_dropout|qalora_group_size|layers_pattern"
    "|megatron_config|megatron_core"
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
_NEUTRAL_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
_EXPERT = re.compile(r"(?:^|\.)(mlp|block_sparse_moe)\.(experts|gate|shared_experts?|shared_expert_gate)\b")
_PLAIN_KEY = re.compile(r"\^?[A-Za-z0-9_]+(\\?\.[A-Za-z0-9_]+)*\$?")


class AdapterFiles(NamedTuple):
    """What one adapter was read from: the identity of its content, and its weights ready to be applied."""

    digest: str
    weights: AdapterWeights


ReadAdapter = Callable[[Path], AdapterFiles]


class _Module(NamedTuple):
    """A linear module that can be adapted, as part of one of the model's weights."""

    name: str  # as the base model calls it
    rows: slice  # of the stacked weight
    num_out: int
    num_in: int
    cut: Cut | None = None  # of its weight, if this rank has a part of it

    @property
    def a(self) -> str:
        return f"{PREFIX}{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        return f"{PREFIX}{self.name}.lora_B.weight"


def read_adapter(directory: Path, model: Decoder, whole: ModelConfig | None = None) -> AdapterFiles:
    """The adapter in `directory`, for `model`. Everything that is wrong with it is a ModelError. Files are
    read once, so what was digested is what runs, whatever is written to them meanwhile. `whole`: the
    dimensions of the whole model, if `model` is a part of it; so much of the adapter is kept."""
    config_file, tensors_file = adapter_files(directory)
    config = parse_adapter_config(read_json(config_file), str(config_file))
    if outer := [name for name in (HEAD, EMBED) if config.targets(name)]:
        refused = f"adapting {listed(outer)} is not supported"
        raise ModelError(f"{config_file}: {refused}, only the linear modules inside layers")
    tensors = _named_as_text(read_tensors(tensors_file)[0], model.config)
    if experts := [name for name in tensors if _EXPERT.search(name)]:
        named = listed([name.removeprefix(PREFIX) for name in experts])
        raise ModelError(f"{tensors_file}: adapting experts and routers is not supported: {named}")
    stacks = _stacks(whole or model.config, model.ops.split)
    adapted = _check(tensors, config, [module for _, parts in stacks for module in parts], tensors_file)
    with memory_needed(f"the adapter in {directory} does not fit into the memory of {model.device}"):
        return AdapterFiles(_digest(tensors, config, adapted), _weights(tensors, config, stacks, model))


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
                hint = f"; {_PICKLE_FILE} is a pickle, which can run code: save the adapter as safetensors"
                raise ModelError(f"{directory} has no {name}{hint if pickled else ''}")
    except OSError as error:  # no permission, or a name that no file can have
        raise ModelError(f"{directory} cannot be read: {error.strerror or error}") from error
    return directory / CONFIG_FILE, directory / TENSORS_FILE


def _named_as_text(tensors: Mapping[str, Tensor], config: ModelConfig) -> Mapping[str, Tensor]:
    """An adapter that was trained on a model that also takes images has other names."""
    found: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = full.removeprefix(PREFIX)
        own = full if name == full else PREFIX + architecture_of(config).text_name(name)
        if own in found:
            raise ModelError(f"the adapter has {own} twice, the second time as {full}")
        found[own] = tensor
    return found


def _stacks(config: ModelConfig, split: Split) -> list[tuple[WeightSpec, list[_Module]]]:
    """The model's matrices inside layers that can be adapted, with the modules that are stacked in each."""
    inside = [weight for weight in layout(config) if weight.name.startswith("layers.")]
    return [(weight, list(_modules(weight, config, split))) for weight in inside if _is_adaptable(weight)]


def _is_adaptable(weight: WeightSpec) -> bool:
    return len(weight.shape) == 2 and not _EXPERT.search(weight.parts[0].name)


def _modules(weight: WeightSpec, config: ModelConfig, split: Split) -> Iterator[_Module]:
    row, shapes = 0, tuple(part.shape for part in weight.parts)
    for index, (name, shape) in enumerate(weight.parts):
        cut = cut_of(weight.name, index, shapes, (config, split)) if split.size > 1 else None
        end = row + (shape if cut is None else cut.shape(shape))[0]
        yield _Module(name.removesuffix(".weight"), slice(row, end), shape[0], shape[1], cut)
        row = end


def blank_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, rank: int = 8
) -> AdapterWeights:
    """An adapter that changes nothing, to try steps with."""
    blank = functools.partial(torch.zeros, dtype=dtype, device=device)
    layers: list[dict[str, LoraWeight]] = []
    for index in range(config.num_layers):
        layers.append({})
        for weight in architecture_of(config).layer(config, index):
            if _is_adaptable(weight):
                modules = list(_modules(weight, config, Split()))
                parts = [(module, blank(module.num_out, rank)) for module in modules]
                a, order = blank(rank * len(modules), weight.shape[1]), _row_order(config, index, weight.name)
                layers[-1][weight.name] = _stacked(a, parts, order)
    return AdapterWeights(tuple(layers))


def _row_order(config: ModelConfig, layer: int, name: str) -> Tensor | None:
    """Of this weight, where the model's is not that of files."""
    return architecture_of(config).layer_kind(config, layer).row_orders(config).get(name)


def _stacked(a: Tensor, parts: Iterable[tuple[_Module, Tensor]], order: Tensor | None) -> LoraWeight:
    """On the device of `a`, the A matrices of all modules; `parts`: each module with its B."""
    made: list[LoraPart] = []
    for module, b in parts:
        first = made[-1].ranks.stop if made else 0
        ranks = slice(first, first + b.shape[1])
        made += [LoraPart(columns, ranks, b[rows].to(a.device)) for columns, rows in _places(module, order)]
    return LoraWeight(a, tuple(made))


def _places(module: _Module, order: Tensor | None) -> Iterator[tuple[slice, slice | Tensor]]:
    """Where the rows of `module` are in a stack with its rows in this order: runs of them, and which of its
    own rows each has."""
    if order is None:
        yield module.rows, slice(None)
        return
    places = torch.nonzero((order >= module.rows.start) & (order < module.rows.stop)).flatten()
    ends = [*(torch.nonzero(places.diff() > 1).flatten() + 1).tolist(), len(places)]
    for first, end in zip([0, *ends], ends, strict=False):
        run = places[first:end]
        yield slice(int(run[0]), int(run[-1]) + 1), order[run] - module.rows.start


def _check(
    tensors: Mapping[str, Tensor], config: AdapterConfig, modules: list[_Module], where: Path
) -> list[_Module]:
    """The modules that the adapter has tensors for. All that is wrong with the tensors is one ModelError."""
    shapes: dict[str, tuple[int, int]] = {}
    for module in modules:
        rank = config.rank_of(module.name)
        shapes |= {module.a: (rank, module.num_in), module.b: (module.num_out, rank)}
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
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            pieces += [f"{tensor.dtype} {list(tensor.shape)}".encode(), data]
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
    """The scale goes into B in float32, and everything is rounded once to the model's dtype; all of it before
    the copy to the device, which is over when it returns: nothing is left for other lanes to wait for."""
    layers: list[dict[str, LoraWeight]] = [{} for _ in range(model.config.num_layers)]

    def scaled(module: _Module) -> Tensor:
        b = _finite((tensors[module.b].float() * config.scale_of(module.name)).to(model.dtype), [module])
        return b if module.cut is None else Cut(module.cut.rows).of(b)

    for weight, modules in stacks:
        _, layer, name = weight.name.split(".")
        if adapted := [module for module in modules if module.a in tensors]:
            a = torch.cat([tensors[module.a].float() for module in adapted]).to(model.dtype)
            a, cut = _finite(a, adapted), adapted[0].cut
            if cut is not None and cut.columns is not None:
                a = cut._replace(rows=(Section(0, len(a), len(a)),)).of(a)
            parts, order = [(one, scaled(one)) for one in adapted], _row_order(model.config, int(layer), name)
            layers[int(layer)][name] = _stacked(a.to(model.device), parts, order)
    return AdapterWeights(tuple(layers))


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
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

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
            return module not in (HEAD, EMBED)
        return any(_names(key, module) for key in self.target_modules)

    def rank_of(self, module: str) -> int:
        return next((rank for key, rank in self.rank_pattern.items() if _names(key, module)), self.rank)

    def scale_of(self, module: str) -> float:
        rank, alphas = self.rank_of(module), self.alpha_pattern.items()
        alpha = next((alpha for key, alpha in alphas if _names(key, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def parse_adapter_config(raw: Json, where: str) -> AdapterConfig:
    """The config of a LoRA adapter that can be run exactly; anything else is a ModelError that names the
    field."""
    fields = Fields(raw, where)
    _refuse_unsupported(fields)
    targets = _module_names(fields, "target_modules")
    fields.need(targets, "target_modules is empty, so it adapts nothing")
    alphas = {"lora_alpha": raw.get("lora_alpha", 8), **_pattern(fields, "alpha_pattern")}
    for key, alpha in alphas.items():
        name = "lora_alpha" if key == "lora_alpha" else "alpha_pattern"
        fields.need(is_number(alpha), f"{name} must be a number, got {alpha!r}")
    ranks = _pattern(fields, "rank_pattern")
    return AdapterConfig(
        rank=fields.count("r", 8),
        alpha=alphas.pop("lora_alpha"),
        rslora=fields.flag("use_rslora", False),
        target_modules=ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else targets,
        exclude_modules=_module_names(fields, "exclude_modules"),
        rank_pattern={
            key: Fields({"rank_pattern": rank}, where).count("rank_pattern") for key, rank in ranks.items()
        },
        alpha_pattern=alphas,
    )


def _refuse_unsupported(fields: Fields) -> None:
    raw = fields.raw
    kind, bias, task = raw.get("peft_type"), raw.get("bias", "none"), raw.get("task_type")
    fields.need(kind == "LORA", f"peft_type is {kind!r}; only LORA adapters can be loaded")
    for field, what in _UNSUPPORTED.items():
        fields.need(not raw.get(field), f"{what} is not supported")
    fields.need(bias == "none", f"bias is {bias!r}; only adapters without biases (none) are supported")
    fields.need(task in (None, "CAUSAL_LM"), f"task_type is {task!r}; only CAUSAL_LM adapters can be loaded")
    init = raw.get("init_lora_weights")
    fields.need(
        init in _NEUTRAL_INITS,
        f"init_lora_weights {init!r} goes with changed weights of the base model; convert it to plain LoRA "
        "first",
    )
    unknown = [
        field
        for field, value in raw.items()
        if value and field not in _UNSUPPORTED and not _KNOWN.fullmatch(field)
    ]
    named = ", ".join(map(repr, unknown))
    fields.need(not unknown, f"unknown fields that may change what the adapter computes: {named}")


def _names(key: str, module: str) -> bool:
    """Whether `key` is the module's name or a whole ending of it; with ^ before it, only the name."""
    return module == key.removeprefix("^") or module.endswith(f".{key}")


def _module_names(fields: Fields, field: str) -> tuple[str, ...] | str:
    value = fields.raw.get(field) or ()
    if isinstance(value, str):
        return value
    good = isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)
    fields.need(good, f"{field} must be a list of names or a string, got {value!r}")
    return tuple(sorted(value))


def _pattern(fields: Fields, field: str) -> dict[str, Any]:
    value = fields.section(field)
    regular = [key for key in value if not _PLAIN_KEY.fullmatch(key)]
    fields.need(
        not regular,
        f"{field} takes names of modules or endings of them, no regular expressions such as {regular[:1]}",
    )
    return {key.replace("\\.", ".").removesuffix("$"): number for key, number in value.items()}

"""Random LoRA adapters in PEFT's files, and base tensors with one merged in: the dense reference of what an
adapter computes. For tests only; written from the format, without our reader and without PEFT."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.models.model import ModelConfig
from penstock.models.registry import layout

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_MODULES = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def adapter_tensors(
    config: ModelConfig, seed: int, rank: int = 4, modules: Sequence[str] = ALL_MODULES
) -> dict[str, Tensor]:
    """For every layer's `modules`, without those of experts: A as PEFT starts with it, B not zero as it is
    after training."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for part in (part for weight in layout(config) for part in weight.parts):
        module = part.name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules and "expert" not in module:
            num_out, num_in = part.shape
            tensors[f"{PREFIX}{module}.lora_A.weight"] = (
                torch.randn(rank, num_in, generator=generator) * num_in**-0.5
            )
            tensors[f"{PREFIX}{module}.lora_B.weight"] = (
                torch.randn(num_out, rank, generator=generator) * 0.2 * rank**-0.5
            )
    return tensors


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Path:
    """The two files, with the fields that PEFT writes; `fields` replace or add some, None in them
    included."""
    modules = sorted({name.split(".")[-3] for name in tensors})
    rank = next((len(tensor) for name, tensor in tensors.items() if "lora_A" in name), 4)
    nothing = ("auto_mapping", "exclude_modules", "layers_to_transform", "modules_to_save")
    usual: dict[str, Any] = {
        **dict.fromkeys(nothing),
        **dict.fromkeys(("fan_in_fan_out", "use_dora", "use_rslora"), False),
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "init_lora_weights": True,
        "r": rank,
        "lora_alpha": 2 * rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "lora_dropout": 0.05,
        "peft_version": "0.18.0",
        "base_model_name_or_path": "some/base",
        "target_modules": modules,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**usual, **fields}))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        directory / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def write_random_adapter(
    directory: Path, config: ModelConfig, seed: int, rank: int = 4, **fields: Any
) -> Path:
    return write_adapter(directory, adapter_tensors(config, seed, rank), **fields)


def merged(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float | Mapping[str, float]
) -> dict[str, Tensor]:
    """`base` with W + scale * B A for every adapted module; `scale` may differ by the last part of the
    module's name."""
    tensors = dict(base)
    for name in base:
        module = name.removesuffix(".weight")
        a, b = (adapter.get(f"{PREFIX}{module}.lora_{which}.weight") for which in "AB")
        if a is not None and b is not None:
            factor = scale if isinstance(scale, float) else scale[module.rpartition(".")[2]]
            update = factor * (b.double() @ a.double())
            tensors[name] = (base[name].double() + update).to(base[name].dtype)
    return tensors


@contextlib.contextmanager
def merged_into(model: Any, adapter: Mapping[str, Tensor], scale: float) -> Iterator[None]:
    """A model of `transformers` with W + scale * B A for every adapted module; as it was afterwards."""
    before = {}
    with torch.no_grad():
        for name in [name for name in adapter if name.endswith(".lora_A.weight")]:
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            weight = model.get_submodule(module).weight
            before[weight] = weight.clone()
            update = adapter[f"{PREFIX}{module}.lora_B.weight"].double() @ adapter[name].double()
            weight.copy_((weight.double() + scale * update).float())
        yield
        for weight, old in before.items():
            weight.copy_(old)

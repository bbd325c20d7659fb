"""What experts that need not be on the device change about a run. Owns the refusal of what does not go with
them, and how many of them the device has."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch

from penstock.config import GIB, Config
from penstock.engine.sizing import ExpertRoom
from penstock.errors import ConfigError
from penstock.kv.memory import free_bytes
from penstock.models.model import ModelConfig, Routing

log = logging.getLogger(__name__)


def num_routed_layers(dims: ModelConfig) -> int:
    return 0 if dims.routing is None else dims.num_layers - len(dims.routing.dense_layers)


def expert_bytes(dims: ModelConfig, dtype: torch.dtype) -> int:
    """Of one expert."""
    return 0 if dims.routing is None else 3 * dims.hidden * dims.routing.ffn * dtype.itemsize


def all_expert_bytes(dims: ModelConfig, dtype: torch.dtype) -> int:
    num_experts = 0 if dims.routing is None else dims.routing.num_experts
    return num_routed_layers(dims) * num_experts * expert_bytes(dims, dtype)


def for_experts(config: Config, dims: ModelConfig, dtype: torch.dtype, room: ExpertRoom | None) -> Config:
    """`config` as a model of these dimensions runs with it. `room`: what --experts-on-device auto takes;
    None: any number. Raises ConfigError by the name of a flag."""
    experts = config.experts
    for flag, given in (
        ("--experts-on-device", experts.on_device),
        ("--record-routing", experts.record),
    ):
        if given is not None and dims.routing is None:
            raise ConfigError(f"{flag} {given}: this model has no experts")
    if experts.record is not None:
        config = replace(config, engine=replace(config.engine, capture=False))
    if experts.on_device is None:
        return config
    needed = all_expert_bytes(dims, dtype)
    wanted = experts.wanted_bytes(needed)
    if (wanted is None and (room is None or room.num_bytes >= needed)) or (
        wanted is not None and wanted >= needed
    ):
        log.info("all experts are on the device: %.2f GiB", needed / GIB)
        return replace(config, experts=replace(experts, on_device=None, guesses=True))
    if wanted is not None:
        check_slots(config, dims, dtype, wanted)
    _check_source(config)
    free = free_bytes(torch.device("cpu"))
    if needed > free:
        raise ConfigError(
            f"--experts-on-device {experts.on_device}: all experts take {needed / GIB:.2f} GiB of host "
            f"memory, of which {free / GIB:.2f} GiB are free"
        )
    source = replace(config.source, experts_in_host=True)
    if room is None and dtype == torch.float32:  # a CPU would choose another form
        source = replace(source, weights="float32")
    return replace(config, source=source)


def _check_source(config: Config) -> None:
    if config.source.deterministic:
        raise ConfigError("--experts-on-device: --deterministic holds all experts on the device")
    if config.source.weights not in ("auto", "float32"):
        raise ConfigError(
            f"--experts-on-device: experts are in the type of --dtype, so --weights {config.source.weights} "
            "is not possible"
        )


def num_expert_slots(
    config: Config, dims: ModelConfig, dtype: torch.dtype, room: ExpertRoom | None, free: int
) -> int:
    """Experts that the device has. `room`: what auto takes; `free`: bytes of the device."""
    text, needed, why = config.experts.on_device, all_expert_bytes(dims, dtype), ""
    num_bytes = config.experts.wanted_bytes(needed)
    if num_bytes is None:
        num_bytes = needed
        if room is not None:
            num_bytes, why = min(room.num_bytes, needed), f" beside {room.beside}"
    num = check_slots(config, dims, dtype, num_bytes)
    if num_bytes > free:
        raise ConfigError(
            f"--experts-on-device {text}: {num_bytes / GIB:.2f} GiB, of which {free / GIB:.2f} GiB are free"
        )
    assert dims.routing is not None
    every, kept = needed / GIB, num * expert_bytes(dims, dtype) / GIB
    share = dims.routing.top_k / dims.routing.num_experts  # of all experts, those of one token
    log.info(
        "experts: %.2f GiB in host memory, %.2f GiB of them on the device%s; if all were hit alike, a token "
        "alone in its step would miss %.2f GiB, and %.3f less for each GiB more",
        *(every, kept, why, (every - kept) * share, share),
    )
    return num


def check_slots(config: Config, dims: ModelConfig, dtype: torch.dtype, num_bytes: int) -> int:
    """How many experts fit into `num_bytes` of the device. A token's experts of one layer have to."""
    assert isinstance(dims.routing, Routing)
    one, least = expert_bytes(dims, dtype), dims.routing.top_k
    num = num_bytes // one
    if num < least:
        raise ConfigError(
            f"--experts-on-device {config.experts.on_device}: {num_bytes / GIB:.4f} GiB hold {num} experts "
            f"of {one / 2**20:.2f} MiB, and a token runs through {least} of a layer: give at least "
            f"{math.ceil(1e4 * least * one / GIB) / 1e4:.4f}"
        )
    return num

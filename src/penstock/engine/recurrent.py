"""What a model with recurrent layers changes about a run. Owns the refusal of options that need KV without
the states at its end, or a state that can go back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from penstock.config import (
    Config,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    Settings,
    settings_of,
)
from penstock.errors import ConfigError
from penstock.models.model import ModelConfig

log = logging.getLogger(__name__)

_STATE_EVERY = 8192  # tokens: a step of prompts on CUDA; a state takes less than the KV of so many
# fields that must be as by default
_REFUSED: Mapping[type[Settings], tuple[str, ...]] = {
    ModelSource: ("deterministic",),
    KvConfig: ("residency", "pin_spans", "scorer", "events"),
    LoraConfig: ("adapters", "dir"),
}


def for_recurrent(config: Config, dims: ModelConfig) -> Config:
    """`config` as a model of these dimensions runs with it. Raises ConfigError by the name of a flag."""
    if dims.recurrence is None:
        for flag, given in (
            ("--kv-offload-states-gib", config.offload.states_gib),
            ("--state-every", config.offload.state_every),
        ):
            if given:
                raise ConfigError(f"{flag} {given:g}: this model has no recurrent layers")
        return config
    for part in (config.source, config.kv, config.lora):
        for one in settings_of(type(part)):
            if one.field in _REFUSED[type(part)] and getattr(part, one.field) != one.default:
                flag = "--kv-events" if one.field == "events" else one.flag
                raise ConfigError(f"{flag} is not supported with a model that has recurrent layers")
    has_stores = config.offload.ssd_dir is not None or config.offload.remote is not None
    if has_stores and config.ranks.size > 1:
        raise ConfigError(
            "--kv-offload-ssd-dir and --kv-offload-remote are not supported with --tensor-parallel and a "
            "model that has recurrent layers"
        )
    if config.offload.enabled:
        return replace(config, offload=_with_distance(config.offload, config.kv.block_tokens))
    if config.kv.prefix_cache:
        log.warning("this model has recurrent layers: without --kv-offload no prefix is reused")
    return replace(config, kv=replace(config.kv, prefix_cache=False))


def _with_distance(offload: OffloadConfig, block_tokens: int) -> OffloadConfig:
    every = offload.state_every
    if every is None:
        every = max(1, _STATE_EVERY // block_tokens) * block_tokens
    if every % block_tokens:
        raise ConfigError(f"--state-every must be a multiple of --block-tokens {block_tokens}, got {every}")
    return replace(offload, state_every=every)

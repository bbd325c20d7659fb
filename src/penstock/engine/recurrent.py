"""What a model with recurrent layers changes about a run. Owns the refusal of options that would have no
effect, or that were not made for states."""

from __future__ import annotations

import logging
from dataclasses import replace

from penstock.config import Config, OffloadConfig
from penstock.errors import ConfigError
from penstock.models.model import ModelConfig

log = logging.getLogger(__name__)

_STATE_EVERY = 8192  # tokens: a step of prompts on CUDA; a state takes less than the KV of so many


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
    if config.source.deterministic:
        raise ConfigError("--deterministic is not supported with a model that has recurrent layers")
    if config.offload.enabled:
        return replace(config, offload=_with_distance(config.offload, config.kv.block_tokens))
    if config.kv.events:
        raise ConfigError("--kv-events: with recurrent layers no prefix is reused without --kv-offload")
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

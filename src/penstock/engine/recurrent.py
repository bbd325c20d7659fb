"""What a model with recurrent layers changes about a run: prefixes are not reused, since KV of a prefix is of
no use without the states at its end. Owns the refusal of options that need such prefixes, or a state that can
go back."""

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
    SpeculationConfig,
    settings_of,
)
from penstock.errors import ConfigError
from penstock.models.model import ModelConfig

log = logging.getLogger(__name__)

# Fields that must be as by default. Offloading itself is on by default, and turned off.
_REFUSED: Mapping[type[Settings], tuple[str, ...]] = {
    ModelSource: ("deterministic",),
    KvConfig: ("resident_tokens", "residency", "pin_spans", "scorer", "events"),
    OffloadConfig: ("host_gib", "eviction", "ssd_dir", "ssd_admission", "remote"),
    LoraConfig: ("adapters", "dir"),
    SpeculationConfig: ("proposer",),
}


def for_recurrent(config: Config, dims: ModelConfig) -> Config:
    """`config` as a model of these dimensions runs with it. Raises ConfigError by the name of a flag."""
    if dims.recurrence is None:
        return config
    for part in (config.source, config.kv, config.offload, config.lora, config.speculation):
        for one in settings_of(type(part)):
            if one.field in _REFUSED[type(part)] and getattr(part, one.field) != one.default:
                flag = "--kv-events" if one.field == "events" else one.flag
                raise ConfigError(f"{flag} is not supported with a model that has recurrent layers")
    reuses = config.offload.enabled or config.kv.prefix_cache
    if reuses:
        log.warning("this model has recurrent layers: no prefix is reused, on the device or from host memory")
    kv, offload = replace(config.kv, prefix_cache=False), replace(config.offload, enabled=False)
    return replace(config, kv=kv, offload=offload)

"""What is known of ranks before anything of a model is: the options that several ranks do not support, and
what a launcher says. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.config import (
    Config,
    ExpertsConfig,
    KvConfig,
    ModelSource,
    SanitizeConfig,
    Settings,
    settings_of,
)
from penstock.errors import ConfigError

# fields that must be as by default with several ranks
_REFUSED: Mapping[type[Settings], tuple[str, ...]] = {
    ModelSource: ("deterministic",),
    KvConfig: ("residency", "pin_spans", "scorer"),
    ExpertsConfig: ("on_device", "order", "guesses", "record"),
    SanitizeConfig: ("check_bytes",),
}


def check_supported(config: Config) -> None:
    """Raises ConfigError by the name of a flag that several ranks do not support."""
    if config.ranks.size == 1:
        return
    for part in (config.source, config.kv, config.experts, config.sanitize):
        for one in settings_of(type(part)):
            if one.field in _REFUSED[type(part)] and getattr(part, one.field) != one.default:
                raise ConfigError(f"{one.flag} is not supported with --tensor-parallel")
    kind, has_stores = config.speculation.kind, config.offload.ssd_dir or config.offload.remote
    if kind in ("draft", "eagle") and has_stores:  # its blocks depend on the number of ranks
        raise ConfigError(
            "--kv-offload-ssd-dir and --kv-offload-remote are not supported with --tensor-parallel and "
            f"--speculate {kind}"
        )


def is_follower(config: Config, environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as a rank other than 0."""
    found = launched_for(config, environ)
    return found is not None and found.rank > 0


class Launched(NamedTuple):
    """What a launcher such as torchrun says in the environment."""

    rank: int
    size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launched | None:
        """None: no launcher started this process."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        return cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]))


def launched_for(config: Config, environ: Mapping[str, str]) -> Launched | None:
    """None: no launcher started this process, or it is to have one rank."""
    size, found = config.ranks.size, Launched.of(environ)
    if found is None or size == 1:
        return None
    if found.size != size or not 0 <= found.rank < size:
        raise ConfigError(
            f"--tensor-parallel {size}: the environment has RANK {found.rank} and WORLD_SIZE {found.size}"
        )
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        raise ConfigError("RANK is set, and MASTER_ADDR or MASTER_PORT is not: start all ranks with torchrun")
    return found

"""What a user of another engine writes to configure Penstock's tiers. Owns names, defaults, their check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from penstock.config import EVICTIONS, EvictionName
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TierOptions:
    """A disk, a shared store, or both."""

    ssd_dir: str | None = None
    ssd_gib: float = 16.0  # of all files together
    eviction: EvictionName = "returning"  # what a full disk forgets first
    persist_s: float = 10.0  # a crash of the machine loses what was written in this time
    remote: str | None = field(default=None, repr=False)  # a URL; may contain a password
    remote_timeout_s: float = 1.0  # for one call; longer means that the store is down
    queue_mib: float = 512.0  # of writes in flight to each of them; further ones are skipped
    # what the user says instead of the content of the weights: equal names share blocks
    weights_id: str | None = None
    # the user's word that the content of an adapter never changes under its name and path
    trust_adapters: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError with one line that names the option."""
        known = [one.name for one in fields(cls)]
        if unknown := sorted(set(map(str, given)) - set(known)):
            raise ConfigError(f"penstock does not know the option {unknown[0]!r}; it has {', '.join(known)}")
        options = cls(**given)
        options._check()
        return options

    def _check(self) -> None:
        for name in ("ssd_dir", "remote", "weights_id"):
            value = getattr(self, name)
            _need(
                value is None or (isinstance(value, str) and value != ""), name, "must be a text, not empty"
            )
        _need(isinstance(self.trust_adapters, bool), "trust_adapters", "must be true or false")
        _need(self.eviction in EVICTIONS, "eviction", f"must be one of {', '.join(EVICTIONS)}")
        for name, most in (
            ("ssd_gib", 2**30),
            ("persist_s", 86400),
            ("remote_timeout_s", 60),
            ("queue_mib", 2**30),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            _need(is_number and 0 < value <= most, name, f"must be a number above 0 and at most {most}")
        _need(bool(self.ssd_dir or self.remote), "ssd_dir or remote", "is needed, or both")


def _need(condition: object, name: str, rule: str) -> None:
    if not condition:
        raise ConfigError(f"penstock: the option {name} {rule}")

"""Stores that several engines share. Owns the list of kinds; each is one file with one `BlockStore`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from penstock.errors import ConfigError
from penstock.kv.tiers.store import BlockStore, Space

# By the URL's scheme: the module, which has `open_store(url, space, timeout_s) -> BlockStore`.
KINDS = {
    "valkey": "valkey",
    "valkeys": "valkey",
    "mooncake": "mooncake",
    "s3": "s3",
}


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily: a store that is down at start is a store that is down. Raises ConfigError for a URL that can never work; no message
    repeats the URL, which may have a password in it."""
    scheme = url.partition("://")[0]  # urlsplit's own errors repeat what it was given
    if scheme not in KINDS:
        raise ConfigError(f"--kv-offload-remote must start with one of {', '.join(f'{kind}://' for kind in KINDS)}")
    module = importlib.import_module(f"penstock.kv.tiers.remote.{KINDS[scheme]}")
    make: Callable[[str, Space, float], BlockStore] = module.open_store
    return make(url, space, timeout_s)

"""Stores that several engines share: one module for each kind, with a `BlockStore` in it. Owns the table of kinds, and the check of a value
that came back; its format is `envelope`'s."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np

from penstock.errors import ConfigError
from penstock.kv.tiers.envelope import HEADER_BYTES, unpack
from penstock.kv.tiers.store import BlockStore, Outcome, Space

# By the URL's scheme: the module here that has `open_store(url, space, timeout_s) -> BlockStore`.
KINDS = {
    "valkey": "valkey",
    "valkeys": "valkey",
    "redis": "valkey",
    "rediss": "valkey",
    "mooncake": "mooncake",
    "s3": "s3",
}


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily: a store that is down at start is a store that is down. Raises ConfigError for a URL that can never work; no message
    repeats the URL, which may have a password in it."""
    scheme = url.partition("://")[0]  # urlsplit's own errors repeat what it was given
    if scheme not in KINDS:
        raise ConfigError(f"--kv-offload-remote must start with one of {', '.join(f'{kind}://' for kind in KINDS)}")
    try:
        module = importlib.import_module(f"penstock.kv.tiers.remote.{KINDS[scheme]}")
    except ImportError as error:
        hint = f"needs its client library: pip install 'penstock[remote]' ({error})"
        raise ConfigError(f"--kv-offload-remote {scheme}:// {hint}") from None
    make: Callable[[str, Space, float], BlockStore] = module.open_store
    return make(url, space, timeout_s)


def is_block(header: memoryview | bytes, key: bytes, space: bytes, payload: memoryview) -> bool:
    """Whether `payload` is what was written under `key` in `space`, as the header before it says."""
    envelope = unpack(header)
    return envelope is not None and envelope.key == key and envelope.space == space and envelope.fits(payload)


def copy_checked(value: memoryview, key: bytes, space: bytes, slot: memoryview) -> Outcome:
    """A whole value, header and bytes, into the host slot. The slot is what is checked: others may still write into `value`."""
    if len(value) != HEADER_BYTES + len(slot):
        return Outcome.CORRUPT
    np.copyto(np.frombuffer(slot, np.uint8), np.frombuffer(value, np.uint8, offset=HEADER_BYTES))  # without the interpreter's lock
    return Outcome.DONE if is_block(bytes(value[:HEADER_BYTES]), key, space, slot) else Outcome.CORRUPT

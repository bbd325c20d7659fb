"""Blocks, slots and keys for tests of stores that several engines share. Owns the memory that a store is
given; which store it is, is the test's business."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from penstock.errors import StoreFailed
from penstock.kv.tiers.store import BlockStore, Outcome, Space

BLOCK_BYTES = 48 * 1024 + 8  # no multiple of anything
TIMEOUT_S = 2.0
LATE_S = 20.0  # beyond this a call hangs; a busy machine may take a while to notice a deadline
NUM_SLOTS = 64


def keys_of(label: str, num: int) -> list[bytes]:
    return [hashlib.blake2b(f"{label} {i}".encode(), digest_size=16).digest() for i in range(num)]


def block_of(key: bytes) -> bytes:
    """What stands under `key`, whoever asks."""
    seed = int.from_bytes(key, "little") % 2**32
    return np.random.default_rng(seed).bytes(BLOCK_BYTES)


class Slots:
    """Host memory as an engine has it, and the space it belongs to."""

    def __init__(self, space: bytes = b"a") -> None:
        self.memory = memoryview(bytearray(NUM_SLOTS * BLOCK_BYTES))
        self.space = Space(hashlib.blake2b(space, digest_size=32).digest(), BLOCK_BYTES)

    def views(self, num: int, first: int = 0) -> list[memoryview]:
        return [
            self.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] for slot in range(first, first + num)
        ]

    def write(self, store: BlockStore, keys: Sequence[bytes], first: int = 0) -> list[Outcome]:
        views = self.views(len(keys), first)
        for key, view in zip(keys, views, strict=True):
            view[:] = block_of(key)
        return store.write(keys, list(range(len(keys))), views)

    def read(self, store: BlockStore, keys: Sequence[bytes], first: int = 0) -> list[Outcome]:
        """Each DONE is compared with what belongs there."""
        views = self.views(len(keys), first)
        for view in views:
            view[:] = b"\xee" * BLOCK_BYTES
        outcomes = store.read(keys, views)
        for key, view, outcome in zip(keys, views, outcomes, strict=True):
            assert outcome is not Outcome.DONE or view == block_of(key), "bytes that were never written there"
        return outcomes


def assert_fails(call: Callable[[], object]) -> StoreFailed:
    """With StoreFailed, and not much later than it may."""
    began = time.monotonic()
    with pytest.raises(StoreFailed) as caught:
        call()
    assert time.monotonic() - began < LATE_S
    return caught.value


def wait_usable(store: BlockStore) -> None:
    """As a breaker does: look until it is back."""
    until = time.monotonic() + LATE_S
    while True:
        try:
            return store.probe()
        except StoreFailed:
            if time.monotonic() > until:
                raise

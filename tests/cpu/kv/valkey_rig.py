"""What the tests of the Valkey store share: blocks that say whose they are, and ways to ask for them. Owns no
server."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.errors import StoreFailed
from penstock.kv.tiers import store as envelope
from penstock.kv.tiers.remote import open_store
from penstock.kv.tiers.store import BlockStore, Outcome, Space
from penstock_valkey import ValkeyStore

BLOCK_BYTES = 4096
PATIENT_S = 30.0  # for servers that answer: a busy machine is slow
SHORT_S = 0.5  # for servers that do not
HANG_S = 20.0  # nothing here takes that long unless it hangs
DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT
SECRET = "hunter2swordfish"


def space(digest: bytes = b"s" * 32, block_bytes: int = BLOCK_BYTES) -> Space:
    return Space(digest, block_bytes)


@contextlib.contextmanager
def opened(url: str, timeout_s: float = PATIENT_S, of: Space | None = None) -> Iterator[ValkeyStore]:
    with contextlib.closing(open_store(url, of or space(), timeout_s)) as store:
        assert isinstance(store, ValkeyStore)
        yield store


def keys_of(num: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(first, first + num)]


def block(key: bytes, size: int = BLOCK_BYTES) -> memoryview:
    return memoryview((key * (size // len(key) + 1))[:size])


def write(store: BlockStore, keys: Sequence[bytes]) -> list[Outcome]:
    return store.write(keys, range(len(keys)), [block(key) for key in keys])


def read(store: BlockStore, keys: Sequence[bytes]) -> list[Outcome]:
    """What is DONE is also byte for byte what was written."""
    buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in keys]
    outcomes = store.read(keys, buffers)
    wrong = [
        key
        for key, outcome, got in zip(keys, outcomes, buffers, strict=True)
        if outcome is DONE and got != block(key)
    ]
    assert not wrong, "wrong bytes served"
    return outcomes


def name_of(key: bytes, digest: bytes = b"s" * 32) -> str:
    return f"penstock:{envelope.FORMAT}:{digest.hex()}:{key.hex()}"


CALLS: dict[str, Callable[[ValkeyStore], object]] = {
    "find": lambda store: store.find(keys_of(3)),
    "read": lambda store: read(store, keys_of(3)),
    "write": lambda store: write(store, keys_of(3, first=50)),
    "probe": lambda store: store.probe(),
    "reset": lambda store: store.reset(),
    "manifests": lambda store: store.manifests(),
    "read_manifest": lambda store: store.read_manifest("aa-1"),
    "write_manifest": lambda store: store.write_manifest("aa-1", b"text", None, b"old"),
    "remove_manifest": lambda store: store.remove_manifest("aa-1"),
}


def failure_of(url: str, timeout_s: float = PATIENT_S) -> str:
    """Everything that is said about the store at `url` when it is asked."""
    with opened(url, timeout_s) as store, pytest.raises(StoreFailed) as failure:
        store.find(keys_of(1))
    return repr(failure.value) + "".join(traceback.format_exception(failure.value)) + repr(store)


@contextlib.contextmanager
def fails(match: str | None = None) -> Iterator[None]:
    """With StoreFailed, and in time."""
    started = time.monotonic()
    with pytest.raises(StoreFailed, match=match):
        yield
    assert time.monotonic() - started < HANG_S

"""A store in a dictionary, which a test can hold, break, empty and damage; and a clock that the test moves.
Owns these switches; everything else works like a real store, including headers and checksums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from penstock.errors import StoreFailed
from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.tiers.remote import copy_checked
from penstock.kv.tiers.store import HEADER_BYTES, Outcome, StoreUsage, Written, pack

_DEADLINE_S = 30.0  # a test that does not release a call fails instead of hanging
_GARBAGE = 0xEE  # content of a buffer after any outcome but DONE


class HandClock:
    """A clock that only the test moves."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class StoreGate:
    """Held calls of a store wait here, and pass one by one when released."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: frozenset[str] = frozenset()  # names of calls; "" stands for all
        self._num_allowed = 0
        self._num_came = 0  # calls that were held

    def hold(self, *calls: str) -> None:
        """From now on; without names all calls."""
        with self._changed:
            self._held = frozenset(calls or ("",))
            self._num_allowed = self._num_came = 0

    def let(self, num_calls: int | None = None) -> None:
        """Release `num_calls` held calls; None: all, and hold no more."""
        with self._changed:
            if num_calls is None:
                self._held = frozenset()
            else:
                self._num_allowed += num_calls
            self._changed.notify_all()

    def wait_came(self, num_calls: int = 1) -> None:
        """Block until `num_calls` calls were held here since `hold`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_came >= num_calls, _DEADLINE_S):
                raise TimeoutError(f"{self._num_came} calls of the store came, not {num_calls}")

    def enter(self, call: str) -> None:
        with self._changed:
            if not self._holds(call):
                return
            self._num_came += 1
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: not self._holds(call) or self._num_allowed > 0, _DEADLINE_S
            ):
                raise TimeoutError(f"the test did not release this {call}")
            if self._holds(call):
                self._num_allowed -= 1

    def _holds(self, call: str) -> bool:
        return "" in self._held or call in self._held


class MemoryStore:
    """Implements `BlockStore`. Stores made with the same `blocks` share them."""

    def __init__(
        self,
        name: str = "remote",
        local: bool = False,
        space: bytes = bytes(SCOPE_BYTES),
        blocks: dict[bytes, bytearray] | None = None,
    ) -> None:
        self.name = name
        self.local = local
        self.blocks: dict[bytes, bytearray] = {} if blocks is None else blocks  # header and payload by key
        # by id; two stores with the same blocks may share these, too
        self.kept_manifests: dict[str, bytes] = {}
        self.gate = StoreGate()
        self.calls: list[str] = []  # received calls, in order
        self.raises: Exception | None = None  # what every call raises
        self.fails: set[bytes] = set()  # keys whose reads and writes fail
        self.max_blocks: int | None = None  # above this number a write is FULL
        # called after the gate, for example to move a clock
        self.on_call: Callable[[str], None] = lambda call: None
        self.closed = False
        self._space = space
        self._lock = threading.Lock()

    # ----------------------------------------------------------------------------------------------- switches

    def die(self, why: str = "the store does not answer") -> None:
        """Every call raises, until `raises` is None again."""
        self.raises = StoreFailed(why)

    def lose(self, *keys: bytes) -> None:
        """Drop blocks as if they were evicted or expired; without keys all of them."""
        with self._lock:
            for key in keys or tuple(self.blocks):
                self.blocks.pop(key, None)

    def spoil(self, key: bytes, at: int = HEADER_BYTES) -> None:
        """Flip a bit of the stored value."""
        with self._lock:
            self.blocks[key][at] ^= 1

    # --------------------------------------------------------------------------------------------- BlockStore

    def find(self, keys: Sequence[bytes]) -> int:
        self._enter("find")
        with self._lock:
            return next((num for num, key in enumerate(keys) if key not in self.blocks), len(keys))

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        for buffer in into:
            buffer.cast("B")[:] = bytes([_GARBAGE]) * buffer.nbytes
        self._enter("read")
        with self._lock:
            return [self._read(key, buffer.cast("B")) for key, buffer in zip(keys, into, strict=True)]

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        self._enter("write")
        with self._lock:
            return [
                self._write(key, bytes(block)) for key, _, block in zip(keys, depths, blocks, strict=True)
            ]

    def persist(self) -> None:
        self._enter("persist")

    def probe(self) -> None:
        self._enter("probe")

    def reset(self) -> int:
        self._enter("reset")
        num = len(self.blocks)
        self.lose()
        return num

    def usage(self) -> StoreUsage:
        return StoreUsage(len(self.blocks), self.max_blocks)

    def close(self) -> None:
        self._enter("close")
        self.closed = True

    # ------------------------------------------------------------------------------------------ ManifestStore

    def manifests(self, start: str = "") -> list[str]:
        self._enter("manifests")
        return [id for id in self.kept_manifests if id.startswith(start)]

    def read_manifest(self, id: str) -> bytes | None:
        self._enter("read_manifest")
        return self.kept_manifests.get(id)

    def write_manifest(
        self, id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
    ) -> Written:
        self._enter("write_manifest")
        with self._lock:
            if self.kept_manifests.get(id) != instead_of:
                return Written.TAKEN
            self.kept_manifests[id] = data
        return Written.DONE

    def remove_manifest(self, id: str, only: bytes | None = None) -> None:
        self._enter("remove_manifest")
        with self._lock:
            if only is None or self.kept_manifests.get(id) == only:
                self.kept_manifests.pop(id, None)

    # ------------------------------------------------------------------------------------------------ private

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        self.gate.enter(call)
        self.on_call(call)
        if self.raises is not None:
            raise self.raises

    def _read(self, key: bytes, buffer: memoryview) -> Outcome:
        if key in self.fails:
            return Outcome.FAILED
        stored = self.blocks.get(key)
        if stored is None:
            return Outcome.MISSING
        outcome = copy_checked(memoryview(stored), key, self._space, buffer)
        if outcome is Outcome.CORRUPT:
            del self.blocks[key]
        return outcome

    def _write(self, key: bytes, block: bytes) -> Outcome:
        if key in self.fails:
            return Outcome.FAILED
        if key not in self.blocks and self.max_blocks is not None and len(self.blocks) >= self.max_blocks:
            return Outcome.FULL
        self.blocks.setdefault(key, bytearray(pack(key, self._space, block) + block))
        return Outcome.DONE

"""What the tests of the SSD store share: blocks whose bytes follow from their keys, a store in a folder, and
a disk that crashes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import shake_128
from pathlib import Path
from typing import Any

from penstock.config import EvictionName
from penstock.kv.tiers.ssd.directory import LOCK_BYTES, DiskIo
from penstock.kv.tiers.ssd.segments import segment_bytes, slot_bytes
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.store import Outcome, Space

BLOCK_BYTES = 5000  # no whole sector: through the bounce buffer; two sectors in the file
SPACE = Space(b"s" * 32, BLOCK_BYTES)
WAIT_S = 60.0


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


@cache
def bytes_of(number: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    return shake_128(key_of(number)).digest(num_bytes)


def max_bytes_for(num_slots: int, block_bytes: int = BLOCK_BYTES, num_segments: int = 8) -> int:
    """A bound that gives about so many slots, at least."""
    return LOCK_BYTES + segment_bytes(num_slots, block_bytes) + num_segments * slot_bytes(block_bytes)


def open_at(
    path: Path,
    num_slots: int = 64,
    io: DiskIo | None = None,
    space: Space = SPACE,
    eviction: EvictionName = "lru",
    scanned: bool = True,
) -> SsdStore:
    store = open_ssd(path, max_bytes_for(num_slots, space.block_bytes), space, eviction, io)
    if scanned:
        assert store.wait_scanned(WAIT_S)
    return store


def write(store: SsdStore, *numbers: int, num_bytes: int = BLOCK_BYTES) -> list[Outcome]:
    blocks = [memoryview(bytes_of(number, num_bytes)) for number in numbers]
    return store.write([key_of(number) for number in numbers], list(range(len(numbers))), blocks)


def read(store: SsdStore, *numbers: int, num_bytes: int = BLOCK_BYTES) -> list[Outcome]:
    """Fails where a block that is DONE has other bytes than were written under its key."""
    into = [memoryview(bytearray(num_bytes)) for _ in numbers]
    outcomes = store.read([key_of(number) for number in numbers], into)
    for number, outcome, view in zip(numbers, outcomes, into, strict=True):
        assert outcome is not Outcome.DONE or view == bytes_of(number, num_bytes), (
            f"wrong bytes of block {number}"
        )
    return outcomes


def those_in(store: SsdStore, numbers: Sequence[int]) -> set[int]:
    return {number for number in numbers if store.find([key_of(number)])}


def segment_paths(path: Path) -> list[Path]:
    return sorted(path.glob("penstock-*.kv"))


def num_bytes_in(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.iterdir())


def until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(int(WAIT_S * 1000)):
        if condition():
            return
        tick.wait(0.001)
    raise AssertionError("it did not happen")


def abandon(store: SsdStore) -> None:
    """What a killed process leaves: nothing is synced, the system closes descriptors and unlocks."""
    store._now.scan.close()
    store._now.segments.close()
    store._now.directory.close()
    store._is_open, store._closed = False, True


def fails(number: int, times: int = -1) -> Callable[..., None]:
    """A hook: the call fails with that error, so many times (negative: always)."""
    left = [times]

    def fail(*args: object) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))

    return fail


class HookedDisk(DiskIo):
    """A hook gets what its system call gets. It may raise, or wait; anything but None and False is the answer
    in place of the system's."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        self.hooks = hooks
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.number_of: dict[int, int] = {}  # of the file, by descriptor

    def count(self, name: str) -> int:
        return [called for called, _ in self.calls].count(name)


def _hooked(name: str) -> Callable[..., Any]:
    def call(self: HookedDisk, *args: Any) -> Any:
        self.calls.append((name, args))
        answer = self.hooks[name](*args) if name in self.hooks else None
        if answer is None or answer is False:
            answer = getattr(super(HookedDisk, self), name)(*args)
        if name == "open" and args[0].suffix == ".kv":
            self.number_of[answer] = int(args[0].stem[-6:])
        return answer

    return call


for _name in ("open", "close", "unlink", "fallocate", "pwritev", "preadv", "fdatasync", "fsync", "rename"):
    setattr(HookedDisk, _name, _hooked(_name))


class GatedDisk(DiskIo):
    """A call of `pwritev` or `preadv` waits at its gate, where that is closed, and says that it is there."""

    def __init__(self) -> None:
        self.gates = {"pwritev": threading.Event(), "preadv": threading.Event()}
        self.there = {"pwritev": threading.Event(), "preadv": threading.Event()}
        for gate in self.gates.values():
            gate.set()

    def _pass(self, name: str) -> None:
        if not self.gates[name].is_set():
            self.there[name].set()
            assert self.gates[name].wait(WAIT_S)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass("pwritev")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        # the bytes are fetched before the gate: what comes after would change nothing
        done = super().preadv(fd, buffers, offset)
        self._pass("preadv")
        return done


class QuickDisk(DiskIo):
    """Through the system's file cache, and nothing is ever synced: for tests that are not about that and make
    thousands of calls."""

    def open(self, path: Path, flags: int, dir_fd: int) -> int:
        return super().open(path, flags & ~os.O_DIRECT, dir_fd)

    def fdatasync(self, fd: int) -> None:
        pass

    def fsync(self, fd: int) -> None:
        pass


class Crashed(BaseException):
    """The machine stops in the middle of a write."""


@dataclass
class _FileState:
    durable: bytearray  # what is certain to be in it after a crash
    named: bool  # whether it is certain to be there at all
    writes: list[tuple[int, bytes]] = field(default_factory=list)  # those that are not certain, in order


class CrashingDisk(QuickDisk):
    """Remembers what has been synced. After `crash` each sector of 512 bytes that has not is old or new as
    chance has it: writes are torn, lost and reordered in every way a disk may do that. Names of files that
    were not synced may be lost, too."""

    TORN_BYTES = 512

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.writes_left: int | None = None  # until the machine stops; None: it does not
        self._rng = rng
        self._path_of: dict[int, Path] = {}
        self._files = {file: _FileState(bytearray(file.read_bytes()), True) for file in segment_paths(path)}
        self._removed: dict[Path, bytearray] = {}

    def open(self, path: Path, flags: int, dir_fd: int) -> int:
        fd = super().open(path, flags, dir_fd)
        self._path_of[fd] = path
        if path.suffix == ".kv":
            self._files.setdefault(path, _FileState(bytearray(), False))
        return fd

    def close(self, fd: int) -> None:
        self._path_of.pop(fd, None)
        super().close(fd)

    def unlink(self, path: Path, dir_fd: int) -> None:
        super().unlink(path, dir_fd)
        state = self._files.pop(path)
        if state.named:
            self._removed[path] = state.durable

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._files[self._path_of[fd]].writes.append((offset, b"".join(buffers)))
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left <= 0:
                raise Crashed
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._apply(self._files[self._path_of[fd]], 1.0, os.fstat(fd).st_size)

    def fsync(self, fd: int) -> None:
        self._removed.clear()
        for state in self._files.values():
            state.named = True

    def crash(self) -> None:
        """Leave on the real disk what this one would have after power came back. Nobody has it open any
        more."""
        for file, state in self._files.items():
            if not state.named and self._rng.random() < 0.5:
                file.unlink()
                continue
            size = file.stat().st_size if self._rng.random() < 0.7 else len(state.durable)
            self._apply(state, self._rng.choice((0.0, 0.2, 0.5, 0.9, 1.0)), size)
            file.write_bytes(state.durable)
        for file, image in self._removed.items():
            if not file.exists() and self._rng.random() < 0.5:
                file.write_bytes(image)

    def _apply(self, state: _FileState, chance: float, size: int) -> None:
        image = state.durable
        image.extend(bytes(max(0, size - len(image))))
        for offset, data in state.writes:
            for start in range(0, len(data), self.TORN_BYTES):
                part = data[start : start + self.TORN_BYTES]
                if offset + start + len(part) <= len(image) and (
                    chance == 1.0 or self._rng.random() < chance
                ):
                    image[offset + start : offset + start + len(part)] = part
        state.writes.clear()

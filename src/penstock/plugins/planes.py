"""Blocks of another engine that lie in planes, such as keys apart from values; for threads that wait. Owns
the names of planes, which blocks are interchangeable, and for how long memory is lent. The engine owns the
memory and may use it when a call has returned, so no call returns before the tiers have let go of it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from penstock.errors import DeadlineExceeded, StoreFailed
from penstock.figures import Traffic
from penstock.kv.blocks.key import Scope
from penstock.kv.tiers.store import Space
from penstock.plugins.tiers import Finished, HostedTiers, View, key_of

log = logging.getLogger(__name__)

FORMAT = 1  # of keys and of what a plane is
LATE_S = 30.0  # a job that takes longer is worth a line in the log
_WRITE_BYTES = 64 << 20  # of one job: enough for all writers, and far from the limit of their queue

Views = Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """All that decides what the bytes of a block mean, except its tokens. No server reads blocks of another
    format."""

    engine: str
    weights: str
    model: str
    dtype: str
    layout: str
    block_tokens: int
    num_planes: int  # keys and values apart, or in one
    plane_bytes: int
    layers: tuple[int, int]
    # by kind ("tp"): this rank and how many there are. Not those that hold the same blocks
    ranks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)  # of the engine, which change KV

    @property
    def block_bytes(self) -> int:
        return self.num_planes * self.plane_bytes

    def space(self) -> Space:
        fields = {"format": FORMAT, **asdict(self)}
        text = json.dumps(fields, sort_keys=True).encode()
        scope = Scope(self.weights.encode(), self.dtype, text, self.block_tokens, self.engine)
        return Space(scope.digest(), self.plane_bytes)

    def keys(self, names: Sequence[str]) -> list[bytes]:
        """Of all planes of the blocks, block by block."""
        planes = [bytes([plane]) for plane in range(self.num_planes)]
        encoded = (name.encode("utf-8", "surrogatepass") for name in names)
        return [key_of(plane + name) for name in encoded for plane in planes]


def memory_at(address: int, num_bytes: int) -> memoryview:
    """The bytes there. The caller keeps them allocated while the view is in use."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


class LentMemory:
    """Numbers for memory of the engine, while a call may touch it. For any thread."""

    def __init__(self, num_bytes: int) -> None:
        self._views: dict[int, memoryview] = {0: memoryview(bytearray(num_bytes))}  # 0 tells the size
        self._numbers = itertools.count(1)

    def view(self, slot: int) -> memoryview:
        return self._views[slot]

    def lend(self, views: Views) -> list[int]:
        slots = [next(self._numbers) for _ in views]
        self._views.update(zip(slots, views, strict=True))
        return slots

    def take_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._views[slot]

    @property
    def num_lent(self) -> int:
        return len(self._views) - 1


class PlanarBlocks:
    """Of one rank. For any thread; no call raises but `clear` and `close`."""

    def __init__(
        self,
        format: BlockFormat,
        open_tiers: Callable[[Space, View], HostedTiers],
        patience_s: float,
        queue_bytes: int = _WRITE_BYTES,
    ) -> None:
        """`patience_s`: a tier that has not answered by then has nothing. `queue_bytes`: what a tier queues,
        at least one block."""
        self.memory = LentMemory(format.plane_bytes)
        self.num_late = 0
        self._format = format
        self._patience_s = patience_s
        self._num_at_once = max(1, min(queue_bytes, _WRITE_BYTES) // format.block_bytes)
        self._tiers = open_tiers(format.space(), self.memory.view)
        self._jobs = itertools.count()
        self._warned: set[str] = set()

    def traffic(self) -> Traffic:
        return self._tiers.traffic()

    def leading(self, names: Sequence[str]) -> int:
        """How many of the leading blocks are there whole."""
        try:
            num = self._tiers.wait_leading(self._format.keys(names), self._patience_s)
        except Exception:
            log.exception("penstock: a lookup failed")
            return 0
        return num // self._format.num_planes

    def read(self, names: Sequence[str], planes: Views) -> list[bool]:
        """Each block into its planes. After False their content is undefined."""
        return self._move(names, planes, self._tiers.read)

    def write(self, names: Sequence[str], planes: Views, depth: int = 0) -> list[bool]:
        """Whether some tier has the block now. `depth`: blocks before the first."""
        num_planes, done = self._format.num_planes, list[bool]()
        for first in range(0, len(names), self._num_at_once):
            some = names[first : first + self._num_at_once]
            depths = [depth + first + place for place in range(len(some)) for _ in range(num_planes)]
            done += self._move(
                some,
                planes[first * num_planes : (first + len(some)) * num_planes],
                partial(self._tiers.write, depths=depths),
            )
        if not all(done):
            self.warn("write", "some blocks were not written; the counters of the tiers say why")
        return done

    def cut(self, block: memoryview) -> list[memoryview]:
        """A whole block in one piece as its planes; none if its size is another."""
        size = self._format.plane_bytes
        if len(block) != self._format.block_bytes:
            return []
        return [block[start : start + size] for start in range(0, len(block), size)]

    def clear(self) -> None:
        """Forget all blocks of this format, also for other servers. Raises StoreFailed."""
        job = next(self._jobs)
        self._tiers.reset(job)
        if not self._wait(job).whole:
            raise StoreFailed("penstock: a tier did not forget its blocks")

    def close(self, timeout_s: float) -> None:
        """Idempotent. Raises DeadlineExceeded."""
        self._tiers.close(timeout_s)

    def warn(self, kind: str, message: str) -> None:
        """Once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("penstock: %s (told once)", message)

    def _move(
        self, names: Sequence[str], planes: Views, submit: Callable[[int, list[bytes], list[int]], None]
    ) -> list[bool]:
        num_planes, plane_bytes = self._format.num_planes, self._format.plane_bytes
        if len(planes) != num_planes * len(names) or any(plane.nbytes != plane_bytes for plane in planes):
            self.warn("size", f"a block is not {num_planes} times {plane_bytes} bytes, and was left out")
            return [False] * len(names)
        job, slots = next(self._jobs), self.memory.lend(planes)
        submit(job, self._format.keys(names), slots)
        done = self._wait(job).done
        self.memory.take_back(slots)
        return [all(done[place : place + num_planes]) for place in range(0, len(done), num_planes)]

    def _wait(self, job: int) -> Finished:
        """Until it is over, however long: the engine takes its memory back when the call returns."""
        while True:
            try:
                return self._tiers.wait_finished(job, LATE_S)
            except DeadlineExceeded:
                self.num_late += 1
                self.warn("late", f"a tier needs more than {LATE_S:g} s, and the thread waits for it")
            except Exception:  # a defect, raised once
                log.exception("penstock: a job failed")

"""How fast blocks move between memory and the disk, beside raw O_DIRECT of as many bytes in a file next to it. Owns that
file and the comparison; the turns are `transfer_cold`'s."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from penstock.bench.cold_rig import OWNER, ColdRig, Shape
from penstock.bench.report import Results
from penstock.bench.transfer_cold import RAW, Beside, ColdWay, Promoted, Room, TierRead, TierWrite, Wait, take_turns
from penstock.errors import ConfigError, InvariantBroken
from penstock.kv.blocks.handles import Pin
from penstock.kv.memory.arena import free_bytes
from penstock.kv.tiers.ssd.directory import LOCK_BYTES
from penstock.kv.tiers.ssd.format import SECTOR_BYTES, segment_bytes, slot_bytes
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.store import Space
from penstock.models.progress import Progress

WRITE, READ, PROMOTE = "host to ssd", "ssd to host", "ssd to device"
SYNCED = "raw, synced"
RAW_THREADS = 4  # more of them did not make a disk faster
_SPARE_SLOTS = 16  # what dividing the tier into files may cost it


def measure_ssd(folder: Path, sizes: Sequence[int], shape: Shape, progress: Progress) -> Results:
    """`folder` is empty, and is left so but for the files of a cache."""
    results = Results([], [])
    for blocks in sizes:
        refusal = _refusal(blocks, shape, folder)
        if refusal is not None:
            results.skipped.append(f"{blocks} blocks on disk: {refusal}")
            continue
        with ColdRig(shape, blocks, partial(_open, folder, blocks)) as rig, RawFile(folder, rig) as file:
            rig.fill(progress)
            results.rows.extend(take_turns(rig, _ways(rig, file), shape.repeat, progress))
        if not file.direct:
            results.skipped.append(f"O_DIRECT: the file system of {folder} has none, so that these figures are of memory")
    return results


def _ways(rig: ColdRig, file: RawFile) -> list[ColdWay]:
    return [
        RawWrite(file),
        TierWrite(rig, WRITE, [RAW]),
        RawWrite(file, synced=True),
        TierWrite(rig, WRITE, [SYNCED], persist=True),
        RawRead(file),
        TierRead(rig, READ, [RAW]),
        Promoted(rig, PROMOTE, (READ, RAW)),
    ]


def _refusal(blocks: int, shape: Shape, folder: Path) -> str | None:
    one_way = blocks * shape.layout.block_bytes
    if shape.layout.block_bytes % SECTOR_BYTES:
        return f"blocks of {shape.layout.block_bytes} bytes are no whole sectors of {SECTOR_BYTES}, and raw O_DIRECT moves nothing else"
    needs = {torch.device("cpu"): 2 * one_way}
    needs[shape.device] = needs.get(shape.device, 0) + one_way
    for where, needed in needs.items():
        if needed > (free := free_bytes(where)):
            return f"they need {needed / 1e9:.1f} GB on {where}, where {free / 1e9:.1f} are free"
    needed, free = one_way + _tier_bytes(blocks, shape.layout.block_bytes), shutil.disk_usage(folder).free
    return f"they need {needed / 1e9:.1f} GB there, where {free / 1e9:.1f} are free" if needed > free else None


def _tier_bytes(blocks: int, block_bytes: int) -> int:
    """So little that every run writes over what the run before has written, as the raw file's do."""
    return LOCK_BYTES + segment_bytes(blocks, block_bytes) + _SPARE_SLOTS * slot_bytes(block_bytes)


def _open(folder: Path, blocks: int, space: Space) -> SsdStore:
    return open_ssd(folder, _tier_bytes(blocks, space.block_bytes), space, "lru")


# --------------------------------------------------------------------------------------------------------------------- raw


class RawFile:
    """A file of as many bytes as the rig's blocks have, in the same folder, and threads that move them."""

    def __init__(self, folder: Path, rig: ColdRig) -> None:
        self.rig = rig
        self.direct = True
        self._path = folder / "raw"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            self.fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self.direct = False
            self.fd = os.open(self._path, flags & ~os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(self.fd, 0, rig.num_bytes)
        except OSError as error:
            self._close()
            raise ConfigError(f"a file of {rig.num_bytes / 1e9:.1f} GB cannot be made in {folder}: {error.strerror}") from error
        self._threads = ThreadPoolExecutor(RAW_THREADS, "bench-raw")

    def start(
        self, call: Callable[[int, Sequence[memoryview], int], int], views: Sequence[memoryview], num_threads: int
    ) -> list[Future[None]]:
        """`call` for every block, each thread one after the other: descriptor, buffer, offset -> bytes moved."""
        size = self.rig.layout.block_bytes

        def run(first: int) -> None:
            for number in range(first, len(views), num_threads):
                if call(self.fd, [views[number]], number * size) != size:
                    raise InvariantBroken(f"the system moved less than the {size} bytes of block {number}")

        return [self._threads.submit(run, first) for first in range(num_threads)]

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._close()

    def _close(self) -> None:
        os.close(self.fd)
        self._path.unlink()


class RawWrite:
    """The ceiling of a write: the same bytes from the same slots. `synced`: until the disk says that it has them."""

    direction = WRITE
    beside: Beside = ()

    def __init__(self, file: RawFile, synced: bool = False) -> None:
        self.name = SYNCED if synced else RAW
        self._file = file
        self._synced = synced
        self._pin: Pin | None = None
        self._views: list[memoryview] = []

    def prepare(self, spoil: bool) -> None:
        rig = self._file.rig
        slots, self._pin = rig.slots.pin_each(rig.keys, OWNER)
        self._views = [rig.host.view(slot) for slot in slots]

    def launch(self) -> Wait:
        started = self._file.start(os.pwritev, self._views, RAW_THREADS)

        def wait() -> None:
            for one in started:
                one.result()
            if self._synced:
                os.fdatasync(self._file.fd)

        return wait

    def finish(self, check: bool) -> None:
        if self._pin is not None:
            self._file.rig.slots.end_handles([self._pin])
            self._pin = None


class RawRead:
    """The ceiling of a read: the same bytes into the same kind of slots."""

    direction = READ
    name = RAW
    beside: Beside = ()

    def __init__(self, file: RawFile) -> None:
        self._file = file
        self._room = Room(file.rig)

    def prepare(self, spoil: bool) -> None:
        self._room.take(spoil)

    def launch(self) -> Wait:
        started = self._file.start(os.preadv, self._room.views, RAW_THREADS)

        def wait() -> None:
            for one in started:
                one.result()

        return wait

    def finish(self, check: bool) -> None:
        self._room.give_back(f"{self.direction}, {self.name}" if check else None)

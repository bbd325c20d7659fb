"""How fast blocks get to and from a disk or store behind host memory, through the parts of a cache with one
such tier, without an engine: real arenas, lanes, copies and books. A disk is compared with raw O_DIRECT of as
many bytes in a file next to the tier's. Owns those parts, the blocks in them, and that file."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch

from penstock.bench.report import Results
from penstock.bench.transfer_ways import (
    CLOSE_S,
    RAW,
    Launch,
    TransferSize,
    TransferWay,
    Wait,
    pin_all,
    take_turns,
    too_large,
)
from penstock.config import OffloadConfig
from penstock.contract import Prefix, Table
from penstock.errors import ConfigError, DeadlineExceeded, InvariantBroken, PenstockError, StoreFailed
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.build import make_movers, open_cold
from penstock.kv.cache import KvCache
from penstock.kv.memory import BlockLayout, DeviceArena, HostArena
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.remote import open_store
from penstock.kv.tiers.ssd.directory import LOCK_BYTES, SECTOR_BYTES
from penstock.kv.tiers.ssd.segments import segment_bytes, slot_bytes
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.store import BlockStore, Outcome, Space, checksum
from penstock.kv.tiers.tiers import Tiers
from penstock.models.progress import Progress

OWNER = "bench"
TIER, PERSISTED = "tier", "tier, persisted"
WRITE, READ, PROMOTE = "host to ssd", "ssd to host", "ssd to device"
WRITE_REMOTE, READ_REMOTE = "host to remote", "remote to host"
SYNCED = "raw, synced"
RAW_THREADS = 4  # more of them did not make a disk faster
_SPARE_SLOTS = 16  # what dividing the tier into files may cost it
_WAIT_S = 600.0


class TransferShape(NamedTuple):
    """Size and number of transfers."""

    layout: BlockLayout
    device: torch.device
    repeat: int
    seed: int


class ColdRig:
    """`num_blocks` blocks of random bytes in host memory, room for as many more there and on the device, and
    an empty store. Their keys are those of one prompt, in a space of their own."""

    def __init__(
        self, shape: TransferShape, num_blocks: int, open_store: Callable[[Space], BlockStore]
    ) -> None:
        layout, device, _, self._seed = shape
        self.layout = layout
        self.device = DeviceArena(layout, num_blocks, device)
        self.host = HostArena(layout, 2 * num_blocks, device)
        scope = Scope(
            secrets.token_bytes(32), layout.dtype, layout.fingerprint(), layout.block_tokens, "none"
        )
        self.tier = open_cold(open_store(Space(scope.digest(), layout.block_bytes)), self.host)
        self.slots = HostTier(BlockPool(self.host.num_slots, self.host.name), layout.block_tokens, _WAIT_S)
        pool = BlockPool(num_blocks, self.device.name)
        self.cache = KvCache(pool, scope, tiers=self._tiers(pool))
        self._woken = threading.Event()
        self.cache.call_when_launched(self._woken.set)
        tokens = np.random.default_rng(self._seed).integers(0, 1 << 16, num_blocks * layout.block_tokens)
        prefix = self.cache.prefix_of(tokens, "", None)
        if prefix is None:
            raise InvariantBroken("a cache with colder tiers gives no keys")
        self.prefix: Prefix = prefix
        self.depths = range(num_blocks)
        self.checksums: list[bytes] = []  # of the blocks, in order

    def _tiers(self, pool: BlockPool) -> Tiers:
        limits = TierLimits(overlap_tokens=1, load_deadline_s=_WAIT_S, load_always=True)
        return Tiers.of(
            pool, self.slots, [self.tier], make_movers(self.device, self.host), self.layout, limits
        )

    # ------------------------------------------------------------------------------------------------- blocks

    @property
    def keys(self) -> Sequence[bytes]:
        return self.prefix.keys

    @property
    def size(self) -> TransferSize:
        """Of all blocks."""
        return TransferSize(len(self.keys), len(self.keys) * self.layout.block_bytes)

    def fill(self, progress: Progress) -> None:
        """Pin host memory, and put the blocks there."""
        pin_all(self.host, progress)
        taken = self.slots.take(self.keys, self.depths, OWNER)
        if taken.reservation is None or taken.keys != list(self.keys):
            raise InvariantBroken(f"{len(taken.keys)} of {len(self.keys)} blocks fit into an empty host tier")
        generator = torch.Generator().manual_seed(self._seed)
        for slot in taken.reservation.slots:
            self.host.tensor[slot].view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)
            self.checksums.append(checksum(self.host.view(slot)))
        self.slots.land(taken)

    def spoil(self) -> None:
        """Clear the blocks in host memory and on the device. Done when this returns, also on a GPU."""
        self.host.tensor.zero_()
        self.device.tensor.zero_()[0, 0, 0, 0, 0, 0].item()

    def check(self, views: Sequence[memoryview], what: str) -> None:
        """`views` hold the blocks, in order."""
        for number, (view, expected) in enumerate(zip(views, self.checksums, strict=True)):
            if checksum(view) != expected:
                raise InvariantBroken(f"{what}: block {number} is not what was written")

    @contextmanager
    def pinned(self) -> Iterator[list[memoryview]]:
        """The blocks in host memory."""
        slots, pin = self.slots.pin_each(self.keys, OWNER)
        yield [self.host.view(slot) for slot in slots]
        if pin is not None:
            pin.end()

    @contextmanager
    def room(self, checked_as: str | None) -> Iterator[Sequence[int]]:
        """Host slots to read the blocks into. `checked_as`: they are empty before, and hold the blocks
        afterwards."""
        reservation = self.slots.take_private(len(self.keys), OWNER)
        if reservation is None:
            raise InvariantBroken("there is no room to read into")
        for slot in reservation.slots if checked_as is not None else ():
            self.host.tensor[slot].zero_()
        yield reservation.slots
        if checked_as is not None:
            self.check([self.host.view(slot) for slot in reservation.slots], checked_as)
        reservation.end()

    # -------------------------------------------------------------------------------------------------- waits

    def wait_until(self, over: Callable[[], bool]) -> None:
        """Settle what there is to settle, as an engine without other work does."""
        by_s = time.monotonic() + _WAIT_S
        while True:
            self._woken.clear()
            self.cache.settle()
            if over():
                return
            if time.monotonic() > by_s:
                raise DeadlineExceeded(f"blocks are still on their way after {_WAIT_S:g} s")
            self._woken.wait(self.cache.look_again_s)

    def empty_store(self) -> None:
        """Raises StoreFailed."""
        resetting = self.cache.reset([self.tier.name])
        self.wait_until(lambda: resetting.settled)
        if resetting.error is not None:
            raise resetting.error

    def wait_idle(self) -> None:
        self.wait_until(lambda: not self.cache.num_in_flight)

    # ---------------------------------------------------------------------------------------------------- end

    def __enter__(self) -> ColdRig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What the store got is removed from it. After an error as much of that as can be done."""
        if kind is None:
            self.wait_idle()
            self.empty_store()
            self.cache.close(CLOSE_S)
        else:
            with contextlib.suppress(PenstockError):
                self.empty_store()
            with contextlib.suppress(PenstockError):
                self.cache.close(CLOSE_S)
        self.host.close()


# ------------------------------------------------------------------------------------------------------- ways


@contextmanager
def write_tier(rig: ColdRig, direction: str, checked: bool, persist: bool = False) -> Iterator[Launch]:
    """From host slots into a store that has none of it, on the tier's lanes; over when the tier says so, or
    when it is safe as well."""
    rig.empty_store()

    def launch() -> Wait:
        slots, pin = rig.slots.pin_each(rig.keys, OWNER)
        writing = None if pin is None else rig.tier.try_write(rig.keys, rig.depths, slots, pin, must=True)
        if writing is None:
            raise StoreFailed(f"the {rig.tier.name} tier takes no blocks")
        sync = rig.tier.persist() if persist else None

        def wait() -> None:
            rig.wait_until(lambda: writing.settled and (sync is None or sync.settled))
            if sync is not None and sync.error is not None:
                raise sync.error
            _require_done(writing.outcomes, direction, writing.error)

        return wait

    yield launch


@contextmanager
def read_tier(rig: ColdRig, direction: str, checked: bool) -> Iterator[Launch]:
    """From the store into host slots, on the tier's lanes."""
    with rig.room(f"{direction}, {TIER}" if checked else None) as slots:

        def launch() -> Wait:
            size = rig.tier.group_blocks
            parts = [slice(first, first + size) for first in range(0, len(rig.keys), size)]
            groups = [rig.tier.read(rig.keys[part], slots[part], (), OWNER) for part in parts]

            def wait() -> None:
                rig.wait_until(lambda: all(group.over() for group in groups))
                _require_done([outcome for group in groups for outcome in group.take_outcomes()], direction)

            return wait

        yield launch


@contextmanager
def promote(rig: ColdRig, checked: bool) -> Iterator[Launch]:
    """From the store to the device, through host memory, as a request's prefix comes: leased, promoted block
    by block, settled."""
    opened: list[Table] = []
    rig.wait_idle()
    rig.cache.reset(("device", "host"))
    if checked:
        rig.spoil()

    def launch() -> Wait:
        num, lease = len(rig.keys), rig.cache.lease(OWNER, rig.prefix)
        if lease is None:
            raise InvariantBroken(f"the {rig.tier.name} tier has nothing of what was written")
        rig.wait_until(lambda: lease.ready)
        if (found := rig.cache.match(rig.keys, lease).num_colder) != num:
            raise InvariantBroken(f"the {rig.tier.name} tier has {found} of {num} blocks that were written")
        opened.append(rig.cache.open(OWNER, rig.prefix, 0))
        load = opened[0].promote(lease, num, 1)

        def wait() -> None:
            rig.wait_until(lambda: load.settled)
            if (error := load.error()) is not None:
                raise error

        return wait

    yield launch
    for table in opened:
        if checked:
            slots = table.slots(len(rig.keys) * rig.layout.block_tokens).tolist()
            fetched = (rig.device.tensor[slot].cpu().flatten().view(torch.uint8) for slot in slots)
            rig.check([memoryview(block.numpy().tobytes()) for block in fetched], PROMOTE)
        table.release(None)
    rig.wait_idle()


def _require_done(outcomes: Sequence[Outcome], direction: str, why: BaseException | None = None) -> None:
    num_lost = sum(outcome is not Outcome.DONE for outcome in outcomes)
    if num_lost:
        raise StoreFailed(f"{direction}: {num_lost} of {len(outcomes)} blocks did not come across") from why


def start_each(call: Callable[[int], None], num: int, pool: ThreadPoolExecutor, num_threads: int) -> Wait:
    """`call` for every number below `num`, on some threads, each one after the other."""

    def run(first: int) -> None:
        for number in range(first, num, num_threads):
            call(number)

    started = [pool.submit(run, first) for first in range(num_threads)]

    def wait() -> None:
        for one in started:
            one.result()

    return wait


# --------------------------------------------------------------------------------------------------- the disk


def measure_ssd(folder: Path, sizes: Sequence[int], shape: TransferShape, progress: Progress) -> Results:
    """`folder` is empty, and is left so but for the files of a cache."""
    results = Results([], [])
    for blocks in sizes:
        refusal = _refusal(blocks, shape, folder)
        if refusal is not None:
            results.skipped.append(f"{blocks} blocks on disk: {refusal}")
            continue
        with ColdRig(shape, blocks, partial(_open_ssd, folder, blocks)) as rig, RawFile(folder, rig) as file:
            rig.fill(progress)
            results.rows.extend(
                take_turns(
                    rig.tier.name, _disk_ways(rig, file), rig.size, shape.repeat, progress, turning=True
                )
            )
        if not file.direct:
            results.skipped.append(
                f"O_DIRECT: the file system of {folder} has none, so that these figures are of memory"
            )
    return results


def _disk_ways(rig: ColdRig, file: RawFile) -> list[TransferWay]:
    """Transfers are compared with the raw file; promotions with reading it."""
    return [
        TransferWay(WRITE, RAW, file.write, ()),
        TransferWay(WRITE, TIER, partial(write_tier, rig, WRITE), ((WRITE, RAW),)),
        TransferWay(WRITE, SYNCED, partial(file.write, synced=True), ()),
        TransferWay(WRITE, PERSISTED, partial(write_tier, rig, WRITE, persist=True), ((WRITE, SYNCED),)),
        TransferWay(READ, RAW, file.read, ()),
        TransferWay(READ, TIER, partial(read_tier, rig, READ), ((READ, RAW),)),
        TransferWay(PROMOTE, "pipelined", partial(promote, rig), ((READ, RAW),)),
    ]


def _refusal(blocks: int, shape: TransferShape, folder: Path) -> str | None:
    one_way = blocks * shape.layout.block_bytes
    if shape.layout.block_bytes % SECTOR_BYTES:
        return (
            f"blocks of {shape.layout.block_bytes} bytes are no whole sectors of {SECTOR_BYTES}, and raw "
            "O_DIRECT moves nothing else"
        )
    needs = {torch.device("cpu"): 2 * one_way}
    needs[shape.device] = needs.get(shape.device, 0) + one_way
    if (refusal := too_large(needs)) is not None:
        return refusal
    needed, free = one_way + _tier_bytes(blocks, shape.layout.block_bytes), shutil.disk_usage(folder).free
    return (
        (f"they need {needed / 1e9:.1f} GB there, where {free / 1e9:.1f} are free") if needed > free else None
    )


def _tier_bytes(blocks: int, block_bytes: int) -> int:
    """So little that every run writes over what the run before has written, as the raw file's do."""
    return LOCK_BYTES + segment_bytes(blocks, block_bytes) + _SPARE_SLOTS * slot_bytes(block_bytes)


def _open_ssd(folder: Path, blocks: int, space: Space) -> SsdStore:
    return open_ssd(folder, _tier_bytes(blocks, space.block_bytes), space, "lru")


class RawFile:
    """A file of as many bytes as the rig's blocks have, in the same folder, and threads that move them."""

    def __init__(self, folder: Path, rig: ColdRig) -> None:
        self.rig = rig
        self.direct = True
        self._path = folder / "raw"
        flags, num_bytes = os.O_RDWR | os.O_CREAT | os.O_EXCL, rig.size.num_bytes
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self.direct = False
            self._fd = os.open(self._path, flags & ~os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            self._close()
            raise ConfigError(
                f"a file of {num_bytes / 1e9:.1f} GB cannot be made in {folder}: {error.strerror}"
            ) from error
        self._threads = ThreadPoolExecutor(RAW_THREADS, "bench-raw")

    @contextmanager
    def write(self, checked: bool, synced: bool = False) -> Iterator[Launch]:
        """The ceiling of a write: the same bytes from the same slots. `synced`: until the disk says that it
        has them."""
        with self.rig.pinned() as views:
            yield partial(self._start, os.pwritev, views, synced)

    @contextmanager
    def read(self, checked: bool) -> Iterator[Launch]:
        """The ceiling of a read: the same bytes into the same kind of slots."""
        with self.rig.room(f"{READ}, {RAW}" if checked else None) as slots:
            yield partial(self._start, os.preadv, [self.rig.host.view(slot) for slot in slots])

    def _start(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        views: Sequence[memoryview],
        synced: bool = False,
    ) -> Wait:
        """`call`: descriptor, buffer, offset -> bytes moved. `synced`: over when the disk says that it has
        them."""
        size = self.rig.layout.block_bytes

        def move(number: int) -> None:
            if call(self._fd, [views[number]], number * size) != size:
                raise InvariantBroken(f"the system moved less than the {size} bytes of block {number}")

        wait_moved = start_each(move, len(views), self._threads, RAW_THREADS)

        def wait_synced() -> None:
            wait_moved()
            os.fdatasync(self._fd)

        return wait_synced if synced else wait_moved

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._path.unlink()


# ---------------------------------------------------------------------------------------------------- a store


def measure_remote(
    offload: OffloadConfig, sizes: Sequence[int], shape: TransferShape, progress: Progress
) -> Results:
    """Leaves other engines' blocks in the store alone, and removes its own."""
    results = Results([], [])
    if (url := offload.remote) is None:
        return results
    for blocks in sizes:
        with ColdRig(shape, blocks, partial(open_store, url, timeout_s=offload.remote_timeout_s)) as rig:
            rig.fill(progress)
            ways = [
                TransferWay(WRITE_REMOTE, TIER, partial(write_tier, rig, WRITE_REMOTE), ()),
                TransferWay(READ_REMOTE, TIER, partial(read_tier, rig, READ_REMOTE), ()),
            ]
            rows = take_turns(rig.tier.name, ways, rig.size, shape.repeat, progress, turning=True)
            results.rows.extend({**row, "percent_of_raw": None} for row in rows)
    return results

"""Ways of moving blocks between tiers. They take turns, so that all meet the same machine. Owns a cache
without an engine (real arenas, lanes, copies and books), its blocks, and a raw file next to a disk's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.bench.run import WARM_UP, runs
from penstock.config import GIB, Config, OffloadConfig
from penstock.engine.inbox import Inbox
from penstock.errors import ConfigError, DeadlineExceeded, InvariantBroken, PenstockError, StoreFailed
from penstock.kv.blocks.key import Scope
from penstock.kv.build import Device, KvGroup, open_cache
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.store import Outcome, checksum
from penstock.kv.transfer import Group, Transfer
from penstock.models.progress import Progress

RAW, TIER = "raw", "tier"
PROMOTE, DEMOTE = "promote", "demote"
DIRECTIONS = {PROMOTE: (PROMOTE,), DEMOTE: (DEMOTE,), "both": (PROMOTE, DEMOTE)}
WRITE_SSD, READ_SSD = "host to ssd", "ssd to host"
WRITE_REMOTE, READ_REMOTE = "host to remote", "remote to host"
OWNER = "bench"
RAW_THREADS = 4  # more of them did not make a disk faster
_WAIT_S = 600.0
_CLOSE_S = 60.0
_PIN_POLL_S = 0.01

Row = dict[str, Any]
Slots = Sequence[int]
# It prepares, yields, submits, yields, waits until all is over, yields, and checks. The clock runs from the
# first to the last yield.
Turn = Iterator[None]


class TransferWay(NamedTuple):
    """One way of moving blocks. The argument of `turn` asks for a check that no byte was there before, and
    that every byte is afterwards."""

    direction: str
    name: str
    turn: Callable[[bool], Turn]
    # directions and names of earlier ways; it is compared with the fastest of them
    beside: tuple[tuple[str, str], ...] = ()
    layers: int | None = None  # that it moves at a time; None: all


class TransferSize(NamedTuple):
    blocks: int
    num_bytes: int


class TransferShape(NamedTuple):
    """Size and number of transfers."""

    layout: BlockLayout
    device: torch.device
    repeat: int
    seed: int


def take_turns(
    stage: str, ways: Sequence[TransferWay], size: TransferSize, repeat: int, progress: Progress
) -> list[Row]:
    """Every way once per run, and a row for each. The order turns around, so that none always follows the
    same. The run that only warms up is checked byte by byte."""
    taken: list[list[tuple[float, float]]] = [[] for _ in ways]
    for run in runs(f"{stage}, {size.blocks} blocks", repeat, progress):
        for way, timed in list(zip(ways, taken, strict=True))[:: -1 if run % 2 else 1]:
            started, submitted, ended = (time.perf_counter() for _ in way.turn(run == WARM_UP))
            if run != WARM_UP:
                timed.append((ended - started, submitted - started))
    rows: list[Row] = []
    for way, timed in zip(ways, taken, strict=True):
        rows.append(_row(way, size, timed, rows))
    return rows


def _row(way: TransferWay, size: TransferSize, timed: list[tuple[float, float]], rows: list[Row]) -> Row:
    total, submit = (
        {"median": median(all_s) * 1000, "all": [one * 1000 for one in all_s]}
        for all_s in zip(*timed, strict=True)
    )
    gb_s = size.num_bytes / total["median"] / 1e6
    others = [row for row in rows if (row["direction"], row["way"]) in way.beside]
    fastest = max(others, key=lambda row: row["gb_s"], default=None)
    return {
        "direction": way.direction,
        "blocks": size.blocks,
        "bytes": size.num_bytes,
        "way": way.name,
        "beside": None if fastest is None else f"{fastest['direction']}, {fastest['way']}",
        "layers": way.layers,
        "gb_s": gb_s,
        "percent_of_raw": 100.0 if fastest is None else 100 * gb_s / fastest["gb_s"],
        "total_ms": total,
        "submit_ms": submit,
    }


class TransferRig:
    """A cache with room for twice `num_blocks` on the device and in host memory, full of random bytes, and
    the tiers of `offload`. Half of the host's blocks have keys, those of one prompt."""

    def __init__(self, shape: TransferShape, num_blocks: int, offload: OffloadConfig) -> None:
        self.layout, device, _, seed = shape
        layout, room = self.layout, 2 * num_blocks
        scope = Scope(
            secrets.token_bytes(32), layout.dtype, layout.fingerprint(), layout.block_tokens, "none"
        )
        offload = replace(
            offload,
            host_gib=(room + 0.5) * layout.block_bytes / GIB,
            eviction="lru",
            lease_s=_WAIT_S,
            load_always=True,
            load_deadline_s=_WAIT_S,
        )
        opened = open_cache(Config(offload=offload), KvGroup(layout), scope, Device(device, room))
        self.cache, self.device = opened.cache, opened.arena
        self.host: Any = opened.host_arena
        self.tier: Any = next(iter(self.cache.cold_tiers.values()), None)
        self.size = TransferSize(num_blocks, num_blocks * layout.block_bytes)
        self.movers = {PROMOTE: self.cache.loads.mover, DEMOTE: self.cache.saves.mover}
        self._inbox = Inbox(sharp=device.type == "cuda")
        self.cache.call_when_launched(self._inbox.wake)
        random = np.random.default_rng(seed)
        self._slots = [random.permutation(room).reshape(2, -1) for _ in ("device", "host")]
        tokens = random.integers(0, 1 << 16, num_blocks * layout.block_tokens)
        prefix: Any = self.cache.prefix_of(tokens, "", None)
        self.prefix, self.keys = prefix, prefix.keys
        self.device.tensor.view(torch.int16).random_(
            -(1 << 15), 1 << 15, generator=torch.Generator(device).manual_seed(seed)
        )
        # the first bytes of the device, and as many in one piece of host memory
        self.piece = self.device.tensor.view(torch.uint8).flatten()[: 2 * self.size.num_bytes]
        self.host_piece = torch.empty(
            len(self.piece), dtype=torch.uint8, pin_memory=device.type == "cuda"
        ).copy_(self.piece)

    def fill(self, progress: Progress) -> None:
        """Wait for host memory, and give it other bytes than the device has at the same slots."""
        tier = self.cache.host
        while tier.memory is not None and not tier.memory.is_over:
            progress("pinning", tier.num_slots - tier.num_unready, tier.num_slots)
            time.sleep(_PIN_POLL_S)
        if tier.num_unready:
            raise ConfigError("the host memory that this needs could not be pinned; lower --blocks")
        # by the CPU: CUDA copies nothing across two pinned pieces
        self.host.tensor.copy_(self.device.tensor[1:].cpu())
        taken = tier.take(self.keys, range(len(self.keys)), OWNER)
        if taken.reservation is None or taken.keys != list(self.keys):
            raise InvariantBroken(f"{len(taken.keys)} of {len(self.keys)} blocks fit into an empty host tier")
        self._checksums = [checksum(self.host.view(slot)) for slot in taken.reservation.slots]
        tier.land(taken)

    # -------------------------------------------------------------------------------- between device and host

    def ends(self, direction: str) -> list[tuple[Tensor, Any]]:
        """Memory and slots of source and destination; those of the two directions have no slot in common."""
        slots = (half[int(direction == DEMOTE)] for half in self._slots)
        ends = list(zip((self.device.tensor, self.host.tensor), slots, strict=True))
        return ends if direction == DEMOTE else ends[::-1]

    def spoil(self, *directions: str) -> None:
        """Clear the destinations. Done when this returns, also on a GPU."""
        for direction in directions:
            memory, slots = self.ends(direction)[1]
            memory[slots] = 0
            self.movers[direction].lane.drain()
        self.piece[0].item()

    def check_moved(self, *directions: str) -> None:
        for direction in directions:
            source, dest = (memory[slots].cpu().view(torch.int16) for memory, slots in self.ends(direction))
            if not torch.equal(source, dest):
                raise InvariantBroken(f"moved, {direction}: a slot does not hold what its source did")

    # ------------------------------------------------------------------------------------- behind host memory

    def check(self, views: Sequence[memoryview], what: str) -> None:
        """`views` hold the blocks with keys, in order."""
        for number, (view, expected) in enumerate(zip(views, self._checksums, strict=True)):
            if checksum(view) != expected:
                raise InvariantBroken(f"{what}: block {number} is not what was written")

    @contextmanager
    def room(self, checked_as: str | None) -> Iterator[Slots]:
        """Host slots to read the blocks into. `checked_as`: they are empty before, and hold the blocks
        afterwards."""
        reservation = self.cache.host.take_private(len(self.keys), OWNER)
        if reservation is None:
            raise InvariantBroken("there is no room to read into")
        views = [self.host.view(slot) for slot in reservation.slots]
        for view in views if checked_as else ():
            view[:] = bytes(len(view))
        yield reservation.slots
        if checked_as:
            self.check(views, checked_as)
        reservation.end()

    def wait_until(self, over: Callable[[], bool], settle: Callable[[], object] | None = None) -> None:
        """Settle what there is to settle, as an engine without other work does."""
        by_s = time.monotonic() + _WAIT_S
        while True:
            (settle or self.cache.settle)()
            if over():
                return
            if time.monotonic() > by_s:
                raise DeadlineExceeded(f"blocks are still on their way after {_WAIT_S:g} s")
            self._inbox.wait(self.cache.look_again_s)

    def empty_store(self) -> None:
        """Raises StoreFailed."""
        resetting = self.cache.reset(self.cache.cold_tiers)
        self.wait_until(lambda: resetting.settled)
        if resetting.error is not None:
            raise resetting.error

    def wait_idle(self) -> None:
        self.wait_until(lambda: not self.cache.num_in_flight)

    def __enter__(self) -> TransferRig:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """What the store got is removed from it. After an error as much of that as can be done."""
        for end in (self.wait_idle, self.empty_store, partial(self.cache.close, _CLOSE_S)):
            with contextlib.suppress(*(() if kind is None else (PenstockError,))):
                end()


# ------------------------------------------------------------------------------ ways between device and host


def host_ways(rig: TransferRig, direction: str, groups: Sequence[int]) -> list[TransferWay]:
    """`groups`: layers that are moved at a time, all of them first."""
    moved = [
        TransferWay(
            direction,
            "moved",
            partial(move_blocks, rig, direction, layers),
            ((direction, RAW),),
            layers if layers < groups[0] else None,
        )
        for layers in groups
    ]
    return [TransferWay(direction, RAW, partial(copy_raw, rig, direction)), *moved]


def copy_raw(rig: TransferRig, direction: str, checked: bool) -> Turn:
    """The ceiling: one copy of as many bytes that lie in one piece on both sides, pinned on the host's. It
    touches no slot, so there is nothing to check."""
    rig.spoil()
    yield
    launched = []
    for one in DIRECTIONS[direction]:
        half = slice(rig.size.num_bytes, None) if one == DEMOTE else slice(rig.size.num_bytes)
        ends, lane = [rig.piece[half], rig.host_piece[half]], rig.movers[one].lane
        copy = partial(_copy_piece, *(ends if one == DEMOTE else ends[::-1]))
        launched.append((lane.submit(copy, label=one), lane.record()))
    yield
    for ticket, end in launched:
        end.wait_passed()
        _raise(ticket.error())
    yield


def _copy_piece(source: Tensor, dest: Tensor) -> None:
    """By one thread where no GPU does it, as blocks are copied."""
    if source.device.type == dest.device.type == "cpu":
        ctypes.memmove(dest.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        dest.copy_(source, non_blocking=True)


def move_blocks(rig: TransferRig, direction: str, layers: int, checked: bool) -> Turn:
    """Scattered blocks through movers, as the engine does it: submitted in one call, launched on another
    thread, over when polling says so."""
    directions = DIRECTIONS[direction]
    rig.spoil(*(directions if checked else ()))
    yield
    transfers, most = [], rig.layout.num_layers
    for one in directions:
        groups = [Group((first, min(first + layers, most))) for first in range(0, most, layers)]
        transfer = Transfer(one, groups)
        (_, transfer.source_slots), (_, transfer.dest_slots) = rig.ends(one)
        rig.movers[one].submit(transfer)
        transfers.append(transfer)
    yield
    rig.wait_until(
        lambda: all(transfer.settled for transfer in transfers),
        lambda: [mover.settle() for mover in rig.movers.values()],
    )
    for transfer in transfers:
        _raise(transfer.error())
    yield
    if checked:
        rig.check_moved(*directions)


# ------------------------------------------------------------------------------------ ways behind host memory


def write_tier(rig: TransferRig, direction: str, checked: bool, persist: bool = False) -> Turn:
    """From host slots into a store that has none of it, on the tier's lanes; over when the tier says so, or
    when it is safe as well."""
    rig.empty_store()
    yield
    slots, pin = rig.cache.host.pin_each(rig.keys, OWNER)
    writing = rig.tier.try_write(rig.keys, range(len(rig.keys)), slots, pin, must=True)
    if writing is None:
        raise StoreFailed(f"the {rig.tier.name} tier takes no blocks")
    last = rig.tier.persist() if persist else writing
    yield
    rig.wait_until(lambda: writing.settled and last.settled)
    yield
    _raise(last.error if persist else None)
    _require_done(writing.outcomes, direction, writing.error)


def read_tier(rig: TransferRig, direction: str, checked: bool) -> Turn:
    """From the store into host slots, on the tier's lanes."""
    with rig.room(f"{direction}, {TIER}" if checked else None) as slots:
        yield
        size = rig.tier.group_blocks
        parts = [slice(first, first + size) for first in range(0, len(rig.keys), size)]
        groups = [rig.tier.read(rig.keys[part], slots[part], (), OWNER) for part in parts]
        yield
        rig.wait_until(lambda: all(group.over() for group in groups))
        yield
        _require_done([outcome for group in groups for outcome in group.take_outcomes()], direction)


def _require_done(outcomes: Sequence[Outcome], direction: str, why: BaseException | None = None) -> None:
    if num_lost := sum(outcome is not Outcome.DONE for outcome in outcomes):
        raise StoreFailed(f"{direction}: {num_lost} of {len(outcomes)} blocks did not come across") from why


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def promote(rig: TransferRig, direction: str, checked: bool) -> Turn:
    """From the store to the device, through host memory, as a request's prefix comes: leased, promoted block
    by block, settled."""
    cache, num = rig.cache, len(rig.keys)
    rig.wait_idle()
    cache.reset(("device", "host"))
    if checked:
        rig.host.tensor.zero_()
        rig.device.tensor.zero_()
    rig.piece[0].item()  # a GPU has done it
    yield
    lease: Any = cache.lease(OWNER, rig.prefix)
    rig.wait_until(lambda: lease.ready)
    if (found := cache.match(rig.keys, lease).num_colder) != num:
        raise InvariantBroken(f"the {rig.tier.name} tier has {found} of {num} blocks that were written")
    table: Any = cache.open(OWNER, rig.prefix, 0)
    load = table.promote(lease, num, rig.layout.block_tokens)
    yield
    rig.wait_until(lambda: load.settled)
    yield
    _raise(load.error())
    if checked:
        slots = table.slots(num * rig.layout.block_tokens).tolist()
        blocks = (rig.device.tensor[slot].cpu().flatten().view(torch.uint8).numpy() for slot in slots)
        rig.check([memoryview(block.tobytes()) for block in blocks], direction)
    table.release(None)
    rig.wait_idle()


class RawFile:
    """A file next to the disk tier's, with room for the rig's blocks, and threads that move them."""

    def __init__(self, folder: Path, rig: TransferRig) -> None:
        self._rig, self._path = rig, folder / "raw"
        self._threads = ThreadPoolExecutor(RAW_THREADS, "bench-raw")
        flags, num_bytes = os.O_RDWR | os.O_CREAT, rig.size.num_bytes
        self.direct = True
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self.direct = False
            self._fd = os.open(self._path, flags, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"a file of {num_bytes / 1e9:.1f} GB cannot be made in {folder}: {error.strerror}"
            ) from error

    def write(self, checked: bool, synced: bool = False) -> Turn:
        """The ceiling of a write: the same bytes from the same slots. `synced`: until the disk says that it
        has them."""
        slots, pin = self._rig.cache.host.pin_each(self._rig.keys, OWNER)
        yield from self._move(os.pwritev, slots, synced)
        if pin is not None:
            pin.end()

    def read(self, checked: bool) -> Turn:
        """The ceiling of a read: the same bytes into the same kind of slots."""
        with self._rig.room(f"{READ_SSD}, {RAW}" if checked else None) as slots:
            yield from self._move(os.preadv, slots)

    def _move(self, call: Callable[[int, Any, int], int], slots: Slots, synced: bool = False) -> Turn:
        """`call`: descriptor, buffers, offset -> bytes moved."""
        size, views = self._rig.layout.block_bytes, [self._rig.host.view(slot) for slot in slots]

        def move(first: int) -> None:
            for number in range(first, len(views), RAW_THREADS):
                if call(self._fd, [views[number]], number * size) != size:
                    raise InvariantBroken(f"the system moved less than the {size} bytes of block {number}")

        yield
        moved = self._threads.map(move, range(RAW_THREADS))
        yield
        list(moved)  # raises what a thread did
        if synced:
            os.fdatasync(self._fd)
        yield

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self._path.unlink()


def disk_ways(rig: TransferRig, file: RawFile) -> list[TransferWay]:
    """Transfers are compared with the raw file; promotions with reading it."""
    synced, raw_read, up = "raw, synced", ((READ_SSD, RAW),), "ssd to device"
    write = partial(write_tier, rig, WRITE_SSD)
    return [
        TransferWay(WRITE_SSD, RAW, file.write),
        TransferWay(WRITE_SSD, TIER, write, ((WRITE_SSD, RAW),)),
        TransferWay(WRITE_SSD, synced, partial(file.write, synced=True)),
        TransferWay(WRITE_SSD, "tier, persisted", partial(write, persist=True), ((WRITE_SSD, synced),)),
        TransferWay(READ_SSD, RAW, file.read),
        TransferWay(READ_SSD, TIER, partial(read_tier, rig, READ_SSD), raw_read),
        TransferWay(up, "pipelined", partial(promote, rig, up), raw_read),
    ]


def store_ways(rig: TransferRig) -> list[TransferWay]:
    return [
        TransferWay(WRITE_REMOTE, TIER, partial(write_tier, rig, WRITE_REMOTE)),
        TransferWay(READ_REMOTE, TIER, partial(read_tier, rig, READ_REMOTE)),
    ]

"""Moves blocks between two arenas: launches transfers off the engine thread, copies their bytes and reports
when they are over. Owns their order and the copying, not their slots.

    submit (engine thread, O(1)) -> prepare, waits, copies (launcher) -> bytes (lane)
    -> settle (engine thread polls)

A transfer is in flight from `submit` on, launched or not: a drain sees both. Transfers of one mover are
launched, and so end, in the order of their submission.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Access, Arrival, Fence, Mode
from penstock.errors import DeadlineExceeded, InvariantBroken, TransferFailed
from penstock.figures import SECONDS_BOUNDS, Histogram, Traffic
from penstock.kv.blocks.handles import Pin
from penstock.kv.memory import BlockLayout, piece_slots
from penstock.lanes.lane import POLL_MOST_S, Lane, Ticket, look_again_s
from penstock.observe import ByteGuard, ContentObserver, TransferObserver

log = logging.getLogger(__name__)

Slots = NDArray[np.int64]
Layers = tuple[int, int]

_NO_SLOTS: Slots = np.empty(0, np.int64)


class Group(NamedTuple):
    """A part of a transfer that is one copy: some of its blocks, some of their layers."""

    layers: Layers
    blocks: slice = slice(None)


class Settling(Protocol):
    """An operation in flight, as its waiter sees it."""

    @property
    def settled(self) -> bool: ...


class Copier(Protocol):
    """Copies blocks from one arena to another; called as an op of the transfer's lane."""

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        """Copy `layers` of each source slot into the same layers of the destination slot at the same
        index."""


@dataclass(slots=True)
class Times:
    """When a transfer was submitted, became the next to end, was last seen unfinished, and ended."""

    submitted_s: float = 0.0
    first_s: float = 0.0
    seen_s: float = 0.0
    settled_s: float = 0.0


class Transfer:
    """Blocks on their way from one arena to the other.

    Its creator protects both ends until `settled`, even if the request has ended. The launcher sets
    `arrivals` last, so a thread that sees them sees everything before.
    """

    def __init__(self, label: str, groups: Sequence[Group], after: Sequence[Fence] = ()) -> None:
        self.label = label
        # groups land one by one, in order; together they cover every layer of every block once
        self.groups = groups
        self.after = after  # the lane waits for these before it touches either end
        self.source_slots = self.dest_slots = _NO_SLOTS
        # on its device slots, from before submission until its end was seen
        self.pins: Sequence[Pin] = ()
        self.keys: Sequence[bytes] = ()  # of its leading blocks that have one
        self.arrivals: tuple[Arrival, ...] | None = None
        self.settled = False
        self.times = Times()
        self.deadline_s = float("inf")
        self.ticket: Ticket | None = None  # of the launch, set by the mover
        self.copied: list[Ticket] = []  # by group, set by the mover
        self._end: Fence | None = None  # behind everything that was put on the lane
        self._error: BaseException | None = None

    def prepare(self) -> bool:
        """On the launcher, before any copy is enqueued: the last moment to choose slots. False: nothing to
        copy."""
        return True

    def touches(self, slots: frozenset[int] | None) -> bool:
        """Whether it may still touch one of these device slots; None: any."""
        return slots is None or any(not slots.isdisjoint(pin.slots) for pin in self.pins)

    @property
    def num_blocks(self) -> int:
        return len(self.source_slots)

    @property
    def overdue(self) -> bool:
        return not self.settled and time.monotonic() > self.deadline_s

    def error(self) -> BaseException | None:
        if self._error is None:
            self._error = next(
                (error for ticket in self.copied if (error := ticket.error()) is not None), None
            )
        return self._error

    # ------------------------------------------------------------------------------------------ for the mover

    def fail(self, error: BaseException) -> None:
        self._error = error

    def launched(self, end: Fence | None, arrivals: Sequence[Arrival]) -> None:
        self._end = end
        self.arrivals = tuple(arrivals)

    def over(self) -> bool:
        """Raises if its launch ended without anything to wait for."""
        if self.arrivals is None and self.ticket is not None and self.ticket.done():
            self._require_launched()
        return self.arrivals is not None and (self._end is None or self._end.passed())

    def wait_over(self, deadline_s: float) -> None:
        """Block until it is launched, then until it is over. Raises DeadlineExceeded, or what `over`
        raises."""
        if self.ticket is None:
            raise InvariantBroken(f"{self.label!r} was never submitted")
        try:
            self.ticket.wait_done(max(0.0, deadline_s - time.monotonic()))
        except DeadlineExceeded:
            raise
        except BaseException as error:  # of the launch: anything that it enqueued is covered by `_end`
            self.fail(error)
        self._require_launched()
        if self._end is not None:
            self._end.wait_passed(max(0.0, deadline_s - time.monotonic()))

    def _require_launched(self) -> None:
        """Its launch is over. If the launch could not record a fence, this is not a failed copy: it is
        unknown when its slots are free."""
        if self.arrivals is None:
            cause = None if self.ticket is None else self.ticket.error()
            raise InvariantBroken(
                f"the launch of {self.label!r} failed, and when it ends is unknown: {cause!r}"
            ) from cause


class ByteChecks:
    """Checked mode for transfers between the device and one colder tier, on their lanes: poisons destinations
    before they are written, hashes blocks, and compares the bytes that leave the device with those that come
    back.

    A slot is poisoned when its new owner is about to write it, on the owner's lane, not when it is given
    back: only the new owner has waited for the fences of the former ones.
    """

    def __init__(
        self,
        guard: ByteGuard,
        contents: ContentObserver,
        layers: Layers,
        tier: str = "host",
        device: str = "device",
    ) -> None:
        self._guard = guard
        self._contents = contents
        self._layers = layers
        self._tier = tier
        self._device = device

    def before(self, transfer: Transfer, lane: Lane, dest: str) -> None:
        """Behind the transfer's waits, before its first copy."""
        slots = transfer.dest_slots
        access = Access(dest, slots, self._layers, Mode.WRITE)
        lane.submit(
            lambda: self._guard.poison(dest, slots.tolist()), [access], label=f"poison for {transfer.label}"
        )
        if dest == self._tier:  # reported before the copy can be found
            self._compare(transfer, lane, demotes=True)

    def after(self, transfer: Transfer, lane: Lane, dest: str) -> None:
        """Behind its last copy."""
        if dest == self._device:
            self._compare(transfer, lane, demotes=False)

    def _compare(self, transfer: Transfer, lane: Lane, demotes: bool) -> None:
        on_device, in_tier = (
            (transfer.source_slots, transfer.dest_slots)
            if demotes
            else (transfer.dest_slots, transfer.source_slots)
        )
        keys = tuple(transfer.keys)

        def compare() -> None:
            if transfer.error() is None:
                tell = self._contents.demoted if demotes else self._contents.promoted
                digests = self._guard.digests(self._device, on_device[: len(keys)].tolist())
                for slot, key, digest in zip(in_tier.tolist(), keys, digests, strict=False):
                    tell(self._tier, slot, key, digest)

        # Only blocks with keys: the request may already be writing into the others again, layer by layer.
        access = Access(self._device, on_device[: len(keys)], self._layers, Mode.READ)
        lane.submit(compare, [access], label=f"digests of {transfer.label}")


@dataclass(slots=True)
class MoverCounts:
    """Totals of one mover, which never fall."""

    num_blocks: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by reason
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))  # from submit to settled


class Mover:
    """One direction between two arenas. `submit` and `settle` are for the engine thread. Launching happens on
    `launcher`, a CPU lane: a long run of launches behind an unresolved fence blocks the launching thread."""

    def __init__(
        self,
        arenas: tuple[str, str],
        copier: Copier,
        lane: Lane,
        launcher: Lane,
        checks: ByteChecks | None = None,  # in checked mode
        observer: TransferObserver | None = None,
    ) -> None:
        # called on the launcher when the device can wait for a transfer
        self.wake: Callable[[], None] = lambda: None
        self.checks = checks
        self.lane = lane
        self.arenas = self._source, self._dest = arenas
        self.copier = copier
        self.counts = MoverCounts()
        self._observer = observer
        self._launcher = launcher
        self.flying: deque[Transfer] = deque()  # not seen to end yet; the first is next
        self._last_settled_s = 0.0

    @property
    def num_blocks(self) -> int:
        return sum(transfer.num_blocks for transfer in self.flying)

    def is_late(self) -> bool:
        """Whether the transfer that is next to end is overdue."""
        return bool(self.flying) and self.flying[0].overdue

    def submit(self, transfer: Transfer) -> None:
        """Hand it over; returns at once. If this raises, no part of it will run."""
        transfer.times.submitted_s = time.monotonic()
        transfer.ticket = self._launcher.submit(
            lambda: self._launch(transfer), label=f"launch {transfer.label}"
        )
        self.flying.append(transfer)
        if self._observer is not None:
            self._observer.transfer_submitted(transfer, self.arenas, transfer.label)

    def settle(self) -> list[Transfer]:
        """Transfers that ended since the last call, oldest first; never blocks."""
        over: list[Transfer] = []
        if not self.flying:
            return over
        now = time.monotonic()
        while self.flying and self.flying[0].over():
            transfer = self.flying.popleft()
            transfer.settled, times = True, transfer.times
            times.settled_s, times.first_s = now, max(times.submitted_s, self._last_settled_s)
            self._last_settled_s = now
            over.append(transfer)
            if self._observer is not None:
                self._observer.transfer_over(transfer, transfer.num_blocks, transfer.error())
        if self.flying:
            self.flying[0].times.seen_s = now
        return over

    def book(self, transfer: Transfer) -> None:
        """Count it: it is over, and its pins have ended. Raises a defect in Penstock: the engine stops."""
        error, counts = transfer.error(), self.counts
        if isinstance(error, InvariantBroken):
            raise error
        if error is not None:
            counts.failures["copy" if isinstance(error, TransferFailed) else type(error).__name__] += 1
            log.warning("%s failed, and its blocks are computed instead: %s", transfer.label, error)
        elif transfer.num_blocks:
            counts.num_blocks += transfer.num_blocks
            counts.seconds.add(transfer.times.settled_s - transfer.times.submitted_s)

    def report(self, tier: str, block_bytes: int, traffic: Traffic) -> None:
        """Add its figures to `traffic`; failures count for `tier`."""
        if self.counts.num_blocks:
            traffic.bytes[self.arenas] = self.counts.num_blocks * block_bytes
            traffic.seconds[self.arenas] = self.counts.seconds.copy()
        traffic.in_flight[self.arenas] = len(self.flying)
        for reason, num in list(self.counts.failures.items()):
            traffic.failures[tier, reason] = traffic.failures.get((tier, reason), 0) + num

    def look_again_s(self) -> float:
        """How long `settle` need not be called, unless `wake` was. Polling would only take the interpreter
        from the launcher."""
        first = self.flying[0] if self.flying else None
        if first is None or first.arrivals is None:
            return POLL_MOST_S
        return look_again_s(time.monotonic() - max(first.times.submitted_s, self._last_settled_s))

    def drain(self, timeout_s: float, concerned: Callable[[Transfer], bool] = lambda transfer: True) -> None:
        """Block until every transfer in flight that is `concerned` is over, launched or not. The next
        `settle` finds them."""
        deadline_s = time.monotonic() + timeout_s
        for transfer in tuple(self.flying):
            if concerned(transfer):
                transfer.wait_over(deadline_s)

    def close(self, timeout_s: float | None) -> None:
        self._launcher.close(timeout_s)
        self.lane.close(timeout_s)

    # ---------------------------------------------------------------------------------------- on the launcher

    def _launch(self, transfer: Transfer) -> None:
        arrivals: list[Arrival] = []
        try:
            if transfer.prepare():
                self._enqueue(transfer, arrivals)
        except BaseException as error:  # of any kind: blocks that were not copied have not landed
            transfer.fail(error)
        finally:
            # After any error, work already on the lane ends before either end is given back.
            transfer.launched(self.lane.record() if transfer.num_blocks else None, arrivals)
            self.wake()

    def _enqueue(self, transfer: Transfer, arrivals: list[Arrival]) -> None:
        source, dest = transfer.source_slots, transfer.dest_slots
        if len(source) != len(dest):
            raise InvariantBroken(
                f"{transfer.label!r} has {len(source)} sources and {len(dest)} destinations"
            )
        for fence in transfer.after:
            self.lane.wait(fence)
        if self.checks is not None:
            self.checks.before(transfer, self.lane, self._dest)
        last: Ticket | None = None
        for group in transfer.groups:
            layers, blocks = group
            accesses = (
                Access(self._source, source[blocks], layers, Mode.READ),
                Access(self._dest, dest[blocks], layers, Mode.WRITE),
            )
            last = self.lane.submit(
                partial(self._copy, transfer, group), accesses, label=transfer.label, after=last
            )
            transfer.copied.append(last)
            # before the last arrival, so that its waiters find this over, too
            if self.checks is not None and group is transfer.groups[-1]:
                self.checks.after(transfer, self.lane, self._dest)
            arrivals.append(Arrival(layers, self.lane.record()))

    def _copy(self, transfer: Transfer, group: Group) -> None:
        try:
            self.copier.copy(
                transfer.source_slots[group.blocks], transfer.dest_slots[group.blocks], group.layers
            )
        except InvariantBroken:
            raise
        except Exception as error:
            raise TransferFailed(f"{transfer.label}: {error}") from error


class NoMover(Mover):
    """For a tier without slots: nothing is ever in flight, and there are no lanes."""

    def __init__(self) -> None:
        self.flying = deque()
        self._last_settled_s = 0.0

    def submit(self, transfer: Transfer) -> None:
        raise InvariantBroken(f"{transfer.label!r} was submitted, and there is nowhere to move to")

    def close(self, timeout_s: float | None) -> None:
        pass


# ----------------------------------------------------------------------------------------------------- copies

_BATCH_SINCE = 12080  # first CUDA version with batched copies
# 0.45 ms at 55 GB/s; meanwhile the next part is prepared, and the driver takes some hundred entries
_FIRST_PART_BYTES = 24 << 20
_PART_GROWTH = 8
# up to this number, one entry per block is faster than a search for neighbours
_FEW_BLOCKS = 32

Pairs = NDArray[np.int64]  # two rows: source slots and destination slots
Entries = NDArray[np.int64]  # three rows: source address, destination address and bytes, per contiguous piece
Extent = tuple[int, int]  # first byte and number of bytes within a block

_NO_ENTRIES: Entries = np.empty((3, 0), np.int64)


def make_copier(source: Tensor, dest: Tensor, layout: BlockLayout) -> Copier:
    """For two arenas' tensors, the slot their first dimension."""
    on_cpu = source.device.type == dest.device.type == "cpu"
    return CpuCopier(source, dest, layout) if on_cpu else CudaCopier(source, dest, layout)


class CpuCopier:
    """One memmove per run of neighbouring blocks, without the GIL, all on the lane's thread: torch would
    start as many threads again as compute has, and they would compete for its cores."""

    def __init__(self, source: Tensor, dest: Tensor, layout: BlockLayout) -> None:
        self._ends = _Ends(source, dest, layout)

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        entries = self._ends.entries(self._ends.checked(source_slots, dest_slots), self._ends.extent(layers))
        for source, dest, num_bytes in entries.T.tolist():
            ctypes.memmove(dest, source, num_bytes)


class CudaCopier:
    """Batched driver calls on the current stream; copy engines do the work, and compute keeps its
    multiprocessors.

    A call takes up to a microsecond per entry, without the GIL. Behind an unresolved fence a stream takes
    some 25,000 entries before it blocks its caller (as single copies, a thousand), so the calling thread must
    be one that may wait. If the CUDA runtime has no batched copies, each block is a copy of its own.
    """

    def __init__(self, source: Tensor, dest: Tensor, layout: BlockLayout) -> None:
        self._ends = _Ends(source, dest, layout)
        self._device = source.device if source.device.type == "cuda" else dest.device
        self._batch = _batch_copy()
        self._host = 0 if source.device.type == "cpu" else 1
        self._piece_slots = piece_slots(layout)

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        if self._batch is None:
            self._copy_each(source_slots, dest_slots, layers)
            return
        pairs, extent = self._ends.checked(source_slots, dest_slots), self._ends.extent(layers)
        stream, num = _current_stream(self._device), pairs.shape[1]
        # A batch starts when all of it is submitted. So a transfer begins with a small batch, and the rest
        # follows while that is being copied.
        for part in _growing_parts(num, extent[1]) if layers[0] == 0 else (slice(0, num),):
            if part.stop - part.start <= _FEW_BLOCKS:
                entries = self._ends.entry_each(pairs[:, part], extent)
            else:
                entries = self._ends.entries(pairs[:, part], extent, (self._host, self._piece_slots))
            self._batch(entries, stream)

    def _copy_each(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        self._ends.checked(source_slots, dest_slots)
        self._ends.extent(layers)
        source, dest = self._ends.tensors
        first, end = layers
        try:
            for source_slot, dest_slot in zip(source_slots.tolist(), dest_slots.tolist(), strict=True):
                dest[dest_slot, first:end].copy_(source[source_slot, first:end], non_blocking=True)
        except RuntimeError as error:
            raise TransferFailed(f"a copy of {len(source_slots)} blocks: {error}") from error


class _Ends:
    """Two arenas of one layout as addresses. Raw addresses are unchecked, so slots are checked against the
    arenas each time."""

    def __init__(self, source: Tensor, dest: Tensor, layout: BlockLayout) -> None:
        for tensor in (source, dest):
            if (
                tensor.shape[1:] != layout.shape
                or tensor.dtype != getattr(torch, layout.dtype)
                or not tensor.is_contiguous()
            ):
                raise InvariantBroken(
                    f"an arena of {tuple(tensor.shape)} in {tensor.dtype} is not laid out as {layout}"
                )
        self.tensors = (source, dest)  # an address keeps nothing alive
        self.extent = layout.extent
        self._block_bytes = layout.block_bytes
        self._addresses = source.data_ptr(), dest.data_ptr()
        self._num_slots = len(source), len(dest)

    def checked(self, source_slots: Slots, dest_slots: Slots) -> Pairs:
        if len(source_slots) != len(dest_slots):
            raise InvariantBroken(f"{len(source_slots)} blocks cannot be copied into {len(dest_slots)} slots")
        pairs = np.array((source_slots, dest_slots), np.int64)
        if pairs.size:
            unsigned = pairs.view(np.uint64)  # a negative slot becomes very large
            for side, (at, num_slots) in enumerate(
                zip(unsigned.argmax(axis=1).tolist(), self._num_slots, strict=True)
            ):
                if unsigned.item(side, at) >= num_slots:
                    raise InvariantBroken(
                        f"an arena of {num_slots} slots has no slots {pairs[side].min()} to "
                        f"{pairs[side].max()}"
                    )
        return pairs

    def entry_each(self, pairs: Pairs, extent: Extent) -> Entries:
        """One piece per block. After a pause, numpy arithmetic takes longer than a few scalar operations."""
        first, num_bytes = extent
        if num_bytes == 0:
            return _NO_ENTRIES
        starts = [address + first for address in self._addresses]
        ends = [
            [start + slot * self._block_bytes for slot in slots]
            for start, slots in zip(starts, pairs.tolist(), strict=True)
        ]
        return np.array((*ends, [num_bytes] * pairs.shape[1]), np.int64)

    def entries(self, pairs: Pairs, extent: Extent, seams: tuple[int, int] | None = None) -> Entries:
        """Whole blocks that are neighbours on both sides become one piece. `seams`: on that side (0: source,
        1: dest) no piece crosses a multiple of that many slots."""
        first, num_bytes = extent
        if num_bytes == 0:
            return _NO_ENTRIES
        entries = np.empty((3, pairs.shape[1]), np.int64)
        for row, slots, address in zip(entries, pairs, self._addresses, strict=False):
            np.multiply(slots, self._block_bytes, out=row)
            row += address + first
        entries[2] = num_bytes
        if num_bytes == self._block_bytes:
            sources, dests = pairs
            goes_on = (sources[1:] - sources[:-1] == 1) & (dests[1:] - dests[:-1] == 1)
            if goes_on.any():
                if seams is not None:
                    goes_on &= pairs[seams[0], 1:] % seams[1] != 0
                starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
                entries = entries.take(starts, axis=1)
                entries[2] = np.diff(starts, append=pairs.shape[1]) * num_bytes
        return entries


def _growing_parts(num_blocks: int, num_bytes: int) -> Iterator[slice]:
    """Slices of blocks of `num_bytes` each. One part is copied while the next, several times as large, is
    submitted."""
    start, part_bytes = 0, _FIRST_PART_BYTES
    while start < num_blocks:
        # A rest too small for a call of its own joins this part.
        is_last = (num_blocks - start) * num_bytes < 2 * part_bytes
        end = num_blocks if is_last else start + max(1, part_bytes // num_bytes)
        yield slice(start, end)
        start, part_bytes = end, part_bytes * _PART_GROWTH


# ----------------------------------------------------------------------------------------------- CUDA runtime


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes"""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("dest", _Location),
        ("flags", ctypes.c_uint),
    )


# cudaMemcpySrcAccessOrderStream: with any other, sources are read before what the stream waits for has
# happened
_STREAM_ORDER = 1


class _BatchCopy:
    """cudaMemcpyBatchAsync. Called through ctypes: no loop over entries in Python, and the GIL is free
    meanwhile."""

    def __init__(self, runtime: ctypes.CDLL, version: int) -> None:
        runtime.cudaGetErrorName.restype = ctypes.c_char_p
        self._runtime = runtime
        self._attributes = _Attributes(source_order=_STREAM_ORDER)
        self._first_entry = ctypes.c_size_t(0)  # from which the attributes hold
        # an argument that CUDA 13 has dropped
        failed_entry = (ctypes.byref(ctypes.c_size_t(0)),) if version < 13000 else ()
        self._fixed = (
            ctypes.byref(self._attributes),
            ctypes.byref(self._first_entry),
            ctypes.c_size_t(1),
            *failed_entry,
        )

    def __call__(self, entries: Entries, stream: int) -> None:
        if stream == 0:
            raise InvariantBroken("blocks are copied on a lane's stream, not on CUDA's default one")
        num = entries.shape[1]
        if not num:
            return
        # refuses what does not lie in one piece
        sources = ctypes.addressof(ctypes.c_char.from_buffer(entries.data))
        dests, sizes = sources + entries.strides[0], sources + 2 * entries.strides[0]
        arrays = ctypes.c_void_p(dests), ctypes.c_void_p(sources), ctypes.c_void_p(sizes)
        code = self._runtime.cudaMemcpyBatchAsync(
            *arrays, ctypes.c_size_t(num), *self._fixed, ctypes.c_void_p(stream)
        )
        if code != 0:
            self._runtime.cudaGetLastError()  # or this thread's next launch would be blamed for it
            name = self._runtime.cudaGetErrorName(code).decode()
            raise TransferFailed(f"cudaMemcpyBatchAsync of {num} pieces: {name}")


@functools.cache
def _batch_copy() -> _BatchCopy | None:
    """None: the CUDA runtime that torch has loaded, or the driver below it, is older than copies in
    batches."""
    try:
        # Never loads one: a second runtime would know nothing of torch's memory.
        runtime = ctypes.CDLL(
            f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW
        )
        versions = ctypes.c_int(0), ctypes.c_int(0)
        codes = (
            runtime.cudaRuntimeGetVersion(ctypes.byref(versions[0])),
            runtime.cudaDriverGetVersion(ctypes.byref(versions[1])),
        )
        if (
            any(codes)
            or min(version.value for version in versions) < _BATCH_SINCE
            or not runtime.cudaMemcpyBatchAsync
        ):
            return None
    except (OSError, AttributeError):
        return None
    return _BatchCopy(runtime, versions[0].value)


def _current_stream(device: torch.device) -> int:
    # torch.cuda.current_stream makes an object for it each time
    return torch._C._cuda_getCurrentRawStream(device.index)

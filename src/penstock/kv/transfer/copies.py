"""Copies of blocks between two arenas. Owns how bytes get across; when, and that both ends stay in place, is the mover's business."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import InvariantBroken, TransferFailed
from penstock.kv.memory import BlockLayout, piece_slots
from penstock.kv.transfer.mover import Copier, Layers, Slots

_BATCH_SINCE = 12080  # version of CUDA that brought copies in batches
_FIRST_PART_BYTES = 24 << 20  # 0.45 ms at 55 GB/s, in which the next part is worked out and the driver takes some hundred entries
_PART_GROWTH = 8
_FEW_BLOCKS = 32  # up to which one entry per block is worked out sooner than it could be seen which are neighbours

Pairs = NDArray[np.int64]  # two rows: slots of the source, and where their blocks go
Entries = NDArray[np.int64]  # three rows: addresses of both ends and bytes, of each contiguous piece
Extent = tuple[int, int]  # first byte and number of bytes within a block

_NO_ENTRIES: Entries = np.empty((3, 0), np.int64)


def make_copier(source: Tensor, dest: Tensor, layout: BlockLayout) -> Copier:
    """For two arenas' tensors, the slot their first dimension."""
    on_cpu = source.device.type == dest.device.type == "cpu"
    return CpuCopier(source, dest, layout) if on_cpu else CudaCopier(source, dest, layout)


class CpuCopier:
    """One memmove per run of neighbouring blocks, without the GIL. The lane's thread does all of it: torch would fetch as many threads
    again as compute has, and they would fight for its cores."""

    def __init__(self, source: Tensor, dest: Tensor, layout: BlockLayout) -> None:
        self._ends = _Ends(source, dest, layout)

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        entries = self._ends.entries(self._ends.checked(source_slots, dest_slots), self._ends.extent(layers))
        for source, dest, num_bytes in entries.T.tolist():
            ctypes.memmove(dest, source, num_bytes)


class CudaCopier:
    """Calls of the driver for many blocks at once, on the current stream; copy engines do the rest, and compute keeps its multiprocessors.

    A call takes up to a microsecond per entry, without the GIL. Behind an unresolved fence a stream takes some 25,000 entries before it
    blocks its caller (as single copies, a thousand), so calls are still made from a thread that may wait. Where the CUDA runtime has no
    copies in batches, each block is a copy of its own.
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
        # A batch starts when all of it has been worked out and handed over: what a transfer begins with starts with a little, and the
        # rest follows while that is on its way.
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
    """Two arenas of one layout as addresses. Raw addresses forgive nothing, so slots are checked against the arenas each time."""

    def __init__(self, source: Tensor, dest: Tensor, layout: BlockLayout) -> None:
        for tensor in (source, dest):
            if tensor.shape[1:] != layout.shape or tensor.dtype != getattr(torch, layout.dtype) or not tensor.is_contiguous():
                raise InvariantBroken(f"an arena of {tuple(tensor.shape)} in {tensor.dtype} is not laid out as {layout}")
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
            unsigned = pairs.view(np.uint64)  # a negative one is very large there
            for side, (at, num_slots) in enumerate(zip(unsigned.argmax(axis=1).tolist(), self._num_slots, strict=True)):
                if unsigned.item(side, at) >= num_slots:
                    raise InvariantBroken(f"an arena of {num_slots} slots has no slots {pairs[side].min()} to {pairs[side].max()}")
        return pairs

    def entry_each(self, pairs: Pairs, extent: Extent) -> Entries:
        """No piece is more than a block. After a pause numpy's arithmetic takes longer than a few numbers by themselves."""
        first, num_bytes = extent
        if num_bytes == 0:
            return _NO_ENTRIES
        starts = [address + first for address in self._addresses]
        ends = [[start + slot * self._block_bytes for slot in slots] for start, slots in zip(starts, pairs.tolist(), strict=True)]
        return np.array((*ends, [num_bytes] * pairs.shape[1]), np.int64)

    def entries(self, pairs: Pairs, extent: Extent, seams: tuple[int, int] | None = None) -> Entries:
        """Whole blocks that are neighbours on both sides become one piece. `seams`: none goes on into a slot, on that side (0: source,
        1: dest), that is a multiple of so many."""
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
    """Of blocks of so many bytes each. A part is on its way while the next, several times as large, is handed over."""
    start, part_bytes = 0, _FIRST_PART_BYTES
    while start < num_blocks:
        # Too little left over for a call of its own is a part of this one.
        is_last = (num_blocks - start) * num_bytes < 2 * part_bytes
        end = num_blocks if is_last else start + max(1, part_bytes // num_bytes)
        yield slice(start, end)
        start, part_bytes = end, part_bytes * _PART_GROWTH


# ---------------------------------------------------------------------------------------------------------------- CUDA runtime


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes"""

    _fields_ = (("source_order", ctypes.c_int), ("source", _Location), ("dest", _Location), ("flags", ctypes.c_uint))


_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream: with any other, sources are read before what the stream waits for has happened


class _BatchCopy:
    """cudaMemcpyBatchAsync. Called through ctypes: no loop over entries in Python, and the GIL is free meanwhile."""

    def __init__(self, runtime: ctypes.CDLL, version: int) -> None:
        runtime.cudaGetErrorName.restype = ctypes.c_char_p
        self._runtime = runtime
        self._attributes = _Attributes(source_order=_STREAM_ORDER)
        self._first_entry = ctypes.c_size_t(0)  # from which the attributes hold
        failed_entry = (ctypes.byref(ctypes.c_size_t(0)),) if version < 13000 else ()  # an argument that CUDA 13 has dropped
        self._fixed = (ctypes.byref(self._attributes), ctypes.byref(self._first_entry), ctypes.c_size_t(1), *failed_entry)

    def __call__(self, entries: Entries, stream: int) -> None:
        if stream == 0:
            raise InvariantBroken("blocks are copied on a lane's stream, not on CUDA's default one")
        num = entries.shape[1]
        if not num:
            return
        sources = ctypes.addressof(ctypes.c_char.from_buffer(entries.data))  # refuses what does not lie in one piece
        dests, sizes = sources + entries.strides[0], sources + 2 * entries.strides[0]
        arrays = ctypes.c_void_p(dests), ctypes.c_void_p(sources), ctypes.c_void_p(sizes)
        code = self._runtime.cudaMemcpyBatchAsync(*arrays, ctypes.c_size_t(num), *self._fixed, ctypes.c_void_p(stream))
        if code != 0:
            self._runtime.cudaGetLastError()  # or this thread's next launch would be blamed for it
            name = self._runtime.cudaGetErrorName(code).decode()
            raise TransferFailed(f"cudaMemcpyBatchAsync of {num} pieces: {name}")


@functools.cache
def _batch_copy() -> _BatchCopy | None:
    """None: the CUDA runtime that torch has loaded, or the driver below it, is older than copies in batches."""
    try:
        # Never loads one: a second runtime would know nothing of torch's memory.
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        versions = ctypes.c_int(0), ctypes.c_int(0)
        codes = runtime.cudaRuntimeGetVersion(ctypes.byref(versions[0])), runtime.cudaDriverGetVersion(ctypes.byref(versions[1]))
        if any(codes) or min(version.value for version in versions) < _BATCH_SINCE or not runtime.cudaMemcpyBatchAsync:
            return None
    except (OSError, AttributeError):
        return None
    return _BatchCopy(runtime, versions[0].value)


def _current_stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)  # torch.cuda.current_stream makes an object for it each time

"""The memory that KV blocks live in, on the device and in the host, and how one block lies in its page. Owns
the layout, the tensors and the pinning of host memory; which slot is whose is the pools' business.

    page of one slot:  [layer][k|v][token][kv_head][head_dim]

A page is contiguous, so one block is one copy; the layers of a page are in order, so a run of layers is one
copy too.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from penstock.config import GIB
from penstock.errors import ConfigError, InvariantBroken

NAME = "block-major"
VERSION = 1  # of the bytes' meaning; changes when the same dimensions are laid out differently

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Dimensions of one block's page."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    layer_bytes: int = field(init=False, repr=False, compare=False)  # K and V of one layer of one block
    block_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a KV layout needs a positive {name}, got {getattr(self, name)}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KV can be stored as {', '.join(ITEM_BYTES)}, not as {self.dtype!r}")
        object.__setattr__(self, "layer_bytes", math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype])
        object.__setattr__(self, "block_bytes", self.num_layers * self.layer_bytes)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_tokens, self.num_kv_heads, self.head_dim)

    def extent(self, layers: tuple[int, int]) -> tuple[int, int]:
        """(first byte, number of bytes) within a page of layers `[layers[0], layers[1])`."""
        first, end = layers
        if not 0 <= first <= end <= self.num_layers:
            raise InvariantBroken(f"no layers {first} to {end} in a page of {self.num_layers} layers")
        return first * self.layer_bytes, (end - first) * self.layer_bytes

    def fingerprint(self) -> bytes:
        """Equal exactly if pages are interchangeable byte by byte. Readable, for tools that inspect a stored
        cache."""
        layers, _, tokens, heads, dim = self.shape
        return (
            f"{NAME}/{VERSION} layers={layers} block_tokens={tokens} kv_heads={heads} head_dim={dim} "
            f"dtype={self.dtype}"
        ).encode()


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A slot with the state of one request in all recurrent layers, as float32 numbers."""

    num_layers: int
    block_bytes: int
    fingerprint: bytes  # equal exactly if states are interchangeable byte by byte; readable
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.block_bytes // ITEM_BYTES[self.dtype],)


class SlotLayout(Protocol):
    """What an arena of host memory needs to know of a slot."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


_LOG = logging.getLogger(__name__)
_CPU = torch.device("cpu")
# Pinning blocks launches on every other thread: 1 ms for 32 MiB of faulted-in memory, 170 ms for 256 MiB that
# is not faulted in yet (H200).
_PIECE_BYTES = 32 << 20
# A page fault on first use makes a copy five to thirty times slower and takes a core from compute. So some
# memory is faulted in ahead if nothing is pinned. All of it at once would take it from a laptop for good.
_AHEAD_BYTES = 256 << 20
_CLOSE_S = 60.0  # one piece is pinned in a fraction of a second
_MADV_POPULATE_WRITE = 23  # Linux 5.14; fault in memory, keeping its content


class DeviceArena:
    """`tensor` is [num_slots + 1, layers, k|v, block_tokens, kv_heads, head_dim]; the last slot is the
    padding block.

    Padding rows of a step read and write the padding block, so kernels need no branch. Everything starts as
    zero, hence finite: a masked weight of 0 times the content of an unused token stays 0.
    """

    def __init__(
        self, layout: BlockLayout, num_slots: int, device: torch.device | str, name: str = "device"
    ) -> None:
        if num_slots < 1:
            raise ConfigError(f"the {name} KV arena needs at least one block, got {num_slots}")
        self.name = name
        self.layout = layout
        self.num_slots = num_slots
        shape = (num_slots + 1, *layout.shape)
        self.tensor = _zeros(shape, getattr(torch, layout.dtype), torch.device(device), name)

    @property
    def padding_slot(self) -> int:
        return self.num_slots

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def num_bytes(self) -> int:
        return (self.num_slots + 1) * self.layout.block_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    num_bytes, lower = math.prod(shape) * dtype.itemsize, "--device-kv-gib or --device-kv-blocks"
    if device.type == "cpu":
        return torch.frombuffer(_untouched(num_bytes, name, "on cpu", lower), dtype=dtype).view(shape)
    with _must_fit(num_bytes, device, name, f"on {device}", lower):
        return torch.zeros(shape, dtype=dtype, device=device)


def _untouched(num_bytes: int, name: str, where: str, lower: str, file: int = -1) -> mmap.mmap:
    """Zeros on whole pages that take no memory before they are used: start-up does not pay for unused
    memory. `file`: of memory that other processes have, too."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with _must_fit(num_bytes, _CPU, name, where, lower):
        memory = mmap.mmap(file, num_bytes, flags=private if file < 0 else mmap.MAP_SHARED)
    # Huge pages: half the fault time on first use, and fewer TLB misses in every gather.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without it is only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextlib.contextmanager
def _must_fit(num_bytes: int, device: torch.device, name: str, where: str, lower: str) -> Iterator[None]:
    """Raises ConfigError if that much memory is not free, or if the block cannot allocate it."""
    available = free_bytes(device)
    try:
        if num_bytes > available:
            raise MemoryError
        yield
    except (torch.OutOfMemoryError, MemoryError, OSError, OverflowError):
        free = f"of which {available / GIB:.2f} GiB are free"
        raise ConfigError(
            f"the {name} KV arena needs {num_bytes / GIB:.2f} GiB {where}, {free}; lower {lower}"
        ) from None


def limit_memory(device: torch.device, num_bytes: int) -> None:
    """From now on this process has no more than that of a GPU, whatever the GPU has."""
    total = torch.cuda.mem_get_info(device)[1]
    if num_bytes > total:
        raise ConfigError(
            f"--device-memory-gib {num_bytes / GIB:g}: {device} has {total / GIB:.1f} GiB in all"
        )
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else torch's cached memory would count as used
        free, total = torch.cuda.mem_get_info(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        within = share * total - torch.cuda.memory_reserved(device) if share < 1 else free
        return max(0, int(min(free, within)))
    return int(psutil.virtual_memory().available)


def piece_slots(layout: SlotLayout) -> int:
    """How many slots are pinned together: whole slots on whole pages. CUDA refuses a copy across two
    registrations, and a registration that shares a page with another."""
    step = mmap.PAGESIZE // math.gcd(layout.block_bytes, mmap.PAGESIZE)
    return step * max(1, _PIECE_BYTES // (step * layout.block_bytes))


# by arena of host memory: the flag that makes it smaller
_FLAGS = {"host": "--kv-offload-host-gib", "kept states": "--kv-offload-states-gib"}


class HostArena:
    """`tensor` is [num_slots, layers, k|v, block_tokens, kv_heads, head_dim], zero at first; of states
    [num_slots, numbers]. It has no padding block: no step reads it.

    With a GPU, a slot may be used only after `prepare` has reported it: copies from and to unpinned memory
    would block the launching thread. `device` is the other end of the copies.
    """

    def __init__(
        self,
        layout: SlotLayout,
        num_slots: int,
        device: torch.device | str,
        name: str = "host",
        file: int = -1,
    ) -> None:
        """`file`: of memory that other processes have, too; -1: this one alone."""
        if num_slots < 1:
            raise ConfigError(f"the {name} KV arena needs at least one block, got {num_slots}")
        self.name = name
        self.layout = layout
        self.num_slots = num_slots
        self.device = torch.device(device)
        self._memory = _untouched(self.num_bytes, name, "of memory", _FLAGS.get(name, ""), file)
        self.tensor = torch.frombuffer(self._memory, dtype=getattr(torch, layout.dtype)).view(
            num_slots, *layout.shape
        )
        self._lock = threading.Lock()  # a piece is pinned before `close`, or not at all
        self._pinned: list[int] = []  # addresses of registered pieces
        # An arena dropped without `close` must unregister, too: the next one may be mapped to the same
        # addresses.
        weakref.finalize(self, _unregister_all, self._pinned, self.device).atexit = False
        self._closed = False

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.layout.block_bytes

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        size = self.layout.block_bytes
        return memoryview(self._memory)[slot * size : (slot + 1) * size]

    @property
    def memory(self) -> memoryview:
        """The bytes of all slots."""
        return memoryview(self._memory)

    def prepare(
        self, ready: Callable[[range], None], progress: Callable[[int, int], None], stop: Callable[[], bool]
    ) -> None:
        """Make the memory usable, piece by piece and in order. `ready` gets the slots of each piece,
        `progress` the bytes done and in total.

        Takes seconds, so its owner calls it once, on a thread of its own (a failed registration also leaves
        its error with the thread). Memory that cannot be pinned ends it with a warning: the slots before are
        usable, the others never become ready.
        """
        if self.device.type == "cpu":
            ready(range(self.num_slots))  # usable anyway, only slower
            self._find_ahead(stop)
            return
        step = piece_slots(self.layout)
        for first in range(0, self.num_slots, step):
            slots = range(first, min(first + step, self.num_slots))
            if stop() or not self._pin(slots):
                return
            ready(slots)
            progress(slots.stop * self.layout.block_bytes, self.num_bytes)

    def _find_ahead(self, stop: Callable[[], bool]) -> None:
        total = min(_AHEAD_BYTES, self.num_bytes)
        for first in range(0, total, _PIECE_BYTES):
            size = min(_PIECE_BYTES, total - first)
            if stop() or free_bytes(_CPU) < 4 * size or not _find(self.tensor.data_ptr() + first, size):
                return  # the other slots are faulted in on first use

    def close(self) -> None:
        """Unpin; idempotent. No copy may be in flight. A `prepare` that still runs ends before its next
        piece."""
        with self._lock:
            self._closed = True
            _unregister_all(self._pinned, self.device)

    def _pin(self, slots: range) -> bool:
        address = self.tensor.data_ptr() + slots.start * self.layout.block_bytes
        num_bytes = len(slots) * self.layout.block_bytes
        if free_bytes(_CPU) < num_bytes:
            return self._give_up(slots, "no memory is left")
        # Fault it in before the registration, outside the driver's lock. No request has the slots yet, so
        # zeros stay zeros.
        ctypes.memset(address, 0, num_bytes)
        with self._lock:
            if self._closed:
                return False
            failure = _register(address, num_bytes, self.device)
            if failure is None:
                self._pinned.append(address)
        return failure is None or self._give_up(slots, failure)

    def _give_up(self, slots: range, why: str) -> bool:
        done, total = (count * self.layout.block_bytes / GIB for count in (slots.start, self.num_slots))
        _LOG.warning(
            "the %s KV arena is %.2f GiB instead of %.2f: the rest of it cannot be pinned (%s)",
            self.name,
            done,
            total,
            why,
        )
        return False


class HostMemory:
    """One arena being prepared."""

    def __init__(self, arena: HostArena, ready: Callable[[range], None]) -> None:
        self._arena = arena
        self._ready = ready
        self._stop = threading.Event()
        self._told = 0  # tenths that have been logged
        self._thread = threading.Thread(target=self._prepare, name="host-memory", daemon=True)
        # also at exit: pinning must not be interrupted
        self._end = weakref.finalize(self, _end, self._stop, self._thread)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Slots that are not ready now never will be."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Idempotent. No copy may be in flight."""
        self._end()
        self._arena.close()

    def _prepare(self) -> None:
        try:
            self._arena.prepare(self._ready, self._progress, self._stop.is_set)
        except BaseException:  # of any kind: the tier goes on with what is ready
            _LOG.exception("host memory could not be prepared further; the host tier uses what it has")

    def _progress(self, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        if tenths > self._told:
            self._told = tenths
            _LOG.info("host memory for KV: %.1f of %.1f GiB ready", done / 2**30, total / 2**30)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():  # which may hold the last reference
        thread.join(_CLOSE_S)


def _find(address: int, num_bytes: int) -> bool:
    """Fault in the mapped memory now, keeping its content. False: this system cannot. `mmap.madvise` would
    keep the GIL meanwhile."""
    return bool(
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE)
        == 0
    )


def _register(address: int, num_bytes: int, device: torch.device) -> str | None:
    """Pin, for all GPUs. None: done; otherwise why not."""
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(address, num_bytes, 0)
        return None if int(code) == 0 else str(cudart.cudaGetErrorString(code))


def _unregister_all(addresses: list[int], device: torch.device) -> None:
    while addresses:
        _unregister(addresses.pop(), device)


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostUnregister(address)
        if int(code) != 0:
            _LOG.warning("a piece of host memory could not be unpinned: %s", cudart.cudaGetErrorString(code))


class PinnedTensors:
    """Host memory of tensors that lie on pages of their own, pinned for copies to a GPU until `close`."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Raises ConfigError if they cannot be pinned."""
        self._device = device
        self._addresses: list[int] = []
        self._end = weakref.finalize(self, _unregister_all, self._addresses, device)
        self._end.atexit = False
        for tensor in tensors if device.type == "cuda" else ():
            address = tensor.data_ptr()
            if (why := _register(address, tensor.numel() * tensor.element_size(), device)) is not None:
                _unregister_all(self._addresses, device)
                raise ConfigError(f"--experts-on-device: host memory for experts cannot be pinned: {why}")
            self._addresses.append(address)

    def close(self) -> None:
        """Idempotent. No copy may be in flight."""
        self._end()


class ArenaGuard:
    """Implements `observe.ByteGuard` over several arenas. `digests` waits for the device, so it is for
    launchers and lanes' own threads."""

    def __init__(self, *arenas: DeviceArena | HostArena) -> None:
        self._tensors = {arena.name: arena.tensor for arena in arenas}
        self._weights: dict[torch.device, Tensor] = {}

    def poison(self, arena: str, slots: Sequence[int]) -> None:
        tensor = self._tensors[arena]
        for slot in slots:  # one by one: a list of slots would have to be uploaded first
            tensor[int(slot)].fill_(math.nan)

    def digests(self, arena: str, slots: Sequence[int]) -> list[int]:
        """Checksum: the words of a block, each times its own odd number, summed. Detects every single change
        and almost every other."""
        tensor = self._tensors[arena]
        weights = self._weights_for(tensor)
        return [int((_words(tensor[int(slot)]) * weights).sum()) for slot in slots]

    def _weights_for(self, tensor: Tensor) -> Tensor:
        if tensor.device not in self._weights:
            self._weights[tensor.device] = (
                2 * torch.arange(_words(tensor[0]).numel(), device=tensor.device) + 1
            )
        return self._weights[tensor.device]


def _words(block: Tensor) -> Tensor:
    return block.reshape(-1).view(torch.int16).to(torch.int64)

"""Ways of getting blocks from one arena to another, ready to be timed. Owns arenas, lanes and slots; the clock is the measurement's.

A way that launches copies in another manner is one class more, and one entry more in `WAYS`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Access, Fence, Mode
from penstock.engine.build import make_launcher
from penstock.engine.inbox import Inbox
from penstock.errors import ConfigError, InvariantBroken
from penstock.kv.memory.arena import DeviceArena
from penstock.kv.memory.host import HostArena
from penstock.kv.memory.layout import BlockLayout
from penstock.kv.transfer.copies import make_copier
from penstock.kv.transfer.mover import Group, Mover, Transfer
from penstock.lanes import cuda
from penstock.lanes.cpu import CpuLane
from penstock.lanes.lane import Lane, Op, Ticket
from penstock.models.progress import Progress

PROMOTE, DEMOTE = "promote", "demote"
DIRECTIONS = {PROMOTE: (PROMOTE,), DEMOTE: (DEMOTE,), "both": (PROMOTE, DEMOTE)}
_CLOSE_S = 60.0

Wait = Callable[[], None]


class Case(NamedTuple):
    """What is moved: so many blocks each way, so many layers at a time."""

    direction: str
    blocks: int
    layers: int


class Rig:
    """Two arenas full of random bytes, a lane for each direction, and which scattered slots go where."""

    def __init__(self, layout: BlockLayout, most_blocks: int, device: torch.device, seed: int) -> None:
        self.layout = layout
        self.device = DeviceArena(layout, 2 * most_blocks, device)
        self.host = HostArena(layout, 2 * most_blocks, device)
        self.lanes = {name: make_lane(name, device) for name in (PROMOTE, DEMOTE)}
        random = np.random.default_rng(seed)
        self._device_slots, self._host_slots = (random.permutation(2 * most_blocks).reshape(2, most_blocks) for _ in range(2))
        _fill_at_random(self.device.tensor, seed)

    def prepare(self, progress: Progress) -> None:
        """Pin host memory and give it other bytes than the device has."""
        pin_all(self.host, progress)
        self.host.tensor.copy_(self.device.tensor[1:].cpu())  # by the CPU: CUDA copies nothing across two pinned pieces

    def slots(self, direction: str, blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, dest); those of the two directions have nothing in common."""
        half = (PROMOTE, DEMOTE).index(direction)
        device, host = self._device_slots[half, :blocks], self._host_slots[half, :blocks]
        return (host, device) if direction == PROMOTE else (device, host)

    def tensors(self, direction: str) -> tuple[Tensor, Tensor]:
        return (self.host.tensor, self.device.tensor) if direction == PROMOTE else (self.device.tensor, self.host.tensor)

    def names(self, direction: str) -> tuple[str, str]:
        return (self.host.name, self.device.name) if direction == PROMOTE else (self.device.name, self.host.name)

    def spoil(self, case: Case) -> None:
        """Nothing of what is to arrive is there yet."""
        for direction in DIRECTIONS[case.direction]:
            dest = self.tensors(direction)[1]
            for slot in self.slots(direction, case.blocks)[1].tolist():
                dest[slot].zero_()
        self.drain()

    def check(self, case: Case, way: str) -> None:
        """Every byte has arrived."""
        for direction in DIRECTIONS[case.direction]:
            source, dest = (tensor.view(len(tensor), -1).view(torch.int32) for tensor in self.tensors(direction))
            for source_slot, dest_slot in zip(*(slots.tolist() for slots in self.slots(direction, case.blocks)), strict=True):
                if not torch.equal(source[source_slot].to(self.device.device), dest[dest_slot].to(self.device.device)):
                    raise InvariantBroken(f"{way}, {case}: slot {dest_slot} does not hold what slot {source_slot} did ({direction})")

    def drain(self) -> None:
        """What was launched outside the lanes is over, too."""
        if self.device.device.type == "cuda":
            self.device.tensor[0, 0, 0, 0, 0, 0].item()
        for lane in self.lanes.values():
            lane.drain()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self.lanes.values():
            lane.close(_CLOSE_S)
        self.host.close()


def pin_all(arena: HostArena, progress: Progress) -> None:
    """On a thread of its own, as `prepare` wants it. Raises ConfigError where not all of it can be pinned."""
    ready: list[range] = []
    told = partial(progress, "pinning")
    thread = threading.Thread(target=lambda: arena.prepare(ready.append, told, lambda: False), name="bench-pin", daemon=True)
    thread.start()
    thread.join()
    if not ready or ready[-1].stop < arena.num_slots:
        raise ConfigError("the host memory that this needs could not be pinned; lower --blocks")


def make_lane(name: str, device: torch.device) -> Lane:
    if device.type == "cuda":
        return cuda.CudaLane(name, device, priority=-1 if name == PROMOTE else 0)
    return CpuLane(name, around=torch.inference_mode)


def _fill_at_random(tensor: Tensor, seed: int) -> None:
    tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=torch.Generator(tensor.device).manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------------ ways


class Way(Protocol):
    """One way of getting a case's bytes across."""

    @property
    def name(self) -> str: ...

    @property
    def scatters(self) -> bool:
        """Whether it moves the case's slots, by layers where asked to; otherwise just as many bytes."""

    def launch(self, case: Case) -> Wait:
        """Submit all of it; what is returned blocks until it is over, and raises what went wrong."""

    def close(self) -> None:
        """Before the rig is closed."""


class RawCopy:
    """The ceiling: one copy of as many bytes that lie in one piece on both sides, pinned on the host's."""

    name = "raw"
    scatters = False

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._device = rig.device.tensor.view(torch.uint8).flatten()
        self._host = torch.empty(rig.host.num_bytes, dtype=torch.uint8, pin_memory=rig.device.device.type == "cuda")
        self._host.copy_(self._device[: len(self._host)])

    def launch(self, case: Case) -> Wait:
        num_bytes = case.blocks * self._rig.layout.block_bytes
        launched = _Launched()
        for direction in DIRECTIONS[case.direction]:
            first = 0 if direction == PROMOTE else len(self._host) // 2
            host, device = (memory[first : first + num_bytes] for memory in (self._host, self._device))
            ends = (host, device) if direction == PROMOTE else (device, host)
            launched.submit(self._rig.lanes[direction], partial(_copy_piece, *ends), (), direction)
        return launched.wait

    def close(self) -> None:
        """It has nothing of its own."""


class Blocks:
    """Scattered blocks, as transfers copy them: an op and a fence for each group of layers."""

    name = "blocks"
    scatters = True

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._copiers = {direction: make_copier(*rig.tensors(direction), rig.layout) for direction in (PROMOTE, DEMOTE)}

    def launch(self, case: Case) -> Wait:
        launched = _Launched()
        for first in range(0, self._rig.layout.num_layers, case.layers):
            layers = first, min(first + case.layers, self._rig.layout.num_layers)
            for direction in DIRECTIONS[case.direction]:
                source, dest = self._rig.slots(direction, case.blocks)
                source_name, dest_name = self._rig.names(direction)
                accesses = Access(source_name, source, layers, Mode.READ), Access(dest_name, dest, layers, Mode.WRITE)
                op = partial(self._copiers[direction].copy, source, dest, layers)
                launched.submit(self._rig.lanes[direction], op, accesses, direction)
        return launched.wait

    def close(self) -> None:
        """It has nothing of its own."""


class Moved:
    """The same through movers, as the engine does it: submitted in one call, launched on another thread, over when polling says so."""

    name = "moved"
    scatters = True

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._inbox = Inbox(sharp=rig.device.device.type == "cuda")
        self._launchers = {direction: make_launcher(lane) for direction, lane in rig.lanes.items()}
        self._movers = {
            direction: Mover(rig.names(direction), make_copier(*rig.tensors(direction), rig.layout), rig.lanes[direction], launcher)
            for direction, launcher in self._launchers.items()
        }
        for mover in self._movers.values():
            mover.wake = self._inbox.wake

    def launch(self, case: Case) -> Wait:
        num_layers = self._rig.layout.num_layers
        groups = [Group((first, min(first + case.layers, num_layers))) for first in range(0, num_layers, case.layers)]
        transfers = []
        for direction in DIRECTIONS[case.direction]:
            transfer = Transfer(direction, groups)
            transfer.source_slots, transfer.dest_slots = self._rig.slots(direction, case.blocks)
            self._movers[direction].submit(transfer)
            transfers.append(transfer)
        return partial(self._wait, transfers)

    def _wait(self, transfers: list[Transfer]) -> None:
        while not all(transfer.settled for transfer in transfers):
            if not any(mover.settle() for mover in self._movers.values()):
                self._inbox.wait(min(mover.look_again_s() for mover in self._movers.values()))
        for transfer in transfers:
            if (error := transfer.error()) is not None:
                raise error

    def close(self) -> None:
        for launcher in self._launchers.values():
            launcher.close(_CLOSE_S)


class _Launched:
    """What is on its way, and its end."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._ends: dict[str, Fence] = {}  # by lane, the newest

    def submit(self, lane: Lane, op: Op, accesses: Sequence[Access], label: str) -> None:
        self._tickets.append(lane.submit(op, accesses, label=label))
        self._ends[lane.name] = lane.record()

    def wait(self) -> None:
        for end in self._ends.values():
            end.wait_passed()
        for ticket in self._tickets:
            if (error := ticket.error()) is not None:
                raise error


WAYS: tuple[Callable[[Rig], Way], ...] = (RawCopy, Blocks, Moved)  # the first is what the others are compared with


def _copy_piece(source: Tensor, dest: Tensor) -> None:
    """By one thread where no GPU does it, as blocks are copied."""
    if source.device.type == dest.device.type == "cpu":
        ctypes.memmove(dest.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        dest.copy_(source, non_blocking=True)

"""Ways of getting blocks from one place to another, taking turns so that all meet the same machine; and those
between device and host memory. Owns the turns, arenas, lanes and slots; which ways are measured is the
measurement's choice.

A way that launches copies in another manner is one function more, and one entry more in `HOST_WAYS`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.bench.run import WARM_UP, runs
from penstock.contract import Access, Fence, Mode
from penstock.engine.inbox import Inbox
from penstock.errors import ConfigError, InvariantBroken
from penstock.kv.build import make_movers
from penstock.kv.memory import BlockLayout, DeviceArena, HostArena, free_bytes
from penstock.kv.transfer import Group, Transfer
from penstock.lanes.lane import Ticket
from penstock.models.progress import Progress

RAW = "raw"
PROMOTE, DEMOTE = "promote", "demote"
DIRECTIONS = {PROMOTE: (PROMOTE,), DEMOTE: (DEMOTE,), "both": (PROMOTE, DEMOTE)}
CLOSE_S = 60.0

Wait = Callable[[], None]  # blocks until the launched work is over, and raises its error
Launch = Callable[[], Wait]  # submits all of it
Beside = tuple[tuple[str, str], ...]  # directions and names of ways that come before it


@dataclass(frozen=True, slots=True)
class TransferWay:
    """One way of moving blocks. The argument of `turn` asks for a check that no byte was there before, and
    that every byte is afterwards. Its work before the launch and after the end is not timed."""

    direction: str
    name: str
    turn: Callable[[bool], AbstractContextManager[Launch]]
    # the ways to compare with, the fastest of them; (): none; None: the first way of all
    beside: Beside | None = None
    layers: int | None = None  # that it moves at a time; None: all


class Timed(NamedTuple):
    submit_s: float  # of the thread that submits
    total_s: float  # from submit to over


class TransferSize(NamedTuple):
    blocks: int
    num_bytes: int


def take_turns(
    stage: str,
    ways: Sequence[TransferWay],
    size: TransferSize,
    repeat: int,
    progress: Progress,
    turning: bool = False,
) -> list[dict[str, Any]]:
    """Every way once per run, and a row for each; `turning`: in an order that turns around, so that none
    always comes behind the same. The run that only warms up is checked byte by byte."""
    taken: list[list[Timed]] = [[] for _ in ways]
    for run in runs(f"{stage}, {size.blocks} blocks", repeat, progress):
        for number in reversed(range(len(ways))) if turning and run % 2 else range(len(ways)):
            one = _timed(ways[number], run == WARM_UP)
            if run != WARM_UP:
                taken[number].append(one)
    rows: list[dict[str, Any]] = []
    for way, timed in zip(ways, taken, strict=True):
        rows.append(_row(way, size, timed))
        _compare(rows[-1], way, rows)
    return rows


def _timed(way: TransferWay, checked: bool) -> Timed:
    with way.turn(checked) as launch:
        started = perf_counter()
        wait = launch()
        submitted = perf_counter()
        wait()
        ended = perf_counter()
    return Timed(submitted - started, ended - started)


def _row(way: TransferWay, size: TransferSize, timed: list[Timed]) -> dict[str, Any]:
    total_s = median(one.total_s for one in timed)
    return {
        "direction": way.direction,
        "blocks": size.blocks,
        "bytes": size.num_bytes,
        "way": way.name,
        **({"beside": None} if way.beside is not None else {}),
        "layers": way.layers,
        "gb_s": size.num_bytes / total_s / 1e9,
        "percent_of_raw": 100.0,
        "total_ms": {"median": total_s * 1000, "all": [one.total_s * 1000 for one in timed]},
        "submit_ms": {
            "median": median(one.submit_s for one in timed) * 1000,
            "all": [one.submit_s * 1000 for one in timed],
        },
    }


def _compare(row: dict[str, Any], way: TransferWay, rows: list[dict[str, Any]]) -> None:
    of = (
        rows[:1]
        if way.beside is None
        else [one for one in rows if (one["direction"], one["way"]) in way.beside]
    )
    if of:
        fastest = max(of, key=lambda one: one["gb_s"])
        row["percent_of_raw"] = 100 * row["gb_s"] / fastest["gb_s"]
        if way.beside:
            row["beside"] = f"{fastest['direction']}, {fastest['way']}"


def too_large(needs: dict[torch.device, int]) -> str | None:
    """Why this much memory per device is not available; None: it is."""
    for where, needed in needs.items():
        if needed > (free := free_bytes(where)):
            return f"they need {needed / 1e9:.1f} GB on {where}, where {free / 1e9:.1f} are free"
    return None


# ------------------------------------------------------------------------------------ between device and host


class Case(NamedTuple):
    """The work: blocks each way, layers at a time."""

    direction: str
    blocks: int
    layers: int


class HostRig:
    """Two arenas full of random bytes, a mover for each direction, and which scattered slots go where."""

    def __init__(self, layout: BlockLayout, most_blocks: int, device: torch.device, seed: int) -> None:
        self.layout = layout
        self.device = DeviceArena(layout, 2 * most_blocks, device)
        self.host = HostArena(layout, 2 * most_blocks, device)
        self.movers = dict(zip((PROMOTE, DEMOTE), make_movers(self.device, self.host), strict=True))
        self.inbox = Inbox(sharp=device.type == "cuda")
        for mover in self.movers.values():
            mover.wake = self.inbox.wake
        random = np.random.default_rng(seed)
        self._device_slots, self._host_slots = (
            random.permutation(2 * most_blocks).reshape(2, most_blocks) for _ in range(2)
        )
        # as many bytes of host memory as the arena has, in one piece; those of the device
        self.pieces: tuple[Tensor, ...] = ()
        generator = torch.Generator(device).manual_seed(seed)
        self.device.tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)

    def prepare(self, progress: Progress) -> None:
        """Pin host memory and give it other bytes than the device has."""
        pin_all(self.host, progress)
        # by the CPU: CUDA copies nothing across two pinned pieces
        self.host.tensor.copy_(self.device.tensor[1:].cpu())
        device = self.device.tensor.view(torch.uint8).flatten()
        host = torch.empty(
            self.host.num_bytes, dtype=torch.uint8, pin_memory=self.device.device.type == "cuda"
        )
        self.pieces = host.copy_(device[: len(host)]), device

    def slots(self, direction: str, blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, dest); those of the two directions have nothing in common."""
        half = (PROMOTE, DEMOTE).index(direction)
        device, host = self._device_slots[half, :blocks], self._host_slots[half, :blocks]
        return (host, device) if direction == PROMOTE else (device, host)

    def arenas(self, direction: str) -> tuple[HostArena | DeviceArena, HostArena | DeviceArena]:
        """(source, dest)."""
        return (self.host, self.device) if direction == PROMOTE else (self.device, self.host)

    def groups(self, case: Case) -> list[tuple[int, int]]:
        """Layers that are moved at a time."""
        num_layers = self.layout.num_layers
        return [(first, min(first + case.layers, num_layers)) for first in range(0, num_layers, case.layers)]

    def spoil(self, case: Case) -> None:
        """Clear the destinations."""
        for direction in DIRECTIONS[case.direction]:
            dest = self.arenas(direction)[1].tensor
            for slot in self.slots(direction, case.blocks)[1].tolist():
                dest[slot].zero_()
        if self.device.device.type == "cuda":
            self.device.tensor[0, 0, 0, 0, 0, 0].item()  # work launched outside the lanes is over, too
        for mover in self.movers.values():
            mover.lane.drain()

    def check(self, case: Case, way: str) -> None:
        """Every byte has arrived."""
        for direction in DIRECTIONS[case.direction]:
            source, dest = (
                arena.tensor.view(len(arena.tensor), -1).view(torch.int32) for arena in self.arenas(direction)
            )
            for source_slot, dest_slot in zip(
                *(slots.tolist() for slots in self.slots(direction, case.blocks)), strict=True
            ):
                if not torch.equal(
                    source[source_slot].to(self.device.device), dest[dest_slot].to(self.device.device)
                ):
                    raise InvariantBroken(
                        f"{way}, {case}: slot {dest_slot} does not hold what slot {source_slot} did "
                        f"({direction})"
                    )

    def __enter__(self) -> HostRig:
        return self

    def __exit__(self, *_: object) -> None:
        for mover in self.movers.values():
            mover.close(CLOSE_S)
        self.host.close()


def pin_all(arena: HostArena, progress: Progress) -> None:
    """On a thread of its own, as `prepare` wants it. Raises ConfigError where not all of it can be pinned."""
    ready: list[range] = []
    told = partial(progress, "pinning")
    thread = threading.Thread(
        target=lambda: arena.prepare(ready.append, told, lambda: False), name="bench-pin", daemon=True
    )
    thread.start()
    thread.join()
    if not ready or ready[-1].stop < arena.num_slots:
        raise ConfigError("the host memory that this needs could not be pinned; lower --blocks")


def host_ways(rig: HostRig, direction: str, blocks: int, groups: Sequence[int]) -> list[TransferWay]:
    """`groups`: layers that are moved at a time, all of them first."""
    cases = [
        (name, Case(direction, blocks, layers))
        for name in HOST_WAYS
        for layers in (groups[:1] if name == RAW else groups)
    ]
    return [
        TransferWay(
            direction,
            name,
            partial(_take_turn, rig, name, case),
            layers=case.layers if case.layers < groups[0] else None,
        )
        for name, case in cases
    ]


@contextmanager
def _take_turn(rig: HostRig, name: str, case: Case, checked: bool) -> Iterator[Launch]:
    checked = checked and name != RAW  # which touches none of the slots
    if checked:
        rig.spoil(case)
    yield partial(HOST_WAYS[name], rig, case)
    if checked:
        rig.check(case, name)


def copy_raw(rig: HostRig, case: Case) -> Wait:
    """The ceiling: one copy of as many bytes that lie in one piece on both sides, pinned on the host's."""
    launched, num_bytes = [], case.blocks * rig.layout.block_bytes
    for direction in DIRECTIONS[case.direction]:
        first = 0 if direction == PROMOTE else len(rig.pieces[0]) // 2
        host, device = (piece[first : first + num_bytes] for piece in rig.pieces)
        ends = (host, device) if direction == PROMOTE else (device, host)
        lane = rig.movers[direction].lane
        launched.append((lane.submit(partial(_copy_piece, *ends), label=direction), lane.record()))
    return partial(_wait_over, launched)


def copy_blocks(rig: HostRig, case: Case) -> Wait:
    """Scattered blocks, as transfers copy them: an op and a fence for each group of layers."""
    launched = []
    for layers in rig.groups(case):
        for direction in DIRECTIONS[case.direction]:
            (source, dest), mover = rig.slots(direction, case.blocks), rig.movers[direction]
            read_from, written_to = rig.arenas(direction)
            accesses = (
                Access(read_from.name, source, layers, Mode.READ),
                Access(written_to.name, dest, layers, Mode.WRITE),
            )
            ticket = mover.lane.submit(
                partial(mover.copier.copy, source, dest, layers), accesses, label=direction
            )
            launched.append((ticket, mover.lane.record()))
    return partial(_wait_over, launched)


def move_blocks(rig: HostRig, case: Case) -> Wait:
    """The same through movers, as the engine does it: submitted in one call, launched on another thread, over
    when polling says so."""
    groups = [Group(layers) for layers in rig.groups(case)]
    transfers = []
    for direction in DIRECTIONS[case.direction]:
        transfer = Transfer(direction, groups)
        transfer.source_slots, transfer.dest_slots = rig.slots(direction, case.blocks)
        rig.movers[direction].submit(transfer)
        transfers.append(transfer)

    def wait() -> None:
        movers = rig.movers.values()
        while not all(transfer.settled for transfer in transfers):
            if not any(mover.settle() for mover in movers):
                rig.inbox.wait(min(mover.look_again_s() for mover in movers))
        for transfer in transfers:
            if (error := transfer.error()) is not None:
                raise error

    return wait


# By name; the first is what the others are compared with.
HOST_WAYS: dict[str, Callable[[HostRig, Case], Wait]] = {
    RAW: copy_raw,
    "blocks": copy_blocks,
    "moved": move_blocks,
}


def _wait_over(launched: Sequence[tuple[Ticket, Fence]]) -> None:
    for _, end in launched:
        end.wait_passed()
    for ticket, _ in launched:
        if (error := ticket.error()) is not None:
            raise error


def _copy_piece(source: Tensor, dest: Tensor) -> None:
    """By one thread where no GPU does it, as blocks are copied."""
    if source.device.type == dest.device.type == "cpu":
        ctypes.memmove(dest.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        dest.copy_(source, non_blocking=True)

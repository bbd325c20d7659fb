"""Copies between device and pinned host memory on real streams: bit by bit, in order, across registrations,
and without blocking."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: copies on CUDA need torch")
if not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: copies on CUDA need an NVIDIA GPU, and there is none here", allow_module_level=True
    )

from penstock.errors import InvariantBroken, TransferFailed  # noqa: E402
from penstock.kv import memory as host_module  # noqa: E402
from penstock.kv.memory import DeviceArena  # noqa: E402
from penstock.kv.memory import HostArena, piece_slots  # noqa: E402
from penstock.kv.memory import BlockLayout  # noqa: E402
from penstock.kv import transfer as copies  # noqa: E402
from penstock.kv.transfer import make_copier  # noqa: E402
from penstock.lanes.cuda import CudaLane  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
LAYOUT = BlockLayout(num_layers=6, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
NUM_SLOTS = 100
ALL = (0, LAYOUT.num_layers)
HOLD_CYCLES = 400_000_000  # about a fifth of a second: far longer than what a test does meanwhile
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory, and of what is handed over at once, as with large arenas."""
    monkeypatch.setattr(host_module, "_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(copies, "_FIRST_PART_BYTES", 256 << 10)


@pytest.fixture
def host() -> Iterator[HostArena]:
    arena = HostArena(LAYOUT, NUM_SLOTS, DEVICE)
    ready = prepared(arena)
    assert len(ready) > 3 and ready[-1].stop == NUM_SLOTS
    yield arena
    torch.cuda.synchronize()
    arena.close()


@pytest.fixture(params=["batches", "each"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """With copies in batches, and as on a CUDA that has none."""
    if request.param == "each":
        monkeypatch.setattr(copies, "_batch_copy", lambda: None)
    return request.param


def prepared(arena: HostArena, seen: Callable[[range], None] = lambda slots: None) -> list[range]:
    ready: list[range] = []

    def note(slots: range) -> None:
        ready.append(slots)
        seen(slots)

    thread = threading.Thread(target=arena.prepare, args=(note, lambda done, total: None, lambda: False))
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return ready


def random_device(seed: int) -> Any:
    """An arena's tensor, of any bits at all."""
    tensor = DeviceArena(LAYOUT, NUM_SLOTS, DEVICE).tensor
    tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=torch.Generator(DEVICE).manual_seed(seed))
    torch.cuda.synchronize()
    return tensor


def copy_of(tensor: Any) -> Any:
    """Made before any lane goes on: lanes do not wait for the stream of this thread."""
    copied = tensor.clone()
    torch.cuda.synchronize()
    return copied


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.view(torch.int16).cpu(), other.view(torch.int16).cpu())


def run(lane: CudaLane, copier: Any, source: Any, dest: Any, layers: tuple[int, int] = ALL) -> None:
    """Errors come to light here, not in a later test."""
    ticket = lane.submit(partial(copier.copy, source, dest, layers), label="copy")
    error = ticket.error()
    if error is not None:
        raise error


# ------------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("num_layers", [6, 3, 2, 1])
def test_what_is_demoted_and_destroyed_comes_back_elsewhere_bit_by_bit(
    way: str, host: HostArena, num_layers: int
) -> None:
    device = random_device(1)
    before = copy_of(device)
    lane = CudaLane("copy", DEVICE)
    random = np.random.default_rng(0)
    here, there, back = (random.permutation(NUM_SLOTS)[:40] for _ in range(3))
    run(lane, make_copier(device, host.tensor, LAYOUT), here, there)
    lane.submit(lambda: device.zero_(), label="destroy")
    for first in range(0, LAYOUT.num_layers, num_layers):
        run(lane, make_copier(host.tensor, device, LAYOUT), there, back, (first, first + num_layers))
    lane.drain(PATIENCE_S)
    assert same(device[back], before[here]) and same(host.tensor[there], before[here])
    untouched = np.setdiff1d(np.arange(NUM_SLOTS + 1), back)
    assert not device[untouched].any(), "nothing else was written"


def test_some_layers_leave_the_others_alone(way: str, host: HostArena) -> None:
    device = random_device(2)
    before = copy_of(device)
    lane = CudaLane("copy", DEVICE)
    run(lane, make_copier(host.tensor, device, LAYOUT), np.array([5, 6]), np.array([9, 3]), (2, 4))
    lane.drain(PATIENCE_S)
    assert not device[[9, 3], 2:4].any()
    before[[9, 3], 2:4] = 0
    assert same(device, before)


def test_a_run_of_neighbours_crosses_registrations(host: HostArena) -> None:
    device = random_device(3)
    lane = CudaLane("copy", DEVICE)
    everything = np.arange(NUM_SLOTS)
    run(lane, make_copier(device, host.tensor, LAYOUT), everything, everything)
    lane.drain(PATIENCE_S)
    assert same(host.tensor, device[:NUM_SLOTS])
    assert piece_slots(LAYOUT) < NUM_SLOTS


def test_a_piece_across_two_registrations_is_a_failed_transfer_that_poisons_nothing(
    host: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "piece_slots", lambda layout: 1 << 30)
    monkeypatch.setattr(copies, "_FIRST_PART_BYTES", 1 << 40)  # all of it is one part, and one piece
    monkeypatch.setattr(copies, "_FEW_BLOCKS", 0)
    device, lane = random_device(4), CudaLane("copy", DEVICE)
    before = copy_of(device)
    with pytest.raises(TransferFailed, match="1 pieces: cudaErrorInvalidValue"):
        run(lane, make_copier(host.tensor, device, LAYOUT), np.arange(NUM_SLOTS), np.arange(NUM_SLOTS))
    assert float(torch.ones(3, device=DEVICE).sum()) == 3.0, "the next launch is not blamed for it"
    assert same(device, before)


def test_the_default_stream_is_refused(host: HostArena) -> None:
    with pytest.raises(InvariantBroken, match="default"):
        make_copier(random_device(5), host.tensor, LAYOUT).copy(np.array([1]), np.array([2]), ALL)


def test_this_cuda_copies_in_batches() -> None:
    """Where torch's CUDA has them, the slow way would go unnoticed."""
    if tuple(int(part) for part in torch.version.cuda.split(".")[:2]) >= (12, 8):
        assert copies._batch_copy() is not None


# ------------------------------------------------------------------------------------------------------ order


def test_a_copy_waits_on_the_device_for_the_fence_of_another_lane(host: HostArena) -> None:
    """The copy is submitted long before its source is written; submitting it waits for nothing."""
    device, written = random_device(6), random_device(7)
    compute, demote = CudaLane("compute", DEVICE), CudaLane("demote", DEVICE)
    slots = np.random.default_rng(1).permutation(NUM_SLOTS)
    copier = make_copier(device, host.tensor, LAYOUT)
    compute.submit(lambda: torch.cuda._sleep(HOLD_CYCLES), label="hold")
    compute.submit(lambda: device.copy_(written), label="write")
    fence = compute.record()
    demote.wait(fence)
    for first in range(LAYOUT.num_layers):
        for _ in range(30):  # more entries than a stream takes as single launches before it blocks its caller
            run(demote, copier, slots, slots[::-1], (first, first + 1))
    submitted_early = not fence.passed()
    demote.drain(PATIENCE_S)
    torch.cuda.synchronize()
    assert submitted_early, "submitting took as long as the lane was held"
    assert same(host.tensor[slots[::-1].copy()], written[slots])


# ------------------------------------------------------------------------------------------------------ arena


def test_slots_are_pinned_when_they_are_ready_and_not_after_close() -> None:
    arena = HostArena(LAYOUT, NUM_SLOTS, DEVICE)
    pinned: list[bool] = []
    assert not any(arena.tensor[slot].is_pinned() for slot in range(NUM_SLOTS))
    prepared(arena, lambda slots: pinned.extend(arena.tensor[slot].is_pinned() for slot in slots))
    assert len(pinned) == NUM_SLOTS and all(pinned)
    arena.close()
    assert not any(arena.tensor[slot].is_pinned() for slot in range(NUM_SLOTS))
    arena.close()


def test_memory_that_is_pinned_already_is_a_warning_and_no_exception(caplog: Any) -> None:
    arena = HostArena(LAYOUT, NUM_SLOTS, DEVICE)
    blocked = arena.tensor[piece_slots(LAYOUT) :]
    assert int(torch.cuda.cudart().cudaHostRegister(blocked.data_ptr(), LAYOUT.block_bytes, 0)) == 0
    try:
        assert [slots.stop for slots in prepared(arena)] == [piece_slots(LAYOUT)]
        assert "cannot be pinned" in caplog.text
    finally:
        arena.close()
        torch.cuda.cudart().cudaHostUnregister(blocked.data_ptr())


def test_an_arena_that_is_dropped_without_being_closed_leaves_nothing_registered() -> None:
    """The next one may be mapped to the same addresses, and could not be pinned."""
    arena = HostArena(LAYOUT, NUM_SLOTS, DEVICE)
    prepared(arena)
    addresses = list(arena._pinned)
    assert addresses
    del arena
    gc.collect()
    codes: list[int] = []
    cudart = torch.cuda.cudart()
    # On a thread of its own: a call that fails leaves its error to whichever call of the same thread looks
    # next.
    asking = threading.Thread(
        target=lambda: codes.extend(int(cudart.cudaHostUnregister(address)) for address in addresses)
    )
    asking.start()
    asking.join()
    assert len(codes) == len(addresses) and all(codes), "it was still registered"

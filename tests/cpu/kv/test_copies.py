"""Copies between arenas: every byte asked for and no other, in as few pieces as there are; slots that do not
exist are refused."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import InvariantBroken, TransferFailed
from penstock.kv import transfer as copies
from penstock.kv.memory import BlockLayout
from penstock.kv.transfer import Copier, CpuCopier, CudaCopier, make_copier

LAYOUT = BlockLayout(num_layers=6, num_kv_heads=2, head_dim=4, block_tokens=8, dtype="bfloat16")
NUM_SLOTS = 24
ALL = (0, LAYOUT.num_layers)
PIECE_SLOTS = 8


def slots(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def random_arena(seed: int, num_slots: int = NUM_SLOTS) -> Tensor:
    """Any bits at all: some are NaN, so comparisons are of bytes."""
    bits = torch.randint(
        -(1 << 15),
        1 << 15,
        (num_slots, *LAYOUT.shape),
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.int16,
    )
    return bits.view(torch.bfloat16)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def expected(source: Tensor, dest: Tensor, pairs: list[tuple[int, int]], layers: tuple[int, int]) -> Tensor:
    after = dest.clone()
    for from_slot, to_slot in pairs:
        after[to_slot, layers[0] : layers[1]] = source[from_slot, layers[0] : layers[1]]
    return after


class Runtime:
    """A CUDA runtime whose batches are copied by the caller's thread. `fail` is the code that it answers
    instead."""

    def __init__(self, version: int = 13000, fail: int = 0) -> None:
        self.batches: list[list[tuple[int, int, int]]] = []
        self.num_cleared = 0
        self._version = version
        self._fail = fail

    def cudaMemcpyBatchAsync(  # noqa: N802
        self, dests: Any, sources: Any, sizes: Any, num: Any, attributes: Any, *rest: Any
    ) -> int:
        first_entry, num_attributes, *failed_entry, stream = rest
        assert (first_entry._obj.value, num_attributes.value, stream.value) == (0, 1, 99)
        assert len(failed_entry) == (1 if self._version < 13000 else 0)
        assert attributes._obj.source_order == 1, "sources must be read in stream order"
        if self._fail:
            return self._fail
        columns = [
            np.ctypeslib.as_array(ctypes.cast(array, ctypes.POINTER(ctypes.c_int64)), (num.value,))
            for array in (dests, sources, sizes)
        ]
        self.batches.append([tuple(entry) for entry in np.stack(columns, axis=1).tolist()])
        for entry in self.batches[-1]:
            ctypes.memmove(*entry)
        return 0

    @property
    def cudaGetErrorName(self) -> Callable[[int], bytes]:  # noqa: N802
        def name(code: int) -> bytes:
            assert code == 1
            return b"cudaErrorInvalidValue"

        return name

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.num_cleared += 1
        return self._fail


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """Puts a runtime in the place of CUDA's."""

    def put(**options: Any) -> Runtime:
        made = Runtime(**options)
        batch: Any = copies._BatchCopy(made, options.get("version", 13000))  # type: ignore[arg-type]
        monkeypatch.setattr(copies, "_batch_copy", lambda: batch)
        monkeypatch.setattr(copies, "_current_stream", lambda device: 99)
        monkeypatch.setattr(copies, "piece_slots", lambda layout: PIECE_SLOTS)
        return made

    return put


@pytest.fixture(params=["cpu", "batches", "batches of CUDA 12", "each"])
def make(
    request: Any, runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Tensor, Tensor], Copier]:
    """Every way in which blocks get across, on memory of this machine."""
    if request.param == "cpu":
        return lambda source, dest: CpuCopier(source, dest, LAYOUT)
    runtime(version=12090 if request.param.endswith("12") else 13000)
    if request.param == "each":
        monkeypatch.setattr(copies, "_batch_copy", lambda: None)
    return lambda source, dest: CudaCopier(source, dest, LAYOUT)


@pytest.mark.parametrize("layers", [ALL, (0, 3), (2, 4), (5, 6), (4, 4)])
def test_the_layers_asked_for_arrive_and_nothing_else_changes(
    make: Callable[..., Copier], layers: tuple[int, int]
) -> None:
    source, dest = random_arena(1), random_arena(2, 30)
    pairs = [(3, 29), (23, 0), (4, 28), (5, 29 - 24), (6, 6), (7, 7), (8, 8), (9, 9), (0, 10)]
    after, before = expected(source, dest, pairs, layers), source.clone()
    make(source, dest).copy(slots(*(a for a, _ in pairs)), slots(*(b for _, b in pairs)), layers)
    assert same(dest, after) and same(source, before)


@given(data=st.data(), num=st.integers(0, NUM_SLOTS))
def test_any_blocks_and_any_layers_arrive_whole(data: st.DataObject, num: int) -> None:
    """Runs of neighbours are likely among so few slots, and must not run on."""
    order = st.one_of(st.just(list(range(NUM_SLOTS))), st.permutations(range(NUM_SLOTS)))
    start = data.draw(st.integers(0, NUM_SLOTS - num))
    pairs = list(
        zip(data.draw(order)[start : start + num], data.draw(order)[start : start + num], strict=True)
    )
    first = data.draw(st.integers(0, LAYOUT.num_layers))
    layers = (first, data.draw(st.integers(first, LAYOUT.num_layers)))
    source, dest = random_arena(1), random_arena(2)
    after = expected(source, dest, pairs, layers)
    CpuCopier(source, dest, LAYOUT).copy(slots(*(a for a, _ in pairs)), slots(*(b for _, b in pairs)), layers)
    assert same(dest, after)


def test_neighbours_on_both_sides_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    real = ctypes.memmove

    def memmove(dest: int, source: int, num_bytes: int) -> None:
        moved.append(num_bytes // LAYOUT.layer_bytes)
        real(dest, source, num_bytes)

    source, dest = random_arena(1), random_arena(2)
    copier = CpuCopier(source, dest, LAYOUT)
    monkeypatch.setattr(copies.ctypes, "memmove", memmove)
    copier.copy(slots(3, 4, 5, 7, 8, 2, 1), slots(10, 11, 12, 13, 14, 9, 8), ALL)
    assert moved == [18, 12, 6, 6]
    moved.clear()
    copier.copy(slots(3, 4, 5), slots(10, 11, 12), (0, 2))
    assert moved == [2, 2, 2], "some layers of neighbours do not touch each other"


def test_no_piece_goes_on_from_one_registration_to_the_next(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses a copy that lies in two; the device's side has no such seams."""
    seen = runtime()
    monkeypatch.setattr(copies, "_FEW_BLOCKS", 0)
    host, device = random_arena(1), random_arena(2)
    CudaCopier(host, device, LAYOUT).copy(np.arange(5, 20), np.arange(4, 19), ALL)
    (batch,) = seen.batches
    in_slots = [
        ((source - host.data_ptr()) // LAYOUT.block_bytes, size // LAYOUT.block_bytes)
        for _, source, size in batch
    ]
    assert in_slots == [(5, 3), (8, 8), (16, 4)]
    assert all(first // PIECE_SLOTS == (first + num - 1) // PIECE_SLOTS for first, num in in_slots)


@given(num=st.integers(0, 300), num_bytes=st.integers(1, 100), first=st.integers(1, 300))
@example(num=0, num_bytes=1, first=1)
@example(num=1, num_bytes=100, first=1)  # a block that is larger than a part
# twice the first part: what is left over is a part of its own, or not
@example(num=20, num_bytes=10, first=100)
@example(num=19, num_bytes=10, first=100)
@example(num=300, num_bytes=1, first=4)
def test_parts_are_all_of_it_in_order_and_none_is_empty(num: int, num_bytes: int, first: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_FIRST_PART_BYTES", first)
        parts = list(copies._growing_parts(num, num_bytes))
    assert all(part.stop > part.start for part in parts)
    assert [block for part in parts for block in range(part.start, part.stop)] == list(range(num))
    assert not parts or (parts[0].stop - 1) * num_bytes < 2 * first, (
        "the driver is not kept waiting for the first"
    )


@given(data=st.data(), num=st.integers(1, NUM_SLOTS))
def test_entries_worked_out_for_each_block_are_those_of_arithmetic_without_neighbours(
    data: st.DataObject, num: int
) -> None:
    source, dest = random_arena(1), random_arena(2)
    ends = copies._Ends(source, dest, LAYOUT)
    order = st.permutations(range(NUM_SLOTS))
    pairs = ends.checked(slots(*data.draw(order)[:num]), slots(*data.draw(order)[:num]))
    first = data.draw(st.integers(0, LAYOUT.num_layers))
    extent = LAYOUT.extent((first, data.draw(st.integers(first, LAYOUT.num_layers))))
    each = ends.entry_each(pairs, extent)
    assert each.sum(axis=1)[2] == num * extent[1] == ends.entries(pairs, extent).sum(axis=1)[2]
    for block, entry in enumerate(each.T.tolist()):
        assert entry == ends.entries(pairs[:, block : block + 1], extent)[:, 0].tolist()


def test_a_slot_that_does_not_exist_in_a_later_part_is_found_before_the_first_is_handed_over(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = runtime()
    monkeypatch.setattr(copies, "_FIRST_PART_BYTES", 2 * LAYOUT.block_bytes)
    copier, good = CudaCopier(random_arena(1), random_arena(2), LAYOUT), np.arange(NUM_SLOTS)
    for wrong in (NUM_SLOTS, -1, -(1 << 63)):
        bad = good.copy()
        bad[-1] = wrong
        for ends in ((bad, good), (good, bad)):
            with pytest.raises(InvariantBroken, match=f"of {NUM_SLOTS} slots"):
                copier.copy(*ends, ALL)
    assert seen.batches == []


def test_a_refusal_of_the_driver_is_a_failed_transfer_by_its_name_and_leaves_no_error_behind(
    runtime: Callable[..., Runtime],
) -> None:
    refusing = runtime(fail=1)
    with pytest.raises(TransferFailed, match="2 pieces: cudaErrorInvalidValue"):
        CudaCopier(random_arena(1), random_arena(2), LAYOUT).copy(slots(1, 5), slots(2, 3), ALL)
    assert refusing.num_cleared == 1


def test_the_default_stream_is_refused(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = runtime()
    monkeypatch.setattr(copies, "_current_stream", lambda device: 0)
    with pytest.raises(InvariantBroken, match="default"):
        CudaCopier(random_arena(1), random_arena(2), LAYOUT).copy(slots(1), slots(2), ALL)
    assert not seen.batches


def test_a_failure_of_torch_is_a_failed_transfer(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime()
    monkeypatch.setattr(copies, "_batch_copy", lambda: None)

    def fail(self: Tensor, *_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    copier = CudaCopier(random_arena(1), random_arena(2), LAYOUT)
    monkeypatch.setattr(Tensor, "copy_", fail)
    with pytest.raises(TransferFailed, match="out of memory"):
        copier.copy(slots(1), slots(2), ALL)


@pytest.mark.parametrize(
    ("source_slots", "dest_slots"),
    [
        ((0, NUM_SLOTS), (0, 1)),
        ((0, 1), (0, NUM_SLOTS)),
        ((-1, 1), (0, 1)),
        ((0, 1), (1, -1)),
        ((0, 1), (0,)),
    ],
)
def test_slots_that_do_not_exist_are_refused_and_nothing_is_copied(
    make: Callable[..., Copier], source_slots: tuple[int, ...], dest_slots: tuple[int, ...]
) -> None:
    source, dest = random_arena(1), random_arena(2)
    before = dest.clone()
    with pytest.raises(InvariantBroken):
        make(source, dest).copy(slots(*source_slots), slots(*dest_slots), ALL)
    assert same(dest, before)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, *LAYOUT.shape),
        torch.zeros(4, 5, 2, 8, 2, 4, dtype=torch.bfloat16),
        random_arena(3)[:, :, :, :, :, :2],
    ],
)
def test_arenas_that_are_laid_out_otherwise_are_refused(other: Tensor) -> None:
    for source, dest in ((other, random_arena(1)), (random_arena(1), other)):
        with pytest.raises(InvariantBroken, match="laid out"):
            make_copier(source, dest, LAYOUT)


def test_a_copier_keeps_its_arenas_alive() -> None:
    ends = [random_arena(1), random_arena(2)]
    gone = [weakref.ref(tensor) for tensor in ends]
    copier = make_copier(*ends, LAYOUT)
    ends.clear()
    assert all(tensor() is not None for tensor in gone)
    copier.copy(slots(1), slots(2), ALL)

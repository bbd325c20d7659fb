"""The host arena: pinned in whole slots and whole pages of memory, given out only where it is pinned, and given back exactly once."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from penstock.errors import ConfigError
from penstock.kv.memory import host as host_module
from penstock.kv.memory.host import HostArena, piece_slots
from penstock.kv.memory.layout import BlockLayout

LAYOUT = BlockLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_tokens=8, dtype="float32")  # 1536 bytes: no whole page
PIECE_BYTES = 64 << 10
CUDA = torch.device("cuda", 0)


class Driver:
    """Registers as CUDA would; refuses from the `limit`-th piece on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int | None = None) -> None:
        self.pieces: dict[int, int] = {}
        self.num_unregistered = 0
        self._limit = limit
        monkeypatch.setattr(host_module, "_PIECE_BYTES", PIECE_BYTES)
        monkeypatch.setattr(host_module, "_register", self._register)
        monkeypatch.setattr(host_module, "_unregister", self._unregister)

    def _register(self, address: int, num_bytes: int, device: torch.device) -> str | None:
        assert device == CUDA
        if self._limit is not None and len(self.pieces) >= self._limit:
            return "out of memory"
        self.pieces[address] = num_bytes
        return None

    def _unregister(self, address: int, device: torch.device) -> None:
        del self.pieces[address]
        self.num_unregistered += 1

    def covers(self, arena: HostArena, slot: int) -> bool:
        """Whether one registration has all of the slot: a copy across two is refused."""
        start = arena.tensor[slot].data_ptr()
        return any(first <= start and start + arena.layout.block_bytes <= first + size for first, size in self.pieces.items())


def prepared(arena: HostArena, stop: Callable[[], bool] = lambda: False, ready: Callable[[range], None] | None = None) -> list[range]:
    """What became ready; progress must end where it does."""
    seen: list[range] = []
    told: list[tuple[int, int]] = []

    def note(slots: range) -> None:
        seen.append(slots)
        if ready is not None:
            ready(slots)

    arena.prepare(note, lambda done, total: told.append((done, total)), stop)
    assert [done for done, _ in told] == [slots.stop * arena.layout.block_bytes for slots in seen]
    assert {total for _, total in told} <= {arena.num_bytes}
    return seen


def check_pieces(arena: HostArena, driver: Driver) -> None:
    """Every slot is covered by one registration, and no two registrations meet inside a page of memory."""
    assert all(driver.covers(arena, slot) for slot in range(arena.num_slots))
    first_page = sorted(address // mmap.PAGESIZE for address in driver.pieces)
    last_page = sorted((address + size - 1) // mmap.PAGESIZE for address, size in driver.pieces.items())
    assert all(last < first for last, first in zip(last_page, first_page[1:], strict=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_arena_has_one_zero_page_per_slot(dtype: str) -> None:
    layout = BlockLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_tokens=8, dtype=dtype)
    arena = HostArena(layout, 5, "cpu")
    assert arena.tensor.shape == (5, *layout.shape) and arena.tensor.dtype is getattr(torch, dtype)
    assert arena.tensor.is_contiguous() and arena.tensor.stride()[1:] == layout.strides
    assert arena.num_bytes == arena.tensor.nbytes == 5 * layout.block_bytes
    assert arena.name == "host" and not arena.tensor.any()
    assert arena.tensor.data_ptr() % mmap.PAGESIZE == 0


def test_on_a_cpu_all_of_it_is_ready_at_once_and_none_of_it_is_touched() -> None:
    before = psutil.Process().memory_info().rss
    arena = HostArena(LAYOUT, (256 << 20) // LAYOUT.block_bytes, "cpu")
    assert prepared(arena) == [range(arena.num_slots)]
    assert psutil.Process().memory_info().rss - before < 64 << 20
    arena.close()
    arena.close()


@pytest.mark.parametrize("num_slots", [1, 7, 42, 43, 1000])
@pytest.mark.parametrize(
    "layout",
    [LAYOUT, BlockLayout(2, 2, 16, 16, "bfloat16"), BlockLayout(3, 1, 10, 8, "float16"), BlockLayout(36, 8, 128, 16, "bfloat16")],
    ids=lambda layout: f"{layout.block_bytes}",
)
def test_pieces_are_whole_slots_on_whole_pages_of_memory(monkeypatch: pytest.MonkeyPatch, layout: BlockLayout, num_slots: int) -> None:
    driver = Driver(monkeypatch)
    arena = HostArena(layout, min(num_slots, (8 << 20) // layout.block_bytes), CUDA)
    seen = prepared(arena)
    assert [slot for slots in seen for slot in slots] == list(range(arena.num_slots))
    check_pieces(arena, driver)
    arena.close()


def test_pieces_that_end_within_a_page_of_memory_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setattr(host_module, "piece_slots", lambda layout: 7)
    arena = HostArena(LAYOUT, 100, CUDA)
    prepared(arena)
    with pytest.raises(AssertionError):
        check_pieces(arena, driver)


def test_a_slot_is_given_out_only_when_all_of_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    arena = HostArena(LAYOUT, 500, CUDA)
    step = piece_slots(LAYOUT)

    def ready(slots: range) -> None:
        assert all(driver.covers(arena, slot) for slot in slots)
        assert not any(driver.covers(arena, slot) for slot in range(slots.stop, arena.num_slots))

    seen = prepared(arena, ready=ready)
    assert len(seen) == len(driver.pieces) == -(-500 // step) > 5


def test_memory_that_cannot_be_pinned_ends_the_arena_early_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    driver = Driver(monkeypatch, limit=2)
    arena = HostArena(LAYOUT, 500, CUDA)
    assert prepared(arena)[-1].stop == 2 * piece_slots(LAYOUT)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "out of memory" in record.message and "host KV arena" in record.message
    arena.close()
    assert not driver.pieces and driver.num_unregistered == 2
    arena.close()
    assert driver.num_unregistered == 2


def test_memory_that_others_have_taken_meanwhile_is_not_fought_for(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    driver = Driver(monkeypatch)
    arena = HostArena(LAYOUT, 500, CUDA)
    monkeypatch.setattr(host_module, "free_bytes", lambda device: PIECE_BYTES // 2)
    assert prepared(arena) == [] and not driver.pieces
    assert "no memory is left" in caplog.text


def test_preparing_stops_between_pieces_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    arena = HostArena(LAYOUT, 500, CUDA)
    assert len(prepared(arena, stop=lambda: len(driver.pieces) == 3)) == len(driver.pieces) == 3
    arena.close()
    assert not driver.pieces


def test_nothing_is_pinned_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    arena = HostArena(LAYOUT, 500, CUDA)
    assert len(prepared(arena, ready=lambda slots: arena.close())) == 1
    assert not driver.pieces and driver.num_unregistered == 1


def test_memory_is_found_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can launch while the driver looks for it."""
    driver = Driver(monkeypatch)
    touched: dict[int, int] = {}
    register = host_module._register

    def look(address: int, num_bytes: int, device: torch.device) -> str | None:
        assert touched[address] == num_bytes
        return register(address, num_bytes, device)

    monkeypatch.setattr(host_module, "_register", look)
    monkeypatch.setattr(host_module.ctypes, "memset", lambda address, byte, num_bytes: touched.update({address: num_bytes}))
    prepared(HostArena(LAYOUT, 500, CUDA))
    assert touched == driver.pieces


def test_preparing_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    arena = HostArena(LAYOUT, 500, CUDA)

    def write(slots: range) -> None:
        arena.tensor[slots.start : slots.stop] = 1.0  # whoever gets a slot uses it at once

    prepared(arena, ready=write)
    assert arena.tensor.eq(1.0).all()


def test_an_arena_that_does_not_fit_says_how_large_it_would_be_and_what_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"host KV arena needs \d+\.\d\d GiB of memory, of which .* free; lower --kv-offload-host-gib"):
        HostArena(LAYOUT, 1 << 40, "cpu")


def test_an_arena_larger_than_what_is_free_is_refused_although_the_system_would_promise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "free_bytes", lambda device: 10 * LAYOUT.block_bytes)
    with pytest.raises(ConfigError, match="lower --kv-offload-host-gib"):
        HostArena(LAYOUT, 11, "cpu")
    assert HostArena(LAYOUT, 10, "cpu").num_slots == 10


def test_memory_that_is_gone_by_the_time_it_is_taken_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_module.mmap, "mmap", refuse)
    with pytest.raises(ConfigError, match="lower --kv-offload-host-gib"):
        HostArena(LAYOUT, 4, "cpu")


def test_an_arena_without_slots_is_refused() -> None:
    with pytest.raises(ConfigError):
        HostArena(LAYOUT, 0, "cpu")

"""The host arena: pinned in whole slots and whole pages of memory, given out only where it is pinned, and
given back exactly once. Where nothing is pinned, all of it can be used at once, and a little of it is found
in advance."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from penstock.errors import ConfigError
from penstock.kv import memory as host_module
from penstock.kv.memory import BlockLayout, HostArena, piece_slots

# 1536 bytes: no whole page
LAYOUT = BlockLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_tokens=8, dtype="float32")
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
        return any(
            first <= start and start + arena.layout.block_bytes <= first + size
            for first, size in self.pieces.items()
        )


def prepared(
    arena: HostArena, stop: Callable[[], bool] = lambda: False, ready: Callable[[range], None] | None = None
) -> list[range]:
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
    assert arena.tensor.is_contiguous()
    assert arena.num_bytes == arena.tensor.nbytes == 5 * layout.block_bytes
    assert arena.name == "host" and not arena.tensor.any()
    assert arena.tensor.data_ptr() % mmap.PAGESIZE == 0


# ------------------------------------------------------------------------------------ where nothing is pinned


class Finder:
    """Small pieces, and a look at each: `pieces` are the offsets and sizes that were found. Refuses from the
    `limit`-th on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int | None = None) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.before: Callable[[], None] = lambda: None
        self._limit = limit
        self._find = host_module._find
        monkeypatch.setattr(host_module, "_PIECE_BYTES", PIECE_BYTES)
        monkeypatch.setattr(host_module, "_AHEAD_BYTES", 8 * PIECE_BYTES)
        monkeypatch.setattr(host_module, "_find", self.find)

    def find(self, address: int, num_bytes: int) -> bool:
        self.before()
        if len(self.pieces) == self._limit:
            return False
        self.pieces.append((address, num_bytes))
        self._find(address, num_bytes)
        return True  # also on a system that cannot

    def offsets(self, arena: HostArena) -> list[tuple[int, int]]:
        return [(address - arena.tensor.data_ptr(), size) for address, size in self.pieces]


def found_ahead(arena: HostArena, stop: Callable[[], bool] = lambda: False) -> list[range]:
    """What became ready. Nobody waits for the rest, so nothing is told about how far it is."""
    seen: list[range] = []

    def progress(done: int, total: int) -> None:
        raise AssertionError("all of it was ready before")

    arena.prepare(seen.append, progress, stop)
    return seen


def test_on_a_cpu_all_of_it_is_ready_before_any_of_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = Finder(monkeypatch)
    arena = HostArena(LAYOUT, 1000, "cpu")
    seen: list[range] = []
    finder.before = lambda: seen.append(range(0)) if not seen else None
    arena.prepare(seen.append, lambda done, total: None, lambda: False)
    assert seen == [range(1000)] and len(finder.pieces) == 8
    arena.close()
    arena.close()


@pytest.mark.parametrize("num_slots", [1, 42, 43, 300, 5000])
def test_the_first_bytes_are_found_in_pieces_up_to_a_limit_or_to_the_end(
    monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    finder = Finder(monkeypatch)
    arena = HostArena(LAYOUT, num_slots, "cpu")
    assert found_ahead(arena) == [range(num_slots)]
    pieces = finder.offsets(arena)
    assert [first for first, _ in pieces] == [PIECE_BYTES * i for i in range(len(pieces))]
    assert sum(size for _, size in pieces) == min(8 * PIECE_BYTES, arena.num_bytes)


def test_an_arena_takes_no_memory_but_what_it_finds_ahead() -> None:
    before = psutil.Process().memory_info().rss
    arena = HostArena(LAYOUT, (1 << 30) // LAYOUT.block_bytes, "cpu")
    assert psutil.Process().memory_info().rss - before < 64 << 20, "none before it is prepared"
    stops = iter([False, True])
    found_ahead(arena, lambda: next(stops))
    assert psutil.Process().memory_info().rss - before < 128 << 20, "one piece of thirty-two"


def test_what_somebody_writes_while_memory_is_found_ahead_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot is in use before the first piece is found, and is written again before each further one."""
    finder = Finder(monkeypatch)
    arena = HostArena(LAYOUT, 1000, "cpu")
    expected = torch.zeros_like(arena.tensor)

    def write() -> None:
        number = len(finder.pieces)
        arena.tensor[number::3] = expected[number::3] = float(1 + number)

    finder.before = write
    found_ahead(arena)
    assert len(finder.pieces) == 8 and torch.equal(arena.tensor, expected) and expected.any(dim=-1).any()


def test_memory_that_is_short_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = Finder(monkeypatch)
    arena = HostArena(LAYOUT, 1000, "cpu")
    monkeypatch.setattr(host_module, "free_bytes", lambda device: 3 * PIECE_BYTES)
    assert found_ahead(arena) == [range(1000)] and finder.pieces == []


# ----------------------------------------------------------------------------------------------- beside a GPU


@pytest.mark.parametrize("num_slots", [1, 7, 42, 43, 1000])
@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        BlockLayout(2, 2, 16, 16, "bfloat16"),
        BlockLayout(3, 1, 10, 8, "float16"),
        BlockLayout(36, 8, 128, 16, "bfloat16"),
    ],
    ids=lambda layout: f"{layout.block_bytes}",
)
def test_pieces_are_whole_slots_on_whole_pages_of_memory(
    monkeypatch: pytest.MonkeyPatch, layout: BlockLayout, num_slots: int
) -> None:
    driver = Driver(monkeypatch)
    arena = HostArena(layout, min(num_slots, (8 << 20) // layout.block_bytes), CUDA)
    seen = prepared(arena)
    assert [slot for slots in seen for slot in slots] == list(range(arena.num_slots))
    check_pieces(arena, driver)
    arena.close()


def test_a_slot_is_given_out_only_when_all_of_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    arena = HostArena(LAYOUT, 500, CUDA)
    step = piece_slots(LAYOUT)

    def ready(slots: range) -> None:
        assert all(driver.covers(arena, slot) for slot in slots)
        assert not any(driver.covers(arena, slot) for slot in range(slots.stop, arena.num_slots))

    seen = prepared(arena, ready=ready)
    assert len(seen) == len(driver.pieces) == -(-500 // step) > 5


def test_memory_that_cannot_be_pinned_ends_the_arena_early_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    driver = Driver(monkeypatch, limit=2)
    arena = HostArena(LAYOUT, 500, CUDA)
    assert prepared(arena)[-1].stop == 2 * piece_slots(LAYOUT)
    (record,) = caplog.records
    assert (
        record.levelname == "WARNING"
        and ("out of memory") in record.message
        and ("host KV arena") in record.message
    )
    arena.close()
    assert not driver.pieces and driver.num_unregistered == 2
    arena.close()
    assert driver.num_unregistered == 2


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
    monkeypatch.setattr(
        host_module.ctypes, "memset", lambda address, byte, num_bytes: touched.update({address: num_bytes})
    )
    arena = HostArena(LAYOUT, 500, CUDA)
    prepared(arena)
    assert touched == driver.pieces


def test_an_arena_that_does_not_fit_says_how_large_it_would_be_and_what_to_lower() -> None:
    with pytest.raises(
        ConfigError,
        match=r"host KV arena needs \d+\.\d\d GiB of memory, of which .* free; lower --kv-offload-host-gib",
    ):
        HostArena(LAYOUT, 1 << 40, "cpu")


def test_memory_that_is_gone_by_the_time_it_is_taken_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_module.mmap, "mmap", refuse)
    with pytest.raises(ConfigError, match="lower --kv-offload-host-gib"):
        HostArena(LAYOUT, 4, "cpu")

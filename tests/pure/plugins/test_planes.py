"""PlanarBlocks of another engine: which of them are interchangeable, and how long its memory is lent."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.errors import InvariantBroken, StoreFailed
from penstock.kv.tiers.cold import ColdLimits, ColdTier, cpu_lanes
from penstock.kv.tiers.store import Space
from penstock.plugins import planes
from penstock.plugins.planes import BlockFormat, PlanarBlocks
from penstock.plugins.tiers import HostedTiers
from penstock.testing.stores import MemoryStore
from tests.pure.plugins.hosted_rig import SOON_S, LocalStore

PLANE = 64
FORMAT = BlockFormat(
    "engine", "w1", "m", "bf16", "page_first", 4, 2, PLANE, (0, 8), {"tp": (0, 2)}, {"s": "1"}
)
NAMES = [f"page {number}" for number in range(8)]


def planes_of(names: list[str]) -> list[memoryview]:
    """Content of pages, plane by plane."""
    whole = b"".join(name.encode().ljust(PLANE, b"k") + name.encode().ljust(PLANE, b"v") for name in names)
    return [memoryview(whole)[start : start + PLANE] for start in range(0, len(whole), PLANE)]


class Reader:
    """Memory for as many pages."""

    def __init__(self, num_pages: int) -> None:
        self.memory = bytearray(num_pages * 2 * PLANE)
        view = memoryview(self.memory)
        self.planes = [view[start : start + PLANE] for start in range(0, len(view), PLANE)]


def read(pages: PlanarBlocks, names: list[str]) -> list[bool]:
    """What is done is also byte for byte what was written."""
    reader = Reader(len(names))
    done = pages.read(names, reader.planes)
    for place, (name, there) in enumerate(zip(names, done, strict=True)):
        here = reader.memory[place * 2 * PLANE : (place + 1) * 2 * PLANE]
        assert not there or here == b"".join(planes_of([name])), "wrong bytes served"
    return done


Make = Callable[..., PlanarBlocks]


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[tuple[PlanarBlocks, tuple[MemoryStore, ...]]] = []

    def build(*stores: MemoryStore, format: BlockFormat = FORMAT, **limits: Any) -> PlanarBlocks:
        def tiers(space: Space, view: Callable[[int], memoryview]) -> HostedTiers:
            limit = ColdLimits(group_bytes=4 * PLANE, **limits)
            return HostedTiers(
                [ColdTier(store, cpu_lanes(store), view, ("host", 1), limit) for store in stores], 1e9
            )

        opened.append((PlanarBlocks(format, tiers, SOON_S, 4 * PLANE), stores))
        return opened[-1][0]

    yield build
    for pages, stores in opened:
        for store in stores:
            store.gate.let()
        pages.close(SOON_S)


@pytest.mark.parametrize("store", [LocalStore, MemoryStore])
def test_pages_come_back_as_they_were_and_the_memory_is_given_back(
    make: Make, store: Callable[[], MemoryStore]
) -> None:
    pages = make(store())
    assert pages.leading(NAMES) == 0 and read(pages, NAMES[:2]) == [False, False]
    assert pages.write(NAMES, planes_of(NAMES)) == [True] * 8
    assert pages.leading(NAMES) == 8 and read(pages, NAMES[::-1]) == [True] * 8
    assert pages.leading(["other", *NAMES]) == 0 and pages.leading([*NAMES[:3], "other", *NAMES]) == 3
    assert pages.memory.num_lent == 0


def test_a_page_without_one_of_its_parts_is_not_there_and_the_others_are(make: Make) -> None:
    # Holds invariant 23: a damaged plane makes its page a miss, and is removed.
    store = LocalStore()
    pages = make(store)
    pages.write(NAMES[:4], planes_of(NAMES[:4]))
    store.lose(FORMAT.keys(NAMES[1:2])[1])
    store.spoil(FORMAT.keys(NAMES[2:3])[0])
    assert pages.leading(NAMES) == 1
    assert read(pages, NAMES[:4]) == [True, False, False, True]
    assert FORMAT.keys(NAMES[2:3])[0] not in store.blocks
    assert pages.traffic().checksum_failures["ssd"] == 1


def test_a_full_tier_says_which_pages_it_took(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    # Holds invariant 24: what is not written is said, counted, and told once.
    store = LocalStore()
    store.max_blocks = 5
    pages = make(store)
    with caplog.at_level(logging.WARNING):
        assert pages.write(NAMES[:4], planes_of(NAMES[:4])) == [True, True, False, False]
        assert pages.write(NAMES[4:], planes_of(NAMES[4:])) == [False] * 4
    assert [record.message for record in caplog.records].count(
        "penstock: some blocks were not written; the counters of the tiers say why (told once)"
    ) == 1
    assert sum(pages.traffic().skipped.values()) > 0


def test_a_write_of_more_than_the_queue_holds_is_written_whole(make: Make) -> None:
    pages = make(LocalStore(), queue_bytes=4 * PLANE)
    assert pages.write(NAMES, planes_of(NAMES)) == [True] * 8 and pages.leading(NAMES) == 8


def test_a_store_that_fails_is_a_miss(make: Make) -> None:
    # Holds invariant 22: nothing is raised into the engine's thread.
    store = MemoryStore()
    pages = make(store)
    pages.write(NAMES, planes_of(NAMES))
    store.die()
    assert pages.leading(NAMES) == 0
    assert read(pages, NAMES[:2]) == [False, False] == pages.write(["new", "er"], planes_of(["new", "er"]))


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_call_returns_only_when_the_tier_no_longer_touches_the_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    # Holds invariant 7: a late store holds the call, since the engine uses the memory again when it returns.
    monkeypatch.setattr(planes, "LATE_S", 0.001)
    store = LocalStore()
    pages = make(store)
    pages.write(NAMES[:2], planes_of(NAMES[:2]))
    store.gate.hold(way)
    done: list[bool] = []
    reader = Reader(2)

    def move() -> None:
        if way == "read":
            done.extend(pages.read(NAMES[:2], reader.planes))
        else:
            done.extend(pages.write(NAMES[2:4], planes_of(NAMES[2:4])))

    thread = threading.Thread(target=move)
    thread.start()
    store.gate.wait_came()
    while not pages.num_late:  # the wait has ended more than once
        assert thread.is_alive() and pages.memory.num_lent == 4
    assert done == []
    store.gate.let()
    thread.join(SOON_S)
    assert done == [True, True] and pages.memory.num_lent == 0


def test_a_defect_of_a_job_does_not_end_the_wait_for_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = make(store := LocalStore())
    pages.write(NAMES[:1], planes_of(NAMES[:1]))
    monkeypatch.setattr(store, "read", lambda keys, into: [])  # outcomes of no block: a defect
    assert read(pages, NAMES[:1]) == [False] and "a job failed" in caplog.text
    assert any(record.exc_info and record.exc_info[0] is InvariantBroken for record in caplog.records)
    assert pages.memory.num_lent == 0


def test_a_lookup_that_meets_a_defect_finds_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = make(LocalStore())

    def meet(*_: object) -> int:
        raise InvariantBroken("a defect of another call")

    monkeypatch.setattr(HostedTiers, "wait_leading", meet)
    assert pages.leading(NAMES) == 0 and "a lookup failed" in caplog.text


def test_pages_of_another_size_are_left_out(make: Make) -> None:
    pages = make(LocalStore())
    assert pages.write(NAMES[:2], planes_of(NAMES[:1])) == [False, False]
    assert pages.write(NAMES[:1], [memoryview(bytes(PLANE - 1))] * 2) == [False]
    assert pages.leading(NAMES) == 0


def test_clear_forgets_all_and_says_if_it_could_not(make: Make) -> None:
    store = LocalStore()
    pages = make(store)
    pages.write(NAMES, planes_of(NAMES))
    pages.clear()
    assert pages.leading(NAMES) == 0 and not store.blocks
    store.die()
    with pytest.raises(StoreFailed, match="did not forget"):
        pages.clear()


def test_after_close_nothing_is_there_and_nothing_is_raised(make: Make) -> None:
    pages = make(LocalStore())
    pages.write(NAMES, planes_of(NAMES))
    pages.close(SOON_S)
    pages.close(SOON_S)
    assert pages.leading(NAMES) == 0 and read(pages, NAMES[:1]) == [False]
    assert pages.write(NAMES[:1], planes_of(NAMES[:1])) == [False]
    assert pages.read([], []) == []


OTHER = {
    "engine": "another",
    "weights": "w2",
    "model": "m2",
    "dtype": "fp8",
    "layout": "page_head",
    "block_tokens": 8,
    "num_planes": 1,
    "plane_bytes": 128,
    "layers": (0, 9),
    "ranks": {"tp": (1, 2)},
    "settings": {"s": "2"},
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(BlockFormat)])
def test_pages_of_another_format_are_never_found(name: str) -> None:
    # Holds invariant 13: each field alone makes another space, and joined fields do not collide.
    other = dataclasses.replace(FORMAT, **{name: OTHER[name]})
    assert other.space().digest != FORMAT.space().digest
    assert dataclasses.replace(FORMAT).space() == FORMAT.space()


def test_fields_do_not_collide_when_they_are_joined() -> None:
    one = dataclasses.replace(FORMAT, model="a", layout="bc")
    assert one.space() != dataclasses.replace(FORMAT, model="ab", layout="c").space()
    assert len(set(FORMAT.keys([*NAMES, "\x00" + NAMES[0], NAMES[0] + "\x00"]))) == 20

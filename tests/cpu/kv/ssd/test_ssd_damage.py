"""Files that somebody or something has changed: flipped bits, cut files, slots in each other's places. Never
a wrong byte, always noticed, and the slot is used again.

Holds invariant 23: a block that was changed on disk is a miss, is counted, and is removed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kv.tiers.ssd.directory import SECTOR_BYTES
from penstock.kv.tiers.ssd.segments import slot_bytes
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import (
    BLOCK_BYTES,
    SPACE,
    bytes_of,
    key_of,
    open_at,
    read,
    segment_paths,
    those_in,
    write,
)

DONE = Outcome.DONE
NUM_BLOCKS = 40
# times eight hundred flipped bits and eight cut files
DAMAGES = int(os.environ.get("PENSTOCK_DAMAGES", "1"))
WIDTH = slot_bytes(BLOCK_BYTES)


def _filled(path: Path) -> SsdStore:
    store = open_at(path, num_slots=64)
    assert write(store, *range(NUM_BLOCKS)) == [DONE] * NUM_BLOCKS
    return store


def _places(store: SsdStore) -> dict[int, tuple[Path, int]]:
    """By block: its file and where its slot begins."""
    found = {}
    for number in range(NUM_BLOCKS):
        segment, slot = store._now.segments.locate(store._now.index.find_each([key_of(number)])[0])
        found[number] = (store._now.directory.segment_path(segment.head.number), segment.offset(slot))
    return found


def _patch(path: Path, offset: int, change: Callable[[bytearray], None], size: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        data = bytearray(file.read(size))
        change(data)
        file.seek(offset)
        file.write(data)


def _flip(data: bytearray) -> None:
    data[0] ^= 1 << random.Random(data[0]).randrange(8)


@pytest.mark.parametrize("seed", range(2 * DAMAGES))
def test_flipped_bits_are_noticed_while_running_and_the_slot_is_used_again(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = _filled(tmp_path)
    places = _places(store)
    for _ in range(100):
        number = rng.randrange(NUM_BLOCKS)
        path, start = places[number]
        offset = rng.choice((rng.randrange(156), SECTOR_BYTES + rng.randrange(BLOCK_BYTES)))
        _patch(path, start + offset, _flip)
        assert read(store, number) == [Outcome.CORRUPT]
        assert those_in(store, [number]) == set() and read(store, number) == [Outcome.MISSING]
        assert write(store, number) == [DONE] and read(store, number) == [DONE]
        places = _places(store)
    assert store.usage().num_used == NUM_BLOCKS
    store._now.index.check()
    store.close()


def _damage_and_count(path: Path, seed: int) -> tuple[int, int]:
    """Hundreds of flips all over the files between two lives; how many wrong blocks were served, and how many
    were lost."""
    rng = random.Random(seed)
    _filled(path).close()
    for _ in range(200):
        file = rng.choice(segment_paths(path))
        _patch(file, rng.randrange(file.stat().st_size), _flip)
    store = open_at(path, num_slots=64)
    num_wrong = num_lost = 0
    for number in range(NUM_BLOCKS):
        into = memoryview(bytearray(BLOCK_BYTES))
        (outcome,) = store.read([key_of(number)], [into])
        num_wrong += outcome is DONE and into != bytes_of(number)
        num_lost += outcome is not DONE
    store._now.index.check()
    if not num_wrong:
        assert write(store, *range(NUM_BLOCKS)) == [DONE] * NUM_BLOCKS, "what was lost makes room"
        assert read(store, *range(NUM_BLOCKS)) == [DONE] * NUM_BLOCKS
    store.close()
    return num_wrong, num_lost


@pytest.mark.parametrize("seed", range(3 * DAMAGES))
def test_flipped_bits_between_two_lives_never_give_a_wrong_byte(tmp_path: Path, seed: int) -> None:
    num_wrong, num_lost = _damage_and_count(tmp_path, seed)
    assert num_wrong == 0 and num_lost > 0


@pytest.mark.parametrize("restart", [False, True])
def test_slots_that_changed_places_are_noticed(tmp_path: Path, restart: bool) -> None:
    rng = random.Random(0)
    store = _filled(tmp_path)
    places = list(_places(store).items())
    rng.shuffle(places)
    moved = []
    for (one, (file, start)), (other, (other_file, other_start)) in zip(
        places[:10:2], places[1:10:2], strict=True
    ):
        first, second = (
            file.read_bytes()[start : start + WIDTH],
            other_file.read_bytes()[other_start : other_start + WIDTH],
        )
        _patch(file, start, lambda data, second=second: data.__setitem__(slice(None), second), WIDTH)  # type: ignore[misc]
        _patch(other_file, other_start, lambda data, first=first: data.__setitem__(slice(None), first), WIDTH)  # type: ignore[misc]
        moved += [one, other]
    if restart:
        store.close()
        store = open_at(tmp_path, num_slots=64)
    lost = Outcome.MISSING if restart else Outcome.CORRUPT
    assert read(store, *moved) == [lost] * len(moved)
    rest = [number for number in range(NUM_BLOCKS) if number not in moved]
    assert read(store, *rest) == [DONE] * len(rest)
    assert write(store, *moved) == [DONE] * len(moved) and read(store, *moved) == [DONE] * len(moved)
    store.close()


def test_files_that_changed_names_are_misses(tmp_path: Path) -> None:
    _filled(tmp_path).close()
    first, second, *_ = segment_paths(tmp_path)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    store = open_at(tmp_path, num_slots=64)
    left = those_in(store, range(NUM_BLOCKS))
    assert 0 < len(left) < NUM_BLOCKS and read(store, *left) == [DONE] * len(left)
    store.close()


@pytest.mark.parametrize("seed", range(8 * DAMAGES))
def test_files_cut_anywhere_never_give_a_wrong_byte(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    _filled(tmp_path).close()
    for file in rng.sample(segment_paths(tmp_path), 3):
        with file.open("r+b") as opened:
            opened.truncate(rng.randrange(file.stat().st_size))
    store = open_at(tmp_path, num_slots=64)
    found = those_in(store, range(NUM_BLOCKS))
    outcomes = read(store, *found)  # the last block of a cut file has its head and not all of its payload
    assert outcomes.count(DONE) >= len(found) - 3 and set(outcomes) <= {DONE, Outcome.CORRUPT}
    assert (
        write(store, *range(NUM_BLOCKS)) == [DONE] * NUM_BLOCKS
        and read(store, *range(NUM_BLOCKS)) == [DONE] * NUM_BLOCKS
    )
    store.close()


def test_a_slot_of_another_space_inside_our_file_is_a_miss(tmp_path: Path) -> None:
    """As if files of two directories had been mixed: the head of the file is ours."""
    store = _filled(tmp_path / "ours")
    places = _places(store)
    foreign = open_at(tmp_path / "foreign", num_slots=64, space=SPACE.__class__(b"t" * 32, BLOCK_BYTES))
    write(foreign, *range(NUM_BLOCKS))
    other = _places(foreign)
    foreign.close()
    for number in range(5):
        (file, start), (other_file, other_start) = places[number], other[number]
        image = other_file.read_bytes()[other_start : other_start + WIDTH]
        _patch(file, start, lambda data, image=image: data.__setitem__(slice(None), image), WIDTH)  # type: ignore[misc]
    assert read(store, *range(6)) == [Outcome.CORRUPT] * 5 + [DONE]
    store.close()

"""Looking at an SSD cache without an engine: what is counted, what is named, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.kv.tiers.ssd.directory import SECTOR_BYTES
from penstock.kv.tiers.ssd.segments import pack_slot, slot_bytes, unpack_segment
from penstock.kv.tiers.ssd.survey import clear, inspect, verify
from penstock.kv.tiers.store import Outcome, pack
from tests.cpu.kv.ssd.ssd_rig import BLOCK_BYTES, SPACE, key_of, open_at, read, segment_paths, those_in, write

WIDTH = slot_bytes(BLOCK_BYTES)


def _ignore(done: int, total: int) -> None:
    assert 0 < done <= total


CALLS: list[Callable[[Path], Any]] = [
    inspect,
    lambda path: verify(path, _ignore),
    lambda path: clear(path, _ignore),
]


def _filled(path: Path, num_blocks: int = 30) -> None:
    store = open_at(path)
    write(store, *range(num_blocks))
    store.close()


def test_inspect_counts_files_slots_and_blocks(tmp_path: Path) -> None:
    _filled(tmp_path)
    found = inspect(tmp_path)
    files = segment_paths(tmp_path)
    assert (found.num_segments, found.file_bytes) == (len(files), sum(path.stat().st_size for path in files))
    assert found.num_slots == sum((path.stat().st_size - SECTOR_BYTES) // WIDTH for path in files)
    (space,) = found.spaces.values()
    assert list(found.spaces) == [SPACE.digest.hex()]
    assert (space.num_blocks, space.num_bytes) == (30, 30 * BLOCK_BYTES) and 0 < space.oldest < space.newest
    assert found.num_good is None and not found.damaged


def test_verify_names_what_is_torn_and_what_is_corrupt(tmp_path: Path) -> None:
    _filled(tmp_path)
    path = segment_paths(tmp_path)[0]
    image = bytearray(path.read_bytes())
    image[SECTOR_BYTES + 3] ^= 1  # head of slot 0
    image[SECTOR_BYTES + 2 * WIDTH + SECTOR_BYTES + 77] ^= 1  # payload of slot 2
    path.write_bytes(image)
    found = verify(tmp_path, _ignore)
    assert found.num_good == 28
    assert len(found.corrupt) == len(found.torn) == 1
    assert path.name in found.corrupt[0] and "slot 0" in found.corrupt[0]
    assert "slot 2" in found.torn[0] and key_of(2).hex() in found.torn[0]
    store = open_at(tmp_path)
    assert those_in(store, range(30)) == set(range(1, 30)) and read(store, 2) == [Outcome.CORRUPT]
    store.close()


def test_files_without_a_head_and_files_cut_short_are_named(tmp_path: Path) -> None:
    _filled(tmp_path)
    first, second, *_ = segment_paths(tmp_path)
    first.write_bytes(b"\0" * first.stat().st_size)
    with second.open("r+b") as file:
        file.truncate(SECTOR_BYTES + WIDTH + 100)
    found = verify(tmp_path, _ignore)
    assert [name.split(":")[0] for name in found.damaged] == [first.name, second.name]
    assert 0 < (found.num_good or 0) < 30


def test_clear_removes_our_files_and_no_others(tmp_path: Path) -> None:
    _filled(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    num_files = len(segment_paths(tmp_path))
    num_bytes = sum(path.stat().st_size for path in segment_paths(tmp_path))
    told: list[tuple[int, int]] = []
    found = clear(tmp_path, lambda done, total: told.append((done, total)))
    assert found.num_segments == num_files == len(told) and not segment_paths(tmp_path)
    assert num_files > 1 and (found.file_bytes, told) == (
        num_bytes,
        [(done, num_files) for done in range(1, num_files + 1)],
    )
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert inspect(tmp_path).num_segments == 0, "it is still a cache, with nothing in it"
    store = open_at(tmp_path)
    assert those_in(store, range(30)) == set()
    store.close()


@pytest.mark.parametrize("call", CALLS)
def test_a_directory_in_use_is_refused_and_nothing_is_touched(
    tmp_path: Path, call: Callable[[Path], Any]
) -> None:
    store = open_at(tmp_path)
    write(store, *range(10))
    with pytest.raises(ConfigError, match="in use by process"):
        call(tmp_path)
    assert read(store, *range(10)) == [Outcome.DONE] * 10
    store.close()
    call(tmp_path)


@pytest.mark.parametrize("call", CALLS)
def test_a_directory_that_is_missing_or_somebody_elses_is_refused(
    tmp_path: Path, call: Callable[[Path], Any]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for path, why in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "other", "not an SSD cache"),
        (tmp_path / "file", "not a directory"),
    ):
        with pytest.raises(ConfigError, match=why):
            call(path)
    assert [entry.name for entry in (tmp_path / "other").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("newer_first", [False, True])
def test_of_two_copies_a_survey_counts_the_newer(tmp_path: Path, newer_first: bool) -> None:
    _filled(tmp_path, 2)
    path = segment_paths(tmp_path)[0]
    image = bytearray(path.read_bytes())
    head = unpack_segment(bytes(image[:SECTOR_BYTES]))
    assert head is not None
    payload = b"x" * BLOCK_BYTES
    for slot, sequence in enumerate((200, 100) if newer_first else (100, 200)):
        sector = pack_slot(pack(key_of(7), SPACE.digest, payload, sequence), head, slot, 0)
        image[SECTOR_BYTES + slot * WIDTH : SECTOR_BYTES + (slot + 1) * WIDTH] = sector + payload.ljust(
            WIDTH - SECTOR_BYTES, b"\0"
        )
    path.write_bytes(image)
    for found in (inspect(tmp_path), verify(tmp_path, _ignore)):
        (space,) = found.spaces.values()
        assert (found.num_blocks, found.num_older, space.oldest, space.newest) == (1, 1, 200, 200)
    assert verify(tmp_path, _ignore).num_good == 2

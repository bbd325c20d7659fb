"""The cache directory: digests that are remembered only as long as they are true."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import ModelError
from penstock.models import cache
from penstock.models.progress import silent


class Stages:
    """A Progress that keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.calls.append((stage, done, total))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def settled(path: Path, data: bytes, age_s: int = 100) -> Path:
    """A file that was last written a while ago."""
    path.write_bytes(data)
    stamp = path.stat().st_mtime_ns - age_s * 10**9
    os.utime(path, ns=(stamp, stamp))
    return path


def test_a_settled_file_is_hashed_once(tmp_path: Path) -> None:
    path, stages = settled(tmp_path / "weights", b"x" * 100), Stages()
    first = cache.file_digest(path, "hashing", stages)
    assert stages.calls == [("hashing", 100, 100)]
    assert cache.file_digest(path, "hashing", stages) == first
    assert len(stages.calls) == 1


def test_a_changed_file_is_hashed_again_even_at_the_same_size(tmp_path: Path) -> None:
    path = settled(tmp_path / "weights", b"x" * 100)
    first = cache.file_digest(path, "hashing", silent)
    settled(path, b"y" * 100, age_s=50)
    assert cache.file_digest(path, "hashing", silent) != first


def test_a_fresh_file_is_not_remembered_since_the_next_write_may_share_its_mtime(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)
    stamp = path.stat().st_mtime_ns
    first = cache.file_digest(path, "hashing", silent)
    path.write_bytes(b"y" * 100)
    os.utime(path, ns=(stamp, stamp))
    assert cache.file_digest(path, "hashing", silent) != first


def test_remembering_fresh_files_would_serve_a_stale_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the rule above guards against."""
    monkeypatch.setattr(cache, "_SETTLED_NS", -(10**18))
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)
    stamp = path.stat().st_mtime_ns
    first = cache.file_digest(path, "hashing", silent)
    path.write_bytes(b"y" * 100)
    os.utime(path, ns=(stamp, stamp))
    assert cache.file_digest(path, "hashing", silent) == first


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"path": 1}', b"\xff\xfe"])
def test_a_damaged_entry_is_ignored(tmp_path: Path, own_cache: Path, junk: bytes) -> None:
    path = settled(tmp_path / "weights", b"x" * 100)
    first = cache.file_digest(path, "hashing", silent)
    for entry in (own_cache / "digests").iterdir():
        entry.write_bytes(junk)
    assert cache.file_digest(path, "hashing", silent) == first


def test_without_a_usable_cache_directory_digests_still_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "below"))
    assert len(cache.file_digest(settled(tmp_path / "weights", b"x"), "hashing", silent)) == cache.DIGEST_BYTES


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        cache.file_digest(tmp_path / "nothing", "hashing", silent)


def test_a_failed_write_leaves_the_old_contents_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "entry"
    cache.write_durably(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(tmp_path: Path) -> None:
    """What was read is neither the old file nor the new one; both are long settled by their times."""
    path = settled(tmp_path / "weights", b"x" * 100)

    def change(stage: str, done: int, total: int) -> None:
        settled(path, b"y" * 90, age_s=50)

    torn = cache.file_digest(path, "hashing", change)
    assert cache.file_digest(path, "hashing", silent) != torn

"""Files read and hashed in one pass: every byte comes with its digest, whoever reads ahead, and a file that
changes is noticed."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ModelError
from penstock.models import hashed_file
from penstock.models.hashed_file import (
    FilePiece,
    HashedFile,
    WeightFile,
    piece_rows,
    read_pieces,
)
from penstock.models.progress import silent


class AtOnce:
    """Runs work where a thread pool would queue it: whatever is submitted too early is done too early."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args))
        except BaseException as error:
            done.set_exception(error)
        return done


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    path = tmp_path / "noise"
    path.write_bytes(np.random.default_rng(0).bytes(100_000))
    return path


@pytest.mark.parametrize("at_once", [False, True])
def test_each_piece_comes_with_its_own_bytes_and_their_digest(
    noise: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_once:
        monkeypatch.setattr(hashed_file, "ThreadPoolExecutor", AtOnce)
    data = noise.read_bytes()
    places = np.random.default_rng(1).integers(1, 50_000, (200, 2)).tolist()
    with WeightFile(noise) as file:
        reading = read_pieces(FilePiece(file, *place) for place in places)
        found = [(bytes(view), digest) for view, digest in reading]
    expected = [data[start : start + num_bytes] for start, num_bytes in places]
    assert found == [(piece, hashlib.sha256(piece).digest()) for piece in expected]


def test_a_user_who_stops_early_leaves_no_thread_behind(noise: Path) -> None:
    with WeightFile(noise) as file:
        reading = read_pieces(FilePiece(file, 0, 1000) for _ in range(1000))
        next(reading)
        assert any(thread.name.startswith("weights") for thread in threading.enumerate())
        reading.close()
    assert not any(thread.name.startswith("weights") for thread in threading.enumerate())


def test_what_goes_wrong_on_a_reading_thread_reaches_the_user(noise: Path) -> None:
    with (
        WeightFile(noise) as file,
        pytest.raises(ModelError, match="noise ends at byte 100000: it was cut short"),
    ):
        list(read_pieces([FilePiece(file, 0, 1000), FilePiece(file, 99_500, 1000)]))
    with pytest.raises(ModelError, match="nothing cannot be read: No such file"):
        WeightFile(noise.parent / "nothing")


@given(num_rows=st.integers(1, 10_000), row_bytes=st.integers(1, 100_000))
def test_pieces_cover_every_row_once_and_are_no_larger_than_they_may_be(
    num_rows: int, row_bytes: int
) -> None:
    pieces = list(piece_rows(num_rows, row_bytes))
    assert pieces[0].start == 0 and pieces[-1].stop == num_rows
    assert all(one.stop == other.start for one, other in itertools.pairwise(pieces))
    assert all(
        (rows.stop - rows.start) * row_bytes <= max(hashed_file.PIECE_BYTES, row_bytes) for rows in pieces
    )


def test_the_digest_of_a_file_is_of_all_its_bytes_and_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashed_file, "PIECE_BYTES", 1000)
    path = tmp_path / "file"

    def digest(data: bytes) -> bytes:
        path.write_bytes(data)
        with HashedFile(path, silent) as file:
            return file.digest

    zeros = bytes(2500)
    variants = [zeros[:at] + b"\1" + zeros[at + 1 :] for at in (0, 999, 1000, 1999, 2000, 2499)]
    variants += [zeros, zeros[:-1], zeros + b"\0", zeros[:2000], zeros[:1000], b""]
    assert len({digest(data) for data in variants}) == len(variants)
    assert digest(zeros) == digest(zeros)


def test_what_is_read_of_a_hashed_file_is_what_was_hashed_or_an_error(
    noise: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashed_file, "PIECE_BYTES", 1000)
    data = noise.read_bytes()
    with HashedFile(noise, silent) as file:
        with noise.open("r+b") as writer:
            writer.seek(5500)
            writer.write(bytes([data[5500] ^ 1]))
        assert file.read(0, 5000) == data[:5000] and file.read(6000, 1000) == data[6000:7000]
        for start, num_bytes in ((5000, 10), (5500, 1), (4999, 2), (0, 100_000)):
            with pytest.raises(ModelError, match="was written to while it was read"):
                file.read(start, num_bytes)


def test_a_file_that_is_rewritten_in_place_is_noticed_however_soon(tmp_path: Path) -> None:
    """It is as long as it was, and its time differs by less than a second."""
    path, first_ns = tmp_path / "weights", 1_700_000_000 * 10**9 + 5
    for later_ns in (1, 1000, 10**9):
        path.write_bytes(b"before")
        os.utime(path, ns=(first_ns, first_ns))
        with WeightFile(path) as file:
            file.check_unchanged()
            with path.open("r+b") as same:
                same.write(b"behind")
            os.utime(path, ns=(first_ns + later_ns, first_ns + later_ns))
            with pytest.raises(ModelError, match="was written to"):
                file.check_unchanged()


def test_a_file_that_cannot_be_hashed_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[WeightFile] = []
    begin = WeightFile.__init__
    monkeypatch.setattr(
        WeightFile, "__init__", lambda self, path: (opened.append(self), begin(self, path))[1]
    )
    (tmp_path / "weights").write_bytes(b"bytes")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HashedFile(tmp_path / "weights", interrupted)
    assert [file._file.closed for file in opened] == [True]

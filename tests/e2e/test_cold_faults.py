"""Disks and stores that get into trouble while an engine uses them: whatever happens, requests end with the
tokens of an engine without tiers, figures tell, and the tier is used again when it is back. The disk is a
directory with real files, the store a real server.

Holds invariant 22: real disks and stores in trouble change no token."""

from __future__ import annotations

import contextlib
import errno
import functools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.errors import DeadlineExceeded, StoreFailed
from penstock.kv import build as build_module
from penstock.kv.tiers.calls import Breaker
from penstock.kv.tiers.cold import ColdLimits
from penstock.kv.tiers.ssd import segments as segments_module
from penstock.testing.sanitized import build_sanitized
from tests.cpu.kv.ssd.ssd_rig import GatedDisk, HookedDisk, fails
from tests.e2e.troubled import (
    FULL_BLOCKS,
    LIMIT_S,
    Apart,
    Troubled,
    apart_or_skip,
    by_source,
    prompt,
    small_disk,
    tokens_of,
    troubled,
    until,
)
from tests.store_servers import valkey_or_skip
from tests.support.driving import block_bytes, run_all, submit, tiny_config
from tests.support.servers import Valkey

NUMBERS = (0, 1, 2)
OTHERS = (3, 4)
BLOCK_BYTES = block_bytes("tiny-qwen3", 16)


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is back is found again soon."""
    torch.set_num_threads(1)
    monkeypatch.setattr(build_module, "ColdLimits", functools.partial(ColdLimits, probe_s=0.02))


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[..., list[list[int]]]]:
    """The tokens of prompts on an engine without tiers."""
    engine, _ = build_sanitized(tiny_config())

    @functools.cache
    def answer(number: int) -> list[int]:
        collected = submit(engine, prompt(number), max_tokens=4)
        run_all(engine)
        return collected.tokens

    yield lambda *numbers: [answer(number) for number in numbers]
    engine.close(LIMIT_S)


Alone = Callable[..., list[list[int]]]


def ask_as_alone(server: Troubled, alone: Alone, *numbers: int) -> list[int]:
    """Tokens that came from cold tiers, by prompt."""
    found = server.ask(*numbers)
    assert tokens_of(found) == alone(*numbers)
    return [
        ssd + remote for ssd, remote in zip(by_source(found, "ssd"), by_source(found, "remote"), strict=True)
    ]


def come_back(server: Troubled, alone: Alone, tier: str) -> None:
    """It is used again: what is written now is found. A machine that is busy may exceed the time of an
    exchange once more meanwhile."""

    def is_used() -> bool:
        server.forget()
        ask_as_alone(server, alone, *NUMBERS)
        try:
            server.persist()
        except StoreFailed:
            return False
        server.forget()
        return ask_as_alone(server, alone, *NUMBERS) == [FULL_BLOCKS] * len(NUMBERS)

    until(lambda: server.usable(tier), f"the {tier} tier answers again")
    until(is_used, f"the {tier} tier is used again")
    assert server.usable(tier)


# ------------------------------------------------------------------------------------------------------- disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Troubled]:
    """With prompts on disk, and nowhere else."""
    with troubled(ssd_dir=str(tmp_path / "ssd"), ssd_gib=0.05, load_deadline_s=LIMIT_S) as server:
        server.ask(*NUMBERS)
        server.persist()
        server.forget()
        yield server


def test_a_disk_that_gets_full_serves_what_it_has(tmp_path: Path, alone: Alone) -> None:
    with (
        small_disk(tmp_path / "small", 24 * BLOCK_BYTES) as folder,
        troubled(ssd_dir=str(folder), ssd_gib=0.05) as server,
    ):
        for number in range(8):  # of six blocks each
            ask_as_alone(server, alone, number)
        server.persist()
        assert 6 <= server.engine.stats().kv_blocks["ssd"]["used"] < 24
        server.forget()
        assert ask_as_alone(server, alone, 7) == [FULL_BLOCKS], "the latest"
        ask_as_alone(server, alone, *range(8))
        assert server.usable("ssd")


def test_a_disk_that_somebody_else_has_filled_is_used_when_there_is_room(
    tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "_GROW_AGAIN_S", 0.02)
    with small_disk(tmp_path / "small", 64 * BLOCK_BYTES) as folder:
        hog = folder / "hog"
        with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        with troubled(ssd_dir=str(folder), ssd_gib=0.05) as server:
            assert ask_as_alone(server, alone, *NUMBERS) == [0, 0, 0]
            with pytest.raises(StoreFailed):
                server.persist()
            assert server.traffic.skipped["full"] > 0
            server.forget()
            assert ask_as_alone(server, alone, *NUMBERS) == [0, 0, 0]
            hog.unlink()
            come_back(server, alone, "ssd")


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fdatasync"])
def test_a_disk_with_errors_is_fenced_off_and_used_again(disk: Troubled, alone: Alone, call: str) -> None:
    directory = disk.store("ssd").directory
    directory.io, healthy = HookedDisk(**{call: fails(errno.EIO)}), directory.io
    found = ask_as_alone(disk, alone, *NUMBERS, *OTHERS)
    assert found[3:] == [0, 0] and (found == [0] * 5) is (call == "preadv")
    if call != "preadv":
        with pytest.raises(StoreFailed):
            disk.persist()
    assert disk.num_failures("ssd") > 0
    assert ask_as_alone(disk, alone, *OTHERS) == [0, 0]
    directory.io = healthy
    come_back(disk, alone, "ssd")


def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path: Path, alone: Alone) -> None:
    with troubled(ssd_dir=str(tmp_path), ssd_gib=0.05, load_deadline_s=0.1) as server:
        server.ask(*NUMBERS)
        server.persist()
        server.forget()
        directory = server.store("ssd").directory
        directory.io, healthy = (slow := GatedDisk()), directory.io
        slow.gates["preadv"].clear()
        try:
            assert ask_as_alone(server, alone, *NUMBERS, *OTHERS) == [0] * 5
            assert slow.there["preadv"].is_set(), "somebody reads"
            slow.gates["pwritev"].clear()
            ask_as_alone(server, alone, 5)
            with pytest.raises(DeadlineExceeded):
                server.engine.kv.wait_flushed("persisted", 0.1)
        finally:
            for gate in slow.gates.values():
                gate.set()
        directory.io = healthy
        server.persist()
        server.forget()
        assert sum(ask_as_alone(server, alone, *NUMBERS, *OTHERS, 5)) > 0, "also what was written meanwhile"
        assert server.usable("ssd")


def test_a_directory_that_is_moved_away_is_used_again_when_it_is_back(
    disk: Troubled, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nobody makes another directory before all is seen to fail
    monkeypatch.setattr(Breaker, "try_probe", lambda self: False)
    (tmp_path / "ssd").rename(tmp_path / "elsewhere")
    ask_as_alone(disk, alone, *OTHERS)
    with pytest.raises(StoreFailed):
        disk.persist()
    assert disk.num_failures("ssd") > 0 and not disk.usable("ssd")
    disk.forget()
    assert ask_as_alone(disk, alone, *NUMBERS, *OTHERS) == [0] * 5
    monkeypatch.undo()
    with contextlib.suppress(FileNotFoundError):  # a probe has made another one meanwhile, or has not
        (tmp_path / "ssd").rename(tmp_path / "made")
    (tmp_path / "elsewhere").rename(tmp_path / "ssd")
    come_back(disk, alone, "ssd")


def test_a_directory_that_is_removed_costs_nothing_but_what_was_in_it(
    disk: Troubled, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaker, "try_probe", lambda self: False)
    shutil.rmtree(tmp_path / "ssd")
    ask_as_alone(disk, alone, *NUMBERS, *OTHERS)
    with pytest.raises(StoreFailed):
        disk.persist()
    assert disk.num_failures("ssd") > 0 and not disk.usable("ssd")
    disk.forget()
    assert ask_as_alone(disk, alone, *NUMBERS) == [0, 0, 0]
    monkeypatch.undo()


# ------------------------------------------------------------------------------------------------------ store

TIMEOUT_S = 1.0  # of an exchange: what takes longer counts as a store that is down


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with valkey_or_skip() as running:
        yield running


@contextlib.contextmanager
def with_store(url: str, alone: Alone) -> Iterator[Troubled]:
    """With prompts in the store, and nowhere else."""
    with troubled(remote=url, remote_timeout_s=TIMEOUT_S) as server:
        come_back(server, alone, "remote")
        server.forget()
        yield server


@pytest.fixture
def shared(valkey: Valkey, alone: Alone) -> Iterator[Troubled]:
    valkey.restart()
    with with_store(valkey.url(), alone) as server:
        yield server


def is_given_up(server: Troubled, alone: Alone) -> None:
    """Requests are answered as if there were no store, and the figures say that there is none."""
    assert ask_as_alone(server, alone, *NUMBERS, *OTHERS) == [0] * 5
    until(lambda: not server.usable("remote"), "the store is fenced off")
    assert server.num_failures("remote") > 0
    with pytest.raises(StoreFailed):
        server.persist()
    server.forget()
    assert ask_as_alone(server, alone, *NUMBERS) == [0, 0, 0]


def test_a_store_that_is_killed_and_comes_back_empty(shared: Troubled, alone: Alone, valkey: Valkey) -> None:
    valkey.kill()
    is_given_up(shared, alone)
    valkey.start()
    come_back(shared, alone, "remote")


def test_a_store_that_is_paused_is_used_again_when_it_goes_on(
    shared: Troubled, alone: Alone, valkey: Valkey
) -> None:
    valkey.pause()
    try:
        is_given_up(shared, alone)
    finally:
        valkey.resume()
    come_back(shared, alone, "remote")


@pytest.mark.parametrize(
    ("trouble", "undo"),
    [(Valkey.kill, Valkey.start), (Valkey.pause, Valkey.resume)],
    ids=["killed", "paused"],
)
def test_a_store_that_goes_and_comes_while_requests_are_served(
    shared: Troubled,
    alone: Alone,
    valkey: Valkey,
    trouble: Callable[[Valkey], None],
    undo: Callable[[Valkey], None],
) -> None:
    alone(*NUMBERS, *OTHERS)
    with ThreadPoolExecutor(1) as asker:
        for turn in range(4):
            asked = asker.submit(ask_as_alone, shared, alone, *NUMBERS, *OTHERS)
            (undo if turn % 2 else trouble)(valkey)
            asked.result(LIMIT_S)
            shared.engine.kv.reset(("device", "host"))
    come_back(shared, alone, "remote")


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    with apart_or_skip() as running:
        yield running


@pytest.mark.parametrize(
    ("cut", "mend"),
    [(Apart.pull_the_cable, Apart.plug_it_in), (Apart.swallow_answers, Apart.let_answers_through)],
    ids=["the link is down", "answers are lost"],
)
def test_a_network_that_is_cut(
    alone: Alone, apart: Apart, cut: Callable[[Apart], None], mend: Callable[[Apart], None]
) -> None:
    with with_store(apart.url, alone) as server:
        cut(apart)
        try:
            is_given_up(server, alone)
        finally:
            mend(apart)
        come_back(server, alone, "remote")

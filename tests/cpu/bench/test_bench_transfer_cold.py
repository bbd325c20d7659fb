"""`bench transfer` behind host memory: what is compared with what, that bytes have arrived, and that nothing
is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench import transfer_cold
from penstock.bench.report import Results
from penstock.bench.transfer import layout_of
from penstock.bench.transfer_cold import TransferShape, measure_remote, measure_ssd
from penstock.cli import main
from penstock.config import Config, ModelSource, OffloadConfig
from penstock.errors import InvariantBroken, StoreFailed
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.ssd.store import SlotIo, SsdStore
from penstock.kv.tiers.store import Outcome
from penstock.kv.transfer import CpuCopier
from penstock.models.progress import silent
from penstock.testing.stores import MemoryStore
from tests.store_servers import valkey_or_skip

SHAPE = TransferShape(
    layout_of(Config(ModelSource("tiny-qwen3", "dummy", "cpu"))), torch.device("cpu"), repeat=2, seed=0
)
REMOTE = OffloadConfig(remote="valkey://elsewhere")


def on_disk(folder: Path, *sizes: int) -> Results:
    return measure_ssd(folder, sizes or (5,), SHAPE, silent)


def test_the_disk_is_measured_both_ways_and_to_the_device_each_beside_raw(tmp_path: Path) -> None:
    results = on_disk(tmp_path, 5, 3)
    assert results.skipped == []
    write, read = "host to ssd", "ssd to host"
    seen = [(row["direction"], row["way"], row["beside"]) for row in results.rows]
    expected = [
        (write, "raw", None),
        (write, "tier", f"{write}, raw"),
        (write, "raw, synced", None),
        (write, "tier, persisted", f"{write}, raw, synced"),
        (read, "raw", None),
        (read, "tier", f"{read}, raw"),
        ("ssd to device", "pipelined", f"{read}, raw"),
    ]
    assert seen == 2 * expected and [row["blocks"] for row in results.rows] == [5] * 7 + [3] * 7
    of = {(row["direction"], row["way"]): row for row in results.rows[:7]}
    for row in of.values():
        assert row["bytes"] == 5 * SHAPE.layout.block_bytes
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["total_ms"]["median"] / 1e6)
        assert len(row["total_ms"]["all"]) == len(row["submit_ms"]["all"]) == 2
    for way, beside in (
        (("ssd to device", "pipelined"), (read, "raw")),
        ((write, "tier, persisted"), (write, "raw, synced")),
    ):
        assert of[way]["percent_of_raw"] == pytest.approx(100 * of[way]["gb_s"] / of[beside]["gb_s"])
    assert not (tmp_path / "raw").exists()


def test_blocks_that_are_no_whole_sectors_and_sizes_that_do_not_fit_are_skipped(tmp_path: Path) -> None:
    odd = SHAPE._replace(layout=BlockLayout(1, 1, 24, 8, "float32"))
    assert "no whole sectors" in measure_ssd(tmp_path, (5,), odd, silent).skipped[0]
    results = on_disk(tmp_path, 1 << 40)
    assert results.rows == [] and "are free" in results.skipped[0]


def _lie(self: Any, run: Any, keys: Any, into: Any) -> list[Outcome]:
    return [Outcome.DONE] * len(run.places)


def test_bytes_that_do_not_come_from_the_disk_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotIo, "read", _lie)
    with pytest.raises(InvariantBroken, match="ssd to host, tier: block 0 is not what was written"):
        on_disk(tmp_path)


def test_bytes_that_do_not_reach_the_device_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuCopier, "copy", lambda self, source, dest, layers: None)
    with pytest.raises(InvariantBroken, match="ssd to device: block 0 is not what was written"):
        on_disk(tmp_path)


def test_a_block_that_is_not_written_ends_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SsdStore.write
    monkeypatch.setattr(SsdStore, "write", lambda self, *asked: [Outcome.FULL, *honest(self, *asked)[1:]])
    with pytest.raises(StoreFailed, match="1 of 5 blocks did not come across"):
        on_disk(tmp_path)


def test_every_run_writes_everything_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there already would be written at any speed."""
    written: list[int] = []
    honest = SsdStore.write
    monkeypatch.setattr(
        SsdStore, "write", lambda self, keys, *rest: written.append(len(keys)) or honest(self, keys, *rest)
    )  # type: ignore[func-returns-value]
    on_disk(tmp_path)
    assert sum(written) == 5 * 2 * (1 + SHAPE.repeat)


def test_a_file_system_without_direct_access_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_cold.os, "O_DIRECT", 0o100000000)  # a flag that no file system has
    honest = transfer_cold.os.open

    def refuse(path: Any, flags: int, *mode: int, **where: int) -> int:
        if flags & 0o100000000:
            raise OSError(22, "Invalid argument")
        return honest(path, flags, *mode, **where)

    monkeypatch.setattr(transfer_cold.os, "open", refuse)
    assert "figures are of memory" in on_disk(tmp_path).skipped[0]


# ----------------------------------------------------------------------------------------------------- stores


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()

    def open_store(url: str, space: Any, timeout_s: float) -> MemoryStore:
        store._space = space.digest
        return store

    monkeypatch.setattr(transfer_cold, "open_store", open_store)
    return store


def test_a_store_is_measured_both_ways_and_left_empty(store: MemoryStore) -> None:
    rows = measure_remote(REMOTE, (5,), SHAPE, silent).rows
    assert [(row["direction"], row["way"]) for row in rows] == [
        ("host to remote", "tier"),
        ("remote to host", "tier"),
    ]
    assert all(row["gb_s"] > 0 and row["percent_of_raw"] is None for row in rows)
    assert store.blocks == {} and store.closed


def test_a_store_that_is_down_is_a_clear_error(store: MemoryStore) -> None:
    store.die()
    with pytest.raises(StoreFailed):
        measure_remote(REMOTE, (5,), SHAPE, silent)


def test_the_command_measures_disk_and_a_real_store_and_shows_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, near = tmp_path / "transfer.json", tmp_path / "disk"
    near.mkdir()
    server = valkey_or_skip(password="sekret")
    try:
        argv = ["--model", "tiny-qwen3", "--device", "cpu", "--blocks", "4", "--layers", "1", "--repeat", "1"]
        tiers = [
            "--kv-offload-ssd-dir",
            str(near),
            "--kv-offload-remote",
            server.url(),
            "--kv-offload-remote-timeout-s",
            "10",
        ]
        assert main(["bench", "transfer", *argv, *tiers, "--json", str(file)]) == 0
        assert server.ask("DBSIZE") == b":0"
    finally:
        server.close()
    shown = capsys.readouterr()
    directions = {row["direction"] for row in json.loads(file.read_text())["results"]}
    assert {"promote", "host to ssd", "ssd to device", "host to remote", "remote to host"} <= directions
    assert "sekret" not in file.read_text() + shown.out + shown.err
    assert list(near.iterdir()) == []


def test_a_time_for_a_store_needs_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--kv-offload-remote-timeout-s", "3"]) == 2
    assert "needs --kv-offload-remote" in capsys.readouterr().err

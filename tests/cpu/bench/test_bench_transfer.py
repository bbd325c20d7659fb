"""`bench transfer`: what is compared with what, that bytes have arrived, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bench.report import Results
from penstock.bench.transfer import TransferBench, dimensions_of, layout_of
from penstock.cli import main
from penstock.config import Config, ModelSource, OffloadConfig
from penstock.errors import InvariantBroken, ModelError, StoreFailed
from penstock.kv.tiers.ssd.store import SlotIo, SsdStore
from penstock.kv.tiers.store import Outcome
from penstock.kv.transfer import CpuCopier
from penstock.models.progress import silent
from penstock.models.qwen3 import TINY_QWEN3
from penstock.testing.stores import MemoryStore
from tests.store_servers import valkey_or_skip

SOURCE = ModelSource("tiny-qwen3", "dummy", "cpu")  # three layers
BLOCK_BYTES = layout_of(Config(SOURCE)).block_bytes
FLAGS = ("--model", "tiny-qwen3", "--device", "cpu", "--blocks", "4", "--repeat", "1")


def measured(blocks: tuple[int, ...] = (5,), layers: tuple[int, ...] = (), **tiers: Any) -> Results:
    config = Config(SOURCE, offload=OffloadConfig(**tiers))
    return TransferBench(blocks, layers, repeat=2, seed=0).measure(config, silent)


def on_disk(folder: Path, *blocks: int) -> list[dict[str, Any]]:
    results = measured(blocks or (5,), ssd_dir=str(folder))
    assert results.skipped == []
    return [row for row in results.rows if "ssd" in row["direction"]]


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Times, rates and bytes agree, and each row is compared with the one that it names, of its own size."""
    for row in rows:
        assert row["bytes"] == row["blocks"] * BLOCK_BYTES * (2 if row["direction"] == "both" else 1)
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["total_ms"]["median"] / 1e6)
        assert len(row["total_ms"]["all"]) == len(row["submit_ms"]["all"]) == 2
        assert row["submit_ms"]["median"] <= row["total_ms"]["median"]
        named = {f"{one['direction']}, {one['way']}": one for one in rows if one["blocks"] == row["blocks"]}
        beside = row if row["beside"] is None else named[row["beside"]]
        assert row["percent_of_raw"] == pytest.approx(100 * row["gb_s"] / beside["gb_s"])


def test_host_memory_is_measured_in_every_direction_whole_and_by_layers_beside_a_raw_copy() -> None:
    results = measured(blocks=(5, 2), layers=(2, 1, 3, 7))
    assert results.skipped == [f"groups of {num} layers: the model has 3" for num in (3, 7)]
    ways = [("raw", None), *(("moved", layers) for layers in (None, 2, 1))]
    sizes = [(direction, blocks) for blocks in (5, 2) for direction in ("promote", "demote", "both")]
    seen = [(row["direction"], row["blocks"], row["way"], row["layers"]) for row in results.rows]
    assert seen == [(*size, *way) for size in sizes for way in ways]
    assert all((row["beside"] is None) == (row["way"] == "raw") for row in results.rows)
    check_rows(results.rows)


@pytest.mark.parametrize("lost", [0, 2])
def test_layers_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    honest = CpuCopier.copy

    def copy(self: CpuCopier, source: Any, dest: Any, layers: tuple[int, int]) -> None:
        first, end = layers
        honest(self, source, dest, (first, min(end, lost) if lost < end else end))

    monkeypatch.setattr(CpuCopier, "copy", copy)
    with pytest.raises(InvariantBroken, match="does not hold what"):
        measured()


def test_what_does_not_fit_is_skipped_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(blocks=(1 << 40, 2))
    assert "are free" in results.skipped[0] and results.skipped[0].startswith(f"{1 << 40} blocks: ")
    assert {row["blocks"] for row in results.rows} == {2}
    monkeypatch.setattr("penstock.bench.transfer.SECTOR_BYTES", BLOCK_BYTES - 1)
    (skipped,) = measured(ssd_dir=str(tmp_path)).skipped
    assert skipped.startswith("5 blocks on disk: ") and "no whole sectors" in skipped


def test_dimensions_come_from_a_name_or_a_directory_and_no_weights_are_read(tmp_path: Path) -> None:
    assert dimensions_of("tiny-qwen3") == ("tiny-qwen3", TINY_QWEN3)
    for name in (str(tmp_path), "no-such-model"):
        with pytest.raises(ModelError, match="built-in name"):
            dimensions_of(name)


# ------------------------------------------------------------------------------------------- disks and stores


def test_the_disk_is_measured_both_ways_and_to_the_device_each_beside_raw(tmp_path: Path) -> None:
    rows = on_disk(tmp_path, 5, 3)
    write, read = "host to ssd", "ssd to host"
    expected = [
        (write, "raw", None),
        (write, "tier", f"{write}, raw"),
        (write, "raw, synced", None),
        (write, "tier, persisted", f"{write}, raw, synced"),
        (read, "raw", None),
        (read, "tier", f"{read}, raw"),
        ("ssd to device", "pipelined", f"{read}, raw"),
    ]
    assert [(row["direction"], row["way"], row["beside"]) for row in rows] == 2 * expected
    assert [row["blocks"] for row in rows] == [5] * 7 + [3] * 7
    check_rows(rows)
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize(
    ("broken", "method", "fake", "said"),
    [
        (
            SlotIo,
            "read",
            lambda self, run, keys, into: [Outcome.DONE] * len(run.places),
            "ssd to host, tier: block 0",
        ),
        (SsdStore, "write", lambda self, keys, *rest: [Outcome.FULL] * len(keys), "5 of 5 blocks did not"),
    ],
)
def test_blocks_that_do_not_reach_or_leave_the_disk_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, method: str, fake: Any, said: str
) -> None:
    monkeypatch.setattr(broken, method, fake)
    with pytest.raises((InvariantBroken, StoreFailed), match=said):
        on_disk(tmp_path)


def test_a_store_is_measured_both_ways_and_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def open_store(url: str, space: Any, timeout_s: float) -> MemoryStore:
        store._space = space.digest
        return store

    monkeypatch.setattr("penstock.kv.build.open_remote", open_store)
    rows = [row for row in measured(remote="valkey://elsewhere").rows if "remote" in row["direction"]]
    assert [(row["direction"], row["way"]) for row in rows] == [
        ("host to remote", "tier"),
        ("remote to host", "tier"),
    ]
    assert all(row["gb_s"] > 0 and row["percent_of_raw"] is None for row in rows)
    assert store.blocks == {} and store.closed
    store.die()
    with pytest.raises(StoreFailed):
        measured(remote="valkey://elsewhere")


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_measures_a_real_store_and_shows_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, server = tmp_path / "transfer.json", valkey_or_skip(password="sekret")
    try:
        store = ["--kv-offload-remote", server.url(), "--kv-offload-remote-timeout-s", "10"]
        assert main(["bench", "transfer", *FLAGS, *store, "--json", str(file)]) == 0
        assert server.ask("DBSIZE") == b":0"
    finally:
        server.close()
    shown = capsys.readouterr()
    assert "remote to host" in shown.out and "sekret" not in file.read_text() + shown.out + shown.err


def test_the_command_refuses_what_would_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--load-format", "auto"], ["--max-batch", "4"], ["--blocks", "0"]):
        assert main(["bench", "transfer", *flags]) == 2
    assert main(["bench", "transfer", "--kv-offload-remote-timeout-s", "3"]) == 2
    assert "needs --kv-offload-remote" in capsys.readouterr().err

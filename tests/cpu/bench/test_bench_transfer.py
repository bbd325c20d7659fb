"""`bench transfer`: what is compared with what, that bytes have arrived, and what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import transfer, transfer_ways
from penstock.bench.transfer import TransferBench, dimensions_of
from penstock.cli import main
from penstock.config import Config, ModelSource
from penstock.errors import ConfigError, InvariantBroken, ModelError
from penstock.kv.transfer import CpuCopier
from penstock.models.progress import silent
from penstock.models.qwen3 import TINY_QWEN3

TINY = Config(ModelSource("tiny-qwen3", "dummy", "cpu"))  # three layers
BLOCK_BYTES = 3 * 2 * 16 * 2 * 32 * 4


def measured(blocks: tuple[int, ...] = (5,), layers: tuple[int, ...] = (1,)) -> transfer.Results:
    return TransferBench(blocks, layers, repeat=2, seed=0).measure(TINY, silent)


def test_every_direction_is_measured_raw_and_in_blocks_whole_and_by_layers() -> None:
    results = measured(blocks=(5, 2), layers=(2, 1))
    assert results.skipped == []
    ways = [("raw", None), *((way, layers) for way in ("blocks", "moved") for layers in (None, 2, 1))]
    sizes = [(direction, blocks) for blocks in (5, 2) for direction in ("promote", "demote", "both")]
    seen = [(row["direction"], row["blocks"], row["way"], row["layers"]) for row in results.rows]
    assert seen == [(*size, *way) for size in sizes for way in ways]
    for row in results.rows:
        assert row["bytes"] == row["blocks"] * BLOCK_BYTES * (2 if row["direction"] == "both" else 1)
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["total_ms"]["median"] / 1e6)
        assert len(row["total_ms"]["all"]) == len(row["submit_ms"]["all"]) == 2
        assert row["submit_ms"]["median"] <= row["total_ms"]["median"]


def test_each_row_is_compared_with_the_raw_copy_of_its_own_size_and_direction() -> None:
    rows = measured(blocks=(5, 2)).rows
    for row in rows:
        (raw,) = [
            one
            for one in rows
            if one["way"] == "raw" and (one["direction"], one["blocks"]) == (row["direction"], row["blocks"])
        ]
        assert row["percent_of_raw"] == pytest.approx(100 * row["gb_s"] / raw["gb_s"])


@pytest.mark.parametrize("lost", [0, 2])
def test_bytes_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    honest = CpuCopier.copy

    def copy(self: CpuCopier, source: Any, dest: Any, layers: tuple[int, int]) -> None:
        first, end = layers
        honest(self, source, dest, (first, min(end, lost) if lost < end else end))

    monkeypatch.setattr(CpuCopier, "copy", copy)
    with pytest.raises(InvariantBroken, match="does not hold what"):
        measured(layers=())


def test_a_copy_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the link fell over")

    monkeypatch.setattr(CpuCopier, "copy", fail)
    with pytest.raises(RuntimeError, match="the link fell over"):
        measured()


def test_memory_that_cannot_be_pinned_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.kv.memory.HostArena.prepare", lambda self, ready, progress, stop: ready(range(3))
    )
    with pytest.raises(ConfigError, match="lower --blocks"):
        measured()


def test_the_two_directions_share_no_slot() -> None:
    with transfer_ways.HostRig(transfer.layout_of(TINY), 20, transfer.torch.device("cpu"), 0) as rig:
        promoted, demoted = (
            rig.slots(direction, 20) for direction in (transfer_ways.PROMOTE, transfer_ways.DEMOTE)
        )
        for one, other in ((promoted[0], demoted[1]), (promoted[1], demoted[0])):
            assert len({*one.tolist(), *other.tolist()}) == 40


def test_sizes_that_do_not_fit_and_groups_that_do_not_exist_are_skipped_with_a_reason() -> None:
    results = measured(blocks=(1 << 40, 2), layers=(3, 7))
    assert "are free" in results.skipped[0] and results.skipped[0].startswith(f"{1 << 40} blocks: ")
    assert results.skipped[1:] == [
        "groups of 3 layers: the model has 3",
        "groups of 7 layers: the model has 3",
    ]
    assert {row["blocks"] for row in results.rows} == {2} and {row["layers"] for row in results.rows} == {
        None
    }


def test_dimensions_come_from_a_name_or_a_directory_and_no_weights_are_read(tmp_path: Path) -> None:
    assert dimensions_of("tiny-qwen3") == ("tiny-qwen3", TINY_QWEN3)
    with pytest.raises(ModelError, match="built-in name"):
        dimensions_of(str(tmp_path))
    with pytest.raises(ModelError, match="built-in name"):
        dimensions_of("no-such-model")


def test_the_command_needs_no_engine_and_writes_table_file_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "penstock.commands.bench.load_engine", lambda config: pytest.fail("an engine was loaded")
    )
    file, picture = tmp_path / "transfer.json", tmp_path / "transfer.png"
    argv = [
        "--model",
        "tiny-qwen3",
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--blocks",
        "4",
        "--layers",
        "1,9",
        "--repeat",
        "1",
    ]
    assert main(["bench", "transfer", *argv, "--json", str(file), "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    report = json.loads(file.read_text())
    assert (report["bench"], report["model"], report["device"]) == ("transfer", "tiny-qwen3", "cpu")
    assert report["settings"] == {"blocks": [4], "layers": [1, 9], "repeat": 1, "seed": 0}
    assert f"{report['results'][0]['gb_s']:.2f}" in shown.out and "% of raw" in shown.out
    assert "groups of 9 layers" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_what_would_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--load-format", "auto"], ["--max-batch", "4"], ["--blocks", "0"]):
        assert main(["bench", "transfer", *flags]) == 2
    assert "penstock: error" in capsys.readouterr().err

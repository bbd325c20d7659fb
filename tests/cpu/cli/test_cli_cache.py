"""`penstock cache` on directories that real engines have written: what it says, what it finds, what it
removes. And the flags that fill such a directory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.kv.tiers.ssd.directory import DiskIo, make_directory
from penstock.kv.tiers.ssd.store import open_ssd
from penstock.kv.tiers.ssd.survey import inspect

PROMPT = "to be or not to be, that is the question"  # 40 tokens of a byte each: two full blocks
SECTOR = 4096


@pytest.fixture
def generate(penstock, tiny, tmp_path, monkeypatch):
    """One answer by an engine with a disk, which is closed in the end."""

    def open_and_scan(*arguments):
        """What lies in the directory is found before the first request, not beside it."""
        store = open_ssd(*arguments)
        assert store.wait_scanned(60.0)
        return store

    monkeypatch.setattr("penstock.kv.build.open_ssd", open_and_scan)

    def run(*flags: str):
        disk = ("--kv-offload-ssd-dir", str(tmp_path / "kv"), "--kv-offload-ssd-gib", "0.01")
        flags = (*tiny, "--kv-offload-host-gib", "0.01", *disk, *flags)
        ran = penstock("generate --raw --max-tokens 1 --ignore-eos", PROMPT, *flags)
        assert ran.code == 0, ran.err
        return ran

    return run


@pytest.fixture
def cached(generate, tmp_path):
    """A directory with two blocks, and a file that is none of ours."""
    generate()
    folder = tmp_path / "kv"
    assert inspect(folder).num_blocks == 2
    (folder / "notes.txt").write_text("mine")
    return folder


@pytest.fixture
def look(penstock, tmp_path):
    """What `cache` returns and prints, and what it writes into its file."""

    def run(action, folder: Path):
        file = tmp_path / "found.json"
        ran = penstock(f"cache {action} --json {file} --kv-offload-ssd-dir {folder}")
        return ran, json.loads(file.read_text())

    return run


def cells(text: str) -> dict[str, str]:
    """First column to second, of every row of a table."""
    rows = [found for line in text.splitlines() if len(found := re.split(r" {2,}", line.strip())) > 1]
    return {row[0]: row[1] for row in rows}


def spoil(folder: Path, offset) -> None:
    """Flip a bit of the first segment's first slot; `offset` from its head."""
    with min(folder.glob("*.kv")).open("r+b") as file:
        file.seek(SECTOR + offset)
        byte = file.read(1)[0]
        file.seek(SECTOR + offset)
        file.write(bytes([byte ^ 1]))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.kv")}


# ---------------------------------------------------------------------------------------- filled by the flags


def test_what_one_process_has_computed_the_next_reads_from_disk(generate, tmp_path):
    first = generate()
    assert "from disk" not in first.err
    again = generate("--json", str(tmp_path / "answer.json"))
    assert again.out == first.out and "32 from disk" in again.err
    assert json.loads((tmp_path / "answer.json").read_text())["kv_source"]["ssd"] == 32


def test_a_directory_in_use_or_open_to_others_is_refused_by_every_command(cached, penstock, tiny):
    before = contents(cached)

    def refused(said: str) -> None:
        lines = (f"generate x {' '.join(tiny)}", "cache inspect", "cache verify", "cache clear --yes")
        for line in lines:
            ran = penstock(f"{line} --kv-offload-ssd-dir {cached}")
            assert (ran.code, ran.out) == (2, "") and said in ran.err

    with contextlib.closing(make_directory(cached, DiskIo())):
        refused(f"in use by process {os.getpid()}")
    cached.chmod(0o777)
    refused(f"chmod go-w {cached}")
    assert contents(cached) == before
    cached.chmod(0o700)
    assert inspect(cached).num_blocks == 2


# -------------------------------------------------------------------------------------------- inspect, verify


def test_inspect_says_what_is_there_and_changes_nothing(cached, look):
    before = contents(cached)
    ran, written = look("inspect", cached)
    assert (ran.code, ran.err) == (0, "")
    found = cells(ran.out)
    assert (found["files"], found["blocks"], found["damaged files"]) == ("1", "2", "0")
    assert "whole blocks" not in found
    assert (written["action"], written["num_blocks"], written["num_good"]) == ("inspect", 2, None)
    (digest,) = written["spaces"]
    assert found[digest[:12]] == "2"
    assert contents(cached) == before


def test_verify_reads_every_block_and_is_content(cached, look):
    ran, _ = look("verify", cached)
    assert ran.code == 0 and "nothing is damaged" in ran.out
    assert (cells(ran.out)["whole blocks"], cells(ran.out)["torn blocks"]) == ("2", "0")


@pytest.mark.parametrize(("offset", "what"), [(SECTOR + 100, "torn blocks"), (20, "damaged heads")])
def test_verify_finds_one_flipped_bit_and_the_next_engine_computes_that_block(
    cached, look, generate, offset, what
):
    spoil(cached, offset)
    ran, written = look("verify", cached)
    assert ran.code == 1 and ran.out.count("damaged: penstock-") == 1
    assert (cells(ran.out)[what], cells(ran.out)["whole blocks"]) == ("1", "1")
    assert len(written["torn"]) + len(written["corrupt"]) == 1 and written["num_good"] == 1
    assert "32 from disk" not in generate().err
    assert "32 from disk" in generate().err, "it was written anew"


# ------------------------------------------------------------------------------------------------------ clear


@pytest.mark.parametrize(
    ("typed", "cleared"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_clear_asks_on_a_terminal(cached, penstock, monkeypatch, typed, cleared):
    terminal = io.StringIO(typed)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    ran = penstock(f"cache clear --kv-offload-ssd-dir {cached}")
    assert "with 2 blocks from" in ran.err and "[y/N]" in ran.err
    assert ran.code == (0 if cleared else 1)
    assert ("removed 1 file of" if cleared else "nothing was removed") in ran.out
    assert bool(contents(cached)) is not cleared
    assert (cached / "notes.txt").read_text() == "mine"


def test_clear_removes_nothing_where_nobody_can_be_asked(cached, penstock, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    ran = penstock(f"cache clear --kv-offload-ssd-dir {cached}")
    assert ran.code == 2 and "--yes" in ran.err and contents(cached)


def test_a_cleared_directory_is_empty_and_can_be_used_again(cached, look, generate):
    ran, found = look("clear --yes", cached)
    assert ran.code == 0 and found["num_segments"] == 1
    assert cells(look("inspect", cached)[0].out)["blocks"] == "0"
    assert "from disk" not in generate().err
    assert "32 from disk" in generate().err


@pytest.mark.parametrize("action", ["inspect", "verify", "clear --yes"])
def test_a_directory_that_is_no_cache_is_left_alone(penstock, tmp_path, action):
    (tmp_path / "thesis.kv").write_text("years of work")
    ran = penstock(f"cache {action} --kv-offload-ssd-dir {tmp_path}")
    assert ran.code == 2 and "is not an SSD cache directory" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.kv"]
    missing = penstock(f"cache {action} --kv-offload-ssd-dir {tmp_path / 'none'}")
    assert missing.code == 2 and "does not exist" in missing.err and not (tmp_path / "none").exists()


def test_looking_into_a_directory_needs_no_torch(cached):
    script = "import sys; from penstock.cli import main; code = main(); print('torch' in sys.modules, code)"
    argv = [sys.executable, "-c", script, "cache", "verify", "--kv-offload-ssd-dir", str(cached)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"


# -------------------------------------------------------------------------------------------------- snapshots


@pytest.fixture
def snapshots(tmp_path):
    """A directory with two snapshots, taken by a real engine."""
    folder, prompt = tmp_path / "snapshots", list(range(40))
    sizes = {"device_kv_blocks": 64, "kv_offload_ssd_gib": 0.01, "kv_offload_host_gib": 0.01}
    model = {"load_format": "dummy", "device": "cpu", "kv_offload_ssd_dir": folder}
    with LLM("tiny-llama", show_progress=False, **model, **sizes) as llm:
        llm.generate(prompt, SamplingParams(max_tokens=1))
        llm.take_snapshot(prompt, "first")
        llm.take_snapshot(prompt, "second", tokens=16, ttl_s=3600)
    return folder


def test_snapshots_are_listed_and_counted(snapshots, look):
    ran, written = look("inspect", snapshots)
    assert ran.code == 0 and cells(ran.out)["snapshots"] == "2"
    assert {"first", "second"} <= set(cells(ran.out)) and "never" in ran.out
    found = {one["name"]: one for one in written["snapshots"]}
    counts = [[one[f"num_{what}"] for what in ("tokens", "blocks", "found")] for one in found.values()]
    assert sorted(counts) == [[16, 1, 1], [40, 2, 2]] and found["second"]["expires_s"] > 1e9
    assert look("verify", snapshots)[0].code == 0


def test_a_damaged_snapshot_is_named_with_the_reason(snapshots, look):
    first, second = sorted(snapshots.glob("*.snapshot"))
    first.write_bytes(first.read_bytes()[:50])
    second.rename(second.with_name(f"penstock-{'f' * 32}-{'f' * 32}.snapshot"))
    ran, _ = look("verify", snapshots)
    flat = " ".join(ran.out.split())
    assert ran.code == 1 and f"{first.name}: the manifest is truncated" in flat
    assert "another snapshot's name" in flat


def test_clear_takes_snapshots_along(snapshots, look):
    (snapshots / f"penstock-{'a' * 32}-{'b' * 32}.new").write_bytes(b"begun")
    ran, _ = look("clear --yes", snapshots)
    assert ran.code == 0 and " and 3 snapshots of " in ran.out
    assert [path.name for path in snapshots.iterdir()] == ["lock"]

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.commands import cache
from penstock.kv.tiers.ssd.directory import make_directory
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.ssd.survey import inspect

PROMPT = "to be or not to be, that is the question"  # 40 tokens of a byte each: two full blocks
SECTOR = 4096


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def open_and_scan(*arguments: Any) -> SsdStore:
    """What lies in the directory is found before the first request, not beside it."""
    store = open_ssd(*arguments)
    assert store.wait_scanned(60.0)
    return store


@pytest.fixture
def generate(
    penstock: Callable, tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable:
    """One answer by an engine with a disk, which is closed in the end."""
    monkeypatch.setattr("penstock.kv.build.open_ssd", open_and_scan)

    def run(*flags: str):
        disk = ("--kv-offload-ssd-dir", str(tmp_path / "kv"), "--kv-offload-ssd-gib", "0.01")
        ran = penstock(
            "generate",
            PROMPT,
            "--raw",
            "--max-tokens",
            "1",
            "--ignore-eos",
            *tiny,
            "--kv-offload-host-gib",
            "0.01",
            *disk,
            *flags,
        )
        assert ran.code == 0, ran.err
        return ran

    return run


@pytest.fixture
def cached(generate: Callable, tmp_path: Path) -> Path:
    """A directory with two blocks, and a file that is none of ours."""
    generate()
    folder = tmp_path / "kv"
    assert inspect(folder).num_blocks == 2
    (folder / "notes.txt").write_text("mine")
    return folder


def cells(text: str) -> dict[str, str]:
    """First column to second, of every row of a table."""
    rows = [found for line in text.splitlines() if len(found := re.split(r" {2,}", line.strip())) > 1]
    return {row[0]: row[1] for row in rows}


def spoil(folder: Path, offset: int) -> None:
    """Flip a bit of the first segment's first slot; `offset` from its head."""
    path = min(folder.glob("*.kv"))
    with path.open("r+b") as file:
        file.seek(SECTOR + offset)
        byte = file.read(1)[0]
        file.seek(SECTOR + offset)
        file.write(bytes([byte ^ 1]))


# ---------------------------------------------------------------------------------------- filled by the flags


def test_what_one_process_has_computed_the_next_reads_from_disk(generate: Callable, tmp_path: Path) -> None:
    first = generate()
    assert "from disk" not in first.err
    again = generate("--json", str(tmp_path / "answer.json"))
    assert again.out == first.out and "32 from disk" in again.err
    assert json.loads((tmp_path / "answer.json").read_text())["kv_source"]["ssd"] == 32


def test_a_directory_that_is_in_use_is_refused(
    cached: Path, penstock: Callable, tiny: tuple[str, ...]
) -> None:
    with contextlib.closing(make_directory(cached)):
        for argv in (
            ("generate", "x", *tiny),
            ("cache", "inspect"),
            ("cache", "verify"),
            ("cache", "clear", "--yes"),
        ):
            ran = penstock(*argv, "--kv-offload-ssd-dir", str(cached))
            assert ran.code == 2 and f"in use by process {os.getpid()}" in ran.err
    assert inspect(cached).num_blocks == 2


# -------------------------------------------------------------------------------------------- inspect, verify


def test_inspect_says_what_is_there_and_changes_nothing(
    cached: Path, penstock: Callable, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in cached.glob("*.kv")}
    ran = penstock(
        "cache", "inspect", "--kv-offload-ssd-dir", str(cached), "--json", str(tmp_path / "found.json")
    )
    assert (ran.code, ran.err) == (0, "")
    found = cells(ran.out)
    assert (found["files"], found["blocks"], found["damaged files"]) == ("1", "2", "0") and (
        "whole blocks"
    ) not in found
    written = json.loads((tmp_path / "found.json").read_text())
    assert (written["action"], written["num_blocks"], written["num_good"]) == ("inspect", 2, None)
    (digest,) = written["spaces"]
    assert found[digest[:12]] == "2"
    assert {path.name: path.read_bytes() for path in cached.glob("*.kv")} == before


@pytest.mark.parametrize("action", ["inspect", "verify", "clear"])
def test_each_says_how_far_it_is(
    cached: Path, penstock: Callable, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr("penstock.progress.ProgressBar.__call__", lambda bar, *said: told.append(said))
    flags = ("--yes",) if action == "clear" else ()
    assert penstock("cache", action, "--kv-offload-ssd-dir", str(cached), *flags).code == 0
    assert told and all(stage == action and done <= total for stage, done, total in told)
    assert told[-1][1] == told[-1][2] > 0


def test_verify_reads_every_block_and_is_content(cached: Path, penstock: Callable) -> None:
    ran = penstock("cache", "verify", "--kv-offload-ssd-dir", str(cached))
    assert ran.code == 0 and "nothing is damaged" in ran.out
    assert (cells(ran.out)["whole blocks"], cells(ran.out)["torn blocks"]) == ("2", "0")


@pytest.mark.parametrize(("offset", "what"), [(SECTOR + 100, "torn blocks"), (20, "damaged heads")])
def test_verify_finds_one_flipped_bit_and_says_so_with_its_exit_code(
    cached: Path, penstock: Callable, tmp_path: Path, offset: int, what: str
) -> None:
    spoil(cached, offset)
    ran = penstock(
        "cache", "verify", "--kv-offload-ssd-dir", str(cached), "--json", str(tmp_path / "found.json")
    )
    assert ran.code == 1 and ran.out.count("damaged: penstock-") == 1
    assert (cells(ran.out)[what], cells(ran.out)["whole blocks"]) == ("1", "1")
    written = json.loads((tmp_path / "found.json").read_text())
    assert len(written["torn"]) + len(written["corrupt"]) == 1 and written["num_good"] == 1


def test_of_much_damage_the_first_lines_are_shown_and_all_are_kept(
    cached: Path, penstock: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.commands.cache.MOST_LINES", 1)
    slot_bytes = min(cached.glob("*.kv")).stat().st_size // inspect(cached).num_slots // SECTOR * SECTOR
    for slot in range(2):
        spoil(cached, slot * slot_bytes + SECTOR)
    ran = penstock(
        "cache", "verify", "--kv-offload-ssd-dir", str(cached), "--json", str(tmp_path / "found.json")
    )
    assert ran.out.count("damaged: ") == 1 and "and 1 more; --json FILE keeps all of them" in ran.out
    assert len(json.loads((tmp_path / "found.json").read_text())["torn"]) == 2


def test_a_damaged_block_is_computed_by_the_next_engine(cached: Path, generate: Callable) -> None:
    spoil(cached, SECTOR + 100)
    assert "32 from disk" not in generate().err
    assert "32 from disk" in generate().err, "it was written anew"


# ------------------------------------------------------------------------------------------------------ clear


@pytest.mark.parametrize(
    ("typed", "cleared"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_clear_asks_on_a_terminal(
    cached: Path, penstock: Callable, monkeypatch: pytest.MonkeyPatch, typed: str, cleared: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    ran = penstock("cache", "clear", "--kv-offload-ssd-dir", str(cached))
    assert "with 2 blocks from" in ran.err and "[y/N]" in ran.err
    assert (
        ran.code == (0 if cleared else 1)
        and ("removed 1 file" if cleared else "nothing was removed") in ran.out
    )
    assert bool(list(cached.glob("*.kv"))) is not cleared
    assert (cached / "notes.txt").read_text() == "mine"


def test_clear_removes_nothing_where_nobody_can_be_asked(
    cached: Path, penstock: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    ran = penstock("cache", "clear", "--kv-offload-ssd-dir", str(cached))
    assert ran.code == 2 and "--yes" in ran.err
    assert list(cached.glob("*.kv"))


def test_a_cleared_directory_is_empty_and_can_be_used_again(
    cached: Path, penstock: Callable, generate: Callable, tmp_path: Path
) -> None:
    ran = penstock(
        "cache", "clear", "--kv-offload-ssd-dir", str(cached), "--yes", "--json", str(tmp_path / "found.json")
    )
    assert ran.code == 0 and json.loads((tmp_path / "found.json").read_text())["num_segments"] == 1
    assert cells(penstock("cache", "inspect", "--kv-offload-ssd-dir", str(cached)).out)["blocks"] == "0"
    assert "from disk" not in generate().err
    assert "32 from disk" in generate().err


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("action", ["inspect", "verify", "clear"])
def test_a_directory_that_is_no_cache_is_left_alone(penstock: Callable, tmp_path: Path, action: str) -> None:
    (tmp_path / "thesis.kv").write_text("years of work")
    flags = ("--yes",) if action == "clear" else ()
    ran = penstock("cache", action, "--kv-offload-ssd-dir", str(tmp_path), *flags)
    assert ran.code == 2 and "is not an SSD cache directory" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.kv"]
    missing = penstock("cache", action, "--kv-offload-ssd-dir", str(tmp_path / "none"), *flags)
    assert missing.code == 2 and "does not exist" in missing.err and not (tmp_path / "none").exists()


def test_a_directory_that_others_may_write_is_refused_by_every_command(
    cached: Path, penstock: Callable, tiny: tuple[str, ...]
) -> None:
    before = {path.name: path.read_bytes() for path in cached.iterdir()}
    cached.chmod(0o777)
    for argv in (
        ("generate", "x", *tiny),
        ("cache", "inspect"),
        ("cache", "verify"),
        ("cache", "clear", "--yes"),
    ):
        ran = penstock(*argv, "--kv-offload-ssd-dir", str(cached))
        assert (ran.code, ran.out) == (2, "") and f"chmod go-w {cached}" in ran.err and "mode 0777" in ran.err
    assert {path.name: path.read_bytes() for path in cached.iterdir()} == before
    cached.chmod(0o700)
    assert inspect(cached).num_blocks == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("cache", "prune"), "prune"),
        (("cache", "inspect"), "--kv-offload-ssd-dir"),
        (("cache", "inspect", "--yes", "--kv-offload-ssd-dir", "x"), "--yes"),
        (("cache", "verify", "--kv-offload-ssd-dir", "x", "--json", "/no/such/folder/x"), "--json"),
        (("cache", "inspect", "--kv-offload-ssd-dir", ""), "--kv-offload-ssd-dir"),
    ],
)
def test_wrong_arguments_are_refused_by_name(penstock: Callable, argv: tuple[str, ...], named: str) -> None:
    ran = penstock(*argv)
    assert (ran.code, ran.out) == (2, "") and named in ran.err and ran.err.count("\n") == 1


def test_looking_into_a_directory_needs_no_torch(cached: Path) -> None:
    script = (
        "import sys; from penstock.cli import main; code = main(sys.argv[1:]); print('torch' in "
        "sys.modules, code)"
    )
    argv = [sys.executable, "-c", script, "cache", "verify", "--kv-offload-ssd-dir", str(cached)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"


@pytest.mark.parametrize(
    ("nanoseconds", "said"),
    [
        (0, "1970-01-01 00:00"),
        (1_700_000_000 * 10**9, "2023-11-14 22:13"),
        (2**63, "2262-04-11 23:47"),
        (2**80, "?"),
    ],
)
def test_times_are_those_of_the_clock_that_wrote_them(nanoseconds: int, said: str) -> None:
    assert cache._time(nanoseconds) == said


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        ((1 << 30) - 1, "1024.0 MiB"),
        (3 << 29, "1.5 GiB"),
    ],
)
def test_sizes_have_the_largest_unit_that_they_reach(num_bytes: int, said: str) -> None:
    assert cache._size(num_bytes) == said


# -------------------------------------------------------------------------------------------------- snapshots


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    """A directory with two snapshots, taken by a real engine."""
    folder, prompt = tmp_path / "snapshots", list(range(40))
    options: dict[str, Any] = {
        "kv_offload_ssd_dir": str(folder),
        "kv_offload_ssd_gib": 0.01,
        "kv_offload_host_gib": 0.01,
    }
    with LLM(
        "tiny-llama", load_format="dummy", device="cpu", device_kv_blocks=64, show_progress=False, **options
    ) as llm:
        llm.generate(prompt, SamplingParams(max_tokens=1))
        llm.take_snapshot(prompt, "first")
        llm.take_snapshot(prompt, "second", tokens=16, ttl_s=3600)
    return folder


def test_snapshots_are_listed_and_counted(snapshots: Path, penstock: Callable, tmp_path: Path) -> None:
    ran = penstock(
        "cache", "inspect", "--kv-offload-ssd-dir", str(snapshots), "--json", str(tmp_path / "found.json")
    )
    assert ran.code == 0 and cells(ran.out)["snapshots"] == "2"
    assert {"first", "second"} <= set(cells(ran.out)) and "never" in ran.out
    found = {one["name"]: one for one in json.loads((tmp_path / "found.json").read_text())["snapshots"]}
    assert (found["first"]["num_tokens"], found["first"]["num_blocks"], found["first"]["num_found"]) == (
        40,
        2,
        2,
    )
    assert (
        found["second"]["num_tokens"],
        found["second"]["num_blocks"],
        found["second"]["expires_s"] > 1e9,
    ) == (16, 1, True)
    assert penstock("cache", "verify", "--kv-offload-ssd-dir", str(snapshots)).code == 0


def test_a_damaged_snapshot_is_named_with_the_reason(snapshots: Path, penstock: Callable) -> None:
    first, second = sorted(snapshots.glob("*.snapshot"))
    first.write_bytes(first.read_bytes()[:50])
    second.rename(second.with_name(f"penstock-{'f' * 32}-{'f' * 32}.snapshot"))
    ran = penstock("cache", "verify", "--kv-offload-ssd-dir", str(snapshots))
    flat = " ".join(ran.out.split())
    assert (
        ran.code == 1
        and (f"{first.name}: the manifest is truncated") in flat
        and "another snapshot's name" in flat
    )


def test_clear_takes_snapshots_along(snapshots: Path, penstock: Callable) -> None:
    (snapshots / f"penstock-{'a' * 32}-{'b' * 32}.new").write_bytes(b"begun")
    ran = penstock("cache", "clear", "--kv-offload-ssd-dir", str(snapshots), "--yes")
    assert ran.code == 0 and "3 snapshots" in ran.out
    assert [path.name for path in snapshots.iterdir()] == ["lock"]

"""tools/trace_request.py: it runs, its figures agree with each other, and each of the three requests passes
what only it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "penstock"
TOTALS = re.compile(r"(\w+) +(\d+) files +(\d+) functions +(\d+) calls +(\d+) changes of file")
OF_FILE = re.compile(r" +(\S+\.py) +(\d+) functions +(\d+) calls")


def folders(files: Iterable[str]) -> set[str]:
    return {str(folder) for name in files for folder in Path(name).parents}


def test_each_kind_of_request_is_traced_from_its_first_byte_to_its_last() -> None:
    command = [sys.executable, str(ROOT / "tools" / "trace_request.py"), "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    totals: dict[str, list[int]] = {}
    files: dict[str, dict[str, list[int]]] = {}
    for line in done.stdout.splitlines():
        if found := TOTALS.fullmatch(line):
            totals[found[1]], files[found[1]] = [int(figure) for figure in found.groups()[1:]], {}
        elif found := OF_FILE.fullmatch(line):
            files[list(files)[-1]][found[1]] = [int(found[2]), int(found[3])]
    assert list(totals) == ["computed", "host", "ssd"], done.stdout
    for place, (num_files, num_functions, num_calls, num_changes) in totals.items():
        passed = files[place]
        assert all((PACKAGE / name).exists() for name in passed)
        assert [len(passed), *map(sum, zip(*passed.values(), strict=True))] == [
            num_files,
            num_functions,
            num_calls,
        ]
        assert 20 < num_files < num_functions < num_calls and num_files <= num_changes < num_calls
        assert next(iter(passed)) == "server/connection.py", "it begins where a request is read"
        assert {"server", "engine", "kv", "lanes", "models"} <= folders(passed), "all its threads count"
        assert not {"engine/build.py", "engine/execution/warm.py"} & set(passed), "starting up does not count"
    assert "kv/tiers/ssd" in folders(files["ssd"]) and "kv/tiers/ssd" not in folders(files["host"])

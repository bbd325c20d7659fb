"""Puts one fault at a time into a copy of the tree and runs tests there: which faults survive? Owns the
copies and the runs; `faults.py` says what a fault is.

    python tools/mutants.py [--num N] [--seed N] random edits, with tests that mirror or import the module
    python tools/mutants.py --kept [TEXT]        the faults of `faults.toml`, with the tests that they name

Exits with 1 where a kept fault survives, or where the tests of the kept faults fail without any.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from faults import Edit, Fault, draw, read_faults

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 240.0
MAX_FILES = 10  # of tests for one random edit


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run: the tests that failed, each with the reports of sanitizers meanwhile."""

    failures: list[dict[str, Any]]
    output: str
    timed_out: bool = False

    def found_by(self, *, report: bool = False) -> str:
        """In words; empty: the fault survives."""
        counted = [failure for failure in self.failures if failure["reports"] or not report]
        if counted:
            first = counted[0]
            kinds = ", ".join(sorted({said.partition(":")[0] for said in first["reports"]}))
            return f"sanitizer ({kinds}) in {first['test']}" if kinds else str(first["test"])
        return "time-out" if self.timed_out and not report else ""


def copied(root: Path, to: Path) -> Path:
    unneeded = shutil.ignore_patterns(".*", "__pycache__", "bench_results")
    shutil.copytree(root, to, ignore=unneeded)
    if (root / ".venv").exists():
        (to / ".venv").symlink_to((root / ".venv").resolve())
    return to


def run(fault: Fault | Edit | None, tests: Sequence[str], root: Path, limit_s: float = TIMEOUT_S) -> Outcome:
    """`tests` in a copy of the tree with `fault` (None: as it is)."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = copied(root, Path(name) / "tree")
        if fault is not None:
            file = copy / fault.file
            tree = ast.parse(file.read_text())
            fault.change(tree)
            file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        return _pytest(copy, tests, isinstance(fault, Fault) and fault.report, limit_s)


def _pytest(copy: Path, tests: Sequence[str], report: bool, limit_s: float) -> Outcome:
    record = copy / "record.json"
    own = {"MUTANT_RECORD": str(record), "MUTANT_NEEDS_REPORT": "1" if report else ""}
    paths = {"PYTHONPATH": str(ROOT / "tools"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    options = {"cwd": copy, "env": {**os.environ, **own, **paths, **threads}, "start_new_session": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutant_watch", *tests]
    process: subprocess.Popen[str] = subprocess.Popen(command, **options, **pipes)  # type: ignore[call-overload]
    try:
        output, timed_out = process.communicate(timeout=limit_s)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, timed_out = process.communicate()[0], True
    failures = json.loads(record.read_text()) if record.exists() else []
    if not failures and not timed_out and process.returncode:  # it cannot even be imported
        failures = [{"test": "the collection", "reports": []}]
    return Outcome(failures, output, timed_out)


def tests_of(file: str, root: Path) -> list[str]:
    """Files with the module's name in theirs, then those that import it; pure ones first, then short ones."""
    path = Path(file)
    stem = (path.parent.name if path.stem == "__init__" else path.stem).lstrip("_")
    module = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"^ *((from|import) {module}\b|from {package} import .*\b{name}\b)", re.MULTILINE)
    ranked = []
    for place, folder in enumerate(("pure", "cpu", "e2e")):
        for test in sorted((root / "tests" / folder).rglob("test_*.py")):
            mirrors = re.fullmatch(rf"test_(.*_)?{stem}(_.*)?", test.stem) is not None
            text = test.read_text()
            if mirrors or imports.search(text):
                ranked.append((not mirrors, place, len(text), str(test.relative_to(root))))
    return [test for *_, test in sorted(ranked)[:MAX_FILES]] or ["tests/cpu/engine/test_engine.py"]


def run_kept(chosen: Sequence[Fault], root: Path, jobs: int) -> int:
    tests = sorted({test for fault in chosen for test in fault.tests})
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        baseline = pool.submit(run, None, tests, root, TIMEOUT_S + 10.0 * len(tests))
        runs = [(fault, pool.submit(run, fault, fault.tests, root)) for fault in chosen]
        if baseline.result().found_by():
            pool.shutdown(cancel_futures=True)
            print(f"{baseline.result().output}\nthe tests fail without any fault")
            return 1
        for fault, future in runs:
            how = future.result().found_by(report=fault.report)
            survivors += not how
            print(f"{fault}  {how or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} found")
    return 1 if survivors else 0


def run_random(num: int, seed: int, root: Path, jobs: int) -> int:
    print(f"{num} edits of seed {seed}", flush=True)
    survivors = []
    with ThreadPoolExecutor(jobs) as pool:
        drawn = [(edit, tests_of(edit.file, root)) for edit in draw(root, num, seed)]
        runs = [(edit, tests, pool.submit(run, edit, tests, root)) for edit, tests in drawn]
        for edit, tests, future in runs:
            how = future.result().found_by()
            print(f"{edit}  {how or f'SURVIVES {len(tests)} files of tests'}", flush=True)
            if not how:
                survivors.append(edit)
    print("\n".join([f"{num - len(survivors)} of {num} found; survivors:", *map(str, survivors)]))
    return 0


def main(arguments: Sequence[str]) -> int:
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    parser.add_argument("--num", type=int, default=20, help="random edits")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="of the random edits")
    parser.add_argument("--kept", nargs="?", const="", metavar="TEXT", help="kept faults with this in them")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at once")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        root = copied(ROOT, Path(name) / "tree")  # what is edited meanwhile does not count
        if options.kept is None:
            return run_random(options.num, options.seed, root, options.jobs)
        kept = [fault for fault in read_faults(ROOT / "tools" / "faults.toml") if options.kept in str(fault)]
        if not kept:
            parser.error(f"no kept fault has {options.kept!r} in it")
        return run_kept(kept, root, options.jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Small faults in the product's own source, put into a copy one at a time: which check finds each? Owns the run and the table of results;
the faults are in `tools/mutants/*.toml`, one file per kind.

    python tools/mutants.py [--only TEXT | --new] [--jobs N]

A fault of order or lifetime, or a wait too many of the engine thread, has to be found by the sanitizer, any other by a test. Exits with 1
where one is not, or where the tests that are to find them fail, or let a sanitizer report, without any fault.
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
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = "docs/mutants.md"
KINDS = {
    "order": "An access that comes too early",
    "lifetime": "Bytes that are given back, published or forgotten at the wrong moment",
    "stall": "A wait of the engine thread where it may not wait",
    "undeclared": "An access that is not declared",
    "accounting": "Promises and counts that do not add up",
    "identity": "Bytes under a key that is not theirs",
    "failure": "What becomes of an error",
    "limits": "One client against the others",
    "answer": "An answer, a figure or a limit that is wrong",
    "front-processes": "Processes of one server that end, stall or disagree",
}
WATCHED = ("order", "lifetime", "stall")  # kinds that the sanitizer has to find
TIMEOUT_S = 240.0  # for one fault, on a machine that does other things besides,
TEST_S = 5.0  # and for each test that is run without a fault: all of them together take a quarter of an hour
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")
_SCHEDULE = re.compile(r"schedule \{\d")  # of a sequencer, other than the default one
_SAID_BY_A_TEST = {"AssertionError": "test", "Failed": "test"}  # any other exception is the product's own


class DoesNotApply(Exception):
    """The text that a fault changes is not there exactly once, or what comes out is no Python."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault. `name` completes "in this copy ..."; `stands_for` is a source (S0 to S4) or a failure that others met."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    stands_for: str
    tests: tuple[str, ...]
    unwatched: str = ""  # why the sanitizer cannot see it, where it would have to

    @property
    def needs_report(self) -> bool:
        return self.kind in WATCHED and not self.unwatched

    def applied(self, source: str) -> str:
        """`source` with the fault."""
        if (num := source.count(self.old)) != 1:
            raise DoesNotApply(f"{self.name}: {self.file} has its text {num} times")
        changed = source.replace(self.old, self.new)
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise DoesNotApply(f"{self.name}: what comes out is no Python: {error}") from None
        return changed


@dataclass(slots=True)
class Outcome:
    """What became of one run of tests."""

    record: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def failures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.record.get("failures", [])
        return found

    def caught_by(self, mutant: Mutant) -> str | None:
        """In words; None: it survives."""
        reported = [failure for failure in self.failures if failure.get("reports")]
        if reported:
            kinds = sorted({report.partition(":")[0] for report in reported[0]["reports"]})
            return f"sanitizer ({', '.join(kinds)}) in {test_name(reported[0])}"
        if mutant.needs_report:
            return None
        if self.failures:
            first = self.failures[0]
            explored = _SCHEDULE.search(first["said"]) is not None
            how = "exploration" if explored else _SAID_BY_A_TEST.get(first["type"], first["type"])
            return f"{how} in {test_name(first)}"
        return "time-out" if self.timed_out else None


def test_name(failure: dict[str, Any]) -> str:
    return str(failure["test"]).rpartition("/")[2].partition("::")[2]


# ----------------------------------------------------------------------------------------------------------------------- faults


def read_mutants(folder: Path) -> list[Mutant]:
    """Of every kind, in order."""
    mutants = []
    for kind in KINDS:
        for raw in tomllib.loads((folder / f"{kind}.toml").read_text())["mutant"]:
            mutants.append(Mutant(kind=kind, **{**raw, "tests": tuple(raw["tests"])}))
    return mutants


def stale(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """What is wrong with those that do not apply."""
    found = []
    for mutant in mutants:
        try:
            mutant.applied((root / mutant.file).read_text())
        except (DoesNotApply, OSError) as error:
            found.append(str(error))
    return found


# ------------------------------------------------------------------------------------------------------------------------- runs


def copied(root: Path, to: Path) -> Path:
    to.mkdir()
    for source in (root / part for part in COPIED if (root / part).exists()):
        shutil.copytree(source, to / source.name) if source.is_dir() else shutil.copy2(source, to / source.name)
    return to


def run(mutant: Mutant | None, tests: Sequence[str], root: Path) -> Outcome:
    """`tests` in a copy of the tree with `mutant` (None: as it is)."""
    ends_with = "nothing" if mutant is None else "report" if mutant.needs_report else "failure"
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = copied(root, Path(name) / "tree")
        if mutant is not None:
            file = copy / mutant.file
            file.write_text(mutant.applied(file.read_text()))
        return _pytest(copy, tests, ends_with, TIMEOUT_S + (TEST_S * len(tests) if mutant is None else 0.0))


def _pytest(copy: Path, tests: Sequence[str], ends_with: str, timeout_s: float) -> Outcome:
    record = copy / "record.json"
    own = {"MUTANT_RECORD": str(record), "MUTANT_ENDS_WITH": ends_with, "PYTHONPATH": str(Path(__file__).parent)}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutant_watch", "--tb=short", *tests]
    started = time.monotonic()
    environment = {**os.environ, **own, **threads}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=copy, env=environment, text=True, start_new_session=True, **pipes)
    try:
        output, timed_out = process.communicate(timeout=timeout_s)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, timed_out = process.communicate()[0], True
    found = json.loads(record.read_text()) if record.exists() else {}
    return Outcome(found, output, timed_out, time.monotonic() - started)


def is_clean(baseline: Outcome) -> bool:
    record = baseline.record
    return bool(record.get("num_passed")) and not baseline.failures and not record["num_reports"] and not baseline.timed_out


# ------------------------------------------------------------------------------------------------------------------------ table


def table(found: dict[Mutant, str]) -> str:
    """The page of the documentation: every fault by kind, and what found it, as `_shown`."""
    parts = [_HEAD.format(num=len(found), watched=sum(mutant.needs_report for mutant in found))]
    for kind, title in KINDS.items():
        parts.append(f"## {title}\n\n| fault | in | stands for | found by |\n|---|---|---|---|")
        for mutant, how in found.items():
            if mutant.kind == kind:
                parts[-1] += f"\n{_row_start(mutant)}{how} |"
    return "\n\n".join(parts) + "\n"


def _row_start(mutant: Mutant) -> str:
    return f"| {mutant.name} | `{mutant.file.removeprefix('src/penstock/')}` | {mutant.stands_for} | "


def _shown(mutant: Mutant, how: str) -> str:
    """With the test's name as code."""
    check, _, test = how.partition(" in ")
    note = f"; the sanitizer cannot: {mutant.unwatched}" if mutant.unwatched else ""
    return (f"{check}: `{test}`" if test else check) + note


def known(mutants: Sequence[Mutant], page: str) -> dict[Mutant, str]:
    """Those that the page has a line for, and what that says of them."""
    found: dict[str, str] = {}
    for line in page.splitlines():
        start = "".join(f"{part} | " for part in line.split(" | ")[:3])
        found[start] = line.removeprefix(start).removesuffix(" |")
    return {mutant: found[_row_start(mutant)] for mutant in mutants if _row_start(mutant) in found}


_HEAD = """\
# Faults put into the source, and what finds them

A check counts when it finds a fault. Each line below is a small fault in Penstock's own source: a wait dropped, a pin
skipped on one path, a key published too early. `make mutants` puts one at a time into a copy of the tree, runs the
tests named for it there, and writes this page.

```sh
make mutants
make mutants ARGS='--only replay'
```

{num} faults. Each line says what found the fault when it was last run, which may be some changes ago. Without a fault the
same tests passed then, and no sanitizer reported anything in them.

*Found by* says what noticed: the [sanitizer](sanitizer.md), with the kinds of its reports; an exploration, which prints
the schedule that fails; a test; or an exception of Penstock's own. For {watched} of the faults, those of order and
lifetime and the stalls, nothing counts but a report of the sanitizer in a test that fails; where it cannot see one, the
line says why.

*Stands for* says what would go wrong, and where it was seen: S0 is a host tier beside captured decode steps, S1 a save
moved to a background thread, S2 a tiered offload inside an engine, S3 contexts paged beyond device memory, S4 steps
prepared by an asynchronous runner; the others are failures that several systems met.

The faults are in `tools/mutants/`, each with the text that it changes. A test checks with every change that all of them
still apply; `make mutants` says whether they are still found."""


def run_all(chosen: Sequence[Mutant], root: Path, jobs: int) -> dict[Mutant, str | None] | None:
    """What caught each, in words; None as a whole: the tests say something without any fault."""
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    print(f"{len(chosen)} faults, {len(tests)} tests or files of tests", flush=True)
    caught: dict[Mutant, str | None] = {}
    with ThreadPoolExecutor(jobs) as pool:
        baseline = pool.submit(run, None, tests, root)
        runs = [(mutant, pool.submit(run, mutant, mutant.tests, root)) for mutant in chosen]
        whole = baseline.result()
        if not is_clean(whole):
            pool.shutdown(cancel_futures=True)
            print(f"{whole.output}\nwithout any fault {len(whole.failures)} tests fail, with {whole.record.get('num_reports', 0)} reports")
            return None
        print(f"without any fault {whole.record['num_passed']} tests pass, with no reports  {whole.seconds:.0f} s", flush=True)
        for mutant, future in runs:
            outcome = future.result()
            caught[mutant] = how = outcome.caught_by(mutant)
            print(f"{mutant.kind:10}  {mutant.name:100}  {how or 'SURVIVES'}  {outcome.seconds:.0f} s", flush=True)
            if how is None:
                print(outcome.output[-3000:], flush=True)
    return caught


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="faults whose name, kind or file contains this; the table stays as it is")
    parser.add_argument("--new", action="store_true", help="only those that the table does not have as they are; it is completed by them")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at once")
    options = parser.parse_args(arguments)
    mutants = read_mutants(ROOT / "tools" / "mutants")
    old = known(mutants, (ROOT / TABLE).read_text()) if options.new else {}
    chosen = [mutant for mutant in mutants if options.only in f"{mutant.name} {mutant.kind} {mutant.file}" and mutant not in old]
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        root = copied(ROOT, Path(name) / "tree")  # what is edited meanwhile does not count
        wrong = stale(chosen, root)
        if wrong or not chosen:
            print("\n".join(wrong) or f"no fault has {options.only!r} in its name, kind or file")
            return 1
        caught = run_all(chosen, root, options.jobs)
    if caught is None:
        return 1
    survivors = [mutant.name for mutant, how in caught.items() if how is None]
    print(f"{len(caught) - len(survivors)} of {len(caught)} found")
    if not options.only and not survivors:
        found = old | {mutant: _shown(mutant, how) for mutant, how in caught.items() if how is not None}
        (ROOT / TABLE).write_text(table({mutant: found[mutant] for mutant in mutants}))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The faults of `make mutants`: each still applies to the source as it is, names tests that are there, and is on the page that shows them.
That they are found is for `make mutants` to say, which takes minutes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tool = load("mutants")
MUTANTS = tool.read_mutants(ROOT / "tools" / "mutants")


def each() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mutants", [[one for one in MUTANTS if one.kind == kind] for kind in tool.KINDS], ids=list(tool.KINDS))


@each()
def test_a_fault_applies_exactly_once_and_leaves_python(mutants: list[tool.Mutant]) -> None:
    assert tool.stale(mutants, ROOT) == []
    assert [one.name for one in mutants if one.old == one.new] == []


@each()
def test_the_tests_of_a_fault_are_there(mutants: list[tool.Mutant]) -> None:
    rules = (ROOT / "tests/pure/lanes/lane_rules.py").read_text()
    for mutant in mutants:
        assert mutant.tests and mutant.name and mutant.stands_for
        for test in mutant.tests:
            file, *names = test.split("::")
            text = (ROOT / file).read_text()
            for name in names:
                function, _, case = name.rstrip("]").partition("[")
                inherited = "(LaneRules)" in text and f"def {function}(" in rules
                assert f"def {function}(" in text or f"class {function}" in text or inherited, f"{mutant.name}: {file} has no {name}"
                assert case in text, f"{mutant.name}: {file} has no case {case}"


def test_there_are_faults_of_every_kind_and_source_under_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 35
    assert {mutant.kind for mutant in MUTANTS} == set(tool.KINDS)
    sources = " ".join(mutant.stands_for for mutant in MUTANTS)
    assert all(f"S{number}: " in sources for number in range(5))
    assert sum(mutant.needs_report for mutant in MUTANTS) >= 30, "most faults of order and lifetime are for the sanitizer"


def test_the_page_shows_exactly_these_faults() -> None:
    page = (ROOT / tool.TABLE).read_text()
    shown = re.findall(r"^\| (.+?) \| `[a-z0-9/_]+\.py` \|", page, flags=re.MULTILINE)
    assert shown == [mutant.name for mutant in MUTANTS], "run make mutants"


# ------------------------------------------------------------------------------------------------------------- the tool itself


def toy(folder: Path) -> Path:
    """A tree in which one test looks at one of two lines."""
    package = folder / "src" / "penstock"
    (package / "sanitizer").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["src"]\n')
    (package / "__init__.py").write_text("LOOKED_AT = 1\nNEVER_LOOKED_AT = 2\n")
    (package / "sanitizer" / "__init__.py").write_text("")
    (package / "sanitizer" / "sanitizer.py").write_text("class Sanitizer:\n    def __init__(self):\n        self.reports = []\n")
    source = "import penstock\n\n\ndef test_it():\n    assert penstock.LOOKED_AT == 1\n"
    (folder / "tests" / "test_toy.py").write_text(source)
    return folder


def mutant(kind: str, old: str, new: str) -> tool.Mutant:
    return tool.Mutant("a toy is broken", kind, "src/penstock/__init__.py", old, new, "nothing", ("tests/test_toy.py",))


def test_a_fault_that_a_test_finds_is_found_and_one_that_none_looks_at_survives(tmp_path: Path) -> None:
    root = toy(tmp_path)
    found, missed = (
        mutant("identity", "\nNEVER", "\nLOOKED_AT = 3\nNEVER"),
        mutant("identity", "NEVER_LOOKED_AT = 2", "NEVER_LOOKED_AT = 3"),
    )
    caught = tool.run_all([found, missed], root, jobs=2)
    assert caught == {found: "test in test_it", missed: None}
    assert (root / "src" / "penstock" / "__init__.py").read_text() == "LOOKED_AT = 1\nNEVER_LOOKED_AT = 2\n"


def test_a_fault_of_order_that_only_a_test_finds_survives(tmp_path: Path) -> None:
    only_a_test = mutant("order", "\nNEVER", "\nLOOKED_AT = 3\nNEVER")
    assert tool.run_all([only_a_test], toy(tmp_path), jobs=1) == {only_a_test: None}


def test_nothing_is_found_where_the_tests_fail_without_any_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = toy(tmp_path)
    (root / "src" / "penstock" / "__init__.py").write_text("LOOKED_AT = 0\nNEVER_LOOKED_AT = 2\n")
    assert tool.run_all([mutant("identity", "NEVER_LOOKED_AT = 2", "NEVER_LOOKED_AT = 3")], root, jobs=1) is None
    assert "without any fault 1 tests fail" in capsys.readouterr().out


@pytest.mark.parametrize(("old", "new"), [("ABSENT", "x"), ("LOOKED_AT", "x"), ("LOOKED_AT = 1", "LOOKED_AT = (")])
def test_a_fault_that_does_not_apply_once_or_leaves_no_python_is_stale(tmp_path: Path, old: str, new: str) -> None:
    assert len(tool.stale([mutant("order", old, new)], toy(tmp_path))) == 1


def test_what_a_sanitizer_said_comes_before_what_a_test_said() -> None:
    failures = [
        {"test": "tests/a.py::test_first", "type": "AssertionError", "said": "", "reports": []},
        {"test": "tests/a.py::test_second", "type": "Leaked", "said": "", "reports": ["race: one", "lifetime: two"]},
    ]
    outcome = tool.Outcome({"failures": failures})
    assert outcome.caught_by(mutant("order", "a", "b")) == "sanitizer (lifetime, race) in test_second"
    assert tool.Outcome({"failures": failures[:1]}).caught_by(mutant("order", "a", "b")) is None
    assert tool.Outcome({}, timed_out=True).caught_by(mutant("failure", "a", "b")) == "time-out"

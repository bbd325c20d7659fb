"""docs/invariants.md and the tests agree: each rule is cited by the test files that it names, and by no
others. Owns no rule."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
Citations = dict[int, set[str]]  # the rule's number, and the files under tests


def stated(page: str) -> Citations:
    """What the page says. Its rules are numbered from 1 without a gap."""
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.*) \|$", page, flags=re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1)), (
        "numbers are given once, in order"
    )
    return {int(number): set(re.findall(r"`([\w./]+)`", files)) for number, _, files in rows}


def cited(sources: dict[str, str]) -> Citations:
    """What test files, by name, say in docstrings and comments."""
    found: Citations = defaultdict(set)
    for name, source in sources.items():
        for number in re.findall(r"\binvariant (\d+):", source):
            found[int(number)].add(name)
    return dict(found)


def disagreements(page: Citations, tests: Citations) -> list[str]:
    found = [f"rule {number} has no test" for number, names in page.items() if not names]
    for number in sorted(page.keys() | tests.keys()):
        there, here = page.get(number, set()), tests.get(number, set())
        found += [f"rule {number}: {name} does not cite it" for name in sorted(there - here)]
        found += [f"rule {number}: {name} cites it and is not on the page" for name in sorted(here - there)]
    return found


def test_every_rule_is_cited_by_the_tests_that_the_page_names() -> None:
    page = stated((ROOT / "docs" / "invariants.md").read_text())
    sources = {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}
    assert len(page) >= 27
    found = disagreements(page, cited(sources))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("page", "source", "said"),
    [
        ("| 1 | rule | `a.py` |", "# Holds %s 1: so.", []),
        ("| 1 | rule | `a.py` |", "# Holds nothing.", ["rule 1: a.py does not cite it"]),
        ("| 1 | rule |  |", "", ["rule 1 has no test"]),
        ("| 1 | rule | `a.py` |", "# %s 1: so. %s 2: too.", ["rule 2: a.py cites it and is not on the page"]),
        (
            "| 1 | rule | `b.py` |",
            "# %s 1: so.",
            ["rule 1: b.py does not cite it", "rule 1: a.py cites it and is not on the page"],
        ),
        (
            "| 1 | rule | `a.py` |",
            "# %s 10: so.",
            ["rule 1: a.py does not cite it", "rule 10: a.py cites it and is not on the page"],
        ),
    ],
)
def test_the_checker_sees(page: str, source: str, said: list[str]) -> None:
    assert disagreements(stated(page), cited({"a.py": source.replace("%s", "invariant")})) == said


def test_the_checker_refuses_a_gap_in_the_numbers() -> None:
    with pytest.raises(AssertionError, match="in order"):
        stated("| 1 | rule | `a.py` |\n| 3 | rule | `a.py` |")

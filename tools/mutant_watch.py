"""A pytest plugin that writes down which tests failed and what sanitizers reported meanwhile. Owns that
record; `tools/mutants.py` starts it in the copy of the tree that has the fault.

MUTANT_RECORD names the file. The run ends with the first failure; where MUTANT_NEEDS_REPORT is set, with the
first that comes with a report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_made: list[Any] = []  # sanitizers of the test that runs
_failures: list[dict[str, Any]] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    import penstock
    from penstock.sanitizer.sanitizer import Sanitizer

    if not Path(penstock.__file__).is_relative_to(session.config.rootpath):
        raise pytest.UsageError(f"{penstock.__file__} is not in {session.config.rootpath}")
    whole = Sanitizer.__init__

    def made(self: Sanitizer, *args: Any, **named: Any) -> None:
        whole(self, *args, **named)
        _made.append(self)

    Sanitizer.__init__ = made  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around setting up, calling and tearing down: sanitizers are mostly asked at the end."""
    _made.clear()
    num_before = len(_failures)
    result = yield
    failed = _failures[num_before:]
    reports = [f"{report.kind}: {report.sentence}" for sanitizer in _made for report in sanitizer.reports]
    for failure in failed:
        failure["reports"] = reports
    if failed:
        Path(os.environ["MUTANT_RECORD"]).write_text(json.dumps(_failures))
        if failed[0]["reports"] or not os.environ["MUTANT_NEEDS_REPORT"]:
            item.session.shouldstop = "it is found"
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failures.append({"test": report.nodeid, "reports": []})

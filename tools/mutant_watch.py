"""A pytest plugin that writes down which tests failed and what sanitizers said meanwhile. Owns that record; runs inside the copy of the
tree that has the fault, started by `tools/mutants.py`.

MUTANT_RECORD names the file. MUTANT_ENDS_WITH says when to stop: `failure` at the first test that fails, `report` at the first that
fails while a sanitizer has reported, `nothing` never.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_made: list[Any] = []  # sanitizers of the test that runs
_record: dict[str, Any] = {"num_passed": 0, "num_reports": 0, "failures": []}


def pytest_collection_finish(session: pytest.Session) -> None:
    import penstock
    from penstock.sanitizer.sanitizer import Sanitizer

    if not Path(penstock.__file__).is_relative_to(session.config.rootpath):
        raise pytest.UsageError(f"penstock comes from {penstock.__file__}, not from the copy in {session.config.rootpath}")
    whole = Sanitizer.__init__

    def made(self: Sanitizer, *args: Any, **named: Any) -> None:
        whole(self, *args, **named)
        _made.append(self)

    Sanitizer.__init__ = made  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around setting up, calling and tearing down: sanitizers are mostly asked at the end."""
    _made.clear()
    num_before = len(_record["failures"])
    result = yield
    reports = [f"{report.kind}: {report.sentence}" for sanitizer in _made for report in sanitizer.reports]
    failed = _record["failures"][num_before:]
    for failure in failed:
        failure["reports"] = reports
    _record["num_passed"] += not failed
    _record["num_reports"] += len(reports)
    Path(os.environ["MUTANT_RECORD"]).write_text(json.dumps(_record))
    enough = {"failure": bool(failed), "report": bool(failed and reports), "nothing": False}
    if enough[os.environ["MUTANT_ENDS_WITH"]]:
        item.session.shouldstop = "it is caught"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.failed and call.excinfo is not None:
        error = {"type": call.excinfo.type.__name__, "said": str(call.excinfo.value)[:2000]}
        _record["failures"].append({"test": item.nodeid, "when": report.when, **error})
    return report

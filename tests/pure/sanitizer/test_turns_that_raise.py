"""A turn, or a wait that is allowed, that ends in an error has ended all the same."""

from __future__ import annotations

import pytest

from penstock.sanitizer.findings import Findings
from penstock.sanitizer.report import Kind
from penstock.sanitizer.turns import Turns


def test_a_permission_to_wait_ends_with_the_error_that_ends_its_block() -> None:
    findings = Findings(strict=False, json_file=None)
    turns = Turns(findings, {})
    with turns.turn():
        with pytest.raises(OSError), turns.may_wait("result"):
            raise OSError
        turns.blocked("load", 1, 0.25)
    assert [report.kind for report in findings.reports] == [Kind.STALL]


def test_a_turn_ends_with_the_error_that_ends_its_block() -> None:
    findings = Findings(strict=False, json_file=None)
    turns = Turns(findings, {})
    with pytest.raises(OSError), turns.turn():
        raise OSError
    turns.blocked("load", 1, 0.25)
    assert findings.reports == []

"""A turn, or a wait that is allowed, that ends in an error has ended all the same."""

from __future__ import annotations

import pytest

from penstock.sanitizer.report import Findings, Kind
from penstock.sanitizer.sanitizer import Turns


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


def test_a_permission_inside_another_is_one_and_the_outer_one_goes_on_behind_it() -> None:
    findings = Findings(strict=False, json_file=None)
    turns = Turns(findings, {})
    with turns.turn():
        with turns.may_wait("result"):
            with turns.may_wait("save"):
                turns.blocked("load", 1, 0.25)
            turns.blocked("load", 2, 0.25)
        assert findings.reports == []
        with turns.turn():
            pass
        turns.blocked("load", 3, 0.25)
    assert [report.kind for report in findings.reports] == [Kind.STALL], (
        "a turn inside another does not end it"
    )


def test_a_wait_is_a_stall_from_the_limit_on() -> None:
    findings = Findings(strict=False, json_file=None)
    turns = Turns(findings, {}, stall_s=0.5)
    turns.blocked("load", 1, 9.0)
    with turns.turn():
        turns.blocked("load", 2, 0.5)
        assert findings.reports == []
        turns.blocked("load", 3, 0.6)
    (report,) = findings.reports
    assert "waited 600.0 ms for item 3 of lane load" in report.sentence

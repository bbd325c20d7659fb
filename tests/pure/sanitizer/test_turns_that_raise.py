"""A turn, or a wait that is allowed, that ends in an error has ended all the same."""

from __future__ import annotations

import pytest

from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer


def test_a_permission_to_wait_ends_with_the_error_that_ends_its_block() -> None:
    sanitizer = Sanitizer()
    with sanitizer.turns.turn():
        with pytest.raises(OSError), sanitizer.turns.may_wait("result"):
            raise OSError
        sanitizer.host_waited("load", 1, 0.25)
    assert [report.kind for report in sanitizer.reports] == [Kind.STALL]


def test_a_turn_ends_with_the_error_that_ends_its_block() -> None:
    sanitizer = Sanitizer()
    with pytest.raises(OSError), sanitizer.turns.turn():
        raise OSError
    sanitizer.host_waited("load", 1, 0.25)
    assert sanitizer.reports == []

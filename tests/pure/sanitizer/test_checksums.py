"""Blocks come back as they went, or it is found; what may differ is not."""

from __future__ import annotations

import pytest

from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer

KEY, OTHER = b"k" * 16, b"o" * 16


@pytest.fixture
def sanitizer() -> Sanitizer:
    made = Sanitizer()
    made.opened("host", 8)
    made.moved("host", list(range(8)), "free", "reserved", "demote")
    return made


def told(sanitizer: Sanitizer) -> list[str]:
    assert all(report.kind is Kind.LIFETIME for report in sanitizer.reports)
    return [report.sentence for report in sanitizer.reports]


def test_bytes_that_changed_between_demote_and_promote_are_found(sanitizer: Sanitizer) -> None:
    sanitizer.checksums.demoted("host", 3, KEY, 0xABC)
    sanitizer.checksums.promoted("host", 3, KEY, 0xABD)
    (sentence,) = told(sanitizer)
    assert sentence == (
        f"bytes changed between demote and promote: slot 3 of host, key {KEY.hex()[:16]}: abc was demoted, "
        "abd came back"
    )


def test_a_key_published_over_different_bytes_is_found(sanitizer: Sanitizer) -> None:
    sanitizer.checksums.demoted("host", 3, KEY, 1)
    sanitizer.checksums.demoted("host", 3, KEY, 2)
    assert [sentence.partition(":")[0] for sentence in told(sanitizer)] == [
        "key published over different bytes"
    ]


def test_bytes_of_another_key_are_found(sanitizer: Sanitizer) -> None:
    sanitizer.checksums.demoted("host", 3, OTHER, 1)
    sanitizer.checksums.promoted("host", 3, KEY, 1)
    (sentence,) = told(sanitizer)
    assert sentence.startswith("bytes of another key promoted") and OTHER.hex()[:16] in sentence


def test_the_same_key_computed_again_into_another_slot_may_differ(sanitizer: Sanitizer) -> None:
    """Other chunks of the same prompt round differently; both copies are right."""
    sanitizer.checksums.demoted("host", 3, KEY, 1)
    sanitizer.checksums.demoted("host", 4, KEY, 2)
    sanitizer.checksums.promoted("host", 4, KEY, 2)
    assert told(sanitizer) == []


def test_a_slot_that_became_free_starts_anew(sanitizer: Sanitizer) -> None:
    sanitizer.checksums.demoted("host", 3, KEY, 1)
    sanitizer.moved("host", [3], "reserved", "free", "demote")
    sanitizer.checksums.promoted("host", 3, KEY, 5)
    sanitizer.checksums.demoted("host", 3, KEY, 2)
    assert told(sanitizer) == [] and len(sanitizer.checksums) == 1

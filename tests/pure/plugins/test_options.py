"""Options of the tiers, and the page that names them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from penstock.plugins.options import TierOptions

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plugins.md"


def test_the_page_names_each_option() -> None:
    text = PAGE.read_text()
    missing = [one.name for one in fields(TierOptions) if f"`{one.name}`" not in text]
    assert not missing


def test_a_url_is_not_shown() -> None:
    """It may hold a password."""
    assert "hunter2" not in repr(TierOptions.of({"remote": "valkey://:hunter2@cache"}))

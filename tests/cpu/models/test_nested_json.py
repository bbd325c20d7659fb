"""JSON in a model's files that is nested deeper than the interpreter goes is a mistake in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ModelError
from penstock.models.weights import INDEX, read_json, weight_files

DEEP = '{"weight_map": ' + "[" * 200_000 + "]" * 200_000 + "}"


def test_lists_in_lists_without_end_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(DEEP)
    with pytest.raises(ModelError, match="not valid JSON"):
        weight_files(tmp_path)
    with pytest.raises(ModelError, match=INDEX):
        read_json(tmp_path / INDEX)

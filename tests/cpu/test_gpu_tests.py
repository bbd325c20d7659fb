"""Tests that only a GPU runs would break unseen: what they import is there. Their files skip themselves
before they import most of it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="NOT TESTED: kernels need triton")
pytest.importorskip("transformers", reason="NOT TESTED: some tests need transformers")

FILES = sorted((Path(__file__).parents[1] / "gpu").glob("*.py"))
OURS = ("penstock", "tests", "retrieval")


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Modules of ours, and what is taken from them."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            yield from ((node.module or "", one.name) for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.name, "*") for one in node.names if one.name.split(".")[0] in OURS)


def is_there(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
        return name == "*" or hasattr(found, name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False
    except pytest.skip.Exception:  # a file of the folder, which skips itself
        return True


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_file_of_them_imports_is_there(file: Path) -> None:
    missing = [f"{name} of {module}" for module, name in imported(file) if not is_there(module, name)]
    assert not missing

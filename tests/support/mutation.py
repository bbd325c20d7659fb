"""A module with one line of its source changed: the fault that shows a test can fail. Owns the copy; the
original stays as it is."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def mutated(module: ModuleType, old: str, new: str, folder: Path) -> Iterator[ModuleType]:
    """`module` loaded once more from a file in `folder`, in which `old` reads `new`; `old` must occur."""
    source = inspect.getsource(module)
    if old not in source:
        raise ValueError(f"{module.__name__} has no {old!r} to change")
    name = f"mutant_of_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[name] = mutant
    try:
        spec.loader.exec_module(mutant)
        yield mutant
    finally:
        del sys.modules[name]

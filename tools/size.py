"""Prints what has grown beyond a comfortable size. Owns the limits; a smell for the reader, not a gate, so it always exits with 0.

python3 tools/size.py FOLDER...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_FUNCTION_LINES = 40
MAX_FILE_LINES = 400
MAX_ATTRIBUTES = 12
MAX_METHODS = 15
MAX_PARAMETERS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Smell(NamedTuple):
    """One thing that is larger than its limit."""

    place: str
    what: str
    size: int
    limit: int

    def __str__(self) -> str:
        return f"{self.place}  {self.what}: {self.size} (limit {self.limit})"


def smells(source: str, place: str) -> Iterator[Smell]:
    """Everything in one file that is over a limit, the file itself included."""
    yield from _over(place, "lines", len(source.splitlines()), MAX_FILE_LINES)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function(node, f"{place}:{node.lineno} {node.name}()")
        elif isinstance(node, ast.ClassDef):
            yield from _class(node, f"{place}:{node.lineno} {node.name}")
        elif isinstance(node, ast.Global):
            yield Smell(f"{place}:{node.lineno}", f"global {', '.join(node.names)}", len(node.names), 0)


def _function(node: Function, place: str) -> Iterator[Smell]:
    yield from _over(place, "lines", (node.end_lineno or node.lineno) - node.lineno + 1, MAX_FUNCTION_LINES)
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    yield from _over(place, "parameters", sum(arg.arg not in ("self", "cls") for arg in named), MAX_PARAMETERS)


def _class(node: ast.ClassDef, place: str) -> Iterator[Smell]:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not _is_data(node):  # a plain record has as many fields as its subject
        yield from _over(place, "attributes", len(_attributes(node)), MAX_ATTRIBUTES)
    yield from _over(place, "methods", len(methods), MAX_METHODS)
    mixed = [ast.unparse(base) for base in node.bases if ast.unparse(base).endswith("Mixin")]
    yield from _over(place, f"mixins ({', '.join(mixed)})", len(mixed), 0)


def _is_data(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
    return any(mark.startswith("dataclass") or mark.endswith(("NamedTuple", "Struct", "Enum", "StrEnum")) for mark in marks)


def _attributes(node: ast.ClassDef) -> set[str]:
    """Names that the class's own methods assign on `self`."""
    stored = (item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store))
    return {item.attr for item in stored if isinstance(item.value, ast.Name) and item.value.id == "self"}


def _over(place: str, what: str, size: int, limit: int) -> Iterator[Smell]:
    if size > limit:
        yield Smell(place, what, size, limit)


def main(folders: Iterable[str]) -> int:
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    found = [smell for path in paths for smell in smells(path.read_text(), str(path))]
    for smell in found:
        print(smell)
    print(f"{len(found)} over a limit in {len(paths)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Prints what has grown beyond a comfortable size, then the tokens of Python per folder. Owns the limits; a
smell for the reader, not a gate, so it always exits with 0.

python3 tools/size.py FOLDER...
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_FUNCTION_LINES = 40
MAX_ATTRIBUTES = 15
MAX_METHODS = 25
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
    """Everything in one file that is over a limit."""
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
    yield from _over(
        place, "parameters", sum(arg.arg not in ("self", "cls") for arg in named), MAX_PARAMETERS
    )


def _class(node: ast.ClassDef, place: str) -> Iterator[Smell]:
    functions = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    # an overload is a type, not a method
    methods = [item for item in functions if "overload" not in map(ast.unparse, item.decorator_list)]
    if not _is_data(node):  # a plain record has as many fields as its subject
        yield from _over(place, "attributes", len(_attributes(node)), MAX_ATTRIBUTES)
    yield from _over(place, "methods", len(methods), MAX_METHODS)
    mixed = [ast.unparse(base) for base in node.bases if ast.unparse(base).endswith("Mixin")]
    yield from _over(place, f"mixins ({', '.join(mixed)})", len(mixed), 0)


def _is_data(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
    return any(
        mark.startswith("dataclass") or mark.endswith(("NamedTuple", "Struct", "Enum", "StrEnum"))
        for mark in marks
    )


def _attributes(node: ast.ClassDef) -> set[str]:
    """Names that the class's own methods assign on `self`."""
    stored = (
        item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
    )
    return {item.attr for item in stored if isinstance(item.value, ast.Name) and item.value.id == "self"}


def _over(place: str, what: str, size: int, limit: int) -> Iterator[Smell]:
    if size > limit:
        yield Smell(place, what, size, limit)


# Names, operators and literals count; of an f-string, in Pythons that take it apart, every part.
_LAYOUT = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
_LAYOUT |= {tokenize.INDENT, tokenize.DEDENT}


def num_tokens(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type not in _LAYOUT for token in tokenize.tokenize(file.readline))


def tokens_by_folder(paths: Iterable[Path]) -> Counter[Path]:
    """Of each folder with all below it."""
    found: Counter[Path] = Counter()
    for path in paths:
        num = num_tokens(path)
        for folder in path.parents[:-1]:
            found[folder] += num
    return found


def main(folders: Iterable[str]) -> int:
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    found = [smell for path in paths for smell in smells(path.read_text(), str(path))]
    for smell in found:
        print(smell)
    print(f"{len(found)} over a limit in {len(paths)} files\n\ntokens of Python")
    for folder, num in sorted(tokens_by_folder(paths).items()):
        print(f"{num:9,}  {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Changes to a syntax tree. Owns two kinds of them: a fault of `faults.toml`, whose place is a function and
names in it, and a random edit. Runs no tests.

A fault names a scope (`penstock.kv.transfer:Mover.launch`, or a module alone), a node in it and a change:

    find = "Call wait lane"    the innermost Call whose subtree has these names: attributes, globals,
                               keywords, constants, operators. Names of locals and parameters never count.
    put = "_1(_2, ())"         what stands in its place: `_` is the node, `_2` its second child expression,
                               `_2_1` a child of that; for a statement, statements, where `_body` is its block
    drop = true                or: the statement goes
    down = 1                   or: it comes so many statements later

`find` has to match exactly one node of the scope.
"""

from __future__ import annotations

import ast
import copy
import itertools
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SYMBOLS: dict[type[ast.AST], str] = {ast.LtE: "<=", ast.NotEq: "!=", ast.Sub: "-", ast.BitAnd: "&"}
_HOLE = re.compile(r"_(\d+(_\d+)*)?")


class DoesNotApply(Exception):
    """The scope or the node is not there, is there more than once, or the change leaves the tree as it is."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `name` completes "in this copy ..."; `report`: only a report of the sanitizer finds it."""

    name: str
    kind: str
    stands_for: str
    within: str
    find: str
    tests: tuple[str, ...]
    put: str = ""
    drop: bool = False
    down: int = 0
    report: bool = False

    @property
    def file(self) -> str:
        return path_of(self.within.partition(":")[0])

    def change(self, tree: ast.Module) -> None:
        """Put the fault into `tree`."""
        qualname = self.within.partition(":")[2]
        scope = self._only([node for name, node in scopes(tree) if name == qualname], self.within)
        node = self._only(matches(scope, self.find), f"{self.find!r} in {self.within}")
        before = ast.dump(scope)
        if self.drop + bool(self.down) + bool(self.put) != 1:
            raise DoesNotApply(f"{self.name}: it has one of put, drop and down")
        if isinstance(node, ast.stmt):
            block = next(block for block in blocks(scope) if node in block)
            block[:] = _moved(block, node, self.down) if self.down else _spliced(block, node, self.put)
        else:
            _Replace(node, _Holes(node).visit(ast.parse(self.put, mode="eval").body)).generic_visit(scope)
        if ast.dump(scope) == before:
            raise DoesNotApply(f"{self.name}: nothing changes")

    def _only(self, found: Sequence[ast.AST], what: str) -> ast.AST:
        if len(found) != 1:
            raise DoesNotApply(f"{self.name}: {what} is there {len(found)} times")
        return found[0]

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} ({self.within})"


def read_faults(path: Path) -> list[Fault]:
    raws = tomllib.loads(path.read_text())["fault"]
    return [Fault(**{**raw, "tests": tuple(raw["tests"])}) for raw in raws]


def path_of(module: str) -> str:
    """Of a module in the tree; a package is named with its `__init__`. `penstock_s3` is one of `stores/`."""
    top = module.partition(".")[0]
    folder = "src" if top == "penstock" else f"stores/{top.removeprefix('penstock_')}"
    return f"{folder}/{module.replace('.', '/')}.py"


# ------------------------------------------------------------------------------------------------------ nodes


def scopes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The module under the empty name, then every class and function by its qualified name."""
    yield "", tree
    yield from _inner(tree, "")


def _inner(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield prefix + child.name, child
            yield from _inner(child, f"{prefix}{child.name}.")
        else:
            yield from _inner(child, prefix)


def matches(scope: ast.AST, find: str) -> list[ast.AST]:
    """Nodes of the kind that have all the names, without those that contain another such node."""
    kind, *names = find.split()
    local = local_names(scope)
    of_kind = [node for node in _walk(scope) if type(node).__name__ == kind]
    fitting = [node for node in of_kind if names_in(node, local).issuperset(names)]
    known = {id(node) for node in fitting}
    return [node for node in fitting if not any(id(inner) in known for inner in _walk(node))]


def _walk(scope: ast.AST) -> Iterator[ast.AST]:
    """Depth first, in the order of the source."""
    for child in ast.iter_child_nodes(scope):
        yield child
        yield from _walk(child)


def local_names(scope: ast.AST) -> set[str]:
    """Everything that functions in it bind, and `self`. Names of a module or a class are no locals."""
    found = {"self", "cls"}
    for function in ast.walk(scope):
        if not isinstance(function, Function | ast.Lambda | ast.comprehension):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found.add(node.name)
    return found


def names_in(node: ast.AST, local: set[str]) -> set[str]:
    """What `find` may ask for."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            found.add(inner.attr)
        elif isinstance(inner, ast.Name) and inner.id not in local:
            found.add(inner.id)
        elif isinstance(inner, ast.keyword) and inner.arg:
            found.add(inner.arg)
        elif isinstance(inner, ast.Constant):
            found.add(repr(inner.value))
        elif type(inner) in _SYMBOLS:
            found.add(_SYMBOLS[type(inner)])
    return found


def children(node: ast.AST) -> list[ast.expr]:
    """Its nearest expressions, in order; those of keywords and loops of comprehensions included."""
    found: list[ast.expr] = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            found.extend([child] if isinstance(child, ast.expr) else children(child))
    return found


# ---------------------------------------------------------------------------------------------------- changes


class _Holes(ast.NodeTransformer):
    def __init__(self, node: ast.AST) -> None:
        self._node = node

    def visit_Name(self, name: ast.Name) -> ast.AST:
        if not _HOLE.fullmatch(name.id):
            return name
        found = self._node
        for step in filter(None, name.id.split("_")):
            found = children(found)[int(step) - 1]
        found = copy.deepcopy(found)
        if hasattr(found, "ctx"):
            found.ctx = name.ctx
        return found


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def blocks(scope: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(scope):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _moved(block: list[ast.stmt], node: ast.stmt, down: int) -> list[ast.stmt]:
    place = block.index(node)
    return [*block[:place], *block[place + 1 : place + 1 + down], node, *block[place + 1 + down :]]


def _spliced(block: list[ast.stmt], node: ast.stmt, put: str) -> list[ast.stmt]:
    place = block.index(node)
    new = [part for line in ast.parse(put).body for part in _statements(line, node)]
    return [*block[:place], *new, *block[place + 1 :]] or [ast.Pass()]


def _statements(line: ast.stmt, node: ast.stmt) -> list[ast.stmt]:
    """One statement of `put`, with what its holes stand for."""
    if isinstance(line, ast.Expr) and isinstance(line.value, ast.Name) and line.value.id in ("_", "_body"):
        whole: list[ast.stmt] = [node] if line.value.id == "_" else copy.deepcopy(node.body)  # type: ignore[attr-defined]
        return whole
    for _, value in ast.iter_fields(line):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            value[:] = [part for inner in value for part in _statements(inner, node)]
    filled: ast.stmt = _Holes(node).visit(line)
    return [filled]


# ----------------------------------------------------------------------------------------------- random edits

_FLIPPED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_PLAIN = (ast.Expr, ast.Assign, ast.AugAssign)
_NAMES = (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.AnnAssign, Function, ast.ClassDef)
_KEPT = (*_NAMES, ast.Pass, ast.Assert, ast.Return)


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one node, which `at` counts in source order: negate, drop, swap or off by one."""

    file: str
    kind: str
    at: int
    line: int
    text: str

    def change(self, tree: ast.Module) -> None:
        node = list(_walk(tree))[self.at]
        if isinstance(node, ast.If | ast.While):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Compare):
            node.ops = [_FLIPPED.get(type(op), type(op))() for op in node.ops]
        elif isinstance(node, ast.Constant):
            node.value += 1  # type: ignore[operator]
        elif isinstance(node, ast.stmt):
            block = next(block for block in blocks(tree) if node in block)
            block[:] = _moved(block, node, 1) if self.kind == "swap" else _spliced(block, node, "")

    def __str__(self) -> str:
        return f"{self.kind}: {self.file}:{self.line}  {self.text}"


def edits(source: str, file: str) -> list[Edit]:
    """All in the bodies of functions, without docstrings, annotations and drops that only undefine a name."""
    tree = ast.parse(source)
    lines = source.splitlines()
    bodies = [scope.body for _, scope in scopes(tree) if isinstance(scope, Function)]
    inside = {id(node) for body in bodies for part in body for node in (part, *_code(part))}
    followed = {id(one): after for block in blocks(tree) for one, after in itertools.pairwise(block)}
    return [
        Edit(file, kind, at, node.lineno, lines[node.lineno - 1].strip())
        for at, node in enumerate(_walk(tree))
        if id(node) in inside and isinstance(node, ast.stmt | ast.expr)
        for kind in _kinds(node, followed)
    ]


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """What is in it, without annotations."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                yield child
                yield from _code(child)


def _kinds(node: ast.AST, followed: dict[int, ast.stmt]) -> Iterator[str]:
    if isinstance(node, ast.If | ast.While):
        yield "negate"
    elif isinstance(node, ast.Compare | ast.Constant) and _is_number(node):
        yield "off by one"
    if not isinstance(node, ast.stmt) or _is_text(node):
        return
    if not isinstance(node, _KEPT) and not _defines(node):
        yield "drop"
    if isinstance(node, _PLAIN) and isinstance(followed.get(id(node)), _PLAIN):
        yield "swap"


def _is_number(node: ast.Compare | ast.Constant) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return any(type(op) in _FLIPPED for op in node.ops)


def _defines(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name | ast.Tuple) for target in targets)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def draw(root: Path, num: int, seed: int) -> list[Edit]:
    """Of all edits of what runs without a GPU, each kind as often as the others."""
    files = [str(path.relative_to(root)) for path in sorted((root / "src").rglob("*.py"))]
    here = [file for file in files if not re.search("cuda|triton|plugins", file)]
    found = [edit for file in here for edit in edits((root / file).read_text(), file)]
    chance = random.Random(seed)
    kinds = sorted({edit.kind for edit in found})
    by_kind = [[edit for edit in found if edit.kind == kind] for kind in kinds]
    return [chance.choice(by_kind[number % len(by_kind)]) for number in range(num)]

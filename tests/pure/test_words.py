"""The words of the code base: names that GLOSSARY.md rules out appear nowhere in src/penstock. Owns the list,
not the meanings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "penstock"

CLASS_ENDINGS = ("Manager", "Handler", "Helper", "Helpers", "Utils", "Info", "Meta", "Base", "Impl")
MODULES = frozenset({"util", "utils", "common", "misc", "helper", "helpers"})
# Words that stand for one of ours and for nothing else; those with honest uses of their own (load, free,
# stream) are left to readers.
WORDS = {
    "seq": "request",
    "seqs": "requests",
    "req": "request",
    "reqs": "requests",
    "page": "block",
    "pages": "blocks",
    "iteration": "step",
    "manager": "pool, or what it owns",
    "mgr": "pool, or what it owns",
    "onboard": "promote",
    "swap": "promote, demote, retract or resume",
    "preempt": "retract",
    "preempted": "retracted",
    "preemption": "retraction",
    "refcount": "pin",
    "lookup": "match",
    "checkpoint": "snapshot",
    "cnt": "num_x",
    "preprocess": "prepare",
    "cleanup": "close",
}
SUFFIXES = {
    "_cnt": "num_x",
    "_count": "num_x",
    "_secs": "x_s",
    "_sec": "x_s",
    "_millis": "x_s",
    "_nbytes": "x_bytes",
}
# by plug-in: names that the engine around it calls it by
THEIRS = {"vllm": {"lookup", "req_context"}}
NOTES = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")


class Named(NamedTuple):
    line: int
    name: str
    is_class: bool = False


def names_in(tree: ast.Module) -> Iterator[Named]:
    """Every name that the file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield Named(node.lineno, node.name, is_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Named(node.lineno, node.name)
        elif isinstance(node, ast.arg):
            yield Named(node.lineno, node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Named(node.lineno, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Named(node.lineno, node.attr)
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield Named(node.lineno, node.asname)


def words_of(name: str) -> list[str]:
    """`KvCacheStats` and `kv_cache_stats` have the same words."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def faults(source: str, module: str) -> list[str]:
    found = []
    if module in MODULES:
        found.append(f"a module is called {module}")
    for line, name, is_class in names_in(ast.parse(source)):
        if name in THEIRS.get(module, ()):
            continue
        if is_class and name.endswith(CLASS_ENDINGS):
            found.append(f"{module}:{line} class {name}")
        # what operating systems call it; what is paged out is a block all the same
        known = name.replace("page_out", "")
        found += [f"{module}:{line} {name}: say {WORDS[word]}" for word in words_of(known) if word in WORDS]
        found += [
            f"{module}:{line} {name}: say {ours}"
            for ending, ours in SUFFIXES.items()
            if name.endswith(ending)
        ]
        if name.startswith(("n_", "_n_")):
            found.append(f"{module}:{line} {name}: say num_x")
    found += [
        f"{module}:{number} {line.strip()}"
        for number, line in enumerate(source.splitlines(), 1)
        if NOTES.search(line)
    ]
    return found


def test_no_name_in_the_code_base_is_a_banned_word() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = [fault for path in paths for fault in faults(path.read_text(), path.stem)]
    assert len(paths) > 30
    assert not found, "\n" + "\n".join(found)


def test_a_class_has_a_name_that_no_other_class_has() -> None:
    where: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
    assert len(where) > 300, "every class is looked at"


def test_every_file_says_what_it_owns_and_defers_its_annotations() -> None:
    """Package files that only hold others may be empty."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if not source.strip():
            continue
        body = ast.parse(source).body
        if not ast.get_docstring(ast.parse(source)):
            found.append(f"{path.relative_to(PACKAGE)} has no docstring")
        if len(body) > 1 and path.stem != "__init__" and "from __future__ import annotations" not in source:
            found.append(f"{path.relative_to(PACKAGE)} evaluates its annotations")
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "class BlockManager: ...",
        "class RequestHandler: ...",
        "class KvInfo: ...",
        "def free_page(): ...",
        "def f(seq): ...",
        "for req in waiting: ...",
        "self.page_ids = []",
        "class SeqTable: ...",
        "block_cnt = 1",
        "def f(n_blocks): ...",
        "timeout_sec = 1.0",
        "import numpy as utils_mgr",
        "x = 1  # TODO: later",
    ],
)
def test_the_checker_refuses(source: str) -> None:
    assert faults(source, "pool")


@pytest.mark.parametrize(
    "source",
    [
        "num_blocks = 1",
        "def sequence(): ...",
        "class Requests: ...",
        "timeout_s = 1.0",
        "class BlockPool: ...",
    ],
)
def test_the_checker_allows(source: str) -> None:
    assert faults(source, "pool") == []


def test_the_checker_refuses_a_module_by_its_name() -> None:
    assert faults("", "utils")

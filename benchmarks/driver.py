"""What the measurements of developers have in common: flags, an engine, a table, a JSON file. Owns no
measurement."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.bench.report import Column, figure, print_table
from penstock.config import LoraConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.flags import config_of, engine_flags

Flag = tuple[Any, str]  # default, help


def flags(doc: str | None, engine: bool = False, **others: Flag) -> argparse.ArgumentParser:
    """`--json`, one flag for each of `others`, of the kind of its default, and with `engine` all flags of an
    engine. A list is given with commas."""
    parents = [engine_flags(LoraConfig)] if engine else []
    parser = argparse.ArgumentParser(
        description=doc, parents=parents, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, text) in others.items():
        kind: Any = type(default)
        if isinstance(default, list):
            item = type(default[0])
            kind = lambda given, item=item: [item(part) for part in given.split(",")]  # noqa: E731
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


@contextmanager
def warmed(args: argparse.Namespace) -> Iterator[Engine]:
    """An engine of these flags, which this thread steps."""
    engine = build(config_of(args))
    engine.warm()
    try:
        yield engine
    finally:
        engine.close(timeout_s=60.0)


def show(rows: Sequence[dict[str, Any]], columns: Sequence[Column | tuple[Any, ...]], left: int = 1) -> None:
    """`columns`: a column, or what `figure` makes one of: title, path, digits, factor."""
    made = [one if isinstance(one, Column) else figure(*one) for one in columns]
    print_table([one.title for one in made], [[one.cell(row) for one in made] for row in rows], left=left)


def text(title: str, name: str) -> Column:
    return Column(title, lambda row: str(row[name]))


def write(path: Path | None, found: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


class Side:
    """A process that does what a line on its stdin asks, answers with a line of JSON, and is idle
    otherwise."""

    def __init__(self, name: str, command: list[str], threads: int = 1, **environment: str) -> None:
        self.name = name
        self._started_s = time.perf_counter()
        self._ended = False
        pipe, own = subprocess.PIPE, {"OMP_NUM_THREADS": str(threads), **environment}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env={**os.environ, **own}
        )

    @property
    def age_s(self) -> float:
        return time.perf_counter() - self._started_s

    def ask(self, *words: object) -> Any:
        self.send(*words)
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def send(self, *words: object) -> None:
        """`answer` waits for the end of it."""
        print(*words, file=self._process.stdin, flush=True)

    def kill(self) -> None:
        """With -9, if it has not ended. `close` does nothing then."""
        self._process.kill()
        self._process.wait()
        self._ended = True

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._process.communicate(timeout=60)
        if self._process.returncode:
            raise SystemExit(self._process.returncode)

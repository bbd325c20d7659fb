"""Recorded routing: which experts the steps of an engine ran tokens through. Owns the file format, its writer
and its reader; it is written from a running engine by `engine.execution.recorded`.

A JSON line that says what was recorded, then one for each step:

    {"routing_trace": 1, "model": "tiny-qwen3-moe", "experts": 8, "top_k": 2, "layers": [0, 1, 2]}
    {"tokens": 5, "hits": [[0, 3, 4, 5, 7, 2], ...]}

`hits` has a list for each layer with experts: an expert and how many of the step's tokens it had, then the
next. Files that end in .gz are packed.
"""

from __future__ import annotations

import gzip
import json
import queue
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from penstock.errors import ConfigError
from penstock.experts.order import Numbers

VERSION = 1
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
_JOIN_S = 30.0


class RoutedStep(NamedTuple):
    """Of each layer with experts: those that were hit, and by how many tokens each."""

    num_tokens: int
    experts: tuple[Numbers, ...]
    counts: tuple[Numbers, ...]

    @property
    def line(self) -> str:
        hits = [
            np.stack(pair, axis=1).flatten().tolist() for pair in zip(self.experts, self.counts, strict=True)
        ]
        return json.dumps({"tokens": self.num_tokens, "hits": hits}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """A file."""

    name: str
    model: str
    num_experts: int  # of a layer
    top_k: int
    layers: tuple[int, ...]  # of the model, those with experts
    steps: tuple[RoutedStep, ...]

    @property
    def num_all(self) -> int:
        """Experts of all layers."""
        return len(self.layers) * self.num_experts


class RoutingWriter:
    """Writes steps on a thread of its own. `put` never waits. `close` ends the file; idempotent."""

    def __init__(self, path: str, about: Mapping[str, Any]) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._queue: queue.SimpleQueue[RoutedStep | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        try:
            self._file = _opened(path)
            self._file.write(json.dumps({"routing_trace": VERSION, **about}) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"--record-routing {path}: {error.strerror or error}") from None
        self._path = path
        self._thread = threading.Thread(target=self._run, name="routing", daemon=True)
        self._thread.start()

    def put(self, step: RoutedStep) -> None:
        self._queue.put(step)

    def close(self) -> None:
        """Raises ConfigError if something could not be written."""
        self._queue.put(None)
        self._thread.join(_JOIN_S)
        if self._error is not None:
            error, self._error = self._error, None
            raise ConfigError(f"--record-routing {self._path}: {error.strerror or error}")

    def _run(self) -> None:
        try:
            with self._file:
                while (step := self._queue.get()) is not None:
                    self._file.write(step.line + "\n")
        except OSError as error:
            self._error = error


def _opened(path: str) -> TextIO:
    return gzip.open(path, "wt") if path.endswith(".gz") else open(path, "w")


def read_routing(path: Path, num_steps: int | None = None) -> RoutingTrace:
    """The first `num_steps`, or all. Raises ConfigError for a file that is not such a trace."""
    lines = _lines(path)
    where, about = next(lines, (str(path), None))
    if not isinstance(about, dict) or about.get("routing_trace") != VERSION:
        raise ConfigError(f"{where}: not a routing trace of version {VERSION} (see --record-routing)")
    num, top_k, layers = (about.get(name) for name in ("experts", "top_k", "layers"))
    good = _are_counts([num, top_k]) and isinstance(layers, list) and _are_counts([len(layers), *layers], 0)
    if not good or not layers:
        raise ConfigError(f"{where}: experts and top_k must be counts, and layers a list of numbers")
    assert isinstance(num, int) and isinstance(top_k, int) and isinstance(layers, list)
    steps = list[RoutedStep]()
    for where, fields in lines:
        if num_steps is not None and len(steps) == num_steps:
            break
        steps.append(_step(fields, num, len(layers), where))
    if not steps:
        raise ConfigError(f"{path} has no steps")
    return RoutingTrace(path.name, str(about.get("model", "")), num, top_k, tuple(layers), tuple(steps))


def _step(fields: Any, num_experts: int, num_layers: int, where: str) -> RoutedStep:
    hits: Any = fields.get("hits") if isinstance(fields, dict) else None
    good = isinstance(hits, list) and len(hits) == num_layers and _are_counts([fields.get("tokens")])
    for own in hits if good and isinstance(hits, list) else ():
        even = isinstance(own, list) and len(own) % 2 == 0
        good = good and even and _are_counts(own[::2], 0, num_experts - 1) and _are_counts(own[1::2])
        good = good and len(set(own[::2])) == len(own) // 2
    if not good:
        expected = f"tokens, and hits of {num_layers} layers: experts below {num_experts}, each with a count"
        raise ConfigError(f"{where}: expected {expected}")
    pairs = [np.array(own, np.int64).reshape(-1, 2) for own in hits]
    experts, counts = (tuple(one[:, side] for one in pairs) for side in (0, 1))
    return RoutedStep(fields["tokens"], experts, counts)


def _are_counts(values: Sequence[object], least: int = 1, most: int = 1 << 40) -> bool:
    return all(type(value) is int and least <= value <= most for value in values)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                try:
                    yield where, json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{where}: not JSON: {error}") from None
    except _UNREADABLE as error:
        raise ConfigError(f"the routing trace {path} cannot be read: {error}") from None

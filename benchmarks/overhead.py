"""What a part of the engine costs where it does nothing for a request: engines with it and without it, each
in a process of its own, take turns. Prints ratios of neighbouring turns, so that other work of the machine
meets both.

    PYTHONPATH=src python benchmarks/overhead.py tiers       fresh prompts, so that nothing is reused
    PYTHONPATH=src python benchmarks/overhead.py sanitizer   crowds on a tiny model; also beside a copy of the
                                                             source that never asks for an observer
    PYTHONPATH=src python benchmarks/overhead.py trace       the same crowds, with and without a trace
    PYTHONPATH=src python benchmarks/overhead.py answers     a trace of answers by the embedded model
                                                             (both: CPU time of the process)
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from driver import Side, flags, write

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 2  # turns of each side that do not count
CUT = "cut out"
# sides in order: each is compared with the one before
SIDES = {
    "tiers": ("off", "on"),
    "sanitizer": (CUT, "off", "on"),
    "trace": (CUT, "off", "on"),
    "answers": ("off", "on"),
}


# --------------------------------------------------------------------------------- the process of one side


def serve(what: str, side: str) -> None:
    """For every line on stdin one turn, and its seconds on stdout."""
    kinds = {"tiers": _tiers, "sanitizer": _sanitizer, "trace": _trace, "answers": _answers}
    with kinds[what](side) as turn:
        for number, _ in enumerate(sys.stdin):
            print(turn(number), flush=True)


@contextmanager
def _tiers(side: str) -> Iterator[Callable[[int], float]]:
    from penstock.config import Config, KvConfig, OffloadConfig

    # Little host memory: pages are faulted in before the first turn, which is a cost that passes.
    is_on = side == "on"
    offload = OffloadConfig(enabled=is_on, host_gib=0.25 if is_on else None)
    with _fresh_prompts(Config(kv=KvConfig(device_gib=1.0), offload=offload), time.perf_counter) as turn:
        yield turn


@contextmanager
def _answers(side: str) -> Iterator[Callable[[int], float]]:
    from penstock.config import Config, KvConfig, TraceConfig

    with tempfile.TemporaryDirectory() as folder:
        trace = TraceConfig(f"{folder}/trace.json") if side == "on" else TraceConfig()
        with _fresh_prompts(Config(kv=KvConfig(device_gib=1.0), trace=trace), time.process_time) as turn:
            yield turn


@contextmanager
def _fresh_prompts(config: Config, clock: Callable[[], float]) -> Iterator[Callable[[int], float]]:
    from penstock.bench.run import Driver, random_prompts
    from penstock.engine.build import build
    from penstock.engine.loop import settle_process
    from penstock.models.progress import silent

    engine = build(config, silent)
    settle_process()
    driver = Driver(engine)
    driver.wait_ready()

    def turn(number: int) -> float:
        prompt = random_prompts(1, 512, engine.tokenizer.vocab_size, (7, number))[0]
        started = clock()
        driver.submit(prompt, 24)
        driver.run_all()
        seconds = clock() - started
        driver.flush()  # its saves end before the turn of the other side
        return seconds

    yield turn
    engine.close(20.0)


@contextmanager
def _sanitizer(side: str) -> Iterator[Callable[[int], float]]:
    from penstock.engine.build import build
    from penstock.sanitizer.sanitizer import Sanitizer
    from tests.support.driving import tiny_config

    sanitizer = Sanitizer() if side == "on" else None
    with _crowds(
        build(tiny_config(blocks=256, host_blocks=512), sanitizer=sanitizer), time.perf_counter
    ) as turn:
        yield turn
    if sanitizer is not None and sanitizer.reports:
        raise SystemExit("\n".join(map(str, sanitizer.reports)))


@contextmanager
def _trace(side: str) -> Iterator[Callable[[int], float]]:
    from penstock.engine.build import build
    from tests.support.driving import tiny_config

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/trace.json" if side == "on" else None
        with _crowds(build(tiny_config(blocks=256, host_blocks=512, trace=file)), time.process_time) as turn:
            yield turn


@contextmanager
def _crowds(engine: Engine, clock: Callable[[], float]) -> Iterator[Callable[[int], float]]:
    from tests.support.driving import run_all, settle_all, submit

    def turn(number: int) -> float:
        rng = random.Random(number)
        stems = [rng.choices(range(1, 500), k=64) for _ in range(4)]
        started = clock()
        for _ in range(3):
            for stem in stems * 4:
                submit(engine, stem + rng.choices(range(1, 500), k=rng.randrange(1, 40)), max_tokens=24)
            run_all(engine)
            settle_all(engine)
            engine.cache.reset(("device",))
        return clock() - started

    yield turn
    engine.close(20.0)


class WithoutObservers(ast.NodeTransformer):
    """Takes away what is done only where an observer is there."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        is_and = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        first = node.test.values[0] if is_and and isinstance(node.test, ast.BoolOp) else node.test
        if ast.unparse(first) in ("self._observer is not None", "observer is not None"):
            return node.orelse or [ast.Pass()]
        return node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        calls = [one for one in node.items if not ast.unparse(one.context_expr).startswith("self._watch.")]
        node.items = calls
        return node if calls else node.body


def copy_without_observers(target: Path) -> None:
    shutil.copytree(ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [
        *target.glob("penstock/lanes/*.py"),
        *target.glob("penstock/kv/**/*.py"),
        *target.glob("penstock/engine/*.py"),
    ]:
        tree = ast.fix_missing_locations(WithoutObservers().visit(ast.parse(path.read_text())))
        path.write_text(ast.unparse(tree))


# ------------------------------------------------------------------------------------------- their turns


def measure(what: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Ratios by the sides that they compare."""
    names = SIDES[what]
    if CUT in names:
        copy_without_observers(folder / "src")
    sides = {}
    for name in names:
        source = folder / "src" if name == CUT else ROOT / "src"
        command = [sys.executable, __file__, what, "--side", name]
        sides[name] = Side(name, command, PYTHONPATH=f"{source}{os.pathsep}{ROOT}")
    ratios: dict[str, list[float]] = {f"{b} against {a}": [] for a, b in pairwise(names)}
    order = random.Random(0)
    for number in range(WARM_UP + rounds):
        seconds = {name: float(sides[name].ask("go")) for name in order.sample(names, len(names))}
        print(number, *(f"{name} {seconds[name]:.3f} s" for name in names), flush=True)
        if number >= WARM_UP:
            for pair, found in ratios.items():
                later, earlier = pair.split(" against ")
                found.append(seconds[later] / seconds[earlier])
    for side in sides.values():
        side.close()
    return ratios


def main() -> None:
    parser = flags(__doc__, rounds=(40, "turns of each side"))
    parser.add_argument("what", choices=SIDES)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(args.what, args.side)
        return
    with tempfile.TemporaryDirectory() as folder:
        ratios = measure(args.what, args.rounds, Path(folder))
    for pair, found in ratios.items():
        low, median, high = statistics.quantiles(found, n=4)
        print(f"{pair}: median {median:.4f}, middle half {low:.4f} to {high:.4f}, {len(found)} rounds")
    write(args.json, ratios)


if __name__ == "__main__":
    main()

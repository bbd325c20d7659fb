"""What the race sanitizer costs: the same crowd of requests on a tiny model with tiers, with the sanitizer
on, with it off, and in a copy of the source without any question whether somebody listens. Three processes
take turns; prints ratios of neighbouring turns.

    .venv/bin/python tools/sanitizer_cost.py [--rounds 12]
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MODES = ("cut out", "off", "on")


class _WithoutListeners(ast.NodeTransformer):
    """Takes away what is done only where an observer is there."""

    def __init__(self) -> None:
        self.num_cut = 0

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        first = (
            node.test.values[0]
            if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
            else node.test
        )
        if ast.unparse(first) in ("self._observer is not None", "observer is not None"):
            self.num_cut += 1
            return node.orelse or [ast.Pass()]
        return node


def strip(source: Path, target: Path) -> int:
    """Copy `source`, cut; returns how many questions there were."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    num_cut = 0
    for path in [*target.glob("penstock/lanes/*.py"), *target.glob("penstock/kv/**/*.py")]:
        cutter = _WithoutListeners()
        tree = ast.fix_missing_locations(cutter.visit(ast.parse(path.read_text())))
        if cutter.num_cut:
            path.write_text(ast.unparse(tree))
            num_cut += cutter.num_cut
    return num_cut


def serve(mode: str) -> None:
    """In a child: for every line on stdin one crowd, and its seconds on stdout."""
    from penstock.engine.build import build
    from penstock.sanitizer.sanitizer import Sanitizer
    from tests.support.driving import run_all, settle_all, submit, tiny_config

    sanitizer = Sanitizer() if mode == "on" else None
    engine = build(tiny_config(blocks=256, host_blocks=512), sanitizer=sanitizer)
    for number, _ in enumerate(sys.stdin):
        rng = random.Random(number)
        stems = [[rng.randrange(1, 500) for _ in range(64)] for _ in range(4)]
        started = time.perf_counter()
        for _ in range(3):
            for stem in stems:
                for _ in range(4):
                    submit(
                        engine,
                        stem + [rng.randrange(1, 500) for _ in range(rng.randrange(1, 40))],
                        max_tokens=24,
                    )
            run_all(engine)
            settle_all(engine)
            engine.cache.reset(("device",))
        print(time.perf_counter() - started, flush=True)
    engine.close(20.0)
    if sanitizer is not None and sanitizer.reports:
        raise SystemExit("\n".join(str(report) for report in sanitizer.reports))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--serve", choices=_MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        num_cut = strip(ROOT / "src", Path(folder) / "src")
        engines: dict[str, subprocess.Popen[str]] = {}
        for mode in _MODES:
            path = os.pathsep.join(
                [str(Path(folder) / "src" if mode == "cut out" else ROOT / "src"), str(ROOT)]
            )
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--serve", mode]
            engines[mode] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
            )

        def turn(mode: str) -> float:
            engine = engines[mode]
            assert engine.stdin is not None and engine.stdout is not None
            engine.stdin.write("go\n")
            return float(engine.stdout.readline())

        off: list[float] = []
        on: list[float] = []
        order = random.Random(0)
        for number in range(1 + args.rounds):
            seconds = {mode: turn(mode) for mode in order.sample(_MODES, len(_MODES))}
            if number:
                off.append(seconds["off"] / seconds["cut out"])
                on.append(seconds["on"] / seconds["off"])
                print(
                    f"{number:3} of {args.rounds}: "
                    + ", ".join(f"{mode} {seconds[mode]:.3f} s" for mode in _MODES),
                    flush=True,
                )
        for engine in engines.values():
            engine.communicate()
            if engine.returncode:
                raise SystemExit(engine.returncode)
    print(f"off against cut out ({num_cut} places): median {statistics.median(off):.4f} of {len(off)} rounds")
    print(f"on against off: median {statistics.median(on):.4f}")


if __name__ == "__main__":
    main()

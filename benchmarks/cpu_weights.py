"""The embedded model on this CPU in each form of weights, beside llama.cpp on the same file: rounds in turn.
Owns the comparison.

`python benchmarks/cpu_weights.py [--llama-cpp FOLDER]`, where FOLDER has npm's `node-llama-cpp` installed.
Every side is a process of its own, idle while another is measured; the median over rounds is taken, since a
shared machine disturbs single ones. Where it is busy throughout, `--threads 1` and the CPU time of a token
(or a prompt) are what can be compared: waiting for a core is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from driver import Side, flags, write
from penstock.bench.decode import steady_times
from penstock.bench.report import describe_machine
from penstock.bench.run import Driver, random_prompts
from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig
from penstock.engine.build import build
from penstock.models.embedded import embedded_file

CASES = (("decode", 1), ("decode", 4), ("decode", 8), ("prefill", 512))
DECODED = 32  # tokens of each request


def serve_side(weights: Any) -> None:
    """The process of one form."""
    start = time.perf_counter()
    source = ModelSource(device="cpu", weights=weights)
    engine = build(
        Config(
            source, KvConfig(device_blocks=512, prefix_cache=False), EngineConfig(1024), OffloadConfig(False)
        )
    )
    driver = Driver(engine)
    rss = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
    )
    print(
        json.dumps({"ready_s": time.perf_counter() - start, "rss_mib": int(rss.split()[1]) / 1024}),
        flush=True,
    )
    for run, line in enumerate(sys.stdin):
        kind, count = line.split()
        start_cpu = time.process_time()
        wall_s = _measure(driver, kind, int(count), run)
        cpu_s = (time.process_time() - start_cpu) / (DECODED if kind == "decode" else 1)
        print(json.dumps({"ms": wall_s * 1000, "cpu_ms": cpu_s * 1000}), flush=True)
    engine.close(timeout_s=20.0)


def _measure(driver: Driver, kind: str, count: int, run: int) -> float:
    vocab = driver.engine.tokenizer.vocab_size
    if kind == "prefill":
        driver.submit(random_prompts(1, count, vocab, (run,))[0], 1)
        start = time.perf_counter()
        driver.run_all()
        return time.perf_counter() - start
    for prompt in random_prompts(count, 16, vocab, (run,)):
        driver.submit(prompt, DECODED)
    return float(median(steady_times(driver.run_all(), count)))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    own = [sys.executable, __file__, "--side"]
    commands = {name: [*own, name] for name in args.weights.split(",")}
    if args.llama_cpp is not None:
        script = str(Path(__file__).with_name("llama_cpp_side.mjs"))
        file, threads = str(embedded_file()), str(args.threads)
        commands["llama.cpp"] = ["node", script, args.llama_cpp, file, threads]
    sides, ready = [], {}
    for name, command in commands.items():  # one after the other, since each start is timed
        sides.append(Side(name, command, args.threads))
        ready[name] = {**sides[-1].answer(), "start_s": sides[-1].age_s}
    times: dict[str, dict[str, list[tuple[float, float]]]] = {
        f"{kind} {count}": {side.name: [] for side in sides} for kind, count in CASES
    }
    for number in range(args.rounds + 1):
        for kind, count in CASES:
            for side in sides:
                # of a step that decodes `count` requests, or of a prompt of `count` tokens
                taken = side.ask(kind, count)
                if number:  # the first warms up
                    times[f"{kind} {count}"][side.name].append((taken["ms"], taken["cpu_ms"]))
    result = {
        "machine": describe_machine(),
        "threads": args.threads,
        "rounds": args.rounds,
        "ready": ready,
        "ms": {case: {name: _figures(taken) for name, taken in of.items()} for case, of in times.items()},
    }
    for side in sides:
        side.close()
    return result


def _figures(taken: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*taken, strict=True)
    return {"median": median(wall), "best": min(wall), "cpu": median(cpu)}


def show(result: dict[str, Any]) -> None:
    for name, ready in result["ready"].items():
        print(
            f"{name:10}  ready after {ready['start_s']:.1f} s (load {ready['ready_s']:.1f} s), "
            f"{ready['rss_mib']:.0f} MiB resident"
        )
    for case, sides in result["ms"].items():
        kind, count = case.split()
        rates = (
            f"{name} {ms['median']:.1f} ms (best {ms['best']:.1f}, CPU {ms['cpu']:.1f}), "
            f"{int(count) / ms['median'] * 1000:.0f} tok/s"
            for name, ms in sides.items()
        )
        print(f"{kind} {count:>3}: " + "; ".join(rates))


def main() -> int:
    parser = flags(
        __doc__,
        weights=("float32,auto", "forms to compare"),
        threads=(2, "of each side"),
        rounds=(7, "in turn"),
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--llama-cpp", metavar="FOLDER", help="where node_modules/node-llama-cpp is")
    args = parser.parse_args()
    if args.side is not None:
        serve_side(args.side)
        return 0
    result = compare(args)
    show(result)
    write(args.json, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

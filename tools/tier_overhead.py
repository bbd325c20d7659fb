"""What the tiers cost where nothing is reused: two engines, one with them and one without, each in its own
process, take turns at fresh prompts. Prints the ratio of the times of neighbouring turns, so that whatever
else the machine does meets both.

    .venv/bin/python tools/tier_overhead.py [--pairs 40] [--tokens 512] [--generate 24] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

_WARM_UP = 2  # turns of each that do not count


def serve(tiers: bool, tokens: int, generate: int) -> None:
    """In a child: for every line on stdin one request, and its seconds on stdout."""
    from penstock.bench.run import Driver, random_prompts
    from penstock.config import Config, KvConfig, OffloadConfig
    from penstock.engine.build import build
    from penstock.engine.loop import settle_process
    from penstock.models.progress import silent

    # So little host memory that it is found before the first turn, and used over and over from then on, as
    # that of a server that has run for a while: finding it on first use is another cost, which passes.
    offload = OffloadConfig(enabled=tiers, host_gib=0.25 if tiers else None)
    engine = build(Config(kv=KvConfig(device_gib=1.0), offload=offload), silent)
    settle_process()
    driver = Driver(engine)
    driver.wait_ready()
    for number, _ in enumerate(sys.stdin):
        prompt = random_prompts(1, tokens, engine.tokenizer.vocab_size, (7, number))[0]
        started = time.perf_counter()
        driver.submit(prompt, generate)
        driver.run_all()
        seconds = time.perf_counter() - started
        driver.flush()  # what it saves is over before the other's turn
        print(seconds, flush=True)
    engine.close(20.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--generate", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=["on", "off"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve == "on", args.tokens, args.generate)
        return
    command = [
        sys.executable,
        __file__,
        "--tokens",
        str(args.tokens),
        "--generate",
        str(args.generate),
        "--serve",
    ]
    engines = {
        mode: subprocess.Popen(
            [*command, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for mode in ("on", "off")
    }

    def turn(mode: str) -> float:
        engine = engines[mode]
        assert engine.stdin is not None and engine.stdout is not None
        engine.stdin.write("go\n")
        return float(engine.stdout.readline())

    ratios: list[float] = []
    order = random.Random(0)
    for pair in range(_WARM_UP + args.pairs):
        modes = ["on", "off"]
        order.shuffle(modes)
        seconds = {mode: turn(mode) for mode in modes}
        if pair >= _WARM_UP:
            ratios.append(seconds["on"] / seconds["off"])
            print(
                f"{pair - _WARM_UP + 1:3} of {args.pairs}: with tiers {seconds['on']:.3f} s, without "
                f"{seconds['off']:.3f} s",
                flush=True,
            )
    for engine in engines.values():
        engine.communicate()
    spread = statistics.quantiles(ratios, n=4)
    print(
        f"median of the ratios {statistics.median(ratios):.4f}, middle half {spread[0]:.4f} to "
        f"{spread[2]:.4f}, {len(ratios)} pairs"
    )
    if args.json:
        args.json.write_text(
            json.dumps({"tokens": args.tokens, "generate": args.generate, "ratios": ratios}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

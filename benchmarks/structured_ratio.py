"""Time between tokens of 32 requests, none and half of them under a JSON schema, in turns. The ratio is what
the others pay.

    PYTHONPATH=src python3 benchmarks/structured_ratio.py [--model smollm2-135m ...] [--tokens N] [--rounds N]
    [--json FILE]

Steps are driven from this thread. A figure is the median over the steps in which all requests decode; a round
measures both ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from penstock.config import LoraConfig
from penstock.contract import Grammar, SamplingParams, TokenEvent
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.flags import config_of, engine_flags

NUM_REQUESTS = 32
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
        "required": ["name", "size"],
    },
    "minItems": 1000,
}


def listen(event: TokenEvent) -> None:
    """Nobody reads the answers."""


def step_s(engine: Engine, num_constrained: int, num_tokens: int) -> float:
    """The median time of a step in which every request decodes."""
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    for number in range(NUM_REQUESTS):
        form = grammar if number < num_constrained else None
        sampling = SamplingParams(max_tokens=num_tokens, seed=number, grammar=form, ignore_eos=form is None)
        engine.submit([7 + number, 11, 13, 17], sampling, listen)
    times: list[float] = []
    while engine.has_work():
        started = time.perf_counter()
        if not engine.step():
            engine.wait_work(1.0)
        elif engine.stats().requests["running"] == NUM_REQUESTS:
            times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, parents=[engine_flags(LoraConfig)])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = build(config_of(args))
    engine.warm()
    step_s(engine, NUM_REQUESTS // 2, 8)
    rounds = [
        (step_s(engine, 0, args.tokens), step_s(engine, NUM_REQUESTS // 2, args.tokens))
        for _ in range(args.rounds)
    ]
    none, half = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(some / no for no, some in rounds)
    waited = engine.stats().blocked_s["mask"]
    figures = {
        "none_ms": none * 1e3,
        "half_ms": half * 1e3,
        "ratio": ratio,
        "engine_waited_for_masks_s": waited,
    }
    print("\n".join(f"{name:28} {value:.3f}" for name, value in figures.items()))
    engine.close()
    if args.json is not None:
        args.json.write_text(
            json.dumps({"name": engine.name, "requests": NUM_REQUESTS, **figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

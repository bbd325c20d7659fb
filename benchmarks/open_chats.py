"""Throughput of chats that state no `max_tokens`, beside the same chats with the exact one: what not knowing
costs.

    PYTHONPATH=src python3 benchmarks/open_chats.py --model tiny-qwen3 --load-format dummy --device-kv-blocks
    N

A number of clients send one chat after the other, each with a prompt of its own. Lengths of answers are drawn
once, log-normal. A chat that states none is cancelled at its length, as by a stop string. Both ways take
turns, so that their ratio means something on a shared machine. What counts is the time until the last chat is
sent. Steps are counted as well: they depend on who runs together, and not on the clock.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from driver import flags, warmed, write
from penstock.contract import SamplingParams, Submission, TokenEvent
from penstock.engine.engine import Engine

Chat = tuple[list[int], int]  # prompt, length of the answer
NEVER = ("\x00never\x00",)  # a stop string: the engine does not know how long the answer will be


def drawn_lengths(num: int, median: int, longest: int, seed: int) -> list[int]:
    r = random.Random(seed)
    return [max(8, min(longest, round(median * r.lognormvariate(0.0, 0.7)))) for _ in range(num)]


class Client:
    """Sends its next chat when one has ended."""

    def __init__(self, engine: Engine, route: str, chats: Iterator[Chat], is_open: bool) -> None:
        self._engine, self._route, self._chats, self._is_open = engine, route, chats, is_open
        self.num_tokens = 0  # of answers
        self._num_left = 0
        self._request_id = ""
        self._ask()

    def _ask(self) -> None:
        found = next(self._chats, None)
        if found is None:
            return
        prompt, self._num_left = found
        room = self._engine.max_model_len - len(prompt)
        sampling = SamplingParams(
            max_tokens=room if self._is_open else self._num_left,
            temperature=0.0,
            ignore_eos=True,
            stop=NEVER if self._is_open else (),
        )
        submit, route = self._engine.submit, self._route
        self._request_id = submit(Submission(prompt, sampling, cache_salt=route, route=route), self._hear)

    def _hear(self, event: TokenEvent) -> None:
        num = min(self._num_left, len(event.tokens))
        self.num_tokens += num
        self._num_left -= num
        if event.finish is not None:
            self._ask()
        elif self._is_open and num and not self._num_left:
            self._engine.cancel(self._request_id)


def measure(engine: Engine, route: str, args: argparse.Namespace, is_open: bool) -> dict[str, Any]:
    r = random.Random(args.seed)
    most = engine.max_model_len - args.prompt_tokens
    lengths = drawn_lengths(args.clients * args.chats, args.tokens, most, args.seed)
    waiting = [([r.randrange(1, 500) for _ in range(args.prompt_tokens)], length) for length in lengths]
    before, started_s = engine.stats(), time.perf_counter()
    chats = (waiting.pop() for _ in lengths)
    clients = [Client(engine, route, chats, is_open) for _ in range(args.clients)]
    seconds, num_tokens, after = 0.0, 0, before
    while engine.has_work():
        if not engine.step():
            engine.wait_work(1.0)
        if waiting:  # later fewer and fewer run, and the longest answer decides
            seconds, num_tokens = time.perf_counter() - started_s, sum(one.num_tokens for one in clients)
            after = engine.stats()
    steps = after.steps - before.steps
    return {
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_step": num_tokens / steps,
        "retractions": after.retractions - before.retractions,
        "expected_tokens": after.expected_tokens.get(route),
    }


def main() -> None:
    args = flags(
        __doc__,
        engine=True,
        clients=(64, "that send chats"),
        chats=(4, "of each client, on average"),
        prompt_tokens=(64, "tokens of a prompt"),
        tokens=(150, "median length of an answer"),
        rounds=(3, "of both ways"),
    ).parse_args()
    with warmed(args) as engine:
        measure(engine, "warm-up", argparse.Namespace(**{**vars(args), "chats": 2}), is_open=False)
        ways: dict[str, list[dict[str, Any]]] = {"exact": [], "open": []}
        for number in range(args.rounds):
            for way, taken in ways.items():
                taken.append(measure(engine, f"{way} {number}", args, is_open=way == "open"))
                print(way, " ".join(f"{name} {value}" for name, value in taken[-1].items()))
    pairs = list(zip(ways["exact"], ways["open"], strict=True))
    names = ("tokens_per_s", "tokens_per_step")
    ratios = {name: statistics.median(some[name] / exact[name] for exact, some in pairs) for name in names}
    print("open, of exact:", ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
    write(args.json, {"name": engine.name, "admission": args.admission, **ways, "ratio": ratios})


if __name__ == "__main__":
    main()

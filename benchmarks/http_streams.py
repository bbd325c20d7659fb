"""What HTTP costs: tokens per second and time between tokens of 1, 32 and 256 streams, in process, over HTTP
with engine and HTTP in one process, and over HTTP with front processes. One command, one machine, the same
work each time.

    PYTHONPATH=src python3 benchmarks/http_streams.py --model qwen3-4b --load-format dummy --device cuda
    [--json FILE]

Each stream asks again as soon as it is answered. Every prompt is new, so that nothing is reused. Clients are
processes of their own with bare sockets. Other flags are those of `penstock serve`, for all three.

Answers of equal length end together, and prompts come in waves. With `--spread 0.5` they are from half to one
and a half times as long, as those of real users are: then nearly every step has a prompt beside its decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from driver import flags, show, text, write

READY = "Penstock is ready on "
ROUNDS = {1: 4, 32: 4}  # requests of each stream, by how many there are; of others:
OTHER_ROUNDS = 3
VOCAB = 256  # token ids are below this


# ---------------------------------------------------------------------------------------------------- figures


def summary(
    num_tokens: int, seconds: float, gaps: Sequence[float], firsts: Sequence[float]
) -> dict[str, float]:
    ordered = sorted(gaps)
    return {
        "tokens_per_s": num_tokens / seconds,
        "gap_p50_ms": 1000 * ordered[len(ordered) // 2],
        "gap_p99_ms": 1000 * ordered[int(len(ordered) * 0.99)],
        "ttft_p50_ms": 1000 * statistics.median(firsts),
        "ttft_p99_ms": 1000 * sorted(firsts)[int(len(firsts) * 0.99)],
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def prompts(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(num_tokens)]


def questions(
    args: argparse.Namespace, streams: int, stream: int, run: int = 0
) -> list[tuple[list[int], int]]:
    """What one stream asks: prompts, and how many tokens of an answer it wants."""
    found = []
    for number in range(ROUNDS.get(streams, OTHER_ROUNDS)):
        seed = hash((streams, stream, number, run))
        output = round(args.output * random.Random(seed + 1).uniform(1 - args.spread, 1 + args.spread))
        found.append((prompts(seed, args.prompt), output))
    return found


def num_wanted(args: argparse.Namespace, streams: int) -> int:
    return sum(output for stream in range(streams) for _, output in questions(args, streams, stream))


# ------------------------------------------------------------------------------------------------- in process


class Asking:
    """One stream: the listener of its requests, one after another."""

    def __init__(
        self,
        gaps: list[float],
        firsts: list[float],
        over: SimpleQueue[Asking],
        asks: list[tuple[list[int], int]],
    ) -> None:
        self.asks = asks
        self._gaps, self._firsts, self._over = gaps, firsts, over
        self._last = self._started = 0.0

    def next(self) -> tuple[list[int], int]:
        self._last = self._started = time.perf_counter()
        return self.asks.pop()

    def __call__(self, event: Any) -> None:
        now = time.perf_counter()
        if event.tokens:
            (self._firsts if self._last == self._started else self._gaps).append(now - self._last)
            self._last = now
        if event.finish is not None:
            assert event.finish == "length", event
            self._over.put(self)


def in_process(args: argparse.Namespace, rest: list[str]) -> None:
    from penstock import cli
    from penstock.contract import SamplingParams, Submission
    from penstock.engine.build import build
    from penstock.engine.loop import EngineLoop
    from penstock.flags import config_of

    engine = build(config_of(cli.make_parser().parse_args(["serve", *rest])))
    loop = EngineLoop(engine)
    loop.start()
    found: dict[int, list[dict[str, float]]] = {streams: [] for streams in args.streams}
    for streams, run in itertools.product(args.streams, range(args.repeat)):
        gaps: list[float] = []
        firsts: list[float] = []
        over: SimpleQueue[Asking] = SimpleQueue()
        for asking in [
            Asking(gaps, firsts, over, questions(args, streams, stream, run)) for stream in range(streams)
        ]:
            over.put(asking)
        begun = time.perf_counter()
        left = streams
        while left:
            asking = over.get()
            if asking.asks:
                prompt, output = asking.next()
                sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, seed=1)
                engine.submit(Submission(prompt, sampling), asking)
            else:
                left -= 1
        taken_s = time.perf_counter() - begun
        found[streams].append(summary(num_wanted(args, streams), taken_s, gaps, firsts))
    print(json.dumps(found), flush=True)
    loop.close(0.0)


# -------------------------------------------------------------------------------------------------- over HTTP


class Stream(asyncio.Protocol):
    """One connection that asks again and again, each time when the answer before is over. It only looks for
    marks: parsing takes time."""

    def __init__(self, bodies: list[bytes], done: asyncio.Future[None]) -> None:
        self.gaps: list[float] = []
        self.firsts: list[float] = []
        self._bodies = bodies
        self._done = done
        self._tail = b""
        self._over = False
        self._last = self._started = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def ask(self) -> None:
        self._last = self._started = time.perf_counter()
        self._transport.write(self._bodies.pop())

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        seen = self._tail + data
        if num := seen.count(b"data: {"):
            if self._last == self._started:
                self.firsts.append(now - self._last)
            else:
                self.gaps += [(now - self._last) / num] * num  # those that came together share the time
            self._last = now
        self._tail = seen[-6:]  # one byte less than a mark has
        self._over = self._over or b"[DONE]" in seen
        if self._over and seen.endswith(b"0\r\n\r\n"):
            self._tail, self._over = b"", False
            if self._bodies:
                self.ask()
            else:
                self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server hung up"))


async def client(host: str, port: int, streams: list[list[bytes]]) -> None:
    """Says when it is connected, waits for a line, and says what it saw."""
    loop = asyncio.get_running_loop()
    opened: list[tuple[Stream, asyncio.Future[None]]] = []
    for bodies in streams:
        done: asyncio.Future[None] = loop.create_future()
        _, stream = await loop.create_connection(
            lambda bodies=bodies, done=done: Stream(bodies, done),  # type: ignore[misc]
            host,
            port,
        )
        opened.append((stream, done))
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for stream, _ in opened:
        stream.ask()
    await asyncio.gather(*(done for _, done in opened))
    print("over", flush=True)
    gaps = [gap for stream, _ in opened for gap in stream.gaps]
    firsts = [first for stream, _ in opened for first in stream.firsts]
    print(json.dumps({"gaps": gaps, "firsts": firsts}), flush=True)


def run_client(argv: list[str]) -> None:
    host, port, model, streams, run, first, step, prompt, output, spread = argv
    args = argparse.Namespace(prompt=int(prompt), output=int(output), spread=float(spread))
    bodies = []
    for stream in range(int(first), int(streams), int(step)):
        asked = []
        for asked_prompt, wanted in questions(args, int(streams), stream, int(run)):
            body = {"model": model, "prompt": asked_prompt, "max_tokens": wanted}
            data = json.dumps(
                {**body, "temperature": 0, "ignore_eos": True, "seed": 1, "stream": True}
            ).encode()
            asked.append(
                (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n") % len(data) + data
            )
        bodies.append(asked)
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop").install()
    asyncio.run(client(host, int(port), bodies))


def over_http(args: argparse.Namespace, rest: list[str], api: list[str]) -> dict[int, list[dict[str, float]]]:
    serve = ["-m", "penstock", "serve", "--port", "0", "--max-concurrent", "1024", "--log-level", "warning"]
    command = [sys.executable, *serve, *rest, *api]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith(READY)).removeprefix(READY).strip()
        try:
            return {
                streams: [measure(args, url, streams, run) for run in range(args.repeat)]
                for streams in args.streams
            }
        finally:
            server.terminate()
            server.wait(120)


def measure(args: argparse.Namespace, url: str, streams: int, run: int) -> dict[str, float]:
    from urllib.request import urlopen

    host, _, port = url.removeprefix("http://").rpartition(":")
    model = json.load(urlopen(f"{url}/v1/models"))["data"][0]["id"]
    num_clients = min(streams, args.clients)
    asked = (args.prompt, args.output, args.spread)
    commands = [
        [
            sys.executable,
            __file__,
            "--as-client",
            host,
            port,
            model,
            *map(str, (streams, run, first, num_clients, *asked)),
        ]
        for first in range(num_clients)
    ]
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    for one in clients:
        assert one.stdout is not None and one.stdout.readline().strip() == "connected"
    begun = time.perf_counter()
    for one in clients:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    for one in clients:
        assert one.stdout is not None and one.stdout.readline().strip() == "over"
    seconds = time.perf_counter() - begun
    replies = [json.loads(one.stdout.readline()) for one in clients if one.stdout is not None]
    for one in clients:
        one.wait(60)
    gaps = [gap for reply in replies for gap in reply["gaps"]]
    firsts = [first for reply in replies for first in reply["firsts"]]
    return summary(num_wanted(args, streams), seconds, gaps, firsts)


# ------------------------------------------------------------------------------------------------------- main


def main() -> None:
    if sys.argv[1:2] == ["--as-client"]:
        run_client(sys.argv[2:])
        return
    parser = flags(
        __doc__,
        streams=([1, 32, 256], "at once"),
        prompt=(256, "tokens of a prompt"),
        output=(256, "tokens of an answer"),
        spread=(0.0, "answers are so much longer or shorter, as a share of --output"),
        clients=(max(1, min(8, (os.cpu_count() or 2) // 2)), "processes"),
        processes=("0,", "values of --api-processes; an empty one is the default"),
        repeat=(1, "runs of each; medians are shown, and the least and most tokens per second"),
    )
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.in_process:
        in_process(args, rest)
        return
    command = [sys.executable, __file__, "--in-process", *sys.argv[1:]]
    here = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    base = {int(num): runs for num, runs in json.loads(here.stdout.splitlines()[-1]).items()}
    found = {"in process": base}
    for value in args.processes.split(","):
        api = ["--api-processes", value] if value else []
        found[f"HTTP, --api-processes {value}" if value else "HTTP, default"] = over_http(args, rest, api)
    rows = []
    for name, by_streams in found.items():
        for num, runs in by_streams.items():
            middle, at_once = medians(runs), medians(base[num])
            rates = sorted(run["tokens_per_s"] for run in runs)
            rows.append(
                {
                    "name": name,
                    "streams": num,
                    **middle,
                    "least": rates[0],
                    "most": rates[-1],
                    "rate": middle["tokens_per_s"] / at_once["tokens_per_s"],
                }
            )
    columns = [
        ("streams", "streams"),
        ("tok/s", "tokens_per_s"),
        ("least", "least"),
        ("most", "most"),
        ("of in process", "rate", 2),
        ("gap p50 ms", "gap_p50_ms", 2),
        ("gap p99 ms", "gap_p99_ms", 2),
        ("ttft p50 ms", "ttft_p50_ms", 1),
        ("ttft p99 ms", "ttft_p99_ms", 1),
    ]
    show(rows, [text("", "name"), *columns])
    write(args.json, found)


if __name__ == "__main__":
    main()

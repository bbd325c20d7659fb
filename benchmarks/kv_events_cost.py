"""What KV events cost: CPU time of the engine's process for the same requests with events off, on, and on
with a subscriber, in turns. Three servers of the embedded model; each round asks each of them the same."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import zmq

from tests.support.servers import free_port

ROUNDS = 7
FLAGS = ("--device", "cpu", "--weights", "int4", "--max-model-len", "1024", "--device-kv-blocks", "128")


class Server:
    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--log-level", "error"]
        self.process = subprocess.Popen(
            [*command, *FLAGS, "--kv-offload-host-gib", "0.2", *flags], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = next(line for line in self.process.stdout if "ready on" in line).split()[-1]
        children = psutil.Process(self.process.pid).children()
        (self.engine,) = (child for child in children if "engine" in child.cmdline())

    def cost(self, prompts: list[list[int]], num: int, at_once: int) -> float:
        """CPU seconds of the engine's process."""

        def ask(prompt: list[int]) -> None:
            body = {"prompt": prompt, "max_tokens": num, "ignore_eos": True, "temperature": 0}
            data = json.dumps({"model": "smollm2-135m", **body}).encode()
            head = {"content-type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(f"{self.url}/v1/completions", data, head)).read()

        before = sum(self.engine.cpu_times()[:2])
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(ask, prompts))
        spent: float = sum(self.engine.cpu_times()[:2]) - before
        return spent


def subscribe(endpoint: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    while True:
        socket.recv_multipart()


def main() -> None:
    alone, heard = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    servers = {
        "off": Server(),
        "on": Server("--kv-events", alone),
        "on, subscriber": Server("--kv-events", heard),
    }
    threading.Thread(target=subscribe, args=(heard,), daemon=True).start()
    r = random.Random(1)
    costs: dict[tuple[str, str], list[float]] = {}
    try:
        for number in range(ROUNDS + 1):
            prompts = [[r.randrange(100, 40_000) for _ in range(512)] for _ in range(4)]
            short = [prompt[:20] for prompt in prompts]
            names = list(servers)
            for name in names[number % 3 :] + names[: number % 3]:
                prefill, decode = servers[name].cost(prompts, 1, 1), servers[name].cost(short, 64, 4)
                if number:  # the first warms up
                    costs.setdefault(("prefill", name), []).append(prefill)
                    costs.setdefault(("decode", name), []).append(decode)
            print(f"round {number} of {ROUNDS}", flush=True)
        for what in ("prefill", "decode"):
            off = costs[what, "off"]
            for name in servers:
                ratios = sorted(one / base for one, base in zip(costs[what, name], off, strict=True))
                median = statistics.median(ratios)
                spread = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
                print(
                    f"{what}, events {name}: {median:.3f} of off (quartiles {spread}), {sum(off):.1f} s off"
                )
    finally:
        for server in servers.values():
            server.process.kill()


if __name__ == "__main__":
    main()

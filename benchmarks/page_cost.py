"""What the page costs: the same requests with the page off, on, and on with ten viewers, in turns. CPU time
of the engine's process and tokens a second while it decodes, and CPU time while it has nothing to do."""

from __future__ import annotations

import contextlib
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from kv_events_cost import Server

ROUNDS, TOKENS, AT_ONCE, VIEWERS, IDLE_S = 30, 64, 4, 10, 45.0
CASES = ("off", "on", "on, ten viewers")


@contextlib.contextmanager
def viewed(url: str, num: int) -> Iterator[None]:
    """By so many, who read all that they get."""
    with contextlib.ExitStack() as stack:
        for _ in range(num):
            address = urlsplit(url)
            link = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            link.sendall(b"GET /page/events HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in link.recv(1 << 16)
            reader = threading.Thread(target=read_all, args=(link,))
            reader.start()
            stack.callback(reader.join)
            stack.callback(link.shutdown, socket.SHUT_RDWR)
        yield


def read_all(link: socket.socket) -> None:
    while link.recv(1 << 16):
        pass


def idle_cost(server: Server) -> float:
    """CPU milliseconds of the engine's process in a second. The system counts in steps of 10 ms."""
    before = sum(server.engine.cpu_times()[:2])
    time.sleep(IDLE_S)
    spent: float = sum(server.engine.cpu_times()[:2]) - before
    return 1e3 * spent / IDLE_S


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4f} (quartiles {low:.4f} to {high:.4f})"


def main() -> None:
    off, on, r = Server("--no-page"), Server(), random.Random(1)
    cost: dict[str, list[float]] = {name: [] for name in CASES}
    speed: dict[str, list[float]] = {name: [] for name in CASES}
    try:
        for number in range(ROUNDS + 1):
            prompts = [[r.randrange(100, 40_000) for _ in range(20)] for _ in range(AT_ONCE)]
            for name in CASES[number % 3 :] + CASES[: number % 3]:
                server = off if name == "off" else on
                with viewed(server.url, VIEWERS if "viewers" in name else 0):
                    began_s = time.monotonic()
                    spent = server.cost(prompts, TOKENS, AT_ONCE)
                    took_s = time.monotonic() - began_s
                if number:  # the first warms up
                    cost[name].append(spent)
                    speed[name].append(AT_ONCE * TOKENS / took_s)
            print(f"round {number} of {ROUNDS}", flush=True)
        for name, base in (("on", "off"), ("on, ten viewers", "on")):
            shares = [one / other for one, other in zip(cost[name], cost[base], strict=True)]
            speeds = [one / other for one, other in zip(speed[name], speed[base], strict=True)]
            print(f"page {name}, by page {base}: CPU time {spread(shares)}, tokens a second {spread(speeds)}")
        for name in CASES:
            server = off if name == "off" else on
            with viewed(server.url, VIEWERS if "viewers" in name else 0):
                print(f"page {name}: {idle_cost(server):.2f} ms of CPU a second without requests")
    finally:
        for server in (off, on):
            server.process.kill()


if __name__ == "__main__":
    main()

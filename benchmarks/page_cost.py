"""What the page costs: the same requests with the page off, on, and on with ten viewers, in turns. CPU time
of the engine's process and tokens a second while it decodes, and CPU time while it has nothing to do."""

from __future__ import annotations

import contextlib
import random
import statistics
import subprocess
import sys
import time

from kv_events_cost import Server

ROUNDS, VIEWERS, TOKENS, AT_ONCE, IDLE_S = 12, 10, 128, 4, 6.0
# Reads one stream until it ends; in a process of its own, as a browser is.
VIEWER = "import sys, urllib.request\nfor line in urllib.request.urlopen(sys.argv[1]): pass"


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4f} (quartiles {low:.4f} to {high:.4f})"


def idle_cost(server: Server) -> float:
    """CPU milliseconds of the engine's process in a second without requests."""
    before, began_s = sum(server.engine.cpu_times()[:2]), time.monotonic()
    time.sleep(IDLE_S)
    spent: float = sum(server.engine.cpu_times()[:2]) - before
    return 1e3 * spent / (time.monotonic() - began_s)


def main() -> None:
    servers = {"off": Server("--no-page"), "on": Server(), "on, ten viewers": Server()}
    names, r = list(servers), random.Random(1)
    cost: dict[str, list[float]] = {name: [] for name in names}
    speed: dict[str, list[float]] = {name: [] for name in names}
    idle: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        for server in servers.values():
            stack.callback(server.process.kill)
        for _ in range(VIEWERS):
            url = f"{servers['on, ten viewers'].url}/page/events"
            stack.callback(subprocess.Popen([sys.executable, "-c", VIEWER, url]).kill)
        for number in range(ROUNDS + 1):
            prompts = [[r.randrange(100, 40_000) for _ in range(20)] for _ in range(AT_ONCE)]
            for name in names[number % 3 :] + names[: number % 3]:
                began_s = time.monotonic()
                spent = servers[name].cost(prompts, TOKENS, AT_ONCE)
                if number:  # the first warms up
                    cost[name].append(spent)
                    speed[name].append(AT_ONCE * TOKENS / (time.monotonic() - began_s))
                    idle[name].append(idle_cost(servers[name]))
            print(f"round {number} of {ROUNDS}", flush=True)
    for name in names:
        shares = [one / base for one, base in zip(cost[name], cost["off"], strict=True)]
        speeds = [one / base for one, base in zip(speed[name], speed["off"], strict=True)]
        print(f"page {name}: CPU time of off {spread(shares)}; tokens a second of off {spread(speeds)}")
        # the mean: the system counts a process's time in steps of 10 ms
        print(f"page {name}: {statistics.mean(idle[name]):.2f} ms of CPU a second without requests")


if __name__ == "__main__":
    main()

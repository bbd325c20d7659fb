# mypy: disable-error-code="no-untyped-call"
"""Experts in host memory: computed there by the CPU, beside a copy to the GPU that computes them.
`python benchmarks/experts_host.py` needs nothing but torch, and takes some 10 seconds. What came of it:
docs/decisions/0054-experts-are-not-computed-on-the-host.md.

An expert has the size of one of qwen3-30b-a3b: 9.4 MB in bfloat16. Each run takes other experts of 1.2 GB, so
none is in a cache. Times are of one layer that misses so many experts, with the choice on the host already:

    cpu      rows to the host, products of all missing experts there, results to the GPU
    link     copies of the experts from pinned memory; the products on the GPU are not counted
    both     halves of the experts at once, each on its way
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, FFN, NUM_EXPERTS = 2048, 768, 128
MISSED = (1, 2, 4, 8)
ROWS = (1, 2, 4, 8)
RUNS = 9
Expert = tuple[Tensor, Tensor]  # gate and up, down


def product(x: Tensor, expert: Expert) -> Tensor:
    gate, up = F.linear(x, expert[0]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, expert[1])


def products(x: Tensor, experts: list[Expert]) -> list[Tensor]:
    """One expert after another, each by all threads: whole experts for single threads are slower."""
    return [product(x, expert) for expert in experts]


def stacks(dtype: torch.dtype, num: int, pinned: bool) -> list[Expert]:
    gate_up, down = torch.randn(2 * FFN, HIDDEN) / HIDDEN**0.5, torch.randn(HIDDEN, FFN) / FFN**0.5
    found = []
    for both in (gate_up, down):
        stack = torch.empty(num, *both.shape, dtype=dtype, pin_memory=pinned)
        for number in range(num):
            stack[number].copy_(both.roll(number, 0))
        found.append(stack)
    return list(zip(*found, strict=True))


def bytes_of(expert: Expert) -> int:
    return sum(one.nbytes for one in expert)


def groups_of(experts: list[Expert], num: int) -> Iterator[list[Expert]]:
    at = 0
    while True:
        yield [experts[(at + i) % len(experts)] for i in range(num)]
        at += num


def timed_ms(run: Callable[[list[Expert]], object], groups: Iterator[list[Expert]]) -> float:
    times = []
    for _ in range(RUNS):
        group = next(groups)
        start = time.perf_counter()
        run(group)
        times.append((time.perf_counter() - start) * 1e3)
    return median(times[1:])


def about() -> str:
    text = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [
        flag for flag in named.get("flags", "").split() if flag.startswith(("amx", "avx512_bf16", "avx_vnni"))
    ]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cpu = f"{named.get('model name')}, {os.cpu_count()} cores, {' '.join(flags)}"
    return f"{cpu}; torch {torch.__version__}; {gpu}"


def read_rate(num_threads: int) -> float:
    """GB/s of a sum over 1 GB."""
    torch.set_num_threads(num_threads)
    values = torch.ones(1 << 28)
    times_ms = [timed_ms(lambda _: values.sum(), groups_of([(values, values)], 1)) for _ in range(2)]
    return values.nbytes / min(times_ms) / 1e6


def cpu_table() -> None:
    shapes = [(num, rows) for rows in (1, 8) for num in (1, 4, 8)]
    print("\nGB/s of weights that the CPU computes with, one layer's missing experts at a time")
    print(f"{'weights':20}" + "".join(f"{f'{num} x {rows} rows':>12}" for num, rows in shapes))
    for dtype in (torch.bfloat16, torch.float32):
        experts = stacks(dtype, NUM_EXPERTS * 2 // dtype.itemsize, False)
        line = f"{dtype!s:20}"
        for num, rows in shapes:
            x = torch.randn(rows, HIDDEN, dtype=dtype)
            ms = timed_ms(partial(products, x), groups_of(experts, num))
            line += f"{num * bytes_of(experts[0]) / ms / 1e6:12.1f}"
        print(line, flush=True)


def layer_table(experts: list[Expert]) -> None:
    print("\nms of a layer")
    print(f"{'missed':>8}{'rows':>6}{'cpu':>9}{'link':>9}{'both':>9}{'link GB/s':>11}{'cpu GB/s':>10}")
    slots = [tuple(torch.empty_like(one, device="cuda") for one in experts[0]) for _ in range(max(MISSED))]
    stream = torch.cuda.Stream()

    def copy(group: list[Expert]) -> None:
        with torch.cuda.stream(stream):
            for slot, expert in zip(slots, group, strict=False):
                for into, one in zip(slot, expert, strict=True):
                    into.copy_(one, non_blocking=True)

    def link(group: list[Expert]) -> None:
        copy(group)
        stream.synchronize()

    for rows in ROWS:
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        host = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, pin_memory=True)
        found = torch.empty(max(MISSED), rows, HIDDEN, dtype=torch.bfloat16, pin_memory=True)

        def cpu(group: list[Expert], x: Tensor = x, host: Tensor = host, found: Tensor = found) -> None:
            host.copy_(x, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            own = torch.stack(products(host, group), out=found[: len(group)])
            own.to("cuda", non_blocking=True)
            torch.cuda.current_stream().synchronize()

        for num in MISSED:

            def both(group: list[Expert], cpu: Callable[[list[Expert]], None] = cpu, num: int = num) -> None:
                copy(group[: num // 2])
                cpu(group[num // 2 :])
                stream.synchronize()

            ms = [timed_ms(run, groups_of(experts, num)) for run in (cpu, link, both)]
            rates = [num * bytes_of(experts[0]) / one / 1e6 for one in (ms[1], ms[0])]
            cells = "".join(f"{one:9.3f}" for one in ms)
            print(f"{num:8}{rows:6}{cells}{rates[0]:11.1f}{rates[1]:10.1f}", flush=True)


def difference(experts: list[Expert]) -> None:
    """Whether the place of an expert's product can be seen in its result."""
    x = torch.randn(8, HIDDEN).bfloat16()
    here = torch.stack(products(x, experts[:16]))
    there = torch.stack([product(x.cuda(), (one[0].cuda(), one[1].cuda())).cpu() for one in experts[:16]])
    share = (here != there).float().mean().item() * 100
    worst = ((here.float() - there.float()).abs().max() / there.float().abs().max()).item()
    print(
        f"\nresults of CPU and GPU: {share:.1f} % of the values differ, by {worst:.1e} of the largest at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    cores = parser.parse_args().cores
    print(about())
    counts = sorted({1, max(1, cores // 4), max(1, cores // 2), cores})
    print("GB/s that so many threads read: " + ", ".join(f"{num}: {read_rate(num):.0f}" for num in counts))
    torch.set_num_threads(cores)
    with torch.inference_mode():
        cpu_table()
        if torch.cuda.is_available():
            experts = stacks(torch.bfloat16, NUM_EXPERTS, True)
            layer_table(experts)
            difference(experts)


if __name__ == "__main__":
    main()

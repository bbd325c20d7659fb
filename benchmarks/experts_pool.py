# mypy: disable-error-code="no-untyped-call,no-any-return"
"""Experts off the device: decode and prompts with a part of all experts resident, beside what link and
compute allow. `python benchmarks/experts.py --part pool` runs it; it builds six engines, with 57 GiB of
experts in host memory in four of them.

Routing is as the random router has it (uniform), or with a bias of -ln(rank) on each router, in an order of
its own for each layer (zipf). With 100 % there is no pool: steps are captured as usual. Limits, from the same
run: the larger of the time with all experts resident, and of the copied bytes over the link.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from penstock.bench.run import Driver
from penstock.engine import build as build_module
from penstock.engine.engine import Engine
from penstock.figures import ExpertFigures
from penstock.flags import config_of
from penstock.models.decoder import Decoder
from penstock.models.layers import OpsAround
from penstock.models.model import Experts, LayerOps

PAD = (
    128  # values that the input of a router has more, where there is a bias: its kernel takes so many at once
)
Row = dict[str, Any]


class BiasedOps(OpsAround):
    """Routers with a bias: one more value of the input is 1 for every token."""

    def __init__(self, ops: LayerOps) -> None:
        super().__init__(ops)
        self._routers: dict[int, Tensor] = {}

    def choose(self, x: Tensor, experts: Experts) -> Any:
        more = x.new_zeros(len(x), PAD)
        more[:, 0] = 1
        router = self._routers.get(key := experts.router.data_ptr())
        if router is None:
            router = self._routers[key] = self._biased(experts)
        return self.ops.choose(torch.cat((x, more), dim=1), experts._replace(router=router))

    def _biased(self, experts: Experts) -> Tensor:
        num = experts.routing.num_experts
        order = torch.randperm(num, generator=torch.Generator().manual_seed(experts.layer))
        bias = torch.zeros(num, PAD)
        bias[:, 0] = -(order + 1).float().log()
        return torch.cat((experts.router, bias.to(experts.router)), dim=1).contiguous()


@contextmanager
def routing(name: str) -> Iterator[None]:
    """Engines that are built meanwhile route so."""
    names: dict[str, Any] = vars(build_module)
    original = names["with_choices"]

    def biased(model: Decoder, *others: Any) -> Decoder:
        layers = [replaced(layer) for layer in model.layers]
        return original(model.with_layers(layers), *others)

    if name == "zipf":
        names["with_choices"] = biased
    try:
        yield
    finally:
        names["with_choices"] = original


def replaced(layer: Any) -> Any:
    return layer if getattr(layer, "experts", None) is None else replace(layer, ops=BiasedOps(layer.ops))


def link_rate(device: torch.device) -> float:
    """Bytes a second of a pinned copy to the device."""
    if device.type != "cuda":
        return float("nan")
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    dest = torch.empty_like(host, device=device)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        dest.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return host.numel() / min(times)


def pool(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for name in args.routings:
        whole: dict[str, float] = {}  # milliseconds with all experts resident
        for share in sorted(args.shares, reverse=True):
            args.experts_on_device = None if share == 100 else f"{share:g}%"
            config = config_of(args)
            started_s = time.perf_counter()
            with routing(name):
                engine = build_module.build(config)
            print(f"{name}, {share:g} %: built in {time.perf_counter() - started_s:.0f} s", flush=True)
            driver, device = Driver(engine, config), engine.parts.arena.device
            link = link_rate(device)
            measured = (
                *(partial(decode, driver, batch, args.written) for batch in args.batches),
                *(partial(prompt, driver, tokens) for tokens in args.prompts),
            )
            for row in (measure() for measure in measured):
                if share == 100:
                    whole[row["what"]] = row["ms"]
                row |= {"routing": name, "share": share, "link_gb_s": link / 1e9}
                row["link_ms"] = row["bytes"] / link * 1e3
                row["limit_ms"] = max(row["link_ms"], whole.get(row["what"], 0.0))
                row["times"] = row["ms"] / row["limit_ms"] if row["limit_ms"] else float("nan")
                print(row, flush=True)
                rows.append(row)
            engine.close(timeout_s=120.0)
            del engine, driver
    return rows


def context(args: argparse.Namespace) -> list[Row]:
    """Three turns of one conversation whose context fits on the device no more than the experts do. Before
    each turn but the first, the device has forgotten its KV."""
    args.kv_offload = True
    config = config_of(args)
    engine = build_module.build(config)
    driver = Driver(engine, config)
    (tokens,) = driver.prompts(1, args.context, 3)
    (more,) = driver.prompts(1, 3 * args.question, 4)
    rows: list[Row] = []
    for turn in range(3):
        prompt = tokens + more[: turn * args.question]
        before = figures(engine)
        reader = driver.submit(prompt, args.written)
        start_s = time.perf_counter()
        driver.run_all()
        each_ms = (time.perf_counter() - start_s - reader.ttft_s) / max(1, args.written - 1) * 1e3
        row = of_steps(f"turn {turn + 1}", reader.ttft_s * 1e3, before, figures(engine), 1)
        rows.append(row | {"token_ms": each_ms, "tokens": len(prompt), "source": str(reader.source)})
        print(rows[-1], flush=True)
        driver.flush()
        driver.reset_cache("device")
    engine.close(timeout_s=120.0)
    return rows


def figures(engine: Engine) -> ExpertFigures:
    return engine.stats().experts or ExpertFigures()


def decode(driver: Driver, batch: int, written: int) -> Row:
    """The median step in which every request gets a token, behind a few that warm up; bytes are the mean of
    them. A step of many requests copies gigabytes, so fewer are measured."""
    for tokens in driver.prompts(batch, 128, 1, batch):
        driver.submit(tokens, written)
    while driver.turn()[1:] != (batch, 0):
        pass
    for _ in range(8):
        driver.turn()
    times, before, start_s = list[float](), figures(driver.engine), time.perf_counter()
    while len(times) < max(8, (written - 16) // batch):
        turn = driver.turn()
        times.append(turn.end_s - start_s)
        start_s = turn.end_s
    after = figures(driver.engine)
    driver.run_all()
    return of_steps(f"decode, batch {batch}", median(times) * 1e3, before, after, len(times))


def prompt(driver: Driver, num_tokens: int) -> Row:
    times, after = list[float](), ExpertFigures()
    for number in range(3):
        (tokens,) = driver.prompts(1, num_tokens, 7, number)
        before = figures(driver.engine)
        reader = driver.submit(tokens, 1)
        driver.run_all()
        after = figures(driver.engine)
        times.append(reader.ttft_s * 1e3)
    return of_steps(f"prompt of {num_tokens}", median(times[1:]), before, after, 1)


def of_steps(what: str, ms: float, before: ExpertFigures, after: ExpertFigures, num: int) -> Row:
    hit, missed = after.hit - before.hit, after.missed - before.missed
    foreseeable = after.foreseeable - before.foreseeable
    return {
        "what": what,
        "ms": ms,
        "bytes": (after.copied_bytes - before.copied_bytes) / num,
        "hit_rate": hit / (hit + missed) if hit + missed else float("nan"),
        "recall": (after.foreseen - before.foreseen) / foreseeable if foreseeable else float("nan"),
        "waited_ms": (after.waited_s - before.waited_s) / num * 1e3,
    }

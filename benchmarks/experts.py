# mypy: disable-error-code="no-untyped-call,no-any-return"
"""Routed experts on a GPU beside what the machine allows: single kernels with the tiles that they might have,
then steps of a whole engine with random weights.

    PYTHONPATH=src python3 benchmarks/experts.py --part kernels
    PYTHONPATH=src python3 benchmarks/experts.py --part engine
    PYTHONPATH=src python3 benchmarks/experts.py --part pool --json experts-pool.json
    PYTHONPATH=src python3 benchmarks/experts.py --part context --device-memory-gib 24 --device-kv-gib 8 \\
        --experts-on-device auto --kv-resident-tokens 65536 --kv-offload-host-gib 32 --json context.json

Limits: a step that decodes has to read the experts that its tokens hit (as routed in the measured step), the
attention's matrices, the head and the KV once; a prompt takes two operations for each weight that a token
runs through, and its attention. Kernels rotate over several layers, so that no weight is still in the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from driver import flags, show, text, write
from experts_pool import context, pool
from penstock.bench.run import Driver
from penstock.engine.build import build
from penstock.flags import config_of
from penstock.models import triton_experts
from penstock.models.model import Experts, ModelConfig
from penstock.models.qwen3_moe import QWEN3_30B_A3B
from penstock.models.triton_experts import (
    DOWN_PAIR,
    FEW,
    GATED_PAIR,
    SORTED,
    Chosen,
    ExpertPlan,
    ExpertTile,
    PairTile,
    plan_for,
)

CONFIG = QWEN3_30B_A3B
READ_GB_S = 4300.0  # of device memory
BATCHES = (1, 8, 32, 128)
PROMPT, WRITTEN = 128, 48  # tokens of requests that decode
PREFILL = 8192
NUM_LAYERS = 4  # of the kernels' weights
Row = dict[str, Any]
Weights = tuple[Tensor, Tensor, Tensor]  # router, gate and up, down

_FEW_TILES = {
    "gated": ((32, 128, 2, 4), (32, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4)),
    "down": ((128, 64, 4, 4), (128, 128, 4, 3), (256, 64, 4, 3), (128, 64, 8, 4), (64, 128, 2, 4)),
}
_MANY_TILES = {
    "gated": ((64, 64, 4, 4), (128, 64, 8, 3), (128, 32, 8, 4)),
    "down": ((128, 64, 8, 4), (128, 64, 8, 3), (256, 64, 8, 3)),
}
_PAIR_TILES = {
    "gated": ((4096, 2), (4096, 4), (8192, 2), (8192, 4), (8192, 8), (16384, 4), (16384, 8)),
    "down": ((4096, 4), (8192, 2), (8192, 4), (8192, 8), (16384, 4), (16384, 8), (32768, 8)),
}


def variants(num_tokens: int, kernel: str) -> Iterator[ExpertPlan]:
    """The plan as it is, and others: with the tiles of `kernel` changed, for few or for many pairs."""
    kept = plan_for(num_tokens * CONFIG.routing.top_k, CONFIG.routing.num_experts)  # type: ignore[union-attr]
    yield kept
    if kernel == "choose":
        return
    plans = {8: [FEW], 32: [FEW], 128: [SORTED[16]], 512: [SORTED[16], SORTED[64]]}
    for plan in plans.get(num_tokens, [SORTED[128], SORTED[64]]):
        rows = plan.gated.rows
        tiles = _FEW_TILES[kernel] if rows < 64 else _MANY_TILES[kernel]
        for columns, depth, warps, stages in tiles:
            for left in (True, False) if rows >= 64 else (True,):
                tile = ExpertTile(rows, columns, depth, warps, stages, left)
                yield plan._replace(gated=tile) if kernel == "gated" else plan._replace(down=tile)


class Rig:
    """Weights of some layers, input for each, and the clock."""

    def __init__(self, num_tokens: int, weights: list[Weights]) -> None:
        routing = CONFIG.routing
        assert routing is not None
        slots = torch.arange(routing.num_experts, dtype=torch.int32, device="cuda")
        self.layers = [Experts(router, up, down, slots, routing) for router, up, down in weights]
        self.inputs = [torch.randn(num_tokens, CONFIG.hidden, device="cuda").bfloat16() for _ in weights]
        self.expert_bytes = 2 * CONFIG.hidden * routing.ffn * 2  # of gate and up, or of down twice

    def choices(self, is_sorted: bool) -> list[Chosen]:
        pairs = zip(self.inputs, self.layers, strict=True)
        return [triton_experts.choose(x, layer, is_sorted) for x, layer in pairs]

    def us(self, call: Callable[[int], Any]) -> float:
        """Of one call, as part of a captured step."""
        call(0)
        torch.cuda.synchronize()
        graph, many = torch.cuda.CUDAGraph(), 2 * NUM_LAYERS
        with torch.cuda.graph(graph):
            for number in range(many):
                call(number % NUM_LAYERS)
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / many)
        return median(times[2:])


def made_weights() -> list[Weights]:
    assert CONFIG.routing is not None
    num, ffn, hidden = CONFIG.routing.num_experts, CONFIG.routing.ffn, CONFIG.hidden

    def some(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return made.normal_(0.0, shape[-1] ** -0.5)

    return [
        (some(num, hidden), some(num, 2 * ffn, hidden), some(num, hidden, ffn)) for _ in range(NUM_LAYERS)
    ]


def kernels(args: argparse.Namespace) -> list[Row]:
    weights, rows, ends_s = made_weights(), list[Row](), time.monotonic() + args.limit_s
    for num_tokens in args.tokens:
        rig, found = Rig(num_tokens, weights), list[Row]()
        if num_tokens == 1:
            found = list(alone(rig))
        for kernel in () if num_tokens == 1 else ("choose", "gated", "down"):
            plans = list(dict.fromkeys(variants(num_tokens, kernel)))
            for number, plan in enumerate(plans):
                if time.monotonic() > ends_s and number:
                    print(f"no time for {len(plans) - number} more tiles of {kernel} at {num_tokens} tokens")
                    break
                row = {"tokens": num_tokens, "kernel": kernel, "kept": not number}
                try:
                    row |= timed(rig, kernel, plan)
                except Exception as error:  # a tile that the machine has no room for
                    print(f"{kernel} {plan.gated}: {str(error).splitlines()[0][:90]}")
                    continue
                found.append(row)
        rows += found
        show(found, KERNEL_COLUMNS)
        print(flush=True)
    return rows


def alone(rig: Rig) -> Iterator[Row]:
    """All of a layer's launches for one token, with other tiles, and without overlap."""
    out = rig.inputs[0].new_empty(rig.layers[0].routing.top_k, *rig.inputs[0].shape)
    overlaps = triton_experts._overlaps

    def row(kernel: str, how: str, gated: PairTile, down: PairTile, kept: bool = False) -> Row:
        def call(i: int) -> None:
            x, layer = rig.inputs[i], rig.layers[i]
            triton_experts.pair_products(x, layer, triton_experts.choose(x, layer, False), out, gated, down)

        tile = f"{gated.values}, {gated.warps} warps; {down.values}, {down.warps} warps"
        limit_us = rig.layers[0].routing.top_k * rig.expert_bytes * 1.5 / READ_GB_S / 1e3
        found = {"tokens": 1, "kernel": kernel, "kept": kept, "how": how, "tile": tile}
        return found | {"us": rig.us(call), "limit_us": limit_us}

    yield row("layer", "pairs", GATED_PAIR, DOWN_PAIR, True)
    us = rig.us(lambda i: triton_experts.routed(rig.inputs[i], rig.layers[i], None, FEW))
    yield {"tokens": 1, "kernel": "layer", "kept": False, "how": "few", "tile": "", "us": us}
    triton_experts._overlaps = lambda _: False  # type: ignore[assignment]
    yield row("layer", "one by one", GATED_PAIR, DOWN_PAIR)
    triton_experts._overlaps = overlaps
    for values, warps in _PAIR_TILES["gated"]:
        yield row("layer", "pairs", PairTile(values, warps), DOWN_PAIR)
    for values, warps in _PAIR_TILES["down"]:
        yield row("layer", "pairs", GATED_PAIR, PairTile(values, warps))


def timed(rig: Rig, kernel: str, plan: ExpertPlan) -> Row:
    """One kernel, with its share of the time that its bytes or its operations take at least."""
    choices, layers, routing = rig.choices(plan.is_sorted), rig.layers, rig.layers[0].routing
    if kernel == "choose":
        us = rig.us(lambda i: triton_experts.choose(rig.inputs[i], layers[i], plan.is_sorted))
        return {"how": "sorted" if plan.is_sorted else "few", "tile": "", "us": us, "limit_us": None}
    pairs = rig.inputs[0].shape[0] * routing.top_k
    inner = [triton_experts.gated(rig.inputs[i], layers[i], choices[i], plan) for i in range(NUM_LAYERS)]
    if kernel == "gated":
        us = rig.us(lambda i: triton_experts.gated(rig.inputs[i], layers[i], choices[i], plan))
        num_bytes, tile = rig.expert_bytes, plan.gated
    else:
        out = rig.inputs[0].new_empty(routing.top_k, *rig.inputs[0].shape)
        us = rig.us(lambda i: triton_experts.down(inner[i], layers[i], choices[i], plan, out))
        num_bytes, tile = rig.expert_bytes // 2, plan.down
    hit: float = sum(choice.ids.unique().numel() for choice in choices) / NUM_LAYERS
    reading_us = hit * num_bytes / READ_GB_S / 1e3
    computing_us = pairs * num_bytes / 790e6  # two operations for each weight, which takes two bytes
    how = f"{'sorted' if plan.is_sorted else 'few'} {tile.rows} rows"
    said = f"{tile.columns} x {tile.depth}, {tile.warps} warps, {tile.stages} stages"
    said += "" if tile.weights_left else ", right"
    return {"how": how, "tile": said, "us": us, "limit_us": max(reading_us, computing_us)}


# ------------------------------------------------------------------------------------------- a whole engine


class Seen:
    """What captured steps chose. Kept tensors have memory of their own in their step, but other steps may
    write to it: they are read while only one kind of step runs."""

    def __init__(self) -> None:
        self._ids: dict[int, list[Tensor]] = {}
        self._choose = triton_experts.choose
        triton_experts.choose = self

    def __call__(self, x: Tensor, experts: Experts, is_sorted: bool) -> Chosen:
        choice = self._choose(x, experts, is_sorted)
        if torch.cuda.is_current_stream_capturing():
            self._ids.setdefault(len(x), []).append(choice.ids)
        return choice

    def clear(self, batch: int) -> None:
        torch.cuda.synchronize()
        for ids in self._ids[batch]:
            ids.fill_(-1)
        torch.cuda.synchronize()

    def experts_hit(self, batch: int, num_experts: int) -> float:
        """Of a layer, on average, in the last step of this many tokens."""
        torch.cuda.synchronize()
        ran = [ids for ids in self._ids[batch] if int(ids.min()) >= 0 and int(ids.max()) < num_experts]
        return sum(ids.unique().numel() for ids in ran) / max(1, len(ran))


def engine(args: argparse.Namespace) -> list[Row]:
    seen, config = Seen(), config_of(args)
    started_s = time.perf_counter()
    made = build(config)
    print(f"built in {time.perf_counter() - started_s:.1f} s", flush=True)
    dims, driver = made.parts.executor.target.model.config, Driver(made, config)
    rows = [decode(driver, seen, dims, batch) for batch in BATCHES]
    times = []
    for number in range(4):
        (prompt,) = driver.prompts(1, PREFILL, 7, number)
        reader = driver.submit(prompt, 1)
        driver.run_all()
        times.append(reader.ttft_s * 1e3)
    flops, rate = prefill_flops(dims), dense_rate()
    ms = median(times[1:])
    row = {"what": f"prompt of {PREFILL}", "ms": ms, "limit_ms": flops / rate * 1e3}
    rows.append(row | {"tflops": flops / ms / 1e9, "dense_tflops": rate / 1e12, "all_ms": times})
    made.close(timeout_s=60.0)
    return rows


def decode(driver: Driver, seen: Seen, dims: ModelConfig, batch: int) -> Row:
    """The median step in which every request gets a token, the second time."""
    times, routing = list[float](), dims.routing
    assert routing is not None
    for run in range(2):
        for prompt in driver.prompts(batch, PROMPT, 1, batch, run):
            driver.submit(prompt, WRITTEN + 2 * batch)
        times, before_s = [], 0.0
        while len(times) < WRITTEN - 8:
            turn = driver.turn()
            if turn[1:] == (batch, 0):
                times += [turn.end_s - before_s] if before_s else []
                before_s = turn.end_s
            else:
                before_s = 0.0
        seen.clear(batch)
        for _ in range(4):
            driver.turn()
        hit = seen.experts_hit(batch, routing.num_experts)
        driver.run_all()
    limit_ms = step_bytes(dims, batch, hit) / READ_GB_S / 1e6
    row = {"what": f"decode, batch {batch}", "ms": median(times) * 1e3, "limit_ms": limit_ms, "hit": hit}
    show([row], ENGINE_COLUMNS)
    return row


def attention_weights(dims: ModelConfig) -> int:
    return dims.hidden * (dims.qkv_width + dims.num_heads * dims.head_dim)


def step_bytes(dims: ModelConfig, batch: int, hit: float) -> float:
    assert dims.routing is not None
    expert = 3 * dims.hidden * dims.routing.ffn
    layer = attention_weights(dims) + dims.routing.num_experts * dims.hidden + hit * expert
    kv = 2 * dims.num_kv_heads * dims.head_dim * batch * (PROMPT + WRITTEN // 2)
    return 2 * (dims.num_layers * (layer + kv) + dims.vocab * dims.hidden)


def prefill_flops(dims: ModelConfig) -> float:
    """Of the weights that are active for each token, and of attention."""
    routing = dims.routing
    assert routing is not None
    active = attention_weights(dims) + dims.hidden * (routing.num_experts + routing.top_k * 3 * routing.ffn)
    attention = 2 * dims.num_heads * dims.head_dim * (PREFILL + 1)
    return 2.0 * PREFILL * dims.num_layers * (active + attention / 2)


def dense_rate() -> float:
    """Operations a second of a large product, as torch does it."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * 8192**3 / (median(times[4:]) / 1e3)


KERNEL_COLUMNS = (
    ("tokens", "tokens"),
    text("kernel", "kernel"),
    text("pairs", "how"),
    text("tile", "tile"),
    ("us", "us", 1),
    ("limit us", "limit_us", 1),
)
ENGINE_COLUMNS = (text("step", "what"), ("ms", "ms", 2), ("limit ms", "limit_ms", 2), ("hit", "hit", 1))
POOL_COLUMNS = (
    text("routing", "routing"),
    text("resident %", "share"),
    text("what", "what"),
    ("ms", "ms", 2),
    ("limit ms", "limit_ms", 2),
    ("times the limit", "times", 2),
    ("hit rate", "hit_rate", 3),
    ("recall", "recall", 3),
    ("waited ms", "waited_ms", 2),
)
CONTEXT_COLUMNS = (
    text("what", "what"),
    ("first token ms", "ms", 1),
    ("ms a token", "token_ms", 2),
    text("prompt", "source"),
    ("hit rate", "hit_rate", 3),
)


def main() -> None:
    parser = flags(
        __doc__,
        engine=True,
        part=("kernels", "kernels, engine, pool or context"),
        shares=([100.0, 50.0, 25.0], "of a pool: percentages of all experts that are resident"),
        routings=(["uniform", "zipf"], "of a pool: how tokens are routed"),
        batches=([1, 8, 32], "of a pool: requests that decode"),
        prompts=([8192, 32768], "of a pool: tokens of prompts"),
        written=(48, "of a pool: steps that decode"),
        context=(131072, "of a conversation: tokens of its first prompt"),
        question=(256, "of a conversation: tokens of the others"),
        tokens=([1, 32, 128, 8192, 8, 512, 2048], "of kernels: numbers of tokens"),
        limit_s=(70.0, "of kernels: after so long, only the tiles that are kept are measured"),
    )
    parser.set_defaults(
        model="qwen3-30b-a3b",
        load_format="dummy",
        device="cuda",
        max_batch=128,
        max_model_len=PREFILL + 512,
        device_kv_gib=24.0,
        kv_offload=False,
    )
    args = parser.parse_args()
    if args.part == "pool":
        if args.max_model_len == PREFILL + 512:
            args.max_model_len = max(args.prompts) + 512
        rows = pool(args)
        show(rows, POOL_COLUMNS)
        write(args.json, rows)
        return
    if args.part == "context":
        if args.max_model_len == PREFILL + 512:
            args.max_model_len = args.context + 3 * (args.question + args.written)
        rows = context(args)
        show(rows, CONTEXT_COLUMNS)
        write(args.json, rows)
        return
    with torch.inference_mode():
        rows = kernels(args) if args.part == "kernels" else engine(args)
    if args.part == "kernels":
        best = [row for row in rows if row["us"] == min(o["us"] for o in rows if same(o, row)) or row["kept"]]
        print("kept and best")
        show(best, KERNEL_COLUMNS)
    else:
        for row in rows:
            row["times"] = row["ms"] / row["limit_ms"]
        show(rows, (*ENGINE_COLUMNS, ("times the limit", "times", 2)))
    write(args.json, rows)


def same(one: Row, other: Row) -> bool:
    return (one["tokens"], one["kernel"]) == (other["tokens"], other["kernel"])


if __name__ == "__main__":
    main()

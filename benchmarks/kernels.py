"""Times the CUDA kernels one by one, on the Qwen3-4B shape in bfloat16: `python benchmarks/kernels.py`. Owns
the cases and the alternatives that are compared; which constants are kept is written in
`engine/execution/attention/triton.py`.

Every case is checked against float32 before it is timed. Times are medians with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.contract import Chunk
from penstock.engine.execution.attention.triton import (
    TUNING,
    Choices,
    RotateTile,
    Tile,
    TritonAttention,
    Tuning,
)
from penstock.engine.execution.batch import Packer, StepInputs
from penstock.errors import InvariantBroken
from penstock.models.layers import rope_table
from penstock.models.qwen3 import QWEN3_4B
from penstock.models.triton_layers import TritonLayerOps

BLOCK = 16
CONFIG = replace(QWEN3_4B, num_layers=4)  # of 36: what fits beside 32 sequences of 32768 tokens
NUM_SLOTS = 32 * 32768 // BLOCK


class Span(NamedTuple):
    """One chunk: `q_len` tokens after `prefix_len` cached ones."""

    prefix_len: int
    q_len: int

    @property
    def kv_len(self) -> int:
        return self.prefix_len + self.q_len


DECODES = (
    (1, 160),
    (8, 160),
    (32, 160),
    (128, 160),
    (256, 160),
    (128, 2048),
    (1, 8192),
    (1, 32768),
    (32, 8192),
    (32, 32768),
)
# Those of few, some and many programs per multiprocessor, which have a tile each.
DECODES_COMPARED = {
    "decode": ((1, 160), (1, 32768), (16, 5700)),
    "decode_even": ((24, 2240), (26, 3400), (32, 160)),
    "decode_many": ((20, 4550), (64, 1100), (256, 160), (128, 2048)),
}
DECODE_TILES = tuple(
    Tile(16, *rest)
    for rest in (
        (32, 4, 4),
        (64, 2, 2),
        (64, 2, 3),
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 4),
        (128, 4, 2),
        (128, 8, 2),
    )
)
PROGRAMS_PER_SM = (2, 4)
TAILS = (Span(8192, 16), Span(32768 - 16, 16), Span(2048, 64))
SHORT_TILES = (Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 128, 4, 2), Tile(64, 64, 8, 3))
PREFILLS = (Span(0, 2048), Span(0, 8192), Span(0, 32768), Span(8192, 8192), Span(24576, 8192))
PREFILLS_COMPARED = {"long": (Span(0, 8192), Span(8192, 8192)), "deep": (Span(4608, 1040), Span(24576, 8192))}
LONG_TILES = (
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 128, 8, 2),
    Tile(128, 128, 8, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 128, 4, 2),
)
ROTATE_TILES = (
    RotateTile(1, 1, 1),
    RotateTile(1, 8, 1),
    RotateTile(4, 4, 4),
    RotateTile(8, 8, 4),
    RotateTile(16, 8, 8),
    RotateTile(4, 16, 4),
)
ROWS = (1, 32, 256, 2048, 8192)


class Line(NamedTuple):
    """One measured figure."""

    what: str
    how: str
    us: float
    rate: str


class Rig:
    """An arena full of random KV on the device, and the clock."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        shape = (NUM_SLOTS + 1, CONFIG.num_layers, 2, BLOCK, CONFIG.num_kv_heads, CONFIG.head_dim)
        self.arena = torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_()
        self.rope = rope_table(CONFIG).to(self.device)
        self.order = np.random.default_rng(0).permutation(NUM_SLOTS).astype(np.int32)
        self.lines: list[Line] = []

    def attention(self, tuning: Tuning | None = None, **how: Any) -> TritonAttention:
        return TritonAttention(self.arena, CONFIG, self.rope, choices=Choices(tuning=tuning, **how))

    def inputs(self, spans: Sequence[Span]) -> StepInputs:
        """Chunks over scattered slots, no two of which share one."""
        chunks, used = [], 0
        for row, span in enumerate(spans):
            length = -(-span.kv_len // BLOCK)
            slots = self.order[used : used + length]
            chunks.append(
                Chunk(str(row), row, span.prefix_len, (0,) * span.q_len, slots, writes=True, num_logits=0)
            )
            used += length
        room = np.empty(4 * sum(span.q_len for span in spans) + 8 * len(spans) + used + 8, np.int32)
        packed = Packer(BLOCK, NUM_SLOTS, len(spans)).pack(
            tuple(chunks), sum(span.q_len == 1 for span in spans), None, room
        )
        ints = torch.from_numpy(packed.ints).to(self.device)
        return packed.shape.views(ints, packed.num_decodes, packed.max_q_len, packed.max_kv_len, packed.spans)

    def step(
        self, spans: Sequence[Span], attention: TritonAttention
    ) -> tuple[StepInputs, tuple[Tensor, Tensor, Tensor]]:
        inputs = self.inputs(spans)
        qkv = torch.randn(sum(span.q_len for span in spans), CONFIG.qkv_width, device=self.device).to(
            torch.bfloat16
        )
        return inputs, attention.rotate_and_write(0, qkv, None, None, inputs)

    def median_us(self, call: Callable[[], Any]) -> float:
        from triton.testing import do_bench

        return float(do_bench(call, warmup=10, rep=40, return_mode="median")) * 1e3

    def report(self, what: str, how: str, us: float, rate: str) -> None:
        self.lines.append(Line(what, how, us, rate))
        print(f"  {what:<34} {how:<28} {us:10.1f} us  {rate}", flush=True)


def expected_rows(rig: Rig, q: Tensor, span: Span, table: Tensor, rows: Tensor) -> Tensor:
    """Attention of some tokens of one chunk in float32, straight from the arena."""
    kv = rig.arena[table.long(), 0].transpose(0, 1).flatten(1, 2)[:, : span.kv_len].float()
    keys, values = kv.repeat_interleave(CONFIG.num_heads // CONFIG.num_kv_heads, dim=2)
    scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * CONFIG.scale
    hidden = torch.arange(span.kv_len, device=q.device) > (span.prefix_len + rows)[:, None]
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill_(hidden, float("-inf")).softmax(-1), values
    ).flatten(1)


def check(rig: Rig, out: Tensor, q: Tensor, spans: Sequence[Span], inputs: StepInputs) -> None:
    """The first and the last chunk, at up to 32 tokens each."""
    for chunk in {0, len(spans) - 1}:
        span, begin = spans[chunk], int(inputs.q_starts[chunk])
        rows = torch.unique(torch.linspace(0, span.q_len - 1, 32, device=q.device).long())
        start = int(inputs.table_starts[chunk])
        table = inputs.tables[start : start - (-span.kv_len // BLOCK)]
        own = slice(begin, begin + span.q_len)
        expected = expected_rows(rig, q[own], span, table, rows)
        error = float((out[own][rows].float() - expected).norm() / expected.norm())
        if not error < 2e-2:
            raise InvariantBroken(f"chunk {chunk} of {len(spans)}, {span}: relative error {error:.3g}")


def kv_bytes(spans: Sequence[Span]) -> int:
    return sum(span.kv_len for span in spans) * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 2


def flops(span: Span) -> float:
    """Of the keys that are seen only."""
    return 4.0 * CONFIG.num_heads * CONFIG.head_dim * span.q_len * (span.prefix_len + (span.q_len + 1) / 2)


def attend(rig: Rig, what: str, how: str, spans: Sequence[Span], attention: TritonAttention) -> float:
    """Check, time and report one attention call. Returns its time."""
    inputs, (q, k, v) = rig.step(spans, attention)
    first = time.perf_counter()
    out = attention.attend(0, q, k, v, inputs)
    torch.accelerator.synchronize()
    first_ms = (time.perf_counter() - first) * 1e3
    check(rig, out, q, spans, inputs)
    us = rig.median_us(lambda: attention.attend(0, q, k, v, inputs))
    rate = f"{kv_bytes(spans) / us / 1e3:7.0f} GB/s"
    if max(span.q_len for span in spans) > 1:
        rate += f" {sum(flops(span) for span in spans) / us / 1e6:7.1f} TFLOP/s, first call {first_ms:.0f} ms"
    rig.report(what, how, us, rate)
    return us


def named(tile: Tile) -> str:
    return f"{tile.rows}x{tile.keys} warps {tile.warps} stages {tile.stages}"


def best_of(
    rig: Rig, cases: Sequence[tuple[str, Sequence[Span]]], tunings: Sequence[tuple[str, Tuning]]
) -> tuple[str, Tuning]:
    """The tuning with the least sum of times, each relative to the best of its case. One that does not fit
    the device is left out."""
    times: dict[str, list[float]] = {}
    for name, tuning in tunings:
        try:
            times[name] = [
                attend(rig, what, name, spans, rig.attention(tuning, prefill="triton"))
                for what, spans in cases
            ]
        except InvariantBroken:
            raise
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    fastest = [min(column) for column in zip(*times.values(), strict=True)]
    score = {
        name: sum(us / least for us, least in zip(row, fastest, strict=True)) for name, row in times.items()
    }
    best = min(score, key=score.__getitem__)
    print(f"  -> {best}", flush=True)
    return best, dict(tunings)[best]


def with_tile(tuning: Tuning, kind: str, tile: Tile) -> Tuning:
    return Tuning(**{**tuning._asdict(), kind: tile})


def decodes(rig: Rig) -> Tuning:
    print("decode", flush=True)

    def case(batch: int, context: int) -> tuple[str, list[Span]]:
        return f"decode {batch} x {context}", [Span(context - 1, 1)] * batch

    best = TUNING[2]
    for kind, pairs in DECODES_COMPARED.items():
        compared = [case(*pair) for pair in pairs]
        _, best = best_of(
            rig, compared, [(named(tile), with_tile(best, kind, tile)) for tile in DECODE_TILES]
        )
    few = [case(*pair) for pair in DECODES_COMPARED["decode"]]
    candidates = [
        (f"{count} programs per SM", best._replace(programs_per_sm=count))
        for count in (best.programs_per_sm, *PROGRAMS_PER_SM)
    ]
    _, best = best_of(rig, few, candidates)
    for pair in DECODES:
        attend(rig, case(*pair)[0], "best", case(*pair)[1], rig.attention(best))
    return best


def prefills(rig: Rig, tuning: Tuning) -> Tuning:
    print("prefill", flush=True)

    def case(span: Span) -> tuple[str, list[Span]]:
        return f"{span.q_len} after {span.prefix_len}", [span]

    _, tuning = best_of(
        rig, [case(s) for s in TAILS], [(named(tile), tuning._replace(short=tile)) for tile in SHORT_TILES]
    )
    for kind, spans in PREFILLS_COMPARED.items():
        longs = [(named(tile), with_tile(tuning, kind, tile)) for tile in LONG_TILES]
        _, tuning = best_of(rig, [case(s) for s in spans], longs)
    for span in PREFILLS:
        attend(rig, case(span)[0], "triton", [span], rig.attention(tuning, prefill="triton"))
        for fused in ("flash", "cudnn"):
            attend(
                rig,
                case(span)[0],
                f"sdpa-{fused}",
                [span],
                rig.attention(tuning, prefill="sdpa", fused=fused),
            )
    attend(
        rig,
        "4 chunks of 2048 and 32 decodes",
        "triton",
        [Span(159, 1)] * 32 + [Span(0, 2048)] * 4,
        rig.attention(tuning),
    )
    return tuning


def elementwise(rig: Rig, tuning: Tuning) -> None:
    print("elementwise", flush=True)
    ops, weight = TritonLayerOps(), torch.ones(CONFIG.hidden, dtype=torch.bfloat16, device=rig.device)
    head_weight = weight[: CONFIG.head_dim].clone()
    gate_up_weight = torch.randn(2 * CONFIG.ffn, CONFIG.hidden, device=rig.device).to(torch.bfloat16)
    for rows in ROWS:
        x = torch.randn(rows, CONFIG.hidden, device=rig.device).to(torch.bfloat16)
        gate_up = torch.randn(rows, 2 * CONFIG.ffn, device=rig.device).to(torch.bfloat16)
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "rms_norm": (lambda x=x: ops.rms_norm(x, weight, 1e-6), 2 * x.nbytes),  # type: ignore[misc]
            "add_rms_norm": (lambda x=x: ops.add_rms_norm(x, x, weight, 1e-6), 4 * x.nbytes),  # type: ignore[misc]
            "silu_mul": (lambda gate_up=gate_up: ops.silu_mul(gate_up), gate_up.nbytes * 3 // 2),  # type: ignore[misc]
            "gated": (lambda x=x: ops.gated(x, gate_up_weight), gate_up_weight.nbytes),  # type: ignore[misc]
        }
        for name, (call, moved) in calls.items():
            us = rig.median_us(call)
            rig.report(f"{name} {rows}", "", us, f"{moved / us / 1e3:7.0f} GB/s")
        inputs = rig.inputs([Span(0, rows)])
        qkv = torch.randn(rows, CONFIG.qkv_width, device=rig.device).to(torch.bfloat16)
        for tile in ROTATE_TILES:
            attention = rig.attention(tuning._replace(rotate_few=tile, rotate_many=tile))
            us = rig.median_us(
                lambda a=attention, i=inputs, x=qkv: a.rotate_and_write(  # type: ignore[misc]
                    0, x, head_weight, head_weight, i
                )
            )
            how = f"{tile.tokens} tokens {tile.heads} heads warps {tile.warps}"
            rig.report(f"rotate_and_write {rows}", how, us, f"{2 * qkv.nbytes / us / 1e3:7.0f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if not torch.accelerator.is_available():
        raise SystemExit("benchmarks/kernels.py needs an NVIDIA GPU")
    started = time.perf_counter()
    with torch.inference_mode():
        rig = Rig()
        tuning = prefills(rig, decodes(rig))
        elementwise(rig, tuning)
    if arguments.json:
        arguments.json.write_text(json.dumps([line._asdict() for line in rig.lines], indent=1))
    print(f"\nkept: {tuning}\n")
    for line in rig.lines:
        if line.how in ("best", "triton", "sdpa-flash", "sdpa-cudnn"):
            print(f"{line.what:<34} {line.how:<12} {line.us:10.1f} us  {line.rate}")
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()

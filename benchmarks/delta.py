# mypy: disable-error-code="no-untyped-call,no-any-return"
"""Gated delta layers on a GPU beside what the machine allows: decode steps and prompts of one layer with the
shape of Qwen3.5-35B-A3B, with kernels and in the readable form.

    PYTHONPATH=src python3 benchmarks/delta.py --json delta.json

The limit of a decode step is to read and write its states once; that of prompts, to read and write what the
kernels hand on to each other. States rotate over several layers, so that none is still in the cache. Every
case is compared with the readable form in float64 before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from penstock.models import triton_delta
from penstock.models.delta_rule import convolved, heads_of, many_steps, one_step
from penstock.models.model import Recurrence
from penstock.models.triton_delta import DeltaInputs, LayerStates, Runs

DIMS = Recurrence(tuple(range(30)), 16, 32, 128, 128, window=4)
NUM_LAYERS = 6  # of the states that are measured
READ_GB_S = 4300.0
DECODES = (1, 8, 32, 128, 256)
PROMPTS = ((2048,), (8192,), (1024,) * 8, (4096, 2048, 1024, 512, 256, 128, 64, 64))
WARPS = (4, 8)
TOLERANCE = 1e-3
Row = dict[str, Any]


def case(lengths: Sequence[int], num_decodes: int) -> tuple[list[LayerStates], Runs, DeltaInputs]:
    num, device = sum(lengths), "cuda"
    rows = len(lengths)
    windows = torch.randn(rows, NUM_LAYERS, DIMS.window - 1, DIMS.qkv_width, device=device)
    shape = (rows, NUM_LAYERS, DIMS.num_value_heads, DIMS.key_dim, DIMS.value_dim)
    matrices = torch.randn(shape, device=device)
    layers = [LayerStates(windows[:, layer], matrices[:, layer]) for layer in range(NUM_LAYERS)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    order = torch.randperm(rows).to(torch.int32).to(device)
    prompts = lengths[num_decodes:]
    inputs = DeltaInputs(
        torch.randn(num, DIMS.qkv_width + DIMS.out_width, device=device).bfloat16()[:, : DIMS.qkv_width],
        torch.randn(DIMS.qkv_width, 1, DIMS.window, device=device),
        -0.1 * torch.rand(num, DIMS.num_value_heads, device=device),
        torch.rand(num, DIMS.num_value_heads, device=device),
    )
    return layers, Runs(order, starts, num_decodes, len(prompts), max(prompts, default=0)), inputs


def readable(
    states: LayerStates, runs: Runs, inputs: DeltaInputs, lengths: Sequence[int], exact: bool
) -> torch.Tensor:
    """As `BoundStates` does it: decodes together, prompts one by one. `exact`: in float64, without changing
    the states."""
    found, at, rows = [], 0, runs.rows.long()
    num = runs.num_decodes
    parts = [(rows[:num], 1, num)] if num else []
    parts += [(rows[num + i : num + i + 1], length, 1) for i, length in enumerate(lengths[num:])]
    for own, length, count in parts:
        tokens = slice(at, at + length * count)
        at = tokens.stop
        given = (inputs.qkv[tokens].float(), inputs.decay[tokens], inputs.beta[tokens])
        window, state = states.windows[own], states.matrices[own]
        if exact:
            given, window, state = tuple(x.double() for x in given), window.double(), state.double()  # type: ignore[assignment]
        qkv, decay, beta = (x.unflatten(0, (count, length)) for x in given)
        mixed, window = convolved(qkv, window, inputs.conv.to(window.dtype))
        out, state = (one_step if length == 1 else many_steps)(heads_of(mixed, decay, beta, DIMS), state)
        if not exact:
            states.windows.index_copy_(0, own, window)
            states.matrices.index_copy_(0, own, state)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


def timed_ms(run: Callable[[int], object], times: int = 30) -> float:
    """Median, each time with another layer."""
    for number in range(3):
        run(number)
    spans = []
    for number in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(number % NUM_LAYERS)
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end))
    return median(spans)


def graphed_ms(run: Callable[[int], object]) -> float:
    """Of one layer, in a captured step of several: without the host."""
    for number in range(3):
        run(number)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(NUM_LAYERS):
            run(layer)
    return timed_ms(lambda _: graph.replay()) / NUM_LAYERS


def measure(lengths: Sequence[int], num_decodes: int) -> Row:
    layers, runs, inputs = case(lengths, num_decodes)
    right = readable(layers[0], runs, inputs, lengths, exact=True)
    found = triton_delta.advance(layers[0], runs, inputs)
    error = float((found.double() - right).abs().max() / right.abs().max())
    assert error < TOLERANCE, f"{lengths[:8]}: {error}"

    def kernels(layer: int) -> object:
        return triton_delta.advance(layers[layer], runs, inputs)

    def plain(layer: int) -> object:
        return readable(layers[layer], runs, inputs, lengths, exact=False)

    state_bytes = 8 * len(lengths) * (DIMS.num_bytes // len(DIMS.layers) // 4)
    by_head = DIMS.num_value_heads * (2 * DIMS.value_dim + 2 * DIMS.key_dim + triton_delta.CHUNK)
    token_bytes = 0 if num_decodes else 8 * sum(lengths) * (DIMS.qkv_width + by_head)
    row: Row = {"decodes": num_decodes, "prompts": list(lengths[num_decodes:]), "error": error}
    row["kernels_ms"] = graphed_ms(kernels) if num_decodes else timed_ms(kernels)
    row["readable_ms"] = graphed_ms(plain) if num_decodes else timed_ms(plain)
    row["limit_ms"] = (state_bytes + token_bytes) / READ_GB_S / 1e6
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [measure([1] * num, num) for num in DECODES]
    for prepare, run in itertools.product(WARPS, WARPS):
        triton_delta.PREPARE_WARPS, triton_delta.RUN_WARPS = prepare, run
        rows += [{**measure(lengths, 0), "warps": [prepare, run]} for lengths in PROMPTS]
    for row in rows:
        print(json.dumps(row))
    if options.json is not None:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

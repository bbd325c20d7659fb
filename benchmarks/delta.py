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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton

from penstock.models import triton_delta
from penstock.models.delta_rule import (
    DeltaForm,
    DeltaInputs,
    LayerStates,
    Prompts,
    ReadableDelta,
    convolved,
    heads_of,
    many_steps,
    one_step,
)
from penstock.models.model import Recurrence

DIMS = Recurrence(tuple(range(30)), 16, 32, 128, 128, window=4)
NUM_LAYERS = 6  # of the states that are measured
READ_GB_S = 4300.0
DECODES = (1, 8, 32, 128, 256)
PROMPTS = ((2048,), (8192,), (1024,) * 8, (4096, 2048, 1024, 512, 256, 128, 64, 64))
# other launches than those that the engine has, one after the other
OTHERS: tuple[tuple[str, dict[str, int]], ...] = (
    *(("PREPARE", {"num_warps": warps}) for warps in (2, 8)),
    *(
        ("CARRY", {"VALUES": values, "num_warps": warps, "num_stages": stages})
        for values, warps, stages in itertools.product((16, 32, 64), (4, 8), (1, 2))
    ),
    *(
        ("READ", {"VALUES": values, "num_warps": warps})
        for values, warps in itertools.product((64, 128), (4, 8))
    ),
)
TOLERANCE = 5e-3
Row = dict[str, Any]


class DoubleDelta(ReadableDelta):
    """In float64."""

    def _run(self, states: LayerStates, rows: torch.Tensor, length: int, inputs: DeltaInputs) -> torch.Tensor:
        qkv, conv, decay, beta = inputs
        rows, parts = rows.long(), (qkv, decay, beta)
        qkv, decay, beta = (part.unflatten(0, (-1, length)) for part in parts)
        mixed, _ = convolved(qkv, states.windows.index_select(0, rows), conv)
        step = one_step if length == 1 else many_steps
        out, _ = step(heads_of(mixed, decay, beta, DIMS), states.matrices.index_select(0, rows))
        return out.transpose(1, 2).flatten(0, 1)


class Case(NamedTuple):
    """One step: requests with a token each, or prompts."""

    layers: Sequence[LayerStates]
    prompts: Prompts
    inputs: DeltaInputs
    decodes: bool


def case(lengths: Sequence[int], decodes: bool) -> Case:
    num, rows, device = sum(lengths), len(lengths), "cuda"
    windows = torch.randn(rows, NUM_LAYERS, DIMS.window - 1, DIMS.qkv_width, device=device)
    shape = (rows, NUM_LAYERS, DIMS.num_value_heads, DIMS.key_dim, DIMS.value_dim)
    matrices = torch.randn(shape, device=device)
    layers = [LayerStates(windows[:, layer], matrices[:, layer]) for layer in range(NUM_LAYERS)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    order = torch.randperm(rows).to(torch.int32).to(device)
    inputs = DeltaInputs(
        torch.randn(num, DIMS.qkv_width + DIMS.out_width, device=device).bfloat16()[:, : DIMS.qkv_width],
        torch.randn(DIMS.qkv_width, 1, DIMS.window, device=device),
        -0.1 * torch.rand(num, DIMS.num_value_heads, device=device),
        torch.rand(num, DIMS.num_value_heads, device=device),
    )
    return Case(layers, Prompts(order, starts, 0, max(lengths), lengths), inputs, decodes)


def run(form: DeltaForm, case: Case, layer: int) -> torch.Tensor:
    if case.decodes:
        return form.steps(case.layers[layer], case.prompts.rows, case.inputs)
    return form.prompts(case.layers[layer], case.prompts, case.inputs)


def error_of(case: Case) -> float:
    """Against the readable form in float64, whose inputs are those of the kernels."""
    exact = LayerStates(*(tensor.double() for tensor in case.layers[0]))
    given = DeltaInputs(*(part.double() for part in case.inputs))
    right = run(DoubleDelta(DIMS), case._replace(layers=[exact], inputs=given), 0)
    found = run(triton_delta.TritonDelta(), case, 0)
    return float((found.double() - right).abs().max() / right.abs().max())


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


def measure(lengths: Sequence[int], decodes: bool) -> Row:
    step = case(lengths, decodes)
    error = error_of(step)
    assert error < TOLERANCE, f"{lengths[:8]}: {error}"
    state_bytes = 8 * len(lengths) * (DIMS.num_bytes // len(DIMS.layers) // 4)
    by_head = DIMS.num_value_heads * (2 * DIMS.value_dim + DIMS.key_dim)
    by_head += (
        DIMS.num_value_heads * DIMS.value_dim * DIMS.key_dim // triton_delta.CHUNK
    )  # states before chunks
    token_bytes = 0 if decodes else 8 * sum(lengths) * (DIMS.qkv_width + by_head)
    row: Row = {"decodes" if decodes else "prompts": len(lengths) if decodes else lengths, "error": error}
    for name, form in (("kernels", triton_delta.TritonDelta()), ("readable", ReadableDelta(DIMS))):
        once = partial(run, form, step)
        row[f"{name}_ms"] = graphed_ms(once) if decodes else timed_ms(once)
    row["limit_ms"] = (state_bytes + token_bytes) / READ_GB_S / 1e6
    return row


def launches(step: Case) -> Iterator[Row]:
    """Compiled first, all of them."""
    once = partial(run, triton_delta.TritonDelta(), step)
    for wanted in (False, True):
        for name, other in OTHERS:
            launch: dict[str, int] = getattr(triton_delta, name)
            kept = dict(launch)
            launch |= other
            try:
                if wanted:
                    yield {"launch": name, **other, "ms": timed_ms(once)}
                else:
                    once(0)
            except triton.runtime.errors.OutOfResources:
                continue
            finally:
                launch |= kept
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--launches", action="store_true", help="prompts with other launches, too")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [measure([1] * num, True) for num in DECODES]
    rows += [measure(lengths, False) for lengths in PROMPTS]
    for row in rows:
        print(json.dumps(row))
    if options.launches:
        for row in launches(case((8192,), False)):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

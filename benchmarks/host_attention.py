"""One decoded token over KV in host memory: attention computed there, by the processor, against bringing the
KV to the device.

    PYTHONPATH=src python3 benchmarks/host_attention.py [--tokens 32768,131072] [--threads 0] [--json FILE]

KV lies as host memory has it: a page per block, in it all layers, K and V. Each way reads one layer after the
other; all layers together are larger than any cache. Three ways of the processor: `in place` reads each block
where it lies, in PyTorch's fused attention; `gathered` copies a layer's blocks together first; `contiguous`
is as fast as it could be were a layer's KV in one piece, which it never is. `link` is the rate of the link to
the device, on a machine that has one: one plain copy of as many bytes from pinned memory in one piece, which
the engine's own copies of blocks reach to within a few per cent (docs/figures.md, Copies). Rates are bytes of
KV per second; what a step takes besides is the same.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

BLOCK, KV_HEADS, GROUP, HEAD_DIM = 16, 8, 4, 128  # of Qwen3-4B
ROUNDS = 5
ROW = "{:>9} {:>8} {:>11} {:>11} {:>11} {:>11}"


def merged(out: Tensor, lse: Tensor) -> Tensor:
    """Partial results of blocks [B, heads, group, dim] and their logarithms [B, heads, group], as one."""
    share = torch.softmax(lse.float(), dim=0).unsqueeze(-1)
    return (out.float() * share).sum(dim=0)


def in_place(q: Tensor, page: Tensor) -> Tensor:
    """`page` [B, 2, block, heads, dim]: one layer of every block. The heads that share KV are taken for
    tokens of one query."""
    k, v = page[:, 0].transpose(1, 2), page[:, 1].transpose(1, 2)
    queries = q.unsqueeze(0).expand(len(page), -1, -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, k, v)
    return merged(out, lse)


def gathered(q: Tensor, page: Tensor) -> Tensor:
    k, v = (page[:, part].permute(2, 0, 1, 3).reshape(KV_HEADS, -1, HEAD_DIM) for part in (0, 1))
    return contiguous(q, k, v)


def contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`k` and `v` [heads, T, dim]."""
    scores = torch.bmm(q, k.transpose(1, 2)).float() / math.sqrt(HEAD_DIM)
    return torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v).float()


def seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def link_seconds(num_bytes: int) -> float | None:
    """No strided view: PyTorch would copy it together on the host first."""
    if not torch.cuda.is_available():
        return None
    pinned, device = (
        torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(num_bytes, dtype=torch.uint8, device="cuda"),
    )

    def copy() -> None:
        device.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    return seconds(copy)


def measure(num_tokens: int, num_layers: int) -> dict[str, float | int | None]:
    num_blocks = num_tokens // BLOCK
    arena = torch.randn(num_blocks, num_layers, 2, BLOCK, KV_HEADS, HEAD_DIM, dtype=torch.float32).to(
        torch.bfloat16
    )
    q = torch.randn(KV_HEADS, GROUP, HEAD_DIM).to(torch.bfloat16)
    k, v = (
        arena[:, 0, part].permute(2, 0, 1, 3).reshape(KV_HEADS, -1, HEAD_DIM).contiguous() for part in (0, 1)
    )
    right = contiguous(q.float(), k.float(), v.float())
    for found in (in_place(q, arena[:, 0]), gathered(q, arena[:, 0]), contiguous(q, k, v)):
        torch.testing.assert_close(found, right, rtol=0.05, atol=0.01)
    num_bytes = arena.nbytes
    took_s = {
        "in place": seconds(lambda: [in_place(q, arena[:, layer]) for layer in range(num_layers)]),
        "gathered": seconds(lambda: [gathered(q, arena[:, layer]) for layer in range(num_layers)]),
        "contiguous": seconds(lambda: contiguous(q, k, v)) * num_layers,
        "link": link_seconds(num_bytes),
    }
    rates = {name: None if taken is None else num_bytes / taken / 1e9 for name, taken in took_s.items()}
    return {"tokens": num_tokens, "layers": num_layers, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", default="32768,131072", help="lengths of the context, with commas between them"
    )
    parser.add_argument("--layers", type=int, default=4, help="whose KV is read in turn")
    parser.add_argument(
        "--threads", type=int, default=0, help="of the processor; 0: as many as PyTorch takes"
    )
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, bfloat16, GB/s of KV")
    print(ROW.format("tokens", "layers", "in place", "gathered", "contiguous", "link"))
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        rows.append(row := measure(tokens, arguments.layers))
        shown = (
            "-" if row[name] is None else f"{row[name]:.1f}"
            for name in ("in place", "gathered", "contiguous", "link")
        )
        print(ROW.format(tokens, arguments.layers, *shown), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""How much of recorded agents' prompts is reused as memory shrinks: the replay of `agents_model.py` with a
share of the blocks that all conversations need, by expected cost and in order of arrival with `lru`, beside
Belady's rule for the latter's order.

    python benchmarks/agents_memory.py agentic-coding.jsonl.gz --users 48 --json memory.json --plot memory.png
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from driver import flags, write
from penstock.bench.report import save_picture
from penstock.bench.trace import best_hits, next_uses
from penstock.bench.trace_files import Asking, block_keys, read_conversations, select
from penstock.models.progress import silent

BLOCK = 16
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)
ON_DEVICE = 0.31  # of all memory, as with 262k tokens on the device and 583k in host memory
WAYS = {"cost": ("--scheduling", "cost"), "fifo, lru": ("--scheduling", "fifo", "--eviction", "lru")}


def modelled(options: argparse.Namespace, num_blocks: int, how: tuple[str, ...]) -> dict[str, Any]:
    """In a process of its own: the model puts its own clock in place of the process's."""
    device = max(4608, round(ON_DEVICE * num_blocks))  # one context of 65,536 tokens and its answer at least
    sizes = ["--device-blocks", str(device), "--host-blocks", str(max(16, num_blocks - device))]
    command = [
        sys.executable,
        str(Path(__file__).with_name("agents_model.py")),
        str(options.trace),
        "--users",
        str(options.users),
    ]
    run = subprocess.run(
        [*command, "--client-ms", "30", "--json", *sizes, *how], check=True, capture_output=True, text=True
    )
    return dict(json.loads(run.stdout))


def main() -> None:
    parser = flags(__doc__, users=(48, "recorded agents at once"))
    parser.add_argument("trace", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    asking = Asking(str(options.trace), options.users)
    users = asking.users_of(
        select(read_conversations(options.trace), options.users, asking.context, asking.requests), 32000
    )
    # In order of arrival users take turns.
    turns = max(len(user.asks) for user in users)
    prompts = [user.asks[turn].prompt for turn in range(turns) for user in users if turn < len(user.asks)]
    keys = [block_keys(prompt, BLOCK) for prompt in prompts]
    total, needed = sum(map(len, prompts)), len({key for some in keys for key in some})
    uses = next_uses(SimpleNamespace(prompts=keys))  # type: ignore[arg-type]
    rows = []
    for share in SHARES:
        num_blocks = round(share * needed)
        row: dict[str, Any] = {"share": share, "blocks": num_blocks}
        for name, how in WAYS.items():
            print(f"{share}x, {name} ...", file=sys.stderr)
            row[name] = modelled(options, num_blocks, how)
        row["optimum"] = best_hits(uses, num_blocks, silent).blocks * BLOCK / total
        rows.append(row)
        print(
            f"| {share:g}x | {100 * row['cost']['reused']:.1f} | {100 * row['fifo, lru']['reused']:.1f} | "
            f"{100 * row['optimum']:.1f} |",
            flush=True,
        )
    write(options.json, {"users": options.users, "needed_blocks": needed, "rows": rows})
    if options.plot:
        title = f"{options.users} recorded coding agents at once, an H200 in modelled time"
        save_picture(options.plot, title, lambda axes: draw(axes, rows))


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    shares = [row["share"] for row in rows]
    for label, style, reused in (
        ("--scheduling cost (default)", "o-", [row["cost"]["reused"] for row in rows]),
        ("--scheduling fifo --eviction lru", "o-", [row["fifo, lru"]["reused"] for row in rows]),
        ("optimum in order of arrival (Belady)", "k--", [row["optimum"] for row in rows]),
    ):
        axes.plot(shares, [100 * share for share in reused], style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shares, [f"{share:g}x" for share in shares])
    axes.set_ylim(0, 100)
    axes.set_xlabel("device and host memory, of what the conversations need in all")
    axes.set_ylabel("prompt tokens reused, %")
    axes.legend(loc="lower right")


if __name__ == "__main__":
    main()

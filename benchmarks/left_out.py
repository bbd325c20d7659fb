"""How many drafts are kept behind tokens that were left out: while drafts do not pay, what makes them has no
KV of what is decoded. Always at the same place of the same answers, so many tokens behind the last that was
left out.

python benchmarks/left_out.py --speculate mtp --json left-out.json python benchmarks/left_out.py --speculate
draft:smollm2-135m     a draft that is the target: without gaps all is kept
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from draft_draws import asked, made, rates, step, tokens_per_step

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.switched import switched

CASES = ((0, 0), (64, 0), (256, 0), (256, 64))  # tokens that are left out, and tokens behind them
# tokens of an answer before drafts are made
BEFORE = 8 + max(left_out + behind for left_out, behind in CASES)


def measured(args: argparse.Namespace, num_left_out: int, num_behind: int) -> dict[str, Any]:
    engine = made(args.model, args.speculate, args.drafts, 1024)
    speculation = switched(engine)
    answers = asked(engine, args.temperature, BEFORE + args.tokens)
    while engine.has_work():
        num = len(answers[0])
        speculation.leaves_out = BEFORE - num_behind - num_left_out <= num < BEFORE - num_behind
        speculation.is_on = num >= BEFORE
        step(engine)
    kept, drafted = rates(engine), sum(engine.stats().drafted)
    engine.close(timeout_s=30.0)
    return {
        "left_out": num_left_out,
        "behind": num_behind,
        "kept": kept,
        "drafted": drafted,
        "tokens_per_step": tokens_per_step(kept),
        "answers": answers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default="mtp")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, with drafts")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(2)
    found: list[dict[str, Any]] = []
    answers: list[list[list[int]]] = []
    for left_out, behind in CASES:
        one = measured(args, left_out, behind)
        answers.append(one.pop("answers"))
        assert answers[0] == answers[-1], "what is left out has changed an answer"
        found.append(one)
        shares = "  ".join(f"{rate:6.1%}" for rate in one["kept"])
        print(
            f"{left_out:4} left out, {behind:3} behind: {shares}  {one['tokens_per_step']:.2f} tokens a "
            f"step, {one['drafted']:,} drafts"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"speculate": args.speculate, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

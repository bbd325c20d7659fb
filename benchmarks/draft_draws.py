"""How many drafts of a head are kept where tokens are sampled: the likeliest token, a draw with the target's
own noise, and what rejection sampling would keep, sum(min(p, q)), at the places that the second one reaches.
All on the same answers, since drafts change none.

python benchmarks/draft_draws.py --temperatures 0.7,1.0 --tokens 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, SpeculationConfig
from penstock.contract import SamplingParams, Submission, TokenEvent
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.ahead import DraftPass
from penstock.engine.execution.draws import DrawKind
from penstock.engine.execution.sampling import SamplePass

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.driving import pass_of
from tests.support.forced import forced

ASKED = (
    "Why is the sky blue?",
    "Give me five tips for a good night's sleep.",
    "Tell me a short story about a fox and a clock.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python class for a stack with push, pop and peek.",
    "Explain how a bill becomes a law.",
    "What should I cook with rice, beans and onions?",
    "Write a letter of thanks to a teacher.",
    "How do I learn to play the guitar?",
    "Describe a rainy day in a small town.",
    "What are prime numbers good for?",
    "List ten animals that live in the sea, and say something about each.",
)


class Overlaps:
    """Collects sum(min(p, q)) of every draft that is verified with all before it kept, by its place."""

    def __init__(self, engine: Engine, temperature: float, num_places: int) -> None:
        self.shares, self.nums = [0.0] * num_places, [0] * num_places
        executor = engine.parts.executor
        ahead = pass_of(engine, DraftPass).drafts
        proposals: dict[tuple[int, int], torch.Tensor] = {}
        sampling = pass_of(engine, SamplePass)
        choose, sample = ahead.draws.choose, sampling.sample
        vocab = executor.target.model.config.vocab

        def note(logits: Any, ids: Any, rows: Any, positions: Any, choice: DrawKind) -> Any:
            for row, position, scores in zip(
                rows.tolist(), positions.tolist(), logits.float() / temperature, strict=True
            ):
                q = scores.softmax(dim=-1)
                proposals[row, position] = q if ids is None else torch.zeros(vocab).index_copy(0, ids, q)
            return choose(logits, ids, rows, positions, choice)

        def compare(step: Any) -> None:
            sample(step)
            flow, packed, outputs = step.flow, step.packed, step.outputs
            if packed.drafted is None:
                return
            inputs, views = flow.bound_inputs(), packed.drafted.views(step.ints, flow.bound_inputs().tokens)
            tokens = outputs.made.tokens.tolist()
            for start, length in zip(views.starts.tolist(), views.lengths.tolist(), strict=True):
                for place in range(length):
                    at = start + place
                    q = proposals.get(
                        (int(inputs.sample_rows[at]), int(inputs.positions[inputs.sample_at[at]]))
                    )
                    if tokens[at] < 0 or q is None:
                        break
                    p = (flow.logits[at].float() / temperature).softmax(dim=-1)
                    self.shares[place] += float(torch.minimum(p, q).sum())
                    self.nums[place] += 1

        ahead.draws.choose, sampling.sample = note, compare  # type: ignore[method-assign,assignment]


def made(model: str, proposer: str, num_drafts: int, max_len: int = 512) -> Engine:
    """One that always drafts as much as it may."""
    config = Config(
        ModelSource(model=model, device="cpu", weights="float32"),
        KvConfig(device_blocks=max_len),
        EngineConfig(max_batch=len(ASKED), max_model_len=max_len),
        speculation=SpeculationConfig(proposer, num_drafts),
    )
    engine = build(config)
    forced(engine)
    return engine


def asked(engine: Engine, temperature: float, num_tokens: int) -> list[list[int]]:
    """Submits all of them; the answers, which grow with each step."""
    found: list[list[int]] = []
    for seed, text in enumerate(ASKED):
        tokens: list[int] = []
        found.append(tokens)

        def listen(event: TokenEvent, tokens: list[int] = tokens) -> None:
            tokens.extend(event.tokens)

        prompt = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
        sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        engine.submit(Submission(prompt, sampling), listen)
    return found


def step(engine: Engine) -> None:
    if not engine.step():
        engine.wait_work(1.0)


def rates(engine: Engine) -> list[float]:
    """Of drafts that are kept: by place, of those whose drafts before were all kept."""
    stats = engine.stats()
    reached = [stats.drafted[0], *stats.accepted[:-1]]
    return [have / max(1, num) for have, num in zip(stats.accepted, reached, strict=True)]


def tokens_per_step(rates: Iterable[float]) -> float:
    return 1.0 + sum(accumulate(rates, lambda chain, rate: chain * rate))


def measured(args: argparse.Namespace, temperature: float) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": temperature}
    answers = []
    for name, choice in (("likeliest", DrawKind.LIKELIEST), ("drawn", None)):
        engine = made(args.model, args.speculate, args.drafts)
        ahead = pass_of(engine, DraftPass).drafts
        if choice is not None:
            draw = ahead.draws.choose
            ahead.draws.choose = lambda *given, draw=draw: draw(*given[:4], DrawKind.LIKELIEST)  # type: ignore[method-assign]
        overlaps = Overlaps(engine, temperature, args.drafts)
        answers.append(asked(engine, temperature, args.tokens))
        while engine.has_work():
            step(engine)
        found[name] = rates(engine)
        found[f"{name}_drafted"] = sum(engine.stats().drafted)
        engine.close(timeout_s=30.0)
    found["rejection"] = [
        share / max(1, num) for share, num in zip(overlaps.shares, overlaps.nums, strict=True)
    ]
    assert answers[0] == answers[1], "drafts have changed an answer"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default="mtp")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0.7,1.0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [measured(args, float(one)) for one in args.temperatures.split(",")]
    for one in found:
        for name in ("likeliest", "drawn", "rejection"):
            shares, expected = "  ".join(f"{rate:6.1%}" for rate in one[name]), tokens_per_step(one[name])
            num = one.get(f"{name}_drafted", one["drawn_drafted"])
            print(
                f"temperature {one['temperature']}  {name:>10}  {shares}   {expected:.2f} tokens a step   "
                f"{num:,} drafts"
            )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Speed against plain `transformers` generate: same weights, same threads, one process, rounds in turn. Owns
the comparison.

`python benchmarks/transformers_ratio.py`. A ratio is their time over ours: above 1 is faster than they are.
Absolute times mean little on a shared machine; both sides of a ratio are measured within seconds of each
other, and the median over rounds is taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from penstock.bench.report import describe_machine
from penstock.bench.run import Driver, random_prompts
from penstock.config import Config, KvConfig, ModelSource
from penstock.engine.build import build
from penstock.errors import ConfigError, PenstockError
from penstock.models.embedded import embedded_file

PAD = 0  # any id: padded positions are masked


class Case(NamedTuple):
    """`num` requests at once; the i-th prompt has `prompt_tokens + i * longer` tokens; each writes
    `tokens`."""

    name: str
    num: int
    prompt_tokens: int
    longer: int
    tokens: int
    aim: float

    def prompts(self, vocab: int, run: int) -> list[list[int]]:
        lengths = [self.prompt_tokens + i * self.longer for i in range(self.num)]
        whole = random_prompts(self.num, max(lengths), vocab, (run, self.num, self.prompt_tokens))
        return [prompt[:length] for prompt, length in zip(whole, lengths, strict=True)]


CASES = (
    Case("prefill 512 tokens, 1 request", 1, 512, 0, 1, aim=0.95),
    Case("decode 64 tokens, 1 request", 1, 16, 0, 64, aim=0.95),
    Case("decode 64 tokens, 8 requests", 8, 16, 8, 64, aim=1.0),
)


class Timed(NamedTuple):
    seconds: float
    tokens: list[list[int]]


class Side(Protocol):
    def run(self, prompts: list[list[int]], tokens: int) -> Timed: ...


class Ours:
    """The engine, driven from this thread. Nothing is reused: every prompt is computed, as on the other
    side."""

    def __init__(self) -> None:
        source = ModelSource("smollm2-135m", device="cpu", dtype="float32")
        self.engine = build(Config(source, KvConfig(prefix_cache=False)))
        self._driver = Driver(self.engine)

    def run(self, prompts: list[list[int]], tokens: int) -> Timed:
        started = time.perf_counter()
        readers = [self._driver.submit(prompt, tokens) for prompt in prompts]
        self._driver.run_all()
        return Timed(time.perf_counter() - started, [reader.tokens for reader in readers])


class Theirs:
    """`generate`, greedy; shorter prompts are padded on the left, as it requires."""

    def __init__(self, gguf: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()
        # to the full length, without a processor that would hold it back
        self._model.generation_config.eos_token_id = None

    def run(self, prompts: list[list[int]], tokens: int) -> Timed:
        longest = max(map(len, prompts))
        started = time.perf_counter()
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            written = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=PAD
            )
        return Timed(time.perf_counter() - started, written[:, longest:].tolist())


def compare(ours: Side, theirs: Side, vocab: int, rounds: int) -> list[dict[str, Any]]:
    """One warm-up of each, then rounds in which the two take turns at going first."""
    taken: dict[str, list[tuple[Timed, Timed]]] = {case.name: [] for case in CASES}
    for run in range(1 + rounds):
        for case in CASES:
            prompts = case.prompts(vocab, run)
            sides = {
                side: side.run(prompts, case.tokens)
                for side in ((ours, theirs) if run % 2 else (theirs, ours))
            }
            print(
                f"round {run} of {rounds}, {case.name}: {sides[theirs].seconds / sides[ours].seconds:.2f}",
                file=sys.stderr,
            )
            if run:
                taken[case.name].append((sides[ours], sides[theirs]))
    return [_row(case, taken[case.name]) for case in CASES]


def _row(case: Case, pairs: list[tuple[Timed, Timed]]) -> dict[str, Any]:
    ratios = [theirs.seconds / ours.seconds for ours, theirs in pairs]
    same = [a == b for ours, theirs in pairs for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
    return {
        "case": case.name,
        "aim": case.aim,
        "ratio": median(ratios),
        "ratios": ratios,
        # least disturbed by others
        "best_ratio": min(theirs.seconds for _, theirs in pairs) / min(ours.seconds for ours, _ in pairs),
        "ours_s": median(ours.seconds for ours, _ in pairs),
        "theirs_s": median(theirs.seconds for _, theirs in pairs),
        "same_outputs": sum(same) / len(same),  # greedy in float32: ties aside, all of them
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measured rounds, after one that only warms up"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), metavar="N", help="of torch, on both sides"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and results there")
    args = parser.parse_args(argv)
    try:
        if args.rounds < 1 or args.threads < 1:
            raise ConfigError("--rounds and --threads must be at least 1")
        rows = _measure(args.rounds, args.threads)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in rows:
        times = (
            f"{row['ours_s']:.3f} s against {row['theirs_s']:.3f} s, same outputs {row['same_outputs']:.0%}"
        )
        print(
            f"{row['case']}: ratio {row['ratio']:.3f} (best rounds {row['best_ratio']:.3f}, aim "
            f"{row['aim']}); {times}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": describe_machine(), "results": rows}, indent=2) + "\n")
    return 0


def _measure(rounds: int, threads: int) -> list[dict[str, Any]]:
    gguf = embedded_file()
    torch.set_num_threads(threads)  # before lanes start their threads, which take over what is set here
    print("loading both", file=sys.stderr)
    theirs, ours = Theirs(gguf), Ours()
    rows = compare(ours, theirs, ours.engine.tokenizer.vocab_size, rounds)
    ours.engine.close(timeout_s=20.0)
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""Needles in haystacks: how many of them a model finds whose recall is exact by construction
(`retrieval.py`), and what prefill and decoding take at each length. Any engine option may be given; a needle
that is not found was lost by the engine.

    PYTHONPATH=src python3 benchmarks/needles.py --lengths 8192,32768 [--device cuda --dtype bfloat16 ...]
    [--json FILE]

One request per length: its prompt is the haystack, then the model asks for all needles by itself, so that all
but the first token of an answer are steps of decoding. It asks again for what it did not find, `--tries`
times. Times are taken where tokens arrive.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from driver import show, warmed, write
from penstock.bench.report import Column
from penstock.contract import FinishReason, SamplingParams, Submission, TokenEvent
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, PenstockError, StepFailed
from penstock.flags import Parser, counts, engine_flags, new_file, positive
from retrieval import Haystack, Retrieval, haystack, write_retrieval_model

WARM_TOKENS = 2048
WAIT_S = 0.1  # at most, before a turn looks again
COLUMNS = (
    ("tokens", "tokens"),
    Column("found", lambda row: f"{row['found']}/{row['asked']}"),
    ("asked again", "asked_again"),
    ("prefill s", "prefill_s", 2),
    ("decode ms p50", "decode_ms.median", 2),
    ("mean ms", "decode_ms.mean", 2),
    ("max ms", "decode_ms.max", 2),
)


@dataclass(slots=True)
class Answer:
    """Listens to one request."""

    submitted_s: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # of each event with tokens, since it was submitted
    counts: list[int] = field(default_factory=list)  # tokens in it
    end: TokenEvent | None = None

    def __call__(self, event: TokenEvent) -> None:
        if event.tokens:
            self.times_s.append(time.perf_counter() - self.submitted_s)
            self.counts.append(len(event.tokens))
            self.tokens.extend(event.tokens)
        if event.finish is not None:
            self.end = event

    @property
    def decode_ms(self) -> list[float]:
        """Milliseconds per token, by event behind the first."""
        return [
            1e3 * (end - start) / num
            for (start, end), num in zip(pairwise(self.times_s), self.counts[1:], strict=True)
        ]


def ask(engine: Engine, stack: Haystack) -> Answer:
    answer = Answer()
    sampling = SamplingParams(
        max_tokens=stack.most_tokens, temperature=0.0, ignore_eos=True, stop_token_ids=frozenset({stack.stop})
    )
    engine.submit(Submission(stack.all_questions(), sampling), answer)
    while engine.has_work():
        if not engine.step():
            engine.wait_work(WAIT_S)
    if answer.end is None or answer.end.finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise StepFailed(
            f"a prompt of {len(stack.tokens) + 1} tokens failed: {answer.end and answer.end.error}"
        )
    return answer


def row_of(num_tokens: int, stack: Haystack, answer: Answer) -> dict[str, Any]:
    times_ms = answer.decode_ms
    return {
        "tokens": num_tokens,
        "found": stack.found(answer.tokens),
        "asked": len(stack.needles),
        "written": len(answer.tokens),
        "asked_again": stack.asked(answer.tokens) - len(stack.needles),
        "prefill_s": answer.times_s[0],
        "decode_ms": {
            "mean": statistics.mean(times_ms),
            "median": statistics.median(times_ms),
            "max": max(times_ms),
        },
    }


def parser() -> Parser:
    found = Parser(prog="needles.py", description=(__doc__ or "").split("\n\n")[0], parents=[engine_flags()])
    found.set_defaults(model=None)
    group = found.add_argument_group("needles")
    group.add_argument(
        "--lengths", type=counts, default=(8192, 32768), metavar="N,N", help="tokens of each prompt"
    )
    group.add_argument(
        "--depths", default="0.1,0.5,0.9", metavar="X,X", help="where they are, as shares of the length"
    )
    shape = Retrieval()
    for name, default, text in (
        ("needles", 16, "in each haystack"),
        ("layers", shape.num_layers, "of the model"),
        ("heads", shape.num_heads, "query heads of a layer"),
        ("kv-heads", shape.num_kv_heads, "KV heads of a layer"),
        ("head-dim", shape.head_dim, "values of a head"),
        ("tries", shape.tries, "questions for a needle that is not found"),
    ):
        group.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=text)
    group.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there")
    return found


def measure(argv: Sequence[str] | None) -> None:
    args = parser().parse_args(argv)
    if args.model is not None:
        raise ConfigError("--model is not taken: this measurement makes its own")
    depths = tuple(float(depth) for depth in args.depths.split(","))
    longest = max(args.lengths) + args.needles * (args.tries + 1)
    args.max_model_len = args.max_model_len or longest
    model = Retrieval(args.layers, args.heads, args.kv_heads, args.head_dim, args.tries, max_position=longest)
    stacks = [
        haystack(length, args.needles, depths, args.seed + i, model) for i, length in enumerate(args.lengths)
    ]
    with tempfile.TemporaryDirectory() as folder:
        args.model = str(write_retrieval_model(Path(folder) / "retrieval", model))
        with warmed(args) as engine:
            warm_tokens = min(WARM_TOKENS, *args.lengths)  # what happens once in a process is in no figure
            ask(engine, haystack(warm_tokens, 1, (0.5,), args.seed + len(stacks), model))
            rows = [
                row_of(length, stack, ask(engine, stack))
                for length, stack in zip(args.lengths, stacks, strict=True)
            ]
    show(rows, COLUMNS, left=0)
    write(args.json, {"model": asdict(model), "depths": depths, "rows": rows})


def main(argv: Sequence[str] | None = None) -> None:
    try:
        measure(argv)
    except (PenstockError, ValueError) as error:
        raise SystemExit(f"needles.py: {error}") from None


if __name__ == "__main__":
    main()

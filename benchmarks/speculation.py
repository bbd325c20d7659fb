"""Tokens per second with drafts and without, on prompts of several kinds. The engines are in one process and
take turns every few steps. Shown are medians of rounds, each against the plain one beside it. `again` is a
second plain engine: what differs by chance.

    python benchmarks/speculation.py --proposers mtp --batches 1,4 --json speculation.json
    python benchmarks/speculation.py --device cuda --batches 1,8,32 --tokens 128,512 --json FILE
    python benchmarks/speculation.py --model LARGE.gguf --proposers draft:SMALL.gguf --kinds code --drafts 2
    python benchmarks/speculation.py --model qwen3-4b --load-format dummy --device cuda --kinds loops
    python benchmarks/speculation.py --device cuda --proposers plain,mtp,again --batches 8,32 --formed 2
    python benchmarks/speculation.py --shown FILE --plot docs/pictures/speculation-h200.svg

`tools/parts/weights.py` fetches two real models: qwen2.5-coder-1.5b, and qwen2.5-coder-0.5b for drafts.

On a CPU give one proposer to each process: several engines in one have more threads than there are cores, and
slow each other down.

`loops` has random prompts: greedy text of random weights soon says the same over and over, and lookups keep
nearly all. It shows what a step of a large model gives with drafts; no real text is like that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driver import flags, write
from penstock.bench.report import draw_bars, save_picture
from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig, SpeculationConfig
from penstock.contract import FinishReason, Grammar, SamplingParams, Submission, TokenEvent
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import settle_process

_TEXT = (
    "The lighthouse at the northern cape was built in 1871 by the harbour company. Its lamp burned whale "
    "oil for the first nine years, then paraffin, and since 1931 it has been electric. The keeper's family "
    "lived in the two rooms at its foot until 1968, when the light was automated. Today the rooms are a "
    "small museum, which is open from May to September and shows the old lenses, the logbooks and a model "
    "of the harbour as it was before the storm of 1894."
)
_CODE = (
    "def total(prices, tax_rate):\n    result = 0\n    for price in prices:\n        result = result + "
    "price\n    return result + result * tax_rate\n"
)
KINDS = {
    "chat": (
        "Why is the sky blue?",
        "Give me five tips for a good night's sleep.",
        "Tell me a short story about a fox and a clock.",
        "What is the difference between a virus and a bacterium?",
    ),
    "code": (
        f"Rename the variable result to amount in this code and show all of it:\n\n{_CODE}",
        f"Add type hints and a docstring to this code and show all of it:\n\n{_CODE}",
        "Write a Python class for a stack with push, pop and peek, and an example of its use.",
        "Write a Python function that counts the words of a text file, with a test.",
    ),
    "summary": (
        f"Summarise this text in two sentences:\n\n{_TEXT}",
        f"Repeat this text word for word:\n\n{_TEXT}",
        f"List the dates in this text and what happened then:\n\n{_TEXT}",
        f"Correct the spelling of this text, and show it again:\n\n{_TEXT}",
    ),
}


SLICE_STEPS = 16  # of one engine, then another has its turn
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    "minItems": 1000,
}


class Round(NamedTuple):
    """One batch of requests, from the first token of the last prompt to the end."""

    num_tokens: int
    seconds: float
    drafted: int
    accepted: int
    steps: int
    blocked_s: float  # that the engine's thread waited for results,
    wall_s: float  # of so much: with the prompts

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


class Turns:
    """Time of one engine, which stands still while others have their turn. The engine measures its own steps
    by it, too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._total_s, self._since_s = 0.0, time.perf_counter()
        engine.turns._pace._clock = self.now

    def now(self) -> float:
        return self._total_s + time.perf_counter() - self._since_s

    def resume(self) -> None:
        self._since_s = time.perf_counter()

    def pause(self) -> None:
        self._total_s = self.now()


class Run:
    """One batch of requests in one engine, a slice of steps at a time.

    Every prompt is computed before the clock starts: what is measured is decoding. With a salt of its own a
    round finds neither KV nor text of the rounds before it."""

    def __init__(
        self, turns: Turns, prompts: Sequence[list[int]], max_tokens: int, salt: str, num_formed: int = 0
    ) -> None:
        self._turns, self._engine = turns, turns.engine
        self._before = self._engine.stats()
        self._heard: list[tuple[float, TokenEvent]] = []
        self._active_s = 0.0
        free = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        formed = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, grammar=Grammar("json_schema", json.dumps(SCHEMA))
        )
        for number, prompt in enumerate(prompts):
            sampling = formed if number < num_formed else free
            self._engine.submit(
                Submission(prompt, sampling, cache_salt=salt),
                lambda event: self._heard.append((turns.now(), event)),
            )

    def advance(self, num_steps: int) -> bool:
        """So many steps; the device has done them when it returns. Says whether there are more."""
        self._turns.resume()
        started_s = self._turns.now()
        for _ in range(num_steps):
            if not self._engine.has_work():
                break
            if not self._engine.step():
                self._engine.wait_work(1.0)
        self._engine.launched().wait_passed()
        self._active_s += self._turns.now() - started_s
        self._turns.pause()
        return self._engine.has_work()

    def result(self) -> Round:
        failed = [event.error for _, event in self._heard if event.finish is FinishReason.ERROR]
        if failed:
            raise SystemExit(f"a request failed: {failed[0]}")
        firsts: dict[str, float] = {}
        for at, event in self._heard:
            if event.tokens:
                firsts.setdefault(event.request_id, at)
        start = max(firsts.values())
        after = [(at, event) for at, event in self._heard if at > start]
        stats = self._engine.stats()
        return Round(
            sum(len(event.tokens) for _, event in after),
            max(at for at, _ in after) - start,
            sum(event.drafted for _, event in after),
            sum(event.accepted for _, event in after),
            stats.steps - self._before.steps,
            stats.blocked_s["result"] - self._before.blocked_s["result"],
            self._active_s,
        )


def make_engine(args: argparse.Namespace, proposer: str | None) -> Engine:
    config = Config(
        ModelSource(
            args.model,
            device=args.device,
            weights=args.weights,
            dtype=args.dtype,
            load_format=args.load_format,
        ),
        KvConfig(device_gib=args.device_kv_gib),
        EngineConfig(max_batch=max(args.batches)),
        OffloadConfig(enabled=False),
        speculation=SpeculationConfig(proposer, (args.drafts or None) if proposer else None),
    )
    return build(config)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All engines in this process: of two processes one may be slower by a tenth for as long as it lives.
    They take turns every few steps: a machine that gets slower or faster meanwhile does so for all of them.
    Each round is compared with the plain one beside it."""
    with contextlib.ExitStack() as stack:
        engines = {name: Turns(stack.enter_context(warm_engine(args, name))) for name in args.proposers}
        # as a server does: else a collection of 100 ms comes every few rounds, and always in those of the
        # same engine
        settle_process()
        found: list[dict[str, Any]] = []
        for kind, num_tokens, batch in itertools.product(args.kinds, args.tokens, args.batches):
            rounds: dict[str, list[list[Round]]] = {name: [] for name in engines}
            # of one request there are four answers in each
            num_rounds = args.rounds if batch > 1 else -(-args.rounds // 4)
            for number in range(num_rounds + 1):
                for name, some in rounds_of(engines, kind, batch, num_tokens, number, args.formed).items():
                    rounds[name].append(some)
            for name in engines:  # the first round is thrown away: what steps take is learned in it
                plain = rounds["plain"][1:] if "plain" in rounds else None
                found.append(row(kind, batch, num_tokens, name, rounds[name][1:], plain))
                print_row(found[-1])
    return found


@contextlib.contextmanager
def warm_engine(args: argparse.Namespace, name: str) -> Iterator[Engine]:
    started_s = time.perf_counter()
    engine = make_engine(args, None if name in ("plain", "again") else name)
    try:
        engine.warm()
        print(f"{name}: warm after {time.perf_counter() - started_s:.0f} s", flush=True)
        yield engine
    finally:
        engine.close()


def rounds_of(
    engines: Mapping[str, Turns], kind: str, batch: int, num_tokens: int, number: int, num_formed: int
) -> dict[str, list[Round]]:
    """One group of prompts after the other where there is one request at a time."""
    prompts = prompts_of(next(iter(engines.values())).engine, kind)
    some = [list(prompts[n % len(prompts)]) for n in range(batch)]
    groups = [some] if batch > 1 else [[one] for one in prompts]
    found: dict[str, list[Round]] = {name: [] for name in engines}
    for n, group in enumerate(groups):
        salt = f"{kind} {batch} {num_tokens} {number} {n}"
        runs = {name: Run(turns, group, num_tokens, salt, num_formed) for name, turns in engines.items()}
        shuffler, open_runs = random.Random(number), list(runs.values())
        while open_runs:
            shuffler.shuffle(open_runs)  # so that none is always behind the same one
            open_runs = [run for run in open_runs if run.advance(SLICE_STEPS)]
        for name, run in runs.items():
            found[name].append(run.result())
    return found


def prompts_of(engine: Engine, kind: str) -> list[list[int]]:
    if kind != "loops":
        return [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in KINDS[kind]]
    chooser = random.Random(1)
    return [[chooser.randrange(1, 500) for _ in range(64)] for _ in range(4)]


def row(
    kind: str,
    batch: int,
    num_tokens: int,
    name: str,
    rounds: Sequence[Sequence[Round]],
    plain: Sequence[Sequence[Round]] | None,
) -> dict[str, Any]:
    every = [one for some in rounds for one in some]
    drafted, accepted = sum(one.drafted for one in every), sum(one.accepted for one in every)
    return {
        "kind": kind,
        "batch": batch,
        "tokens": num_tokens,
        "proposer": name,
        "tokens_per_s": statistics.median(map(rate_of, rounds)),
        "against_plain": None
        if plain is None
        else [rate_of(some) / rate_of(beside) for some, beside in zip(rounds, plain, strict=True)],
        "acceptance": accepted / drafted if drafted else None,
        "tokens_per_step": sum(one.num_tokens for one in every)
        / max(1, sum(one.steps for one in every))
        / batch,
        "waits_for_device": sum(one.blocked_s for one in every) / sum(one.wall_s for one in every),
    }


def rate_of(rounds: Sequence[Round]) -> float:
    return sum(one.num_tokens for one in rounds) / sum(one.seconds for one in rounds)


def print_row(one: dict[str, Any]) -> None:
    share = "" if one["acceptance"] is None else f"{one['acceptance']:6.1%} kept"
    ratios = one["against_plain"]
    ratio = (
        ""
        if ratios is None
        else (f"{statistics.median(ratios):5.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    )
    print(
        f"{one['kind']:8} {one['tokens']:4} tokens  batch {one['batch']:3}  {one['proposer'][:16]:16} "
        f"{one['tokens_per_s']:9.1f} tok/s {ratio}  {one['tokens_per_step']:5.2f} tokens a step {share}  "
        f"waits for the device {one['waits_for_device']:4.0%}",
        flush=True,
    )


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[tuple[tuple[str, int, int], str], float]:
    """Tokens per second against plain decoding, by case and proposer: the median of rounds."""
    return {
        (case_of(one), one["proposer"]): statistics.median(one["against_plain"])
        for one in rows
        if one["against_plain"]
    }


def case_of(one: dict[str, Any]) -> tuple[str, int, int]:
    return one["kind"], one.get("tokens", 128), one["batch"]


def draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Tokens per second against plain decoding: a group of bars for each kind of prompts and number of
    requests."""
    ratios, groups = ratios_of(rows), list(dict.fromkeys(map(case_of, rows)))
    proposers = list(dict.fromkeys(one["proposer"] for one in rows if one["proposer"] != "plain"))
    names = [
        f"{kind}, {tokens} tokens, {batch} request{'s' if batch > 1 else ''}"
        for kind, tokens, batch in groups
    ]
    draw_bars(
        axes, names, {name: [ratios.get((group, name)) for group in groups] for name in proposers}, "%.2f"
    )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("tokens per second, against plain decoding")


def main() -> None:
    parser = flags(
        __doc__,
        model=("smollm2-135m", "name or path"),
        device=("cpu", "auto, cpu or cuda"),
        dtype=("auto", "of activations and KV"),
        weights=("auto", "their form on a CPU"),
        load_format=("auto", "auto or dummy"),
        proposers=(["plain", "ngram", "mtp", "again"], "what proposes drafts"),
        batches=([1, 4], "requests at once"),
        kinds=(["chat", "summary"], f"prompts: {', '.join(KINDS)}, loops"),
        tokens=([128], "of each answer"),
        rounds=(5, "of each case"),
        formed=(0, "requests of each batch that write JSON by a schema"),
        drafts=(0, "of a request and step, at most; 0: the proposer's default"),
        device_kv_gib=(1.0, "device memory for KV"),
        machine=(platform.machine(), "its name, for the file and the picture"),
    )
    parser.add_argument("--plot", type=Path, help="draw them into this file")
    parser.add_argument("--shown", type=Path, help="measure nothing: draw the rows of this file")
    args = parser.parse_args()
    where = args.device
    if args.shown is not None:
        stored = json.loads(args.shown.read_text())
        rows, where = stored["rows"], f"{stored['settings']['model']} on {stored['machine']}"
    else:
        rows = measure(args)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "plot", "shown")}
    write(args.json, {"machine": args.machine, "settings": settings, "rows": rows})
    if args.plot is not None:
        save_picture(args.plot, f"Speculative decoding: {where}", lambda axes: draw(axes, rows))


if __name__ == "__main__":
    main()

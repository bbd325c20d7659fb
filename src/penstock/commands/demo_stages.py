"""What `penstock demo` asks, of which engine, and what comes back. Owns the plan, an answer's figures and how
answers are compared; measures and shows nothing, and needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import zip_longest
from typing import Any, NamedTuple

from penstock.config import Config
from penstock.contract import KvSource

QUESTION = "Who opened the gate at night?"
NEXT_QUESTION = "What was the price of the padlock?"
# where KV is, as it is called here
PLACES = {"device": "device", "host": "host", "ssd": "disk", "remote": "store"}


@dataclass(frozen=True, slots=True)
class DemoStage:
    """One question to one engine."""

    name: str
    title: str
    tier: str | None  # that has the KV of the document; None: it is computed
    question: str = QUESTION


COLD = DemoStage("cold", "nothing cached", None)
HOST = DemoStage("host", "from host memory", "host")
SSD = DemoStage("ssd", "from disk, restarted", "ssd")
REMOTE = DemoStage("remote", "second engine: store", "remote")
NEXT = DemoStage("next", "next question", "device", NEXT_QUESTION)


class DemoEngine(NamedTuple):
    """One process, and what it is asked. The last of several also gets the next question."""

    config: Config
    stages: tuple[DemoStage, ...]


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """The figures of one stage."""

    stage: DemoStage
    prompt_tokens: int
    source: KvSource
    ttft_s: float
    total_s: float
    tokens: list[int]
    text: str

    @property
    def reused(self) -> str:
        """Prompt tokens by the place that their KV came from."""
        found = {place: getattr(self.source, tier) for tier, place in PLACES.items()}
        return ", ".join(f"{num:,} {place}" for place, num in found.items() if num)

    @property
    def was_served(self) -> bool:
        """By the tier that it shows."""
        return self.stage.tier is None or getattr(self.source, self.stage.tier) > 0


class EngineRun(NamedTuple):
    """What a process sends at its end."""

    measured_on: dict[str, Any]
    document_tokens: int
    blocks_on_disk: int
    start_s: float  # until the engine could be asked
    answers: list[DemoAnswer]


def planned(config: Config, remote: str | None) -> list[DemoEngine]:
    """The first engine writes to the disk of `config` and to the store; each of the others has one of them
    alone."""
    offload = replace(config.offload, load_always=True)
    if remote is not None:
        offload = replace(offload, remote=remote, remote_timeout_s=20.0)
    alone = {SSD: replace(offload, remote=None), REMOTE: replace(offload, ssd_dir=None)}
    if remote is None:
        del alone[REMOTE]
    engines = [DemoEngine(replace(config, offload=offload), (COLD, HOST))]
    engines += [DemoEngine(replace(config, offload=one), (stage,)) for stage, one in alone.items()]
    return [*engines[:-1], engines[-1]._replace(stages=(*engines[-1].stages, NEXT))]


def story() -> str:
    return files("penstock.commands").joinpath("demo.txt").read_text(encoding="utf-8")


def factor(cold: DemoAnswer, other: DemoAnswer) -> float:
    return cold.ttft_s / other.ttft_s


def difference(answers: Sequence[DemoAnswer]) -> str | None:
    """Where an answer differs from the first one to the same question, in words. None: nowhere."""
    first: dict[str, DemoAnswer] = {}
    for answer in answers:
        one = first.setdefault(answer.stage.question, answer)
        pairs = enumerate(zip_longest(one.tokens, answer.tokens, fillvalue="none"))
        for at, (before, now) in pairs:
            if before != now:
                names = f"{one.stage.title!r} and {answer.stage.title!r}"
                return f"the answers {names} differ: token {at + 1} is {before} and {now}"
    return None


def unserved(answers: Sequence[DemoAnswer]) -> str | None:
    """Stages whose tier had nothing of the prompt, in words."""
    found = [f"{answer.stage.title!r}" for answer in answers if not answer.was_served]
    return f"nothing of the prompt came from the tier that is shown: {', '.join(found)}" if found else None

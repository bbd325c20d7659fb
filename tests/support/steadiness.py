"""The same greedy requests over a prompt that is computed, and over one that comes from any tier, alone and
beside others. Owns the prompts and how answers are compared: by tokens and the exact floats of their
log-probabilities."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.build import build
from penstock.engine.engine import Engine
from tests.support.driving import Collected, run_all, settle_all, submit, wait_scanned

NUM_TOKENS = 6
LENGTHS = (17, 40, 64, 129, 210)  # around the ends of blocks and of chunks

Answer = tuple[tuple[int, ...], tuple[Any, ...]]


def prompts(engine: Engine, text: Sequence[int] = ()) -> list[list[int]]:
    """Pieces of `text`, or random ones."""
    chooser = random.Random(5)
    return [
        list(text[7 * num : 7 * num + num])
        if text
        else [chooser.randrange(3, engine.tokenizer.vocab_size) for _ in range(num)]
        for num in LENGTHS
    ]


def read(found: Collected) -> Answer:
    assert found.error is None
    return tuple(found.tokens), tuple(found.logprobs)


def alone(engine: Engine, some: Sequence[Sequence[int]]) -> tuple[list[Answer], list[KvSource | None]]:
    answers, sources = [], []
    for prompt in some:
        found = submit(engine, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=4)
        run_all(engine)
        settle_all(engine)
        answers.append(read(found))
        sources.append(found.source)
    return answers, sources


def together(engine: Engine, some: Sequence[Sequence[int]]) -> list[Answer]:
    found = [submit(engine, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=4) for prompt in some]
    run_all(engine)
    settle_all(engine)
    return [read(one) for one in found]


def differing(config: Config, disk: Path, text: Sequence[int] = ()) -> list[str]:
    """The ways to an answer that give another one than a prompt computed alone: empty where all are the same.
    `config` has a host tier; a disk is added."""
    config = dataclasses.replace(
        config, offload=dataclasses.replace(config.offload, ssd_dir=str(disk), ssd_gib=0.5, load_always=True)
    )
    engine = build(config)
    wait_scanned(engine)
    asked = prompts(engine, text)
    expected, sources = alone(engine, asked)
    assert all(
        source is not None and source.computed == len(prompt)
        for source, prompt in zip(sources, asked, strict=True)
    )
    found = {}

    def ask(way: str, source: str) -> None:
        found[way], sources = alone(engine, asked)
        assert all(getattr(one, source) > 0 for one in sources if one is not None), (way, sources)

    ask("device", "device")
    engine.cache.reset(("device",))
    ask("host", "host")
    found["batch, from the device"] = together(engine, asked)
    longer = [[*prompt, *answer[0]] for prompt, answer in zip(asked, expected, strict=True)]
    next_turn, _ = alone(engine, longer)
    persisting = engine.cache.persist()
    settle_all(engine)
    assert persisting is not None
    engine.close(timeout_s=30.0)

    engine = build(config)
    wait_scanned(engine)
    ask("disk", "ssd")
    engine.close(timeout_s=30.0)

    engine = build(dataclasses.replace(config, offload=dataclasses.replace(config.offload, ssd_dir=None)))
    found["batch, computed"] = together(engine, asked)
    engine.cache.reset(("device", "host"))
    computed, _ = alone(engine, longer)
    engine.close(timeout_s=30.0)
    ways = [way for way, answers in found.items() if answers != expected]
    return ways + (["next turn"] if next_turn != computed else [])

"""A conversation of 131,072 tokens in three turns, of which the device holds an eighth: the second and the
third restore nearly all of it, by name, also after a restart."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.contract import SamplingParams, SnapshotRequest, Submission, TokenEvent
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.models import loader
from penstock.models.registry import BUILT_IN
from tests.support import driving
from tests.support.driving import Collected, tiny_config, wait_scanned

TOKENS = 131_072
THIN = dataclasses.replace(
    BUILT_IN["tiny-llama"], num_layers=1, num_heads=1, num_kv_heads=1, hidden=16, ffn=32, vocab=256
)


@pytest.fixture(autouse=True)
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head in one layer: attention over so many pairs of tokens takes seconds."""
    models = {**BUILT_IN, "tiny-thin": THIN}
    monkeypatch.setattr(loader, "BUILT_IN", models)
    monkeypatch.setattr(driving, "BUILT_IN", models)
    torch.set_num_threads(1)


@contextmanager
def opened(directory: Path) -> Iterator[Engine]:
    sizes = {
        "blocks": 1200,
        "host_blocks": 10_500,
        "resident_tokens": 16_384,
        "prefill_chunk": 4096,
        "max_batch": 2,
    }
    lengths = {"max_model_len": TOKENS + 8192, "positions": TOKENS + 8192}
    engine = build(tiny_config("tiny-thin", ssd_dir=directory, ssd_gib=0.5, **sizes, **lengths))
    stop, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not stop.is_set():
                if not engine.step():
                    engine.wait_work(0.1)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield engine
    finally:
        stop.set()
        thread.join()
        engine.close(60.0)
    assert not failed


def answer(engine: Engine, prompt: list[int]) -> Collected:
    collected, done = Collected(), threading.Event()

    def hear(event: TokenEvent) -> None:
        collected.events.append(event)
        if event.finish is not None:
            done.set()

    engine.submit(Submission(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)), hear)
    assert done.wait(600.0) and collected.error is None
    return collected


def restored(collected: Collected) -> float:
    assert collected.source is not None
    source = dataclasses.asdict(collected.source)
    return 1.0 - source["computed"] / sum(source.values())


@pytest.mark.parametrize(
    ("restarts", "length"),
    [(False, TOKENS // 2), (True, TOKENS)],
    ids=["one process", "restarted between turns"],
)
def test_the_second_and_the_third_turn_restore_the_conversation(
    tmp_path: Path, restarts: bool, length: int
) -> None:
    rng, name = np.random.default_rng(0), ""
    said = [rng.integers(1, 250, num).tolist() for num in (length, 500, 500)]
    for turns in ((0,), (1,), (2,)) if restarts else ((0, 1, 2),):
        with opened(tmp_path / "ssd") as engine:
            wait_scanned(engine)
            for turn in turns:
                name = take_turn(engine, said[turn], turn, name)


def take_turn(engine: Engine, said: list[int], turn: int, before: str) -> str:
    """`said` behind the snapshot of the turn before; returns the name of this one's."""
    tokens = said
    if before:
        tokens = [*np.frombuffer(engine.snapshots.open(before).tokens, np.uint32).tolist(), *said]
    collected = answer(engine, tokens)
    if turn:
        assert restored(collected) >= 0.97, f"turn {turn + 1}: {collected.source}"
    whole = np.asarray([*tokens, *collected.tokens], np.uint32)
    taken = engine.snapshots.take(SnapshotRequest(f"turn-{turn + 1}", prompt=whole.tobytes(), ttl_s=3600.0))
    assert (
        taken.num_tokens == len(whole) and taken.kept_tokens >= 0.97 * len(whole) and taken.tiers == ("ssd",)
    )
    return taken.name

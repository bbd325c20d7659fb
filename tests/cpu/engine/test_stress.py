"""Random crowds of requests: whatever arrives, shares, waits, is retracted or cancelled, each gets the tokens
it would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import FinishReason
from penstock.engine import sizing
from penstock.engine.engine import Engine
from penstock.engine.execution.replays import cuda_buckets
from tests.cpu.engine.test_eagle_engine import write_random_eagle
from tests.cpu.engine.test_engine import check_at_rest
from tests.cpu.engine.test_mtp_engine import model_of, write_random_head
from tests.cpu.engine.test_tiers import overlap_from
from tests.support.crowds import crowds
from tests.support.driving import Collected, generate, settle_all, submit
from tests.support.forced import ForcedDevice, forced
from tests.support.guesses import Guess

WAIT_S = 0.01  # at most, for a transfer
RESIDENT_TOKENS = 128  # longer requests are paged out

Asked = tuple[tuple[int, ...], tuple[tuple[str, Any], ...]]


def random_request(rng: random.Random, stems: list[list[int]]) -> Asked:
    """A prompt that shares its beginning with others, and any mixture of what a request can ask for."""
    stem = rng.choice(stems)
    prompt = stem[: rng.choice((0, 5, 16, 32, 47, 48, 80, 150))] + [
        rng.randrange(1, 500) for _ in range(rng.choice((0, 1, 3, 16, 40)))
    ]
    sampling: dict[str, Any] = {"max_tokens": rng.choice((0, 1, 2, 7, 20, 33))}
    if rng.random() < 0.5:
        sampling |= {"temperature": rng.choice((0.5, 1.0, 1.5)), "seed": rng.randrange(100)}
        sampling |= rng.choice(
            ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9})
        )
    if rng.random() < 0.3:
        sampling |= rng.choice(
            ({"frequency_penalty": 0.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3})
        )
    if rng.random() < 0.2:
        sampling |= {"logprobs": 2}
    if rng.random() < 0.15:
        sampling |= {"prompt_logprobs": 1}
    return tuple(prompt or [7]), tuple(sampling.items())


def crowd(engine: Engine, rng: random.Random, asked: list[Asked]) -> list[tuple[Asked, Collected]]:
    """Submit over time, in bursts and one by one, and cancel every fifth at some moment of its life."""
    waiting, running, doomed = list(asked), [], []
    while waiting or engine.has_work():
        for _ in range(rng.choice((0, 0, 1, 1, 6)) if waiting else 0):
            if waiting:
                request = waiting.pop()
                found = submit(engine, request[0], **dict(request[1]))
                running.append((request, found))
                if rng.random() < 0.2:
                    doomed.append([rng.randrange(12), found.request_id])
        for entry in doomed:
            entry[0] -= 1
            if entry[0] == 0:
                engine.cancel(entry[1])
        if isinstance(drafting := engine.parts.speculation, ForcedDevice) and rng.random() < 0.08:
            drafting.is_on = not drafting.is_on
        if rng.random() < (0.1 if engine.cache.cold_tiers else 0.02):
            engine.cache.reset(rng.choice((("device",), ("host",), ("device", "host"))))
        if rng.random() < 0.3 and (prefix := engine.cache.prefix_of(rng.choice(asked)[0])) is not None:
            engine.cache.prefetch(prefix, "somebody who thinks")
        if not engine.step():
            engine.wait_work(WAIT_S)
        engine.parts.scheduler.check()
    return running


SEEDS = crowds(6)
CROWDS = [*(("tiny-qwen3", seed) for seed in SEEDS), *(("tiny-qwen3-moe", seed) for seed in SEEDS[1::5])]


@pytest.mark.parametrize(("model", "seed"), CROWDS)
def test_every_request_of_a_random_crowd_gets_the_tokens_it_would_get_alone(
    make_engine: Callable[..., Engine],
    model: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    rng = random.Random(seed)
    stems = [[rng.randrange(1, 500) for _ in range(150)] for _ in range(3)]
    alone = make_engine(model, prefix_cache=False, capture=False, prefill_chunk=512)
    asked = [random_request(rng, stems) for _ in range(40)]
    asked += rng.choices(asked, k=20)  # what was asked before is what prompt lookup can propose
    head = tmp_path / "head"
    heads = f"mtp:{head}", f"eagle:{head}"
    proposer = ("ngram", "draft:tiny-qwen3", heads[0], None, "draft:tiny-llama", heads[1])[seed % 6]
    if proposer in heads:
        (write_random_head if proposer == heads[0] else write_random_eagle)(head, model_of(alone))
    host_blocks = (0, 40, 8, 400)[seed % 4]
    if seed % 2:  # padded replays of every kind, as on CUDA
        monkeypatch.setattr(sizing, "buckets_for", lambda *_: cuda_buckets(32, 64))
    if seed % 3:  # nearly every answer is longer than was expected
        monkeypatch.setattr(sizing, "lengths_for", lambda _: Guess(seed))
    engine = make_engine(
        model,
        max_batch=32 if seed % 2 else 8,
        blocks=rng.choice((16, 24, 200)),
        host_blocks=host_blocks,
        overcommit=rng.choice((1.0, 4.0)),
        prefill_chunk=rng.choice((16, 64)),
        speculate=proposer,
        **({"ssd_dir": str(tmp_path / "disk"), "ssd_gib": 0.05} if seed % 4 in (1, 3) else {}),
        **({"resident_tokens": RESIDENT_TOKENS, "max_model_len": 256} if host_blocks >= 40 else {}),
    )
    if engine.parts.speculation is not None:
        forced(engine, lambda most: rng.randrange(most + 1))
    if "host" in engine.kv.tiers and seed % 3:
        # every step layer by layer over its loads; the others wait for all of them, but for the longest
        overlap_from(engine, 0)
    if engine.cache.cold_tiers:
        for stem in stems:
            generate(engine, stem)
        settle_all(engine)
        engine.cache.reset(("device", "host"))  # they are on disk alone when the crowd comes
    num_cancelled = 0
    for (prompt, sampling), found in crowd(engine, rng, asked):
        expected = generate(alone, prompt, **dict(sampling))
        assert found.error is None
        if found.finish is FinishReason.CANCELLED:
            num_cancelled += 1
            assert found.tokens == expected.tokens[: len(found.tokens)], (prompt, sampling)
            continue
        assert found.finish is expected.finish
        assert found.tokens == expected.tokens, (prompt, sampling)
        assert found.prompt_logprobs is None or len(found.prompt_logprobs) == len(prompt)
        assert len(found.logprobs) == (len(found.tokens) if "logprobs" in dict(sampling) else 0)
    settle_all(engine)
    check_at_rest(engine)
    assert num_cancelled > 0
    assert proposer is None or sum(engine.parts.scheduler.counts.drafted_by_place) > 0
    assert host_blocks < 40 or engine.stats().host_steps > 0, "something was paged out"
    assert "ssd" not in engine.kv.tiers or engine.cache.cold_tiers["ssd"].counts.num_read > 0, (
        "something came from the disk"
    )
    assert sum(engine.stats().kv_blocks["device"].values()) == engine.cache.num_blocks

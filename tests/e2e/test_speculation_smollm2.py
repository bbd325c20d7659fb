"""Speculation with real weights: the head that comes with the package, prompt lookup, and the model as its
own draft. In float32, so that a step of one row and one of several compute the same: greedy answers are those
of plain decoding, token by token."""

from __future__ import annotations

import functools
import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig, SpeculationConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import check_silent
from tests.support.driving import run_all, submit
from tests.support.forced import forced

PROSE = (Path(__file__).parents[1] / "data" / "prose.txt").read_text()
CODE = "def add(a, b):\n    total = a + b\n"
ASKED = (
    *(f"Repeat this text: {PROSE[at : at + 32]}" for at in range(0, 2400, 450)),
    *(f"Summarise: {PROSE[at : at + 36]}" for at in range(100, 2900, 700)),
    *(f"What is {topic}?" for topic in ("gravity", "a prime number", "jazz")),
    *(f"Rename {name} in this code:\n\n{CODE}" for name in ("total", "a")),
    *(f"Count from {n} to {n + 9}." for n in (1, 5)),
)
TOKENS = 8


def made(proposer: str | None, sanitizer: Sanitizer | None = None) -> Engine:
    config = Config(
        ModelSource(device="cpu", weights="float32"),
        KvConfig(device_blocks=160),
        EngineConfig(max_batch=16, overcommit=2.0),
        OffloadConfig(enabled=True, host_gib=0.25, load_always=True),
        speculation=SpeculationConfig(proposer),
    )
    return build(config, sanitizer=sanitizer)


def answers(engine: Engine) -> list[list[int]]:
    found = []
    for text in ASKED:
        prompt = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
        found.append(submit(engine, prompt, max_tokens=TOKENS, ignore_eos=False))
    run_all(engine, 100_000)
    assert all(one.error is None for one in found)
    return [one.tokens for one in found]


@functools.cache
def plain_answers() -> list[list[int]]:
    torch.set_num_threads(1)
    engine = made(None)
    found = answers(engine)
    engine.close(timeout_s=30.0)
    return found


@pytest.mark.parametrize("proposer", ["ngram", "mtp", "draft:smollm2-135m"])
def test_greedy_answers_are_those_of_plain_decoding(proposer: str) -> None:
    """With tiers on, and with memory promised twice."""
    right = plain_answers()
    sanitizer = Sanitizer()
    engine = made(proposer, sanitizer)
    forced(engine, lambda most: min(most, 3))
    assert answers(engine) == right
    stats = engine.stats()
    if proposer.startswith("draft"):  # it is the target: what is not kept lies behind the end of an answer
        assert sum(stats.accepted) > 60 and sum(stats.accepted) > 0.95 * sum(stats.drafted)
    else:
        assert sum(stats.accepted) > (5 if proposer == "ngram" else 15) and sum(stats.drafted) > sum(
            stats.accepted
        )
    print(
        f"{proposer}: "
        f"{[f'{kept / num:.2f}' for kept, num in zip(stats.accepted, stats.drafted, strict=True)]} kept by "
        "place"
    )
    engine.close(timeout_s=30.0)
    check_silent(sanitizer)


def post(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2-135m", "temperature": 0.0, **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}(\{{| )", line))


def test_a_server_counts_what_it_proposed_and_kept(start_server: Callable[..., Any]) -> None:
    """What usage says of each request adds up to the metrics. A stop string inside kept drafts ends the
    answer there."""
    flags = (
        "--device",
        "cpu",
        "--max-model-len",
        "1024",
        "--device-kv-blocks",
        "256",
        "--weights",
        "float32",
        "--sanitize=strict",
    )
    _, url = start_server(*flags, "--speculate", "ngram")
    words = "red green blue " * 12
    details = []
    for n in range(3):
        reply = post(url, prompt=f"{n} {words}", max_tokens=12)
        details.append(
            reply["usage"].get("completion_tokens_details", {"draft_tokens": 0, "accepted_draft_tokens": 0})
        )
    drafted, accepted = (
        sum(one[name] for one in details) for name in ("draft_tokens", "accepted_draft_tokens")
    )
    assert drafted >= accepted  # how many are worth their time depends on the machine
    assert metric(url, "penstock_spec_proposed_total") == drafted
    assert metric(url, "penstock_spec_accepted_total") == accepted
    assert metric(url, "penstock_spec_accept_length_sum") == accepted
    whole = post(url, prompt=f"7 {words}", max_tokens=12)["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:9]
    stopped = post(url, prompt=f"7 {words}", max_tokens=12, stop=[stop])["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["text"] == whole[: whole.index(stop)]

"""Sequences larger than what they may have on the device, whose tokens attend to a chosen part of them. What
is found is asked of a model that recalls by construction; all of it runs under the sanitizer."""

from __future__ import annotations

import os
import random
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.config import GIB, Config, EngineConfig, KvConfig, ModelSource, OffloadConfig
from penstock.contract import FinishReason
from penstock.engine import build as build_module
from penstock.engine.engine import Engine
from penstock.engine.execution.paging import PagedPass
from penstock.engine.pace import ScoringCost
from penstock.engine.scheduling import residency
from penstock.errors import TransferFailed
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import build_sanitized, check_silent
from retrieval import Haystack, Retrieval, haystack, write_retrieval_model
from tests.support.driving import Collected, assert_same, generate, pass_of, run_all, settle_all, submit

Make = Callable[..., Engine]
Prompts = Callable[..., list[int]]

LENGTHS = [int(length) for length in os.environ.get("PENSTOCK_NEEDLES", "16384").split(",")]
LONG = 1536
RESIDENT = 512
MODEL = Retrieval(tries=32)  # so many questions for a needle: scores are taken twice meanwhile
BLOCK_BYTES = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * 16 * 4


def scored_engine(make_engine: Make, **settings: Any) -> Engine:
    sizes = {
        "blocks": 80,
        "host_blocks": 300,
        "max_model_len": 2048,
        "resident_tokens": RESIDENT,
        "residency": "scored",
    }
    return make_engine(**{**sizes, **settings})


def full_engine(make_engine: Make, **settings: Any) -> Engine:
    return make_engine(blocks=300, host_blocks=300, max_model_len=2048, **settings)


def assert_nothing_held(engine: Engine) -> None:
    settle_all(engine)
    engine.check()
    slots = engine.cache.stats().slots
    assert slots["device"].active == slots["device"].pinned == slots["host"].pinned == 0


# ---------------------------------------------------------------------------------------------------- needles


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture(autouse=True)
def every_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long steps take here decides nothing."""
    monkeypatch.setattr(ScoringCost, "tau", 16)


class Found(NamedTuple):
    needles: int
    most_active: int  # slots of the device that were in use at once
    num_slots: int
    host_steps: int


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval_model(tmp_path_factory.mktemp("retrieval"), MODEL)


@pytest.fixture
def no_exact_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """That find a needle wherever it is, while they measure recall."""
    monkeypatch.setattr(residency, "FIRST_RECALL", -1)


@pytest.fixture
def ask(retrieval: Path, device: str, no_exact_steps: None) -> Iterator[Callable[..., Found]]:
    made: list[tuple[Engine, Sanitizer]] = []

    def ask(
        num_tokens: int, share: float, depths: tuple[float, ...] = (0.1, 0.5, 0.9), seed: int = 0, **kv: Any
    ) -> Found:
        stack = haystack(num_tokens, 16, depths, seed, MODEL)
        resident = int(num_tokens * share) // 16 * 16
        total = num_tokens + stack.most_tokens
        config = Config(
            source=ModelSource(model=str(retrieval), device=device, dtype="float32"),
            kv=KvConfig(device_blocks=resident // 16, resident_tokens=resident, residency="scored", **kv),
            engine=EngineConfig(max_model_len=total, max_batch=2, prefill_chunk=512),
            offload=OffloadConfig(host_gib=(total // 16 * 1.2 + 64) * BLOCK_BYTES / GIB),
        )
        made.append(build_sanitized(config))
        return drive(made[-1][0], stack)

    yield ask
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)


def drive(engine: Engine, stack: Haystack) -> Found:
    answer = submit(
        engine, stack.all_questions(), max_tokens=stack.most_tokens, stop_token_ids=frozenset({stack.stop})
    )
    most = 0
    while engine.has_work():
        if not engine.step():
            engine.wait_work(0.01)
        engine.cache.loads.mover.drain(30.0)  # how long a copy takes here decides nothing either
        most = max(most, engine.cache.stats().slots["device"].active)
    assert answer.error is None and answer.events[0].scored
    return Found(stack.found(answer.tokens), most, engine.cache.num_blocks, engine.stats().host_steps)


@pytest.mark.parametrize("seed", [0])
def test_needles_are_found_with_six_percent_of_the_context_on_the_device(
    seed: int, ask: Callable[..., Found]
) -> None:
    found = ask(8192, 0.06, seed=seed)
    assert found.needles >= 15
    assert found.num_slots <= 0.06 * 8192 / 16 and found.most_active <= found.num_slots


@pytest.mark.parametrize("length", LENGTHS)
def test_needles_are_found_in_long_contexts(
    length: int, tmp_path: Path, device: str, no_exact_steps: None
) -> None:
    """With one layer and one KV head, whose prefill takes a quarter of the time."""
    model = Retrieval(num_layers=1, num_heads=2, num_kv_heads=1, tries=32)
    stack = haystack(length, 16, (0.1, 0.5, 0.9), 0, model)
    resident, total = int(length * 0.06) // 16 * 16, length + stack.most_tokens
    config = Config(
        source=ModelSource(model=str(write_retrieval_model(tmp_path, model)), device=device, dtype="float32"),
        kv=KvConfig(device_blocks=resident // 16, resident_tokens=resident, residency="scored"),
        engine=EngineConfig(max_model_len=total, max_batch=2, prefill_chunk=1024),
        offload=OffloadConfig(host_gib=(total // 16 * 1.2 + 64) * BLOCK_BYTES / 4 / GIB),
    )
    engine = build_module.build(config)
    found = drive(engine, stack)
    engine.close(timeout_s=20.0)
    assert found.needles >= 15 and found.most_active <= 0.06 * length / 16


@pytest.mark.parametrize("depth", [0.5])
def test_recency_alone_finds_none_outside_its_window(depth: float, ask: Callable[..., Found]) -> None:
    assert ask(4096, 0.12, depths=(depth,), scorer="lru").needles == 0
    assert ask(4096, 0.12, depths=(depth,)).needles >= 15


def test_pinned_needles_are_found_whatever_the_scores_say(ask: Callable[..., Found]) -> None:
    """All of them lie around 3 % of the context."""
    needles = haystack(8192, 16, (0.03,), 0, MODEL).needles
    first, last = min(needle.position for needle in needles), max(needle.position for needle in needles)
    assert last - first < 512
    assert ask(8192, 0.25, depths=(0.03,), scorer="lru", pin_spans=((first, last + 1),)).needles == 16


# ------------------------------------------------------------------------------------------- what is attended


def test_a_request_that_fits_is_never_scored(make_engine: Make, prompts: Prompts) -> None:
    """And gives what it would give without the flag, bit for bit."""
    prompt = prompts(RESIDENT - 60)
    engine, exact = scored_engine(make_engine), scored_engine(make_engine, residency="exact")
    ours, theirs = (generate(one, prompt, max_tokens=40, logprobs=3) for one in (engine, exact))
    assert ours.tokens == theirs.tokens and ours.logprobs == theirs.logprobs
    assert not ours.events[0].scored and engine.stats().residency.scorings == 0


def placement_of(engine: Engine, answer: Any) -> Any:
    """Where the KV of a running scored request is."""
    return engine.parts.scheduler.lives[answer.request_id].placement


def run_until(engine: Engine, done: Callable[[], bool], turns: int = 5000) -> None:
    for _ in range(turns):
        if done():
            return
        if not engine.step():
            engine.wait_work(0.01)
    raise AssertionError("it did not come to that")


def test_its_table_is_the_chosen_parts_in_order_and_the_window(
    make_engine: Make, prompts: Prompts, tmp_path: Path
) -> None:
    """And every slot of it holds the bytes that host memory has for the block in that place."""
    engine = scored_engine(make_engine)
    looked = 0
    deep = submit(engine, prompts(LONG), max_tokens=120)
    while engine.has_work():
        if not engine.step():
            engine.wait_work(0.01)
        running = engine.parts.scheduler.running.requests.get(deep.request_id)
        resident = None if running is None else placement_of(engine, deep).resident
        if running is None or resident is None or not resident._chosen:
            continue
        engine.parts.lanes[0].drain()
        host = pass_of(engine, PagedPass).reads._host.tensor  # type: ignore[union-attr]
        for part, fetched in resident._chosen.items():
            there = running.table.paged_slots[part * 4 : part * 4 + 4]
            assert (engine.parts.arena.tensor[fetched.slots.tolist()].cpu() == host[there.tolist()]).all()
            looked += 1
    assert looked > 100 and deep.finish is FinishReason.LENGTH


# ------------------------------------------------------------------------------------------------------ scope


def test_an_exact_request_finds_nothing_that_was_computed_over_a_part(
    make_engine: Make, prompts: Prompts
) -> None:
    """Holds invariant 15: what was computed over a part has a scope of its own."""
    engine, full, prompt = scored_engine(make_engine), full_engine(make_engine), prompts(LONG)
    scored = submit(engine, prompt, max_tokens=300)
    for num in (100, 300):  # while it runs, and when it has ended
        run_until(engine, lambda num=num: len(scored.tokens) >= num)  # type: ignore[misc]
        longer = [*prompt, *scored.tokens[:num]]
        exact = submit(engine, longer, residency="exact", max_tokens=20, logprobs=2)
        run_until(engine, lambda exact=exact: exact.finish is not None)  # type: ignore[misc]
        assert_same(exact, generate(full, longer, max_tokens=20, logprobs=2))
        assert exact.source is not None and exact.source.computed >= 100, (
            "the prompt is found, or what was computed exactly"
        )


def test_what_has_a_scope_of_its_own_is_kept_for_the_next_turn_alone(
    make_engine: Make, prompts: Prompts
) -> None:
    """In host memory, in whole parts that are summed up; what nobody goes on from leaves nothing."""
    engine, prompt = scored_engine(make_engine), prompts(LONG)
    generate(engine, prompt, max_tokens=200)
    assert_nothing_held(engine)
    keys = set(engine.cache.prefix_of(np.array(prompt, np.uint32)).keys)  # type: ignore[union-attr]
    (kept,) = engine.parts.scheduler.deep.kept._kept.values()
    own = set(kept.keys) - keys
    assert len(kept.keys) % 4 == 0 and LONG + 200 - 64 - 16 <= 16 * len(kept.keys) <= LONG + 200
    assert set(engine.cache.loads._host.pool.keys()) - keys == own == engine.cache.writeback._unshared
    assert set(engine.cache._pool.keys()) <= keys
    cancelled = submit(engine, prompts(LONG, 1), max_tokens=200)
    run_until(engine, lambda: len(cancelled.tokens) >= 150)
    engine.cancel(cancelled.request_id)
    run_all(engine)
    assert_nothing_held(engine)
    assert engine.cache.writeback._unshared == own


def test_what_lands_when_its_request_has_gone_is_forgotten(
    make_engine: Make, prompts: Prompts, tmp_path: Path
) -> None:
    """And no disk ever has it."""
    engine, prompt = scored_engine(make_engine, ssd_dir=str(tmp_path), ssd_gib=0.05), prompts(LONG)
    deep = submit(engine, prompt, max_tokens=200)
    run_until(engine, lambda: len(deep.tokens) >= 100)
    copier, may_go_on = engine.cache.saves.mover.copier, threading.Event()

    def copy(*args: Any) -> None:
        may_go_on.wait(30.0)
        copier.copy(*args)

    engine.cache.saves.mover.copier = types.SimpleNamespace(copy=copy)  # type: ignore[assignment]
    run_until(engine, lambda: len(deep.tokens) >= 140)
    engine.cancel(deep.request_id)
    run_all(engine)
    may_go_on.set()
    assert_nothing_held(engine)
    keys = set(engine.cache.prefix_of(np.array(prompt, np.uint32)).keys)  # type: ignore[union-attr]
    assert set(engine.cache.loads._host.pool.keys()) <= keys
    assert engine.cache.cold_tiers["ssd"].usage().as_dict()["used"] <= len(keys)
    assert not engine.cache.writeback._unshared and not engine.cache.writeback.unwanted


# ---------------------------------------------------------------------------------------------- the next turn


def turns_of(engine: Engine, prompts: Prompts, num: int, short: int = -1) -> Iterator[tuple[int, Collected]]:
    """A conversation of so many turns, each of which brings 60 tokens: the prompt's length, and what came.
    One answer may be `short`."""
    prompt = prompts(1024)
    for turn in range(num):
        answer = generate(engine, prompt, max_tokens=2 if turn == short else 70, logprobs=2)
        yield len(prompt), answer
        prompt += answer.tokens + prompts(60, seed=100 + turn)
        settle_all(engine)


def kept_of(engine: Engine) -> list[residency.KeptContext]:
    return list(engine.parts.scheduler.deep.kept._kept.values())


def test_its_next_turns_find_what_was_scored_and_read_what_is_resident(
    make_engine: Make, prompts: Prompts, no_exact_steps: None
) -> None:
    """No step reads all of the context in host memory, however long it is by then."""
    engine = scored_engine(make_engine, host_blocks=400)
    num_before = num_steps = 0
    for turn, (length, answer) in enumerate(turns_of(engine, prompts, 7)):
        assert answer.error is None and answer.source is not None and answer.events[0].scored
        num_steps, num_before = engine.stats().host_steps, num_steps
        if turn == 0:
            assert num_steps > 0
            continue
        assert num_steps == num_before, "the prompt was computed over all of the context"
        assert length - 64 - 16 - 60 <= answer.source.host and answer.source.computed <= 64 + 16 + 60
        assert_nothing_held(engine)
        engine.check()
    assert len(kept_of(engine)) == 1, "a turn replaces what the one before has left"


def test_others_find_nothing_of_it(make_engine: Make, prompts: Prompts) -> None:
    """Neither another tenant, nor a request that attends to all, nor one with other tokens."""
    engine, prompt = scored_engine(make_engine), prompts(1024)
    answer = generate(engine, prompt, max_tokens=100)
    settle_all(engine)
    longer = [*prompt, *answer.tokens, *prompts(50, seed=3)]
    other = submit(engine, longer, salt="another tenant", max_tokens=5)
    run_all(engine)
    exact = submit(engine, longer, residency="exact", max_tokens=5)
    run_all(engine)
    differing = submit(engine, [*prompt, answer.tokens[0] + 1, *longer[1025:]], max_tokens=5)
    run_all(engine)
    assert [one.source.computed for one in (other, exact, differing)] == [1174, 150, 150]  # type: ignore[union-attr]


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_a_next_turn_says_that_it_is_scored_however_short_its_answer(
    max_tokens: int, make_engine: Make, prompts: Prompts
) -> None:
    """Its prompt was computed over a part of the context. The first token of a first turn attends to all, and
    so does the prompt."""
    engine, prompt = scored_engine(make_engine), prompts(1024)
    first = generate(engine, prompt, max_tokens=1)
    assert not first.events[0].scored
    answer = generate(engine, prompt, max_tokens=100)
    settle_all(engine)
    longer = [*prompt, *answer.tokens, *prompts(40, seed=5)]
    going_on = generate(engine, longer, max_tokens=max_tokens)
    assert going_on.source is not None and going_on.source.host > 1024 and going_on.events[0].scored


@pytest.mark.parametrize("what", ["cancel", "retract", "close"])
def test_whatever_ends_it_while_its_parts_come_it_leaves_what_it_went_on_from(
    what: str, make_engine: Make, prompts: Prompts
) -> None:
    engine, prompt = scored_engine(make_engine), prompts(1024)
    answer = generate(engine, prompt, max_tokens=100)
    settle_all(engine)
    may_go_on, stopped = hold_loads(engine)
    longer = [*prompt, *answer.tokens, *prompts(40, seed=5)]
    going_on = submit(engine, longer, max_tokens=50)
    run_until(engine, stopped.is_set)
    (kept,) = kept_of(engine)
    for _ in range(5):
        engine.step()
    assert not going_on.tokens and kept.num_users == 1, "it waits for what it begins with"
    if what == "close":
        threading.Timer(0.05, may_go_on.set).start()
        engine.close(timeout_s=20.0)
        return
    scheduler = engine.parts.scheduler
    if what == "cancel":
        engine.cancel(going_on.request_id)
        engine.step()
    else:
        scheduler.retract(scheduler.running.requests[going_on.request_id])
    assert kept.num_users == 0
    may_go_on.set()
    run_all(engine)
    assert_nothing_held(engine)
    if what == "cancel":
        going_on = generate(engine, longer, max_tokens=50)
    assert (
        len(going_on.tokens) == 50
        and going_on.source is not None
        and going_on.source.computed <= 64 + 16 + 40 + 100
    )


def test_a_next_turn_whose_copies_fail_goes_on_without_those_parts(
    make_engine: Make, prompts: Prompts
) -> None:
    engine, prompt = scored_engine(make_engine), prompts(1024)
    answer = generate(engine, prompt, max_tokens=100)
    settle_all(engine)

    def copy(*args: Any) -> None:
        raise TransferFailed("a copy that is lost")

    engine.cache.loads.mover.copier = types.SimpleNamespace(copy=copy)  # type: ignore[assignment]
    going_on = submit(engine, [*prompt, *answer.tokens, *prompts(40, seed=5)], max_tokens=20)
    run_until(engine, lambda: going_on.finish is not None, turns=2000)
    assert going_on.finish is FinishReason.LENGTH
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    "short", [-1, 1, 2], ids=["long answers", "the second is short", "the last is short"]
)
def test_what_it_knows_of_keys_is_what_all_of_its_context_would_say(
    short: int, make_engine: Make, prompts: Prompts, no_exact_steps: None
) -> None:
    """What was kept, and what was added since, against the blocks that lie in host memory. An answer may be
    over before it is scored."""
    engine = scored_engine(make_engine)
    for turn, (_, answer) in enumerate(turns_of(engine, prompts, 3, short)):
        assert answer.source is not None and (turn == 0 or answer.source.computed <= 64 + 16 + 60 + 62)
    (kept,) = kept_of(engine)
    assert len(kept.keys) >= (1024 + 64 if short > 0 else 1024 + 2 * 130) // 16
    scores, host = pass_of(engine, PagedPass).scores, pass_of(engine, PagedPass).reads._host.tensor  # type: ignore[union-attr]
    assert scores is not None
    engine.step()
    engine.parts.lanes[0].drain()
    num_parts, num_layers = len(kept.place), scores.num_layers
    low, high = scores._in(kept.place, scores._make(1, scores.arena).values(1)).unbind(3)
    pin = engine.cache.loads._host.pin_run(kept.keys, "test")
    assert pin is not None and len(pin.run) == len(kept.keys)
    keys = (
        host[pin.run.tolist(), :num_layers, 0]
        .transpose(0, 1)
        .reshape(num_layers, num_parts, 64, *host.shape[4:])
    )
    pin.end()
    assert torch.equal(low, keys.amin(2)) and torch.equal(high, keys.amax(2))


def test_nothing_of_one_request_reaches_the_next(make_engine: Make, prompts: Prompts) -> None:
    """What was known of its keys is gone, also where it was cancelled, and the next begins without scores,
    pins and parts."""
    engine = scored_engine(make_engine)
    scores = pass_of(engine, PagedPass).scores
    assert scores is not None
    generate(engine, prompts(LONG), max_tokens=50, pins=[(600, 640)])
    second = submit(engine, prompts(LONG, 5), max_tokens=200)
    run_until(engine, lambda: len(second.tokens) > 1)
    resident = placement_of(engine, second).resident
    assert resident is not None and resident._pinned == (0,) and list(scores._known) == [second.request_id]
    engine.cancel(second.request_id)
    run_all(engine)
    engine.step()
    engine.parts.lanes[0].drain()
    assert not scores._known


# -------------------------------------------------------------------------------------------- end and failure


def hold_loads(engine: Engine) -> tuple[threading.Event, threading.Event]:
    """The next copy to the device stops until the first event is set; the second says that it has begun."""
    copier, may_go_on, stopped = engine.cache.loads.mover.copier, threading.Event(), threading.Event()

    def copy(*args: Any) -> None:
        stopped.set()
        may_go_on.wait(30.0)
        copier.copy(*args)

    engine.cache.loads.mover.copier = types.SimpleNamespace(copy=copy)  # type: ignore[assignment]
    return may_go_on, stopped


def test_decoding_goes_on_while_parts_are_on_their_way(make_engine: Make, prompts: Prompts) -> None:
    """But not before the first part is there, which every step shows."""
    engine = scored_engine(make_engine)
    may_go_on, stopped = hold_loads(engine)
    deep = submit(engine, prompts(LONG), max_tokens=60)
    run_until(engine, stopped.is_set)
    for _ in range(20):
        engine.step()
    assert len(deep.tokens) == 1, "that one is the prompt's, which attends to all"
    may_go_on.set()
    run_until(engine, lambda: len(deep.tokens) > 1)
    may_go_on, stopped = hold_loads(engine)
    run_until(engine, lambda: len(deep.tokens) == 60, turns=400)
    assert stopped.is_set()
    may_go_on.set()
    assert_nothing_held(engine)


def test_cancelled_in_the_middle_of_a_fetch_it_leaves_nothing_behind(
    make_engine: Make, prompts: Prompts
) -> None:
    engine = scored_engine(make_engine)
    may_go_on, stopped = hold_loads(engine)
    deep = submit(engine, prompts(LONG), max_tokens=200)
    run_until(engine, stopped.is_set)
    engine.cancel(deep.request_id)
    for _ in range(5):
        engine.step()
    assert deep.finish is FinishReason.CANCELLED
    slots = engine.cache.stats().slots
    assert slots["device"].pinned > 0 and slots["device"].active == 0, (
        "the copy has its slots until it is over"
    )
    may_go_on.set()
    assert_nothing_held(engine)


# ---------------------------------------------------------------------------------------------- beside others


@pytest.mark.parametrize(("model", "seed"), [("tiny-qwen3", 0), ("tiny-qwen3", 1), ("tiny-qwen3-moe", 1)])
def test_a_random_crowd_of_exact_scored_and_fitting_requests(
    model: str, seed: int, make_engine: Make, prompts: Prompts
) -> None:
    """Exact and fitting ones give what they give alone; the others end, some of them in a next turn, and
    leave nothing held."""
    rng, num_turns = random.Random(seed), 0
    speculate = "ngram" if seed % 2 else None
    make_engine = partial(make_engine, model)
    engine = scored_engine(
        make_engine, blocks=rng.choice((80, 120)), overcommit=rng.choice((1.0, 3.0)), speculate=speculate
    )
    full, stems = full_engine(make_engine), [prompts(LONG, one) for one in (1, 2)]
    waiting = [make_request(rng, stems) for _ in range(14)]
    asked: list[tuple[str, list[int], Collected]] = []
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.3:
            kind, prompt = waiting.pop()
            mode = {"exact": "exact", "scored": "scored", "fitting": None}[kind]
            asked.append(
                (
                    kind,
                    prompt,
                    submit(engine, prompt, residency=mode, max_tokens=rng.choice((2, 20, 50)), logprobs=1),
                )
            )
        answered = [
            (prompt, one)
            for kind, prompt, one in asked
            if kind == "scored" and one.finish is FinishReason.LENGTH
        ]
        if answered and num_turns < 10 and rng.random() < 0.1:
            num_turns += 1
            prompt, one = rng.choice(answered)
            prompt = [*prompt, *one.tokens, *(rng.randrange(1, 500) for _ in range(rng.randrange(1, 90)))]
            asked.append(
                (
                    "scored",
                    prompt,
                    submit(engine, prompt, residency="scored", max_tokens=rng.choice((2, 40, 90))),
                )
            )
        if asked and rng.random() < 0.01:
            engine.cancel(rng.choice(asked)[2].request_id)
        if rng.random() < 0.02 and len(tracks := engine.parts.scheduler.running.requests) > 1:
            engine.parts.scheduler.retract(rng.choice(list(tracks.values())))
        if not engine.step():
            engine.wait_work(0.01)
        engine.check()
    assert_nothing_held(engine)
    for kind, prompt, ours in asked:
        assert ours.finish in (FinishReason.LENGTH, FinishReason.CANCELLED), ours.error
        if kind != "scored" and ours.tokens:
            assert_same(ours, generate(full, prompt, max_tokens=len(ours.tokens), logprobs=1))


def make_request(rng: random.Random, stems: list[list[int]]) -> tuple[str, list[int]]:
    kind = rng.choice(("exact", "scored", "scored", "fitting"))
    stem = rng.choice(stems)
    length = rng.randrange(20, 300) if kind == "fitting" else rng.randrange(700, LONG)
    return kind, [*stem[: rng.randrange(length)], *(rng.randrange(1, 500) for _ in range(length))][:length]

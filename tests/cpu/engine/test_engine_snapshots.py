"""Snapshots of a real engine, under the sanitizer: what protects them while they are taken, beside deep
requests, and at the end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.contract import Adapter, SamplingParams, SnapshotRequest, Submission
from penstock.engine.engine import Engine
from penstock.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    SnapshotMissing,
    SnapshotRefused,
    SnapshotSpace,
    SnapshotTaken,
)
from penstock.kv.questions import run_steps
from penstock.models.registry import BUILT_IN
from penstock.testing.stores import HandClock
from tests.support.adapters import write_random_adapter
from tests.support.driving import generate, run_all, settle_all

Make = Callable[..., Engine]
Prompts = Callable[..., list[int]]


@contextmanager
def running(engine: Engine) -> Iterator[None]:
    """The engine's turns on a thread of their own, as the loop has them."""
    stop, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not stop.is_set():
                if not engine.step():
                    engine.wait_work(0.01)
                engine.check()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60.0)
    assert not failed, failed


def request(prompt: list[int], name: str = "talk", **fields: Any) -> SnapshotRequest:
    return SnapshotRequest(name, prompt=np.asarray(prompt, np.uint32).tobytes(), **fields)


def fill(engine: Engine, prompts: Prompts, num: int = 30) -> None:
    for seed in range(100, 100 + num):
        generate(engine, prompts(100, seed), max_tokens=1)
        settle_all(engine)


def test_pins_are_given_back_at_the_end(make_engine: Make, prompts: Prompts) -> None:
    """`close` says so where they are not."""
    engine = make_engine(blocks=64, host_blocks=64)
    generate(engine, prompts(70))
    settle_all(engine)
    with running(engine):
        engine.snapshots.take(request(prompts(70)))
    assert engine.cache.stats().slots["host"].pinned == 4
    engine.close(20.0)
    with pytest.raises(EngineClosed):
        engine.snapshots.all()
    with pytest.raises(EngineClosed):
        engine.snapshots.take(request(prompts(70)))


def test_an_adapter_other_than_its_own_cannot_continue_it(make_engine: Make, prompts: Prompts) -> None:
    engine = make_engine(blocks=64, host_blocks=64)
    generate(engine, prompts(70))
    settle_all(engine)
    with running(engine):
        engine.snapshots.take(request(prompts(70)))
    assert len(engine.snapshots.open("talk").tokens) == 4 * 70
    with pytest.raises(
        SnapshotRefused, match=r"adapter is none and here lora, adapter_version is none and here abc"
    ):
        engine.snapshots.open("talk", "", Adapter("a", "abc"))
    with pytest.raises(SnapshotMissing):
        engine.snapshots.open("talk", "another")


def test_what_cannot_be_of_this_model_is_refused_by_name(make_engine: Make, prompts: Prompts) -> None:
    """Before anything is pinned."""
    engine = make_engine(blocks=64, host_blocks=64)
    limits = engine.limits
    for asked, said in (
        (SnapshotRequest("talk"), "either a session or a prompt"),
        (request(prompts(70), session="agent"), "either a session or a prompt"),
        (request([limits.vocab] * 70), f"token ids must lie between 0 and {limits.vocab - 1}"),
        (request(prompts(limits.max_model_len + 1)), f"{limits.max_model_len + 1} tokens"),
    ):
        with running(engine), pytest.raises(InvalidRequest, match=said):
            engine.snapshots.take(asked)
    assert engine.cache.stats().slots["host"].pinned == 0 and engine.snapshots.all().snapshots == []


def test_what_is_being_taken_is_pinned_from_the_first_moment(
    make_engine: Make, prompts: Prompts, tmp_path: Path
) -> None:
    """Between the look at what is there and the manifest, others may write more than the disk has room
    for."""
    engine = make_engine(blocks=32, host_blocks=16, ssd_dir=tmp_path, ssd_gib=0.0012)
    generate(engine, prompts(70))
    settle_all(engine)
    tokens = np.asarray(prompts(70), np.uint32)
    reached, saved = concurrent.futures.Future[None](), concurrent.futures.Future[None]()

    def save(keys: Sequence[bytes]) -> concurrent.futures.Future[None]:
        reached.set_result(None)
        return saved

    taking = run_steps(engine.snapshots.taking(request(prompts(70)), tokens, save))
    reached.result(60.0)
    fill(engine, prompts)
    saved.set_result(None)
    assert taking.result(60.0).kept_tokens == 64
    keys = engine.cache.prefix_of(tokens).keys  # type: ignore[union-attr]
    assert engine.cache.cold_tiers["ssd"].calls.store.find(keys) == 4


def test_blocks_are_safe_on_disk_before_the_manifest_names_them(
    make_engine: Make, prompts: Prompts, tmp_path: Path
) -> None:
    engine = make_engine(blocks=64, host_blocks=64, ssd_dir=tmp_path, ssd_gib=0.01, ssd_admission="evict")
    generate(engine, prompts(70))
    store: Any = engine.cache.cold_tiers["ssd"].calls.store
    done: list[str] = []

    def noted(name: str, call: Callable[..., Any], *args: Any) -> Any:
        done.append(name)
        return call(*args)

    for name in ("write", "persist", "write_manifest"):
        setattr(store, name, functools.partial(noted, name, getattr(store, name)))
    with running(engine):
        assert engine.snapshots.take(request(prompts(70))).kept_tokens == 64
    assert done[0] == "write" and done[-2:] == ["persist", "write_manifest"], done


def test_host_memory_that_is_promised_to_deep_requests_is_not_pinned(
    make_engine: Make, prompts: Prompts
) -> None:
    """One slot in eight is promised to nobody: so many may be pinned where sequences are paged out to host
    memory."""
    engine = make_engine(blocks=64, host_blocks=256, max_model_len=2048, resident_tokens=256)
    assert engine.stats().snapshots.pinned_blocks_max == 32
    first = generate(engine, prompts(1024), max_tokens=4)
    settle_all(engine)
    with running(engine):
        with pytest.raises(
            SnapshotSpace, match="64 more blocks: 0 of the 256 in the host tier are pinned, and 32 may be"
        ):
            engine.snapshots.take(request(prompts(1024)))
        engine.snapshots.take(request(prompts(1024), num_tokens=512))
    deep = generate(engine, prompts(1900, 1), max_tokens=4)
    assert deep.error is None and len(deep.tokens) == 4
    settle_all(engine)
    again = generate(engine, prompts(1024), max_tokens=4)
    assert again.tokens == first.tokens and again.source is not None and again.source.host >= 512


@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("seed", range(3))
def test_the_books_hold_in_any_order(
    make_engine: Make, prompts: Prompts, tmp_path: Path, seed: int, on_disk: bool
) -> None:
    """Against a model: which names there are, what they pin together, and that all of it is there whatever
    else is computed."""
    rng = random.Random(seed)
    disk = {"ssd_dir": tmp_path, "ssd_gib": 0.0015} if on_disk else {}
    engine = make_engine(blocks=40, host_blocks=56, **disk)
    clock = HandClock()
    registry = engine.snapshots
    registry._clock = clock
    trunk = prompts(64, seed)
    talks = [[*trunk[: 16 * (number % 5)], *prompts(80, 10 * seed + number)] for number in range(8)]
    alive: dict[tuple[str, str], tuple[list[int], float | None]] = {}
    most = engine.stats().snapshots.pinned_blocks_max

    def keys(tokens: list[int], salt: str) -> set[bytes]:
        return set(engine.cache.prefix_of(tokens, salt).keys)  # type: ignore[union-attr]

    for step in range(40):
        name, salt = f"s{rng.randrange(5)}", rng.choice(["", "other"])
        match rng.choice(["take", "take", "take", "delete", "later", "others"]):
            case "take":
                talk = rng.choice(talks)
                tokens = talk[: rng.randrange(16, len(talk) + 1)]
                generate(engine, talk, max_tokens=1, salt=salt)
                settle_all(engine)
                ttl_s = rng.choice([None, 50.0, 500.0])
                pinned = set[bytes]().union(*(keys(tokens, salt) for (_, salt), (tokens, _) in alive.items()))
                fits = len(pinned | keys(tokens, salt)) <= most
                asked = request(tokens, name, cache_salt=salt, ttl_s=ttl_s)
                expected = SnapshotTaken if (name, salt) in alive else None if fits else SnapshotSpace
                with contextlib.nullcontext() if expected is None else pytest.raises(expected):
                    take(engine, asked)
                    alive[name, salt] = tokens, None if ttl_s is None else clock() + ttl_s
            case "delete":
                with (
                    contextlib.nullcontext()
                    if alive.pop((name, salt), None)
                    else pytest.raises(SnapshotMissing)
                ):
                    engine.snapshots.delete(name, salt)
            case "later":
                clock.advance(rng.choice([1.0, 60.0]))
                alive = {which: one for which, one in alive.items() if one[1] is None or clock() < one[1]}
                engine.step()
            case "others":
                fill(engine, prompts, 6)
        found = {
            (one.name, salt): one for salt in ("", "other") for one in engine.snapshots.all(salt).snapshots
        }
        assert set(found) == set(alive), step
        pinned = set[bytes]().union(*(keys(tokens, salt) for (_, salt), (tokens, _) in alive.items()))
        assert engine.stats().snapshots.pinned_blocks == len(pinned) <= most
        for which, (tokens, _) in alive.items():
            assert found[which].kept_tokens == len(tokens) // 16 * 16, f"{which} at {step}"
            assert np.frombuffer(engine.snapshots.open(*which).tokens, np.uint32).tolist() == tokens
        engine.check()


def take(engine: Engine, asked: SnapshotRequest) -> None:
    """While the engine has its turns here."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        taking = threads.submit(engine.snapshots.take, asked)
        while not taking.done():
            engine.step()
            concurrent.futures.wait([taking], 0.001)
        taking.result()


def test_a_take_that_is_not_answered_in_time_leaves_neither_pins_nor_its_name(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that does not answer holds the lane. What was asked for meanwhile is done later, when nobody
    waits for it any more."""
    engine = make_engine(blocks=64, host_blocks=64)
    generate(engine, prompts(70))
    settle_all(engine)
    registry, gate = engine.snapshots, threading.Event()
    registry._begin(lambda: gate.wait(60.0))  # a tier that does not answer
    monkeypatch.setattr("penstock.engine.cache_calls.TAKE_S", 0.01)
    with pytest.raises(DeadlineExceeded):
        take(engine, request(prompts(70)))
    monkeypatch.undo()
    gate.set()
    assert engine.snapshots.all().snapshots == [] and engine.stats().snapshots.pinned_blocks == 0
    take(engine, request(prompts(70)))
    with pytest.raises(SnapshotTaken):
        take(engine, request(prompts(70)))
    assert engine.snapshots.begin_find("talk").result(60.0).pinned, (
        "whoever is refused a name takes nothing from whoever has it"
    )


@pytest.mark.parametrize("whose", ["salt", "adapter", "both"])
def test_blocks_that_only_the_device_has_are_saved_under_whose_they_are(
    make_engine: Make, prompts: Prompts, tmp_path: Path, whose: str
) -> None:
    """A session's, with all that its keys depend on."""
    engine = make_engine(blocks=64, host_blocks=16)
    directory = write_random_adapter(tmp_path / "a", BUILT_IN["tiny-qwen3"], 1)
    adapter = None if whose == "salt" else engine.adapters.load("a", directory).adapter
    salt = "" if whose == "adapter" else "mine"
    fill(engine, prompts, 12)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.submit(
        Submission(prompts(70), params, session="agent", cache_salt=salt, adapter=adapter), lambda event: None
    )
    run_all(engine)
    settle_all(engine)
    keys = engine.cache.prefix_of(prompts(70), salt, adapter).keys  # type: ignore[union-attr]
    assert engine.cache.loads._host.num_leading(keys) == 0
    with running(engine):
        taken = engine.snapshots.take(
            SnapshotRequest("talk", session="agent", cache_salt=salt, num_tokens=70)
        )
    assert (taken.kept_tokens, taken.adapter) == (64, "" if adapter is None else "a")
    assert engine.cache.loads._host.num_leading(keys) == 4

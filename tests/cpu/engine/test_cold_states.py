"""States of recurrent layers on disks and in stores: a prefix of a hybrid model comes back after a restart
and on another engine, as far as both its blocks and a state are there, with the tokens of a state that runs
through the whole sequence.

The reference computes one sequence, token by token."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.contract import CacheHint, KvSource
from penstock.engine.engine import Engine
from penstock.errors import SnapshotRefused, SnapshotSpace, StoreFailed
from penstock.kv import build as kv_build
from penstock.kv.states import KeptStates, StateStore
from penstock.kv.tiers.ssd import survey
from penstock.kv.tiers.store import BlockStore, Space
from penstock.testing.sanitized import build_sanitized, check_silent
from penstock.testing.stores import MemoryStore
from tests.cpu.engine.test_engine_snapshots import request, running
from tests.cpu.engine.test_kept_states import all_at_rest, assert_right, expected, states_of
from tests.support import contiguous_kv
from tests.support.crowds import crowds
from tests.support.driving import Collected, generate, run_all, settle_all, submit, tiny_config, wait_scanned

Prompts = Callable[..., list[int]]
Start = Callable[..., Engine]
MODEL, BLOCK = "tiny-qwen3.5", 16
ROOM: dict[str, Any] = {"blocks": 128, "host_blocks": 256, "max_batch": 4, "states_gib": 0.001}
STATES = "ssd states"
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "top_p": 0.95}


@pytest.fixture
def start() -> Iterator[Start]:
    """Sanitized engines, one after the other or at once; all are closed and silent in the end."""
    made = []

    def start(**settings: Any) -> Engine:
        made.append(build_sanitized(tiny_config(MODEL, **{**ROOM, **settings})))
        return made[-1][0]

    yield start
    for engine, sanitizer in made:
        engine.close(timeout_s=60.0)
        check_silent(sanitizer)


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 0.05}


def scanned(engine: Engine) -> Engine:
    wait_scanned(engine)
    store = states_of(engine).cold.tiers[STATES].calls.store
    assert isinstance(store, StateStore) and store.wrapped.wait_scanned(60.0)  # type: ignore[attr-defined]
    return engine


def ended(engine: Engine, *, persists: bool = True) -> None:
    settle_all(engine)
    if persists:
        wait_persisted(engine)
    engine.close(timeout_s=60.0)


def wait_persisted(engine: Engine) -> None:
    done = engine.kv.begin_flush("persisted")
    while not done.done():
        if not engine.step():
            engine.wait_work(0.01)
    done.result()


def forget_memory(engine: Engine) -> None:
    """Only cold tiers have blocks and states."""
    settle_all(engine)
    engine.cache.reset(("device", "host"))
    assert states_of(engine).pool.num_keys == 0


# ------------------------------------------------------------------------------------------------------ disks


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_a_conversation_comes_back_from_disk_in_another_engine(
    start: Start, disk: dict[str, Any], prompts: Prompts, how: str
) -> None:
    sampling = SAMPLED if how == "sampled" else {}
    first, prompt = start(**disk), prompts(100)
    cold = generate(first, prompt, max_tokens=20, **sampling)
    ended(first)
    engine = scanned(start(**disk))
    found = generate(engine, prompt, max_tokens=20, **sampling)
    assert found.source == KvSource(ssd=96, computed=4)
    assert found.tokens == cold.tokens
    longer = [*prompt, *cold.tokens, *prompts(30, seed=1)]
    again = generate(engine, longer, max_tokens=12)
    assert again.source == KvSource(device=96, computed=54)
    assert_right(engine, longer, again, 12)
    all_at_rest(engine)


@pytest.mark.parametrize("lost", ["device", "memory", "states"])
def test_what_memory_has_lost_is_read_from_disk(
    start: Start, disk: dict[str, Any], prompts: Prompts, lost: str
) -> None:
    """The blocks may be on the device while the state is on disk alone."""
    engine, prompt = start(**disk), prompts(150)
    generate(engine, prompt)
    settle_all(engine)
    if lost == "states":
        states_of(engine).pool.evict(states_of(engine).pool.num_slots)
    else:
        engine.cache.reset(("device",) if lost == "device" else ("device", "host"))
    found = generate(engine, prompt, max_tokens=20)
    tier = {"device": "host", "memory": "ssd", "states": "device"}[lost]
    assert found.source == KvSource(computed=6, **{tier: 144})
    assert_right(engine, prompt, found, 20)
    assert states_of(engine).cold.tiers[STATES].counts.num_read == (lost != "device")
    all_at_rest(engine)


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_a_state_that_is_damaged_or_gone_is_a_miss_and_an_earlier_one_serves(
    start: Start, disk: dict[str, Any], prompts: Prompts, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds invariant 23: a state counts as any other block."""
    engine, prompt = start(**disk, state_every=64), prompts(150)
    generate(engine, prompt)
    forget_memory(engine)
    tier = states_of(engine).cold.tiers[STATES]
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None and tier.usage().num_used == 3, "after 64, 128 and 144 tokens"
    spoil(Path(disk["ssd_dir"]) / "states", prefix.keys[8], what, tier)
    found = generate(engine, prompt, max_tokens=20)
    assert found.source is not None and found.source.computed in (150 - 128, 150)
    assert_right(engine, prompt, found, 20)
    assert (tier.counts.num_corrupt, tier.counts.num_missing) == ((1, 0) if what == "damaged" else (0, 1))
    again = generate(engine, prompt, max_tokens=20)
    assert again.source == KvSource(device=144, computed=6)
    assert_right(engine, prompt, again, 20)
    all_at_rest(engine)


def spoil(folder: Path, key: bytes, what: str, tier: Any) -> None:
    """The state of this boundary: a bit of it is flipped, or the file of the disk forgets it after it was
    found."""
    if what == "gone":
        read = tier.calls.store.read

        def lose(keys: Sequence[bytes], into: Sequence[memoryview]) -> Any:
            store = tier.calls.store.wrapped
            store._now.index.forget(key, store._now.index.find_each([key])[0])
            return read(keys, into)

        tier.calls.store.read = lose
        return
    for path in folder.glob("penstock-*.kv"):
        data = bytearray(path.read_bytes())
        at = data.find(key)
        while at >= 0:
            data[at // 4096 * 4096 + 4096 + 99] ^= 1
            at = data.find(key, at + 1)
        path.write_bytes(data)


def test_the_states_of_another_layout_are_a_miss(
    start: Start, disk: dict[str, Any], prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, prompt = start(**disk), prompts(100)
    generate(first, prompt)
    ended(first)
    made = kv_build.StateLayout
    monkeypatch.setattr(
        "penstock.engine.sizing.StateLayout",
        lambda layers, size, words: made(layers, size, words.replace(b"float32", b"bfloat16")),
    )
    engine = start(**disk)
    wait_scanned(engine)
    assert generate(engine, prompt).source == KvSource(computed=100)


def test_disks_of_blocks_and_states_together_take_what_was_given(
    start: Start, tmp_path: Path, prompts: Prompts
) -> None:
    engine = start(ssd_dir=str(tmp_path / "ssd"), ssd_gib=0.002, host_blocks=400)
    for seed in range(12):
        generate(engine, prompts(200, seed=seed), max_tokens=1)
    settle_all(engine)
    used = sum(path.stat().st_size for path in (tmp_path / "ssd").rglob("*.kv"))
    assert 0 < used <= 0.002 * 2**30
    usage = engine.stats().kv_blocks[STATES]
    assert usage["used"] > 0 and usage["used"] + usage["free"] <= 0.0005 * 2**30 / 16896


def test_states_on_disk_are_inspected_verified_and_cleared_with_the_blocks(
    start: Start, disk: dict[str, Any], prompts: Prompts
) -> None:
    engine, folder = start(**disk), Path(disk["ssd_dir"])
    generate(engine, prompts(100))
    ended(engine)
    found = survey.verify(folder, lambda done, total: None)
    assert found.num_good == found.num_blocks == 7 and len(found.spaces) == 2, "six blocks and a state"
    (path,) = (folder / "states").glob("penstock-*.kv")
    data = bytearray(path.read_bytes())
    data[2 * 4096 + 99] ^= 1
    path.write_bytes(data)
    found = survey.verify(folder, lambda done, total: None)
    assert len(found.torn) == 1 and found.torn[0].startswith("states/penstock-000000.kv slot 0")
    num_files = len([*folder.rglob("*.kv")])
    assert survey.clear(folder, lambda done, total: None).num_segments == num_files
    assert survey.inspect(folder).num_blocks == 0 and not [*folder.rglob("*.kv")]


def test_a_reset_of_the_disk_clears_its_states(start: Start, disk: dict[str, Any], prompts: Prompts) -> None:
    engine, prompt = start(**disk), prompts(100)
    generate(engine, prompt)
    settle_all(engine)
    engine.cache.reset(("device", "host", "ssd"))
    settle_all(engine)
    assert states_of(engine).cold.tiers[STATES].usage().num_used == 0
    assert generate(engine, prompt).source == KvSource(computed=100)
    all_at_rest(engine)


# ----------------------------------------------------------------------------------------------------- stores


class Shared:
    """Blocks of a store that several engines use, by space."""

    def __init__(self) -> None:
        self.stores: list[MemoryStore] = []
        self._blocks: dict[bytes, dict[bytes, bytearray]] = {}

    def open(self, url: str, space: Space, timeout_s: float) -> BlockStore:
        blocks = self._blocks.setdefault(space.digest, {})
        self.stores.append(MemoryStore(space=space.digest, blocks=blocks))
        return self.stores[-1]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    shared = Shared()
    monkeypatch.setattr(kv_build, "open_remote", shared.open)
    return shared


REMOTE = {"remote": "memory://"}


def test_another_engine_continues_over_a_store(start: Start, shared: Shared, prompts: Prompts) -> None:
    first, second, prompt = start(**REMOTE), start(**REMOTE), prompts(120)
    for turn in range(4):
        one, other = (first, second) if turn % 2 == 0 else (second, first)
        found = generate(one, prompt, max_tokens=20)
        assert_right(one, prompt, found, 20)
        settle_all(one)
        there = generate(other, prompt, max_tokens=20)
        assert there.source is not None and there.source.computed <= len(prompt) - 96 - 48 * turn
        assert there.tokens == found.tokens
        settle_all(other)
        prompt = [*prompt, *found.tokens, *prompts(28, seed=turn + 1)]
    all_at_rest(first)


def test_a_store_that_has_lost_the_last_blocks_serves_an_earlier_state(
    start: Start, shared: Shared, prompts: Prompts
) -> None:
    """Holds invariant 15a: a state without its blocks is of no use."""
    first, prompt = start(**REMOTE, state_every=64), prompts(150)
    generate(first, prompt)
    settle_all(first)
    prefix = first.cache.prefix_of(prompt)
    assert prefix is not None
    shared.stores[0].lose(*prefix.keys[5:])
    second = start(**REMOTE)
    found = generate(second, prompt, max_tokens=20)
    assert found.source is not None and found.source.computed == 150 - 64
    assert_right(second, prompt, found, 20)
    all_at_rest(second)


@pytest.mark.parametrize("dies", ["find", "read"])
def test_a_store_that_fails_leaves_the_request_to_compute(
    start: Start, shared: Shared, prompts: Prompts, dies: str
) -> None:
    first, prompt = start(**REMOTE), prompts(100)
    generate(first, prompt)
    settle_all(first)
    second = start(**REMOTE)
    states = shared.stores[3]

    def fail(call: str) -> None:
        if call == dies:
            raise StoreFailed("the store was told to fail")

    states.on_call = fail
    found = generate(second, prompt, max_tokens=20)
    assert found.source == KvSource(computed=100)
    assert_right(second, prompt, found, 20)
    all_at_rest(second)


def test_a_request_whose_state_is_late_computes_and_the_state_serves_the_next(
    start: Start, shared: Shared, prompts: Prompts
) -> None:
    first, prompt = start(**REMOTE), prompts(100)
    generate(first, prompt)
    settle_all(first)
    second = start(**REMOTE, load_deadline_s=0.05)
    shared.stores[3].gate.hold("read")
    found = generate(second, prompt, max_tokens=20)
    assert found.source is not None and found.source.computed == 100
    assert_right(second, prompt, found, 20)
    shared.stores[3].gate.let()
    settle_all(second)
    assert_right(second, prompt, generate(second, prompt, max_tokens=20), 20)
    all_at_rest(second)


def test_requests_that_want_one_state_share_its_read(start: Start, shared: Shared, prompts: Prompts) -> None:
    first, prompt = start(**REMOTE), prompts(100)
    generate(first, prompt)
    settle_all(first)
    second = start(**REMOTE)
    found = [submit(second, prompt, max_tokens=6) for _ in range(3)]
    run_all(second)
    for one in found:
        assert_right(second, prompt, one, 6)
    assert shared.stores[3].calls.count("read") == 1
    all_at_rest(second)


def test_a_request_that_is_cancelled_while_its_state_is_read_leaves_nothing_behind(
    start: Start, shared: Shared, prompts: Prompts
) -> None:
    first, prompt = start(**REMOTE), prompts(100)
    generate(first, prompt)
    settle_all(first)
    second = start(**REMOTE)
    shared.stores[3].gate.hold("read")
    gone = submit(second, prompt)
    while "read" not in shared.stores[3].calls:
        if not second.step():
            second.wait_work(0.01)
    second.cancel(gone.request_id)
    shared.stores[3].gate.let()
    run_all(second)
    assert_right(second, prompt, generate(second, prompt, max_tokens=20), 20)
    all_at_rest(second)


# ------------------------------------------------------------------------------------- snapshots and sessions


def take(engine: Engine, prompt: Sequence[int]) -> None:
    settle_all(engine)
    with running(engine):
        engine.snapshots.take(request(list(prompt)))


def fill(engine: Engine, prompts: Prompts, num: int = 40) -> None:
    """More states than there is room for."""
    for seed in range(100, 100 + num):
        generate(engine, prompts(40, seed=seed), max_tokens=1)
        settle_all(engine)


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_a_snapshot_pins_the_state_at_its_boundary(
    start: Start, disk: dict[str, Any], prompts: Prompts, tier: str
) -> None:
    room = {"states_gib": 8.5 * 16896 / 2**30} if tier == "host" else {**disk, "ssd_gib": 0.0015}
    engine, prompt = start(**room, host_blocks=400), prompts(100)
    generate(engine, prompt)
    take(engine, prompt)
    (shown,) = engine.snapshots.all().snapshots
    assert (shown.num_tokens, shown.kept_tokens, shown.pinned) == (100, 96, True)
    fill(engine, prompts)
    if tier == "ssd":
        ended(engine)
        engine = scanned(start(**room, host_blocks=400))
        engine.snapshots.wait_listed(60.0)
        fill(engine, prompts)
        engine.cache.reset(("device", "host"))
    tokens = np.frombuffer(engine.snapshots.open("talk").tokens, np.uint32).tolist()
    assert tokens == prompt
    found = generate(engine, [*tokens, *prompts(20, seed=1)], max_tokens=12)
    assert found.source is not None and found.source.computed == 120 - 96
    assert_right(engine, [*tokens, *prompts(20, seed=1)], found, 12)
    with running(engine):
        engine.snapshots.delete("talk")
    assert states_of(engine).pool.counts.pinned == 0
    all_at_rest(engine)


def test_a_snapshot_of_what_has_no_state_is_refused(start: Start, prompts: Prompts) -> None:
    engine, prompt = start(), prompts(100)
    generate(engine, prompt)
    settle_all(engine)
    states_of(engine).pool.evict(100)
    with pytest.raises(SnapshotRefused, match="none of its 6 blocks is in a tier"):
        take(engine, prompt)
    all_at_rest(engine)


def test_snapshots_pin_no_more_states_than_their_share(start: Start, prompts: Prompts) -> None:
    engine = start(states_gib=3.5 * 16896 / 2**30)
    for seed in range(2):
        generate(engine, prompts(40, seed=seed))
    settle_all(engine)
    with running(engine):
        engine.snapshots.take(request(prompts(40, seed=0), "one"))
        with pytest.raises(SnapshotSpace, match="of the 3 in the host tier are pinned, and 1 may be"):
            engine.snapshots.take(request(prompts(40, seed=1), "two"))
    assert states_of(engine).pool.counts.pinned == 1


def test_the_state_of_a_retained_session_stays_and_one_of_a_released_session_goes(
    start: Start, prompts: Prompts
) -> None:
    engine, kept, gone = start(states_gib=8.5 * 16896 / 2**30), prompts(100), prompts(70, seed=1)
    generate(engine, kept, session="kept", hint=CacheHint(retain_s=600.0))
    engine.step()
    fill(engine, prompts)
    found = generate(engine, kept)
    assert found.source is not None and found.source.computed == 4
    generate(engine, gone, session="gone", hint=CacheHint(release=True))
    settle_all(engine)
    engine.step()
    prefix = engine.cache.prefix_of(gone)
    assert prefix is not None and states_of(engine).last_here(prefix.keys) == 0
    all_at_rest(engine)


@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_a_prefetch_brings_the_state_with_the_blocks(
    start: Start, shared: Shared, disk: dict[str, Any], prompts: Prompts, tier: str
) -> None:
    engine, prompt = start(**(disk if tier == "ssd" else REMOTE)), prompts(150)
    generate(engine, prompt)
    forget_memory(engine)
    done = engine.kv.prefetch(prompt)
    while not done.done():
        engine.step()
    settle_all(engine)
    found = generate(engine, prompt, max_tokens=20)
    assert found.source == KvSource(host=144, computed=6)
    assert states_of(engine).cold.tiers[f"{tier} states"].counts.num_read == 1
    assert_right(engine, prompt, found, 20)
    all_at_rest(engine)


# ---------------------------------------------------------------------------------------------- random crowds


@pytest.mark.parametrize("seed", crowds(2))
def test_a_random_crowd_over_all_tiers_gets_the_tokens_of_each_request_alone(
    start: Start, shared: Shared, disk: dict[str, Any], prompts: Prompts, seed: int
) -> None:
    """Stores fail, lose and damage what they have at any time."""
    r = random.Random(seed)
    engine = start(
        **(disk if seed % 2 == 0 else {}),
        **REMOTE,
        blocks=r.choice([24, 48]),
        host_blocks=r.choice([30, 120]),
        states_gib=r.choice([3, 12, 60]) * 16896 / 2**30,
        state_every=r.choice([0, 16, 48]),
        overcommit=r.choice([1.0, 3.0]),
        prefill_chunk=r.choice([16, 40, 100]),
        max_model_len=300,
        load_deadline_s=r.choice([0.01, 30.0]),
    )
    known = [prompts(r.randint(10, 120), seed=i) for i in range(3)]
    asked: list[tuple[list[int], Collected]] = []
    for _ in range(20):
        stem = r.choice(known)
        prompt = [*stem[: r.randint(1, len(stem))], *prompts(r.randint(0, 30), seed=r.randint(0, 9))][:220]
        asked.append((prompt, submit(engine, prompt, max_tokens=r.randint(1, 60))))
        known.append([*prompt, *asked[-1][1].tokens])
        for _ in range(r.randint(0, 30)):
            engine.step()
        trouble(engine, r.choice(shared.stores), r)
        if r.random() < 0.2:
            engine.cancel(r.choice(asked)[1].request_id)
    run_all(engine)
    for prompt, one in asked:
        assert one.error is None
        contiguous_kv.assert_greedy(engine.parts.executor.target.model, prompt, one.tokens)
    for store in shared.stores:
        store.raises = None
    all_at_rest(engine)


def trouble(engine: Engine, store: MemoryStore, r: random.Random) -> None:
    keys = list(store.blocks)
    match r.randrange(6):
        case 0:
            engine.cache.reset((r.choice(["device", "host", "remote"]),))
        case 1:
            store.raises = None if store.raises else StoreFailed("the store was told to fail")
        case 2 if keys:
            store.spoil(r.choice(keys), at=r.choice([140, 200]))
        case 3 if keys:
            store.lose(*r.sample(keys, len(keys) // 3))


# ------------------------------------------------------------------------------------------------- the faults


def test_a_state_that_is_found_before_it_has_been_read_is_noticed(
    start: Start, shared: Shared, prompts: Prompts, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request would begin with whatever is in the slot."""
    monkeypatch.setattr(KeptStates, "pin", lambda own, owner, key: own.pool.pin([0], owner))
    monkeypatch.setattr("penstock.kv.states.ColdSearch.reads_first", lambda own, key, num: False)
    make = functools.partial(make_engine, MODEL, **ROOM, **REMOTE)
    first, prompt = make(), prompts(100)
    generate(first, prompt)
    settle_all(first)
    second = make()
    reservation = states_of(second).pool.try_reserve(1, "another state")
    assert reservation is not None
    found = generate(second, prompt, max_tokens=12)
    reservation.end()
    assert found.tokens != expected(second, prompt, 12)


def test_what_is_not_for_a_model_without_states_stays_as_it_was(tmp_path: Path) -> None:
    config = tiny_config("tiny-qwen3", host_blocks=64, ssd_dir=str(tmp_path / "ssd"), ssd_gib=0.01)
    engine, _ = build_sanitized(dataclasses.replace(config))
    assert engine.cache.states is None and not (tmp_path / "ssd" / "states").exists()
    assert set(engine.stats().kv_blocks) == {"device", "host", "ssd"}
    engine.close(timeout_s=60.0)

"""The engine with tiers behind host memory: an SSD for real, and a shared store whose troubles are the
test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import FinishReason, KvSource
from penstock.engine.engine import Engine
from penstock.errors import DeadlineExceeded
from penstock.kv import build as build_module
from penstock.kv.tiers.reads import Fetch
from penstock.testing.stores import HandClock, MemoryStore
from tests.cpu.engine.test_tiers import forget, states, turn, until
from tests.support.driving import Collected, generate, run_all, settle_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """The store that every engine with `remote="memory://"` uses."""
    store = MemoryStore("remote", local=False)

    def reach(url: str, space: Any, timeout_s: float) -> MemoryStore:
        return store

    monkeypatch.setattr(build_module, "open_remote", reach)
    return store


def store_of(engine: Engine, tier: str) -> Any:
    return engine.cache.cold_tiers[tier].calls.store


@contextmanager
def held(store: MemoryStore, call: str) -> Iterator[None]:
    store.gate.hold(call)
    try:
        yield
    finally:
        store.gate.let()


def only_colder(engine: Engine) -> None:
    """What was computed is in the coldest tiers and nowhere else."""
    flush(engine)
    forget(engine, "device")
    forget(engine, "host")


def flush(engine: Engine) -> None:
    """As `wait_flushed("persisted")`, on the engine's own thread."""
    settle_all(engine)
    persisting = engine.cache.persist()
    assert persisting is not None
    until(engine, lambda: persisting.settled)
    assert persisting.error is None
    settle_all(engine)


@pytest.mark.parametrize("length", [16, 400])
def test_a_prefix_comes_back_from_the_ssd_with_the_same_tokens(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path, length: int
) -> None:
    engine = make_engine(host_blocks=64, ssd_dir=str(tmp_path), ssd_gib=0.05)
    cold = generate(engine, prompts(length))
    only_colder(engine)
    warm = generate(engine, prompts(length))
    assert warm.tokens == cold.tokens
    from_ssd = min(length // 16 * 16, length - 1)
    assert warm.source == KvSource(ssd=from_ssd, computed=length - from_ssd)
    again = generate(engine, prompts(length))
    assert again.source == KvSource(device=from_ssd, computed=length - from_ssd), "it was promoted through"
    forget(engine, "device")
    assert generate(engine, prompts(length)).source == KvSource(host=from_ssd, computed=length - from_ssd)
    settle_all(engine)
    engine.check()


def test_what_was_persisted_survives_the_engine(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path
) -> None:
    first = make_engine(host_blocks=64, ssd_dir=str(tmp_path), ssd_gib=0.05)
    cold = generate(first, prompts(200))
    flush(first)
    first.close(20.0)
    second = make_engine(host_blocks=64, ssd_dir=str(tmp_path), ssd_gib=0.05)
    store_of(second, "ssd").wait_scanned(20.0)
    warm = generate(second, prompts(200))
    assert warm.source == KvSource(ssd=192, computed=8) and warm.tokens == cold.tokens


def test_device_host_ssd_and_store_stack_at_the_right_offsets(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path, shared: MemoryStore
) -> None:
    engine = make_engine(host_blocks=64, ssd_dir=str(tmp_path), ssd_gib=0.05, remote="memory://")
    whole = prompts(16 * 8 + 3)
    cold = generate(engine, whole)
    only_colder(engine)
    store_of(engine, "ssd").reset()  # the shared store has it all
    generate(engine, whole[: 16 * 6 + 1])  # ...and six blocks come back through host memory to the ssd
    only_colder(engine)
    generate(engine, whole[: 16 * 4 + 1])
    forget(engine, "device")
    generate(engine, whole[: 16 * 2 + 1])  # of which two on the device
    split = generate(engine, whole)
    assert split.source == KvSource(device=32, host=32, ssd=32, remote=32, computed=3)
    assert split.tokens == cold.tokens


def test_what_one_engine_computes_another_serves(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    one, other = (make_engine(host_blocks=64, remote="memory://") for _ in range(2))
    cold = generate(one, prompts(100))
    settle_all(one)
    warm = generate(other, prompts(100))
    assert warm.source == KvSource(remote=96, computed=4) and warm.tokens == cold.tokens
    assert generate(other, prompts(100), salt="another tenant").source == KvSource(computed=100)


def dies(store: MemoryStore) -> None:
    store.die()


def loses(store: MemoryStore) -> None:
    """Between the question and the reading."""
    store.on_call = lambda call: store.lose() if call == "read" else None


def damages(store: MemoryStore) -> None:
    for key in store.blocks:
        store.spoil(key, at=200)


# Holds invariant 22: a store that is dead, empty or damaged costs a computation and is counted.
@pytest.mark.parametrize("trouble", [dies, loses, damages])
def test_a_store_in_trouble_means_computing(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore, trouble: Callable[[MemoryStore], None]
) -> None:
    engine = make_engine(host_blocks=64, remote="memory://")
    cold = generate(engine, prompts(100))
    only_colder(engine)
    trouble(shared)
    warm = generate(engine, prompts(100))
    assert warm.tokens == cold.tokens and warm.finish is FinishReason.LENGTH
    assert warm.source == KvSource(computed=100)
    settle_all(engine)
    traffic = engine.stats().traffic
    assert traffic is not None
    assert (traffic.failures.get(("remote", "missing"), 0) > 0) is (trouble is loses)
    assert traffic.usable["remote"] is (trouble is not dies)
    assert (traffic.checksum_failures.get("remote", 0) > 0) is (trouble is damages)


def test_a_load_that_ends_short_keeps_what_came(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    engine = make_engine(host_blocks=64, remote="memory://")
    prompt = prompts(16 * 40 + 5)
    cold = generate(engine, prompt)
    only_colder(engine)
    keys = engine.cache.prefix_of(prompt).keys  # type: ignore[union-attr]
    # between the question and the reading
    shared.on_call = lambda call: shared.lose(keys[30]) if call == "read" else None
    warm = generate(engine, prompt)
    assert warm.tokens == cold.tokens
    assert warm.source is not None and 0 < warm.source.remote < 16 * 40
    assert warm.source.remote + warm.source.computed == len(prompt)
    settle_all(engine)
    engine.check()


# Holds invariant 6: the engine thread waits for no store.
def test_others_run_while_blocks_are_read(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    engine = make_engine(host_blocks=64, remote="memory://")
    cold = generate(engine, prompts(100))
    only_colder(engine)
    with held(shared, "read"):
        slow = submit(engine, prompts(100))
        until(engine, lambda: states(engine).get("loading") == 1)
        assert len(generate_beside(engine, prompts(20, seed=3), slow)) == 8
        assert not slow.tokens and states(engine) == {"loading": 1}
    run_all(engine)
    assert slow.tokens == cold.tokens and slow.source == KvSource(remote=96, computed=4)


def generate_beside(engine: Engine, prompt: list[int], slow: Any) -> list[int]:
    other = submit(engine, prompt)
    until(engine, lambda: other.finish is not None)
    return other.tokens


# Holds invariant 7: a read keeps its slots after a cancel.
def test_a_cancel_during_a_read_returns_at_once_and_the_slots_stay_with_it(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    engine = make_engine(host_blocks=64, remote="memory://")
    generate(engine, prompts(100))
    only_colder(engine)
    with held(shared, "read"):
        slow = submit(engine, prompts(100))
        until(engine, lambda: states(engine).get("loading") == 1)
        engine.cancel(slow.request_id)
        turn(engine)
        assert slow.finish is FinishReason.CANCELLED and states(engine) == {}
        kv = engine.stats().kv_blocks
        assert kv["device"]["active"] == kv["device"]["pinned"] == 0, "nothing moves to the device any more"
        assert kv["host"]["reserved"] == 6, "a read under way keeps what it writes"
    settle_all(engine)
    assert engine.stats().kv_blocks["host"]["reserved"] == 0
    assert generate(engine, prompts(100)).source == KvSource(host=96, computed=4), (
        "and what it has read can be found"
    )


@pytest.mark.parametrize(("timeout_s", "patient_s"), [(1.0, 9.0), (30.0, 40.0)])
def test_a_call_that_has_time_left_makes_no_store_unusable(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore, timeout_s: float, patient_s: float
) -> None:
    """A store far away was given more time. One that does not end its calls in time is left alone all the
    same."""
    engine = make_engine(host_blocks=64, remote="memory://", remote_timeout_s=timeout_s)
    tier, clock = engine.cache.cold_tiers["remote"], HandClock()
    tier.calls.breaker.clock = clock
    with held(shared, "write"):
        generate(engine, prompts(40))
        until(engine, lambda: bool(tier.calls._running))
        clock.advance(patient_s)
        assert tier.usable
        clock.advance(patient_s)
        assert not tier.usable
    settle_all(engine)
    assert tier.usable


@pytest.mark.parametrize(
    ("admission", "after_one", "after_two"), [("always", 6, 6), ("reuse", 0, 6), ("evict", 0, 0)]
)
def test_admission_decides_what_is_written_to_the_disk(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path, admission: str, after_one: int, after_two: int
) -> None:
    engine = make_engine(host_blocks=64, ssd_dir=str(tmp_path), ssd_gib=0.05, ssd_admission=admission)
    generate(engine, prompts(100), max_tokens=1)
    settle_all(engine)
    assert engine.stats().kv_blocks["ssd"]["used"] == after_one
    forget(engine, "device")
    generate(engine, prompts(100), max_tokens=1)
    settle_all(engine)
    assert engine.stats().kv_blocks["ssd"]["used"] == after_two


def test_blocks_that_are_about_to_leave_host_memory_are_written_first(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path
) -> None:
    engine = make_engine(host_blocks=32, ssd_dir=str(tmp_path), ssd_gib=0.05, ssd_admission="evict")
    first = generate(engine, prompts(100))
    for seed in range(1, 12):
        generate(engine, prompts(100, seed=seed))
        settle_all(engine)
    forget(engine, "device")
    again = generate(engine, prompts(100))
    assert again.tokens == first.tokens
    assert again.source is not None and again.source.ssd == 96, "six blocks in thirty-two slots are long gone"


def prefetch(engine: Engine, prompt: list[int]) -> Fetch:
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    fetch = engine.cache.prefetch(prefix, "somebody who thinks")
    assert fetch is not None
    return fetch


def far_away(make_engine: MakeEngine, prompts: Prompts, **settings: float) -> tuple[Engine, Collected]:
    engine = make_engine(host_blocks=128, remote="memory://", **settings)
    cold = generate(engine, prompts(100))
    only_colder(engine)
    return engine, cold


def test_a_read_that_hangs_keeps_nobody_waiting(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    engine, cold = far_away(make_engine, prompts, load_deadline_s=0.05)
    with held(shared, "read"):
        fetch = prefetch(engine, prompts(100))
        until(engine, lambda: fetch.num_blocks == 6)
        other = generate(engine, prompts(100, seed=1))
        assert other.finish is FinishReason.LENGTH
        same = generate(engine, prompts(100))
        assert same.tokens == cold.tokens and same.source == KvSource(computed=100), (
            "nor who wants the same, for longer than its deadline"
        )
        assert not fetch.settled and engine.stats().kv_blocks["host"]["reserved"] == 6, (
            "the read keeps what it writes"
        )
    settle_all(engine)
    assert fetch.settled
    engine.check()


def test_an_engine_that_closes_over_a_read_that_hangs_says_so_and_closes_later(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    engine, _ = far_away(make_engine, prompts)
    with held(shared, "read"):
        fetch = prefetch(engine, prompts(100))
        until(engine, lambda: fetch.num_blocks == 6)
        shared.gate.wait_came()
        with pytest.raises(DeadlineExceeded):
            engine.close(0.0)
        assert not fetch.settled
    engine.close(20.0)
    assert fetch.settled

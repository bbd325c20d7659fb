"""Cold blocks read into host memory ahead of the request that wants them: from a real disk, a real store and
one that hangs, under the sanitizer. The tokens are those of a request alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.contract import FinishReason, KvSource
from penstock.engine.engine import Engine
from penstock.errors import DeadlineExceeded
from penstock.kv.tiers.reads import Fetch
from penstock.testing.stores import MemoryStore
from tests.cpu.engine.test_cold_tiers import held, only_colder, store_of
from tests.cpu.engine.test_tiers import states, turn, until
from tests.support.driving import Collected, generate, run_all, settle_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def prefetch(engine: Engine, prompt: list[int]) -> Fetch:
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    fetch = engine.cache.prefetch(prefix, "somebody who thinks")
    assert fetch is not None
    return fetch


def waiting_behind(engine: Engine, prompts: Prompts, prompt: list[int]) -> tuple[Collected, Collected]:
    """A request that runs in the only row, and one that waits for it."""
    ahead = submit(engine, prompts(20, seed=9), max_tokens=60)
    until(engine, lambda: len(ahead.tokens) > 2)
    behind = submit(engine, prompt)
    turn(engine)
    assert states(engine) == {"running": 1, "waiting": 1}
    return ahead, behind


def test_a_request_in_line_starts_from_host_memory_though_it_was_on_disk(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path
) -> None:
    engine = make_engine(host_blocks=128, max_batch=1, ssd_dir=str(tmp_path), ssd_gib=0.05)
    cold = generate(engine, prompts(400))
    only_colder(engine)
    ahead, behind = waiting_behind(engine, prompts, prompts(400))
    until(engine, lambda: engine.stats().traffic.bytes["ssd", "host"] > 0 and engine.cache.num_in_flight == 0)  # type: ignore[union-attr]
    assert ahead.finish is None and not behind.tokens, "while the first one computes"
    run_all(engine)
    assert behind.tokens == cold.tokens and behind.source == KvSource(ssd=399, computed=1)
    settle_all(engine)
    engine.check()


def test_blocks_of_a_real_disk_come_ahead_of_anybody(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path
) -> None:
    engine = make_engine(host_blocks=128, ssd_dir=str(tmp_path), ssd_gib=0.05)
    cold = generate(engine, prompts(200))
    only_colder(engine)
    before = engine.cache.cold_tiers["ssd"].counts.num_read
    fetch = prefetch(engine, prompts(200))
    settle_all(engine)
    assert fetch.settled and fetch.num_blocks == fetch.num_came == 12
    assert engine.cache.cold_tiers["ssd"].counts.num_read - before == 12
    warm = generate(engine, prompts(200))
    assert warm.source == KvSource(host=192, computed=8) and warm.tokens == cold.tokens


def test_damage_on_a_real_disk_ends_it_and_the_rest_is_computed(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path
) -> None:
    engine = make_engine(host_blocks=128, ssd_dir=str(tmp_path), ssd_gib=0.05)
    cold = generate(engine, prompts(200))
    only_colder(engine)
    for path in tmp_path.glob("penstock-*.kv"):
        content = bytearray(path.read_bytes())
        for at in range(4096 + 200, len(content), 4096):
            content[at] ^= 0xFF
        path.write_bytes(bytes(content))
    fetch = prefetch(engine, prompts(200))
    settle_all(engine)
    assert fetch.settled and fetch.num_came == 0 < fetch.num_blocks
    assert engine.stats().traffic.checksum_failures["ssd"] > 0  # type: ignore[union-attr]
    warm = generate(engine, prompts(200))
    assert warm.tokens == cold.tokens and warm.source == KvSource(computed=200)


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


def test_a_request_that_comes_while_it_is_read_for_shares_the_read(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    engine, cold = far_away(make_engine, prompts)
    shared.calls.clear()
    with held(shared, "read"):
        fetch = prefetch(engine, prompts(100))
        until(engine, lambda: fetch.num_blocks == 6)
        warm = submit(engine, prompts(100))
        until(engine, lambda: states(engine).get("loading") == 1)
        assert not warm.tokens
    run_all(engine)
    assert warm.tokens == cold.tokens and warm.source == KvSource(remote=96, computed=4)
    settle_all(engine)
    assert shared.calls.count("read") == 1, "six small blocks are one group"


def test_a_reset_while_it_is_read_for_is_for_good(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    engine, cold = far_away(make_engine, prompts)
    with held(shared, "read"):
        fetch = prefetch(engine, prompts(100))
        until(engine, lambda: fetch.num_blocks == 6)
        resetting = engine.cache.reset(["host", "remote"])
    until(engine, lambda: resetting.settled)
    settle_all(engine)
    assert fetch.settled and not shared.blocks and engine.stats().kv_blocks["host"]["idle"] == 0
    again = generate(engine, prompts(100))
    assert again.source == KvSource(computed=100) and again.tokens == cold.tokens


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


def test_a_store_that_dies_is_not_asked_to_read_ahead(
    make_engine: MakeEngine, prompts: Prompts, shared: MemoryStore
) -> None:
    engine, cold = far_away(make_engine, prompts)
    shared.die()
    fetch = prefetch(engine, prompts(100))
    settle_all(engine)
    assert fetch.settled and fetch.num_blocks == 0 and not engine.cache.cold_tiers["remote"].usable
    prefix = engine.cache.prefix_of(prompts(100))
    assert prefix is not None and engine.cache.prefetch(prefix, "again") is None, "it is fenced off"
    assert generate(engine, prompts(100)).tokens == cold.tokens
    assert store_of(engine, "remote") is shared

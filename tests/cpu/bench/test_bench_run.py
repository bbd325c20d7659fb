"""Driving an engine from one thread: everything ends, nothing is stuck unnoticed, and the cache can be
emptied in between."""

from __future__ import annotations

import threading

import pytest

from penstock.bench.run import Driver, random_prompts
from penstock.engine.build import build
from penstock.errors import ConfigError, StepFailed
from penstock.kv.memory import HostArena, HostMemory


def test_every_request_is_read_to_its_full_length(engine):
    driver = Driver(engine)
    readers = [driver.submit([i, 2, 3], max_tokens=5 + i) for i in range(3)]
    turns = driver.run_all()
    assert [len(reader.tokens) for reader in readers] == [5, 6, 7]
    assert sum(turn.num_tokens for turn in turns) == 18 and sum(turn.num_finished for turn in turns) == 3
    assert all(reader.ttft_s > 0 for reader in readers)
    assert not engine.has_work()


def test_a_failed_step_ends_the_measurement(engine, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("the device fell over")

    driver = Driver(engine)
    driver.submit([1, 2, 3], 4)
    monkeypatch.setattr("penstock.models.decoder.Decoder.embed", fail)
    with pytest.raises(StepFailed, match="the device fell over"):
        driver.run_all()


@pytest.fixture
def withheld(monkeypatch):
    """Host slots can be used when their memory is ready, as beside a GPU."""

    def open_memory(arena, ready):
        ready.__self__.withhold()
        return HostMemory(arena, ready)

    monkeypatch.setattr("penstock.kv.tiers.host.HostMemory", open_memory)


def test_a_measurement_waits_for_host_memory_that_is_being_prepared(tiered_config, withheld, monkeypatch):
    more = threading.Event()

    def prepare(arena, ready, progress, stop):
        ready(range(64))
        assert more.wait(60.0)
        ready(range(arena.num_slots))

    monkeypatch.setattr(HostArena, "prepare", prepare)
    engine = build(tiered_config)
    seen: list[tuple[str, int, int]] = []
    Driver(engine, progress=lambda *told: (seen.append(told), more.set())).wait_ready()
    assert seen[0][0] == "preparing host memory" and seen[0][1] <= 64 < seen[0][2]
    assert engine.cache.host.num_unready == 0
    engine.close(timeout_s=20.0)


def test_prompts_are_different_of_the_length_asked_for_and_decided_by_the_seed():
    for num, num_tokens, vocab in ((1, 1, 2), (256, 1, 512), (32, 7, 16), (8, 300, 49152)):
        prompts = random_prompts(num, num_tokens, vocab, (0,))
        assert len({tuple(prompt) for prompt in prompts}) == num
        assert all(len(prompt) == num_tokens for prompt in prompts)
        assert all(0 <= token < vocab for prompt in prompts for token in prompt)
    assert random_prompts(4, 9, 512, (1, -2)) == random_prompts(4, 9, 512, (1, -2))
    assert random_prompts(4, 9, 512, (1, 2)) != random_prompts(4, 9, 512, (1, 3))
    with pytest.raises(ConfigError, match="not enough prompts"):  # rather than sought forever
        random_prompts(512, 1, 512, (0,))

"""Experts off the device on CUDA: the same tokens with all of them there, with a quarter, and with the
fewest; lanes behind a launcher; a limit of device memory. Under the sanitizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: experts off the device need torch")
if not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: experts off the device need an NVIDIA GPU, and there is none here",
        allow_module_level=True,
    )

from penstock.config import GIB, Config, ExpertsConfig  # noqa: E402
from penstock.engine.engine import Engine  # noqa: E402
from penstock.experts.routing import read_routing  # noqa: E402
from penstock.kv import memory  # noqa: E402
from penstock.lanes.cpu import CpuLane  # noqa: E402
from penstock.lanes.cuda import CudaLane, make_launcher  # noqa: E402
from penstock.lanes.launched import LaunchedLane  # noqa: E402
from penstock.models.registry import BUILT_IN  # noqa: E402
from penstock.observe import LaneObserver  # noqa: E402
from penstock.testing.sanitized import build_sanitized, check_silent  # noqa: E402
from tests.gpu.test_lanes_cuda import DEVICE, CudaRig, _kernels_are_loaded  # noqa: E402, F401
from tests.pure.lanes.lane_rules import LaneRules  # noqa: E402
from tests.support.driving import run_all, settle_all, submit, tiny_config  # noqa: E402

pytestmark = pytest.mark.gpu
SHARES = ("50%", "25%", "9%")  # the last has room for one token's experts of a layer


class LaunchedCudaRig(CudaRig):
    """All lanes share a launcher."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher: CpuLane | None = None
        self.launched: list[LaunchedLane] = []

    def lane(self, name: str, observer: LaneObserver | None = None) -> Any:
        inner = CudaLane(f"{name}, launched", DEVICE)
        self.launcher = self.launcher or make_launcher(inner)
        self.launched.append(LaunchedLane(name, inner, self.launcher, observer))
        return self.launched[-1]

    def close(self) -> None:
        torch.cuda.synchronize()
        for lane in self.launched:
            lane.close(self.patience_s)
        if self.launcher is not None:
            self.launcher.close(self.patience_s)


@pytest.fixture
def rig() -> Iterator[LaunchedCudaRig]:
    made = LaunchedCudaRig()
    yield made
    made.close()


class TestLaunchedCudaLane(LaneRules):
    """A stream behind a launcher keeps the rules of all lanes."""


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(1, 500, n).tolist() for n in lengths]


ASKED = prompts(3, 40, 90, 17, 150)


def pooled(on_device: str | None, experts: dict[str, Any] | None = None, **more: Any) -> Config:
    config = tiny_config("tiny-qwen3-moe", device="cuda", **more)
    return dataclasses.replace(config, experts=ExpertsConfig(on_device, **(experts or {})))


def answers(config: Config, asked: list[list[int]] = ASKED, rounds: int = 1) -> list[list[int]]:
    """Greedy and sampled ones, at once; after a round they come back from host memory, if there is some."""
    engine, sanitizer = build_sanitized(config)
    engine.warm()
    found: list[list[int]] = []
    for _ in range(rounds):
        these = [
            submit(engine, prompt, max_tokens=12, temperature=0.9 * (i % 2), seed=i)
            for i, prompt in enumerate(asked)
        ]
        run_all(engine)
        assert all(one.error is None for one in these), [one.error for one in these]
        found += [one.tokens for one in these]
        settle_all(engine)
        engine.cache.reset(("device",))
    check_counts(engine, config)
    engine.close(timeout_s=60.0)
    check_silent(sanitizer)
    return found


def check_counts(engine: Engine, config: Config) -> None:
    figures = engine.stats().experts
    assert (figures is None) == (config.experts.on_device is None)
    if figures is not None:
        assert figures.missed > 0
        assert figures.copied_bytes == (figures.missed + figures.guessed) * 3 * 64 * 32 * 4


def test_events_say_how_long_steps_waited_for_experts() -> None:
    engine, sanitizer = build_sanitized(pooled("9%", {"guesses": False}))
    found = submit(engine, ASKED[2], max_tokens=12)
    run_all(engine)
    waits_s = [event.expert_wait_s for event in found.events if event.expert_wait_s is not None]
    figures = engine.stats().experts
    assert figures is not None and 0.0 < sum(waits_s) <= figures.waited_s + 1e-9
    engine.close(timeout_s=60.0)
    check_silent(sanitizer)


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    """Op by op: a replay of another shape may round in another way."""
    return answers(pooled(None, capture=False))


@pytest.mark.parametrize("guesses", [True, False], ids=["guessing", "not guessing"])
@pytest.mark.parametrize("share", SHARES)
def test_tokens_are_those_with_all_experts_on_the_device(
    share: str, guesses: bool, whole: list[list[int]]
) -> None:
    assert answers(pooled(share, {"guesses": guesses}, capture=False)) == whole


@pytest.fixture(scope="module")
def replayed() -> list[list[int]]:
    return answers(pooled(None))


@pytest.mark.parametrize("guesses", [True, False], ids=["guessing", "not guessing"])
@pytest.mark.parametrize("share", SHARES)
def test_tokens_of_captured_pieces_are_those_of_whole_replays(
    share: str, guesses: bool, replayed: list[list[int]]
) -> None:
    """Five requests: their steps are padded."""
    assert answers(pooled(share, {"guesses": guesses})) == replayed


@pytest.mark.parametrize("share", ["25%", "9%"])
def test_tokens_are_the_same_with_tiers_and_contexts_that_do_not_fit(share: str) -> None:
    asked = prompts(150, 60, 100, 200, 30, 45)
    settings: dict[str, Any] = {"blocks": 24, "host_blocks": 80, "resident_tokens": 128, "max_model_len": 300}
    settings |= {"overcommit": 4.0, "max_batch": 4, "capture": False}
    assert answers(pooled(share, **settings), asked, 2) == answers(pooled(None, **settings), asked, 2)


def test_a_layer_of_a_published_size_streams_through_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with prompts long enough that nearly every expert is hit, and copies that take as long as
    the products."""
    dims = BUILT_IN["qwen3-30b-a3b"]
    monkeypatch.setitem(BUILT_IN, "tiny-wide", dataclasses.replace(dims, num_layers=4, vocab=512))
    found = []
    for share in (None, "25%", "3%"):
        config = pooled(share, capture=False, max_model_len=4096, prefill_chunk=1024, blocks=600)
        source = dataclasses.replace(config.source, model="tiny-wide", dtype="bfloat16")
        engine, sanitizer = build_sanitized(dataclasses.replace(config, source=source))
        these = [submit(engine, prompt, max_tokens=16) for prompt in prompts(2500, 30, 700)]
        run_all(engine)
        found.append([one.tokens for one in these])
        engine.close(timeout_s=60.0)
        check_silent(sanitizer)
    assert found[0] == found[1] == found[2]


def test_recorded_routing_counts_every_token(tmp_path: Path, whole: list[list[int]]) -> None:
    path = tmp_path / "routing.jsonl"
    assert answers(pooled(None, {"record": str(path)})) == whole
    trace = read_routing(path)
    assert all(own.sum() == 2 * step.num_tokens for step in trace.steps for own in step.counts)
    assert sum(step.num_tokens for step in trace.steps) == sum(map(len, ASKED)) + 11 * len(ASKED)


def test_a_limit_of_device_memory_is_what_is_free() -> None:
    device = torch.device("cuda", 0)
    total = torch.cuda.mem_get_info(device)[1]
    try:
        memory.limit_memory(device, 2 * GIB)
        assert memory.free_bytes(device) <= 2 * GIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * GIB, dtype=torch.uint8, device=device)
    finally:
        memory.limit_memory(device, total)

"""Hybrid models on CUDA: against `transformers` on the CPU, steps as replays and op by op, and
the sizes of published models, whose heads have 256 values."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="NOT TESTED: the reference needs transformers")
from penstock.config import EngineConfig, ModelSource
from penstock.models.registry import BUILT_IN
from penstock.testing.sanitized import build_sanitized, check_silent
from penstock.contract import KvSource
from tests.e2e.test_parity_families import DECODED, IDS, save
from tests.e2e.test_parity_hybrid import error_of, reference_of, scored, served
from tests.support import contiguous_kv
from tests.support.driving import run_all, settle_all, submit, tiny_config

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-3  # of a log-probability: products are summed in another order than on the CPU
MODEL, WIDE = "tiny-qwen3.5", "tiny-wide"


def prompts(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 500, num_tokens).tolist()


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_a_hybrid_model_computes_on_cuda_what_transformers_computes(family: str, tmp_path: Path) -> None:
    reference = reference_of(family)
    prompts = [IDS[:150], IDS[150:220], IDS[30:31]]
    with served(save(reference, tmp_path), device="cuda") as engine:
        found = [scored(engine, prompt) for prompt in prompts]
        run_all(engine)
        assert not all(shape.is_decode for shape in engine.parts.executor.target.replays.buckets)
        for tier in ("none", "device", "host"):
            if tier == "host":
                settle_all(engine)
                engine.parts.cache.reset(["device"])
            found.append(submit(engine, prompts[0], max_tokens=DECODED, logprobs=0))
            run_all(engine)
    sources = [one.source for one in found[-3:]]
    assert sources == [
        KvSource(computed=150),
        KvSource(device=144, computed=6),
        KvSource(host=144, computed=6),
    ]
    for prompt, one in zip([*prompts, *[prompts[0]] * 3], found, strict=True):
        assert error_of(reference, prompt, one) < TOLERANCE


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> str:
    """Few layers of the sizes that published models have."""
    dims = BUILT_IN["qwen3.5-4b"]
    assert dims.recurrence is not None and dims.head_dim == 256
    few = dataclasses.replace(dims.recurrence, layers=(0, 1, 2))
    sizes = {"num_layers": 4, "hidden": 512, "ffn": 512, "vocab": 512, "max_position": 4096}
    monkeypatch.setitem(BUILT_IN, WIDE, dataclasses.replace(dims, recurrence=few, **sizes))  # type: ignore[arg-type]
    return WIDE


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("model", [MODEL, WIDE])
@pytest.mark.usefixtures("wide")
def test_crowds_on_cuda_get_the_tokens_of_each_request_alone(model: str, capture: bool) -> None:
    sizes = {"max_batch": 12, "blocks": 60, "host_blocks": 200, "overcommit": 3.0, "state_every": 32}
    config = tiny_config(model, device="cuda", capture=capture, **sizes)
    engine, sanitizer = build_sanitized(config)
    reference = engine.parts.executor.target.model
    asked = [prompts(length, seed=length) for length in (1, 5, 30, 64, 65, 130, 200, 7, 8)]
    found = [submit(engine, prompt, max_tokens=30) for prompt in asked]
    gone = submit(engine, prompts(90, seed=1), max_tokens=30)
    for _ in range(12):
        engine.step()
    engine.cancel(gone.request_id)
    run_all(engine)
    for prompt, one in zip(asked, found, strict=True):
        assert one.error is None
        assert one.tokens == contiguous_kv.generate(reference, prompt, 30)
    engine.close(timeout_s=60.0)
    check_silent(sanitizer)


@pytest.mark.parametrize("model", [MODEL, WIDE])
@pytest.mark.usefixtures("wide")
def test_a_sequence_that_does_not_fit_on_cuda_gets_the_tokens_of_its_state(model: str) -> None:
    sizes = {"blocks": 24, "host_blocks": 120, "resident_tokens": 160, "max_model_len": 900, "max_batch": 4}
    engine, sanitizer = build_sanitized(tiny_config(model, device="cuda", **sizes))
    reference, prompt = engine.parts.executor.target.model, prompts(500, seed=3)
    for _ in range(2):
        found = submit(engine, prompt, max_tokens=20)
        run_all(engine)
        assert found.tokens == contiguous_kv.generate(reference, prompt, 20)
    assert found.source == KvSource(host=496, computed=4)
    engine.close(timeout_s=60.0)
    check_silent(sanitizer)


@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_states_come_back_on_cuda_from_disk_and_from_pinned_memory(tier: str, tmp_path: Path) -> None:
    sizes = {"blocks": 60, "host_blocks": 200, "ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 0.05}
    engine, sanitizer = build_sanitized(tiny_config(MODEL, device="cuda", **sizes))
    states, prompt = engine.cache.states, prompts(200, seed=4)
    assert states is not None
    while states.pool.counts.reserved:  # until its memory is pinned
        time.sleep(0.01)
    right = contiguous_kv.generate(engine.parts.executor.target.model, prompt, 20)
    for _ in range(2):
        found = submit(engine, prompt, max_tokens=20)
        run_all(engine)
        assert found.tokens == right
        settle_all(engine)
        engine.parts.cache.reset(["device"] if tier == "host" else ["device", "host"])
    assert found.source == KvSource(computed=8, **{tier: 192})
    engine.close(timeout_s=60.0)
    check_silent(sanitizer)


@pytest.mark.usefixtures("wide")
def test_an_engine_in_bfloat16_warms_up_and_answers() -> None:
    """Every kernel fits into a multiprocessor, and states are finite."""
    config = tiny_config(WIDE, device="cuda", blocks=600)
    config = dataclasses.replace(
        config,
        source=ModelSource(WIDE, load_format="dummy", device="cuda", dtype="bfloat16"),
        engine=EngineConfig(max_model_len=4096, max_batch=8, prefill_chunk=2048),
    )
    engine, sanitizer = build_sanitized(config)
    with engine.launching():
        engine.warm()
    found = [submit(engine, prompts(length, seed=length), max_tokens=20) for length in (3, 300, 3000)]
    run_all(engine)
    assert [len(one.tokens) for one in found] == [20] * 3
    slots = engine.parts.executor.target.forward.slots
    assert slots is not None and all(tensor.isfinite().all() for tensor in slots.tensors)
    engine.close(timeout_s=60.0)
    check_silent(sanitizer)

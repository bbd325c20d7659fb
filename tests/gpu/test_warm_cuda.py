"""No kernel is compiled under a request: all that steps need is there when the engine is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cpu.engine.conftest import prompts

from penstock.engine.build import build
from penstock.testing.driving import run_all, submit, tiny_config

pytestmark = pytest.mark.gpu
__all__ = ["prompts"]

triton = pytest.importorskip("triton", reason="NOT TESTED: kernels need triton")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_is_compiled_after_the_engine_was_built(prompts: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(*_: Any, **what: Any) -> None:
        compiled.append(str(what.get("repr", what)))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    config = tiny_config(device="cuda", host_blocks=256, prefill_chunk=1024, blocks=512)
    engine = build(dataclasses.replace(config, source=dataclasses.replace(config.source, dtype=dtype)))
    try:
        assert compiled, "the hook tells of every kernel"
        compiled.clear()
        for batch in ([40], [600, 90, 300], [1100, 17, 1]):
            stems = [prompts(length, seed=length) for length in batch]
            for stem in stems:
                submit(engine, stem, max_tokens=4)
            run_all(engine)
            for stem in stems:  # over a prefix: short, long, alone and beside others
                submit(engine, stem + prompts(200, seed=len(stem) + 1), max_tokens=4)
            run_all(engine)
        whole = prompts(1000, seed=5)
        for more in (0, 300, 900):
            submit(engine, whole + prompts(max(more, 1), seed=more), max_tokens=2)
            run_all(engine)
        assert compiled == []
    finally:
        engine.close(timeout_s=20.0)

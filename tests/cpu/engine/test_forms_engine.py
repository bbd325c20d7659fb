"""An engine whose weights are in 4 or 8 bits: prefixes come back as they were computed, and only to the form
that computed them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from penstock.config import Config, WeightsName
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import generate, settle_all, tiny_config
from tests.support.tiny_gguf import write_tiny_gguf

PROMPT = list(range(3, 100))  # six full blocks, and one token that is always computed


def config_of(weights: WeightsName, folder: Path, **offload: Any) -> Config:
    """A GGUF file whose layers are in 4 bits, in any form: the same weights for all."""
    config, file = tiny_config("tiny-llama", host_blocks=64), folder / "tiny.gguf"
    if not file.exists():
        write_tiny_gguf(file, encoding_of=lambda name: "Q4_1" if ".layers." in name else "Q8_0")
    source = dataclasses.replace(config.source, model=str(file), load_format="auto", weights=weights)
    return dataclasses.replace(config, source=source, offload=dataclasses.replace(config.offload, **offload))


def answer(engine: Engine) -> tuple[KvSource | None, list[int]]:
    found = generate(engine, PROMPT, max_tokens=24)
    settle_all(engine)
    return found.source, list(found.tokens)


def test_blocks_on_disk_serve_the_form_that_computed_them_and_no_other(tmp_path: Path) -> None:
    def restarted(weights: WeightsName) -> int:
        offload = {"ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 0.05, "load_always": True}
        engine, sanitizer = build_sanitized(config_of(weights, tmp_path, **offload))
        engine.cache.cold_tiers["ssd"].calls.store.wait_scanned(20.0)
        source, _ = answer(engine)
        persisting = engine.cache.persist()
        assert persisting is not None
        while not persisting.settled:
            engine.step()
        settle_all(engine)
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)
        assert source is not None
        return source.ssd

    assert restarted("int8") == 0
    assert restarted("int8") == 96
    assert restarted("float32") == 0 and restarted("bfloat16") == 0
    assert restarted("int4") == 0
    assert restarted("int4") == 96

"""The embedded model in its default form with `--deterministic`, on real text: the same bits cold and warm,
alone and in a batch."""

from __future__ import annotations

from pathlib import Path

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig
from tests.support.embedded import embedded_tokenizer
from tests.support.steadiness import differing

PROSE = Path(__file__).resolve().parents[1] / "data" / "prose.txt"


def test_answers_are_the_same_bits_wherever_kv_comes_from(tmp_path: Path) -> None:
    source = ModelSource(device="cpu", weights="int4", deterministic=True)
    kv, engine = KvConfig(device_blocks=256), EngineConfig(max_model_len=512, max_batch=8, prefill_chunk=200)
    config = Config(source, kv, engine, OffloadConfig(host_gib=0.3))
    assert differing(config, tmp_path, embedded_tokenizer().encode(PROSE.read_text())) == []

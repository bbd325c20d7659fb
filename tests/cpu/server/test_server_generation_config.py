"""What a model's generation_config.json states is what a request gets that leaves a field out; what it gives
itself counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.config import Config, KvConfig, ModelSource
from penstock.engine.build import build
from penstock.errors import ModelError
from penstock.flags import config_of
from penstock.models.loader import inspect_model, read_sampling
from penstock.testing.tiny_models import write_tiny_model

STATED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def stating(folder: Path, **fields: Any) -> Path:
    model = write_tiny_model(folder / "model")
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 5, 0], "do_sample": True, **fields})
    )
    return model


@pytest.mark.parametrize(("choice", "expected"), [("auto", STATED), ("none", {})])
def test_a_served_model_has_the_defaults_and_all_end_ids_of_its_file(
    tmp_path: Path, choice: Any, expected: dict[str, Any]
) -> None:
    model = stating(tmp_path, **STATED)
    engine = build(
        Config(ModelSource(str(model), device="cpu", generation_config=choice), KvConfig(device_blocks=16))
    )
    assert (dict(engine.sampling), engine.tokenizer.eos_ids) == (expected, frozenset({0, 2, 5}))
    engine.close(timeout_s=20.0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "temperature must be at least 0"),
        ("top_p", 0, "top_p must be above 0"),
        ("top_k", 1.5, "top_k must be a number, got 1.5"),
        ("repetition_penalty", "1.1", "repetition_penalty must be a number, got '1.1'"),
        ("min_p", True, "min_p must be a number, got True"),
    ],
)
def test_a_file_that_states_nonsense_is_refused_by_name(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    model = stating(tmp_path, **{field: value})
    with pytest.raises(ModelError, match=rf"generation_config\.json: {message}.*--generation-config none"):
        read_sampling(model)
    with pytest.raises(ModelError, match=message):
        inspect_model(ModelSource(str(model)))


def test_the_flag_is_of_serve_and_other_commands_keep_their_own_defaults() -> None:
    parser = cli.make_parser()
    assert config_of(parser.parse_args(["serve"])).source.generation_config == "auto"
    assert (
        config_of(parser.parse_args(["serve", "--generation-config", "none"])).source.generation_config
        == "none"
    )
    assert config_of(parser.parse_args(["generate", "hi"])).source.generation_config == "none"

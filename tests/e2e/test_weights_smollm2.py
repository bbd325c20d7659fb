"""The embedded model's own file: loaded from the cache without a second copy in memory, and refused when it
is cut or bent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from penstock.errors import ModelError
from penstock.models.embedded import embedded_file
from penstock.models.llama import SMOLLM2_135M
from penstock.models.loader import LoadedModel
from penstock.models.progress import silent
from penstock.models.registry import layout
from tests.support.loading import load_on_cpu

WEIGHT_BYTES = 4 * sum(weight.numel for weight in layout(SMOLLM2_135M))


def load(
    model: str = "smollm2-135m", dtype: torch.dtype = torch.float32, progress: object = silent
) -> LoadedModel:
    return load_on_cpu(model, dtype, progress)  # type: ignore[arg-type]


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to measure memory")
def test_loading_keeps_one_copy_of_the_weights_in_memory() -> None:
    load()  # converted and hashed, if this is the first time
    before, peak = anonymous_bytes(), 0

    def watch(stage: str, done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    loaded = load(progress=watch)
    assert peak - before < 1.2 * WEIGHT_BYTES
    held = [
        loaded.model.embedding,
        loaded.model.norm,
        *(t for layer in loaded.model.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)),
    ]  # type: ignore[attr-defined]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == WEIGHT_BYTES


def test_the_files_own_dimensions_are_those_of_the_built_in_name() -> None:
    config = load().model.config
    for field in (
        "num_layers",
        "hidden",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "max_position",
        "rope_theta",
    ):
        assert getattr(config, field) == getattr(SMOLLM2_135M, field)
    assert config.tied_embeddings and config.norm_eps == pytest.approx(1e-5)


def test_the_digest_is_stable_and_tells_dtypes_apart() -> None:
    first = load()
    assert first.model.digest == load(str(embedded_file())).model.digest
    assert first.model.digest != load(dtype=torch.bfloat16).model.digest


@pytest.mark.parametrize("keep", [0, 1_000_000, 98_362_431])
def test_the_file_cut_short_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cut.gguf"
    shutil.copyfile(embedded_file(), path)
    with path.open("r+b") as file:
        file.truncate(keep)
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        load(str(path))
    assert not list((tmp_path / "cache").glob("gguf/*")), "something of the conversion was left behind"


def test_the_file_with_a_bent_header_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "bent.gguf"
    shutil.copyfile(embedded_file(), path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 16)
    with pytest.raises(ModelError, match=r"bent\.gguf is damaged or truncated"):
        load(str(path))

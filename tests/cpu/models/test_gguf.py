"""GGUF files: read, converted once, and refused where they are damaged or foreign."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.errors import ModelError
from penstock.models import gguf_convert
from penstock.models.gguf_convert import MANIFEST, WEIGHTS, converted_directory
from penstock.models.gguf_file import GgufFile
from penstock.models.model import ModelConfig
from penstock.models.progress import silent
from penstock.models.safetensors_dir import load_directory
from penstock.testing.tiny_models import TINY_LLAMA, TINY_QWEN3, tiny_tensors, write_tiny_gguf, write_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PENSTOCK_CACHE", str(path))
    return path


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
def test_a_converted_file_has_the_weights_of_the_model_it_was_made_from(tmp_path: Path, config: ModelConfig) -> None:
    directory = converted_directory(write_tiny_gguf(tmp_path / "tiny.gguf", config), silent)
    converted = load_directory(directory, config, CPU, torch.float32, silent)
    original = load_directory(write_tiny_model(tmp_path / "model", config), config, CPU, torch.float32, silent)
    assert set(converted) == set(original)
    assert all(torch.equal(converted[name], original[name]) for name in original)


def test_without_unpermuting_the_rows_of_q_would_be_another_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the test above would show."""
    monkeypatch.setattr(gguf_convert, "unpermute", lambda rows, head_dim: rows)
    directory = converted_directory(write_tiny_gguf(tmp_path / "tiny.gguf"), silent)
    converted = load_directory(directory, TINY_LLAMA, CPU, torch.float32, silent)
    q = tiny_tensors(TINY_LLAMA)["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(converted["layers.0.qkv"][: len(q)], q)


def test_conversion_happens_once_and_says_so(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    first: list[tuple[str, int, int]] = []
    second: list[tuple[str, int, int]] = []
    directory = converted_directory(path, lambda *call: first.append(call))
    conversion = [call for call in first if "converting" in call[0]]
    assert conversion[-1][1] == conversion[-1][2] > 0
    assert converted_directory(path, lambda *call: second.append(call)) == directory
    assert not any("converting" in stage for stage, _, _ in second)


def test_the_copy_is_found_by_content_and_not_by_path(tmp_path: Path) -> None:
    directory = converted_directory(write_tiny_gguf(tmp_path / "a.gguf"), silent)
    assert converted_directory(write_tiny_gguf(tmp_path / "b.gguf"), silent) == directory
    assert converted_directory(write_tiny_gguf(tmp_path / "c.gguf", seed=1), silent) != directory


def test_another_converter_version_makes_another_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    directory = converted_directory(path, silent)
    monkeypatch.setattr(gguf_convert, "CONVERTER_VERSION", gguf_convert.CONVERTER_VERSION + 1)
    assert converted_directory(path, silent) != directory


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "no manifest", "empty manifest", "wrong manifest"])
def test_a_damaged_cached_copy_is_made_again(tmp_path: Path, how: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    directory = converted_directory(path, silent)
    weights = directory / WEIGHTS
    good = weights.read_bytes()
    if how == "truncated":
        os.truncate(weights, len(good) // 2)
    elif how == "flipped":
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif how == "missing":
        weights.unlink()
    elif how == "no manifest":
        (directory / MANIFEST).unlink()
    elif how == "empty manifest":
        (directory / MANIFEST).write_text("{}")
        os.truncate(weights, 0)
    else:
        (directory / MANIFEST).write_text('{"model.safetensors": "00"}')
    assert converted_directory(path, silent) == directory
    assert weights.read_bytes() == good
    assert [child.name for child in directory.parent.iterdir()] == [directory.name]


def test_two_processes_that_convert_at_once_end_with_one_intact_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    publish = gguf_convert._publish
    inodes = []

    def other_was_faster(temporary: Path, target: Path, progress: object) -> None:
        monkeypatch.setattr(gguf_convert, "_publish", publish)
        inodes.append((converted_directory(path, silent) / WEIGHTS).stat().st_ino)
        publish(temporary, target, silent)

    monkeypatch.setattr(gguf_convert, "_publish", other_was_faster)
    directory = converted_directory(path, silent)
    assert (directory / WEIGHTS).stat().st_ino == inodes[0], "the copy that another process may be reading was replaced"
    assert [child.name for child in directory.parent.iterdir()] == [directory.name]


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_convert, "sync_directory", full)
    with pytest.raises(ModelError, match=r"cannot be written to .*No space left on device; set PENSTOCK_CACHE"):
        converted_directory(write_tiny_gguf(tmp_path / "tiny.gguf"), silent)
    assert list((own_cache / "gguf").iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_after_a_day(tmp_path: Path, own_cache: Path) -> None:
    old, young = own_cache / "gguf" / "tmp-old", own_cache / "gguf" / "tmp-young"
    for path in (old, young):
        path.mkdir(parents=True)
    os.utime(old, (1, 1))
    converted_directory(write_tiny_gguf(tmp_path / "tiny.gguf"), silent)
    assert not old.exists() and young.exists()


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("keep", [0, 3, 10, 23, 24, 60, 500, 5000, -1, -100_000])
def test_a_truncated_file_is_a_model_error(tmp_path: Path, pristine: bytes, keep: int) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(pristine[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        converted_directory(path, silent)


DAMAGE = {
    "magic": (0, b"GGUX"),
    "big-endian version": (4, struct.pack(">I", 3)),
    "future version": (4, struct.pack("<I", 99)),
    "tensor count": (8, struct.pack("<Q", 2**60)),
    "entry count": (16, struct.pack("<Q", 2**63)),
    "first key's length": (24, struct.pack("<Q", 2**50)),
}


@pytest.mark.parametrize(("offset", "data"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_header_is_a_model_error(tmp_path: Path, pristine: bytes, offset: int, data: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(pristine[:offset] + data + pristine[offset + len(data) :])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        converted_directory(path, silent)


def test_any_damaged_byte_of_the_header_is_a_model_error_or_read_as_stated(tmp_path: Path, pristine: bytes) -> None:
    """No byte of the header, whatever it is changed to, leads to any other exception, or to a loop over an absurd count."""
    header_bytes = pristine.index(b"blk.1.ffn_down.weight")
    path = tmp_path / "tiny.gguf"
    chosen = np.random.default_rng(0).integers(0, header_bytes, 300)
    refused = 0
    for at in chosen:
        damaged = bytearray(pristine)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            source = GgufFile(path)
            gguf_convert.parse_config(gguf_convert.config_from_metadata(source), "x")
            gguf_convert.tokenizer_files(source.metadata, "x")
        except ModelError:
            refused += 1
    assert refused > 30


def test_the_data_is_checked_to_be_there_before_anything_is_written(tmp_path: Path, pristine: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(pristine[:-4])
    calls: list[str] = []
    with pytest.raises(ModelError, match="is truncated: tensor"):
        converted_directory(path, lambda stage, done, total: calls.append(stage))
    assert not any("converting" in stage for stage in calls)


# ------------------------------------------------------------------------------------------------------------ foreign

FOREIGN = {
    "architecture": ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported are llama, qwen3"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "deepseek"}, "pre-tokenizer 'deepseek' is not supported; supported are smollm, qwen2"),
    "tokenizer": ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported"),
    "rope scaling": ({"llama.rope.scaling.type": "yarn"}, "rope scaling of type 'yarn'"),
}


@pytest.mark.parametrize(("metadata", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, metadata: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        converted_directory(write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata), silent)


def test_tensors_that_do_not_fit_the_metadata_are_named(tmp_path: Path, pristine: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(pristine.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_Xown.weight"))
    with pytest.raises(
        ModelError, match=r"missing tensors: model\.layers\.1\.mlp\.down_proj\.weight; unexpected tensors: blk\.1\.ffn_Xown\.weight"
    ):
        converted_directory(path, silent)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_encodings_are_decoded_as_ggml_defines_them(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    from penstock.testing import tiny_models

    encoding = gguf.GGMLQuantizationType[kind]
    plain = tiny_tensors(TINY_LLAMA)["model.layers.0.mlp.up_proj.weight"].numpy()
    encoded = gguf.quantize(plain, encoding)
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(self: gguf.GGUFWriter, name: str, rows: np.ndarray) -> None:
        if name == "blk.0.ffn_up.weight":
            add_tensor(self, name, encoded, raw_dtype=encoding)
        else:
            add_tensor(self, name, rows)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    path = tiny_models.write_tiny_gguf(tmp_path / "tiny.gguf")
    weights = load_directory(converted_directory(path, silent), TINY_LLAMA, CPU, torch.float32, silent)
    up = weights["layers.0.gate_up"][TINY_LLAMA.ffn :].numpy()
    assert np.array_equal(up, gguf.dequantize(encoded, encoding))
    assert 0 < np.abs(up - plain).max() < 0.2

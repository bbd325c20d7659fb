"""GGUF files: read, converted once, and refused where they are damaged or foreign."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock.errors import ModelError
from penstock.models import gguf_convert
from penstock.models.embedded import cache_dir
from penstock.models.gguf_convert import CONVERTER_VERSION, MANIFEST, WEIGHTS, Content, load_converted
from penstock.models.gguf_file import GgufFile
from penstock.models.hashed_file import HashedFile, WeightFile
from penstock.models.progress import Progress, silent
from penstock.models.registry import config_of_gguf, parse_config
from penstock.models.rotary import RopeScaling
from penstock.models.weights import LoadedWeights, load_directory, read_json
from penstock.testing.tiny_models import TINY_LLAMA, TINY_QWEN3, tiny_tensors, write_tiny_model
from tests.support.tiny_gguf import write_tiny_gguf

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def load(directory: Path) -> tuple[LoadedWeights, Content]:
    config = parse_config(read_json(directory / "config.json"), "config.json")
    weights = load_directory(directory, config, CPU, torch.float32, silent)
    return weights, weights.content


def converted(path: Path, progress: Progress = silent) -> dict[str, torch.Tensor]:
    """The weights of a GGUF file."""
    return converted_by(load, path, progress).tensors


def converted_by(
    load: Callable[[Path], tuple[LoadedWeights, Content]], path: Path, progress: Progress = silent
) -> LoadedWeights:
    with HashedFile(path, progress) as file:
        return load_converted(file, load, progress)


def copy_of(path: Path) -> Path:
    """Where the converted copy of a GGUF file is kept."""
    with HashedFile(path, silent) as file:
        return cache_dir() / "gguf" / f"{file.digest.hex()[:32]}-v{gguf_convert.CONVERTER_VERSION}"


def test_a_converted_file_has_the_weights_of_the_model_it_was_made_from(tmp_path: Path) -> None:
    for config in (TINY_LLAMA, TINY_QWEN3):
        found = converted(write_tiny_gguf(tmp_path / "tiny.gguf", config))
        model = write_tiny_model(tmp_path / "model", config)
        original = load_directory(model, config, CPU, torch.float32, silent).tensors
        assert set(found) == set(original)
        assert all(torch.equal(found[name], original[name]) for name in original)


def test_a_file_is_converted_once_and_its_copy_is_found_by_content_and_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, int]] = []

    def conversions(path: Path) -> list[tuple[str, int, int]]:
        calls.clear()
        converted(path, lambda *call: calls.append(call))
        return [call for call in calls if "converting" in call[0]]

    path = write_tiny_gguf(tmp_path / "a.gguf")
    first = conversions(path)
    assert first[-1][1] == first[-1][2] > 0
    assert not conversions(path) and not conversions(write_tiny_gguf(tmp_path / "b.gguf"))
    assert conversions(write_tiny_gguf(tmp_path / "c.gguf", seed=1))
    monkeypatch.setattr(gguf_convert, "CONVERTER_VERSION", CONVERTER_VERSION + 1)
    assert conversions(path) and len(list(copy_of(path).parent.iterdir())) == 3


def flipped(path: Path) -> None:
    """One bit of the last byte, behind the back of whoever looks at size and times."""
    good, stat = path.read_bytes(), path.stat()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def other_base(path: Path) -> None:
    """Of the rotary positions: a config as good as the one before."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 20000.0}))


def other_manifest(directory: Path, other: Path) -> None:
    """A whole copy under the name of another."""
    converted(other)
    for file in copy_of(other).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())


SPOIL: dict[str, Callable[[Path, Path], object]] = {
    "truncated": lambda directory, other: os.truncate(directory / WEIGHTS, 10_000),
    "flipped": lambda directory, other: flipped(directory / WEIGHTS),
    "no manifest": lambda directory, other: (directory / MANIFEST).unlink(),
    "another config": lambda directory, other: other_base(directory / "config.json"),
    "another file's copy": other_manifest,
    "a file too many": lambda directory, other: (directory / "chat_template.jinja").write_text(
        "{{ 'other' }}"
    ),
}


@pytest.mark.parametrize("how", SPOIL)
def test_a_damaged_or_foreign_cached_copy_is_not_served_but_made_again(tmp_path: Path, how: str) -> None:
    path, other = write_tiny_gguf(tmp_path / "tiny.gguf"), write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    expected, directory = converted(path), copy_of(path)
    good = {file.name: file.read_bytes() for file in directory.iterdir()}
    SPOIL[how](directory, other)
    found = converted(path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == good
    assert not list(directory.parent.glob("tmp-*"))


def test_a_copy_that_is_damaged_after_it_was_opened_is_not_served(tmp_path: Path) -> None:
    """Between the check of its small files and the reading of its weights: what is loaded is what is
    compared."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    expected, directory = converted(path), copy_of(path)

    def damage_and_load(found: Path) -> tuple[LoadedWeights, Content]:
        if found == directory:
            flipped(directory / WEIGHTS)
        return load(found)

    found = converted_by(damage_and_load, path).tensors
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_processes_that_convert_at_once_load_their_own_and_leave_one_copy(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    kept: list[int] = []
    loaded: list[Path] = []

    def other_is_faster(directory: Path) -> tuple[LoadedWeights, Content]:
        loaded.append(directory)
        if len(loaded) == 1:
            converted_by(other_is_faster, path)
            kept.append((copy_of(path) / WEIGHTS).stat().st_ino)
        return load(directory)

    converted_by(other_is_faster, path)
    assert len(set(loaded)) == 2 and copy_of(path) not in loaded
    assert (copy_of(path) / WEIGHTS).stat().st_ino == kept[0], (
        "the copy that another process may be reading was replaced"
    )
    assert [child.name for child in copy_of(path).parent.iterdir()] == [copy_of(path).name]


def test_a_file_that_is_written_over_while_it_is_converted_is_a_model_error(
    tmp_path: Path, own_cache: Path
) -> None:
    """With the old size and time: what is converted is compared with what the copy is named after."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    other, stamp = write_tiny_gguf(tmp_path / "other.gguf", seed=1).read_bytes(), path.stat().st_mtime_ns

    def replace(stage: str, done: int, total: int) -> None:
        if "hashing" in stage and done == total:
            path.write_bytes(other)
            os.utime(path, ns=(stamp, stamp))

    with pytest.raises(ModelError, match=r"tiny\.gguf was written to while it was read"):
        converted(path, replace)
    assert not list(own_cache.glob("gguf/*"))


def test_a_conversion_that_fails_leaves_nothing_behind(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_convert, "sync_directory", full)
    with pytest.raises(
        ModelError, match=r"cannot be written to .*No space left on device; set PENSTOCK_CACHE"
    ):
        converted(write_tiny_gguf(tmp_path / "tiny.gguf"))
    assert list((own_cache / "gguf").iterdir()) == []


# ----------------------------------------------------------------------------------------------------- damage


def test_a_truncated_file_and_a_damaged_header_are_model_errors(tmp_path: Path, pristine: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    damage = {0: b"GGUX", 4: struct.pack(">I", 3), 8: struct.pack("<Q", 2**60), 16: struct.pack("<Q", 2**63)}
    damage[24] = struct.pack("<Q", 2**50)  # the first key's length
    damaged = [pristine[:at] + data + pristine[at + len(data) :] for at, data in damage.items()]
    cut = [pristine[:keep] for keep in (0, 3, 23, 60, 5000, -1)]
    stages: list[str] = []
    for data in (*damaged, *cut, pristine[:4] + struct.pack("<I", 99) + pristine[8:]):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"tiny\.gguf"):
            converted(path, lambda stage, done, total: stages.append(stage))
    assert not any("converting" in stage for stage in stages), "all is checked before anything is written"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(name: str, *shape: int, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)


def header(entries: Sequence[bytes] = (), tensors: Sequence[bytes] = ()) -> bytes:
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, len(tensors), len(entries))
        + b"".join([*entries, *tensors])
        + bytes(128)
    )


def nested(depth: int) -> bytes:
    """An array of one array, and so on; the innermost has one number."""
    return (
        string("a")
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * (depth - 1)
        + struct.pack("<IQB", 0, 1, 7)
    )


def aligned(kind: int, value: bytes) -> bytes:
    return string("general.alignment") + struct.pack("<I", kind) + value


HOSTILE = [
    (header([nested(3)]), "a value of unknown type 9"),
    (header(tensors=[tensor("t")]), "tensor t of 0 dimensions"),
    (header(tensors=[tensor("t", 1, 1, 1, 1, 1)]), "tensor t of 5 dimensions"),
    (header(tensors=[tensor("t", 2**40)]), "tensor t of shape"),
    (header(tensors=[tensor("t", 4, offset=10_000)]), "at offset 10000"),
    (header(tensors=[tensor("t", 4), tensor("t", 4)]), "tensor t appears twice"),
    (header([aligned(4, struct.pack("<I", 0))]), "alignment 0"),
    (header([aligned(8, string("32"))]), "alignment '32'"),
]


def test_a_header_that_no_writer_writes_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    for data, reason in HOSTILE:
        path.write_bytes(data)
        said = rf"odd\.gguf is damaged or truncated: .*{reason}"
        with WeightFile(path) as file, pytest.raises(ModelError, match=said):
            GgufFile(file)


def test_what_a_header_may_say_is_read_as_it_is(tmp_path: Path) -> None:
    """The same words as above, at the edge of what is allowed."""
    path = tmp_path / "odd.gguf"
    path.write_bytes(header([nested(2), aligned(4, struct.pack("<I", 1))], [tensor("t", 1, 2, 3, 4)]))
    with WeightFile(path) as file:
        source = GgufFile(file)
    assert source.metadata == {"a": [[7]], "general.alignment": 1}
    assert {name: found.shape for name, found in source.tensors.items()} == {"t": (4, 3, 2, 1)}


def test_any_damaged_byte_of_the_header_is_a_model_error_or_read_as_stated(
    tmp_path: Path, pristine: bytes
) -> None:
    """No byte of the header, whatever it is changed to, leads to any other exception, or to a loop over an
    absurd count."""
    header_bytes = pristine.index(b"blk.1.ffn_down.weight")
    path = tmp_path / "tiny.gguf"
    chosen = np.random.default_rng(0).integers(0, header_bytes, 150)
    refused = 0
    for at in chosen:
        damaged = bytearray(pristine)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            with WeightFile(path) as file:
                source = GgufFile(file)
            parse_config(config_of_gguf(source.metadata, source.tensors, {}, "x"), "x")
            gguf_convert.tokenizer_files(source.metadata, "x")
        except ModelError:
            refused += 1
    assert refused > 15


def test_tensors_begin_where_the_alignment_of_the_file_says(tmp_path: Path) -> None:
    path, vectors = tmp_path / "aligned.gguf", {"one": [1.0, 2.0, 3.0], "two": [4.0, 5.0]}
    for alignment in (8, 32, 4096):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_custom_alignment(alignment)
        for name, values in vectors.items():
            writer.add_tensor(name, np.array(values, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with WeightFile(path) as file:
            source = GgufFile(file)
            assert {name: source.numbers(tensor) for name, tensor in source.tensors.items()} == vectors


TOKENS = [str(id) for id in range(300)]
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 2048,
    "tokenizer.ggml.tokens": TOKENS,
}
STRETCHED = 0.1 * math.log(4.0) + 1.0  # what yarn multiplies cos and sin by
YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
TRAINED = {"llama.rope.scaling.original_context_length": 512}
NUMBERS = {"attn_factor": 1.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
PLAIN = {
    "num_kv_heads": 4,
    "head_dim": 16,
    "vocab": 300,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rotary_dim": 0,
}
STATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, PLAIN),
    ({"llama.attention.head_count_kv": 2}, {"num_kv_heads": 2}),
    ({"llama.attention.key_length": 32, "llama.attention.value_length": 32}, {"head_dim": 32}),
    ({"llama.vocab_size": 320}, {"vocab": 320}),
    ({"llama.rope.scale_linear": 2.0}, {"rope_scaling": RopeScaling("linear", 2.0)}),
    ({**YARN, **TRAINED}, {"rope_scaling": RopeScaling("yarn", 4.0, 512, STRETCHED, 32.0, 1.0)}),
    (
        {**YARN, **TRAINED, **{f"llama.rope.scaling.{name}": value for name, value in NUMBERS.items()}},
        {"rope_scaling": RopeScaling("yarn", 4.0, 512, 1.5 * STRETCHED, 16.0, 2.0)},
    ),
]


def test_metadata_mean_what_they_mean_to_llama_cpp() -> None:
    """What is left out as well. A factor of attention comes on top of what yarn has by itself."""
    for given, expected in STATED:
        config = parse_config(config_of_gguf({**METADATA, **given}, {"output.weight"}, {}, "x"), "x")
        assert {name: getattr(config, name) for name in expected} == expected


# ---------------------------------------------------------------------------------------------------- foreign

FOREIGN = [
    (
        "general.architecture",
        "mamba",
        "'mamba' is not supported; supported are llama, qwen2, qwen2moe, qwen3",
    ),
    (
        "tokenizer.ggml.pre",
        "deepseek",
        "'deepseek' is not supported; supported are smollm, gpt-2",
    ),
    ("tokenizer.ggml.model", "bert", "tokenizer model 'bert' is not supported; supported are gpt2 and llama"),
    ("tokenizer.ggml.model", "llama", "has no usable tokenizer.ggml.scores"),
    ("llama.rope.scaling.type", "yarn²", "rope scaling of type 'yarn²'"),
]


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    for key, value, message in FOREIGN:
        with pytest.raises(ModelError, match=message):
            converted(write_tiny_gguf(tmp_path / "tiny.gguf", metadata={key: value}))


def test_tensors_that_do_not_fit_the_metadata_are_named(tmp_path: Path, pristine: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(pristine.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_Xown.weight"))
    with pytest.raises(
        ModelError,
        match=r"missing tensors: model\.layers\.1\.mlp\.down_proj\.weight; unexpected tensors: "
        r"blk\.1\.ffn_Xown\.weight",
    ):
        converted(path)


def test_encodings_are_decoded_as_ggml_defines_them(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    plain = tiny_tensors(TINY_LLAMA)[name].numpy()
    for kind in ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16"):

        def encoding_of(tensor: str, kind: str = kind) -> str:
            return kind if tensor == name else "F32"

        weights = converted(write_tiny_gguf(tmp_path / f"{kind}.gguf", encoding_of=encoding_of))
        up = weights["layers.0.gate_up"][TINY_LLAMA.ffn :].numpy()
        encoding = gguf.GGMLQuantizationType[kind]
        assert np.array_equal(up, gguf.dequantize(gguf.quantize(plain, encoding), encoding))
        assert 0 < np.abs(up - plain).max() < 0.2

"""Model directories: what loads, and what each kind of damage is answered with."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.errors import ModelError
from penstock.models import hashed_file
from penstock.models.hashed_file import WeightFile
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress, silent
from penstock.models.weights import INDEX, layout, load_directory, read_header, weight_files
from penstock.testing.tiny_models import TINY_LLAMA, TINY_QWEN3, tiny_tensors, write_tiny_model

CPU = torch.device("cpu")


def load(
    directory: Path, config: ModelConfig = TINY_LLAMA, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return load_directory(directory, config, CPU, dtype, silent).tensors


def test_fused_tensors_hold_their_parts_in_order_and_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    for config, shards in ((TINY_LLAMA, 1), (TINY_LLAMA, 3), (TINY_QWEN3, 1), (TINY_QWEN3, 3)):
        parts = tiny_tensors(config)
        stored = {name: tensor.half() if shards == 3 else tensor for name, tensor in parts.items()}
        model = write_tiny_model(
            tmp_path / f"{config.architecture}{shards}", config, shards=shards, tensors=stored
        )
        weights = load(model, config, torch.bfloat16)
        q, k, v = (stored[f"model.layers.1.self_attn.{name}_proj.weight"].bfloat16() for name in "qkv")
        assert torch.equal(weights["layers.1.qkv"], torch.cat((q, k, v)))
        assert torch.equal(weights["embed"], stored["model.embed_tokens.weight"].bfloat16())
        assert ("head" in weights) == (not config.tied_embeddings)
        for file in model.glob("*.safetensors"):  # loaded weights do not depend on the file any more
            file.write_bytes(b"\0" * file.stat().st_size)
        assert torch.equal(weights["layers.1.qkv"], torch.cat((q, k, v)))


def test_everything_wrong_with_names_and_shapes_is_said_at_once(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY_LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.norm.weight"] = torch.ones(65)
    tensors["lm_head.weight"] = torch.zeros(512, 64, dtype=torch.int8)
    with pytest.raises(ModelError) as caught:
        load(write_tiny_model(tmp_path / "model", tensors=tensors))
    message = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected tensors: model.layers.0.self_attn.q_proj.bias" in message
    assert "misshapen tensors: model.norm.weight is [65], expected [64]" in message
    assert "dtypes other than F32, BF16, F16: lm_head.weight is I8" in message


def test_a_tied_output_in_a_file_is_that_of_the_embeddings_or_refused(tmp_path: Path) -> None:
    """Others use both matrices, or the embeddings alone: the config has to say what is meant."""
    tensors = tiny_tensors(TINY_QWEN3)
    embed = tensors["model.embed_tokens.weight"]
    changed = embed.clone()
    changed[-1, -1] += 1.0
    for other in (changed, embed[:-1].clone(), embed.to(torch.int8)):
        path = write_tiny_model(
            tmp_path / "other", TINY_QWEN3, tensors={**tensors, "lm_head.weight": other}, shards=3
        )
        with pytest.raises(ModelError, match=r"tie_word_embeddings is true, but lm_head\.weight is another"):
            load(path, TINY_QWEN3)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)  # no surprise either
    for head in (embed.clone(), embed.double().float()):
        path = write_tiny_model(tmp_path / "same", TINY_QWEN3, tensors={**tensors, "lm_head.weight": head})
        assert "head" not in load(path, TINY_QWEN3)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    rounded["lm_head.weight"] = rounded["model.embed_tokens.weight"].float()  # the same in another dtype
    load(write_tiny_model(tmp_path / "rounded", TINY_QWEN3, tensors=rounded), TINY_QWEN3)


def test_a_damaged_file_is_a_model_error_that_names_it(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model") / "model.safetensors"
    good = path.read_bytes()
    damage = {
        "truncated data": good[:-1000],
        "empty": b"",
        "huge header length": b"\xff" * 8 + good[8:],
        "flipped bit in the header": good[:8] + bytes([good[8] ^ 0x40]) + good[9:],
        "trailing garbage": good + bytes(64),
        "another format": b"\x80\x04pickle" + bytes(1000),
    }
    for data in damage.values():
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"model\.safetensors is (damaged or )?not a safetensors"):
            load(path.parent)


def test_any_damage_of_a_header_is_found_where_the_formats_own_library_finds_it(tmp_path: Path) -> None:
    """But for a dtype that neither knows: that is refused only where the model has the tensor."""
    path = tmp_path / "x.safetensors"
    tensors = {
        "a": torch.ones(3, 4),
        "b": torch.zeros(5, dtype=torch.bfloat16),
        "c": torch.zeros(2, dtype=torch.float16),
        "d": torch.zeros(0, 3),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    good = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        data = bytearray(good)
        for at in random.integers(0, good.index(b"}}") + 10, random.integers(1, 4)):
            data[at] = random.choice(list(b'0123456789,"[]{}:FB\xff'))
        path.write_bytes(data)
        try:
            with WeightFile(path) as file:
                ours = {
                    name: (list(tensor.shape), tensor.dtype) for name, tensor in read_header(file).items()
                }
        except ModelError as error:
            ours = str(error)
        try:
            with safe_open(path, "pt") as opened:
                theirs = {
                    name: (opened.get_slice(name).get_shape(), opened.get_slice(name).get_dtype())
                    for name in opened.keys()  # noqa: SIM118
                }
        except SafetensorError as error:
            theirs = str(error)
        if isinstance(theirs, str) and "unknown variant" in theirs:
            continue
        assert isinstance(ours, str) == isinstance(theirs, str), (data, ours, theirs)
        assert isinstance(ours, str) or ours == theirs
        refused += isinstance(ours, str)
    assert 100 < refused < 200


def test_directories_without_one_model_say_what_they_want(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must hold model\.safetensors"):
        load(tmp_path)
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"a\.safetensors, b\.safetensors"):
        load(tmp_path)


def test_what_lies_beside_the_weights_is_not_read_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    """People leave adapters, and copies in another precision, where the weights are."""
    directory = write_tiny_model(tmp_path / "model")
    (directory / "adapter_model.safetensors").write_bytes(b"something else")
    assert weight_files(directory) == (directory / "model.safetensors",)
    directory = write_tiny_model(tmp_path / "shards", shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks weight files that its index names: model-00002-of-00003"):
        load(directory)


def saved_over_shards(directory: Path, num_left: int) -> dict[str, torch.Tensor]:
    """One file beside the index of three shards, of which so many are left."""
    write_tiny_model(directory, shards=3)
    for shard in sorted(directory.glob("*.safetensors"))[num_left:]:
        shard.unlink()
    tensors = tiny_tensors(TINY_LLAMA)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1.0
    save_file(tensors, directory / "model.safetensors")
    return tensors


def test_a_file_saved_over_shards_is_the_new_model_unless_some_are_left(tmp_path: Path) -> None:
    """`transformers` leaves the index and removes the shards."""
    tensors = saved_over_shards(tmp_path / "new", 0)
    assert torch.equal(load(tmp_path / "new")["norm"], tensors["model.norm.weight"])
    for num_left in (1, 3):
        saved_over_shards(tmp_path / str(num_left), num_left)
        with pytest.raises(ModelError, match=r"two models: .*-00001-of-00003.*remove one of them"):
            load(tmp_path / str(num_left))


def test_an_index_that_cannot_be_used_is_a_model_error(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", shards=2)
    deep = '{"weight_map": ' + "[" * 200_000 + "]" * 200_000 + "}"
    outside = '{"weight_map": {"x": "../other/model.safetensors"}}'
    for text in ("{", "{}", deep, outside):
        (directory / INDEX).write_text(text)
        with pytest.raises(ModelError, match="outside its directory" if text == outside else INDEX):
            load(directory)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", shards=2)
    save_file(tiny_tensors(TINY_LLAMA), directory / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match="repeats tensors"):
        load(directory)


# ---------------------------------------------------------------------------------------------------- content


def content(directory: Path, progress: Progress = silent) -> dict[str, bytes]:
    return load_directory(directory, TINY_LLAMA, CPU, torch.float32, progress).content


def test_the_content_follows_the_bytes_of_the_weights_and_not_the_files_they_are_in(tmp_path: Path) -> None:
    first = content(write_tiny_model(tmp_path / "first"))
    assert list(first) == [part.name for weight in layout(TINY_LLAMA) for part in weight.parts]
    assert len(set(first.values())) == len(first)
    assert content(write_tiny_model(tmp_path / "shards", shards=3)) == first
    assert not set(content(write_tiny_model(tmp_path / "other", seed=1)).values()) & set(first.values())


def test_every_byte_of_a_tensor_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # matrices are several pieces, of several rows each, the last one shorter
    monkeypatch.setattr(hashed_file, "PIECE_BYTES", 1000)
    directory = write_tiny_model(tmp_path / "model")
    first = content(directory)
    with WeightFile(directory / "model.safetensors") as file:
        stored = read_header(file)["model.layers.1.mlp.up_proj.weight"]
    path = directory / "model.safetensors"
    good = path.read_bytes()
    for at in (0, 1, 999, 1000, 1001, stored.num_bytes // 2, stored.num_bytes - 1):
        bad = bytearray(good)
        bad[stored.start + at] ^= 1
        path.write_bytes(bad)
        found = content(directory)
        assert {name for name in first if found[name] != first[name]} == {"model.layers.1.mlp.up_proj.weight"}


def test_pieces_of_any_size_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny_model(tmp_path / "model")
    whole = load(directory)
    for piece_bytes in (1, 300, 5000):
        monkeypatch.setattr(hashed_file, "PIECE_BYTES", piece_bytes)
        pieced = load(directory)
        assert all(torch.equal(pieced[name], whole[name]) for name in whole)


def test_the_same_bytes_under_another_dtype_are_other_content(tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in tiny_tensors(TINY_LLAMA).items()}
    half = content(write_tiny_model(tmp_path / "half", tensors=tensors))
    relabelled = {name: tensor.view(torch.bfloat16) for name, tensor in tensors.items()}
    assert not set(content(write_tiny_model(tmp_path / "bfloat", tensors=relabelled)).values()) & set(
        half.values()
    )


# ---------------------------------------------------------------------- files that change while they are read


class AtFirstTensor:
    """A Progress that does something to the files once, when the first tensor is there and most are yet to be
    read."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def __call__(self, stage: str, done: int, total: int) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


@pytest.fixture
def one_piece_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the next tensor is read before it is asked for."""
    monkeypatch.setattr(hashed_file, "_MAX_THREADS", 1)
    monkeypatch.setattr(hashed_file, "_AHEAD", 1)


@pytest.mark.usefixtures("one_piece_ahead")
def test_weights_that_are_renamed_over_while_they_are_read_are_the_old_ones_to_the_end(
    tmp_path: Path,
) -> None:
    directory, other = write_tiny_model(tmp_path / "model"), write_tiny_model(tmp_path / "other", seed=1)
    expected, found = content(directory), other / "model.safetensors"
    assert (
        content(directory, AtFirstTensor(lambda: found.replace(directory / "model.safetensors"))) == expected
    )
    assert content(directory) != expected


@pytest.mark.usefixtures("one_piece_ahead")
def test_weights_that_are_written_over_while_they_are_read_are_a_model_error(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    path = directory / "model.safetensors"
    other = (write_tiny_model(tmp_path / "other", seed=1) / "model.safetensors").read_bytes()
    os.utime(path, (1, 1))
    with pytest.raises(ModelError, match=r"model\.safetensors was written to while it was read"):
        content(directory, AtFirstTensor(lambda: path.write_bytes(other)))


@pytest.mark.usefixtures("one_piece_ahead")
def test_any_shard_that_is_written_over_while_they_are_read_is_a_model_error(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        directory = write_tiny_model(tmp_path / "model", shards=3)
        path = directory / f"model-0000{number}-of-00003.safetensors"
        os.utime(path, (1, 1))
        with pytest.raises(ModelError, match=rf"model-0000{number}-of-00003\.safetensors was written to"):
            content(directory, AtFirstTensor(functools.partial(path.write_bytes, path.read_bytes())))


@pytest.mark.usefixtures("one_piece_ahead")
def test_bytes_that_are_written_over_unnoticed_are_digested_as_they_were_loaded(tmp_path: Path) -> None:
    """By a writer who puts the modification time back: what was read before is the old, what was read after
    is the new, and so say the digests."""
    directory, other = write_tiny_model(tmp_path / "model"), write_tiny_model(tmp_path / "other", seed=1)
    path = directory / "model.safetensors"
    stamp = path.stat().st_mtime_ns
    old, new, new_bytes = content(directory), content(other), (other / "model.safetensors").read_bytes()
    new_weights = load(other)

    def replace() -> None:
        path.write_bytes(new_bytes)
        os.utime(path, ns=(stamp, stamp))

    found = load_directory(directory, TINY_LLAMA, CPU, torch.float32, AtFirstTensor(replace))
    first, *_, last = layout(TINY_LLAMA)
    assert found.content[first.parts[0].name] == old[first.parts[0].name]
    assert found.content[last.parts[0].name] == new[last.parts[0].name]
    assert torch.equal(found.tensors[last.name], new_weights[last.name]) and not torch.equal(
        found.tensors[first.name], new_weights[first.name]
    )


@pytest.mark.usefixtures("one_piece_ahead")
def test_weights_that_are_cut_short_while_they_are_read_are_a_model_error(tmp_path: Path) -> None:
    """Under a mapping this would end the process with a bus error."""
    directory = write_tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"model\.safetensors ends at byte \d+: it was cut short"):
        content(directory, AtFirstTensor(lambda: os.truncate(directory / "model.safetensors", 4096)))

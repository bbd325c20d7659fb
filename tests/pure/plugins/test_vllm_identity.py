"""Which servers share blocks: a difference in anything that decides what a block's bytes mean gives another
space. Weights are known by their content."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.plugins.vllm_host import Configured, digest_of, facts_of
from penstock.plugins.weights import weights_digest
from tests.support.fake_vllm import NEWEST, OLDEST, HfConfig, SlidingWindowSpec, config_of

Change = Callable[[Any, Any], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-00001.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "model-00002.safetensors").write_bytes(b"more")
    (folder / "config.json").write_text("{}")
    return folder


def digest(model: Path, change: Change | None = None, **given: Any) -> bytes:
    """`change` gets the VllmConfig and the KVCacheConfig."""
    config = config_of(model)
    if change is not None:
        change(*config)
    given = {"offload": {"block_size": 16}, "version": NEWEST, "device": "cuda NVIDIA H200", **given}
    return digest_of(facts_of(Configured(*config), **given))


def setting(path: str, value: Any) -> Change:
    """Of the VllmConfig."""

    def change(vllm: Any, _: Any) -> None:
        *parts, name = path.split(".")
        of = vllm
        for part in parts:
            of = getattr(of, part)
        assert getattr(of, name) != value
        setattr(of, name, value)

    return change


def add_window(_: Any, kv_cache: Any) -> None:
    spec = SlidingWindowSpec(block_size=16, sliding_window=128)
    kv_cache.kv_cache_groups.append(SimpleNamespace(layer_names=["layers.1"], kv_cache_spec=spec))


def draft(name: str) -> Any:
    return SimpleNamespace(method=name, draft_model_config=None)


CHANGES: dict[str, Change] = {
    **{
        path: setting(path, value)
        for path, value in {
            "model_config.dtype": "float16",
            "model_config.quantization": "fp8",
            "model_config.max_model_len": 8192,
            "model_config.disable_sliding_window": True,
            "model_config.hf_config": HfConfig({"hidden_size": 64, "rope_theta": 5e5}),
            "cache_config.cache_dtype": "fp8_e4m3",
            "cache_config.kv_cache_layout": "HND",
            "cache_config.prefix_caching_hash_algo": "xxhash",
            "parallel_config.tensor_parallel_size": 2,
            "parallel_config.pipeline_parallel_size": 2,
            "parallel_config.prefill_context_parallel_size": 2,
            "parallel_config.decode_context_parallel_size": 2,
            "parallel_config.world_size": 2,
            "parallel_config.cp_kv_cache_interleave_size": 16,
            "attention_config.backend": "FLASHINFER",
            "load_config.load_format": "bitsandbytes",
            "use_v2_model_runner": True,
            "speculative_config": draft("ngram"),
        }.items()
    },
    "another group": add_window,
    "other layers in a group": lambda _, kv: kv.kv_cache_groups[0].layer_names.append("layers.1"),
    "another block size": lambda _, kv: setattr(kv.kv_cache_groups[0].kv_cache_spec, "block_size", 32),
    "another order of layers": lambda _, kv: kv.kv_cache_tensors[0].layers.insert(0, "layers.1"),
    "another width of a block": lambda _, kv: setattr(kv.kv_cache_tensors[0], "block_stride", 2048),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_server_that_differs_shares_nothing(model: Path, name: str) -> None:
    """Holds invariant 13: the scope covers what the block hash leaves out."""
    assert digest(model, CHANGES[name]) != digest(model)


@pytest.mark.parametrize(
    "given",
    [
        {"version": "0.34.0"},
        {"device": "cuda NVIDIA B200"},
        {"offload": {"block_size": 64}},
        {"offload": {"block_size": 16, "blocks_per_chunk": 4}},
        {"offload": {"block_size": 16, "canonical_layout": True}},
        {"weights_id": "mine"},
    ],
)
def test_another_host_or_chunk_shares_nothing(model: Path, given: dict[str, Any]) -> None:
    assert digest(model, **given) != digest(model)


@pytest.mark.parametrize("name", ["VLLM_KV_CACHE_LAYOUT", "VLLM_PP_LAYER_PARTITION"])
def test_an_environment_that_changes_the_layout_shares_nothing(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(model)
    monkeypatch.setenv(name, "HND")
    assert digest(model) != before


def test_what_changes_no_block_changes_no_identity(model: Path, tmp_path: Path) -> None:
    """Memory, the folder's name, and which rank of several equal ones it is."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(model, moved)
    (moved / "tokenizer.json").write_text("{}")

    def change(vllm: Any, kv_cache: Any) -> None:
        vllm.parallel_config.data_parallel_index = 3
        kv_cache.num_blocks = kv_cache.kv_cache_tensors[0].size = 7

    assert digest(moved, change) == digest(model)


def test_weights_of_the_same_size_and_time_are_told_apart(model: Path) -> None:
    file = model / "model-00001.safetensors"
    before, was = digest(model), file.stat()
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert file.stat().st_size == was.st_size and file.stat().st_mtime_ns == was.st_mtime_ns
    assert digest(model) != before


def test_weights_are_read_in_pieces_that_cannot_change_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.plugins.weights._PIECE_BYTES", 4)
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(b"aaaabbbbcc")
    other.write_bytes(b"bbbbaaaacc")
    assert weights_digest(one) != weights_digest(other)
    other.write_bytes(b"aaaabbbbcc")
    assert weights_digest(one) == weights_digest(other)


def test_bytes_cannot_move_from_one_file_to_the_next(tmp_path: Path) -> None:
    digests = []
    for name, cut in (("one", 2), ("other", 4)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.bin").write_bytes(b"abcdef"[:cut])
        (folder / "b.bin").write_bytes(b"abcdef"[cut:])
        digests.append(weights_digest(folder))
    assert digests[0] != digests[1]


def test_random_weights_are_known_by_their_seed(model: Path) -> None:
    def dummy(seed: int) -> Change:
        def change(vllm: Any, _: Any) -> None:
            vllm.load_config.load_format = "dummy"
            vllm.model_config.seed = seed

        return change

    assert digest(model, dummy(1)) == digest(model, dummy(1)) != digest(model, dummy(2))


def test_a_draft_model_in_the_same_blocks_counts(model: Path, tmp_path: Path) -> None:
    def with_draft(folder: Path) -> Change:
        drafts = config_of(folder)[0].model_config
        return setting("speculative_config", SimpleNamespace(method="eagle3", draft_model_config=drafts))

    digests = set()
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(name.encode())
        digests.add(digest(model, with_draft(folder)))
    assert len(digests | {digest(model)}) == 3


def test_weights_that_are_not_here_need_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="give the option weights_id"):
        digest(Path("nobody/nothing-of-that-name"))
    one, other = (digest(Path("nobody/nothing"), weights_id=name) for name in ("one", "other"))
    assert one != other


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="finds no weights"):
        weights_digest(tmp_path)


def test_a_version_that_hides_an_attribute_is_refused(model: Path) -> None:
    """A field that is left out would let two models share blocks."""
    with pytest.raises(ConfigError, match="has no quantization"):
        digest(model, lambda vllm, _: delattr(vllm.model_config, "quantization"))


def test_attributes_that_older_versions_lack_are_no_error(model: Path) -> None:
    config = config_of(model, OLDEST)
    assert not hasattr(config[0].cache_config, "kv_cache_layout")
    found = facts_of(Configured(*config), {}, OLDEST, "cpu")
    assert found["cache.kv_cache_layout"] == "-"

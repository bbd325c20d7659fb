"""GGUF files as model directories: converted once, kept in the cache. Owns the mapping of names and numbers, and the cached copies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from penstock.errors import ModelError
from penstock.models.cache import DIGEST_BYTES, cache_dir, file_digest, remember_digest, sync_directory
from penstock.models.dimensions import ARCHITECTURES, parse_config
from penstock.models.gguf_file import GgufFile, GgufTensor
from penstock.models.gguf_tokenizer import tokenizer_files
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress
from penstock.models.safetensors_dir import read_json
from penstock.models.weights import check_tensors

CONVERTER_VERSION = 2  # part of every cached copy's name: raise it whenever the converted bytes or files change
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
_ABANDONED_S = 24 * 3600.0  # a temporary directory this old belongs to a process that was killed
_PIECE_ROWS = 4096

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Encoding(NamedTuple):
    """How a tensor's rows lie in the GGUF file, and the safetensors dtype they become."""

    row_bytes: int
    dtype: str
    plain: bool  # the bytes are already what safetensors stores


def converted_directory(path: Path, progress: Progress) -> Path:
    """The cached model directory of a GGUF file, made now if there is none or it no longer is what was written."""
    digest = file_digest(path, f"hashing {path.name}", progress)
    target = cache_dir() / "gguf" / f"{digest.hex()[:32]}-v{CONVERTER_VERSION}"
    if target.is_dir() and _intact(target, progress):
        return target
    source = GgufFile(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix="tmp-"))
        try:
            weights_digest = _convert(source, temporary, progress)
            _publish(temporary, target, progress)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        where = f"{target.parent}: {error.strerror or error}"
        raise ModelError(f"the converted weights cannot be written to {where}; set PENSTOCK_CACHE to another place") from error
    remember_digest(target / WEIGHTS, weights_digest)
    return target


def _intact(directory: Path, progress: Progress) -> bool:
    """Whether the cached copy holds the bytes that were written: a changed file has another mtime and is hashed again."""
    try:
        manifest = read_json(directory / MANIFEST)
        return WEIGHTS in manifest and all(
            file_digest(directory / name, f"checking {name}", progress).hex() == digest for name, digest in manifest.items()
        )
    except ModelError:
        return False


def _publish(temporary: Path, target: Path, progress: Progress) -> None:
    """One rename makes the directory visible, whole. Where one stands already, an intact one stays and a damaged one goes."""
    try:
        os.rename(temporary, target)
    except OSError:
        if _intact(target, progress):
            return
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix="tmp-"))
        os.rename(target, aside)
        os.rename(temporary, target)
        shutil.rmtree(aside, ignore_errors=True)
    sync_directory(target.parent)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob("tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _convert(source: GgufFile, directory: Path, progress: Progress) -> bytes:
    """Write the model directory and return the digest of its weights file."""
    raw = config_from_metadata(source)
    config = parse_config(raw, str(source.path))
    files = {"config.json": json.dumps(raw).encode(), **tokenizer_files(source.metadata, str(source.path))}
    manifest = {name: hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest() for name, data in files.items()}
    with (directory / WEIGHTS).open("wb") as file:
        weights_digest = _write_weights(source, config, file, progress)
        file.flush()
        os.fsync(file.fileno())
    manifest[WEIGHTS] = weights_digest.hex()
    for name, data in {**files, MANIFEST: json.dumps(manifest).encode()}.items():
        with (directory / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(directory)
    return weights_digest


def config_from_metadata(source: GgufFile) -> dict[str, Any]:
    """The config.json that a GGUF file's metadata amounts to."""
    kinds = {kind: name for name, kind in ARCHITECTURES.items()}
    kind = source.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in kinds:
        raise ModelError(f"{source.path}: architecture {kind!r} is not supported; supported are {', '.join(kinds)}")
    entry = _Entries(source.metadata, kind)
    if entry("expert_count", 0) or entry("attention.sliding_window", 0):
        raise ModelError(f"{source.path}: experts and sliding windows are not supported")
    heads, hidden = entry("attention.head_count"), entry("embedding_length")
    head_dim = entry("attention.key_length") or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None)
    if entry("attention.value_length", head_dim) != head_dim or entry("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{source.path}: keys, values and rotated dimensions of unequal width are not supported")
    scaling = entry("rope.scaling.type", "none")
    if "rope_freqs.weight" in source.tensors or entry("rope.scale_linear", 1.0) != 1.0:
        scaling = "frequency factors"
    vocabulary = source.metadata.get("tokenizer.ggml.tokens")
    return {
        "architectures": [kinds[kind]],
        "model_type": kind,  # not ours to read: it lets others load the converted directory
        "num_hidden_layers": entry("block_count"),
        "hidden_size": hidden,
        "intermediate_size": entry("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": entry("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": entry("vocab_size", len(vocabulary) if isinstance(vocabulary, list) else None),
        "max_position_embeddings": entry("context_length"),
        "rope_theta": entry("rope.freq_base", 10000.0),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
        "rms_norm_eps": entry("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
    }


class _Entries:
    """Metadata under an architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata, self._prefix = metadata, architecture

    def __call__(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)


def _write_weights(source: GgufFile, config: ModelConfig, file: BinaryIO, progress: Progress) -> bytes:
    """Stream every tensor into a safetensors file, one piece of rows in memory at a time."""
    named = {_name(tensor.name): tensor for tensor in source.tensors.values()}
    encodings = {name: _encoding(tensor, source) for name, tensor in named.items()}
    check_tensors({name: (tensor.shape, encodings[name].dtype) for name, tensor in named.items()}, config, source.path)
    raw = {name: source.raw(tensor, encodings[name].row_bytes) for name, tensor in named.items()}  # all there, before any is written
    header, total = _header(named, encodings)
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    file.write(header)
    state.update(header)
    done = 0
    for name, tensor in named.items():
        permuted = config.architecture == "llama" and name.endswith((".q_proj.weight", ".k_proj.weight"))
        rows = unpermute(raw[name], config.head_dim) if permuted else raw[name]
        for piece in _decoded(rows, tensor, source):
            file.write(piece)
            state.update(piece)
            done += len(piece)
            progress("converting GGUF to safetensors (once)", done, total)
    return state.digest()


def _header(named: Mapping[str, GgufTensor], encodings: Mapping[str, _Encoding]) -> tuple[bytes, int]:
    """A safetensors header, and the bytes of tensor data that follow it."""
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in named.items():
        dtype = encodings[name].dtype
        start, end = end, end + math.prod(tensor.shape) * (4 if dtype == "F32" else 2)
        entries[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)  # tensors start on a cache line
    return len(text).to_bytes(8, "little") + text, end


def _name(gguf_name: str) -> str:
    """The name in safetensors files; one that has no equal there stays, and is found unexpected."""
    stem, _, suffix = gguf_name.rpartition(".")
    if suffix == "weight" and stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.weight"
    prefix, _, rest = stem.partition(".")
    block, _, inner = rest.partition(".")
    if suffix == "weight" and prefix == "blk" and inner in LAYER_NAMES:
        return f"model.layers.{block}.{LAYER_NAMES[inner]}.weight"
    return gguf_name


def _encoding(tensor: GgufTensor, source: GgufFile) -> _Encoding:
    import gguf  # only a conversion needs it, and not every machine that runs converted weights has it

    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{source.path}: tensor {tensor.name} has an unknown encoding {tensor.kind}") from error
    if tensor.shape[-1] % block:
        raise ModelError(f"{source.path} is damaged: rows of {tensor.name} are {tensor.shape[-1]} long, not a multiple of {block}")
    row_bytes = tensor.shape[-1] // block * block_bytes
    plain = kind.name in ("F32", "F16", "BF16")
    return _Encoding(row_bytes, kind.name if plain else "F32", plain)


def _decoded(rows: np.ndarray[Any, Any], tensor: GgufTensor, source: GgufFile) -> Iterator[memoryview]:
    """Bytes as safetensors stores them, a piece of rows at a time."""
    import gguf

    plain = _encoding(tensor, source).plain
    for start in range(0, len(rows), _PIECE_ROWS):
        piece = np.ascontiguousarray(rows[start : start + _PIECE_ROWS])
        if not plain:
            try:
                piece = gguf.dequantize(piece, gguf.GGMLQuantizationType(tensor.kind)).view(np.uint8)
            except NotImplementedError as error:
                raise ModelError(f"{source.path}: tensor {tensor.name}: {error}") from error
        yield piece.reshape(-1).data


def unpermute(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Llama's q and k rows are stored with the two halves of each head interleaved; put the halves back one after the other."""
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)

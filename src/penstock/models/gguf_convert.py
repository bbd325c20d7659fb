"""GGUF files as model directories: converted once, kept in the cache directory. Owns the conversion and the cached copies."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch

from penstock.errors import ModelError
from penstock.models.architecture import TensorSpec, WeightSpec
from penstock.models.embedded import cache_dir
from penstock.models.forms import Forms, Quants, matrix_of_quants, takes_4_bits
from penstock.models.gguf_file import GgufEncoding, GgufFile, GgufTensor
from penstock.models.hashed_file import HashedFile, WeightFile, piece_digest, piece_rows
from penstock.models.model import ModelConfig, Weight
from penstock.models.progress import Progress
from penstock.models.registry import architecture_of, config_of_gguf, layout, parse_config
from penstock.models.rotary import FACTOR_TENSORS
from penstock.models.tokenizer_files import tokenizer_files
from penstock.models.weights import DTYPES, check_tensors, empty_formed, listed, put_rows, read_json, tensor_digest

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
Content = Mapping[str, bytes]  # digests of tensors by name, as `tensor_digest` makes them
Load = Callable[[Path], tuple[Loaded, Content]]

CONVERTER_VERSION = 5  # part of every cached copy's name: raise it whenever the converted bytes or files change
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
FILES = frozenset({"config.json", "tokenizer.json"})  # that every copy has besides
_ABANDONED_S = 24 * 3600.0  # a temporary directory this old belongs to a process that was killed


def load_converted(path: Path, load: Load[Loaded], progress: Progress) -> Loaded:
    """What `load` makes of the GGUF file as a model directory: of the cached copy, or of one made now if there is none or it is not what
    was written. `load` says what it has read, and that is compared: whatever happens to a copy, it is not served."""
    with HashedFile(path, progress) as file:
        target = cache_dir() / "gguf" / f"{file.digest.hex()[:32]}-v{CONVERTER_VERSION}"
        loaded = _load_cached(target, file.digest, load) if target.is_dir() else None
        if loaded is None:
            loaded = _make(GgufFile(file), file.digest, target, load, progress)
    return loaded


def read_gguf(source: GgufFile, config: ModelConfig, forms: Forms, in_4_bits: Collection[str], progress: Progress) -> dict[str, Weight]:
    """The model's weights in `forms`, nothing is written. Those `in_4_bits` are taken as they are, where `forms` has 4 bits; all others are
    decoded a piece at a time and rounded to where they stay."""
    named = check_gguf(source, config)
    total, done = sum(weight.numel for weight in layout(config)), 0
    weights: dict[str, Weight] = {}
    for weight in layout(config):
        if forms.few_rows_of_4 and weight.name in in_4_bits:
            weights[weight.name] = matrix_of_quants(_quants(source, weight, named, config), forms)
        else:
            weights[weight.name] = empty_formed(weight, config, forms)
            _fill(weights[weight.name], source, weight, named, config)
        done += weight.numel
        progress("loading weights", done, total)
    return weights


def _fill(out: Weight, source: GgufFile, weight: WeightSpec, named: Mapping[str, GgufTensor], config: ModelConfig) -> None:
    for part, room in zip(weight.parts, out.split([part.shape[0] for part in weight.parts]), strict=True):
        tensor = named[part.name]
        encoding = source.encoding(tensor)
        pieces = source.decoded(tensor, _interleaved(part, config))
        for rows, piece in zip(piece_rows(tensor.num_rows, tensor.shape[-1] * encoding.item_bytes), pieces, strict=True):
            put_rows(room, rows, torch.frombuffer(bytearray(piece) if piece.readonly else piece, dtype=DTYPES[encoding.dtype]))


def _quants(source: GgufFile, weight: WeightSpec, named: Mapping[str, GgufTensor], config: ModelConfig) -> Quants:
    pieces = [piece for part in weight.parts for piece in source.quants(named[part.name], _interleaved(part, config))]
    return Quants(*(torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*pieces, strict=True)))


def _interleaved(part: TensorSpec, config: ModelConfig) -> int | None:
    return config.head_dim if part.name.endswith(architecture_of(config).interleaved_in_gguf) else None


def weights_in_4_bits(source: GgufFile, config: ModelConfig) -> frozenset[str]:
    """The model's matrices that can be held in 4 bits without being rounded to them: the file has all their parts so. Embeddings and the
    head are not among them, whose products are exact ones of 8 bits; nor are rows that the model puts into another order."""
    named = check_gguf(source, config)
    reordered = "qkv" if config.rotary_dim else None
    return frozenset(
        weight.name
        for weight in layout(config)
        if weight.name.startswith("layers.") and weight.name.rpartition(".")[2] != reordered and takes_4_bits(weight.shape)
        if all(source.has_quants(named[part.name]) for part in weight.parts)
    )


def is_quantized(source: GgufFile) -> bool:
    """Whether any tensor is stored in less than 16 bits."""
    return not all(source.encoding(tensor).plain for tensor in source.tensors.values())


def _load_cached(target: Path, source: bytes, load: Load[Loaded]) -> Loaded | None:
    """None: another process has just moved the copy away, or it is damaged."""
    try:
        return _load_checked(target, source, load)
    except (ModelError, OSError) as error:
        log.warning("the converted copy in %s is not usable and is made again: %s", target, error)
        return None


def _load_checked(directory: Path, source: bytes, load: Load[Loaded]) -> Loaded:
    manifest = read_json(directory / MANIFEST)
    files, tensors = manifest.get("files"), manifest.get("tensors")
    if manifest.get("source") != source.hex() or not isinstance(files, dict) or not isinstance(tensors, dict) or not files.keys() >= FILES:
        raise ModelError(f"{directory / MANIFEST} does not belong to this file")
    foreign = {path.name for path in directory.iterdir()} - files.keys() - {MANIFEST, WEIGHTS}
    if foreign:  # a loader would take an index or a chat template for the model's
        raise ModelError(f"{directory} holds files that were not written there: {listed(sorted(foreign))}")
    for name, digest in files.items():
        with WeightFile(directory / name) as file:
            if piece_digest(file.read(0, file.num_bytes)).hex() != digest:
                raise ModelError(f"{directory / name} is not what was written")
    loaded, content = load(directory)
    changed = [name for name, digest in content.items() if tensors.get(name) != digest.hex()]
    if changed:
        raise ModelError(f"{directory / WEIGHTS} is not what was written: {listed(changed)}")
    return loaded


def _make(source: GgufFile, digest: bytes, target: Path, load: Load[Loaded], progress: Progress) -> Loaded:
    """Convert into a directory of our own, load from there, and leave it at `target` for later starts. Processes that do so at the same
    time do not meet: each loads its own."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        _discard(target)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix="tmp-"))
        try:
            _convert(source, digest, temporary, progress)
            loaded = _load_checked(temporary, digest, load)
            _publish(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        where = f"{target.parent}: {error.strerror or error}"
        raise ModelError(f"the converted weights cannot be written to {where}; set PENSTOCK_CACHE to another place") from error
    return loaded


def _discard(target: Path) -> None:
    """Away with a copy in one rename, so that no reader finds half of it under its name."""
    if target.is_dir():
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix="tmp-"))
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(target, aside)
        shutil.rmtree(aside, ignore_errors=True)


def _publish(temporary: Path, target: Path) -> None:
    """One rename makes the directory visible, whole. One that another process has published meanwhile stays."""
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync_directory(target.parent)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob("tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _convert(source: GgufFile, digest: bytes, directory: Path, progress: Progress) -> None:
    """Write the model directory, and the manifest that says what was written and from what."""
    raw = gguf_config(source)
    config = parse_config(raw, str(source.path))
    files = {"config.json": json.dumps(raw).encode(), **tokenizer_files(source.metadata, str(source.path))}
    with (directory / WEIGHTS).open("wb") as file:
        tensors = _write_weights(source, config, file, progress)
        file.flush()
        os.fsync(file.fileno())
    manifest = {
        "source": digest.hex(),
        "files": {name: piece_digest(data).hex() for name, data in files.items()},
        "tensors": {name: content.hex() for name, content in tensors.items()},
    }
    for name, data in {**files, MANIFEST: json.dumps(manifest).encode()}.items():
        with (directory / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(directory)


def gguf_config(source: GgufFile) -> dict[str, Any]:
    """The config.json that a file amounts to."""
    factors = {name: source.numbers(source.tensors[name]) for name in FACTOR_TENSORS if name in source.tensors}
    return config_of_gguf(source.metadata, source.tensors, factors, str(source.path))


def check_gguf(source: GgufFile, config: ModelConfig) -> dict[str, GgufTensor]:
    """The model's tensors by their names in safetensors files. All of them are there, in the shapes that the model has."""
    names = _names(config)
    # One without a place stays, and is found unexpected.
    named = {names.get(name, name): tensor for name, tensor in source.tensors.items() if name not in FACTOR_TENSORS}
    encodings = {name: source.encoding(tensor) for name, tensor in named.items()}
    check_tensors({name: (tensor.shape, encodings[name].dtype) for name, tensor in named.items()}, config, source.path)
    for name, tensor in named.items():  # all there, before any is written
        source.check_inside(tensor, encodings[name].row_bytes)
    return named


def _write_weights(source: GgufFile, config: ModelConfig, file: BinaryIO, progress: Progress) -> dict[str, bytes]:
    """Stream every tensor into a safetensors file, one piece in memory at a time; returns the digests of tensors."""
    named = check_gguf(source, config)
    encodings = {name: source.encoding(tensor) for name, tensor in named.items()}
    header, total = _header(named, encodings)
    file.write(header)
    done = 0
    content = {}
    for name, tensor in named.items():
        digests = []
        for piece in source.decoded(tensor, _interleaved(TensorSpec(name, tensor.shape), config)):
            file.write(piece)
            digests.append(piece_digest(piece))
            done += len(piece)
            progress("converting GGUF to safetensors (once)", done, total)
        content[name] = tensor_digest(TensorSpec(name, tensor.shape), encodings[name].dtype, digests)
    return content


def _header(named: Mapping[str, GgufTensor], encodings: Mapping[str, GgufEncoding]) -> tuple[bytes, int]:
    """A safetensors header, and the bytes of tensor data that follow it."""
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in named.items():
        dtype = encodings[name].dtype
        start, end = end, end + math.prod(tensor.shape) * encodings[name].item_bytes
        entries[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)  # tensors start on a cache line
    return len(text).to_bytes(8, "little") + text, end


def _names(config: ModelConfig) -> dict[str, str]:
    """GGUF's name for each tensor of the model -> its name in safetensors files, as llama.cpp has them."""
    import gguf

    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config.architecture]
    if not kinds:
        raise ModelError(f"the installed gguf package does not know the architecture {config.architecture!r}")
    known = gguf.get_tensor_name_map(kinds[0], config.num_layers)
    names = (part.name for weight in layout(config) for part in weight.parts)
    return {known.get_name(name, (".weight", ".bias")) or name: name for name in names}


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""GGUF files as models: read straight into forms, or converted once to a model directory that is kept in the
cache folder. Owns which of their tensors is which of the model's, the conversion and the cached copies."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import TensorSpec
from penstock.models.embedded import cache_dir
from penstock.models.fields import Fields
from penstock.models.forms import Forms, Quants, matrix_of_quants, takes_4_bits
from penstock.models.gguf_file import GgufFile, GgufTensor
from penstock.models.hashed_file import HashedFile, WeightFile, piece_digest
from penstock.models.model import ModelConfig, Weight
from penstock.models.progress import Progress
from penstock.models.registry import architecture_of, config_of_gguf, layout, parse_config
from penstock.models.rotary import FACTOR_TENSORS
from penstock.models.tokenizer import Tokenizer
from penstock.models.tokenizer_files import load_tokenizer, tokenizer_files
from penstock.models.weights import (
    DTYPES,
    check_tensors,
    each_weight,
    empty_formed,
    fill,
    listed,
    read_json,
    tensor_digest,
)

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
Content = Mapping[str, bytes]  # digests of tensors by name, as `tensor_digest` makes them
Load = Callable[[Path], tuple[Loaded, Content]]

# part of every cached copy's name: raise it whenever the converted bytes or files change
CONVERTER_VERSION = 6
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
FILES = frozenset({"config.json", "tokenizer.json"})  # that every copy has besides
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
_ABANDONED_S = 24 * 3600.0  # a temporary directory this old belongs to a process that was killed


class GgufModel:
    """A GGUF file as a model: its config, and its tensors by their names in safetensors files. All of them
    are there, in the shapes that the model has."""

    def __init__(self, file: WeightFile) -> None:
        self._source, self._where = GgufFile(file), str(file.path)
        metadata, tensors = self._source.metadata, self._source.tensors
        factors = {name: self._source.numbers(tensors[name]) for name in FACTOR_TENSORS if name in tensors}
        self.config_json = config_of_gguf(metadata, tensors, factors, self._where)
        self.config = parse_config(self.config_json, self._where)
        shapes = {part.name: part.shape for weight in layout(self.config) for part in weight.parts}
        names = _names(self.config, shapes)
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in each_expert(tensor for name, tensor in tensors.items() if name not in factors):
            name = names.get(tensor.name, tensor.name)  # one without a place is found unexpected
            if shapes.get(name) == (1, *tensor.shape):
                tensor = tensor._replace(shape=(1, *tensor.shape))
            self._tensors[name] = tensor
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}
        check_tensors(found, self.config, file.path)

    def tokenizer_files(self) -> dict[str, bytes]:
        return tokenizer_files(self._source.metadata, self._where)

    def tokenizer(self) -> Tokenizer:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in self.tokenizer_files().items():
                (Path(folder) / name).write_bytes(data)
            return load_tokenizer(Path(folder), self.config)

    def in_4_bits(self) -> frozenset[str]:
        """The model's matrices that can be held in 4 bits without being rounded to them: the file has all
        their parts so. Embeddings and the head are not among them, whose products are exact ones of 8 bits;
        nor are rows that the model puts into another order."""
        reordered = "qkv" if self.config.rotary_dim else None
        return frozenset(
            weight.name
            for weight in layout(self.config)
            if weight.name.startswith("layers.")
            and weight.name.rpartition(".")[2] != reordered
            and takes_4_bits(weight.shape, weight.name)
            and all(self._source.has_quants(self._tensors[part.name]) for part in weight.parts)
        )

    def read(self, forms: Forms, progress: Progress) -> dict[str, Weight]:
        """The weights in `forms`; nothing is written. Weights in 4 bits are taken unchanged if `forms` has 4
        bits; all others are decoded a piece at a time and rounded in place."""
        in_4_bits = self.in_4_bits() if forms.few_rows_of_4 else ()
        weights: dict[str, Weight] = {}
        for weight in each_weight(self.config, "loading weights", progress):
            if weight.name in in_4_bits:
                slots = [matrix_of_quants(self._quants(parts), forms) for parts in weight.by_slot]
                weights[weight.name] = slots if weight.num_slots else slots[0]
            else:
                weights[weight.name] = empty_formed(weight, self.config, forms)
                fill(weights[weight.name], weight, self._pieces)
        return weights

    def _quants(self, parts: Sequence[TensorSpec]) -> Quants:
        pieces = (piece for part in parts for piece in self._source.quants(*self._of(part.name)))
        return Quants(*map(torch.cat, zip(*pieces, strict=True)))

    def _pieces(self, part: TensorSpec) -> Iterator[tuple[slice, Tensor]]:
        dtype = DTYPES[self._tensors[part.name].dtype]
        for rows, piece in self._decoded(part.name):
            yield rows, torch.frombuffer(piece, dtype=dtype)

    def _decoded(self, name: str) -> Iterator[tuple[slice, Any]]:
        """Its pieces as bytes, with the values that safetensors files have."""
        is_more = name.endswith(architecture_of(self.config).one_more_in_gguf)
        if is_more and self._tensors[name].dtype != "F32":
            raise ModelError(f"{self._where}: {name} must be float32")
        for rows, piece in self._source.decoded(*self._of(name)):
            yield rows, (piece.view(np.float32) - 1).view(np.uint8) if is_more else piece

    def write(self, file: BinaryIO, progress: Progress) -> dict[str, bytes]:
        """Stream every tensor into a safetensors file, one piece in memory at a time; returns the digests of
        tensors."""
        entries: dict[str, Any] = {}
        end = 0
        for name, tensor in self._tensors.items():
            start, end = end, end + math.prod(tensor.shape) * tensor.item_bytes
            entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        header = json.dumps(entries).encode()
        header += b" " * (-(8 + len(header)) % 64)  # tensors start on a cache line
        file.write(len(header).to_bytes(8, "little") + header)
        content, done = {}, 0
        for name, tensor in self._tensors.items():
            digests = []
            for _, piece in self._decoded(name):
                file.write(piece.data)
                digests.append(piece_digest(piece))
                done += piece.nbytes
                progress("converting GGUF to safetensors (once)", done, end)
            content[name] = tensor_digest(TensorSpec(name, tensor.shape), tensor.dtype, digests)
        return content

    def _of(self, name: str) -> tuple[GgufTensor, int | None]:
        """A tensor, and the width of its heads where their halves are interleaved."""
        interleaved = name.endswith(architecture_of(self.config).interleaved_in_gguf)
        return self._tensors[name], self.config.head_dim if interleaved else None


def each_expert(tensors: Iterable[GgufTensor]) -> Iterator[GgufTensor]:
    """Tensors of all experts of a layer as one of each: its rows lie in one piece of the file."""
    for tensor in tensors:
        if not tensor.name.endswith("_exps.weight") or len(tensor.shape) != 3:
            yield tensor
            continue
        num, *shape = tensor.shape
        num_bytes = tensor.num_rows // num * tensor.row_bytes
        for expert in range(num):
            name, offset = f"{tensor.name}[{expert}]", tensor.offset + expert * num_bytes
            yield tensor._replace(name=name, shape=tuple(shape), offset=offset)


def _names(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """GGUF's name for each tensor of the model -> its name in safetensors files, as llama.cpp has them. Those
    of experts are as `each_expert` makes them."""
    import gguf

    architecture = architecture_of(config)
    wanted = architecture.gguf_name or architecture.name
    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted]
    if not kinds:
        raise ModelError(f"the installed gguf package does not know the architecture {wanted!r}")
    known = gguf.get_tensor_name_map(kinds[0], config.num_layers)
    found: dict[str, str] = {}
    for name in names:
        expert = _EXPERT.search(name)
        own = known.get_name(_EXPERT.sub("", name), (".weight", ".bias")) or name
        found[own if expert is None else f"{own}[{expert[1]}]"] = name
    return found


# ------------------------------------------------------------------------------------------- converted copies


def load_converted(file: HashedFile, load: Load[Loaded], progress: Progress) -> Loaded:
    """The result of `load` for the GGUF file as a model directory: from the cached copy, or from a new one if
    there is none or it is damaged. `load` reports what it has read, and that is compared, so a damaged copy
    is never served."""
    target = cache_dir() / "gguf" / f"{file.digest.hex()[:32]}-v{CONVERTER_VERSION}"
    try:
        if target.is_dir():
            return _load_checked(target, file.digest, load)
    except (ModelError, OSError) as error:  # damaged, or another process has just moved it away
        log.warning("the converted copy in %s is not usable and is made again: %s", target, error)
    return _make(file, target, load, progress)


def _load_checked(directory: Path, source: bytes, load: Load[Loaded]) -> Loaded:
    manifest = read_json(directory / MANIFEST)
    files, tensors = (Fields(manifest, MANIFEST).section(name) for name in ("files", "tensors"))
    if manifest.get("source") != source.hex() or not files.keys() >= FILES:
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


def _make(file: HashedFile, target: Path, load: Load[Loaded], progress: Progress) -> Loaded:
    """Convert into a directory of our own, load from there, and leave it at `target` for later starts.
    Processes that do so at the same time do not meet: each loads its own."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        with _temporary(target.parent) as aside, contextlib.suppress(FileNotFoundError):
            os.rename(target, aside)  # a damaged copy: no reader finds half of it under its name
        with _temporary(target.parent) as temporary:
            _convert(file, temporary, progress)
            loaded = _load_checked(temporary, file.digest, load)
            _publish(temporary, target)
    except OSError as error:
        where = f"{target.parent}: {error.strerror or error}"
        raise ModelError(
            f"the converted weights cannot be written to {where}; set PENSTOCK_CACHE to another place"
        ) from error
    return loaded


@contextlib.contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=parent, prefix="tmp-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _publish(temporary: Path, target: Path) -> None:
    """One rename makes the directory visible, whole. One that another process has published meanwhile
    stays."""
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


def _convert(source: HashedFile, directory: Path, progress: Progress) -> None:
    """Write the model directory, and a manifest of its content and its source."""
    model = GgufModel(source)
    files = {"config.json": json.dumps(model.config_json).encode(), **model.tokenizer_files()}
    with _synced(directory / WEIGHTS) as file:
        tensors = model.write(file, progress)
    manifest = {
        "source": source.digest.hex(),
        "files": {name: piece_digest(data).hex() for name, data in files.items()},
        "tensors": {name: content.hex() for name, content in tensors.items()},
    }
    for name, data in {**files, MANIFEST: json.dumps(manifest).encode()}.items():
        with _synced(directory / name) as file:
            file.write(data)
    sync_directory(directory)


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

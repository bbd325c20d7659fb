"""The tensors of a model: read from a directory of safetensors files, or random. Owns that format and its
bounds, the check against the architecture, and the digests.

A safetensors file starts with the length of its header, eight bytes, and the header, a JSON object: name ->
dtype, shape and the place in the rest of the file. Tensors fill that rest without gaps.
(huggingface.co/docs/safetensors)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import EMBED, HEAD, TensorSpec, WeightSpec
from penstock.models.forms import Forms, Matrix, empty_matrix
from penstock.models.hashed_file import DIGEST_BYTES, FilePiece, WeightFile, piece_rows, read_pieces
from penstock.models.model import ModelConfig, Weight
from penstock.models.progress import Progress
from penstock.models.registry import architecture_of, layout

INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # that weights may be stored in
_NAMED = 6  # tensors listed in an error before the rest is only counted


class LoadedWeights(NamedTuple):
    """Weights on the device, and their source."""

    tensors: dict[str, Weight]
    # digest of each tensor's name, dtype, shape and bytes, under its name in the file, in the model's order
    content: dict[str, bytes]


def load_directory(
    directory: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    forms: Forms | None = None,
) -> LoadedWeights:
    """The model's tensors on `device` in `dtype`, matrices in `forms` if given. Every byte is read once,
    hashed, and copied to its final place."""
    with ExitStack() as stack:
        files = [stack.enter_context(WeightFile(path)) for path in weight_files(directory)]
        stored = stored_tensors(files)
        check_tensors(
            {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}, config, directory
        )
        _check_tied(stored, config, directory)
        sources = [stored[part.name] for weight in layout(config) for part in weight.parts]
        reading = stack.enter_context(
            closing(read_pieces(piece for source in sources for _, piece in _pieces(source)))
        )
        loaded = LoadedWeights({}, {})
        for weight in each_weight(config, "loading weights", progress):
            out = (
                empty_weight(weight, device, dtype) if forms is None else empty_formed(weight, config, forms)
            )
            for part, room in zip(
                weight.parts, out.split([part.shape[0] for part in weight.parts]), strict=True
            ):
                digests = list(_fill(room, stored[part.name], reading))
                loaded.content[part.name] = tensor_digest(part, stored[part.name].dtype, digests)
            loaded.tensors[weight.name] = out
        for file in files:
            file.check_unchanged()
    return loaded


def _check_tied(stored: Mapping[str, StoredTensor], config: ModelConfig, directory: Path) -> None:
    """Where embeddings are tied, an output matrix beside them has to be the same one: it is not read, and
    another would not be missed."""
    head, embed = stored.get(f"{HEAD}.weight"), stored.get(f"{EMBED}.weight")
    if config.tied_embeddings and head is not None and embed is not None and not _same_values(head, embed):
        raise ModelError(
            f"{directory}: tie_word_embeddings is true, but {HEAD}.weight is another matrix than "
            f"{EMBED}.weight; set it to false in config.json to use both, or leave {HEAD}.weight out"
        )


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """`other` is one that can be used."""
    if one.shape != other.shape or one.dtype not in DTYPES:
        return False
    num_rows = one.shape[0]
    row_bytes = max(one.num_bytes, other.num_bytes) // num_rows
    return all(torch.equal(_rows(one, rows), _rows(other, rows)) for rows in piece_rows(num_rows, row_bytes))


def _rows(source: StoredTensor, rows: slice) -> Tensor:
    """A stretch of a matrix's rows as float32."""
    row_bytes = source.num_bytes // source.shape[0]
    data = bytearray((rows.stop - rows.start) * row_bytes)
    source.file.read_into(memoryview(data), source.start + rows.start * row_bytes)
    return torch.frombuffer(data, dtype=DTYPES[source.dtype]).float()


def each_weight(config: ModelConfig, stage: str, progress: Progress) -> Iterator[WeightSpec]:
    """The model's tensors in order; the one before is done when the next is asked for."""
    total, done = sum(weight.numel for weight in layout(config)), 0
    for weight in layout(config):
        yield weight
        done += weight.numel
        progress(stage, done, total)


def stored_tensors(files: Iterable[WeightFile]) -> dict[str, StoredTensor]:
    """The tensors of all files together."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        tensors = read_header(file)
        twice = [name for name in tensors if name in stored]
        if twice:
            raise ModelError(f"{file.path} repeats tensors of another file: {listed(twice)}")
        stored |= tensors
    return stored


def _pieces(source: StoredTensor) -> Iterator[tuple[slice, FilePiece]]:
    """The pieces of a matrix with the rows that each has; a vector is a matrix of one row."""
    num_rows = source.shape[0] if len(source.shape) > 1 else 1
    row_bytes = source.num_bytes // num_rows
    for rows in piece_rows(num_rows, row_bytes):
        yield (
            rows,
            FilePiece(
                source.file, source.start + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes
            ),
        )


def _fill(room: Weight, source: StoredTensor, reading: Iterator[tuple[memoryview, bytes]]) -> Iterator[bytes]:
    """Copy the next pieces of `reading`, which are those of `source`, to `room`; yields their digests."""
    for rows, _ in _pieces(source):
        data, digest = next(reading)
        put_rows(room, rows, torch.frombuffer(data, dtype=DTYPES[source.dtype]))
        yield digest


def put_rows(room: Weight, rows: slice, values: Tensor) -> None:
    """Round a range of a tensor's rows into their final place; a vector is a matrix of one row."""
    if isinstance(room, Matrix):
        room.fill(rows, values.reshape(-1, room.shape[1]).float())
    else:
        room = room if room.dim() > 1 else room.unsqueeze(0)
        room[rows].copy_(values.reshape(-1, room.shape[1]))


def empty_weight(weight: WeightSpec, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Room for one tensor. A matrix that is only multiplied with lies input-major on the CPU, where float32
    products of a few rows take half the time so; embeddings are looked up by row and stay row-major."""
    if device.type == "cpu" and dtype == torch.float32 and len(weight.shape) == 2 and weight.name != "embed":
        return torch.empty(weight.shape[::-1], dtype=dtype).t()
    return torch.empty(weight.shape, dtype=dtype, device=device)


def empty_formed(weight: WeightSpec, config: ModelConfig, forms: Forms) -> Weight:
    """Room on the CPU for one tensor of a model whose matrices are in `forms`."""
    if len(weight.shape) == 1:
        return torch.empty(weight.shape, dtype=torch.float32)
    return empty_matrix(weight.name, weight.shape, config.tied_embeddings, forms)


# --------------------------------------------------------------------------- which files, and what is in them


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that together hold the weights."""
    single, files = directory / "model.safetensors", sorted(directory.glob("*.safetensors"))
    if (directory / INDEX).is_file():
        named = _indexed_names(directory)
        if single not in files or single.name in named:
            return _present(directory, named)
        # transformers leaves the index of shards when it saves one file over them; when it saves shards over
        # one file, that file stays whole.
        if shards := [name for name in named if directory / name in files]:
            raise ModelError(
                f"{directory} holds two models: {single.name}, and those of {INDEX}: {listed(shards)}; "
                "remove one of them"
            )
    if single in files:
        return (single,)
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelError(
            f"{directory} must hold model.safetensors or {INDEX}; safetensors files there: {found}"
        )
    return tuple(files)


def _indexed_names(directory: Path) -> list[str]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise ModelError(f"{directory / INDEX} has no usable weight_map")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{directory / INDEX} names files outside its directory: {listed(outside)}")
    return names


def _present(directory: Path, names: Sequence[str]) -> tuple[Path, ...]:
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{directory} lacks weight files that its index names: {listed(missing)}")
    return tuple(directory / name for name in names)


class StoredTensor(NamedTuple):
    """One tensor's place in its file."""

    file: WeightFile
    dtype: str  # as the format spells it
    shape: tuple[int, ...]
    start: int  # byte of the file
    num_bytes: int


def read_header(file: WeightFile) -> dict[str, StoredTensor]:
    """The tensors of a file, all of them inside it."""
    try:
        header_bytes = int.from_bytes(file.read(0, 8), "little") if file.num_bytes >= 8 else 0
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, file.num_bytes - 8):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {file.num_bytes}")
        entries = json.loads(file.read(8, header_bytes).decode("utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("its header is no JSON object")
        entries.pop(_METADATA, None)
        tensors = {name: _tensor(file, 8 + header_bytes, name, entry) for name, entry in entries.items()}
        _check_places(tensors, 8 + header_bytes, file.num_bytes)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file.path} is damaged or not a safetensors file: {error}") from error
    return tensors


def _tensor(file: WeightFile, data_start: int, name: str, entry: Any) -> StoredTensor:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, places = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _counts(shape) or not _counts(places) or len(places) != 2:
        raise ValueError(f"its header does not describe {name}")
    start, end = places
    item_bytes = _ITEM_BYTES.get(dtype)  # of one that is not known nothing is read
    if start > end or (item_bytes is not None and end - start != math.prod(shape) * item_bytes):
        raise ValueError(f"{name} of shape {shape} in {dtype} does not take the bytes {start} to {end}")
    return StoredTensor(file, dtype, tuple(shape), data_start + start, end - start)


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
    )


def _check_places(tensors: dict[str, StoredTensor], at: int, num_bytes: int) -> None:
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != at:
            raise ValueError(f"{name} starts at byte {tensor.start}, expected {at}")
        at += tensor.num_bytes
    if at != num_bytes:
        raise ValueError(f"its tensors end at byte {at} of {num_bytes}")


def check_tensors(found: Mapping[str, tuple[tuple[int, ...], str]], config: ModelConfig, where: Path) -> None:
    """`found` is a file's content: name -> (shape, dtype as safetensors spells it). Reports all problems in
    one ModelError."""
    expected = {part.name: part.shape for weight in layout(config) for part in weight.parts}
    redundant = architecture_of(config).is_redundant
    present = [name for name in expected if name in found]
    shapes = ((name, list(found[name][0]), list(expected[name])) for name in present)
    problems = {
        "missing tensors": [name for name in expected if name not in found],
        "unexpected tensors": [
            name for name in found if name not in expected and not redundant(name, config)
        ],
        "misshapen tensors": [
            f"{name} is {shape}, expected {wanted}" for name, shape, wanted in shapes if shape != wanted
        ],
        f"dtypes other than {', '.join(DTYPES)}": [
            f"{name} is {found[name][1]}" for name in present if found[name][1] not in DTYPES
        ],
    }
    refuse_any(problems, f"the weights in {where} do not fit its configuration")


def refuse_any(problems: Mapping[str, Sequence[str]], message: str) -> None:
    """`problems`: names by kind of problem."""
    if any(problems.values()):
        stated = "; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names)
        raise ModelError(f"{message}: {stated}")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], bytes]:
    """All tensors of a small safetensors file, and its bytes."""
    with WeightFile(path) as file:
        data = file.read(0, file.num_bytes)
        file.check_unchanged()
    try:
        return safetensors.torch.load(data), data
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{path} is damaged or not a safetensors file: {error}") from error


def unusable_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """For `refuse_any`: problems of tensors that were read and whose shapes are known."""
    found = {name: tensor for name, tensor in tensors.items() if name in shapes}
    sized = ((name, list(tensor.shape), list(shapes[name])) for name, tensor in found.items())
    usable = DTYPES.values()
    return {
        "misshapen tensors": [
            f"{name} is {shape}, expected {wanted}" for name, shape, wanted in sized if shape != wanted
        ],
        f"dtypes other than {', '.join(DTYPES)}": [
            f"{name} is {tensor.dtype}" for name, tensor in found.items() if tensor.dtype not in usable
        ],
        "tensors that are not finite": [
            name for name, t in found.items() if t.dtype in usable and not torch.isfinite(t).all()
        ],
    }


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# ------------------------------------------------------------------------------- random weights, and identity


def dummy_weights(
    config: ModelConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    forms: Forms | None = None,
) -> dict[str, Weight]:
    """Random weights made on the device: norms of one, no biases, matrices normal with a deviation of fan-in
    ** -0.5, so that every projection keeps its input's scale and logits differ. The same seed, dtype and kind
    of device give the same weights."""
    generator = torch.Generator(device=device).manual_seed(seed % 2**63)
    weights: dict[str, Weight] = {}
    for weight in each_weight(config, "making random weights", progress):
        tensor = empty_weight(weight, device, dtype)
        if tensor.dim() == 1:
            tensor.fill_(0.0 if weight.name.endswith("_bias") else 1.0)
        else:
            tensor.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        weights[weight.name] = tensor if forms is None else empty_formed(weight, config, forms)
        if forms is not None:
            put_rows(weights[weight.name], slice(None), tensor)
    return weights


def tensor_digest(part: TensorSpec, dtype: str, pieces: Iterable[bytes]) -> bytes:
    """Identity of one tensor in a file: the digests of its pieces, under its name, its shape and the dtype
    that it is stored in."""
    return _framed(
        b"penstock-tensor",
        [part.name.encode(), dtype.encode(), str(list(part.shape)).encode(), b"".join(pieces)],
    )


def weights_digest(
    config: ModelConfig, dtype: torch.dtype, content: Iterable[bytes], forms: Forms | None = None
) -> bytes:
    """Identity of the function that the weights compute: their `content`, the dtype and forms they run in,
    and the numbers of the config. Fields with default values are left out, so that a new field changes no
    model that does not use it."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    numbers = {name: value for name, value in dataclasses.asdict(config).items() if value != defaults[name]}
    # when to stop, and how long a sequence may be, change no KV
    for without_effect in ("eos_ids", "context"):
        numbers.pop(without_effect, None)
    runs_in = str(dtype) if forms is None else f"{dtype} {forms.scope}"
    return _framed(
        b"penstock-weights", [json.dumps(numbers, sort_keys=True).encode(), runs_in.encode(), *content]
    )


def _framed(kind: bytes, parts: Iterable[bytes]) -> bytes:
    """Each part goes in behind its length, so that no two lists read the same."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=kind)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def dummy_digest(
    config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype, forms: Forms | None = None
) -> bytes:
    return weights_digest(config, dtype, [b"dummy", str(seed).encode(), device.type.encode()], forms)

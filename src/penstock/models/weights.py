"""The tensors of a model: read from a directory of safetensors files, or random. Owns that format and its
bounds, the check against the architecture, and the digests.

A safetensors file starts with the length of its header, eight bytes, and the header, a JSON object: name ->
dtype, shape and the place in the rest of the file. Tensors fill that rest without gaps.
(huggingface.co/docs/safetensors)
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import EMBED, HEAD, TensorSpec, WeightSpec
from penstock.models.fields import Json, Shape, changed_fields, is_number
from penstock.models.forms import Forms, Matrix, empty_matrix
from penstock.models.hashed_file import DIGEST_BYTES, FilePiece, WeightFile, piece_rows, read_pieces
from penstock.models.model import ModelConfig, Split, Weight
from penstock.models.progress import Progress
from penstock.models.registry import architecture_of, layout
from penstock.models.split import Cut, cut_of

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # that weights may be stored in
_NAMED = 6  # tensors listed in an error before the rest is only counted


Pieces = Callable[[TensorSpec], Iterable[tuple[slice, Tensor]]]  # of a part: ranges of its rows, their values


class Devices(NamedTuple):
    """Where the tensors of a model are: experts may be on another device than the rest. All are laid out as
    on `device`."""

    device: torch.device
    experts: torch.device

    def of(self, weight: WeightSpec) -> torch.device:
        return self.experts if weight.num_slots else self.device


class LoadedWeights(NamedTuple):
    """Weights on the device, and their source."""

    tensors: dict[str, Weight]
    # digest of each tensor's name, dtype, shape and bytes, under its name in the file, in the model's order
    content: dict[str, bytes]


def load_directory(
    directory: Path,
    config: ModelConfig,
    device: torch.device | Devices,
    dtype: torch.dtype,
    progress: Progress,
    held: Forms | Split | None = None,
) -> LoadedWeights:
    """The model's tensors on `device` in `dtype`, matrices in forms if given, or one rank's part of them.
    Every byte is read once, hashed, and copied to its final place."""
    with ExitStack() as stack:
        files, stored, unread = open_tensors(directory, config, stack)
        for what in unread:
            log.warning("%s: not read: %s; only text is served", directory, what)
        _check_tied(stored, config, directory)

        def room(weight: WeightSpec) -> Weight:
            if isinstance(held, Split):
                return RankPart(weight, config, held).empty(device, dtype)
            return empty_formed(weight, config, held) if held else empty_weight(weight, device, dtype)

        def put(out: Weight, weight: WeightSpec, pieces: Pieces) -> None:
            if isinstance(held, Split):
                RankPart(weight, config, held).filled(out, pieces)
            else:
                fill(out, weight, pieces)

        loaded = LoadedWeights({}, {})
        reading = read_weights(layout(config), stored, room, loaded, put)
        for _ in each_weight(config, "loading weights", progress):
            next(reading)
        for file in files:
            file.check_unchanged()
    return loaded


def read_weights(
    weights: Iterable[WeightSpec],
    stored: Mapping[str, StoredTensor],
    room: Callable[[WeightSpec], Weight],
    loaded: LoadedWeights,
    put: Callable[[Weight, WeightSpec, Pieces], object] | None = None,
) -> Iterator[None]:
    """Read one of `weights` after the other into its `room`, and add it to `loaded`. `put`: instead of
    `fill`."""
    put = put or fill
    weights = tuple(weights)
    order = [part.name for weight in weights for part in weight.parts]
    with closing(read_pieces(piece for name in order for _, piece in _pieces(stored[name]))) as reading:

        def pieces(part: TensorSpec) -> Iterator[tuple[slice, Tensor]]:
            source, digests = stored[part.name], []
            for rows, _ in _pieces(source):
                data, digest = next(reading)
                digests.append(digest)
                yield rows, torch.frombuffer(data, dtype=DTYPES[source.dtype])
            loaded.content[part.name] = tensor_digest(part, source.dtype, digests)

        for weight in weights:
            loaded.tensors[weight.name] = out = room(weight)
            put(out, weight, pieces)
            yield


def read_stored(directory: Path, stack: ExitStack) -> tuple[list[WeightFile], dict[str, StoredTensor]]:
    """The files of the weights, open until `stack` ends, and all tensors that they have."""
    files = [stack.enter_context(WeightFile(path)) for path in weight_files(directory)]
    stored: dict[str, StoredTensor] = {}
    for file in files:
        tensors = read_header(file)
        if twice := [name for name in tensors if name in stored]:
            raise ModelError(f"{file.path} repeats tensors of another file: {listed(twice)}")
        stored |= tensors
    return files, stored


def open_tensors(
    directory: Path, config: ModelConfig, stack: ExitStack
) -> tuple[list[WeightFile], Mapping[str, StoredTensor], list[str]]:
    """The files of the weights, open until `stack` ends, their tensors, which are those of the model, and
    what else they have, in words."""
    files, stored = read_stored(directory, stack)
    architecture = architecture_of(config)
    own = architecture.laid_out(stored)
    check_tensors({name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}, config, directory)
    return files, own, list(architecture.unread(stored))


def _check_tied(stored: Mapping[str, StoredTensor], config: ModelConfig, directory: Path) -> None:
    """Where embeddings are tied, an output matrix beside them has to be the same one: it is not read, and
    another would not be missed."""
    head, embed = stored.get(f"{HEAD}.weight"), stored.get(f"{EMBED}.weight")
    if not config.tied_embeddings or head is None or embed is None:
        return
    same = head.shape == embed.shape and head.dtype in DTYPES
    if not same or not all(
        torch.equal(head.floats(rows), embed.floats(rows))
        for rows in piece_rows(config.vocab, 4 * config.hidden)
    ):
        raise ModelError(
            f"{directory}: tie_word_embeddings is true, but {HEAD}.weight is another matrix than "
            f"{EMBED}.weight; set it to false in config.json to use both, or leave {HEAD}.weight out"
        )


def each_weight(config: ModelConfig, stage: str, progress: Progress) -> Iterator[WeightSpec]:
    """The model's tensors in order; the one before is done when the next is asked for."""
    total, done = sum(weight.numel for weight in layout(config)), 0
    for weight in layout(config):
        yield weight
        done += weight.numel
        progress(stage, done, total)


def _pieces(source: StoredTensor) -> Iterator[tuple[slice, FilePiece]]:
    """The pieces of a matrix with the rows that each has; a vector is a matrix of one row."""
    num_rows = source.shape[0] if len(source.shape) > 1 else 1
    return (
        (rows, source.piece(rows, num_rows)) for rows in piece_rows(num_rows, source.num_bytes // num_rows)
    )


def fill(
    out: Weight, weight: WeightSpec, pieces: Callable[[TensorSpec], Iterable[tuple[slice, Tensor]]]
) -> None:
    """Copy every part of `weight` to its place in `out`. `pieces`: ranges of a part's rows, and their
    values."""
    for part, room in zip(weight.parts, _rooms(out, weight), strict=True):
        for rows, values in pieces(part):
            put_rows(room, rows, values)


def _rooms(out: Weight, weight: WeightSpec) -> Iterator[Weight]:
    """The place of each part."""
    slots = out if weight.num_slots else (out,)
    for slot, parts in zip(slots, weight.by_slot, strict=True):
        yield from slot.split([part.shape[0] for part in parts])


def put_rows(room: Weight, rows: slice, values: Tensor) -> None:
    """Round a range of a tensor's rows into their final place; a vector is a matrix of one row."""
    if isinstance(room, list):
        for slot, own in zip(room, values, strict=True):
            put_rows(slot, rows, own)
    elif isinstance(room, Matrix):
        room.fill(rows, values.reshape(-1, room.shape[1]).float())
    else:
        room = torch.atleast_2d(room)
        room[rows].copy_(values.reshape(-1, *room.shape[1:]))


class RankPart(NamedTuple):
    """What one rank has of one tensor."""

    weight: WeightSpec
    config: ModelConfig
    split: Split

    def empty(self, device: torch.device | Devices, dtype: torch.dtype) -> Tensor:
        """Room for it."""
        shapes = (cut.shape(part.shape) for cut, part in zip(self.cuts, self.weight.parts, strict=True))
        parts = (part._replace(shape=shape) for part, shape in zip(self.weight.parts, shapes, strict=True))
        out = empty_weight(self.weight._replace(parts=tuple(parts)), device, dtype)
        return out.zero_() if any(cut.has_gaps for cut in self.cuts) else out

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Of each part."""
        specs, each = [], max(1, self.weight.num_slots)
        parts = self.weight.parts[: len(self.weight.parts) // each]  # every slot has the same
        shapes = tuple(part.shape for part in parts)
        for index in range(len(parts)):
            specs.append(cut_of(self.weight.name, index, shapes, (self.config, self.split)))
        return tuple(specs) * each

    def filled(self, out: Tensor, pieces: Callable[[TensorSpec], Iterable[tuple[slice, Tensor]]]) -> Tensor:
        """`pieces`: as for `fill`, of whole tensors."""
        cuts = iter(self.cuts)
        for slot, parts in zip(out if self.weight.num_slots else (out,), self.weight.by_slot, strict=True):
            start = 0
            for part, cut in zip(parts, cuts, strict=False):
                num = cut.shape(part.shape)[0]
                room, start = slot[start : start + num], start + num
                for rows, values in pieces(part):
                    if len(part.shape) == 1:  # read as one row
                        cut.put(room.unsqueeze(1), slice(0, part.shape[0]), values.reshape(-1, 1))
                    else:
                        cut.put(room.flatten(1), rows, values.reshape(-1, math.prod(part.shape[1:])))
        return out


def empty_weight(weight: WeightSpec, device: torch.device | Devices, dtype: torch.dtype) -> Tensor:
    """Room for one tensor. A matrix that is only multiplied with lies input-major on the CPU, where float32
    products of a few rows take half the time so; embeddings are looked up by row and stay row-major."""
    place = device.of(weight) if isinstance(device, Devices) else device
    device = device.device if isinstance(device, Devices) else device
    if weight.exact:
        return torch.empty(weight.shape, dtype=torch.float32, device=place)
    if device.type == "cpu" and dtype == torch.float32 and len(weight.shape) > 1 and weight.name != "embed":
        *slots, rows, width = weight.shape
        return torch.empty(*slots, width, rows, dtype=dtype).mT
    if device != place and device.type == "cuda":
        return _mapped(weight.shape, dtype)
    return torch.empty(weight.shape, dtype=dtype, device=place)


def _mapped(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Host memory that shares no page with any other, so that it can be pinned."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def empty_formed(weight: WeightSpec, config: ModelConfig, forms: Forms) -> Weight:
    """Room on the CPU for one tensor of a model whose matrices are in `forms`."""
    if weight.exact or len(weight.shape) == 1:
        return torch.empty(weight.shape, dtype=torch.float32)
    name, shape, tied = weight.name, weight.shape[-2:], config.tied_embeddings
    if weight.num_slots:
        return [empty_matrix(name, shape, tied, forms) for _ in range(weight.num_slots)]
    return empty_matrix(name, shape, tied, forms)


# --------------------------------------------------------------------------- which files, and what is in them


def read_json(path: Path) -> Json:
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
        names = _indexed_names(directory)
        shards = [name for name in names if (directory / name).is_file()]
        if single not in files or single.name in names:
            if missing := [name for name in names if name not in shards]:
                raise ModelError(f"{directory} lacks weight files that its index names: {listed(missing)}")
            return tuple(directory / name for name in names)
        # transformers leaves the index of shards when it saves one file over them; when it saves shards over
        # one file, that file stays whole.
        if shards:
            raise ModelError(
                f"{directory} holds two models: {single.name}, and those of {INDEX}: {listed(shards)}; "
                "remove one of them"
            )
    files = [single] if single in files else files
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelError(
            f"{directory} must hold model.safetensors or {INDEX}; safetensors files there: {found}"
        )
    return tuple(files)


def _indexed_names(directory: Path) -> list[str]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{directory / INDEX} has no usable weight_map")
    if outside := sorted({name for name in names if Path(name).name != name}):
        raise ModelError(f"{directory / INDEX} names files outside its directory: {listed(outside)}")
    return sorted(set(names))


class StoredTensor(NamedTuple):
    """One tensor's place in its file."""

    file: WeightFile
    dtype: str  # as the format spells it
    shape: Shape
    start: int  # byte of the file
    num_bytes: int

    def piece(self, rows: slice, num_rows: int) -> FilePiece:
        """Where some of its rows are; it has `num_rows`."""
        row_bytes = self.num_bytes // num_rows
        return FilePiece(self.file, self.start + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes)

    def matrix(self, first: int, num_rows: int) -> StoredTensor:
        """Some rows of it, where all dimensions but the last are rows."""
        row_bytes = self.num_bytes // math.prod(self.shape[:-1])
        place = self.start + first * row_bytes, num_rows * row_bytes
        return StoredTensor(self.file, self.dtype, (num_rows, self.shape[-1]), *place)

    def floats(self, rows: slice) -> Tensor:
        """Some rows of a matrix as float32."""
        file, start, num_bytes = self.piece(rows, self.shape[0])
        return torch.frombuffer(bytearray(file.read(start, num_bytes)), dtype=DTYPES[self.dtype]).float()


def read_header(file: WeightFile) -> dict[str, StoredTensor]:
    """The tensors of a file: one behind the other, from the end of its header to its own end."""
    tensors: dict[str, StoredTensor] = {}
    try:
        header_bytes = int.from_bytes(file.read(0, min(8, file.num_bytes)), "little")
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, file.num_bytes - 8):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {file.num_bytes}")
        entries = json.loads(file.read(8, header_bytes))
        entries.pop(_METADATA, None)
        start = at = 8 + header_bytes
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (first, end) = (entry[key] for key in ("dtype", "shape", "data_offsets"))
            counts = all(is_number(n, int) and n >= 0 for n in (*shape, first, end - first))
            # of a dtype that weights may not have nothing is read
            if not counts or (dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - first):
                raise ValueError(
                    f"{name} of shape {shape} in {dtype} does not take the bytes {first} to {end}"
                )
            if start + first != at:
                raise ValueError(f"{name} starts at byte {start + first}, expected {at}")
            tensors[name] = StoredTensor(file, dtype, tuple(shape), at, end - first)
            at += end - first
        if at != file.num_bytes:
            raise ValueError(f"its tensors end at byte {at} of {file.num_bytes}")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file.path} is damaged or not a safetensors file: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{file.path} is not a safetensors file: its header does not describe tensors"
        ) from error
    return tensors


def check_tensors(found: Mapping[str, tuple[Shape, str]], config: ModelConfig, where: Path) -> None:
    """`found` is a file's content: name -> (shape, dtype as safetensors spells it). Reports all problems in
    one ModelError."""
    redundant = architecture_of(config).is_redundant
    own = {name: found[name] for name in found if not redundant(name, config)}
    expected = {part.name for weight in layout(config) for part in weight.parts}
    own |= {name: found[name] for name in expected if name in found}
    message = f"the weights in {where} do not fit its configuration"
    check_weights(own, layout(config), message)


def check_weights(
    found: Mapping[str, tuple[Shape, str]], weights: Iterable[WeightSpec], message: str
) -> None:
    """Raises a ModelError that begins with `message` if `found` is not what `weights` are read from."""
    expected = {part.name: part.shape for weight in weights for part in weight.parts}
    problems = {
        "missing tensors": [name for name in expected if name not in found],
        "unexpected tensors": [name for name in found if name not in expected],
        **_misfits(found, expected, DTYPES),
    }
    refuse_any(problems, message)


def _misfits(
    found: Mapping[str, tuple[Shape, Any]], shapes: Mapping[str, Shape], usable: Any
) -> dict[str, list[str]]:
    """Tensors of known names with another shape or dtype than they should have."""
    known = [(name, *found[name]) for name in shapes if name in found]
    return {
        "misshapen tensors": [
            f"{name} is {list(shape)}, expected {list(shapes[name])}"
            for name, shape, _ in known
            if tuple(shape) != tuple(shapes[name])
        ],
        f"dtypes other than {', '.join(DTYPES)}": [
            f"{name} is {dtype}" for name, _, dtype in known if dtype not in usable
        ],
    }


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


def unusable_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """For `refuse_any`: problems of tensors that were read and whose shapes are known."""
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items() if name in shapes}
    usable = [name for name, (_, dtype) in found.items() if dtype in DTYPES.values()]
    return {
        **_misfits(found, shapes, DTYPES.values()),
        "tensors that are not finite": [name for name in usable if not torch.isfinite(tensors[name]).all()],
    }


@contextmanager
def memory_needed(refusal: str) -> Iterator[None]:
    """Memory that the device does not have is a ModelError that begins with `refusal`."""
    try:
        yield
    except RuntimeError as error:
        # the CPU allocator's words
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ModelError(f"{refusal}: {error}") from error


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# ------------------------------------------------------------------------------- random weights, and identity


def dummy_weights(
    config: ModelConfig,
    seed: int,
    device: torch.device | Devices,
    dtype: torch.dtype,
    progress: Progress,
    held: Forms | Split | None = None,
) -> dict[str, Weight]:
    """Random weights made on the device: norms of one, no biases, matrices normal with a deviation of fan-in
    ** -0.5, so that every projection keeps its input's scale and logits differ. The same seed, dtype and kind
    of device give the same weights."""
    maker = device.device if isinstance(device, Devices) else device
    generator = torch.Generator(device=maker).manual_seed(seed % 2**63)
    weights: dict[str, Weight] = {}
    for weight in each_weight(config, "making random weights", progress):
        tensor = empty_weight(weight, maker, dtype)
        if tensor.dim() == 1:
            tensor.fill_(architecture_of(config).dummy_value(weight.name))
        else:
            tensor.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        if isinstance(held, Split):  # cut from the whole tensor: the same model on any number of ranks
            part = RankPart(weight, config, held)
            weights[weight.name] = part.filled(part.empty(device, dtype), whole_parts(weight, tensor))
            continue
        if isinstance(device, Devices) and device.of(weight) != maker:
            tensor = empty_weight(weight, device, dtype).copy_(tensor)
        weights[weight.name] = tensor
        if held is not None:
            weights[weight.name] = empty_formed(weight, config, held)
            put_rows(weights[weight.name], slice(None), tensor)
    return weights


def whole_parts(weight: WeightSpec, tensor: Tensor) -> Pieces:
    """The parts of a whole tensor, as `fill` takes them."""
    parts = {part.name: room for part, room in zip(weight.parts, _rooms(tensor, weight), strict=True)}
    return lambda part: [(slice(0, part.shape[0] if len(part.shape) > 1 else 1), parts[part.name])]


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
    numbers = changed_fields(config)
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

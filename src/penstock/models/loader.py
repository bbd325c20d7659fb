"""From a name or path to a running model and its tokenizer, or to what can be said of it before it is read.
Owns how names are resolved; reads files only through its siblings."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.config import ModelSource, WeightsName
from penstock.contract import SamplingParams
from penstock.errors import InvalidRequest, ModelError
from penstock.models.architecture import MAX_POSITION
from penstock.models.decoder import Decoder
from penstock.models.embedded import NAME, embedded_file
from penstock.models.form_choice import chosen_forms, wanted
from penstock.models.forms import Forms
from penstock.models.gguf_convert import CONVERTER_VERSION, Content, GgufModel, load_converted
from penstock.models.hashed_file import HashedFile, WeightFile
from penstock.models.model import LayerOps, ModelConfig
from penstock.models.progress import Progress
from penstock.models.registry import BUILT_IN, architecture_of, layout, parse_config
from penstock.models.tokenizer import ByteTokenizer, TextCodec
from penstock.models.tokenizer_files import load_tokenizer
from penstock.models.weights import (
    check_tensors,
    dummy_digest,
    dummy_weights,
    load_directory,
    read_json,
    stored_tensors,
    weight_files,
    weights_digest,
)

# Fields of generation_config.json that are defaults of requests, as vLLM takes them, with their types.
_SAMPLING: Mapping[str, Any] = dict.fromkeys(
    ("temperature", "top_p", "min_p", "repetition_penalty"), int | float
) | {"top_k": int}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and the name it is served under."""

    model: Decoder
    tokenizer: TextCodec
    name: str
    weights: str  # how its matrices are held, in words
    # fields of SamplingParams, where a request does not give them
    sampling: Mapping[str, Any] = field(default_factory=dict)


def load_model(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    ops: LayerOps,
    progress: Progress,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load what `source` names onto `device` in `dtype`, for sequences of at most `max_model_len` tokens
    (None: the model's own). Every way in which a model can be unusable is a ModelError."""
    try:
        if source.load_format == "dummy":
            return _load_dummy(source, device, dtype, ops, progress, max_model_len)
        name, path = _resolve(source.model)
        weights_name = wanted(source.weights, device.type, dtype)

        def choose(
            config: ModelConfig, in_4_bits: Collection[str] = (), name: WeightsName = weights_name
        ) -> Forms | None:
            return chosen_forms(name, config, source.deterministic, progress, in_4_bits)

        def load(directory: Path) -> tuple[LoadedModel, Content]:
            config = read_config(directory).settled(max_model_len)
            # Of a GGUF file this is the copy in float32; in other forms it is read straight.
            forms = choose(config, name="float32" if path.is_file() else weights_name)
            tokenizer = load_tokenizer(directory, config)
            config = dataclasses.replace(config, eos_ids=tuple(sorted(tokenizer.eos_ids)))
            weights = load_directory(directory, config, device, dtype, progress, forms)
            digest = weights_digest(config, dtype, weights.content.values(), forms)
            model = architecture_of(config).model(config, weights.tensors, ops, digest)
            sampling = read_sampling(directory) if source.generation_config == "auto" else {}
            return LoadedModel(model, tokenizer, name, _held(forms, dtype), sampling), weights.content

        if not path.is_file():
            return load(path)[0]
        with HashedFile(path, progress) as file:
            straight = (
                None
                if weights_name == "float32"
                else _load_gguf(name, file, choose, ops, progress, max_model_len)
            )
            return load_converted(file, load, progress) if straight is None else straight
    except RuntimeError as error:
        # the CPU allocator's words
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ModelError(
            f"the weights of {source.model} do not fit into the memory of {device}: {error}"
        ) from error


def _load_gguf(
    name: str,
    file: HashedFile,
    choose: Callable[[ModelConfig, Collection[str]], Forms | None],
    ops: LayerOps,
    progress: Progress,
    max_model_len: int | None,
) -> LoadedModel | None:
    """The GGUF file straight into the forms that are chosen for it. None: it runs in float32, for which a
    copy is kept."""
    source = GgufModel(file)
    config, in_4_bits = source.config.settled(max_model_len), source.in_4_bits()
    forms = choose(config, in_4_bits)
    if forms is None or not (forms.few_rows or forms.few_rows_of_4 or forms.wide != torch.float32):
        return None
    with tempfile.TemporaryDirectory() as folder:
        for file_name, data in source.tokenizer_files().items():
            (Path(folder) / file_name).write_bytes(data)
        tokenizer = load_tokenizer(Path(folder), config)
    config = dataclasses.replace(config, eos_ids=tuple(sorted(tokenizer.eos_ids)))
    weights = source.read(forms, progress)
    digest = weights_digest(
        config, torch.float32, [b"gguf", str(CONVERTER_VERSION).encode(), file.digest], forms
    )
    return LoadedModel(
        architecture_of(config).model(config, weights, ops, digest), tokenizer, name, str(forms)
    )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model before any of its tensors is read."""

    name: str
    config: ModelConfig
    num_parameters: int
    file_bytes: int  # 0: there are no files
    has_chat_template: bool
    # its weights that files have in 4 bits, as the CPU multiplies them
    in_4_bits: frozenset[str] = frozenset()


def inspect_model(source: ModelSource, max_model_len: int | None = None) -> ModelFacts:
    """What a load would find in its config, its tokenizer and the headers of its weights. Raises ModelError
    if the load would fail. A built-in name without weights is known by its dimensions."""
    if source.load_format == "dummy" or (source.model in BUILT_IN and source.model != NAME):
        name, config, tokenizer = _dummy_parts(source.model)
        return _facts(name, config, 0, tokenizer.has_chat_template, max_model_len)
    name, path = _resolve(source.model)
    if path.is_dir():
        config = read_config(path)
        tokenizer = load_tokenizer(path, config)
        read_sampling(path)
        with ExitStack() as stack:
            files = [stack.enter_context(WeightFile(file)) for file in weight_files(path)]
            stored = stored_tensors(files)
            check_tensors(
                {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}, config, path
            )
            return _facts(
                name,
                config,
                sum(file.num_bytes for file in files),
                tokenizer.has_chat_template,
                max_model_len,
            )
    with WeightFile(path) as file:
        gguf = GgufModel(file)
        settings = json.loads(gguf.tokenizer_files()["tokenizer_config.json"])
        facts = _facts(name, gguf.config, file.num_bytes, "chat_template" in settings, max_model_len)
        return dataclasses.replace(facts, in_4_bits=gguf.in_4_bits())


def _facts(
    name: str, config: ModelConfig, file_bytes: int, has_chat_template: bool, max_model_len: int | None
) -> ModelFacts:
    num_parameters = sum(weight.numel for weight in layout(config))
    return ModelFacts(name, config.settled(max_model_len), num_parameters, file_bytes, has_chat_template)


def read_config(directory: Path) -> ModelConfig:
    """The dimensions of a model directory; no weights are read."""
    file = directory / "config.json"
    return parse_config(read_json(file), str(file))


def read_sampling(directory: Path) -> dict[str, Any]:
    """The defaults of requests that generation_config.json states."""
    file = directory / "generation_config.json"
    stated = read_json(file) if file.is_file() else {}
    given = {name: stated[name] for name in _SAMPLING if stated.get(name) is not None}
    wrong = [
        name
        for name, value in given.items()
        if isinstance(value, bool) or not isinstance(value, _SAMPLING[name])
    ]
    if wrong:
        raise ModelError(
            f"{file}: {wrong[0]} must be a number, got {given[wrong[0]]!r}; --generation-config none leaves "
            "the file out"
        )
    try:
        SamplingParams(max_tokens=1, **given)
    except InvalidRequest as error:
        raise ModelError(f"{file}: {error}; --generation-config none leaves the file out") from error
    return given


def _resolve(model: str) -> tuple[str, Path]:
    """The name to serve under, and a GGUF file or a directory with safetensors and a config."""
    if model == NAME:
        return model, embedded_file()
    if model in BUILT_IN:
        raise ModelError(
            f"{model} has no weights of its own: add --load-format dummy for random ones, or give a path to "
            "real ones"
        )
    path = _existing(model)
    if path.is_file():
        return path.stem, path
    if not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        hint = f"; it holds a GGUF file: give {inside[0]}" if inside else ""
        raise ModelError(f"{path} has no config.json{hint}")
    return path.resolve().name, path


def _existing(model: str) -> Path:
    path = Path(os.path.expanduser(model))
    if not path.exists():
        raise ModelError(
            f"no model {model!r}: it is neither a path that exists nor a built-in name "
            f"({', '.join(BUILT_IN)})"
        )
    return path


def _load_dummy(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    ops: LayerOps,
    progress: Progress,
    max_model_len: int | None,
) -> LoadedModel:
    name, config, tokenizer = _dummy_parts(source.model)
    config = config.settled(max_model_len)
    if (positions := source.positions or 0) > MAX_POSITION:
        raise ModelError(f"--max-model-len {positions}: dummy weights have at most {MAX_POSITION} positions")
    config = dataclasses.replace(config, max_position=max(config.max_position, positions))
    weights_name = wanted(source.weights, device.type, dtype)
    forms = chosen_forms(
        "float32" if weights_name == "auto" else weights_name, config, source.deterministic, progress
    )
    digest = dummy_digest(config, source.seed, device, dtype, forms)
    weights = dummy_weights(config, source.seed, device, dtype, progress, forms)
    return LoadedModel(
        architecture_of(config).model(config, weights, ops, digest), tokenizer, name, _held(forms, dtype)
    )


def _held(forms: Forms | None, dtype: torch.dtype) -> str:
    return str(forms or dtype).removeprefix("torch.")


def _dummy_parts(model: str) -> tuple[str, ModelConfig, TextCodec]:
    if model in BUILT_IN:
        config = BUILT_IN[model]
        return model, config, ByteTokenizer(config.vocab)
    path = _existing(model)
    if not path.is_dir():
        raise ModelError(
            f"--load-format dummy takes a built-in name ({', '.join(BUILT_IN)}) or a directory with a "
            f"config.json, not {path}"
        )
    config = read_config(path)
    if not (path / "tokenizer.json").is_file():
        return path.resolve().name, dataclasses.replace(config, eos_ids=()), ByteTokenizer(config.vocab)
    tokenizer = load_tokenizer(path, config)
    return (
        path.resolve().name,
        dataclasses.replace(config, eos_ids=tuple(sorted(tokenizer.eos_ids))),
        tokenizer,
    )

"""From a name or path to a running model and its tokenizer, or to what can be said of it before it is read.
Owns how names are resolved; reads files only through its siblings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
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
from penstock.models.fields import is_number
from penstock.models.form_choice import chosen_forms, wanted
from penstock.models.forms import Forms
from penstock.models.gguf_convert import CONVERTER_VERSION, Content, GgufModel, load_converted
from penstock.models.hashed_file import HashedFile, WeightFile
from penstock.models.model import LayerOps, ModelConfig, Split
from penstock.models.progress import Progress
from penstock.models.registry import BUILT_IN, architecture_of, layout, parse_config
from penstock.models.split import part_of
from penstock.models.tokenizer import ByteTokenizer, TextCodec
from penstock.models.tokenizer_files import load_tokenizer
from penstock.models.weights import (
    Devices,
    dummy_digest,
    dummy_weights,
    load_directory,
    memory_needed,
    open_tensors,
    read_json,
    weights_digest,
)

_HOST = torch.device("cpu")
# Fields of generation_config.json that are defaults of requests, as vLLM takes them, with their types.
_SAMPLING: Mapping[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), int | float),
    "top_k": int,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and the name it is served under."""

    model: Decoder
    tokenizer: TextCodec
    name: str
    weights: str  # how its matrices are held, in words
    # fields of SamplingParams, where a request does not give them
    sampling: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None  # of its files
    whole: ModelConfig | None = None  # the dimensions of the whole model, if only a part of it is here

    @property
    def dims(self) -> ModelConfig:
        """Of the whole model."""
        return self.whole or self.model.config


@dataclass(frozen=True, slots=True)
class _Load:
    """One load: what is wanted, and where it goes."""

    source: ModelSource
    weights: WeightsName  # that `wanted` returned
    device: torch.device
    dtype: torch.dtype
    ops: LayerOps
    progress: Progress
    max_model_len: int | None

    def run(self) -> LoadedModel:
        if self.source.load_format == "dummy":
            return self._dummy()
        name, path = _resolve(self.source.model)
        if path.is_dir():
            return self._directory(name, path, self.weights)[0]
        with HashedFile(path, self.progress) as file:
            straight = None if self.weights == "float32" else self._gguf(name, file)
            return straight or load_converted(
                file, lambda copy: self._directory(name, copy, "float32"), self.progress
            )

    def _directory(self, name: str, path: Path, weights: WeightsName) -> tuple[LoadedModel, Content]:
        config = read_config(path)
        forms, tokenizer = self._forms(config, weights), load_tokenizer(path, config)
        config = self._settled(config, tokenizer)
        held = self._split or forms
        tensors, content = load_directory(path, config, self._devices, self.dtype, self.progress, held)
        digest = weights_digest(config, self.dtype, content.values(), forms)
        sampling = read_sampling(path) if self.source.generation_config == "auto" else {}
        model = architecture_of(config).model(self._part(config), tensors, self.ops, digest)
        loaded = LoadedModel(model, tokenizer, name, self._held(forms), sampling, path, self._whole(config))
        return loaded, content

    def _gguf(self, name: str, file: HashedFile) -> LoadedModel | None:
        """The GGUF file straight into the forms that are chosen for it. None: it runs in float32, for which a
        copy is kept."""
        source = GgufModel(file)
        forms = self._forms(source.config, self.weights, source.in_4_bits())
        if forms is None or not (forms.few_rows or forms.few_rows_of_4 or forms.wide != torch.float32):
            return None
        tokenizer = source.tokenizer()
        config = self._settled(source.config, tokenizer)
        content = [b"gguf", str(CONVERTER_VERSION).encode(), file.digest]
        digest = weights_digest(config, torch.float32, content, forms)
        model = architecture_of(config).model(config, source.read(forms, self.progress), self.ops, digest)
        return LoadedModel(model, tokenizer, name, self._held(forms))

    def _dummy(self) -> LoadedModel:
        name, config, tokenizer = _dummy_parts(self.source.model)
        if (positions := self.source.positions or 0) > MAX_POSITION:
            raise ModelError(
                f"--max-model-len {positions}: dummy weights have at most {MAX_POSITION} positions"
            )
        config = self._settled(config, tokenizer)
        config = dataclasses.replace(config, max_position=max(config.max_position, positions))
        forms = self._forms(config, "float32" if self.weights == "auto" else self.weights)
        seed, dtype, held = self.source.seed, self.dtype, self._split or forms
        digest = dummy_digest(config, seed, self.device, dtype, forms)
        weights = dummy_weights(config, seed, self._devices, dtype, self.progress, held)
        model = architecture_of(config).model(self._part(config), weights, self.ops, digest)
        return LoadedModel(model, tokenizer, name, self._held(forms), whole=self._whole(config))

    def _forms(
        self, config: ModelConfig, weights: WeightsName, in_4_bits: Collection[str] = ()
    ) -> Forms | None:
        return chosen_forms(weights, config, self.source.deterministic, self.progress, in_4_bits)

    @property
    def _split(self) -> Split | None:
        """None: the whole model."""
        return self.ops.split if self.ops.split.size > 1 else None

    def _part(self, config: ModelConfig) -> ModelConfig:
        """The dimensions that this rank computes with."""
        return part_of(config, self.ops.split)

    def _whole(self, config: ModelConfig) -> ModelConfig | None:
        return None if self._split is None else config

    def _settled(self, config: ModelConfig, tokenizer: TextCodec) -> ModelConfig:
        ends = tuple(sorted(tokenizer.eos_ids))
        return dataclasses.replace(config.settled(self.max_model_len), eos_ids=ends)

    @property
    def _devices(self) -> Devices:
        return Devices(self.device, _HOST if self.source.experts_in_host else self.device)

    def _held(self, forms: Forms | None) -> str:
        return str(forms or self.dtype).removeprefix("torch.")


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
    weights = wanted(source.weights, device.type, dtype)
    if ops.split.size > 1:
        if source.weights not in ("auto", "float32"):
            raise ModelError(f"--weights {source.weights}: with --tensor-parallel only float32 is supported")
        weights = "float32"
    with memory_needed(f"the weights of {source.model} do not fit into the memory of {device}"):
        return _Load(source, weights, device, dtype, ops, progress, max_model_len).run()


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
    num_bytes, in_4_bits = 0, frozenset[str]()
    if source.load_format == "dummy" or (source.model in BUILT_IN and source.model != NAME):
        name, config, tokenizer = _dummy_parts(source.model)
    else:
        name, path = _resolve(source.model)
        with ExitStack() as stack:
            if path.is_dir():
                config = read_config(path)
                tokenizer = load_tokenizer(path, config)
                read_sampling(path)
                files, *_ = open_tensors(path, config, stack)
            else:
                files = [stack.enter_context(WeightFile(path))]
                gguf = GgufModel(files[0])
                config, tokenizer, in_4_bits = gguf.config, gguf.tokenizer(), gguf.in_4_bits()
            num_bytes = sum(file.num_bytes for file in files)
    num_parameters = sum(weight.numel for weight in layout(config))
    has_template, settled = tokenizer.has_chat_template, config.settled(max_model_len)
    return ModelFacts(name, settled, num_parameters, num_bytes, has_template, in_4_bits)


def read_config(directory: Path) -> ModelConfig:
    """The dimensions of a model directory; no weights are read."""
    file = directory / "config.json"
    return parse_config(read_json(file), str(file))


def read_sampling(directory: Path) -> dict[str, Any]:
    """The defaults of requests that generation_config.json states."""
    file = directory / "generation_config.json"
    stated = read_json(file) if file.is_file() else {}
    given = {name: stated[name] for name in _SAMPLING if stated.get(name) is not None}
    try:
        for name, value in given.items():
            if not is_number(value, _SAMPLING[name]):
                raise InvalidRequest(f"{name} must be a number, got {value!r}")
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
    config, has_vocabulary = read_config(path), (path / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(path, config) if has_vocabulary else ByteTokenizer(config.vocab)
    return path.resolve().name, config, tokenizer

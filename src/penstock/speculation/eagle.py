"""An EAGLE-3 head as others publish it. Owns its layer, and the reading of its files in both public layouts:
that of EAGLE, SGLang and SpecForge, and that of vLLM's speculators.

    g = fc [three hidden states of the target]        the residual stream in front of three of its layers
    y = a Llama layer whose q, k and v see [norm(embedding of the next token), norm(g)]; g is its residual
    logits = its output matrix, by norm(y)            of a part of the vocabulary, by the map d2t

For the step one token further, y is in the place of g. Rotary positions are the head's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import TensorSpec, WeightSpec, stack
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.fields import Fields, is_number
from penstock.models.llama import Llama
from penstock.models.model import ModelConfig, Weight
from penstock.models.split import part_of
from penstock.models.weights import read_json, read_tensors, weight_files
from penstock.speculation.head import DraftHead, Rooms, load_weights
from penstock.speculation.vocab import DraftVocab, read_vocab

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_LAYER, _OTHER_LAYER = "layers.0.", "midlayer."
_TAPS = "eagle_aux_hidden_state_layer_ids"
_REFUSED = ("fc_norm", "norm_output", "parallel_drafting")  # they change the mathematics


@dataclass(frozen=True, kw_only=True)
class EagleLayer(DecoderLayer):
    """`hidden` is the embedding of the token, the residual stream the state before it."""

    hidden_norm: Tensor

    def _normed(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        assert residual is not None
        state = self.ops.rms_norm(residual, self.hidden_norm, self.eps)
        both = torch.cat((self.ops.rms_norm(hidden, self.attn_norm, self.eps), state), dim=-1)
        return both, self._stream(residual, state)

    def _stream(self, state: Tensor, normed: Tensor) -> Tensor:
        return state


class NormedEagleLayer(EagleLayer):
    """Of a head with `norm_before_residual`."""

    def _stream(self, state: Tensor, normed: Tensor) -> Tensor:
        return normed


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The content of a head's config.json."""

    dims: ModelConfig  # of the head's layer, with as many positions as the target has
    draft_vocab: int
    taps: tuple[int, int, int]
    kind: type[EagleLayer]
    norms_taps: bool  # `norm_before_fc`

    def layout(self, found: Collection[str]) -> Iterator[WeightSpec]:
        """The tensors of the head except its maps. `found`: those of the file, which may leave out the
        embedding, and an output matrix of the whole vocabulary: the target's are used."""
        dims, width = self.dims, len(self.taps) * self.dims.hidden
        if EMBED in found:
            yield stack("embed", (EMBED, dims.vocab, dims.hidden))
        if self.norms_taps:
            yield stack("input_norm", ("input_norm.weight", width))
        yield stack("fc", ("fc.weight", dims.hidden, width))
        for weight in (stack("hidden_norm", ("hidden_norm.weight", dims.hidden)), *Llama().layer(dims)):
            parts = [TensorSpec(_LAYER + part.name, part.shape) for part in weight.parts]
            if weight.name == "qkv":
                parts = [part._replace(shape=(part.shape[0], 2 * dims.hidden)) for part in parts]
            yield WeightSpec(_LAYER + weight.name, tuple(parts))
        yield stack("norm", ("norm.weight", dims.hidden))
        if HEAD in found or self.draft_vocab < dims.vocab:
            yield stack("head", (HEAD, self.draft_vocab, dims.hidden))


class EagleHead(DraftHead):
    """A head on the device of its target."""

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Weight],
        vocab: DraftVocab | None,
        target: Decoder,
        digest: bytes,
    ) -> None:
        dims, embed = part_of(config.dims, target.ops.split), weights.get("embed", target.embedding)
        if isinstance(embed, Tensor) and isinstance(target.embedding, Tensor):
            embed = target.embedding if torch.equal(embed, target.embedding) else embed
        shared = {"embed": embed, "head": embed if dims.tied_embeddings else target.output}
        dims = dataclasses.replace(dims, tied_embeddings=False, vocab=config.draft_vocab)
        block = Decoder(dims, {**shared, **weights, "embed": embed}, target.ops, b"", [config.kind])
        super().__init__(block, config.taps, vocab, digest)
        self.own_dims = self.dims
        self._fc, self._input_norm = weights["fc"], weights.get("input_norm")

    def fused(self, tapped: Sequence[Tensor]) -> Tensor:
        ops, both = self._block.ops, torch.cat(tuple(tapped), dim=-1)
        if self._input_norm is not None:
            both = ops.rms_norm(both, self._input_norm, self.dims.norm_eps)
        return ops.linear(both, self._fc)

    def _joined(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._block.embed(tokens), hidden


# ------------------------------------------------------------------------------------------------------ files


def read_eagle(directory: Path, target: Decoder, whole: ModelConfig | None = None) -> EagleHead:
    """The head in `directory`, for `target`, which may be a part of the model of dimensions `whole`. Raises
    ModelError for any problem with it."""
    config, where = read_eagle_config(directory, whole or target.config), str(directory)
    tensors, digest = _read_tensors(directory, config)
    d2t, t2d = (tensors.pop(name, None) for name in ("d2t", "t2d"))
    num, size = config.draft_vocab, target.config.vocab
    vocab = read_vocab(d2t, 0 if num == size and d2t is None else num, size, where, offsets=True)
    if vocab is not None and t2d is not None:
        covered = torch.zeros(size, dtype=torch.bool).index_fill_(0, vocab.target_ids, True)
        if t2d.shape != covered.shape or not torch.equal(t2d != 0, covered):
            raise ModelError(f"{where}: t2d does not name the tokens that d2t names")
    rooms = Rooms(target, config.dims)
    weights = load_weights(tuple(config.layout(tensors)), tensors, rooms, directory)
    return EagleHead(config, weights, vocab, target, digest)


def read_eagle_config(directory: Path, target: ModelConfig) -> EagleConfig:
    """Only what config.json says. Raises ModelError if it does not fit the target."""
    file = directory / "config.json"
    raw = read_json(file)
    fields, names = Fields(raw, str(file)), raw.get("architectures")
    known = isinstance(names, list) and any(name in ARCHITECTURES for name in names)
    listed = ", ".join(ARCHITECTURES)
    fields.need(known, f"it is no EAGLE-3 head: architectures is {names!r}, not one of {listed}")
    inner = "transformer_layer_config"  # in the layout of speculators
    layer = fields.section(inner) if inner in raw else raw
    options = _options(fields)
    for name in _REFUSED:
        fields.need(not options.raw.get(name), f"{name} is {options.raw.get(name)!r}, which is not supported")
    fields.need(options.flag("use_aux_hidden_state", True), "it takes no hidden states of inner layers")
    fields.need(layer is raw or "norm_before_residual" in raw, "it has no norm_before_residual")
    dims = Llama().parse_config(layer, str(file))
    fits = {
        "model_type": (layer.get("model_type", "llama"), "llama"),
        "num_hidden_layers": (dims.num_layers, 1),
        "hidden_size": (dims.hidden, target.hidden),
        "target_hidden_size": (options.count("target_hidden_size", target.hidden), target.hidden),
        "vocab_size": (dims.vocab, target.vocab),
    }
    wrong = [f"{name} is {own!r}, not {needed!r}" for name, (own, needed) in fits.items() if own != needed]
    fields.need(not wrong, f"the head does not fit this model: {'; '.join(wrong)}")
    return EagleConfig(
        dataclasses.replace(dims.settled(None), eos_ids=(), context=0, max_position=target.max_position),
        options.count("draft_vocab_size", dims.vocab, most=dims.vocab),
        _taps(options, target.num_layers),
        NormedEagleLayer if options.flag("norm_before_residual", False) else EagleLayer,
        options.flag("norm_before_fc", False),
    )


def _options(fields: Fields) -> Fields:
    """What a config says about the head: outside, or in `eagle_config`."""
    outer, inner = fields.raw, fields.section("eagle_config")
    unlike = [name for name in inner if outer.get(name) is not None and outer[name] != inner[name]]
    fields.need(not unlike, f"eagle_config says something else about {', '.join(unlike)}")
    return Fields(
        {**inner, **{name: value for name, value in outer.items() if value is not None}}, fields.where
    )


def _taps(options: Fields, num_layers: int) -> tuple[int, int, int]:
    """Two conventions are in use. Ids that begin with 1 mean outputs of layers, others mean inputs: that is
    how SGLang tells them apart."""
    ids: Any = options.raw.get(_TAPS) or [2, num_layers // 2, num_layers - 3]
    good = isinstance(ids, list) and len(ids) == 3 and all(is_number(id, int) for id in ids)
    taps = [id + (ids[0] == 1) for id in ids] if good else []
    good = good and 0 <= taps[0] < taps[1] < taps[2] <= num_layers
    must = f"{_TAPS} must be three ascending layers of the model, which has {num_layers}"
    options.need(good, f"{must}; got {ids!r}")
    return taps[0], taps[1], taps[2]


def _read_tensors(directory: Path, config: EagleConfig) -> tuple[dict[str, Tensor], bytes]:
    """By the names of the newer layout; and the digest of all that decides what the head computes."""
    pickled = sorted(file.name for file in directory.glob("*.bin"))
    if pickled and not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory} holds {pickled[0]}: such files can run code, and are not read; convert it to "
            "safetensors (docs/speculation.md, EAGLE-3 heads)"
        )
    tensors, state = dict[str, Tensor](), hashlib.blake2b(digest_size=16, person=b"penstock-eagle")
    state.update(repr(config).encode())
    for file in weight_files(directory):
        found, data = read_tensors(file)
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
        for stored, tensor in found.items():
            is_other = stored.startswith(_OTHER_LAYER)
            name = _LAYER + stored.removeprefix(_OTHER_LAYER) if is_other else stored
            if name in tensors:
                raise ModelError(f"{file} repeats {stored}")
            tensors[name] = tensor
    return tensors, state.digest()

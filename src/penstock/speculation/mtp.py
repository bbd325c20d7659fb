"""A multi-token-prediction head that Penstock trained. Owns the head's weights and files.

x = fc [norm(hidden), norm(embedding of the next token)]     hidden: the residual stream behind the
target's last layer
y = one decoder layer of the target's own shape, over x      with KV rows of its own
logits = rows of the target's output matrix, by norm(y)      all of them, or those of the draft vocabulary
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import WeightSpec, stack
from penstock.models.decoder import Decoder
from penstock.models.fields import Fields
from penstock.models.forms import Matrix
from penstock.models.model import ModelConfig, Weight
from penstock.models.registry import architecture_of
from penstock.models.split import Cut, share
from penstock.models.weights import read_json, read_tensors
from penstock.speculation.head import DraftHead, Rooms, load_weights
from penstock.speculation.vocab import DraftVocab, read_vocab

CONFIG_FILE, TENSORS_FILE = "config.json", "head.safetensors"
FORMAT, VERSION = "penstock-mtp", 1
HEADS_PACKAGE = "penstock_heads"
MAX_DEPTH = 16
# fields of the target's config
_SHAPE = ("architecture", "num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab")
_MAP_FORMS = ("absolute", "offset")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The content of a head's config.json."""

    depth: int  # number of tokens ahead that it was trained for
    draft_vocab: int  # 0: the whole vocabulary
    d2t_form: str = "absolute"


class MtpHead(DraftHead):
    """A head on the device of its target, whose embedding and output matrix it shares."""

    def __init__(
        self,
        config: HeadConfig,
        weights: Mapping[str, Weight],
        vocab: DraftVocab | None,
        target: Decoder,
        digest: bytes = b"",
    ) -> None:
        self.config = config
        self._fc, *self._norms = (weights[name] for name in ("fc", "hidden_norm", "embed_norm"))
        output, dims = target.output, head_dims(target.config)
        if vocab is not None:
            output = _output_of(target, vocab.target_ids.to(target.device))
            dims = dataclasses.replace(dims, vocab=len(vocab))
        layer = {
            f"layers.0.{name.removeprefix('layer.')}": weight
            for name, weight in weights.items()
            if name.startswith("layer.")
        }
        inner = {**layer, "embed": target.embedding, "head": output, "norm": weights["norm"]}
        block = Decoder(dims, inner, target.ops, b"")
        super().__init__(block, (target.config.num_layers,), vocab, digest)

    def fused(self, tapped: Sequence[Tensor]) -> Tensor:
        return tapped[0]

    def _joined(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        ops, both = self._block.ops, (hidden, self._block.embed(tokens))
        normed = [
            ops.rms_norm(x, norm, self.dims.norm_eps) for x, norm in zip(both, self._norms, strict=True)
        ]
        return ops.linear(torch.cat(normed, dim=-1), self._fc), None


def head_dims(target: ModelConfig) -> ModelConfig:
    """One layer of the target's shape without experts, with the window of its last layer."""
    return dataclasses.replace(
        target, num_layers=1, windows=target.windows[-1:], tied_embeddings=False, routing=None
    )


def head_layout(target: ModelConfig) -> tuple[WeightSpec, ...]:
    """All tensors of a head except its id map."""
    hidden = target.hidden
    layer = architecture_of(target).layer(head_dims(target))
    return (
        stack("fc", ("fc", hidden, 2 * hidden)),
        *(stack(name, (name, hidden)) for name in ("hidden_norm", "embed_norm", "norm")),
        *(stack(f"layer.{weight.name}", (f"layer.{weight.name}", *weight.shape)) for weight in layer),
    )


def rows_of(output: Weight, ids: Tensor) -> Weight:
    """The rows `ids` of an output matrix, in its own form."""
    if not isinstance(output, Matrix):
        return output.index_select(0, ids)
    packed, scale, wide = (
        None if part is None else part.index_select(0, ids)
        for part in (output.packed, output.scale, output.wide)
    )
    return Matrix(packed, scale, wide, output.few_rows)


def _output_of(target: Decoder, ids: Tensor) -> Weight:
    """The same for the head of a target. Of several ranks each has a part, of rows that others have."""
    split = target.ops.split
    if split.size == 1:
        return rows_of(target.output, ids)
    return Cut((share(len(ids), split),)).of(target.ops.embed(ids, target.output))


def fingerprint(target: Decoder, whole: ModelConfig | None = None) -> str:
    """Identity of a target's weights, independent of their storage form: its shape, and its norms in
    bfloat16, which are the same in every form. `whole`: its dimensions, if `target` is a part of it."""
    state = hashlib.blake2b(digest_size=16, person=b"penstock-mtp")
    state.update(json.dumps(target_shape(whole or target.config)).encode())
    for norm in (
        target.norm,
        *(norm for layer in target.layers for norm in (layer.attn_norm, layer.ffn_norm)),
    ):
        state.update(norm.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return state.hexdigest()


def target_shape(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _SHAPE}


# ------------------------------------------------------------------------------------------------------ files


def write_head(
    directory: Path,
    tensors: Mapping[str, Tensor],
    vocab: DraftVocab | None,
    target: Decoder,
    depth: int,
    notes: Mapping[str, Any],
) -> None:
    """`tensors` as `head_layout` names them, written in bfloat16. `notes`: for readers, about its training
    and results."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to(torch.bfloat16).contiguous().cpu() for name, tensor in tensors.items()}
    if vocab is not None:
        stored["d2t"] = vocab.target_ids.to(torch.int32).cpu()
    stated = {
        "format": FORMAT,
        "version": VERSION,
        "depth": depth,
        "draft_vocab": 0 if vocab is None else len(vocab),
        "d2t_form": "absolute",
        "target": target_shape(target.config),
        "target_fingerprint": fingerprint(target),
        "notes": dict(notes),
    }
    (directory / TENSORS_FILE).write_bytes(safetensors.torch.save(stored))
    (directory / CONFIG_FILE).write_text(json.dumps(stated, indent=2) + "\n")


def read_head(directory: Path, target: Decoder, whole: ModelConfig | None = None) -> MtpHead:
    """The head in `directory`, for `target`, which may be a part of the model of dimensions `whole`. Raises
    ModelError for any problem with it."""
    file, whole = directory / CONFIG_FILE, whole or target.config
    config = _checked_config(read_json(file), target, whole, str(file))
    tensors, data = read_tensors(directory / TENSORS_FILE)
    where, is_offset = str(directory / TENSORS_FILE), config.d2t_form == "offset"
    d2t = tensors.pop("d2t", None)
    vocab = read_vocab(d2t, config.draft_vocab, target.config.vocab, where, offsets=is_offset)
    rooms = Rooms(target, head_dims(whole))
    weights = load_weights(head_layout(whole), tensors, rooms, directory / TENSORS_FILE)
    return MtpHead(config, weights, vocab, target, hashlib.blake2b(data, digest_size=16).digest())


def installed_heads() -> list[Path]:
    """Folders with heads: in the package of heads, or in the folder of a checkout."""
    spec = importlib.util.find_spec(HEADS_PACKAGE)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    places = places or [Path(__file__).parents[3] / "heads" / HEADS_PACKAGE]
    return sorted(file.parent for place in places for file in place.glob(f"*/{CONFIG_FILE}"))


def installed_head(target: Decoder, whole: ModelConfig) -> MtpHead:
    """The head for these weights. Raises ModelError if there is none, with advice."""
    own, heads = fingerprint(target, whole), installed_heads()
    for directory in heads:
        if read_json(directory / CONFIG_FILE).get("target_fingerprint") == own:
            return read_head(directory, target, whole)
    raise ModelError(
        "--speculate mtp: there is no head for this model; train one (docs/speculation.md, Train a head), "
        "and name it: mtp:PATH"
        if heads
        else "--speculate mtp needs a head, and none is installed: run `pip install ./heads` in Penstock's "
        "repository, or name one of your own: mtp:PATH"
    )


def _checked_config(raw: Mapping[str, Any], target: Decoder, whole: ModelConfig, where: str) -> HeadConfig:
    fields = Fields(raw, where)
    fields.need(raw.get("format") == FORMAT, f"it is no {FORMAT} head, but {raw.get('format')!r}")
    fields.need(raw.get("version") == VERSION, f"version {raw.get('version')!r} is not known; {VERSION} is")
    stated, own = fields.section("target"), target_shape(whole)
    wrong = [
        f"{name} is {stated.get(name)!r}, not {value!r}"
        for name, value in own.items()
        if stated.get(name) != value
    ]
    fields.need(not wrong, f"it was trained for another model: {'; '.join(wrong)}")
    found = raw.get("target_fingerprint")
    fields.need(
        found == fingerprint(target, whole),
        f"it was trained for other weights of the same shape (fingerprint {found})",
    )
    draft_vocab = 0 if raw.get("draft_vocab") == 0 else fields.count("draft_vocab", most=target.config.vocab)
    form = raw.get("d2t_form", "absolute")
    fields.need(form in _MAP_FORMS, f"d2t_form is {form!r}; known are {', '.join(_MAP_FORMS)}")
    return HeadConfig(fields.count("depth", most=MAX_DEPTH), draft_vocab, form)

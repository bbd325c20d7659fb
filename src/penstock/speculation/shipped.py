"""The draft head that a checkpoint has beside its model, under `mtp.*`: that of Qwen3-Next and Qwen3.5. Owns
its layer and the reading of its tensors.

    x = fc [norm(embedding of the next token), norm(h)]     h: the target's hidden state behind its last norm
    y = norm(one attending layer of the target's kind over x)    with experts if the file has some
    logits = the target's output matrix, by y

For the step one token further, y is in the place of h.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import TensorSpec, WeightSpec, stack
from penstock.models.decoder import Decoder
from penstock.models.hashed_file import WeightFile
from penstock.models.loader import LoadedModel
from penstock.models.model import ModelConfig, PagedKv, Weight
from penstock.models.registry import architecture_of
from penstock.models.split import part_of
from penstock.models.weights import (
    LoadedWeights,
    StoredTensor,
    check_weights,
    memory_needed,
    read_stored,
    read_weights,
)
from penstock.speculation.head import DraftHead, Guess, Rooms

PREFIX, _LAYER, _IN_MODEL = "mtp.", "mtp.layers.0.", "model."
_ROUTER = f"{_LAYER}mlp.gate.weight"


class ShippedHead(DraftHead):
    """A head on the device of its target, whose embedding and output matrix it shares."""

    def __init__(
        self, dims: ModelConfig, weights: Mapping[str, Weight], target: Decoder, digest: bytes
    ) -> None:
        """`dims`: of the whole layer."""
        inner = dict(weights)
        # files have the difference of a norm from one; the architecture adds it to its own
        self._fc: Weight = inner.pop("fc")
        self._norms: list[Tensor] = [inner.pop(name).add_(1.0) for name in _JOINED]
        inner |= {"embed": target.embedding, "head": target.output}
        block = architecture_of(dims).model(part_of(dims, target.ops.split), inner, target.ops, b"")
        super().__init__(block, (target.config.num_layers,), None, digest)
        self._target_norm = target.norm

    def fused(self, tapped: Sequence[Tensor]) -> Tensor:
        return self._block.ops.rms_norm(tapped[0], self._target_norm, self.dims.norm_eps)

    def _joined(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        ops, both = self._block.ops, (self._block.embed(tokens), hidden)
        normed = [
            ops.rms_norm(x, norm, self.dims.norm_eps) for x, norm in zip(both, self._norms, strict=True)
        ]
        return ops.linear(torch.cat(normed, dim=-1), self._fc), None

    def step(self, hidden: Tensor, tokens: Tensor, kv: PagedKv, at: Tensor | None = None) -> Guess:
        guess = super().step(hidden, tokens, kv, at)
        normed = self._block.ops.rms_norm(guess.hidden, self._block.norm, self.dims.norm_eps)
        return Guess(normed, guess.logits)


_JOINED = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}


def head_dims(target: ModelConfig, is_routed: bool) -> ModelConfig:
    """One layer of the target's shape that attends."""
    routing = target.routing
    if routing is not None:
        routing = dataclasses.replace(routing, dense_layers=()) if is_routed else None
    return dataclasses.replace(
        target, num_layers=1, windows=(), tied_embeddings=False, recurrence=None, routing=routing
    )


def head_layout(dims: ModelConfig) -> tuple[WeightSpec, ...]:
    """The tensors of a head, by their names in files."""
    hidden, found = dims.hidden, [stack("fc", (f"{PREFIX}fc.weight", dims.hidden, 2 * dims.hidden))]
    found += [stack(name, (f"{PREFIX}{stored}.weight", hidden)) for name, stored in _JOINED.items()]
    for weight in architecture_of(dims).layer(dims):
        parts = tuple(TensorSpec(_LAYER + part.name, part.shape) for part in weight.parts)
        found.append(weight._replace(name=f"layers.0.{weight.name}", parts=parts))
    found.append(stack("norm", (f"{PREFIX}norm.weight", hidden)))
    return tuple(weight._replace(exact=weight.name.endswith("norm")) for weight in found)


class _StoredHead(NamedTuple):
    """A head in the files of a checkpoint, which fits its model."""

    files: list[WeightFile]
    tensors: Mapping[str, StoredTensor]  # by the names of `head_layout`
    dims: ModelConfig

    @classmethod
    def find(cls, directory: Path, target: ModelConfig, stack: ExitStack) -> _StoredHead:
        """Its files are open until `stack` ends. Only headers are read. Raises ModelError if there is none,
        or it does not fit."""
        files, everything = read_stored(directory, stack)
        of_head = {name: tensor for name, tensor in everything.items() if name.startswith(PREFIX)}
        if not of_head:
            raise ModelError(f"--speculate mtp: {directory} has no head for drafts ({PREFIX}*)")
        # experts in one tensor are taken apart, as in the model
        renamed = {_IN_MODEL + name.removeprefix(PREFIX): tensor for name, tensor in of_head.items()}
        apart = architecture_of(target).laid_out(renamed)
        stored = {PREFIX + name.removeprefix(_IN_MODEL): tensor for name, tensor in apart.items()}
        dims = head_dims(target, _ROUTER in stored)
        own = f"hidden size {target.hidden}, vocabulary {target.vocab}"
        message = f"--speculate mtp: the head in {directory} does not fit the model ({own})"
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
        check_weights(shapes, head_layout(dims), message)
        return cls(files, stored, dims)


def check_shipped(directory: Path, target: ModelConfig) -> None:
    """Raises what `shipped_head` would, before weights are read."""
    with ExitStack() as stack:
        _StoredHead.find(directory, target, stack)


def shipped_head(loaded: LoadedModel, path: str | None) -> ShippedHead:
    """The head of the checkpoint that `loaded` is from; for random weights a random one. Raises ModelError if
    there is none, or it does not fit. `path`: what the user named instead."""
    target, directory, found = loaded.model, loaded.directory, LoadedWeights({}, {})
    if path is not None:
        raise ModelError(
            f"--speculate mtp:{path}: a head in files of its own is not supported with recurrent layers; "
            "--speculate mtp uses the one in the checkpoint"
        )
    if directory is None:
        return _random_head(target, loaded.dims)
    with ExitStack() as stack:
        head = _StoredHead.find(directory, loaded.dims, stack)
        with memory_needed(f"the head in {directory} does not fit into the memory of {target.device}"):
            rooms = Rooms(target, head.dims)
            for _ in read_weights(head_layout(head.dims), head.tensors, rooms.empty, found, rooms.put):
                pass
        for file in head.files:
            file.check_unchanged()
    state = hashlib.blake2b(digest_size=16, person=b"penstock-shipped")
    state.update(b"".join(found.content.values()))
    return ShippedHead(head.dims, found.tensors, target, state.digest())


def _random_head(target: Decoder, whole: ModelConfig) -> ShippedHead:
    dims = head_dims(whole, whole.routing is not None)
    generator, weights = torch.Generator(device=target.device).manual_seed(0), dict[str, Weight]()
    for weight in head_layout(dims):
        values = torch.zeros(weight.shape, dtype=target.dtype, device=target.device)
        if len(weight.shape) > 1:
            values.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        weights[weight.name] = Rooms(target, dims).placed(weight, values)
    return ShippedHead(dims, weights, target, b"random head")

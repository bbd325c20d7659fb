"""A draft head: one decoder layer over a hidden state and a token, with KV rows of its own. It guesses the
target's next tokens. Owns its pass; subclasses own what goes in, and the files.

The entry of token i takes the hidden state of token i - 1, and its logits are a guess at token i + 1. Its own
hidden state stands for that of token i, so the same step with it and the guessed token guesses one token
further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.models.architecture import WeightSpec
from penstock.models.decoder import Decoder
from penstock.models.forms import Forms, Matrix
from penstock.models.model import ModelConfig, PagedKv, Weight
from penstock.models.split import need_even_heads
from penstock.models.weights import (
    Pieces,
    RankPart,
    empty_formed,
    empty_weight,
    fill,
    memory_needed,
    refuse_any,
    unusable_tensors,
    whole_parts,
)
from penstock.speculation.vocab import DraftVocab


class Guess(NamedTuple):
    """The output of one step of the head."""

    hidden: Tensor  # [T, hidden]: input of the step one token further
    logits: Tensor  # [T, draft vocab]


class DraftHead:
    """A head on the device of its target."""

    # The dimensions of its KV. None: those of one layer of the target.
    own_dims: ModelConfig | None = None

    def __init__(
        self, block: Decoder, taps: tuple[int, ...], vocab: DraftVocab | None, digest: bytes
    ) -> None:
        """`block`: the layer, and the norm and the output behind it. `taps`: the layers of the target whose
        input it takes; their number means the output of the last one. `digest`: of its files."""
        self._block = block
        self.taps = taps
        self.vocab = None if vocab is None else vocab.to(block.device)
        self.digest = digest
        self.dims, self.dtype, self.rope = block.config, block.dtype, block.rope

    def fused(self, tapped: Sequence[Tensor]) -> Tensor:
        """The hidden states at `taps`, each [T, hidden], as one of the head's."""
        raise NotImplementedError

    def _joined(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The input of the layer, and its residual stream."""
        raise NotImplementedError

    def step(self, hidden: Tensor, tokens: Tensor, kv: PagedKv, at: Tensor | None = None) -> Guess:
        """`hidden` [T, hidden] of the tokens before `tokens` int32 [T]. `kv` holds the head's own rows, as
        its layer 0. `at`: entries to guess for; None: all."""
        inner, residual = self._block.layer(0, *self._joined(hidden, tokens), kv)
        if at is not None:
            inner, residual = inner[..., at, :], residual[at]
        state = residual + (inner.sum(dim=0).to(residual.dtype) if inner.dim() == 3 else inner)
        return Guess(state, self._block.head(inner, residual))

    def fill(self, hidden: Tensor, tokens: Tensor, kv: PagedKv) -> None:
        """Only write the rows of `kv`: with a single layer this needs no attention."""
        self._block.project(0, *self._joined(hidden, tokens), kv)


class Rooms:
    """Where a head's weights go, as its target's are held: whole, or one rank's part of them."""

    def __init__(self, target: Decoder, dims: ModelConfig) -> None:
        """`dims`: of the head's whole layer."""
        need_even_heads(dims, target.ops.split, "a head for drafts")
        self.target, self._dims = target, dims

    def empty(self, weight: WeightSpec) -> Weight:
        target, like = self.target, self.target.layers[-1].qkv
        if target.ops.split.size > 1:
            return RankPart(weight, self._dims, target.ops.split).empty(target.device, target.dtype)
        if not isinstance(like, Matrix):
            return empty_weight(weight, target.device, target.dtype)
        forms = Forms(torch.bfloat16 if like.wide is None else like.wide.dtype, like.few_rows)
        return empty_formed(weight, target.config, forms)

    def put(self, room: Weight, weight: WeightSpec, pieces: Pieces) -> None:
        if self.target.ops.split.size > 1:
            RankPart(weight, self._dims, self.target.ops.split).filled(room, pieces)
        else:
            fill(room, weight, pieces)

    def placed(self, weight: WeightSpec, values: Tensor) -> Weight:
        room = self.empty(weight)
        self.put(room, weight, whole_parts(weight, values))
        return room


def load_weights(
    layout: Sequence[WeightSpec], tensors: Mapping[str, Tensor], rooms: Rooms, where: Path
) -> dict[str, Weight]:
    """The weights of a head on the target's device, by the names of `layout`; `tensors` are those of its
    files. Raises ModelError if they are not those of `layout`."""
    shapes = {part.name: part.shape for weight in layout for part in weight.parts}
    problems = {
        "missing tensors": [name for name in shapes if name not in tensors],
        "unexpected tensors": [name for name in tensors if name not in shapes],
        **unusable_tensors(tensors, shapes),
    }
    refuse_any(problems, f"the tensors in {where} do not fit the model")
    with memory_needed(f"the head in {where} does not fit into the memory of {rooms.target.device}"):
        return {
            weight.name: rooms.placed(weight, torch.cat([tensors[part.name] for part in weight.parts]))
            for weight in layout
        }

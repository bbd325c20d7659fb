"""The forward pass as a list of ops: embed, each layer, head. Owns the activations; the same list is run
eagerly or captured."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.engine.execution.attention import Attention, Partial
from penstock.engine.execution.batch import Shape, StepInputs
from penstock.engine.execution.scoring import StepScores
from penstock.engine.execution.state_drafts import BoundDrafts, StateDrafts
from penstock.engine.execution.states import BoundStates, StateSlots
from penstock.lanes.lane import Op, Replay
from penstock.models.decoder import Decoder
from penstock.models.lora import LoraRuns
from penstock.models.model import ModelConfig


class Attending(NamedTuple):
    """State between the attention passes of one layer."""

    q: Tensor
    partial: Partial
    rest: Any  # for the rest of the layer


class BoundKv:
    """The paged cache bound to one step's inputs: the view of a model's layer. Its layer 0 is `first_layer`
    of the arena."""

    __slots__ = ("_attention", "_first_layer", "_inputs", "_scores")

    def __init__(
        self, attention: Attention, inputs: StepInputs, first_layer: int = 0, scores: StepScores | None = None
    ) -> None:
        self._attention = attention
        self._inputs = inputs
        self._first_layer = first_layer
        self._scores = scores

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._attention.rotate_and_write(self._first_layer + layer, qkv, q_norm, k_norm, self._inputs)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._scores is not None:
            self._scores.add_layer(self._first_layer + layer, q)
        return self._attention.attend(self._first_layer + layer, q, k, v, self._inputs)


@dataclass(slots=True)
class Flow:
    """Activations of one step; touched only by the step's own ops, in lane order."""

    inputs: StepInputs | None = None  # set by the upload of an eager step
    hidden: Tensor | None = None  # [T, hidden]; after a layer perhaps in shares, [shares, T, hidden]
    residual: Tensor | None = None
    attending: Attending | None = None  # set and read by the attention passes of one layer
    logits: Tensor | None = None  # [S, vocab]; None if the step samples nothing
    tapped: tuple[Tensor, ...] = ()  # [T, hidden] each: what drafts are made from
    lora: LoraRuns | None = None  # None: no token of the step has an adapter
    scores: StepScores | None = None  # None: no chunk asks for scores of its context

    def release(self) -> None:
        """The step is over: its activations are of no more use."""
        self.hidden = self.residual = self.logits = None

    def bound_inputs(self) -> StepInputs:
        assert self.inputs is not None, "a step's ops ran before its upload"
        return self.inputs


class LayerOp(NamedTuple):
    """One op of the pass, the layers whose KV it touches, and those whose states."""

    op: Op
    layers: tuple[int, int]
    label: str
    states: tuple[int, int] = (0, 0)


class LayerStore(Protocol):
    """What one layer keeps of each request."""

    layers: tuple[int, int]  # of KV: its own, or none behind those before it
    states: tuple[int, int]  # the same of states

    def bound(self, flow: Flow) -> Any:
        """The view that the layer's `forward` takes."""


class KvOfLayer:
    """Keys and values of its tokens, layer `number` of the blocks."""

    states = (0, 0)

    def __init__(self, attention: Attention, layer: int, number: int) -> None:
        self._attention, self._shift = attention, number - layer
        self.layers = number, number + 1

    def bound(self, flow: Flow) -> BoundKv:
        return BoundKv(self._attention, flow.bound_inputs(), self._shift, flow.scores)


class StateOfLayer:
    """A state of fixed size, layer `number` of the slots."""

    def __init__(self, slots: StateSlots, number: int, num_kv: int, drafts: StateDrafts | None) -> None:
        """`num_kv`: layers with KV before it. `drafts`: for steps with drafts."""
        self._slots, self._number, self._drafts = slots, number, drafts
        self.layers, self.states = (num_kv, num_kv), (number, number + 1)

    def bound(self, flow: Flow) -> BoundStates:
        inputs = flow.bound_inputs()
        if inputs.has_drafts and self._drafts is not None:
            return BoundDrafts(self._slots, self._number, inputs, self._drafts)
        return BoundStates(self._slots, self._number, inputs)


def layer_stores(
    config: ModelConfig, attention: Attention, slots: StateSlots | None, drafts: StateDrafts | None = None
) -> tuple[LayerStore, ...]:
    """By layer."""
    recurrent = () if config.recurrence is None else config.recurrence.layers
    stores: list[LayerStore] = []
    for layer in range(config.num_layers):
        num_states = bisect.bisect_left(recurrent, layer)
        num_kv = layer - num_states
        if slots is not None and layer in recurrent:
            stores.append(StateOfLayer(slots, num_states, num_kv, drafts))
        else:
            stores.append(KvOfLayer(attention, layer, num_kv))
    return tuple(stores)


class DraftMaker(Protocol):
    """What makes drafts from a step, as its pass sees it."""

    @property
    def taps(self) -> Collection[int]:
        """Layers whose input it takes. The number of layers means the output of the last one."""

    def blank(self, flow: Flow) -> None:
        """Runs last in every decode-only pass."""


class Recorder(Protocol):
    """Captures ops."""

    @property
    def padding_row(self) -> int: ...

    def whole(self, name: str, ops: Sequence[tuple[str, Op]]) -> Replay: ...

    def piece(self, name: str, ops: Sequence[tuple[str, Op]]) -> Replay:
        """It has run once when this returns, on a GPU."""


class Forward:
    """Makes the ops of one pass over a model."""

    def __init__(
        self,
        model: Decoder,
        attention: Attention,
        pending: Tensor,
        begin: Callable[[], None] = lambda: None,
        maker: DraftMaker | None = None,
        states: tuple[StateSlots | None, StateDrafts | None] = (None, None),
    ) -> None:
        """`begin` is called first in every pass, on the compute thread. `states`: of recurrent layers, and
        what steps with drafts need of them."""
        self.model = model
        self.slots, self.state_drafts = states
        self._stores = layer_stores(model.config, attention, *states)
        self._with_kv = [layer for layer, one in enumerate(self._stores) if one.layers[0] < one.layers[1]]
        self._begin = begin
        self.attention = attention
        # int32 [rows, 1 + drafts]: each request's last token, and the drafts after it
        self._pending = pending
        self._maker = maker
        self.blanks = maker is not None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What every pass uses besides its inputs, at fixed addresses."""
        slots = () if self.slots is None else self.slots.tensors
        drafts = () if self.state_drafts is None else self.state_drafts.tensors
        return self.model.rope, self.attention.arena, *slots, *drafts

    def captures(self, shape: Shape) -> bool:
        """Whether steps of this shape can be captured. How prompts run through states may depend on their
        lengths, which a replay does not know. Beside drafts, prompts are in no replay."""
        if self.slots is None or shape.is_decode:
            return True
        return not self.slots.form.needs_lengths and self.state_drafts is None

    def recorded(self, label: str, ops: Sequence[tuple[str, Op]], recorder: Recorder) -> Replay:
        """A replay of `ops`, those of a captured step."""
        return recorder.whole(label, ops)

    def ops(self, flow: Flow, is_decode: bool = False) -> list[LayerOp]:
        """`is_decode`: every request of the step has one token, or one and drafts."""
        ops = [LayerOp(partial(self._embed, flow), (0, 0), "embed")]
        ops += [
            LayerOp(partial(self._layer, flow, i), store.layers, f"layer {i}", store.states)
            for i, store in enumerate(self._stores)
        ]
        if self._maker is not None:
            for layer in sorted(self._maker.taps, reverse=True):
                ops.insert(1 + layer, LayerOp(partial(self._tap, flow), (0, 0), "tap"))
        ops.append(LayerOp(partial(self._head, flow), (0, 0), "head"))
        if self._maker is not None and is_decode:
            ops.append(LayerOp(partial(self._maker.blank, flow), (0, 0), "blank"))
        return ops

    def _embed(self, flow: Flow) -> None:
        self._begin()
        inputs = flow.bound_inputs()
        # Decodes come first, so token i belongs to chunk i; ids that the host does not know yet are read from
        # `pending`.
        firsts = inputs.tokens[: len(inputs.rows)]
        width = self._pending.shape[1]
        places = inputs.rows[: len(firsts)]
        if width > 1:  # -1 is the token sampled last, -2 the first draft
            places = places * width + (-1 - firsts).clamp(0, width - 1)
        latest = self._pending.view(-1)[places]
        firsts.copy_(torch.where(firsts < 0, latest, firsts))
        flow.hidden, flow.residual, flow.tapped = self.model.embed(inputs.tokens), None, ()

    def _tap(self, flow: Flow) -> None:
        """Keep the residual stream as it is here."""
        hidden, residual = flow.hidden, flow.residual
        assert hidden is not None
        if residual is not None:
            hidden = residual + (hidden.sum(dim=0) if hidden.dim() == 3 else hidden).to(residual.dtype)
        flow.tapped = (*flow.tapped, hidden)

    def _layer(self, flow: Flow, index: int) -> None:
        assert flow.hidden is not None
        kv = self._stores[index].bound(flow)
        flow.hidden, flow.residual = self.model.layer(index, flow.hidden, flow.residual, kv, flow.lora)

    def attend_resident(self, flow: Flow, number: int) -> None:
        """Layer `number` of those with KV, up to its attention over blocks on the device. `add_piece` may
        follow several times, then `finish`."""
        assert flow.hidden is not None
        inputs, index = flow.bound_inputs(), self._with_kv[number]
        kv = BoundKv(self.attention, inputs, number - index)
        q, k, v, rest = self.model.project(index, flow.hidden, flow.residual, kv, flow.lora)
        flow.attending = Attending(q, self.attention.attend_resident(number, q, k, v, inputs), rest)
        if flow.scores is not None:
            flow.scores.note_resident(flow.attending.partial.lse)

    def add_piece(self, flow: Flow, rows: tuple[int, int], landed: Callable[[], Tensor]) -> None:
        assert flow.attending is not None
        self.attention.add_piece(flow.attending.partial, flow.attending.q, rows, landed())

    def finish(self, flow: Flow, number: int) -> None:
        assert flow.attending is not None
        attending, flow.attending = flow.attending, None
        if flow.scores is not None:
            flow.scores.add_layer(number, attending.q, attending.partial.lse)
        attended, index = attending.partial.out.to(attending.q.dtype), self._with_kv[number]
        flow.hidden, flow.residual = self.model.finish(index, attended, attending.rest, flow.lora)

    def _head(self, flow: Flow) -> None:
        inputs = flow.bound_inputs()
        assert flow.hidden is not None and flow.residual is not None
        if len(inputs.sample_at) == 0:
            flow.logits = None
        elif len(inputs.sample_at) == len(inputs.tokens):
            flow.logits = self.model.head(flow.hidden, flow.residual)
        else:
            flow.logits = self.model.head(
                flow.hidden[..., inputs.sample_at, :], flow.residual[inputs.sample_at]
            )

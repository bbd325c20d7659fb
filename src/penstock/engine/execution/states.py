"""The states of recurrent layers: one slot for each row of device state, float32, at fixed addresses. Owns
them, and how the tokens of a step run through them.

    slot:  [layer][the last inputs of the convolution] | [layer][the matrix of each head]

A request has the slot of its row. Its first chunk clears the slot, and every later chunk continues from it,
in the order of the compute lane. So whatever becomes of a request, the next one in its row clears the slot
after the last step that used it. Padding has a slot of its own.

States at block boundaries are kept in slots of host memory. A step copies them from and to the rows of its
chunks, in the same order; which slot is whose is the business of `kv/states.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.contract import Access, Mode
from penstock.engine.execution.batch import StepInputs
from penstock.models.delta_rule import DeltaForm, DeltaInputs, LayerStates, Prompts, ReadableDelta
from penstock.models.model import Recurrence


class StateSlots:
    """Slots in `memory`, float32 numbers [slots, numbers]. On the device there is one for each row, and a
    last one for padding; in host memory one for each kept state."""

    def __init__(self, name: str, dims: Recurrence, memory: Tensor) -> None:
        """`name`: in declared accesses. `memory` is finite from the start, so what padding leaves in its slot
        stays so."""
        self.name = name
        self.dims = dims
        self.num_layers = len(dims.layers)
        window = (self.num_layers, dims.window - 1, dims.qkv_width)
        heads = (self.num_layers, dims.num_value_heads, dims.key_dim, dims.value_dim)
        windows, matrices = memory.split_with_sizes((math.prod(window), math.prod(heads)), dim=1)
        self.windows, self.matrices = windows.unflatten(1, window), matrices.unflatten(1, heads)
        self.form = form_for(dims, memory.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.windows, self.matrices

    def clear(self, slots: Sequence[int]) -> None:
        for tensor in self.tensors:
            for slot in slots:  # no index goes to the device
                tensor[slot].zero_()

    def access(self, slots: Sequence[int], mode: Mode) -> Access:
        """To all layers."""
        return Access(self.name, slots, (0, self.num_layers), mode)

    def copy_to(self, others: StateSlots, pairs: Sequence[tuple[int, int]]) -> None:
        """Slots of this memory to slots of another. Nothing waits for the copies but later work on the
        lane."""
        for own, other in zip(self.tensors, others.tensors, strict=True):
            for source, target in pairs:
                other[target].copy_(own[source], non_blocking=True)


class BoundStates:
    """The slots bound to one step's inputs: the view of a model's layer, which is `number` `layer` of the
    slots. Implements `RecurrentStates`."""

    __slots__ = ("_inputs", "_number", "_slots")

    def __init__(self, slots: StateSlots, number: int, inputs: StepInputs) -> None:
        self._slots, self._number, self._inputs = slots, number, inputs

    def advance(self, layer: int, qkv: Tensor, conv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        inputs, num, found = self._inputs, self._inputs.num_decodes, list[Tensor]()
        if num:
            found.append(self._decoded(DeltaInputs(qkv[:num], conv, decay[:num], beta[:num])))
        if len(qkv) > num:  # a captured step has no spans
            lengths = [length for _, length in inputs.spans] or None
            longest = max(lengths or [len(qkv) - num])
            prompts = Prompts(inputs.rows[num:], inputs.q_starts[num:], num, longest, lengths)
            own = DeltaInputs(qkv[num:], conv, decay[num:], beta[num:])
            found.append(self._slots.form.prompts(self._states, prompts, own))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _decoded(self, given: DeltaInputs) -> Tensor:
        """The rows of one token each."""
        return self._slots.form.steps(self._states, self._inputs.rows[: len(given.qkv)], given)

    @property
    def _states(self) -> LayerStates:
        return LayerStates(*(tensor[:, self._number] for tensor in self._slots.tensors))


def form_for(dims: Recurrence, device: torch.device) -> DeltaForm:
    if device.type == "cuda":
        from penstock.models.triton_delta import TritonDelta

        return TritonDelta()
    return ReadableDelta(dims)

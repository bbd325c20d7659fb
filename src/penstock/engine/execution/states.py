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

from torch import Tensor

from penstock.contract import Access, Mode
from penstock.engine.execution.batch import StepInputs
from penstock.models.delta_rule import convolved, heads_of, many_steps, one_step
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
        """Decodes together, and each prompt by itself."""
        inputs, dims = self._inputs, self._slots.dims
        num, rows = inputs.num_decodes, inputs.rows.long()
        qkv, found = qkv.float(), qkv.new_zeros(len(qkv), dims.num_value_heads, dims.value_dim).float()
        if num:
            found[:num] = self._decoded(qkv[:num], conv, decay[:num], beta[:num])
        at = num
        for chunk, (_, length) in enumerate(inputs.spans, start=num):
            own, at = slice(at, at + length), at + length
            found[own] = self._run(rows[chunk : chunk + 1], length, conv, qkv[own], decay[own], beta[own])
        return found

    def _decoded(self, qkv: Tensor, conv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The rows of one token each."""
        return self._run(self._inputs.rows[: len(qkv)].long(), 1, conv, qkv, decay, beta)

    def _run(
        self, rows: Tensor, length: int, conv: Tensor, qkv: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """[N * length, ...] of the requests in `rows` -> [N * length, value heads, value_dim]."""
        qkv, decay, beta = (part.unflatten(0, (-1, length)) for part in (qkv, decay, beta))
        windows, matrices = (tensor[:, self._number] for tensor in self._slots.tensors)
        mixed, window = convolved(qkv, windows.index_select(0, rows), conv)
        windows.index_copy_(0, rows, window)
        heads = heads_of(mixed, decay, beta, self._slots.dims)
        out, state = (one_step if length == 1 else many_steps)(heads, matrices.index_select(0, rows))
        matrices.index_copy_(0, rows, state)
        return out.transpose(1, 2).flatten(0, 1)

"""The states of recurrent layers on CUDA: the tokens of a step run through them by kernels. Owns how a step's
inputs become theirs."""

from __future__ import annotations

from torch import Tensor

from penstock.engine.execution.states import BoundStates
from penstock.models.triton_delta import DeltaInputs, LayerStates, Runs, advance


class TritonStates(BoundStates):
    """Decodes together, and all prompts together."""

    __slots__ = ()

    def advance(self, layer: int, qkv: Tensor, conv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        inputs, slots = self._inputs, self._slots
        states = LayerStates(*(tensor[:, self._number] for tensor in slots.tensors))
        longest = max((length for _, length in inputs.spans), default=0)
        runs = Runs(inputs.rows, inputs.q_starts, inputs.num_decodes, len(inputs.spans), longest)
        return advance(states, runs, DeltaInputs(qkv, conv, decay.contiguous(), beta.contiguous()))

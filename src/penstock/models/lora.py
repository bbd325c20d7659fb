"""Low-rank updates on top of a model's projections: y += (x A^T) B^T for the tokens of each adapter. Owns no
base weights and no files.

The model stacks q, k, v and gate, up into one matrix each, an adapter has them one by one: its A matrices of
one stack are stacked too, and each B adds to its own columns of the stack's output.

    x [T, in]  --A^T-->  [T, r_q + r_k + r_v]  --B_q^T, B_k^T, B_v^T-->  columns q | k | v of y [T, out]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from penstock.contract import Adapter, Chunk

_ADAPTER_OF = attrgetter("adapter")


class LoraPart(NamedTuple):
    """One adapted module inside a stack."""

    columns: slice  # of the stack's output
    ranks: slice  # of the stack's A rows
    b: Tensor  # [out of the module, r], the adapter's scale multiplied in


class LoraWeight(NamedTuple):
    """The update of an adapter to one stack of modules of one layer."""

    a: Tensor  # [sum of ranks, in]
    parts: tuple[LoraPart, ...]

    def add(self, x: Tensor, y: Tensor) -> None:
        """`y` [T, out] is changed in place."""
        low = F.linear(x, self.a)
        for columns, ranks, b in self.parts:
            y[:, columns].addmm_(low[:, ranks], b.t())


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter on the device: for each layer, by the names of `Architecture.layer` ("qkv", "out",
    "gate_up", "down")."""

    layers: tuple[Mapping[str, LoraWeight], ...]

    @property
    def num_bytes(self) -> int:
        weights = [weight for layer in self.layers for weight in layer.values()]
        return sum(
            tensor.nbytes for weight in weights for tensor in (weight.a, *(part.b for part in weight.parts))
        )


class LoraRun(NamedTuple):
    """Neighbouring tokens of a step that one adapter applies to."""

    start: int
    end: int
    weights: AdapterWeights


class LoraRuns(NamedTuple):
    """The adapters of one step. Keeps their weights alive, even if an adapter is unloaded meanwhile."""

    runs: Sequence[LoraRun]

    def add(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        """Add what the adapters say to `y`, the output of layer `layer`'s projection `name` (as in
        `Architecture.layer`) for input `x`; tokens without an adapter stay as they are."""
        for start, end, weights in self.runs:
            weight = weights.layers[layer].get(name)
            if weight is not None:
                weight.add(x[start:end], y[start:end])


def lora_runs(chunks: Sequence[Chunk], weights_of: Callable[[Adapter], AdapterWeights]) -> LoraRuns | None:
    """Which tokens of a step of `chunks` belong to which adapter; None where none has one. Neighbours with
    the same weights are one run."""
    if not any(map(_ADAPTER_OF, chunks)):  # most steps, and hundreds of chunks in each: at the speed of C
        return None
    runs: list[LoraRun] = []
    at = 0
    for chunk in chunks:
        end = at + len(chunk.tokens)
        if chunk.adapter is not None:
            weights = weights_of(chunk.adapter)
            if runs and runs[-1].end == at and runs[-1].weights is weights:
                runs[-1] = runs[-1]._replace(end=end)
            else:
                runs.append(LoraRun(at, end, weights))
        at = end
    return LoraRuns(runs)

"""What recurrent layers keep of a step with drafts until it is known which are accepted. Owns the inputs of
the step's state updates, not the states.

Such a step leaves the states as they were. When its tokens are chosen, each state is advanced by the inputs
of the accepted tokens, so behind the step it is what plain decoding would have left. A state has as many
bytes as the inputs of some sixty tokens, so inputs are kept, and not a state for each draft.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.execution.batch import StepInputs
from penstock.engine.execution.states import BoundStates, StateSlots
from penstock.models.delta_rule import DeltaInputs, convolved, heads_of, one_step
from penstock.models.model import Recurrence

INPUTS_OF_STATES = "inputs of states"  # the name of this memory in declared accesses


class Groups(NamedTuple):
    """The rows of a step, taken apart by request: adjacent rows of one request are a token and its drafts."""

    firsts: Tensor  # int64 [G]
    lengths: Tensor  # int64 [G]
    rows: Tensor  # int64 [G]: of device state

    @classmethod
    def of(cls, rows: Tensor, positions: Tensor) -> Groups:
        """Rows of padding are all at position 0, and groups of their own."""
        goes_on = (rows[1:] == rows[:-1]) & (positions[1:] == positions[:-1] + 1)
        firsts = torch.nn.functional.pad(~goes_on, (1, 0), value=True).nonzero()[:, 0]
        ends = torch.nn.functional.pad(firsts[1:], (0, 1), value=len(rows))
        return cls(firsts, ends - firsts, rows[firsts].long())

    def longest_first(self) -> Groups:
        order = self.lengths.argsort(descending=True, stable=True)
        return Groups(self.firsts[order], self.lengths[order], self.rows[order])


class StateDrafts:
    """The inputs of one step, at fixed addresses: steps follow each other on one lane."""

    def __init__(self, slots: StateSlots, num_rows: int, rejected: Tensor) -> None:
        """`num_rows`: decoded tokens of a step at most. `rejected` [rows]: drafts that the step has
        rejected."""
        dims, device = slots.dims, slots.matrices.device
        self._slots, self._rejected = slots, rejected
        widths = dims.qkv_width, dims.num_value_heads, dims.num_value_heads
        self._kept = [torch.zeros((slots.num_layers, num_rows, width), device=device) for width in widths]
        self._convs: dict[int, Tensor] = {}  # by layer; weights

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self._kept, self._rejected

    @property
    def is_cuda(self) -> bool:
        return self._rejected.is_cuda

    @staticmethod
    def num_bytes(dims: Recurrence, num_rows: int) -> int:
        return 4 * len(dims.layers) * num_rows * (dims.qkv_width + 2 * dims.num_value_heads)

    def advance(self, number: int, given: DeltaInputs, inputs: StepInputs) -> Tensor:
        """What decoded tokens find in the states of layer `number`, each after the drafts before it:
        [R, value heads, value_dim]. The states stay as they are."""
        self._convs[number] = given.conv
        for kept, part in zip(self._kept, (given.qkv, given.decay, given.beta), strict=True):
            kept[number, : len(part)].copy_(part)
        dims = self._slots.dims
        found = given.decay.new_empty(len(given.qkv), dims.num_value_heads, dims.value_dim)
        self._run(number, inputs, found)
        return found

    def settle(self, inputs: StepInputs) -> None:
        """After sampling: advance all states by the accepted tokens."""
        for number in range(self._slots.num_layers):
            self._run(number, inputs, None)
        if inputs.rows.is_cuda:
            from penstock.engine.execution import triton_states

            num = inputs.num_decodes
            where = inputs.rows[:num], inputs.positions[:num], self._rejected
            triton_states.move_windows(self._slots.windows, self._kept[0], where)

    def _run(self, number: int, inputs: StepInputs, found: Tensor | None) -> None:
        """Through layer `number`. With `found` all tokens, and only what they find is kept; without it the
        accepted tokens, and only the states are kept."""
        num, conv = inputs.num_decodes, self._convs[number]
        qkv, decay, beta = (kept[number, :num] for kept in self._kept)
        given, rows, positions = (
            DeltaInputs(qkv, conv, decay, beta),
            inputs.rows[:num],
            inputs.positions[:num],
        )
        windows, matrices = (tensor[:, number] for tensor in self._slots.tensors)
        if qkv.is_cuda:
            from penstock.engine.execution import triton_states

            where = rows, positions, self._rejected
            triton_states.advance_groups(given, (windows, matrices), where, self._slots.dims, found)
            return
        groups = Groups.of(rows, positions)
        if found is None:
            rejected = self._rejected.long()[groups.rows]
            groups = groups._replace(lengths=(groups.lengths - rejected).clamp(min=1))
        groups = groups.longest_first()
        window, state = run_groups(given, groups, windows, matrices, self._slots.dims, found)
        if found is None:
            windows.index_copy_(0, groups.rows, window)
            matrices.index_copy_(0, groups.rows, state)


class BoundDrafts(BoundStates):
    """The view of a layer in a step with drafts."""

    __slots__ = ("_drafts",)

    def __init__(self, slots: StateSlots, number: int, inputs: StepInputs, drafts: StateDrafts) -> None:
        super().__init__(slots, number, inputs)
        self._drafts = drafts

    def _decoded(self, given: DeltaInputs) -> Tensor:
        return self._drafts.advance(self._number, given, self._inputs)


def run_groups(
    given: DeltaInputs,
    groups: Groups,
    windows: Tensor,
    matrices: Tensor,
    dims: Recurrence,
    found: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The first tokens of all groups together, then the second ones, and so on: the arithmetic of plain
    decoding. `groups` are sorted by length. Writes what they find to `found`; returns the windows and states
    behind each group."""
    window, state = windows.index_select(0, groups.rows), matrices.index_select(0, groups.rows)
    num_alive = [int((groups.lengths > place).sum()) for place in range(int(groups.lengths.max()))]
    for place, num in enumerate(num_alive):
        at = groups.firsts[:num] + place
        mixed, next_window = convolved(given.qkv[at].unsqueeze(1), window[:num], given.conv)
        heads = heads_of(mixed, given.decay[at].unsqueeze(1), given.beta[at].unsqueeze(1), dims)
        out, next_state = one_step(heads, state[:num])
        if num == len(state):
            window, state = next_window, next_state
        else:
            window[:num], state[:num] = next_window, next_state
        if found is not None:
            found[at] = out[:, :, 0]
    return window, state

"""The target's pass: the forward of a step, from the upload of its inputs to its logits. Owns its order: an
eager step waits for arriving KV layer by layer, a replay for all of it before."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.contract import Access, Mode, StepPlan
from penstock.engine.execution.arriving import Arriving
from penstock.engine.execution.batch import Packed, Shape, StepInputs
from penstock.engine.execution.forward import Forward
from penstock.engine.execution.paging import PagedPass
from penstock.engine.execution.passes import GRAPHS, INPUTS, LAST, SAMPLER, Pass, Step, only
from penstock.engine.execution.replays import Replays
from penstock.engine.execution.staging import move
from penstock.errors import InvariantBroken
from penstock.models.lora import LoraRuns


class TargetPass(Pass):
    """One model. A layer of another kind is an op of `Forward.ops`."""

    def __init__(
        self, forward: Forward, replays: Replays, rejected: Tensor, paged: PagedPass | None = None
    ) -> None:
        """`rejected` [rows]: drafts that the step before rejected. `paged`: runs layers whose KV is partly in
        host memory."""
        self.forward = forward
        self.model, self.attention = forward.model, forward.attention
        self.replays = replays
        self.attentions = (forward.attention,)
        self._rejected = rejected
        self._paged = paged
        self._num_layers = forward.model.config.num_kv_layers

    def bucket_for(self, plan: StepPlan, arriving: Arriving, lora: LoraRuns | None) -> Shape | None:
        """The shape of the replay that runs the step; None if it runs op by op."""
        if arriving.overlaps or lora is not None or plan.reads_host or plan.scores:
            return None
        return self.replays.bucket_for(plan)

    def capture(self, bucket: Shape) -> None:
        self.replays.get(bucket)

    def submit(self, step: Step) -> None:
        if step.bucket is None:
            self._run_eagerly(step)
        else:
            self._replay(step, step.bucket)

    def _run_eagerly(self, step: Step) -> None:
        packed, flow, ops = step.packed, step.flow, step.ops
        if packed.paged and self._paged is None:
            raise InvariantBroken("a step reads KV in host memory, but there is no host tier")
        host = step.staged[0][: packed.num_ints]

        def upload() -> None:
            step.ints = move(torch.empty(len(host), dtype=torch.int32, device=self.model.device), host)
            flow.inputs = packed.views(step.ints)

        ops.submit(upload, "upload", [step.staged[1]])
        self._submit_place(step)
        others = {"embed": (_embed_access(packed),), "blank": self._blank_accesses(step)}
        for op, layers, label, states in self.forward.ops(flow, packed.shape.is_decode):
            ops.wait_layers(self._end_of_blanks(step) if label == "blank" else layers[1])
            if layers[0] == layers[1]:
                ops.submit(op, label, others.get(label, step.states(states)))
            elif packed.paged and self._paged is not None:
                self._paged.submit_layer(step, layers[0])
            else:
                # key bounds, besides KV
                scored = () if flow.scores is None else flow.scores.accesses(layers)
                ops.submit(op, label, (*step.kv(layers), *scored))
            if packed.paged and self._paged is not None and label == "embed":
                self._paged.lane.wait(ops.lane.record())  # the slots must be uploaded first

    def _replay(self, step: Step, bucket: Shape) -> None:
        captured, inputs, ops = self.replays.get(bucket), self.replays.inputs, step.ops
        step.flow, step.ints = captured.flow, inputs
        host = step.staged[0][: step.packed.num_ints]
        ops.submit(
            lambda: move(inputs[: len(host)], host), "upload", [step.staged[1], only(INPUTS, Mode.WRITE)]
        )
        self._submit_place(step)
        ops.wait_layers(self._end_of_blanks(step))  # a replay cannot wait inside
        others = _embed_access(step.packed), only(INPUTS, Mode.READ), only(GRAPHS, Mode.WRITE)
        kept = *step.kv((0, self._num_layers)), *step.states((0, step.limits.state_layers))
        ops.replay(captured.replay, (*kept, *others, *self._blank_accesses(step)))

    def _submit_place(self, step: Step) -> None:
        """If the step before had drafts, this step's rows begin after the accepted ones. Only the device
        knows how many they are."""
        packed, drafted = step.packed, step.packed.drafted
        if drafted is None or drafted.num_unsure == 0:
            return

        def place() -> None:
            inputs = step.flow.bound_inputs()
            unsure = drafted.views(step.ints, inputs.tokens).unsure[: packed.num_decodes]
            place_unsure(inputs, unsure, self._rejected, step.limits.block_tokens)

        step.ops.submit(place, "place", [_embed_access(packed), only(INPUTS, Mode.WRITE)])

    def _end_of_blanks(self, step: Step) -> int:
        """Layers that a decode writes: with a proposer, those of its KV, too."""
        return step.limits.num_layers if self.forward.blanks else self._num_layers

    def _blank_accesses(self, step: Step) -> tuple[Access, ...]:
        """A decode-only step blanks the draft KV of its tokens."""
        if not self.forward.blanks or not step.packed.shape.is_decode:
            return ()
        return step.kv((self._num_layers, step.limits.num_layers))[1:]


def _embed_access(packed: Packed) -> Access:
    return Access(SAMPLER, packed.row_of, LAST, Mode.READ)


def place_unsure(inputs: StepInputs, unsure: Tensor, rejected: Tensor, block_tokens: int) -> None:
    """Move the rows of requests back by the drafts that the step before rejected. Decodes are the first rows
    and each has a sample, so that rows and samples have the same index."""
    if unsure.is_cuda:
        from penstock.engine.execution import triton_steps

        triton_steps.place_unsure(inputs, unsure, rejected, block_tokens)
        return
    num = len(unsure)
    shift = rejected[inputs.rows[:num]] * unsure
    inputs.positions[:num] -= shift
    inputs.kv_lens[:num] -= shift
    last = inputs.kv_lens[:num] - 1
    slots = inputs.tables[inputs.table_starts[:num] + last // block_tokens]
    write_at = slots * block_tokens + last % block_tokens
    inputs.write_at[:num] = torch.where(shift > 0, write_at, inputs.write_at[:num])

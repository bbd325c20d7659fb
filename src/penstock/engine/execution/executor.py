"""Runs steps: a plan becomes ops on the compute lane, a finished step becomes a result. Owns the order of a
step's passes, and the host buffers that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.contract import Adapter, Fence, Mode, StepPlan, Waits
from penstock.engine.execution.arriving import Arriving
from penstock.engine.execution.batch import TOKENS_OF
from penstock.engine.execution.forward import Flow
from penstock.engine.execution.masks import Masks
from penstock.engine.execution.passes import GRAPHS, Pass, Step, StepLimits, StepOps, only
from penstock.engine.execution.running_step import LateSample, Outputs, RunningStep
from penstock.engine.execution.staging import StagingRing
from penstock.engine.execution.target import TargetPass
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane, Ticket
from penstock.models.lora import AdapterWeights, lora_runs

_NO_WAITS = Waits()


class Executor:
    """One model on one compute lane. Called from the engine thread; only `RunningStep.wait_result` blocks."""

    def __init__(
        self,
        lane: Lane,
        limits: StepLimits,
        passes: Sequence[Pass],
        target: TargetPass,
        masks: Masks,
        weights_of: Callable[[Adapter], AdapterWeights],
    ) -> None:
        """`passes`: in the order of their ops; `target` is one of them."""
        self.limits = limits
        self.passes = passes
        self.target = target
        self.masks = masks
        self._lane = lane
        self._weights_of = weights_of
        self._is_cuda = target.model.device.type == "cuda"
        self._staging = StagingRing(limits.staging_ints, lane, "staged inputs", self._is_cuda)
        self._results = StagingRing(limits.result_ints, lane, "staged results", self._is_cuda)

    def launch(self, plan: StepPlan, waits: Waits = _NO_WAITS) -> RunningStep:
        """Put the step on the compute lane and return; the step before may still be running. `waits`: fences
        and loads for the plan's ids. If a grammar applies, sampling is not launched: call `sample` after the
        step before was read."""
        after, loads = waits.of(plan)
        self._check(plan)
        for fence in after:
            self._lane.wait(fence)
        ops = StepOps(self._lane, Arriving(loads))
        for one in self.passes:
            one.begin(plan, ops)
        step = self._packed(plan, ops)
        self._submit(step, is_late=False)
        entries = step.entries()
        masks = step.masks = self.masks.for_step(entries, self._is_cuda) if self.masks.answers else None
        last, fence = self._finish(step) if masks is None else (ops.newest(), self._lane.record())
        self._staging.used_until(fence)
        late = None if masks is None else LateSample(masks, partial(self._finish, step))
        nums = step.sampling.num_logprobs
        return RunningStep(plan.number, entries, nums, step.outputs, last, fence, loads, late)

    def sample(self, step: RunningStep) -> RunningStep:
        """The step launched last, with its sampling on the lane. Blocks only if a grammar applies, until its
        masks are filled; `masks.advance` with the tokens of the step before starts their computation."""
        if step.late is None:
            return step
        endings = step.late.masks.wait_filled(self._lane)
        last, fence = step.late.submit()
        most = step.late.masks.most
        return replace(step, last=last, fence=fence, late=None, endings=endings, most=most)

    def forget(self, left: Sequence[tuple[str, range]]) -> None:
        """Scored requests that left, and the ranges of their key bounds that are kept."""
        for one in self.passes:
            one.forget(left)

    def _check(self, plan: StepPlan) -> None:
        if any(chunk.num_logits > 1 for chunk in plan.chunks[plan.num_decodes :]):
            raise InvariantBroken(
                f"step {plan.number} wants several tokens for one request: a row has only one last token"
            )
        most = self.limits.max_request_drafts
        if max(map(len, map(TOKENS_OF, plan.chunks[: plan.num_decodes])), default=0) > 1 + most:
            raise InvariantBroken(f"step {plan.number} verifies over {most} drafts of one request")

    def _packed(self, plan: StepPlan, ops: StepOps) -> Step:
        lora = lora_runs(plan.chunks, self._weights_of)
        bucket = self.target.bucket_for(plan, ops.arriving, lora)
        host, array = self._staging.next()
        packed = self.target.replays.packer.pack(plan.chunks, plan.num_decodes, bucket, array, plan.num_ahead)
        staged, results = (host, self._staging.access(Mode.READ)), self._results
        outputs = Outputs(self._lane, results.next()[0], results.access(Mode.READ), lora)
        written = results.access(Mode.WRITE)
        step = Step(plan, ops, self.limits, bucket, packed, staged, written, outputs, Flow(lora=lora))
        for one in self.passes:
            one.pack(step)
        return step

    def _submit(self, step: Step, is_late: bool) -> None:
        for one in self.passes:
            if one.is_late == is_late:
                one.submit(step)

    def _finish(self, step: Step) -> tuple[Ticket, Fence]:
        """From sampling on."""
        self._submit(step, is_late=True)
        if step.bucket is not None and not self._is_cuda:  # a GPU's belong to its graph
            # Also after a failed op. The flow stays for the next replay, and there is one for each shape.
            self._lane.submit(step.flow.release, (only(GRAPHS, Mode.WRITE),), label="release")
        # a later step may read layers that this one did not wait for
        step.ops.wait_layers(self.limits.num_layers)
        fence = self._lane.record()
        self._results.used_until(fence)
        if step.masks is not None:
            self.masks.used_until(fence)
        return step.ops.newest(), fence

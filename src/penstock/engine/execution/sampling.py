"""The passes over a step's logits: tokens for its requests, and logprobs of prompts. Owns what the lane does
for them; the mathematics is in `sampler.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.contract import Access, Mode, StepPlan
from penstock.engine.execution.forward import Flow
from penstock.engine.execution.masks import Masks
from penstock.engine.execution.passes import (
    GRAPHS,
    INPUTS,
    LAST,
    ROW_STATE,
    SAMPLER,
    Pass,
    Step,
    StepOps,
    only,
)
from penstock.engine.execution.sampler import Allowed, Rows, Sampler, needs_state, token_logprobs
from penstock.engine.execution.staging import Uploads, move
from penstock.models.decoder import Decoder

LOGPROB_ROWS = 128  # prompt positions whose logits are held at one time: 128 * 151936 floats are 78 MB


class SamplePass(Pass):
    """Chooses the step's tokens, once masks are there if a grammar applies."""

    is_late = True

    def __init__(self, sampler: Sampler, rows: Rows, masks: Masks, uploads: Uploads) -> None:
        self.sampler = sampler
        self._rows = rows
        self._masks = masks
        self._uploads = uploads

    def begin(self, plan: StepPlan, ops: StepOps) -> None:
        for start in plan.starts:
            self._rows.start(start)
            if self._masks.answers or start.sampling.masked_from is not None:
                self._masks.start(start)
            if needs_state(start.sampling):
                access = Access(SAMPLER, (start.row,), ROW_STATE, Mode.WRITE)
                ops.submit(partial(self.sampler.start, start), "start", [access])

    def pack(self, step: Step) -> None:
        packed = step.packed
        num_unsure = 0 if packed.drafted is None else packed.drafted.num_unsure
        step.sampling = plan = self._rows.sample_plan(*packed.samples(), num_unsure)
        if plan.params is not None:
            step.params_at, words = packed.append(plan.params.size)
            words[:] = plan.params.ravel()

    def submit(self, step: Step) -> None:
        num, plan = step.packed.shape.num_samples, step.sampling
        if not num:
            return
        step.outputs.sampled = step.outputs.room_for(num, max(plan.num_logprobs))
        state = Access(SAMPLER, plan.rows, ROW_STATE if plan.penalties or plan.ends else LAST, Mode.WRITE)
        read = [] if step.bucket is None else [only(arena, Mode.READ) for arena in (INPUTS, GRAPHS)]
        read += [] if step.masks is None else [step.masks.access]
        step.ops.submit(lambda: self.sample(step), "sample", [state, step.written, *read])

    def sample(self, step: Step) -> None:
        """The op."""
        plan, outputs, inputs = step.sampling, step.outputs, step.flow.bound_inputs()
        assert step.flow.logits is not None and outputs.sampled is not None
        params, drafted, allowed = None, step.packed.drafted, None
        if plan.params is not None:
            end = step.params_at + plan.params.size
            params = step.ints[step.params_at : end].view(plan.params.shape)
        drafting = None if drafted is None else drafted.views(step.ints, inputs.tokens)
        if (masks := step.masks) is not None:
            words = torch.empty(len(masks.host), dtype=torch.int32, device=self._uploads.device)
            allowed = Allowed(self._uploads.send(masks.at), move(words, masks.host).view(len(masks.at), -1))
        output = self.sampler.sample(step.flow.logits, inputs.sample_rows, plan, params, allowed, drafting)
        move(outputs.sampled, output.packed())
        outputs.made = output


class PromptLogprobsPass(Pass):
    """Logprobs of the prompt tokens that follow each computed position, a slice of positions at a time."""

    def __init__(self, model: Decoder, uploads: Uploads) -> None:
        self._model, self._uploads = model, uploads

    def submit(self, step: Step) -> None:
        if step.bucket is not None or not step.plan.echoes:
            return
        at = 0
        for chunk in step.plan.chunks:
            if chunk.echo is not None:
                targets, num_top = chunk.echo
                room = step.outputs.room_for(len(targets), num_top)
                step.outputs.prompts.append((chunk.request_id, room))
                for first in range(0, len(targets), LOGPROB_ROWS):
                    part = slice(first, first + LOGPROB_ROWS)
                    op = partial(self._echo, step.flow, at + first, targets[part], room[part], num_top)
                    step.ops.submit(op, "prompt logprobs", [step.written])
            at += chunk.num_tokens

    def _echo(self, flow: Flow, at: int, targets: Sequence[int], room: Tensor, num_top: int) -> None:
        assert flow.hidden is not None and flow.residual is not None
        rows = slice(at, at + len(targets))
        logits = self._model.head(flow.hidden[..., rows, :], flow.residual[rows])
        move(room, token_logprobs(logits, self._uploads.send(targets), num_top).packed())

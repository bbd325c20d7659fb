"""The passes over a step's logits: tokens for its requests, and logprobs of prompts. Owns what the lane does
for them; the mathematics is in `sampler.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.contract import Access, Mode, StepPlan
from penstock.engine.execution.batch import Shape
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
from penstock.engine.execution.replays import CapturedPass, Replays
from penstock.engine.execution.sampler import (
    NUM_PARAMS,
    Allowed,
    Rows,
    SampleKind,
    SampleOutput,
    Sampler,
    needs_state,
    token_logprobs,
)
from penstock.engine.execution.staging import Uploads, move
from penstock.models.decoder import Decoder

MOST_SORTED = 64  # rows whose top-k and top-p are captured
LOGPROB_ROWS = 128  # prompt positions whose logits are held at one time: 128 * 151936 floats are 78 MB


class SamplePass(Pass):
    """Chooses the step's tokens, once masks are there if a grammar applies.

    After the replay of a decode step, sampling that needs no state of rows is a replay, too. Op by op, its
    launches would take longer than a small model's step.
    """

    is_late = True

    def __init__(
        self, sampler: Sampler, rows: Rows, masks: Masks, uploads: Uploads, replays: Replays
    ) -> None:
        self.sampler = sampler
        self._rows = rows
        self._masks = masks
        self._uploads = uploads
        self._replays = replays

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
        read = [] if step.bucket is None else [only(INPUTS, Mode.READ)]
        graphs = [] if step.bucket is None else [only(GRAPHS, Mode.WRITE)]
        masks = [] if step.masks is None else [step.masks.access]
        kind = None if step.bucket is None or step.packed.drafted is not None else plan.kind
        if step.bucket is None or kind is None or not _is_captured(step.bucket, kind):
            step.ops.submit(
                lambda: self.sample(step), "sample", [state, step.written, *read, *graphs, *masks]
            )
            return
        captured = self._captured(step.bucket, kind)
        if masks or plan.params is not None:
            step.ops.submit(lambda: self._fill(step, captured), "sampling", [*read, *graphs, *masks])
        step.ops.replay(captured.replay, [state, *read, *graphs])
        step.ops.submit(lambda: self.hand_on(step, captured), "sampled", [step.written, *graphs])

    def sample(self, step: Step) -> None:
        """The op."""
        plan, outputs, inputs = step.sampling, step.outputs, step.flow.bound_inputs()
        assert step.flow.logits is not None and outputs.sampled is not None
        drafted = step.packed.drafted
        drafting = None
        if drafted is not None:
            positions = inputs.positions[inputs.sample_at] if plan.free is not None else None
            drafting = drafted.views(step.ints, inputs.tokens, positions)
        given = plan, _params(step), self._allowed(step), drafting
        output = self.sampler.sample(step.flow.logits, inputs.sample_rows, *given)
        move(outputs.sampled, output.packed())
        outputs.made = output

    def _allowed(self, step: Step) -> Allowed | None:
        if (masks := step.masks) is None:
            return None
        words = torch.empty(len(masks.host), dtype=torch.int32, device=self._uploads.device)
        return Allowed(self._uploads.send(masks.at), move(words, masks.host).view(len(masks.at), -1))

    # ---- captured

    def capture(self, bucket: Shape) -> None:
        for kind in SampleKind:
            if _is_captured(bucket, kind):
                self._captured(bucket, kind)
        logits = self._replays.get(bucket).flow.logits
        if logits is not None:  # the first grammar must not wait for a kernel to be compiled
            self.sampler.lane.submit(partial(_forbid_nothing, logits), label="masks").wait_done()

    def _captured(self, bucket: Shape, kind: SampleKind) -> CapturedPass:
        device, plan = self._uploads.device, kind.plan()

        def room(size: int) -> tuple[Tensor, ...]:
            """The parameters, and the chosen tokens."""
            params = torch.zeros((NUM_PARAMS, size), dtype=torch.int32, device=device)
            return params, torch.zeros(size, dtype=torch.int32, device=device)

        def run(flow: Flow, tensors: tuple[Tensor, ...]) -> None:
            params, tokens = tensors
            assert flow.logits is not None
            given = None if plan.greedy else params
            rows = flow.bound_inputs().sample_rows
            tokens.copy_(self.sampler.sample(flow.logits, rows, plan, given).tokens)

        return self._replays.get_pass(bucket, kind, room, run)

    def _fill(self, step: Step, captured: CapturedPass) -> None:
        """Parameters to where the replay reads them, and forbidden tokens out of its logits."""
        if (params := _params(step)) is not None:
            move(captured.tensors[0], params)
        if (allowed := self._allowed(step)) is not None:
            assert step.flow.logits is not None
            allowed.forbid(step.flow.logits)

    def hand_on(self, step: Step, captured: CapturedPass) -> None:
        """The op after the replay: the tokens to the host, and to what makes drafts."""
        assert step.outputs.sampled is not None
        tokens = captured.tensors[1]
        move(step.outputs.sampled, tokens)
        step.outputs.made = SampleOutput(tokens)


def _forbid_nothing(logits: Tensor) -> None:
    at, num_words = torch.zeros(1, dtype=torch.int64, device=logits.device), -(-logits.shape[-1] // 32)
    Allowed(at, torch.full((1, num_words), -1, dtype=torch.int32, device=logits.device)).forbid(logits)


def _is_captured(bucket: Shape, kind: SampleKind) -> bool:
    """Steps with prompts take longer than launches do, and so does sorting many rows, which needs much memory
    besides. Which drafts are kept is found out op by op."""
    if not bucket.is_decode or bucket.has_drafts:
        return False
    return kind is not SampleKind.FILTERED or bucket.num_samples <= MOST_SORTED


def _params(step: Step) -> Tensor | None:
    """The parameters of the step's plan on the device."""
    if (params := step.sampling.params) is None:
        return None
    return step.ints[step.params_at : step.params_at + params.size].view(params.shape)


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

"""Runs steps: a plan becomes ops on the compute lane, a finished step becomes a result. Owns the order of a step's ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.config import ScorerName
from penstock.contract import MAX_LOGPROBS, Access, Adapter, Fence, Mode, StepPlan, Waits
from penstock.engine.execution import warm
from penstock.engine.execution.arriving import Arriving
from penstock.engine.execution.batch import Packed, Packer, Shape
from penstock.engine.execution.forward import Flow, Forward
from penstock.engine.execution.grammars import Grammars
from penstock.engine.execution.masks import Masks, StepMasks
from penstock.engine.execution.outcome import LateSample, Outputs, RunningStep
from penstock.engine.execution.paging import PagedReads
from penstock.engine.execution.replays import Replays
from penstock.engine.execution.rows import NUM_PARAMS, Rows, SamplePlan, needs_state
from penstock.engine.execution.sampler import Allowed, Sampler, packed_width, token_logprobs
from penstock.engine.execution.scoring import ContextKeys
from penstock.engine.execution.staging import StagingRing, Uploads, move
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane, Op, Ticket
from penstock.models.lora import AdapterWeights, blank_weights, lora_runs
from penstock.observe import ByteGuard

_LOGPROB_ROWS = 128  # prompt positions whose logits are held at once: 128 * 151936 floats are 78 MB

# Device memory that steps use besides KV, as it is called in declared accesses. The sampler's slots are rows; its "layers" are the last
# token, and what penalties count.
_SAMPLER, _LAST, _ROW_STATE = "sampler rows", (0, 1), (0, 2)
_INPUTS = "replay inputs"
_GRAPHS = "memory of replays"
_ONE: tuple[tuple[int, ...], tuple[int, int]] = ((0,), (0, 1))  # there is one of each, in one piece
_NO_WAITS = Waits()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """KeySizes that hold for the executor's life."""

    max_batch: int
    prefill_chunk: int  # prompt tokens per step
    max_table: int  # slots of the longest sequence
    block_tokens: int
    padding_slot: int
    arena: str  # name of the KV arena in declared accesses
    max_paged: int = 0  # blocks in host memory that the sequences of a step may have
    max_parts: int = 0  # of a sequence's context, whose scores a step may give

    @property
    def staging_ints(self) -> int:
        most = Shape(self.prefill_chunk + self.max_batch, self.max_batch, self.max_batch)
        return most.fixed_ints + 1 + self.max_batch * (self.max_table + NUM_PARAMS) + self.max_paged

    @property
    def result_ints(self) -> int:
        return (self.max_batch + self.prefill_chunk) * packed_width(MAX_LOGPROBS) + self.max_parts + 1


class _Chain:
    """Ops of one step on the lane, each after the one before: when one fails, the rest are skipped and say why."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.last: Ticket | None = None

    def submit(self, op: Op, label: str, accesses: Sequence[Access] = ()) -> Ticket:
        self.last = self._lane.submit(op, accesses, label=label, after=self.last)
        return self.last

    def newest(self) -> Ticket:
        assert self.last is not None, "nothing of the step was submitted"
        return self.last


class Executor:
    """One model on one compute lane. Called from the engine thread; only `RunningStep.wait_result` blocks."""

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        uploads: Uploads,
        lane: Lane,
        limits: StepLimits,
        buckets: Sequence[Shape],
        weights_of: Callable[[Adapter], AdapterWeights],
        grammars: Grammars,
    ) -> None:
        device = forward.model.device
        self.masks = Masks(grammars.wait_compiled, grammars.num_words, limits.max_batch, lane)
        self.guard: ByteGuard | None = None  # in checked mode
        self.paged: PagedReads | None = None  # where there is host memory to page out to
        self.scores: ContextKeys | None = None  # where requests may attend to a part of their context
        self._weights_of = weights_of
        self._forward = forward
        self._sampler = sampler
        self._uploads = uploads
        self._lane = lane
        self.limits = limits
        self._device = device
        self._rows = Rows(limits.max_batch)
        self._packer = Packer(limits.block_tokens, limits.padding_slot, limits.max_batch)
        self._staging = StagingRing(limits.staging_ints, lane, "staged inputs", pinned=device.type == "cuda")
        self._results = StagingRing(limits.result_ints, lane, "staged results", pinned=device.type == "cuda")
        inputs = torch.zeros(limits.staging_ints, dtype=torch.int32, device=device)
        self._replays = Replays(
            lane, forward, self._packer, inputs, buckets, lambda: (sampler.last_tokens, forward.model.rope, forward.attention.arena)
        )

    def capture_all(self, progress: Callable[[str, int, int], None]) -> None:
        """Record every bucket now, so that no request pays for it; the largest first, whose memory the others reuse."""
        buckets = self._replays.buckets
        for done, bucket in enumerate(reversed(buckets)):
            progress("capturing steps", done, len(buckets))
            self._replays.get(bucket)
        progress("capturing steps", len(buckets), len(buckets))

    def keep_scores(self, scorer: ScorerName) -> None:
        """Requests may attend to a part of their context."""
        self.scores = ContextKeys(scorer, self._forward.attention, self._lane, self._uploads)

    def warm(self, slot: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        """Run one step of every kind over `slot`, which the caller holds. Blocks; on the thread that will launch steps."""
        limits, model = self.limits, self._forward.model
        sizes = warm.Sizes(limits.max_batch, limits.prefill_chunk, max_tokens)
        self._forward.attention.warm(sizes.prefill_chunk, max_tokens, progress)
        kinds = warm.all_kinds(sizes, self._replays.buckets) if self._device.type == "cuda" else warm.few_kinds(sizes)
        blank = blank_weights(model.config, model.dtype, model.device)
        weights_of, self._weights_of = self._weights_of, lambda adapter: blank
        try:
            for done, plan in enumerate(warm.plans(kinds, slot, limits.block_tokens)):
                progress("warming up", done, len(kinds))
                if (error := self.launch(plan).wait_error()) is not None:
                    raise error
        finally:
            self._weights_of = weights_of
        progress("warming up", len(kinds), len(kinds))

    def launch(self, plan: StepPlan, waits: Waits = _NO_WAITS) -> RunningStep:
        """Put the step on the compute lane and return; the step before may still be running there. `waits`: what the plan's ids stand
        for. Where a grammar has a say, the step ends before its sampling, and `sample` has to follow once the step before was read."""
        after, loads = waits.of(plan)
        if any(chunk.num_logits > 1 for chunk in plan.chunks[plan.num_decodes :]):
            raise InvariantBroken(f"step {plan.number} wants several tokens for one request: a row has but one last token")
        for fence in after:
            self._lane.wait(fence)
        chain = _Chain(self._lane)
        if self.guard is not None:
            self._spoil(self.guard, chain, plan)
        for start in plan.starts:
            self._rows.start(start)
            self.masks.start(start)
            if needs_state(start.sampling):
                access = Access(_SAMPLER, (start.row,), _ROW_STATE, Mode.WRITE)
                chain.submit(lambda start=start: self._sampler.start(start), "start", [access])  # type: ignore[misc]
        arriving = Arriving(loads)
        lora = lora_runs(plan.chunks, self._weights_of)
        is_paged = any(chunk.num_paged for chunk in plan.chunks)
        is_eager = is_paged or any(chunk.scoring is not None for chunk in plan.chunks)
        bucket = None if arriving.overlaps or lora is not None or is_eager else self._replays.bucket_for(plan)
        host, array = self._staging.next()
        packed = self._packer.pack(plan.chunks, plan.num_decodes, bucket, array)
        sample_plan, num_ints = self._plan_sampling(packed, array)
        outputs = Outputs(self._lane, self._results.next()[0], self._results.access(Mode.READ), lora)
        if bucket is not None:
            flow, device_ints = self._replay(chain, arriving, bucket, packed, host[:num_ints])
        else:
            scores = None if self.scores is None else self.scores.for_step(plan.chunks, packed, outputs.room_for_parts)
            flow, device_ints = self._run_eagerly(chain, arriving, packed, host[:num_ints], Flow(lora=lora, scores=scores))
            self._submit_prompt_logprobs(chain, plan, flow, outputs)
        chunks = plan.chunks if bucket is not None else [c for c in plan.chunks if c.num_logits]
        masks = self.masks.for_step(chunks, self._device.type == "cuda")

        def sample() -> tuple[Ticket, Fence]:
            if packed.shape.num_samples:
                outputs.sampled = outputs.room_for(packed.shape.num_samples, max(sample_plan.num_logprobs))
                accesses = self._sample_accesses(sample_plan, masks, captured=bucket is not None)
                chain.submit(lambda: self._sample(flow, sample_plan, device_ints(), len(packed.ints), outputs, masks), "sample", accesses)
            fence = self._lane.record()
            self._results.used_until(fence)
            self.masks.used_until(fence)
            return chain.newest(), fence

        last, fence = sample() if masks is None else (chain.newest(), self._lane.record())
        self._staging.used_until(fence)
        late = None if masks is None else LateSample(masks, sample)
        return RunningStep(plan.number, chunks, sample_plan.num_logprobs, outputs, last, fence, loads, late)

    def sample(self, step: RunningStep) -> RunningStep:
        """The step launched last, with its sampling on the lane. Blocks only where a grammar has a say, until its masks are there: those
        that need a token of the step before are computed from when `masks.advance` was told it."""
        if step.late is None:
            return step
        endings = step.late.masks.wait_filled(self._lane)
        last, fence = step.late.submit()
        return replace(step, last=last, fence=fence, late=None, endings=endings)

    # --------------------------------------------------------------------------------------------------------- forward

    def _spoil(self, guard: ByteGuard, chain: _Chain, plan: StepPlan) -> None:
        """Blocks that the step is the first to write hold nothing that anybody could use."""
        arena, block = self.limits.arena, self.limits.block_tokens
        slots = [
            int(slot) for chunk in plan.chunks if chunk.writes for slot in chunk.slots[-(-chunk.start // block) - chunk.num_elsewhere :]
        ]
        if slots:
            access = Access(arena, slots, (0, self._forward.model.config.num_layers), Mode.WRITE)
            chain.submit(lambda: guard.poison(arena, slots), "poison", [access])

    def _accesses(self, packed: Packed, layers: tuple[int, int]) -> tuple[Access, Access]:
        arena = self.limits.arena
        return Access(arena, packed.read_slots, layers, Mode.READ), Access(arena, packed.write_slots, layers, Mode.WRITE)

    def _embed_access(self, packed: Packed) -> Access:
        ends = packed.shape.cuts()
        return Access(_SAMPLER, packed.ints[ends[5] : ends[6]], _LAST, Mode.READ)

    def _sample_accesses(self, plan: SamplePlan, masks: StepMasks | None, captured: bool) -> list[Access]:
        state = Access(_SAMPLER, plan.rows, _ROW_STATE if plan.penalties else _LAST, Mode.WRITE)
        read = [Access(arena, *_ONE, Mode.READ) for arena in (_INPUTS, _GRAPHS)] if captured else []
        read += [] if masks is None else [masks.access]
        return [state, self._results.access(Mode.WRITE), *read]

    def _run_eagerly(
        self, chain: _Chain, arriving: Arriving, packed: Packed, host: Tensor, flow: Flow
    ) -> tuple[Flow, Callable[[], Tensor]]:
        landed: list[Tensor] = []

        def upload() -> None:
            ints = move(torch.empty(len(host), dtype=torch.int32, device=self._device), host)
            landed.append(ints)
            flow.inputs = packed.shape.views(ints, packed.num_decodes, packed.max_q_len, packed.max_kv_len, packed.spans, packed.paged)

        chain.submit(upload, "upload", [self._staging.access(Mode.READ)])
        if packed.paged:
            self._submit_paged(chain, arriving, packed, flow)
            return flow, lambda: landed[0]
        for op, layers, label in self._forward.ops(flow):
            self._wait_for(arriving, chain, layers[1])
            if layers[1] > layers[0]:
                accesses: Sequence[Access] = (*self._accesses(packed, layers), *flow.score_accesses(layers))
            else:
                accesses = [self._embed_access(packed)] if label == "embed" else ()
            chain.submit(op, label, accesses)
        self._submit_scores(chain, flow)
        return flow, lambda: landed[0]

    def _scored_accesses(self, packed: Packed, flow: Flow, layers: tuple[int, int]) -> Sequence[Access]:
        """Of an op that looks at keys where they lie, where scores are asked for."""
        return () if flow.scores is None else (*flow.scores.accesses(layers), self._accesses(packed, layers)[0])

    def _submit_scores(self, chain: _Chain, flow: Flow) -> None:
        if flow.scores is not None:
            chain.submit(flow.scores.finish, "part scores", [self._results.access(Mode.WRITE)])

    def _submit_paged(self, chain: _Chain, arriving: Arriving, packed: Packed, flow: Flow) -> None:
        """Layers whose attention is over what is on the device first, and then over pieces that stream in from host memory."""
        reads, forward = self.paged, self._forward
        if reads is None:
            raise InvariantBroken("a step reads KV in host memory, and there is none")
        embed, head = forward.ends(flow)
        chain.submit(embed, "embed", [self._embed_access(packed)])
        reads.lane.wait(self._lane.record())  # the slots have been uploaded
        pieces = list(reads.pieces(packed.paged))
        for layer in range(forward.model.config.num_layers):
            self._wait_for(arriving, chain, layer + 1)
            chain.submit(forward.attend_resident(flow, layer), f"layer {layer}", self._accesses(packed, (layer, layer + 1)))
            for piece in pieces:
                fetched = reads.fetch(layer, piece, lambda: flow.bound_inputs().tables, self._lane)
                chain.submit(forward.add_piece(flow, piece.rows, fetched.landed), f"piece of layer {layer}", [fetched.access])
                if flow.scores is not None and (add := flow.scores.piece(layer, piece, fetched.landed)) is not None:
                    chain.submit(add, f"sums of layer {layer}", [fetched.access, *flow.scores.accesses((layer, layer + 1))])
                fetched.read_until(self._lane.record())
            chain.submit(forward.finish(flow, layer), f"rest of layer {layer}", self._scored_accesses(packed, flow, (layer, layer + 1)))
        chain.submit(head, "head")
        self._submit_scores(chain, flow)

    def _wait_for(self, arriving: Arriving, chain: _Chain, end: int) -> None:
        if arriving.wait_on(self._lane, end):
            chain.submit(arriving.check, "arrived")

    def _replay(self, chain: _Chain, arriving: Arriving, bucket: Shape, packed: Packed, host: Tensor) -> tuple[Flow, Callable[[], Tensor]]:
        captured = self._replays.get(bucket)
        inputs = self._replays.inputs
        chain.submit(
            lambda: move(inputs[: len(host)], host), "upload", [self._staging.access(Mode.READ), Access(_INPUTS, *_ONE, Mode.WRITE)]
        )
        self._wait_for(arriving, chain, self._forward.model.config.num_layers)  # no wait is kept inside a replay
        kv = self._accesses(packed, (0, self._forward.model.config.num_layers))
        others = self._embed_access(packed), Access(_INPUTS, *_ONE, Mode.READ), Access(_GRAPHS, *_ONE, Mode.WRITE)
        chain.last = self._lane.replay(captured.replay, (*kv, *others), after=chain.last)
        return captured.flow, lambda: inputs

    # -------------------------------------------------------------------------------------------------------- sampling

    def _plan_sampling(self, packed: Packed, array: np.ndarray) -> tuple[SamplePlan, int]:
        """Decide how this step samples and put the parameters behind the packed inputs. Returns the ints to upload in all."""
        ends = packed.shape.cuts()
        sample_at, rows = packed.ints[ends[6] : ends[7]], packed.ints[ends[7] : ends[8]]
        plan = self._rows.sample_plan(rows, packed.ints[ends[0] : ends[1]][sample_at])
        used = len(packed.ints)
        if plan.params is not None:
            array[used : used + plan.params.size] = plan.params.ravel()
            used += plan.params.size
        return plan, used

    def _sample(self, flow: Flow, plan: SamplePlan, ints: Tensor, params_at: int, outputs: Outputs, masks: StepMasks | None) -> None:
        assert flow.logits is not None and outputs.sampled is not None
        inputs = flow.bound_inputs()
        params = None
        if plan.params is not None:
            params = ints[params_at : params_at + plan.params.size].view(plan.params.shape)
        allowed = None
        if masks is not None:
            words = move(torch.empty(len(masks.host), dtype=torch.int32, device=self._device), masks.host)
            allowed = Allowed(self._uploads.send(masks.at), words.view(len(masks.at), -1))
        output = self._sampler.sample(flow.logits, inputs.sample_rows, plan, params, allowed)
        move(outputs.sampled, output.packed())

    def _submit_prompt_logprobs(self, chain: _Chain, plan: StepPlan, flow: Flow, outputs: Outputs) -> None:
        """Logprobs of the prompt tokens that follow each computed position, a slice of positions at a time."""
        if not plan.echoes:
            return
        at = 0
        for chunk in plan.chunks:
            if chunk.echo is not None:
                targets, num_top = chunk.echo
                room = outputs.room_for(len(targets), num_top)
                outputs.prompts.append((chunk.request_id, room))
                for first in range(0, len(targets), _LOGPROB_ROWS):
                    part = targets[first : first + _LOGPROB_ROWS], room[first : first + _LOGPROB_ROWS], num_top
                    chain.submit(self._prompt_part(flow, at + first, *part), "prompt logprobs", [self._results.access(Mode.WRITE)])
            at += chunk.num_tokens

    def _prompt_part(self, flow: Flow, at: int, targets: Sequence[int], room: Tensor, num_top: int) -> Op:
        def run() -> None:
            assert flow.hidden is not None and flow.residual is not None
            rows = slice(at, at + len(targets))
            logits = self._forward.model.head(flow.hidden[..., rows, :], flow.residual[rows])
            move(room, token_logprobs(logits, self._uploads.send(targets), num_top).packed())

        return run

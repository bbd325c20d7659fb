"""Runs steps: a plan becomes ops on the compute lane, a finished step becomes a result. Owns the order of a
step's ops."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.config import ScorerName
from penstock.contract import MAX_LOGPROBS, Access, Adapter, Chunk, Fence, Mode, StepPlan, Waits
from penstock.engine.execution import warm
from penstock.engine.execution.ahead import Passes
from penstock.engine.execution.arriving import Arriving
from penstock.engine.execution.batch import TOKENS_OF, Drafted, Packed, Packer, Shape, StepInputs
from penstock.engine.execution.draws import DrawKind
from penstock.engine.execution.forward import Flow, Forward
from penstock.engine.execution.grammars import Grammars
from penstock.engine.execution.masks import Masks, StepMasks
from penstock.engine.execution.paging import PagedReads
from penstock.engine.execution.replays import PROMPTS_BESIDE, CapturedPass, Replays
from penstock.engine.execution.running_step import LateSample, Outputs, RunningStep
from penstock.engine.execution.sampler import (
    NUM_PARAMS,
    Allowed,
    Rows,
    SamplePlan,
    Sampler,
    needs_state,
    packed_width,
    token_logprobs,
)
from penstock.engine.execution.scoring import ContextKeys
from penstock.engine.execution.staging import StagingRing, Uploads, move
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane, Op, Ticket
from penstock.models.adapters import blank_weights
from penstock.models.lora import AdapterWeights, lora_runs
from penstock.observe import ByteGuard
from penstock.speculation.length import StepCosts

_LOGPROB_ROWS = 128  # prompt positions whose logits are held at one time: 128 * 151936 floats are 78 MB

# Names, in declared accesses, of device memory that steps use besides KV. The sampler's slots are rows; its
# "layers" are the last token and the state of penalties.
_SAMPLER, _LAST, _ROW_STATE = "sampler rows", (0, 1), (0, 2)
_INPUTS = "replay inputs"
_GRAPHS = "memory of replays"
_ONE: tuple[tuple[int, ...], tuple[int, int]] = ((0,), (0, 1))  # one slot, one layer
_NO_WAITS = Waits()
_TIMED_STEPS = 8
_MEASURED_S = 0.5  # total time of measured steps after which no larger size is measured


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes that hold for the executor's life."""

    max_batch: int
    prefill_chunk: int  # prompt tokens per step
    max_table: int  # slots of the longest sequence
    block_tokens: int
    padding_slot: int
    arena: str  # name of the KV arena in declared accesses
    max_paged: int = 0  # host blocks that the sequences of a step may have
    max_parts: int = 0  # parts of a context that a step may score
    max_drafts: int = 0  # drafts of all requests of a step
    max_request_drafts: int = 0  # drafts of one request
    num_ahead: int = 0  # drafts per request that the device makes after a step
    num_layers: int = 0  # layers of a block: those of the target, then those of the draft model

    @property
    def max_rows(self) -> int:
        return self.max_batch + self.max_drafts

    @property
    def staging_ints(self) -> int:
        most_rows = self.max_rows + PROMPTS_BESIDE  # with the padding of a captured step
        most = Shape(self.prefill_chunk + self.max_rows, most_rows, most_rows)
        per_row = NUM_PARAMS + 2 * self.max_request_drafts
        drafted = Drafted.num_ints(most_rows, most_rows) if self.max_drafts else 0
        nexts = most.num_tokens if self.num_ahead else 0
        beyond = 1 + self.num_ahead // self.block_tokens  # table entries for drafts
        tables = beyond + self.max_batch * (self.max_table + beyond)
        return most.fixed_ints + tables + most_rows * per_row + drafted + nexts + self.max_paged

    @property
    def result_ints(self) -> int:
        return (self.max_rows + self.prefill_chunk) * packed_width(MAX_LOGPROBS) + self.max_parts + 1


class _Chain:
    """Ops of one step on the lane, in order: if one fails, the rest are skipped with its error."""

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
        ahead: Passes | None = None,
    ) -> None:
        """`ahead`: makes drafts on the device."""
        device = forward.model.device
        self.masks = Masks(grammars, limits.max_batch, lane)
        self.guard: ByteGuard | None = None  # in checked mode
        self.paged: PagedReads | None = None  # set if there is host memory to page out to
        self.scores: ContextKeys | None = None  # set if requests may attend to a part of their context
        self.ahead = ahead
        self._weights_of = weights_of
        self._forward = forward
        self._sampler = sampler
        self.uploads = uploads
        self._lane = lane
        self.limits = limits
        self._device = device
        self._rows = Rows(limits.max_batch, sampler.eos_ids, forward.model.config.vocab)
        self._has_new_draws = False  # rows have changed since their draws were last uploaded
        self._packer = Packer(limits.block_tokens, limits.padding_slot, limits.max_batch, limits.num_ahead)
        self._staging = StagingRing(limits.staging_ints, lane, "staged inputs", pinned=device.type == "cuda")
        self._results = StagingRing(limits.result_ints, lane, "staged results", pinned=device.type == "cuda")
        inputs = torch.zeros(limits.staging_ints, dtype=torch.int32, device=device)
        self._replays = Replays(
            lane,
            forward,
            self._packer,
            inputs,
            buckets,
            lambda: (sampler.pending, forward.model.rope, forward.attention.arena),
        )

    @property
    def pending(self) -> Tensor:
        """[rows, 1 + drafts]: the last token of each request, and the drafts after it."""
        return self._sampler.pending

    def capture_all(self, progress: Callable[[str, int, int], None]) -> None:
        """Capture every bucket now, so that no request waits for it; the largest first, so that the others
        reuse its memory."""
        buckets = self._replays.buckets
        for done, bucket in enumerate(reversed(buckets)):
            progress("capturing steps", done, len(buckets))
            self._replays.get(bucket)
            if bucket.samples_all and self.ahead is not None:
                for choice in DrawKind:
                    self._captured_ahead(bucket, choice)
        progress("capturing steps", len(buckets), len(buckets))

    def keep_scores(self, scorer: ScorerName, num_kept: int) -> None:
        """Allow requests to attend to a part of their context; key bounds of `num_kept` parts are kept for
        later turns."""
        self.scores = ContextKeys(scorer, self._forward.attention, self._lane, self.uploads, num_kept)

    def warm(self, slot: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        """Run one step of every kind over `slot`, which the caller holds. Blocks; call it on the thread that
        will launch steps."""
        limits, model = self.limits, self._forward.model
        sizes = warm.Sizes(limits.max_batch, limits.prefill_chunk, max_tokens)
        attentions = [self._forward.attention]
        if self.ahead is not None and self.ahead.guesser.attention is not attentions[0]:
            attentions.append(self.ahead.guesser.attention)
        for attention in attentions:
            attention.warm(sizes.prefill_chunk, max_tokens, progress)
        kinds = (
            warm.all_kinds(sizes, self._replays.buckets)
            if self._device.type == "cuda"
            else warm.few_kinds(sizes)
        )
        blank = blank_weights(model.config, model.dtype, model.device)
        weights_of, self._weights_of = self._weights_of, lambda adapter: blank
        drafted: list[StepPlan] = []
        if self.ahead is not None:
            drafted = warm.drafted_plans(
                sizes, slot, limits.block_tokens, limits.num_ahead, self._device.type == "cuda"
            )
        num = len(kinds) + len(drafted)
        try:
            for done, plan in enumerate((*warm.plans(kinds, slot, limits.block_tokens), *drafted)):
                progress("warming up", done, num)
                _wait_step(self.launch(plan))
        finally:
            self._weights_of = weights_of
        progress("warming up", num, num)

    def measured_costs(self, slot: int, costs: StepCosts) -> StepCosts:
        """Measure decode steps of `costs.sizes` rows on this machine, and the drafting after them. Blocks for
        some seconds; if steps are slow, the largest sizes are skipped. Call it after `warm`."""
        block_tokens, seconds = self.limits.block_tokens, list[float]()
        for size in costs.sizes:
            if sum(seconds) > _MEASURED_S:
                break
            step_s = self._step_s(warm.verify_plan(size, slot, block_tokens, self.limits.max_request_drafts))
            seconds.append(max(step_s, *seconds[-1:], 0.0))  # more rows never take less: smooths noise
        measured = replace(costs, sizes=costs.sizes[: len(seconds)], seconds=tuple(seconds))
        counts = 1, min(self.limits.max_batch, measured.sizes[-1])
        plain, making = (
            [self._step_s(warm.decode_plan(num, slot, block_tokens, num_ahead), is_alone) for num in counts]
            for num_ahead, is_alone in ((0, False), (self.limits.num_ahead, self.ahead is None))
        )
        few_s, many_s = (max(0.0, other - one) for one, other in zip(plain, making, strict=True))
        row_s = max(0.0, many_s - few_s) / max(1, counts[1] - counts[0])
        return replace(measured, making_s=few_s, making_row_s=row_s)

    def _step_s(self, plan: StepPlan, is_alone: bool = False) -> float:
        """Time of such a step in a pipeline, where each is launched while the one before runs. A slow step,
        or one that `is_alone`, is launched after the one before was read."""
        started_s = time.perf_counter()
        _wait_step(self.launch(plan))
        ended_s = time.perf_counter()
        if ended_s - started_s > _MEASURED_S / 4:
            return ended_s - started_s
        plan = replace(plan, starts=())  # rows are set up already
        running, times = None if is_alone else self.launch(plan), list[float]()
        while len(times) < _TIMED_STEPS and sum(times) < _MEASURED_S / 4:
            launched = self.launch(plan)
            _wait_step(running or launched)
            running = None if is_alone else launched
            times.append(time.perf_counter() - ended_s)
            ended_s += times[-1]
        if running is not None:
            _wait_step(running)
        return statistics.median(times)

    def launch(self, plan: StepPlan, waits: Waits = _NO_WAITS) -> RunningStep:
        """Put the step on the compute lane and return; the step before may still be running. `waits`: fences
        and loads for the plan's ids. If a grammar applies, sampling is not launched: call `sample` after the
        step before was read."""
        after, loads = waits.of(plan)
        if any(chunk.num_logits > 1 for chunk in plan.chunks[plan.num_decodes :]):
            raise InvariantBroken(
                f"step {plan.number} wants several tokens for one request: a row has only one last token"
            )
        if (
            max(map(len, map(TOKENS_OF, plan.chunks[: plan.num_decodes])), default=0)
            > 1 + self.limits.max_request_drafts
        ):
            raise InvariantBroken(
                f"step {plan.number} verifies over {self.limits.max_request_drafts} drafts of one request"
            )
        for fence in after:
            self._lane.wait(fence)
        chain = _Chain(self._lane)
        if self.guard is not None:
            self._spoil(self.guard, chain, plan)
        for start in plan.starts:
            self._rows.start(start)
            if self.masks.answers or start.sampling.masked_from is not None:
                self.masks.start(start)
            access = Access(_SAMPLER, (start.row,), _ROW_STATE, Mode.WRITE)
            if needs_state(start.sampling):
                chain.submit(lambda start=start: self._sampler.start(start), "start", [access])  # type: ignore[misc]
            self._has_new_draws = True
        arriving = Arriving(loads)
        lora = lora_runs(plan.chunks, self._weights_of)
        is_eager = plan.reads_host or plan.scores
        bucket = None if arriving.overlaps or lora is not None or is_eager else self._replays.bucket_for(plan)
        host, array = self._staging.next()
        packed = self._packer.pack(plan.chunks, plan.num_decodes, bucket, array, plan.num_ahead)
        sample_plan, num_ints = self._plan_sampling(packed, array)
        outputs = Outputs(self._lane, self._results.next()[0], self._results.access(Mode.READ), lora)
        if bucket is not None:
            flow, device_ints = self._replay(chain, arriving, bucket, packed, host[:num_ints])
        else:
            scores = (
                None
                if self.scores is None
                else self.scores.for_step(plan.chunks, packed, outputs.room_for_parts)
            )
            flow, device_ints = self._run_eagerly(
                chain, arriving, packed, host[:num_ints], Flow(lora=lora, scores=scores)
            )
            if plan.echoes:
                self._submit_prompt_logprobs(chain, plan, flow, outputs)
        chunks: Sequence[Chunk] = (
            plan.chunks if bucket is not None else [c for c in plan.chunks if c.num_logits]
        )
        if packed.drafted is not None:  # one entry per sample
            chunks = [c for c in chunks for _ in range(max(1, c.num_logits))]
        masks = self.masks.for_step(chunks, self._device.type == "cuda") if self.masks.answers else None

        def sample() -> tuple[Ticket, Fence]:
            if packed.shape.num_samples:
                outputs.sampled = outputs.room_for(packed.shape.num_samples, max(sample_plan.num_logprobs))
                accesses = self._sample_accesses(sample_plan, masks, captured=bucket is not None)
                chain.submit(
                    lambda: self._sample(flow, sample_plan, device_ints(), packed, outputs, masks),
                    "sample",
                    accesses,
                )
            runs_ahead = plan.num_ahead > 0 or not plan.is_decode
            if self.ahead is not None and runs_ahead and not self.ahead.failed:
                choice = DrawKind.FILTERED if sample_plan.filters else DrawKind.DRAWN
                drafting = plan.num_ahead, choice if sample_plan.random else DrawKind.LIKELIEST
                self._submit_ahead(chain, arriving, packed, flow, outputs, device_ints, bucket, drafting)
            # a later step may read layers that this one did not wait for
            self._wait_for(arriving, chain, self.limits.num_layers)
            fence = self._lane.record()
            self._results.used_until(fence)
            if masks is not None:
                self.masks.used_until(fence)
            return chain.newest(), fence

        last, fence = sample() if masks is None else (chain.newest(), self._lane.record())
        self._staging.used_until(fence)
        late = None if masks is None else LateSample(masks, sample)
        return RunningStep(plan.number, chunks, sample_plan.num_logprobs, outputs, last, fence, loads, late)

    def sample(self, step: RunningStep) -> RunningStep:
        """The step launched last, with its sampling on the lane. Blocks only if a grammar applies, until its
        masks are filled; `masks.advance` with the tokens of the step before starts their computation."""
        if step.late is None:
            return step
        endings = step.late.masks.wait_filled(self._lane)
        last, fence = step.late.submit()
        return replace(step, last=last, fence=fence, late=None, endings=endings)

    # ------------------------------------------------------------------------------------------------ forward

    def _spoil(self, guard: ByteGuard, chain: _Chain, plan: StepPlan) -> None:
        """Poison blocks that the step is the first to write: no request may use their old content."""
        arena, block = self.limits.arena, self.limits.block_tokens
        slots = [
            int(slot)
            for chunk in plan.chunks
            if chunk.writes
            for slot in chunk.slots[-(-chunk.start // block) - chunk.num_elsewhere :]
        ]
        if slots:
            access = Access(arena, slots, (0, self.limits.num_layers), Mode.WRITE)
            chain.submit(lambda: guard.poison(arena, slots), "poison", [access])

    def _accesses(self, packed: Packed, layers: tuple[int, int]) -> tuple[Access, Access]:
        arena = self.limits.arena
        return Access(arena, packed.read_slots, layers, Mode.READ), Access(
            arena, packed.write_slots, layers, Mode.WRITE
        )

    def _embed_access(self, packed: Packed) -> Access:
        return Access(_SAMPLER, packed.row_of, _LAST, Mode.READ)

    def _blank_accesses(self, packed: Packed) -> tuple[Access, ...]:
        """A decode-only step blanks the draft KV of its tokens."""
        if self.ahead is None or not packed.shape.is_decode:
            return ()
        return self._accesses(packed, (self._forward.model.config.num_layers, self.limits.num_layers))[1:]

    def _sample_accesses(self, plan: SamplePlan, masks: StepMasks | None, captured: bool) -> list[Access]:
        state = Access(_SAMPLER, plan.rows, _ROW_STATE if plan.penalties or plan.ends else _LAST, Mode.WRITE)
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
            flow.inputs = packed.shape.views(
                ints, packed.num_decodes, packed.max_q_len, packed.max_kv_len, packed.spans, packed.paged
            )

        chain.submit(upload, "upload", [self._staging.access(Mode.READ)])
        self._submit_place(chain, packed, flow, lambda: landed[0])
        others = {"embed": (self._embed_access(packed),), "blank": self._blank_accesses(packed)}
        for op, layers, label in self._forward.ops(flow, packed.shape.is_decode):
            self._wait_for(arriving, chain, layers[1])
            if packed.paged and layers[1] > layers[0]:
                self._submit_paged(chain, packed, flow, layers[0])
                continue
            accesses = others.get(label, ())
            if layers[1] > layers[0]:
                # key bounds, besides KV
                scored = () if flow.scores is None else flow.scores.accesses(layers)
                accesses = (*self._accesses(packed, layers), *scored)
            chain.submit(op, label, accesses)
            if packed.paged and label == "embed":
                self._paged_reads().lane.wait(self._lane.record())  # the slots must be uploaded first
        if flow.scores is not None:
            chain.submit(flow.scores.finish, "part scores", [self._results.access(Mode.WRITE)])
        return flow, lambda: landed[0]

    def _submit_place(self, chain: _Chain, packed: Packed, flow: Flow, ints: Callable[[], Tensor]) -> None:
        """If the step before had drafts, this step's rows begin after the accepted ones. Only the device
        knows how many they are."""
        drafted = packed.drafted
        if drafted is None or drafted.num_unsure == 0:
            return

        def place() -> None:
            inputs = flow.bound_inputs()
            unsure = drafted.views(ints(), inputs.tokens).unsure[: packed.num_decodes]
            place_unsure(inputs, unsure, self._sampler.rejected, self.limits.block_tokens)

        chain.submit(place, "place", [self._embed_access(packed), Access(_INPUTS, *_ONE, Mode.WRITE)])

    def _paged_reads(self) -> PagedReads:
        if self.paged is None:
            raise InvariantBroken("a step reads KV in host memory, but there is no host tier")
        return self.paged

    def _submit_paged(self, chain: _Chain, packed: Packed, flow: Flow, layer: int) -> None:
        """A layer that attends to blocks on the device first, then to pieces that stream in from host
        memory."""
        reads, forward, scores, layers = self._paged_reads(), self._forward, flow.scores, (layer, layer + 1)
        kv = self._accesses(packed, layers)
        chain.submit(partial(forward.attend_resident, flow, layer), f"layer {layer}", kv)
        for piece in reads.pieces(packed.paged):
            fetched = reads.fetch(layer, piece, lambda: flow.bound_inputs().tables, self._lane)
            chain.submit(
                partial(forward.add_piece, flow, piece.rows, fetched.landed),
                f"piece of layer {layer}",
                [fetched.access],
            )
            if scores is not None and (add := scores.piece(layer, piece, fetched.landed)) is not None:
                chain.submit(add, f"sums of layer {layer}", [fetched.access, *scores.accesses(layers)])
            fetched.read_until(self._lane.record())
        # scoring reads keys in the arena
        scored = () if scores is None else (*scores.accesses(layers), kv[0])
        chain.submit(partial(forward.finish, flow, layer), f"rest of layer {layer}", scored)

    def _wait_for(self, arriving: Arriving, chain: _Chain, end: int) -> None:
        if arriving.wait_on(self._lane, end):
            chain.submit(arriving.check, "arrived")

    def _replay(
        self, chain: _Chain, arriving: Arriving, bucket: Shape, packed: Packed, host: Tensor
    ) -> tuple[Flow, Callable[[], Tensor]]:
        captured = self._replays.get(bucket)
        inputs = self._replays.inputs
        chain.submit(
            lambda: move(inputs[: len(host)], host),
            "upload",
            [self._staging.access(Mode.READ), Access(_INPUTS, *_ONE, Mode.WRITE)],
        )
        self._submit_place(chain, packed, captured.flow, lambda: inputs)
        # a replay cannot wait inside
        self._wait_for(arriving, chain, self._forward.model.config.num_layers)
        kv = self._accesses(packed, (0, self._forward.model.config.num_layers))
        others = (
            self._embed_access(packed),
            Access(_INPUTS, *_ONE, Mode.READ),
            Access(_GRAPHS, *_ONE, Mode.WRITE),
        )
        chain.last = self._lane.replay(
            captured.replay, (*kv, *others, *self._blank_accesses(packed)), after=chain.last
        )
        return captured.flow, lambda: inputs

    # ----------------------------------------------------------------------------------------------- sampling

    def _plan_sampling(self, packed: Packed, array: np.ndarray) -> tuple[SamplePlan, int]:
        """Decide how this step samples, and append the parameters to the packed inputs. Returns the total
        number of ints to upload."""
        ends = packed.shape.cuts()
        sample_at, rows = packed.ints[ends[6] : ends[7]], packed.ints[ends[7] : ends[8]]
        num_unsure = 0 if packed.drafted is None else packed.drafted.num_unsure
        plan = self._rows.sample_plan(rows, packed.ints[ends[0] : ends[1]][sample_at], num_unsure)
        used = len(packed.ints)
        if plan.params is not None:
            array[used : used + plan.params.size] = plan.params.ravel()
            used += plan.params.size
        return plan, used

    def _sample(
        self,
        flow: Flow,
        plan: SamplePlan,
        ints: Tensor,
        packed: Packed,
        outputs: Outputs,
        masks: StepMasks | None,
    ) -> None:
        assert flow.logits is not None and outputs.sampled is not None
        inputs = flow.bound_inputs()
        params = None
        if plan.params is not None:
            params_at = len(packed.ints)
            params = ints[params_at : params_at + plan.params.size].view(plan.params.shape)
        drafting = None if packed.drafted is None else packed.drafted.views(ints, inputs.tokens)
        allowed = None
        if masks is not None:
            words = move(torch.empty(len(masks.host), dtype=torch.int32, device=self._device), masks.host)
            allowed = Allowed(self.uploads.send(masks.at), words.view(len(masks.at), -1))
        output = self._sampler.sample(flow.logits, inputs.sample_rows, plan, params, allowed, drafting)
        move(outputs.sampled, output.packed())
        outputs.made = output

    def _submit_ahead(
        self,
        chain: _Chain,
        arriving: Arriving,
        packed: Packed,
        flow: Flow,
        outputs: Outputs,
        ints: Callable[[], Tensor],
        bucket: Shape | None,
        drafting: tuple[int, DrawKind],
    ) -> None:
        """The draft model's pass over the step's tokens, which fills its KV, and the passes that make
        drafts."""
        ahead, layers = self.ahead, (self._forward.model.config.num_layers, self.limits.num_layers)
        assert ahead is not None and packed.ahead_slots is not None
        captured = None
        if bucket is not None and bucket.samples_all and self._device.type == "cuda":
            captured = self._captured_ahead(bucket, drafting[1])

        def run() -> None:
            inputs, made = flow.bound_inputs(), outputs.made
            outputs.made = None
            if made is None:  # nothing was sampled: the step is part of a prompt
                nexts, lasts = inputs.tokens[:0], inputs.sample_at[:0].long()
            else:
                nexts = made.tokens.clamp(min=0)
                lasts = torch.arange(len(nexts), device=nexts.device) if made.lasts is None else made.lasts
                # without padding rows
                lasts = lasts[: packed.num_asking] if bucket is not None else lasts
            rows = inputs.sample_rows[lasts]
            if not packed.shape.samples_all:
                given = ints()[packed.nexts_at : packed.nexts_at + packed.shape.num_tokens]
                sampled = nexts[(-1 - given).clamp(min=0).long()] if len(nexts) else given
                nexts, lasts = torch.where(given < 0, sampled, given), inputs.sample_at[lasts].long()
            ahead.attempt(ahead.run, flow, nexts, lasts, rows, *drafting)

        def fill() -> None:
            from penstock.engine.execution import triton_steps

            made, outputs.made = outputs.made, None
            assert made is not None and captured is not None
            into = captured.nexts, captured.lasts, captured.rows
            triton_steps.fill_pass(made.tokens, made.lasts, flow.bound_inputs().sample_rows, into)

        self._wait_for(arriving, chain, layers[1])
        if drafting[0] and drafting[1] is not DrawKind.LIKELIEST and self._has_new_draws:
            self._has_new_draws, words = False, self._rows.draw_words()
            chain.submit(
                lambda: ahead.draws.load(words),
                "draws",
                [Access(_SAMPLER, range(words.shape[1]), _ROW_STATE, Mode.WRITE)],
            )
        rows = packed.ints[slice(*packed.shape.cuts()[7:9])]
        read = [Access(arena, *_ONE, Mode.READ) for arena in (_INPUTS, _GRAPHS)]
        written = Access(self.limits.arena, packed.ahead_slots, layers, Mode.WRITE)
        accesses = [
            *self._accesses(packed, layers),
            written,
            *read,
            Access(_SAMPLER, rows, _LAST, Mode.WRITE),
        ]
        accesses += (
            [] if drafting[1] is DrawKind.LIKELIEST else [Access(_SAMPLER, rows, _ROW_STATE, Mode.READ)]
        )
        chain.submit(run if captured is None else fill, "draft", accesses)
        if captured is not None:
            chain.last = self._lane.replay(captured.replay, accesses, after=chain.last)

    def _captured_ahead(self, bucket: Shape, choice: DrawKind) -> CapturedPass:
        ahead, num_drafts = self.ahead, self.limits.num_ahead
        assert ahead is not None
        return self._replays.get_pass(
            bucket,
            choice,
            lambda flow, nexts, lasts, rows: ahead.run(flow, nexts, lasts, rows, num_drafts, choice),
        )

    def _submit_prompt_logprobs(self, chain: _Chain, plan: StepPlan, flow: Flow, outputs: Outputs) -> None:
        """Logprobs of the prompt tokens that follow each computed position, a slice of positions at a
        time."""
        at = 0
        for chunk in plan.chunks:
            if chunk.echo is not None:
                targets, num_top = chunk.echo
                room = outputs.room_for(len(targets), num_top)
                outputs.prompts.append((chunk.request_id, room))
                for first in range(0, len(targets), _LOGPROB_ROWS):
                    part = (
                        targets[first : first + _LOGPROB_ROWS],
                        room[first : first + _LOGPROB_ROWS],
                        num_top,
                    )
                    chain.submit(
                        partial(self._echo, flow, at + first, *part),
                        "prompt logprobs",
                        [self._results.access(Mode.WRITE)],
                    )
            at += chunk.num_tokens

    def _echo(self, flow: Flow, at: int, targets: Sequence[int], room: Tensor, num_top: int) -> None:
        assert flow.hidden is not None and flow.residual is not None
        rows = slice(at, at + len(targets))
        logits = self._forward.model.head(flow.hidden[..., rows, :], flow.residual[rows])
        move(room, token_logprobs(logits, self.uploads.send(targets), num_top).packed())


def _wait_step(step: RunningStep) -> None:
    if (error := step.wait_error()) is not None:
        raise error


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

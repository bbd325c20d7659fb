"""Drafts that the device makes after a step, for the next step. Owns the passes of a head or a smaller model
over the paged KV.

Their KV is in further layers of every block, after the target's: it is saved, loaded and evicted with them. A
model's entry of a token is at the token's own position. A head's entry is at the position of the token
before, whose hidden state it takes.

A decode-only step writes zeros there. While drafting is on, a pass right after the step replaces them with
KV. While it is off there is no pass: the zeros stay, and attention masks these tokens.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Access, Mode, StepPlan
from penstock.engine.execution.attention import Attention
from penstock.engine.execution.batch import Shape, StepInputs
from penstock.engine.execution.draws import DrawKind, Draws
from penstock.engine.execution.forward import BoundKv, Flow
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
from penstock.engine.execution.sampler import Rows
from penstock.engine.execution.staging import move
from penstock.speculation.draft import DraftModel
from penstock.speculation.head import DraftHead

log = logging.getLogger(__name__)

_NO_TOKENS, _ALL_TOKENS = slice(0, 0), slice(None)
# of a decode-only step
_BY_ROW = ("tokens", "positions", "write_at", "kv_lens", "table_starts", "rows")


class _Guess(NamedTuple):
    """A guess at the next token of each request."""

    logits: Tensor  # [G, draft vocab]
    place: StepInputs  # one row per request: the inputs of the last pass
    hidden: Tensor | None = None  # of the same rows, if the next pass needs it


class Guesser(Protocol):
    """Guesses from a step and from drafts, and keeps KV of its own."""

    max_position: int
    taps: tuple[int, ...]  # of the target, see `DraftMaker`
    attention: Attention  # over its own layers; perhaps the target's
    target_ids: Tensor | None  # int64 [draft vocab]: the target's token of each; None: ids are equal

    def fill(self, flow: Flow, nexts: Tensor) -> None:
        """Only the KV of the step's tokens."""

    def blank(self, flow: Flow) -> None:
        """Zeros as KV of a decode-only step's tokens."""

    def first(self, flow: Flow, nexts: Tensor, lasts: Tensor, place: StepInputs, drafts: Drafts) -> _Guess:
        """The KV, and a guess at the token after the one that each request has sampled; `place` is at the
        token before that one."""

    def further(self, guess: _Guess, place: StepInputs) -> _Guess:
        """One token further: `place` holds the drafts."""


class HeadGuesser:
    """A draft head over the target's hidden states."""

    def __init__(self, head: DraftHead, attention: Attention) -> None:
        """The head's layer is the last one of `attention`, which may be the target's."""
        self._head, self.attention = head, attention
        self._layer = attention.arena.shape[1] - 1
        self.max_position, self.taps = head.dims.max_position, head.taps
        self.target_ids = None if head.vocab is None else head.vocab.target_ids

    def fill(self, flow: Flow, nexts: Tensor) -> None:
        self._head.fill(self._head.fused(flow.tapped), nexts, self._kv(flow.bound_inputs()))

    def blank(self, flow: Flow) -> None:
        blank(self.attention.arena[:, self._layer :], flow.bound_inputs().write_at)

    def first(self, flow: Flow, nexts: Tensor, lasts: Tensor, place: StepInputs, drafts: Drafts) -> _Guess:
        hidden = self._head.fused(flow.tapped)
        guess = self._head.step(hidden, nexts, self._kv(flow.bound_inputs()), lasts)
        return _Guess(guess.logits, place, guess.hidden)

    def further(self, guess: _Guess, place: StepInputs) -> _Guess:
        assert guess.hidden is not None
        made = self._head.step(guess.hidden, place.tokens, self._kv(place))
        return _Guess(made.logits, place, made.hidden)

    def _kv(self, inputs: StepInputs) -> BoundKv:
        return BoundKv(self.attention, inputs, self._layer)


class ModelGuesser:
    """A smaller model. It needs only tokens, and uses no adapters."""

    taps: tuple[int, ...] = ()

    def __init__(self, draft: DraftModel, attention: Attention) -> None:
        """`attention` is over the model's own part of the arena."""
        self._draft, self.attention = draft, attention
        self.max_position = draft.model.config.max_position
        self.target_ids: Tensor | None = None

    def fill(self, flow: Flow, nexts: Tensor) -> None:
        self._run(flow.bound_inputs(), _NO_TOKENS)

    def blank(self, flow: Flow) -> None:
        blank(self.attention.arena, flow.bound_inputs().write_at)

    def first(self, flow: Flow, nexts: Tensor, lasts: Tensor, place: StepInputs, drafts: Drafts) -> _Guess:
        """In one pass if the step has no prompts: all KV of a layer is written before any row attends."""
        inputs, place = flow.bound_inputs(), drafts.moved(place, nexts[lasts])
        if inputs.num_decodes < len(inputs.tokens):
            self._run(inputs, _NO_TOKENS)
            logits = self._run(place, _ALL_TOKENS)
        else:
            logits = self._run(_joined(inputs, place), slice(len(inputs.tokens), None))
        assert logits is not None
        return _Guess(logits, place)

    def further(self, guess: _Guess, place: StepInputs) -> _Guess:
        logits = self._run(place, _ALL_TOKENS)
        assert logits is not None
        return _Guess(logits, place)

    def _run(self, inputs: StepInputs, at: slice) -> Tensor | None:
        return self._draft.step(inputs.tokens, BoundKv(self.attention, inputs), at)


class Drafts:
    """Makes drafts on the device, and writes them to `pending` [rows, 1 + most], after the last tokens."""

    def __init__(self, guesser: Guesser, draws: Draws, pending: Tensor, block_tokens: int) -> None:
        self.draws = draws
        self.guesser = guesser
        self.pending = pending
        self._block_tokens = block_tokens
        self._last_position = guesser.max_position - 1
        self.failed = False  # drafting has stopped for good

    @property
    def taps(self) -> tuple[int, ...]:
        return self.guesser.taps

    def blank(self, flow: Flow) -> None:
        """After a decode-only step: no draft attends to old bytes at the place of its tokens."""
        self.attempt(self.guesser.blank, flow)

    def attempt(self, work: Callable[..., None], *args: object) -> None:
        """Drafts are optional: if a pass fails, the step's own result stays valid, and no more drafts are
        made."""
        if self.failed:
            return
        try:
            work(*args)
        except Exception:
            self.failed = True
            log.exception("drafting failed: requests continue without drafts until the next start")

    def run(
        self,
        flow: Flow,
        nexts: Tensor,
        lasts: Tensor,
        rows: Tensor,
        num_drafts: int,
        choice: DrawKind = DrawKind.LIKELIEST,
    ) -> None:
        """`nexts` [T]: the token after each token of the step, if known. `lasts` int64 [G]: index in the step
        of each request's last accepted token. `rows` [G]: rows of these requests."""
        if num_drafts == 0 or len(lasts) == 0:  # the step is part of a prompt, or drafts do not pay
            self.guesser.fill(flow, nexts)
            return
        place = _last_rows(flow.bound_inputs(), lasts, rows)
        guess = self.guesser.first(flow, nexts, lasts, place, self)
        ids = self.guesser.target_ids
        for number in range(1, num_drafts + 1):
            chosen = self.draws.choose(guess.logits, ids, rows, place.positions + number, choice)
            drafts = (chosen if ids is None else ids[chosen]).to(torch.int32)
            self.pending[:, number].index_copy_(0, rows.long(), drafts)
            if number < num_drafts:
                guess = self.guesser.further(guess, self.moved(guess.place, drafts))

    def moved(self, place: StepInputs, tokens: Tensor) -> StepInputs:
        """One token further. Tables have an entry for every draft; without room it is the padding block."""
        size, at = self._block_tokens, place.kv_lens
        slots = place.tables[(place.table_starts + at // size).long()]
        return dataclasses.replace(
            place,
            tokens=tokens,
            positions=(place.positions + 1).clamp(max=self._last_position),
            write_at=slots * size + at % size,
            kv_lens=at + 1,
        )


class DraftPass(Pass):
    """The draft model's pass over a step's tokens, which fills its KV, and the passes that make drafts."""

    is_late = True

    def __init__(self, drafts: Drafts, rows: Rows, replays: Replays, masks: Masks) -> None:
        self.drafts = drafts
        self._masks = masks
        self.attentions = (drafts.guesser.attention,)
        self._rows = rows
        self._has_new_draws = False  # rows have changed since their draws were last uploaded
        self._replays = replays

    def begin(self, plan: StepPlan, ops: StepOps) -> None:
        self._has_new_draws |= bool(plan.starts)

    def pack(self, step: Step) -> None:
        """The next token of each token, in a step with prompts."""
        shape = step.packed.shape
        if not shape.samples_all:
            step.nexts_at, nexts = step.packed.append(shape.num_tokens)
            pack_nexts(step.plan, step.packed.gap, step.bucket is not None, nexts)

    def submit(self, step: Step) -> None:
        plan, sampling, ops, limits = step.plan, step.sampling, step.ops, step.limits
        if self.drafts.failed or not (plan.num_ahead or not plan.is_decode):
            return
        choice = DrawKind.FILTERED if sampling.filters else DrawKind.DRAWN
        choice = choice if sampling.random else DrawKind.LIKELIEST
        captured = None
        if step.bucket is not None and step.bucket.samples_all and self.drafts.pending.is_cuda:
            captured = self._captured(step.bucket, choice)
        ops.wait_layers(limits.num_layers)
        if plan.num_ahead and choice is not DrawKind.LIKELIEST and self._has_new_draws:
            self._has_new_draws, words = False, self._rows.draw_words()
            written = Access(SAMPLER, range(words.shape[1]), ROW_STATE, Mode.WRITE)
            ops.submit(lambda: self.drafts.draws.load(words), "draws", [written])
        accesses = self._accesses(step, choice)
        if captured is None:
            ops.submit(lambda: self._run_after(step, choice), "draft", accesses)
        else:
            ops.submit(lambda: _fill(step, captured), "draft", accesses)
            ops.replay(captured.replay, accesses)
        if plan.num_ahead and self._masks.answers:
            self._hand_on(step)

    def _hand_on(self, step: Step) -> None:
        """Drafts to the host: the next step needs a mask for each."""
        pending = self.drafts.pending
        room = step.outputs.room_for_drafts(*pending.shape)
        read = Access(SAMPLER, range(len(pending)), LAST, Mode.READ)
        step.ops.submit(lambda: move(room, pending), "drafts to the host", [read, step.written])

    def capture(self, bucket: Shape) -> None:
        if bucket.samples_all:
            for choice in DrawKind:
                self._captured(bucket, choice)

    def _captured(self, bucket: Shape, choice: DrawKind) -> CapturedPass:
        num_drafts, device = self.drafts.pending.shape[1] - 1, self.drafts.pending.device

        def room(size: int) -> tuple[Tensor, ...]:
            """The next tokens, the last token and the row of each request."""
            nexts, rows = (torch.zeros(size, dtype=torch.int32, device=device) for _ in range(2))
            return nexts, torch.arange(size, device=device), rows

        def run(flow: Flow, tensors: tuple[Tensor, ...]) -> None:
            nexts, lasts, rows = tensors
            self.drafts.run(flow, nexts, lasts, rows, num_drafts, choice)

        return self._replays.get_pass(bucket, choice, room, run)

    def _accesses(self, step: Step, choice: DrawKind) -> list[Access]:
        limits, rows = step.limits, step.packed.samples()[0]
        size, layers = limits.block_tokens, (limits.target_layers, limits.num_layers)
        # drafts are written after the last token of each chunk
        ahead = [
            chunk.slots[(chunk.kv_len - chunk.num_elsewhere * size) // size :]
            for chunk in step.plan.chunks[: None if step.plan.num_ahead else 0]
        ]
        slots = np.concatenate(ahead) if ahead else step.packed.read_slots[:0]
        accesses = [
            *step.kv(layers),
            Access(limits.arena, slots, layers, Mode.WRITE),
            only(INPUTS, Mode.READ),
            only(GRAPHS, Mode.READ),
            Access(SAMPLER, rows, LAST, Mode.WRITE),
        ]
        read = [] if choice is DrawKind.LIKELIEST else [Access(SAMPLER, rows, ROW_STATE, Mode.READ)]
        return accesses + read

    def _run_after(self, step: Step, choice: DrawKind) -> None:
        """The op of a step that is not captured."""
        inputs, made, chunks = step.flow.bound_inputs(), step.outputs.made, step.plan.chunks
        step.outputs.made = None
        if made is None:  # nothing was sampled: the step is part of a prompt
            nexts, lasts = inputs.tokens[:0], inputs.sample_at[:0].long()
        else:
            nexts = made.tokens.clamp(min=0)
            lasts = torch.arange(len(nexts), device=nexts.device) if made.lasts is None else made.lasts
            if step.bucket is not None:  # without padding rows
                lasts = lasts[: len(chunks) if any(chunk.num_logits for chunk in chunks) else 0]
        rows = inputs.sample_rows[lasts]
        if not step.packed.shape.samples_all:
            given = step.ints[step.nexts_at : step.nexts_at + step.packed.shape.num_tokens]
            sampled = nexts[(-1 - given).clamp(min=0).long()] if len(nexts) else given
            nexts, lasts = torch.where(given < 0, sampled, given), inputs.sample_at[lasts].long()
        self.drafts.attempt(self.drafts.run, step.flow, nexts, lasts, rows, step.plan.num_ahead, choice)


def _fill(step: Step, captured: CapturedPass) -> None:
    """Fill the inputs of a captured pass."""
    from penstock.engine.execution import triton_steps

    made, step.outputs.made = step.outputs.made, None
    assert made is not None
    rows = step.flow.bound_inputs().sample_rows
    nexts_into, lasts_into, rows_into = captured.tensors
    triton_steps.fill_pass(made.tokens, made.lasts, rows, (nexts_into, lasts_into, rows_into))


def blank(arena: Tensor, write_at: Tensor) -> None:
    """Write zeros to all layers of `arena` at `write_at`."""
    if arena.is_cuda:
        from penstock.engine.execution import triton_steps

        triton_steps.blank(arena, write_at)
        return
    size = arena.shape[3]
    arena[(write_at // size).long(), :, :, (write_at % size).long()] = 0.0


def pack_nexts(plan: StepPlan, gap: int, is_bucket: bool, into: NDArray[np.int32]) -> None:
    """The token after each token of the step: its id, or -1 - the number of its sample. `gap`: padding rows
    after the decodes."""
    at = sample = 0
    for number, chunk in enumerate(plan.chunks):
        if number == plan.num_decodes:
            into[at : at + gap] = 0
            at += gap
        end = at + len(chunk.tokens)
        if number >= plan.num_decodes:
            into[at : end - 1] = chunk.tokens[1:]
            into[end - 1] = -1 - sample if chunk.num_logits else chunk.next_token
        else:
            into[at:end] = -1 - np.arange(sample, sample + end - at) if chunk.num_logits else chunk.next_token
        at, sample = end, sample + max(chunk.num_logits, is_bucket)
    into[at:] = 0


def _last_rows(inputs: StepInputs, lasts: Tensor, rows: Tensor) -> StepInputs:
    """One row per request, at its last accepted token."""
    num = len(lasts)
    if inputs.num_decodes == len(inputs.tokens):
        of_token, behind = lasts, torch.zeros_like(lasts)
    else:
        of_token = torch.searchsorted(inputs.q_starts[1:], lasts.to(torch.int32), right=True)
        behind = inputs.q_starts[of_token + 1] - 1 - lasts  # later tokens of its chunk
    return StepInputs(
        tokens=inputs.tokens[lasts],
        positions=inputs.positions[lasts],
        write_at=inputs.write_at[lasts],
        q_starts=torch.arange(num + 1, dtype=torch.int32, device=lasts.device),
        kv_lens=(inputs.kv_lens[of_token] - behind).to(torch.int32),
        table_starts=inputs.table_starts[of_token],
        tables=inputs.tables,
        rows=rows,
        sample_at=rows[:0],
        sample_rows=rows[:0],
        num_decodes=num,
        max_q_len=1,
        max_kv_len=inputs.max_kv_len,
    )


def _joined(inputs: StepInputs, place: StepInputs) -> StepInputs:
    """The rows of a decode-only step, followed by those of `place`."""
    both: dict[str, Any] = {
        name: torch.cat((getattr(inputs, name), getattr(place, name))) for name in _BY_ROW
    }
    num = len(both["tokens"])
    q_starts = torch.arange(num + 1, dtype=torch.int32, device=place.tokens.device)
    return dataclasses.replace(place, **both, q_starts=q_starts, num_decodes=num)

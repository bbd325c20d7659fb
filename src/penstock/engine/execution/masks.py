"""Bit masks of the tokens that grammars allow next, for the sampling of each step. Owns a matcher per
constrained request, and the thread that runs matchers during the forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Access, Chunk, Fence, Mode, Start
from penstock.engine.execution.grammars import Grammars, Matcher
from penstock.engine.execution.staging import StagingRing
from penstock.engine.execution.thoughts import ThoughtMatcher
from penstock.lanes.lane import Lane


class GrammarEnd(NamedTuple):
    """A request whose grammar allows no further token."""

    request_id: str
    error: str | None  # None: its answer is complete


@dataclass(slots=True, eq=False)
class _Answer:
    """One constrained request, until it ends or is retracted."""

    request_id: str
    num_prompt: int
    num_known: int  # generated tokens passed to it; the matcher has them once its jobs are done
    masked_from: int  # generated tokens before the first mask
    matcher: Matcher | ThoughtMatcher | None = None  # made and used only by the mask thread
    # masks of the step that waits for it, and the generated tokens that it must have by then
    waiting: tuple[StepMasks, _Asked, int] | None = None

    def is_masked(self, chunk: Chunk) -> bool:
        """True if the step that samples `chunk` needs a mask. Not after reasoning that ended without a
        grammar following; if this is seen late, the mask allows all tokens."""
        is_free = isinstance(self.matcher, ThoughtMatcher) and self.matcher.is_free
        return chunk.kv_len - self.num_prompt >= self.masked_from and not is_free


class _Asked(NamedTuple):
    """The masks of one answer in a step."""

    answer: _Answer
    row: int  # of the mask of its next token
    drafts: Sequence[int]  # the masks after them are in the rows behind it


@dataclass(slots=True, eq=False)
class StepMasks:
    """The masks of one step, in a buffer of the staging ring: the mask thread fills each row once, and the
    step's sampling reads them."""

    host: Tensor  # int32 [C * words]
    rows: NDArray[np.int32]  # [C, words], the same bytes
    at: Sequence[int]  # the step's samples that they are for
    access: Access
    jobs: list[Future[list[GrammarEnd]]] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)  # rows that no job fills yet
    # By request: tokens that it gets from the step at most. After so many drafts its answer is complete.
    most: dict[str, int] = field(default_factory=dict)

    def wait_filled(self, lane: Lane) -> list[GrammarEnd]:
        """Block until every mask is filled; returns requests whose grammars have ended. A row whose token
        never arrived belongs to a request that ended or was retracted: its sample is not used."""
        endings = [ending for job in self.jobs for ending in job.result()]
        # written by the mask thread, which is done
        lane.touch((self.access._replace(mode=Mode.WRITE),), label="masks")
        for row in self.missing:
            self.rows[row] = -1
        return endings


class Masks:
    """Called from the engine thread. Jobs run in order on the mask thread."""

    def __init__(self, grammars: Grammars, max_rows: int, lane: Lane) -> None:
        """`max_rows`: tokens that a step samples at most."""
        self._grammars = grammars
        self._num_words = grammars.num_words
        self._max_rows = max_rows
        self._lane = lane
        self._ring: StagingRing | None = None  # made when first needed
        # of requests with a grammar; if empty, the engine makes no calls here
        self.answers: dict[str, _Answer] = {}
        self._by_row: dict[int, _Answer] = {}
        self._thread = ThreadPoolExecutor(1, "masks")

    def start(self, start: Start) -> None:
        """A request takes a row: make its matcher and feed it the tokens generated before."""
        if (last := self._by_row.pop(start.row, None)) is not None and self.answers.get(
            last.request_id
        ) is last:
            del self.answers[last.request_id]  # it ended without notice
        # from before a retraction, or of an earlier request with the same id
        self.answers.pop(start.request_id, None)
        if (masked_from := start.sampling.masked_from) is None:
            return
        answer = _Answer(start.request_id, start.num_prompt, len(start.output), masked_from)
        self.answers[start.request_id] = self._by_row[start.row] = answer

        def make() -> None:
            grammar, thought = start.sampling.grammar, start.sampling.thought
            matcher = None if grammar is None else self._grammars.wait_compiled(grammar).copy()
            answer.matcher = (
                matcher if thought is None else ThoughtMatcher(thought, self._grammars.token_bytes, matcher)
            )
            if answer.matcher is not None:
                answer.matcher.consume(start.output)

        self._thread.submit(make)

    def for_step(self, chunks: Sequence[Chunk], pinned: bool) -> StepMasks | None:
        """`chunks`: that of each sample, in order: one with drafts comes several times. None: none of them is
        constrained."""
        found = [
            (at, answer, chunk)
            for at, chunk in enumerate(chunks)
            if (answer := self.answers.get(chunk.request_id)) and chunk.num_logits and answer.is_masked(chunk)
        ]
        if not found:
            return None
        if self._ring is None:
            self._ring = StagingRing(self._max_rows * self._num_words, self._lane, "staged masks", pinned)
        host, array = self._ring.next()
        used = len(found) * self._num_words
        masks = StepMasks(
            host[:used],
            array[:used].reshape(-1, self._num_words),
            [at for at, _, _ in found],
            self._ring.access(Mode.READ),
        )
        ready: list[_Asked] = []
        row = 0
        while row < len(found):
            _, answer, chunk = found[row]
            num_drafts = chunk.num_logits - 1
            asked = _Asked(answer, row, chunk.tokens[len(chunk.tokens) - num_drafts :])
            num_wanted = chunk.kv_len - num_drafts - answer.num_prompt
            if num_wanted == answer.num_known:
                ready.append(asked)
            else:  # its last token is being sampled
                answer.waiting = (masks, asked, num_wanted)
                masks.missing.update(range(row, row + chunk.num_logits))
            row += chunk.num_logits
        if ready:
            masks.jobs.append(self._thread.submit(_fill, ready, masks))
        return masks

    def used_until(self, fence: Fence) -> None:
        """The masks of the step launched last are read until `fence` passes."""
        if self._ring is not None:
            self._ring.used_until(fence)

    def advance(self, news: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Tokens were sampled for these requests. Start to compute the masks that waited for them."""
        told = [
            (answer, tokens)
            for request_id, tokens in news
            if tokens and (answer := self.answers.get(request_id))
        ]
        by_step: dict[StepMasks | None, list[tuple[_Asked, Sequence[int]]]] = {}
        for answer, tokens in told:
            answer.num_known += len(tokens)
            masks, asked, num_wanted = answer.waiting or (None, _Asked(answer, -1, ()), -1)
            if num_wanted != answer.num_known:
                masks = None
            else:
                answer.waiting = None
            by_step.setdefault(masks, []).append((asked, tokens))
        for masks, some in by_step.items():
            job = self._thread.submit(_advance, some, masks)
            if masks is not None:
                masks.jobs.append(job)
                for one, _ in some:
                    masks.missing.difference_update(range(one.row, one.row + 1 + len(one.drafts)))

    def close(self) -> None:
        """Waits for running jobs, whose work is bounded. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _advance(news: Sequence[tuple[_Asked, Sequence[int]]], masks: StepMasks | None) -> list[GrammarEnd]:
    for asked, tokens in news:
        if asked.answer.matcher is not None:
            asked.answer.matcher.consume(tokens)
    return [] if masks is None else _fill([asked for asked, _ in news], masks)


def _fill(wanted: Sequence[_Asked], masks: StepMasks) -> list[GrammarEnd]:
    """Fill the masks of the next tokens. If no token is allowed, the request has ended, and its mask allows
    all."""
    rows, answers = masks.rows, [(one.answer, one.row) for one in wanted]
    going_on: list[tuple[Matcher, int]] = []
    reasoning: set[int] = set()
    for answer, row in answers:
        matcher = answer.matcher
        if isinstance(matcher, ThoughtMatcher):
            if matcher.answering is None:
                reasoning.add(row)
                rows[row] = -1 if matcher.due is None else 0
                if matcher.due is not None:
                    rows[row].view(np.uint32)[matcher.due // 32] = 1 << matcher.due % 32
                continue
            matcher = matcher.answering
        if matcher is not None and not matcher.is_over:
            going_on.append((matcher, row))
    drafted = {one.row: one for one in wanted if one.drafts}
    Matcher.fill([one for one in going_on if one[1] not in drafted], rows)
    for matcher, row in going_on:
        if row in drafted:
            most = matcher.fill_drafted(row, drafted[row].drafts, rows)
            if most is not None:
                masks.most[drafted[row].answer.request_id] = most
    for row, one in drafted.items():
        if row not in {of for _, of in going_on}:
            rows[row : row + 1 + len(one.drafts)] = -1
    open_rows = reasoning | {row for matcher, row in going_on if not matcher.is_over and rows[row].any()}
    ended = [(answer, row) for answer, row in answers if row not in open_rows]
    for _, row in ended:
        rows[row] = -1
    return [GrammarEnd(answer.request_id, _why_not(answer.matcher)) for answer, _ in ended]


def _why_not(matcher: Matcher | ThoughtMatcher | None) -> str | None:
    """None: the answer is complete."""
    if matcher is None:
        return "its schema or grammar could not be compiled again"
    error = matcher.error
    if error is None and matcher.is_accepting:
        return None
    return (
        f"the answer cannot meet its schema or grammar: {error or 'no token of this model can continue it'}"
    )

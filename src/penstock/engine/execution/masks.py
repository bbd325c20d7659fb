"""Bit masks of the tokens that may come next, by grammars and token rules, for the sampling of each step.
Owns a matcher per constrained request, and the thread that runs matchers during the forward pass."""

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
from penstock.engine.execution.token_rules import TokenRules
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane


class GrammarEnd(NamedTuple):
    """A request whose grammar or token rules allow no further token."""

    request_id: str
    error: str | None  # None: its answer is complete


@dataclass(slots=True, eq=False)
class _Answer:
    """One constrained request, until it ends or is retracted."""

    request_id: str
    row: int
    num_prompt: int
    num_known: int  # generated tokens passed to it; the matcher has them once its jobs are done
    masked_from: int  # generated tokens before the first mask
    is_ruled: bool  # it has token rules
    # made and used only by the mask thread
    matcher: Matcher | ThoughtMatcher | None = None
    rules: TokenRules | None = None
    is_made: bool = False  # False when asked for a mask: its grammar could not be compiled again
    # masks of the step that waits for it, and the generated tokens that it must have by then: fewer if drafts
    # of the step before are rejected
    waiting: tuple[StepMasks, _WantedMasks, range] | None = None
    made: Sequence[int] = ()  # drafts that the device made after its last known token

    def is_masked(self, chunk: Chunk) -> bool:
        """True if the step that samples `chunk` needs a mask. Not after reasoning that ended without a
        grammar following; if this is seen late, the mask allows all tokens."""
        is_free = not self.is_ruled and isinstance(self.matcher, ThoughtMatcher) and self.matcher.is_free
        return chunk.kv_len - self.num_prompt >= self.masked_from and not is_free

    @property
    def due(self) -> int | None:
        """The forced next token, at an end of reasoning."""
        matcher = self.matcher
        return matcher.due if isinstance(matcher, ThoughtMatcher) and not matcher.is_past else None

    def consume(self, tokens: Sequence[int]) -> None:
        for one in (self.matcher, self.rules):
            if one is not None:
                one.consume(tokens)


class _WantedMasks(NamedTuple):
    """The masks of one answer in a step."""

    answer: _Answer
    row: int  # of the mask of its next token
    drafts: Sequence[int]  # the masks after them are in the rows behind it

    def resolved(self) -> _WantedMasks:
        """With the drafts that the device made: -2 is the first of them."""
        made = self.answer.made
        if min(self.drafts, default=0) < -1 - len(made):
            raise InvariantBroken(f"no drafts of request {self.answer.request_id} came to the host")
        return self._replace(drafts=[made[-2 - id] if id < 0 else id for id in self.drafts])


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
    # By request: tokens that it gets from the step at most. After so many drafts no token can follow.
    most: dict[str, int] = field(default_factory=dict)

    def note_most(self, answer: _Answer, most: int | None) -> None:
        if most is not None:
            self.most[answer.request_id] = min(most, self.most.get(answer.request_id, most))

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
        # of constrained requests; if empty, the engine makes no calls here
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
        sampling, known = start.sampling, (start.num_prompt, len(start.output), masked_from)
        answer = _Answer(start.request_id, start.row, *known, sampling.rules_out)
        self.answers[start.request_id] = self._by_row[start.row] = answer

        def make() -> None:
            if answer.is_ruled:
                answer.rules = TokenRules(sampling, self._num_words)
            grammar, thought = sampling.grammar, sampling.thought
            matcher = None if grammar is None else self._grammars.wait_compiled(grammar).copy()
            answer.matcher = (
                matcher if thought is None else ThoughtMatcher(thought, self._grammars.token_bytes, matcher)
            )
            answer.is_made = True
            answer.consume(start.output)

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
        ready: list[_WantedMasks] = []
        row = 0
        while row < len(found):
            _, answer, chunk = found[row]
            num_drafts = chunk.num_logits - 1
            asked = _WantedMasks(answer, row, chunk.tokens[len(chunk.tokens) - num_drafts :])
            num_wanted = chunk.kv_len - num_drafts - answer.num_prompt
            wanted = range(num_wanted - chunk.num_unsure, num_wanted + 1)
            if answer.num_known in wanted:
                ready.append(asked.resolved())
            else:  # its last token is being sampled
                answer.waiting = (masks, asked, wanted)
                masks.missing.update(range(row, row + chunk.num_logits))
            row += chunk.num_logits
        if ready:
            masks.jobs.append(self._thread.submit(_fill, ready, masks))
        return masks

    def used_until(self, fence: Fence) -> None:
        """The masks of the step launched last are read until `fence` passes."""
        if self._ring is not None:
            self._ring.used_until(fence)

    def advance(
        self, news: Iterable[tuple[str, Sequence[int]]], made: NDArray[np.int32] | None = None
    ) -> None:
        """Tokens were sampled for these requests. Start to compute the masks that waited for them. `made`: by
        row the last token, and the drafts that the device made after it."""
        told = [
            (answer, tokens)
            for request_id, tokens in news
            if tokens and (answer := self.answers.get(request_id))
        ]
        by_step: dict[StepMasks | None, list[tuple[_WantedMasks, Sequence[int]]]] = {}
        for answer, tokens in told:
            answer.num_known += len(tokens)
            if made is not None:
                answer.made = made[answer.row, 1:].tolist()
            masks, asked, wanted = answer.waiting or (None, _WantedMasks(answer, -1, ()), range(0))
            if answer.num_known not in wanted:
                masks = None
            else:
                answer.waiting, asked = None, asked.resolved()
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


def _advance(news: Sequence[tuple[_WantedMasks, Sequence[int]]], masks: StepMasks | None) -> list[GrammarEnd]:
    for asked, tokens in news:
        asked.answer.consume(tokens)
    return [] if masks is None else _fill([asked for asked, _ in news], masks)


def _fill(wanted: Sequence[_WantedMasks], masks: StepMasks) -> list[GrammarEnd]:
    """Fill the masks of the next tokens. If no token is allowed, the request has ended, and its mask allows
    all."""
    rows, filled = masks.rows, set[int]()
    going_on: list[tuple[Matcher, int]] = []
    drafted = {one.row: one for one in wanted if one.drafts}
    for answer, row, drafts in wanted:
        matcher = answer.matcher.answering if isinstance(answer.matcher, ThoughtMatcher) else answer.matcher
        if matcher is not None and not matcher.is_over:
            going_on.append((matcher, row))
            continue
        rows[row : row + 1 + len(drafts)] = -1
        if matcher is None and answer.is_made:
            filled.add(row)
            _force(rows[row], answer.due)
    Matcher.fill([one for one in going_on if one[1] not in drafted], rows)
    for matcher, row in going_on:
        if row in drafted:
            masks.note_most(drafted[row].answer, matcher.fill_drafted(row, drafted[row].drafts, rows))
    filled |= {row for matcher, row in going_on if not matcher.is_over}
    for answer, row, drafts in wanted:
        # the end of reasoning is forced: its length has a limit
        if answer.rules is not None and row in filled and answer.due is None:
            masks.note_most(answer, answer.rules.apply(rows[row : row + 1 + len(drafts)], drafts))
    ended = [(one.answer, one.row) for one in wanted if one.row not in filled or not rows[one.row].any()]
    for _, row in ended:
        rows[row] = -1
    return [GrammarEnd(answer.request_id, _why_not(answer)) for answer, _ in ended]


def _force(row: NDArray[np.int32], due: int | None) -> None:
    """Only the token that is due, if one is."""
    if due is not None:
        row[:] = 0
        row.view(np.uint32)[due // 32] = 1 << due % 32


def _why_not(answer: _Answer) -> str | None:
    """None: the answer is complete."""
    matcher = answer.matcher
    if not answer.is_made:
        return "its schema or grammar could not be compiled again"
    if matcher is None or (matcher.error is None and matcher.is_accepting):
        return None
    none = "no token of this model" if answer.rules is None else "none of the tokens that it may have"
    return f"the answer cannot meet its schema or grammar: {matcher.error or f'{none} can continue it'}"

"""Which part of its context a scored request has on the device while it decodes. Owns the choice, and how the device's blocks are divided
for it; draws nothing and moves nothing.

    first part | pinned parts | parts with the best scores | ... left out ... | trailing window, which is written at its end

A part is 64 tokens, or one block where that is more. All before the window is in host memory; parts that are chosen are copied back beside
it. Decoding goes on over the old choice until the copies have landed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config import KvConfig, ResidencyName, wrong_spans
from penstock.contract import FetchedBlocks, Residency, Scoring, Table
from penstock.errors import ConfigError, InvalidRequest

PART_TOKENS = 64
WINDOW_SHARE = 4  # one in so many of the resident parts is the trailing window, and one at least
SLACK_PARTS = 2  # by which the window may grow until its first part has been saved and summed up
MOVING_SHARE = 8  # one in so many of the parts that can be chosen is kept free for the next choice
FIRST_TAU = 16  # tokens between two scorings, until their times are known
RECALL_EVERY = 64  # scorings, of which one is in a step that reads all of the context,
FIRST_RECALL = 4  # this one first
AT_ONCE = 32  # parts that are fetched in one plan: the engine thread takes a tenth of a millisecond for each
DECAY = 0.5  # of a score with each scoring: what was wanted a moment ago is wanted sooner than what was never


@dataclass(frozen=True, slots=True)
class Division:
    """How the blocks that a scored request may have on the device are divided. Sizes are in parts."""

    part_blocks: int
    block_tokens: int
    window: int
    chosen: int  # in use at once, the first part and pinned ones included
    moving: int  # copied besides, for the next choice

    @classmethod
    def of(cls, resident_blocks: int, block_tokens: int) -> Division:
        """Raises ConfigError where there would be nothing to choose."""
        part_blocks = max(1, PART_TOKENS // block_tokens)
        parts = resident_blocks // part_blocks
        window = max(1, parts // WINDOW_SHARE)
        rest = parts - window - SLACK_PARTS
        moving = max(1, rest // MOVING_SHARE)
        if rest - moving < 2:
            size, tokens = part_blocks * block_tokens, resident_blocks * block_tokens
            sizes = f"{size} tokens at the beginning, {size} in the trailing window, {SLACK_PARTS * size} being saved"
            need = f"{sizes}, {size} chosen and {size} on their way make {(4 + SLACK_PARTS) * size}"
            raise ConfigError(f"--kv-residency scored: {need}, and a sequence has {tokens} on the device; raise --kv-resident-tokens")
        return cls(part_blocks, block_tokens, window, rest - moving, moving)

    @property
    def num_parts(self) -> int:
        """On the device, in any way."""
        return self.window + SLACK_PARTS + self.chosen + self.moving

    @property
    def part_tokens(self) -> int:
        return self.part_blocks * self.block_tokens

    @property
    def most_fetched(self) -> int:
        """Blocks."""
        return (self.chosen + self.moving) * self.part_blocks

    def pinned(self, pins: Sequence[tuple[int, int]], num_tokens: int) -> tuple[int, ...]:
        """Parts that hold the first token or pinned ones, of a sequence of at most `num_tokens`. Raises InvalidRequest where they leave
        nothing to choose."""
        parts, num = {0}, 1
        for first, end in pins:
            span = range(first // self.part_tokens, -(-min(end, num_tokens) // self.part_tokens))
            parts.update(span[: self.chosen])  # a span may be longer than anything that is counted one by one
            num = max(num, len(span) + (0 not in span), len(parts))
        if num >= self.chosen:
            held = f"{num} parts of {self.part_tokens} tokens, the first included"
            raise InvalidRequest(f"kv_pin_spans take {held}, and {self.chosen - 1} can be pinned: one has to be free", "kv_pin_spans")
        return tuple(sorted(parts))


@dataclass(frozen=True, slots=True)
class ResidencyChoice:
    """What requests that do not fit attend to while they decode: what is so by default, and what each may ask for."""

    deep_blocks: int  # a request of more is one that does not fit; 0: all fit
    block_tokens: int
    scored: bool  # by default
    pins: tuple[tuple[int, int], ...]  # by default
    division: Division | None
    refusal: str = ""  # why there is no division

    @classmethod
    def of(cls, deep_blocks: int, resident_blocks: int, kv: KvConfig) -> ResidencyChoice:
        """Raises ConfigError where the default cannot be kept."""
        scored, division, refusal = kv.residency == "scored", None, "all sequences fit"
        if deep_blocks:
            try:
                division = Division.of(resident_blocks, kv.block_tokens)
                division.pinned(kv.pin_spans, sys.maxsize)
            except (ConfigError, InvalidRequest) as error:
                if scored:
                    raise ConfigError(str(error)) from None
                refusal = str(error)
        return cls(deep_blocks, kv.block_tokens, scored, kv.pin_spans, division, refusal)

    def for_request(self, asked: ResidencyName | None, pins: Sequence[tuple[int, int]] | None, num_tokens: int) -> Residency | None:
        """For one that may have `num_tokens` in all; None where it attends to all. Raises InvalidRequest for what cannot be."""
        if wrong := wrong_spans(pins or ()):
            raise InvalidRequest(wrong, "kv_pin_spans")
        scored = self.scored if asked is None else asked == "scored"
        if pins is not None and not scored:
            raise InvalidRequest("kv_pin_spans are for requests with kv_residency scored", "kv_pin_spans")
        if not scored or not 0 < self.deep_blocks < -(-num_tokens // self.block_tokens):
            return None
        if self.division is None:
            raise InvalidRequest(f"kv_residency scored is not possible here: {self.refusal}", "kv_residency")
        spans = self.pins if pins is None else tuple(pins)
        self.division.pinned(spans, num_tokens)
        return Residency(spans)


class Placed(NamedTuple):
    """Where a chunk finds its context."""

    slots: NDArray[np.int32]
    paged: NDArray[np.int32] | None
    num_left_out: int
    scoring: Scoring | None


class ResidentSet:
    """Of one request, from its admission until it leaves: nothing of it is known to its next life, or to another request."""

    def __init__(self, division: Division, pins: Sequence[tuple[int, int]], num_exact: int, num_tokens: int) -> None:
        """Its first `num_exact` tokens attend to all before them; it may have `num_tokens` in all."""
        self.division = division
        self.num_exact = num_exact
        self.tau = FIRST_TAU
        self._pinned = division.pinned(pins, num_tokens)
        self._most_parts = -(-num_tokens // division.part_tokens)
        self._chosen: dict[int, FetchedBlocks] = {}  # by part: on the device
        self._coming: dict[int, FetchedBlocks] = {}  # by part: on its way
        self._scores: NDArray[np.float32] = np.empty(0, np.float32)
        self._order: list[int] = list(self._pinned)  # what should be there, the most wanted first
        self._slots: NDArray[np.int32] | None = None  # of those chosen, in token order
        self._num_summed = 0  # blocks whose keys are summed up by the steps planned so far
        self._score_at = 0  # position from which the next scoring is due
        self._is_scoring = False
        self._num_scorings = 0

    def decodes(self, start: int) -> bool:
        """Whether a chunk that begins there attends to the resident set only."""
        return start >= self.num_exact

    # ------------------------------------------------------------------------------------------------------------ for steps

    def num_making_way(self, table: Table, num_short: int, most: int) -> int:
        """Blocks at the window's beginning that are to make way, where a step lacks room for `num_short` and the window may have `most`:
        for the step, and as long as it is larger than it has to be, for parts that are wanted more. In whole parts, and only what is
        summed up."""
        size = self.division.part_blocks
        num_wanted = len(self.wanted(table)) * size
        num_spare = most + num_short - self.division.window * size
        num = max(num_short, min(num_short + num_wanted, num_spare))
        end = -(-(table.num_paged + max(0, num)) // size) * size
        return max(0, min(end, self._num_summed // size * size) - table.num_paged) if num > 0 else 0

    def place(self, table: Table, start: int, end: int, may_score: bool, may_read: bool) -> Placed:
        """For the tokens `start` to `end`. `may_score`: no other chunk of the step asks for scores. `may_read`: the step may read host
        memory, as it does now and then to see how much was left out."""
        tail = table.slots(end)
        if not self.decodes(start):
            paged = table.paged_slots if table.num_paged else None
            scoring = self._last_exact(table, tail, end, may_score) if end == self.num_exact else None
            return Placed(tail, paged, 0, scoring)
        own = np.concatenate((self._chosen_slots(), tail))
        num_left_out = table.num_paged - len(own) + len(tail)
        scoring = self._later(table, tail, start, may_score)
        if scoring is not None and scoring.num_parts:
            self._num_scorings += 1
            if may_read and self._num_scorings % RECALL_EVERY == FIRST_RECALL:
                return Placed(own, self._left_out(table), 0, scoring._replace(recall=True))
        return Placed(own, None, num_left_out, scoring)

    def _left_out(self, table: Table) -> NDArray[np.int32]:
        """Where in host memory the blocks are that are not on the device."""
        is_here = np.zeros(table.num_paged, bool)
        size = self.division.part_blocks
        for part in self._chosen:
            is_here[part * size : (part + 1) * size] = True
        return table.paged_slots[~is_here]

    def _last_exact(self, table: Table, tail: NDArray[np.int32], end: int, may_score: bool) -> Scoring:
        """All that is paged out streams past this chunk, and is summed up on its way."""
        self._num_summed, slots = end // self.division.block_tokens, tail[: end // self.division.block_tokens - table.num_paged]
        num_parts = self._begin_scoring(end) if may_score else 0
        return Scoring(self.division.part_blocks, self._most_parts, table.num_paged, slots, table.num_paged > 0, num_parts)

    def _later(self, table: Table, tail: NDArray[np.int32], start: int, may_score: bool) -> Scoring | None:
        """What is full by now is summed up with the next scoring. A part that waits for it cannot be paged out, and has one without."""
        first, end = self._num_summed, start // self.division.block_tokens
        scores = may_score and start >= self._score_at and not self._is_scoring
        if not scores and end - first < self.division.part_blocks:
            return None
        self._num_summed, slots = end, tail[first - table.num_paged : end - table.num_paged]
        num_parts = self._begin_scoring(start) if scores else 0
        return Scoring(self.division.part_blocks, self._most_parts, first, slots, False, num_parts)

    def _begin_scoring(self, position: int) -> int:
        """Returns how many parts there are to be scored."""
        num_parts = self._num_summed // self.division.part_blocks
        self._is_scoring, self._score_at = num_parts > 0, position + self.tau
        return num_parts

    def _chosen_slots(self) -> NDArray[np.int32]:
        if self._slots is None:
            runs = [self._chosen[part].slots for part in sorted(self._chosen)]
            self._slots = np.concatenate(runs) if runs else np.empty(0, np.int32)
        return self._slots

    # ---------------------------------------------------------------------------------------------------------- the choice

    def take_scores(self, scores: NDArray[np.float32]) -> None:
        """A scoring is over: what should be on the device is chosen again."""
        self._is_scoring = False
        known = np.zeros_like(scores)
        known[: len(self._scores)] = self._scores * DECAY
        self._scores = np.maximum(known, scores)
        best = np.argsort(self._scores, kind="stable")[::-1]  # of equal ones the latest first
        pinned = set(self._pinned)
        # Looked through in every plan: as many as can be on the device in any way are enough, however long the context is.
        most = 2 * self.division.num_parts
        self._order = [*self._pinned, *(part for part in best[:most].tolist() if part not in pinned)]

    def take_landed(self) -> list[FetchedBlocks]:
        """Copies that are over are used from now on; returns those that have failed."""
        failed = []
        for part in [part for part, fetched in self._coming.items() if fetched.settled]:
            fetched = self._coming.pop(part)
            if fetched.failed:
                failed.append(fetched)
            else:
                self._chosen[part], self._slots = fetched, None
        return failed

    def take_surplus(self) -> list[FetchedBlocks]:
        """What gives way to what has landed: the least wanted of what is chosen."""
        num = len(self._chosen) - self.division.chosen
        if num <= 0:
            return []
        place = {part: at for at, part in enumerate(self._order)}
        worst = sorted(self._chosen, key=lambda part: place.get(part, len(place)))[-num:]
        self._slots = None
        return [self._chosen.pop(part) for part in worst]

    def wanted(self, table: Table) -> list[int]:
        """Parts to be fetched now, the most wanted first: as many as may be on their way."""
        end = table.num_paged // self.division.part_blocks
        target = [part for part in self._order if part < end][: self.division.chosen]
        num = min(AT_ONCE, self.division.chosen + self.division.moving - len(self._chosen) - len(self._coming))
        missing = (part for part in target if part not in self._chosen and part not in self._coming)
        return [part for part, _ in zip(missing, range(num), strict=False)]

    def coming(self, part: int, fetched: FetchedBlocks) -> None:
        self._coming[part] = fetched

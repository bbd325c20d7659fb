"""Which part of its context a scored request has on the device while it decodes. Owns the choice, how the
device's blocks are divided for it, and what the next turn of its conversation is told; draws nothing and
moves nothing.

    first part | pinned parts | parts with the best scores | ... left out ... | trailing window, which is
    written at its end

A part is 64 tokens, or one block where that is more. All before the window is in host memory; parts that are
chosen are copied back beside it. Decoding goes on over the old choice until the copies have landed.

Every step shows its tokens the first part, pinned parts and the trailing window. A request that begins with
blocks in host memory waits until these have been copied. Where that is not possible, its steps read all of
its context in host memory.

The next turn finds all that the last one had in host memory, and what was known of its keys. It begins with
the last choice, waits until that is on the device, and computes its prompt over it. So its first token waits
for what is resident, however long the context is. Behind the prompt parts are scored, and chosen again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config import KvConfig, ResidencyName, wrong_spans
from penstock.contract import FetchedBlocks, KeptSums, Residency, Scoring, Table
from penstock.errors import ConfigError, InvalidRequest, InvariantBroken

PART_TOKENS = 64
WINDOW_SHARE = 4  # one in so many of the resident parts is the trailing window, and one at least
SLACK_PARTS = 2  # by which the window may grow until its first part has been saved and summed up
MOVING_SHARE = 8  # one in so many of the parts that can be chosen is kept free for the next choice
FIRST_TAU = 16  # tokens between two scorings, until their times are known
RECALL_EVERY = 64  # scorings, of which one is in a step that reads all of the context,
FIRST_RECALL = 4  # this one first
AT_ONCE = 128  # parts that are fetched in one plan, and in one copy: what other requests load waits behind it
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
            sizes = (
                f"{size} tokens at the beginning, {size} "
                f"in "
                f"the "
                f"trailing "
                f"window, "
                f"{SLACK_PARTS * size} "
                f"being saved"
            )
            need = f"{sizes}, {size} chosen and {size} on their way make {(4 + SLACK_PARTS) * size}"
            raise ConfigError(
                f"--kv-residency scored: {need}, and a sequence "
                f"has "
                f"{tokens} "
                f"on "
                f"the "
                f"device; "
                f"raise --kv-resident-tokens"
            )
        return cls(part_blocks, block_tokens, window, rest - moving, moving)

    @property
    def num_parts(self) -> int:
        """On the device, in any way."""
        return self.window + SLACK_PARTS + self.chosen + self.moving

    @property
    def part_tokens(self) -> int:
        return self.part_blocks * self.block_tokens

    def pinned(self, pins: Sequence[tuple[int, int]], num_tokens: int) -> tuple[int, ...]:
        """Parts that hold the first token or pinned ones, of a sequence of at most `num_tokens`. Raises
        InvalidRequest where they leave nothing to choose."""
        parts, num = {0}, 1
        for first, end in pins:
            span = range(first // self.part_tokens, -(-min(end, num_tokens) // self.part_tokens))
            parts.update(span[: self.chosen])  # a span may be longer than anything that is counted one by one
            num = max(num, len(span) + (0 not in span), len(parts))
        if num >= self.chosen:
            held = f"{num} parts of {self.part_tokens} tokens, the first included"
            raise InvalidRequest(
                f"kv_pin_spans take {held}, and {self.chosen - 1} can be pinned: one has to be free",
                "kv_pin_spans",
            )
        return tuple(sorted(parts))


@dataclass(frozen=True, slots=True)
class ResidencyChoice:
    """What requests that do not fit attend to while they decode: what is so by default, and what each may ask
    for."""

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

    def for_request(
        self,
        asked: ResidencyName | None,
        pins: Sequence[tuple[int, int]] | None,
        num_prompt: int,
        num_more: int,
    ) -> Residency | None:
        """For one whose prompt has `num_prompt` tokens, and that may have `num_more` behind it; None where it
        attends to all. Raises InvalidRequest for what cannot be. Pins of its own lie in its prompt; those by
        default are for every length, and end with it."""
        num_tokens = num_prompt + num_more
        if wrong := wrong_spans(pins or ()):
            raise InvalidRequest(wrong, "kv_pin_spans")
        scored = self.scored if asked is None else asked == "scored"
        if pins is not None and not scored:
            raise InvalidRequest("kv_pin_spans are for requests with kv_residency scored", "kv_pin_spans")
        if beyond := next((span for span in pins or () if span[1] > num_prompt), None):
            what = f"kv_pin_spans: tokens {beyond[0]} to {beyond[1] - 1} cannot be pinned"
            raise InvalidRequest(f"{what}: the prompt has {num_prompt}, numbered from 0", "kv_pin_spans")
        if not scored or not 0 < self.deep_blocks < -(-num_tokens // self.block_tokens):
            return None
        if self.division is None:
            raise InvalidRequest(f"kv_residency scored is not possible here: {self.refusal}", "kv_residency")
        spans = self.pins if pins is None else tuple(pins)
        self.division.pinned(spans, num_tokens)
        return Residency(spans)


@dataclass(slots=True, eq=False)
class KeptContext:
    """What a scored request has left for the next turn of its conversation."""

    # the key that its last block would have, had it been computed over all before it: by this a prompt knows
    # its own
    name: bytes
    keys: Sequence[bytes]  # under which its blocks are in host memory: whole parts
    num_open: int  # of these, the first so many anybody may find
    place: range  # parts of the room for what is known of keys
    scores: NDArray[np.float32]  # of the parts
    num_users: int = 0  # requests that go on from it


class KeptContexts:
    """Those of the conversations that were answered last, as many as there is room for what is known of their
    keys. A context is replaced by that of its next turn."""

    def __init__(self, division: Division | None, num_pageable: int) -> None:
        """There is room for what is known of all blocks that may be paged out."""
        self._division = division
        self._num_parts = num_kept_parts(division, num_pageable)
        self._kept: dict[bytes, KeptContext] = {}  # by name, the latest used last
        self._owned: Counter[bytes] = Counter()  # keys that are no prefix's, and contexts that have them

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, keys: Sequence[bytes]) -> KeptContext | None:
        """The longest that a prompt with these `keys` goes on from."""
        fitting = (
            one
            for one in self._kept.values()
            if len(one.keys) <= len(keys) and keys[len(one.keys) - 1] == one.name
        )
        return max(fitting, key=lambda one: len(one.keys), default=None)

    def num_usable(self, num_blocks: int, num_tokens: int) -> int:
        """Of a context whose first `num_blocks` blocks are there, those that a prompt of `num_tokens` goes on
        from. 0: it is computed over all before it, since it brings more than the trailing window takes."""
        if self._division is None:
            return 0
        num = num_blocks // self._division.part_blocks * self._division.part_blocks
        most = self._division.window * self._division.part_tokens
        return num if num_tokens - num * self._division.block_tokens <= most else 0

    def keep(self, context: KeptContext, before: KeptContext | None) -> list[bytes]:
        """`before` is what it went on from. Returns keys that nobody knows any more. Where there is no room,
        it is not kept: its `place` is empty."""
        freed = self._drop(before) if before is not None and before.num_users == 0 else []
        freed += self._drop(self._kept.get(context.name))  # by another request, with the same tokens
        num = len(context.place)
        while (gap := self._gap(num)) is None and (
            oldest := next((one for one in self._kept.values() if not one.num_users), None)
        ):
            freed += self._drop(oldest)
        own = context.keys[context.num_open :]
        if gap is None:
            context.place = range(0)
            return [key for key in (*freed, *own) if key not in self._owned]
        context.place = gap
        self._kept[context.name] = context
        self._owned.update(own)
        return [key for key in freed if key not in self._owned]

    def use(self, context: KeptContext) -> None:
        """By a request, until `leave`."""
        context.num_users += 1
        if self._kept.pop(context.name, None) is not None:
            self._kept[context.name] = context

    def leave(self, context: KeptContext) -> None:
        context.num_users -= 1

    def _drop(self, context: KeptContext | None) -> list[bytes]:
        """Returns its own keys."""
        if context is None or self._kept.get(context.name) is not context:
            return []
        del self._kept[context.name]
        own = list(context.keys[context.num_open :])
        self._owned -= Counter(own)
        return own

    def _gap(self, num_parts: int) -> range | None:
        """The first place with so much room between the others."""
        start = 0
        for taken in sorted((one.place for one in self._kept.values()), key=lambda place: place.start):
            if taken.start - start >= num_parts:
                break
            start = taken.stop
        return range(start, start + num_parts) if start + num_parts <= self._num_parts else None


def num_kept_parts(division: Division | None, num_pageable: int) -> int:
    return 0 if division is None else num_pageable // division.part_blocks


class Placed(NamedTuple):
    """Where a chunk finds its context."""

    slots: NDArray[np.int32]
    paged: NDArray[np.int32] | None
    num_left_out: int
    scoring: Scoring | None


class ResidentSet:
    """Of one request, from its admission until it leaves. Nothing of it is known to its next life, or to
    another request; the next turn of its conversation is told what `KeptContext` has."""

    def __init__(
        self,
        division: Division,
        pins: Sequence[tuple[int, int]],
        num_known: int,
        num_tokens: int,
        continues: tuple[KeptContext, int] | None = None,
    ) -> None:
        """`num_known` of its tokens are known, and it may have `num_tokens` in all. `continues`: it goes on
        from what an earlier turn has left of its first so many blocks."""
        self.division = division
        self.num_exact = num_known  # its first so many tokens attend to all before them, or came so
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
        self.context: KeptContext | None = None  # that it goes on from
        self._kept: KeptSums | None = None  # where what is known of its keys is, until a step is told
        self._is_filling = False  # nothing is computed before all that is chosen has come
        self._may_wait = True  # no copy has failed
        if continues is not None:
            self.context, self._num_summed = continues
            self.num_exact, self._score_at = self._num_summed * division.block_tokens, num_known + 1
            num_parts = self._num_summed // division.part_blocks
            self._kept = KeptSums(self.context.place.start, self.context.place.stop, num_parts)
            self._is_filling = True
            self._scores = self.context.scores[:num_parts]
            self._choose()

    def decodes(self, start: int) -> bool:
        """Whether a chunk that begins there attends to the resident set only."""
        return start >= self.num_exact

    # ---------------------------------------------------------------------------------------------- for steps

    def num_making_way(self, table: Table, num_short: int, most: int) -> int:
        """Blocks at the window's beginning that are to make way, where a step lacks room for `num_short` and
        the window may have `most`: for the step, and as long as it is larger than it has to be, for parts
        that are wanted more. In whole parts, and only what is summed up."""
        size = self.division.part_blocks
        num_wanted = -(-num_short // size) + len(self.wanted(table))  # parts, as the others here
        num_spare = (most + num_short) // size - self.division.window
        num = max(-(-num_short // size), min(num_wanted, num_spare))
        return max(0, min(num * size, self._num_summed // size * size - table.num_paged))

    def place(self, table: Table, start: int, end: int, may_score: bool, may_read: bool) -> Placed:
        """For the tokens `start` to `end`. `may_score`: no other chunk of the step asks for scores.
        `may_read`: the step may read host memory, as it does now and then to see how much was left out.
        Raises InvariantBroken where its tokens would not see what every step shows."""
        if table.num_paged % self.division.part_blocks:
            raise InvariantBroken(
                f"{table.num_paged} blocks of a scored request are paged out, which are no whole parts"
            )
        tail, self._is_filling = table.slots(end), False
        if not self.decodes(start):
            paged = table.paged_slots if table.num_paged else None
            scoring = self._last_exact(table, tail, end, may_score) if end == self.num_exact else None
            return Placed(tail, paged, 0, scoring)
        own = np.concatenate((self._chosen_slots(), tail))
        num_left_out = table.num_paged - len(own) + len(tail)
        scoring = self._later(table, tail, start, may_score)
        if not self.shows_needed(table):
            if not may_read:
                raise InvariantBroken(
                    f"a step at token {start} shows neither its trailing window nor host memory"
                )
            return Placed(own, self._left_out(table), 0, scoring)
        if scoring is not None and scoring.num_parts:
            self._num_scorings += 1
            if may_read and num_left_out and self._num_scorings % RECALL_EVERY == FIRST_RECALL:
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
        self._num_summed, slots = (
            end // self.division.block_tokens,
            tail[: end // self.division.block_tokens - table.num_paged],
        )
        num_parts = self._begin_scoring(end) if may_score else 0
        return Scoring(
            self.division.part_blocks,
            self._most_parts,
            table.num_paged,
            slots,
            table.num_paged > 0,
            num_parts,
        )

    def _later(self, table: Table, tail: NDArray[np.int32], start: int, may_score: bool) -> Scoring | None:
        """What is full by now is summed up with the next scoring. A part that waits for it cannot be paged
        out, and has one without. While a prompt goes on from an earlier turn nothing is paged out, and its
        first token does not wait until such a step is launched."""
        if self._kept is not None and start < self._score_at:
            return None
        first, end = self._num_summed, start // self.division.block_tokens
        scores = may_score and start >= self._score_at and not self._is_scoring
        if not scores and end - first < self.division.part_blocks:
            return None
        self._num_summed, slots = end, tail[first - table.num_paged : end - table.num_paged]
        num_parts = self._begin_scoring(start) if scores else 0
        kept, self._kept = self._kept, None
        return Scoring(self.division.part_blocks, self._most_parts, first, slots, False, num_parts, kept=kept)

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

    # --------------------------------------------------------------------------------------------- the choice

    def take_scores(self, scores: NDArray[np.float32]) -> None:
        """A scoring is over: what should be on the device is chosen again."""
        self._is_scoring = False
        known = np.zeros_like(scores)
        known[: len(self._scores)] = self._scores * DECAY
        self._scores = np.maximum(known, scores)
        self._choose()

    def _choose(self) -> None:
        best = np.argsort(self._scores, kind="stable")[::-1]  # of equal ones the latest first
        pinned = set(self._pinned)
        # Looked through in every plan: as many as can be on the device in any way are enough, however long
        # the context is.
        most = 2 * self.division.num_parts
        self._order = [*self._pinned, *(part for part in best[:most].tolist() if part not in pinned)]

    def take_landed(self) -> list[FetchedBlocks]:
        """Copies that are over are used from now on; returns those that have failed."""
        failed = []
        for part in [part for part, fetched in self._coming.items() if fetched.settled]:
            fetched = self._coming.pop(part)
            if fetched.failed:
                failed.append(fetched)
                self._may_wait = False  # for what may never come
            else:
                self._chosen[part], self._slots = fetched, None
        return failed

    def take_surplus(self, table: Table) -> list[FetchedBlocks]:
        """What gives way to what has landed: the least wanted of what is chosen."""
        num = len(self._chosen) - self._most_chosen(table)
        if num <= 0:
            return []
        place = {part: at for at, part in enumerate(self._in_order(table))}
        worst = sorted(self._chosen, key=lambda part: place.get(part, len(place)))[-num:]
        self._slots = None
        return [self._chosen.pop(part) for part in worst]

    def wanted(self, table: Table) -> list[int]:
        """Parts to be fetched now, the most wanted first: as many as may be on their way."""
        most = self._most_chosen(table)
        target = self._in_order(table)[:most]
        num = min(AT_ONCE, most + self.division.moving - len(self._chosen) - len(self._coming))
        missing = (part for part in target if part not in self._chosen and part not in self._coming)
        return [part for part, _ in zip(missing, range(num), strict=False)]

    def most_fetched(self, table: Table) -> int:
        """Blocks that may have a copy on the device, used or on their way."""
        return (self._most_chosen(table) + self.division.moving) * self.division.part_blocks

    def _most_chosen(self, table: Table) -> int:
        """Parts that are in use at once. What stands in for the trailing window has the window's room."""
        return max(self.division.chosen, len(self._needed(table)))

    def _in_order(self, table: Table) -> list[int]:
        """Parts that are paged out, the most wanted first."""
        end = table.num_paged // self.division.part_blocks
        return list(dict.fromkeys((*self._needed(table), *(part for part in self._order if part < end))))

    def _needed(self, table: Table) -> list[int]:
        """Paged-out parts that every step shows: the first, pinned ones, and as long as the blocks behind
        them do not fill the trailing window, those before these."""
        size = self.division.part_blocks
        end = table.num_paged // size
        num_recent = self.division.window - (table.num_slots - table.num_paged) // size
        recent = range(end - 1, max(-1, end - 1 - num_recent), -1)
        return list(dict.fromkeys((*(part for part in self._pinned if part < end), *recent)))

    def shows_needed(self, table: Table) -> bool:
        return all(part in self._chosen for part in self._needed(table))

    def coming(self, part: int, fetched: FetchedBlocks) -> None:
        self._coming[part] = fetched

    def is_filling(self, table: Table) -> bool:
        """Whether its next tokens wait for parts that are on their way: for what every step shows, and those
        of a next turn for all that it begins with."""
        return self._may_wait and bool(self._coming) and (self._is_filling or not self.shows_needed(table))

    # ------------------------------------------------------------------------------------------ the next turn

    def num_keeping(self, table: Table) -> int:
        """Blocks that the next turn can go on from: whole parts, all of them summed up. None where no step
        was told of the sums that it began with: the next turn begins with those, too."""
        size = self.division.part_blocks
        return 0 if self._kept is not None else min(self._num_summed, len(table.sealed_keys)) // size * size

    def kept(self, name: bytes, keys: Sequence[bytes]) -> KeptContext:
        """Of so many blocks; where it lies is not known yet. Parts that were never scored are worth
        nothing."""
        num_parts = len(keys) // self.division.part_blocks
        scores = np.zeros(num_parts, np.float32)
        scores[: len(self._scores)] = self._scores[:num_parts]
        num_open = min(len(keys), self.num_exact // self.division.block_tokens)
        if self.context is not None:
            num_open = min(num_open, self.context.num_open)
        return KeptContext(name, keys, num_open, range(num_parts), scores)

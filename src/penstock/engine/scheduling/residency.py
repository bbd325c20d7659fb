"""Which part of its context a scored request has on the device while it decodes. Owns the choice, the
division of device blocks for it, and the context kept for the next turn. Draws no blocks and moves none.

    first part | pinned parts | parts with the best scores | ... left out ... | trailing window, which is
    written at its end

A part is 64 tokens, or one block if that is more. All tokens before the window are in host memory; chosen
parts are copied back to the device. Decoding uses the old choice until the copies have landed.

Every token attends to the first part, pinned parts and the trailing window. A request that begins with blocks
in host memory waits until these are copied. If that is not possible, its steps read its whole context from
host memory.

The next turn finds the whole context in host memory, and the kept key bounds. It begins with the last choice,
waits until that is on the device, and computes its prompt over it. So the time to its first token depends on
the resident part, not on the length of the context. After the prompt, parts are scored and chosen again.
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
from penstock.engine.scheduling.placement import Placed
from penstock.errors import ConfigError, InvalidRequest, InvariantBroken

PART_TOKENS = 64
WINDOW_SHARE = 4  # one in this many of the resident parts is the trailing window, at least one part
SLACK_PARTS = 2  # growth of the window until its first part has been saved and its key bounds computed
MOVING_SHARE = 8  # one in this many of the parts that can be chosen stays free for the next choice
FIRST_TAU = 16  # tokens between two scorings, until their times are known
RECALL_EVERY = 64  # one scoring in this many runs in a step that reads the whole context
FIRST_RECALL = 4  # the first such scoring
AT_ONCE = 128  # parts fetched per plan, in one copy: loads of other requests queue after it
DECAY = 0.5  # factor on old scores at each scoring: a part wanted lately ranks above one never wanted


@dataclass(frozen=True, slots=True)
class Division:
    """How a scored request divides its blocks on the device. Sizes are in parts."""

    part_blocks: int
    block_tokens: int
    window: int
    chosen: int  # in use at one time, the first part and pinned ones included
    moving: int  # being copied for the next choice

    @classmethod
    def of(cls, resident_blocks: int, block_tokens: int) -> Division:
        """Raises ConfigError if no part could be chosen."""
        part_blocks = max(1, PART_TOKENS // block_tokens)
        parts = resident_blocks // part_blocks
        window = max(1, parts // WINDOW_SHARE)
        rest = parts - window - SLACK_PARTS
        moving = max(1, rest // MOVING_SHARE)
        if rest - moving < 2:
            size, tokens = part_blocks * block_tokens, resident_blocks * block_tokens
            raise ConfigError(
                f"--kv-residency scored needs {(4 + SLACK_PARTS) * size} tokens of a sequence on the device, "
                f"and it has {tokens}; raise --kv-resident-tokens"
            )
        return cls(part_blocks, block_tokens, window, rest - moving, moving)

    @property
    def num_parts(self) -> int:
        """All parts on the device."""
        return self.window + SLACK_PARTS + self.chosen + self.moving

    @property
    def part_tokens(self) -> int:
        return self.part_blocks * self.block_tokens

    def pinned(self, pins: Sequence[tuple[int, int]], num_tokens: int) -> tuple[int, ...]:
        """Parts that hold the first token or pinned tokens, in a sequence of at most `num_tokens`. Raises
        InvalidRequest if no part is left to choose."""
        parts, num = {0}, 1
        for first, end in pins:
            span = range(first // self.part_tokens, -(-min(end, num_tokens) // self.part_tokens))
            parts.update(span[: self.chosen])  # a span may be too long to enumerate
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
    """What deep requests attend to while they decode: the default, and what a request may ask for."""

    deep_blocks: int  # a request of more blocks is deep; 0: all requests fit
    block_tokens: int
    scored: bool  # by default
    pins: tuple[tuple[int, int], ...]  # by default
    division: Division | None
    refusal: str = ""  # why there is no division

    @classmethod
    def of(cls, deep_blocks: int, resident_blocks: int, kv: KvConfig) -> ResidencyChoice:
        """Raises ConfigError if the default is not possible."""
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
        """For a request with `num_prompt` prompt tokens and at most `num_more` after them; None if it attends
        to all. Raises InvalidRequest if what it asks for is not possible. Its own pins must lie in its
        prompt; default pins are cut at its end."""
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
    """The context that a scored request leaves for the next turn of its conversation."""

    # the key that its last block would have with full attention; the next turn's prompt finds it by this key
    name: bytes
    keys: Sequence[bytes]  # keys of its blocks in host memory: whole parts
    num_open: int  # of these, the first ones that any request may match
    place: range  # its parts in the store of key bounds
    scores: NDArray[np.float32]  # of the parts
    num_users: int = 0  # requests that continue it


class KeptContexts:
    """Contexts of the conversations answered last, as many as the store of key bounds holds. The next turn's
    context replaces the one before."""

    def __init__(self, division: Division | None, num_pageable: int) -> None:
        """The store has room for the key bounds of all pageable blocks."""
        self._division = division
        self._num_parts = num_kept_parts(division, num_pageable)
        self._kept: dict[bytes, KeptContext] = {}  # by name, least recently used first
        self._owned: Counter[bytes] = Counter()  # keys that belong to contexts alone, and in how many each is

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, keys: Sequence[bytes]) -> KeptContext | None:
        """The longest context that a prompt with these `keys` continues."""
        fitting = (
            one
            for one in self._kept.values()
            if len(one.keys) <= len(keys) and keys[len(one.keys) - 1] == one.name
        )
        return max(fitting, key=lambda one: len(one.keys), default=None)

    def num_usable(self, num_blocks: int, num_tokens: int) -> int:
        """How many blocks a prompt of `num_tokens` can continue from, if the first `num_blocks` of the
        context exist. 0: its new tokens exceed the trailing window, so it is computed with full attention."""
        if self._division is None:
            return 0
        num = num_blocks // self._division.part_blocks * self._division.part_blocks
        most = self._division.window * self._division.part_tokens
        return num if num_tokens - num * self._division.block_tokens <= most else 0

    def keep(self, context: KeptContext, before: KeptContext | None) -> list[bytes]:
        """`before`: the context that it continued. Returns keys that no context has any more. If there is no
        room, it is not kept and its `place` is empty."""
        freed = self._drop(before) if before is not None and before.num_users == 0 else []
        freed += self._drop(self._kept.get(context.name))  # left by another request with the same tokens
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
        """A request uses it until `leave`."""
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
        """The first gap of `num_parts` between the other contexts."""
        start = 0
        for taken in sorted((one.place for one in self._kept.values()), key=lambda place: place.start):
            if taken.start - start >= num_parts:
                break
            start = taken.stop
        return range(start, start + num_parts) if start + num_parts <= self._num_parts else None


def num_kept_parts(division: Division | None, num_pageable: int) -> int:
    return 0 if division is None else num_pageable // division.part_blocks


class Scorings:
    """When a request is scored, and which of its blocks have key bounds by then. A part cannot be paged out
    before it has them."""

    def __init__(self, division: Division, num_tokens: int) -> None:
        """The request has at most `num_tokens`."""
        self.tau = FIRST_TAU  # tokens between two scorings
        self.num_summed = 0  # blocks whose key bounds the planned steps have computed
        self.kept: KeptSums | None = None  # place of kept key bounds, until a step takes them
        self.due = 0  # position from which the next scoring is due
        self.num_taken = 0
        self.is_running = False
        self._division = division
        self._most_parts = -(-num_tokens // division.part_tokens)

    @property
    def num_whole(self) -> int:
        """Blocks of whole parts with key bounds."""
        size = self._division.part_blocks
        return self.num_summed // size * size

    def of_last_exact(self, table: Table, tail: NDArray[np.int32], end: int, may_score: bool) -> Scoring:
        """This chunk streams all paged-out blocks, so their key bounds are computed on the way."""
        num_paged, self.num_summed = table.num_paged, end // self._division.block_tokens
        slots = tail[: self.num_summed - num_paged]
        num_parts = self._begin(end) if may_score else 0
        size, most = self._division.part_blocks, self._most_parts
        return Scoring(size, most, num_paged, slots, num_paged > 0, num_parts)

    def of_later(self, table: Table, tail: NDArray[np.int32], start: int, may_score: bool) -> Scoring | None:
        """The next scoring also computes the key bounds of full blocks. A whole part without bounds cannot be
        paged out, so its bounds are computed without a scoring. A prompt that continues an earlier turn pages
        nothing out, so its first token does not wait for such a step."""
        if self.kept is not None and start < self.due:
            return None
        first, end, size = self.num_summed, start // self._division.block_tokens, self._division.part_blocks
        scores = may_score and start >= self.due and not self.is_running
        if not scores and end - first < size:
            return None
        self.num_summed, slots = end, tail[first - table.num_paged : end - table.num_paged]
        num_parts = self._begin(start) if scores else 0
        kept, self.kept = self.kept, None
        return Scoring(size, self._most_parts, first, slots, False, num_parts, kept=kept)

    def _begin(self, position: int) -> int:
        """Returns how many parts are scored."""
        num_parts = self.num_summed // self._division.part_blocks
        self.is_running, self.due = num_parts > 0, position + self.tau
        return num_parts

    def note_taken(self) -> bool:
        """A step scores. True: it may read the whole context, to measure recall."""
        self.num_taken += 1
        return self.num_taken % RECALL_EVERY == FIRST_RECALL


class AroundDrafts(NamedTuple):
    """Of a chunk: drafts before it that are not verified yet, and slots for drafts after it."""

    num_unsure: int = 0
    room: int = 0


NO_DRAFTS = AroundDrafts()


class ResidentSet:
    """The resident set of one request, from its admission until it leaves. It does not outlive a retraction
    and is not shared; the next turn of the conversation gets a `KeptContext`."""

    def __init__(
        self,
        division: Division,
        pins: Sequence[tuple[int, int]],
        num_known: int,
        num_tokens: int,
        continues: tuple[KeptContext, int] | None = None,
    ) -> None:
        """`num_known` of its tokens are known, at most `num_tokens` will be. `continues`: the context of an
        earlier turn and how many of its blocks are used."""
        self.division = division
        self.num_exact = num_known  # tokens whose KV was computed with full attention
        self.scorings = Scorings(division, num_tokens)
        self._pinned = division.pinned(pins, num_tokens)
        self._chosen: dict[int, FetchedBlocks] = {}  # by part: on the device
        self._coming: dict[int, FetchedBlocks] = {}  # by part: being copied
        self._scores: NDArray[np.float32] = np.empty(0, np.float32)
        self._order: list[int] = list(self._pinned)  # parts that should be resident, most wanted first
        self._slots: NDArray[np.int32] | None = None  # slots of chosen parts, in token order
        self.context: KeptContext | None = None  # the context that it continues
        self._is_filling = False  # no step before all chosen parts have landed
        self._may_wait = True  # no copy has failed
        if continues is not None:
            self.context, num_blocks = continues
            self.num_exact, num_parts = num_blocks * division.block_tokens, num_blocks // division.part_blocks
            place = self.context.place
            self.scorings.num_summed, self.scorings.due = num_blocks, num_known + 1
            self.scorings.kept = KeptSums(place.start, place.stop, num_parts)
            self._is_filling = True
            self._scores = self.context.scores[:num_parts]
            self._choose()

    def decodes(self, start: int) -> bool:
        """True if a chunk that begins at `start` attends to the resident set only."""
        return start >= self.num_exact

    # ---------------------------------------------------------------------------------------------- for steps

    def num_making_way(self, table: Table, num_short: int, most: int) -> int:
        """Blocks to page out at the window's start. A step lacks `num_short` blocks, and the window may have
        `most`. Frees room for the step, and for wanted parts while the window is larger than needed. Whole
        parts only, and only blocks with key bounds."""
        size = self.division.part_blocks
        num_wanted = -(-num_short // size) + len(self.wanted(table))  # parts, as the others here
        num_spare = (most + num_short) // size - self.division.window
        num = max(-(-num_short // size), min(num_wanted, num_spare))
        return max(0, min(num * size, self.scorings.num_whole - table.num_paged))

    def place(
        self,
        table: Table,
        start: int,
        end: int,
        may_score: bool,
        may_read: bool,
        drafts: AroundDrafts = NO_DRAFTS,
    ) -> Placed:
        """Place the context of tokens `start` to `end`. `may_score`: no other chunk of the step asks for
        scores. `may_read`: the step may read host memory; it does so now and then to measure recall. Raises
        InvariantBroken if its tokens would miss parts that every step needs."""
        if table.num_paged % self.division.part_blocks:
            raise InvariantBroken(
                f"{table.num_paged} blocks of a scored request are paged out, which are no whole parts"
            )
        tail, self._is_filling = table.slots(end + drafts.room), False
        if not self.decodes(start):
            paged = table.paged_slots if table.num_paged else None
            scoring = None
            if end == self.num_exact:
                scoring = self.scorings.of_last_exact(table, tail, end, may_score)
            return Placed(tail, paged, 0, scoring)
        own = np.concatenate((self._chosen_slots(), tail))
        num_left_out = table.num_paged - len(own) + len(tail)
        scoring = self.scorings.of_later(table, tail, start - drafts.num_unsure, may_score)
        if not self.shows_needed(table):
            if not may_read:
                raise InvariantBroken(
                    f"a step at token {start} shows neither its trailing window nor host memory"
                )
            return Placed(own, self._left_out(table), 0, scoring)
        if (
            (scoring is not None and scoring.num_parts)
            and self.scorings.note_taken()
            and may_read
            and num_left_out
        ):
            return Placed(own, self._left_out(table), 0, scoring._replace(recall=True))
        return Placed(own, None, num_left_out, scoring)

    def _left_out(self, table: Table) -> NDArray[np.int32]:
        """Host slots of the blocks that are not on the device."""
        is_here = np.zeros(table.num_paged, bool)
        size = self.division.part_blocks
        for part in self._chosen:
            is_here[part * size : (part + 1) * size] = True
        return table.paged_slots[~is_here]

    def _chosen_slots(self) -> NDArray[np.int32]:
        if self._slots is None:
            runs = [self._chosen[part].slots for part in sorted(self._chosen)]
            self._slots = np.concatenate(runs) if runs else np.empty(0, np.int32)
        return self._slots

    # --------------------------------------------------------------------------------------------- the choice

    def take_scores(self, scores: NDArray[np.float32]) -> None:
        """A scoring is over: choose the resident parts again."""
        self.scorings.is_running = False
        known = np.zeros_like(scores)
        known[: len(self._scores)] = self._scores * DECAY
        self._scores = np.maximum(known, scores)
        self._choose()

    def _choose(self) -> None:
        best = np.argsort(self._scores, kind="stable")[::-1]  # ties: the latest part first
        pinned = set(self._pinned)
        # Every plan scans this list, so its length is bounded by what the device can hold, not by the
        # context.
        most = 2 * self.division.num_parts
        self._order = [*self._pinned, *(part for part in best[:most].tolist() if part not in pinned)]

    def take_landed(self) -> list[FetchedBlocks]:
        """Use the copies that have landed; returns those that failed."""
        failed = []
        for part in [part for part, fetched in self._coming.items() if fetched.settled]:
            fetched = self._coming.pop(part)
            if fetched.failed:
                failed.append(fetched)
                self._may_wait = False  # for a part that may never arrive
            else:
                self._chosen[part], self._slots = fetched, None
        return failed

    def take_surplus(self, table: Table) -> list[FetchedBlocks]:
        """Remove and return the least wanted chosen parts, in favour of those that landed."""
        num = len(self._chosen) - self._most_chosen(table)
        if num <= 0:
            return []
        place = {part: at for at, part in enumerate(self._in_order(table))}
        worst = sorted(self._chosen, key=lambda part: place.get(part, len(place)))[-num:]
        self._slots = None
        return [self._chosen.pop(part) for part in worst]

    def wanted(self, table: Table) -> list[int]:
        """Parts to fetch now, most wanted first, within the limit on copies in flight."""
        most = self._most_chosen(table)
        target = self._in_order(table)[:most]
        num = min(AT_ONCE, most + self.division.moving - len(self._chosen) - len(self._coming))
        missing = (part for part in target if part not in self._chosen and part not in self._coming)
        return [part for part, _ in zip(missing, range(num), strict=False)]

    def most_fetched(self, table: Table) -> int:
        """Most blocks that may be fetched to the device, landed or in flight."""
        return (self._most_chosen(table) + self.division.moving) * self.division.part_blocks

    def _most_chosen(self, table: Table) -> int:
        """Most parts in use at one time. Parts that replace the trailing window use the window's room."""
        return max(self.division.chosen, len(self._needed(table)))

    def _in_order(self, table: Table) -> list[int]:
        """Paged-out parts, most wanted first."""
        end = table.num_paged // self.division.part_blocks
        return list(dict.fromkeys((*self._needed(table), *(part for part in self._order if part < end))))

    def _needed(self, table: Table) -> list[int]:
        """Paged-out parts that every step needs: the first, pinned ones, and the latest ones while the blocks
        on the device do not fill the trailing window."""
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
        """True while its next tokens wait for parts being copied: those that every step needs and, at the
        start of a turn, all chosen parts."""
        return self._may_wait and bool(self._coming) and (self._is_filling or not self.shows_needed(table))

    # ------------------------------------------------------------------------------------------ the next turn

    def num_keeping(self, table: Table) -> int:
        """Blocks that the next turn can continue from: whole parts with key bounds. 0 if no step has taken
        the kept bounds that it began with: the next turn uses the same ones."""
        size = self.division.part_blocks
        num_sealed = len(table.sealed_keys) // size * size
        return 0 if self.scorings.kept is not None else min(self.scorings.num_whole, num_sealed)

    def kept(self, name: bytes, keys: Sequence[bytes]) -> KeptContext:
        """The context to keep, without its final place. Parts that were never scored get score 0."""
        num_parts = len(keys) // self.division.part_blocks
        scores = np.zeros(num_parts, np.float32)
        scores[: len(self._scores)] = self._scores[:num_parts]
        num_open = min(len(keys), self.num_exact // self.division.block_tokens)
        if self.context is not None:
            num_open = min(num_open, self.context.num_open)
        return KeptContext(name, keys, num_open, range(num_parts), scores)

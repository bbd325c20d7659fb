"""The placement of requests of a model with recurrent layers: they begin at a boundary of which a state is
kept, or at their first token, and keep states at boundaries of their own. Owns which boundaries these are,
and what a running request has of kept states."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.contract import (
    Fence,
    KvLedger,
    Match,
    Prefetch,
    SlotHandle,
    StateLedger,
    StateMove,
    Table,
)
from penstock.engine.scheduling.placement import Placed, Placement
from penstock.engine.scheduling.stages import Life, RunningRequest, WaitingRequest
from penstock.engine.scheduling.steps import NextStep


class _Written(NamedTuple):
    """A slot that a planned step writes, and the boundary, in tokens."""

    boundary: int
    handle: SlotHandle


@dataclass(slots=True)
class _Kept:
    """Of one request in one run."""

    begins: SlotHandle | None = None  # the state that it begins with, until a step with it was read
    is_read: bool = False  # a planned step reads it
    last: int = 0  # the last boundary that its prompt has before its end, if others may wait for its state
    written: deque[_Written] = field(default_factory=deque)  # by steps that were not read yet


class AtBoundaries(Placement):
    """One serves all requests."""

    saves_rest = False  # no state is kept where it is retracted
    divides = False

    def __init__(self, ledger: KvLedger, states: StateLedger, every: int) -> None:
        """`every`: states are also kept after each so many tokens; 0: they are not."""
        super().__init__(ledger)
        self._states = states
        self._every = every
        self._kept: dict[Life, _Kept] = {}

    def usable_keys(self, waiting: WaitingRequest) -> Sequence[bytes]:
        """Not of a block with its last token: that one is computed, and a state behind it has it already."""
        return super().usable_keys(waiting)[: (waiting.num_tokens - 1) // self._ledger.block_tokens]

    def is_ready(self, waiting: WaitingRequest) -> bool:
        if waiting.search is None:
            waiting.search = self._states.search(self.usable_keys(waiting))
        return super().is_ready(waiting) and (waiting.search is None or waiting.search.ready)

    def reads_first(self, waiting: WaitingRequest, match: Match) -> bool:
        """Its blocks are read or loaded meanwhile, or when it has a table."""
        num = match.num_blocks + match.num_colder
        key = self.usable_keys(waiting)[num - 1] if num else None
        return waiting.search is not None and waiting.search.reads_first(key, match.num_known)

    def prefetch(self, waiting: WaitingRequest, is_next: bool) -> Prefetch | None:
        """As far as there is a state, once that is known."""
        if waiting.search is not None and not waiting.search.ready:
            waiting.may_prefetch = True
            return None
        return super().prefetch(waiting, is_next)

    def open(self, waiting: WaitingRequest, match: Match) -> Table | None:
        life, keys, kept = waiting.life, self.usable_keys(waiting), _Kept()
        num = match.num_blocks + match.num_colder
        if num:
            kept.begins = self._states.pin(life.request.id, keys[num - 1])
            if kept.begins is None:
                return None
        if len(keys) > num:
            kept.last = len(keys) * self._ledger.block_tokens
            self._states.expect(keys[-1], len(keys), 1)
        self._kept[life] = kept
        return super().open(waiting, match)

    def until_boundary(self, running: RunningRequest, num_tokens: int) -> int:
        start, kept = running.num_planned, self._kept[running.life]
        ends = [kept.last, (start // self._every + 1) * self._every if self._every else 0]
        return min([num_tokens, *(end - start for end in ends if end > start)])

    def place(self, running: RunningRequest, start: int, end: int, room: int, step: NextStep) -> Placed:
        kept, begins, ends = self._kept[running.life], None, None
        if kept.begins is not None and not kept.is_read:
            begins = kept.begins.slots[0]
        kept.is_read = True
        if end == kept.last or (self._every and end % self._every == 0):
            ends = self._reserve(running, kept, end)
        move = None if begins is None and ends is None else StateMove(begins, ends)
        return super().place(running, start, end, room, step)._replace(state=move)

    def _reserve(self, running: RunningRequest, kept: _Kept, boundary: int) -> int | None:
        life = running.life
        if life.prefix is None or not life.request.may_match:
            return None
        handle = self._states.try_reserve(life.request.id, self._key(life, boundary))
        if handle is None:
            self._expect_none(life, kept, boundary)
            return None
        kept.written.append(_Written(boundary, handle))
        return handle.slots[0]

    def computed(self, running: RunningRequest, fence: Fence | None) -> None:
        life, kept, size = running.life, self._kept[running.life], self._ledger.block_tokens
        if kept.begins is not None:
            kept.begins.end(fence)
            kept.begins = None
        while kept.written and kept.written[0].boundary <= running.num_committed:
            boundary, handle = kept.written.popleft()
            if life.prefix is not None and len(life.prefix.keys) * size < boundary:
                life.prefix = self._ledger.extend_prefix(life.prefix, life.tokens)
            key = self._key(life, boundary)
            assert key is not None
            self._states.publish(handle, key, boundary // size, fence)
            self._expect_none(life, kept, boundary)

    def leave(self, running: RunningRequest, is_answered: bool, fence: Fence | None) -> None:
        life, kept = running.life, self._kept.pop(running.life)
        self._expect_none(life, kept, kept.last)
        for handle in (kept.begins, *(one.handle for one in kept.written)):
            if handle is not None:
                handle.end(fence)

    def _key(self, life: Life, boundary: int) -> bytes | None:
        """None: not all tokens before it are known."""
        num = boundary // self._ledger.block_tokens
        return life.prefix.keys[num - 1] if life.prefix is not None and num <= len(life.prefix.keys) else None

    def _expect_none(self, life: Life, kept: _Kept, boundary: int) -> None:
        """The state of this boundary is there, or will not be."""
        if boundary and boundary == kept.last and (key := self._key(life, boundary)) is not None:
            self._states.expect(key, boundary // self._ledger.block_tokens, -1)
            kept.last = 0

"""The placement of requests of a model with recurrent layers: they begin at a boundary of which a state is
kept, or at their first token, and keep states at boundaries of their own. Owns which boundaries these are,
and what a running request has of kept states.

    shortly before a prompt ends         the next request of the conversation begins there
    where two prompts part               a shared beginning, such as a system prompt
    every N tokens                       if asked for

A state of tokens that attended to a part of their context has a key that only the next turn of its
conversation finds, as blocks have.
"""

from __future__ import annotations

import bisect
import sys
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


# Blocks that two prompts share after a state, at least, for one where they part: copying it takes as long as
# computing some hundred tokens.
_LEAST_SHARED = 16
# The last tokens of a prompt are those of a chat template, and may be others when the conversation goes on.
# Short prompts are computed again in no time.
_SETBACK_TOKENS, _LONG_TOKENS = 64, 1024
_MOST_ENDED = 4096  # sequences of which it is known where they have ended


@dataclass(slots=True)
class _Kept:
    """Of one request in one run."""

    num_shared: int = sys.maxsize  # tokens whose states others may use
    begins: SlotHandle | None = None  # the state that it begins with, until a step with it was read
    is_read: bool = False  # a planned step reads it
    # boundaries in its prompt, in tokens, of which it keeps a state that others may wait for
    ends: set[int] = field(default_factory=set)
    written: deque[_Written] = field(default_factory=deque)  # by steps that were not read yet
    running: RunningRequest | None = None
    compared: set[WaitingRequest] = field(default_factory=set)  # with its prompt


class AtBoundaries(Placement):
    """One serves all requests."""

    saves_rest = False  # no state is kept where it is retracted
    divides = False

    def __init__(self, ledger: KvLedger, states: StateLedger, every: int, unit: int = 1) -> None:
        """`every`: states are also kept after each so many tokens; 0: they are not. `unit`: blocks; other
        boundaries are multiples of it, since scored requests begin there."""
        super().__init__(ledger)
        self._states = states
        self._every, self._unit = every, unit
        self._kept: dict[Life, _Kept] = {}
        # last keys of sequences: a request that goes on there does not part
        self._ended: dict[bytes, None] = {}
        self._young: dict[Life, _Kept] = {}  # of requests in their prompts, and some that were

    def usable_keys(self, waiting: WaitingRequest) -> Sequence[bytes]:
        """Not of a block with its last token: that one is computed, and a state behind it has it already."""
        return super().usable_keys(waiting)[: (waiting.num_tokens - 1) // self._ledger.block_tokens]

    def is_ready(self, waiting: WaitingRequest) -> bool:
        is_known = self.is_known(waiting)
        return super().is_ready(waiting) and is_known

    def is_known(self, waiting: WaitingRequest) -> bool:
        """Whether cold tiers have said which state they have for it."""
        self._compare(waiting)
        if waiting.search is None:
            waiting.search = self._states.search(self.usable_keys(waiting))
        return waiting.search is None or waiting.search.ready

    def reads_first(self, waiting: WaitingRequest, match: Match) -> bool:
        """Its blocks are read or loaded meanwhile, or when it has a table."""
        return self.reads_state_first(waiting, match.num_blocks + match.num_colder, match.num_known)

    def reads_state_first(self, waiting: WaitingRequest, num: int, num_known: int) -> bool:
        """It would begin after `num` blocks; `num_known` are cached."""
        key = self.usable_keys(waiting)[num - 1] if num else None
        return waiting.search is not None and waiting.search.reads_first(key, num_known)

    def prefetch(self, waiting: WaitingRequest, is_next: bool) -> Prefetch | None:
        """As far as there is a state, once that is known."""
        if waiting.search is not None and not waiting.search.ready:
            waiting.may_prefetch = True
            return None
        return super().prefetch(waiting, is_next)

    def num_here(self, match: Match) -> int:
        return match.num_here

    def open(self, waiting: WaitingRequest, match: Match) -> Table | None:
        begins = self.usable_keys(waiting)[: match.num_blocks + match.num_colder]
        return super().open(waiting, match) if self.begin(waiting, begins, match.num_known) else None

    def begin(
        self,
        waiting: WaitingRequest,
        begins: Sequence[bytes],
        num_known: int = 0,
        num_shared: int = sys.maxsize,
    ) -> bool:
        """It begins with the blocks `begins`; `num_known` are cached. `num_shared`: its first tokens, which
        see all before them. False: the state of these blocks was evicted meanwhile."""
        life, keys, num = waiting.life, self.usable_keys(waiting), len(begins)
        kept, num_known = _Kept(num_shared), min(num_known, len(keys))
        if num:
            kept.begins = self._states.pin(life.request.id, begins[-1])
            if kept.begins is None:
                return False
        if self._last(waiting) > num:
            self._expect(life, kept, self._last(waiting))
        num_parting = num_known - num_known % self._unit
        if num_parting - num >= _LEAST_SHARED and keys[num_known - 1] not in self._ended:
            self._expect(life, kept, num_parting)
        self._kept[life] = kept
        return True

    def _last(self, waiting: WaitingRequest) -> int:
        """The last boundary of a prompt, in blocks, that the next one of its conversation has, too."""
        back = _SETBACK_TOKENS if waiting.num_tokens >= _LONG_TOKENS else 1
        num = (waiting.num_tokens - back) // self._ledger.block_tokens
        return num - num % self._unit

    def enter(self, running: RunningRequest) -> None:
        kept = self._young[running.life] = self._kept[running.life]
        kept.running = running

    def _compare(self, waiting: WaitingRequest) -> None:
        """Running requests keep a state where its prompt parts from theirs, if they are not that far yet. It
        waits for that."""
        keys, size = self.usable_keys(waiting), self._ledger.block_tokens
        for life, kept in list(self._young.items()) if len(keys) >= _LEAST_SHARED else ():
            running = kept.running
            if running is None or running.num_planned >= life.num_prompt:
                del self._young[life]
                kept.compared.clear()
            elif waiting not in kept.compared and life.prefix is not None and life.request.may_match:
                kept.compared.add(waiting)
                num = min(_num_common(keys, life.prefix.keys), kept.num_shared // size)
                num, num_planned = num - num % self._unit, running.num_planned // size
                if num - num_planned >= _LEAST_SHARED:
                    self._expect(life, kept, num)

    def _expect(self, life: Life, kept: _Kept, num_blocks: int) -> None:
        """It will keep a state after so many blocks of its prompt."""
        boundary = num_blocks * self._ledger.block_tokens
        key = self._key(life, kept, boundary)
        if boundary in kept.ends or (key is None and boundary <= kept.num_shared):
            return
        kept.ends.add(boundary)
        if key is not None:
            self._states.expect(key, num_blocks, 1)

    def until_boundary(self, running: RunningRequest, num_tokens: int) -> int:
        start, kept = running.num_planned, self._kept[running.life]
        ends = [*kept.ends, (start // self._every + 1) * self._every if self._every else 0]
        return min([num_tokens, *(end - start for end in ends if end > start)])

    def most_drafts(self, running: RunningRequest) -> int:
        """A state is kept behind a token whose place is certain. So the chunk that ends at a boundary has no
        drafts, nor has the one before it, which may follow drafts that are not verified yet."""
        if not self._every:
            return super().most_drafts(running)
        start = running.num_planned
        return max(0, (start // self._every + 1) * self._every - start - 3)

    def place(self, running: RunningRequest, start: int, end: int, room: int, step: NextStep) -> Placed:
        return super().place(running, start, end, room, step)._replace(state=self.move(running, end))

    def move(self, running: RunningRequest, end: int) -> StateMove | None:
        """What its next chunk, up to token `end`, does with kept states."""
        kept, begins, ends = self._kept[running.life], None, None
        if kept.begins is not None and not kept.is_read:
            begins = kept.begins.slots[0]
        kept.is_read = True
        if end in kept.ends or (self._every and end % self._every == 0):
            ends = self._reserve(running, kept, end)
        return None if begins is None and ends is None else StateMove(begins, ends)

    def _reserve(self, running: RunningRequest, kept: _Kept, boundary: int) -> int | None:
        life = running.life
        if life.prefix is None or not life.request.may_match:
            return None
        handle = self._states.try_reserve(life.request.id, self._key(life, kept, boundary))
        if handle is None:
            self._expect_none(life, kept, boundary)
            return None
        kept.written.append(_Written(boundary, handle))
        return handle.slots[0]

    def computed(self, running: RunningRequest, fence: Fence | None) -> None:
        kept = self._kept[running.life]
        if kept.begins is not None:
            kept.begins.end(fence)
            kept.begins = None
        self._publish(running, kept, fence)

    def _publish(self, running: RunningRequest, kept: _Kept, fence: Fence | None) -> None:
        """What was written up to the tokens that are committed. A key of its own scope is that of a block,
        which is sealed later."""
        life, size = running.life, self._ledger.block_tokens
        while kept.written and kept.written[0].boundary <= running.num_committed:
            boundary, is_shared = kept.written[0].boundary, kept.written[0].boundary <= kept.num_shared
            num_blocks, own = boundary // size, running.table.sealed_keys
            if not is_shared and len(own) < num_blocks:
                return
            if life.prefix is not None and is_shared and len(life.prefix.keys) < num_blocks:
                life.prefix = self._ledger.extend_prefix(life.prefix, life.tokens)
            key = self._key(life, kept, boundary) if is_shared else own[num_blocks - 1]
            assert key is not None
            self._states.publish(kept.written.popleft().handle, key, num_blocks, fence, is_shared)
            self._expect_none(life, kept, boundary)

    def leave(self, running: RunningRequest, is_answered: bool, fence: Fence | None) -> None:
        life, kept = running.life, self._kept.pop(running.life)
        self._publish(running, kept, fence)
        self._young.pop(life, None)
        for boundary in list(kept.ends):
            self._expect_none(life, kept, boundary)
        self._note_end(running)
        for handle in (kept.begins, *(one.handle for one in kept.written)):
            if handle is not None:
                handle.end(fence)

    def _key(self, life: Life, kept: _Kept, boundary: int) -> bytes | None:
        """By which others find it. None: they do not, or not all tokens before it are known."""
        num = boundary // self._ledger.block_tokens
        if life.prefix is None or num > len(life.prefix.keys) or boundary > kept.num_shared:
            return None
        return life.prefix.keys[num - 1]

    def _expect_none(self, life: Life, kept: _Kept, boundary: int) -> None:
        """The state of this boundary is there, or will not be."""
        if boundary in kept.ends:
            kept.ends.remove(boundary)
            if (key := self._key(life, kept, boundary)) is not None:
                self._states.expect(key, boundary // self._ledger.block_tokens, -1)

    def _note_end(self, running: RunningRequest) -> None:
        """Another request may continue what it has computed; its last block may be sealed or not."""
        life, size = running.life, self._ledger.block_tokens
        num = min(running.num_committed, len(life.tokens)) // size
        if life.prefix is None or not num:
            return
        if len(life.prefix.keys) < num:
            life.prefix = self._ledger.extend_prefix(life.prefix, life.tokens)
        self._ended.update(dict.fromkeys(life.prefix.keys[max(0, num - 2) : num]))
        while len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]


def _num_common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Leading keys that are equal. A key covers all before it."""
    return bisect.bisect_left(
        range(min(len(one), len(other))), True, key=lambda number: one[number] != other[number]
    )

"""What a request needs of the KV before its next token: the rule of the layers whose KV lies in one block.
Owns no state.

    full attention     every block
    sliding window     the last blocks
    recurrent state    a state that is kept at the prefix's end, and every block of the layers that attend

So a rule says from which block on all blocks are needed. A request gives back earlier blocks, and finds a
prefix without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import Run, SlotState
from penstock.kv.states import KeptStates
from penstock.kv.tiers.host import ABSENT, HostLease, HostTier
from penstock.kv.tiers.loads import Loads
from penstock.kv.tiers.reads import BlocksToRead, ToRead

# Blocks that a request with a window may have besides those of its window and of its step: both may begin
# inside a block, and a token more is kept for a full match, whose last token is computed again.
_PARTIAL_BLOCKS = 2

# whether a running request will seal the block of this number and key
Announces = Callable[[int, bytes], bool]


class Usable(NamedTuple):
    """A usable prefix of `num_blocks + num_colder` blocks. The device has those before `num_blocks` that are
    needed, in `slots`."""

    slots: Run
    num_blocks: int
    num_colder: int = 0  # blocks after these, which colder tiers have
    # leading blocks on the device, and in any tier, whether they are of use or not; only with states
    num_here: int = 0
    num_known: int = 0

    @property
    def first(self) -> int:
        """The first block that is needed."""
        return self.num_blocks - len(self.slots)


class PrefixRule(Protocol):
    keeps_all: bool  # no block of a running request is ever given back

    @property
    def states(self) -> KeptStates | None:
        """Those without which a prefix is of no use; None: blocks are enough."""

    def first_block(self, num_tokens: int) -> int:
        """The first block that a request with KV of `num_tokens` tokens needs, also if it computes the last
        of them again."""

    def most_slots(self, num_tokens: int, step_tokens: int) -> int:
        """Slots that it has at one time until it has `num_tokens` tokens, in steps of `step_tokens` or
        fewer."""

    def num_available(self, pool: BlockPool) -> int:
        """Slots that can be promised or drawn."""

    def num_taken(self, pool: BlockPool, slots: Run) -> int:
        """By how much `num_available` falls when a table begins with the sealed `slots`."""

    def find(self, pool: BlockPool, keys: Sequence[bytes], like: PoolWant | None = None) -> Usable:
        """The longest usable prefix on the device. `like`: a want with an earlier answer."""

    def to_want(self, pool: BlockPool, keys: Sequence[bytes], like: PoolWant | None = None) -> Run:
        """Those on the device that the longest usable prefix has, with blocks of all tiers."""

    def with_lease(
        self, found: Usable, pool: BlockPool, keys: Sequence[bytes], lease: HostLease, loads: Loads
    ) -> Usable:
        """A longer one than `found`, with the blocks of `lease` that are worth loading; else `found`."""

    def num_usable(self, keys: Sequence[bytes], num: int) -> int:
        """How many of the first `num` blocks are of use, if all of them are there."""

    def first_colder(self, pool: BlockPool, keys: Sequence[bytes], host: HostTier) -> int:
        """The first block that colder tiers are asked for; the number of keys if the device has all."""

    def to_read(self, pool: BlockPool, keys: Sequence[bytes], lease: HostLease | None) -> ToRead:
        """What to read into host memory."""

    def is_announced(self, num_found: int, keys: Sequence[bytes], announces: Announces) -> bool:
        """Whether a running request makes a longer prefix usable than its first `num_found` blocks."""

    def is_coming(self, num_found: int, keys: Sequence[bytes], loads: Loads) -> bool:
        """Whether a load in flight makes a longer prefix usable than its first `num_found` blocks."""


class WholePrefix:
    """Implements `PrefixRule` for full attention."""

    keeps_all = True
    states: KeptStates | None = None

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def first_block(self, num_tokens: int) -> int:
        return 0

    def most_slots(self, num_tokens: int, step_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def num_available(self, pool: BlockPool) -> int:
        return pool.num_available

    def num_taken(self, pool: BlockPool, slots: Run) -> int:
        return len(pool.book.those_in(SlotState.IDLE, slots))

    def find(self, pool: BlockPool, keys: Sequence[bytes], like: PoolWant | None = None) -> Usable:
        slots = pool.find(keys, like)
        return Usable(slots, len(slots))

    def to_want(self, pool: BlockPool, keys: Sequence[bytes], like: PoolWant | None = None) -> Run:
        return pool.find(keys, like)

    def with_lease(
        self, found: Usable, pool: BlockPool, keys: Sequence[bytes], lease: HostLease, loads: Loads
    ) -> Usable:
        return found._replace(num_colder=loads.worth(lease, found.num_blocks))

    def num_usable(self, keys: Sequence[bytes], num: int) -> int:
        return num

    def first_colder(self, pool: BlockPool, keys: Sequence[bytes], host: HostTier) -> int:
        return len(pool.find(keys))

    def to_read(self, pool: BlockPool, keys: Sequence[bytes], lease: HostLease | None) -> ToRead:
        return ToRead(len(pool.find(keys)), keys)

    def is_announced(self, num_found: int, keys: Sequence[bytes], announces: Announces) -> bool:
        return announces(num_found, keys[num_found])

    def is_coming(self, num_found: int, keys: Sequence[bytes], loads: Loads) -> bool:
        return loads.is_coming(num_found, keys[num_found])


class WithStates(WholePrefix):
    """The rule of a model with recurrent layers: a prefix ends at a boundary of which a state is kept. Blocks
    after it are computed again."""

    states: KeptStates

    def __init__(self, block_tokens: int, states: KeptStates) -> None:
        super().__init__(block_tokens)
        self.states = states

    def find(self, pool: BlockPool, keys: Sequence[bytes], like: PoolWant | None = None) -> Usable:
        return self._cut(super().find(pool, keys, like), keys)

    def to_want(self, pool: BlockPool, keys: Sequence[bytes], like: PoolWant | None = None) -> Run:
        slots, end = pool.find(keys, like), self.states.last_before(keys, len(keys))
        return slots if end >= len(slots) else slots[:end]

    def with_lease(
        self, found: Usable, pool: BlockPool, keys: Sequence[bytes], lease: HostLease, loads: Loads
    ) -> Usable:
        """A lease may end inside a block, which no state is kept for."""
        longer = super().with_lease(super().find(pool, keys), pool, keys, lease, loads)
        num_whole = max(longer.num_blocks, lease.num_tokens // self._block_tokens)
        num_colder = min(longer.num_colder, num_whole - longer.num_blocks)
        return self._cut(longer._replace(num_colder=num_colder), keys)

    def num_usable(self, keys: Sequence[bytes], num: int) -> int:
        return self.states.last_before(keys, num)

    def to_read(self, pool: BlockPool, keys: Sequence[bytes], lease: HostLease | None) -> ToRead:
        """Blocks behind the last boundary that has a state are of no use."""
        return ToRead(len(pool.find(keys)), keys, partial(self._chosen, pool, keys))

    def _chosen(self, pool: BlockPool, keys: Sequence[bytes], colder: NDArray[np.bool_]) -> BlocksToRead:
        num_here, states = len(pool.find(keys)), self.states
        num_covered = num_here + int(np.argmin([*colder[num_here:], False]))
        end = len(keys) if states.is_searching else states.last_before(keys, num_covered)
        return BlocksToRead(min(num_here, end), end, self.find(pool, keys).num_blocks)

    def is_announced(self, num_found: int, keys: Sequence[bytes], announces: Announces) -> bool:
        """Blocks alone are of no use, so nothing is gained by waiting for them."""
        return self.states.is_expected(keys, num_found)

    def is_coming(self, num_found: int, keys: Sequence[bytes], loads: Loads) -> bool:
        return False

    def _cut(self, found: Usable, keys: Sequence[bytes]) -> Usable:
        end = self.states.last_before(keys, found.num_blocks + found.num_colder)
        num = min(end, found.num_blocks)
        num_known = found.num_blocks + found.num_colder
        return Usable(found.slots[:num], num, end - num, found.num_blocks, num_known)


class LastWindow:
    """Implements `PrefixRule` for layers in which a token sees `window` tokens, itself included.

    Requests that share blocks part later: each draws blocks of its own for the shared ones that leave its
    window. So a shared block counts as often as it is held.
    """

    keeps_all = False
    states: KeptStates | None = None

    def __init__(self, window: int, block_tokens: int) -> None:
        self.window = window
        self._block_tokens = block_tokens

    def first_block(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window) // self._block_tokens

    def most_slots(self, num_tokens: int, step_tokens: int) -> int:
        """A block leaves when it is sealed, and the blocks of a step in flight are not."""
        size = self._block_tokens
        kept = -(-max(self.window, step_tokens) // size)
        return min(-(-num_tokens // size), kept - (-step_tokens // size) + _PARTIAL_BLOCKS)

    def num_available(self, pool: BlockPool) -> int:
        return pool.num_available - pool.book.num_shared

    def num_taken(self, pool: BlockPool, slots: Run) -> int:
        return len(slots)

    def find(self, pool: BlockPool, keys: Sequence[bytes], like: PoolWant | None = None) -> Usable:
        slots, num_blocks = pool.find_last(keys, -(-self.window // self._block_tokens))
        return Usable(slots, num_blocks)

    def to_want(self, pool: BlockPool, keys: Sequence[bytes], like: PoolWant | None = None) -> Run:
        return self.find(pool, keys, like).slots

    def with_lease(
        self, found: Usable, pool: BlockPool, keys: Sequence[bytes], lease: HostLease, loads: Loads
    ) -> Usable:
        longer = self._joined(found, pool, keys, lease.covered(), lease.num_tokens)
        # a part of it is of no use: a shorter prefix needs earlier blocks
        num_worth = loads.worth(lease, longer.num_blocks, found.num_blocks)
        return longer if num_worth >= longer.num_colder else found

    def num_usable(self, keys: Sequence[bytes], num: int) -> int:
        return num

    def first_colder(self, pool: BlockPool, keys: Sequence[bytes], host: HostTier) -> int:
        found = self.find(pool, keys)
        if found.num_blocks < len(keys):
            num_tokens = len(keys) * self._block_tokens
            found = self._joined(found, pool, keys, np.array(host.has_each(keys)), num_tokens)
        return found.num_blocks

    def to_read(self, pool: BlockPool, keys: Sequence[bytes], lease: HostLease | None) -> ToRead:
        found = self.find(pool, keys)
        if lease is None or found.num_blocks == len(keys):
            return ToRead(found.num_blocks, keys, partial(self._chosen, pool, keys))
        longer = self._joined(found, pool, keys, lease.covered(), lease.num_tokens)
        keys = keys[: longer.num_blocks + longer.num_colder]
        return ToRead(longer.num_blocks, keys, partial(self._chosen, pool, keys))

    def _chosen(self, pool: BlockPool, keys: Sequence[bytes], colder: NDArray[np.bool_]) -> BlocksToRead:
        found = self.find(pool, keys)
        longer = self._joined(found, pool, keys, colder, len(keys) * self._block_tokens)
        return BlocksToRead(longer.num_blocks, longer.num_blocks + longer.num_colder, found.num_blocks)

    def is_announced(self, num_found: int, keys: Sequence[bytes], announces: Announces) -> bool:
        return announces(num_found, keys[num_found])

    def is_coming(self, num_found: int, keys: Sequence[bytes], loads: Loads) -> bool:
        """The last block of a load ends a usable prefix."""
        lasts = (load.first + len(load.keys) - 1 for load in loads.in_flight.values())
        return any(num_found <= last < len(keys) and loads.is_coming(last, keys[last]) for last in lasts)

    def _joined(
        self,
        found: Usable,
        pool: BlockPool,
        keys: Sequence[bytes],
        colder: NDArray[np.bool_],
        num_tokens: int,
    ) -> Usable:
        """The longest usable prefix that is longer than `found`, and whose last blocks are `colder` ones;
        else `found`. `colder` blocks have KV of `num_tokens` tokens."""
        blocks = np.arange(len(colder))
        slots = np.full(len(colder), ABSENT)
        slots[: len(keys)] = pool.find_each(keys[: len(colder)])
        # by last block of a prefix: the first that it needs, and the first of the colder ones at its end
        firsts = np.maximum(np.minimum((blocks + 1) * self._block_tokens, num_tokens) - self.window, 0)
        firsts //= self._block_tokens
        starts = np.maximum(_last(~colder) + 1, firsts)
        missing = np.append(_last(slots == ABSENT), ABSENT)[starts - 1]  # the last before these
        usable = np.flatnonzero(colder & (missing < firsts))
        if not usable.size or usable[-1] < found.num_blocks:
            return found
        last = int(usable[-1])
        absent = np.flatnonzero(slots[starts[last] : last + 1] == ABSENT)
        num_blocks = int(starts[last] + absent[0]) if absent.size else last + 1
        return Usable(slots[firsts[last] : num_blocks], num_blocks, last + 1 - num_blocks)


def _last(mask: NDArray[np.bool_]) -> NDArray[np.intp]:
    """By place, the last one up to there that is true, or ABSENT."""
    last: NDArray[np.intp] = np.maximum.accumulate(np.where(mask, np.arange(len(mask)), ABSENT))
    return last


def rule_for(windows: Sequence[int], block_tokens: int, states: KeptStates | None = None) -> PrefixRule:
    """Of a block with KV of layers that have these windows; 0: a layer sees all tokens. `states`: of the
    recurrent layers beside them."""
    if states is not None:
        return WithStates(block_tokens, states)
    window = max(windows, default=0) if all(windows) else 0
    return LastWindow(window, block_tokens) if window else WholePrefix(block_tokens)

"""One request's table: its slots in token order, and how far its chain of keys has come. Owns a hold; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence, Prefix
from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Hold
from penstock.kv.blocks.key import block_key


class BlockTable:
    """Grows while the request runs; blocks `0..num_keyed` have been sealed, by this request or by whoever computed them first."""

    __slots__ = ("_after", "_last_key", "block_tokens", "hold", "num_keyed", "prefix")

    def __init__(self, hold: Hold, block_tokens: int, prefix: Prefix | None, num_matched: int) -> None:
        self.hold = hold
        self.block_tokens = block_tokens
        self.prefix = prefix  # None: its blocks never get a key
        self.num_keyed = num_matched
        self._last_key = prefix.keys[num_matched - 1] if prefix is not None and num_matched else None
        self._after: tuple[Fence, ...] = ()

    @property
    def owner(self) -> str:
        return self.hold.owner

    @property
    def num_slots(self) -> int:
        return self.hold.num_slots

    @property
    def announced(self) -> Sequence[bytes]:
        """Keys of its prompt that it is going to seal."""
        return () if self.prefix is None else self.prefix.keys[self.num_keyed :]

    def slots(self, num_tokens: int) -> NDArray[np.int32]:
        """Read-only view of exactly ceil(num_tokens / block_tokens) slots; its content never changes."""
        self.hold.require_open()
        return self.hold.first(-(-num_tokens // self.block_tokens))

    def next_keys(self, tokens: Sequence[int], num_full: int) -> list[bytes]:
        """Keys of blocks `num_keyed..num_full`: the prompt's are known, those of generated tokens continue the chain."""
        if self.prefix is None or len(tokens) < num_full * self.block_tokens:
            raise InvariantBroken(f"table of {self.owner!r} has no keys for {num_full} blocks of {len(tokens)} tokens")
        keys = list(self.prefix.keys[self.num_keyed : num_full])
        last = keys[-1] if keys else self._last_key
        for block in range(self.num_keyed + len(keys), num_full):
            last = block_key(last, tokens[block * self.block_tokens : (block + 1) * self.block_tokens], self.prefix.scope)
            keys.append(last)
        return keys

    def advance(self, keys: Sequence[bytes]) -> None:
        """`keys` are sealed."""
        self.num_keyed += len(keys)
        self._last_key = keys[-1]

    def add_after(self, fences: tuple[Fence, ...]) -> None:
        """Slots were drawn that may not be written before `fences`."""
        if fences:
            known = [fence for fence in self._after if not fence.passed()]
            self._after = (*known, *(fence for fence in fences if all(fence is not other for other in known)))

    def take_after(self) -> tuple[Fence, ...]:
        """What the next step that writes into this table waits for, on its lane; handed out once."""
        after, self._after = self._after, ()
        return after

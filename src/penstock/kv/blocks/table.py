"""One request's table: its slots in token order, and how far its chain of keys has come. Owns a hold, and pins on what of it was paged out
to host memory; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence, Prefix
from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Hold, Pin
from penstock.kv.blocks.key import block_key


class Landing(Protocol):
    """The copy of a fetched run."""

    @property
    def settled(self) -> bool: ...

    def error(self) -> BaseException | None: ...


class FetchedRun:
    """Implements `contract.FetchedBlocks`: slots of its own, which nobody else sees, and the copy that fills them."""

    __slots__ = ("hold", "load")

    def __init__(self, hold: Hold, load: Landing) -> None:
        self.hold = hold
        self.load = load

    @property
    def slots(self) -> NDArray[np.int32]:
        return self.hold.first(self.hold.num_slots)

    @property
    def settled(self) -> bool:
        return self.load.settled

    @property
    def failed(self) -> bool:
        return self.load.error() is not None


class BlockTable:
    """Grows while the request runs; blocks `0..num_keyed` have been sealed, by this request or by whoever computed them first."""

    __slots__ = (
        *("_after", "block_tokens", "fetched", "hold", "is_deep", "num_alone", "num_fetched", "num_shared", "own_scope"),
        *("paged_pins", "paged_slots", "prefix", "sealed_keys"),
    )

    def __init__(self, hold: Hold, block_tokens: int, prefix: Prefix | None, num_matched: int) -> None:
        self.hold = hold
        self.block_tokens = block_tokens
        self.prefix = prefix  # None: its blocks never get a key
        self.sealed_keys = [] if prefix is None else list(prefix.keys[:num_matched])
        self.num_alone = 0  # of its first blocks, those that host memory was told to forget
        self.is_deep = False  # only its last blocks are on the device, and those before them in host memory
        self.paged_pins: list[Pin] = []  # of host memory, in token order
        self.fetched: set[FetchedRun] = set()
        self.num_fetched = 0  # blocks in those
        self.own_scope: bytes | None = None  # under which its blocks from number `num_shared` on get their keys; None: there are none
        self.num_shared = 0
        # Where in host memory its first blocks are, which it does not have on the device. Replaced as a whole, never changed.
        self.paged_slots: NDArray[np.int32] = np.empty(0, np.int32)
        self._after: tuple[Fence, ...] = ()

    @property
    def num_paged(self) -> int:
        return self.hold.num_dropped

    def add_paged(self, pin: Pin) -> None:
        """The next of its first blocks are in host memory, under `pin`."""
        self.paged_pins.append(pin)
        self.paged_slots = np.concatenate((self.paged_slots, pin.array))

    @property
    def owner(self) -> str:
        return self.hold.owner

    @property
    def num_slots(self) -> int:
        return self.hold.num_slots

    @property
    def num_keyed(self) -> int:
        return len(self.sealed_keys)

    @property
    def is_announcing(self) -> bool:
        """Whether it is going to seal keys of its prompt."""
        return self.prefix is not None and self.num_keyed < len(self.prefix.keys)

    def announces(self, number: int, key: bytes) -> bool:
        """Whether block `number` of its prompt has `key`, and is yet to be sealed."""
        return self.prefix is not None and self.num_keyed <= number < len(self.prefix.keys) and self.prefix.keys[number] == key

    def slots(self, num_tokens: int) -> NDArray[np.int32]:
        """Read-only view of the slots of its first ceil(num_tokens / block_tokens) blocks, without those that were paged out; its content
        never changes."""
        self.hold.require_open()
        return self.hold.first(-(-num_tokens // self.block_tokens))[self.hold.num_dropped :]

    def next_keys(self, tokens: Sequence[int], num_full: int) -> list[bytes]:
        """Keys of blocks `num_keyed..num_full`: the prompt's are known, those of generated tokens continue the chain."""
        if self.prefix is None or len(tokens) < num_full * self.block_tokens:
            raise InvariantBroken(f"table of {self.owner!r} has no keys for {num_full} blocks of {len(tokens)} tokens")
        keys = list(self.prefix.keys[self.num_keyed : num_full])
        last = keys[-1] if keys else self.sealed_keys[-1] if self.sealed_keys else None
        for block in range(self.num_keyed + len(keys), num_full):
            scope = self.prefix.scope if self.own_scope is None or block < self.num_shared else self.own_scope
            last = block_key(last, tokens[block * self.block_tokens : (block + 1) * self.block_tokens], scope)
            keys.append(last)
        return keys

    def add_after(self, fences: tuple[Fence, ...]) -> None:
        """Slots were drawn that may not be written before `fences`."""
        if fences:
            known = [fence for fence in self._after if not fence.passed()]
            self._after = (*known, *(fence for fence in fences if all(fence is not other for other in known)))

    def take_after(self) -> tuple[Fence, ...]:
        """What the next step that writes into this table waits for, on its lane; handed out once."""
        after, self._after = self._after, ()
        return after

"""What a pool tells its order of eviction, and asks of it. Owns the protocol; the policies beside it implement it.

An order holds exactly the idle slots, so that nothing held or pinned can be popped. It is told more than that: which key and depth a slot
was sealed with, and when a block was found again. A pool calls it on the engine thread for runs of slots, so the cost per slot is constant:
no scans, and no call does work that another one has piled up.

A prefix is of use without its continuation, not the other way round: of slots that are added together the first is the deepest of its
prefix and goes first where a policy has no reason to prefer another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.kv.blocks.slots import Run


class EvictionOrder(Protocol):
    """Idle slots, and which of them goes first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """Every idle slot, in no order that matters."""

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """`slots`, which are in use, got these keys; `depths` are the blocks' places in their prefixes, counted from 0."""

    def hit(self, slots: Run) -> None:
        """These blocks were found again by somebody who uses them; whether they are idle at this moment does not matter."""

    def add(self, slots: Run) -> None:
        """`slots` became idle; of these the first is to go first."""

    def remove(self, slots: Run) -> None:
        """`slots`, which are idle, are in use again."""

    def pop(self, num: int) -> list[int]:
        """Take out `num` to be forgotten, or all where there are fewer, in the order in which they go."""

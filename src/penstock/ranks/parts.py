"""Blocks of disks and stores, which have all heads, and their parts in the host memory of the ranks of one
machine. Owns the way between the two: rank 0 reads and writes for all of them, in memory that it shares with
each.

    in a store        [layer][k|v][token][every KV head][head_dim]
    of one rank       [layer][k|v][token][its KV heads][head_dim]

So a block in a store does not depend on the number of ranks that wrote it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvariantBroken
from penstock.kv.memory import ITEM_BYTES, BlockLayout, HostArena
from penstock.kv.tiers.store import BlockStore, Outcome, StoreUsage
from penstock.models.split import Section

Memory = NDArray[Any]  # of one rank, by slot


class HostParts:
    """`spans`: the KV heads of each rank. `files`: the memory of all ranks but this one, which is 0."""

    def __init__(
        self, own: HostArena, stored: BlockLayout, spans: Sequence[Section], files: Sequence[int]
    ) -> None:
        self.block_bytes = stored.block_bytes
        self._item = np.dtype(f"u{ITEM_BYTES[stored.dtype]}")  # numpy does not know all of torch's types
        self._stored, self._spans = stored.shape, spans
        self._own_bytes, self._num_slots = own.layout.block_bytes, own.num_slots
        shape, memory = (own.num_slots, *own.layout.shape), np.frombuffer(own.memory, self._item)
        self._address = memory.__array_interface__["data"][0]
        self._memories: list[Memory] = [memory.reshape(shape)]
        for file in files:
            shared = mmap.mmap(file, own.num_bytes, flags=mmap.MAP_SHARED)
            self._memories.append(np.frombuffer(shared, self._item).reshape(shape))

    def slot_of(self, view: memoryview) -> int:
        """The slot that is seen through a view of this rank's memory."""
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        slot, rest = divmod(int(address - self._address), self._own_bytes)
        if rest or not 0 <= slot < self._num_slots or len(view) != self._own_bytes:
            raise InvariantBroken("a store was given bytes that are no slot of host memory")
        return slot

    def room(self, num_blocks: int) -> list[memoryview]:
        """Buffers of whole blocks, on pages of their own."""
        room = memoryview(mmap.mmap(-1, max(1, num_blocks * self.block_bytes)))
        return [room[at : at + self.block_bytes] for at in range(0, len(room), self.block_bytes)][:num_blocks]

    def gather(self, slot: int, block: memoryview) -> None:
        """The parts of all ranks become a whole block."""
        whole = np.frombuffer(block, self._item).reshape(self._stored)
        for span, memory in zip(self._spans, self._memories, strict=True):
            whole[..., span.first : span.first + span.num, :] = memory[slot][..., : span.num, :]

    def scatter(self, block: memoryview, slot: int) -> None:
        """Every rank gets its part."""
        whole = np.frombuffer(block, self._item).reshape(self._stored)
        for span, memory in zip(self._spans, self._memories, strict=True):
            memory[slot][..., : span.num, :] = whole[..., span.first : span.first + span.num, :]


class PartedStore:
    """A store of whole blocks, for host memory that is in parts. What else it can do is as it was."""

    def __init__(self, store: BlockStore, parts: HostParts) -> None:
        self.name, self.local = store.name, store.local
        self._store, self._parts = store, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        blocks = self._parts.room(len(keys))
        outcomes = self._store.read(keys, blocks)
        for block, view, outcome in zip(blocks, into, outcomes, strict=True):
            if outcome is Outcome.DONE:
                self._parts.scatter(block, self._parts.slot_of(view))
        return outcomes

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        whole = self._parts.room(len(keys))
        for block, view in zip(whole, blocks, strict=True):
            self._parts.gather(self._parts.slot_of(view), block)
        return self._store.write(keys, depths, whole)

    def find(self, keys: Sequence[bytes]) -> int:
        return self._store.find(keys)

    def persist(self) -> None:
        self._store.persist()

    def probe(self) -> None:
        self._store.probe()

    def reset(self) -> int:
        return self._store.reset()

    def usage(self) -> StoreUsage:
        return self._store.usage()

    def close(self) -> None:
        self._store.close()

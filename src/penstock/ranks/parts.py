"""Blocks of disks and stores, which have all heads, and their parts in the host memory of the ranks of one
machine. Owns the way between the two: rank 0 reads and writes for all of them, in memory that it shares with
each.

    in a store        [layer][k|v][token][every KV head][head_dim]
    of one rank       [layer][k|v][token][its KV heads][head_dim]

So a block in a store does not depend on the number of ranks that wrote it, nor does a state. Blocks get into
host memory by copies that rank 0 waits for, states by steps. So before it touches states of other ranks, rank
0 waits until they have made all steps that it has announced.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvariantBroken
from penstock.kv.memory import ITEM_BYTES, BlockLayout, HostArena
from penstock.kv.tiers.store import BlockStore, Outcome, StoreUsage
from penstock.models.model import Recurrence, Split
from penstock.models.split import Section, divided, recurrent_sections

Memory = NDArray[Any]
# of a whole block and one rank's part: the places in the first and those in the second that are the same


Places = Callable[[Memory, Memory], Iterator[tuple[Memory, Memory]]]


def kv_places(stored: BlockLayout, own: BlockLayout, span: Section) -> Places:
    """Where the KV heads of `span` are in a whole block, and in the part of their rank."""

    def places(whole: Memory, part: Memory) -> Iterator[tuple[Memory, Memory]]:
        heads = whole.reshape(stored.shape)[..., span.first : span.first + span.num, :]
        yield heads, part.reshape(own.shape)[..., : span.num, :]

    return places


def state_places(dims: Recurrence, split: Split) -> Places:
    """The same of a state: the channels of its windows, then its matrices."""
    own = divided(dims, split)

    def places(whole: Memory, part: Memory) -> Iterator[tuple[Memory, Memory]]:
        (windows, matrices), (own_windows, own_matrices) = _apart(whole, dims), _apart(part, own)
        spans, at = recurrent_sections(dims, split), 0
        for span in spans.channels:
            own_channels = own_windows[..., at : at + span.num]
            yield windows[..., span.first : span.first + span.num], own_channels
            at += span.room
        heads = spans.heads
        yield matrices[:, heads.first : heads.first + heads.num], own_matrices[:, : heads.num]

    return places


def _apart(state: Memory, dims: Recurrence) -> tuple[Memory, Memory]:
    num = len(dims.layers)
    windows, matrices = np.split(state, [num * (dims.window - 1) * dims.qkv_width])
    heads = (num, dims.num_value_heads, dims.key_dim, dims.value_dim)
    return windows.reshape(num, dims.window - 1, dims.qkv_width), matrices.reshape(heads)


class HostParts:
    """`places`: of each rank. `files`: the memory of all ranks but this one, which is 0."""

    def __init__(
        self, own: HostArena, block_bytes: int, places: Sequence[Places], files: Sequence[int]
    ) -> None:
        """`block_bytes`: of a whole block."""
        self.block_bytes = block_bytes
        # numpy does not know all of torch's types
        self._item = np.dtype(f"u{ITEM_BYTES[own.layout.dtype]}")
        self._places = places
        self._own_bytes, self._num_slots = own.layout.block_bytes, own.num_slots
        memory = np.frombuffer(own.memory, self._item)
        self._address = memory.__array_interface__["data"][0]
        self._memories: list[Memory] = [memory.reshape(own.num_slots, -1)]
        for file in files:
            shared = mmap.mmap(file, own.num_bytes, flags=mmap.MAP_SHARED)
            self._memories.append(np.frombuffer(shared, self._item).reshape(own.num_slots, -1))

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
        for whole, part in self._pairs(slot, block):
            whole[...] = part

    def scatter(self, block: memoryview, slot: int) -> None:
        """Every rank gets its part."""
        for whole, part in self._pairs(slot, block):
            part[...] = whole

    def _pairs(self, slot: int, block: memoryview) -> Iterator[tuple[Memory, Memory]]:
        whole = np.frombuffer(block, self._item)
        for places, memory in zip(self._places, self._memories, strict=True):
            yield from places(whole, memory[slot])


class PartedStore:
    """A store of whole blocks, for host memory that is in parts. What else it can do is as it was."""

    def __init__(
        self, store: BlockStore, parts: HostParts, settle: Callable[[], None] = lambda: None
    ) -> None:
        """`settle`: until no step of another rank still uses slots that no step of this one does."""
        self.name, self.local = store.name, store.local
        self._store, self._parts, self._settle = store, parts, settle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        blocks = self._parts.room(len(keys))
        outcomes = self._store.read(keys, blocks)
        self._settle()
        for block, view, outcome in zip(blocks, into, outcomes, strict=True):
            if outcome is Outcome.DONE:
                self._parts.scatter(block, self._parts.slot_of(view))
        return outcomes

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        whole = self._parts.room(len(keys))
        self._settle()
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

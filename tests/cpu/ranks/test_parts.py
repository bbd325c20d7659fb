"""Rank 0 reads and writes states for all ranks, when no step of another one still uses their slots."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.kv.blocks.key import KEY_BYTES
from penstock.kv.memory import HostArena, StateLayout
from penstock.kv.states import KEPT_STATES
from penstock.kv.tiers.store import Outcome
from penstock.models.model import Recurrence, Split
from penstock.models.split import divided
from penstock.ranks.parts import HostParts, PartedStore, state_places
from penstock.testing.stores import MemoryStore

Words = NDArray[np.uint32]
DIMS = Recurrence((0, 1), 3, 6, 4, 5, window=4)  # the second of two ranks has one head and room for two
KEY = bytes(KEY_BYTES)
SPLITS = Split(0, 2), Split(1, 2)


class TwoRanks:
    """Their host memory, and what the steps of rank 1 still have to do there."""

    def __init__(self, arena: HostArena, file: int) -> None:
        os.ftruncate(file, arena.num_bytes)
        shared = mmap.mmap(file, arena.num_bytes)
        self.memories = [np.frombuffer(memory, np.uint32).reshape(2, -1) for memory in (arena.memory, shared)]
        self.late: list[tuple[int, Words]] = []

    def keep(self, rank: int, slot: int, state: Words) -> None:
        """As a step of this rank does."""
        for whole, part in state_places(DIMS, SPLITS[rank])(state, self.memories[rank][slot]):
            part[...] = whole

    def settle(self) -> None:
        late, self.late = self.late, []
        for slot, state in late:
            self.keep(1, slot, state)


@pytest.fixture
def ranks() -> Iterator[tuple[HostArena, TwoRanks, PartedStore, MemoryStore]]:
    arena = HostArena(StateLayout(2, divided(DIMS, SPLITS[0]).num_bytes, b""), 2, "cpu", KEPT_STATES)
    file = os.memfd_create("states of rank 1")
    both, store = TwoRanks(arena, file), MemoryStore()
    places = [state_places(DIMS, split) for split in SPLITS]
    parts = HostParts(arena, DIMS.num_bytes, places, [file])
    yield arena, both, PartedStore(store, parts, both.settle), store
    os.close(file)


def state(seed: int) -> Words:
    return np.random.default_rng(seed).integers(1, 1 << 32, DIMS.num_bytes // 4, np.uint32)


def test_a_state_is_stored_when_all_ranks_have_kept_it(
    ranks: tuple[HostArena, TwoRanks, PartedStore, MemoryStore],
) -> None:
    arena, both, parted, store = ranks
    both.keep(0, 1, state(1))
    both.late.append((1, state(1)))
    assert parted.write([KEY], [1], [arena.view(1)]) == [Outcome.DONE]
    room = memoryview(bytearray(DIMS.num_bytes))
    assert store.read([KEY], [room]) == [Outcome.DONE]
    assert np.array_equal(np.frombuffer(room, np.uint32), state(1))


def test_a_state_is_read_into_slots_that_no_step_still_writes(
    ranks: tuple[HostArena, TwoRanks, PartedStore, MemoryStore],
) -> None:
    arena, both, parted, store = ranks
    store.write([KEY], [1], [memoryview(state(2).tobytes())])
    both.late.append((0, state(3)))
    assert parted.read([KEY], [arena.view(0)]) == [Outcome.DONE]
    both.settle()
    for rank in range(2):
        for whole, part in state_places(DIMS, SPLITS[rank])(state(2), both.memories[rank][0]):
            assert np.array_equal(whole, part)

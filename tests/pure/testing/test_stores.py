"""The store in memory does what a real one does, and its switches what they say."""

from __future__ import annotations

import threading

import pytest

from penstock.errors import StoreFailed
from penstock.kv.tiers.store import HEADER_BYTES, BlockStore, Outcome
from penstock.testing.stores import HandClock, MemoryStore

KEYS = [bytes([number]) * 16 for number in range(4)]
SIZE = 32


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * SIZE)


def store_of(*numbers: int) -> MemoryStore:
    store = MemoryStore()
    assert store.write([KEYS[n] for n in numbers], [0] * len(numbers), [block(n) for n in numbers]) == [
        Outcome.DONE
    ] * len(numbers)
    return store


def read(store: BlockStore, *numbers: int) -> list[tuple[Outcome, bool]]:
    """The outcome of each, and whether its bytes came."""
    buffers = [bytearray(SIZE) for _ in numbers]
    outcomes = store.read([KEYS[n] for n in numbers], [memoryview(buffer) for buffer in buffers])
    return [
        (outcome, buffer == bytes(block(n)))
        for outcome, buffer, n in zip(outcomes, buffers, numbers, strict=True)
    ]


@pytest.mark.parametrize("at", [0, 40, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_flipped_bit_is_noticed_wherever_it_is_and_the_block_removed(at: int) -> None:
    store = store_of(1)
    store.spoil(KEYS[1], at)
    assert [outcome for outcome, _ in read(store, 1)] == [Outcome.CORRUPT] and read(store, 1) == [
        (Outcome.MISSING, False)
    ]


def test_a_block_under_another_key_or_of_another_space_or_length_is_not_served() -> None:
    store = store_of(1)
    for key, value in ((KEYS[2], store.blocks[KEYS[1]]), (KEYS[3], store.blocks[KEYS[1]][:-1])):
        store.blocks[key] = bytearray(value)
    assert [outcome for outcome, _ in read(store, 2, 3)] == [Outcome.CORRUPT] * 2
    other = MemoryStore(space=b"o" * 32, blocks=store.blocks)
    assert [outcome for outcome, _ in read(other, 1)] == [Outcome.CORRUPT]


def test_blocks_are_lost_fail_or_find_no_room_when_told() -> None:
    store = store_of(1, 2)
    store.lose(KEYS[1])
    store.fails.add(KEYS[2])
    assert read(store, 1, 2) == [(Outcome.MISSING, False), (Outcome.FAILED, False)]
    store.max_blocks = 1
    assert store.write([KEYS[3]], [0], [block(3)]) == [Outcome.FULL]
    store.die()
    for call in (store.persist, store.probe, store.reset, lambda: store.find(KEYS), lambda: read(store, 1)):
        with pytest.raises(StoreFailed):
            call()


def test_calls_stand_at_the_gate_until_they_are_let_through() -> None:
    store, clock = store_of(1), HandClock()
    store.on_call = lambda call: clock.advance(2.0)
    store.gate.hold("find")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(store.find(KEYS[1:2]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    store.gate.wait_came(2)
    assert read(store, 1) == [(Outcome.DONE, True)], "others pass"
    assert found == [] and clock() == 1002.0
    store.gate.let(1)
    store.gate.let()
    for thread in threads:
        thread.join(10.0)
    assert found == [1, 1] and clock() == 1006.0

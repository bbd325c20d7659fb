"""What a pool tells its order of eviction: keys and depths at seal, hits, what becomes idle and what is used
again."""

from __future__ import annotations

from hashlib import blake2b

from penstock.kv.blocks.pool import BlockPool


def key(number: int) -> bytes:
    return blake2b(bytes([number]), digest_size=16).digest()


class Listening:
    """An order that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def __len__(self) -> int:
        return 0

    def __iter__(self):
        return iter(())

    def sealed(self, slots, keys, depths):
        self.told.append(("sealed", list(slots), list(keys), list(depths)))

    def hit(self, slots):
        self.told.append(("hit", list(slots)))

    def add(self, slots):
        self.told.append(("add", list(slots)))

    def remove(self, slots):
        self.told.append(("remove", list(slots)))

    def pop(self, num):
        return []


def test_the_pool_tells_key_and_depth_at_seal_and_every_hit():
    order = Listening()
    pool = BlockPool(4, "device", eviction=order)
    hold = pool.hold("a")
    pool.try_reserve(2, "a").commit(hold)
    pool.seal([0, 1], [key(0), key(1)], [5, 6])
    sharer = pool.hold("b", [0])
    hold.end()
    sharer.end()
    pool.note_hits([1])
    assert order.told == [
        ("sealed", [0, 1], [key(0), key(1)], [5, 6]),
        ("remove", []),
        ("hit", [0]),
        ("add", [1]),
        ("add", [0]),
        ("hit", [1]),
    ]


def test_a_block_whose_key_lives_elsewhere_is_not_told():
    order = Listening()
    pool = BlockPool(4, "device", eviction=order)
    hold = pool.hold("a")
    pool.try_reserve(4, "a").commit(hold)
    assert pool.seal([0], [key(1)]) == 1
    assert pool.seal([1, 2, 3], [key(0), key(1), key(2)], [7, 8, 9]) == 2
    assert [told for told in order.told if told[0] == "sealed"] == [
        ("sealed", [0], [key(1)], [0]),
        ("sealed", [1, 3], [key(0), key(2)], [7, 9]),
    ]

"""Blocks that requests in line will use, in the pool's books: who wants what, what is forgotten for whom, and
whose answer is whose."""

from __future__ import annotations

import pytest

from penstock.kv.blocks.pool import BlockPool, KeyIndex

KEYS = tuple(bytes([i]) * 16 for i in range(200))


def put(pool: BlockPool, keys: tuple[bytes, ...], depth: int = 0) -> list[int]:
    """Idle blocks under `keys`: where they are."""
    hold = pool.hold("writer")
    reservation = pool.try_reserve(len(keys), "writer")
    assert reservation is not None
    reservation.commit(hold)
    slots = list(hold.slots)
    pool.seal(slots, keys, range(depth, depth + len(keys)))
    hold.end()
    return slots


def test_only_what_is_idle_is_evicted_by_name_wanted_or_not() -> None:
    pool = BlockPool(5, "device")
    rests, wanted, held, pinned = (put(pool, KEYS[i : i + 1]) for i in (0, 10, 20, 30))
    want, hold, pin = (
        pool.want(pool.find(KEYS[10:11]), 1.0),
        pool.hold("runs", held),
        pool.pin(pinned, "transfer"),
    )
    assert pool.evict_these([*held, *wanted, *rests, *pinned]) == 2 and pool.num_evicted == 2
    assert pool.find_each([KEYS[0], KEYS[10], KEYS[20], KEYS[30]]) == [-1, -1, held[0], pinned[0]]
    assert want.gone.all() and pool.num_unwanted == 3
    want.end()
    hold.end()
    pin.end()
    pool.check()


def test_wanted_or_not_the_last_idle_ones_are_forgotten_and_no_more() -> None:
    pool = BlockPool(5, "device")
    slots = put(pool, KEYS[:4])
    want, pin = pool.want(pool.find(KEYS[:4]), 1.0), pool.pin(slots[3:], "transfer")
    assert pool.evict_these(slots, 0) == 0 and pool.evict_these(slots, -1) == 0
    assert pool.evict_these(slots, 2) == 2
    assert pool.find_each(KEYS[:4]) == [slots[0], -1, -1, slots[3]], "what a transfer uses stays"
    assert want.gone.tolist() == [False, True, True, False]
    pin.end()
    assert pool.evict_these(slots, 9) == 2
    want.end()
    pool.check()


def test_a_want_is_kept_where_nothing_has_changed_and_made_anew_where_something_has() -> None:
    pool = BlockPool(8, "device")
    put(pool, KEYS[:3])
    want = pool.want(pool.find(KEYS[:4]), 1.0)
    assert pool.want(pool.find(KEYS[:4], want), 5.0, want) is want and want.rank == 5.0
    put(pool, KEYS[3:4], depth=3)
    more = pool.want(pool.find(KEYS[:4], want), 1.0, want)
    assert more.num_blocks == 4 and not want.protects and pool.num_unwanted == 4
    pool.coldest(8, drops_wants=True)  # somebody needed all the room, and was not admitted after all
    assert not more.protects and pool.num_unwanted == 8
    again = pool.want(pool.find(KEYS[:4], more), 1.0, more)
    assert again.protects and pool.num_unwanted == 4
    again.end()
    assert pool.num_unwanted == 8


def test_a_block_that_came_back_to_another_place_is_wanted_there() -> None:
    pool = BlockPool(8, "device")
    slots = put(pool, KEYS[:3])
    want = pool.want(pool.find(KEYS[:3]), 1.0)
    pool.evict_these(slots, 1)
    other = put(pool, KEYS[100:101])
    hold = pool.hold("runs", other)
    back = put(pool, KEYS[2:3], depth=2)
    want = pool.want(pool.find(KEYS[:3], want), 1.0, want)
    assert want.slots.tolist() == [*slots[:2], *back] and want.protects
    assert pool.evict(8) == 3 and want.gone.all()
    hold.end()
    want.end()
    pool.check()


def test_an_answer_that_another_thread_got_meanwhile_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of two tenants: a caller of `lease` asks for his between the engine's question and its note
    of the answer."""
    pool = BlockPool(8, "device")
    mine, other = put(pool, KEYS[:2]), put(pool, KEYS[10:12])
    find = KeyIndex.find

    def interrupted(self: KeyIndex, keys: tuple[bytes, ...], like: object = None) -> object:
        found = find(self, keys, like)  # type: ignore[arg-type]
        find(self, KEYS[10:12])
        return found

    asked = KEYS[:3]
    with monkeypatch.context() as patch:
        patch.setattr(KeyIndex, "find", interrupted)
        want = pool.want(pool.find(asked), 1.0)
    for i in range(600):  # so many others ask that the index forgets what it has answered
        pool.find((KEYS[i % 100 + 20],))
    assert list(pool.find(asked, want)) == mine != other
    again = pool.want(pool.find(asked, want), 1.0, want)
    assert again.slots.tolist() == mine
    again.end()


def test_an_own_answer_serves_where_the_index_has_forgotten_it() -> None:
    pool = BlockPool(8, "device")
    put(pool, KEYS[:4])
    asked = KEYS[:6]
    want = pool.want(pool.find(asked), 1.0)
    for i in range(600):
        pool.find((KEYS[i % 100 + 20],))
    looked_up: list[int] = []
    slot_of = pool.index.slot_of

    class Counting(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: bytes) -> int:
            looked_up.append(1)
            return super().__getitem__(key)

    pool.index.slot_of = Counting(slot_of)
    assert len(pool.find(asked, want)) == 4 and looked_up == []
    want.end()

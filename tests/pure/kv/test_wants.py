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

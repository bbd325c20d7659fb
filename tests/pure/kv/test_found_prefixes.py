"""What is found under a prefix is that prefix's: a run without a gap, under a scope that no other scope can
spell."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool


def scope(**fields: str) -> Scope:
    return Scope(b"w" * 32, "float32", b"layout", 16, "rope", **fields)


def test_a_text_that_spells_what_lies_between_two_fields_does_not_move_their_border() -> None:
    """Names and types of fields go into the digest; somebody who knows them can write them."""
    between = "adapter_version" + "str"
    one = scope(adapter="x", adapter_version=f"y{between}z")
    other = scope(adapter=f"x{between}y", adapter_version="z")
    assert one.digest() != other.digest()


def test_a_run_of_keys_ends_at_the_first_that_is_missing() -> None:
    pool = BlockPool(4, "device")
    reservation = pool.try_reserve(3, "request")
    assert reservation is not None
    hold = pool.hold("request")
    reservation.commit(hold)
    first, _, third = hold.slots
    pool.seal([first, third], [b"first", b"third"])
    assert pool.find([b"first", b"second", b"third"]).tolist() == [first]
    assert pool.find_each([b"first", b"second", b"third"]) == [first, -1, third]
    hold.end()
    pool.close()


def test_a_prefix_that_is_asked_for_again_is_found_as_it_is_now() -> None:
    pool = BlockPool(4, "device")
    keys = (b"first", b"second")
    assert not len(pool.find(keys))
    for num in (1, 2):
        reservation, hold = pool.try_reserve(1, "request"), pool.hold("request")
        assert reservation is not None
        reservation.commit(hold)
        pool.seal(hold.slots, keys[num - 1 : num])
        assert len(pool.find(keys)) == len(pool.find(keys)) == num
        hold.end()
    pool.evict(1)
    assert len(pool.find(keys)) == 0, "the one that rested longest was the beginning"
    pool.close()


class CountingSlots(dict[bytes, int]):
    """Counts how often somebody looks for a key."""

    num_lookups = 0

    def __getitem__(self, key: bytes) -> int:
        self.num_lookups += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.num_lookups += 1
        return super().__contains__(key)


def sealed(pool: BlockPool, keys: tuple[bytes, ...]) -> None:
    """They are there, and nobody uses them."""
    reservation, hold = pool.try_reserve(len(keys), "request"), pool.hold("request")
    assert reservation is not None
    reservation.commit(hold)
    pool.seal(hold.slots, keys)
    hold.end()


def keys_of(name: str, num: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{number}".encode() for number in range(num))


def test_a_prefix_that_is_asked_for_again_is_not_looked_up_again() -> None:
    """Of 5000 keys that are there and 1000 that are yet to come, each later question looks at the next one
    alone, though other blocks come and go meanwhile."""
    pool = BlockPool(7000, "device")
    keys = keys_of("a", 6000)
    sealed(pool, keys[:5000])
    pool.index.slot_of = CountingSlots(pool.index.slot_of)
    want = pool.want(pool.find(keys), 1.0)
    for turn in range(20):
        pool.index.slot_of.num_lookups = 0
        assert len(pool.find(keys, want)) == 5000 and pool.index.slot_of.num_lookups == 1
        sealed(pool, keys_of(f"other {turn}", 10))
        pool.forget(pool.find_each(keys_of(f"other {turn}", 10)))
    sealed(pool, keys[5000:5010])
    pool.index.slot_of.num_lookups = 0
    assert len(pool.find(keys, want)) == 5010 and pool.index.slot_of.num_lookups <= 12, (
        "ten that came, and the one behind"
    )


@pytest.mark.parametrize("num", [3, 100])
def test_a_prefix_that_went_and_came_back_is_not_looked_up_again_either(num: int) -> None:
    """What was forgotten before the answer was given takes nothing back from it."""
    pool = BlockPool(2 * num, "device")
    keys = keys_of("a", num + 1)
    sealed(pool, keys[:num])
    pool.forget(pool.find_each(keys[:num]))
    sealed(pool, keys[:num])
    want = pool.want(pool.find(keys), 1.0)
    sealed(pool, (b"another",))
    pool.forget(pool.find_each([b"another"]))
    pool.index.slot_of = CountingSlots(pool.index.slot_of)
    assert len(pool.find(keys, want)) == num and pool.index.slot_of.num_lookups == 1


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_prompt_that_begins_as_the_one_before_is_looked_up_behind_that(num_more: int) -> None:
    pool = BlockPool(4, "device")
    keys = keys_of("a", 4)
    sealed(pool, keys[:3])
    run = pool.find(keys[:3])
    pool.index.slot_of = CountingSlots(pool.index.slot_of)
    assert pool.find(keys_of("a", 3 + num_more)) is run and pool.index.slot_of.num_lookups == num_more


def test_the_longest_prefix_with_its_last_blocks_is_found_and_no_key_is_looked_up_twice() -> None:
    num_found = 0
    for r in walks(300):
        pool = BlockPool(40, "device")
        keys, num_last = keys_of("a", r.randint(1, 40)), r.randint(1, 9)
        share = r.choice([0.5, 0.9, 1.0])
        sealed(pool, tuple(key for key in keys if r.random() < share))
        here = [slot >= 0 for slot in pool.find_each(keys)]
        end = max(end for end in range(len(keys) + 1) if all(here[max(0, end - num_last) : end]))
        pool.index.slot_of = slots = CountingSlots(pool.index.slot_of)
        run, num = pool.find_last(keys, num_last)
        assert num == end and slots.num_lookups - len(run) <= len(keys)
        assert run.tolist() == pool.find_each(keys[max(0, end - num_last) : end])
        num_found += end > num_last
    assert num_found > 50, "prefixes longer than what is needed of them"


def walks(num: int) -> Iterator[random.Random]:
    for seed in range(num):
        yield random.Random(seed)


def test_what_is_remembered_of_long_prefixes_is_what_is_there_whatever_comes_and_goes() -> None:
    """Prefixes share beginnings, blocks of them are forgotten one by one and many at once, and come back in
    other slots."""
    num_held = 0
    for r in walks(40):
        pool = BlockPool(400, "device")
        stem = keys_of("stem", 120)
        prefixes = [(*stem[: r.choice([0, 40, 120])], *keys_of(f"tail {number} ", 60)) for number in range(4)]
        for _ in range(60):
            keys = r.choice(prefixes)
            here = pool.find_each(keys)
            if r.random() < 0.5:
                missing = [place for place, slot in enumerate(here) if slot < 0][: r.randint(1, 60)]
                if missing and len(missing) <= pool.num_available:
                    sealed(pool, tuple(keys[place] for place in missing))
            elif r.random() < 0.5:
                pool.evict(r.choice([3, 30, 90]))
            else:
                pool.forget([slot for slot in r.sample(here, r.randint(1, 3)) if slot >= 0])
            for asked in prefixes:
                found = pool.find_each(asked)
                expected = found[: found.index(-1)] if -1 in found else found
                assert list(pool.find(asked)) == expected
                num_held += len(expected) > 32
    assert num_held > 1000, "long ones were met"

"""What is found under a prefix is that prefix's: a run without a gap, under a scope that no other scope can spell."""

from __future__ import annotations

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
    assert pool.find([b"first", b"second", b"third"]) == [first]
    assert pool.find_each([b"first", b"second", b"third"]) == [first, -1, third]
    hold.end()
    pool.close()


def test_a_prefix_that_is_asked_for_again_is_found_as_it_is_now() -> None:
    pool = BlockPool(4, "device")
    keys = (b"first", b"second")
    assert pool.find(keys) == []
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

"""Which boundaries have a state: a random walk against a plain model, and the rule of a usable prefix against
its definition."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.contract import SlotHandle
from penstock.errors import InvariantBroken
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.rules import WholePrefix, WithStates
from penstock.kv.states import KEPT_STATES, KeptStates

KEYS = [bytes([number]) * 16 for number in range(12)]


def make(num_slots: int) -> KeptStates:
    return KeptStates(BlockPool(num_slots, KEPT_STATES))


def depth_of(key: bytes) -> int:
    return KEYS.index(key) + 1


def keep(states: KeptStates, key: bytes) -> None:
    handle = states.try_reserve("r", key)
    assert handle is not None
    states.publish(handle, key, depth_of(key), None)


def test_a_state_is_found_once_it_is_published_and_not_before() -> None:
    states = make(2)
    handle = states.try_reserve("r", KEYS[0])
    assert handle is not None and states.last_before(KEYS, 12) == 0
    assert states.pin("other", KEYS[0]) is None
    states.publish(handle, KEYS[0], 1, None)
    assert states.last_before(KEYS, 12) == 1
    assert states.try_reserve("r", KEYS[0]) is None, "it is there already"
    assert states.num_skipped == 0
    states.check()


def test_of_two_states_of_one_boundary_the_first_stays() -> None:
    states = make(2)
    first, second = (states.try_reserve("r", None) for _ in range(2))
    assert first is not None and second is not None
    states.publish(first, KEYS[0], 1, None)
    states.publish(second, KEYS[0], 1, None)
    assert (states.pool.counts.idle, states.pool.counts.free) == (1, 1)
    states.check()


def test_a_pinned_state_is_not_evicted() -> None:
    states = make(1)
    keep(states, KEYS[0])
    pin = states.pin("r", KEYS[0])
    assert pin is not None
    assert states.try_reserve("r", KEYS[1]) is None and states.num_skipped == 1
    assert states.forget() == 0
    pin.end()
    keep(states, KEYS[1])
    assert states.last_before(KEYS, 12) == 2 and states.last_before(KEYS, 1) == 0


def test_what_is_expected_is_told_until_nothing_is() -> None:
    states = make(1)
    states.expect(KEYS[3], 4, 1)
    states.expect(KEYS[3], 4, 1)
    states.expect(KEYS[3], 4, -1)
    assert states.is_expected(KEYS) and states.is_expected(KEYS, 3)
    assert not states.is_expected(KEYS, 4) and not states.is_expected(KEYS[:3])
    states.expect(KEYS[3], 4, -1)
    assert not states.is_expected(KEYS)
    with pytest.raises(InvariantBroken, match="less often than never"):
        states.expect(KEYS[3], 4, -1)


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_finds_what_a_plain_model_has(seed: int) -> None:
    """Holds invariant 16: every slot is free, idle, reserved or pinned."""
    r, states = random.Random(seed), make(5)
    kept: dict[bytes, None] = {}  # oldest use first; pinned ones are among them
    writing: list[tuple[bytes, SlotHandle]] = []
    pins: list[tuple[bytes, SlotHandle]] = []
    for _ in range(600):
        key, pinned = r.choice(KEYS), {one for one, _ in pins}
        match r.randrange(5):
            case 0:
                handle = states.try_reserve("r", key)
                idle = [one for one in kept if one not in pinned]
                free = 5 - len(kept) - len(writing)
                assert (handle is None) == (key in kept or not (free or idle))
                if handle is not None:
                    if not free:
                        gone = {
                            one for one in kept if states.last_before(KEYS, depth_of(one)) != depth_of(one)
                        }
                        assert len(gone) == 1 and not gone & pinned
                        kept = {one: None for one in kept if one not in gone}
                    writing.append((key, handle))
            case 1 if writing:
                key, handle = writing.pop(r.randrange(len(writing)))
                states.publish(handle, key, depth_of(key), None)
                kept[key] = None
            case 2 if writing:
                writing.pop(r.randrange(len(writing)))[1].end()
            case 3:
                pin = states.pin("r", key)
                assert (pin is None) == (key not in kept)
                if pin is not None:
                    pins.append((key, pin))
            case 4 if pins:
                pins.pop(r.randrange(len(pins)))[1].end()
        states.check()
        end = r.randint(0, len(KEYS))
        assert states.last_before(KEYS, end) == max(
            (num for num in range(1, end + 1) if KEYS[num - 1] in kept), default=0
        )


def blocks_of(pool: BlockPool, keys: Sequence[bytes]) -> None:
    for key in keys:
        reservation = pool.try_reserve(1, "r")
        assert reservation is not None
        hold = pool.hold("r")
        reservation.commit(hold)
        pool.seal(hold.run, [key])
        hold.end()


@pytest.mark.parametrize("seed", range(20))
def test_a_prefix_is_usable_where_all_blocks_and_a_state_are_there(seed: int) -> None:
    """Holds invariant 15a: on the device alone."""
    r, states, pool = random.Random(seed), make(12), BlockPool(12, "device")
    blocks_of(pool, present := r.sample(KEYS, r.randint(0, 12)))
    for key in (with_state := r.sample(KEYS, r.randint(0, 12))):
        keep(states, key)
    found = WithStates(16, states).find(pool, tuple(KEYS))
    usable = [num for num in range(1, 13) if set(KEYS[:num]) <= set(present) and KEYS[num - 1] in with_state]
    assert found.num_blocks == len(found.slots) == max(usable, default=0) and found.num_colder == 0
    assert found.num_blocks <= WholePrefix(16).find(pool, tuple(KEYS)).num_blocks
    assert pool.keys(found.slots.tolist()) == KEYS[: found.num_blocks]

"""The books of expert slots: what fits is held, what is worth least makes room, a held slot stays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvariantBroken
from penstock.experts.order import ORDERS, is_bulk
from penstock.experts.slots import NONE, POOL, ExpertSlots
from penstock.sanitizer.sanitizer import Sanitizer

LAYERS, EXPERTS = 3, 6


def slots_of(num_slots: int, order: str = "lfu", sanitizer: Sanitizer | None = None) -> ExpertSlots:
    return ExpertSlots(num_slots, LAYERS, EXPERTS, ORDERS[order](LAYERS * EXPERTS), sanitizer)


def numbers(*wanted: int) -> np.ndarray:
    return np.array(wanted, np.int64)


def step(slots: ExpertSlots, *layers: tuple[int, ...]) -> list[int]:
    """How many experts of each layer had to be brought."""
    slots.order.begin()
    brought = []
    for layer, wanted in enumerate(layers):
        slots.order.used(layer * EXPERTS + numbers(*wanted))
        wave = slots.bring(layer, numbers(*wanted))
        assert len(wave.experts) == len(wanted)
        slots.give_back(wave.slots, None)
        brought.append(len(wave.moves))
    return brought


@pytest.mark.parametrize("order", ORDERS)
def test_what_was_brought_is_there_in_the_next_step(order: str) -> None:
    slots = slots_of(6, order)
    assert step(slots, (0, 1), (2, 3), (4, 5)) == [2, 2, 2]
    assert step(slots, (0, 1), (2, 3), (4, 5)) == [0, 0, 0]


def test_an_expert_that_is_used_often_outlives_others() -> None:
    slots = slots_of(2)
    for _ in range(3):
        step(slots, (0,))
    assert step(slots, (1,)) == [1]
    assert step(slots, (2,)) == [1]
    assert step(slots, (0,)) == [0]


def test_without_a_rule_what_came_first_stays() -> None:
    slots = slots_of(3, "none")
    for expert in range(3):
        step(slots, (expert,))
    assert step(slots, (3,)) == [1]
    assert step(slots, (0, 1)) == [0]
    assert step(slots, (4,)) == [1]
    assert step(slots, (0, 1)) == [0]


def test_an_old_use_counts_less_than_a_few_new_ones() -> None:
    slots = slots_of(2)
    for _ in range(4):
        step(slots, (0,))
    for _ in range(2000):
        slots.order.begin()
    for _ in range(2):
        step(slots, (1,))
    assert step(slots, (2,)) == [1]
    assert step(slots, (1,)) == [0]
    assert step(slots, (0,)) == [1]


def test_a_wave_has_as_many_experts_as_there_are_slots() -> None:
    slots = slots_of(2)
    wave = slots.bring(0, numbers(0, 1, 2, 3, 4))
    assert len(wave.experts) == len(wave.moves) == 2
    with pytest.raises(InvariantBroken, match="held twice"):
        slots.bring(0, wave.experts)
    slots.give_back(wave.slots, None)
    rest = np.setdiff1d(numbers(0, 1, 2, 3, 4), wave.experts)
    assert len(slots.bring(0, rest).moves) == 2


def test_a_guess_takes_no_slot_of_an_expert_that_it_guesses_too() -> None:
    slots = slots_of(3)
    step(slots, (), (0, 1, 2))
    moves = slots.prefetch(1, numbers(1, 2, 3, 4), most=9)
    assert [move.expert for move in moves] == [EXPERTS + 3]
    assert slots.map_of(1)[[1, 2, 3]].min() > NONE


def test_slots_that_stream_are_those_of_the_layer_before() -> None:
    """Nothing is known of any expert, so what is used again last makes room."""
    slots = slots_of(2 * EXPERTS)
    every = np.arange(EXPERTS)
    for _ in range(2):
        slots.order.begin()
        for layer in range(LAYERS):
            wave = slots.bring(layer, every)
            ahead = (layer + 1) % LAYERS
            moves = slots.prefetch(ahead, every, most=EXPERTS)
            slots.give_back(np.concatenate((wave.slots, numbers(*(move.slot for move in moves)))), None)
            assert (slots.map_of(layer) != NONE).all()
            assert (slots.map_of(ahead) != NONE).all()


def test_a_copy_that_failed_leaves_no_expert_behind() -> None:
    slots = slots_of(2)
    wave = slots.bring(0, numbers(3, 4))
    slots.lose(wave.moves)
    slots.give_back(wave.slots, None)
    slots.check()
    assert (slots.slot_of == NONE).all()
    assert len(slots.bring(0, numbers(3)).moves) == 1


def test_a_pool_that_is_closed_with_a_held_slot_is_reported() -> None:
    sanitizer = Sanitizer()
    slots = slots_of(2, sanitizer=sanitizer)
    wave = slots.bring(0, numbers(1))
    slots.close()
    assert any(POOL in str(report) for report in sanitizer.reports)
    slots.give_back(wave.slots, None)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_books_agree_whatever_is_wanted(data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(sorted(ORDERS)))
    sanitizer = Sanitizer()
    slots = slots_of(data.draw(st.integers(2, 8)), order, sanitizer)
    wanted = st.sets(st.integers(0, EXPERTS - 1), min_size=1)
    for _ in range(data.draw(st.integers(1, 12))):
        slots.order.begin()
        for layer in range(LAYERS):
            left = numbers(*data.draw(wanted))
            slots.order.used(layer * EXPERTS + left)
            while len(left):
                wave = slots.bring(layer, left)
                assert len(wave.experts) == min(len(left), slots.num_slots)
                assert (slots.map_of(layer)[wave.experts] == wave.slots).all()
                guessed = slots.prefetch((layer + 1) % LAYERS, numbers(*data.draw(wanted)), most=2)
                assert not set(wave.slots) & {move.slot for move in guessed}
                slots.give_back(wave.slots, None)
                slots.give_back(numbers(*(move.slot for move in guessed)), None)
                left = np.setdiff1d(left, wave.experts)
                slots.check()
    slots.close()
    assert not sanitizer.reports


def test_a_step_is_bulk_if_its_tokens_hit_nearly_all() -> None:
    assert is_bulk(512, 8, 128) and is_bulk(64, 8, 128)
    assert not is_bulk(63, 8, 128) and not is_bulk(1, 8, 128)

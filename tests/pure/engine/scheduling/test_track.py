"""One request's state machine and its arithmetic."""

from __future__ import annotations

import pytest

from penstock.contract import Request, SamplingParams
from penstock.engine.scheduling.budget import blocks_for
from penstock.engine.scheduling.track import State, Track
from penstock.errors import IllegalTransition, InvariantBroken

LEGAL = {
    (State.WAITING, State.LOADING),
    (State.WAITING, State.RUNNING),
    (State.WAITING, State.ENDED),
    (State.LOADING, State.WAITING),  # it waits no longer for what does not come
    (State.LOADING, State.RUNNING),
    (State.LOADING, State.RETRACTED),
    (State.LOADING, State.ENDED),
    (State.RUNNING, State.RETRACTED),
    (State.RUNNING, State.ENDED),
    (State.RETRACTED, State.LOADING),
    (State.RETRACTED, State.RUNNING),
    (State.RETRACTED, State.ENDED),
}


def track(num_prompt: int = 4, max_tokens: int = 3) -> Track:
    prompt = list(range(num_prompt))
    return Track(Request("r", prompt, SamplingParams(max_tokens=max_tokens)), 1, None, tokens=list(prompt))


@pytest.mark.parametrize("old", State)
@pytest.mark.parametrize("new", State)
def test_a_request_moves_only_along_its_table(old: State, new: State) -> None:
    one = track()
    one.state = old
    if (old, new) in LEGAL:
        one.move(new)
        assert one.state is new
    else:
        with pytest.raises(
            IllegalTransition, match=f"request r: {new.value} is not legal in state {old.value}"
        ):
            one.move(new)
        assert one.state is old


@pytest.mark.parametrize(
    ("max_tokens", "num_generated", "num_in_flight", "num_planned", "left"),
    [
        (3, 0, 0, 0, 4),  # all of the prompt
        (3, 0, 0, 3, 1),
        (3, 0, 1, 4, 1),  # the token that is being sampled
        (3, 1, 1, 5, 1),
        (3, 1, 2, 6, 0),  # all three are known or on their way
        (3, 2, 1, 6, 0),
        (1, 0, 0, 0, 4),
        (1, 0, 1, 4, 0),
        (0, 0, 0, 0, 4),  # a request for no tokens still computes its prompt
        (0, 0, 0, 4, 0),
        (3, 2, 0, 0, 6),  # retracted with two tokens generated
    ],
)
def test_what_is_left_to_compute(
    max_tokens: int, num_generated: int, num_in_flight: int, num_planned: int, left: int
) -> None:
    one = track(4, max_tokens)
    one.tokens += [9] * num_generated
    one.num_in_flight, one.num_planned = num_in_flight, num_planned
    assert one.num_left == left


@pytest.mark.parametrize(("max_tokens", "tokens"), [(0, 4), (1, 4), (2, 5), (9, 12)])
def test_the_last_generated_token_is_never_fed_back(max_tokens: int, tokens: int) -> None:
    assert track(4, max_tokens).lifetime_tokens == tokens


def test_where_all_of_a_load_that_failed_is_there_the_last_token_is_computed_again() -> None:
    one = track(8)
    one.compute_rest(2, 4)
    assert one.num_planned == one.num_committed == one.num_sealed == 7 and one.num_left == 1
    assert one.num_cached == 8, "its KV is not written again"


def test_a_request_that_holds_no_table_says_so() -> None:
    with pytest.raises(InvariantBroken, match="request r has no table in state waiting"):
        track().held_table()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_hold_tokens_rounded_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks

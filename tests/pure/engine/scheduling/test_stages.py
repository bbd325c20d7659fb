"""One request's state machine and its arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from penstock.contract import Match
from penstock.engine.scheduling.stages import State, begin
from penstock.errors import IllegalTransition
from tests.pure.engine.scheduling.staged import BLOCK, NoTable, life_of, running_of, waiting_of

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


def test_a_request_moves_only_along_its_table() -> None:
    for old, new in itertools.product(State, State):
        one = life_of(range(4))
        one.state = old
        if (old, new) in LEGAL:
            one.move(new)
            assert one.state is new
            continue
        with pytest.raises(
            IllegalTransition, match=f"request r: {new.value} is not legal in state {old.value}"
        ):
            one.move(new)
        assert one.state is old


@pytest.mark.parametrize(("max_tokens", "tokens"), [(0, 4), (1, 4), (2, 5), (9, 12)])
def test_the_last_generated_token_is_never_fed_back(max_tokens: int, tokens: int) -> None:
    assert life_of(range(4), max_tokens).lifetime_tokens == tokens


def test_where_a_load_ends_short_what_lies_before_it_on_the_device_stays_cached() -> None:
    """Where all of it is there, the last token is computed again, and its KV is not written again."""
    one = running_of(life_of(range(20)), num_cached=16, num_resident=8)
    for num_landed, num_cached, num_known in ((3, 20, 19), (1, 12, 12), (0, 8, 8)):
        one.compute_rest(num_landed, block_tokens=4)
        assert one.num_cached == num_cached and one.life.computes
        assert one.num_planned == one.num_committed == one.num_sealed == num_known


@dataclass
class Covers:
    """A lease over so many tokens."""

    num_tokens: int

    def runs_from(self, block: int) -> list[tuple[str, int]]:
        num = -(-self.num_tokens // BLOCK) - block  # a tail has a block of its own
        return [("host", num)] if num > 0 else []


def test_a_stage_begins_with_what_the_device_has_and_what_its_lease_covers() -> None:
    for leased, on_device, colder, num_cached in (
        (None, 2, 0, 8),
        (12, 2, 1, 12),
        (4, 2, 0, 8),  # it covers less than the device has
        (10, 2, 1, 10),  # a tail
        (0, 0, 0, 0),
        (12, 0, 3, 12),
        (16, 2, 2, 16),  # the whole prompt
    ):
        waiting = waiting_of(life_of([1] * 16, 4))
        waiting.lease = None if leased is None else Covers(leased)  # type: ignore[assignment]
        one = begin(waiting, 0, NoTable(), Match(on_device, 0, False, colder), BLOCK)  # type: ignore[arg-type]
        known = min(15, num_cached)
        assert (one.num_cached, one.num_planned, one.num_committed) == (num_cached, known, known)
        runs = [("device", min(15, on_device * BLOCK)), ("host", known - on_device * BLOCK)]
        assert one.life.sources.found == tuple((tier, num) for tier, num in runs if num > 0)

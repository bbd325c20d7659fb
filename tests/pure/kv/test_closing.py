"""Closing a cache and its tiers: what ran out of time may be tried again, and what has nothing to do gets the moment that it needs to end."""

from __future__ import annotations

import pytest
from stacked_rig import Stacked

from penstock.errors import DeadlineExceeded


def test_a_close_that_ran_out_of_time_is_tried_again_from_the_beginning() -> None:
    rig = Stacked()
    table = rig.ran(2)
    rig.cache.release(table, None)
    lane = rig.lane("save")
    lane.step = lambda: False  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        rig.cache.close(0.0)
    assert rig.cache.num_in_flight == 1 and not rig.first.closed
    del lane.step
    rig.cache.close()
    assert rig.cache.num_in_flight == 0 and rig.first.closed


def test_lanes_that_have_nothing_to_do_get_a_moment_to_end_where_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Stacked("ssd", "remote")
    given: dict[str, float | None] = {}
    for lane in rig.lanes:
        close = lane.close
        monkeypatch.setattr(lane, "close", lambda timeout_s, lane=lane, close=close: given.update({lane.name: timeout_s}) or close(timeout_s))
    rig.cache.close(0.0)
    assert {lane.name for lane in rig.lanes} - set(given) == {"compute"}
    assert all(timeout_s is None or timeout_s > 0.1 for timeout_s in given.values()), given

"""What the scheduler asks of storage, in numbers: a wrong one shows late, and only where memory is short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from penstock.contract import Match, Request, SamplingParams
from penstock.engine.scheduling.budget import Room
from penstock.engine.scheduling.line import want_rank
from penstock.engine.scheduling.track import State, Track
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from penstock.kv.tiers.host import HostLease
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, planned, remembered, shape, tiers_of
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import StepFence, World


def noted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every such call from now on."""
    calls: list[tuple[Any, ...]] = []
    call = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args: calls.append(args) or call(self, *args))
    return calls


def test_room_is_asked_for_what_was_promised_and_what_is_new_and_nothing_that_others_may_draw_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_slots=24, prefill_chunk=64, cold=Cold(24))
    world.submit(B[:8], 1)
    world.finish()  # two blocks that nobody holds
    asked = noted(monkeypatch, KvCache, "make_room")
    world.submit(A[:4], 9, ignore_eos=True)  # three blocks, of which it draws one at once
    world.submit([*B[:8], *C[:8]], 9, ignore_eos=True)  # six, of which two are there
    planned(world)
    assert asked == [(3, 0), (2 + 4, 2 + 2)]
    world.close()


def test_a_load_is_told_how_much_is_computed_over_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = remembered(A[:8], prefill_chunk=8, num_slots=16)
    asked = noted(monkeypatch, BlockTable, "promote")
    for num_own, num_next in ((3, 3), (8, 8), (11, 8)):
        last = world.submit([*A[:8], *C[:num_own]], 1)
        world.plan()
        assert [args[1:] for args in asked] == [(2, num_next)]
        asked.clear()
        world.cancel(last)
        world.device.lanes.run_all()
        world.settle()
        world.cache.reset(["device"])
    world.close()


def test_what_is_claimed_begins_behind_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    world = remembered(A[:12], num_slots=16)
    world.submit(A[:4], 1)
    world.finish()  # brings the first block back
    asked = noted(monkeypatch, HostLease, "claim")
    world.submit([*A[:12], 6], 1)
    world.plan()
    assert asked == [(1, 2)]
    world.close()


def test_a_store_is_not_asked_again_what_it_has_answered_to_an_earlier_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = remembered(A[:8])
    world.submit(B[:8], 9, ignore_eos=True)
    world.submit([*A[:8], 1], 8 * BLOCK - 16, ignore_eos=True)
    world.step()
    track = next(track for track in world.scheduler._line)
    before = track.lease
    assert before is not None
    asked = noted(monkeypatch, KvCache, "lease")
    tiers_of(world).expire()
    world.step()
    assert [args[2] for args in asked] == [before] and track.lease is not before
    world.close()


def test_a_lease_and_a_want_know_how_late_their_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[float] = []
    set_rank = HostLease.set_rank
    monkeypatch.setattr(HostLease, "set_rank", lambda self, rank: ranks.append(rank) or set_rank(self, rank))
    world = World(num_slots=16, max_batch=1, prefill_chunk=64, cold=Cold(24), max_overtaken_s=20.0)
    world.submit(A[:8], 1)
    world.finish()
    world.cache.reset(["device"])
    tiers_of(world).loads.costs.prefill.add(100, 0.0, 100.0)
    world.submit([2, 2, 2], 40, ignore_eos=True)
    planned(world)
    world.now_s = 5.0
    waits = world.submit([*A[:8], 1], 1, priority=2)
    ranks.clear()
    world.plan()
    track = world.scheduler._tracks[waits]
    assert (
        track.want is not None and ranks == [want_rank(track)] and track.want.rank == want_rank(track) > 5.0
    )
    world.close()


def test_one_that_relies_on_colder_tiers_no_more_saves_nothing_there_when_it_is_pushed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_slots=6, overcommit=2.0, cold=Cold(24))
    first, second = world.submit(A[:8], 9, ignore_eos=True), world.submit(B[:8], 9, ignore_eos=True)
    planned(world)
    world.scheduler._tracks[second].computes = True
    retracted, released = noted(monkeypatch, BlockTable, "retract"), noted(monkeypatch, BlockTable, "release")
    while world.state_of(second) == "running":
        world.step()
    assert world.state_of(second) == State.RETRACTED.value and retracted == [] and len(released) == 1
    assert world.scheduler._tracks[second].lease is None
    world.close()
    assert all(world.outcome(i)[1] is not None for i in (first, second))


def test_the_last_token_of_an_answer_needs_no_room() -> None:
    """It is never fed back: a prompt of four tokens takes two blocks with five more, and one block with one
    more."""
    world = World(num_slots=3, prefill_chunk=64)
    first, second = world.submit(A[:4], 5, ignore_eos=True), world.submit(B[:4], 1, ignore_eos=True)
    assert shape(planned(world)) == [(first, 0, 4), (second, 0, 4)], "two blocks and one"
    world.close()


@pytest.mark.parametrize(
    ("num_blocks", "state", "fits"),
    [
        (3, State.WAITING, True),
        (6, State.WAITING, True),
        (7, State.WAITING, False),
        (3, State.RETRACTED, True),
        (4, State.RETRACTED, False),
    ],
)
def test_promises_may_exceed_memory_but_not_to_one_that_was_pushed_out(
    num_blocks: int, state: State, fits: bool
) -> None:
    """A second time would be thrashing: it comes back when all of its life fits."""
    world = World(num_slots=3, overcommit=2.0)
    request = Request("r", [1], SamplingParams(max_tokens=num_blocks * BLOCK))
    track = Track(request, 1, None, state, [1])
    assert (
        track.lifetime_tokens == num_blocks * BLOCK
        and world.scheduler._running.fits(track, Match(0, 0, False)) == fits
    )


def test_matched_blocks_that_nobody_holds_are_room_no_more_and_those_of_others_cost_nothing() -> None:
    world = World(num_slots=4)
    track = Track(Request("r", [1] * 13, SamplingParams(max_tokens=4)), 1, None, tokens=[1] * 13)
    fits = {
        (num, idle): world.scheduler._running.fits(track, Match(num, idle, False))
        for num in range(4)
        for idle in range(num + 1)
    }
    assert all(fits.values()), "four blocks: what is matched is either room or there already"
    longer = Track(Request("r", [1] * 13, SamplingParams(max_tokens=5)), 1, None, tokens=[1] * 13)
    fits = {
        (num, idle): world.scheduler._running.fits(longer, Match(num, idle, False))
        for num in range(4)
        for idle in range(num + 1)
    }
    assert fits == {(num, idle): idle < num for num, idle in fits}, (
        "one more: it fits where somebody else holds one of them"
    )


def test_what_a_load_that_failed_was_to_write_is_computed_behind_its_earlier_users() -> None:
    """The slots are the request's already, so that nothing is drawn which would ask for them."""
    world = remembered(A[:8])
    again = world.submit([*A[:8], 1], 1)
    world.plan()
    tiers_of(world).promotions.fail_next = 1
    world.device.lanes.run_all()
    world.settle()
    fence = StepFence(world, 0)
    world.cache.tables[again].hold.add_after((fence,))
    plan = planned(world)
    assert shape(plan) == [(again, 0, 8)] and fence in world.waits[plan.number].of(plan)[0]
    world.close()


@dataclass
class Covers:
    """A lease over so many tokens."""

    num_tokens: int

    def runs_from(self, block: int) -> list[tuple[str, int]]:
        num = -(-self.num_tokens // BLOCK) - block  # a tail has a block of its own
        return [("host", num)] if num > 0 else []


@pytest.mark.parametrize(
    ("leased", "on_device", "colder", "num_cached"),
    [
        (None, 2, 0, 8),
        (12, 2, 1, 12),
        (4, 2, 0, 8),
        (10, 2, 1, 10),
        (0, 0, 0, 0),
        (12, 0, 3, 12),
        (16, 2, 2, 16),
    ],
    ids=[
        "no lease",
        "behind it",
        "it covers less than the device has",
        "a tail",
        "nothing",
        "all of it",
        "the whole prompt",
    ],
)
def test_a_life_begins_with_what_the_device_has_and_what_its_lease_covers(
    leased: int | None, on_device: int, colder: int, num_cached: int
) -> None:
    track = Track(Request("r", [1] * 16, SamplingParams(max_tokens=4)), 1, None, tokens=[1] * 16)
    track.lease = None if leased is None else Covers(leased)  # type: ignore[assignment]
    track.begin(Match(on_device, 0, False, colder), BLOCK)
    assert (track.num_cached, track.num_planned, track.num_committed) == (
        num_cached,
        min(15, num_cached),
        min(15, num_cached),
    )
    runs = [("device", min(15, on_device * BLOCK)), ("host", min(15, num_cached) - on_device * BLOCK)]
    assert track.found == tuple((tier, num) for tier, num in runs if num > 0)


def test_what_a_step_has_left_for_prompts_is_told_of_every_one_where_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deeper a chunk lies, the longer it takes: a chunk that counted as the next one would make the step
    too short."""
    spent: list[tuple[int, int, int]] = []
    spend = Room.spend
    monkeypatch.setattr(Room, "spend", lambda self, *args: spent.append(args) or spend(self, *args))
    world = World(num_slots=16, prefill_chunk=12)
    world.submit(A, 2, ignore_eos=True)
    world.submit(B[:7], 2, ignore_eos=True)
    for _ in range(4):
        plan = world.plan()
        chunks = [] if plan is None else [(c.start, c.num_tokens) for c in plan.chunks if c.num_tokens > 1]
        assert [args[:2] for args in spent] == chunks and all(num <= num_left for _, num, num_left in spent)
        spent.clear()
        while len(world.in_flight) > 1:
            world.commit()
    world.close()

"""The scheduler over a disk and a store behind the host tier: who waits, for what, where a prompt is said to
have come from, and what is read ahead for those in line."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.contract import KvSource, Prefetch
from penstock.engine.scheduling import admission
from penstock.kv.tiers.reads import Fetch
from tests.pure.engine.scheduling.scheduler_cases import A, B, planned, shape, source_of, tiers_of
from tests.pure.engine.scheduling.scheduler_tiers import Cold, land_in_parts
from tests.pure.engine.scheduling.scheduler_world import World


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


def forgotten(*tiers: str, num_host: int = 24, **world: int) -> World:
    """A world in which A was computed; it is in the first of `tiers`, and nowhere hotter."""
    made = World(**world, cold=Cold(num_host, stores=tiers))
    made.submit(A, 1, ignore_eos=True)
    made.finish()
    made.cache.reset(["device", "host"])
    for store in list(tiers_of(made).stores.values())[1:]:
        store.lose()
    return made


def run_lane(world: World, name: str, steps: int = 100) -> None:
    for _ in range(steps):
        world.device.lanes.lane(name).step()
    world.settle()


def test_a_store_that_has_not_answered_is_waited_for_and_others_go_on() -> None:
    world = forgotten("remote")
    request, other = world.submit(A, 2, ignore_eos=True), world.submit(B[:3], 2, ignore_eos=True)
    assert [one for one, _, _ in shape(planned(world))] == [other] and world.state_of(request) == "waiting"
    run_lane(world, "ask remote")
    world.plan()
    assert world.state_of(request) == "loading"
    world.finish()
    assert source_of(world, request) == KvSource(remote=15, computed=1)
    world.close()


def reads_of(world: World, tier: str = "ssd") -> Counter[bytes]:
    """How often the store is asked for each key from now on."""
    store, counted = tiers_of(world).stores[tier], Counter[bytes]()
    read = store.read

    def counting(keys, into):  # type: ignore[no-untyped-def]
        counted.update(keys)
        return read(keys, into)

    store.read = counting  # type: ignore[method-assign]
    return counted


def line_of(world: World, *prompts: list[int]) -> list[str]:
    """The first runs and takes the only row; the others wait."""
    requests = [world.submit(prompt, 3, ignore_eos=True) for prompt in prompts]
    planned(world)
    return requests


def prefetch_of(world: World, request_id: str) -> Prefetch | None:
    waiting = world.scheduler.lives[request_id].waiting
    return None if waiting is None else waiting.prefetch


def fetch_of(world: World, request_id: str) -> Fetch:
    fetch = prefetch_of(world, request_id)
    assert isinstance(fetch, Fetch)
    return fetch


def host_has(world: World, prompt: list[int]) -> list[bool]:
    return [slot >= 0 for slot in tiers_of(world).host.pool.find_each(world.cache.prefix_of(prompt).keys)]  # type: ignore[union-attr]


@pytest.mark.parametrize("turns", [0, 1, 3, 5])
def test_a_request_that_starts_while_it_is_read_for_takes_over(turns: int) -> None:
    world = forgotten("ssd", max_batch=1)
    reads = reads_of(world)
    running, waiting = line_of(world, B, [*A, 1])
    fetch = fetch_of(world, waiting)
    for number in range(turns):
        world.device.lanes.lane(f"read ssd {number % 2}").step()
    world.settle()
    world.cancel(running)
    world.plan()
    assert world.state_of(waiting) == "loading" and prefetch_of(world, waiting) is None and fetch.ended
    world.finish()
    assert set(reads.values()) == {1} and len(reads) == 4, "nothing is read twice"
    source = source_of(world, waiting)
    assert source.computed == 1 and source.ssd + source.host == 16
    world.close()


def test_a_cancel_in_line_ends_what_is_read_for_it() -> None:
    world = forgotten("ssd", max_batch=1)
    _, waiting = line_of(world, B, [*A, 1])
    fetch = fetch_of(world, waiting)
    world.cancel(waiting)
    assert fetch.ended
    world.device.lanes.run_all()
    world.settle()
    assert fetch.settled and host_has(world, A) == [True, True, False, False], (
        "what was being read has landed"
    )
    world.close()


def test_the_first_in_line_are_read_for_and_one_more_in_each_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_PREFETCHED", 2)
    world = forgotten("ssd", max_batch=1, num_host=96)
    prompts = [[number] * 16 for number in (1, 2, 3)]
    for prompt in prompts:
        world.submit(prompt, 1, ignore_eos=True)
        world.finish()
    world.cache.reset(["device", "host"])
    requests = line_of(world, B, *prompts)
    assert [prefetch_of(world, request) is not None for request in requests] == [False, True, False, False]
    world.plan()
    assert [prefetch_of(world, request) is not None for request in requests] == [False, True, True, False]
    world.plan()
    assert [prefetch_of(world, request) is not None for request in requests] == [False, True, True, False], (
        "the third is too far"
    )
    world.close()

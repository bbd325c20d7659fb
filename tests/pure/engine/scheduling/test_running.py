"""Room on the device is made before a request is admitted: what only the device has goes to host memory
first. Nobody waits for that longer than it takes, whatever host memory has room for, and whoever wants the
blocks that have to go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.engine.scheduling import running as running_module
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, planned, source_of, tiers_of
from tests.pure.engine.scheduling.scheduler_tiers import Cold, land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import STEMS
from tests.pure.engine.scheduling.scheduler_world import World

D = [3, 1, 3, 1, 2, 2, 2, 2, 4, 4, 4, 4, 1, 1, 1, 1]


def full(num_host: int, **world: Any) -> World:
    """The device has eight slots and remembers B, which is nowhere else where host memory is small; host
    memory remembers C."""
    made = World(
        num_slots=8, prefill_chunk=64, cold=Cold(num_host, postpones=True), max_overtaken_s=20.0, **world
    )
    tiers_of(made).loads.costs.prefill.add(100, 0.0, 1.0)
    made.submit(C, 1, ignore_eos=True)
    made.finish()
    made.cache.reset(["device"])
    made.submit(B, 1, ignore_eos=True)
    made.finish()
    assert made.cache.stats().slots["device"].idle == 4
    return made


def note_moves(world: World, note: Callable[[Sequence[int]], None]) -> None:
    """`note` hears of the slots whose blocks leave the device to make room, from now on."""
    saves = tiers_of(world).saves
    save = saves._save_slots

    def noted(slots: Sequence[int], *args: Any, **named: Any) -> None:
        note(slots)
        save(slots, *args, **named)

    saves._save_slots = noted  # type: ignore[method-assign]


def test_blocks_that_only_the_device_has_leave_it_before_somebody_else_gets_their_slots() -> None:
    world = full(num_host=6)  # room for C and two of B
    large = world.submit(D, 16, ignore_eos=True)  # the whole device
    assert world.plan() is None and world.state_of(large) == "waiting", (
        "nobody is admitted while blocks are on their way"
    )
    assert world.cache.stats().slots["device"].pinned > 0
    assert world.plan() is None, "and they are sent once"
    while world.state_of(large) == "waiting":
        assert world.cache.num_in_flight, "it waits for nothing else"
        world.step()
        world.check()
    world.finish()
    world.cache.reset(["device"])
    again = world.submit([*B, 1], 1)
    world.close()
    assert source_of(world, again).host == 16, "nothing was lost"


# Holds invariant 17: running requests draw what they were promised.
def test_what_others_were_promised_can_be_drawn_while_blocks_leave() -> None:
    world = full(num_host=24)
    world.submit(D, 1, ignore_eos=True)
    world.finish()
    # three blocks, one drawn at once in the place of one that host memory has
    runs = world.submit(A[:4], 9, ignore_eos=True)
    planned(world)
    world.cache.reset(["host"])
    next_one = world.submit([5, 6] * 6, 8, ignore_eos=True)  # five: all that is not promised
    for _ in range(6):
        world.plan()
        world.commit()
        world.check()
    assert world.state_of(next_one) == "waiting" and len(world.asked[runs].got) >= 6, "who runs goes on"
    world.close()


def lost_copies(world: World) -> list[bytes]:
    """Keys that the device forgets while host memory does not have them, from now on."""
    lost: list[bytes] = []
    pool, host = world.cache.pool, tiers_of(world).host
    evict = pool.evict

    def watched(num_slots: int) -> int:
        keys = pool.keys(pool.coldest(num_slots, drops_wants=True))
        lost.extend(key for key, absent in zip(keys, host.absent(keys), strict=True) if absent)
        return evict(num_slots)

    pool.evict = watched  # type: ignore[method-assign]
    return lost


def with_answers(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """So many slots are kept free for answers, also in a small pool."""
    monkeypatch.setattr(running_module, "_ANSWER_BLOCKS", num_blocks)
    monkeypatch.setattr(running_module, "_ANSWER_SHARE", 1)


def test_answers_wait_for_nothing_and_take_nobodys_only_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with_answers(monkeypatch, 2)
    world = full(num_host=24)
    lost = lost_copies(world)
    runs = world.submit(A[:4], 20, ignore_eos=True)  # six blocks; four slots are free, and B has the others
    planned(world)
    world.cache.reset(["host"])
    while world.outcome(runs)[1] is None:
        num_before = len(world.asked[runs].got)
        world.commit()
        assert len(world.asked[runs].got) == num_before + 1, "a token in every step"
        world.device.lanes.run_all()
        world.settle()
        world.plan()
    assert not lost and tiers_of(world).host.pool.num_keys >= 2, "what had to go was saved in time"
    world.close()


def test_no_room_is_made_for_the_next_one_out_of_what_it_has_itself() -> None:
    """Whatever else is wanted, and however much: it would lose what it was admitted with."""
    world = full(num_host=24)
    world.submit(D, 1, ignore_eos=True)
    world.finish()
    world.cache.reset(["host"])  # the device alone has B and D, and is full
    of_d = world.cache.prefix_of(D)
    assert of_d is not None
    retained = world.cache.retain(of_d, -1e12)
    moved = list[int]()
    note_moves(world, moved.extend)
    again = world.submit([*B, 1], 8, ignore_eos=True)
    slots_of_d = world.cache.pool.find_each(of_d.keys)
    while world.outcome(again)[1] is None:
        world.plan()
        if world.in_flight:
            world.commit()
        world.device.lanes.run_all()
        world.settle()
    assert moved and set(moved) <= set(slots_of_d) and source_of(world, again).device == 16
    retained.end()
    world.close()


@pytest.mark.parametrize(("host", "num_moved"), [("empty", 4), ("unwanted", 4), ("wanted", 1)])
def test_room_for_requests_in_line_is_made_of_unwanted_blocks_that_host_memory_takes(
    host: str, num_moved: int
) -> None:
    """Those behind the next request need more slots than that. `host`: what it has, without a free slot."""
    world = World(num_slots=12, prefill_chunk=64, cold=Cold(24 if host == "empty" else 4, postpones=True))
    for prompt in (D, A, B):
        world.submit(prompt, 1, ignore_eos=True)
        world.finish()
        if prompt is D:
            world.cache.reset(["device"])
    if host == "empty":
        world.cache.reset(["host"])
    moves = list[list[int]]()
    note_moves(world, lambda slots: moves.append([*slots]))
    of_b = world.cache.prefix_of(B)
    assert of_b is not None
    slots_of_b = world.cache.pool.find_each(of_b.keys)
    again = world.submit([*A, 5, 5], 16, ignore_eos=True)  # needs one slot more than are free
    for last in range(3):
        world.submit([*D, 4, last] if host == "wanted" else [2, 2, 4, 4, last], 4, ignore_eos=True)
    world.finish()
    assert source_of(world, again).device == 16
    assert len(moves[0]) == num_moved and set(moves[0]) <= set(slots_of_b)
    world.close()


def watch_moves(world: World) -> None:
    """Every move frees a slot at least: while nobody runs, there are no more moves than slots before somebody
    is admitted."""
    moves = Counter[int]()

    def counted(slots: Sequence[int], *args: object, **named: bool) -> None:
        world.seen["blocks that left"] += len(slots)
        if not world.cache.tables:
            moves[len(world.log.admitted)] += 1
            assert moves[len(world.log.admitted)] <= world.cache.num_blocks, (
                "blocks are sent again and again, and nobody is admitted"
            )

    note_moves(world, counted)


def crowd(seed: int) -> Counter[str]:
    """Many requests, a device for few of them, host memory of any size, and copies that take any number of
    plans."""
    r = random.Random(seed)
    bound_s = r.choice([0.0, 2.0, 50.0])
    cold = Cold(r.randint(1, 9), r.choice([0, 1000]), postpones=True)
    sizes = {"num_slots": r.randint(4, 8), "max_batch": r.choice([1, 2, 4])}
    sizes |= {"prefill_chunk": r.choice([3, 8, 64]), "overcommit": r.choice([1.0, 1.0, 3.0])}
    world = World(**sizes, cold=cold, max_overtaken_s=bound_s)
    tiers_of(world).loads.costs.prefill.add(100, 0.0, r.choice([0.01, 1.0, 100.0]))
    watch_moves(world)
    for _ in range(r.randint(4, 14)):
        stem, max_tokens = r.choice([*STEMS, A, D]), r.randint(1, 9)
        most = world.cache.num_blocks * 4 - max_tokens
        world.submit(
            [*stem[: r.randint(3, 16)], *stem[: r.randint(0, 4)]][:most],
            max_tokens,
            r.choice([0, 0, 0, -1, 1]),
            ignore_eos=True,
        )
        world.now_s += r.choice([0.0, 0.5, 10.0])
        for _ in range(r.choice([0, 1, 3])):
            world.plan()
            if len(world.in_flight) > 1:
                world.commit()
    run_on(world, r)
    return world.seen


def run_on(world: World, r: random.Random) -> None:
    """To the end, with copies that take any number of plans."""
    for _ in range(600):
        for _ in range(r.randint(1, 5)):
            if len(world.in_flight) < 2:
                world.plan()
            world.check()
        if world.in_flight:
            world.commit()
        for _ in range(r.randint(0, 12)):
            r.choice(list(world.device.lanes)).step()
        world.settle()
        if not world.scheduler.has_work():
            break
    assert not world.scheduler.has_work(), "somebody waits for ever"
    while world.in_flight:
        world.commit()
    world.close()


def test_everybody_gets_room_and_the_right_tokens_whatever_host_memory_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    land_in_parts(monkeypatch)
    seen: Counter[str] = Counter()
    for seed in range(50):
        seen += crowd(seed)
    wanted = ("blocks that left", "overtakes", "promotion", "retraction", "full match")
    assert [name for name in wanted if not seen[name]] == [], (
        "the crowds did not meet what this test is about"
    )

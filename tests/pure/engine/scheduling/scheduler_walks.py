"""Random walks through the scheduler's world with tiers behind the device: every event in any order. Owns the
choice of events."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract import Match, Prefix
from penstock.kv.rules import LastWindow
from tests.event_walks import Event, choose_events, told_shortly
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_times import UNTIMED, Timed
from tests.pure.engine.scheduling.scheduler_world import World
from tests.support.guesses import guessed

STEMS = [
    [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3],
    [1, 2, 3, 4, 5, 6, 1, 2, 3, 5, 5, 5, 5, 5, 5],
    [6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6],
]
KINDS: list[dict[str, object]] = [
    {},
    {},
    {"ignore_eos": True},
    {"prompt_logprobs": 0},
    {"logprobs": 1},
    {"stop_token_ids": frozenset({2, 3})},
]
LONG = [
    [at * at % 5 + at // 7 % 2 for at in range(80)],
    [at * at % 5 + (at // 7 + at // 41) % 2 for at in range(80)],
    [6] * 80,
]
MAX_OPEN = 8


class Shape(NamedTuple):
    """What a walk is a walk through."""

    num_slots: int
    max_batch: int
    prefill_chunk: int
    overcommit: float
    prefix_cache: bool
    num_host: int
    overlap_tokens: int
    depth: int  # steps in flight at most; the engine has two
    stores: tuple[str, ...] = ()  # of cold tiers
    timed: Timed = UNTIMED
    max_overtaken_s: float = 0.0
    postpones: bool = False
    prioritizes: bool = False  # requests have different priorities
    num_deep: int = 0  # blocks of a request that is not deep yet, at most; 0: as many as of one that is
    num_resident: int = 0  # blocks that a deep request may have on the device; 0: there are no deep ones
    token_s: float = 0.0  # what computing a token is believed to take; 0: nobody knows
    expects: int = 0  # tokens that every request is believed to write besides what it has; 0: all that it may
    window: int = 0  # tokens that each token sees; 0: all
    num_states: int = 0  # slots of kept states; 0: no layer is recurrent
    state_every: int = 0


SIZES = (*Shape._fields[:5], "timed", "max_overtaken_s", "num_deep", "num_resident", "window")
SIZES += ("num_states", "state_every")


class Walker:
    """Does events: the functions below, by their names."""

    def __init__(self, shape: Shape) -> None:
        self.depth = shape.depth
        self.num_submitted = 0
        self.prioritizes = shape.prioritizes
        cold = Cold(shape.num_host, shape.overlap_tokens, shape.stores, postpones=shape.postpones)
        self.world = World(
            **{name: getattr(shape, name) for name in SIZES},
            cold=cold,
            lengths=guessed(shape.expects),
        )
        assert self.world.tiers is not None
        self.tiers = self.world.tiers
        if shape.token_s:
            self.tiers.loads.costs.prefill.add(100, 0.0, 100 * shape.token_s)

    def do(self, event: Event) -> None:
        name, number = event
        r = random.Random(number)
        globals()[name](self, r)
        self.world.now_s += r.choice((0.0, 0.0, 0.5, 1.0, 8.0))
        self.world.check()

    def end(self) -> None:
        """From here on nothing goes wrong: every request ends, and nothing is left."""
        self.tiers.promotions.fail_next = self.tiers.demotions.fail_next = 0
        self.tiers.heal()
        while len(self.world.in_flight) > 1:
            self.world.commit()
        self.world.close()


# ------------------------------------------------------------------------------------------------- requests


def _ask(walker: Walker, prompt: Sequence[int], max_tokens: int, kind: dict[str, object]) -> None:
    if len(walker.world.scheduler.lives) < MAX_OPEN:
        priority = walker.num_submitted * 7 % 11 % 3 - 1 if walker.prioritizes else 0
        walker.num_submitted += 1
        walker.world.submit(
            prompt[: walker.world.most_blocks * BLOCK - max_tokens], max_tokens, priority, **kind
        )


def _length(r: random.Random) -> int:
    return r.choice([0, 1, 1, 2, 5, 9, 9])


def submit(walker: Walker, r: random.Random) -> None:
    _ask(walker, r.choice(STEMS)[: r.randint(1, 15)], _length(r), r.choice(KINDS))


def submit_full_blocks(walker: Walker, r: random.Random) -> None:
    _ask(walker, r.choice(STEMS)[: r.randint(1, 3) * BLOCK], _length(r), {})


def submit_a_crowd(walker: Walker, r: random.Random) -> None:
    """Together they want more than there is, for long."""
    first, length, max_tokens = r.randint(0, 4), r.choice([4, 5, 11]), r.randint(6, 12)
    for at in range(first, first + r.randint(2, 4)):
        _ask(walker, STEMS[0][at : at + length], max_tokens, {"ignore_eos": True})


def continue_a_conversation(walker: Walker, r: random.Random) -> None:
    if walker.world.asked:
        asked = r.choice(list(walker.world.asked.values()))
        _ask(walker, [*asked.known, *STEMS[2][: r.randint(0, 3)]], _length(r), {})


def cancel(walker: Walker, r: random.Random) -> None:
    still_open = [i for i in walker.world.asked if walker.world.state_of(i) != "ended"]
    if still_open:
        walker.world.cancel(r.choice(still_open))


def a_prefix_comes_back(walker: Walker, r: random.Random) -> None:
    """Something was asked before, and the device has forgotten it."""
    if r.random() < 0.25:
        for _ in range(30):
            if not walker.world.step():
                break
    walker.world.cache.reset(["device"])
    continue_a_conversation(walker, r)
    plan(walker, r)
    if r.random() < 0.7:
        walker.tiers.launch("device")
    plan(walker, r)


def a_prefix_in_host_memory_waits_for_room(walker: Walker, r: random.Random) -> None:
    """Somebody runs, for long, and there is not room enough for whoever is next."""
    if r.random() < 0.5:
        for _ in range(30):
            if not walker.world.step():
                break
    walker.world.cache.reset(["device"])
    num_tokens = walker.world.cache.num_blocks * BLOCK
    _ask(walker, STEMS[2][: r.randint(1, 5)], r.randint(2, num_tokens // 2), {"ignore_eos": True})
    plan(walker, r)
    if walker.world.asked:
        known = r.choice(list(walker.world.asked.values())).known[: num_tokens - 4]
        _ask(walker, known, r.randint(1, num_tokens - len(known)), {})
    plan(walker, r)


# -------------------------------------------------------------------------------------------------- windows


def submit_several_windows(walker: Walker, r: random.Random) -> None:
    _ask(walker, r.choice(LONG)[: r.randint(10, 60)], r.choice([1, 9, 30]), r.choice(KINDS))


def a_window_comes_back(walker: Walker, r: random.Random) -> None:
    """Some of its blocks are lost, on the device or in host memory."""
    submit_several_windows(walker, r)
    for _ in range(30):
        if not walker.world.step():
            break
    pool = r.choice([walker.world.cache.pool, walker.tiers.host.pool])
    pool.evict(r.randint(1, pool.num_slots))
    continue_a_conversation(walker, r)
    turns(walker, r, flows=r.random() < 0.5)


# -------------------------------------------------------------------------------------------- deep requests


def submit_a_deep_one(walker: Walker, r: random.Random) -> None:
    """Often in whole blocks, and often one that was there before."""
    length = r.randint(20, 80)
    _ask(
        walker,
        r.choice(LONG)[: length if r.random() < 0.5 else length // BLOCK * BLOCK],
        _length(r),
        r.choice(KINDS),
    )


def a_deep_one_runs_for_long(walker: Walker, r: random.Random) -> None:
    _ask(walker, r.choice(LONG)[: r.randint(4, 40)], r.randint(20, 40), {"ignore_eos": True})
    turns(walker, r, flows=True)


def one_that_fits_goes_on_and_is_deep(walker: Walker, r: random.Random) -> None:
    """The device has more of it than a deep one may have there, and host memory perhaps less."""
    num_tokens = walker.world.budget.deep_blocks * BLOCK
    stem = r.choice(LONG)
    _ask(walker, stem[: num_tokens - r.randint(1, 6)], 1, {})
    for _ in range(r.randint(4, 20)):
        walker.world.device.lanes.lane("launch to device").step()
        plan(walker, r)
        if len(walker.world.in_flight) == walker.depth:
            walker.world.commit()
    _ask(walker, stem[: num_tokens + r.randint(1, 12)], 1, {})
    turns(walker, r)


def others_share_the_beginning_of_a_deep_one(walker: Walker, r: random.Random) -> None:
    stem = r.choice(LONG)
    for _ in range(r.randint(1, 2)):
        _ask(walker, stem[: r.randint(4, 20)], r.randint(4, 12), {"ignore_eos": True})
    _ask(walker, stem[: r.randint(20, 80)], r.choice([1, 9]), {})
    turns(walker, r, flows=True)


def a_deep_one_comes_behind_a_crowd(walker: Walker, r: random.Random) -> None:
    """It is the youngest, and the first to be pushed out."""
    submit_a_crowd(walker, r)
    a_deep_one_runs_for_long(walker, r)
    turns(walker, r, flows=True)


def what_matched_is_lost_at_the_last_moment(walker: Walker, r: random.Random) -> None:
    """A copy that others are waiting for takes its room in host memory, before the deep request that is
    next has it."""
    host, num_kept = walker.tiers.host, r.choice([0, 1, 1, 2, 4])

    def lose(prefix: Prefix, match: Match) -> None:
        host.forget(prefix.keys[num_kept : match.num_paged])

    walker.world.loses = lose
    turns(walker, r, flows=True)
    walker.world.loses = None


def steps_that_do_not_read_host_memory(walker: Walker, r: random.Random) -> None:
    for _ in range(r.randint(1, 3)):
        if len(walker.world.in_flight) == walker.depth:
            walker.world.commit()
        walker.world.plan(reads_host=False)


# ---------------------------------------------------------------------------------------------------- steps


def plan(walker: Walker, r: random.Random) -> None:
    if len(walker.world.in_flight) < walker.depth:
        walker.world.plan()


def commit(walker: Walker, r: random.Random) -> None:
    if walker.world.in_flight:
        walker.world.commit(RuntimeError("device lost") if r.random() < 0.15 else None)


def turns(walker: Walker, r: random.Random, flows: bool = False) -> None:
    for _ in range(r.randint(1, 8)):
        if flows:
            walker.world.device.lanes.run_all()
            walker.world.settle()
        plan(walker, r)
        if len(walker.world.in_flight) == walker.depth:
            walker.world.commit()


def turns_while_transfers_flow(walker: Walker, r: random.Random) -> None:
    turns(walker, r, flows=True)


# ------------------------------------------------------------------------------------------------ transfers


def transfers_go_on(walker: Walker, r: random.Random) -> None:
    dest = r.choice(["device", "host"])
    for _ in range(r.randint(0, 2)):
        walker.tiers.launch(dest)
    for _ in range(r.randint(0, 5)):
        walker.tiers.move(dest)


def transfers_end(walker: Walker, r: random.Random) -> None:
    walker.world.device.lanes.run_all()


def settle(walker: Walker, r: random.Random) -> None:
    walker.world.settle()


def the_next_copy_fails(walker: Walker, r: random.Random) -> None:
    if walker.tiers.loads.mover.flying or walker.tiers.saves.mover.flying:
        r.choice([walker.tiers.promotions, walker.tiers.promotions, walker.tiers.demotions]).fail_next = 1


def promotions_are_late(walker: Walker, r: random.Random) -> None:
    walker.tiers.make_late()


def leases_expire(walker: Walker, r: random.Random) -> None:
    walker.tiers.expire()


def loading_pays_or_does_not(walker: Walker, r: random.Random) -> None:
    walker.tiers.worth = r.random() < 0.7


def reset(walker: Walker, r: random.Random) -> None:
    walker.world.cache.reset([r.choice(["device"] * 5 + ["host"])])


# ------------------------------------------------------------------------------------ tiers behind the host


def a_prefix_comes_back_from_far_away(walker: Walker, r: random.Random) -> None:
    """Neither device nor host have it any more."""
    if r.random() < 0.5:
        for _ in range(30):
            if not walker.world.step():
                break
    walker.world.cache.reset(["device", "host"])
    continue_a_conversation(walker, r)
    for _ in range(r.randint(0, 3)):
        stores_go_on(walker, r)
    plan(walker, r)


def those_in_line_start_while_they_are_read_for(walker: Walker, r: random.Random) -> None:
    """A prefix comes back from far away and has to wait; then whoever is ahead of it goes."""
    ahead = [i for i in walker.world.asked if walker.world.state_of(i) != "ended"]
    walker.world.cache.reset(["device", "host"])
    continue_a_conversation(walker, r)
    plan(walker, r)
    for request_id in ahead:
        walker.world.cancel(request_id)
    plan(walker, r)


def stores_go_on(walker: Walker, r: random.Random) -> None:
    """One lane to a store, by a few steps."""
    lanes = [
        lane
        for lane in walker.world.device.lanes
        if lane.name.startswith(("read", "write", "ask")) and len(lane)
    ]
    if lanes:
        lane = r.choice(lanes)
        for _ in range(r.randint(1, 6)):
            lane.step()


def a_block_goes_bad(walker: Walker, r: random.Random) -> None:
    store = r.choice(list(walker.tiers.stores.values()))
    if store.blocks:
        key = r.choice(sorted(store.blocks))
        r.choice([store.lose, store.spoil, store.fails.add])(key)


def a_store_dies_or_is_full(walker: Walker, r: random.Random) -> None:
    store = r.choice(list(walker.tiers.stores.values()))
    if r.random() < 0.5:
        store.die()
    else:
        store.max_blocks = len(store.blocks)


def stores_are_well_again(walker: Walker, r: random.Random) -> None:
    walker.tiers.heal()


def host_memory_is_short(walker: Walker, r: random.Random) -> None:
    """Somebody takes all of it, for a while."""
    taken = walker.tiers.host.take_private(walker.tiers.host.pool.counts.free, "somebody")
    plan(walker, r)
    stores_go_on(walker, r)
    plan(walker, r)
    if taken is not None:
        taken.rollback()


WEIGHTS = {
    "submit": 3,
    "submit_full_blocks": 5,
    "submit_a_crowd": 2,
    "continue_a_conversation": 5,
    "cancel": 4,
    "a_prefix_comes_back": 14,
    "a_prefix_in_host_memory_waits_for_room": 6,
    "plan": 8,
    "commit": 8,
    "turns": 6,
    "turns_while_transfers_flow": 6,
    "transfers_go_on": 16,
    "transfers_end": 2,
    "settle": 6,
    "the_next_copy_fails": 8,
    "promotions_are_late": 2,
    "leases_expire": 1,
    "loading_pays_or_does_not": 1,
    "reset": 5,
}


_DEEP = {
    "submit_a_deep_one": 14,
    "a_deep_one_runs_for_long": 6,
    "others_share_the_beginning_of_a_deep_one": 8,
    "a_deep_one_comes_behind_a_crowd": 8,
    "one_that_fits_goes_on_and_is_deep": 8,
    "what_matched_is_lost_at_the_last_moment": 8,
    "steps_that_do_not_read_host_memory": 6,
    "turns_while_transfers_flow": 16,
}


COLD_WEIGHTS = {
    **WEIGHTS,
    "a_prefix_comes_back": 6,
    "a_prefix_comes_back_from_far_away": 20,
    "those_in_line_start_while_they_are_read_for": 2,
    "stores_go_on": 24,
    "a_block_goes_bad": 6,
    "a_store_dies_or_is_full": 2,
    "stores_are_well_again": 3,
    "host_memory_is_short": 2,
}


_WINDOWS = {
    "submit_several_windows": 12,
    "a_window_comes_back": 12,
    "turns_while_transfers_flow": 16,
}


def choose(
    seed: int, behind: bool = False, deep: bool = False, windowed: bool = False, stateful: bool = False
) -> tuple[Shape, list[Event]]:
    """`behind`: there are tiers behind host memory. `deep`: some requests are larger than the device.
    `windowed`: tokens see only the last ones, and requests may be longer than the device."""
    r = random.Random(seed)
    shape = Shape(
        num_slots=r.randint(4, 10),
        max_batch=r.choice([1, 2, 4, 4]),
        prefill_chunk=r.choice([1, 3, 4, 5, 8, 64]),
        overcommit=r.choice([1.0, 2.0, 4.0]),
        prefix_cache=r.random() < 0.8,
        num_host=r.choice([3, 8, 24, 24]),
        overlap_tokens=r.choice([0, 4, 1000]),
        depth=r.choice([2, 2, 3]),
    )
    if behind:
        shape = shape._replace(stores=r.choice([("ssd",), ("ssd",), ("remote",), ("ssd", "remote")]))
    weights = COLD_WEIGHTS if behind else WEIGHTS
    if deep:
        num_slots = r.randint(8, 14)
        num_resident = r.randint(8, num_slots)
        rooms = {
            "num_slots": num_slots,
            "num_resident": num_resident,
            "num_deep": r.randint(num_resident, num_slots),
        }
        shape = shape._replace(**rooms, num_host=r.choice([16, 24, 40]), prefix_cache=True)
        weights = {**weights, **_DEEP}
    if windowed:
        window, chunk = r.choice([1, 3, 4, 6, 8, 11, 16]), r.choice([1, 3, 4, 5, 8, 16])
        fewest = LastWindow(window, BLOCK).most_slots(sys.maxsize, chunk)
        shape = shape._replace(
            window=window,
            prefill_chunk=chunk,
            num_slots=fewest + r.choice([0, 0, 3, 8]),
            num_host=r.choice([8, 24, 60]),
        )
        weights = {**weights, **_WINDOWS}
    if stateful:
        shape = shape._replace(
            num_states=r.choice([1, 3, 20]), state_every=r.choice([0, 0, BLOCK, 2 * BLOCK])
        )
    events = choose_events(r, weights, r.randint(20, 80))
    shape = shape._replace(
        max_overtaken_s=r.choice([0.0, 2.0, 20.0]),
        postpones=r.random() < 0.6,
        prioritizes=r.random() < 0.3,
        token_s=r.choice([0.0, 0.001, 0.02, 0.5]),
        expects=r.choice([0, 0, 1, 1, 3]),
    )
    return shape, events


def walk(shape: Shape, events: Sequence[Event]) -> Counter[str]:
    """What the world has seen, if nothing was wrong."""
    walker = Walker(shape)
    for event in events:
        walker.do(event)
    walker.end()
    return walker.world.seen


def walk_and_shorten(
    seed: int, behind: bool = False, deep: bool = False, windowed: bool = False, stateful: bool = False
) -> Counter[str]:
    """A walk; where it fails, as few events as fail in the same way are named."""
    shape, events = choose(seed, behind, deep, windowed, stateful)
    return told_shortly(lambda some: walk(shape, some), events, f"walk {seed} through {shape}")

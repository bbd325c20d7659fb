"""Random walks through the scheduler's world with a tier behind the device: every event in any order. Owns the choice of events, and how a
walk that fails is made short.

An event is a name and a number; all that it does follows from the two and from the world it meets. So events can be left out of a walk,
and what is left means the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scheduler_device import BLOCK
from scheduler_tiers import Cold
from scheduler_world import World

STEMS = [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3], [1, 2, 3, 4, 5, 6, 1, 2, 3, 5, 5, 5, 5, 5, 5], [6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6]]
KINDS: list[dict[str, object]] = [{}, {}, {"ignore_eos": True}, {"prompt_logprobs": 0}, {"logprobs": 1}, {"stop_token_ids": (2, 3)}]
MAX_OPEN = 8
Event = tuple[str, int]


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


class Walker:
    """Does events; the method's name is the event's."""

    def __init__(self, shape: Shape) -> None:
        self.depth = shape.depth
        self.world = World(*shape[:5], cold=Cold(shape.num_host, shape.overlap_tokens))
        assert self.world.tiers is not None
        self.tiers = self.world.tiers

    def do(self, event: Event) -> None:
        name, number = event
        getattr(self, name)(random.Random(number))
        self.world.check()

    def end(self) -> None:
        """From here on nothing goes wrong: every request ends, and nothing is left."""
        self.tiers.promotions.fail_next = self.tiers.demotions.fail_next = 0
        while len(self.world.in_flight) > 1:
            self.world.commit()
        self.world.close()

    # ------------------------------------------------------------------------------------------------------------ requests

    def _submit(self, prompt: Sequence[int], max_tokens: int, kind: dict[str, object]) -> None:
        if len(self.world.scheduler._tracks) < MAX_OPEN:
            self.world.submit(prompt[: self.world.cache.num_blocks * BLOCK - max_tokens], max_tokens, **kind)

    def _max_tokens(self, r: random.Random) -> int:
        return r.choice([0, 1, 1, 2, 5, 9, 9])

    def submit(self, r: random.Random) -> None:
        self._submit(r.choice(STEMS)[: r.randint(1, 15)], self._max_tokens(r), r.choice(KINDS))

    def submit_full_blocks(self, r: random.Random) -> None:
        self._submit(r.choice(STEMS)[: r.randint(1, 3) * BLOCK], self._max_tokens(r), {})

    def submit_a_crowd(self, r: random.Random) -> None:
        """Together they want more than there is, for long."""
        first, length, max_tokens = r.randint(0, 4), r.choice([4, 5, 11]), r.randint(6, 12)
        for at in range(first, first + r.randint(2, 4)):
            self._submit(STEMS[0][at : at + length], max_tokens, {"ignore_eos": True})

    def continue_a_conversation(self, r: random.Random) -> None:
        if self.world.asked:
            asked = r.choice(list(self.world.asked.values()))
            self._submit([*asked.known, *STEMS[2][: r.randint(0, 3)]], self._max_tokens(r), {})

    def cancel(self, r: random.Random) -> None:
        still_open = [i for i in self.world.asked if self.world.state_of(i) != "ended"]
        if still_open:
            self.world.cancel(r.choice(still_open))

    def a_prefix_comes_back(self, r: random.Random) -> None:
        """Something was asked before, and the device has forgotten it."""
        if r.random() < 0.25:
            for _ in range(30):
                if not self.world.step():
                    break
        self.world.cache.reset(["device"])
        self.continue_a_conversation(r)
        self.plan(r)
        if r.random() < 0.7:
            self.tiers.launch("device")
        self.plan(r)

    # --------------------------------------------------------------------------------------------------------------- steps

    def plan(self, r: random.Random) -> None:
        if len(self.world.in_flight) < self.depth:
            self.world.plan()

    def commit(self, r: random.Random) -> None:
        if self.world.in_flight:
            self.world.commit(RuntimeError("device lost") if r.random() < 0.15 else None)

    def turns(self, r: random.Random, flows: bool = False) -> None:
        for _ in range(r.randint(1, 8)):
            if flows:
                self.world.device.lanes.run_all()
                self.world.settle()
            self.plan(r)
            if len(self.world.in_flight) == self.depth:
                self.world.commit()

    def turns_while_transfers_flow(self, r: random.Random) -> None:
        self.turns(r, flows=True)

    # ----------------------------------------------------------------------------------------------------------- transfers

    def transfers_go_on(self, r: random.Random) -> None:
        dest = r.choice(["device", "host"])
        for _ in range(r.randint(0, 2)):
            self.tiers.launch(dest)
        for _ in range(r.randint(0, 5)):
            self.tiers.move(dest)

    def transfers_end(self, r: random.Random) -> None:
        self.world.device.lanes.run_all()

    def settle(self, r: random.Random) -> None:
        self.world.settle()

    def the_next_copy_fails(self, r: random.Random) -> None:
        if self.world.cache.num_in_flight:
            r.choice([self.tiers.promotions, self.tiers.promotions, self.tiers.demotions]).fail_next = 1

    def promotions_are_late(self, r: random.Random) -> None:
        self.tiers.make_late()

    def leases_expire(self, r: random.Random) -> None:
        self.tiers.expire()

    def loading_pays_or_does_not(self, r: random.Random) -> None:
        self.tiers.worth = r.random() < 0.7

    def reset(self, r: random.Random) -> None:
        self.world.cache.reset([r.choice(["device"] * 5 + ["host"])])


WEIGHTS = {
    "submit": 3,
    "submit_full_blocks": 5,
    "submit_a_crowd": 2,
    "continue_a_conversation": 5,
    "cancel": 4,
    "a_prefix_comes_back": 14,
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


def choose(seed: int) -> tuple[Shape, list[Event]]:
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
    names = r.choices(list(WEIGHTS), list(WEIGHTS.values()), k=r.randint(20, 80))
    return shape, [(name, r.getrandbits(32)) for name in names]


def walk(shape: Shape, events: Sequence[Event]) -> Counter[str]:
    """What the world has seen, if nothing was wrong."""
    walker = Walker(shape)
    for event in events:
        walker.do(event)
    walker.end()
    return walker.world.seen


def walk_and_shorten(seed: int) -> Counter[str]:
    """A walk; where it fails, as few events as fail in the same way are named."""
    shape, events = choose(seed)
    try:
        return walk(shape, events)
    except Exception as error:
        kind = type(error)
        short = _shortened(events, lambda some: _fails(shape, some, kind))
        error.add_note(f"walk {seed} through {shape}, of which this is enough:")
        for event in short:
            error.add_note(f"    {event!r},")
        raise


def _fails(shape: Shape, events: Sequence[Event], kind: type[Exception]) -> bool:
    try:
        walk(shape, events)
    except Exception as error:
        return isinstance(error, kind)
    return False


def _shortened(events: Sequence[Event], fails: Callable[[Sequence[Event]], bool]) -> Sequence[Event]:
    """Leave out ever smaller pieces, as long as it fails without them."""
    size = len(events) // 2
    while size:
        at = 0
        while at < len(events):
            without = [*events[:at], *events[at + size :]]
            if fails(without):
                events = without
            else:
                at += size
        size //= 2
    return events

"""Walks of random events through some world, and how one that fails is made short. Owns neither the events
nor the world.

An event is a name and a number; all that it does follows from the two and from the world it meets. So events
can be left out of a walk, and what is left means the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Event = tuple[str, int]
T = TypeVar("T")


def choose_events(r: random.Random, weights: Mapping[str, int], num_events: int) -> list[Event]:
    return [
        (name, r.getrandbits(32)) for name in r.choices(list(weights), list(weights.values()), k=num_events)
    ]


def told_shortly(walk: Callable[[Sequence[Event]], T], events: Sequence[Event], what: str) -> T:
    """What `walk` returns; where it fails, as few events as fail in the same way are named in a note to the
    error."""
    try:
        return walk(events)
    except Exception as error:
        kind = type(error)
        error.add_note(f"{what}, of which this is enough:")
        for event in shortened(events, lambda some: _fails(walk, some, kind)):
            error.add_note(f"    {event!r},")
        raise


def _fails(walk: Callable[[Sequence[Event]], object], events: Sequence[Event], kind: type[Exception]) -> bool:
    try:
        walk(events)
    except Exception as error:
        return isinstance(error, kind)
    return False


def shortened(events: Sequence[Event], fails: Callable[[Sequence[Event]], bool]) -> Sequence[Event]:
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

"""Which slot holds which key. Owns both directions of that map and nothing about who uses the slots."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import NamedTuple

import numpy as np

from penstock.errors import InvariantBroken
from penstock.kv.blocks.slots import Run, as_run

_REMEMBERED = 128  # answers, at least: a plan looks at half as many waiting requests


class Found(NamedTuple):
    """An answer: the run of leading `keys` that was here when so many times something had been forgotten."""

    keys: tuple[bytes, ...]
    run: Run
    num_forgets: int


class KeyIndex:
    """Keys of sealed slots: each key in one slot, each slot with one key at most."""

    def __init__(self, num_slots: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_slots  # by slot; None: not sealed
        self.sealed = bytearray(num_slots)  # by slot; 1: it has a key
        self._slot_of: dict[bytes, int] = {}
        self._num_forgets = 0
        self._lost_at = array("q", bytes(8 * num_slots))  # by slot: the number of the forget that last took its key
        self._losses = np.frombuffer(self._lost_at, np.int64)  # the same memory
        self._found: dict[int, Found] = {}  # by the identity of the keys, which the answer keeps from being another's
        self._found_before: dict[int, Found] = {}
        self._last = Found((), [], 0)  # a crowd often comes for the same beginning

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def last(self) -> Found:
        """The newest answer about a tuple of keys."""
        return self._last

    def find(self, keys: Sequence[bytes], like: Found | None = None) -> Run:
        """Slots of the longest run of leading `keys` that are here, which nobody may change. A waiting request asks in every plan: for
        the same tuple only what was added behind the last answer is looked up, and of that only what was forgotten since is taken back.
        A key covers all before it: where two tuples have the same one in the same place, what was found up to there holds for both.
        `like`: an earlier answer, for whoever keeps his own; one that is about other keys is not taken."""
        num_forgets = self._num_forgets  # before anything is looked at: another thread may be about to change it
        known = self._found.get(id(keys)) or self._found_before.get(id(keys)) or _as_far_as(like, keys) or _as_far_as(self._last, keys)
        run: Run = []
        if known is not None:
            run = known.run if known.num_forgets == num_forgets else self._still_here(known)
        num = len(run)
        if num < len(keys) and keys[num] in self._slot_of:
            run = self._extended(run, keys[num:] if num else keys)
        if isinstance(keys, tuple):
            same = known is not None and known.run is run and known.num_forgets == num_forgets
            self._remember(known if known is not None and same and known.keys is keys else Found(keys, run, num_forgets))
        return run

    def _extended(self, run: Run, keys: Sequence[bytes]) -> Run:
        slots: list[int] = []
        with suppress(KeyError):  # the first that is not here ends it, and the list has those before
            slots.extend(map(self._slot_of.__getitem__, keys))
        if isinstance(run, np.ndarray):
            return np.concatenate((run, np.array(slots, np.intp)))
        return as_run([*run, *slots] if run else slots)

    def _still_here(self, known: Found) -> Run:
        """Its run, up to the first slot that has lost its key since."""
        run = known.run
        if isinstance(run, np.ndarray):
            lost = np.flatnonzero(self._losses[run] > known.num_forgets)
            return as_run(run[: lost[0]]) if lost.size else run
        lost_at = self._lost_at
        end = next((place for place, slot in enumerate(run) if lost_at[slot] > known.num_forgets), None)
        return run if end is None else run[:end]

    def _remember(self, found: Found) -> None:
        """In two halves, of which the older is dropped as a whole: no step of it can be spoiled by another thread."""
        if len(self._found) >= _REMEMBERED and id(found.keys) not in self._found:
            self._found, self._found_before = {}, self._found
        self._found[id(found.keys)] = self._last = found

    def find_each(self, keys: Sequence[bytes]) -> list[int]:
        """The slot of each key; -1 where it is not here."""
        return list(map(self._slot_of.get, keys, repeat(-1)))

    def are_sealed(self, slots: Run) -> bool:
        """Whether all of them are."""
        if isinstance(slots, np.ndarray):
            return bool(np.frombuffer(self.sealed, bool)[slots].all())
        return all(map(self.sealed.__getitem__, slots))

    def add(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Give each slot its key unless the key lives elsewhere: first writer wins. Returns the slots that got theirs."""
        if any(map(self.key_of.__getitem__, slots)):
            raise InvariantBroken(f"slot {next(slot for slot in slots if self.key_of[slot])} is sealed already")
        homes = list(map(self._slot_of.setdefault, keys, slots))
        taken, given = list(slots), keys
        if homes != taken:
            places = [place for place, slot in enumerate(slots) if homes[place] == slot]
            taken, given = [slots[place] for place in places], [keys[place] for place in places]
        key_of = self.key_of
        for slot, key in zip(taken, given, strict=True):
            key_of[slot] = key
        self._mark(as_run(taken), 1)
        return taken

    def forget(self, slots: Sequence[int]) -> list[bytes]:
        """The keys of `slots` are no longer here; returns them."""
        keys = []
        for slot in slots:
            key = self.key_of[slot]
            if key is None:
                raise InvariantBroken(f"slot {slot} has no key to forget")
            del self._slot_of[key]
            self.key_of[slot] = None
            keys.append(key)
        run = as_run(slots)
        self._mark(run, 0)
        if isinstance(run, np.ndarray):
            self._losses[run] = self._num_forgets + 1
        else:
            for slot in run:
                self._lost_at[slot] = self._num_forgets + 1
        self._num_forgets += 1  # behind the change: who looks meanwhile, from another thread, has seen a state that is over
        return keys

    def _mark(self, slots: Run, sealed: int) -> None:
        if isinstance(slots, np.ndarray):
            np.frombuffer(self.sealed, np.uint8)[slots] = sealed
        else:
            for slot in slots:
                self.sealed[slot] = sealed

    def check(self) -> None:
        """Raise unless both directions agree."""
        backwards = [(key, slot) for slot, key in enumerate(self.key_of) if key is not None]
        if len(backwards) != len(self._slot_of) or dict(backwards) != self._slot_of:
            raise InvariantBroken(f"{len(backwards)} slots have a key and {len(self._slot_of)} keys have a slot, and they disagree")
        if [slot for _, slot in backwards] != [slot for slot, sealed in enumerate(self.sealed) if sealed]:
            raise InvariantBroken(f"{len(backwards)} slots have a key, and they are not the {sum(self.sealed)} that are said to be sealed")


def _as_far_as(found: Found | None, keys: Sequence[bytes]) -> Found | None:
    """`found` where `keys` begin with all of it: whoever hands in an answer of his own may have got another's by mistake."""
    if found is None or not isinstance(keys, tuple):
        return None
    num = len(found.run)
    return found if 0 < num <= len(keys) and keys[num - 1] == found.keys[num - 1] else None
